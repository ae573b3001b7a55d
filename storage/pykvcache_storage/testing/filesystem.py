"""A filesystem in memory, with what a power cut may do to it.

Model, deliberately worse than ext4: names are journalled in order, and a power cut keeps any prefix of what happened
since the last fsync of anything; content that was not synced is, page by page, new, old or zero, and the length new or
old. An fsync makes the file's content durable, and every name up to that moment.

Descriptors are real ones, of empty memory files as long as the simulated file: `os.fstat` tells the length, and a
number is never another open file's. Errors are those of Linux, as minus the errno. Not thread-safe.
"""

import errno
import os
import random
from collections.abc import Callable
from ctypes import memmove, string_at
from dataclasses import dataclass, field
from typing import Any

from pykvcache_storage.reactor.operations import (
    Close,
    Link,
    MakeDirectory,
    Open,
    Read,
    Rename,
    RingOperation,
    Sync,
    Touch,
    Unlink,
    Write,
)

SECTOR_SIZE_BYTES = 512
"""What direct I/O must be aligned to here, as on most disks."""
PAGE_SIZE_BYTES = 4096
JOURNAL_LENGTH_MAX = 64
"""Older states are durable: a real kernel, too, commits by itself after a while."""


@dataclass(slots=True, eq=False)
class Inode:
    """A file or a directory; `durable` is the content that a power cut cannot take.

    Args:
        modified_ns: the time that a `Touch` set since the last write, None if none did.
    """

    is_directory: bool
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    modified_ns: int | None = None


@dataclass(frozen=True, slots=True)
class _Descriptor:
    inode: Inode
    flags: int


class MemoryFilesystem:
    """Names, inodes and open descriptors.

    Args:
        root: absolute path of the one directory that exists at first.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.normpath(root)
        self._names = {self.root: Inode(is_directory=True)}
        self._journal = [dict(self._names)]
        self._descriptors: dict[int, _Descriptor] = {}
        self._calls: dict[type[RingOperation], Callable[[Any], int]] = {
            Open: self._open,
            Read: self._read,
            Write: self._write,
            Sync: self._sync,
            Close: self._close,
            Link: self._link,
            Rename: self._rename,
            Unlink: self._unlink,
            MakeDirectory: self._make_directory,
            Touch: self._touch,
        }

    def perform(self, operation: RingOperation) -> int:
        """Carry out one operation; return its result or minus the errno."""
        try:
            return self._calls[type(operation)](operation)
        except OSError as error:
            return -(error.errno or errno.EIO)

    def file_names(self) -> list[str]:
        """Return the paths of all files, sorted."""
        return sorted(path for path, inode in self._names.items() if not inode.is_directory)

    def content(self, path: str) -> bytearray:
        """Return a file's content itself: change it to damage the file."""
        return self._find(path).content

    def modified_ns(self, path: str) -> int | None:
        """Return the modification time that was set since the last write, None if none was."""
        return self._find(path).modified_ns

    @property
    def open_descriptors(self) -> int:
        """How many descriptors are open: a leak shows here."""
        return len(self._descriptors)

    def lose_processes(self) -> None:
        """End every process: descriptors are gone, everything that was done stays."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def lose_power(self, choose: random.Random) -> None:
        """Forget what was not durable, as far as chance will have it."""
        self.lose_processes()
        self._names = dict(choose.choice(self._journal))
        self._journal = [dict(self._names)]
        for inode in dict.fromkeys(self._names.values()):
            if inode.content != inode.durable:
                inode.content = _tear(inode, choose)
                inode.durable = bytes(inode.content)

    # ---- operations ----

    def _open(self, operation: Open) -> int:
        path, flags = _normal(operation.path), operation.flags
        inode = self._names.get(path)
        if inode is None:
            if not flags & os.O_CREAT:
                self._parent(path)
                raise OSError(errno.ENOENT, "")
            inode = self._add(path, Inode(is_directory=False))
        else:
            _check_open(inode, flags)
            if flags & os.O_TRUNC:
                inode.content.clear()
        descriptor = os.memfd_create("simulated")
        self._descriptors[descriptor] = _Descriptor(inode, flags)
        self._show_size(inode)
        return descriptor

    def _show_size(self, inode: Inode) -> None:
        """Let `os.fstat` tell the file's length on every descriptor; the holes take no memory."""
        for descriptor, opened in self._descriptors.items():
            if opened.inode is inode:
                os.ftruncate(descriptor, len(inode.content))

    def _read(self, operation: Read) -> int:
        inode = self._data(operation, forbidden=os.O_WRONLY)
        part = bytes(inode.content[operation.offset : operation.offset + operation.size_bytes])
        memmove(operation.address, part, len(part))
        return len(part)

    def _write(self, operation: Write) -> int:
        inode = self._data(operation, forbidden=os.O_RDONLY)
        end = operation.offset + operation.size_bytes
        if end > len(inode.content):
            inode.content.extend(bytes(end - len(inode.content)))
            self._show_size(inode)
        inode.content[operation.offset : end] = string_at(operation.address, operation.size_bytes)
        inode.modified_ns = None
        return operation.size_bytes

    def _data(self, operation: Read | Write, *, forbidden: int) -> Inode:
        opened = self._opened(operation.descriptor)
        if opened.flags & os.O_ACCMODE == forbidden:
            raise OSError(errno.EBADF, "")
        if opened.inode.is_directory:
            raise OSError(errno.EISDIR, "")
        numbers = (operation.offset, operation.address, operation.size_bytes)
        if min(numbers) < 0 or (opened.flags & os.O_DIRECT and any(n % SECTOR_SIZE_BYTES for n in numbers)):
            raise OSError(errno.EINVAL, "")
        return opened.inode

    def _sync(self, operation: Sync) -> int:
        inode = self._opened(operation.descriptor).inode
        inode.durable = bytes(inode.content)
        self._journal = [dict(self._names)]
        return 0

    def _close(self, operation: Close) -> int:
        self._opened(operation.descriptor)
        del self._descriptors[operation.descriptor]
        os.close(operation.descriptor)
        return 0

    def _link(self, operation: Link) -> int:
        inode = self._find(operation.source)
        target = _normal(operation.target)
        if target in self._names:
            raise OSError(errno.EEXIST, "")
        if inode.is_directory:
            raise OSError(errno.EPERM, "")
        self._add(target, inode)
        return 0

    def _rename(self, operation: Rename) -> int:
        source, target = _normal(operation.source), _normal(operation.target)
        inode, replaced = self._find(source), self._names.get(target)
        if inode.is_directory:
            raise OSError(errno.EOPNOTSUPP, "the simulation renames files only")
        if replaced is not None and not operation.replace:
            raise OSError(errno.EEXIST, "")
        if replaced is not None and replaced.is_directory:
            raise OSError(errno.EISDIR, "")
        if replaced is not inode:
            self._parent(target)
            del self._names[source]
            self._add(target, inode)
        return 0

    def _unlink(self, operation: Unlink) -> int:
        if self._find(operation.path).is_directory:
            raise OSError(errno.EISDIR, "")
        del self._names[_normal(operation.path)]
        self._note()
        return 0

    def _make_directory(self, operation: MakeDirectory) -> int:
        path = _normal(operation.path)
        if path in self._names:
            raise OSError(errno.EEXIST, "")
        self._add(path, Inode(is_directory=True))
        return 0

    def _touch(self, operation: Touch) -> int:
        self._find(operation.path).modified_ns = operation.modified_ns
        return 0

    # ---- names ----

    def _find(self, path: str) -> Inode:
        path = _normal(path)
        if path != self.root:
            self._parent(path)
        if path not in self._names:
            raise OSError(errno.ENOENT, "")
        return self._names[path]

    def _parent(self, path: str) -> None:
        """Check that a path's directory exists."""
        parent = self._names.get(os.path.dirname(path))
        if parent is None:
            above = os.path.dirname(path)
            if len(above) > len(self.root):
                self._parent(above)
            raise OSError(errno.ENOENT, "")
        if not parent.is_directory:
            raise OSError(errno.ENOTDIR, "")

    def _add(self, path: str, inode: Inode) -> Inode:
        self._parent(path)
        self._names[path] = inode
        self._note()
        return inode

    def _note(self) -> None:
        self._journal = [*self._journal[1 - JOURNAL_LENGTH_MAX :], dict(self._names)]

    def _opened(self, descriptor: int) -> _Descriptor:
        if descriptor not in self._descriptors:
            raise OSError(errno.EBADF, "")
        return self._descriptors[descriptor]


def _normal(path: str) -> str:
    if "\0" in path:
        raise OSError(errno.EINVAL, "")
    return os.path.normpath(path)


def _check_open(inode: Inode, flags: int) -> None:
    if flags & os.O_CREAT and flags & os.O_EXCL:
        raise OSError(errno.EEXIST, "")
    if inode.is_directory and (flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_CREAT):
        raise OSError(errno.EISDIR, "")
    if flags & os.O_DIRECTORY and not inode.is_directory:
        raise OSError(errno.ENOTDIR, "")


def _tear(inode: Inode, choose: random.Random) -> bytearray:
    """Return content mixed from what was durable, what was written, and nothing."""
    old, new = inode.durable, inode.content
    size = choose.choice((len(old), len(new)))
    torn = bytearray()
    for start in range(0, size, PAGE_SIZE_BYTES):
        length = min(PAGE_SIZE_BYTES, size - start)
        page = choose.choice((old, new, b""))[start : start + length]
        torn += page.ljust(length, b"\0")
    return torn
