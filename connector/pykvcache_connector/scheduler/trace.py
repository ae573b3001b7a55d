"""The access trace: which blocks each request asked for, one JSON line a request, for `pykvcache-sidecar simulate`.

    {"seconds": 1790000000.1, "fingerprint": "0123456789ab", "tokens_per_block": 256, "block_bytes": 29360128,
     "blocks": ["0123456789abcdef", ...]}

Hashes only, never tokens. Several engines may append to one file. An error, or a file that has reached its limit, ends
the trace with one line in the log; nothing else depends on it. One thread of its own (`uses.py`); may block.
"""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from pykvcache_connector.vllm_api import split_offload_key
from pykvcache_contract.keys import FINGERPRINT_DIRECTORY_LENGTH, Fingerprint

logger = logging.getLogger(__name__)

FILE_SIZE_MAX_BYTES = 1 << 30
BUFFER_SIZE_BYTES = 64 << 10
"""Lines that wait for a write while requests come without a pause."""
HASH_LENGTH_BYTES = 8
"""Of a block's hash; a million blocks then have two alike once in 37 million traces."""
_OPEN_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Traced:
    """What is equal in all lines of one generation.

    Args:
        group: the KV-cache group whose blocks are listed.
        block_bytes: of one block's files, all ranks together, and of those of the other groups for the same tokens.
    """

    fingerprint: Fingerprint
    group: int
    tokens_per_block: int
    block_bytes: int


class Trace:
    """Appends to one file; the first line creates it."""

    def __init__(self, path: str, *, size_max_bytes: int = FILE_SIZE_MAX_BYTES) -> None:
        self._path = path
        self._size_max_bytes = size_max_bytes
        self._descriptor = -1
        self._lines: list[bytes] = []
        self._buffered = 0
        self.is_off = False

    def add(self, traced: Traced, *, seconds: float, keys: Sequence[bytes]) -> None:
        """Add a request's line; it is on the disk after `flush`, or when the buffer is full."""
        if self.is_off:
            return
        line = _line(traced, seconds, keys)
        self._lines.append(line)
        self._buffered += len(line)
        if self._buffered >= BUFFER_SIZE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered, in whole lines."""
        if not self._lines or self.is_off:
            return
        data = b"".join(self._lines)
        self._lines, self._buffered = [], 0
        try:
            self._write(data)
        except OSError as error:
            self._stop(f"{error.strerror}. Choose another file, or free some space")

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self.flush()
        self._close()

    def _write(self, data: bytes) -> None:
        if self._descriptor < 0:
            self._descriptor = os.open(self._path, _OPEN_FLAGS, 0o644)
        if os.fstat(self._descriptor).st_size + len(data) > self._size_max_bytes:
            self._stop(f"it has reached {self._size_max_bytes} bytes. Move it away and restart to go on")
            return
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _stop(self, reason: str) -> None:
        self.is_off = True
        logger.warning("the access trace %s ends here: %s", self._path, reason)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _line(traced: Traced, seconds: float, keys: Sequence[bytes]) -> bytes:
    split = map(split_offload_key, keys)
    record = {
        "seconds": seconds,
        "fingerprint": traced.fingerprint[:FINGERPRINT_DIRECTORY_LENGTH],
        "tokens_per_block": traced.tokens_per_block,
        "block_bytes": traced.block_bytes,
        "blocks": [block_hash[:HASH_LENGTH_BYTES].hex() for block_hash, group in split if group == traced.group],
    }
    return json.dumps(record).encode() + b"\n"
