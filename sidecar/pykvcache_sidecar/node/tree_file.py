"""`node.json`, which says whose a tree is: read with suspicion, replaced in one step, so that nobody sees half of it.

The file lies where only root writes, on a disk that may come from anywhere: it may be a link, a pipe or of any size.
Blocking, any thread; two writers of one tree are the caller's to prevent.
"""

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_contract.names import (
    REASON_DISK_FULL,
    REASON_DISK_NOT_MOUNTED,
    REASON_DISK_READ_ONLY,
    REASON_ERROR,
    REASON_FOREIGN_DIRECTORY,
)
from pykvcache_sidecar.node.folders import READ_FLAGS, LinkError, below_descriptor, open_inside
from pykvcache_storage.documents import create_document, read_document

NODE_FILE = "node.json"
FORMAT_VERSION = 1
NAMESPACES, SHARED = "ns", "shared"
"""Directories of a tree that pods mount by hostPath, those of namespaces and that of all."""

_OURS_UNFINISHED = re.compile(r"\.+node\.json\..*")
_REASONS = {
    errno.EROFS: REASON_DISK_READ_ONLY,
    errno.ENOSPC: REASON_DISK_FULL,
    errno.EDQUOT: REASON_DISK_FULL,
    errno.ENOENT: REASON_DISK_NOT_MOUNTED,
}


class TreeError(Exception):
    """A pool's directory cannot be used.

    Args:
        reason: one word of `names.REASON_…`, for conditions.
        message: says what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """Whose a tree is.

    Args:
        pool: the object's name.
        uid: the object's uid; a pool deleted and made again has another.
        retain: keep the tree when the pool is gone.
    """

    pool: str
    uid: str
    retain: bool = False


@dataclass(frozen=True, slots=True)
class TreeRecord:
    """What node.json says.

    Args:
        generation: 1 at first, more each time that the tree was prepared anew.
        filesystem: identity of the filesystem, empty if it has none that lasts.
        mount_point: of the filesystem, as the node sees it.
    """

    identity: PoolIdentity
    generation: int
    filesystem: str
    mount_point: str


def read_record(tree: int, *, directory: str) -> TreeRecord | None:
    """Return what node.json in an open directory says; None if the directory is empty.

    Args:
        directory: its path, whose last part must be the pool's name.

    Raises:
        TreeError: ForeignDirectory: other files without node.json, or one that is damaged or another pool's.
        OSError: the disk refuses.
    """
    try:
        document = read_document(below_descriptor(tree, NODE_FILE), remedy="")
    except FileNotFoundError:
        refuse_files(tree, directory=directory)
        return None
    except PoolUnavailableError as error:
        cause = str(error).replace(below_descriptor(tree), directory).strip()
        raise TreeError(
            REASON_FOREIGN_DIRECTORY, f"{cause} Nothing is changed in {directory}; remove it if it is a pool's."
        ) from error
    record = _parse(document)
    if record is None or record.identity.pool != os.path.basename(directory):
        raise TreeError(
            REASON_FOREIGN_DIRECTORY,
            f"{directory}/{NODE_FILE} is not of this pool in format {FORMAT_VERSION}. "
            f"Remove {directory}, or choose another path.",
        )
    return record


def refuse_files(tree: int, *, directory: str) -> None:
    """Raise a TreeError if an open directory holds anything but what a killed `write_record` leaves.

    Nor does it matter what the kubelet makes for a pod with a hostPath volume that comes before the first preparation:
    empty directories, where those of namespaces will be.
    """
    foreign = [n for n in os.listdir(tree) if not (_OURS_UNFINISHED.fullmatch(n) or _is_made_for_pods(n, tree))]
    if foreign:
        raise TreeError(
            REASON_FOREIGN_DIRECTORY,
            f"{directory} holds other files ({foreign[0]!r}) and no {NODE_FILE}; it is left alone. "
            "Move them away, or choose another path.",
        )


def _is_made_for_pods(name: str, tree: int) -> bool:
    if name not in (NAMESPACES, SHARED):
        return False
    try:
        place = open_inside(tree, name, flags=READ_FLAGS)
    except LinkError:
        return False
    try:
        return _is_bare(place) and all(name == NAMESPACES and _is_empty(inner, place) for inner in os.listdir(place))
    finally:
        os.close(place)


def _is_empty(name: str, parent: int) -> bool:
    try:
        folder = open_inside(parent, name, flags=READ_FLAGS)
    except LinkError:
        return False
    try:
        return _is_bare(folder) and not os.listdir(folder)
    finally:
        os.close(folder)


def _is_bare(folder: int) -> bool:
    """Say whether nobody but the agent's user could have put something there."""
    status = os.fstat(folder)
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def write_record(record: TreeRecord, tree: int) -> None:
    """Write or replace node.json in an open directory, durably.

    Raises:
        OSError: the disk refuses; the former file stays.
    """
    document = {
        "formatVersion": FORMAT_VERSION,
        "pool": record.identity.pool,
        "uid": record.identity.uid,
        "retain": record.identity.retain,
        "generation": record.generation,
        "filesystem": record.filesystem,
        "mountPoint": record.mount_point,
    }
    name = f".{NODE_FILE}.{uuid.uuid4().hex}"
    create_document(below_descriptor(tree, name), document)
    os.rename(name, NODE_FILE, src_dir_fd=tree, dst_dir_fd=tree)
    os.fsync(tree)


@contextlib.contextmanager
def explained(path: str) -> Iterator[None]:
    """Turn an OSError into the TreeError that says what can be done."""
    try:
        yield
    except LinkError as error:
        raise TreeError(
            REASON_FOREIGN_DIRECTORY,
            f"{path}: {error.filename} is a symbolic link or a file. Remove it, or name the path that it leads to.",
        ) from error
    except OSError as error:
        raise tree_error(error, path) from error


def tree_error(error: OSError, path: str) -> TreeError:
    """Return the TreeError for what the disk said."""
    reason = _REASONS.get(error.errno or 0, REASON_ERROR)
    remedy = {
        REASON_DISK_NOT_MOUNTED: "Mount its disk again.",
        REASON_DISK_READ_ONLY: "Check the disk, and mount it writable.",
        REASON_DISK_FULL: "Free some space.",
    }.get(reason, "Check the disk.")
    return TreeError(reason, f"{path}: {error.strerror or error}. {remedy}")


def _parse(document: dict[str, Any]) -> TreeRecord | None:
    texts = [document.get(name) for name in ("pool", "uid", "filesystem", "mountPoint")]
    generation, retain = document.get("generation"), document.get("retain")
    if document.get("formatVersion") != FORMAT_VERSION or not all(isinstance(text, str) for text in texts):
        return None
    if not isinstance(generation, int) or not isinstance(retain, bool):
        return None
    pool, uid, filesystem, mount_point = map(str, texts)
    return TreeRecord(PoolIdentity(pool, uid, retain), generation, filesystem, mount_point)
