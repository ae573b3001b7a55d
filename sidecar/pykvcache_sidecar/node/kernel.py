"""What the node's kernel allows this process: io_uring, and why not. Asked once, at the start."""

import errno
import os
from pathlib import Path

from pykvcache_contract.api.node import IOUring
from pykvcache_storage.reactor.ring_uring import UringRing

_SYSCTL = Path("/proc/sys/kernel/io_uring_disabled")


def kernel_release() -> str:
    """Return the running kernel's release."""
    return os.uname().release


def io_uring(sysctl: Path = _SYSCTL) -> IOUring:
    """Return whether a ring can be made here; a pod's own seccomp profile may be stricter."""
    try:
        UringRing(entries=8).close()
    except ImportError:
        return IOUring.UNSUPPORTED
    except OSError as error:
        return explain(error, sysctl)
    return IOUring.AVAILABLE


def explain(error: OSError, sysctl: Path = _SYSCTL) -> IOUring:
    """Return what a refused ring means."""
    if error.errno not in {errno.EPERM, errno.EACCES}:
        return IOUring.UNSUPPORTED
    try:
        is_disabled = sysctl.read_text().strip() != "0"
    except OSError:
        is_disabled = False
    return IOUring.BLOCKED_BY_SYSCTL if is_disabled else IOUring.BLOCKED_BY_SECCOMP
