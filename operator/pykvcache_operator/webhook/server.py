"""HTTPS for API servers: POST /mutate, one AdmissionReview in, one out.

Everything is bounded: the body, the time to send it, how many large ones there are at once, and how long a pool that
nobody knows is waited for. All of it together stays below the timeout of the webhook configuration, 5 s, so that the
answer is ours. Anybody in the cluster may connect; what they can do is to ask what would become of a pod.
"""

import asyncio
import json
import logging
import time
from typing import Protocol

from aiohttp import web

from pykvcache_operator.webhook import review
from pykvcache_operator.webhook.known import Known

logger = logging.getLogger(__name__)

PATH = "/mutate"
BODY_BYTES_MAX = 8 * 2**20
"""An object has at most 1.5 MiB in etcd, 3 MiB in a request to the API server; JSON escapes may double it."""
TURN_SECONDS_MAX = 1.5
"""How long a large body waits for its turn."""
BODY_SECONDS_MAX = 2.0
UNKNOWN_SECONDS_MAX = 1.0
"""How long a pool or namespace that nobody knows may take to arrive by its watch."""
LARGE_BYTES_MIN = 2**20
LARGE_AT_ONCE_MAX = 4
"""Of bodies of that size or of unknown size: each takes several times its size while it is worked on."""
KEEP_ALIVE_SECONDS = 120.0
"""Longer than the 90 s after which Go's clients drop idle connections: who closes first must not be the server, or a
request that is just being sent fails."""
END_SECONDS_MAX = 5.0
"""How long requests under way may take when the process ends."""


class Count(Protocol):
    """Is told of each answer."""

    def __call__(self, *, result: str, reason: str, seconds: float) -> None: ...


class Reviews:
    """Answers reviews."""

    def __init__(self, known: Known, inject: review.Inject, *, count: Count) -> None:
        self._known, self._inject, self._count = known, inject, count
        self._large = asyncio.Semaphore(LARGE_AT_ONCE_MAX)
        self.is_ending = False
        """While it is set, connections are closed after their answer, so that clients go to another replica."""

    def runner(self) -> web.AppRunner:
        """Return what `server.listen` opens to the world; its `cleanup` waits for requests under way."""
        application = web.Application(client_max_size=BODY_BYTES_MAX)
        application.router.add_post(PATH, self._mutate)
        return web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            shutdown_timeout=END_SECONDS_MAX,
        )

    async def _mutate(self, request: web.Request) -> web.Response:
        if request.content_length is not None and request.content_length < LARGE_BYTES_MIN:
            return await self._review(request)
        try:
            await asyncio.wait_for(self._large.acquire(), TURN_SECONDS_MAX)
        except asyncio.TimeoutError:
            raise web.HTTPServiceUnavailable(text="too many large reviews at once\n") from None
        try:
            return await self._review(request)
        finally:
            self._large.release()

    async def _review(self, request: web.Request) -> web.Response:
        started = time.perf_counter()
        try:
            question = review.read(await _body(request))
        except (review.MalformedReviewError, web.HTTPException) as error:
            self._count(result="malformed", reason="", seconds=time.perf_counter() - started)
            logger.warning("refused a request: %s", error)
            if isinstance(error, web.HTTPException):
                raise
            raise web.HTTPBadRequest(text=f"{error}\n") from None
        if name := review.pool_name(question.pod):
            await self._known.wait_for(pool=name, namespace=question.namespace, seconds=UNKNOWN_SECONDS_MAX)
        answer = review.respond(question, self._inject)
        self._count(result=answer.result, reason=answer.reason, seconds=time.perf_counter() - started)
        logger.info("%s: pod %s, pool %s %s", answer.result, question.title, review.short(name), answer.reason)
        response = web.json_response(body=json.dumps(answer.document).encode())
        if self.is_ending:
            response.force_close()
        return response


async def _body(request: web.Request) -> bytes:
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="send application/json\n")
    try:
        return await asyncio.wait_for(request.read(), BODY_SECONDS_MAX)
    except asyncio.TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body took longer than {BODY_SECONDS_MAX:g} s\n") from None
