"""The import contracts in pyproject.toml hold, and each of them catches what it was written against."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[2]
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
SOURCE_ROOTS = sorted(path.parent.name for path in ROOT.glob("*/pykvcache_*") if (path / "__init__.py").exists())


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the source roots in a folder, which come first on the path, before the installed ones."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", folder / "pyproject.toml"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder / root) for root in SOURCE_ROOTS)}
    environment |= {"COLUMNS": "200"}  # so that names of contracts stay on one line
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path):
    """A copy of the product's source, to be spoiled."""
    for root in SOURCE_ROOTS:
        shutil.copytree(ROOT / root, tmp_path / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contract", "file", "line"),
    [
        ("parts", "contract/pykvcache_contract/units.py", "import pykvcache_storage.memory"),
        ("parts", "storage/pykvcache_storage/block.py", "import pykvcache_connector.settings"),
        ("parts", "connector/pykvcache_connector/settings.py", "import pykvcache_bench"),
        ("parts", "bench/pykvcache_bench/inventory.py", "import pykvcache_connector.settings"),
        ("storage", "storage/pykvcache_storage/memory.py", "import pykvcache_storage.block"),
        ("storage", "storage/pykvcache_storage/block.py", "import pykvcache_storage.testing"),
        ("storage", "storage/pykvcache_storage/unlisted.py", ""),
        ("connector", "connector/pykvcache_connector/scheduler/index.py", "import pykvcache_connector.worker"),
        ("connector", "connector/pykvcache_connector/settings.py", "import pykvcache_connector.scheduler"),
        ("sidecar", "sidecar/pykvcache_sidecar/server.py", "import pykvcache_sidecar.care"),
        ("sidecar", "sidecar/pykvcache_sidecar/limits.py", "import pykvcache_sidecar.evictor"),
        ("node", "sidecar/pykvcache_sidecar/node/mounts.py", "import pykvcache_sidecar.node.csi"),
        ("node-csi", "sidecar/pykvcache_sidecar/node/registration.py", "import pykvcache_sidecar.node.tree"),
        ("node-csi", "sidecar/pykvcache_sidecar/node/csi.py", "import pykvcache_storage.pool"),
        ("operator", "operator/pykvcache_operator/observe.py", "import pykvcache_operator.apply"),
        ("operator-pure", "operator/pykvcache_operator/decide.py", "import kopf"),
        ("vllm", "cli/pykvcache_cli/main.py", "import vllm"),
        ("vllm", "connector/pykvcache_connector/settings.py", "import vllm.config"),
        ("torch", "connector/pykvcache_connector/scheduler/index.py", "import torch"),
        ("light", "storage/pykvcache_storage/block.py", "import pydantic"),
        ("testing", "connector/pykvcache_connector/identity.py", "from pykvcache_storage.testing import disk"),
    ],
)
def test_a_violation_breaks_its_contract(copy, contract, file, line):
    name = next(row["name"] for row in CONFIGURATION["contracts"] if row["id"] == contract)
    target = copy / file
    target.write_text((target.read_text() if target.exists() else "") + f"\n{line}\n")
    result = lint_imports(copy)
    assert f"{name} BROKEN" in result.stdout, result.stdout + result.stderr


def test_every_package_with_code_is_checked():
    packages = {path.name for path in ROOT.glob("*/pykvcache_*") if (path / "__init__.py").exists()}
    assert packages == set(CONFIGURATION["root_packages"])
