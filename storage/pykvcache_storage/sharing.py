"""Whoever may write into the pool directory may write everywhere in it, whatever umask the maker of a folder has.

Facts: in a pod vLLM often runs as root, and the sidecar never does; each evicts what the other made. An emptyDir is
writable for all, a volume with fsGroup for its group, but a folder made with the usual umask only for its maker. The
umask belongs to vLLM's whole process. In a sticky directory, as the node agent makes them, nobody may remove what
another made. What they mean: a folder that is made in a pool takes over the pool directory's permissions, by a default
ACL, which the kernel hands down to all that is made below and puts in the umask's place; files beside it get theirs
one by one. A sticky pool, one that only its owner may write, and one with ACLs of its own, which the kernel hands down
by itself, stay as they are.

Nobody gets what the pool directory does not give: its group's permissions go to what has the same group, which is sure
for all that is made below a directory with the setgid bit (as fsGroup makes it). A hard link may be anybody's file.

Where the filesystem knows no ACLs (NFS, gVisor) the umask decides, and all must run as one user. Changes only what
belongs to this process's user. Blocking calls, at start-up and not per block.
"""

import contextlib
import os
import stat
import struct
from collections.abc import Iterator

_DEFAULT_ACL = "system.posix_acl_default"
_HEADER, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")
_VERSION = 2
_USER, _GROUP, _OTHER = 0x01, 0x04, 0x20  # linux/posix_acl.h
_NOBODY = 0xFFFFFFFF
_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def share_folder(folder: str, *, pool_directory: str) -> None:
    """Give a folder, and what will be made in it, the permissions of the pool directory, if others may write there."""
    with contextlib.suppress(OSError), _own(folder, os.O_DIRECTORY) as descriptor:
        status = os.fstat(descriptor)
        mode = _shared_mode(pool_directory, heir=status)
        if mode:
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) | mode)
            os.setxattr(descriptor, _DEFAULT_ACL, _acl(mode))


def share_file(path: str) -> None:
    """Let everybody who may write into the folder of this file read and write the file."""
    with contextlib.suppress(OSError), _own(path) as descriptor:
        status = os.fstat(descriptor)
        mode = _shared_mode(os.path.dirname(path), heir=status) & 0o666
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_mode & mode != mode:
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) | mode)


def _shared_mode(directory: str, *, heir: os.stat_result) -> int:
    """Return what a folder or file may take over of a directory's permissions; 0: they stay as they are."""
    status = os.stat(directory)
    mode = status.st_mode
    is_inherited = stat.S_ISREG(heir.st_mode) or mode & heir.st_mode & stat.S_ISGID
    if status.st_gid != heir.st_gid or not is_inherited:
        mode = mode & ~stat.S_IRWXG | (mode & stat.S_IRWXO) << 3
    is_shared = mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX
    return mode & 0o777 if is_shared and not _has_acl(directory) else 0


def _has_acl(directory: str) -> bool:
    """Return whether a directory has more than a mode, whose group's part then means the mask."""
    try:
        return any(name.startswith("system.posix_acl_") for name in os.listxattr(directory))
    except OSError:
        return False  # the filesystem knows none


@contextlib.contextmanager
def _own(path: str, flags: int = 0) -> Iterator[int]:
    """Yield a descriptor of what belongs to us; PermissionError for what belongs to another."""
    descriptor = os.open(path, _OPEN_FLAGS | flags)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(path)
        yield descriptor
    finally:
        os.close(descriptor)


def _acl(mode: int) -> bytes:
    entries = ((_USER, 0o7), (_GROUP, mode >> 3 & 0o7), (_OTHER, mode & 0o7))
    return _HEADER.pack(_VERSION) + b"".join(_ENTRY.pack(tag, bits, _NOBODY) for tag, bits in entries)
