"""Removing a tree with everything in it, a bounded piece at a time: pools hold millions of files.

Facts: what lies in a pool directory was made by pods: links to anywhere, folders nested deeper than a path may be
long, pipes, files that nobody may remove, new ones while we work. A kill may come between any two steps. Therefore
folders are opened without following links, no deeper than `DEPTH_MAX`; what lies deeper is moved up into the tree
first. Another filesystem below is not entered, and a tree with a mount inside is not begun. `node.json` goes last, so
that whatever is left is still known as ours. Pods that have a directory mounted keep what they have open, and can make
nothing new.

Blocking; the time of a call is that of `entries_max` removals. One thread per tree.
"""

import contextlib
import errno
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from pykvcache_contract.names import REASON_ERROR
from pykvcache_sidecar.node.folders import READ_FLAGS, below_descriptor, open_folder, open_inside, parts_of
from pykvcache_sidecar.node.mount_table import read_mount_table
from pykvcache_sidecar.node.mounts import mounts_inside
from pykvcache_sidecar.node.tree import ASIDE_PREFIX, PoolTree
from pykvcache_sidecar.node.tree_file import NODE_FILE, TreeError, explained, tree_error, write_record

DEPTH_MAX = 16
ENTRIES_MAX = 10_000
"""Entries looked at in one call: at most seconds on a slow disk."""

_PATH_LETTERS_MAX = 300


@dataclass(frozen=True, slots=True)
class Erased:
    """What one call did.

    Args:
        removed: files and folders.
        more: whether anything is left; then call again.
    """

    removed: int
    more: bool


def erase(tree: PoolTree, *, entries_max: int = ENTRIES_MAX) -> Erased:
    """Remove a part of a tree, in the end all of it.

    Raises:
        TreeError: it is not the same tree any more or not mounted; something is mounted inside; or what is left
            cannot be removed.
    """
    with tree.opened() as top:
        if inside := mounts_inside(tree.directory, read_mount_table()):
            raise TreeError(REASON_ERROR, f"{tree.directory} is not erased: unmount {inside[0]} in it first.")
        work = _Work(top, entries_max, lambda name: name == NODE_FILE)
        work.run()
        if work.error is not None and not work.removed:
            raise tree_error(work.error, f"erase {tree.directory}: {work.error.filename}")
        if work.is_more:
            return Erased(work.removed, more=True)
        with explained(tree.directory):
            _remove_last(tree, top)
        return Erased(work.removed + 2, more=False)


def erase_aside(tree: PoolTree, *, entries_max: int) -> Erased:
    """Remove a part of what was set aside in a tree, in the end all of it; no other namespace is touched.

    Raises:
        TreeError: as for `erase`.
    """
    with tree.opened_namespaces() as top:
        if top is None:
            return Erased(0, more=False)
        work = _Work(top, entries_max, lambda name: not name.startswith(ASIDE_PREFIX))
        work.run()
        if work.error is not None and not work.removed:
            raise tree_error(work.error, f"erase {tree.directory}: {work.error.filename}")
        return Erased(work.removed, more=work.is_more)


class _Work:
    def __init__(self, top: int, entries_max: int, stays: Callable[[str], bool]) -> None:
        self._top = top
        self._stays = stays
        self._device = os.fstat(top).st_dev
        self._left = entries_max
        self.removed = 0
        self.error: OSError | None = None

    @property
    def is_more(self) -> bool:
        return not all(map(self._stays, os.listdir(self._top)))

    def run(self) -> None:
        """Pass over the tree until it is empty, the entries are used up, or a pass removes nothing."""
        before = -1
        while self._left > 0 and self.removed > before and self.is_more:
            before = self.removed
            self._empty(self._top, depth=0)

    def _empty(self, folder: int, *, depth: int) -> None:
        with os.scandir(folder) as entries:
            for entry in entries:
                if depth == 0 and self._stays(entry.name):
                    continue
                if self._left <= 0:
                    return
                self._left -= 1
                try:
                    self._remove(entry, folder, depth=depth)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    # Others may still be removed; what is not empty was not emptied for a reason noted already.
                    if error.errno != errno.ENOTEMPTY and self.error is None:
                        self.error = OSError(error.errno, error.strerror, _path(entry.name, folder))

    def _remove(self, entry: "os.DirEntry[str]", folder: int, *, depth: int) -> None:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.name, dir_fd=folder)
        elif depth >= DEPTH_MAX:
            os.rename(entry.name, f".deep-{uuid.uuid4().hex}", src_dir_fd=folder, dst_dir_fd=self._top)
        else:
            self._remove_folder(entry.name, folder, depth=depth)
        self.removed += 1

    def _remove_folder(self, name: str, parent: int, *, depth: int) -> None:
        folder = open_inside(parent, name, flags=READ_FLAGS)
        try:
            if os.fstat(folder).st_dev != self._device:
                raise OSError(errno.EXDEV, "another filesystem is mounted there", name)
            self._empty(folder, depth=depth + 1)
        finally:
            os.close(folder)
        os.rmdir(name, dir_fd=parent)


def _path(name: str, folder: int) -> str:
    """Return a path for a message; pods choose names, of any length and characters."""
    with contextlib.suppress(OSError):
        name = f"{os.readlink(below_descriptor(folder))}/{name}"
    return ascii(name)[1 : _PATH_LETTERS_MAX + 1].removesuffix("'")


def _remove_last(tree: PoolTree, top: int) -> None:
    """Remove node.json and the tree's own folder together, or neither."""
    root = open_folder("/", parts_of(tree.root))
    try:
        os.unlink(NODE_FILE, dir_fd=top)
        try:
            os.rmdir(tree.record.identity.pool, dir_fd=root)
        except OSError as error:
            if error.errno == errno.EBUSY:
                return  # a mount point of its own, and empty: so it was before the pool came
            with contextlib.suppress(OSError):
                write_record(tree.record, top)
            raise
    finally:
        os.close(root)
