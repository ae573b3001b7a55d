"""Block files as a worker sees them: where they are, and what a read must prove.

Everything here is part of reactor tasks. Whose files they are is the scheduler's decision (`Target`).
"""

import os
from dataclasses import dataclass

from pykvcache_connector.vllm_api import split_offload_key
from pykvcache_connector.worker.outcomes import Outcomes
from pykvcache_contract.errors import CorruptBlockError, TransientError
from pykvcache_contract.header import BlockHeader
from pykvcache_contract.keys import BlockKey, Fingerprint
from pykvcache_contract.paths import block_path, quarantine_path
from pykvcache_storage.block import FileAccess, quarantine, read_block
from pykvcache_storage.memory import Slot
from pykvcache_storage.reactor.operations import Task


@dataclass(frozen=True, slots=True)
class Target:
    """Whose files a worker reads and writes now."""

    generation: int
    fingerprint: Fingerprint


class BlockFiles:
    """The files of one rank in one pool directory.

    Args:
        file_rank: whose files.
        verify_payload: compare checksums of payloads, not only headers.
    """

    def __init__(
        self, directory: str, *, file_rank: int, access: FileAccess, verify_payload: bool, outcomes: Outcomes
    ) -> None:
        self._directory = directory
        self._file_rank = file_rank
        self._access = access
        self.verify_payload = verify_payload
        self._outcomes = outcomes

    def key(self, offload_key: bytes, target: Target) -> BlockKey:
        """Return the key of the file of one of vLLM's keys."""
        block_hash, group = split_offload_key(offload_key)
        return BlockKey(target.fingerprint, block_hash, group, self._file_rank)

    def path(self, key: BlockKey) -> str:
        """Return where a block's file is."""
        return os.path.join(self._directory, block_path(key))

    def read(self, key: BlockKey, slot: Slot) -> Task[BlockHeader]:
        """Read a block file into a slot of its size and check its header."""
        return read_block(self.path(key), key=key, slot=slot, access=self._access)

    def check(self, key: BlockKey, header: BlockHeader, checksum: int | Exception) -> None:
        """Raise unless the payload's checksum is the header's.

        Args:
            checksum: what the copier gave: a checksum or an exception.

        Raises:
            CorruptBlockError: it is not.
            TransientError: it could not be computed.
        """
        if isinstance(checksum, Exception):
            raise TransientError(f"copy of {self.path(key)}: {checksum}") from checksum
        if self.verify_payload and checksum != header.checksum:
            raise CorruptBlockError(
                f"{self.path(key)}: the payload's checksum is {checksum:016x}, expected {header.checksum:016x}"
            )

    def set_aside(self, key: BlockKey, offload_key: bytes, generation: int, error: CorruptBlockError) -> Task[None]:
        """Move a damaged file to quarantine and note it."""
        target = os.path.join(self._directory, quarantine_path(key))
        outcome = yield from quarantine(self.path(key), target)
        self._outcomes.quarantined(offload_key, generation, outcome, why=str(error))
