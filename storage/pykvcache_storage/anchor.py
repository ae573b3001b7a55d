"""Whether a pool directory still is the pool that was opened, asked before every round of changes.

Facts: a disk can vanish under its mount point, and what is then written fills the filesystem below, where an old copy
of the pool may lie from the day it moved to the disk. A disk that comes back may bear another device number (NVMe
after a reset, NFS, device mapper), and a new one is blank. A bind mount of the same filesystem, as in containers, has
the device and inode of its source. What they mean: neither pool.json nor the device number alone tells. Therefore
what counts is the mount point that the pool was on, found by mount ids, and then the uid in pool.json:

- that mount point is none any more: `UNMOUNTED`, whatever lies below it;
- it is one and holds the same uid: `SAME`, whatever its device number. A copy of the pool that another mount has put
  in its place, on another device: `REPLACED`;
- it is one and holds nothing: `BLANK`, the only state in which a pool may be prepared anew. Of several processes that
  see a blank disk one is first; what it created is no other pool for the rest. So a pool created since the former was
  last seen is `BLANK` too, and to open it with `create` is right.

No descriptor is kept, so that the disk can be unmounted at any time. Asking takes a tenth of a millisecond, any
thread; it blocks as long as the filesystem does. Where the kernel tells no mount ids (gVisor) device numbers stand in,
and bind mounts of the same filesystem look like folders.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_storage.pool import Pool, read_identity, refuse_foreign

CREATED_SLACK_SECONDS = 5.0
"""How far the clocks of hosts that share a pool may differ, and pool.json tells whole seconds."""

_BACK = "and work goes on by itself"


class PoolState(Enum):
    """What a pool's directory is now."""

    SAME = "same"
    MISSING = "missing"
    """Gone or unreadable."""
    UNMOUNTED = "unmounted"
    """The mount point that it was on is none any more."""
    REPLACED = "replaced"
    """Another pool, foreign files, or another filesystem in its place."""
    BLANK = "blank"
    """The same place without a pool and without foreign files, or one that another process has prepared anew."""


@dataclass(slots=True)
class Anchor:
    """What an opened pool was.

    Args:
        directory: as it was opened; may be a link.
        place: the same without links.
        mount_point: what the filesystem that holds it is mounted on: `place` or a folder above.
        clock: Unix time.
        seen_seconds: when the pool was last found the same.
    """

    directory: str
    uid: str
    device: int
    place: str
    mount_point: str
    clock: Callable[[], float] = field(default=time.time, repr=False)
    seen_seconds: float = 0.0

    @classmethod
    def of(cls, pool: Pool, *, clock: Callable[[], float] = time.time) -> "Anchor":
        """Note what the pool is now.

        Raises:
            PoolUnavailableError: it is gone already, or another one.
        """
        place = os.path.realpath(pool.directory)
        try:
            device, mount_point = os.stat(place).st_dev, _mount_point_of(place)
        except OSError as error:
            raise PoolUnavailableError(f"look at {pool.directory}: {error.strerror}. Mount its disk.") from error
        anchor = cls(pool.directory, pool.uid, device, place, mount_point, clock, clock())
        state, sentence = anchor._look()
        if state is not PoolState.SAME:
            raise PoolUnavailableError(sentence)
        return anchor

    @property
    def was_mount_point(self) -> bool:
        """Return whether the pool's directory itself was a mount point, bind mounts included."""
        return self.place == self.mount_point

    def state(self) -> PoolState:
        """Return what the directory is now. A pool that comes back is SAME again."""
        return self._look()[0]

    def describe(self) -> str:
        """Return a sentence that says what the directory is now and what can be done."""
        return self._look()[1]

    def _look(self) -> tuple[PoolState, str]:
        place = os.path.realpath(self.directory)
        try:
            if place == self.place and not is_mount_point(self.mount_point):
                return PoolState.UNMOUNTED, (
                    f"{self.mount_point} was the mount point of {self.directory} and is none now: "
                    f"mount the disk again, {_BACK}."
                )
            is_same_place = place == self.place and _mount_id(place) == _mount_id(self.mount_point)
            is_same_device = os.stat(place).st_dev == self.device
            identity = read_identity(place)
        except OSError as error:
            return self._missing(error.strerror)
        except PoolUnavailableError as error:
            return self._missing(str(error).rstrip("."))
        if identity is None:
            return self._without_pool(place, is_same_place=is_same_place)
        if identity["uid"] != self.uid:
            return self._another(identity, is_same_place=is_same_place)
        if not (is_same_place or is_same_device):
            return self._replaced("is on another filesystem, with a copy of the pool")
        self.seen_seconds = self.clock()
        return PoolState.SAME, f"{self.directory} is pool {self.uid}, as before."

    def _another(self, identity: dict[str, Any], *, is_same_place: bool) -> tuple[PoolState, str]:
        if is_same_place and _created_seconds(identity) >= self.seen_seconds - CREATED_SLACK_SECONDS:
            return PoolState.BLANK, f"{self.directory} was prepared anew and is pool {identity['uid']} now: it is used."
        return self._replaced(f"is pool {identity['uid']} and was {self.uid}")

    def _without_pool(self, place: str, *, is_same_place: bool) -> tuple[PoolState, str]:
        if not is_same_place:
            return self._replaced("is another place and no pool")
        try:
            refuse_foreign(place)
        except PoolUnavailableError:
            return self._replaced("holds other files and no pool")
        except OSError as error:
            return self._missing(error.strerror)
        return PoolState.BLANK, (
            f"{self.directory} holds no pool any more and is prepared anew; if it is the wrong disk, mount the former."
        )

    def _missing(self, reason: str | None) -> tuple[PoolState, str]:
        sentence = f"{self.directory} cannot be read ({reason}): mount its disk or give access, {_BACK}."
        return PoolState.MISSING, sentence

    def _replaced(self, what: str) -> tuple[PoolState, str]:
        sentence = f"{self.directory} {what}: mount the former disk, {_BACK}, or restart to use what is there."
        return PoolState.REPLACED, sentence


def _created_seconds(identity: dict[str, Any]) -> float:
    try:
        return datetime.fromisoformat(identity["created"]).timestamp()
    except ValueError:
        return 0.0


def _mount_point_of(path: str) -> str:
    mount = _mount_id(path)
    while (parent := os.path.dirname(path)) != path and _mount_id(parent) == mount:
        path = parent
    return path


def is_mount_point(path: str) -> bool:
    """Return whether a filesystem is mounted on this directory, bind mounts of the same filesystem included.

    Args:
        path: absolute, without links.

    Raises:
        OSError: it cannot be reached, or is no directory.
    """
    parent = os.path.dirname(path)
    return parent == path or _mount_id(path) != _mount_id(parent)


def _mount_id(directory: str) -> str:
    """Return what tells two mounts apart, also two of the same filesystem."""
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _told_mount_id(descriptor) or f"device {os.fstat(descriptor).st_dev}"
    finally:
        os.close(descriptor)


def _told_mount_id(descriptor: int) -> str:
    try:
        with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines:
            return next((line for line in lines if line.startswith("mnt_id:")), "")
    except OSError:
        return ""
