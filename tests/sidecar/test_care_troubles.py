"""What goes wrong in a part of the pool: the rest is cared for, and the status says what to do."""

import os
import subprocess
from pathlib import Path

import pytest

from pykvcache_contract.errors import CapacityError, TransientError
from pykvcache_contract.paths import quarantine_path
from pykvcache_sidecar import scan
from pykvcache_sidecar.status import status_document
from pykvcache_storage.inventory import count_bytes, iterate_blocks
from pykvcache_storage.removal import Removed, Remover
from pykvcache_storage.usage import UsageLedger

DAY = 86_400.0


def reason(care) -> str:
    return status_document(care.book.snapshot(), care.book.settings)["reason"]


def warnings(caplog, words: str) -> list[str]:
    return [record.message for record in caplog.records if words in record.message]


@pytest.fixture
def bad_folder(pool, make_pool, monkeypatch):
    """Another model's folder of 20 blocks; half of it cannot be read while the returned list holds something."""
    other = make_pool(pool.directory, {"engine": {"model": "test/other"}})
    for number in range(20):
        other.write(number, age_seconds=DAY + 60.0 * number)
    other.recount()
    name = other.fingerprint[:12]
    broken = ["input/output error"]
    real = scan.walk

    def walk(directory, fingerprint):
        for number, file in enumerate(real(directory, fingerprint)):
            if fingerprint == name and broken and number == 30:
                raise TransientError(f"scan {directory}/{fingerprint}: {broken[0]}")
            yield file

    monkeypatch.setattr(scan, "walk", walk)
    return name, broken


# ---- scans that miss something ----


def test_a_folder_that_cannot_be_read_does_not_end_eviction(pool, bad_folder, start_care, caplog):
    name, broken = bad_folder
    pool.fill(75)
    damaged = pool.directory / quarantine_path(pool.key(1))
    damaged.write_bytes(b"x" * 4096)
    os.utime(damaged, (1, 1))
    pool.recount()
    before = pool.ledger.usage().recount_seconds
    care = start_care()
    now = care.until(lambda now: now.evicted_blocks["capacity"] >= 15)
    assert now.state == "working"
    assert now.evicted_blocks["quarantine"] == 1
    assert pool.ledger.used_bytes() == count_bytes(str(pool.directory)), "a count of a part is not used"
    assert pool.ledger.usage().recount_seconds == before
    for text in (now.last_error, reason(care)):
        assert all(word in text for word in (name, "input/output error", "chown -R"))
    for _ in range(3):
        care.until_scanned()
    assert len(warnings(caplog, "cannot be read")) == 1
    broken.clear()
    care.until_scanned()
    assert (care.book.snapshot().last_error, reason(care)) == ("", "")
    assert pool.ledger.usage().recount_seconds > before
    assert pool.ledger.used_bytes() == count_bytes(str(pool.directory))


def test_a_part_that_cannot_be_read_is_looked_at_again_soon(bad_folder, start_care):
    _, broken = bad_folder
    care = start_care()
    care.until(lambda now: now.last_error)
    broken.clear()
    care.pass_time(61)
    care.until(lambda now: not now.last_error)


def test_a_count_of_a_part_does_not_make_an_unknown_fill_level_known(pool, bad_folder, start_care):
    _, broken = bad_folder
    (pool.directory / "usage").unlink()
    care = start_care()
    care.until_scanned()
    assert pool.ledger.usage() is None
    broken.clear()
    care.pass_time(61)
    care.until(lambda now: now.levels.used_bytes == count_bytes(str(pool.directory)))


def test_a_model_of_which_only_a_part_was_seen_is_not_taken_for_unused(pool, bad_folder, start_care):
    name, broken = bad_folder
    for item in ("config.json", "tmp"):
        os.utime(pool.directory / name / item, (1, 1))
    care = start_care(unused_seconds=DAY / 2)
    for _ in range(3):
        care.until_scanned()
    assert len(list(iterate_blocks(str(pool.directory), name))) == 20
    broken.clear()
    care.pass_time(61)
    assert care.until(lambda now: now.dropped_fingerprints).evicted_blocks["unused"] == 20


def test_a_scan_that_fails_as_a_whole_shows_until_one_succeeds(pool, start_care, monkeypatch, caplog):
    def fail(_):
        raise TransientError("list the pool: input/output error")

    pool.fill(10)
    care = start_care()
    with monkeypatch.context() as broken:
        broken.setattr(scan, "fingerprint_directories", fail)
        now = care.until(lambda now: now.last_error)
        assert (now.state, "input/output error" in reason(care)) == ("working", True)
        for _ in range(3):
            care.pass_time(11)
            care.care.round()
            care.until(lambda _: not care.care._keeper._scanner.is_running)
            assert "input/output error" in care.book.snapshot().last_error
    assert len(warnings(caplog, "could not be scanned")) == 1
    care.pass_time(11)
    assert care.until(lambda now: not now.last_error).scan.files == 10


@pytest.mark.slow
def test_a_folder_of_another_user_does_not_end_eviction(make_pool, open_folder, start_sidecar):
    pool = make_pool(open_folder / "pool")
    other = make_pool(pool.directory, {"engine": {"model": "test/other"}})
    for number in range(20):
        other.write(number)
    pool.fill(75)
    subprocess.run(["chown", "-R", "65534", pool.directory], check=True)
    closed = pool.directory / other.fingerprint[:12] / "r0"
    os.chown(closed, 0, 0)
    os.chmod(closed, 0o700)
    sidecar = start_sidecar(pool.directory, "--capacity", 100 * pool.block_bytes, user=65534)
    status = sidecar.wait_status(lambda status: status["evicted"]["blocks"] == 15)
    assert status["state"] == "working"
    for word in (other.fingerprint[:12], "Permission denied", "chown -R 65534"):
        assert word in status["reason"]
    os.chown(closed, 65534, 65534)


# ---- files that cannot be removed ----


def test_files_that_cannot_be_removed_are_told_once_with_a_remedy(pool, start_care, monkeypatch, caplog):
    pool.fill(95)
    care = start_care()
    with monkeypatch.context() as broken:
        broken.setattr(Remover, "remove", lambda *_: Removed.FAILED)
        now = care.until(lambda now: now.failed_removals >= 95)
        assert "chown -R" in now.last_error
        care.pass_time(11)
        now = care.until(lambda now: now.failed_removals >= 190)
        assert "cannot be removed" in reason(care)
    assert len(warnings(caplog, "cannot be removed")) == 1
    assert len(pool.blocks()) == 95
    care.pass_time(11)
    now = care.until(lambda now: now.evicted_blocks["capacity"] == 15)
    assert (now.last_error, reason(care)) == ("", "")


def test_one_file_that_cannot_be_removed_among_others_is_only_counted(pool, start_care, monkeypatch):
    pool.fill(95)
    care = start_care()
    real = Remover.remove
    oldest = pool.key(94).block_hash.hex()

    def remove(remover, file):
        return Removed.FAILED if file.block_hash == oldest else real(remover, file)

    monkeypatch.setattr(Remover, "remove", remove)
    now = care.until(lambda now: now.evicted_blocks["capacity"] == 15)
    assert (now.failed_removals, now.last_error) == (1, "")


def test_the_complaint_ends_when_nothing_needs_to_leave_any_more(pool, start_care, monkeypatch):
    damaged = pool.directory / quarantine_path(pool.key(1))
    damaged.write_bytes(b"x" * 4096)
    os.utime(damaged, (1, 1))
    care = start_care()
    monkeypatch.setattr(Remover, "remove", lambda *_: Removed.FAILED)
    assert care.until(lambda now: now.last_error).failed_removals == 1
    care.care.round()
    assert care.book.snapshot().last_error, "no other scan has looked"
    damaged.unlink()
    care.pass_time(61)
    care.until(lambda now: not now.last_error)


@pytest.mark.slow
def test_blocks_of_another_user_are_told_with_a_remedy(make_pool, open_folder, start_sidecar):
    pool = make_pool(open_folder / "pool")
    pool.fill(95)
    for path in (pool.directory, pool.directory / "usage"):
        os.chown(path, 65534, 65534)
    sidecar = start_sidecar(pool.directory, "--capacity", 100 * pool.block_bytes, user=65534)
    status = sidecar.wait_status(lambda status: "cannot be removed" in status["reason"])
    assert "chown -R 65534" in status["reason"]
    pool.give_to(65534)
    sidecar.wait_status(lambda status: status["evicted"]["blocks"] == 15 and not status["reason"])


# ---- quarantine and room ----


def quarantine(pool, count: int) -> list[Path]:
    """Quarantine as many files of a block's size, the first the oldest."""
    paths = [pool.directory / quarantine_path(pool.key(1000 + number)) for number in range(count)]
    for path in paths:
        path.write_bytes(b"x" * pool.block_bytes)
    for number, path in enumerate(reversed(paths)):
        os.utime(path, (path.stat().st_mtime - 60.0 * (number + 1),) * 2)
    return paths


def test_quarantined_files_leave_before_any_healthy_block_when_room_is_needed(pool, start_care):
    damaged = quarantine(pool, 10)
    paths = pool.fill(85)
    now = start_care(quarantine_seconds=DAY).until(lambda now: now.evicted_blocks["capacity"])
    assert (now.evicted_blocks["quarantine"], now.evicted_blocks["capacity"]) == (10, 5)
    assert [path for path in damaged if path.exists()] == []
    assert [True] * 80 + [False] * 5 == [path.exists() for path in paths]
    assert pool.ledger.used_bytes() == count_bytes(str(pool.directory))


def test_no_more_quarantined_files_leave_than_room_is_needed(pool, start_care):
    damaged = quarantine(pool, 25)
    paths = pool.fill(70)
    now = start_care(quarantine_seconds=DAY).until(lambda now: now.evicted_blocks["quarantine"])
    assert (now.evicted_blocks["quarantine"], now.evicted_blocks["capacity"]) == (15, 0)
    assert [False] * 15 + [True] * 10 == [path.exists() for path in damaged]
    assert all(path.exists() for path in paths)


def test_quarantined_files_that_leave_behind_a_scans_back_are_not_counted(pool, start_care, wait_for, monkeypatch):
    damaged = quarantine(pool, 12)
    paths = pool.fill(77)
    care = start_care(quarantine_seconds=DAY)
    care.until_scanned()
    monkeypatch.setattr("pykvcache_sidecar.scan.STEP_ENTRIES", 1)
    monkeypatch.setattr("pykvcache_sidecar.scan.pause_after", lambda _: 0.001)
    care.pass_time(3601)
    care.care.round()
    scanner = care.care._keeper._scanner
    every = [str(path.relative_to(pool.directory)) for path in (*damaged, *paths)]
    wait_for(lambda: scanner._scan is not None and all(map(scanner.has_passed, every)))
    pool.ledger.reserve(3 * pool.block_bytes, capacity_bytes=10**12)
    before = care.book.snapshot().scan.ended_seconds
    care.until(lambda now: now.evicted_blocks["quarantine"] and now.scan.ended_seconds > before)
    pool.ledger.release(3 * pool.block_bytes)
    assert pool.ledger.used_bytes() <= count_bytes(str(pool.directory)) + 3 * pool.block_bytes
    assert [77] == [row.blocks for row in care.book.snapshot().fingerprints]


# ---- levels that nobody knows ----


def test_levels_are_unknown_while_the_pool_is_away(pool, tmp_path, start_care):
    pool.fill(5)
    care = start_care(write_budget_bytes=10**6)
    assert care.book.snapshot().levels.allowed_bytes is None, "nobody has looked yet"
    assert care.until_scanned().levels.write_budget_bytes == 10**6
    pool.directory.rename(tmp_path / "aside")
    care.care.round()
    document = status_document(care.book.snapshot(), care.book.settings)
    assert document["state"] == "missing"
    assert [document[name] for name in ("used_bytes", "allowed_bytes", "free_bytes")] == [None] * 3
    assert document["write_budget"] == {"bytes_per_day": None, "written_bytes": None}
    (tmp_path / "aside").rename(pool.directory)


def test_one_that_stands_by_knows_no_limit_that_the_ledger_does_not_hold(pool, start_care):
    pool.fill(5)
    first, second = start_care(), start_care()
    first.care.round()
    pool.ledger.set_limits(capacity_bytes=0, write_budget_bytes=0)
    second.care.round()
    levels = second.book.snapshot().levels
    assert (levels.allowed_bytes, levels.write_budget_bytes) == (None, 0)
    assert levels.used_bytes == 5 * pool.block_bytes
    (pool.directory / "usage").unlink()
    second.care.round()
    levels = second.book.snapshot().levels
    assert (levels.allowed_bytes, levels.write_budget_bytes) == (None, None)
    assert levels.free_bytes


def test_a_full_disk_on_which_not_even_the_limits_can_be_written_is_emptied_all_the_same(pool, start_care, monkeypatch):
    pool.fill(95)

    def refuse(*_: object, **__: object) -> None:
        raise CapacityError("no room for a byte")

    monkeypatch.setattr(UsageLedger, "set_limits", refuse)
    care = start_care()
    care.until(lambda now: now.evicted_blocks["capacity"] == 15)


def test_a_filesystem_that_frees_late_is_given_time_before_more_is_evicted(pool, start_care, monkeypatch):
    pool.fill(50)
    monkeypatch.setattr("pykvcache_sidecar.keeper.free_bytes", lambda _: 0)
    care = start_care(min_free_bytes=5 * pool.block_bytes)
    care.until(lambda now: now.evicted_blocks["min_free"])
    for _ in range(5):
        care.care.round()
    assert care.book.snapshot().evicted_blocks["min_free"] == 14, "45 blocks may be used, and 80 % of that stay"
    care.pass_time(31.0)
    care.until(lambda now: now.evicted_blocks["min_free"] > 14)
