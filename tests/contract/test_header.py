"""The block header: format v1 is fixed by golden bytes, and no damage goes unnoticed."""

import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.errors import CorruptBlockError
from pykvcache_contract.header import HEADER_SIZE_BYTES, BlockHeader, check_header, decode_header, encode_header
from pykvcache_contract.keys import BlockKey, Fingerprint

KEY = BlockKey(Fingerprint("0123456789abcdef" * 4), bytes(range(0xA0, 0xC0)), group=3, rank=7)
HEADER = BlockHeader(KEY, payload_size_bytes=0x123000, used_size_bytes=0x122FF8, checksum=0x1122334455667788)

GOLDEN_FIELDS = (
    "50594b56424c4b00"  # magic
    "01000000"  # format version
    "03000000"  # group
    "0030120000000000"  # payload length
    "8877665544332211"  # payload checksum
    "07000000"  # rank
    "20000000"  # length of the block hash
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"  # fingerprint
    "a0a1a2a3a4a5a6a7a8a9aaabacadaeafb0b1b2b3b4b5b6b7b8b9babbbcbdbebf"  # block hash
    "0000000000000000000000000000000000000000000000000000000000000000"  # its padding
    "f82f120000000000"  # bytes of KV
)
GOLDEN_CRC = "1e26168a"
GOLDEN_SHA256 = "9d847481c13c7cef2d51f82a83377ab0fb6081c66ad9cff312f01473e0331ef0"

keys = st.builds(
    BlockKey,
    st.binary(min_size=32, max_size=32).map(lambda data: Fingerprint(data.hex())),
    st.binary(min_size=1, max_size=64),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)


@st.composite
def headers(draw) -> BlockHeader:
    payload = 4096 * draw(st.integers(0, 2**40))
    return BlockHeader(draw(keys), payload, draw(st.integers(0, payload)), draw(st.integers(0, 2**64 - 1)))


def with_crc(body: bytearray) -> bytes:
    """Return 4096 bytes whose CRC is right again."""
    return bytes(body[:4092]) + zlib.crc32(body[:4092]).to_bytes(4, "little")


def test_format_v1_never_drifts():
    data = encode_header(HEADER)
    assert data[:144].hex() == GOLDEN_FIELDS
    assert data[144:4092] == bytes(4092 - 144)
    assert data[4092:].hex() == GOLDEN_CRC
    assert hashlib.sha256(data).hexdigest() == GOLDEN_SHA256
    assert decode_header(bytes.fromhex(GOLDEN_FIELDS).ljust(4092, b"\0") + bytes.fromhex(GOLDEN_CRC)) == HEADER


@given(headers())
def test_what_was_encoded_is_decoded(header):
    data = encode_header(header)
    assert len(data) == HEADER_SIZE_BYTES
    assert decode_header(data) == header
    assert decode_header(memoryview(data + b"payload")) == header
    assert check_header(data, key=header.key, payload_size_bytes=header.payload_size_bytes) == header


def test_every_flipped_bit_is_found():
    data = bytearray(encode_header(HEADER))
    for position in range(HEADER_SIZE_BYTES):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(CorruptBlockError):
                decode_header(data)
            data[position] ^= 1 << bit
    assert decode_header(data) == HEADER


@given(st.binary(max_size=HEADER_SIZE_BYTES + 64))
def test_noise_is_never_a_header(data):
    with pytest.raises(CorruptBlockError):
        decode_header(data)


@pytest.mark.parametrize("size", [0, 8, 143, 4095])
def test_a_header_that_is_cut_off_says_where(size):
    with pytest.raises(CorruptBlockError, match=f"cut off after {size} of 4096"):
        decode_header(encode_header(HEADER)[:size])


@pytest.mark.parametrize(
    ("offset", "value", "words"),
    [
        (0, b"PYKVUSE\0", "magic"),
        (8, b"\x02\0\0\0", "format version 2, this program reads 1"),
        (16, b"\x01\0\0\0\0\0\0\0", "length"),
        (36, b"\0\0\0\0", "length"),
        (36, b"\x41\0\0\0", "length"),
        (136, b"\x01\x30\x12\0\0\0\0\0", "length"),
    ],
    ids=["magic", "version", "odd payload", "no hash", "hash too long", "more used than there is"],
)
def test_a_field_that_is_wrong_is_named_even_with_a_right_crc(offset, value, words):
    body = bytearray(encode_header(HEADER))
    body[offset : offset + len(value)] = value
    with pytest.raises(CorruptBlockError, match=words):
        decode_header(with_crc(body))


@pytest.mark.parametrize(
    "other",
    [
        BlockKey(Fingerprint("f" * 64), KEY.block_hash, 3, 7),
        BlockKey(KEY.fingerprint, KEY.block_hash[:-1], 3, 7),
        BlockKey(KEY.fingerprint, KEY.block_hash, 2, 7),
        BlockKey(KEY.fingerprint, KEY.block_hash, 3, 6),
    ],
    ids=["fingerprint", "hash", "group", "rank"],
)
def test_an_intact_header_of_another_block_is_proved_bad(other):
    with pytest.raises(CorruptBlockError, match="another block"):
        check_header(encode_header(HEADER), key=other, payload_size_bytes=HEADER.payload_size_bytes)


def test_an_intact_header_of_another_length_is_proved_bad():
    with pytest.raises(CorruptBlockError, match="payload of 1191936 bytes, expected 4096"):
        check_header(encode_header(HEADER), key=KEY, payload_size_bytes=4096)
