"""What this directory and this kernel allow: the engine, direct I/O, the publish method, each with the reason.

Everything is tried for real in a temporary folder of the directory, which is always removed; in a pool that can only be
read, on its pool.json. Blocking; called once at start-up, before there is a reactor, on any thread.
"""

import errno
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import addressof, c_char
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError, ReadOnlyError
from pykvcache_contract.paths import POOL_FILE
from pykvcache_contract.units import SECTOR_SIZE_BYTES
from pykvcache_storage.reactor.liburing import REMEDY
from pykvcache_storage.reactor.operations import (
    Close,
    Link,
    MakeDirectory,
    Open,
    Read,
    Rename,
    Ring,
    RingOperation,
    Sync,
    Unlink,
    Write,
)
from pykvcache_storage.reactor.ring_threads import ThreadRing
from pykvcache_storage.reactor.ring_uring import UringRing
from pykvcache_storage.reactor.system_calls import perform

FOLDER_PREFIX = ".pykvcache-probe-"
OPERATION_SECONDS_MAX = 10.0
"""Far beyond any healthy disk; an engine that takes longer is not used."""

_ASYNCHRONOUS_DIRECT = frozenset({"ext4", "xfs", "btrfs", "f2fs"})
"""Filesystems whose direct reads and writes return from the submission before the disk has answered."""
_ALIGNMENTS = (512, 1024, 2048, SECTOR_SIZE_BYTES)
_NO_SPACE = (-errno.ENOSPC, -errno.EDQUOT)
_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")

# Never unmapped: after a timeout the kernel may still write there.
_SCRATCH = mmap.mmap(-1, 4 * SECTOR_SIZE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
_SCRATCH_ADDRESS = addressof(c_char.from_buffer(_SCRATCH))

EngineName = Literal["uring", "threads"]


class PublishMethod(Enum):
    """How a finished block becomes visible, best first."""

    LINK = "link"
    RENAME_NOREPLACE = "rename_noreplace"
    RENAME = "rename"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What to use in a directory.

    Args:
        engine: which ring.
        force_async: whether io_uring must send reads and writes to kernel threads (see `ring_uring`).
        filesystem: type name as in /proc/self/mountinfo, for example `ext4`.
        alignment_bytes: what address, length and offset must be multiples of; 1 without direct I/O.
        engine_reason, direct_reason, publish_reason: one sentence each, for the log.
    """

    engine: EngineName
    engine_reason: str
    direct_io: bool
    direct_reason: str
    force_async: bool
    publish: PublishMethod
    publish_reason: str
    filesystem: str
    alignment_bytes: int


def probe(
    directory: str | os.PathLike[str],
    *,
    engine: Literal["auto", "uring", "threads"] = "auto",
    direct_io: Literal["auto", "on", "off"] = "auto",
) -> ProbeResult:
    """Find out what works in an existing, writable directory.

    Raises:
        ConfigurationError: what was asked for explicitly is impossible here; the message names the remedy.
        PoolUnavailableError: the directory is missing, not a directory, or full to the last file.
        ReadOnlyError: nothing can be written there.
    """
    filesystem = filesystem_of(directory)
    with _temporary_folder(directory) as folder:
        path = os.path.join(folder, "direct")
        direct = _choose_direct(lambda size: _try_direct(path, size), filesystem=filesystem, wanted=direct_io)
        flags = os.O_DIRECT if direct[0] > 1 else 0
        chosen = _choose_engine(lambda name, run: _exercise(os.path.join(folder, name), flags, run), wanted=engine)
        publish = _choose_publish(folder, filesystem)
    return _result(chosen, direct, publish, filesystem)


def probe_read_only(
    directory: str | os.PathLike[str],
    *,
    engine: Literal["auto", "uring", "threads"] = "auto",
    direct_io: Literal["auto", "on", "off"] = "auto",
) -> ProbeResult:
    """Find out what works in a pool that can only be read; its pool.json stands for all files, and none is made.

    Raises:
        ConfigurationError: as for `probe`.
    """
    filesystem = filesystem_of(directory)
    path = os.path.join(directory, POOL_FILE)
    direct = _choose_direct(lambda size: _try_direct_read(path, size), filesystem=filesystem, wanted=direct_io)
    flags = os.O_DIRECT if direct[0] > 1 else 0
    chosen = _choose_engine(lambda _, run: _exercise_reading(path, flags, run), wanted=engine)
    return _result(chosen, direct, (PublishMethod.LINK, "nothing is published in a read-only pool"), filesystem)


def _result(
    engine: tuple[EngineName, str], direct: tuple[int, str], publish: tuple[PublishMethod, str], filesystem: str
) -> ProbeResult:
    inline = direct[0] == 1 or filesystem not in _ASYNCHRONOUS_DIRECT
    return ProbeResult(
        engine=engine[0],
        engine_reason=engine[1],
        direct_io=direct[0] > 1,
        direct_reason=direct[1],
        force_async=engine[0] == "uring" and inline,
        publish=publish[0],
        publish_reason=publish[1],
        filesystem=filesystem,
        alignment_bytes=direct[0],
    )


def make_ring(result: ProbeResult, *, entries: int = 256, threads: int = 16) -> Ring:
    """Return the ring that the probe chose; `threads` matters only for the thread ring, `entries` only for io_uring."""
    if result.engine == "uring":
        return UringRing(entries=entries, force_async=result.force_async)
    return ThreadRing(threads)


def filesystem_of(directory: str | os.PathLike[str]) -> str:
    """Return the type name of the filesystem that holds a path, `unknown` if the mount table does not tell."""
    path = os.path.join(os.path.realpath(directory), "")
    best, name = -1, "unknown"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields, _, source = line.partition(" - ")
            mount_point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields.split(" ")[4])
            # Of two mounts on one point the later hides the earlier.
            if path.startswith(os.path.join(mount_point, "")) and len(mount_point) >= best:
                best, name = len(mount_point), source.split(" ")[0]
    return name


@contextmanager
def _temporary_folder(directory: str | os.PathLike[str]) -> Iterator[str]:
    try:
        folder = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=directory)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise PoolUnavailableError(f"{directory} is not a directory: create it, or correct the path") from error
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise ReadOnlyError(f"{directory} cannot be written ({error.strerror}): mount it read-write") from error
        raise PoolUnavailableError(f"no file can be created in {directory}: {error.strerror}") from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- direct I/O ----


def _choose_direct(attempt: Callable[[int], int], *, filesystem: str, wanted: str) -> tuple[int, str]:
    """Return the alignment that direct I/O needs, 1 for none, and why; `attempt` tries one."""
    if wanted == "off":
        return 1, "direct I/O is off by configuration"
    result = -errno.EINVAL
    for alignment in _ALIGNMENTS:
        result = attempt(alignment)
        if result >= 0:
            return alignment, f"O_DIRECT works on {filesystem} with sectors of {alignment} bytes"
    reason = f"O_DIRECT is refused ({_name(result)}) by {filesystem}"
    if wanted == "on":
        raise ConfigurationError(f"direct_io = on is impossible: {reason}. Set direct_io to auto or off.")
    return 1, reason


def _try_direct(path: str, alignment: int) -> int:
    """Write and read one unit of `alignment` bytes, nothing aligned any better; return a count or minus the errno."""
    descriptor = perform(Open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    if descriptor < 0:
        return descriptor
    address = _SCRATCH_ADDRESS + alignment
    result = perform(Write(descriptor, address, alignment, alignment))
    if result >= 0 or result in _NO_SPACE:
        result = perform(Read(descriptor, address, alignment, alignment))
    perform(Close(descriptor))
    return result


def _try_direct_read(path: str, alignment: int) -> int:
    """Read one unit of `alignment` bytes, nothing aligned any better; return a count or minus the errno."""
    descriptor = perform(Open(path, os.O_RDONLY | os.O_DIRECT))
    if descriptor < 0:
        return descriptor
    result = perform(Read(descriptor, _SCRATCH_ADDRESS + alignment, alignment, 0))
    perform(Close(descriptor))
    return result


# ---- engine ----

_Run = Callable[[RingOperation], int]


def _choose_engine(exercise: Callable[[str, _Run], dict[str, int]], *, wanted: str) -> tuple[EngineName, str]:
    if wanted == "threads":
        return "threads", "the thread ring is chosen by configuration"
    refusal = _why_no_uring(exercise)
    if refusal is None:
        return "uring", "io_uring works here"
    if wanted == "uring":
        raise ConfigurationError(f"engine = uring is impossible: {refusal}. Set engine to auto or threads.")
    return "threads", refusal


def _why_no_uring(exercise: Callable[[str, _Run], dict[str, int]]) -> str | None:
    """Do the same work through io_uring and through system calls; return what only io_uring cannot do."""
    try:
        ring = UringRing(entries=8)
        try:
            through_ring = exercise("uring", lambda operation: _run(ring, operation))
        finally:
            ring.close()
    except ImportError as error:
        return f"{error}; {REMEDY}"
    except OSError as error:
        return _explain(error)
    expected = exercise("calls", perform)
    for name, result in through_ring.items():
        if result < 0 <= expected[name]:
            return f"io_uring of this kernel cannot {name} ({_name(result)})"
    return None


def _run(ring: Ring, operation: RingOperation) -> int:
    ring.submit(operation, 0)
    for _, result in ring.wait(OPERATION_SECONDS_MAX):
        return result
    raise TimeoutError(errno.ETIMEDOUT, f"no answer within {OPERATION_SECONDS_MAX:.0f} s")


def _exercise_reading(path: str, flags: int, run: _Run) -> dict[str, int]:
    """Do once everything that a load does; return the results by name."""
    results = {"open": run(Open(path, os.O_RDONLY | flags))}
    results["read"] = run(Read(results["open"], _SCRATCH_ADDRESS, SECTOR_SIZE_BYTES, 0))
    results["close"] = run(Close(results["open"]))
    return results


def _exercise(folder: str, flags: int, run: _Run) -> dict[str, int]:
    """Do once everything that the reactor does; return the results by name."""
    results = {"make a directory": run(MakeDirectory(folder, 0o700))}
    path, other = os.path.join(folder, "a"), os.path.join(folder, "b")
    results["open"] = descriptor = run(Open(path, os.O_RDWR | os.O_CREAT | flags, 0o600))
    results["write"] = run(Write(descriptor, _SCRATCH_ADDRESS, SECTOR_SIZE_BYTES, 0))
    results["read"] = run(Read(descriptor, _SCRATCH_ADDRESS, SECTOR_SIZE_BYTES, 0))
    results["sync"] = run(Sync(descriptor))
    results["close"] = run(Close(descriptor))
    results["link"] = run(Link(path, other))
    results["unlink"] = run(Unlink(other))
    results["rename without replacing"] = run(Rename(path, other))
    results["rename"] = run(Rename(path, other, replace=True))
    return results


def _explain(error: OSError) -> str:
    name = _name(-(error.errno or errno.EIO))
    if error.errno in (errno.EPERM, errno.EACCES):
        setting = _SYSCTL.read_text().strip() if _SYSCTL.exists() else "0"
        cause = (
            f"kernel.io_uring_disabled is {setting}" if setting != "0" else "the container's seccomp profile denies it"
        )
        return f"io_uring is forbidden here ({name}: {cause})"
    if error.errno == errno.ENOSYS:
        return f"this kernel has no io_uring, or a seccomp profile hides it ({name})"
    if error.errno == errno.ENOMEM:
        return f"io_uring gets no memory ({name}: raise RLIMIT_MEMLOCK)"
    return f"io_uring fails here ({name}: {error.strerror})"


def _name(result: int) -> str:
    return errno.errorcode.get(-result, str(-result))


# ---- publish ----


def _choose_publish(folder: str, filesystem: str) -> tuple[PublishMethod, str]:
    """Return the best step that makes a block visible; the first two let the first writer win."""
    source, target = os.path.join(folder, "source"), os.path.join(folder, "target")
    Path(source).touch()
    linked = _refuses_to_replace(Link(source, target), again=Link(source, target))
    if linked is None:
        return PublishMethod.LINK, f"{filesystem} has hard links"
    Path(target).unlink(missing_ok=True)
    renamed = _refuses_to_replace(Rename(source, target), again=Rename(folder, target))
    if renamed is None:
        return (
            PublishMethod.RENAME_NOREPLACE,
            f"{filesystem} has no hard links ({linked}), but rename without replacing",
        )
    reason = f"{filesystem} has neither hard links ({linked}) nor rename without replacing ({renamed})"
    return PublishMethod.RENAME, f"{reason}, so the last writer wins"


def _refuses_to_replace(first: RingOperation, *, again: RingOperation) -> str | None:
    """Return None if the first attempt works and the second finds the target taken, else what went wrong."""
    result = perform(first)
    if result < 0:
        return _name(result)
    result = perform(again)
    return None if result == -errno.EEXIST else "it replaces an existing file"
