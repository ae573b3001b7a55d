"""Byte quantities and durations as Kubernetes writes them: `800Gi`, `720h`.

Not `units`, which reads sizes as people write them: there `K` is 1024, here `k` is 1000 and `K` is no unit at all.
"""

import re
from fractions import Fraction
from math import ceil

QUANTITY_PATTERN = r"([0-9]{1,19}(?:\.[0-9]{1,9})?)(k|[MGTPE]|[KMGTPE]i)?"
QUANTITY_BYTES_MAX = 2**60
DURATION_PATTERN = r"(?:([0-9]{1,6})h)?(?:([0-9]{1,8})m)?(?:([0-9]{1,9})s)?"
"""So few digits that every duration fits into Go's 292 years."""
TEXT_LENGTH_MAX = 32

_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)}
_FACTORS = {"": 1, **{letter: 1000**power for power, letter in enumerate("kMGTPE", 1)}, **_BINARY}


def parse_quantity(value: object) -> int:
    """Return the bytes of a quantity; a fraction of a byte counts as a byte, as in Kubernetes.

    >>> parse_quantity("10Gi"), parse_quantity("1.5M"), parse_quantity(4096)
    (10737418240, 1500000, 4096)

    Raises:
        ValueError: no quantity, negative, or above 1Ei.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{value!r} is not a quantity; write for example 800Gi")
    match = re.fullmatch(QUANTITY_PATTERN, str(value))
    if match is None:
        raise ValueError(f"{value!r} is not a quantity of bytes; write for example 800Gi, 1.5Ti or 500G")
    size_bytes: int = ceil(Fraction(match[1]) * _FACTORS[match[2] or ""])
    if size_bytes > QUANTITY_BYTES_MAX:
        raise ValueError(f"{value!r} is above 1Ei")
    return size_bytes


def format_quantity(size_bytes: int) -> str:
    """Return the shortest exact quantity with a binary unit.

    >>> format_quantity(10 * 2**30), format_quantity(1536), format_quantity(0)
    ('10Gi', '1536', '0')
    """
    for unit, factor in reversed(_BINARY.items()):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def parse_duration(text: object) -> int:
    """Return the seconds of a duration in Go's notation; hours are the largest unit, seconds the smallest.

    >>> parse_duration("720h"), parse_duration("1h30m"), parse_duration("0s")
    (2592000, 5400, 0)

    Raises:
        ValueError: no duration.
    """
    match = re.fullmatch(DURATION_PATTERN, text) if isinstance(text, str) and text else None
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write for example 720h, 1h30m or 0s")
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds


def format_duration(seconds: int) -> str:
    """Return a duration in Go's notation, without parts that are zero.

    >>> format_duration(2592000), format_duration(5400), format_duration(0)
    ('720h', '1h30m', '0s')
    """
    hours, rest = divmod(seconds, 3600)
    parts = [(hours, "h"), (rest // 60, "m"), (rest % 60, "s")]
    return "".join(f"{count}{unit}" for count, unit in parts if count) or "0s"
