"""The few C functions of liburing that the ring needs, called through ctypes.

Facts: the PyPI package `liburing` holds the C library inside its extension module, free of vector instructions, with
every function exported; the Python wrapper beside it is compiled with AVX-512 and kills the interpreter on processors
without. A ctypes call through `CDLL` lets go of the GIL, and when another Python thread wants it, getting it back takes
up to the switch interval (5 ms); a call through `PyDLL` keeps it.

Therefore: the package is found but never imported; functions that may sleep or copy data go through `CDLL`, all others,
which take well under a microsecond, through `PyDLL`.
"""

import ctypes
import functools
import importlib.util
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RING_STRUCT_SIZE_BYTES = 1024
"""Room for `struct io_uring`: 216 bytes in liburing 2.15."""

REMEDY = "install it with `pip install liburing`"


class Parameters(ctypes.Structure):
    """`struct io_uring_params` of the kernel; the offsets behind `features` are liburing's business."""

    _fields_ = (
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread_cpu", ctypes.c_uint32),
        ("sq_thread_idle", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 96),
    )


class Timespec(ctypes.Structure):
    """`struct __kernel_timespec`."""

    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class Liburing:
    """Typed handles; each returns what the C function does: minus the errno on failure.

    Args:
        submit_and_wait: (ring, completion pointer, count, timespec, signal mask).
        wait: the same without submitting.
    """

    queue_init: Callable[[int, Any, Any], int]
    enable_rings: Callable[[Any], int]
    queue_exit: Callable[[Any], None]
    get_sqe: Callable[[Any], int | None]
    submit: Callable[[Any], int]
    submit_and_wait: Callable[[Any, Any, int, Any, None], int]
    wait: Callable[[Any, Any, int, Any, None], int]
    peek_completions: Callable[[Any, Any, int], int]
    advance: Callable[[Any, int], None]
    set_iowait: Callable[[Any, bool], int] | None


def find_library() -> Path:
    """Return the shared object inside the installed package, without importing the package.

    Raises:
        ImportError: not installed, or without a shared object.
    """
    spec = importlib.util.find_spec("liburing")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("the liburing package is not installed")
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("liburing*.so")):
            return path
    raise ImportError("the liburing package holds no shared object")


@functools.cache
def load() -> Liburing:
    """Load the library once.

    Raises:
        ImportError: the package is missing, or its shared object does not load here; the message says which.
    """
    path = str(find_library())
    try:
        quick, sleeping = ctypes.PyDLL(path), ctypes.CDLL(path)
        return _bind(quick, sleeping)
    except (OSError, AttributeError) as error:
        raise ImportError(f"the liburing package does not load on {platform.machine()}: {error}") from error


def _bind(quick: ctypes.PyDLL, sleeping: ctypes.CDLL) -> Liburing:
    pointer, unsigned, integer = ctypes.c_void_p, ctypes.c_uint, ctypes.c_int
    sleep = (pointer, pointer, unsigned, pointer, pointer)
    set_iowait = None
    if hasattr(quick, "io_uring_set_iowait"):
        set_iowait = _function(quick, "io_uring_set_iowait", integer, pointer, ctypes.c_bool)
    return Liburing(
        queue_init=_function(quick, "io_uring_queue_init_params", integer, unsigned, pointer, pointer),
        enable_rings=_function(quick, "io_uring_enable_rings", integer, pointer),
        queue_exit=_function(sleeping, "io_uring_queue_exit", None, pointer),
        get_sqe=_function(quick, "io_uring_get_sqe", pointer, pointer),
        submit=_function(sleeping, "io_uring_submit", integer, pointer),
        submit_and_wait=_function(sleeping, "io_uring_submit_and_wait_timeout", integer, *sleep),
        wait=_function(sleeping, "io_uring_wait_cqes", integer, *sleep),
        peek_completions=_function(quick, "io_uring_peek_batch_cqe", unsigned, pointer, pointer, unsigned),
        advance=_function(quick, "io_uring_cq_advance", None, pointer, unsigned),
        set_iowait=set_iowait,
    )


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
    return function
