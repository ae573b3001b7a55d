"""The wheel holds every module of the product, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("py_kvcache-*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_wheel_holds_all_packages_and_no_tests(wheel):
    modules = {name for name in wheel.namelist() if name.endswith(".py")}
    packages = [path for path in ROOT.glob("*/pykvcache_*") if (path / "__init__.py").exists()]
    expected = {str(file.relative_to(package.parent)) for package in packages for file in package.rglob("*.py")}
    assert modules == expected


@pytest.mark.slow
def test_the_wheel_carries_its_license_and_its_command(wheel):
    names = wheel.namelist()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "pykvcache = pykvcache_cli.main:main" in wheel.read(entry_points).decode()
