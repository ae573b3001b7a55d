"""Identity of an offloaded block: fingerprint, block hash, group, rank.

Two processes may share a file only if their keys are equal. The fingerprint covers everything that changes the bytes
of a block; the block hash (vLLM's, chained over the whole prefix) covers the tokens.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import NewType

Fingerprint = NewType("Fingerprint", str)
"""64 lower-case hexadecimal digits: SHA-256 of the canonical JSON of everything that changes the bytes."""

FINGERPRINT_DIRECTORY_LENGTH = 12
MAX_BLOCK_HASH_LENGTH = 64


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Names one offloaded block of one rank.

    Args:
        block_hash: vLLM's hash at the end of the block, 1 to 64 bytes.
        group: index of the KV-cache group, 0 for models with one group.
        rank: which worker's bytes, 0 ≤ rank < world size.
    """

    fingerprint: Fingerprint
    block_hash: bytes
    group: int
    rank: int

    def __post_init__(self) -> None:
        if not 1 <= len(self.block_hash) <= MAX_BLOCK_HASH_LENGTH:
            raise ValueError(f"a block hash has 1 to {MAX_BLOCK_HASH_LENGTH} bytes, not {len(self.block_hash)}")
        if self.group < 0 or self.rank < 0:
            raise ValueError("group and rank are zero or more")


def fingerprint_of(identity: dict[str, object]) -> Fingerprint:
    """Return the fingerprint of a JSON-serialisable description; key order does not matter.

    >>> fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest())
