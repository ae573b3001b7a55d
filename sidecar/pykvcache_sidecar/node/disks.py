"""Which disks a node has for pools: filesystems that somebody has mounted where disks for data are mounted by habit.

Nothing is formatted, mounted or written. A disk is a mount point that matches one of the patterns and shows a whole
filesystem: a bind mount of a directory is somebody's directory, not a disk. What kind of disk it is tells sysfs; device
mapper and RAID are followed to the devices below. What sysfs does not tell (loop devices, tmpfs, network disks, virtual
disks, whose `rotational` says nothing) is of type Other.

Asking a filesystem how full it is can hang as long as its disk does: `discover` leaves such a disk out.
"""

import fnmatch
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from pykvcache_contract.api.node import DISKS_MAX, Disk
from pykvcache_contract.api.pool import DiskType
from pykvcache_sidecar.node.filesystems import filesystem_of
from pykvcache_sidecar.node.folders import READ_FLAGS, open_folder, parts_of
from pykvcache_sidecar.node.mount_table import Mount, read_mount_table, visible_mounts
from pykvcache_sidecar.node.patience import Patience

DEFAULT_PATTERNS = ("/mnt/local", "/mnt/k8s-disks/*", "/mnt/disks/*", "/mnt/nvme*", "/mnt/pykvcache*")
"""Where EKS, GKE and administrators mount local disks; a place of py-kvcache's own comes last."""
_COARSE_STEPS = 100
"""Free bytes are told in hundredths of the disk, so that they change seldom."""
DEVICE_LETTERS_MAX = 253
"""What a KVCacheNode may hold; network filesystems are called after servers and paths."""
_STACK_DEPTH_MAX = 8
"""A partition on a device mapper on a RAID has three levels."""
_VIRTUAL = ("loop", "ram", "zram", "nbd", "vd", "xvd", "rbd", "drbd")


def discover(
    patterns: Iterable[str], *, patience: Patience, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")
) -> list[Disk]:
    """Return the disks mounted at places that match, by place; at most `DISKS_MAX`, what a status may list.

    Args:
        patterns: absolute paths, `*` stands for any text within one component.
        patience: with each disk.

    Raises:
        OSError: the mount table cannot be read. A disk that does not answer is left out.
    """
    mounts = read_mount_table(proc / "self" / "mountinfo")
    places = visible_mounts(mounts)
    wanted = list(patterns)
    chosen = sorted(point for point, mount in places.items() if _is_disk(mount) and _matches(point, wanted))
    disks = []
    for point in chosen[:DISKS_MAX]:
        try:
            disks.append(patience.ask(point, functools.partial(_describe, places[point], mounts, sysfs=sysfs)))
        except OSError:
            continue
    return disks


def disk_at(mount_point: str, *, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> Disk | None:
    """Return the disk mounted at one place, whether or not it matches a pattern; None where none is.

    Raises:
        OSError: the mount table cannot be read, or the disk does not answer.
    """
    mounts = read_mount_table(proc / "self" / "mountinfo")
    mount = visible_mounts(mounts).get(mount_point)
    return None if mount is None else _describe(mount, mounts, sysfs=sysfs)


def _is_disk(mount: Mount) -> bool:
    is_subvolume = mount.filesystem == "btrfs" and not mount.root.endswith(mount.point)
    return mount.root == "/" or is_subvolume


def _matches(point: str, patterns: Iterable[str]) -> bool:
    parts = point.split("/")
    for pattern in patterns:
        wanted = pattern.rstrip("/").split("/")
        if len(wanted) == len(parts) and all(map(fnmatch.fnmatchcase, parts, wanted)):
            return True
    return False


def _describe(mount: Mount, mounts: list[Mount], *, sysfs: Path) -> Disk:
    descriptor = open_folder("/", parts_of(mount.point), flags=READ_FLAGS)
    try:
        status = os.fstatvfs(descriptor)
        identity = filesystem_of(descriptor, path=mount.point, mounts=mounts).identity
    finally:
        os.close(descriptor)
    size = status.f_blocks * status.f_frsize
    node = _device_node(mount, sysfs)
    physical = list(_physical(node)) if node is not None else []
    types = {_type_of(disk) for disk in physical}
    return Disk(
        mount_path=mount.point,
        device=mount.source[:DEVICE_LETTERS_MAX] if node is None else f"/dev/{node.name}",
        model=next(filter(None, map(_model_of, physical)), ""),
        type=types.pop() if len(types) == 1 else DiskType.OTHER,
        size_bytes=size,
        free_bytes=coarse(status.f_bavail * status.f_frsize, size),
        filesystem=mount.filesystem,
        filesystem_uuid=identity,
    )


def coarse(size_bytes: int, whole_bytes: int) -> int:
    """Return a size rounded down to a hundredth of the whole.

    >>> coarse(123_456, 1_000_000), coarse(7, 50), coarse(5, 0)
    (120000, 7, 5)
    """
    step = max(1, whole_bytes // _COARSE_STEPS)
    return size_bytes // step * step


def _device_node(mount: Mount, sysfs: Path) -> Path | None:
    """Return the device's folder in sysfs; by name where a filesystem has device numbers of its own."""
    candidates = [sysfs / "dev" / "block" / mount.device]
    if mount.source.startswith("/dev/"):
        candidates.append(sysfs / "class" / "block" / os.path.basename(mount.source))
    return next((path.resolve() for path in candidates if path.exists()), None)


def _physical(node: Path, depth: int = 0) -> Iterator[Path]:
    """Yield the folders of the disks that a device is made of."""
    disk = node.parent if (node / "partition").exists() else node
    try:
        below = sorted(node.joinpath("slaves").iterdir())
    except OSError:
        below = []
    if not below or depth == _STACK_DEPTH_MAX:
        yield disk
        return
    for device in below:
        yield from _physical(device.resolve(), depth + 1)


def _type_of(disk: Path) -> DiskType:
    if disk.name.startswith("nvme"):
        return DiskType.NVME
    rotational = _read(disk / "queue" / "rotational")
    if disk.name.startswith(_VIRTUAL) or rotational not in {"0", "1"}:
        return DiskType.OTHER
    return DiskType.HDD if rotational == "1" else DiskType.SSD


def _model_of(disk: Path) -> str:
    return " ".join(_read(disk / "device" / "model").split())


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
