"""Processes of a cluster on this machine: started with a log file, stopped for certain.

A process dies with the thread that started it (setpriv's parent-death signal), so that a killed test run leaves nothing
behind; one started with lasting=True does not.
"""

import os
import random
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

END_LIMIT_S = 60
PORTS = range(10_000, 30_000)  # from 30000 on they may be NodePorts of this machine's own Kubernetes
_OUTLIVING: list[subprocess.Popen[bytes]] = []
"""Lasting processes, held so that none is taken for one that was forgotten."""


class Process:
    """One program and its log."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        log: Path,
        lasting: bool = False,
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; `log` is written anew."""
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        prefix = [] if lasting else ["setpriv", "--pdeathsig", "KILL", "--"]
        with log.open("wb") as output:
            self._popen = subprocess.Popen(
                [*prefix, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=pass_fds,
                env=environment,
            )
        if lasting:
            _OUTLIVING.append(self._popen)

    @property
    def pid(self) -> int:
        """Its number, or that of the program that entered the namespaces for it."""
        return self._popen.pid

    def check(self) -> None:
        """Raise RuntimeError with the end of its log if it has ended."""
        if (code := self._popen.poll()) is not None:
            raise RuntimeError(f"{self.name} ended with status {code}; {self.log} ends with:\n{tail(self.log)}")

    def kill(self) -> None:
        """End it at once, with what it waits for, and wait until both are gone."""
        waited_for = children(self.pid) if self._popen.poll() is None else []
        for pid in waited_for:
            send(pid, signal.SIGKILL)
        if waited_for:  # it ends when they have, which takes them a moment
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(END_LIMIT_S)
        self._popen.kill()
        self._popen.wait()


def children(pid: int) -> list[int]:
    """Return the processes that a one-threaded process started."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def send(pid: int, number: int) -> None:
    """Send a signal; a process that is gone does not matter."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def tail(path: Path, *, lines: int = 30) -> str:
    """Return the last lines of a log, or why there are none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)


def make_folder(parent: Path, kind: str) -> Path:
    """Make a folder that belongs to this process, as `abandoned` can tell later."""
    parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-", dir=parent))


def abandoned(parent: Path, kind: str) -> list[Path]:
    """Return the folders of `make_folder` whose processes are gone: they were killed, or the machine went down."""
    folders = parent.glob(f"{kind}-*-*")
    return [folder for folder in folders if not Path("/proc", folder.name.split("-")[1]).exists()]


def free_ports(count: int) -> list[int]:
    """Return different free ports of 127.0.0.1, none of those that the kernel gives to whoever asks for any.

    They are used seconds later, and again after a restart; any other program could have such a one by then.
    """
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [port for port in PORTS if not low <= port <= high]
    drawn = random.SystemRandom().sample(outside, len(outside))  # so that runs side by side do not take the same
    found: list[int] = []
    with ExitStack() as stack:
        for port in [*drawn, *[0] * count]:  # 0: whichever the kernel gives, where it gives all of them
            with suppress(OSError):  # taken
                opened = stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(opened.getsockname()[1])
            if len(found) == count:
                break
    return found
