"""Ring operations as io_uring requests: 64 bytes each, as linux/io_uring.h lays them out.

Pure packing, no system calls. A request holds addresses of paths, so whoever submits it keeps the returned buffers
until the completion: a path freed too early once made a garbage-named file and reported success.
"""

import ctypes
import os
import struct

from pykvcache_storage.reactor.operations import (
    Close,
    Link,
    MakeDirectory,
    Open,
    Read,
    Rename,
    Sync,
    Unlink,
    Write,
)
from pykvcache_storage.reactor.system_calls import AT_FDCWD, MAX_TRANSFER_BYTES, RENAME_NOREPLACE

REQUEST_SIZE_BYTES = 64
WAKE_TOKEN = (1 << 64) - 1
"""User data of the poll behind `wake`; no task has this token."""
SQE_ASYNC = 1 << 4

_OP_FSYNC, _OP_POLL_ADD, _OP_OPENAT, _OP_CLOSE, _OP_READ, _OP_WRITE = 3, 6, 18, 19, 22, 23
_OP_RENAMEAT, _OP_UNLINKAT, _OP_MKDIRAT, _OP_LINKAT = 35, 36, 37, 39
_POLLIN = 1
_CWD_UNSIGNED = AT_FDCWD & 0xFFFFFFFF

_pack = struct.Struct("<BBHiQQIIQ24x").pack
"""opcode, flags, priority, descriptor, offset or second path, address, length, operation flags, user data."""

PathOperation = Open | Link | Rename | Unlink | MakeDirectory
PathBuffer = ctypes.Array[ctypes.c_char]


def data_request(operation: Read | Write, token: int, *, flags: int) -> bytes:
    """Return a read or a write."""
    return _pack(
        _OP_READ if isinstance(operation, Read) else _OP_WRITE,
        flags,
        0,
        operation.descriptor,
        operation.offset,
        operation.address,
        min(operation.size_bytes, MAX_TRANSFER_BYTES),
        0,
        token,
    )


def descriptor_request(operation: Sync | Close, token: int) -> bytes:
    """Return an fsync or a close."""
    opcode = _OP_FSYNC if isinstance(operation, Sync) else _OP_CLOSE
    return _pack(opcode, 0, 0, operation.descriptor, 0, 0, 0, 0, token)


def wake_request(event_descriptor: int) -> bytes:
    """Return a poll that completes once the eventfd was written to."""
    return _pack(_OP_POLL_ADD, 0, 0, event_descriptor, 0, 0, 0, _POLLIN, WAKE_TOKEN)


def path_request(operation: PathOperation, token: int) -> tuple[bytes, list[PathBuffer]]:
    """Return a request about paths, and the buffers that it points into.

    Raises:
        ValueError: a path holds a NUL; the kernel would silently use the part before it.
    """
    if isinstance(operation, Link | Rename):
        return _two_path_request(operation, token)
    buffer = _path_buffer(operation.path)
    path = ctypes.addressof(buffer)
    if isinstance(operation, Open):
        flags = operation.flags | os.O_CLOEXEC
        request = _pack(_OP_OPENAT, 0, 0, AT_FDCWD, 0, path, operation.mode, flags, token)
    elif isinstance(operation, Unlink):
        request = _pack(_OP_UNLINKAT, 0, 0, AT_FDCWD, 0, path, 0, 0, token)
    else:
        request = _pack(_OP_MKDIRAT, 0, 0, AT_FDCWD, 0, path, operation.mode, 0, token)
    return request, [buffer]


def _two_path_request(operation: Link | Rename, token: int) -> tuple[bytes, list[PathBuffer]]:
    buffers = [_path_buffer(operation.source), _path_buffer(operation.target)]
    source, target = map(ctypes.addressof, buffers)
    opcode, flags = _OP_LINKAT, 0
    if isinstance(operation, Rename):
        opcode, flags = _OP_RENAMEAT, 0 if operation.replace else RENAME_NOREPLACE
    return _pack(opcode, 0, 0, AT_FDCWD, target, source, _CWD_UNSIGNED, flags, token), buffers


def _path_buffer(path: str) -> PathBuffer:
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError(f"a path holds a NUL: {path!r}")
    return ctypes.create_string_buffer(encoded)
