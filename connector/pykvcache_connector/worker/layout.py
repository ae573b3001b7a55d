"""How the pages of one offloaded block lie in a payload: per KV tensor, the pages of its GPU blocks back to back."""

from collections.abc import Sequence
from dataclasses import dataclass

from pykvcache_contract.header import HEADER_SIZE_BYTES
from pykvcache_contract.units import round_up


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Sizes of one offloaded block.

    Args:
        page_sizes_bytes: used bytes of one GPU block in each KV tensor, in vLLM's order.
        blocks: GPU blocks of one offloaded block.
    """

    page_sizes_bytes: tuple[int, ...]
    blocks: int

    @property
    def used_size_bytes(self) -> int:
        """Return the bytes of KV in a payload."""
        return self.blocks * sum(self.page_sizes_bytes)

    @property
    def payload_size_bytes(self) -> int:
        """Return the size of the payload, a multiple of 4096."""
        return round_up(self.used_size_bytes)

    @property
    def file_size_bytes(self) -> int:
        """Return the size of a block file; a staging slot is as long as the largest group's."""
        return HEADER_SIZE_BYTES + self.payload_size_bytes

    def check_whole(self, row_count: int) -> None:
        """Refuse to store a part of an offloaded block.

        Raises:
            ValueError: fewer pages than a block has; the rest of the payload would be another block's bytes.
        """
        if row_count != self.blocks:
            raise ValueError(f"{row_count} GPU blocks are no whole offloaded block of {self.blocks}")

    def segments(self) -> list[tuple[int, int]]:
        """Return (offset in the payload, page size) of each KV tensor's pages."""
        result, offset = [], 0
        for page_size in self.page_sizes_bytes:
            result.append((offset, page_size))
            offset += self.blocks * page_size
        return result


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Which rows of the KV tensors one offloaded block covers.

    Args:
        rows: GPU block numbers, in token order.
        first_page: index within the offloaded block of the first of them; > 0 where vLLM already has the front.
    """

    rows: tuple[int, ...]
    first_page: int


def split_rows(rows: Sequence[int], *, key_count: int, first_block: int, blocks: int) -> list[BlockRows]:
    """Return which rows belong to each of `key_count` consecutive offloaded blocks.

    Args:
        rows: GPU block numbers of a transfer, in token order.
        first_block: position of rows[0] in the request, in GPU blocks.
        blocks: GPU blocks of one offloaded block.

    >>> split_rows([7, 8, 9], key_count=2, first_block=3, blocks=2)
    [BlockRows(rows=(7,), first_page=1), BlockRows(rows=(8, 9), first_page=0)]
    """
    result, start, page = [], 0, first_block % blocks
    for _ in range(key_count):
        end = min(start + blocks - page, len(rows))
        result.append(BlockRows(tuple(int(row) for row in rows[start:end]), page))
        start, page = end, 0
    if start != len(rows):
        raise ValueError(f"{len(rows)} GPU blocks do not fit {key_count} offloaded blocks of {blocks}")
    return result


def whole_blocks(rows: Sequence[int], *, key_count: int, first_block: int, blocks: int) -> list[BlockRows | None]:
    """Return the rows of each offloaded block that can be stored, None for one that is not whole on the GPU.

    vLLM frees GPU blocks that a sliding window has left behind and leaves them out, so the first offloaded block may
    lack its front. Where more are missing nobody knows which, and none is stored.

    Args: as for `split_rows`.

    >>> whole_blocks([7, 8, 9], key_count=2, first_block=3, blocks=2)
    [None, BlockRows(rows=(8, 9), first_page=0)]
    >>> whole_blocks([7, 8, 9], key_count=2, first_block=4, blocks=2)
    [None, None]
    """
    if first_block % blocks + len(rows) != key_count * blocks:
        return [None] * key_count
    parts = split_rows(rows, key_count=key_count, first_block=first_block, blocks=blocks)
    return [part if len(part.rows) == blocks else None for part in parts]
