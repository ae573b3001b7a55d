"""What the agent remembers of its pools over restarts: one small file in its folder below kubelet's.

Facts: after a restart a disk may be missing, and a pool that was on it must not move to another disk, nor to the
filesystem below its mount point. A pool may be deleted while the node is down, and nobody names its place any more.
What they mean: where each pool was prepared, and how often, is written down, not on the disk in question.

A file that is lost or damaged costs this knowledge and nothing else. Any thread.
"""

import contextlib
import logging
import os
import threading
import uuid
from dataclasses import asdict, dataclass

from pykvcache_contract.api.node import POOLS_MAX
from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_storage.documents import create_document, read_document

logger = logging.getLogger(__name__)

MEMORY_FILE = "pools.json"
_POOLS_MAX = POOLS_MAX
"""The file stays within the size that is read again, also with long names; the oldest entry goes first."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """One pool.

    Args:
        pool: the object's name.
        root: the tree was prepared in this directory.
        generation: of the tree.
        mount_point: of its filesystem.
    """

    pool: str
    root: str
    generation: int
    mount_point: str


class Memory:
    """The file.

    Args:
        directory: made if it is missing.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(directory, MEMORY_FILE)
        self._lock = threading.Lock()
        os.makedirs(directory, exist_ok=True)
        self._pools = _read(self._path)

    def get(self, uid: str) -> Remembered | None:
        """Return what is remembered of a pool."""
        with self._lock:
            return self._pools.get(uid)

    def roots(self) -> set[str]:
        """Return every directory in which a tree was prepared."""
        with self._lock:
            return {pool.root for pool in self._pools.values()}

    def note(self, uid: str, remembered: Remembered) -> None:
        """Remember a pool; writes only what is new."""
        with self._lock:
            if self._pools.get(uid) == remembered:
                return
            self._pools[uid] = remembered
            while len(self._pools) > _POOLS_MAX:
                del self._pools[next(iter(self._pools))]
            self._write()

    def forget(self, uid: str) -> None:
        """Forget a pool that is erased."""
        with self._lock:
            if self._pools.pop(uid, None) is not None:
                self._write()

    def _write(self) -> None:
        temporary = f"{self._path}.{uuid.uuid4().hex}"
        try:
            create_document(temporary, {uid: asdict(pool) for uid, pool in self._pools.items()})
            os.rename(temporary, self._path)
        except OSError as error:
            logger.warning("%s could not be written: %s. A restart forgets where pools are.", self._path, error)
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _read(path: str) -> dict[str, Remembered]:
    try:
        document = read_document(path, remedy="It is written anew.")
    except FileNotFoundError:
        return {}
    except PoolUnavailableError as error:
        logger.warning("%s", error)
        return {}
    pools = {}
    for uid, entry in document.items():
        try:
            remembered = Remembered(**entry)
        except TypeError:
            continue
        if all(isinstance(text, str) for text in (remembered.pool, remembered.root, remembered.mount_point)):
            if isinstance(remembered.generation, int):
                pools[uid] = remembered
    return pools
