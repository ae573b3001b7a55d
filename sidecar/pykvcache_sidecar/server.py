"""HTTP for Prometheus, for the kubelet and for people: /metrics, /healthz, /readyz, /status. Answers GET only.

Every answer comes from memory, so a hung disk delays none. Threads: one that accepts, one per open connection, at most
`CONNECTIONS_MAX`; more are closed at once, and a silent one after `IDLE_SECONDS`.
"""

import json
import logging
import socket
import socketserver
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from pykvcache_contract.errors import ConfigurationError
from pykvcache_sidecar.book import ROUND, Book, Snapshot
from pykvcache_sidecar.exporter import PoolCollector
from pykvcache_sidecar.status import status_document

logger = logging.getLogger(__name__)

TICK_SECONDS_MAX = 30.0
"""A round takes well under a second; one that takes this long sits on a hung disk or failed again and again."""
CONNECTIONS_MAX = 32
IDLE_SECONDS = 10.0
STOP_POLL_SECONDS = 0.1
"""How long the end may wait for the thread that accepts."""
TEXT = "text/plain; charset=utf-8"
Answer = tuple[HTTPStatus, str, bytes]


class Answers(ABC):
    """What each path answers; the collector is what /metrics shows."""

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self.paths: dict[str, Callable[[], Answer]] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": self._status,
        }

    def _metrics(self) -> Answer:
        return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry)

    @abstractmethod
    def _healthz(self) -> Answer: ...

    @abstractmethod
    def _readyz(self) -> Answer: ...

    @abstractmethod
    def _status(self) -> Answer: ...


class PoolAnswers(Answers):
    """What each path answers about one pool.

    Args:
        is_patient: no restart is ever asked for: then a disk that does not answer is told by /readyz, not by /healthz.
    """

    def __init__(self, book: Book, *, is_patient: bool = False) -> None:
        super().__init__(PoolCollector(book))
        self._book, self._is_patient = book, is_patient

    def _healthz(self) -> Answer:
        late = _lateness(self._book.snapshot())
        return unavailable(late) if late and not self._is_patient else (HTTPStatus.OK, TEXT, b"ok\n")

    def _readyz(self) -> Answer:
        now = self._book.snapshot()
        if self._is_patient and (late := _lateness(now)):
            return unavailable(late)
        if now.is_ready:
            return HTTPStatus.OK, TEXT, f"{now.state}\n".encode()
        return unavailable(f"{now.state}: {now.reason}")

    def _status(self) -> Answer:
        now = self._book.snapshot()
        document = status_document(now, self._book.settings)
        return as_json({**document, "reason": "; ".join(filter(None, (document["reason"], _lateness(now))))})


def _lateness(now: Snapshot) -> str:
    """Return that and why no round comes to its end; "" while rounds do."""
    if now.tick_age_seconds <= TICK_SECONDS_MAX:
        return ""
    cause = now.problems.get(ROUND) or "the disk does not answer"
    return f"no round was finished for {now.tick_age_seconds:.0f} s: {cause}"


def serve(answers: Mapping[str, Callable[[], Answer]], *, host: str, port: int) -> ThreadingHTTPServer:
    """Start serving; return the server, whose `server_address` tells the port.

    Args:
        answers: by path; each is asked on a thread of its own and answers from memory.

    Raises:
        ConfigurationError: the address cannot be used.
    """

    class Handler(_Handler):
        paths = answers

    try:
        server = _server_class(host)((host, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"--listen {host}:{port}: {reason}. Choose another port, or end the program that has it."
        ) from error
    thread = threading.Thread(
        target=server.serve_forever, args=(STOP_POLL_SECONDS,), name="pykvcache-http", daemon=True
    )
    thread.start()
    return server


def unavailable(reason: str) -> Answer:
    """Return the answer for what cannot be done now, with a reason for people."""
    return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{reason}\n".encode("utf-8", "backslashreplace")


def as_json(document: dict[str, Any]) -> Answer:
    """Return a document as an answer for programs."""
    return HTTPStatus.OK, "application/json", json.dumps(document, indent=2).encode() + b"\n"


def _server_class(host: str) -> "type[_Server]":
    return _ServerIPv6 if ":" in host else _Server


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the DNS for our name and hangs where there is none.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("an HTTP connection ended early", exc_info=True)


class _ServerIPv6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    paths: Mapping[str, Callable[[], Answer]]
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        answer = self.paths.get(self.path.partition("?")[0])
        if answer is None:
            known = " ".join(self.paths)
            status, kind, body = HTTPStatus.NOT_FOUND, TEXT, f"there is: {known}\n".encode()
        else:
            status, kind, body = answer()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the name is the base class's
        logger.debug(format, *arguments)
