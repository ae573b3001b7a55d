"""Engines on the CPU for the tests: processes that run vLLM, prompts, outputs without the cache, a filled pool.

An engine start costs seconds inside a process that has vLLM imported, and up to a minute otherwise. So one process
(`vllm`) runs most engines, one after the other; a test that needs a second one asks for `spawn`.
"""

import contextlib
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("driver.py")
CALL_SECONDS_MAX = 600.0
"""Far beyond any healthy call, engine starts on a busy machine included."""
BLOCK_TOKENS = 64
NEW_TOKENS = 8
RUNS_MAX = 20
"""Of prompts that a pool comes to serve wholly: a run finds at least one damaged block of a prompt, or stores one, and
the longest has eight."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == DRIVER.parent:
            item.add_marker(pytest.mark.engine)


class CallError(RuntimeError):
    """vLLM raised, or its process ended; the message holds what it said."""


@dataclass(frozen=True)
class Outputs:
    """What came out for each prompt: new tokens, how many of the prompt's came from a cache, how many were rated."""

    tokens: list[list[int]]
    cached: list[int]
    logprobs: list[int]


class Process:
    """A process that runs vLLM; see driver.py for the calls."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        self.log_path = log
        self.version = ""
        self._output = log.open("w")
        self._log_start = 0
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def send(self, name: str, /, **arguments: Any) -> None:
        """Begin a call."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
        self._process.stdin.flush()

    def receive(self) -> Any:
        """Return the result of the call that was begun first."""
        try:
            line = self._answers.get(timeout=CALL_SECONDS_MAX)
        except queue.Empty:
            self.kill()
            raise CallError(f"no answer within {CALL_SECONDS_MAX:.0f} s; the log ends:\n{self.log()[-4000:]}") from None
        if not line:
            raise CallError(f"the process ended; its log ends:\n{self.log()[-4000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise CallError(answer["error"])
        return answer["result"]

    def call(self, name: str, /, **arguments: Any) -> Any:
        self.send(name, **arguments)
        return self.receive()

    def log(self) -> str:
        """Return what was logged since the last engine began to start."""
        self._output.flush()
        return self.log_path.read_text(errors="replace")[self._log_start :]

    @contextlib.contextmanager
    def engine(
        self, model: Path, connector: dict[str, Any] | None = None, *, faults: bool = False, **options: Any
    ) -> Iterator["Engine"]:
        """Run one engine, with our connector unless `connector` is None."""
        self._log_start = len(self.log_path.read_text(errors="replace"))
        try:
            self.call("start", model=str(model), engine=options, connector=connector, faults=faults)
            yield Engine(self)
        finally:
            if self.is_alive():
                self.call("stop")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """End the process and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._output):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@dataclass
class Engine:
    """A running engine."""

    process: Process

    def generate(self, prompts: list[list[int]], max_tokens: int = NEW_TOKENS, **options: Any) -> Outputs:
        """Run prompts together, greedily; the options are those of the driver."""
        self.begin_generate(prompts, max_tokens, **options)
        return self.end_generate()

    def begin_generate(self, prompts: list[list[int]], max_tokens: int = NEW_TOKENS, **options: Any) -> None:
        self.process.send("generate", prompts=prompts, max_tokens=max_tokens, **options)

    def end_generate(self) -> Outputs:
        outputs = self.process.receive()
        return Outputs(*([item[name] for item in outputs] for name in ("tokens", "cached", "logprobs")))

    def wait_idle(self) -> dict[str, float]:
        """Wait until everything is stored and counted; return our metrics without their prefix."""
        self.process.call("wait_idle")
        return self.metrics("vllm:pykvcache_")

    def wait_until(self, condition: Callable[[dict[str, float]], bool]) -> None:
        """Let the engine step, with prompts too short to be stored, until our metrics meet a condition."""
        deadline = time.monotonic() + CALL_SECONDS_MAX
        while not condition(metrics := self.metrics("vllm:pykvcache_")):
            assert time.monotonic() < deadline, metrics
            self.generate([[3, 4, 5]], 2)

    def repeat(
        self, prompts: list[list[int]], until: Callable[[dict[str, float]], bool], max_tokens: int = NEW_TOKENS
    ) -> list[Outputs]:
        """Run prompts again and again and return the outputs of each run; `until` sees by how much our metrics grew.

        How many runs it takes depends on the machine: a request whose first block another one has just proved damaged
        does not read the others, and what a request was to load it does not store. After many runs it returns anyway.
        """
        runs: list[Outputs] = []
        before, after = {}, self.wait_idle()
        while len(runs) < RUNS_MAX and not (runs and until(_growth(before, after))):
            runs.append(self.generate(prompts, max_tokens))
            before, after = after, self.wait_idle()
        return runs

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return the metrics with a prefix, without it; `name|label value`, counters without `_total`."""
        found = self.process.call("metrics")
        return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}

    def fault(self, name: str, **arguments: Any) -> Any:
        return self.process.call("fault", name=name, arguments=arguments)


def _growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


@dataclass
class Processes:
    """All processes of the session."""

    folder: Path
    started: list[Process] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Imports vLLM, a quarter of a minute, while the fixtures prepare other things.
        self.main = self.spawn()

    def spawn(self, **environment: str | None) -> Process:
        """Start a process; a variable that is None is left out of its environment."""
        variables = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "INFO",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONHASHSEED": "0",
            **environment,
        }
        log = self.folder / f"vllm-{len(self.started)}.log"
        process = Process(log, {name: value for name, value in variables.items() if value is not None})
        self.started.append(process)
        process.send("hello")
        return process

    def running(self) -> Process:
        """Return the process that most tests share; a new one if a test has ended the last."""
        if not self.main.is_alive():
            self.main = self.spawn()
        if not self.main.version:
            self.main.version = self.main.receive()
        return self.main

    def end(self) -> None:
        for process in self.started:
            process.kill()


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    processes = Processes(tmp_path_factory.mktemp("vllm"))
    yield processes
    processes.end()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose greedy output depends on every layer's KV."""
    folder = tmp_path_factory.mktemp("model")
    command = [sys.executable, "-m", "pykvcache_cli.tiny_model", str(folder)]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return folder


@pytest.fixture
def vllm(processes: Processes) -> Process:
    """The process that most tests share."""
    return processes.running()


@pytest.fixture
def spawn(processes: Processes) -> Iterator[Callable[..., Process]]:
    """Start further processes; the test's end ends them."""
    mine: list[Process] = []

    def start(**environment: str | None) -> Process:
        process = processes.spawn(**environment)
        mine.append(process)
        process.version = process.receive()
        return process

    yield start
    for process in mine:
        process.kill()


@dataclass(frozen=True)
class Prompts:
    """Six prompts: four that begin alike for 260 to 520 tokens, one of its own, and one of exactly five blocks.

    Attributes:
        hits: for each, its tokens in whole blocks, which a full pool can serve.
        blocks: different whole blocks of all.
    """

    tokens: list[list[int]]
    hits: list[int]
    blocks: int

    @property
    def loads(self) -> int:
        """Return how many blocks a full pool serves in a run, if each request loads its own."""
        return sum(self.hits) // BLOCK_TOKENS

    @staticmethod
    def found_first(cached: list[int]) -> list[int]:
        """Return what was found by the prompts that begin like none before them.

        On an empty pool that is nothing, whereas the others may find what these have stored meanwhile.
        """
        return [cached[index] for index in (0, 4, 5)]


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    source = random.Random(1)

    def draw(count: int) -> list[int]:
        return [source.randrange(3, 500) for _ in range(count)]

    common = draw(520)
    tokens = [*(common[:length] + draw(40) for length in (260, 324, 388, 520)), draw(300), draw(5 * BLOCK_TOKENS)]
    hits = [len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in tokens]
    return Prompts(tokens, hits, blocks=(max(hits[:4]) + hits[4] + hits[5]) // BLOCK_TOKENS)


Baseline = Callable[..., list[list[int]]]


@pytest.fixture
def baseline(vllm: Process, model: Path, prompts: Prompts, baselines: dict[str, Any]) -> Baseline:
    """Return a function that gives the outputs of an engine without our connector; call it before starting one."""

    def outputs(max_tokens: int = NEW_TOKENS, **options: Any) -> list[list[int]]:
        key = json.dumps([max_tokens, options], sort_keys=True)
        if key not in baselines:
            with vllm.engine(model, **options) as engine:
                baselines[key] = engine.generate(prompts.tokens, max_tokens).tokens
        found: list[list[int]] = baselines[key]
        return found

    return outputs


@pytest.fixture(scope="session")
def baselines() -> dict[str, Any]:
    return {}


Connector = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def connector() -> Connector:
    """Return a function that makes the connector's options for a pool."""

    def options(pool: Path, **changed: Any) -> dict[str, Any]:
        defaults = {"staging": "16MiB", "block_size": BLOCK_TOKENS, "lookup_timeout_seconds": 30}
        return {"pool": str(pool), **defaults, **changed}

    return options


@dataclass(frozen=True)
class Filled:
    """A pool with the blocks of all prompts, and what the engine that stored them said."""

    pool: Path
    outputs: Outputs
    metrics: dict[str, float]


@pytest.fixture(scope="session")
def filled(
    processes: Processes, model: Path, prompts: Prompts, connector: Connector, tmp_path_factory: pytest.TempPathFactory
) -> Filled:
    """A pool filled once, by a process that has ended."""
    pool = tmp_path_factory.mktemp("filled")
    process = processes.spawn()
    process.receive()
    with process.engine(model, connector(pool)) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    process.kill()
    return Filled(pool, outputs, metrics)


class PoolFolder:
    """A pool directory, looked at from outside."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def blocks(self, rank: int = 0) -> list[Path]:
        """Return the block files of a rank, sorted by name."""
        return sorted(self.path.glob(f"*/r{rank}/*/*/*.kvb"))

    def names(self, rank: int = 0) -> list[str]:
        return [file.name for file in self.blocks(rank)]

    def quarantined(self) -> list[Path]:
        return sorted(self.path.glob("*/quarantine/*.kvb"))

    def temporaries(self) -> list[Path]:
        return sorted(self.path.glob("*/tmp/*.tmp"))

    def fingerprints(self) -> list[str]:
        return sorted(file.parent.name for file in self.path.glob("*/config.json"))

    def inspect(self) -> dict[str, Any]:
        """Return what `pykvcache inspect --verify` says; every block must be good."""
        command = [sys.executable, "-m", "pykvcache_cli.main", "inspect", str(self.path), "--verify", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture
def empty_pool(tmp_path: Path) -> PoolFolder:
    folder = tmp_path / "pool"
    folder.mkdir()
    return PoolFolder(folder)


@pytest.fixture
def pool(filled: Filled, tmp_path: Path) -> PoolFolder:
    """A copy of the filled pool, to be damaged."""
    return PoolFolder(Path(shutil.copytree(filled.pool, tmp_path / "pool")))
