"""The product's images, built from the Dockerfile as it is, and only when something that goes into them changed.

With docker where its daemon answers, else with buildah; then the base image is a minimal Debian that debootstrap makes
once, since there need not be a way to a registry. The result is an archive in the cache that containerd can import.
"""

import hashlib
import shutil
import subprocess
import tempfile
from functools import cache as remember
from pathlib import Path

from harness.binaries import locked, make_once, require
from harness.settings import REPOSITORY
from harness.waiting import stage

TARGETS = ("operator", "sidecar", "connector", "bench")
PREFIX = "localhost/pykvcache/"
STORED_MAX = 60  # images, named or steps of builds, in buildah's store; about 5 GB, since steps share what they can
KEPT = 2  # archives of each target that stay in the cache
INPUTS = ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE", "*/pykvcache_*/**/*")

BASE = "localhost/pykvcache/base:bookworm-2"  # the number changes with what is below
DOCKER_BASE = "docker.io/library/python:3.11-slim-bookworm"  # as the Dockerfile says
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
UNNEEDED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/lib/apt/lists",
    "var/cache/apt",
)
# pip inside a build finds certificates and its index where pip outside does.
HOST_FILES = ("/etc/ssl/certs", "/etc/pip.conf")


@remember
def source_key(source: Path = REPOSITORY) -> str:
    """Return a hash of everything that goes into images."""
    digest = hashlib.sha256(BASE.encode())
    for pattern in INPUTS:
        for path in sorted(source.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(f"{path.relative_to(source)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def local_name(target: str, source: Path = REPOSITORY) -> str:
    """Return what an image built here is called."""
    return f"{PREFIX}{target}:{source_key(source)}"


def build(target: str, cache: Path, source: Path = REPOSITORY) -> Path:
    """Return the archive with the image `local_name(target, source)`, built unless the cache has it.

    `source` is a checkout of ours, of this or another version.

    Raises:
        ValueError: there is no such target.
        MissingError: neither docker nor buildah is there.
        RuntimeError: the build failed; with the end of its output.
    """
    if target not in TARGETS:
        raise ValueError(f"no image {target}; there are {', '.join(TARGETS)}")
    kind = target if source == REPOSITORY else f"other-{target}"
    folder = cache / "images" / f"{kind}-{source_key(source)}"

    def make(scratch: Path) -> None:
        with stage(f"image {target} built"), locked(cache / ".images.lock"):
            if has_docker():
                _build_with_docker(target, scratch / "image.tar", source)
            else:
                _build_with_buildah(target, scratch / "image.tar", cache=cache, source=source)

    archive = make_once(folder, make) / "image.tar"
    prune(folder, f"{kind}-*")
    return archive


def base(cache: Path) -> Path:
    """Return an archive of the image that all others are built on, to compare their sizes with it.

    Raises:
        MissingError, RuntimeError: as for `build`.
    """

    def make(scratch: Path) -> None:
        archive = scratch / "image.tar"
        if has_docker():
            run(["docker", "pull", "--quiet", DOCKER_BASE])
            run(["docker", "save", "--output", str(archive), DOCKER_BASE])
            return
        with locked(cache / ".images.lock"):
            run([*_store(cache), "push", "--quiet", _buildah_base(cache), f"docker-archive:{archive}:{BASE}"])

    name = DOCKER_BASE if has_docker() else BASE
    return make_once(cache / "images" / f"base-{name.rpartition(':')[2]}", make) / "image.tar"


def push(target: str, cache: Path, *, registry: str) -> str:
    """Build an image, push it to a registry where docker or buildah is logged in, and return its name there."""
    archive, name = build(target, cache), f"{registry}/pykvcache-{target}:{source_key()}"
    if has_docker():
        run(["docker", "load", "--input", str(archive)])
        run(["docker", "tag", local_name(target), name])
        run(["docker", "push", "--quiet", name])
    else:
        run([*_store(cache), "push", "--quiet", local_name(target), f"docker://{name}"])
    return name


@remember
def has_docker() -> bool:
    """Whether a docker daemon answers."""
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def prune(folder: Path, pattern: str) -> None:
    """Remove all but the newest archives beside one, and never that, which is in use."""
    others = [path for path in folder.parent.glob(pattern) if path != folder]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT - 1 :]:
        shutil.rmtree(path)


def _build_with_docker(target: str, archive: Path, source: Path) -> None:
    name = local_name(target, source)
    run(["docker", "build", "--target", target, "--tag", name, str(source)])
    run(["docker", "save", "--output", str(archive), name])


def _build_with_buildah(target: str, archive: Path, *, cache: Path, source: Path) -> None:
    name = local_name(target, source)
    _buildah_base(cache)
    store = _store(cache)
    _bound(store)
    volumes = [f"--volume={path}:{path}:ro" for path in HOST_FILES if Path(path).exists()]
    command = [*store, "build", "--isolation=chroot", "--network=host", "--pull-never", "--layers", *volumes]
    run([*command, f"--build-arg=BASE={BASE}", f"--target={target}", f"--tag={name}", str(source)])
    # Not as oci-archive: that is compressed, for many seconds, and unpacked at once.
    run([*store, "push", "--quiet", name, f"docker-archive:{archive}:{name}"])


def _store(cache: Path) -> list[str]:
    """Return buildah with a store of our own; overlay, because vfs copies a whole image for every step."""
    store = cache / "buildah"
    return ["buildah", f"--root={store}/root", f"--runroot={store}/run", "--storage-driver=overlay"]


def _bound(store: list[str]) -> None:
    """Remove all steps of earlier builds once there are too many; the next build then takes a minute longer."""
    if len(run([*store, "images", "--all", "--quiet"]).split()) > STORED_MAX:
        names = run([*store, "images", "--format", "{{.Name}}:{{.Tag}}"]).split()
        old = [name for name in names if name != BASE and "<none>" not in name]
        if old:
            run([*store, "rmi", "--force", *old])
        run([*store, "rmi", "--prune", "--force"])


def _buildah_base(cache: Path) -> str:
    """Return the name of the base image in buildah's store, made unless it is there."""
    require("buildah", "debootstrap")
    store = _store(cache)
    if BASE not in run([*store, "images", "--format", "{{.Name}}:{{.Tag}}"]).split():
        with stage("base image made"):
            _make_base(store)
    return BASE


def _make_base(store: list[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="base-", dir="/var/tmp") as scratch:
        root = Path(scratch, "root")
        run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)])
        for path in UNNEEDED:
            shutil.rmtree(root / path)
        container = run([*store, "from", "scratch"]).strip()
        run([*store, "copy", "--quiet", container, f"{root}/.", "/"])
        run([*store, "commit", "--quiet", "--rm", container, BASE])


def run(command: list[str]) -> str:
    """Run a step of a build and return what it wrote; RuntimeError with the end of that if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{output}")
    return done.stdout
