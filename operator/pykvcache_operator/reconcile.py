"""One pool, brought to its declared state: observe, decide, apply. Runs in the workers of `work.Work`.

No writes when nothing changed: a status equal to the server's is not sent, and one that differs only in how much is
used, or in how many pods use it, is sent at most every `QUIET_SECONDS`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

from pykvcache_contract.api.pool import KVCachePool, StorageType
from pykvcache_operator.apply import Applier
from pykvcache_operator.build import is_quiet, status_differs
from pykvcache_operator.calibrator import Calibrator
from pykvcache_operator.cluster import Cluster
from pykvcache_operator.decide import decide
from pykvcache_operator.exporter import Metrics
from pykvcache_operator.node_local import why_refused
from pykvcache_operator.observe import labelled_nodes, observe
from pykvcache_operator.resources import Decision, PodsView, PoolItem
from pykvcache_operator.settings import Settings

logger = logging.getLogger(__name__)

QUIET_SECONDS = 30.0
"""Figures that change all the time are written at most this often per pool."""

UNKNOWN_SECONDS = 1.0
"""When to look again at a pool whose claims are being listed for the first time."""


class Reconciler:
    """Brings pools to their declared state.

    Args:
        calibrator: None if nothing is to be measured.
        claims_problem: returns why what a pool's claims need cannot be read, "" if it can, None if not yet.
        pods: returns what is known of the pods that are labelled for a pool; None if nobody follows pods.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        cluster: Cluster,
        applier: Applier,
        calibrator: Calibrator | None,
        *,
        settings: Settings,
        metrics: Metrics,
        claims_problem: Callable[[KVCachePool], str | None],
        pods: Callable[[str], PodsView | None],
        clock: Callable[[], float],
    ) -> None:
        self._cluster, self._applier, self._calibrator = cluster, applier, calibrator
        self._settings, self._metrics = settings, metrics
        self._claims_problem, self._pods, self._clock = claims_problem, pods, clock
        self._written: dict[str, float] = {}

    async def reconcile(self, name: str) -> float | None:
        """Bring one pool up to date; return in how many seconds to look again without news.

        Raises:
            ApiError: try again later.
        """
        with self._metrics.reconciling():
            item = self._cluster.pools.get(name)
            if item is None:
                if not self._cluster.pools.is_unread(name):
                    await self._forget(name)
                return None
            again = [await self._bring_up_to_date(item)]
            is_refused = why_refused(item.pool, self._settings.allowed_host_paths) is not None
            if self._calibrator is not None and not is_refused:
                again.append(await self._calibrator.calibrate(item.pool, datetime.now(timezone.utc)))
        return min((seconds for seconds in again if seconds is not None), default=None)

    async def _forget(self, name: str) -> None:
        """Clean up after a pool that is gone."""
        self._written.pop(name, None)
        self._applier.refusals.pop(name, None)
        await self._applier.label(name, labelled_nodes(self._cluster, name), is_ready=False)
        if self._calibrator is not None:
            await self._calibrator.forget(name)

    async def _bring_up_to_date(self, item: PoolItem) -> float | None:
        claims_problem: str | None = ""
        if item.pool.spec.storage.type is StorageType.SHARED_FILESYSTEM:
            claims_problem = self._claims_problem(item.pool)
        if claims_problem is None:
            return UNKNOWN_SECONDS
        now = datetime.now(timezone.utc)
        seen = observe(
            self._cluster,
            item,
            claims_problem=claims_problem,
            claims_refusal=self._applier.refusals.get(item.pool.name, ""),
            allowed_host_paths=self._settings.allowed_host_paths,
            is_calibrating=self._calibrator is not None,
            pods=self._pods(item.pool.name),
        )
        decision = self._spare(item, decide(seen, now))
        await self._applier.apply(item.pool, decision, now)
        if decision.status is not None:
            self._written[item.pool.name] = self._clock()
        return decision.again_seconds

    def _spare(self, item: PoolItem, decision: Decision) -> Decision:
        """Leave the status out of a decision if writing it would tell nobody anything, or can wait."""
        status = decision.status
        if status is None or not status_differs(item.status, status):
            return replace(decision, status=None)
        wait = self._written.get(item.pool.name, -QUIET_SECONDS) + QUIET_SECONDS - self._clock()
        if wait <= 0 or not is_quiet(item.status, status):
            return decision
        again = min(wait, decision.again_seconds or wait)
        return replace(decision, status=None, notices=(), again_seconds=again)  # what is written later is told later
