"""Byte sizes as people write them, and the alignment that direct I/O needs."""

import re
from fractions import Fraction

SECTOR_SIZE_BYTES = 4096
"""Alignment of every buffer, length and offset: the largest logical sector size of NVMe disks in use."""

HUGE_PAGE_SIZE_BYTES = 2 * 1024 * 1024

_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", 1):
    _FACTORS |= dict.fromkeys((_letter, f"{_letter}I", f"{_letter}IB"), 1024**_power)
    _FACTORS[f"{_letter}B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return a size in bytes.

    Suffixes are those of Kubernetes quantities and of people: Ki/KiB/K = 1024, KB = 1000, and so on up to P.

    >>> parse_size("1GiB"), parse_size("1.5Mi"), parse_size("2 GB"), parse_size(4096)
    (1073741824, 1572864, 2000000000, 4096)

    Raises:
        ValueError: not a size, or negative.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise ValueError(f"{text!r} is not a size; write for example 64GiB")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text} is negative; a size is zero or more bytes")
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 64GiB")
    factor = _FACTORS.get(match[2].upper())
    if factor is None:
        raise ValueError(f"{text!r} has an unknown unit; use KiB, MiB, GiB or TiB")
    return int(Fraction(match[1]) * factor)


def format_size(size_bytes: int) -> str:
    """Return a size for people, in powers of 1024.

    >>> format_size(28 * 2**20), format_size(1536), format_size(12)
    ('28.0 MiB', '1.5 KiB', '12 B')
    """
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{size_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def round_up(size_bytes: int, alignment: int = SECTOR_SIZE_BYTES) -> int:
    """Return the smallest multiple of `alignment` that is not below `size_bytes`.

    >>> round_up(1), round_up(4096), round_up(4097)
    (4096, 4096, 8192)
    """
    return -(-size_bytes // alignment) * alignment
