"""Small JSON files that several processes may create at once: the first writer wins, readers never see half of one.

Used for a pool's identity and a fingerprint's description, at start-up only. No locks, no retries, any thread.
"""

import contextlib
import ctypes
import errno
import json
import os
import stat
import uuid
from typing import Any

from pykvcache_contract.errors import PoolUnavailableError

MAX_DOCUMENT_SIZE_BYTES = 256 * 1024
"""A larger file is not one of ours; it is refused instead of being read into memory."""

_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_RENAME_FLAGS = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def create_document(path: str, document: dict[str, Any]) -> bool:
    """Create a JSON file, complete and durable, unless it exists; return whether this call created it.

    Raises:
        OSError: it could not be written; nothing is left behind.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{uuid.uuid4().hex}")
    try:
        _write(temporary, json.dumps(document, indent=2).encode() + b"\n")
        created = _give_name(temporary, path)
        _sync_folder(folder)
        return created
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def read_document(path: str, *, remedy: str) -> dict[str, Any]:
    """Return a JSON file's object.

    Args:
        remedy: a sentence for the error message: what the user can do about a damaged file.

    Raises:
        FileNotFoundError: no such file.
        PoolUnavailableError: a symbolic link, unreadable, too large or not a JSON object.
    """
    try:
        text = _read(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise PoolUnavailableError(f"cannot read {path}: {reason}. {remedy}") from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise PoolUnavailableError(f"{path} is damaged: {error}. {remedy}") from error
    if not isinstance(document, dict):
        raise PoolUnavailableError(f"{path} is damaged: it holds no JSON object. {remedy}")
    return document


def _read(path: str) -> bytes:
    descriptor = os.open(path, _OPEN_FLAGS)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        text = os.read(descriptor, MAX_DOCUMENT_SIZE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MAX_DOCUMENT_SIZE_BYTES:
        raise OSError(errno.EFBIG, f"it is larger than {MAX_DOCUMENT_SIZE_BYTES} bytes")
    return text


def _write(path: str, text: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        if os.write(descriptor, text) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        # Without it a power cut may leave the name without the content.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_name(temporary: str, path: str) -> bool:
    try:
        os.link(temporary, path, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _rename_once(temporary, path)
    return True


def _rename_once(temporary: str, path: str) -> bool:
    """Rename without replacing; where even that is unknown (some FUSE filesystems), look first and hope."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    code = errno.ENOSYS
    if rename is not None:
        result = rename(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(path), _RENAME_NOREPLACE)
        code = ctypes.get_errno() if result else 0
    if code == errno.EEXIST or (code in _NO_RENAME_FLAGS and os.path.lexists(path)):
        return False
    if code in _NO_RENAME_FLAGS:
        os.rename(temporary, path)
    elif code:
        raise OSError(code, os.strerror(code), path)
    return True


def _sync_folder(folder: str) -> None:
    # Some filesystems cannot sync a folder; then a power cut may lose the name, and the next start creates it again.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
