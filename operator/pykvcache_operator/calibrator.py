"""Carries out the plans of `calibration`: Jobs, and what they measured in the status of KVCacheNodes.

All pools share one lock, because plans count the Jobs of the whole cluster and a node's profiles are written together;
answers go back into the stores before the lock is let go, so the next plan sees them. An operator that dies in between
leaves a Job that the next one finds. Pools that find all Jobs taken queue up, and the end of a Job wakes the first.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

from pykvcache_contract.api.node import KVCacheNode, Profile
from pykvcache_contract.api.pool import KVCachePool, StorageType
from pykvcache_operator import build, paths
from pykvcache_operator.calibration import (
    JOBS_MAX,
    Action,
    CalibrationPlan,
    DeleteJob,
    ForgetProfile,
    RecordProfile,
    plan,
)
from pykvcache_operator.calibration_job import (
    NODE_ANNOTATION,
    CalibrationJob,
    JobSettings,
    StartJob,
    build_job,
    read_job,
)
from pykvcache_operator.client import Api, ApiError
from pykvcache_operator.cluster import Cluster
from pykvcache_operator.node_local import is_silent

logger = logging.getLogger(__name__)


class Calibrator:
    """Keeps the disks of pools measured.

    Args:
        wake: called with the names of pools that may go on.
    """

    def __init__(self, api: Api, cluster: Cluster, settings: JobSettings, *, wake: Callable[[str], None]) -> None:
        self._api, self._cluster, self._settings, self._wake = api, cluster, settings, wake
        self._lock = asyncio.Lock()
        self._waiting: dict[str, None] = {}

    async def calibrate(self, pool: KVCachePool, now: datetime) -> float | None:
        """Do what is due for a pool; return in how many seconds to look again without news.

        Raises:
            ApiError: try again later; what concerns other nodes was done.
        """
        if pool.spec.storage.type is not StorageType.NODE_LOCAL:
            return None
        async with self._lock:
            planned = self._plan(pool, now)
            refusals: dict[str, ApiError] = {}
            for action in planned.actions:
                node = self._node_of(action)
                if node in refusals:
                    continue  # a Job is deleted only when its profile is written
                try:
                    await self._do(pool, action)
                except ApiError as error:
                    if not error.status:
                        raise  # no answer: the next one would take as long
                    refusals[node] = error
            self._queue_up(pool)
        for refusal in refusals.values():
            raise refusal
        return (planned.look_again - now).total_seconds() if planned.look_again else None

    async def forget(self, pool_name: str) -> None:
        """Remove what is known of a pool that is gone; its Jobs go with it, their owner."""
        async with self._lock:
            self._waiting.pop(pool_name, None)
            for cache in list(self._cluster.caches.values()):
                if cache.profile(pool_name) is not None:
                    await self._write(cache.name, pool_name, None)

    def _plan(self, pool: KVCachePool, now: datetime) -> CalibrationPlan:
        caches = [cache for cache in self._cluster.caches.values() if cache.pool(pool.name)]
        reachable = {
            cache.name
            for cache in caches
            if (node := self._cluster.nodes.get(cache.name)) and node.is_ready and not is_silent(cache, now)
        }
        return plan(pool, nodes=caches, reachable=reachable, jobs=self._jobs(), now=now)

    def _queue_up(self, pool: KVCachePool) -> None:
        """Remember a pool that could not start its Jobs because of others'."""
        self._waiting.pop(pool.name, None)
        active = sum(job.finished is None for job in self._jobs())
        places = (cache for cache in self._cluster.caches.values() if cache.pool(pool.name))
        if active >= JOBS_MAX and any(cache.profile(pool.name) is None for cache in places):
            self._waiting[pool.name] = None

    def _jobs(self) -> list[CalibrationJob]:
        pods = list(self._cluster.pods.values())
        return [job for document in self._cluster.jobs.values() if (job := read_job(document, pods))]

    def _node_of(self, action: Action) -> str:
        if not isinstance(action, DeleteJob):
            return action.node
        document = self._cluster.jobs.get(action.name, self._settings.namespace)
        return str(document["metadata"]["annotations"][NODE_ANNOTATION]) if document else ""

    async def _do(self, pool: KVCachePool, action: Action) -> None:
        if isinstance(action, StartJob):
            await self._start(pool, action)
        elif isinstance(action, DeleteJob):
            await self._delete(action.name)
        elif isinstance(action, RecordProfile):
            await self._write(action.node, pool.name, action.profile)
        elif isinstance(action, ForgetProfile):
            await self._write(action.node, pool.name, None)

    async def _start(self, pool: KVCachePool, start: StartJob) -> None:
        body = build_job(pool, start, self._settings)
        try:
            self._cluster.jobs.put(await self._api.create(paths.jobs(self._settings.namespace), body))
        except ApiError as error:
            if not error.is_conflict:  # it is there, and the informer will tell
                raise
        logger.info("measuring pool %s on node %s", pool.name, start.node)

    async def _delete(self, name: str) -> None:
        document = self._cluster.jobs.get(name, self._settings.namespace)
        if document is not None:
            path = f"{paths.jobs(self._settings.namespace)}/{name}"
            await self._api.delete(path, uid=document["metadata"]["uid"])
            self._cluster.jobs.remove(document)
            for waiting in list(self._waiting)[:JOBS_MAX]:
                self._wake(waiting)

    async def _write(self, node: str, pool_name: str, profile: Profile | None) -> None:
        cache: KVCacheNode | None = self._cluster.caches.get(node)
        if cache is None:
            return
        try:
            body = build.profiles(cache, pool_name, profile)
            self._cluster.caches.renew(await self._api.apply(f"{paths.CACHES}/{node}/status", body))
        except ApiError as error:
            if not error.is_missing:
                raise
