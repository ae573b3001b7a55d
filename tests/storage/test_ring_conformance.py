"""What every ring does alike: io_uring, threads and the simulated disk, on a disk and on tmpfs, direct and buffered."""

import gc
import os
import random
import re
import signal
import threading
import time
from errno import EBADF, EEXIST, EINVAL, EISDIR, ENOENT, ENOTDIR
from pathlib import Path

import pytest

from pykvcache_storage.reactor.operations import (
    Close,
    Link,
    MakeDirectory,
    Open,
    Read,
    Rename,
    Sync,
    Touch,
    Unlink,
    Write,
)

PAGE = 4096
ODD_NAMES = ["é–名前", os.fsdecode(b"latin-\xe9\xff\x80"), "with space\nand newline", "x" * 255]


def test_content_written_is_content_read(disk, slots):
    content = random.Random(1).randbytes(8 * PAGE)
    disk.write_file("a", slots[0], content)
    assert disk.read_file("a", slots[1]) == content


def test_a_read_at_the_end_of_the_file_is_short_and_beyond_it_empty(disk, slots):
    path = disk.write_file("a", slots[0], bytes(3 * PAGE))
    descriptor = disk.do(Open(path, os.O_RDONLY | disk.flags))
    assert disk.do(Read(descriptor, slots[1].address, 4 * PAGE, 2 * PAGE)) == PAGE
    assert disk.do(Read(descriptor, slots[1].address, PAGE, 3 * PAGE)) == 0
    assert disk.do(Close(descriptor)) == 0


def test_a_block_of_28_mib_survives_the_round_trip_byte_for_byte(disk, big_slots):
    source, target = big_slots
    source.data[:] = random.Random(2).randbytes(len(source.data))
    descriptor = disk.open("block")
    assert disk.do(Write(descriptor, source.address, len(source.data), 0)) == len(source.data)
    assert disk.do(Sync(descriptor)) == 0
    assert disk.do(Read(descriptor, target.address, len(target.data), 0)) == len(target.data)
    assert disk.do(Close(descriptor)) == 0
    assert source.data == target.data


def test_64_operations_at_once_complete_once_each_with_their_own_result(disk, slots):
    pages = [bytes([index]) * PAGE for index in range(64)]
    slots[0].data[: 64 * PAGE] = b"".join(pages)
    descriptor = disk.open("a")
    order = random.Random(3).sample(range(64), 64)
    writes = [Write(descriptor, slots[0].address + index * PAGE, PAGE, index * PAGE) for index in order]
    assert disk.do_all(writes) == [PAGE] * 64
    reads = [Read(descriptor, slots[1].address + index * PAGE, PAGE, index * PAGE) for index in order]
    assert disk.do_all([*reads, Read(-1, slots[2].address, PAGE, 0)]) == [PAGE] * 64 + [-EBADF]
    assert slots[1].data[: 64 * PAGE] == b"".join(pages)
    assert disk.do(Close(descriptor)) == 0


def test_far_more_operations_than_queue_entries_all_complete(disk, slots):
    disk.write_file("a", slots[0], bytes(PAGE))
    descriptor = disk.open("a")
    reads = [Read(descriptor, slots[1].address, PAGE, 0)] * 2000
    assert disk.do_all(reads) == [PAGE] * 2000
    assert disk.do(Close(descriptor)) == 0


def test_paths_may_be_freed_as_soon_as_they_are_submitted(disk):
    for index in range(100):
        disk.ring.submit(MakeDirectory(disk.path("".join(["folder", str(index)]))), index)
    gc.collect()
    overwrite = [bytes([65]) * length for length in range(20, 120) for _ in range(20)]
    results = []
    while len(results) < 100:
        results += [result for _, result in disk.ring.wait(100)]
    del overwrite
    assert results == [0] * 100
    assert disk.do_all([MakeDirectory(disk.path(f"folder{index}")) for index in range(100)]) == [-EEXIST] * 100


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_of_any_bytes_work_in_every_operation(disk, slots, name):
    disk.write_file(name, slots[0], bytes(PAGE))
    path = disk.path(name)
    assert disk.do(Touch(path, 10**18)) == 0
    assert disk.do(Link(path, disk.path("other"))) == 0
    assert disk.do(Unlink(path)) == 0
    assert disk.do(Rename(disk.path("other"), path)) == 0
    if not disk.simulated:
        assert name in os.listdir(disk.folder)
    assert disk.do(Unlink(path)) == 0
    assert disk.do(MakeDirectory(path)) == 0


def test_a_path_with_a_nul_is_refused_instead_of_cut(disk, slots):
    disk.write_file("a", slots[0], bytes(PAGE))
    assert disk.do(Unlink(disk.path("a\0b"))) == -EINVAL
    assert disk.do(Rename(disk.path("a"), disk.path("b\0c"))) == -EINVAL
    assert disk.read_file("a", slots[1]) == bytes(PAGE)


def test_open_reports_what_is_wrong_with_the_path(disk, slots):
    path = disk.write_file("a", slots[0], bytes(PAGE))
    assert disk.do(Open(disk.path("missing"), os.O_RDONLY)) == -ENOENT
    assert disk.do(Open(disk.path("missing/a"), os.O_RDWR | os.O_CREAT)) == -ENOENT
    assert disk.do(Open(f"{path}/a", os.O_RDONLY)) == -ENOTDIR
    assert disk.do(Open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)) == -EEXIST
    assert disk.do(Open(disk.folder, os.O_RDWR)) == -EISDIR


def test_opening_with_truncate_empties_the_file(disk, slots):
    path = disk.write_file("a", slots[0], bytes(PAGE))
    assert disk.do(Close(disk.do(Open(path, os.O_RDWR | os.O_TRUNC)))) == 0
    assert disk.read_file("a", slots[1]) == b""


def test_a_directory_can_be_opened_and_synced(disk):
    descriptor = disk.do(Open(disk.folder, os.O_RDONLY | os.O_DIRECTORY))
    assert disk.do(Sync(descriptor)) == 0
    assert disk.do(Close(descriptor)) == 0


def test_a_descriptor_that_is_not_open_is_ebadf(disk, slots):
    descriptor = disk.open("a")
    assert disk.do(Close(descriptor)) == 0
    address = slots[0].address
    operations = [Read(-1, address, PAGE, 0), Write(-1, address, PAGE, 0), Sync(-1), Close(-1), Close(descriptor)]
    assert disk.do_all(operations) == [-EBADF] * 5


def test_the_access_mode_of_a_descriptor_is_kept(disk, slots):
    disk.write_file("a", slots[0], bytes(PAGE))
    reader, writer = disk.open("a", os.O_RDONLY), disk.open("a", os.O_WRONLY)
    assert disk.do(Write(reader, slots[0].address, PAGE, 0)) == -EBADF
    assert disk.do(Read(writer, slots[0].address, PAGE, 0)) == -EBADF
    assert disk.do_all([Close(reader), Close(writer)]) == [0, 0]


def test_a_misaligned_direct_read_is_judged_by_the_filesystem(disk, slots):
    disk.write_file("a", slots[0], bytes(2 * PAGE))
    descriptor = disk.open("a", os.O_RDONLY)
    misaligned = Read(descriptor, slots[1].address, 100, 0)
    expected = -EINVAL if disk.simulated else disk.system_result(misaligned)
    assert disk.do(misaligned) == expected
    assert disk.do(Close(descriptor)) == 0


def test_a_negative_offset_is_refused_instead_of_meaning_the_current_position(disk, slots):
    descriptor = disk.open("a")
    assert disk.do(Read(descriptor, slots[0].address, PAGE, -1)) == -EINVAL
    assert disk.do(Write(descriptor, slots[0].address, PAGE, -1)) == -EINVAL
    assert disk.do(Close(descriptor)) == 0


def test_a_link_never_replaces_and_needs_its_source(disk, slots):
    path = disk.write_file("a", slots[0], b"a" * PAGE)
    other = disk.write_file("b", slots[0], b"b" * PAGE)
    assert disk.do(Link(path, other)) == -EEXIST
    assert disk.read_file("b", slots[1]) == b"b" * PAGE
    assert disk.do(Link(disk.path("missing"), disk.path("c"))) == -ENOENT
    assert disk.do(Link(path, disk.path("missing/c"))) == -ENOENT
    assert disk.do(Link(path, disk.path("c"))) == 0
    assert disk.do(Unlink(path)) == 0
    assert disk.read_file("c", slots[1]) == b"a" * PAGE


def test_a_rename_replaces_only_when_asked_to(disk, slots):
    path = disk.write_file("a", slots[0], b"a" * PAGE)
    other = disk.write_file("b", slots[0], b"b" * PAGE)
    assert disk.do(Rename(path, other)) == -EEXIST
    assert disk.read_file("b", slots[1]) == b"b" * PAGE
    assert disk.do(Rename(path, other, replace=True)) == 0
    assert disk.read_file("b", slots[1]) == b"a" * PAGE
    assert disk.do(Rename(path, disk.path("c"))) == -ENOENT
    assert disk.do(Rename(other, disk.path("c"))) == 0
    assert disk.do(Unlink(other)) == -ENOENT


def test_a_directory_is_created_once(disk):
    assert disk.do(MakeDirectory(disk.path("d"))) == 0
    assert disk.do(MakeDirectory(disk.path("d"))) == -EEXIST
    assert disk.do(MakeDirectory(disk.path("missing/d"))) == -ENOENT
    assert disk.do(Unlink(disk.path("d"))) == -EISDIR


def test_an_unlinked_file_is_gone_but_stays_readable_through_its_descriptor(disk, slots):
    path = disk.write_file("a", slots[0], b"a" * PAGE)
    descriptor = disk.open("a", os.O_RDONLY)
    assert disk.do(Unlink(path)) == 0
    assert disk.do(Unlink(path)) == -ENOENT
    assert disk.do(Read(descriptor, slots[1].address, PAGE, 0)) == PAGE
    assert disk.do(Close(descriptor)) == 0


@pytest.mark.parametrize("modified_ns", [0, 119_999_997_000, 1_800_000_000_000_000_001])
def test_touch_sets_the_modification_time_to_the_nanosecond(disk, slots, modified_ns):
    path = disk.write_file("a", slots[0], bytes(PAGE))
    assert disk.do(Touch(path, modified_ns)) == 0
    assert disk.do(Touch(disk.path("missing"), modified_ns)) == -ENOENT
    assert disk.modified_ns(path) == modified_ns


def test_many_touches_and_reads_together_complete_once_each(disk, slots):
    path = disk.write_file("a", slots[0], bytes(PAGE))
    descriptor = disk.open("a", os.O_RDONLY)
    operations = [Touch(path, 10**18), Read(descriptor, slots[1].address, PAGE, 0)] * 50
    assert disk.do_all(operations) == [0, PAGE] * 50
    assert disk.do(Close(descriptor)) == 0


def test_a_wake_before_the_wait_ends_it(disk):
    disk.ring.wake()
    assert disk.ring.wait(None) == []


def test_a_wake_during_the_wait_ends_it(disk):
    timer = threading.Timer(0.05, disk.ring.wake)
    timer.start()
    assert disk.ring.wait(None) == []
    timer.join()


def test_many_wakes_from_many_threads_lose_nothing_and_leave_nothing(disk):
    threads = [threading.Thread(target=lambda: [disk.ring.wake() for _ in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert disk.ring.wait(None) == []
    for thread in threads:
        thread.join()
    disk.ring.wait(0)
    disk.ring.wait(0)
    started = time.monotonic()
    assert disk.ring.wait(0.02) == []
    assert time.monotonic() - started >= 0.02


def test_a_wake_after_close_does_nothing(disk):
    disk.ring.close()
    disk.ring.wake()


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_wait_without_operations_lasts_for_its_timeout(disk, seconds):
    lasted = []
    for _ in range(3):
        started = time.monotonic()
        assert disk.ring.wait(seconds) == []
        lasted.append(time.monotonic() - started)
    assert seconds <= min(lasted) < seconds + 1


def test_a_signal_runs_its_handler_and_does_not_end_the_wait(disk):
    disk.ring.wait(0)
    seen = []
    previous = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    main = threading.main_thread().ident
    timers = [threading.Timer(0.02 * n, signal.pthread_kill, (main, signal.SIGUSR1)) for n in (1, 2)]
    timers.append(threading.Timer(0.1, disk.ring.wake))
    for timer in timers:
        timer.start()
    assert disk.ring.wait(None) == []
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, previous)
    assert seen


def activity(threads):
    """Return how often these threads went to sleep, and for how long they had a processor.

    Not the time of the whole process, which others may use; and a machine that is stolen from counts what it lacks too.
    """
    sleeps = 0
    for thread in threads:
        text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        sleeps += int(re.search(r"^voluntary_ctxt_switches:\s+(\d+)", text, re.MULTILINE)[1])
    return sleeps, sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) for thread in threads)


@pytest.mark.slow
def test_an_idle_ring_sleeps_and_is_not_woken_again_and_again(disk):
    ours = [t for t in threading.enumerate() if t is threading.main_thread() or t.name.startswith("pykvcache-io-")]
    timer = threading.Timer(2, disk.ring.wake)
    timer.start()
    wall, (sleeps, seconds) = time.monotonic(), activity(ours)
    assert disk.ring.wait(None) == []
    sleeps_after, seconds_after = activity(ours)
    used = (seconds_after - seconds) / (time.monotonic() - wall)
    timer.join()
    assert sleeps_after - sleeps < 20
    assert used < 0.01


def test_the_ring_may_be_made_on_one_thread_and_used_on_another(disk, slots):
    done = []
    thread = threading.Thread(target=lambda: done.append(disk.write_file("a", slots[0], bytes(PAGE))))
    thread.start()
    thread.join()
    assert done == [disk.path("a")]
