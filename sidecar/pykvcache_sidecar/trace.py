"""Reads request traces: one JSON line a request, as the connector writes them where it is told to.

    {"seconds": 1764512345.25, "fingerprint": "0123456789ab", "tokens_per_block": 256, "block_bytes": 29364224,
     "blocks": ["00f1e2d3c4b5a697", …]}

One line at a time is in memory. A trace may be copied while vLLM writes it, so a torn last line is passed over with a
remark; anything else that is no request is an error that names the line, because a silent gap would change the result.

Blocking calls, any thread.
"""

import heapq
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.paths import FINGERPRINT_DIRECTORY

LINE_SIZE_BYTES_MAX = 16 * 1024 * 1024
"""A prompt of a million tokens in blocks of 16 takes 1.3 MB."""
FINGERPRINTS_MAX = 4096
DISORDER_SECONDS_MAX = 60.0
"""Processes that append to one file may overtake each other by moments; more means that files were put together."""


@dataclass(frozen=True, slots=True)
class Request:
    """What one request wanted when it arrived.

    Args:
        fingerprint: its first 12 digits, which are the name of the folder in the pool.
        block_bytes: of one block, all ranks together.
        blocks: first digits of the hashes of all full blocks of the prompt, as numbers, head first.
    """

    seconds: float
    fingerprint: str
    tokens_per_block: int
    block_bytes: int
    blocks: list[int]


class Trace:
    """One trace file; iterate over it once.

    After or during the iteration `read_bytes` tells how far it came, and `remarks` what was odd.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.read_bytes = 0
        self.remarks: list[str] = []
        self._shapes: dict[str, tuple[int, int]] = {}
        self._latest_seconds = -math.inf
        self._disorder_count = 0

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of the file.

        Raises:
            ConfigurationError: the file cannot be read, or a line is no request.
        """
        try:
            yield from self._requests()
        except OSError as error:
            raise ConfigurationError(f"cannot read the trace {self.path}: {error.strerror}") from error
        if self._disorder_count:
            remedy = "give several traces as several arguments instead of one file, or sort it by time"
            self.remarks.append(
                f"{self.path}: {self._disorder_count} requests are older than one before them; {remedy}"
            )

    def _requests(self) -> Iterator[Request]:
        with open(self.path, "rb") as file:
            number = 0
            while line := file.readline(LINE_SIZE_BYTES_MAX + 1):
                number += 1
                self.read_bytes += len(line)
                try:
                    request = parse_request(line)
                    self._note(request)
                except ValueError as error:
                    # A line that is too long has no line end either, and is not torn: there is more behind it.
                    if line.endswith(b"\n") or len(line) > LINE_SIZE_BYTES_MAX:
                        remedy = "Remove the line to go on without it"
                        raise ConfigurationError(f"{self.path}, line {number}: {error}. {remedy}") from error
                    self.remarks.append(f"{self.path}: the last line, {number}, is cut off and left out")
                    return
                yield request

    def _note(self, request: Request) -> None:
        shape = (request.tokens_per_block, request.block_bytes)
        known = self._shapes.setdefault(request.fingerprint, shape)
        if shape != known:
            raise ValueError(
                f"fingerprint {request.fingerprint} has blocks of {shape[0]} tokens and {shape[1]} bytes here, "
                f"of {known[0]} tokens and {known[1]} bytes before"
            )
        if len(self._shapes) > FINGERPRINTS_MAX:
            raise ValueError(f"more than {FINGERPRINTS_MAX} fingerprints; split the trace by time")
        self._disorder_count += request.seconds < self._latest_seconds - DISORDER_SECONDS_MAX
        self._latest_seconds = max(self._latest_seconds, request.seconds)


def merge(traces: Iterable[Iterable[Request]]) -> Iterator[Request]:
    """Yield the requests of several traces by time, as one pool that all of them share saw them."""
    return heapq.merge(*traces, key=attrgetter("seconds"))


def parse_request(line: bytes) -> Request:
    """Return the request that a line describes.

    Raises:
        ValueError: none; the message says what is wrong.
    """
    if len(line) > LINE_SIZE_BYTES_MAX:
        raise ValueError(f"longer than {LINE_SIZE_BYTES_MAX} bytes")
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    return Request(
        seconds=_seconds(fields),
        fingerprint=_fingerprint(fields),
        tokens_per_block=_count(fields, "tokens_per_block"),
        block_bytes=_count(fields, "block_bytes"),
        blocks=_blocks(fields),
    )


def _seconds(fields: dict[str, Any]) -> float:
    value = fields.get("seconds")
    # The bound keeps nanoseconds in 64 bits.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**33:
        raise ValueError('"seconds" is no Unix time')
    return float(value)


def _fingerprint(fields: dict[str, Any]) -> str:
    value = fields.get("fingerprint")
    if not isinstance(value, str) or not FINGERPRINT_DIRECTORY.fullmatch(value):
        raise ValueError('"fingerprint" is not the first 12 hexadecimal digits of one')
    return value


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise ValueError(f'"{name}" is no positive number')
    return value


def _blocks(fields: dict[str, Any]) -> list[int]:
    values = fields.get("blocks")
    if not isinstance(values, list):
        raise ValueError('"blocks" is no list')
    try:
        return [int(value, 16) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError('"blocks" holds something that is no hexadecimal text') from error
