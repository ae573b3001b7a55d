"""The webhook's process: serves reviews from what it knows, until it is asked to end.

One event loop, no Lease and no state: replicas are equal, and each can be lost. It is ready while it has a certificate
that is valid and has read pools and namespaces once; it is healthy while its loop runs. An API server that is away
takes neither from it: what was known last holds, and a restart would know nothing.

Asked to end, it says that it is not ready and goes on answering: API servers learn some seconds later that it leaves.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import time
from collections.abc import Coroutine
from typing import Any

from pykvcache_contract.errors import TransientError
from pykvcache_operator import server
from pykvcache_operator.client import Api, load_configuration
from pykvcache_operator.settings import GRACE_SECONDS as WATCH_GRACE_SECONDS
from pykvcache_operator.webhook.certificate_files import CertificateFiles
from pykvcache_operator.webhook.decide import decider
from pykvcache_operator.webhook.exporter import Metrics
from pykvcache_operator.webhook.known import Known
from pykvcache_operator.webhook.options import Options
from pykvcache_operator.webhook.server import Reviews

logger = logging.getLogger(__name__)


class Webhook:
    """All parts of one process."""

    def __init__(self, api: Api, options: Options) -> None:
        self._options = options
        self._metrics = Metrics()
        self._known = Known(
            api,
            watch_seconds=options.watch_seconds,
            silence_seconds=options.watch_seconds + WATCH_GRACE_SECONDS,
            clock=time.monotonic,
        )
        self._certificate = CertificateFiles(
            options.certificate_directory, clock=time.time, counted=self._metrics.count_certificate
        )
        self._reviews = Reviews(self._known, decider(self._known, options.injection), count=self._metrics.count)
        self._metrics.watch(known=self._known, certificate=self._certificate)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, and a while longer.

        Raises:
            ConfigurationError: an address cannot be used.
            TransientError: a part ended that must not.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        async with contextlib.AsyncExitStack() as stack:
            await self._serve(stack)
            parts = [_start("certificate", self._certificate.keep())]
            parts += [_start(f"watch of {one.name}", one.run()) for one in self._known.informers]
            stack.push_async_callback(_end, parts)
            _leave_libraries_to_themselves()
            await self._until_stopped(parts)
            logger.info("asked to end; answering for %g s more", self._options.grace_seconds)
            self._reviews.is_ending = True
            await asyncio.sleep(self._options.grace_seconds)

    def readiness_problem(self) -> str:
        """Return why no reviews should be sent here; "" if they should."""
        if self._stop.is_set():
            return "ending"
        return "; ".join(filter(None, (self._certificate.problem, self._known.problem)))

    async def _serve(self, stack: contextlib.AsyncExitStack) -> None:
        options = self._options
        probes, port = await server.serve(
            host=options.metrics_host,
            port=options.metrics_port,
            is_healthy=lambda: "",
            is_ready=self.readiness_problem,
            registry=self._metrics.registry,
            option="--metrics-listen",
        )
        stack.push_async_callback(probes.cleanup)
        logger.info("serving /healthz, /readyz and /metrics on port %d", port)
        runner, tls = self._reviews.runner(), self._certificate.listener
        port = await server.listen(runner, host=options.host, port=options.port, option="--listen", tls=tls)
        stack.push_async_callback(runner.cleanup)
        logger.info("serving reviews on port %d", port)

    async def _until_stopped(self, parts: "list[asyncio.Task[Any]]") -> None:
        stopping = _start("stop", self._stop.wait())
        done, _ = await asyncio.wait([*parts, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for part in done - {stopping}:
            raise TransientError(f"{part.get_name()} ended: {part.exception()!r}") from part.exception()


def _leave_libraries_to_themselves() -> None:
    """Let garbage collection pass over what was loaded so far: going through it would delay an answer every time."""
    gc.collect()
    gc.freeze()


def _start(name: str, part: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    task = asyncio.ensure_future(part)
    task.set_name(name)
    return task


async def _end(parts: "list[asyncio.Task[Any]]") -> None:
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)


async def run(options: Options) -> None:
    """Run one webhook until it is asked to end.

    Raises:
        ConfigurationError: an option or the way to the API server is wrong.
        TransientError: it must be started again.
    """
    api = Api(await load_configuration())
    try:
        await Webhook(api, options).run()
    finally:
        with contextlib.suppress(OSError):
            await api.close()
