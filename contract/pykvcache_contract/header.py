"""The first 4096 bytes of a block file (format v1, docs/format.md).

Little-endian, fixed offsets:

    0   8   magic "PYKVBLK\\0"
    8   4   format version (1)
    12  4   group
    16  8   payload length in bytes: a multiple of 4096
    24  8   payload checksum
    32  4   rank
    36  4   length of the block hash in bytes
    40  32  fingerprint (SHA-256)
    72  64  block hash, zero padded
    136 8   bytes of KV in the payload; the rest of the payload is zero
    144     zeros up to 4092
    4092 4  CRC-32 of bytes 0 … 4091

The payload checksum is computed by whoever holds the payload (GPU, CPU or scrubber); see docs/format.md.
"""

import struct
import zlib
from dataclasses import dataclass

from pykvcache_contract.errors import CorruptBlockError
from pykvcache_contract.keys import BlockKey, Fingerprint
from pykvcache_contract.paths import FORMAT_VERSION
from pykvcache_contract.units import SECTOR_SIZE_BYTES

HEADER_SIZE_BYTES = SECTOR_SIZE_BYTES
MAGIC = b"PYKVBLK\0"
_FIELDS = struct.Struct("<8sIIQQII32s64sQ")
_CRC = struct.Struct("<I")
_CRC_OFFSET = HEADER_SIZE_BYTES - _CRC.size


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a block file says about itself.

    Args:
        payload_size_bytes: length of the payload area, a multiple of 4096.
        used_size_bytes: how many bytes of it are KV, ≤ payload_size_bytes; the rest is zero.
        checksum: 64-bit payload checksum, unsigned.
    """

    key: BlockKey
    payload_size_bytes: int
    used_size_bytes: int
    checksum: int


def encode_header(header: BlockHeader) -> bytes:
    """Return the 4096 bytes that precede the payload."""
    key = header.key
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        key.group,
        header.payload_size_bytes,
        header.checksum,
        key.rank,
        len(key.block_hash),
        bytes.fromhex(key.fingerprint),
        key.block_hash,
        header.used_size_bytes,
    )
    body = fields.ljust(_CRC_OFFSET, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def decode_header(data: bytes | memoryview) -> BlockHeader:
    """Return the header in the first 4096 bytes of `data`.

    Raises:
        CorruptBlockError: too short, wrong magic, version, CRC or field; the message names which.
    """
    if len(data) < HEADER_SIZE_BYTES:
        raise CorruptBlockError(f"the header is cut off after {len(data)} of {HEADER_SIZE_BYTES} bytes")
    body = bytes(data[:_CRC_OFFSET])
    if body[:8] != MAGIC:
        raise CorruptBlockError("not a block file: the magic number is wrong")
    if _CRC.unpack(bytes(data[_CRC_OFFSET:HEADER_SIZE_BYTES]))[0] != zlib.crc32(body):
        raise CorruptBlockError("the header's CRC does not match")
    _, version, group, payload, checksum, rank, hash_length, fingerprint, block_hash, used = _FIELDS.unpack_from(body)
    if version != FORMAT_VERSION:
        raise CorruptBlockError(f"format version {version}, this program reads {FORMAT_VERSION}")
    if not 1 <= hash_length <= len(block_hash) or used > payload or payload % SECTOR_SIZE_BYTES:
        raise CorruptBlockError("a length in the header is impossible")
    key = BlockKey(Fingerprint(fingerprint.hex()), block_hash[:hash_length], group, rank)
    return BlockHeader(key, payload_size_bytes=payload, used_size_bytes=used, checksum=checksum)


def check_header(data: bytes | memoryview, *, key: BlockKey, payload_size_bytes: int) -> BlockHeader:
    """Return the header if it is intact and describes exactly the block that was asked for.

    Raises:
        CorruptBlockError: damaged, or another block's (wrong key or length).
    """
    header = decode_header(data)
    if header.key != key:
        raise CorruptBlockError(f"the file holds another block: {header.key.block_hash.hex()}")
    if header.payload_size_bytes != payload_size_bytes:
        raise CorruptBlockError(f"payload of {header.payload_size_bytes} bytes, expected {payload_size_bytes}")
    return header
