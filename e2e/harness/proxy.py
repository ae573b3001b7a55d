"""Between a client and the API server, for tests of what a client does when watches fall silent.

Plain HTTP on this machine; it speaks to the API server with an administrator's certificate, so the kubeconfig file that
it writes needs none. One thread with an event loop of its own.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import aiohttp
from aiohttp import web

CLOSING_S = 0.3
"""Transports close in later rounds of the loop."""
HOP_HEADERS = ("Transfer-Encoding", "Content-Encoding", "Content-Length", "Connection", "Host")


class ApiProxy:
    """Passes requests on to `server`; while it is stalled, nothing more comes out of any watch."""

    def __init__(self, server: str, *, certificates: Path, state: Path) -> None:
        """Start it; `certificates` holds admin.crt, admin.key and ca.crt."""
        self._server, self._flowing = server, threading.Event()
        self._flowing.set()
        self._tls = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        self._tls.load_cert_chain(certificates / "admin.crt", certificates / "admin.key")
        self._started = threading.Event()
        self._port = 0
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        if not self._started.wait(120):
            raise RuntimeError("the proxy did not start")
        self.kubeconfig = state / "through-proxy.conf"
        self.kubeconfig.write_text(json.dumps(self._kubeconfig()))

    def stall(self) -> None:
        """Hold back whatever watches tell; new ones are opened and say nothing."""
        self._flowing.clear()

    def flow(self) -> None:
        """Let watches tell again."""
        self._flowing.set()

    def stop(self) -> None:
        """End it."""
        self._flowing.set()
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(120)

    def _kubeconfig(self) -> Mapping[str, object]:
        named = {"name": "proxy"}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{**named, "cluster": {"server": f"http://127.0.0.1:{self._port}"}}],
            "users": [{**named, "user": {}}],
            "contexts": [{**named, "context": {"cluster": "proxy", "user": "proxy"}}],
            "current-context": "proxy",
        }

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        connector = aiohttp.TCPConnector(ssl=self._tls, limit=0)
        async with aiohttp.ClientSession(self._server, connector=connector, auto_decompress=True) as self._session:
            application = web.Application(client_max_size=2**24)
            application.router.add_route("*", "/{path:.*}", self._pass)
            runner = web.AppRunner(application, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port = runner.addresses[0][1]
            self._started.set()
            await self._end.wait()
            await runner.cleanup()
        await asyncio.sleep(CLOSING_S)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name not in HOP_HEADERS}
        headers["Accept-Encoding"] = "identity"
        body = await request.read()
        endless = aiohttp.ClientTimeout(total=None)
        async with self._session.request(
            request.method, request.rel_url, headers=headers, data=body or None, timeout=endless
        ) as answer:
            kept = {name: value for name, value in answer.headers.items() if name not in HOP_HEADERS}
            response = web.StreamResponse(status=answer.status, headers=kept)
            with suppress(ConnectionError):  # the client went away
                await response.prepare(request)
                await self._copy(answer, request, response)
        return response

    async def _copy(self, answer: aiohttp.ClientResponse, request: web.Request, response: web.StreamResponse) -> None:
        is_watch = request.query.get("watch") == "true"
        async for chunk in answer.content.iter_any():
            if is_watch:
                await asyncio.to_thread(self._flowing.wait)
            await response.write(chunk)
        if is_watch:
            await asyncio.to_thread(self._flowing.wait)  # its end tells something, too
