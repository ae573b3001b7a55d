"""What a lookup costs vLLM's scheduler, and what the index weighs.

    python -m pykvcache_bench.lookup --model DIR --directory POOL_PARENT [--ranks 2] [--drop-caches]

One vLLM in this process, on the CPU or a GPU, gets a prompt of `--blocks` offloaded blocks (320 of 256 tokens: 80 000
tokens) again and again: while no file of its blocks exists (absent), when all exist and vLLM does not know it (cold),
and when it knows (warm). The files are made with the right names and sizes and without content; no block is loaded and
no prompt computed, because the measurement holds each request back and then aborts it.

Ours: the time of the scheduler's thread that our code takes for the request, from its arrival to the answer: keys,
question, every answer per block. With vLLM's: the same including vLLM's own bookkeeping below the connector, measured
in rounds of their own because telling the two apart costs time. Answer: from the arrival until it is known how much to
load. An idle vLLM asks again every millisecond; a busy one after its running step, here after `--step-ms`.

Index: bytes and time per key of the scheduler's index of known blocks; `--index-only` measures nothing else.
`--drop-caches` makes the kernel forget names and inodes before each cold lookup; it needs root and slows all of the
machine for a moment.
"""

import argparse
import contextlib
import functools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pykvcache_connector.scheduler.index import Index
from pykvcache_contract.keys import BlockKey, Fingerprint
from pykvcache_contract.paths import block_path
from pykvcache_contract.transfer_config import transfer_config

SCHEDULER_GOAL_MS = 1.0
KEY_LENGTH = 36
"""A SHA-256 and four bytes of group."""
WAIT_SECONDS_MAX = 60.0
IDLE_STEP_SECONDS = 0.001
"""What vLLM's server sleeps after a step that had nothing to compute (run_busy_loop); the offline engine does not."""
STATES = ("absent", "cold", "warm")
ASK = "get_num_new_matched_tokens"
METHODS = ("on_new_request", ASK, "lookup")
"""What vLLM calls of the connector, the connector of vLLM's part, and that part of our manager."""


@dataclass(slots=True)
class Sample:
    """One request from its arrival to its answer, in seconds.

    Args:
        ours: time inside our code; 0 where it was not told from vLLM's.
        total: time inside the connector, vLLM's part below it included.
    """

    arrival: float = 0.0
    ours: float = 0.0
    total: float = 0.0
    answered: float = 0.0
    asked: int = 0
    matched_tokens: int | None = None
    block_hashes: list[bytes] = field(default_factory=list)


class Meter:
    """Tells our time from vLLM's, where each calls the other on one thread."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_ours = False
        self._since = 0.0

    def timed(self, method: Callable[..., Any], *, is_ours: bool) -> Callable[..., Any]:
        """Return the method with its time counted, if it is ours, until it calls another timed method."""

        def call(*arguments: Any, **named: Any) -> Any:
            before = self._switch(is_ours)
            try:
                return method(*arguments, **named)
            finally:
                self._switch(before)

        return call

    def _switch(self, is_ours: bool) -> bool:
        now = time.perf_counter()
        if self._is_ours:
            self.seconds += now - self._since
        before, self._is_ours, self._since = self._is_ours, is_ours, now
        return before


class Probe:
    """Stands between vLLM's scheduler and the connector, takes times, and never lets a request start.

    Args:
        connector: vLLM's, in this process.
    """

    def __init__(self, connector: Any) -> None:
        self.sample = Sample()
        self._connector = connector
        self._meter: Meter | None = None

    @contextlib.contextmanager
    def measuring(self, *, is_split: bool) -> Iterator[None]:
        """Replace the connector's methods meanwhile; with `is_split` tell ours from vLLM's, which slows both."""
        scheduler, manager = self._connector.connector_scheduler, self._connector.connector_scheduler.manager
        self._meter = Meter() if is_split else None
        with contextlib.ExitStack() as stack:
            if self._meter is not None:
                for target, is_ours in ((self._connector, True), (scheduler, False), (manager, True)):
                    for name in METHODS:
                        if hasattr(target, name):
                            method = self._meter.timed(getattr(target, name), is_ours=is_ours)
                            stack.enter_context(replaced(target, name, method))
            for name, method in (("on_new_request", self._on_new_request), (ASK, self._get_num_new_matched_tokens)):
                inner = getattr(self._connector, name)
                stack.enter_context(replaced(self._connector, name, functools.partial(method, inner)))
            yield

    def _on_new_request(self, inner: Callable[..., None], request: Any) -> None:
        self.sample = Sample(arrival=time.perf_counter(), block_hashes=list(request.block_hashes))
        self._take_time(inner, request)

    def _get_num_new_matched_tokens(self, inner: Callable[..., Any], *arguments: Any) -> tuple[int | None, bool]:
        sample = self.sample
        if sample.matched_tokens is None:
            sample.matched_tokens, _ = self._take_time(inner, *arguments)
            sample.answered = time.perf_counter() - sample.arrival
            sample.asked += 1
        return None, False

    def _take_time(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        self.sample.total += time.perf_counter() - started
        self.sample.ours = self._meter.seconds if self._meter else 0.0
        return result


@contextlib.contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an object meanwhile."""
    own = vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(target, name)
        else:
            setattr(target, name, own)


class Engine:
    """A vLLM in this process, with a pool of its own that ends with it."""

    def __init__(self, options: argparse.Namespace, pool: str) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
        os.environ |= {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if options.ranks == 2:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        from vllm import LLM, SamplingParams

        self._sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        self._llm = LLM(**_engine_arguments(options, pool))
        self._engine = self._llm.llm_engine
        self.probe = Probe(self._engine.engine_core.engine_core.scheduler.connector)
        self._count = 0

    def compute(self, prompt: list[int]) -> None:
        """Answer a prompt as usual."""
        self._llm.generate([{"prompt_token_ids": prompt}], self._sampling, use_tqdm=False)

    def look_up(self, prompt: list[int], *, delay_seconds: float, is_split: bool) -> Sample:
        """Return what it took to learn which of the prompt's blocks exist; vLLM asks for the first time after a delay.

        Raises:
            TimeoutError: no answer came.
        """
        self._count += 1
        name, deadline = f"request-{self._count}", time.monotonic() + WAIT_SECONDS_MAX
        with self.probe.measuring(is_split=is_split):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, self._sampling)
            time.sleep(delay_seconds)
            while self.probe.sample.matched_tokens is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{name} got no answer in {WAIT_SECONDS_MAX} s")
                self._engine.step()
                time.sleep(IDLE_STEP_SECONDS)
            self._engine.abort_request([name])
            self._engine.step()
        return self.probe.sample

    def shutdown(self) -> None:
        """End the engine."""
        self._engine.engine_core.shutdown()


def _engine_arguments(options: argparse.Namespace, pool: str) -> dict[str, Any]:
    tokens = options.blocks * options.offload_block
    extra = {"pool": pool, "staging": options.staging, "block_size": options.offload_block}
    extra |= {"lookup_timeout_seconds": WAIT_SECONDS_MAX}
    return {
        "model": options.model,
        "block_size": options.block_size,
        "max_model_len": tokens + 2 * options.offload_block,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": options.ranks,
        "kv_transfer_config": transfer_config(extra),
    }


def main() -> int:
    """Measure, print a line for each state, and return 1 if a goal was missed."""
    options = _parser().parse_args()
    measure_index(options.keys)
    if options.index_only:
        return 0
    pool = tempfile.mkdtemp(prefix="lookup-", dir=options.directory)
    engine = Engine(options, pool)
    try:
        samples = measure_lookups(engine, options, pool)
    finally:
        engine.shutdown()
        shutil.rmtree(pool, ignore_errors=True)
    return report(samples, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pykvcache_bench.lookup",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="directory of the model; `python -m pykvcache_cli.tiny_model DIR` makes one")
    parser.add_argument("--directory", help="where to make the pool, on the disk to measure")
    parser.add_argument("--blocks", type=int, default=320, help="of the prompt (default: 320)")
    parser.add_argument("--offload-block", type=int, default=256, help="tokens of one (default: 256)")
    parser.add_argument("--block-size", type=int, default=32, help="vLLM's, in tokens; on the CPU a multiple of 32")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel workers (default: 1)")
    parser.add_argument("--rounds", type=int, default=10, help="of each kind (default: 10)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the busy vLLM")
    parser.add_argument("--staging", default="64MiB")
    parser.add_argument("--kv-cache-bytes", type=int, default=384 << 20, help="room for one prompt at least")
    parser.add_argument("--drop-caches", action="store_true", help="before each cold lookup; needs root")
    parser.add_argument("--keys", type=int, default=1_000_000, help="in the index")
    parser.add_argument("--index-only", action="store_true")
    return parser


def measure_lookups(engine: Engine, options: argparse.Namespace, pool: str) -> dict[tuple[str, str], list[Sample]]:
    """Return the samples of every state, for an idle and a busy vLLM; every other round is split."""
    rng = random.Random(11)
    folder, sizes = learn_files(engine, options, pool)
    samples: dict[tuple[str, str], list[Sample]] = {}
    for number in range(2 * options.rounds):
        for load, delay in (("idle", 0.0), ("busy", options.step_ms / 1000)):
            prompt = [rng.randrange(3, 500) for _ in range(options.blocks * options.offload_block + 1)]
            hashes: list[bytes] = []
            for state in STATES:
                if state == "cold":
                    make_files(pool, folder, sizes, hashes)
                    if options.drop_caches:
                        drop_caches()
                sample = engine.look_up(prompt, delay_seconds=delay, is_split=bool(number % 2))
                step = len(sample.block_hashes) // options.blocks
                hashes = sample.block_hashes[step - 1 :: step]
                expected = 0 if state == "absent" else options.blocks * options.offload_block
                if sample.matched_tokens != expected:
                    raise RuntimeError(f"{state}: {sample.matched_tokens} tokens found, not {expected}")
                samples.setdefault((load, state), []).append(sample)
    return samples


def learn_files(engine: Engine, options: argparse.Namespace, pool: str) -> tuple[str, dict[int, int]]:
    """Store one block, and return the fingerprint's folder and the size of each rank's block files."""
    engine.compute([5] * (options.offload_block + 1))
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < deadline:
        engine.compute([3, 4, 5])
        found = sorted(Path(pool).glob("*/r*/*/*/*.kvb"))
        if len(found) == options.ranks:
            return found[0].parts[-5], {int(path.parts[-4].removeprefix("r")): path.stat().st_size for path in found}
    raise TimeoutError(f"no block was stored in {WAIT_SECONDS_MAX} s; the log says why")


def make_files(pool: str, folder: str, sizes: dict[int, int], hashes: list[bytes]) -> None:
    """Make files of blocks, of the right names and sizes and without content."""
    for path, size in _files(pool, folder, sizes, hashes):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.truncate(size)


def _files(pool: str, folder: str, sizes: dict[int, int], hashes: list[bytes]) -> Iterator[tuple[str, int]]:
    for block_hash in hashes:
        for rank, size in sizes.items():
            yield os.path.join(pool, block_path(BlockKey(Fingerprint(folder), bytes(block_hash), 0, rank))), size


def drop_caches() -> None:
    """Make the kernel forget names, inodes and cached pages."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def report(samples: dict[tuple[str, str], list[Sample]], options: argparse.Namespace) -> int:
    """Print medians, the slowest answer, and the goal; return 1 if a median misses it."""
    missed = False
    for (load, state), found in samples.items():
        whole = [sample for sample in found if not sample.ours]
        ours = statistics.median(sample.ours for sample in found if sample.ours) * 1000
        missed |= ours > SCHEDULER_GOAL_MS
        print(
            f"{options.blocks} blocks, {options.ranks} rank(s), {load} {state:6}: ours {ours:.3f} ms "
            f"(goal {SCHEDULER_GOAL_MS}), with vLLM's {statistics.median(s.total for s in whole) * 1000:.3f} ms, "
            f"in {statistics.median(s.asked for s in whole):.0f} asks, "
            f"answer after {statistics.median(s.answered for s in whole) * 1000:.2f} ms "
            f"(slowest {max(s.answered for s in whole) * 1000:.2f})"
        )
    return int(missed)


def measure_index(count: int) -> None:
    """Print bytes and time per key of an index of `count` keys, and time per key once it is full."""
    rng = random.Random(5)
    keys = [rng.randbytes(KEY_LENGTH) for _ in range(count)]
    more = [rng.randbytes(KEY_LENGTH) for _ in range(count)]
    index = Index(count)
    add = _seconds_per_key(index.add, keys)
    contains = _seconds_per_key(index.__contains__, keys)
    full = _seconds_per_key(index.add, more)
    print(
        f"index of {count} keys: {_index_bytes(count) / count:.0f} bytes a key, add {add * 1e9:.0f} ns, "
        f"contains {contains * 1e9:.0f} ns, add when full {full * 1e9:.0f} ns"
    )


def _seconds_per_key(method: Callable[[bytes], object], keys: list[bytes]) -> float:
    started = time.perf_counter()
    for key in keys:
        method(key)
    return (time.perf_counter() - started) / len(keys)


def _index_bytes(count: int) -> int:
    """Return the memory of a full index and its keys."""
    rng = random.Random(5)
    tracemalloc.start()
    index = Index(count)
    for _ in range(count):
        index.add(rng.randbytes(KEY_LENGTH))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(index) == count
    return size


if __name__ == "__main__":
    sys.exit(main())
