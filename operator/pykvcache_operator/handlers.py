"""kopf's part: it watches KVCachePools and hands them over; nothing else.

Handlers only put objects into a store, which wakes the workers. There is no handler that makes kopf add a finalizer or
an annotation (no on.delete, timer, daemon or index), so kopf never writes to the API server. kopf hides bookmarks and
ends of watches, by which one that lives is told from one that is stalled: its session therefore reports what it reads.
"""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

import aiohttp
import kopf

from pykvcache_contract.names import API_GROUP, API_VERSION, POOL_PLURAL
from pykvcache_operator.client import CONNECT_SECONDS, REQUEST_SECONDS, Api
from pykvcache_operator.settings import Settings

WORKERS_MAX = 20
LOGIN_LIFETIME = timedelta(minutes=30)
"""Tokens of service accounts are replaced on disk long before they end after an hour; then kopf logs in anew."""
_ERROR_BACKOFFS = (1, 2, 5, 10)


class Pools(Protocol):
    """Where pools are put."""

    def put(self, document: dict[str, Any]) -> None: ...
    def remove(self, document: dict[str, Any]) -> None: ...


def make_registry(api: Api, pools: Pools, heard: Callable[[], None]) -> kopf.OperatorRegistry:
    """Return kopf's handlers.

    Args:
        heard: called whenever the watch of pools tells anything, bookmarks too.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        session, may_expire = await api.open_session(_watched_response(heard))
        expiration = datetime.now(timezone.utc) + LOGIN_LIFETIME if may_expire else None
        return kopf.AiohttpSession(server=api.server, aiohttp_session=session, expiration=expiration)

    @kopf.on.event(API_GROUP, API_VERSION, POOL_PLURAL, registry=registry)
    async def pool_event(event: Mapping[str, Any], **_: Any) -> None:
        put = pools.remove if event["type"] == "DELETED" else pools.put
        put(dict(event["object"]))

    return registry


def make_settings(settings: Settings) -> kopf.OperatorSettings:
    """Return kopf's settings: nothing of its own in the cluster, and watches that end and are checked."""
    ours = kopf.OperatorSettings()
    ours.persistence.finalizer = f"{API_GROUP}/kopf"
    ours.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=f"kopf.{API_GROUP}")
    ours.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=f"kopf.{API_GROUP}")
    ours.posting.enabled = False
    ours.scanning.disabled = True
    ours.queueing.worker_limit = WORKERS_MAX
    ours.watching.server_timeout = int(settings.watch_seconds)
    ours.watching.client_timeout = int(settings.watch_seconds) + 30
    ours.watching.connect_timeout = CONNECT_SECONDS
    ours.watching.inactivity_timeout = settings.silence_seconds
    ours.networking.request_timeout = REQUEST_SECONDS
    ours.networking.error_backoffs = _ERROR_BACKOFFS
    ours.process.ultimate_exiting_timeout = 20.0
    return ours


def quiet_kopf() -> None:
    """Leave of kopf's log what an administrator may act on."""
    logging.getLogger("kopf").setLevel(logging.WARNING)


class _Heard:
    """The content of a watch, which reports each piece that is read."""

    def __init__(self, content: aiohttp.StreamReader, heard: Callable[[], None]) -> None:
        self._content, self._heard = content, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        async for chunk in self._content.iter_chunked(size):
            self._heard()
            yield chunk
        self._heard()  # ended by the server, and not by a cut connection


def _watched_response(heard: Callable[[], None]) -> type[aiohttp.ClientResponse]:
    class WatchedResponse(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> "WatchedResponse":
            await super().start(connection)
            if self.url.query.get("watch") == "true" and self.status == 200:
                self.content = _Heard(self.content, heard)  # type: ignore[assignment] # looks and reads like one
            return self

    return WatchedResponse
