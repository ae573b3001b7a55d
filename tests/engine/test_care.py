"""A real sidecar beside real vLLM: blocks leave while they are wanted, and no output ever tells.

The sidecar is a process of its own, as beside a server. Salts multiply the working set: the same prompts under another
salt have other blocks and the same outputs.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from pykvcache_contract.paths import USAGE_FILE
from pykvcache_contract.recency import depth_of
from pykvcache_sidecar.replay import Bounds, Endless, Replay
from pykvcache_sidecar.trace import Trace
from pykvcache_storage.inventory import iterate_blocks
from pykvcache_storage.usage import UsageLedger

HYBRID_MODEL = Path(__file__).with_name("hybrid_model.py")
DEADLINE_SECONDS = 400.0
"""For what takes seconds on an idle machine."""
LONG_BLOCKS = 16
IDLE_SECONDS = 3600
NEW_TOKENS = 2
"""Enough to tell a wrong KV cache, and most of a round's time is then the cache's."""
ROUNDS = 12
RACING_ROUNDS = 24
RACING_ROUNDS_MAX = 240
"""Where the thread that removes blocks hardly gets a processor."""
REMOVALS_PER_ROUND = 8
TENANTS = 4


def wait_for(condition: Callable[[], Any], what: Callable[[], str]) -> Any:
    """Return the first true value of a condition."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    never = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, what()
        never.wait(0.02)  # gives the processor away between two looks
    return value


class Sidecar:
    """`pykvcache-sidecar run` in a process of its own."""

    def __init__(self, pool: Path, log: Path, **options: Any) -> None:
        self._log = log
        arguments = {"pool": pool, "listen": "127.0.0.1:0", "interval": 0.05, **options}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
        with log.open("w") as stream:
            command = [sys.executable, "-m", "pykvcache_sidecar.main", "run", *flags]
            self._process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        try:
            self._port = wait_for(self._find_port, log.read_text)
        except BaseException:
            self.end()
            raise

    def _find_port(self) -> str:
        assert self._process.poll() is None, self._log.read_text()
        found = re.search(r"listening on \S+:(\d+)\n", self._log.read_text())  # to its end: it may be half there
        return found[1] if found else ""

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=DEADLINE_SECONDS) as answer:
            text: str = answer.read().decode()
            return text

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/status"))
        return found

    def wait_status(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Return the first status for which a condition holds."""
        last: dict[str, Any] = {}

        def look() -> bool:
            last.update(self.status())
            return bool(condition(last))

        wait_for(look, lambda: f"last status: {last}\n{self._log.read_text()}")
        return last

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture
def expected(baseline) -> list[list[int]]:
    """The outputs of all prompts without the cache."""
    return [tokens[:NEW_TOKENS] for tokens in baseline()]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Callable[..., Sidecar]]:
    """Return a function that starts a sidecar on a pool; the one before it ends first."""
    started: list[Sidecar] = []

    def start(pool: Path, **options: Any) -> Sidecar:
        for before in started:
            before.end()
        started.append(Sidecar(pool, tmp_path / f"sidecar-{len(started)}.log", **options))
        return started[-1]

    yield start
    for each in started:
        each.end()


@dataclass(frozen=True)
class Stored:
    """What an engine with a trace left: a pool with the blocks of all prompts and of a long one, and its words.

    Attributes:
        cached: what the second run of all prompts got from the pool.
        long_names: files of the long prompt's blocks.
    """

    pool: Path
    trace: Path
    cached: list[int]
    block_bytes: int
    long_prompt: list[int]
    long_tokens: list[list[int]]
    long_names: frozenset[str]

    def copy(self, target: Path, *, only_long: bool = False) -> Path:
        """Copy the pool, but for its usage, which would count blocks that are left out."""

        def left_out(_: str, names: list[str]) -> set[str]:
            blocks = {name for name in names if name.endswith(".kvb")}
            return {USAGE_FILE} | (blocks - self.long_names if only_long else set())

        return Path(shutil.copytree(self.pool, target, ignore=left_out))


@pytest.fixture(scope="module")
def stored(processes, model, prompts, connector, tmp_path_factory) -> Stored:
    folder = tmp_path_factory.mktemp("stored")
    pool, trace = folder / "pool", folder / "trace.jsonl"
    pool.mkdir()
    long_prompt = [random.Random(2).randrange(3, 500) for _ in range(LONG_BLOCKS * 64 + 20)]
    with processes.running().engine(model, connector(pool, trace=str(trace))) as engine:
        engine.generate(prompts.tokens)
        engine.wait_idle()
        cached = engine.generate(prompts.tokens).cached
        before = set(block_files(pool))
        long_tokens = engine.generate([long_prompt]).tokens
        engine.wait_idle()
    long_files = set(block_files(pool)) - before
    sizes = {file.stat().st_size for file in long_files}
    assert LONG_BLOCKS == len(long_files)
    assert prompts.blocks == len(before)
    return Stored(
        pool, trace, cached, sizes.pop(), long_prompt, long_tokens, frozenset(file.name for file in long_files)
    )


def block_files(pool: Path) -> list[Path]:
    """Return the block files; a walk of ours, because glob fails on folders that are removed meanwhile."""
    return sorted(pool / file.path for file in iterate_blocks(str(pool)))


def size_of(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def bytes_in(pool: Path) -> int:
    """Return at most the bytes of the blocks that were in a pool at one moment, while blocks come and go.

    One walk would count a block that leaves together with the one that takes its room.
    """
    before, after = (set(iterate_blocks(str(pool))) for _ in range(2))
    return sum(file.size_bytes for file in before & after)


def row_of(pool: Path, model: str, files: set[Path]) -> dict[str, tuple[str, int]]:
    """Return what /status must say of the blocks of one model."""
    (directory,) = {file.relative_to(pool).parts[0] for file in files}
    return {directory: (model, size_of(files))}


def test_a_pool_smaller_than_what_is_wanted_is_evicted_while_every_request_gets_the_right_tokens(
    vllm, model, empty_pool, prompts, expected, connector, stored, sidecar
):
    capacity_blocks = 24
    capacity = capacity_blocks * stored.block_bytes
    care = sidecar(empty_pool.path, capacity=capacity)
    ledger = UsageLedger(str(empty_pool))
    store_counts = [0.0]
    deadline = time.monotonic() + DEADLINE_SECONDS
    with vllm.engine(model, connector(empty_pool)) as engine:
        care.wait_status(lambda now: now["used_bytes"] is not None)  # it has found the pool
        # A full pool takes nothing for a while, whoever makes room meanwhile; so this goes through all states.
        while len(store_counts) <= ROUNDS or store_counts[-1] <= capacity_blocks + prompts.blocks / 2:
            outputs = engine.generate(prompts.tokens, NEW_TOKENS, salt=f"tenant {len(store_counts) % TENANTS}")
            assert expected == outputs.tokens
            used = [ledger.used_bytes(), care.status()["used_bytes"], bytes_in(empty_pool.path)]
            assert None not in used
            assert max(used) <= capacity, used
            store_counts.append(engine.metrics("vllm:pykvcache_")["store_blocks"])
            assert time.monotonic() < deadline, (store_counts, care.status())
        metrics = engine.wait_idle()
        count = metrics["store_blocks"]

        def is_told_alike(now: dict[str, Any]) -> bool:
            """All that was stored is there or was evicted, as /metrics says too; some may be about to leave yet."""
            evicted = now["evicted"]["blocks"]
            counted = f'pykvcache_pool_evicted_blocks_total{{reason="capacity"}} {float(evicted)}\n'
            return count == evicted + len(block_files(empty_pool.path)) and counted in care.get("/metrics")

        status = care.wait_status(is_told_alike)
    assert status["evicted"]["blocks"] > 0
    assert metrics["load_blocks"] > 0
    assert 0 == status["scrub"]["damaged"]
    empty_pool.inspect()


class Vandal:
    """A thread that removes blocks at random, one after the other, until it is stopped."""

    def __init__(self, pool: Path, *, seed: int, pause_seconds: float) -> None:
        self.removed = 0
        self._pool = pool
        self._random = random.Random(seed)
        self._pause_seconds = pause_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stopped.wait(self._pause_seconds):
            if files := block_files(self._pool):
                self._random.choice(files).unlink(missing_ok=True)
                self.removed += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


def test_blocks_that_vanish_all_the_time_while_they_are_loaded_are_recomputed(
    vllm, model, prompts, expected, connector, stored, tmp_path
):
    pool = stored.copy(tmp_path / "pool")
    # Room for four blocks: most loads wait for those before them, which is when blocks vanish between lookup and open.
    with vllm.engine(model, connector(pool, staging=4 * stored.block_bytes)) as engine:
        started = time.monotonic()
        assert prompts.hits == engine.generate(prompts.tokens, NEW_TOKENS).cached
        # As many a round whatever the machine, and not so many that nothing is left.
        pause_seconds = (time.monotonic() - started) / REMOVALS_PER_ROUND
        rounds: list[Any] = []
        failed = 0.0
        with Vandal(pool, seed=3, pause_seconds=pause_seconds) as vandal:
            while len(rounds) < RACING_ROUNDS or not (failed and vandal.removed > RACING_ROUNDS):
                rounds.append(engine.generate(prompts.tokens, NEW_TOKENS))
                failed = engine.metrics("vllm:pykvcache_")["load_failures|missing"]
                assert len(rounds) < RACING_ROUNDS_MAX, (vandal.removed, failed)
        calm = engine.repeat(
            prompts.tokens, until=lambda grown: prompts.loads == grown["load_blocks"], max_tokens=NEW_TOKENS
        )
    assert [expected] * len(rounds) == [outputs.tokens for outputs in rounds]
    assert 0 < sum(sum(outputs.cached) for outputs in rounds) < len(rounds) * sum(prompts.hits)
    assert [expected] * len(calm) == [outputs.tokens for outputs in calm]
    assert prompts.hits == calm[-1].cached, [outputs.cached for outputs in calm]


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory) -> Path:
    model = tmp_path_factory.mktemp("hybrid-model")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, str(HYBRID_MODEL), str(model)], check=True, env=environment)
    return model


def test_blocks_of_an_idle_model_leave_before_those_of_a_busy_one(
    vllm, model, hybrid_model, prompts, connector, stored, sidecar, tmp_path
):
    pool = stored.copy(tmp_path / "pool")
    idle = set(block_files(pool))
    for file in idle:
        used_ns = file.stat().st_mtime_ns - IDLE_SECONDS * 10**9
        os.utime(file, ns=(used_ns, used_ns))
    with vllm.engine(hybrid_model, connector(pool)) as engine:
        runs = [engine.generate(prompts.tokens)]
        engine.wait_idle()
        busy = set(block_files(pool)) - idle
        total, goal = size_of(idle | busy), size_of(busy) + size_of(idle) // 2
        care = sidecar(pool, capacity=total, high=0.999, low=goal / total)
        status = care.wait_status(lambda now: now["evicted"]["blocks"] and now["size_bytes"] <= goal)
        left = set(block_files(pool))
        assert busy < left < busy | idle
        rows = {row["directory"]: (row["model"], row["size_bytes"]) for row in status["fingerprints"]}
        assert rows == {**row_of(pool, str(model), left & idle), **row_of(pool, str(hybrid_model), busy)}

        runs.append(engine.generate(prompts.tokens))
        engine.wait_idle()
        goal = size_of(busy) // 2
        care = sidecar(pool, capacity=2 * goal, high=0.999, low=0.5)
        care.wait_status(lambda now: now["evicted"]["blocks"] and now["size_bytes"] <= goal)
        assert set(block_files(pool)) < busy
        runs.append(engine.generate(prompts.tokens))
    assert [0] * len(prompts.tokens) == runs[0].cached
    assert sum(runs[1].cached) > 0
    assert [runs[0].tokens] * 3 == [outputs.tokens for outputs in runs]


def test_first_seen_blocks_beyond_the_write_budget_are_declined_and_change_no_output(
    vllm, model, empty_pool, prompts, expected, connector, stored, sidecar
):
    budget_blocks = 7
    budget = budget_blocks * stored.block_bytes
    care = sidecar(empty_pool.path, capacity="1GiB", write_budget=budget)
    care.wait_status(lambda now: now["write_budget"]["bytes_per_day"] == budget)
    with vllm.engine(model, connector(empty_pool)) as engine:
        rounds = []
        for _ in range(3):
            rounds.append(engine.generate(prompts.tokens, NEW_TOKENS))
            metrics = engine.wait_idle()
    status = care.status()
    assert [expected] * 3 == [outputs.tokens for outputs in rounds]
    assert metrics["declines|store|write_budget"] > 0
    # What is wanted again may use all of the day's budget, however much of the day has passed; and if the day ends now,
    # another one.
    assert budget_blocks <= metrics["store_blocks"] < prompts.blocks
    assert budget >= status["write_budget"]["written_bytes"]
    assert 0 == metrics["store_failures|capacity"]
    assert sum(rounds[-1].cached) > 0


def test_a_simulation_of_the_access_trace_finds_what_the_engine_found(prompts, stored):
    requests = list(Trace(str(stored.trace)))
    count = len(prompts.tokens)
    assert 2 * count + 1 == len(requests)
    bounds = Bounds(capacity_bytes=1 << 30)
    for pool in (Endless(), Replay(policy="lru", costs={}, bounds=bounds)):
        found = [pool.serve(request) * request.tokens_per_block for request in requests]
        assert stored.cached == prompts.hits == found[count : 2 * count]
        (tally,) = pool.tallies.values()
        assert size_of(block_files(stored.pool)) == tally.stored_bytes
    assert {file.relative_to(stored.pool).parts[0] for file in block_files(stored.pool)} == set(pool.tallies)


def test_the_tail_of_a_prefix_leaves_and_its_head_is_still_a_hit(vllm, model, connector, stored, sidecar, tmp_path):
    pool = stored.copy(tmp_path / "pool", only_long=True)
    assert LONG_BLOCKS == len(block_files(pool))
    care = sidecar(pool, capacity=LONG_BLOCKS * stored.block_bytes, low=0.5)
    half = LONG_BLOCKS // 2
    status = care.wait_status(lambda now: now["blocks"] == half)
    assert half == status["evicted"]["blocks"]
    assert list(range(half)) == sorted(depth_of(file.stat().st_mtime_ns) for file in block_files(pool))
    with vllm.engine(model, connector(pool)) as engine:
        outputs = engine.generate([stored.long_prompt])
    assert [half * 64] == outputs.cached
    assert stored.long_tokens == outputs.tokens
