"""All pools of this node: which belong here, what becomes of each, and which directory a pod gets.

The manager compares what the API server told with what lies here, and gives every pool's worker its order. It touches
no pool's disk itself, so it comes round whatever disks do, and it answers mounts from memory: never from the API
server, and not from a disk but for a directory that has to be made, which the pool's worker does within seconds.

While the API server is away everything goes on as it was told last; before it has told anything, nothing is done and
pods wait.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pykvcache_contract.api.node import NodePool, NodePoolState
from pykvcache_contract.api.pool import KVCachePool, OnUnavailable, Sharing, StorageType, Volume
from pykvcache_contract.api.selection import admits, selects
from pykvcache_contract.metrics import VOLUME_RESULTS
from pykvcache_contract.names import FORCE_DELETE_ANNOTATION, REASON_DISK_NOT_MOUNTED
from pykvcache_sidecar.node.cluster import Cluster, View
from pykvcache_sidecar.node.orders import Aim, Order, Surroundings, Wanted
from pykvcache_sidecar.node.places import Code, Place, Refusal
from pykvcache_sidecar.node.survey import Findings, Survey
from pykvcache_sidecar.node.tree import PoolTree
from pykvcache_sidecar.node.tree_file import TreeError
from pykvcache_sidecar.node.worker import PoolWorker

logger = logging.getLogger(__name__)


class PoolManager:
    """Manages the pools of one node; implements `places.Places`.

    Args:
        start: lets a new worker run; it begins at once.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        survey: Survey,
        surroundings: Surroundings,
        start: Callable[[PoolWorker], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._survey = survey
        self._around = surroundings
        self._start = start or _start_thread
        self._monotonic = monotonic
        self._workers: dict[str, PoolWorker] = {}
        self._judged: frozenset[str] = frozenset()
        self._adopted: Findings | None = None
        self._finished: set[str] = set()
        """Pools in deletion for which nothing is left to do here, although they may be on a disk that is away."""
        self._ticked = monotonic()
        self._volumes = dict.fromkeys(VOLUME_RESULTS, 0)
        self._lock = threading.Lock()
        """Guards the counts."""
        self.wake = threading.Event()

    # ---- for other threads ----

    def place(self, *, pool: str, namespace: str, pod: str, service_account: str) -> Place:
        """Return what a pod gets of a pool, as `places.Places` says."""
        try:
            place = self._find_place(pool, namespace)
        except Refusal:
            self._count("refused")
            raise
        self._count("degraded" if place.directory is None else "mounted")
        return place

    def volumes(self) -> dict[str, int]:
        """Return how many answers `place` gave, by result."""
        with self._lock:
            return dict(self._volumes)

    def _count(self, result: str) -> None:
        with self._lock:
            self._volumes[result] += 1

    def _find_place(self, pool: str, namespace: str) -> Place:
        view = self._cluster.view()
        if view.pools is None:
            raise Refusal(Code.UNAVAILABLE, "the node agent has not reached the API server yet; it goes on trying.")
        found = view.pools.get(pool)
        if found is None:
            raise Refusal(Code.NOT_FOUND, f"there is no KVCachePool {pool}: see `kubectl get kvcachepools`.")
        _check_kind(found)
        return self._place(found, self._wanted(found, namespace, view))

    def workers(self) -> list[PoolWorker]:
        """Return the workers of all pools that are here in any way."""
        return list(self._workers.values())

    def reports(self) -> list[NodePool]:
        """Return every pool's state here, by name; of two of one name the living one."""
        reports = [worker.report() for worker in self.workers()]
        reports.sort(key=lambda report: report.state is not NodePoolState.DELETING)
        return sorted({report.name: report for report in reports}.values(), key=lambda report: report.name)

    def tick_age_seconds(self) -> float:
        """Return how long ago a round was finished."""
        return self._monotonic() - self._ticked

    def run(self, stopped: threading.Event) -> None:
        """Go round until it is stopped."""
        while not stopped.is_set():
            try:
                self.round()
            except Exception:
                logger.exception("the node's pools could not be looked at")
            self.wake.wait(self._around.settings.interval_seconds)
            self.wake.clear()

    def stop(self) -> None:
        """Ask all workers to end."""
        for worker in self.workers():
            worker.stop()

    # ---- rounds ----

    def round(self) -> None:
        """Give every pool's worker its order."""
        view, findings = self._cluster.view(), self._survey.findings()
        if view.pools is not None and view.labels is not None and findings is not None:
            self._give_orders(self._orders(view, findings))
            if findings is not self._adopted:  # else those that are erased by now would be adopted again
                self._adopt_orphans(findings.orphans)
                self._adopted = findings
            self._dismiss()
            self._judged = frozenset(pool.metadata.uid for pool in view.pools.values())
        self._ticked = self._monotonic()

    def _orders(self, view: View, findings: Findings) -> dict[str, tuple[str, Order]]:
        """Return the orders by uid, each with the pool's name; pools that are nothing to this node have none."""
        orders: dict[str, tuple[str, Order]] = {}
        for pool in (view.pools or {}).values():
            order = self._order(pool, view, findings)
            if order is not None:
                orders[pool.metadata.uid] = (pool.name, order)
        for uid, worker in self._workers.items():
            if uid not in orders and uid not in (view.uids or ()):
                former = worker.order
                orders[uid] = (worker.name, Order(Aim.ERASE, former.pool, force=former.force))
        return orders

    def _order(self, pool: KVCachePool, view: View, findings: Findings) -> Order | None:
        uid = pool.metadata.uid
        worker = self._workers.get(uid)
        if pool.metadata.deletion_timestamp is not None:
            if worker is None and (uid in self._finished or self._around.memory.get(uid) is None):
                return None
            return Order(Aim.ERASE, pool, force=pool.metadata.annotations.get(FORCE_DELETE_ANNOTATION) == "true")
        if pool.spec.storage.type is not StorageType.NODE_LOCAL:
            return None
        if not self._belongs(pool, view, findings):
            return None if worker is None else Order(Aim.LEAVE, pool)
        profile = next((one for one in view.profiles if one.pool_uid == uid), None)
        return Order(Aim.KEEP, pool, profile=profile, namespaces=_beforehand(pool, view))

    def _belongs(self, pool: KVCachePool, view: View, findings: Findings) -> bool:
        labels: Mapping[str, str] = view.labels or {}
        if selects(pool, labels, findings.disks):
            return True
        # A disk that vanished is no reason to leave: the pool waits for it, and says so.
        remembered = self._around.memory.get(pool.metadata.uid)
        if remembered is None or remembered.mount_point in {disk.mount_path for disk in findings.disks}:
            return False
        return all(labels.get(key) == value for key, value in pool.spec.node_selector.items())

    def _give_orders(self, orders: Mapping[str, "tuple[str, Order]"]) -> None:
        for uid, (name, order) in orders.items():
            worker = self._workers.get(uid)
            if worker is None:
                self._hire(PoolWorker(name=name, uid=uid, order=order, surroundings=self._around))
            elif worker.order != order:
                worker.order = order
                worker.wake()

    def _adopt_orphans(self, orphans: Sequence[PoolTree]) -> None:
        for tree in orphans:
            identity = tree.record.identity
            if identity.uid not in self._workers:
                logger.info("%s is of pool uid %s, which exists no more: it is erased", tree.directory, identity.uid)
                self._hire(
                    PoolWorker(
                        name=identity.pool,
                        uid=identity.uid,
                        order=Order(Aim.ERASE),
                        surroundings=self._around,
                        tree=tree,
                    )
                )

    def _dismiss(self) -> None:
        """Let workers go that have nothing left to do, or whose pool is gone as well as its disk."""
        for uid, worker in list(self._workers.items()):
            is_gone = worker.order.aim is Aim.ERASE and uid not in (self._cluster.view().uids or ())
            if worker.is_done or (is_gone and worker.report().reason == REASON_DISK_NOT_MOUNTED):
                worker.stop()
                del self._workers[uid]
                if worker.order.aim is Aim.ERASE:
                    self._finished.add(uid)
        self._finished.intersection_update(self._cluster.view().uids or ())

    def _hire(self, worker: PoolWorker) -> None:
        self._start(worker)  # first: one that could not be started is hired again
        self._workers[worker.uid] = worker

    # ---- places ----

    def _wanted(self, pool: KVCachePool, namespace: str, view: View) -> Wanted:
        """Return which directory a namespace gets.

        Raises:
            Refusal: none.
        """
        if namespace == self._around.settings.operator_namespace:
            return Wanted(is_calibration=True)
        if not admits(pool, namespace, (view.namespaces or {}).get(namespace, {})):
            selector = pool.spec.allowed_namespaces
            if view.namespaces is None and selector is not None and selector.match_labels:
                raise Refusal(Code.UNAVAILABLE, f"the labels of namespace {namespace} are not known yet; asked again.")
            raise Refusal(
                Code.PERMISSION_DENIED,
                f"namespace {namespace} may not mount KVCachePool {pool.name}: add it to spec.allowedNamespaces of the "
                "pool, or name another pool.",
            )
        return Wanted(namespace="" if pool.spec.sharing is Sharing.POOL else namespace)

    def _place(self, pool: KVCachePool, wanted: Wanted) -> Place:
        if pool.metadata.deletion_timestamp is not None:
            return _without(pool, f"KVCachePool {pool.name} is being deleted")
        worker = self._workers.get(pool.metadata.uid)
        if worker is None:
            if pool.metadata.uid not in self._judged:
                raise Refusal(Code.UNAVAILABLE, f"KVCachePool {pool.name} is being prepared; it is asked for again.")
            return _without(
                pool, f"KVCachePool {pool.name} has no place on this node: see its nodeSelector and diskSelector"
            )
        try:
            return Place(worker.directory(wanted))
        except TreeError as error:
            return _without(pool, f"KVCachePool {pool.name} is not ready on this node: {error.reason}. {error.message}")


def _check_kind(pool: KVCachePool) -> None:
    storage = pool.spec.storage
    if storage.type is not StorageType.NODE_LOCAL or storage.volume is not Volume.CSI:
        kind = storage.type.value if storage.type is not StorageType.NODE_LOCAL else "NodeLocal with volume HostPath"
        raise Refusal(
            Code.INVALID_ARGUMENT,
            f"KVCachePool {pool.name} is {kind}, which is not mounted by the CSI driver: use its claim, an emptyDir or "
            "its hostPath instead.",
        )


def _without(pool: KVCachePool, reason: str) -> Place:
    """Return the empty marker directory, or let the pod wait, as the pool wants."""
    if pool.spec.storage.on_unavailable is OnUnavailable.BLOCK:
        raise Refusal(Code.UNAVAILABLE, f"{reason}. The pod waits, because the pool's onUnavailable is Block.")
    return Place(None, reason)


def _beforehand(pool: KVCachePool, view: View) -> tuple[str, ...]:
    """Return the namespaces that get their directory before anybody asks: all that may mount it by hostPath."""
    if pool.spec.storage.volume is not Volume.HOST_PATH or pool.spec.sharing is Sharing.POOL:
        return ()
    namespaces = view.namespaces or {}
    return tuple(sorted(name for name, labels in namespaces.items() if admits(pool, name, labels)))


def _start_thread(worker: PoolWorker) -> None:
    threading.Thread(target=worker.run, name="pykvcache-pool", daemon=True).start()
