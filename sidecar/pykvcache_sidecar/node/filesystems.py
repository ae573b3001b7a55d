"""Telling the filesystem that a pool was prepared on from another one in its place, or from the one below it.

Facts. The usual tools for UUIDs read udev's links, or the superblock through a device node; a container has neither.
Device numbers change at a reboot. `statfs` tells an id: ext4, btrfs and ZFS make it from the UUID, which lasts as long
as the filesystem; XFS and most others make it from the device number, tmpfs at every mount. XFS tells its UUID by an
ioctl that needs no right. A disk that is not mounted leaves its mount point, an empty directory of the filesystem
below, mostly the node's root filesystem. A container that sees a host directory at the same path has a bind mount
there, also where nothing is mounted on the host: the path is a mount point then, and proves nothing; but the table
says which directory of the filesystem is shown.

Therefore two things are noted and compared. The identity: from the UUID where one is told, else empty, and then it
decides nothing. And the mount point on the node: the mount's point without the tail it has in common with the
directory shown, `/mnt/disk` of `/mnt/disk/cache` that shows `/cache`, and `/` of `/mnt/disk` that shows `/mnt/disk`.
On a node whose root is a btrfs subvolume or an ostree deployment the tail is the same, and the rule holds.

Blocking, any thread.
"""

import fcntl
import os
import struct
from dataclasses import dataclass

from pykvcache_sidecar.node.mount_table import Mount

_FROM_STATFS = {"ext2", "ext3", "ext4", "btrfs", "zfs"}
_XFS_GEOMETRY = 0x8070_5864
"""XFS_IOC_FSGEOMETRY_V1: fills 112 bytes, the UUID at offset 64; in every kernel with XFS."""
_XFS_UUID = struct.Struct("64x16s32x")


@dataclass(frozen=True, slots=True)
class Filesystem:
    """What a directory lies on.

    Args:
        identity: type and UUID, or what stands for it; empty if the type has none that lasts.
        mount_point: where it is mounted on the node; `/` for the root filesystem.
        directory: path of the directory within the filesystem.
        device: as the mount table tells it.
    """

    identity: str
    mount_point: str
    directory: str
    device: str

    @property
    def is_root(self) -> bool:
        """Return whether this is the node's root filesystem, where nobody expects a cache."""
        return self.mount_point == "/"


def filesystem_of(descriptor: int, *, path: str, mounts: list[Mount]) -> Filesystem:
    """Return what an open directory lies on.

    Args:
        path: of the directory, absolute and without links.

    Raises:
        OSError: the filesystem does not answer.
    """
    mount = holder_of(path, mounts)
    return Filesystem(
        identity=_identity(descriptor, mount.filesystem),
        mount_point=_point_on_node(mount),
        directory=inner_path(path, mount),
        device=mount.device,
    )


def holder_of(path: str, mounts: list[Mount]) -> Mount:
    """Return the mount that a path lies on, by the table alone: the longest point above it, the last of equals."""
    holder: Mount | None = None
    for mount in mounts:
        is_above = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if is_above and (holder is None or len(mount.point) >= len(holder.point)):
            holder = mount
    if holder is None:
        raise OSError(f"{path} is on no mount that /proc/self/mountinfo tells")
    return holder


def inner_path(path: str, mount: Mount) -> str:
    """Return where a path lies within the filesystem that is mounted above it."""
    rest = path[len(mount.point.rstrip("/")) :]
    return (mount.root.rstrip("/") + rest) or "/"


def _point_on_node(mount: Mount) -> str:
    point, root = mount.point.strip("/").split("/"), mount.root.strip("/").split("/")
    while point and root and point[-1] == root[-1] != "":
        point, root = point[:-1], root[:-1]
    return "/" + "/".join(point)


def _identity(descriptor: int, kind: str) -> str:
    if kind == "xfs":
        answer = fcntl.ioctl(descriptor, _XFS_GEOMETRY, bytes(_XFS_UUID.size))
        return f"xfs:{_XFS_UUID.unpack(answer)[0].hex()}"
    if kind in _FROM_STATFS:
        number = os.fstatvfs(descriptor).f_fsid & 0xFFFF_FFFF_FFFF_FFFF
        return f"{kind}:{number:016x}" if number else ""
    return ""
