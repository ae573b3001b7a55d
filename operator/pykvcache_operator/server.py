"""HTTP for the kubelet and Prometheus: /healthz, /readyz, /metrics, of the operator and of the webhook.

Served by the process's own event loop on purpose: a loop that hangs answers no probe, and the kubelet restarts it.
"""

import ssl
from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pykvcache_contract.errors import ConfigurationError

Question = Callable[[], str]
"""Returns why the answer is no; "" is yes."""


async def serve(
    *,
    host: str,
    port: int,
    is_healthy: Question,
    is_ready: Question,
    registry: CollectorRegistry,
    option: str = "--listen",
) -> tuple[web.AppRunner, int]:
    """Start serving; return the runner, whose `cleanup` ends it, and the port.

    Raises:
        ConfigurationError: the address cannot be used; the message names the option that gave it.
    """

    async def healthz(_request: web.Request) -> web.Response:
        return _answer(is_healthy())

    async def readyz(_request: web.Request) -> web.Response:
        return _answer(is_ready())

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)],
    )
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    return runner, await listen(runner, host=host, port=port, option=option)


async def listen(runner: web.AppRunner, *, host: str, port: int, option: str, tls: ssl.SSLContext | None = None) -> int:
    """Open the address for a runner and return the port; `tls` is used for new connections.

    Raises:
        ConfigurationError: the address cannot be used; the runner was cleaned up.
    """
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port, ssl_context=tls).start()
    except OSError as error:
        await runner.cleanup()
        reason = error.strerror or str(error)
        raise ConfigurationError(f"{option} {host}:{port}: {reason}. Choose another address.") from error
    return int(runner.addresses[0][1])


def _answer(problem: str) -> web.Response:
    return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")
