"""The only writer: makes the cluster what a decision says.

Every write is idempotent and names the uid it is meant for, so that doing it twice, late, or beside another operator
does no harm. Answers go back into the stores at once, so the next decision sees them. A refused claim or label does
not keep a status from being written, nor a label a pool from going; it is raised at the end.
"""

import logging
from collections.abc import Awaitable
from datetime import datetime
from typing import Any

from pykvcache_contract.api.pool import KVCachePool
from pykvcache_operator import build, paths
from pykvcache_operator.client import Api, ApiError
from pykvcache_operator.cluster import Cluster
from pykvcache_operator.resources import Claim, Decision, Notice

logger = logging.getLogger(__name__)


class Applier:
    """Writes to the API server.

    Args:
        instance: this process, for Events.
    """

    def __init__(self, api: Api, cluster: Cluster, *, instance: str) -> None:
        self._api, self._cluster, self._instance = api, cluster, instance
        self.refusals: dict[str, str] = {}
        """By pool, why a claim could not be written when that was tried last."""

    async def apply(self, pool: KVCachePool, decision: Decision, now: datetime) -> None:
        """Do what was decided for a pool; `decision.status` None leaves the status.

        Raises:
            ApiError: something could not be written and should be tried again.
        """
        if decision.add_finalizer:
            self._cluster.pools.renew(await self._api.apply(f"{paths.POOLS}/{pool.name}", build.finalizer(pool)))
        labelled = await _tried(self.label(pool.name, decision.label_nodes, is_ready=True))
        unlabelled = await _tried(self.label(pool.name, decision.unlabel_nodes, is_ready=False))
        failure = await self._claims(pool, decision)
        if decision.status is not None:
            body = pool.status_document(decision.status)
            self._cluster.pools.renew(await self._api.apply(f"{paths.POOLS}/{pool.name}/status", body))
        for notice in decision.notices:
            await self._post(pool, notice, now)
        if failure is not None:
            raise failure
        if decision.remove_finalizer:
            await self._release(pool)
        if (failure := labelled or unlabelled) is not None:
            raise failure

    async def label(self, pool_name: str, nodes: tuple[str, ...], *, is_ready: bool) -> None:
        """Set or remove a pool's label on nodes; one that is refused is raised after all others.

        Raises:
            ApiError: try again later.
        """
        refusals = []
        for node in nodes:
            path, body = f"{paths.NODES}/{node}", build.node_labels(pool_name, is_ready=is_ready)
            try:
                self._cluster.nodes.renew(await self._api.merge(path, body))
            except ApiError as error:
                if not error.status:
                    raise  # no answer: the next node's would take as long
                if not error.is_missing:
                    refusals.append(error)
        if refusals:
            raise refusals[0]

    async def _release(self, pool: KVCachePool) -> None:
        current = self._cluster.pools.get(pool.name)
        if current is None or current.pool.metadata.uid != pool.metadata.uid:
            return
        try:
            await self._api.merge(f"{paths.POOLS}/{pool.name}", build.without_finalizer(current.pool))
        except ApiError as error:
            if not error.is_missing:
                raise

    async def _claims(self, pool: KVCachePool, decision: Decision) -> ApiError | None:
        """Make, enlarge and drop claims, each whatever becomes of the others; return the first failure."""
        made = [self._make(pool, namespace) for namespace in decision.make_claims]
        enlarged = [self._enlarge(pool, claim) for claim in decision.enlarge_claims]
        dropped = [self._api.delete(_path(claim), uid=claim.uid) for claim in decision.drop_claims]
        failures = [failure for write in (*made, *enlarged, *dropped) if (failure := await _tried(write))]
        if not failures:
            self.refusals.pop(pool.name, None)
            return None
        self.refusals[pool.name] = f"{failures[0]}; {len(failures)} claims could not be written, trying again"
        return failures[0]

    async def _make(self, pool: KVCachePool, namespace: str) -> None:
        try:
            document = await self._api.create(paths.claims(namespace), build.claim(pool, namespace))
        except ApiError as error:
            if error.is_conflict:
                return  # somebody made one first; the informer will tell whose it is
            raise
        self._cluster.claims.put(document)

    async def _enlarge(self, pool: KVCachePool, claim: Claim) -> None:
        self._cluster.claims.renew(await self._api.merge(_path(claim), build.larger_claim(pool)))

    async def _post(self, pool: KVCachePool, notice: Notice, now: datetime) -> None:
        """Post an Event; it is lost if that fails, for it is in the status, too."""
        body = build.event(pool, notice, instance=self._instance, now=now)
        try:
            await self._api.create(paths.events(build.EVENT_NAMESPACE), body)
        except ApiError as error:
            logger.warning("could not post the event %s of pool %s: %s", notice.reason, pool.name, error)


def _path(claim: Claim) -> str:
    return f"{paths.claims(claim.namespace)}/{claim.name}"


async def _tried(write: Awaitable[Any]) -> ApiError | None:
    try:
        await write
    except ApiError as error:
        return error
    return None
