"""The caring loop, round by round, on real pools: what leaves, what stays, and in which order."""

import errno
import fcntl
import os
import subprocess
import time

import pytest

from pykvcache_contract.errors import PyKVCacheError
from pykvcache_contract.metrics import POOL_STATES
from pykvcache_contract.paths import quarantine_path
from pykvcache_sidecar.care_lock import CareLock
from pykvcache_sidecar.evictor import Shift
from pykvcache_sidecar.policy import make_policy
from pykvcache_sidecar.scan import Batch
from pykvcache_storage.inventory import count_bytes, iterate_blocks
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import Reserved

DAY = 86_400.0


def kept(paths):
    return [path.exists() for path in paths]


def on_disk(pool):
    return count_bytes(str(pool.directory))


# ---- eviction ----


def test_a_pool_above_the_high_watermark_is_brought_to_the_low_one_oldest_first(pool, start_care):
    paths = pool.fill(95)
    now = start_care().until(lambda now: sum(now.evicted_blocks.values()))
    assert [True] * 80 + [False] * 15 == kept(paths)
    assert {reason: count for reason, count in now.evicted_blocks.items() if count} == {"capacity": 15}
    assert now.levels.used_bytes == pool.ledger.used_bytes() == on_disk(pool) == 80 * pool.block_bytes
    assert [80] == [row.blocks for row in now.fingerprints]
    assert now.last_evicted_age_seconds >= 80 * 60


def test_a_pool_at_the_high_watermark_is_left_alone(pool, start_care):
    paths = pool.fill(90)
    now = start_care().until_scanned()
    assert all(kept(paths))
    assert now.state == "working"
    assert now.levels.allowed_bytes == pool.ledger.usage().limit_bytes == 100 * pool.block_bytes


def test_a_capacity_that_is_lowered_while_it_works_counts_from_the_next_round(pool, start_care, make_settings):
    paths = pool.fill(60)
    care = start_care()
    care.until_scanned()
    care.care.change(make_settings(capacity_bytes=50 * pool.block_bytes))
    care.until(lambda now: now.evicted_blocks["capacity"] == 20)
    assert [True] * 40 + [False] * 20 == kept(paths)
    assert pool.ledger.usage().limit_bytes == 50 * pool.block_bytes


def test_scrubbing_begins_when_a_rate_is_set_while_it_works(pool, start_care, make_settings):
    pool.fill(3)
    care = start_care()
    assert care.until_scanned().scrubbed_blocks == 0
    care.care.change(make_settings(scrub_bytes_per_second=2**30))
    assert care.until(lambda now: now.scrubbed_blocks >= 3).damaged_blocks == 0


def test_another_scrub_rate_interrupts_no_scan_and_no_scrub(pool, start_care, make_settings):
    pool.fill(3)
    care = start_care(scrub_bytes_per_second=1)
    care.until_scanned()
    keeper, scanned = care.care._keeper, care.book.snapshot().scan
    care.care.change(make_settings(scrub_bytes_per_second=2**30))
    care.care.round()
    assert care.care._keeper is keeper
    assert care.book.snapshot().scan == scanned
    assert keeper._scrubber._bucket._rate == 2**30


def test_what_is_stored_after_a_scan_shows_a_minute_later(pool, start_care):
    pool.fill(10)
    care = start_care()
    before = care.until_scanned()
    care.pass_time(61)
    care.care.round()
    assert not care.care._keeper._scanner.is_running, "nothing was stored since"
    pool.ledger.reserve(pool.block_bytes, capacity_bytes=10**12)
    pool.write(1000)
    now = care.until(lambda now: now.scan.ended_seconds > before.scan.ended_seconds)
    assert [11] == [row.blocks for row in now.fingerprints]


def test_a_store_that_a_quota_refused_makes_room_below_it(pool, start_care):
    paths = pool.fill(60)
    assert pool.ledger.reserve(pool.block_bytes, capacity_bytes=100 * pool.block_bytes) is Reserved.TAKEN
    pool.ledger.refuse(pool.block_bytes)
    capacity = 100 * pool.block_bytes
    now = start_care().until(lambda now: now.evicted_blocks["refused"] and now.levels.allowed_bytes == capacity)
    assert [True] * 48 + [False] * 12 == kept(paths)
    assert now.levels.used_bytes == 48 * pool.block_bytes
    assert pool.ledger.usage().refused_bytes == 0


def refuse_at(pool, blocks: int) -> None:
    """Note a refusal as a writer would at this fill level, and leave the level as it is."""
    used = pool.ledger.used_bytes()
    pool.ledger.recount(lambda: (blocks + 1) * pool.block_bytes)
    pool.ledger.refuse(pool.block_bytes)
    pool.ledger.recount(lambda: used)


def test_room_that_does_not_help_against_refusals_is_made_once(pool, start_care, caplog):
    paths = pool.fill(60)
    care = start_care()
    capacity = 100 * pool.block_bytes
    refuse_at(pool, 60)
    care.until(lambda now: now.evicted_blocks["refused"] and now.levels.allowed_bytes == capacity)
    for blocks, seconds in ((48, 0), (50, 0), (60, 3599), (40, 1), (49, 3600)):
        care.pass_time(seconds)
        refuse_at(pool, blocks)
        for _ in range(3):
            care.care.round()
        assert kept(paths) == [True] * 48 + [False] * 12
        assert pool.ledger.usage().refused_bytes == 0
        assert pool.ledger.usage().limit_bytes == capacity
    warnings = [record.message for record in caplog.records if "nothing more is evicted" in record.message]
    assert len(warnings) == 1
    assert "df -i" in warnings[0]


def test_a_refusal_after_the_room_was_used_makes_room_again(pool, start_care):
    paths = pool.fill(60)
    care = start_care()
    refuse_at(pool, 60)
    care.until(lambda now: now.evicted_blocks["refused"] == 12)
    for number in range(48, 60):
        pool.write(number)
    pool.recount()
    refuse_at(pool, 60)
    care.until(lambda now: now.evicted_blocks["refused"] == 24)
    assert kept(paths) == [True] * 36 + [False] * 12 + [True] * 12


def test_a_refusal_far_up_is_heeded_an_hour_after_one_that_was_not(pool, start_care):
    pool.fill(60)
    care = start_care()
    refuse_at(pool, 60)
    care.until(lambda now: now.evicted_blocks["refused"] == 12)
    refuse_at(pool, 48)
    care.care.round()
    care.pass_time(3600)
    for number in range(48, 60):
        pool.write(number)
    pool.recount()
    refuse_at(pool, 60)
    care.until(lambda now: now.evicted_blocks["refused"] == 24)


def test_within_one_use_tails_leave_before_heads(pool, start_care):
    prefixes = [[pool.write(100 * p + d, age_seconds=3600, depth=d) for d in range(19)] for p in range(5)]
    pool.recount()
    start_care().until(lambda now: sum(now.evicted_blocks.values()))
    for prefix in prefixes:
        there = kept(prefix)
        assert there == sorted(there, reverse=True), "a prefix has no hole"
        assert there == [True] * 16 + [False] * 3


def test_a_block_used_since_the_scan_stays(pool, start_care):
    paths = pool.fill(85)
    care = start_care()
    care.until_scanned()
    os.utime(paths[-1])
    pool.ledger.reserve(10 * pool.block_bytes, capacity_bytes=10**12)
    care.until(lambda now: now.evicted_blocks["capacity"] >= 15)
    assert paths[-1].exists()
    assert not paths[-2].exists()


def test_an_unknown_fill_level_is_counted_and_the_limits_are_set(pool, start_care):
    pool.fill(10)
    (pool.directory / "usage").unlink()
    assert pool.ledger.reserve(1, capacity_bytes=100) is Reserved.UNKNOWN
    care = start_care(write_budget_bytes=5000)
    now = care.until(lambda now: now.levels.write_budget_bytes)
    assert now.levels.used_bytes == 10 * pool.block_bytes
    usage = pool.ledger.usage()
    assert (usage.limit_bytes, usage.write_budget_bytes) == (100 * pool.block_bytes, 5000)
    assert pool.ledger.reserve(5001, capacity_bytes=10**12) is Reserved.WRITE_BUDGET


def test_writers_are_stopped_before_anything_is_evicted(pool, start_care, monkeypatch):
    pool.fill(50)
    care = start_care(min_free_bytes=1000 * pool.block_bytes)
    care.until_scanned()
    limits = []
    monkeypatch.setattr("pykvcache_sidecar.keeper.free_bytes", lambda _: 980 * pool.block_bytes)
    real = care.care._keeper._evictor.evict
    monkeypatch.setattr(
        care.care._keeper._evictor, "evict", lambda *a: limits.append(pool.ledger.usage().limit_bytes) or real(*a)
    )
    care.care.round()
    assert limits == [30 * pool.block_bytes]
    assert pool.ledger.reserve(1, capacity_bytes=10**12) is Reserved.TAKEN
    assert pool.ledger.reserve(7 * pool.block_bytes, capacity_bytes=10**12) is Reserved.FULL
    assert care.book.snapshot().evicted_blocks["min_free"] == 26


def test_what_is_evicted_behind_a_scans_back_is_not_counted(pool, start_care, wait_for, monkeypatch):
    pool.fill(89)
    care = start_care()
    care.until_scanned()
    monkeypatch.setattr("pykvcache_sidecar.scan.STEP_ENTRIES", 1)
    monkeypatch.setattr("pykvcache_sidecar.scan.pause_after", lambda _: 0.001)
    care.pass_time(3601)
    care.care.round()
    scanner = care.care._keeper._scanner
    every = [file.path for file in iterate_blocks(str(pool.directory))]
    wait_for(lambda: scanner._scan is not None and all(map(scanner.has_passed, every)))
    pool.ledger.reserve(3 * pool.block_bytes, capacity_bytes=10**12)
    before = care.book.snapshot().scan.ended_seconds
    now = care.until(lambda now: now.scan.ended_seconds > before and now.evicted_blocks["capacity"])
    pool.ledger.release(3 * pool.block_bytes)
    assert pool.ledger.used_bytes() <= on_disk(pool) + 3 * pool.block_bytes
    assert on_disk(pool) == (89 - now.evicted_blocks["capacity"]) * pool.block_bytes
    assert [89 - now.evicted_blocks["capacity"]] == [row.blocks for row in now.fingerprints]


def test_a_batch_that_runs_out_is_followed_by_another_scan(pool, start_care, monkeypatch):
    monkeypatch.setattr("pykvcache_sidecar.keeper.Batch", lambda policy, _: Batch(policy, 4))
    paths = pool.fill(95)
    start_care().until(lambda now: now.evicted_blocks["capacity"] == 15)
    assert [True] * 80 + [False] * 15 == kept(paths)


def test_an_empty_pool_on_a_full_disk_is_not_scanned_without_end(pool, start_care, monkeypatch):
    monkeypatch.setattr("pykvcache_sidecar.keeper.free_bytes", lambda _: 0)
    pool.ledger.recount(lambda: 5 * pool.block_bytes)
    begun = []
    care = start_care(min_free_bytes=10**9)
    monkeypatch.setattr(
        "pykvcache_sidecar.keeper.make_policy", lambda *args, **names: begun.append(1) or make_policy(*args, **names)
    )
    care.until(lambda now: now.scan.ended_seconds)
    pool.ledger.recount(lambda: 5 * pool.block_bytes)
    for _ in range(50):
        care.care.round()
    assert len(begun) == 1
    care.pass_time(11)
    care.until(lambda _: len(begun) == 2)


def test_a_shift_ends_when_the_process_is_asked_to(pool, start_care):
    pool.fill(95)
    care = start_care()
    care.stopped.set()
    assert Shift(care.stopped).is_over()
    care.care.round()
    assert len(pool.blocks()) == 95


def test_the_cost_aware_policy_keeps_the_block_that_costs_more(pool, start_care, monkeypatch):
    monkeypatch.setattr("pykvcache_sidecar.keeper.read_costs", lambda _: {pool.fingerprint[:12]: 2.0})
    paths = pool.fill(95)
    start_care(policy="cost").until(lambda now: sum(now.evicted_blocks.values()))
    assert [True] * 80 + [False] * 15 == kept(paths)


# ---- what is not evicted, but goes ----


def test_damaged_files_leave_after_their_time_in_quarantine(pool, start_care):
    damaged = pool.directory / quarantine_path(pool.key(1))
    damaged.write_bytes(b"x" * 8192)
    pool.recount()
    care = start_care(quarantine_seconds=DAY)
    care.until_scanned()
    assert damaged.exists()
    care.pass_time(DAY)
    now = care.until(lambda now: now.evicted_blocks["quarantine"])
    assert not damaged.exists()
    assert now.evicted_bytes["quarantine"] == 8192
    assert now.last_evicted_age_seconds == 0.0
    assert pool.ledger.used_bytes() == 0


def test_a_fingerprint_that_nobody_uses_goes_with_its_folder(pool, make_pool, start_care):
    paths = pool.fill(5)
    old = make_pool(pool.directory, {"engine": {"model": "test/old"}})
    for number in range(3):
        old.write(number, age_seconds=20 * DAY)
    folder = pool.directory / old.fingerprint[:12]
    for name in ("config.json", "tmp"):
        os.utime(folder / name, (time.time() - 20 * DAY,) * 2)
    pool.recount()
    now = start_care(unused_seconds=14 * DAY).until(lambda now: now.dropped_fingerprints)
    assert not folder.exists()
    assert all(kept(paths))
    assert now.evicted_blocks["unused"] == 3
    assert [pool.fingerprint[:12]] == [row.directory for row in now.fingerprints]
    assert pool.ledger.used_bytes() == on_disk(pool)


def test_a_fingerprint_without_blocks_whose_vllm_has_just_started_stays(pool, start_care):
    start_care(unused_seconds=14 * DAY).until_scanned()
    assert (pool.directory / pool.fingerprint[:12] / "config.json").exists()


@pytest.mark.parametrize("jump", [-10 * 365 * DAY, 10 * 365 * DAY])
def test_a_clock_that_jumps_removes_nothing(pool, start_care, jump):
    paths = pool.fill(50)
    damaged = pool.directory / quarantine_path(pool.key(1))
    damaged.write_bytes(b"x" * 4096)
    care = start_care(unused_seconds=14 * DAY, quarantine_seconds=3 * DAY)
    care.until_scanned()
    care.wall[0] += jump
    care.steady[0] += 3601.0
    before = care.book.snapshot().scan.ended_seconds
    care.until(lambda now: now.scan.ended_seconds != before)
    assert all(kept([*paths, damaged]))


def test_temporary_files_of_dead_writers_are_swept_and_those_of_living_ones_stay(pool, start_care):
    folder = pool.directory / pool.fingerprint[:12] / "tmp"
    dead, living = folder / f"{'a' * 32}-1.tmp", folder / f"{'b' * 32}-1.tmp"
    lock = folder / f"{'b' * 32}.lock"
    for path in (dead, living, lock):
        path.write_bytes(b"x" * 100)
    with lock.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        now = start_care().until(lambda now: now.swept_files)
    assert now.swept_files == 1
    assert [False, True] == kept([dead, living])


def test_foreign_files_odd_names_and_links_survive_an_eviction_of_everything(pool, tmp_path, start_care):
    outside = tmp_path / "outside"
    outside.mkdir()
    stranger = outside / pool.write(1).name
    stranger.write_bytes(b"x" * pool.block_bytes)
    paths = pool.fill(95)
    folder = paths[0].parent
    odd = os.fsencode(folder) + b"/\xff\xfe.kvb"
    with open(odd, "wb") as file:
        file.write(b"x")
    link = folder / f"{folder.parent.name}{folder.name}{'0' * 59}_g0.kvb"
    link.symlink_to(stranger)
    note = pool.directory / "notes.txt"
    note.write_text("mine")
    care = start_care(capacity_bytes=1)
    care.until(lambda now: now.evicted_blocks["capacity"] == 95)
    assert [path for path in pool.blocks() if path.is_file() and not path.is_symlink()] == [
        path for path in pool.blocks() if os.fsencode(path) == odd
    ]
    assert os.path.exists(odd)
    assert [True] * 3 == kept([stranger, link, note])


def test_a_folder_replaced_by_a_link_leads_nowhere(pool, tmp_path, start_care):
    pool.fill(85)
    care = start_care()
    care.until_scanned()
    inside = pool.directory / pool.fingerprint[:12] / "r0"
    outside = tmp_path / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    pool.ledger.reserve(10 * pool.block_bytes, capacity_bytes=10**12)
    care.until(lambda _: not care.care._keeper._evictor.has_candidates)
    assert sorted(outside.rglob("*")) == before
    assert sum(care.book.snapshot().evicted_blocks.values()) == 0


# ---- who works, and where ----


def test_of_two_the_first_works_and_the_second_takes_over(pool, start_care):
    pool.fill(95)
    first, second = start_care(), start_care()
    assert not first.care.round()
    second.care.round()
    now = second.book.snapshot()
    assert (now.state, now.is_active, now.is_ready) == ("standby", False, True)
    assert now.levels.used_bytes is not None
    first.care.rest()
    first.care._watch.leave()
    second.care.round()
    assert second.book.snapshot().is_active


def test_a_lock_file_that_was_removed_is_taken_anew(pool, start_care):
    care = start_care()
    care.care.round()
    (pool.directory / "care.lock").unlink()
    rival = start_care()
    rival.care.round()
    care.care.round()
    assert [rival.book.snapshot().state, care.book.snapshot().state] == ["working", "standby"]


def test_no_lock_file_is_made_in_a_mount_point_whose_disk_has_just_gone(tmp_path):
    with pytest.raises(PyKVCacheError):
        CareLock(str(tmp_path)).take()
    assert list(tmp_path.iterdir()) == []


def test_where_flock_is_unknown_it_works_and_says_so(pool, start_care, monkeypatch):
    def no_flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    paths = pool.fill(95)
    monkeypatch.setattr(fcntl, "flock", no_flock)
    now = start_care().until(lambda now: sum(now.evicted_blocks.values()))
    assert now.state == "working"
    assert "no flock" in now.reason
    assert not paths[-1].exists()


def test_a_pool_that_was_emptied_is_prepared_anew(pool, start_care):
    pool.fill(20)
    care = start_care()
    uid = care.until_scanned().uid
    subprocess.run(["find", pool.directory, "-mindepth", "1", "-delete"], check=True)
    now = care.until(lambda now: now.uid != uid and now.scan.ended_seconds)
    assert now.state == "working"
    assert now.fingerprints == ()
    assert now.uid == open_pool(str(pool.directory), create=False).uid


def test_a_pool_that_somebody_else_prepared_anew_is_taken_over(pool, start_care):
    care = start_care()
    uid = care.until_scanned().uid
    care.wall[0] = time.time()
    care.care.round()
    (pool.directory / "pool.json").unlink()
    pool.prepare()
    assert care.until(lambda now: now.uid != uid).state == "working"


def test_another_pool_in_its_place_is_left_alone_until_the_former_is_back(pool, make_pool, tmp_path, start_care):
    other = make_pool(tmp_path / "other")
    other.fill(100)
    care = start_care()
    uid = care.until_scanned().uid
    care.pass_time(3600)
    care.care.round()
    aside = tmp_path / "aside"
    pool.directory.rename(aside)
    other.directory.rename(pool.directory)
    before = sorted(pool.directory.rglob("*"))
    care.care.round()
    now = care.book.snapshot()
    assert (now.state, now.is_ready, now.uid) == ("replaced", False, uid)
    assert now.reason
    assert sorted(pool.directory.rglob("*")) == before
    pool.directory.rename(tmp_path / "other")
    care.care.round()
    assert care.book.snapshot().state == "missing"
    aside.rename(pool.directory)
    care.care.round()
    assert care.book.snapshot().state == "working"


def test_every_state_is_one_of_the_contract(pool, start_care):
    assert {"starting", "working", "standby", "read_only", "missing", "unmounted", "replaced", "refused"} == {
        *POOL_STATES
    }
    assert start_care().book.snapshot().state in POOL_STATES


def test_a_round_that_fails_is_noted_and_the_next_one_heals_it(pool, start_care, monkeypatch):
    care = start_care()
    care.care._try_round()
    with monkeypatch.context() as broken:
        broken.setattr("pykvcache_sidecar.keeper.Keeper.work", lambda _: 1 / 0)
        care.pass_time(60)
        assert not care.care._try_round()
        now = care.book.snapshot()
        assert (now.tick_age_seconds, now.last_error) == (60.0, "division by zero")
    care.care._try_round()
    now = care.book.snapshot()
    assert (now.tick_age_seconds, now.last_error) == (0.0, "")
