"""Fixtures for tests of the sidecar: pools with real blocks, the command in a process of its own."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pykvcache_contract.keys import BlockKey, Fingerprint, fingerprint_of
from pykvcache_contract.recency import recency_ns
from pykvcache_sidecar.book import Book, Snapshot
from pykvcache_sidecar.care import Care
from pykvcache_sidecar.settings import CareSettings
from pykvcache_storage.inventory import count_bytes
from pykvcache_storage.pool import open_pool
from pykvcache_storage.testing.blocks import publish
from pykvcache_storage.usage import UsageLedger

IDENTITY = {"engine": {"model": "test/llama"}, "epoch": None}
BLOCK_BYTES = 16_384
# After everything is imported, because another user may not reach the interpreter's own files.
BECOME_ANOTHER_USER = """
import codecs, os
from pykvcache_sidecar import signals
signals.hold()
from pykvcache_sidecar import run

codecs.lookup("ascii")
def as_another_user(care):
    def care_so(settings, **where):
        os.setgroups([])
        os.setgid({user})
        os.setuid({user})
        care(settings, **where)
    return care_so

run.care, run.care_patiently = as_another_user(run.care), as_another_user(run.care_patiently)
"""
DEADLINE_SECONDS = 60.0
"""How long a test waits for something that takes a fraction of a second on an idle machine."""


def wait_for_value(condition: Callable[[], Any], what: str = "the condition") -> Any:
    deadline = time.monotonic() + DEADLINE_SECONDS
    never = threading.Event()
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for {what}"
        never.wait(0.02)  # gives the processor away between two looks


class PoolOnDisk:
    """A pool directory with blocks that are whole, all of one size."""

    block_bytes = BLOCK_BYTES

    def __init__(self, directory: Path, identity: dict[str, Any] = IDENTITY) -> None:
        self.directory = directory
        self.identity = identity
        self.fingerprint: Fingerprint = fingerprint_of(identity)
        # Ages count from here: a use counts to the minute, and one that ended between two blocks would spoil the order.
        self._now_seconds = time.time()
        directory.mkdir(exist_ok=True)
        self.prepare()

    def prepare(self) -> None:
        open_pool(str(self.directory), create=True).prepare_fingerprint(self.fingerprint, self.identity)

    @property
    def ledger(self) -> UsageLedger:
        return UsageLedger(str(self.directory))

    def key(self, number: int, *, rank: int = 0) -> BlockKey:
        return BlockKey(self.fingerprint, random.Random(number).randbytes(32), 0, rank)

    def write(self, number: int, *, age_seconds: float = 0.0, depth: int = 0, rank: int = 0) -> Path:
        """Publish one block as if it had been used so long ago, so deep in its prefix."""
        payload = random.Random(-number - 1).randbytes(BLOCK_BYTES - 4096)
        used_ns = recency_ns(self._now_seconds - age_seconds, depth)
        return publish(self.directory, self.key(number, rank=rank), payload, used_ns=used_ns)

    def fill(self, count: int, *, age_seconds: float = 0.0) -> list[Path]:
        """Publish blocks, the first the most recent one, and count them in the ledger."""
        paths = [self.write(number, age_seconds=age_seconds + 60.0 * number) for number in range(count)]
        self.recount()
        return paths

    def recount(self) -> None:
        self.ledger.recount(lambda: count_bytes(str(self.directory)))

    def give_to(self, user: int) -> None:
        """Give all to a user who may begin to remove at once: what lies deeper first, so that nothing is gone yet."""
        for folder, _, names in os.walk(self.directory, topdown=False):
            for path in (*(os.path.join(folder, name) for name in names), folder):
                os.chown(path, user, user)

    def blocks(self) -> set[Path]:
        # Not rglob, which fails where a folder vanishes before it is read.
        every = (Path(folder, name) for folder, _, names in os.walk(self.directory) for name in names)
        return {path for path in every if path.suffix == ".kvb"}


@pytest.fixture
def wait_for() -> Callable[..., Any]:
    """Return a function that returns the first true value of a condition."""
    return wait_for_value


@pytest.fixture
def make_pool() -> Callable[..., PoolOnDisk]:
    """Return a function from a directory, and an identity, to a pool."""
    return PoolOnDisk


@pytest.fixture
def pool(tmp_path: Path) -> PoolOnDisk:
    return PoolOnDisk(tmp_path / "pool")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users reach; pytest's own are private."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., CareSettings]:
    """Return a function that makes settings: those of a quiet sidecar, but for what is given."""

    def make(**given: Any) -> CareSettings:
        values = {
            "pool_directory": str(tmp_path / "pool"),
            "capacity_bytes": 100 * BLOCK_BYTES,
            "high": 0.9,
            "low": 0.8,
            "min_free_bytes": 0,
            "write_budget_bytes": 0,
            "policy": "lru",
            "scrub_bytes_per_second": 0,
            "unused_seconds": 0.0,
            "quarantine_seconds": 86_400.0,
            "require_mount": False,
            "interval_seconds": 0.05,
        }
        return CareSettings(**{**values, **given})

    return make


class CareInProcess:
    """The caring loop, round by round, with clocks that a test sets."""

    def __init__(self, settings: CareSettings) -> None:
        self.wall = [time.time()]
        self.steady = [1000.0]
        self.stopped = threading.Event()
        self.book = Book(settings, monotonic=lambda: self.steady[0])
        self.care = Care(
            settings=settings,
            pool=open_pool(settings.pool_directory, create=True),
            book=self.book,
            stopped=self.stopped,
            clock=lambda: self.wall[0],
            monotonic=lambda: self.steady[0],
        )

    def pass_time(self, seconds: float) -> None:
        """Let both clocks run on."""
        self.wall[0] += seconds
        self.steady[0] += seconds

    def until(self, condition: Callable[[Snapshot], Any]) -> Snapshot:
        """Go round until a condition holds, then once more."""

        def go_round() -> bool:
            self.care.round()
            return bool(condition(self.book.snapshot()))

        wait_for_value(go_round)
        self.care.round()
        return self.book.snapshot()

    def until_scanned(self) -> Snapshot:
        """Go round until a scan has ended that began after now."""
        before = self.book.snapshot().scan.ended_seconds
        self.pass_time(3601.0)
        return self.until(lambda now: now.scan.ended_seconds > before)


@pytest.fixture
def start_care(make_settings: Callable[..., CareSettings]) -> Iterator[Callable[..., CareInProcess]]:
    """Return a function from settings that differ from the quiet ones to a loop."""
    started: list[CareInProcess] = []

    def start(**given: Any) -> CareInProcess:
        started.append(CareInProcess(make_settings(**given)))
        return started[-1]

    yield start
    for care in started:
        care.stopped.set()
        care.care.rest(10.0)


class Sidecar:
    """`pykvcache-sidecar run` in a process of its own."""

    def __init__(self, directory: Path, log: Path, *options: object, user: int | None = None, before: str = "") -> None:
        self.log = log
        arguments = ["run", "--pool", directory, "--listen", "127.0.0.1:0", "--interval", "0.05", *options]
        code = "from pykvcache_sidecar.main import main; main()"
        if user is not None:
            code = BECOME_ANOTHER_USER.format(user=user) + code
        code = before + code
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, arguments)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def text(self) -> str:
        return self.log.read_text()

    def port(self) -> str:
        """Return the port, as soon as the log names it."""
        assert self.process.poll() is None, self.text()
        lines = self.text().splitlines(keepends=True)
        line = next((line for line in lines if "listening on" in line and line.endswith("\n")), "")
        return line.rpartition(":")[2].strip()

    def get(self, path: str) -> tuple[int, str]:
        """Return status code and body."""
        port = wait_for_value(self.port, "the sidecar to listen")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment's
        try:
            with opener.open(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        return json.loads(self.get("/status")[1])

    def wait_status(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Return the first status for which a condition holds."""
        last: dict[str, Any] = {}

        def look() -> bool:
            last.update(self.status())
            return bool(condition(last))

        try:
            wait_for_value(look)
        except AssertionError as error:
            raise AssertionError(f"last status: {last}\n{self.text()}") from error
        return last

    def wait_state(self, state: str) -> dict[str, Any]:
        return self.wait_status(lambda status: status["state"] == state)

    def wait_scanned(self) -> dict[str, Any]:
        return self.wait_status(lambda status: status["scan"]["ended_seconds"])

    def terminate(self) -> int:
        """Ask it to end; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SECONDS)


@pytest.fixture
def start_sidecar(tmp_path: Path) -> Iterator[Callable[..., Sidecar]]:
    """Return a function that starts a sidecar; what still runs at the end is killed."""
    sidecars: list[Sidecar] = []

    def start(directory: Path, *options: object, user: int | None = None, before: str = "") -> Sidecar:
        log = tmp_path / f"sidecar-{len(sidecars)}.log"
        sidecars.append(Sidecar(directory, log, *options, user=user, before=before))
        return sidecars[-1]

    yield start
    for sidecar in sidecars:
        sidecar.process.kill()
        sidecar.process.wait()
