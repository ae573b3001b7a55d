"""Reading one block file through the reactor: every ring for what files can be, the simulated disk for faults."""

import errno
import os
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
from pykvcache_contract.header import HEADER_SIZE_BYTES, BlockHeader, encode_header
from pykvcache_contract.keys import BlockKey, fingerprint_of
from pykvcache_contract.units import SECTOR_SIZE_BYTES
from pykvcache_storage.block import FileAccess, Quarantined, is_own_limit, quarantine, read_block, translate
from pykvcache_storage.reactor.operations import Close, MakeDirectory, Open, Read, Rename
from pykvcache_storage.reactor.reactor import MAX_RETRIES
from pykvcache_storage.testing.disk import SimulatedDisk

REAL = ["uring-disk-direct", "threads-disk-direct", "threads-tmpfs-buffered"]
on_real_disks = pytest.mark.parametrize("disk", REAL, indirect=True)


def put(disk, name: str, content: bytes) -> str:
    """Make a file without the ring, which belongs to its reactor; return the path."""
    path = disk.path(name)
    if disk.simulated:
        put_simulated(disk.ring, path, content)
    else:
        Path(path).write_bytes(content)
    return path


def put_simulated(simulated: SimulatedDisk, path: str, content: bytes) -> None:
    descriptor = simulated.files.perform(Open(path, os.O_WRONLY | os.O_CREAT))
    simulated.files.content(path)[:] = content
    simulated.files.perform(Close(descriptor))


def exists(disk, path: str) -> bool:
    return path in disk.ring.files.file_names() if disk.simulated else os.path.lexists(path)


@pytest.fixture
def read(block_key, run):
    """Return a function that reads a block; it returns header and payload."""

    def read_file(ring, path, *, direct=True, key=block_key):
        def task(slot):
            slot.data[:] = b"\xee" * len(slot.data)
            header = yield from read_block(path, key=key, slot=slot, access=FileAccess(direct))
            return header, bytes(slot.data[HEADER_SIZE_BYTES:])

        return run(ring, task)

    return read_file


@pytest.fixture
def simulated(make_block) -> SimulatedDisk:
    """A simulated disk with one good block."""
    simulated = SimulatedDisk(seed=3)
    put_simulated(simulated, "/disk/a", make_block())
    return simulated


def zeroed(content: bytearray) -> None:
    content[:] = bytes(len(content))


def zero_header(content: bytearray) -> None:
    content[:HEADER_SIZE_BYTES] = bytes(HEADER_SIZE_BYTES)


def flip_header_bit(content: bytearray) -> None:
    content[100] ^= 1


def wrong_version(content: bytearray) -> None:
    content[8] = 2


def cut(size: int):
    def change(content: bytearray) -> None:
        del content[size:]

    return change


def extend(size: int):
    def change(content: bytearray) -> None:
        content += bytes(size)

    return change


def shifted(content: bytearray) -> None:
    content[:] = content[SECTOR_SIZE_BYTES:] + content[:SECTOR_SIZE_BYTES]


DAMAGES = {
    "empty": cut(0),
    "cut inside the header": cut(100),
    "only the header": cut(HEADER_SIZE_BYTES),
    "cut at a page": cut(5 * SECTOR_SIZE_BYTES),
    "cut at an odd length": cut(5 * SECTOR_SIZE_BYTES + 123),
    "cut by one byte": cut(-1),
    "one byte longer": extend(1),
    "one page longer": extend(SECTOR_SIZE_BYTES),
    "zeroed": zeroed,
    "zeroed header": zero_header,
    "flipped bit in the header": flip_header_bit,
    "another format version": wrong_version,
    "shifted by a page": shifted,
}


def test_a_complete_block_is_read_with_its_header(disk, read, make_block, block_key):
    content = make_block()
    header, payload = read(disk.ring, put(disk, "a", content), direct=bool(disk.flags))
    assert payload == content[HEADER_SIZE_BYTES:]
    assert (header.key, header.payload_size_bytes) == (block_key, len(payload))


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_block_is_proved_bad_and_moved_aside(disk, read, run, make_block, damage):
    content = bytearray(make_block())
    damage(content)
    path, target = put(disk, "a", bytes(content)), disk.path("quarantine/a")
    with pytest.raises(CorruptBlockError, match=path):
        read(disk.ring, path, direct=bool(disk.flags))
    assert run(disk.ring, lambda slot: quarantine(path, target)) is Quarantined.MOVED
    assert not exists(disk, path)
    assert exists(disk, target)
    with pytest.raises(BlockMissingError):
        read(disk.ring, path, direct=bool(disk.flags))


@pytest.mark.parametrize(
    "field",
    [{"block_hash": b"\x07" * 32}, {"group": 0}, {"rank": 0}, {"fingerprint": fingerprint_of({"model": "another"})}],
    ids=lambda field: next(iter(field)),
)
def test_an_intact_block_of_another_key_is_proved_bad(simulated, read, make_block, block_key, field):
    names = ("fingerprint", "block_hash", "group", "rank")
    other = BlockKey(**{name: getattr(block_key, name) for name in names} | field)
    put_simulated(simulated, "/disk/b", make_block(key=other))
    read(simulated, "/disk/b", key=other)
    with pytest.raises(CorruptBlockError, match="another block"):
        read(simulated, "/disk/b")


def test_an_intact_header_that_tells_another_payload_length_is_proved_bad(simulated, read, make_block, block_key):
    content = make_block()
    size = len(content) - HEADER_SIZE_BYTES
    header = BlockHeader(block_key, size - SECTOR_SIZE_BYTES, 8, 0)
    put_simulated(simulated, "/disk/b", encode_header(header) + content[HEADER_SIZE_BYTES:])
    with pytest.raises(CorruptBlockError, match=f"payload of {size - SECTOR_SIZE_BYTES} bytes, expected {size}"):
        read(simulated, "/disk/b")


@pytest.mark.parametrize("name", ["missing", "no/such/folder", "a/below-a-file"])
def test_a_missing_block_is_a_miss(disk, read, make_block, name):
    put(disk, "a", make_block())
    with pytest.raises(BlockMissingError, match=name):
        read(disk.ring, disk.path(name), direct=bool(disk.flags))


@on_real_disks
def test_a_symbolic_link_is_not_followed_but_moved_aside(disk, read, run, make_block):
    victim, path, target = put(disk, "victim", make_block()), disk.path("link"), disk.path("quarantine/link")
    os.symlink(victim, path)
    with pytest.raises(CorruptBlockError, match="symbolic link"):
        read(disk.ring, path, direct=bool(disk.flags))
    assert run(disk.ring, lambda slot: quarantine(path, target)) is Quarantined.MOVED
    assert os.path.islink(target)
    read(disk.ring, victim, direct=bool(disk.flags))


@on_real_disks
def test_a_folder_in_place_of_a_block_is_never_served(disk, read):
    os.mkdir(disk.path("a"))
    with pytest.raises((CorruptBlockError, TransientError)):
        read(disk.ring, disk.path("a"), direct=bool(disk.flags))


def test_short_reads_are_continued(simulated, read, make_block):
    simulated.shorten(Read, times=20)
    assert read(simulated, "/disk/a")[1] == make_block()[HEADER_SIZE_BYTES:]
    assert sum(isinstance(operation, Read) for operation in simulated.history) > 2


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
@pytest.mark.parametrize("kind", [Open, Read])
def test_an_interrupted_operation_is_repeated(simulated, read, make_block, kind, code):
    simulated.fail(kind, error=code, times=MAX_RETRIES)
    assert read(simulated, "/disk/a")[1] == make_block()[HEADER_SIZE_BYTES:]


def test_an_operation_that_is_interrupted_for_ever_proves_nothing(simulated, read):
    simulated.fail(Read, error=errno.EINTR, times=10_000)
    with pytest.raises(TransientError, match="/disk/a"):
        read(simulated, "/disk/a")
    assert simulated.files.open_descriptors == 0


@pytest.mark.parametrize(
    "code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EINVAL, errno.ENOMEM]
)
@pytest.mark.parametrize("kind", [Open, Read])
def test_an_error_of_the_system_proves_nothing_about_the_block(simulated, read, kind, code):
    simulated.fail(kind, error=code)
    with pytest.raises(TransientError, match=f"of /disk/a: {os.strerror(code)}"):
        read(simulated, "/disk/a")
    assert simulated.files.open_descriptors == 0
    read(simulated, "/disk/a")


def test_a_stale_file_handle_is_a_miss(simulated, read):
    simulated.fail(Open, error=errno.ESTALE)
    with pytest.raises(BlockMissingError):
        read(simulated, "/disk/a")


@pytest.mark.parametrize("code", [errno.EIO, errno.EINTR, errno.ENOSPC])
def test_an_error_on_closing_does_not_spoil_what_was_read(simulated, read, make_block, code):
    simulated.fail(Close, error=code)
    assert read(simulated, "/disk/a")[1] == make_block()[HEADER_SIZE_BYTES:]
    assert simulated.files.open_descriptors == 1
    simulated.files.lose_processes()


def test_an_interrupted_close_is_never_repeated(simulated, read):
    simulated.fail(Close, error=errno.EINTR)
    read(simulated, "/disk/a")
    assert not any(isinstance(operation, Close) for operation in simulated.history)
    simulated.files.lose_processes()


# ---- quarantine ----


def test_the_newest_damaged_file_of_a_key_is_kept(simulated, run):
    simulated.files.perform(MakeDirectory("/disk/quarantine"))
    for content in (b"older", b"newer"):
        put_simulated(simulated, "/disk/a", content)
        assert run(simulated, lambda slot: quarantine("/disk/a", "/disk/quarantine/a")) is Quarantined.MOVED
    assert simulated.files.file_names() == ["/disk/quarantine/a"]
    assert simulated.files.content("/disk/quarantine/a") == b"newer"


def test_a_file_that_another_process_moved_is_out_of_the_way(simulated, run):
    assert run(simulated, lambda slot: quarantine("/disk/gone", "/disk/quarantine/gone")) is Quarantined.GONE


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("kind", [Rename, MakeDirectory])
def test_a_file_that_cannot_be_moved_stays_and_says_so(simulated, run, kind, code):
    simulated.fail(kind, error=code)
    assert run(simulated, lambda slot: quarantine("/disk/a", "/disk/quarantine/a")) is Quarantined.STUCK
    assert simulated.files.file_names() == ["/disk/a"]


# ---- errors ----


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOENT, BlockMissingError),
        (errno.ENOTDIR, BlockMissingError),
        (errno.ESTALE, BlockMissingError),
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EFBIG, CapacityError),
        (errno.EROFS, ReadOnlyError),
        (errno.EACCES, ReadOnlyError),
        (errno.EPERM, ReadOnlyError),
        (errno.EIO, TransientError),
        (errno.EMFILE, TransientError),
        (errno.ETIMEDOUT, TransientError),
    ],
)
def test_an_errno_becomes_what_the_caller_must_do(code, kind):
    error = translate(OSError(code, os.strerror(code)), operation="store", path="/pool/a")
    assert type(error) is kind
    assert isinstance(error, PyKVCacheError)
    assert str(error) == f"store of /pool/a: {os.strerror(code)}"


@pytest.mark.parametrize(
    ("cause", "is_own"),
    [
        (OSError(errno.EFBIG, ""), True),
        (OSError(errno.ENOSPC, ""), False),
        (OSError(errno.EDQUOT, ""), False),
        (None, False),
    ],
)
def test_only_a_limit_of_file_sizes_is_the_processs_own(cause, is_own):
    error = CapacityError("no room")
    error.__cause__ = cause
    assert is_own_limit(error) is is_own
