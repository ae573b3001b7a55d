"""What dead writers left behind, and how a writer shows that it lives.

A writer's unpublished files are `<fp12>/tmp/<writer>-<n>.tmp`; while it lives it holds `<fp12>/tmp/<writer>.lock`
locked with flock. A sweep removes the temporary files of writers that are dead.

Facts: the kernel drops a flock when its process dies, however it dies. A file cannot be created and locked in one
step. A folder listing is no snapshot. What they mean: a sweep may lock a new lock file before its writer does, and
remove it; and it may list a temporary file but miss the lock file beside it. Therefore

- only the holder of the flock on the file at a path may unlink it; having locked, everybody looks again whether the
  path still is that file. A writer that lost its new file starts over, and creates temporary files only afterwards;
- a sweep judges a writer after it has seen one of its temporary files, by opening the lock by name: the lock is older
  than the file, so an absent or free lock means a dead writer, and writers never come back under the same name.

If a sweep errs all the same (flock that does not reach other nodes, as on NFS with local_lock), a living writer loses
an unpublished file: its publish fails with ENOENT and one store is dropped. Published blocks are never touched.

Where flock is unknown (ENOLCK, EOPNOTSUPP), temporary files are removed when they are a day old, lock files never.
Runs at start-up and in the sidecar; blocking calls.
"""

import contextlib
import errno
import fcntl
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pykvcache_contract.errors import PoolUnavailableError, ReadOnlyError
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.paths import (
    TEMPORARY_DIRECTORY,
    TEMPORARY_FILE,
    WRITER_LOCK,
    fingerprint_directory,
    writer_lock_path,
)

AGE_LIMIT_SECONDS = 24 * 3600
"""Without flock: no store takes a day, so an older temporary file has no living writer."""

MAX_VERDICTS = 4096
"""How many writers a sweep remembers; beyond it, it forgets and looks again."""

MAX_ATTEMPTS = 1000
"""How often, a millisecond apart, a writer waits for a sweep that looks at its new file, for microseconds."""

_NO_FLOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}


class WriterLock:
    """Shows other processes that this writer lives. Held until `close` or the end of the process.

    A forked child shares the lock; it must not close it.

    Args:
        pool_directory: with the fingerprint's folders prepared.
        writer: 32 hexadecimal digits, unique; made if not given.

    Attributes:
        exclusive: False where the filesystem knows no flock, and sweeps go by age.

    Raises:
        PoolUnavailableError, ReadOnlyError: the lock file cannot be created; go on without storing.
    """

    def __init__(self, pool_directory: str, fingerprint: Fingerprint, writer: str = "") -> None:
        self.writer = writer or uuid.uuid4().hex
        self.path = os.path.join(pool_directory, writer_lock_path(fingerprint, self.writer))
        try:
            self._descriptor, self.exclusive = _create_locked(self.path)
        except OSError as error:
            kind = ReadOnlyError if error.errno in _NOT_WRITABLE else PoolUnavailableError
            raise kind(f"cannot lock {self.path}: {error.strerror}; blocks cannot be stored") from error

    def is_held(self) -> bool:
        """Return whether the lock file is still at its path: not if the folder was emptied or its disk is another."""
        return self._descriptor >= 0 and _is_at(self._descriptor, self.path)

    def close(self) -> None:
        """Remove the lock file and give up the lock. The writer's temporary files are gone or free to sweep."""
        if self._descriptor < 0:
            return
        # The name goes first: a sweep that opened the file before finds that the path is gone, and leaves it.
        with contextlib.suppress(OSError):
            if _is_at(self._descriptor, self.path):
                os.unlink(self.path)
        os.close(self._descriptor)
        self._descriptor = -1


@dataclass(slots=True)
class SweepReport:
    """What one sweep did.

    Args:
        removed: temporary files removed, and their bytes.
        living: writers whose temporary files were left alone.
        dead: writers whose temporary files were removed.
        failed: files that could not be removed.
        by_age: True if the filesystem knows no flock.
    """

    removed: int = 0
    removed_bytes: int = 0
    living: int = 0
    dead: int = 0
    failed: int = 0
    by_age: bool = False


def sweep(
    pool_directory: str, fingerprint: Fingerprint | str, *, clock: Callable[[], float] = time.time
) -> SweepReport:
    """Remove the temporary files of dead writers of one fingerprint.

    Touches only regular files that bear our names; follows no link. A missing folder is an empty one.

    Args:
        fingerprint: whole, or the name of its folder.
    """
    parent = os.path.join(pool_directory, fingerprint_directory(Fingerprint(fingerprint)))
    folder = _open_folder(parent, TEMPORARY_DIRECTORY)
    if folder < 0:
        return SweepReport()
    try:
        return _Sweep(folder, clock).run()
    finally:
        os.close(folder)


class _Life(Enum):
    LIVING = "living"
    DEAD = "dead"
    UNKNOWN = "unknown"


class _Sweep:
    """One sweep of one tmp folder; works relative to the folder's descriptor, so that no link can redirect it."""

    def __init__(self, folder: int, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._clock = clock
        self._verdicts: dict[str, _Life] = {}
        self._report = SweepReport()

    def run(self) -> SweepReport:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    continue
                if temporary := TEMPORARY_FILE.fullmatch(entry.name):
                    self._visit_temporary(entry, writer=temporary[1])
                elif lock := WRITER_LOCK.fullmatch(entry.name):
                    # Not remembered: its writer may just be starting, and then locks another file.
                    self._look(lock[1])
        return self._report

    def _visit_temporary(self, entry: "os.DirEntry[str]", *, writer: str) -> None:
        life = self._judge(writer)
        if life is _Life.LIVING:
            return
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            return
        is_old = self._clock() - status.st_mtime > AGE_LIMIT_SECONDS
        if (life is _Life.DEAD or is_old) and self._unlink(entry.name):
            self._report.removed += 1
            self._report.removed_bytes += status.st_size

    def _judge(self, writer: str) -> _Life:
        if writer not in self._verdicts:
            if len(self._verdicts) >= MAX_VERDICTS:
                self._verdicts.clear()
            life = self._verdicts[writer] = self._look(writer)
            self._report.living += life is _Life.LIVING
            self._report.dead += life is _Life.DEAD
        return self._verdicts[writer]

    def _look(self, writer: str) -> _Life:
        """Try to take a writer's lock; if that works, remove the lock file while holding it."""
        name = f"{writer}.lock"
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(name, flags, dir_fd=self._folder)
        except FileNotFoundError:
            return _Life.DEAD
        except OSError:
            return _Life.LIVING
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(descriptor, name, folder=self._folder):
                return _Life.LIVING
            self._unlink(name)
            return _Life.DEAD
        except OSError as error:
            no_flock = error.errno in _NO_FLOCK
            self._report.by_age |= no_flock
            return _Life.UNKNOWN if no_flock else _Life.LIVING
        finally:
            os.close(descriptor)

    def _unlink(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        except OSError:
            self._report.failed += 1
            return False
        return True


def _create_locked(path: str) -> tuple[int, bool]:
    """Return a descriptor of the file at `path`, locked, and whether the lock is a real one."""
    for _ in range(MAX_ATTEMPTS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor, True
        except BlockingIOError:
            time.sleep(0.001)
        except OSError as error:
            if error.errno in _NO_FLOCK:
                return descriptor, False
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)


def _is_at(descriptor: int, path: str, *, folder: int | None = None) -> bool:
    try:
        found = os.stat(path, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def _open_folder(parent: str, name: str) -> int:
    """Return a descriptor of a folder below another, neither of them a link; -1 if there is none."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        outer = os.open(parent, flags)
        try:
            return os.open(name, flags, dir_fd=outer)
        finally:
            os.close(outer)
    except (FileNotFoundError, NotADirectoryError):
        return -1
    except OSError as error:
        if error.errno == errno.ELOOP:
            return -1
        raise
