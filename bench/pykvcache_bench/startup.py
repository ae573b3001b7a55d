"""Does a pool with a million blocks delay vLLM's start or its first requests?

    python -m pykvcache_bench.startup --model DIR --directory POOL_PARENT [--files 1000000] [--rounds 6]

Fills a pool with files of the names and sizes that this vLLM would give its blocks, and without content; then starts
vLLM again and again in this process, in turn with the full pool, with an empty one, and without the connector. Each
start sends new prompts, one after the other: the first measures what a user sees after a restart, the others, after
`--pause` seconds, when the pool is being counted in the background, what the counting costs. Before each start the last
count is made two hours old, so that every start counts the pool anew; younger than an hour it would be trusted.

Scheduler, worker and counting share one process and its interpreter, which is the least favourable case. Needs 4 KiB of
disk and two inodes a file; making a million files takes minutes. All are removed.
"""

import argparse
import gc
import itertools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pykvcache_bench.files import make_blocks
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.transfer_config import transfer_config
from pykvcache_storage.usage import Usage, UsageLedger

WAIT_SECONDS_MAX = 600.0
COUNT_AGE_SECONDS = 7200.0
GOAL = 1.05
"""First token with a full pool ÷ with an empty one: no more than noise."""


def main() -> int:
    """Fill, measure, report, and remove all files."""
    options = _parser().parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # One unpinned computing thread: threads that wait for each other on a busy machine differ by more than we measure.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    directory = tempfile.mkdtemp(prefix="startup-", dir=options.directory)
    pools = {name: os.path.join(directory, name) for name in ("full", "empty")}
    try:
        for pool in pools.values():
            os.mkdir(pool)
        fill(pools["full"], options)
        return report(measure(pools, options))
    finally:
        print("removing the files", flush=True)
        shutil.rmtree(directory, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pykvcache_bench.startup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="directory of the model; `python -m pykvcache_cli.tiny_model DIR` makes one")
    parser.add_argument("--directory", help="where to make the pools, on the disk to measure")
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=6, help="starts of each kind (default: 6)")
    parser.add_argument("--requests", type=int, default=20, help="after each start, one after the other")
    parser.add_argument("--pause", type=float, default=12.0, help="seconds from the first request to the others")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt")
    parser.add_argument(
        "--wait", action="store_true", help="at the end, wait for the count: minutes, as it goes slowly"
    )
    parser.add_argument("--block-size", type=int, default=32, help="vLLM's, in tokens; on the CPU a multiple of 32")
    parser.add_argument("--offload-block", type=int, default=256, help="ours, in tokens")
    parser.add_argument("--kv-cache-bytes", type=int, default=256 << 20)
    return parser


# ---- the measurement ----


def measure(pools: dict[str, str], options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Return the results of all starts by kind; kinds take turns, because the machine's speed drifts."""
    results: dict[str, list[dict[str, Any]]] = {"full": [], "empty": [], "none": []}
    # Every order: a start is slower after one of another kind, and rotation would give each the same predecessor.
    orders = itertools.cycle(itertools.permutations(results))
    for number, order in zip(range(options.rounds), orders, strict=False):
        for kind in order:
            pool = pools.get(kind)
            if pool:
                age_count(pool)
            result = start_vllm(options, pool, seed=number, waits=options.wait and number == options.rounds - 1)
            results[kind].append(result)
            print(
                f"round {number + 1} {kind:5}: started in {result['start_seconds']:.1f} s, first token after "
                f"{result['ttft_seconds'][0]:.3f} s, then {statistics.median(result['ttft_seconds'][1:]):.3f} s",
                flush=True,
            )
    return results


def start_vllm(options: argparse.Namespace, pool: str | None, *, seed: int, waits: bool) -> dict[str, Any]:
    """Start vLLM, send the prompts, wait until the pool is counted if so told, and end it."""
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(**_engine_arguments(options, pool))
    ready = time.perf_counter()
    rng = random.Random(seed)
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    seconds = []
    for number in range(options.requests):
        if number == 1:
            time.sleep(options.pause)
        prompt = [rng.randrange(3, 500) for _ in range(options.tokens)]
        begun = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
    answered = time.perf_counter()
    counted = _wait_until_counted(pool) - ready if pool and waits else None
    _end(llm)
    return {
        "start_seconds": ready - started,
        "ttft_seconds": seconds,
        "answered_seconds": answered - ready,
        "counted_seconds": counted,
    }


def _end(llm: Any) -> None:
    """Shut vLLM down so that another can start in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def _wait_until_counted(pool: str) -> float:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    ledger = UsageLedger(pool)
    while is_old(ledger.usage()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return time.perf_counter()


def age_count(pool: str) -> None:
    """Make the pool's last count so old that the next start counts again; stores go on meanwhile, as in real life."""
    UsageLedger(pool, clock=lambda: time.time() - COUNT_AGE_SECONDS).recount(lambda: 0)


def is_old(usage: Usage | None) -> bool:
    """Return whether the pool has not been counted lately."""
    return usage is None or time.time() - usage.recount_seconds > COUNT_AGE_SECONDS / 2


def _engine_arguments(options: argparse.Namespace, pool: str | None) -> dict[str, Any]:
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    arguments: dict[str, Any] = {
        "model": options.model,
        "block_size": options.block_size,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "max_model_len": options.tokens + 64,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": UniProcExecutor,
    }
    if pool:
        arguments["kv_transfer_config"] = transfer_config(
            {
                "pool": pool,
                "staging": "64MiB",
                "capacity": 1 << 60,  # a million files without content look like terabytes
                "block_size": options.offload_block,
            }
        )
    return arguments


def report(results: dict[str, list[dict[str, Any]]]) -> int:
    """Print medians and medians of the rounds' ratios; return 1 if the first token came later than the goal."""
    first = {kind: [run["ttft_seconds"][0] for run in runs] for kind, runs in results.items()}
    later = {kind: [statistics.median(run["ttft_seconds"][1:]) for run in runs] for kind, runs in results.items()}
    start = {kind: [run["start_seconds"] for run in runs] for kind, runs in results.items()}
    for title, values in (("engine start", start), ("first token", first), ("later first tokens", later)):
        medians = ", ".join(f"{kind} {statistics.median(seconds):.3f} s" for kind, seconds in values.items())
        print(f"{title:18}: {medians}; full ÷ empty {_ratio(values):.3f}")
    counted = results["full"][-1]["counted_seconds"]
    answered = statistics.median(run["answered_seconds"] for run in results["full"])
    verdict = "ok" if _ratio(first) <= GOAL else "MISSED"
    print(f"all requests answered {answered:.1f} s after the start")
    if counted is not None:
        print(f"the full pool counted after {counted:.1f} s")
    print(f"first token, full ÷ empty: {_ratio(first):.3f}, goal {GOAL} {verdict}")
    return int(verdict != "ok")


def _ratio(values: dict[str, list[float]]) -> float:
    return statistics.median(full / empty for full, empty in zip(values["full"], values["empty"], strict=True))


# ---- the full pool ----


def fill(pool: str, options: argparse.Namespace) -> None:
    """Make the files of a pool, in the folder that vLLM itself makes."""
    start_vllm(options, pool, seed=-1, waits=True)  # also warms this process up: imports and kernels
    found = list(Path(pool).glob("*/r0/*/*/*.kvb"))
    if not found:
        raise RuntimeError("vLLM stored no block: a prompt must hold at least one offloaded block")
    size, fingerprint = found[0].stat().st_size, Fingerprint(found[0].parts[-5])
    seconds = make_blocks(pool, fingerprint, options.files - len(found), size_bytes=size)
    print(f"{options.files} files of {size} bytes made in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
