"""Proving a block file good or bad, as scrubbers and `pykvcache inspect --verify` do.

Reads with plain system calls in pieces of one MiB, through the page cache and out of it again: loads use direct I/O
and lose nothing. What it raises says what the caller may do: only `CorruptBlockError` proves a file bad.
"""

import errno
import os
import stat

from pykvcache_contract.errors import BlockMissingError, CorruptBlockError, TransientError
from pykvcache_contract.header import HEADER_SIZE_BYTES, BlockHeader, check_header
from pykvcache_contract.keys import BlockKey
from pykvcache_contract.units import SECTOR_SIZE_BYTES
from pykvcache_storage.checksum import CHECKSUM_MASK, checksum

PIECE_SIZE_BYTES = 1 << 20
_OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def verify_block(path: str, key: BlockKey) -> None:
    """Check header, length, key and payload checksum of one block file.

    Raises:
        CorruptBlockError: proved bad; the message names the file and what is wrong.
        BlockMissingError: no such file.
        TransientError: it could not be read, which proves nothing.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
        try:
            _verify(descriptor, key)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    except CorruptBlockError as error:
        raise CorruptBlockError(f"{path}: {error}") from error
    except FileNotFoundError as error:
        raise BlockMissingError(f"verify {path}: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CorruptBlockError(f"{path}: a symbolic link, not a block file") from error
        raise TransientError(f"verify {path}: {error.strerror}") from error


def _verify(descriptor: int, key: BlockKey) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise CorruptBlockError("not a regular file")
    payload_size_bytes = status.st_size - HEADER_SIZE_BYTES
    if payload_size_bytes < 0 or payload_size_bytes % SECTOR_SIZE_BYTES:
        raise CorruptBlockError(f"{status.st_size} bytes long, no block file has that length")
    header = check_header(os.pread(descriptor, HEADER_SIZE_BYTES, 0), key=key, payload_size_bytes=payload_size_bytes)
    found = _payload_checksum(descriptor, header)
    if found != header.checksum:
        raise CorruptBlockError(f"the payload's checksum is {found:016x}, the header says {header.checksum:016x}")


def _payload_checksum(descriptor: int, header: BlockHeader) -> int:
    buffer = bytearray(min(PIECE_SIZE_BYTES, header.payload_size_bytes))
    total = done = 0
    while done < header.payload_size_bytes:
        piece = memoryview(buffer)[: header.payload_size_bytes - done]
        _read_exactly(descriptor, piece, HEADER_SIZE_BYTES + done)
        total += checksum(piece, first_row=done // SECTOR_SIZE_BYTES)
        done += len(piece)
    return total & CHECKSUM_MASK


def _read_exactly(descriptor: int, piece: memoryview, offset: int) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(descriptor, [piece[done:]], offset + done)
        if count == 0:
            raise CorruptBlockError(f"the file ends after {offset + done} bytes")
        done += count
