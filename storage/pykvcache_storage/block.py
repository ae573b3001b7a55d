"""One offloaded block read or written as a task of the reactor.

A block file is a 4096-byte header and a payload of a multiple of 4096 bytes, read and written whole, at offset 0, from
and to one staging slot. Errors of the system are translated here, once.
"""

import contextlib
import enum
import errno
import os
from dataclasses import dataclass

from pykvcache_contract.errors import (
    BlockMissingError,
    CapacityError,
    CorruptBlockError,
    PyKVCacheError,
    ReadOnlyError,
    TransientError,
)
from pykvcache_contract.header import HEADER_SIZE_BYTES, BlockHeader, check_header
from pykvcache_contract.keys import BlockKey
from pykvcache_storage.memory import Slot
from pykvcache_storage.reactor.operations import Close, MakeDirectory, Open, Read, Rename, Task, Write

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}


@dataclass(frozen=True, slots=True)
class FileAccess:
    """How files of a directory are opened, as the probe found.

    Args:
        direct: use O_DIRECT.
    """

    direct: bool

    @property
    def flags(self) -> int:
        """Return the open flags that every block file gets."""
        return os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if self.direct else 0)


def translate(error: OSError, *, operation: str, path: str) -> PyKVCacheError:
    """Return our error for one of the system's; what it proves decides what the caller may do."""
    message = f"{operation} of {path}: {error.strerror}"
    if error.errno in _MISSING:
        return BlockMissingError(message)
    if error.errno in _NO_ROOM:
        return CapacityError(message)
    if error.errno in _NOT_WRITABLE:
        return ReadOnlyError(message)
    return TransientError(message)


def is_own_limit(error: CapacityError) -> bool:
    """Return whether it was the process's own limit of a file's size (EFBIG): no room in the pool helps against it."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG


def read_block(path: str, *, key: BlockKey, slot: Slot, access: FileAccess) -> Task[BlockHeader]:
    """Read a block file into the slot and check its header; the payload's checksum is the caller's to verify.

    Raises (in the task):
        BlockMissingError: no such file.
        CorruptBlockError: truncated, oversized, damaged header, another block's, or a symbolic link.
        TransientError: anything else, which proves nothing about the file.
    """
    try:
        descriptor = yield Open(path, os.O_RDONLY | access.flags)
    except OSError as error:
        raise _read_error(error, operation="open", path=path) from error
    try:
        # Before the first read: behind an odd end of the file, direct I/O would answer EINVAL, which proves nothing.
        count = os.fstat(descriptor).st_size
        if count == len(slot.data):
            count = yield from _read_all(descriptor, slot)
    except OSError as error:
        raise _read_error(error, operation="read", path=path) from error
    finally:
        # What was read is checked below; how the descriptor ends changes nothing about it.
        with contextlib.suppress(OSError):
            yield Close(descriptor)
    if count != len(slot.data):
        raise CorruptBlockError(f"{path} holds {count} bytes, expected {len(slot.data)}")
    try:
        return check_header(slot.data, key=key, payload_size_bytes=len(slot.data) - HEADER_SIZE_BYTES)
    except CorruptBlockError as error:
        raise CorruptBlockError(f"{path}: {error}") from error


def _read_error(error: OSError, *, operation: str, path: str) -> PyKVCacheError:
    if error.errno == errno.ELOOP:
        return CorruptBlockError(f"{operation} of {path}: a symbolic link, not a block file")
    translated = translate(error, operation=operation, path=path)
    if isinstance(translated, BlockMissingError):
        return translated
    return TransientError(str(translated))


def _read_all(descriptor: int, slot: Slot) -> Task[int]:
    size = len(slot.data)
    done = 0
    while done < size:
        count = yield Read(descriptor, slot.address + done, size - done, done)
        if count == 0:
            break
        done += count
    return done


def write_all(descriptor: int, slot: Slot) -> Task[None]:
    """Write the whole slot at offset 0, continuing after short writes."""
    size = len(slot.data)
    done = 0
    while done < size:
        count = yield Write(descriptor, slot.address + done, size - done, done)
        if count == 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += count


class Quarantined(enum.Enum):
    """What became of a damaged file."""

    MOVED = "moved"
    GONE = "gone"
    STUCK = "stuck"


def quarantine(path: str, target: str) -> Task[Quarantined]:
    """Move a proved bad block aside, so that it is never served again; return what became of it.

    Of several that found the same damage one moves the file, the others find it gone. The newest damaged file of a
    key is kept for inspection; the quarantine folder is made if it is missing. Raises nothing: a file that cannot be
    moved (read-only pool) stays, and the caller must make its key a miss.
    """
    try:
        try:
            yield Rename(path, target, replace=True)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                yield MakeDirectory(os.path.dirname(target))
            yield Rename(path, target, replace=True)
    except FileNotFoundError:
        return Quarantined.GONE
    except OSError:
        return Quarantined.STUCK
    return Quarantined.MOVED
