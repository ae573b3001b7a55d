"""A folder for a measurement's files that goes away however the process ends.

Facts: a process that is stopped or fails removes its folder itself; one that is killed cannot. The kernel drops a
flock when its process dies. A folder cannot be created and locked in one step. What they mean: a folder belongs to a
living run while it is locked; the next run removes the folders that it can lock, perhaps one that was made a moment
ago. Therefore a run that has locked its folder looks whether it still is there, and else makes another one.

Where flock is unknown, folders are removed when they are a day old. The name begins with a dot: an empty directory
stays one that a pool can begin in. Blocking calls, any thread.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator

from pykvcache_contract.errors import CapacityError, ConfigurationError, ReadOnlyError, TransientError
from pykvcache_contract.units import format_size

PREFIX = ".pykvcache-calibration-"
AGE_LIMIT_SECONDS = 24 * 3600
FREE_SHARE = 0.05
"""The most of the free space that a measurement may take for its seconds."""

_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{16}")
_NO_DIRECTORY = {errno.ENOENT, errno.ENOTDIR}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_ATTEMPTS_MAX = 10
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def scratch_folder(directory: str) -> Iterator[str]:
    """Make an empty folder inside a directory, and remove it with all it holds in the end.

    Raises:
        ConfigurationError: no such directory.
        ReadOnlyError: nothing can be written there.
        CapacityError: no room for a folder.
        TransientError: anything else.
    """
    path, descriptor = _make_locked(directory)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def sweep(directory: str, *, clock: Callable[[], float] = time.time) -> int:
    """Remove the folders of dead runs; return how many. Touches only folders that bear our name, follows no link."""
    removed = 0
    with os.scandir(directory) as entries:
        paths = [entry.path for entry in entries if _NAME.fullmatch(entry.name)]
    for path in paths:
        # Gone meanwhile, somebody else's, or no folder.
        with contextlib.suppress(OSError):
            removed += _remove_if_dead(path, clock)
    return removed


def usable_bytes(directory: str, *, wanted_bytes: int, min_free_bytes: int) -> int:
    """Return how many bytes a measurement may write: at most a twentieth of what is free, never into `min_free_bytes`.

    The result may be zero or negative.
    """
    status = os.statvfs(directory)
    free_bytes = status.f_bavail * status.f_frsize
    return min(wanted_bytes, int(free_bytes * FREE_SHARE), free_bytes - min_free_bytes)


def refuse_too_little(directory: str, *, found_bytes: int, needed_bytes: int) -> None:
    """Raise a CapacityError where there is too little room to measure anything."""
    if found_bytes < needed_bytes:
        raise CapacityError(
            f"{directory} has room for {format_size(max(0, found_bytes))} of test files, and "
            f"{format_size(needed_bytes)} are needed: free some space, of which {FREE_SHARE:.0%} are used, "
            "or lower --min-free"
        )


def _make_locked(directory: str) -> tuple[str, int]:
    """Return a new folder and the descriptor whose flock says that its run lives."""
    for _ in range(_ATTEMPTS_MAX):
        path = os.path.join(directory, PREFIX + secrets.token_hex(8))
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            raise _translated(directory, error) from error
        try:
            descriptor = os.open(path, _FOLDER_FLAGS)
        except FileNotFoundError:
            continue  # swept between the two calls
        if _hold(descriptor) is not False and _is_at(descriptor, path):
            return path, descriptor
        os.close(descriptor)
    raise TransientError(f"no folder in {directory} outlives the sweeps of others: try again")


def _translated(directory: str, error: OSError) -> Exception:
    if error.errno in _NO_DIRECTORY:
        return ConfigurationError(f"{directory} is no directory in which files can be made: correct the path")
    if error.errno in _NOT_WRITABLE:
        return ReadOnlyError(f"{directory} cannot be written ({error.strerror}): mount it read-write, or give access")
    if error.errno in _NO_ROOM:
        return CapacityError(f"{directory} has no room for a folder ({error.strerror}): free some space")
    return TransientError(f"no folder can be made in {directory}: {error.strerror}")


def _hold(descriptor: int) -> bool | None:
    """Return whether this process now holds the folder's lock, None where flock is unknown."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove_if_dead(path: str, clock: Callable[[], float]) -> bool:
    descriptor = os.open(path, _FOLDER_FLAGS)
    try:
        held = _hold(descriptor)
        is_young = clock() - os.fstat(descriptor).st_mtime < AGE_LIMIT_SECONDS
        if held is False or (held is None and is_young):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return not os.path.lexists(path)
    finally:
        os.close(descriptor)
