"""One walk that answers everything: what is there, what may leave first, and what is gone behind its back."""

import itertools
import random
import threading
import time

import pytest

from pykvcache_contract.errors import TransientError
from pykvcache_sidecar.pace import pause_after
from pykvcache_sidecar.policy import Lru
from pykvcache_sidecar.scan import Batch, Scan, Scanner
from pykvcache_storage import inventory
from pykvcache_storage.inventory import Kind, PoolFile, count_bytes


def walked(pool, *, size=1000):
    scan = Scan(str(pool.directory), Batch(Lru(), size), mark=0)
    for _ in scan.steps():
        continue
    return scan


def paths(pool, files):
    return [pool.directory / file.path for file in files]


def test_candidates_come_in_the_order_in_which_they_leave(pool):
    written = [pool.write(number, age_seconds=number * 60) for number in range(50)]
    result = walked(pool).result(0.0)
    assert written[::-1] == paths(pool, result.candidates)
    assert result.is_complete


def test_the_tail_of_a_prefix_leaves_before_its_head(pool):
    old = [pool.write(number, age_seconds=7200, depth=number) for number in range(10)]
    new = [pool.write(100 + number, age_seconds=3600, depth=number) for number in range(10)]
    assert old[::-1] + new[::-1] == paths(pool, walked(pool).result(0.0).candidates)


def test_a_batch_keeps_those_that_leave_first_whatever_the_order_of_the_walk():
    seed = time.time_ns()
    numbers = list(range(1000))
    random.Random(seed).shuffle(numbers)
    batch = Batch(Lru(), 100)
    for number in numbers:
        batch.add(PoolFile(Kind.BLOCK, f"{number}", 1, number * 1_000_000), "f")
    assert [str(number) for number in range(100)] == [file.path for file in batch.in_order()], f"seed {seed}"
    assert not batch.is_complete


def test_a_scan_counts_what_an_inventory_counts(pool):
    pool.fill(30)
    (pool.directory / pool.fingerprint[:12] / "quarantine" / f"r0_{'ab' * 32}_g0.kvb").write_bytes(b"x" * 100)
    (pool.directory / pool.fingerprint[:12] / "tmp" / f"{'a' * 32}-1.tmp").write_bytes(b"x" * 50)
    (pool.directory / pool.fingerprint[:12] / "notes.txt").write_text("not ours")
    result = walked(pool).result(0.0)
    assert result.counted_bytes == count_bytes(str(pool.directory)) == 30 * pool.block_bytes + 150
    assert result.files == 32
    assert [100] == [file.size_bytes for file in result.quarantined]
    assert [30] == [summary.blocks.count for summary in result.summaries]


def test_a_folder_is_passed_when_the_walk_has_left_it(pool):
    for number in range(20):
        pool.write(number)
    files = list(inventory.iterate_blocks(str(pool.directory)))
    scan = Scan(str(pool.directory), Batch(Lru(), 100), mark=0)
    steps = scan.steps()
    assert not any(scan.has_passed(file.path) for file in files)
    for _ in steps:
        continue
    assert all(scan.has_passed(file.path) for file in files)


def test_no_block_is_passed_before_it_is_counted(pool, monkeypatch):
    monkeypatch.setattr("pykvcache_sidecar.scan.STEP_ENTRIES", 1)
    for number in range(50):
        pool.write(number)
    scan = Scan(str(pool.directory), Batch(Lru(), 100), mark=0)
    every = [file.path for file in inventory.iterate_blocks(str(pool.directory))]
    for _ in scan.steps():
        counted = {file.path for file in scan.batch.in_order()}
        assert {path for path in every if scan.has_passed(path)} <= counted


@pytest.fixture
def slow_scan(pool, monkeypatch):
    """A scanner whose scan rests between any two entries, and the event that is set when it has begun."""
    monkeypatch.setattr("pykvcache_sidecar.scan.STEP_ENTRIES", 1)
    monkeypatch.setattr("pykvcache_sidecar.scan.pause_after", lambda _: 3600.0)
    pool.fill(20)
    begun = threading.Event()

    def begin():
        begun.set()
        return Scan(str(pool.directory), Batch(Lru(), 100), mark=0)

    scanner = Scanner(begin)
    yield scanner, begun
    scanner.stop(10.0)


def test_a_scan_that_rests_ends_at_once(slow_scan, wait_for):
    scanner, begun = slow_scan
    scanner.start(hurry=False)
    assert begun.wait(60)
    assert scanner.take() == (False, None)
    scanner.stop(60)
    assert wait_for(lambda: scanner.take()[0])
    assert not scanner.is_running


def test_a_scan_in_a_hurry_does_not_rest(slow_scan, wait_for):
    scanner, _ = slow_scan
    scanner.start(hurry=True)
    results = []
    wait_for(lambda: results.append(scanner.take()) or results[-1][0])
    assert results[-1][1].files == 20
    assert scanner.take() == (False, None), "a result is handed over once"


def test_a_scan_that_fails_has_ended_without_a_result(tmp_path, wait_for):
    scanner = Scanner(lambda: Scan(str(tmp_path / "missing"), Batch(Lru(), 100), mark=0))
    scanner.start(hurry=True)
    results = []
    wait_for(lambda: results.append(scanner.take()) or results[-1][0])
    assert results[-1] == (True, None)
    assert "missing" in scanner.error


def test_a_scan_goes_on_behind_a_folder_that_cannot_be_read(pool, make_pool, monkeypatch):
    written = [pool.write(number) for number in range(20)]
    other = make_pool(pool.directory, {"engine": {"model": "test/other"}})
    name = other.fingerprint[:12]
    for number in range(20):
        other.write(number)
    real = inventory.walk

    def walk(directory, fingerprint):
        yield from itertools.islice(real(directory, fingerprint), 30 if fingerprint == name else None)
        if fingerprint == name:
            raise TransientError("input/output error")

    monkeypatch.setattr("pykvcache_sidecar.scan.walk", walk)
    scan = walked(pool)
    result = scan.result(0.0)
    assert result.unread == {name: "input/output error"}
    assert set(written) < set(paths(pool, result.candidates)), "what was found of the other is used too"
    every = [file.path for file in inventory.iterate_blocks(str(pool.directory))]
    counted = {file.path for file in scan.batch.in_order()}
    assert {path for path in every if scan.has_passed(path)} <= counted


def test_a_scan_takes_at_most_a_fifth_of_a_core():
    for step in (0.001, 0.01, 0.05):
        assert step / (step + pause_after(step)) <= 0.2
