"""What is mounted where, as /proc/self/mountinfo tells. Reads that file and touches no filesystem, so never hangs."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table.

    Args:
        device: major and minor number, for example `259:1`; of no block device for btrfs, tmpfs and network disks.
        root: which directory of the filesystem is mounted; `/` for all of it, else it is a bind mount or a subvolume.
        point: absolute path.
        filesystem: type name, for example `ext4`.
        source: what the filesystem calls its device; any text.
        options: of this mount and of the filesystem.
    """

    device: str
    root: str
    point: str
    filesystem: str
    source: str
    options: frozenset[str]


def read_mount_table(path: Path = MOUNTINFO) -> list[Mount]:
    """Return all mounts, the oldest first; of two on one point the later hides the earlier.

    Raises:
        OSError: there is no such file.
    """
    return list(_parse_table(path.read_bytes()))


def visible_mounts(mounts: list[Mount]) -> dict[str, Mount]:
    """Return for each mount point what is seen there."""
    return {mount.point: mount for mount in mounts}


@functools.lru_cache(maxsize=2)
def _parse_table(table: bytes) -> tuple[Mount, ...]:
    """Return the mounts of a table. The last one is kept: it is asked for every second, and seldom is another."""
    lines = table.decode(errors="surrogateescape").splitlines()
    return tuple(mount for line in lines if (mount := _parse(line)))


def _parse(line: str) -> Mount | None:
    mine, separator, theirs = line.partition(" - ")
    fields, others = mine.split(" "), theirs.split(" ")
    if not separator or len(fields) < 6 or len(others) < 2:
        return None
    options = fields[5].split(",") + (others[2].split(",") if len(others) > 2 else [])
    return Mount(
        device=fields[2],
        root=_unescape(fields[3]),
        point=_unescape(fields[4]),
        filesystem=others[0],
        source=_unescape(others[1]),
        options=frozenset(options),
    )


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
