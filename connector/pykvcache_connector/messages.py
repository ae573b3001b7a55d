"""What the scheduler's process and the workers' processes send each other. Pickled by vLLM; plain data only."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pykvcache_connector.vllm_api import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    LoadStoreSpec,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    extend,
)
from pykvcache_contract.keys import Fingerprint

KeyT = TypeVar("KeyT")
POOL_FULL = "pool_full"
UNAVAILABLE = "unavailable"
_FULL_REASONS = ("", POOL_FULL, UNAVAILABLE)
"""Of two ranks' reasons the later one counts: a larger capacity is no remedy for a disk that is away."""


@dataclass(frozen=True, slots=True)
class StoreNotes:
    """What the scheduler knows of blocks that are to be stored, in their order.

    Args:
        recencies_ns: modification times that their files get.
        repeated: whether at least two requests wanted the block.
    """

    recencies_ns: list[int]
    repeated: list[bool]


class BlockKeysSpec(LoadStoreSpec):
    """The disk side of a transfer: which offloaded blocks, in the order of their GPU blocks.

    Args:
        keys: vLLM's offload keys (block hash and group).
        notes: of a store; None for a load.
    """

    def __init__(self, keys: list[bytes], notes: StoreNotes | None = None) -> None:
        self.keys = keys
        self.notes = notes

    @staticmethod
    def medium() -> str:
        """Return vLLM's name of the medium; it becomes a metric label on 0.22."""
        return "DISK"


@dataclass(frozen=True)
class WorkerHello(KVConnectorHandshakeMetadata):
    """What a worker tells once at start.

    Args:
        layout: everything about its KV cache that changes the bytes of a block.
        block_sizes_bytes: size of its block files, by KV-cache group.
        unavailable: why the worker cannot use the pool, or None.
        staged_max: most blocks that may be staged at once in two-phase loads.
    """

    rank: int
    layout: dict[str, Any]
    block_sizes_bytes: dict[int, int]
    unavailable: str | None
    staged_max: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """Where blocks live now, decided by the scheduler: one fingerprint per rank and what it stands for.

    Args:
        generation: grows when the prefix cache is reset; reports of an older one are void.
    """

    generation: int
    fingerprints: tuple[Fingerprint, ...]
    descriptions: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class StagingOrders:
    """Which blocks workers must read and keep, and which to let go: the first phase of two-phase loads.

    Args:
        number: grows with every message, because vLLM hands one message to a worker more than once.
        stage: offload keys by ticket; a ticket stands for one reading of a block. One that is known is held longer.
        release: tickets.
    """

    number: int
    stage: dict[int, bytes]
    release: tuple[int, ...]


@dataclass
class ConnectorMetadata(OffloadingConnectorMetadata):
    """Scheduler → workers, every step. Without an identity the cache is off."""

    identity: Identity | None = None
    staging: StagingOrders | None = None


@dataclass
class OffMetadata(KVConnectorMetadata):
    """Scheduler → workers, every step, where the scheduler's half could not even start: there is nothing to do."""


@dataclass
class WorkerReport:
    """What became of blocks since the last report, all of one generation.

    Args:
        stored: offload key → number of ranks whose file is now published.
        dropped: offload keys that some rank did not store.
        lost: offload keys whose file is gone on some rank (missing, or damaged and quarantined).
        unreadable: offload keys whose file is there but could not be read.
        full_reason: why stores are refused now: `POOL_FULL` (at capacity, or it cannot be written), `UNAVAILABLE`
            (its disk is away); empty if they are not.
        is_stalled: True in every step in which reads or writes are overdue, so that new loads would only queue behind
            them; False once that is over; None: no news.
        staged: ticket → number of ranks on which the block is verified and waits in its slot.
        has_write_budget: whether the pool limits what is written a day; None: no news.
        is_over_budget: a block that was wanted once was not stored, because the budget does not reach.
        is_budget_spent: the same for a block that was wanted twice: the whole day's budget is used up.
    """

    generation: int = 0
    stored: dict[bytes, int] = field(default_factory=dict)
    dropped: set[bytes] = field(default_factory=set)
    lost: set[bytes] = field(default_factory=set)
    unreadable: set[bytes] = field(default_factory=set)
    full_reason: str = ""
    is_stalled: bool | None = None
    staged: dict[int, int] = field(default_factory=dict)
    has_write_budget: bool | None = None
    is_over_budget: bool = False
    is_budget_spent: bool = False

    def merge(self, other: "WorkerReport") -> "WorkerReport":
        """Return the report of both ranks; an older generation's is void."""
        if self.generation != other.generation:
            return max(self, other, key=lambda report: report.generation)
        return WorkerReport(
            self.generation,
            _add(self.stored, other.stored),
            self.dropped | other.dropped,
            self.lost | other.lost,
            self.unreadable | other.unreadable,
            max(self.full_reason, other.full_reason, key=_FULL_REASONS.index),
            _worse(self.is_stalled, other.is_stalled),
            _add(self.staged, other.staged),
            _worse(self.has_write_budget, other.has_write_budget),
            self.is_over_budget or other.is_over_budget,
            self.is_budget_spent or other.is_budget_spent,
        )


def _worse(one: bool | None, other: bool | None) -> bool | None:
    """Return True if either is, else False if either is."""
    return one or other or (False if False in (one, other) else None)


def _add(one: dict[KeyT, int], other: dict[KeyT, int]) -> dict[KeyT, int]:
    result = dict(one)
    for key, count in other.items():
        result[key] = result.get(key, 0) + count
    return result


@dataclass
class WorkerMetadata(OffloadingWorkerMetadata):
    """Workers → scheduler: vLLM's finished jobs and our report, if there is news."""

    report: WorkerReport | None = None

    def aggregate(self, other: Any) -> "WorkerMetadata":
        """Return the metadata of both workers; `other` may be vLLM's own class, without a report."""
        reports = [report for report in (self.report, getattr(other, "report", None)) if report is not None]
        report = reports[0].merge(reports[1]) if len(reports) == 2 else (reports[0] if reports else None)
        result: WorkerMetadata = extend(WorkerMetadata, super().aggregate(other), report=report)
        return result
