"""Block files that are good, and every way in which one can be bad."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache_contract.errors import BlockMissingError, CorruptBlockError, TransientError
from pykvcache_contract.header import BlockHeader, encode_header
from pykvcache_contract.keys import BlockKey
from pykvcache_storage import verify
from pykvcache_storage.checksum import checksum
from pykvcache_storage.verify import PIECE_SIZE_BYTES, verify_block

PAGE = 4096


def block_bytes(key: BlockKey, payload: bytes) -> bytes:
    header = BlockHeader(key, len(payload), len(payload) - 100 if payload else 0, checksum(payload))
    return encode_header(header) + payload


@pytest.fixture
def key(make_key: Callable[[int], BlockKey]) -> BlockKey:
    return make_key(1)


@pytest.fixture
def block(tmp_path: Path, key: BlockKey) -> Path:
    path = tmp_path / "block.kvb"
    path.write_bytes(block_bytes(key, random.Random(1).randbytes(2 * PIECE_SIZE_BYTES + 3 * PAGE)))
    return path


def damage(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("pages", [0, 1, 255, 256, 257])
def test_a_good_block_of_any_length_passes(tmp_path: Path, key: BlockKey, pages: int) -> None:
    path = tmp_path / "block.kvb"
    path.write_bytes(block_bytes(key, random.Random(pages).randbytes(pages * PAGE)))
    verify_block(str(path), key)


def test_a_good_block_longer_than_one_piece_passes(block: Path, key: BlockKey) -> None:
    verify_block(str(block), key)


@pytest.mark.parametrize("offset", [PAGE, PAGE + PIECE_SIZE_BYTES - 1, PAGE + PIECE_SIZE_BYTES, -1])
def test_a_flipped_bit_in_the_payload_is_found(block: Path, key: BlockKey, offset: int) -> None:
    data = bytearray(block.read_bytes())
    data[offset] ^= 0x10
    block.write_bytes(data)
    with pytest.raises(CorruptBlockError, match=r"block\.kvb: the payload's checksum"):
        verify_block(str(block), key)


def test_two_swapped_pages_are_found(block: Path, key: BlockKey) -> None:
    data = block.read_bytes()
    damage(block, PAGE, data[-PAGE:])
    damage(block, len(data) - PAGE, data[PAGE : 2 * PAGE])
    with pytest.raises(CorruptBlockError, match="checksum"):
        verify_block(str(block), key)


@pytest.mark.parametrize("offset", [0, 8, 12, 24, 40, 72, 4092])
def test_a_damaged_header_is_found(block: Path, key: BlockKey, offset: int) -> None:
    damage(block, offset, b"\xff")
    with pytest.raises(CorruptBlockError):
        verify_block(str(block), key)


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, PIECE_SIZE_BYTES, 2 * PIECE_SIZE_BYTES + 4 * PAGE - 1])
def test_a_file_cut_at_any_length_is_found(block: Path, key: BlockKey, size: int) -> None:
    os.truncate(block, size)
    with pytest.raises(CorruptBlockError):
        verify_block(str(block), key)


def test_a_file_with_excess_bytes_is_found(block: Path, key: BlockKey) -> None:
    os.truncate(block, block.stat().st_size + PAGE)
    with pytest.raises(CorruptBlockError, match="payload of"):
        verify_block(str(block), key)


def test_another_blocks_file_is_found(block: Path, make_key: Callable[[int], BlockKey]) -> None:
    with pytest.raises(CorruptBlockError, match="another block"):
        verify_block(str(block), make_key(2))


def test_a_file_of_zeros_does_not_pass(tmp_path: Path, key: BlockKey) -> None:
    (tmp_path / "zeros").write_bytes(bytes(8 * PAGE))
    with pytest.raises(CorruptBlockError, match="magic"):
        verify_block(str(tmp_path / "zeros"), key)


def test_a_file_that_ends_while_it_is_read_is_bad(block: Path, key: BlockKey, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(
        verify.os, "preadv", lambda fd, buffers, offset: real(fd, buffers, offset + (offset > PAGE) * 2**40)
    )
    with pytest.raises(CorruptBlockError, match="ends after"):
        verify_block(str(block), key)


def test_short_reads_are_continued(block: Path, key: BlockKey, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(verify.os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:99_999]], offset))
    verify_block(str(block), key)


def test_a_missing_file_is_missing_not_bad(tmp_path: Path, key: BlockKey) -> None:
    with pytest.raises(BlockMissingError):
        verify_block(str(tmp_path / "gone"), key)


def test_an_error_of_the_disk_proves_nothing(block: Path, key: BlockKey, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(verify.os, "preadv", fail)
    with pytest.raises(TransientError, match="Input/output error"):
        verify_block(str(block), key)


def test_a_link_a_folder_and_a_pipe_are_no_block_files(tmp_path: Path, block: Path, key: BlockKey) -> None:
    (tmp_path / "link").symlink_to(block)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "folder", "pipe"):
        with pytest.raises(CorruptBlockError):
            verify_block(str(tmp_path / name), key)


@pytest.mark.slow
def test_a_large_block_is_verified_in_bounded_memory(tmp_path: Path, key: BlockKey, start_python: Callable) -> None:
    pages = 64 * 256
    header = BlockHeader(key, pages * PAGE, pages * PAGE, 0)
    path = tmp_path / "large.kvb"
    path.write_bytes(encode_header(header))
    os.truncate(path, PAGE + pages * PAGE)
    code = """
import resource, sys
from pykvcache_contract.keys import BlockKey
from pykvcache_storage.verify import verify_block
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
verify_block(sys.argv[1], BlockKey(sys.argv[2], bytes.fromhex(sys.argv[3]), 0, 0))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    output = start_python(code, path, key.fingerprint, key.block_hash.hex()).communicate()[0]
    assert int(output) * 1024 < 16 * PIECE_SIZE_BYTES
