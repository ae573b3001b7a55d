"""Settings for every suite, and fixtures that tests of several parts use."""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline for one example: on a busy machine it fails what is right; pytest-timeout stops what hangs.
# CI judges a change by the same examples each time; developers' runs go on looking for new ones.
settings.register_profile("project", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("project")

StartPython = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_python() -> Iterator[StartPython]:
    """Return a function that runs Python code in a process of its own; what still runs at the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, user: int | None = None) -> "subprocess.Popen[str]":
        if user is not None:
            code = f"import os; os.setgroups([]); os.setgid({user}); os.setuid({user})\n{code}"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


class Mounts:
    """Mount points that are gone at the end, whatever is mounted there; where mounts are not allowed, tests skip."""

    def __init__(self) -> None:
        self._places: list[Path] = []

    def tmpfs(self, place: Path, *, size: str = "8m") -> None:
        """Mount an empty tmpfs."""
        self._mount(place, "-t", "tmpfs", "-o", f"size={size}", "none")

    def image(self, image: Path, place: Path) -> None:
        """Mount the filesystem in a file by a loop device."""
        self._mount(place, "-o", "loop", image)

    def bind(self, source: Path, place: Path) -> None:
        """Show a directory under another path."""
        self._mount(place, "--bind", source)

    def unmount(self, place: Path) -> None:
        """Unmount a disk that nobody may be using."""
        subprocess.run(["umount", place], check=True)

    def detach(self, place: Path) -> None:
        """Take a disk away, whoever is using it."""
        subprocess.run(["umount", "-l", place], check=True)

    def remount(self, place: Path, option: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{option}", place], check=True)

    def _mount(self, place: Path, *arguments: object) -> None:
        place.mkdir(exist_ok=True)
        result = subprocess.run(["mount", *map(str, arguments), place], capture_output=True, check=False)
        if result.returncode:
            pytest.skip(f"mounts are not allowed here: {result.stderr.decode().strip()}")
        self._places.append(place)

    def close(self) -> None:
        for place in self._places:
            while subprocess.run(["umount", "-l", place], capture_output=True, check=False).returncode == 0:
                continue


@pytest.fixture
def mounts() -> Iterator[Mounts]:
    with contextlib.closing(Mounts()) as places:
        yield places


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as the connector's image holds it: our wheel and liburing, less what the Dockerfile takes out."""
    root = Path(__file__).parents[1]
    wheels, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("library")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels)]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    liburing = importlib.util.find_spec("liburing")
    assert liburing is not None
    assert liburing.origin is not None
    shutil.copytree(Path(liburing.origin).parent, folder / "liburing", ignore=shutil.ignore_patterns("__pycache__"))
    found = re.search(r"rm -rf (bin .*?) \\\n", (root / "Dockerfile").read_text())
    assert found is not None
    for pattern in found[1].split():
        for path in folder.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder
