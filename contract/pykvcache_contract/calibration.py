"""What a measurement of a pool's disk says: `pykvcache calibrate storage` writes it, the operator reads it.

It travels as one JSON object in a container's termination message, which Kubernetes cuts at 4096 bytes, so it is
bounded: at most 24 points, short texts. The reader trusts nothing: whoever runs in that container may have written it.
"""

import json
from dataclasses import dataclass
from typing import Any

from pykvcache_contract.api.fields import to_dict
from pykvcache_contract.api.node import POINTS_MAX, ProfilePoint

FORMAT_VERSION = 1
DOCUMENT_SIZE_BYTES_MAX = 4096
TEXT_LENGTH_MAX = 64
MESSAGE_LENGTH_MAX = 512

EXIT_TRY_AGAIN = 1
EXIT_UNSUPPORTED = 42
"""Another try would end the same way: read-only, no space, not a directory."""

_BLOCK_BYTES_MAX = 1 << 30
_DEPTH_MAX = 1024
_RATE_MAX = 10**13
"""Bytes per second: a hundred times what any disk of a node does."""
_LATENCY_MAX = 600 * 10**6
_SECONDS_MAX = 3600
_BYTES_MAX = 1 << 50


@dataclass(frozen=True, slots=True)
class StorageCalibration:
    """A disk as the reactor sees it.

    Args:
        engine: `uring` or `threads`.
        buffered: whether the page cache took part, because direct I/O is refused here.
        disk_model: empty if it is not visible.
        points: at most 24, the most telling first. `depth` counts the blocks in flight over all readers, the latency is
            the median from the start of a block's open to its last byte.
        read_bytes_per_second: of the fastest point.
        contended: whether others moved more than a fifth as many bytes meanwhile; None if that is not visible.
        complete: whether time sufficed for every point.
    """

    engine: str
    buffered: bool
    filesystem: str
    kernel: str
    disk_model: str
    points: tuple[ProfilePoint, ...]
    read_bytes_per_second: int
    write_bytes_per_second: int
    contended: bool | None
    complete: bool
    seconds: float
    bytes: int


@dataclass(frozen=True, slots=True)
class CalibrationRefusal:
    """Why nothing was measured, in words for people.

    Args:
        retry: whether another try may succeed.
    """

    message: str
    retry: bool


def encode_calibration(result: StorageCalibration | CalibrationRefusal) -> str:
    """Return the document, at most 4096 bytes of ASCII: longer texts are cut, points beyond 24 are left out."""
    if isinstance(result, CalibrationRefusal):
        document: dict[str, Any] = {"error": plain_text(result.message, MESSAGE_LENGTH_MAX), "retry": result.retry}
    else:
        document = _measured(result)
    return json.dumps({"formatVersion": FORMAT_VERSION, **document}, separators=(",", ":"))


def plain_text(text: str, length_max: int) -> str:
    """Return a text in printable ASCII, cut to a length: it is shown on terminals and must not grow when encoded.

    >>> plain_text("Disk\x1b[31m µ", 64), plain_text("abcdef", 4)
    ('Disk?[31m ?', 'abcd')
    """
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text[:length_max])


def decode_calibration(text: str) -> StorageCalibration | CalibrationRefusal:
    """Return what a document says.

    Raises:
        ValueError: it is no document of ours, cut off, or holds an impossible value; the message says which.
    """
    if len(text) > DOCUMENT_SIZE_BYTES_MAX:
        raise ValueError(f"it has {len(text)} characters, at most {DOCUMENT_SIZE_BYTES_MAX} are expected")
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON, or was cut off ({plain_text(str(error), 80)})") from error
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    if document.get("formatVersion") != FORMAT_VERSION:
        raise ValueError(
            f"its formatVersion is not {FORMAT_VERSION}: the image of the calibration is of another release"
        )
    if "error" in document:
        return CalibrationRefusal(_text(document, "error", MESSAGE_LENGTH_MAX), bool(_flag(document, "retry")))
    return _parse(document)


def _measured(result: StorageCalibration) -> dict[str, Any]:
    return {
        "engine": plain_text(result.engine, TEXT_LENGTH_MAX),
        "buffered": result.buffered,
        "filesystem": plain_text(result.filesystem, TEXT_LENGTH_MAX),
        "kernel": plain_text(result.kernel, TEXT_LENGTH_MAX),
        "diskModel": plain_text(result.disk_model, TEXT_LENGTH_MAX),
        "readBytesPerSecond": result.read_bytes_per_second,
        "writeBytesPerSecond": result.write_bytes_per_second,
        "contended": result.contended,
        "complete": result.complete,
        "seconds": round(result.seconds, 1),
        "bytes": result.bytes,
        "points": [to_dict(point) for point in result.points[:POINTS_MAX]],
    }


def _parse(document: dict[str, Any]) -> StorageCalibration:
    points = document.get("points")
    if not isinstance(points, list) or not 1 <= len(points) <= POINTS_MAX:
        raise ValueError(f"points is no list of 1 to {POINTS_MAX} entries")
    buffered = _flag(document, "buffered")
    if buffered is None:
        raise ValueError("buffered is neither true nor false")
    return StorageCalibration(
        engine=_text(document, "engine", TEXT_LENGTH_MAX),
        buffered=buffered,
        filesystem=_text(document, "filesystem", TEXT_LENGTH_MAX),
        kernel=_text(document, "kernel", TEXT_LENGTH_MAX),
        disk_model=_text(document, "diskModel", TEXT_LENGTH_MAX),
        points=tuple(_parse_point(point) for point in points),
        read_bytes_per_second=_count(document, "readBytesPerSecond", _RATE_MAX),
        write_bytes_per_second=_count(document, "writeBytesPerSecond", _RATE_MAX),
        contended=_flag(document, "contended"),
        complete=bool(_flag(document, "complete")),
        seconds=_seconds(document),
        bytes=_count(document, "bytes", _BYTES_MAX),
    )


def _parse_point(point: Any) -> ProfilePoint:
    if not isinstance(point, dict):
        raise ValueError("a point is no object")
    return ProfilePoint(
        block_bytes=_count(point, "blockBytes", _BLOCK_BYTES_MAX),
        depth=_count(point, "depth", _DEPTH_MAX),
        readers=_count(point, "readers", _DEPTH_MAX),
        read_bytes_per_second=_count(point, "readBytesPerSecond", _RATE_MAX),
        latency_microseconds=_count(point, "latencyMicroseconds", _LATENCY_MAX),
    )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _text(document: dict[str, Any], name: str, length_max: int) -> str:
    value = document.get(name)
    if not isinstance(value, str) or len(value) > length_max:
        raise ValueError(f"{name} is no text of at most {length_max} characters")
    return plain_text(value, length_max)


def _flag(document: dict[str, Any], name: str) -> bool | None:
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} is neither true, false nor null")
    return value


def _count(document: dict[str, Any], name: str, largest: int) -> int:
    value = document.get(name)
    # A bool is an int in Python; and no disk moves nothing in a second.
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise ValueError(f"{name} is no whole number from 1 to {largest}")
    return value


def _seconds(document: dict[str, Any]) -> float:
    value = document.get("seconds")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= _SECONDS_MAX:
        raise ValueError(f"seconds is no number from 0 to {_SECONDS_MAX}")
    return float(value)
