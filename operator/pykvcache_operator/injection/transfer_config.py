"""vLLM's kv-transfer-config as injection writes it."""

from dataclasses import dataclass

from pykvcache_contract.names import LIBRARY_PATH, POOL_PATH


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """What vLLM's container is told about its pool.

    Args:
        staging_bytes: host memory of each worker between disk and GPU.
        block_tokens: of one stored block; the connector rounds it up to vLLM's own.
        create_pool: whether vLLM may make a pool of an empty directory: where a sidecar cares for it, or nobody.
        pool_path: where the pool is mounted in the container.
        library_path: where the library is mounted; empty: the image has it, and PYTHONPATH stays as it is.
    """

    staging_bytes: int
    block_tokens: int
    create_pool: bool
    pool_path: str = POOL_PATH
    library_path: str = LIBRARY_PATH
