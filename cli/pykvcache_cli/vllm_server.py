"""A real `vllm serve` as a child process: start, wait until healthy, complete, read metrics, stop."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

START_SECONDS = 600.0
"""Far beyond a healthy start (under a minute on two cores, minutes for a large model)."""
STOP_SECONDS = 60.0
REQUEST_SECONDS = 600.0
LOG_LINES = 30


class ServerError(RuntimeError):
    """The server did not start, or a request failed; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer.

    Args:
        text: what the model said; greedy.
        prompt_tokens: as the server counted them.
        ttft_seconds: from the request to the first token.
    """

    text: str
    prompt_tokens: int
    ttft_seconds: float


class VllmServer:
    """A running server; use `running`."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self._port = port
        self._log = log

    def complete(self, model: str, prompt: str, *, max_tokens: int) -> Completion:
        """Return a greedy completion and the time to its first token.

        Raises:
            ServerError: the request failed.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        started = time.perf_counter()
        first, text, prompt_tokens = 0.0, "", 0
        for event in self._events("/v1/completions", body):
            for choice in event.get("choices", []):
                first = first or time.perf_counter() - started
                text += choice["text"]
            usage = event.get("usage")
            prompt_tokens = usage["prompt_tokens"] if usage else prompt_tokens
        return Completion(text, prompt_tokens, first)

    def metrics(self) -> dict[str, float]:
        """Return the sums over all labels of every sample on /metrics, by name."""
        sums: dict[str, float] = {}
        for line in self.metrics_text().splitlines():
            if line and not line.startswith("#"):
                name = line.split("{")[0].split(" ")[0]
                sums[name] = sums.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        return sums

    def metrics_text(self) -> str:
        """Return /metrics as Prometheus reads it."""
        return self._get("/metrics")

    def wait_until_healthy(self) -> None:
        """Return when the server answers.

        Raises:
            ServerError: it ended or took too long.
        """
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"vLLM ended with status {self._process.returncode}:\n{self.log_tail()}")
            with contextlib.suppress(OSError, ServerError):
                self._get("/health")
                return
            time.sleep(0.5)
        raise ServerError(f"vLLM was not ready after {START_SECONDS:.0f} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Return the last lines of the server's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])

    def stop(self) -> None:
        """End the server and its children, as a pod's end does: SIGTERM, then SIGKILL."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _get(self, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status != 200:
            raise ServerError(f"GET {path}: {answer.status}")
        return text

    def _events(self, path: str, body: dict[str, object]) -> Iterator[dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_SECONDS)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise ServerError(f"POST {path}: {answer.status} {answer.read().decode()[:500]}\n{self.log_tail()}")
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)


@contextlib.contextmanager
def running(model: str, arguments: list[str], *, environment: dict[str, str], log: Path) -> Iterator[VllmServer]:
    """Yield a healthy server on a free port of this machine; stop it at the end.

    Args:
        arguments: flags after `vllm serve MODEL`.
        environment: added to this process's.
        log: file that gets the server's output.

    Raises:
        ServerError: vLLM is not installed here, or did not start.
    """
    port = _free_port()
    command = [_vllm_program(), "serve", model, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "ab") as output:
        server = VllmServer(_spawn(command, environment, output), port, log)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def _spawn(command: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def _vllm_program() -> str:
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if beside.exists() else shutil.which("vllm")
    if found is None:
        raise ServerError("the command `vllm` was not found. Install vLLM in this Python environment.")
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
