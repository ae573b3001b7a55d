"""Publishing one block through the reactor: undisturbed, with a fault and cut at every step, and in a race."""

import contextlib
import errno
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from pykvcache_contract.errors import (
    BlockMissingError,
    CapacityError,
    CorruptBlockError,
    PyKVCacheError,
    ReadOnlyError,
    TransientError,
)
from pykvcache_contract.header import HEADER_SIZE_BYTES
from pykvcache_contract.paths import TEMPORARY_FILE, block_path, fingerprint_directory, quarantine_path, temporary_path
from pykvcache_contract.recency import recency_ns
from pykvcache_storage.block import FileAccess, Quarantined, quarantine, read_block
from pykvcache_storage.checksum import checksum
from pykvcache_storage.probe import PublishMethod
from pykvcache_storage.publish import Published, publish_block
from pykvcache_storage.reactor.operations import (
    Close,
    Link,
    MakeDirectory,
    Open,
    Rename,
    Ring,
    Sync,
    Touch,
    Unlink,
    Write,
)
from pykvcache_storage.reactor.reactor import MAX_RETRIES
from pykvcache_storage.testing.disk import SimulatedDisk

WRITER = "ab" * 16
MODIFIED_NS = recency_ns(1_800_000_000.0, 41)
ERRORS = {
    errno.ENOSPC: CapacityError,
    errno.EDQUOT: CapacityError,
    errno.EIO: TransientError,
    errno.EROFS: ReadOnlyError,
}
each_method = pytest.mark.parametrize("method", PublishMethod, ids=lambda method: method.value)
each_fsync = pytest.mark.parametrize("fsync", [False, True], ids=["lazy", "fsync"])


@dataclass
class Pool:
    """A pool folder on some ring, with functions that publish and read one block on a reactor."""

    ring: Ring
    folder: str
    direct: bool
    key: object
    run: object

    @property
    def target(self) -> str:
        return f"{self.folder}/{block_path(self.key)}"

    def temporary(self, number: int = 0) -> str:
        return f"{self.folder}/{temporary_path(self.key.fingerprint, WRITER, number)}"

    def prepare(self, make_directory) -> None:
        fingerprint = f"{self.folder}/{fingerprint_directory(self.key.fingerprint)}"
        for path in (fingerprint, f"{fingerprint}/tmp", f"{fingerprint}/quarantine"):
            make_directory(path)

    def publish(self, content: bytes, *, method=PublishMethod.LINK, fsync=False, number=0) -> Published:
        def task(slot):
            slot.data[:] = content
            return publish_block(
                slot=slot,
                temporary=self.temporary(number),
                target=self.target,
                modified_ns=MODIFIED_NS,
                access=FileAccess(self.direct),
                method=method,
                fsync=fsync,
            )

        return self.run(self.ring, task)

    def read(self) -> bytes:
        """Return a block that passes every check of a load."""

        def task(slot):
            header = yield from read_block(self.target, key=self.key, slot=slot, access=FileAccess(self.direct))
            payload = bytes(slot.data[HEADER_SIZE_BYTES:])
            if checksum(payload) != header.checksum:
                raise CorruptBlockError("payload")
            return bytes(slot.data)

        return self.run(self.ring, task)

    def quarantine(self) -> Quarantined:
        target = f"{self.folder}/{quarantine_path(self.key)}"
        return self.run(self.ring, lambda slot: quarantine(self.target, target))


@pytest.fixture
def pool(disk, block_key, run) -> Pool:
    """A pool on every ring."""
    pool = Pool(disk.ring, disk.folder, bool(disk.flags), block_key, run)
    if disk.simulated:
        pool.prepare(lambda path: disk.ring.files.perform(MakeDirectory(path)))
    else:
        pool.prepare(os.mkdir)
    return pool


@pytest.fixture
def simulate(block_key, run):
    """Return a function that makes a pool on a fresh simulated disk, or on the one given."""

    def make(seed: int = 1, *, ring: SimulatedDisk | None = None) -> Pool:
        fresh = ring is None
        ring = ring or SimulatedDisk(seed)
        pool = Pool(ring, ring.root, True, block_key, run)
        if fresh:
            pool.prepare(lambda path: ring.files.perform(MakeDirectory(path)))
        return pool

    return make


def names_in(pool: Pool) -> list[str]:
    """Return all files of a pool, relative to it."""
    if isinstance(pool.ring, SimulatedDisk):
        return [os.path.relpath(path, pool.folder) for path in pool.ring.files.file_names()]
    return sorted(str(path.relative_to(pool.folder)) for path in Path(pool.folder).rglob("*") if path.is_file())


def without_probe(names: list[str]) -> list[str]:
    return [name for name in names if name != "probe"]


# ---- undisturbed ----


@each_fsync
@each_method
def test_a_published_block_is_read_back_byte_for_byte_and_nothing_else_is_left(pool, make_block, method, fsync):
    content = make_block()
    assert pool.publish(content, method=method, fsync=fsync) is Published.FIRST
    assert pool.read() == content
    assert without_probe(names_in(pool)) == [block_path(pool.key)]


@each_fsync
@each_method
def test_a_block_has_its_recency_from_the_moment_it_has_its_name(pool, disk, make_block, method, fsync):
    pool.publish(make_block(), method=method, fsync=fsync)
    assert disk.modified_ns(pool.target) == MODIFIED_NS
    if disk.simulated:
        kinds = [type(operation) for operation in pool.ring.history]
        assert kinds.index(Touch) < kinds.index(Link if method is PublishMethod.LINK else Rename)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EROFS, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_filesystem_that_keeps_no_times_costs_the_order_and_not_the_block(simulate, make_block, code):
    pool = simulate()
    pool.ring.fail(Touch, error=code)
    assert pool.publish(make_block()) is Published.FIRST
    assert pool.read() == make_block()


@pytest.mark.parametrize("method", [PublishMethod.LINK, PublishMethod.RENAME_NOREPLACE], ids=lambda m: m.value)
def test_the_first_writer_wins(pool, make_block, method):
    assert pool.publish(make_block(1), method=method) is Published.FIRST
    assert pool.publish(make_block(2), method=method) is Published.ALREADY_THERE
    assert pool.read() == make_block(1)
    assert without_probe(names_in(pool)) == [block_path(pool.key)]


def test_without_links_and_flags_the_last_writer_wins_with_a_complete_block(pool, make_block):
    for seed in (1, 2):
        assert pool.publish(make_block(seed), method=PublishMethod.RENAME) is Published.FIRST
        assert pool.read() == make_block(seed)
    assert without_probe(names_in(pool)) == [block_path(pool.key)]


@pytest.mark.parametrize("depth", range(4))
def test_missing_folders_are_made_as_far_as_they_are_missing(simulate, make_block, depth):
    pool = simulate()
    parts = block_path(pool.key).split("/")[:-1]
    for count in range(2, 2 + depth):
        pool.ring.files.perform(MakeDirectory(f"/disk/{'/'.join(parts[:count])}"))
    pool.publish(make_block())
    made = [operation.path for operation in pool.ring.history if isinstance(operation, MakeDirectory)]
    assert len(made) == (0 if depth == 3 else 3)
    assert pool.read() == make_block()


def test_short_writes_are_continued(simulate, make_block):
    pool = simulate()
    pool.ring.shorten(Write, times=20)
    pool.publish(make_block())
    assert pool.read() == make_block()
    assert sum(isinstance(operation, Write) for operation in pool.ring.history) > 2


# ---- a fault at every step ----


def steps_of(simulate, make_block, *, method: PublishMethod, fsync: bool) -> list[tuple[type, int]]:
    """Return the steps of an undisturbed publish: kind of operation and which one of its kind."""
    pool = simulate()
    pool.publish(make_block(), method=method, fsync=fsync)
    seen: Counter[type] = Counter()
    steps = []
    for operation in pool.ring.history:
        seen[type(operation)] += 1
        steps.append((type(operation), seen[type(operation)]))
    return steps


def test_the_steps_are_those_of_the_design(simulate, make_block):
    lazy = [kind for kind, _ in steps_of(simulate, make_block, method=PublishMethod.LINK, fsync=False)]
    assert lazy == [Open, Write, Close, Touch, Link, MakeDirectory, MakeDirectory, MakeDirectory, Link, Unlink]
    durable = [kind for kind, _ in steps_of(simulate, make_block, method=PublishMethod.LINK, fsync=True)]
    assert durable == [*lazy[:2], Sync, *lazy[2:], Open, Sync, Close]


@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@each_fsync
@each_method
def test_a_fault_at_any_step_leaves_nothing_or_a_complete_block(simulate, make_block, method, fsync, code):
    content = make_block()
    for kind, nth in steps_of(simulate, make_block, method=method, fsync=fsync):
        pool = simulate()
        pool.ring.fail(kind, error=code, nth=nth)
        # What comes after the name, and the time, may fail unnoticed: nothing is wrong with the block.
        if kind in (Touch, Unlink) or (kind in (Open, Sync, Close) and nth == 2):
            assert pool.publish(content, method=method, fsync=fsync) is Published.FIRST
            assert pool.read() == content
            assert len(names_in(pool)) == (2 if kind is Unlink else 1)
        else:
            with pytest.raises(ERRORS[code], match=os.strerror(code)):
                pool.publish(content, method=method, fsync=fsync)
            assert names_in(pool) == [], (kind, nth)
        assert pool.ring.files.open_descriptors == (kind is Close)
        assert pool.publish(content, method=method, fsync=fsync, number=1) in Published
        assert pool.read() == content
        pool.ring.files.lose_processes()


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN], ids=errno.errorcode.get)
@each_method
def test_an_interruption_at_any_step_is_repeated(simulate, make_block, method, code):
    for kind, nth in steps_of(simulate, make_block, method=method, fsync=True):
        if kind is Close:
            continue
        pool = simulate()
        pool.ring.fail(kind, error=code, nth=nth, times=MAX_RETRIES)
        assert pool.publish(make_block(), method=method, fsync=True) is Published.FIRST
        assert pool.read() == make_block()
        assert names_in(pool) == [block_path(pool.key)]


def test_an_interrupted_close_drops_the_store_because_the_content_may_not_be_written(simulate, make_block):
    pool = simulate()
    pool.ring.fail(Close, error=errno.EINTR)
    with pytest.raises(TransientError):
        pool.publish(make_block())
    assert names_in(pool) == []
    pool.ring.files.lose_processes()


def test_a_missing_temporary_folder_is_a_failed_store_not_a_missing_block(disk, block_key, run, make_block):
    pool = Pool(disk.ring, disk.path("emptied"), bool(disk.flags), block_key, run)
    with pytest.raises(TransientError, match="No such file or directory"):
        pool.publish(make_block())


def test_a_file_in_place_of_a_folder_is_a_failed_store(simulate, make_block):
    pool = simulate()
    folder = os.path.dirname(os.path.dirname(os.path.dirname(pool.target)))
    pool.ring.files.perform(Close(pool.ring.files.perform(Open(folder, os.O_CREAT | os.O_WRONLY))))
    with pytest.raises(TransientError):
        pool.publish(make_block())
    assert names_in(pool) == [os.path.relpath(folder, "/disk")]


def test_no_folder_above_the_ranks_is_ever_made(simulate, make_block):
    pool = simulate(ring=SimulatedDisk(1))
    with pytest.raises(TransientError, match="store of"):
        pool.publish(make_block())
    assert not any(isinstance(operation, MakeDirectory) for operation in pool.ring.history)
    pool.prepare(lambda path: pool.ring.files.perform(MakeDirectory(path)))
    assert pool.publish(make_block()) is Published.FIRST


def test_a_temporary_file_that_a_sweep_removed_costs_one_store(simulate, make_block):
    pool = simulate()

    def task(slot):
        slot.data[:] = make_block()
        publication = publish_block(
            slot=slot,
            temporary=pool.temporary(),
            target=pool.target,
            modified_ns=MODIFIED_NS,
            access=FileAccess(True),
            method=PublishMethod.LINK,
            fsync=False,
        )
        operation = next(publication)
        with contextlib.suppress(StopIteration):
            while True:
                if isinstance(operation, Link):
                    pool.ring.files.perform(Unlink(pool.temporary()))
                try:
                    operation = publication.send((yield operation))
                except OSError as error:
                    operation = publication.throw(error)

    with pytest.raises(TransientError):
        pool.run(pool.ring, task)
    assert names_in(pool) == []


# ---- cut at every step ----


@pytest.mark.parametrize("power_loss", [False, True], ids=["killed", "power cut"])
@each_fsync
@each_method
def test_after_a_crash_at_any_step_no_wrong_block_is_served(simulate, make_block, method, fsync, power_loss):
    content = make_block()
    steps = len(steps_of(simulate, make_block, method=method, fsync=fsync))
    for count in range(steps + 1):
        seed = 100 * count + fsync
        before = simulate(seed)
        before.ring.crash_after(count)
        with contextlib.suppress(PyKVCacheError):
            before.publish(content, method=method, fsync=fsync)
        pool = simulate(ring=before.ring.restart(power_loss=power_loss))
        if power_loss and not any("tmp" in str(name) for name in folders_in(pool)):
            # The very folders were not durable: an empty pool, which the next start prepares again.
            pool.prepare(lambda path, ring=pool.ring: ring.files.perform(MakeDirectory(path)))
        leftovers = [os.path.basename(name) for name in names_in(pool) if name != block_path(pool.key)]
        assert all(TEMPORARY_FILE.fullmatch(name) for name in leftovers)
        try:
            assert pool.read() == content, f"seed {seed}, step {count}"
        except BlockMissingError:
            assert count < steps or power_loss
        except CorruptBlockError:
            assert power_loss, f"seed {seed}, step {count}: half a block under its name"
            assert not fsync, f"seed {seed}, step {count}: content is not durable before its name"
            assert pool.quarantine() is Quarantined.MOVED
        pool.publish(content, method=method, fsync=fsync, number=1)
        assert pool.read() == content


def folders_in(pool: Pool) -> list[str]:
    folders = (f"{pool.folder}/{fingerprint_directory(pool.key.fingerprint)}/tmp",)
    return [path for path in folders if pool.ring.files.perform(MakeDirectory(path)) == -errno.EEXIST]


# ---- a race ----


def test_two_writers_at_once_and_a_reader_that_never_sees_half_a_block(pool, make_block):
    content = make_block()
    outcomes: list[object] = []
    together = threading.Barrier(3)

    def write(number: int) -> None:
        together.wait(60)
        outcomes.append(pool.publish(content, number=number))

    writers = [threading.Thread(target=write, args=[number]) for number in (1, 2)]
    for writer in writers:
        writer.start()
    together.wait(60)
    seen = 0
    while not seen or any(writer.is_alive() for writer in writers):
        with contextlib.suppress(BlockMissingError):
            assert pool.read() == content
            seen += 1
    for writer in writers:
        writer.join(60)
    assert sorted(outcomes, key=str) == [Published.ALREADY_THERE, Published.FIRST]
    assert without_probe(names_in(pool)) == [block_path(pool.key)]
