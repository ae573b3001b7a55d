"""The shared fill level: strict across real processes, safe after kills, torn files and recounts."""

import errno
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache_contract.errors import PoolUnavailableError, ReadOnlyError, TransientError
from pykvcache_storage import usage
from pykvcache_storage.usage import RECORD_SIZE_BYTES, SETTLE_SECONDS, Reserved, UsageLedger

PATIENT = """
from pykvcache_storage import usage
usage.LOCK_TIMEOUT_SECONDS = 60.0  # the holder may wait for a disk, or for the processor
"""
WORKER = (
    PATIENT
    + """
import random, sys
from pykvcache_storage.usage import Reserved, UsageLedger
for line in sys.stdin:
    directory, seed, capacity, count = line.split()
    ledger, chance, held, highest = UsageLedger(directory), random.Random(seed), [], 0
    for _ in range(int(count)):
        if held and chance.random() < 0.4:
            ledger.release(held.pop())
        else:
            size = chance.randrange(1, 100)
            if ledger.reserve(size, capacity_bytes=int(capacity)) is Reserved.TAKEN:
                held.append(size)
        highest = max(highest, ledger.used_bytes())
    print(sum(held), highest, flush=True)
"""
)
FILL = (
    PATIENT
    + """
import sys
from pykvcache_storage.usage import UsageLedger
ledger = UsageLedger(sys.argv[1])
print("ready", flush=True)
while True:
    ledger.reserve(7, capacity_bytes=1_000_000)
    ledger.release(3)
"""
)


class ManualClock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def ledger(tmp_path: Path, clock: ManualClock) -> UsageLedger:
    ledger = UsageLedger(str(tmp_path), clock=clock)
    ledger.ensure(lambda: 0)
    return ledger


@pytest.fixture(scope="module")
def workers() -> Iterator[list["subprocess.Popen[str]"]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WORKER]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) for _ in range(4)]
    yield processes
    for process in processes:
        process.communicate()


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(capacity=st.integers(1, 4000), seed=st.integers(0, 2**32))
def test_several_processes_never_use_more_than_the_capacity(
    workers: list["subprocess.Popen[str]"], capacity: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        UsageLedger(directory).ensure(lambda: 0)
        for index, worker in enumerate(workers):
            worker.stdin.write(f"{directory} {seed + index} {capacity} 100\n")
            worker.stdin.flush()
        answers = [[int(number) for number in worker.stdout.readline().split()] for worker in workers]
        assert max(highest for _, highest in answers) <= capacity
        assert UsageLedger(directory).used_bytes() == sum(held for held, _ in answers)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_valid_record(tmp_path: Path, start_python: Callable) -> None:
    ledger = UsageLedger(str(tmp_path))
    ledger.ensure(lambda: 0)
    for reservations in (1, 3, 17, 40, 100):
        process = start_python(FILL, tmp_path)
        process.stdout.readline()
        before = ledger.usage().added_bytes
        while ledger.usage().added_bytes < before + 7 * reservations:
            pass
        process.kill()
        process.wait()
        assert 0 < ledger.used_bytes() <= 1_000_000
    assert ledger.reserve(1, capacity_bytes=10_000_000) is Reserved.TAKEN


def test_threads_of_one_process_exclude_each_other(ledger: UsageLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "LOCK_TIMEOUT_SECONDS", 60.0)

    def add() -> None:
        for _ in range(100):
            assert ledger.reserve(1, capacity_bytes=10_000) is Reserved.TAKEN

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.used_bytes() == 400


def test_a_reservation_fits_exactly_or_not_at_all(ledger: UsageLedger) -> None:
    assert ledger.reserve(60, capacity_bytes=100) is Reserved.TAKEN
    assert ledger.reserve(41, capacity_bytes=100) is Reserved.FULL
    assert ledger.reserve(40, capacity_bytes=100) is Reserved.TAKEN
    assert ledger.used_bytes() == 100


def test_released_room_can_be_taken_again_and_never_goes_below_zero(ledger: UsageLedger) -> None:
    ledger.reserve(100, capacity_bytes=100)
    ledger.release(30)
    assert ledger.reserve(30, capacity_bytes=100) is Reserved.TAKEN
    ledger.release(500)
    assert ledger.used_bytes() == 0


def test_a_lower_capacity_refuses_until_there_is_room(ledger: UsageLedger) -> None:
    ledger.reserve(100, capacity_bytes=100)
    assert ledger.reserve(1, capacity_bytes=50) is Reserved.FULL
    ledger.release(51)
    assert ledger.reserve(1, capacity_bytes=50) is Reserved.TAKEN


def test_without_a_file_nothing_is_stored_until_a_recount(tmp_path: Path) -> None:
    ledger = UsageLedger(str(tmp_path))
    assert ledger.used_bytes() is None
    assert ledger.reserve(1, capacity_bytes=100) is Reserved.UNKNOWN
    ledger.release(1)
    assert not (tmp_path / "usage").exists()
    assert ledger.ensure(lambda: 70) == 70
    assert ledger.reserve(31, capacity_bytes=100) is Reserved.FULL
    assert ledger.reserve(30, capacity_bytes=100) is Reserved.TAKEN


def test_a_known_fill_level_is_not_counted_again(ledger: UsageLedger) -> None:
    ledger.reserve(5, capacity_bytes=100)
    assert ledger.ensure(lambda: pytest.fail("scanned")) == 5


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * RECORD_SIZE_BYTES, b"x" * 4096])
def test_a_damaged_file_is_unknown_until_a_recount(ledger: UsageLedger, damage: bytes) -> None:
    Path(ledger.path).write_bytes(damage)
    assert ledger.used_bytes() is None
    assert ledger.reserve(1, capacity_bytes=100) is Reserved.UNKNOWN
    assert ledger.ensure(lambda: 12) == 12
    assert ledger.reserve(1, capacity_bytes=100) is Reserved.TAKEN


@pytest.mark.parametrize("offset", [0, 8, 16, 20, 60, 88, 120, RECORD_SIZE_BYTES - 1])
def test_any_torn_record_is_noticed(ledger: UsageLedger, offset: int) -> None:
    data = bytearray(Path(ledger.path).read_bytes())
    data[offset] ^= 1
    Path(ledger.path).write_bytes(data)
    assert ledger.used_bytes() is None


def test_a_record_whose_writer_lost_the_processor_half_way_is_read_when_it_is_whole(
    ledger: UsageLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.reserve(7, capacity_bytes=100)
    torn, real, slept = [b"x" * RECORD_SIZE_BYTES] * 15, os.pread, []
    monkeypatch.setattr(usage.os, "pread", lambda *given: torn.pop() if torn else real(*given))
    monkeypatch.setattr(usage.time, "sleep", slept.append)
    assert ledger.used_bytes() == 7
    assert slept, "the processor is given away"


def test_a_file_of_a_later_version_is_unknown(ledger: UsageLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "_VERSION", 2)
    assert ledger.used_bytes() is None


def test_a_named_pipe_or_a_link_in_its_place_is_no_record(tmp_path: Path) -> None:
    ledger = UsageLedger(str(tmp_path))
    os.mkfifo(ledger.path)
    assert ledger.used_bytes() is None
    os.unlink(ledger.path)
    (tmp_path / "victim").touch()
    os.symlink(tmp_path / "victim", ledger.path)
    with pytest.raises(TransientError):
        ledger.ensure(lambda: 0)
    assert (tmp_path / "victim").read_bytes() == b""


def test_a_recount_repairs_what_a_killed_store_leaked(ledger: UsageLedger, clock: ManualClock) -> None:
    ledger.reserve(40, capacity_bytes=100)
    ledger.reserve(60, capacity_bytes=100)
    clock.now += SETTLE_SECONDS
    assert ledger.recount(lambda: 60) == 60
    assert ledger.usage().recount_seconds == clock.now


def test_a_recount_keeps_reservations_made_while_it_scans(ledger: UsageLedger) -> None:
    def scan() -> int:
        ledger.reserve(25, capacity_bytes=100)
        return 10

    assert ledger.recount(scan) == 35


def test_a_recount_keeps_a_store_that_was_under_way_when_it_began(ledger: UsageLedger, clock: ManualClock) -> None:
    ledger.reserve(30, capacity_bytes=100)
    clock.now += SETTLE_SECONDS - 1
    assert ledger.recount(lambda: 0) == 30
    clock.now += 1
    assert ledger.recount(lambda: 30) == 30


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 90), st.integers(1, 50)), max_size=30))
def test_a_recount_never_forgets_a_recent_store_and_repeats_only_recent_ones(steps: list[tuple[float, int]]) -> None:
    clock = ManualClock()
    stores = []
    with tempfile.TemporaryDirectory() as directory:
        ledger = UsageLedger(directory, clock=clock)
        ledger.ensure(lambda: 0)
        for pause, size in steps:
            clock.now += pause
            ledger.reserve(size, capacity_bytes=10**9)
            stores.append((clock.now, size))
        published = sum(size for _, size in stores)
        unseen = sum(size for moment, size in stores if moment > clock.now - SETTLE_SECONDS)
        older = sum(size for moment, size in stores if moment <= clock.now - 4 * SETTLE_SECONDS)
        assert ledger.recount(lambda: published - unseen) >= published
        assert ledger.recount(lambda: published) <= 2 * published - older


def test_a_recount_survives_the_loss_of_the_file_while_it_scans(ledger: UsageLedger, clock: ManualClock) -> None:
    ledger.reserve(90, capacity_bytes=100)
    clock.now += SETTLE_SECONDS
    mark = ledger.begin_recount()
    os.unlink(ledger.path)
    ledger.ensure(lambda: 90)
    ledger.reserve(5, capacity_bytes=100)
    assert ledger.finish_recount(mark, counted_bytes=90) == 95


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_one_process_still_counts_right_and_says_so(
    ledger: UsageLedger, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(_descriptor: int, _operation: int) -> None:
        raise OSError(code, os.strerror(code))

    assert ledger.shared
    monkeypatch.setattr(usage.fcntl, "flock", flock)
    test_threads_of_one_process_exclude_each_other(ledger, monkeypatch)
    assert not ledger.shared


def test_a_lock_that_is_never_released_costs_one_store_not_the_process(
    ledger: UsageLedger, monkeypatch: pytest.MonkeyPatch, start_python: Callable
) -> None:
    code = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print('held', flush=True); sys.stdin.readline()"
    )
    start_python(code, ledger.path).stdout.readline()
    monkeypatch.setattr(usage, "LOCK_TIMEOUT_SECONDS", 0.01)
    with pytest.raises(TransientError, match="has been locked"):
        ledger.reserve(1, capacity_bytes=100)
    assert ledger.used_bytes() == 0


def test_a_removed_pool_is_named(tmp_path: Path) -> None:
    ledger = UsageLedger(str(tmp_path / "gone"))
    assert ledger.reserve(1, capacity_bytes=100) is Reserved.UNKNOWN
    with pytest.raises(PoolUnavailableError, match="is gone"):
        ledger.ensure(lambda: 0)


def test_a_read_only_pool_refuses_changes_and_still_answers(
    tmp_path: Path, read_only_view: Callable[[Path], Path]
) -> None:
    directory = tmp_path / "pool"
    directory.mkdir()
    UsageLedger(str(directory)).ensure(lambda: 9)
    ledger = UsageLedger(str(read_only_view(directory)))
    assert ledger.used_bytes() == 9
    with pytest.raises(ReadOnlyError):
        ledger.reserve(1, capacity_bytes=100)


def test_a_refused_store_notes_how_full_the_pool_was(ledger: UsageLedger) -> None:
    for _ in range(3):
        assert ledger.reserve(10, capacity_bytes=100) is Reserved.TAKEN
    ledger.refuse(10)
    refused = ledger.usage()
    assert refused is not None
    assert (refused.used_bytes, refused.refused_bytes) == (20, 20)
    ledger.forget_refusal()
    ledger.forget_refusal()
    assert ledger.usage() == replace(refused, refused_bytes=0)


def test_refusals_while_room_is_made_do_not_lower_the_level_and_one_after_it_counts_anew(ledger: UsageLedger) -> None:
    levels = []
    for stored, evicted, forgets in ((60, 0, False), (0, 10, False), (20, 0, True), (0, 30, False)):
        assert ledger.reserve(stored + 10, capacity_bytes=100) is Reserved.TAKEN
        ledger.release(evicted)
        ledger.refuse(10)
        found = ledger.usage()
        assert found is not None
        levels.append((found.used_bytes, found.refused_bytes))
        if forgets:
            ledger.forget_refusal()
    assert levels == [(60, 60), (50, 60), (70, 70), (40, 40)]


def test_a_store_refused_by_an_empty_pool_is_noted_too(ledger: UsageLedger) -> None:
    assert ledger.reserve(10, capacity_bytes=100) is Reserved.TAKEN
    ledger.refuse(10)
    refused = ledger.usage()
    assert refused is not None
    assert (refused.used_bytes, refused.refused_bytes) == (0, 1)


def test_a_record_that_cannot_be_read_is_not_taken_for_a_lost_one(ledger: UsageLedger) -> None:
    assert ledger.reserve(10, capacity_bytes=100) is Reserved.TAKEN
    os.rename(ledger.path, f"{ledger.path}.aside")
    os.mkdir(ledger.path)
    with pytest.raises(TransientError):
        ledger.begin_recount()


def test_without_any_limit_there_is_a_default_one(ledger: UsageLedger) -> None:
    most = usage.DEFAULT_CAPACITY_BYTES
    assert ledger.reserve(most, capacity_bytes=0) is Reserved.TAKEN
    assert ledger.reserve(1, capacity_bytes=0) is Reserved.FULL
    assert ledger.reserve(1, capacity_bytes=most + 1) is Reserved.TAKEN
