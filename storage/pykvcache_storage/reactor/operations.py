"""The operations a task may ask the reactor for, and the protocol of a ring that carries them out.

A task is a generator. It yields one operation at a time and receives its result, as if each were a blocking call:

    descriptor = yield Open(path, os.O_RDONLY | os.O_DIRECT)
    count = yield Read(descriptor, address, size_bytes, offset=0)

A failed operation is raised inside the task as `OSError` with its errno. Both rings (`ring_uring`, `ring_threads`) pass
one conformance suite; the simulated one (`testing.disk`) adds faults.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class Open:
    """Open a file; the result is a descriptor that the task must `Close`."""

    path: str
    flags: int
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Read:
    """Read up to `size_bytes` at `offset` into memory at `address`; the result is the count, 0 at the end of the file.

    The memory must stay alive until the result arrives; with O_DIRECT all three are multiples of 4096.
    """

    descriptor: int
    address: int
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write up to `size_bytes` at `offset` from memory at `address`; the result is the count written."""

    descriptor: int
    address: int
    size_bytes: int
    offset: int


@dataclass(frozen=True, slots=True)
class Sync:
    """Make a file's data and metadata durable (fsync)."""

    descriptor: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close a descriptor."""

    descriptor: int


@dataclass(frozen=True, slots=True)
class Link:
    """Make `target` a hard link to `source`; EEXIST if it exists."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Rename:
    """Rename `source` to `target`. Without `replace`, EEXIST if the target exists (RENAME_NOREPLACE)."""

    source: str
    target: str
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Unlink:
    """Remove a file."""

    path: str


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """Create one directory; EEXIST if it exists. Of its mode the umask, or the default ACL, takes away."""

    path: str
    mode: int = 0o777


@dataclass(frozen=True, slots=True)
class Touch:
    """Set a file's modification time, in nanoseconds since 1970: it says when a block was last wanted."""

    path: str
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Await:
    """Park the task until somebody, on any thread, calls the function that `start` was given.

    `start` runs on the reactor thread and must not block. The value passed becomes the operation's result.
    """

    start: Callable[[Callable[[Any], None]], None]


RingOperation = Open | Read | Write | Sync | Close | Link | Rename | Unlink | MakeDirectory | Touch
Operation = RingOperation | Await
ResultT = TypeVar("ResultT")
Task = Generator[Operation, Any, ResultT]


class Ring(Protocol):
    """Carries out operations; used by one thread, except `wake`.

    Attributes:
        name: `uring` or `threads`, as in settings, logs and metrics.
    """

    name: str

    def submit(self, operation: RingOperation, token: int) -> None:
        """Queue one operation. Nothing need happen before the next `wait`.

        Paths and buffers stay alive inside the ring until the completion is returned.
        """

    def wait(self, timeout_seconds: float | None) -> list[tuple[int, int]]:
        """Hand queued operations to the kernel, sleep until something completed, return (token, result) pairs.

        A result is what the system call returns, or minus the errno. Returns an empty list after a `wake` or at the
        timeout; `None` sleeps without limit. The GIL is released while it sleeps, and no processor time is used.
        """

    def wake(self) -> None:
        """Make a present or the next `wait` return at once. Callable from any thread, at any time."""

    def close(self) -> None:
        """Release the ring. The caller has drained it: nothing is in flight."""
