"""Which disk lies below a directory, and what all its users move, as sysfs tells.

The whole disk counts, not the partition or the one logical volume: its neighbours share the same flash. A volume over
several disks stays a volume. Not visible, and then unknown: the disks of a filesystem with a device number of its own
(btrfs, NFS), and any in a sandbox without sysfs. Blocking, any thread.
"""

import os
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
CONTENTION_SHARE = 0.2
"""Others that move more than this part of what we move make a measurement say less about the disk than about them."""

_UNIT_BYTES = 512
"""What the kernel counts in, whatever the disk's sectors are."""
_STACK_MAX = 8


@dataclass(frozen=True, slots=True)
class Disk:
    """One block device.

    Args:
        folder: its folder in sysfs.
        model: as the manufacturer calls it; empty for virtual disks.
    """

    folder: Path
    model: str

    def moved_bytes(self) -> int | None:
        """Return how many bytes everybody has read and written since it was attached, None if it is gone."""
        try:
            fields = (self.folder / "stat").read_text().split()
            return (int(fields[2]) + int(fields[6])) * _UNIT_BYTES
        except (OSError, ValueError, IndexError):
            return None


def disk_below(directory: str, *, sysfs: Path = SYSFS) -> Disk | None:
    """Return the disk that holds a directory, None if it cannot be seen."""
    device = os.stat(directory).st_dev
    try:
        folder = (sysfs / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return None
    for _ in range(_STACK_MAX):
        below = _only_slave(folder)
        if below is None:
            break
        folder = below
    if (folder / "partition").exists():
        folder = folder.parent
    return Disk(folder, _model(folder))


def is_contended(*, ours_bytes: int, before_bytes: int | None, after_bytes: int | None) -> bool | None:
    """Say whether others moved more than a fifth of what we moved, None if the disk's counters are not visible.

    >>> is_contended(ours_bytes=1000, before_bytes=50, after_bytes=1250), is_contended(
    ...     ours_bytes=1000, before_bytes=50, after_bytes=1251
    ... )
    (False, True)
    """
    if before_bytes is None or after_bytes is None:
        return None
    others_bytes = after_bytes - before_bytes - ours_bytes
    return others_bytes > ours_bytes * CONTENTION_SHARE


def _only_slave(folder: Path) -> Path | None:
    """Return the device that a mapped one lies on, if it is one."""
    slaves = list((folder / "slaves").glob("*"))
    return slaves[0].resolve() if len(slaves) == 1 else None


def _model(folder: Path) -> str:
    try:
        return " ".join((folder / "device" / "model").read_text(errors="replace").split())
    except OSError:
        return ""
