"""Does a restarted vLLM find its KV blocks, are its answers the same, and how fast does it load?

    python -m pykvcache_bench.restart --model DIR --directory POOL_PARENT [--dtype float16] …

Every step is a vLLM of its own in a new process: without the connector (once computing everything, once with every
prefix from GPU memory), with an empty pool (once with all prompts at once, once one by one into a second pool, whose
blocks must then hold the same bytes where kernels are batch-invariant), restarted with prefix caching off and on, and
restarted after one block was damaged behind its intact header. On a GPU set VLLM_BATCH_INVARIANT=1: without it greedy
answers change with the batch, connector or not. An answer is right if a run without the connector gives it: computed,
or continued from a prefix in GPU memory, which is what a load continues from. Use one size for --block-size and
--offload-block, so that both continue from the same token.
Exits with 1 if an answer is not right, nothing was loaded, or the damage went unnoticed.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from pykvcache_contract.header import HEADER_SIZE_BYTES, decode_header
from pykvcache_contract.transfer_config import transfer_config

COUNTERS = (
    "hit_tokens_total",
    "load_bytes_total",
    "load_active_seconds_total",
    "load_failures_total",
    "store_bytes_total",
    "store_active_seconds_total",
    "store_failures_total",
    "quarantined_blocks_total",
)
BLOCKS = "*/r*/*/*/*.kvb"
SETTLE_SECONDS = 2.0
"""After the last answer: stores end and the last counts are on their way."""


def main() -> int:
    """Run all steps, print a line for each, and return the exit status."""
    options = _parser().parse_args()
    if options.step:
        print("RESULT " + json.dumps(asyncio.run(_serve(json.loads(options.step)))))
        return 0
    pool, second = (_empty_directory(Path(options.directory, name)) for name in ("restart-pool", "restart-second"))
    runs = _Runs(options)
    plain = runs.run("without the connector")
    control = runs.run("without it, prefixes on the GPU", prefix_caching=True, rounds=2)
    cold = runs.run("empty pool", pool)
    runs.run("empty pool, one prompt at a time", second, one_by_one=True)
    differing, common = _differing_blocks(pool, second)
    warm = [
        runs.run("restarted, prefix caching off", pool),
        runs.run("restarted, prefix caching on", pool, prefix_caching=True),
    ]
    _damage_one_block(pool)
    damaged = runs.run("restarted, one block damaged", pool)
    wrong = [_wrong(run, plain, control) for run in (cold, *warm, damaged)]
    loaded = all(run["hit_tokens_total"] > 0 for run in warm)
    noticed = damaged["quarantined_blocks_total"] == 1 and damaged["load_failures_total"] >= 1
    print(f"blocks that hold other bytes when stored one prompt at a time: {differing} of {common}")
    print(f"answers that continue differently from a prefix on the GPU: {_wrong(control, plain)} of {options.prompts}")
    print(f"wrong answers: {sum(wrong)}; loaded: {loaded}; damage noticed: {noticed}")
    return 0 if not any(wrong) and loaded and noticed else 1


def _empty_directory(path: Path) -> Path:
    subprocess.run(["rm", "-rf", str(path)], check=True)
    path.mkdir(parents=True)
    return path


def _differing_blocks(one: Path, other: Path) -> tuple[int, int]:
    """Return how many blocks of two pools have unequal payloads, by their checksums, and how many both have."""
    sums = [{path.relative_to(pool): _payload_checksum(path) for path in pool.glob(BLOCKS)} for pool in (one, other)]
    common = sums[0].keys() & sums[1].keys()
    return sum(sums[0][name] != sums[1][name] for name in common), len(common)


def _payload_checksum(path: Path) -> int:
    with open(path, "rb") as file:
        return decode_header(file.read(HEADER_SIZE_BYTES)).checksum


def _wrong(run: dict[str, Any], *right: dict[str, Any]) -> int:
    """Return how many of a run's answers none of the right runs gave."""
    return sum(all(tokens != other["tokens"][number] for other in right) for number, tokens in enumerate(run["tokens"]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of the model")
    parser.add_argument("--directory", help="parent of the pool; on tmpfs the disk is not measured")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights, for speed only")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs=2, default=[257, 3000], metavar=("MIN", "MAX"))
    parser.add_argument("--vocabulary", type=int, default=500)
    parser.add_argument("--block-size", type=int, default=16, help="vLLM's, in tokens")
    parser.add_argument("--offload-block", type=int, default=64, help="ours, in tokens")
    parser.add_argument("--staging", default="256MiB")
    parser.add_argument("--capacity", default="64GiB")
    parser.add_argument("--kv-cache-bytes", type=int, default=256 << 20)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the connector")
    parser.add_argument("--output", help="file for all results as JSON lines")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    return parser


class _Runs:
    """Starts a vLLM per step, in a process of its own."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def run(
        self,
        title: str,
        pool: Path | None = None,
        *,
        prefix_caching: bool = False,
        rounds: int = 1,
        one_by_one: bool = False,
    ) -> dict[str, Any]:
        options = vars(self._options) | {
            "pool": str(pool) if pool else None,
            "prefix_caching": prefix_caching,
            "rounds": rounds,
            "one_by_one": one_by_one,
        }
        started = time.monotonic()
        process = subprocess.run(
            [sys.executable, "-m", "pykvcache_bench.restart", "--step", json.dumps(options)],
            env={**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            sys.exit(f"{title}: vLLM ended with {process.returncode}\n{process.stdout[-6000:]}")
        result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
        self._report(title, result, time.monotonic() - started, process.stdout)
        return result

    def _report(self, title: str, result: dict[str, Any], seconds: float, log: str) -> None:
        speed = result["load_bytes_total"] / 1e9 / max(result["load_active_seconds_total"], 1e-9)
        stored = result["store_bytes_total"] / 1e9 / max(result["store_active_seconds_total"], 1e-9)
        print(
            f"{title:32} wall {result['wall_seconds']:7.3f} s  first token {result['ttft_seconds'][0]:.3f} s  "
            f"hit {result['hit_tokens_total']:.0f} of {sum(result['prompt_tokens'])} tokens  "
            f"loaded {result['load_bytes_total'] / 1e6:.0f} MB at {speed:.2f} GB/s  "
            f"stored {result['store_bytes_total'] / 1e6:.0f} MB at {stored:.2f} GB/s  "
            f"failures {result['load_failures_total']:.0f}+{result['store_failures_total']:.0f}  ({seconds:.0f} s)",
            flush=True,
        )
        if self._options.output:
            with open(self._options.output, "a") as file:
                file.write(json.dumps({"title": title, **result, "log": log[-4000:]}) + "\n")


def _damage_one_block(pool: Path) -> None:
    """Flip one bit in the middle of a payload; the header stays intact."""
    path = min(pool.glob(BLOCKS))
    with open(path, "r+b") as file:
        offset = HEADER_SIZE_BYTES + (path.stat().st_size - HEADER_SIZE_BYTES) // 3
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


async def _serve(options: dict[str, Any]) -> dict[str, Any]:
    """Run one engine and send all prompts at once."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**_engine_arguments(options)))
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    try:
        await _complete(engine, "warm-up", [1, 2, 3], sampling)
        prompts = _prompts(options)
        for number in range(options["rounds"]):
            started = time.perf_counter()
            requests = [
                _complete(engine, f"request-{number}-{n}", prompt, sampling) for n, prompt in enumerate(prompts)
            ]
            if options["one_by_one"]:
                answers = [await request for request in requests]
            else:
                answers = list(await asyncio.gather(*requests))
            wall = time.perf_counter() - started
        await asyncio.sleep(SETTLE_SECONDS)
        # Counts travel with steps: one more request brings the rest.
        await _complete(engine, "flush", [1, 2, 3], sampling)
        counts = _counts()
    finally:
        engine.shutdown()
    return {
        "tokens": [tokens for tokens, _ in answers],
        "ttft_seconds": [ttft for _, ttft in answers],
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "wall_seconds": wall,
        **counts,
    }


def _engine_arguments(options: dict[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": options["model"],
        "dtype": options["dtype"],
        "load_format": options["load_format"],
        "block_size": options["block_size"],
        "kv_cache_memory_bytes": options["kv_cache_bytes"],
        "max_model_len": max(4096, options["tokens"][1] + 64),
        "enable_prefix_caching": options["prefix_caching"],
        "enforce_eager": options["eager"],
        "tensor_parallel_size": options["tensor_parallel"],
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    if options["pool"]:
        arguments["kv_transfer_config"] = transfer_config(
            {
                "pool": options["pool"],
                "staging": options["staging"],
                "capacity": options["capacity"],
                "block_size": options["offload_block"],
                **dict(option.split("=", 1) for option in options["option"]),
            }
        )
    return arguments


def _prompts(options: dict[str, Any]) -> list[list[int]]:
    """Return random prompts of evenly spread lengths; neighbours share a prefix of half the shorter one's length."""
    rng = random.Random(7)
    low, high = options["tokens"]
    count = options["prompts"]
    lengths = [low + (high - low) * n // max(1, count - 1) for n in range(count)] if count > 1 else [high]
    shared = [rng.randrange(3, options["vocabulary"]) for _ in range(high)]
    return [
        shared[: length // 2] + [rng.randrange(3, options["vocabulary"]) for _ in range(length - length // 2)]
        for length in lengths
    ]


async def _complete(engine: Any, name: str, prompt: list[int], sampling: Any) -> tuple[list[int], float]:
    started, ttft, tokens = time.perf_counter(), 0.0, []
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
        ttft = ttft or time.perf_counter() - started
        tokens = list(output.outputs[0].token_ids)
    return tokens, ttft


def _counts() -> dict[str, float]:
    """Return the connector's counters of this process, summed over labels; 0 without the connector."""
    from prometheus_client import REGISTRY

    sums = dict.fromkeys(COUNTERS, 0.0)
    for family in REGISTRY.collect():
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:pykvcache_")
            if name in sums and name != sample.name:
                sums[name] += sample.value
    return sums


if __name__ == "__main__":
    sys.exit(main())
