"""Directories reached step by step through descriptors, so that no symbolic link on the way is ever followed.

The agent is root and works in directories that pods write to. A path checked and then used by name may lead elsewhere
by the time it is used; a descriptor may not. `below_descriptor` gives such a directory a path for calls that want one.
No state, any thread; blocks as long as the filesystem does.
"""

import errno
import os
from collections.abc import Sequence

LOOK_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINKS = {errno.ELOOP, errno.ENOTDIR}


class LinkError(OSError):
    """A part of a path is a symbolic link or no directory."""


def parts_of(path: str, *, below: str = "/") -> list[str]:
    """Return the names that lead from a directory to a path below it; nothing is looked up.

    Raises:
        ValueError: the path is relative, not below, or not in its simplest form (`..`, `.`, `//`).
    """
    base = below.rstrip("/") + "/"
    if path.startswith(base):
        parts = path[len(base) :].split("/")
        if {"", ".", ".."}.isdisjoint(parts) and "\0" not in path:
            return parts
    raise ValueError(f"{path!r} is no plain path below {below}")


def open_folder(base: str, parts: Sequence[str], *, flags: int = LOOK_FLAGS) -> int:
    """Return a descriptor of a directory below `base`; the caller closes it.

    Args:
        base: may itself be, or lead through, a link: administrators move directories between disks.
        parts: names, none of which may be a link.

    Raises:
        LinkError: one of them is a link or no directory.
        OSError: it cannot be opened, FileNotFoundError among them.
    """
    last = len(parts) - 1
    descriptor = os.open(base, (LOOK_FLAGS if parts else flags) & ~os.O_NOFOLLOW)
    for index, part in enumerate(parts):
        try:
            inner = open_inside(descriptor, part, flags=flags if index == last else LOOK_FLAGS)
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def open_inside(parent: int, name: str, *, flags: int = LOOK_FLAGS) -> int:
    """Return a descriptor of one directory in another; the errors are those of `open_folder`."""
    try:
        return os.open(name, flags, dir_fd=parent)
    except OSError as error:
        if error.errno in _LINKS:
            raise LinkError(error.errno, "it is a symbolic link or no directory", name) from error
        raise


def below_descriptor(descriptor: int, *names: str) -> str:
    """Return a path of this process to an open directory, or to a name in it."""
    return "/".join(("/proc/self/fd", str(descriptor), *names))
