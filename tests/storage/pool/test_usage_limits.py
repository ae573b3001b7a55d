"""Limits in the usage record: the sidecar's capacity, the write budget of a day, and clocks that are set."""

import struct
import tempfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache_storage.usage import RECORD_SIZE_BYTES, SETTLE_SECONDS, Reserved, UsageLedger

DAY = 86400
ROOM = 10**15


class ManualClock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    """Noon of day 100."""
    return ManualClock(100.5 * DAY)


@pytest.fixture
def ledger(tmp_path: Path, clock: ManualClock) -> UsageLedger:
    return make_ledger(str(tmp_path), clock)


def make_ledger(directory: str, clock: ManualClock, *, budget: int = 0) -> UsageLedger:
    ledger = UsageLedger(directory, clock=clock)
    ledger.ensure(lambda: 0)
    ledger.set_limits(capacity_bytes=0, write_budget_bytes=budget)
    return ledger


def reserve(ledger: UsageLedger, size: int) -> Reserved:
    return ledger.reserve(size, capacity_bytes=ROOM)


def reserve_new(ledger: UsageLedger, size: int) -> Reserved:
    return ledger.reserve(size, capacity_bytes=ROOM, is_repeated=False)


def test_the_smaller_of_the_two_capacities_holds(ledger: UsageLedger) -> None:
    ledger.set_limits(capacity_bytes=100, write_budget_bytes=0)
    assert ledger.reserve(101, capacity_bytes=1000) is Reserved.FULL
    assert ledger.reserve(51, capacity_bytes=50) is Reserved.FULL
    assert ledger.reserve(100, capacity_bytes=1000) is Reserved.TAKEN
    ledger.set_limits(capacity_bytes=0, write_budget_bytes=0)
    assert ledger.reserve(900, capacity_bytes=1000) is Reserved.TAKEN
    ledger.set_limits(capacity_bytes=1, write_budget_bytes=0)
    assert ledger.reserve(1, capacity_bytes=ROOM) is Reserved.FULL


def test_a_record_of_a_release_before_limits_has_none(ledger: UsageLedger) -> None:
    fields = struct.pack("<8sIIQQddQdQd", b"PYKVUSE\0", 1, 0, 40, 50, 1.0, 2.0, 30, 3.0, 45, 4.0)
    body = fields.ljust(RECORD_SIZE_BYTES - 4, b"\0")
    Path(ledger.path).write_bytes(body + struct.pack("<I", zlib.crc32(body)))
    usage = ledger.usage()
    assert (usage.used_bytes, usage.newer_seconds, usage.limit_bytes, usage.write_budget_bytes) == (40, 4.0, 0, 0)
    assert ledger.reserve(60, capacity_bytes=100, is_repeated=False) is Reserved.TAKEN
    assert (ledger.usage().written_day, ledger.usage().written_bytes) == (100, 60)


def test_limits_create_no_record_and_leave_a_damaged_one(tmp_path: Path) -> None:
    ledger = UsageLedger(str(tmp_path))
    ledger.set_limits(capacity_bytes=1, write_budget_bytes=1)
    assert list(tmp_path.iterdir()) == []
    Path(ledger.path).write_bytes(b"x")
    ledger.set_limits(capacity_bytes=1, write_budget_bytes=1)
    assert Path(ledger.path).read_bytes() == b"x"


def test_equal_limits_are_not_written_again(ledger: UsageLedger) -> None:
    ledger.set_limits(capacity_bytes=5, write_budget_bytes=6)
    before = Path(ledger.path).stat().st_mtime_ns
    ledger.set_limits(capacity_bytes=5, write_budget_bytes=6)
    assert Path(ledger.path).stat().st_mtime_ns == before
    assert (ledger.usage().limit_bytes, ledger.usage().write_budget_bytes) == (5, 6)


def test_recounts_and_releases_keep_the_limits_and_what_was_written(ledger: UsageLedger, clock: ManualClock) -> None:
    ledger.set_limits(capacity_bytes=100, write_budget_bytes=70)
    reserve(ledger, 60)
    ledger.release(60)
    clock.now += SETTLE_SECONDS
    ledger.recount(lambda: 7)
    usage = ledger.usage()
    assert (usage.used_bytes, usage.limit_bytes, usage.write_budget_bytes) == (7, 100, 70)
    assert (usage.written_day, usage.written_bytes) == (100, 60)


def test_without_a_budget_nothing_is_declined_and_all_is_counted(ledger: UsageLedger) -> None:
    assert reserve_new(ledger, 10**12) is Reserved.TAKEN
    assert ledger.usage().written_bytes == 10**12


def test_repeated_blocks_may_use_the_whole_day_and_new_ones_what_has_accrued(
    tmp_path: Path, clock: ManualClock
) -> None:
    ledger = make_ledger(str(tmp_path), clock, budget=1000)
    assert reserve_new(ledger, 501) is Reserved.WRITE_BUDGET
    assert reserve_new(ledger, 500) is Reserved.TAKEN
    assert reserve_new(ledger, 1) is Reserved.WRITE_BUDGET
    assert reserve(ledger, 501) is Reserved.WRITE_BUDGET
    assert reserve(ledger, 500) is Reserved.TAKEN
    assert reserve(ledger, 1) is Reserved.WRITE_BUDGET
    assert ledger.usage().used_bytes == ledger.usage().written_bytes == 1000


def test_a_full_pool_is_full_whatever_the_budget(tmp_path: Path, clock: ManualClock) -> None:
    ledger = make_ledger(str(tmp_path), clock, budget=1000)
    assert ledger.reserve(5000, capacity_bytes=100) is Reserved.FULL


def test_midnight_brings_a_new_budget_that_accrues_from_nothing(tmp_path: Path, clock: ManualClock) -> None:
    ledger = make_ledger(str(tmp_path), clock, budget=1000)
    reserve(ledger, 1000)
    clock.now = 101 * DAY - 1
    assert reserve(ledger, 1) is Reserved.WRITE_BUDGET
    clock.now = 101 * DAY
    assert reserve_new(ledger, 1) is Reserved.WRITE_BUDGET
    assert reserve(ledger, 10) is Reserved.TAKEN
    assert (ledger.usage().written_day, ledger.usage().written_bytes) == (101, 10)
    clock.now += DAY / 10
    assert reserve_new(ledger, 90) is Reserved.TAKEN
    assert reserve_new(ledger, 1) is Reserved.WRITE_BUDGET


def test_hosts_a_few_seconds_apart_at_midnight_share_one_budget(tmp_path: Path, clock: ManualClock) -> None:
    ledger = make_ledger(str(tmp_path), clock, budget=1000)
    reserve(ledger, 1000)
    written = 0
    for _ in range(5):
        clock.now = 101 * DAY + 1
        written += 300 * (reserve(ledger, 300) is Reserved.TAKEN)
        clock.now = 101 * DAY - 1
        written += 300 * (reserve(ledger, 300) is Reserved.TAKEN)
    assert written == 900
    assert ledger.usage().written_day == 101


@pytest.mark.parametrize("days_ahead", [2, 400, 10**6])
def test_a_clock_that_was_far_ahead_once_brings_no_second_budget_and_ends_no_stores(
    tmp_path: Path, clock: ManualClock, days_ahead: int
) -> None:
    ledger = make_ledger(str(tmp_path), clock, budget=1000)
    clock.now += days_ahead * DAY
    reserve(ledger, 800)
    clock.now -= days_ahead * DAY
    assert reserve(ledger, 201) is Reserved.WRITE_BUDGET
    assert reserve(ledger, 200) is Reserved.TAKEN
    assert (ledger.usage().written_day, ledger.usage().written_bytes) == (100, 1000)
    clock.now += DAY
    assert reserve(ledger, 1000) is Reserved.TAKEN


def test_a_clock_before_1970_is_no_error(tmp_path: Path) -> None:
    ledger = make_ledger(str(tmp_path), ManualClock(-5.0), budget=1000)
    assert reserve_new(ledger, 1) is Reserved.WRITE_BUDGET
    assert reserve(ledger, 1000) is Reserved.TAKEN


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(0, 30_000), st.booleans(), st.integers(1, 400)), max_size=40))
def test_no_day_writes_more_than_its_budget_and_new_blocks_never_run_ahead(
    steps: list[tuple[float, bool, int]],
) -> None:
    clock, written = ManualClock(50.0 * DAY), dict[int, int]()
    with tempfile.TemporaryDirectory() as directory:
        ledger = make_ledger(directory, clock, budget=1000)
        for pause, is_repeated, size in steps:
            clock.now += pause
            day, share = divmod(clock.now, DAY)
            allowed = 1000 if is_repeated else int(1000 * (share / DAY))
            outcome = ledger.reserve(size, capacity_bytes=ROOM, is_repeated=is_repeated)
            fits = written.get(day, 0) + size <= allowed
            assert outcome is (Reserved.TAKEN if fits else Reserved.WRITE_BUDGET)
            written[day] = written.get(day, 0) + size * fits
    assert all(size <= 1000 for size in written.values())


def test_the_record_has_room_for_every_field(ledger: UsageLedger) -> None:
    ledger.set_limits(capacity_bytes=2**63, write_budget_bytes=2**62)
    assert reserve(ledger, 2**40) is Reserved.TAKEN
    usage = ledger.usage()
    assert (usage.limit_bytes, usage.write_budget_bytes) == (2**63, 2**62)
