"""vLLM's worker interface of the offloading connector, old and new, in front of one `Transfer`.

vLLM 0.22 calls `transfer_async`, later releases `submit_store` and `submit_load`; both mean the same. Every job is
reported as a success, because vLLM's worker asserts it; rows that could not be loaded are reported through
`take_failed_rows`.
"""

import itertools
from typing import Any

from pykvcache_connector.messages import BlockKeysSpec
from pykvcache_connector.vllm_api import WorkerBase, split_offload_key, transfer_result
from pykvcache_connector.worker.layout import BlockRows, split_rows, whole_blocks
from pykvcache_connector.worker.transfer import Transfer
from pykvcache_contract.errors import PyKVCacheError

CLOSE_SECONDS = 3.0
"""vLLM kills a worker 4 s after asking it to end; stores that are not published by then are lost, harmlessly."""


class Handler(WorkerBase):
    """One per worker process; called on vLLM's worker thread only.

    Args:
        transfer: None when the cache is off: then loads fail softly and stores are dropped.
        can_recompute: vLLM can be told that a load failed. Where it cannot, blocks are staged before anything is
            promised, and only a copy inside the machine can still fail; rather than go on with wrong KV, that raises.
    """

    def __init__(self, transfer: Transfer | None, *, can_recompute: bool = True) -> None:
        self.transfer = transfer
        self._can_recompute = can_recompute
        self._refused: list[tuple[int, bool]] = []
        self._failed_rows: set[int] = set()

    def transfer_async(self, job_id: int, spec: tuple[Any, Any]) -> bool:
        """Start a job (vLLM 0.22)."""
        source, target = spec
        if isinstance(target, BlockKeysSpec):
            return self.submit_store(job_id, source, target)
        return self.submit_load(job_id, source, target)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: BlockKeysSpec) -> bool:
        """Start storing GPU blocks."""
        self._submit(job_id, spec=dst_spec, gpu=src_spec, is_store=True)
        return True

    def submit_load(self, job_id: int, src_spec: BlockKeysSpec, dst_spec: Any, expedited: bool = False) -> bool:
        """Start loading GPU blocks; all our loads are expedited."""
        self._submit(job_id, spec=src_spec, gpu=dst_spec, is_store=False)
        return True

    def _submit(self, job_id: int, *, spec: BlockKeysSpec, gpu: Any, is_store: bool) -> None:
        if self.transfer is None:
            if not is_store:
                self._failed_rows.update(int(row) for row in gpu.block_ids)
            self._refused.append((job_id, is_store))
            return
        rows = self._rows(spec.keys, gpu, is_store=is_store)
        self.transfer.submit(job_id, is_store=is_store, keys=spec.keys, rows=rows, notes=spec.notes)

    def _rows(self, keys: list[bytes], gpu: Any, *, is_store: bool) -> list[BlockRows | None]:
        """Return the GPU blocks of each key; keys and GPU blocks come group by group, in the same order."""
        assert self.transfer is not None
        split = whole_blocks if is_store else split_rows
        rows, start = gpu.block_ids.tolist(), 0
        result: list[BlockRows | None] = []
        present = [(size, first) for size, first in zip(gpu.group_sizes, gpu.block_indices, strict=True) if size]
        for (group, key_count), (size, first) in zip(_runs(keys), present, strict=True):
            blocks = self.transfer.layouts[group].blocks
            part = rows[start : start + size]
            result += split(part, key_count=key_count, first_block=int(first), blocks=blocks)
            start += size
        return result

    def get_finished(self) -> list[Any]:
        """Return vLLM's records of the jobs that are over."""
        results = [transfer_result(job, size_bytes=0, seconds=0.0, is_store=store) for job, store in self._refused]
        self._refused = []
        for job, seconds in self.transfer.poll() if self.transfer else ():
            if job.failed_rows and not self._can_recompute:
                raise PyKVCacheError(
                    f"GPU blocks {sorted(job.failed_rows)} could not be loaded after they were promised, and vLLM "
                    "cannot recompute them for models with sliding windows; the log has the cause"
                )
            self._failed_rows |= job.failed_rows
            if not job.is_store and self.transfer:
                self.transfer.outcomes.job_ended(seconds)
            results.append(
                transfer_result(job.job_id, size_bytes=job.moved_bytes, seconds=seconds, is_store=job.is_store)
            )
        return results

    def take_failed_rows(self) -> set[int]:
        """Return the GPU blocks of finished loads that must be recomputed, once."""
        rows, self._failed_rows = self._failed_rows, set()
        return rows

    def wait(self, job_ids: set[int]) -> None:
        """Return once these jobs no longer touch GPU memory."""
        if self.transfer is not None:
            self.transfer.wait(job_ids)

    def shutdown(self) -> None:
        """Finish what has begun, within vLLM's grace period."""
        if self.transfer is not None:
            self.transfer.close(CLOSE_SECONDS)


def _runs(keys: list[bytes]) -> list[tuple[int, int]]:
    """Return (group, number of its keys) of keys that come group by group."""
    ends = {split_offload_key(key)[1] for key in (*keys[:1], *keys[-1:])}
    if len(ends) == 1:
        return [(ends.pop(), len(keys))]
    runs = itertools.groupby(keys, lambda key: split_offload_key(key)[1])
    return [(group, sum(1 for _ in run)) for group, run in runs]
