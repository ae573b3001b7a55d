"""Child processes that serve HTTP on this machine: vLLM's server and the sidecar, each as a user would start it.

Started in a session of their own, so that `stop` reaches the processes that they start; their output goes to a file.
"""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START_SECONDS_MAX = 600.0
STOP_SECONDS_MAX = 60.0
REQUEST_SECONDS_MAX = 600.0
POLL_SECONDS = 0.1
LOG_CHARACTERS = 6000
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # One unpinned computing thread each: several vLLM share the processors, and pinned ones would share the first.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class ProcessError(RuntimeError):
    """A child ended, did not start, or refused a request; the message holds the end of its output."""


class Served:
    """A child process with an HTTP port.

    Args:
        ready_path: answers 200 when the process is ready.
    """

    def __init__(self, command: list[str], *, port: int, ready_path: str, log: Path) -> None:
        self.port = port
        self._ready_path = ready_path
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **os.environ},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Return when the process answers that it is ready."""
        self.wait_for(self._is_ready, "be ready")

    def wait_for(self, condition: Callable[[], bool], what: str, *, seconds_max: float = START_SECONDS_MAX) -> None:
        """Return when the condition holds; it is asked again and again."""
        deadline = time.monotonic() + seconds_max
        while not condition():
            if not self.is_alive():
                raise ProcessError(f"the process ended before it could {what}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ProcessError(f"the process took more than {seconds_max:.0f} s to {what}:\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def get(self, path: str) -> str:
        """Return what GET answers."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON that POST answers."""
        return json.loads(self._ask("POST", path, json.dumps(body)))

    def metrics(self) -> dict[str, float]:
        """Return the sums over all labels of every sample on /metrics, by name."""
        sums: dict[str, float] = {}
        for name, value in self.samples().items():
            name = name.split("{")[0]
            sums[name] = sums.get(name, 0.0) + value
        return sums

    def samples(self) -> dict[str, float]:
        """Return every sample on /metrics by its name with labels."""
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines() if line and line[0] != "#")
        return {name: float(value) for name, _, value in lines}

    def resident_bytes_max(self) -> int:
        """Return the most memory that the process has had resident so far."""
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise ProcessError("the kernel does not tell the process's peak memory")

    def processor_seconds(self) -> float:
        """Return the processor time that the process has used, in user and kernel mode."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def log_tail(self) -> str:
        """Return the end of the output."""
        return self._log.read_text(errors="replace")[-LOG_CHARACTERS:]

    def stop(self) -> None:
        """End the process and its children: SIGTERM, then SIGKILL."""
        if self.is_alive():
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError, ProcessError):
            self.get(self._ready_path)
            return True
        return False

    def _ask(self, method: str, path: str, body: str | None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS_MAX)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status != 200:
            raise ProcessError(f"{method} {path}: {answer.status} {text[:500]}")
        return text


@contextlib.contextmanager
def sidecar(pool: str, capacity_bytes: int, *options: str, log: Path) -> Iterator[Served]:
    """Yield a running `pykvcache-sidecar run` that is ready; stop it at the end."""
    port = _free_port()
    command = [sys.executable, "-m", "pykvcache_sidecar.main", "run", "--pool", pool]
    command += ["--capacity", str(capacity_bytes), "--listen", f"127.0.0.1:{port}", *options]
    yield from _running(Served(command, port=port, ready_path="/readyz", log=log))


@contextlib.contextmanager
def vllm_server(model: str, *flags: str, log: Path) -> Iterator[Served]:
    """Yield a running `vllm serve` that is healthy; stop it at the end."""
    port = _free_port()
    command = [str(Path(sys.executable).parent / "vllm"), "serve", model, *flags]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    yield from _running(Served(command, port=port, ready_path="/health", log=log))


def _running(process: Served) -> Iterator[Served]:
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.stop()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
