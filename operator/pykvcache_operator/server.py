"""HTTP for the kubelet and Prometheus: /healthz, /readyz, /metrics.

Served by the operator's own event loop on purpose: a loop that hangs answers no probe, and the kubelet restarts it.
"""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from pykvcache_contract.errors import ConfigurationError

Question = Callable[[], str]
"""Returns why the answer is no; "" is yes."""


async def serve(
    *, host: str, port: int, is_healthy: Question, is_ready: Question, registry: CollectorRegistry
) -> tuple[web.AppRunner, int]:
    """Start serving; return the runner, whose `cleanup` ends it, and the port.

    Raises:
        ConfigurationError: the address cannot be used.
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
    await runner.setup()
    try:
        await web.TCPSite(runner, host or None, port).start()
    except OSError as error:
        await runner.cleanup()
        reason = error.strerror or str(error)
        raise ConfigurationError(f"--listen {host}:{port}: {reason}. Choose another address.") from error
    return runner, runner.addresses[0][1]


def _answer(problem: str) -> web.Response:
    return web.Response(status=503 if problem else 200, text=f"{problem or 'ok'}\n")
