"""Which of several sidecars works on a pool: the holder of a flock on `<pool>/care.lock`.

The kernel drops the lock when its holder dies, however it dies, so the next one takes over within an interval. The file
stays when nobody holds it. It is opened for reading only: a file open for writing would keep an administrator from
remounting the disk read-only. NFS locks only what is open for writing, so there it is opened so.

A disk may vanish between any two steps. So the file is made only beside pool.json, found through one descriptor: what
is made in a bare mount point lies on the filesystem below.

Where the filesystem knows no flock every sidecar works; that is safe, because removals are, and only wastes effort.
One thread; never blocks on the lock.
"""

import errno
import fcntl
import os
from enum import Enum

from pykvcache_contract.paths import CARE_LOCK_FILE, POOL_FILE
from pykvcache_storage.block import translate
from pykvcache_storage.sharing import share_file

_NO_FLOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Turn(Enum):
    """Whose turn it is."""

    OURS = "ours"
    OTHERS = "others"
    UNKNOWN = "unknown"
    """No flock here: work, and say so."""


class CareLock:
    """The lock of one pool directory, not taken yet."""

    def __init__(self, pool_directory: str) -> None:
        self.path = os.path.join(pool_directory, CARE_LOCK_FILE)
        self._descriptor = -1

    def take(self) -> Turn:
        """Take the lock, or make sure that it is still the one at its path.

        Raises:
            ReadOnlyError, TransientError: the lock file cannot be made or opened.
        """
        if self._descriptor >= 0 and self._is_at_path():
            return Turn.OURS
        self.give_back()
        try:
            return self._open_and_lock(os.O_RDONLY)
        except OSError as error:
            self.give_back()
            raise translate(error, operation="lock", path=self.path) from error

    def give_back(self) -> None:
        """Let another sidecar work, and let go of the filesystem."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open_and_lock(self, mode: int) -> Turn:
        self._descriptor = self._open(mode | _FLAGS)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.give_back()
            return Turn.OTHERS
        except OSError as error:
            if error.errno == errno.EBADF and mode == os.O_RDONLY:
                self.give_back()
                return self._open_and_lock(os.O_RDWR)
            if error.errno not in _NO_FLOCK:
                raise
            self.give_back()
            return Turn.UNKNOWN
        if self._is_at_path():
            return Turn.OURS
        # Removed between opening and locking: the next round looks for the new one.
        self.give_back()
        return Turn.OTHERS

    def _open(self, flags: int) -> int:
        try:
            # Without O_CREAT first: in a sticky folder the kernel refuses to "create" another user's file.
            return os.open(self.path, flags)
        except FileNotFoundError:
            descriptor = self._create(flags)
            share_file(self.path)
            return descriptor

    def _create(self, flags: int) -> int:
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.stat(POOL_FILE, dir_fd=folder, follow_symlinks=False)
            return os.open(CARE_LOCK_FILE, flags | os.O_CREAT, 0o666, dir_fd=folder)
        finally:
            os.close(folder)

    def _is_at_path(self) -> bool:
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(os.fstat(self._descriptor), found)
