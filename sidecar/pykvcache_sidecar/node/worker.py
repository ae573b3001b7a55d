"""One pool on this node: finds its place, prepares it, keeps it cared for, and erases it in the end.

The manager says what it wants (`Order`), other threads ask for directories and for the pool's state; all else happens
on the worker's own thread, so that a disk that hangs takes this pool with it and nothing else. A round is short, and
each looks at everything anew: what was true of a disk a second ago proves nothing.

What pods get of a pool that is not ready is decided by the manager; this tells only why it is not.
"""

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace

from pykvcache_contract.api.node import Disk, NodePool, NodePoolState, Profile
from pykvcache_contract.api.pool import DeletionPolicy, KVCachePool, Sharing
from pykvcache_contract.errors import CapacityError, PoolUnavailableError, PyKVCacheError, ReadOnlyError
from pykvcache_contract.names import (
    REASON_DISK_FULL,
    REASON_DISK_READ_ONLY,
    REASON_ERROR,
    REASON_NOT_PREPARED,
    REASON_POOL_REPLACED,
)
from pykvcache_sidecar.book import Snapshot
from pykvcache_sidecar.levels import free_bytes
from pykvcache_sidecar.node.caretakers import Caretakers
from pykvcache_sidecar.node.disks import coarse, disk_at
from pykvcache_sidecar.node.erase import erase, erase_aside
from pykvcache_sidecar.node.mounts import mounts_of
from pykvcache_sidecar.node.orders import Aim, Order, Surroundings, Wanted
from pykvcache_sidecar.node.placing import find_tree, prepare_tree
from pykvcache_sidecar.node.profiles import put_profile
from pykvcache_sidecar.node.tree import CALIBRATION, PoolTree
from pykvcache_sidecar.node.tree_file import NAMESPACES, TreeError, explained, tree_error
from pykvcache_storage.probe import ProbeResult, probe

logger = logging.getLogger(__name__)

NAMESPACES_MAX = 256
"""Most namespaces with a directory of their own in a pool; each is cared for by threads of its own."""
ANSWER_SECONDS = 10.0
"""How long a pod's mount waits for a directory that has to be made."""
STALL_SECONDS = 30.0
"""A round takes milliseconds; a worker that needs so long sits on a disk that does not answer."""
CARE_END_SECONDS = 10.0
"""How long a round of an erasure waits for the care to end: what that makes meanwhile would have to be erased again."""
CLEAR_OUT_ENTRIES_MAX = 1000
"""Entries of directories of former namespaces looked at in one round: pods wait for rounds."""
REASON_IN_USE = "InUse"
_STILL_THERE = {REASON_DISK_FULL, REASON_DISK_READ_ONLY}
"""The directory is whole and can be read: pods may have it, although the pool is not ready for more."""


class PoolWorker:
    """Works for one pool.

    Args:
        tree: if it is known already.

    Attributes:
        order: set by the manager at any time.
        is_done: nothing is left to do; the worker can go.
    """

    def __init__(
        self, *, name: str, uid: str, order: Order, surroundings: Surroundings, tree: PoolTree | None = None
    ) -> None:
        self.name = name
        self.uid = uid
        self.order = order
        self.is_done = False
        self._around = surroundings
        self._tree = tree
        self._probed: ProbeResult | None = None
        self._disk: Disk | None = None
        self._directories: dict[Wanted, str] = {}
        self._profiled: dict[str, Profile | None] = {}
        self._caretakers = Caretakers(surroundings.settings.interval_seconds)
        self._questions: queue.SimpleQueue[tuple[Wanted, Future[str]]] = queue.SimpleQueue()
        self._namespaces: frozenset[str] = frozenset()
        self._gone: tuple[float, frozenset[str]] | None = None
        self._has_aside = True
        """Something may be set aside: perhaps by a process that was killed before it was erased."""
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._ticked = surroundings.monotonic()
        self._report = NodePool(
            name=name, uid=uid, state=NodePoolState.NOT_READY, reason=REASON_NOT_PREPARED, message="not looked at yet"
        )

    # ---- for other threads ----

    def report(self) -> NodePool:
        """Return the pool's state here; from memory."""
        silent_seconds = self._around.monotonic() - self._ticked
        if silent_seconds <= STALL_SECONDS:
            return self._report
        state = NodePoolState.NOT_READY if self._report.state is NodePoolState.READY else self._report.state
        message = f"the disk has not answered for {STALL_SECONDS:.0f} s or more. Look at dmesg; check the disk."
        return replace(self._report, state=state, reason=REASON_ERROR, message=message)

    def snapshots(self) -> list[Snapshot]:
        """Return what the care of each directory knows."""
        return self._caretakers.snapshots()

    def problems(self) -> dict[str, str]:
        """Return what keeps single directories from being cared for, by directory."""
        return dict(self._caretakers.problems)

    def directory(self, wanted: Wanted) -> str:
        """Return a pool directory; make it if it is missing, within `ANSWER_SECONDS`.

        Raises:
            TreeError: there is none now.
        """
        report = self.report()
        if report.state is not NodePoolState.READY and report.reason not in _STILL_THERE | {REASON_NOT_PREPARED}:
            raise TreeError(report.reason, report.message)
        known = self._directories.get(wanted)
        if known is not None and report.reason != REASON_NOT_PREPARED:
            return known
        answer: Future[str] = Future()
        self._questions.put((wanted, answer))
        self._wake.set()
        try:
            return answer.result(ANSWER_SECONDS)
        except FutureTimeoutError:
            raise TreeError(REASON_ERROR, f"the disk of pool {self.name} does not answer") from None

    def namespaces(self) -> frozenset[str]:
        """Return the namespaces that had a directory in the last round."""
        return self._namespaces

    def clear_out(self, namespaces: frozenset[str]) -> None:
        """Erase the directories of namespaces that exist no more, soon or never: one that is mounted stays."""
        self._gone = (self._around.monotonic(), namespaces)
        self._wake.set()

    def wake(self) -> None:
        """Begin the next round now."""
        self._wake.set()

    def stop(self) -> None:
        """Ask the worker to end."""
        self._stopped.set()
        self._wake.set()

    # ---- the worker's own thread ----

    def run(self) -> None:
        """Go round until it is stopped or done."""
        while not self._stopped.is_set() and not self.is_done:
            self.round()
            self._wake.wait(self._around.settings.interval_seconds)
            self._wake.clear()
        self.close()

    def close(self, timeout_seconds: float = 0.0) -> None:
        """End all care, and wait for each loop at most so long."""
        self._caretakers.stop(timeout_seconds)

    def round(self) -> None:
        """Do what is to be done now, a bounded piece of it; raises nothing."""
        order = self.order
        work = {Aim.KEEP: self._keep, Aim.LEAVE: self._leave, Aim.ERASE: self._erase}[order.aim]
        try:
            with explained(self.name if self._tree is None else self._tree.directory):
                work(order)
        except TreeError as error:
            self._tell_trouble(order, error.reason, error.message)
        except ReadOnlyError as error:
            self._tell_trouble(order, REASON_DISK_READ_ONLY, str(error))
        except CapacityError as error:
            self._tell_trouble(order, REASON_DISK_FULL, str(error))
        except PyKVCacheError as error:
            self._tell_trouble(order, REASON_ERROR, str(error))
        except Exception as error:
            logger.exception("pool %s could not be looked after", self.name)
            self._tell_trouble(order, REASON_ERROR, f"{type(error).__name__}: {error}. See the node agent's log.")
        self._ticked = self._around.monotonic()
        self._answer(order)

    def _tell_trouble(self, order: Order, reason: str, message: str) -> None:
        if reason not in _STILL_THERE:
            self._rest()
        state = NodePoolState.DELETING if order.aim is Aim.ERASE else NodePoolState.NOT_READY
        self._tell(order, state, reason, message)

    def _rest(self) -> None:
        self._around.held.pop(self.uid, None)
        self._caretakers.stop()
        self._directories = {}

    # ---- keeping ----

    def _keep(self, order: Order) -> None:
        pool = _pool_of(order)
        self._use(prepare_tree(pool, self._around))
        tree = _tree_of(self._tree)
        is_read_only = bool(os.statvfs(tree.directory).f_flag & os.ST_RDONLY)
        if not is_read_only:
            self._set_aside_former(tree)
        leaves = tree.leaves()
        self._namespaces = frozenset(_namespaces_of(tree, leaves))
        # Before anything is made: on a full disk that fails until care has made room.
        self._tend(tree, leaves, pool)
        if is_read_only:
            message = f"{tree.directory} is mounted read-only. Check the disk; then mount -o remount,rw"
            self._tell(order, NodePoolState.NOT_READY, REASON_DISK_READ_ONLY, message)
            return
        self._probe(tree)
        remark = self._make_directories(order, pool)
        self._put_profiles(leaves, order.profile)
        self._erase_aside(tree)
        if self._is_full(tree.directory, pool):
            self._tell(order, NodePoolState.NOT_READY, REASON_DISK_FULL, _FULL.format(tree.directory))
        else:
            self._tell(order, NodePoolState.READY, "", remark)

    def _tend(self, tree: PoolTree, leaves: Sequence[str], pool: KVCachePool) -> None:
        held, place = self._around.held, tree.record.mount_point
        others = sum(size for uid, (where, size) in list(held.items()) if where == place and uid != self.uid)
        self._caretakers.tend(_cared_for(tree, leaves), pool, others_bytes=others)
        held[self.uid] = (place, self._used_bytes(pool))

    def _used_bytes(self, pool: KVCachePool) -> int:
        # Pods can write the record: one that claims more than there is must not spoil the node's whole status.
        most = pool.spec.storage.capacity_per_node_bytes or 0
        return sum(min(now.levels.used_bytes or 0, most) for now in self._caretakers.snapshots())

    def _probe(self, tree: PoolTree) -> None:
        if self._probed is not None:
            return
        try:
            self._probed = probe(tree.directory)
        except PoolUnavailableError as error:
            if isinstance(error.__cause__, OSError):
                raise tree_error(error.__cause__, tree.directory) from error
            raise
        self._disk = disk_at(tree.record.mount_point)

    def _use(self, tree: PoolTree) -> None:
        """Begin anew where the tree is another one than in the last round."""
        former = self._tree
        self._tree = tree
        if former is None or (former.root, former.record.generation) != (tree.root, tree.record.generation):
            self._rest()
            self._probed = self._disk = None
            self._profiled = {}
            self._has_aside = True
            logger.info("pool %s is at %s, generation %d", self.name, tree.directory, tree.record.generation)

    def _make_directories(self, order: Order, pool: KVCachePool) -> str:
        """Make what nobody will ask for; return why a namespace has no directory, which keeps no other from its own."""
        wanted = []
        if pool.spec.sharing is Sharing.POOL:
            wanted.append(Wanted())
        if pool.spec.calibration.enabled:
            wanted.append(Wanted(is_calibration=True))
        for one in wanted:
            if one not in self._directories:
                self._make(one, order.profile)
        try:
            for name in order.namespaces:
                if Wanted(namespace=name) not in self._directories:
                    self._make(Wanted(namespace=name), order.profile)
        except TreeError as error:
            return error.message
        return ""

    def _make(self, wanted: Wanted, profile: Profile | None) -> str:
        tree = _tree_of(self._tree)
        if wanted.is_calibration:
            path = tree.calibration_directory()
        elif wanted.namespace:
            self._check_room(tree, wanted.namespace)
            path = tree.namespace_directory(wanted.namespace)
        else:
            path = tree.shared_directory()
        self._put_profile(path, profile)
        self._directories[wanted] = path
        return path

    def _set_aside_former(self, tree: PoolTree) -> None:
        """Take the directories of namespaces that are gone out of use, unless a pod of theirs still ends."""
        gone, self._gone = self._gone, None
        if gone is None or self._around.monotonic() - gone[0] > STALL_SECONDS:
            return  # by then there may be a new one of the name
        for name in sorted(gone[1]):
            leaf = f"{tree.directory}/{NAMESPACES}/{name}"
            if mounts_of(leaf, below=self._around.settings.kubelet_directory):
                continue
            self._directories.pop(Wanted(namespace=name), None)
            self._profiled.pop(leaf, None)
            tree.set_aside(name)
            self._has_aside = True
            logger.info("namespace %s is gone, and its directory in pool %s is erased", name, self.name)

    def _erase_aside(self, tree: PoolTree) -> None:
        """Erase a piece of what was set aside; that it fails is no trouble of the pool's."""
        if not self._has_aside:
            return
        try:
            self._has_aside = erase_aside(tree, entries_max=CLEAR_OUT_ENTRIES_MAX).more
        except TreeError as error:
            self._has_aside = False  # until the next one, or a restart
            logger.warning("directories of former namespaces in pool %s stay: %s", self.name, error.message)
        if self._has_aside:
            self._wake.set()

    def _check_room(self, tree: PoolTree, namespace: str) -> None:
        others = _namespaces_of(tree, tree.leaves())
        if len(others) >= NAMESPACES_MAX and namespace not in others:
            raise TreeError(
                REASON_ERROR,
                f"{len(others)} namespaces have a directory in pool {self.name} on this node, the most there may be. "
                "Make another pool for the rest (allowedNamespaces).",
            )

    def _put_profiles(self, leaves: Sequence[str], profile: Profile | None) -> None:
        for leaf in leaves:
            if leaf not in self._profiled or self._profiled[leaf] != profile:
                self._put_profile(leaf, profile)

    def _put_profile(self, leaf: str, profile: Profile | None) -> None:
        self._profiled[leaf] = profile  # not again before it changes, also if it fails
        try:
            put_profile(leaf, profile)
        except OSError as error:
            logger.warning("the profile could not be written into %s: %s", leaf, error)

    def _is_full(self, directory: str, pool: KVCachePool) -> bool:
        """Return whether others leave the pool no room at all: then it holds nothing, and can hold nothing."""
        used = [now.levels.used_bytes for now in self._caretakers.snapshots()]
        known = [size for size in used if size is not None]
        if len(known) < len(used):
            return False
        return free_bytes(directory) + sum(known) <= pool.spec.storage.min_free_bytes

    # ---- leaving and erasing ----

    def _leave(self, order: Order) -> None:
        if self._count_mounts():
            self._keep(order)
            return
        self._rest()
        self.is_done = True
        logger.info("pool %s does not belong to this node any more; its files stay", self.name)

    def _erase(self, order: Order) -> None:
        try:
            self._erase_tree(order)
        except TreeError as error:
            if error.reason != REASON_POOL_REPLACED:
                raise
            self._rest()
            self._finish("its place is another pool's now")

    def _erase_tree(self, order: Order) -> None:
        tree = self._tree = self._tree or find_tree(self.uid, order.pool, self._around)
        mounts = self._count_mounts()
        if tree is None:
            self.is_done = True
        elif mounts and not order.force:
            message = f"{mounts} volumes of pods on this node show it. It is erased when they are gone."
            self._caretakers_only(order, tree)
            self._tell(order, NodePoolState.DELETING, REASON_IN_USE, message)
        elif _retains(order, tree):
            self._rest()
            tree.check()
            if order.pool is not None:
                prepare_tree(order.pool, self._around)  # node.json must say so too
            self._finish("its files stay: deletionPolicy is Retain")
        else:
            self._rest()
            self._tell(order, NodePoolState.DELETING, "", "its files are being removed")
            if not self._caretakers.have_ended(CARE_END_SECONDS) or erase(tree).more:
                self._wake.set()
            else:
                self._finish("erased")

    def _caretakers_only(self, order: Order, tree: PoolTree) -> None:
        """Keep a pool that pods still use within its bounds."""
        if order.pool is not None:
            self._tend(tree, tree.leaves(), order.pool)
        self._directories = {}

    def _finish(self, what: str) -> None:
        self._around.memory.forget(self.uid)
        self.is_done = True
        logger.info("pool %s (uid %s) is gone: %s", self.name, self.uid, what)

    def _count_mounts(self) -> int:
        """Return how many volumes of pods show the pool.

        Raises:
            OSError: nobody knows; then it is no time to take anything away.
        """
        if self._tree is None:
            return 0
        return mounts_of(self._tree.directory, below=self._around.settings.kubelet_directory)

    def _mounts(self) -> int:
        with contextlib.suppress(OSError):
            return self._count_mounts()
        return 0

    # ---- telling ----

    def _answer(self, order: Order) -> None:
        while True:
            try:
                wanted, answer = self._questions.get_nowait()
            except queue.Empty:
                return
            try:
                if order.aim is not Aim.KEEP or not self._is_usable():
                    raise TreeError(self._report.reason, self._report.message)
                answer.set_result(self._directories.get(wanted) or self._make(wanted, order.profile))
            except TreeError as error:
                answer.set_exception(error)
            except Exception as error:
                answer.set_exception(TreeError(REASON_ERROR, str(error)))

    def _is_usable(self) -> bool:
        return self._report.state is NodePoolState.READY or self._report.reason in _STILL_THERE

    def _tell(self, order: Order, state: NodePoolState, reason: str, message: str) -> None:
        if (state, reason) != (self._report.state, self._report.reason):
            level = logging.INFO if state is NodePoolState.READY or not reason else logging.WARNING
            logger.log(level, "pool %s is %s%s", self.name, state.value, f": {reason}. {message}" if reason else "")
        capacity = 0 if order.pool is None else order.pool.spec.storage.capacity_per_node_bytes or 0
        used = 0 if order.pool is None else self._used_bytes(order.pool)
        tree, probed = self._tree, self._probed
        self._report = NodePool(
            name=self.name,
            uid=self.uid,
            state=state,
            reason=reason,
            message=message,
            path="" if tree is None else tree.directory,
            capacity_bytes=capacity,
            used_bytes=coarse(used, capacity),
            generation=0 if tree is None else tree.record.generation,
            engine="" if probed is None else probed.engine,
            direct_io=probed is not None and probed.direct_io,
            publish_method="" if probed is None else probed.publish.value,
            mounts=self._mounts(),
            disk_model="" if self._disk is None else self._disk.model,
            filesystem="" if probed is None else probed.filesystem,
        )


_FULL = (
    "the filesystem of {} has no room for a single block: others fill it up to minFree. Free some space, or lower "
    "minFree."
)


def _cared_for(tree: PoolTree, leaves: Sequence[str]) -> list[str]:
    """Return the pool directories that pods store in: measurements remove their files themselves."""
    return [leaf for leaf in leaves if leaf != f"{tree.directory}/{CALIBRATION}"]


def _namespaces_of(tree: PoolTree, leaves: Sequence[str]) -> list[str]:
    folder = f"{tree.directory}/{NAMESPACES}/"
    return [leaf.removeprefix(folder) for leaf in leaves if leaf.startswith(folder)]


def _pool_of(order: Order) -> KVCachePool:
    assert order.pool is not None, "only an erasure has no pool"
    return order.pool


def _tree_of(tree: PoolTree | None) -> PoolTree:
    assert tree is not None, "it was prepared"
    return tree


def _retains(order: Order, tree: PoolTree) -> bool:
    if order.pool is None:
        return tree.record.identity.retain
    return order.pool.spec.deletion_policy is DeletionPolicy.RETAIN
