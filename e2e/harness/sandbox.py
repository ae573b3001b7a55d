"""The namespaces of one node: mounts, network and processes of its own, on this machine.

Whatever a node does (bridges, iptables, mounts, sockets below /run) is seen inside only, and ends with the namespaces:
when their first process is killed the kernel kills the rest, unmounts and removes interfaces. Two things are not
covered by namespaces and put back by hand: cgroups and the few sysctls that the kubelet sets. Needs root.
"""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from harness.processes import Process, children, send
from harness.waiting import NotYetError, wait_for

SYSCTLS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")
CGROUPS = Path("/sys/fs/cgroup")

# The first process ignores SIGCHLD, so that the kernel takes away what its orphans leave; it has nothing else to do.
# The kubelet's folder is bound to itself as a mount of its own: what is mounted there is not seen twice.
ENTER = """\
set -e
mount --make-rshared /
for hidden in /run /var/log /var/lib/cni; do mkdir -p $hidden; mount -t tmpfs tmpfs $hidden; done
mkdir -p /run/lock {kubelet} /var/lib/kubelet
mount --bind {kubelet} /var/lib/kubelet
mount --make-private /var/lib/kubelet
mount --make-shared /var/lib/kubelet
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
touch {ready}
trap '' CHLD
exec sleep infinity
"""


class Sandbox:
    """The namespaces of one node and the programs in them. `state` is its folder, seen inside and outside."""

    def __init__(self, state: Path, *, lasting: bool) -> None:
        self.state, self._lasting = state, lasting
        self._ours: list[Process] = []  # outside: they entered, or made, the namespaces and wait for what runs inside
        self.pid = 0  # of the first process inside, as the host numbers it; who attaches sets it

    def start(self) -> None:
        """Make the namespaces; the caller gives them interfaces."""
        self.state.mkdir(parents=True, exist_ok=True)
        ready = self.state / "entered"
        script = ENTER.format(kubelet=self.state / "kubelet", ready=ready)
        flags = ["--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
        log = self.state / "log" / "sandbox"
        unshare = Process("sandbox", ["unshare", *flags, "sh", "-c", script], log=log, lasting=self._lasting)

        self._ours.append(unshare)

        def entered() -> bool:
            unshare.check()
            return ready.exists()

        wait_for("the node's namespaces", entered, limit_s=120, every_s=0.02)
        self.pid = children(unshare.pid)[0]

    @property
    def is_alive(self) -> bool:
        """Whether the first process is there; its number may have gone to another one since."""
        try:
            return Path(f"/proc/{self.pid}/cmdline").read_bytes() == b"sleep\0infinity\0"
        except OSError:
            return False

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the command line that runs another one inside."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid", "--", *map(str, arguments)]

    def run(self, *arguments: str | Path, text: str | None = None, limit_s: float = 120) -> str:
        """Run a command inside, wait for it and return its output.

        Raises:
            NotYetError: it failed; with what it wrote.
        """
        done = subprocess.run(
            self.command(*arguments), input=text, capture_output=True, text=True, timeout=limit_s, check=False
        )
        if done.returncode:
            raise NotYetError(f"{' '.join(map(str, arguments))}: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def spawn(self, name: str, command: Sequence[str | Path], *, pass_fds: Sequence[int] = ()) -> Process:
        """Start a program inside that runs on; its log lies in the node's folder."""
        log = self.state / "log" / name
        process = Process(name, self.command(*command), log=log, lasting=self._lasting, pass_fds=pass_fds)
        self._ours.append(process)
        return process

    def connect(self, other: "Sandbox", *, bridge: str) -> None:
        """Lay a cable between the equally named bridges of two nodes."""
        inside, beyond = f"to-{other.state.name}", f"to-{self.state.name}"
        net = ["nsenter", f"--target={self.pid}", "--net", "--", "ip", "link"]
        subprocess.run(
            [*net, "add", inside, "type", "veth", "peer", "name", beyond, "netns", str(other.pid)], check=True
        )
        self.run("ip", "link", "set", inside, "master", bridge, "up")
        other.run("ip", "link", "set", beyond, "master", bridge, "up")

    def stop(self) -> None:
        """End everything inside at once, and wait until it has ended."""
        if self.is_alive:
            send(self.pid, signal.SIGKILL)
            wait_for("the node's processes to end", lambda: not self.is_alive, limit_s=120, every_s=0.02)
        # First the one that waits for the first process inside, whose end the kernel puts off until all others have
        # ended. Those that entered must live meanwhile: what they wait for is there until they take note of its end.
        for process in self._ours:
            process.kill()


def read_sysctls() -> str:
    """Return what `restore_sysctls` needs."""
    return json.dumps({name: Path("/proc/sys", name).read_text() for name in SYSCTLS})


def restore_sysctls(saved: str) -> None:
    """Put back what the kubelet changed."""
    for name, value in json.loads(saved).items():
        Path("/proc/sys", name).write_text(value)


def make_cgroups(name: str) -> None:
    """Make the group below which a node's pods live, in every hierarchy; cgroup v1, v2, or both."""
    if (controllers := CGROUPS / "cgroup.controllers").exists():
        enabled = " ".join(f"+{controller}" for controller in controllers.read_text().split())
        (CGROUPS / "cgroup.subtree_control").write_text(enabled)
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)
        if (hierarchy / "cpuset.cpus").exists() and not (hierarchy / "cgroup.controllers").exists():
            for file in ("cpuset.cpus", "cpuset.mems"):  # v1: empty ones admit no process
                (hierarchy / name / file).write_text((hierarchy / file).read_text())


def remove_cgroups(name: str) -> None:
    """Remove the groups of a node whose processes are gone."""
    folders = [Path(at) for hierarchy in _hierarchies() for at, _, _ in os.walk(hierarchy / name, topdown=False)]

    def removed() -> bool:
        while folders:
            folders[0].rmdir()  # EBUSY, an OSError, until its last process is reaped
            folders.pop(0)
        return True

    wait_for("the cgroups of the node to be empty", removed, limit_s=120, every_s=0.05)


def _hierarchies() -> list[Path]:
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return sorted({path.resolve() for path in CGROUPS.iterdir() if path.is_dir()})
