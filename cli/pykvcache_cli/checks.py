"""The checks of `pykvcache doctor`: each looks at one thing and says what will be used, why, and what to do about it.

Nothing is imported from vLLM or liburing beyond what the storage probe itself needs; versions come from the metadata of
installed packages. A check changes nothing but the probe's own temporary folder, which is removed.
"""

import importlib.metadata
import os
import platform
import resource
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError, ReadOnlyError
from pykvcache_contract.units import format_size
from pykvcache_storage.pool import NotYetAPoolError, open_pool
from pykvcache_storage.probe import ProbeResult, probe
from pykvcache_storage.usage import UsageLedger

VLLM_TESTED = ("0.22.1", "0.26.0", "0.32.0", "0.33.0")
"""Releases that the test suite runs or whose names it checks."""

HUGE_PAGES_FILE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MEMORY_LOCK_LEAST_BYTES = 64 << 10
"""What the ring itself may be charged against the limit on kernels before 5.12."""


class Level(Enum):
    """How bad a finding is; only `FATAL` keeps the cache from being used."""

    FINE = "ok"
    WARNING = "warning"
    FATAL = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Args:
        subject: what was looked at.
        value: what will be used, or what is there.
        reason: why; empty if there is nothing to say.
        remedy: what to do, for a warning or an error.
    """

    subject: str
    value: str
    reason: str = ""
    level: Level = Level.FINE
    remedy: str = ""


def check_machine() -> Iterator[Finding]:
    """Look at everything that does not depend on a pool."""
    yield Finding("kernel", platform.release(), f"Python {platform.python_version()}")
    yield _check_vllm(_installed("vllm"))
    yield _check_liburing(_installed("liburing"))
    yield _check_hash_seed(os.environ.get("PYTHONHASHSEED"))
    yield _check_memory_lock(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield _check_huge_pages(HUGE_PAGES_FILE)


def check_engine_anywhere() -> Iterator[Finding]:
    """Try the engine in a temporary folder, when there is no pool to try it in."""
    with tempfile.TemporaryDirectory(prefix="pykvcache-doctor-") as folder:
        result = probe(folder)
    yield _engine(result)
    yield Finding("pool", "not given", "direct I/O, publish method and space depend on it: pykvcache doctor POOL")


def check_pool(directory: str, capacity_bytes: int | None) -> Iterator[Finding]:
    """Look at a pool directory and at what works in it.

    Args:
        capacity_bytes: what the pool is meant to hold, if known.
    """
    try:
        pool = open_pool(directory, create=False)
        yield Finding("pool", pool.directory, f"format v1, created {pool.created}, uid {pool.uid}")
    except NotYetAPoolError:
        yield Finding("pool", directory, "empty; the first vLLM that starts with it makes it a pool")
    except PoolUnavailableError as error:
        yield Finding("pool", "cannot be used", level=Level.FATAL, remedy=str(error))
        return
    yield from _check_storage(directory)
    yield from _check_room(directory, capacity_bytes)


def _check_storage(directory: str) -> Iterator[Finding]:
    try:
        result = probe(directory)
    except ReadOnlyError as error:
        yield Finding("writable", "no", "blocks are loaded but not stored", Level.WARNING, str(error))
        return
    except (PoolUnavailableError, ConfigurationError) as error:
        yield Finding("writable", "no", level=Level.FATAL, remedy=str(error))
        return
    yield _engine(result)
    yield _direct(result)
    yield _publish(result)
    yield Finding("filesystem", result.filesystem)


def _engine(result: ProbeResult) -> Finding:
    mode = ", reads and writes through kernel threads" if result.force_async else ""
    if result.engine == "uring":
        return Finding("engine", "io_uring", result.engine_reason + mode)
    remedy = (
        "Loads work, at a lower rate. To allow io_uring: sysctl kernel.io_uring_disabled=0, a seccomp profile that "
        "permits io_uring_setup, and pip install liburing."
    )
    return Finding("engine", "threads", result.engine_reason, Level.WARNING, remedy)


def _direct(result: ProbeResult) -> Finding:
    if result.direct_io:
        value = f"on, aligned to {result.alignment_bytes} bytes"
        return Finding("direct I/O", value, result.direct_reason)
    remedy = "Blocks also take page cache, and loads are slower. Put the pool on ext4 or xfs on a local NVMe."
    return Finding("direct I/O", "off", result.direct_reason, Level.WARNING, remedy)


def _publish(result: ProbeResult) -> Finding:
    value = result.publish.value.replace("_", " ")
    if result.publish.value != "rename":
        return Finding("publish", value, result.publish_reason)
    remedy = "Two writers of one block may both write it; harmless, but wasteful. Prefer a filesystem with hard links."
    return Finding("publish", value, result.publish_reason, Level.WARNING, remedy)


def _check_room(directory: str, capacity_bytes: int | None) -> Iterator[Finding]:
    status = os.statvfs(directory)
    free_bytes, total_bytes = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    value = f"{format_size(free_bytes)} of {format_size(total_bytes)}"
    if status.f_files and not status.f_favail:
        yield Finding("free space", value, "no free inodes", Level.WARNING, "Nothing can be stored: free some inodes.")
    elif free_bytes < total_bytes // 100:
        yield Finding("free space", value, "under 1 %", Level.WARNING, "Stores are dropped: free some space.")
    else:
        yield Finding("free space", value)
    yield _check_capacity(UsageLedger(directory).used_bytes(), capacity_bytes, free_bytes)


def _check_capacity(used_bytes: int | None, capacity_bytes: int | None, free_bytes: int) -> Finding:
    used = "unknown until vLLM has started once" if used_bytes is None else format_size(used_bytes)
    if capacity_bytes is None:
        return Finding("pool usage", used, "no capacity given: --capacity SIZE compares")
    value = f"{used} of {format_size(capacity_bytes)}"
    reachable = (used_bytes or 0) + free_bytes
    if reachable < capacity_bytes:
        remedy = f"Only {format_size(reachable)} can be reached: lower capacity or free space; until then stores fail."
        return Finding("pool usage", value, "the disk is smaller than the capacity", Level.WARNING, remedy)
    if used_bytes is not None and used_bytes >= capacity_bytes:
        remedy = "Nothing more is stored: raise capacity, or run an evictor (pykvcache-sidecar run)."
        return Finding("pool usage", value, "full", Level.WARNING, remedy)
    return Finding("pool usage", value)


def _check_vllm(version: str | None) -> Finding:
    if version is None:
        remedy = "Run doctor in the environment that runs vLLM."
        return Finding("vLLM", "not installed here", level=Level.WARNING, remedy=remedy)
    if version.partition("+")[0] in VLLM_TESTED:
        return Finding("vLLM", version, "tested with this release")
    remedy = f"Tested are {', '.join(VLLM_TESTED)}. Features are detected, so it may work; look for errors at start-up."
    return Finding("vLLM", version, "not a tested release", Level.WARNING, remedy)


def _check_liburing(version: str | None) -> Finding:
    if version is not None:
        return Finding("liburing", version)
    remedy = "Without it the thread engine is used: pip install 'py-kvcache[connector]'"
    return Finding("liburing", "not installed", level=Level.WARNING, remedy=remedy)


def _check_hash_seed(value: str | None) -> Finding:
    if value is not None and value.isdecimal():
        return Finding("PYTHONHASHSEED", value, "block hashes are the same after a restart")
    reason = "block hashes may change at every start, and nothing is found again"
    remedy = "Set the same value for every vLLM of the pool: export PYTHONHASHSEED=0"
    return Finding("PYTHONHASHSEED", value or "not set", reason, Level.WARNING, remedy)


def _check_memory_lock(limit_bytes: int) -> Finding:
    if limit_bytes == resource.RLIM_INFINITY:
        return Finding("RLIMIT_MEMLOCK", "unlimited")
    value = format_size(limit_bytes)
    if limit_bytes >= MEMORY_LOCK_LEAST_BYTES:
        return Finding("RLIMIT_MEMLOCK", value)
    remedy = "io_uring may get no memory on kernels before 5.12: ulimit -l unlimited, or memlock in limits.conf."
    return Finding("RLIMIT_MEMLOCK", value, "very low", Level.WARNING, remedy)


def _check_huge_pages(file: Path) -> Finding:
    subject, remedy = "huge pages", f"Reads into 4 KiB pages are several times slower: echo madvise > {file}"
    try:
        text = file.read_text()
    except OSError:
        return Finding(subject, "unknown", f"{file} cannot be read")
    setting = text.partition("[")[2].partition("]")[0]
    if setting == "never":
        return Finding(subject, "never", "staging memory gets 4 KiB pages", Level.WARNING, remedy)
    return Finding(subject, setting, "staging memory gets 2 MiB pages")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
