"""Taking files out of a pool: evicted blocks, damaged blocks, folders of fingerprints that nobody uses.

Facts: between a scan and a removal a block may be used, removed by another, or published anew; an administrator may
have put a link where a folder of ours was; a process may be killed between any two steps; a recount may end between a
removal and its release. What they mean: a path seen earlier proves nothing, and a release may count twice or never.
Therefore

- a file is reached folder by folder through descriptors, none of them a link, and looked at once more: only a regular
  file of the size seen, whose modification time is not newer than the one seen, is removed. Between that look and the
  removal lie microseconds in which a use is lost; it costs one block, which is computed anew;
- a file is removed first and its bytes are released then, unless a recount ended in between. A kill or that recount
  leaves bytes taken that nobody uses until the next recount; the pool is never fuller than its ledger says. Of
  several removers the one whose unlink succeeds releases;
- a fingerprint's folder is taken down by rmdir from the inside outwards, so that whatever appears meanwhile keeps it,
  beginning with `tmp`, without which no writer can begin.

A reader that has the file open keeps its bytes; one that comes later finds a miss. Folders emptied are removed; a
writer that made one at that moment drops its store or makes it again. No descriptor outlasts a call, so that the
disk can be unmounted at any time. Runs in the sidecar and the CLI; blocking calls, any thread.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from enum import Enum

from pykvcache_contract.errors import PyKVCacheError, TransientError
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.paths import (
    CONFIG_FILE,
    FINGERPRINT_DIRECTORY,
    QUARANTINE_DIRECTORY,
    RANK_DIRECTORY,
    TEMPORARY_DIRECTORY,
    quarantine_path,
)
from pykvcache_storage.inventory import FIRST_LEVEL, SECOND_LEVEL, Kind, PoolFile, walk
from pykvcache_storage.recovery import sweep
from pykvcache_storage.usage import UsageLedger

_DEPTHS = {Kind.BLOCK: 5, Kind.QUARANTINED: 3}
_FAN_OUT = (RANK_DIRECTORY, FIRST_LEVEL, SECOND_LEVEL)
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_OPEN_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Removed(Enum):
    """What became of a file."""

    REMOVED = "removed"
    GONE = "gone"
    """No such file any more, or something else has its name."""
    USED = "used"
    """Used or published anew since it was seen; it stays."""
    FAILED = "failed"
    """Not allowed, or the disk refused; it stays."""


class Remover:
    """Removes files of one pool and keeps its ledger right.

    Args:
        pool_directory: may itself be a link, nothing below it.
    """

    def __init__(self, pool_directory: str, ledger: UsageLedger) -> None:
        self._pool = pool_directory
        self._ledger = ledger

    def remove(self, file: PoolFile) -> Removed:
        """Remove a block or a quarantined file unless it was used since it was seen; drop folders that this empties.

        Temporary files are refused: only a sweep knows whether their writer lives.
        """
        if file.kind is Kind.TEMPORARY:
            return Removed.FAILED
        parts = _parts(file)
        try:
            with _opened(self._pool, parts[:-1]) as folders:
                return self._remove(file, folders, parts)
        except OSError as error:
            return _outcome(error)

    def quarantine(self, file: PoolFile) -> Removed:
        """Move a block that was proved bad into its fingerprint's quarantine; REMOVED means moved.

        A use does not acquit it, but another file in its place does. An older quarantined file of the block is
        replaced. The file's modification time becomes the time of the move, where the owner allows it.
        """
        if file.kind is not Kind.BLOCK:
            return Removed.FAILED
        parts = _parts(file)
        try:
            with _opened(self._pool, parts[:-1]) as folders:
                return self._move_aside(file, folders, parts)
        except OSError as error:
            return _outcome(error)

    def drop_fingerprint(self, directory: str) -> bool:
        """Remove the folder of a fingerprint without blocks and living writers; return whether it is gone.

        Quarantined files go with it. Files that are not ours keep the folder; what was taken out of it by then, a
        writer's start makes again.
        """
        if not FINGERPRINT_DIRECTORY.fullmatch(directory):
            raise ValueError(f"{directory!r} is no fingerprint's folder")
        try:
            if self._is_used(directory):
                return False
            with _opened(self._pool, [directory]) as (pool, folder):
                return self._take_down(directory, pool, folder)
        except FileNotFoundError:
            return os.path.isdir(self._pool) and not os.path.lexists(os.path.join(self._pool, directory))
        except (OSError, TransientError):
            return False

    def _remove(self, file: PoolFile, folders: list[int], parts: list[str]) -> Removed:
        status = os.stat(parts[-1], dir_fd=folders[-1], follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return Removed.GONE
        # Not the inode: some FUSE filesystems give a file a new number now and then, and nothing would ever leave.
        if status.st_size != file.size_bytes or status.st_mtime_ns > file.modified_ns:
            return Removed.USED
        recount_seconds = self._ledger.last_recount()
        os.unlink(parts[-1], dir_fd=folders[-1])
        self._release(status.st_size, recount_seconds)
        if file.kind is Kind.BLOCK:
            _drop_emptied(folders, parts)
        return Removed.REMOVED

    def _move_aside(self, file: PoolFile, folders: list[int], parts: list[str]) -> Removed:
        status = os.stat(parts[-1], dir_fd=folders[-1], follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return Removed.GONE
        if status.st_size != file.size_bytes or file.inode not in (0, status.st_ino):
            return Removed.USED
        target = os.path.basename(quarantine_path(file.key(Fingerprint(parts[0]))))
        with contextlib.suppress(FileExistsError):
            os.mkdir(QUARANTINE_DIRECTORY, dir_fd=folders[1])
        with _folder(QUARANTINE_DIRECTORY, folders[1]) as quarantine:
            replaced_bytes, recount_seconds = _size_of(target, quarantine), self._ledger.last_recount()
            os.rename(parts[-1], target, src_dir_fd=folders[-1], dst_dir_fd=quarantine)
            if replaced_bytes:
                self._release(replaced_bytes, recount_seconds)
            with contextlib.suppress(OSError):
                os.utime(target, dir_fd=quarantine, follow_symlinks=False)
        _drop_emptied(folders, parts)
        return Removed.REMOVED

    def _release(self, size_bytes: int, recount_seconds: float) -> None:
        # The file is gone already: what cannot be released now, the next recount finds.
        with contextlib.suppress(PyKVCacheError):
            self._ledger.release(size_bytes, recount_seconds=recount_seconds)

    def _is_used(self, directory: str) -> bool:
        with contextlib.closing(walk(self._pool, directory)) as files:
            if any(file is not None and file.kind is Kind.BLOCK for file in files):
                return True
        return sweep(self._pool, directory).living > 0

    def _take_down(self, directory: str, pool: int, folder: int) -> bool:
        if _foreign_names(folder):
            return False
        _drop_folder(TEMPORARY_DIRECTORY, folder)
        for file in walk(self._pool, directory):
            if file is not None and file.kind is Kind.QUARANTINED:
                self.remove(file)
        _drop_folder(QUARANTINE_DIRECTORY, folder)
        _drop_fan_out(folder, _FAN_OUT)
        return _drop_last(directory, pool, folder)


def _parts(file: PoolFile) -> list[str]:
    parts = file.path.split("/")
    if len(parts) != _DEPTHS[file.kind] or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{file.path!r} is no path that a walk tells")
    return parts


@contextlib.contextmanager
def _opened(pool_directory: str, parts: list[str]) -> Iterator[list[int]]:
    """Yield descriptors of the pool and of each folder below it, none of which is a link."""
    with contextlib.ExitStack() as stack:
        folders = [os.open(pool_directory, _OPEN_FLAGS)]
        stack.callback(os.close, folders[0])
        for part in parts:
            folders.append(stack.enter_context(_folder(part, folders[-1])))
        yield folders


@contextlib.contextmanager
def _folder(name: str, parent: int) -> Iterator[int]:
    descriptor = os.open(name, _OPEN_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _size_of(name: str, folder: int) -> int:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _drop_emptied(folders: list[int], parts: list[str]) -> None:
    """Remove a block's inner fan-out folder and then the outer one, as far as they are empty."""
    with contextlib.suppress(OSError):
        os.rmdir(parts[3], dir_fd=folders[3])
        os.rmdir(parts[2], dir_fd=folders[2])


def _foreign_names(folder: int) -> bool:
    ours = {CONFIG_FILE, TEMPORARY_DIRECTORY, QUARANTINE_DIRECTORY}
    return any(name not in ours and not RANK_DIRECTORY.fullmatch(name) for name in os.listdir(folder))


def _drop_folder(name: str, parent: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=parent)


def _drop_fan_out(parent: int, patterns: "tuple[re.Pattern[str], ...]") -> None:
    """Remove empty folders, the inner ones first; one that is not empty is an OSError and keeps the rest."""
    for name in filter(patterns[0].fullmatch, os.listdir(parent)):  # at most 4096
        if len(patterns) > 1:
            with _folder(name, parent) as folder:
                _drop_fan_out(folder, patterns[1:])
        os.rmdir(name, dir_fd=parent)


def _drop_last(directory: str, pool: int, folder: int) -> bool:
    """Remove config.json and the folder together, or neither."""
    if set(os.listdir(folder)) - {CONFIG_FILE}:
        return False
    aside = f".{directory}.{CONFIG_FILE}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(CONFIG_FILE, aside, src_dir_fd=folder, dst_dir_fd=pool)
    try:
        os.rmdir(directory, dir_fd=pool)
    except OSError:
        # A writer began at this moment. Should it have written the file anew, the two are equal.
        with contextlib.suppress(FileNotFoundError):
            os.rename(aside, CONFIG_FILE, src_dir_fd=pool, dst_dir_fd=folder)
        raise
    with contextlib.suppress(FileNotFoundError):
        os.unlink(aside, dir_fd=pool)
    return True


def _outcome(error: OSError) -> Removed:
    return Removed.GONE if error.errno in _NOT_THERE else Removed.FAILED
