"""Whether this sidecar may work on its pool now: is it the same pool as before, can it be written, is it our turn?

Looked at before every round, because a disk can vanish under its mount point, and what is then written fills the root
filesystem. As long as the pool is not there nothing is touched, and no file of it is held open, so that it can be
unmounted. A blank place of the same kind is prepared anew, or taken over if another sidecar or a vLLM was first.

One thread. Raises nothing: what is wrong becomes a state and a sentence.
"""

import errno
import logging
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from pykvcache_contract.errors import (
    CapacityError,
    ConfigurationError,
    PoolUnavailableError,
    PyKVCacheError,
    ReadOnlyError,
)
from pykvcache_contract.paths import USAGE_FILE
from pykvcache_sidecar.care_lock import CareLock, Turn
from pykvcache_sidecar.settings import CareSettings
from pykvcache_storage.anchor import Anchor, PoolState
from pykvcache_storage.pool import Pool, open_pool

logger = logging.getLogger(__name__)

WORKING = "working"
STANDBY = "standby"
READ_ONLY = "read_only"
REFUSED = "refused"
MISSING = "missing"
UNMOUNTED = "unmounted"

_NOT_THERE = {errno.ENOENT, errno.ENOTDIR}
_NOT_WRITABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_FLOCK = "the filesystem knows no flock: several sidecars on this pool would all work, which is safe but wasteful"


@dataclass(frozen=True, slots=True)
class Standing:
    """What may be done.

    Args:
        state: one of the contract's `POOL_STATES`; only in `WORKING` may anything be written.
        reason: a sentence with the remedy, or a remark.
    """

    state: str
    reason: str = ""


class Watch:
    """Looks at one pool directory.

    Args:
        pool: as opened at the start.
        clock: Unix time.

    Attributes:
        pool: the pool that is there now, or was last.
    """

    def __init__(self, settings: CareSettings, pool: Pool, *, clock: Callable[[], float]) -> None:
        self.pool = pool
        self._settings = settings
        self._clock = clock
        self._anchor = Anchor.of(pool, clock=clock)
        self._lock = CareLock(pool.directory)

    def look(self) -> Standing:
        """Return what may be done now; takes the turn if it is free."""
        state = self._anchor.state()
        if state is PoolState.BLANK:
            self.leave()
            if refusal := self._adopt():
                return refusal
        elif state is not PoolState.SAME:
            self.leave()
            return Standing(state.name.lower(), self._anchor.describe())
        return self._look_closer()

    def leave(self) -> None:
        """Let another sidecar work, and hold nothing of the filesystem."""
        self._lock.give_back()

    def _look_closer(self) -> Standing:
        directory = self.pool.directory
        try:
            if reason := _why_not_writable(directory):
                self.leave()
                return Standing(READ_ONLY, reason)
            turn = self._lock.take()
        except CapacityError:
            turn = Turn.UNKNOWN  # A full disk is where work is most needed.
        except ReadOnlyError as error:
            return Standing(READ_ONLY, f"{error}. {access_remedy(directory)}")
        except (OSError, PyKVCacheError) as error:
            self.leave()
            return Standing(REFUSED, str(error))
        if turn is Turn.OTHERS:
            return Standing(STANDBY, "another sidecar works on this pool; this one takes over when it ends")
        return Standing(WORKING, _NO_FLOCK if turn is Turn.UNKNOWN else "")

    def _adopt(self) -> Standing | None:
        """Take the place over as a new pool; return what is against it."""
        try:
            self._settings.check_mount()
            pool = open_pool(self.pool.directory, create=True)
            self.pool, self._anchor = pool, Anchor.of(pool, clock=self._clock)
        except (ConfigurationError, PoolUnavailableError) as error:
            return Standing(REFUSED, str(error))
        logger.warning("the pool was prepared anew at %s: uid %s", self.pool.directory, self.pool.uid)
        return None


def try_open(settings: CareSettings) -> "Pool | Standing":
    """Open the pool, or return why it cannot be looked after yet; an empty directory becomes one."""
    try:
        if os.path.isdir(settings.pool_directory):
            settings.check_mount()
        return open_pool(settings.pool_directory, create=True)
    except ConfigurationError as error:
        return Standing(UNMOUNTED, str(error))
    except PoolUnavailableError as error:
        return Standing(_state_of(error.__cause__), str(error))
    except OSError as error:
        return Standing(_state_of(error), f"{settings.pool_directory}: {error.strerror}")


def _state_of(cause: BaseException | None) -> str:
    code = cause.errno if isinstance(cause, OSError) else None
    if code in _NOT_THERE:
        return MISSING
    return READ_ONLY if code in _NOT_WRITABLE else REFUSED


def _why_not_writable(directory: str) -> str:
    if os.statvfs(directory).f_flag & os.ST_RDONLY:
        return f"{directory} is mounted read-only: mount -o remount,rw, or readOnly: false in the pod."
    for path in (directory, os.path.join(directory, USAGE_FILE)):
        if os.path.exists(path) and not os.access(path, os.W_OK):
            return f"{path} is not writable for user {os.geteuid()}. {access_remedy(directory)}"
    return ""


def access_remedy(directory: str) -> str:
    """Return the sentence that says how this process gets access to the pool's files."""
    return f"Give access: chown -R {os.geteuid()} {shlex.quote(directory)}, or set fsGroup in the pod."
