"""Block files for benches: by the million without content (4 KiB of disk and two inodes each), or few and good ones.

The fan-out gives nearly every block a folder of its own, so folders, not files, decide how long making and scanning
takes: a million files take minutes to make.
"""

import os
import random
import time

from pykvcache_contract.header import HEADER_SIZE_BYTES, BlockHeader, encode_header
from pykvcache_contract.keys import BlockKey, Fingerprint
from pykvcache_contract.paths import block_path
from pykvcache_storage.checksum import checksum

PAYLOAD_SIZE_BYTES = 28 << 20
"""A block of 256 tokens of a model with 3 · 10⁹ parameters."""
FILE_SIZE_BYTES = HEADER_SIZE_BYTES + PAYLOAD_SIZE_BYTES
HASH_SIZE_BYTES = 32


def make_blocks(
    pool: str, fingerprint: Fingerprint, count: int, *, size_bytes: int = FILE_SIZE_BYTES, days: float = 0.0
) -> float:
    """Make files named like blocks with random hashes, equal in every run; return the seconds it took.

    Args:
        days: spread the last uses evenly at random over so many days before now; 0 leaves the files new.
    """
    source, started, now = random.Random(3), time.perf_counter(), time.time()
    for _ in range(count):
        path = os.path.join(pool, block_path(BlockKey(fingerprint, source.randbytes(HASH_SIZE_BYTES), 0, 0)))
        make_file(path, size_bytes)
        if days:
            used = now - source.random() * days * 86_400
            os.utime(path, (used, used))
    return time.perf_counter() - started


def write_block(
    pool: str, fingerprint: Fingerprint, source: random.Random, *, size_bytes: int, used_seconds: float
) -> None:
    """Write a good block with random hash and payload, last used at a Unix time.

    Args:
        size_bytes: of the file, header included; a multiple of 4096.
    """
    payload = source.randbytes(size_bytes - HEADER_SIZE_BYTES)
    key = BlockKey(fingerprint, source.randbytes(HASH_SIZE_BYTES), 0, 0)
    path = os.path.join(pool, block_path(key))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(encode_header(BlockHeader(key, len(payload), len(payload), checksum(payload))))
        file.write(payload)
    os.utime(path, (used_seconds, used_seconds))


def make_file(path: str, size_bytes: int) -> None:
    """Make a file without content and its folders."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        _make_folder(os.path.dirname(path))
        descriptor = os.open(path, flags)
    os.ftruncate(descriptor, size_bytes)
    os.close(descriptor)


def _make_folder(path: str) -> None:
    """Make a folder; nearly always its parent exists, and asking a million times takes long."""
    try:
        os.mkdir(path)
    except FileNotFoundError:
        os.makedirs(path)
