"""Block files for tests of those who read, count and evict them, published as the connector publishes: at once.

A file that grows under its own name is no block: whoever scrubs the pool meanwhile quarantines it.
"""

import os
import time
from pathlib import Path

from pykvcache_contract.header import BlockHeader, encode_header
from pykvcache_contract.keys import BlockKey
from pykvcache_contract.paths import block_path
from pykvcache_storage.checksum import checksum


def block_content(key: BlockKey, payload: bytes) -> bytes:
    """Return header and payload of one good block."""
    return encode_header(BlockHeader(key, len(payload), len(payload), checksum(payload))) + payload


def publish(directory: Path, key: BlockKey, payload: bytes, *, used_ns: int | None = None) -> Path:
    """Publish one good block in a pool's directory, last used at that time (now by default); return its path."""
    path = directory / block_path(key)
    used = time.time_ns() if used_ns is None else used_ns
    temporary = directory / f".{path.name}"  # not among those of real writers, where the sweeper would miss its writer
    temporary.write_bytes(block_content(key, payload))
    os.utime(temporary, ns=(used, used))
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            return temporary.replace(path)
        except FileNotFoundError:
            if not temporary.exists():
                raise
            # Whoever evicts has removed the emptied folder in between.
