"""Is the staging budget a hard limit? Resident memory of a worker while it moves many times its budget.

    python -m pykvcache_bench.staging --model DIR --directory POOL_PARENT [--staging 17MiB] [--prompts 24]

Two vLLMs, each in a process of its own with scheduler and worker in it, get the same prompts twice: one without the
connector, one with an empty pool and a small staging budget. The first pass stores every block, the second loads it
again, because vLLM's own prefix caching is off. Meanwhile a thread asks the kernel how much of the staging mapping, and
of the whole process, is resident.

Budget: the option `staging`. Mapped: what the slots take of it. Resident: the most pages of the mapping that the kernel
ever held, the rest of the last huge page included. The process's growth is what the connector costs in all: staging,
threads, rings, index, code.
"""

import argparse
import ctypes
import json
import mmap
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pykvcache_contract.transfer_config import transfer_config
from pykvcache_contract.units import HUGE_PAGE_SIZE_BYTES, format_size, parse_size, round_up
from pykvcache_storage.memory import StagingMemory

SAMPLE_SECONDS = 0.02
SETTLE_SECONDS = 1.0
"""After each pass: stores of the last blocks end."""


def main() -> int:
    """Run both vLLMs, report, and return 1 if the budget was exceeded."""
    options = _parser().parse_args()
    if options.step:
        print("RESULT " + json.dumps(serve(json.loads(options.step))))
        return 0
    with tempfile.TemporaryDirectory(prefix="staging-", dir=options.directory) as pool:
        plain = run(options, None)
        cached = run(options, pool)
    return report(plain, cached, budget=parse_size(options.staging))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pykvcache_bench.staging",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="directory of the model; `python -m pykvcache_cli.tiny_model DIR` makes one")
    parser.add_argument("--directory", help="where to make the pool, on a disk")
    parser.add_argument(
        "--staging",
        default="17MiB",
        help="the budget; no multiple of 2 MiB, or rounding up to huge pages stays unseen (default: 17MiB)",
    )
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--block-size", type=int, default=32, help="vLLM's, in tokens; on the CPU a multiple of 32")
    parser.add_argument("--offload-block", type=int, default=256, help="ours, in tokens")
    parser.add_argument("--kv-cache-bytes", type=int, default=64 << 20)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    return parser


def run(options: argparse.Namespace, pool: str | None) -> dict[str, Any]:
    """Return what one vLLM in a process of its own measured.

    Raises:
        RuntimeError: it failed; the message holds the end of its log.
    """
    process = subprocess.run(
        [sys.executable, "-m", "pykvcache_bench.staging", "--step", json.dumps(vars(options) | {"pool": pool})],
        env={**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(f"vLLM ended with {process.returncode}\n{process.stdout[-6000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def report(plain: dict[str, Any], cached: dict[str, Any], *, budget: int) -> int:
    """Print one line about the mapping and one about the process."""
    resident, moved = cached["staging_resident_max"], cached["stored"] + cached["loaded"]
    verdict = "ok" if 0 < resident <= budget else "MISSED"
    print(
        f"staging: budget {format_size(budget)}, mapped {format_size(cached['staging_mapped'])}, resident at most "
        f"{format_size(resident)}, resident ÷ budget {resident / budget:.3f}, goal ≤ 1 {verdict}; "
        f"stored {format_size(cached['stored'])}, loaded {format_size(cached['loaded'])}: {moved / budget:.0f} × budget"
    )
    extra = cached["process_resident_max"] - plain["process_resident_max"]
    print(
        f"process: resident at most {format_size(plain['process_resident_max'])} without the connector, "
        f"{format_size(cached['process_resident_max'])} with it: {extra / 2**20:+.1f} MiB, "
        f"{(extra - budget) / 2**20:+.1f} MiB beside the budget; "
        f"growth from the first pass to the second {cached['growth'] / 2**20:+.1f} MiB "
        f"(without {plain['growth'] / 2**20:+.1f})"
    )
    return int(verdict != "ok")


# ---- in the child process ----


class Sampler:
    """Watches resident memory on a thread of its own, between `start` and `stop`."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self.staging_max = 0
        self.process_max = 0
        self._ranges = ranges
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Take one last sample and end."""
        self._stopped.set()
        self._thread.join()
        self._sample()

    def _main(self) -> None:
        while not self._stopped.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> None:
        self.process_max = max(self.process_max, process_resident())
        self.staging_max = max(self.staging_max, sum(resident_in(start, end) for start, end in self._ranges))


def process_resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def resident_in(start: int, end: int) -> int:
    """Return the resident bytes of a page-aligned range of this process's addresses."""
    pages = (end - start) // mmap.PAGESIZE
    state = (ctypes.c_ubyte * pages)()
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), state):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(byte & 1 for byte in state) * mmap.PAGESIZE


def record_memories() -> list[StagingMemory]:
    """Return a list to which all staging memory of this process will be added; vLLM hides objects from `gc`."""
    memories: list[StagingMemory] = []
    make = StagingMemory.__init__

    def make_and_record(memory: StagingMemory, **arguments: int) -> None:
        make(memory, **arguments)
        memories.append(memory)

    setattr(StagingMemory, "__init__", make_and_record)  # noqa: B010 - mypy refuses the plain assignment
    return memories


def bounds(memory: StagingMemory) -> tuple[int, int]:
    """Return first and last address, the rest of the last huge page included."""
    return memory.address, memory.address + round_up(memory.size_bytes, HUGE_PAGE_SIZE_BYTES)


def serve(options: dict[str, Any]) -> dict[str, Any]:
    """Send all prompts twice and return the most memory that was resident."""
    from vllm import LLM, SamplingParams

    memories = record_memories()
    llm = LLM(**_engine_arguments(options))
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], sampling, use_tqdm=False)
    rng = random.Random(2)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, 500) for _ in range(options["tokens"])]}
        for _ in range(options["prompts"])
    ]
    sampler = Sampler([bounds(memory) for memory in memories])
    sampler.start()
    peaks = []
    for _ in range(2):
        llm.generate(prompts, sampling, use_tqdm=False)
        time.sleep(SETTLE_SECONDS)
        llm.generate([{"prompt_token_ids": [3, 4, 5]}], sampling, use_tqdm=False)
        peaks.append(sampler.process_max)
    sampler.stop()
    moved = {name: _counter(llm, f"vllm:pykvcache_{name}_bytes") for name in ("store", "load")}
    return {
        "staging_mapped": sum(memory.size_bytes for memory in memories),
        "staging_resident_max": sampler.staging_max,
        "process_resident_max": sampler.process_max,
        "growth": peaks[1] - peaks[0],
        "stored": moved["store"],
        "loaded": moved["load"],
    }


def _counter(llm: Any, name: str) -> int:
    """Return the sum over all labels of one of vLLM's counters."""
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name.removesuffix("_total") == name)


def _engine_arguments(options: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": options["model"],
        "block_size": options["block_size"],
        "kv_cache_memory_bytes": options["kv_cache_bytes"],
        "max_model_len": options["tokens"] + 64,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    if options["pool"]:
        arguments["kv_transfer_config"] = transfer_config(
            {
                "pool": options["pool"],
                "staging": options["staging"],
                "block_size": options["offload_block"],
            }
        )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
