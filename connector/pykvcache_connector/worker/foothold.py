"""A writer's place in a pool: the folders of its fingerprint and its lock there, made anew when they vanish.

Facts: a disk can vanish under its mount point, and come back blank; whoever creates folders meanwhile fills the root
filesystem. An administrator may empty a pool under running engines. What they mean: before anything is created, and
again every few seconds while blocks are stored, the directory must prove to be the place that was opened. A bare mount
point or another pool: nothing is stored, and no lock held, until the pool is back. The same place without its folders,
or a blank disk on the same mount point, prepared by us or by the first of several processes: folders and lock are made
again.

Blocking calls, on the thread of housekeeping only.
"""

import logging
from collections.abc import Collection
from typing import Any

from pykvcache_contract.errors import PyKVCacheError
from pykvcache_contract.keys import Fingerprint
from pykvcache_storage.anchor import Anchor, PoolState
from pykvcache_storage.pool import Pool, open_pool
from pykvcache_storage.recovery import WriterLock, sweep

logger = logging.getLogger(__name__)


class Foothold:
    """Where one writer process stands in one pool.

    Args:
        may_create: whether a blank disk on the same mount point may be made a pool again; else somebody else must.

    Attributes:
        is_there: the pool was the one that was opened when it was last looked at.
    """

    def __init__(self, pool: Pool, *, may_create: bool = True) -> None:
        self.is_there = True
        self._pool = pool
        self._may_create = may_create
        self._anchor = Anchor.of(pool)
        self._current: tuple[Fingerprint, dict[str, Any]] | None = None
        self._locks: dict[Fingerprint, WriterLock] = {}
        self._complaint = ""

    def prepare(self, fingerprint: Fingerprint, description: dict[str, Any]) -> None:
        """Create the fingerprint's folders and remove what dead writers left; if the pool is away, when it is back.

        Locks of fingerprints before the last one are dropped, so that a sidecar can remove their folders; stores of the
        last one may still be under way.
        """
        last = fingerprint if self._current is None else self._current[0]
        self._leave(self._locks.keys() - {fingerprint, last})
        self._current = (fingerprint, description)
        self.look()

    def look(self) -> None:
        """See whether the pool is still there, and make anew what is missing of ours."""
        try:
            self.is_there = False
            self.is_there = self._is_usable()
            if self.is_there and self._current is not None and not self._holds(self._current[0]):
                self._settle(*self._current)
        except (OSError, PyKVCacheError) as error:
            self._complain(f"this model's folders could not be prepared, blocks may not be stored: {error}")
        else:
            self._complaint = "" if self.is_there else self._complaint

    def is_same_place(self) -> bool:
        """Return whether something may be created in the pool now. Any thread."""
        return self._anchor.state() is PoolState.SAME

    def writer(self, fingerprint: Fingerprint) -> str:
        """Return the name of this writer, whose lock is held.

        Raises:
            PoolUnavailableError, ReadOnlyError: the lock cannot be made.
        """
        if fingerprint not in self._locks:
            self._locks[fingerprint] = WriterLock(self._pool.directory, fingerprint)
        return self._locks[fingerprint].writer

    def leave(self) -> None:
        """Drop the locks: this writer ends, or a disk that is gone must not be held."""
        self._leave(set(self._locks))

    def _leave(self, fingerprints: Collection[Fingerprint]) -> None:
        for fingerprint in fingerprints:
            self._locks.pop(fingerprint).close()

    def _is_usable(self) -> bool:
        state = self._anchor.state()
        if state is PoolState.BLANK:
            self._pool = open_pool(self._pool.directory, create=self._may_create, for_writing=True)
            self._anchor = Anchor.of(self._pool)
            logger.warning("%s was blank and is a pool again, as %s", self._pool.directory, self._pool.uid)
        elif state is not PoolState.SAME:
            self._complain(f"blocks are not stored for now: {self._anchor.describe()}")
            self.leave()
            return False
        return True

    def _holds(self, fingerprint: Fingerprint) -> bool:
        lock = self._locks.get(fingerprint)
        return lock is not None and lock.is_held()

    def _settle(self, fingerprint: Fingerprint, description: dict[str, Any]) -> None:
        self._leave(self._locks.keys() & {fingerprint})
        self._pool.prepare_fingerprint(fingerprint, description)
        report = sweep(self._pool.directory, fingerprint)
        if report.removed:
            logger.info("removed temporary files of dead writers: %d", report.removed)
        self.writer(fingerprint)

    def _complain(self, complaint: str) -> None:
        """Say what is wrong, once until something else is."""
        if complaint != self._complaint:
            self._complaint = complaint
            logger.warning("%s", complaint)
