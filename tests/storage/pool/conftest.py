"""Fixtures for tests of pools: real directories, real processes, a read-only mount, another user."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pykvcache_contract.keys import BlockKey, Fingerprint, fingerprint_of

NOBODY = 65534
CHANGES = ("unlink", "rmdir", "rename", "mkdir", "utime", "pwrite")


@pytest.fixture
def fingerprint() -> Fingerprint:
    return fingerprint_of({"model": "test"})


@pytest.fixture
def make_key(fingerprint: Fingerprint) -> Callable[[int], BlockKey]:
    """Return a function from a number to a block key; the hash is spread like a real one."""

    def key(number: int, *, rank: int = 0, group: int = 0) -> BlockKey:
        text = fingerprint_of({"number": number})
        return BlockKey(fingerprint, bytes.fromhex(text), group, rank)

    return key


@pytest.fixture
def read_only_view(tmp_path: Path, unmount: Callable[[object], None]) -> Iterator[Callable[[Path], Path]]:
    """Return a function that shows a directory again under another path, mounted read-only."""
    mounted: list[Path] = []

    def show(directory: Path) -> Path:
        view = tmp_path / f"read-only-{len(mounted)}"
        view.mkdir()
        bind = subprocess.run(["mount", "--bind", directory, view], capture_output=True, check=False)
        if bind.returncode:
            pytest.skip(f"bind mounts are not allowed here: {bind.stderr.decode().strip()}")
        mounted.append(view)
        subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
        return view

    yield show
    for view in mounted:
        unmount(view)


@pytest.fixture
def in_child() -> Callable[[Callable[[], object]], int]:
    """Return a function that runs another one in a forked child and returns the child's exit code, -9 if killed."""

    def run(work: Callable[[], object]) -> int:
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)

    return run


@pytest.fixture
def kill_at(in_child: Callable[[Callable[[], object]], int]) -> Callable[..., bool]:
    """Return a function that runs another one in a child, killed just before its n-th change of the disk.

    It returns whether the child got that far.
    """

    def run(step: int, *, work: Callable[[], object]) -> bool:
        calls = 0

        def counted(change: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                nonlocal calls
                if calls == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
                return change(*arguments, **options)

            return call

        def count_and_work() -> None:
            for name in CHANGES:
                setattr(os, name, counted(getattr(os, name)))
            work()

        return in_child(count_and_work) == -signal.SIGKILL

    return run
