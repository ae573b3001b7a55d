"""The operator's process: waits for the Lease, then follows the cluster and keeps every pool at its declared state.

One event loop. Before the Lease is ours only the probes are served. With it, the tasks below run until the process is
asked to end by SIGTERM or SIGINT, or until the first of them ends, by losing the Lease or by an error: the process then
exits non-zero and is started again. What it was in the midst of the next process sees and brings to its end.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Collection, Coroutine, Iterator
from datetime import datetime, timezone
from typing import Any

import kopf

from pykvcache_contract.api.pool import KVCachePool, StorageType
from pykvcache_contract.errors import TransientError
from pykvcache_contract.metrics import (
    API_REQUESTS,
    IS_LEADER,
    KNOWN_POOLS,
    LABELLED_PODS,
    LAST_WATCH_EVENT,
    POOL_NODES_DESIRED,
    POOL_NODES_READY,
    RECONCILES_WAITING,
    WEBHOOK_CERTIFICATE_EXPIRY,
    WEBHOOK_CERTIFICATE_FAILURES,
    WEBHOOK_CERTIFICATES,
    Metric,
)
from pykvcache_contract.names import CONDITION_READY
from pykvcache_operator import handlers, paths, server
from pykvcache_operator.apply import Applier
from pykvcache_operator.calibration_job import COMPONENT_LABELS, JobSettings
from pykvcache_operator.calibrator import Calibrator
from pykvcache_operator.certifier import Certifier
from pykvcache_operator.client import Api, ApiError, load_configuration
from pykvcache_operator.cluster import Cluster
from pykvcache_operator.detector import QUERY, Detector
from pykvcache_operator.exporter import Metrics
from pykvcache_operator.informer import Informer, Store
from pykvcache_operator.lease import Lease
from pykvcache_operator.reconcile import Reconciler
from pykvcache_operator.resources import PodCounts, PodsView
from pykvcache_operator.settings import Settings
from pykvcache_operator.shared import needs_namespaces
from pykvcache_operator.work import Work

logger = logging.getLogger(__name__)

NEED_SECONDS = 2.0
"""How often it is looked whether a pool needs a kind of object that is not watched yet."""
API_RETRY_SECONDS = 3.0


class Operator:
    """All parts of one process."""

    def __init__(self, api: Api, settings: Settings) -> None:
        self._api, self._settings = api, settings
        self._is_started = False
        self._metrics = Metrics()
        self._cluster = Cluster(self._wake)
        jobs = JobSettings(
            namespace=settings.namespace,
            image=settings.calibration_image,
            image_pull_secrets=settings.calibration_pull_secrets,
            priority_class=settings.calibration_priority_class,
        )
        self._detector = (
            Detector(api, wake=self._wake_for_pods, instance=settings.identity, clock=time.monotonic)
            if settings.follow_pods
            else None
        )
        self._reconciler = Reconciler(
            self._cluster,
            Applier(api, self._cluster, instance=settings.identity),
            Calibrator(api, self._cluster, jobs, wake=self._wake) if settings.calibration_image else None,
            settings=settings,
            metrics=self._metrics,
            claims_problem=self._claims_problem,
            pods=self._pods,
            clock=time.monotonic,
        )
        self._work = Work(self._reconciler.reconcile, workers=settings.workers)
        self._lease = Lease(
            api,
            namespace=settings.namespace,
            name=settings.lease_name,
            identity=settings.identity,
            clock=time.monotonic,
        )
        self._certifier = _certifier(api, settings) if settings.webhook_configuration else None
        self._informers: dict[str, Informer[Any]] = {}
        self._pools_heard = time.monotonic()
        self._tasks: list[asyncio.Task[Any]] = []
        self._stop = asyncio.Event()
        self._metrics.add(self._samples)

    async def run(self) -> None:
        """Serve probes, become active, work.

        Raises:
            TransientError: the Lease was lost, or a part ended that must not.
        """
        settings = self._settings
        runner, port = await server.serve(
            host=settings.host,
            port=settings.port,
            is_healthy=self.health_problem,
            is_ready=self.readiness_problem,
            registry=self._metrics.registry,
        )
        logger.info("serving /healthz, /readyz and /metrics on port %d", port)
        try:
            if await self._becomes_active():
                await self._work_until_the_end()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._lease.release()
            await runner.cleanup()

    def health_problem(self) -> str:
        """Return why a restart may help; "" if nothing is wrong."""
        if not self._lease.is_held:
            return ""
        silent = {name: age for name, age in self._ages() if age > self._settings.stale_seconds}
        listed = ", ".join(f"{name} for {age:.0f} s" for name, age in silent.items())
        return f"the API server told nothing about {listed}" if silent else ""

    def readiness_problem(self) -> str:
        """Return why this process does not work yet; a standby is ready, else no roll-out would end."""
        if self._lease.is_held and not self._is_started:
            return "reading the cluster: " + "; ".join(i.problem for i in self._informers.values() if i.problem)
        return ""

    async def _becomes_active(self) -> bool:
        """Wait for the Lease; False if the process is asked to end first."""
        self._take_signals()
        await self._until_done(self._start("acquiring", self._lease.acquire()))
        self._hear_pools()  # nobody listened before
        return self._lease.is_held and not self._stop.is_set()

    async def _work_until_the_end(self) -> None:
        self._start("lease", self._lease.keep())
        if self._certifier is not None:
            self._start("certificates", self._certifier.run())
        await self._until_done(self._start("preparations", self._prepare()))
        if self._stop.is_set():
            return
        self._is_started = True
        for name, part in (("workers", self._work.run()), ("resync", self._resync()), ("needs", self._follow_needs())):
            self._start(name, part)
        if self._detector is not None:
            self._start("events about pods", self._detector.run())
            self._start("reading of pods", self._look_whether_pods_are_read(self._are_pods_read()))
        self._tasks += await self._spawn_kopf()
        self._take_signals()  # from kopf, which took them
        await self._until_done(None)
        logger.info("asked to end")

    def _take_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    async def _until_done(self, expected: "asyncio.Task[Any] | None") -> None:
        """Wait until this task has ended, or the process is asked to end.

        Raises:
            TransientError: another task ended before, or this one by an error.
        """
        stopping = self._start("stop", self._stop.wait())
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            self._tasks.remove(task)
            if task.exception() is not None:
                raise TransientError(f"{task.get_name()} ended: {task.exception()}") from task.exception()
            if task is not expected and not self._stop.is_set():
                raise TransientError(f"{task.get_name()} ended, which it must not")
        self._tasks.remove(stopping)
        stopping.cancel()

    async def _spawn_kopf(self) -> Collection["asyncio.Task[Any]"]:
        """Start kopf's tasks; not `kopf.operator`, which in the end cancels what it did not start."""
        handlers.quiet_kopf()
        return await kopf.spawn_tasks(
            registry=handlers.make_registry(self._api, self._cluster.pools, self._hear_pools),
            settings=handlers.make_settings(self._settings),
            clusterwide=True,
            standalone=True,
            stop_flag=self._stop,
        )

    async def _prepare(self) -> None:
        """Read the cluster, pools last: their decisions need all the rest."""
        self._follow("nodes", self._cluster.nodes, paths.NODES)
        self._follow("kvcachenodes", self._cluster.caches, paths.CACHES)
        if self._settings.calibration_image:
            labels = ",".join(f"{key}={value}" for key, value in COMPONENT_LABELS.items())
            namespace, query = self._settings.namespace, {"labelSelector": labels}
            self._follow("jobs", self._cluster.jobs, paths.jobs(namespace), query=query)
            self._follow("pods", self._cluster.pods, paths.pods(namespace), query=query)
        needed = list(self._informers.values())
        if self._detector is not None:  # not waited for: without its numbers all else can be done
            self._follow(LABELLED_PODS, self._detector.store, paths.ALL_PODS, query=QUERY)
        await asyncio.gather(*(informer.synced.wait() for informer in needed))
        await self._list_pools_patiently()
        for name in self._cluster.concerned():
            self._work.add(name, 0.0)
        logger.info("%d pools, %d nodes, %d of them with a node agent", *map(len, self._stores()))

    def _stores(self) -> tuple[Store[Any], Store[Any], Store[Any]]:
        return self._cluster.pools, self._cluster.nodes, self._cluster.caches

    async def _list_pools_patiently(self) -> None:
        problem = ""
        while True:
            try:
                return await self._list_pools()
            except ApiError as error:
                if error.is_missing or error.is_forbidden:
                    self._hear_pools()  # an answer: a restart would get the same one
                if str(error) != problem:
                    hint = "; are the CustomResourceDefinitions installed?" if error.is_missing else ""
                    logger.warning("cannot list pools, trying again: %s%s", error, hint)
                problem = str(error)
            await asyncio.sleep(API_RETRY_SECONDS)

    async def _list_pools(self) -> None:
        self._cluster.pools.replace(*await self._api.list(paths.POOLS))
        self._hear_pools()

    async def _resync(self) -> None:
        """Look at every pool now and then, whatever the watches said; also finds pools whose end was missed."""
        while True:
            await asyncio.sleep(self._settings.resync_seconds)
            try:
                documents, version = await self._api.list(paths.POOLS)
            except ApiError as error:
                logger.warning("cannot list pools, again in %.0f s: %s", self._settings.resync_seconds, error)
                continue
            self._cluster.pools.replace(documents, version)
            for name in self._cluster.concerned():
                self._work.add(name, 0.0)

    async def _follow_needs(self) -> None:
        """Watch claims and namespaces from when the first pool needs them."""
        while not {"persistentvolumeclaims", "namespaces"} <= self._informers.keys():
            shared = self._cluster.of_type(StorageType.SHARED_FILESYSTEM)
            if shared and "persistentvolumeclaims" not in self._informers:
                self._follow("persistentvolumeclaims", self._cluster.claims, paths.CLAIMS)
            if any(needs_namespaces(pool) for pool in shared) and "namespaces" not in self._informers:
                self._follow("namespaces", self._cluster.namespaces, paths.NAMESPACES)
            await asyncio.sleep(NEED_SECONDS)
        await asyncio.Event().wait()

    async def _look_whether_pods_are_read(self, known: bool | None) -> None:
        """Look at all pools again when pods can be read, or no longer can."""
        while True:
            await asyncio.sleep(NEED_SECONDS)
            if (current := self._are_pods_read()) is not known:
                known = current
                for item in self._cluster.pools.values():
                    self._work.add(item.pool.name)

    def _follow(self, name: str, store: Store[Any], path: str, query: dict[str, str] | None = None) -> None:
        informer = self._informers[name] = Informer(
            self._api,
            store,
            name=name,
            path=path,
            query=query,
            server_seconds=self._settings.watch_seconds,
            silence_seconds=self._settings.silence_seconds,
            clock=time.monotonic,
        )
        self._start(f"watch of {name}", informer.run())

    def _start(self, name: str, part: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(part)
        task.set_name(name)
        self._tasks.append(task)
        return task

    def _wake(self, name: str) -> None:
        if self._is_started:
            self._work.add(name)

    def _wake_for_pods(self, label: str, after_seconds: float) -> None:
        if self._is_started and self._cluster.pools.get(label) is not None:
            self._work.add(label, after_seconds)

    def _hear_pools(self) -> None:
        self._pools_heard = time.monotonic()

    def _ages(self) -> Iterator[tuple[str, float]]:
        yield "kvcachepools", time.monotonic() - self._pools_heard
        for name, informer in self._informers.items():
            yield name, informer.heard_age

    def _samples(self) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
        yield IS_LEADER, (), float(self._lease.is_held)
        yield RECONCILES_WAITING, (), float(self._work.waiting)
        for labels in API_REQUESTS.initial_labels:
            yield API_REQUESTS, labels, float(self._api.requests[labels[0]])
        if not self._lease.is_held:
            return
        if self._certifier is not None:
            yield from _certificate_samples(self._certifier)
        for name, age in self._ages():
            yield LAST_WATCH_EVENT, (name,), time.time() - age
        ready = {"True": 0, "False": 0, "Unknown": 0}
        for item in self._cluster.pools.values():
            conditions = {c.type: c.status.value for c in item.pool.status.conditions}
            ready[conditions.get(CONDITION_READY, "Unknown")] += 1
            yield POOL_NODES_READY, (item.pool.name,), float(item.pool.status.nodes_ready)
            yield POOL_NODES_DESIRED, (item.pool.name,), float(item.pool.status.nodes_desired)
        for status, count in ready.items():
            yield KNOWN_POOLS, (status.lower(),), float(count)
        if self._detector is not None and self._are_pods_read():
            yield from self._detector.samples({item.pool.name for item in self._cluster.pools.values()})

    def _pods(self, pool_name: str) -> PodsView | None:
        """Return what is known of the pods labelled for a pool; None if they are not followed."""
        if self._detector is None:
            return None
        problem = self._pods_problem()
        return PodsView(PodCounts() if problem is None else self._detector.counts(pool_name), problem)

    def _are_pods_read(self) -> bool | None:
        problem = self._pods_problem()
        return None if problem is None else not problem

    def _pods_problem(self) -> str | None:
        """Return why pods cannot be read; "" if they were, None if that is under way."""
        informer = self._informers.get(LABELLED_PODS)
        if informer is None:
            return None
        if informer.synced.is_set() and not informer.is_refused:
            return ""
        return informer.problem or None

    def _claims_problem(self, pool: KVCachePool) -> str | None:
        """Return why what a pool's claims need cannot be read; "" if it was, None if that is under way."""
        names = ["persistentvolumeclaims", *(["namespaces"] if needs_namespaces(pool) else [])]
        informers = [informer for name in names if (informer := self._informers.get(name))]
        if len(informers) == len(names) and all(i.synced.is_set() and not i.is_refused for i in informers):
            return ""
        return "; ".join(informer.problem for informer in informers if informer.problem) or None


def _certifier(api: Api, settings: Settings) -> Certifier:
    return Certifier(
        api,
        namespace=settings.namespace,
        configuration=settings.webhook_configuration,
        service=settings.webhook_service,
        clock=lambda: datetime.now(timezone.utc),
        monotonic=time.monotonic,
    )


def _certificate_samples(certifier: Certifier) -> Iterator[tuple[Metric, tuple[str, ...], float]]:
    yield WEBHOOK_CERTIFICATE_FAILURES, (), float(certifier.failures)
    for which in WEBHOOK_CERTIFICATES:
        if end := certifier.expiries.get(which):
            yield WEBHOOK_CERTIFICATE_EXPIRY, (which,), end.timestamp()


async def run(settings: Settings) -> None:
    """Run one operator until it is asked to end.

    Raises:
        ConfigurationError: an option or the way to the API server is wrong.
        TransientError: it must be started again.
    """
    api = Api(await load_configuration())
    try:
        await Operator(api, settings).run()
    finally:
        with contextlib.suppress(OSError):
            await api.close()
