"""One active operator: a coordination.k8s.io Lease, held or waited for.

The holder renews every `RETRY_SECONDS`; one that could not for `RENEW_SECONDS` has lost it and must end its process.
Others take it when its record has not changed for `DURATION_SECONDS` by their own clock, so clocks need not agree. A
hung holder may still finish a write that was on its way: all writes are therefore idempotent.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timezone

from pykvcache_contract.errors import TransientError
from pykvcache_operator.client import Api, ApiError, Document

logger = logging.getLogger(__name__)

DURATION_SECONDS = 15
RENEW_SECONDS = 10.0
RETRY_SECONDS = 2.0


class LeaseLostError(TransientError):
    """Another process may be active by now: end this one, and let it be started again."""


class Lease:
    """One process's view of the lease.

    Args:
        identity: unique per process; seen in the lease.
        clock: monotonic seconds.
    """

    def __init__(self, api: Api, *, namespace: str, name: str, identity: str, clock: Callable[[], float]) -> None:
        self._api, self._namespace, self._name, self.identity = api, namespace, name, identity
        self._clock = clock
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen: tuple[str, str] = ("", "")
        self._seen_at = clock()
        self.is_held = False

    async def acquire(self) -> None:
        """Wait until the lease is ours."""
        problem = ""
        while not self.is_held:
            try:
                self.is_held = await self._try()
            except ApiError as error:
                if str(error) != problem:
                    logger.warning("cannot get the lease %s/%s, trying again: %s", self._namespace, self._name, error)
                problem = str(error)
            if not self.is_held:
                await asyncio.sleep(RETRY_SECONDS)
        logger.info("this process is active: it holds the lease %s/%s", self._namespace, self._name)

    async def keep(self) -> None:
        """Renew for ever.

        Raises:
            LeaseLostError: somebody else has it, or it could not be renewed in time.
        """
        renewed = self._clock()
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            left = RENEW_SECONDS - (self._clock() - renewed)
            try:
                # At least one try, also after a loop that hung: the record says who has it now.
                held = await asyncio.wait_for(self._try(), timeout=max(left, RETRY_SECONDS))
            except (ApiError, asyncio.TimeoutError) as error:
                if self._clock() - renewed >= RENEW_SECONDS:
                    raise self._lose(f"could not be renewed for {RENEW_SECONDS:.0f} s: {error!r}") from error
                continue
            if not held:
                raise self._lose(f"is held by {self._seen[0]}")
            renewed = self._clock()

    async def release(self) -> None:
        """Let another process have it at once."""
        if not self.is_held:
            return
        self.is_held = False
        try:
            lease = await self._api.get(f"{self._collection}/{self._name}")
            if lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"]["holderIdentity"] = ""
                await self._api.replace(f"{self._collection}/{self._name}", lease)
        except ApiError as error:
            logger.info("the lease was not released, it ends by itself in %d s: %s", DURATION_SECONDS, error)

    def _lose(self, why: str) -> LeaseLostError:
        self.is_held = False
        return LeaseLostError(f"the lease {self._namespace}/{self._name} {why}; this process ends")

    async def _try(self) -> bool:
        """Take or renew the lease if that is allowed; say whether we have it."""
        try:
            lease = await self._api.get(f"{self._collection}/{self._name}")
        except ApiError as error:
            if not error.is_missing:
                raise
            return await self._write(None)
        spec = lease["spec"]
        holder = spec.get("holderIdentity") or ""
        if (holder, spec.get("renewTime", "")) != self._seen:
            self._seen, self._seen_at = (holder, spec.get("renewTime", "")), self._clock()
        is_over = self._clock() - self._seen_at > DURATION_SECONDS
        if holder not in ("", self.identity) and (self.is_held or not is_over):
            return False
        return await self._write(lease)

    async def _write(self, lease: Document | None) -> bool:
        """Put our name into the lease that was read; False if somebody was faster."""
        now = datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")
        spec: Document = dict(lease["spec"]) if lease else {}
        if spec.get("holderIdentity") != self.identity:
            spec |= {"acquireTime": now, "leaseTransitions": spec.get("leaseTransitions", 0) + (lease is not None)}
        spec |= {"holderIdentity": self.identity, "leaseDurationSeconds": DURATION_SECONDS, "renewTime": now}
        try:
            if lease is None:
                names = {"name": self._name, "namespace": self._namespace}
                body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": names, "spec": spec}
                await self._api.create(self._collection, body)
            else:
                await self._api.replace(f"{self._collection}/{self._name}", {**lease, "spec": spec})
        except ApiError as error:
            if error.is_conflict and not self.is_held:
                return False
            raise  # the holder looks again: it may have been no more than a label
        return True
