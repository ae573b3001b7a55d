"""Each ring operation as one blocking system call: what a helper thread runs where the ring cannot.

Every call lets go of the GIL while the kernel works. Not for the reactor thread.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

from pykvcache_storage.reactor.operations import (
    Close,
    Link,
    MakeDirectory,
    Open,
    Read,
    Rename,
    RingOperation,
    Sync,
    Touch,
    Unlink,
    Write,
)

AT_FDCWD = -100
RENAME_NOREPLACE = 1
MAX_TRANSFER_BYTES = 0x7FFFF000
"""Most bytes that Linux moves in one read or write; longer ones are cut short by the kernel in any case."""

_libc = ctypes.CDLL(None, use_errno=True)


def perform(operation: RingOperation) -> int:
    """Carry out one operation; return what the system call returns, or minus the errno."""
    try:
        return _CALLS[type(operation)](operation) or 0
    except OSError as error:
        return -(error.errno or errno.EIO)
    except (ValueError, OverflowError):
        # Python refuses a NUL inside a path, or a number that fits no field, before the kernel sees it.
        return -errno.EBADF if getattr(operation, "descriptor", 0) < 0 else -errno.EINVAL


def _open(operation: Open) -> int:
    return os.open(operation.path, operation.flags | os.O_CLOEXEC, operation.mode)


def _read(operation: Read) -> int:
    return os.preadv(operation.descriptor, [_memory_of(operation)], operation.offset)


def _write(operation: Write) -> int:
    return os.pwritev(operation.descriptor, [_memory_of(operation)], operation.offset)


def _memory_of(operation: Read | Write) -> ctypes.Array[ctypes.c_char]:
    if operation.offset < 0:
        raise ValueError("an offset of -1 would mean the descriptor's own position")
    size = min(operation.size_bytes, MAX_TRANSFER_BYTES)
    return (ctypes.c_char * size).from_address(operation.address)


def _rename(operation: Rename) -> None:
    if operation.replace:
        os.rename(operation.source, operation.target)
    else:
        rename_no_replace(operation.source, operation.target)


def rename_no_replace(source: str, target: str) -> None:
    """Rename, unless the target exists; Python's `os` has no renameat2.

    Raises:
        OSError: EEXIST, or EINVAL where the filesystem knows no RENAME_NOREPLACE.
    """
    function = getattr(_libc, "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, "the C library has no renameat2")
    names = [os.fsencode(name) for name in (source, target)]
    if any(b"\0" in name for name in names):
        raise ValueError("embedded null byte")
    if function(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_NOREPLACE) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), source, None, target)


_CALLS: dict[type[RingOperation], Callable[[Any], int | None]] = {
    Open: _open,
    Read: _read,
    Write: _write,
    Sync: lambda operation: os.fsync(operation.descriptor),
    Close: lambda operation: os.close(operation.descriptor),
    Link: lambda operation: os.link(operation.source, operation.target),
    Rename: _rename,
    Unlink: lambda operation: os.unlink(operation.path),
    MakeDirectory: lambda operation: os.mkdir(operation.path, operation.mode),
    Touch: lambda operation: os.utime(operation.path, ns=(operation.modified_ns, operation.modified_ns)),
}
