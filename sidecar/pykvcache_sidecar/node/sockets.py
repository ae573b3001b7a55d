"""gRPC servers on Unix sockets that kubelet finds by their path.

Facts: a killed process leaves its socket behind, on which nobody answers. gRPC removes the path that it bound when it
stops, whoever's socket is there by then. Kubelet looks at what appears in its directories, except names that begin with
a dot, and may connect at once. Therefore a server binds a hidden name of its own and gets the public one by a rename,
when it answers already: a stale socket, or that of an agent that is about to end, is replaced in one step, and nobody
removes another's. What is no socket is never replaced.

If the public name vanishes, nobody can reach the server any more: `check` begins a new one.
"""

import logging
import os
import stat
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from pykvcache_sidecar.node.places import Refusal

log = logging.getLogger(__name__)

PATH_BYTES_MAX = 107
"""Of a Unix socket, on Linux."""
CONCURRENT_MAX = 64
"""Calls at work or waiting for a thread; more are refused, and kubelet asks again."""
_MESSAGE_BYTES_MAX = 1 << 20

Method = Callable[[Any], Any]
"""From a request to its response; a Refusal it raises becomes a status."""


class SocketError(Exception):
    """A server cannot be reached at its path; the message says what to do."""


class Endpoint:
    """A gRPC server at a path.

    Args:
        path: absolute; its folder exists.
        handlers: generic handlers, called in the server's threads.
        threads: calls at work at a time.
    """

    def __init__(self, path: str, handlers: "Sequence[grpc.GenericRpcHandler]", *, threads: int) -> None:
        self.path = path
        self._handlers = handlers
        self._threads = threads
        self._server: grpc.Server | None = None
        self._socket: os.stat_result | None = None

    def start(self) -> None:
        """Begin to answer.

        Raises:
            SocketError: the folder is missing, the path too long or taken by what is no socket.
        """
        folder = os.path.dirname(self.path)
        hidden = f"{folder}/.{uuid.uuid4().hex[:8]}.sock"
        if len(os.fsencode(max(hidden, self.path, key=len))) > PATH_BYTES_MAX:
            raise SocketError(f"listen at {self.path}: a socket's path has at most {PATH_BYTES_MAX} bytes. Shorten it.")
        self._refuse_other_files()
        server = grpc.server(
            ThreadPoolExecutor(self._threads, thread_name_prefix="grpc"),
            handlers=self._handlers,
            options=[("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX)],
            maximum_concurrent_rpcs=CONCURRENT_MAX,
        )
        try:
            server.add_insecure_port(f"unix:{hidden}")
            os.chmod(hidden, 0o600)
            server.start()
            self._socket = os.stat(hidden)
            os.rename(hidden, self.path)
        except (OSError, RuntimeError) as error:
            server.stop(grace=None)
            raise SocketError(
                f"listen at {self.path}: {error}. The directory must exist and be writable for the agent."
            ) from error
        self._server = server

    def check(self) -> bool:
        """Return whether the server can be reached by its path; begin a new one if the path is gone.

        A socket that another process has put there stays: that process has taken over.

        Raises:
            SocketError: as for `start`; the next check tries again.
        """
        if self._is_ours():
            return True
        if not os.path.lexists(self.path):
            self.stop()
            self.start()
        return False

    def stop(self, *, grace_seconds: float | None = None) -> None:
        """Answer no more; remove the socket if it is ours.

        Args:
            grace_seconds: for calls at work; None cancels them. They run to their end in any case.
        """
        if self._is_ours():
            os.unlink(self.path)
        if self._server is not None:
            self._server.stop(grace_seconds).wait()
        self._server = self._socket = None

    def _is_ours(self) -> bool:
        try:
            return self._socket is not None and os.path.samestat(os.lstat(self.path), self._socket)
        except OSError:
            return False

    def _refuse_other_files(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except OSError:
            return  # free, or unreachable: then listening says why
        if not stat.S_ISSOCK(mode):
            raise SocketError(f"listen at {self.path}: something else than a socket is there. Remove it.")


def generic_handler(service: str, methods: Mapping[str, tuple[Any, Any, Method]]) -> "grpc.GenericRpcHandler":
    """Return a gRPC handler.

    Args:
        service: with its package.
        methods: name → message class of the request, of the response, and what answers.
    """
    return grpc.method_handlers_generic_handler(
        service,
        {
            name: grpc.unary_unary_rpc_method_handler(
                _answering(method),
                request_deserializer=request.FromString,
                response_serializer=response.SerializeToString,
            )
            for name, (request, response, method) in methods.items()
        },
    )


def _answering(method: Method) -> Callable[[Any, Any], Any]:
    def answer(request: Any, context: Any) -> Any:
        try:
            return method(request)
        except Refusal as refusal:
            log.warning("refused: %s", refusal.message, exc_info=refusal.__cause__)
            code, message = grpc.StatusCode[refusal.code.value], refusal.message
        except Exception as error:
            # A thread's loop top: kubelet asks again, and the process goes on.
            log.exception("a call of kubelet failed")
            code = grpc.StatusCode.UNAVAILABLE
            message = f"{type(error).__name__}: {error}; the agent's log on the node says more"
        return context.abort(code, message)

    return answer
