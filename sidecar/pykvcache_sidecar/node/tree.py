"""The directory of one pool on one node, `<root>/<pool>`, and the pool directories in it.

    node.json               whose it is, on which filesystem it was prepared, how often
    ns/<namespace>/         one pool directory for each namespace       (sharing: Namespace)
    shared/                 one for all                                 (sharing: Pool)
    calibration/            the operator's own, for measurements

Each of the last three is a complete pool directory with a pool.json, as the connector makes one. They have mode 01777:
pods run as any user, and none may remove what another made. What leads to them is 0711, so that nobody lists or plants
anything there. The agent makes `pool.json` and `usage`, both before a pod sees the directory: in a sticky directory
only what its owner made can be opened by everybody.

A tree belongs to a pool by its uid, not by its name. What is not provably a tree of ours is never changed. What
`node.json` says was true when it was written; whether the disk is still that one is asked anew in each call. Every
directory is opened without following links and used through its descriptor.

Errors: `TreeError` with the one word that becomes the node's reason. Blocking; one thread per pool.
"""

import contextlib
import os
import re
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_contract.names import (
    REASON_DISK_NOT_MOUNTED,
    REASON_ERROR,
    REASON_FOREIGN_DIRECTORY,
    REASON_POOL_REPLACED,
)
from pykvcache_contract.paths import POOL_FILE, USAGE_FILE
from pykvcache_sidecar.node.filesystems import Filesystem, filesystem_of
from pykvcache_sidecar.node.folders import READ_FLAGS, below_descriptor, open_folder, open_inside, parts_of
from pykvcache_sidecar.node.mount_table import read_mount_table
from pykvcache_sidecar.node.tree_file import (
    NAMESPACES,
    SHARED,
    PoolIdentity,
    TreeError,
    TreeRecord,
    explained,
    read_record,
    tree_error,
    write_record,
)
from pykvcache_storage.pool import open_pool

CALIBRATION = "calibration"
TREES_MAX = 1000
"""Directories looked at in one root; the rest are left alone."""
ASIDE_PREFIX = "."
"""Names in `ns` that begin so are of no namespace: what was set aside, and is being erased."""

_LEAF_MODE = 0o1777
_PASSAGE_MODE = 0o711
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_POOL_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Known:
    """What the agent remembers of the last time it prepared a pool here, also over restarts.

    Args:
        generation: of the tree then.
        mount_point: of its filesystem then, `PoolTree.record.mount_point`.
    """

    generation: int
    mount_point: str


@dataclass(frozen=True, slots=True)
class PoolTree:
    """A prepared directory of a pool.

    Args:
        root: absolute path without links; the tree is `<root>/<pool>`.
    """

    root: str
    record: TreeRecord

    @property
    def directory(self) -> str:
        """Return the tree's path."""
        return f"{self.root}/{self.record.identity.pool}"

    def namespace_directory(self, namespace: str) -> str:
        """Return a namespace's pool directory; make it at its first use.

        Raises:
            TreeError: the disk is not the one any more, or something else is in the way.
            ValueError: no name of a namespace.
        """
        if not _LABEL.fullmatch(namespace):
            raise ValueError(f"{namespace!r} is no name of a namespace")
        return self._leaf(NAMESPACES, namespace)

    def shared_directory(self) -> str:
        """Return the pool directory of all; the rest is as for `namespace_directory`."""
        return self._leaf(SHARED)

    def calibration_directory(self) -> str:
        """Return the operator's pool directory; the rest is as for `namespace_directory`."""
        return self._leaf(CALIBRATION)

    def leaves(self) -> list[str]:
        """Return the pool directories that exist, for whoever cares for them; links are left out.

        Raises:
            TreeError: the disk is not the one any more.
        """
        with self.opened() as tree:
            names = [[name] for name in (SHARED, CALIBRATION) if _is_directory(name, tree)]
            with contextlib.suppress(FileNotFoundError), _opened(NAMESPACES, tree) as namespaces:
                found = sorted(filter(_LABEL.fullmatch, os.listdir(namespaces)))
                names += [[NAMESPACES, name] for name in found if _is_directory(name, namespaces)]
        return ["/".join((self.directory, *parts)) for parts in names]

    def set_aside(self, namespace: str) -> None:
        """Take a namespace's pool directory out of use, in one step; `erase.erase_aside` then removes it.

        Raises:
            TreeError: the disk is not the one any more, or refuses.
        """
        with self.opened() as tree, contextlib.suppress(FileNotFoundError), _opened(NAMESPACES, tree) as namespaces:
            aside = f"{ASIDE_PREFIX}{uuid.uuid4().hex}"
            os.rename(namespace, aside, src_dir_fd=namespaces, dst_dir_fd=namespaces)

    @contextlib.contextmanager
    def opened_namespaces(self) -> Iterator[int | None]:
        """Yield a descriptor of the folder of all namespaces; None while none has a directory.

        Raises:
            TreeError: as for `opened`.
        """
        with self.opened() as tree, contextlib.ExitStack() as stack:
            namespaces = None
            with contextlib.suppress(FileNotFoundError):
                namespaces = stack.enter_context(_opened(NAMESPACES, tree))
            yield namespaces

    def check(self) -> None:
        """Raise a TreeError unless the tree is still there, of the same pool and on the same filesystem."""
        with self.opened():
            return

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor of the tree, after it was checked.

        Raises:
            TreeError: another tree, another filesystem, or none.
        """
        with explained(self.directory), _open_tree(self.directory) as (tree, filesystem):
            found = read_record(tree, directory=self.directory)
            if found is None or _is_unmounted(filesystem, self.record):
                raise _not_mounted(self.directory, filesystem, self.record)
            if found.identity.uid != self.record.identity.uid:
                raise TreeError(
                    REASON_POOL_REPLACED,
                    f"{self.directory} is of pool uid {found.identity.uid}, not {self.record.identity.uid} any more.",
                )
            yield tree

    def _leaf(self, *parts: str) -> str:
        path = "/".join((self.directory, *parts))
        with self.opened() as tree, explained(path), contextlib.ExitStack() as stack:
            for part in parts[:-1]:
                tree = stack.enter_context(_made(part, tree, mode=_PASSAGE_MODE))
            leaf = stack.enter_context(_made(parts[-1], tree, mode=_LEAF_MODE))
            _make_pool(leaf, path)
        return path


def prepare(
    root: str, identity: PoolIdentity, *, allow_root_filesystem: bool = False, known: Known | None = None
) -> PoolTree:
    """Make or find the tree of a pool; the same call again changes nothing.

    A tree that a deleted pool of the same name left behind is taken over if it was to be retained.

    Args:
        root: absolute path without links. What is missing of it is created, on a filesystem that is checked first.
        allow_root_filesystem: prepare also on the node's root filesystem.
        known: of an earlier preparation; None if there was none.

    Raises:
        TreeError: DiskNotMounted, ForeignDirectory, PoolReplaced (`find_trees` shows by which pool): nothing was
            written. DiskReadOnly, DiskFull or Error: it may have been begun, and the next call goes on.
        ValueError: a relative path, or no name of a pool.
    """
    if not _POOL_NAME.fullmatch(identity.pool):
        raise ValueError(f"{identity.pool!r} is no name of a pool")
    parts_of(root)
    directory = f"{root}/{identity.pool}"
    with explained(directory):
        with contextlib.suppress(FileNotFoundError), _open_tree(directory) as (tree, filesystem):
            found = read_record(tree, directory=directory)
            if found is not None:
                _check_found(found, identity, filesystem=filesystem, directory=directory)
                return PoolTree(root, _renewed(found, identity, tree=tree, known=known))
        filesystem = _check_fresh(directory, allow_root_filesystem=allow_root_filesystem, known=known)
        generation = known.generation + 1 if known else 1
        record = TreeRecord(identity, generation, filesystem.identity, filesystem.mount_point)
        return _create(PoolTree(root, record))


def find_trees(root: str) -> list[PoolTree]:
    """Return the trees in a root, whichever pools they are of; what is no readable tree of ours is left out.

    Raises:
        TreeError: the root cannot be read; a root that does not exist holds none.
    """
    trees: list[PoolTree] = []
    with explained(root):
        try:
            folder = open_folder("/", parts_of(root), flags=READ_FLAGS)
        except FileNotFoundError:
            return trees
        try:
            for name in sorted(filter(_POOL_NAME.fullmatch, os.listdir(folder)))[:TREES_MAX]:
                with contextlib.suppress(OSError, TreeError), _opened(name, folder) as tree:
                    if record := read_record(tree, directory=f"{root}/{name}"):
                        trees.append(PoolTree(root, record))
        finally:
            os.close(folder)
    return trees


# ---- checks ----


def _is_unmounted(filesystem: Filesystem, record: TreeRecord) -> bool:
    """Return whether this is not the filesystem noted: another identity or, where none is told, one mounted above."""
    if record.filesystem or filesystem.identity:
        return record.filesystem != filesystem.identity
    return _is_above(filesystem.mount_point, record.mount_point)


def _is_above(mount_point: str, other: str) -> bool:
    return mount_point != other and other.startswith(mount_point.rstrip("/") + "/")


def _not_mounted(directory: str, filesystem: Filesystem, record: TreeRecord) -> TreeError:
    return TreeError(
        REASON_DISK_NOT_MOUNTED,
        f"{directory} was prepared on {record.filesystem or 'a filesystem'} at {record.mount_point}; there is "
        f"{filesystem.identity or 'another filesystem'} at {filesystem.mount_point} now. Mount the disk again; if it "
        f"was replaced, remove {directory}, and it is prepared anew.",
    )


def _check_found(found: TreeRecord, identity: PoolIdentity, *, filesystem: Filesystem, directory: str) -> None:
    if _is_unmounted(filesystem, found):
        raise _not_mounted(directory, filesystem, found)
    if found.identity.uid != identity.uid and not found.identity.retain:
        raise TreeError(
            REASON_POOL_REPLACED,
            f"{directory} is of a former pool of this name, uid {found.identity.uid}; it is erased first.",
        )


def _renewed(found: TreeRecord, identity: PoolIdentity, *, tree: int, known: Known | None) -> TreeRecord:
    """Return the record as it is to be; write it if that is different."""
    generation = found.generation
    if known is not None and generation < known.generation:
        generation = known.generation + 1  # a disk that comes back after another one took its place
    wanted = replace(found, identity=identity, generation=generation)
    if wanted != found:
        write_record(wanted, tree)
    return wanted


def _check_fresh(directory: str, *, allow_root_filesystem: bool, known: Known | None) -> Filesystem:
    """Return the filesystem that a missing tree would be made on, if it may be."""
    path = directory
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    nearest = open_folder("/", parts_of(path) if path != "/" else [], flags=READ_FLAGS)
    try:
        filesystem = filesystem_of(nearest, path=path, mounts=read_mount_table())
    finally:
        os.close(nearest)
    if known is not None and _is_above(filesystem.mount_point, known.mount_point):
        raise TreeError(
            REASON_DISK_NOT_MOUNTED,
            f"{directory} was on a disk mounted at {known.mount_point}, where nothing is mounted now. Mount it again.",
        )
    if filesystem.is_root and not allow_root_filesystem:
        raise TreeError(
            REASON_DISK_NOT_MOUNTED,
            f"{directory} is on the node's root filesystem. Mount a disk there, choose another path, or start "
            "the agent with --allow-root-filesystem.",
        )
    return filesystem


# ---- directories ----


@contextlib.contextmanager
def _open_tree(directory: str) -> "Iterator[tuple[int, Filesystem]]":
    tree = open_folder("/", parts_of(directory), flags=READ_FLAGS)
    try:
        yield tree, filesystem_of(tree, path=directory, mounts=read_mount_table())
    finally:
        os.close(tree)


@contextlib.contextmanager
def _opened(name: str, parent: int) -> Iterator[int]:
    descriptor = open_inside(parent, name, flags=READ_FLAGS)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _made(name: str, parent: int, *, mode: int) -> Iterator[int]:
    """Make a directory unless it is there, and yield it; one that somebody else made is refused."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent)
    with _opened(name, parent) as folder:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise TreeError(
                REASON_FOREIGN_DIRECTORY, f"the directory {name} belongs to user {status.st_uid}. Remove it."
            )
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(folder, mode)
        yield folder


def _create(fresh: PoolTree) -> PoolTree:
    """Make a tree on the filesystem that its record names."""
    with contextlib.ExitStack() as stack:
        folder = open_folder("/", [])
        stack.callback(os.close, folder)
        for part in parts_of(fresh.root):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=folder)
            folder = stack.enter_context(_opened(part, folder))
        tree = stack.enter_context(_made(fresh.record.identity.pool, folder, mode=_PASSAGE_MODE))
        filesystem = filesystem_of(tree, path=fresh.directory, mounts=read_mount_table())
        if (filesystem.identity, filesystem.mount_point) != (fresh.record.filesystem, fresh.record.mount_point):
            raise TreeError(REASON_ERROR, f"{fresh.directory} was mounted or unmounted just now. It is tried again.")
        write_record(fresh.record, tree)
        os.fsync(folder)
    return fresh


def _is_directory(name: str, parent: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def _make_pool(leaf: int, path: str) -> None:
    """Make a directory a pool, and the record of its fill level writable for all pods, whoever creates it first."""
    try:
        open_pool(below_descriptor(leaf), create=True)
    except PoolUnavailableError as error:
        if isinstance(error.__cause__, OSError):
            raise tree_error(error.__cause__, path) from error
        raise TreeError(REASON_FOREIGN_DIRECTORY, str(error).replace(below_descriptor(leaf), path)) from error
    with contextlib.suppress(FileExistsError):
        os.close(os.open(USAGE_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=leaf))
    for name, mode in ((POOL_FILE, 0o644), (USAGE_FILE, 0o666)):
        _share(name, leaf, mode=mode)


def _share(name: str, leaf: int, *, mode: int) -> None:
    """Give a file of ours its mode, whatever our umask is and wherever we were killed."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=leaf)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
