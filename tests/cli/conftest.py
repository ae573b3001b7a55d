"""Fixtures for tests of the command line: the command in this process or in one of its own, and pools with blocks."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pykvcache_cli.main import app
from pykvcache_contract.keys import BlockKey, fingerprint_of
from pykvcache_storage.pool import open_pool
from pykvcache_storage.testing.blocks import publish

IDENTITY = {"engine": {"model": "meta/llama-test"}, "epoch": None}


@pytest.fixture
def run() -> Callable[..., Any]:
    """Return a function that runs `pykvcache` with arguments and returns exit_code, stdout and output (with stderr)."""

    def invoke(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="pykvcache")

    return invoke


@pytest.fixture
def run_apart() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Return a function that runs Python code in a process of its own."""

    def start(code: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    return start


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    directory = tmp_path / "pool"
    directory.mkdir()
    open_pool(str(directory), create=True).prepare_fingerprint(fingerprint_of(IDENTITY), IDENTITY)
    return directory


@pytest.fixture
def write_block(pool: Path) -> Callable[..., Path]:
    """Return a function that writes one good block into the pool and returns its path."""

    def write(number: int, *, rank: int = 0, pages: int = 2) -> Path:
        payload = random.Random(number).randbytes(pages * 4096)
        key = BlockKey(fingerprint_of(IDENTITY), random.Random(-number - 1).randbytes(32), 0, rank)
        return publish(pool, key, payload)

    return write
