"""Which block leaves first: every policy gives a block one number, and the lowest leaves first.

Facts: a block's modification time says when its prefix was last wanted and how deep the block lies in it (contract:
recency.py); a block of a large model took longer to compute, per byte, than one of a small model. What they mean:
within one fingerprint the modification time alone is the right order, tail before head, and a policy may only choose
between fingerprints. Therefore every policy keeps, within one fingerprint, the order of `Lru`.

A policy belongs to one scan: the moment it compares with is fixed, else a file seen late in a scan of half a minute
would look older than one seen early. Make a new one for every scan.

Pure arithmetic; touches no disk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pykvcache_contract.errors import ConfigurationError

POLICY_NAMES = ("lru", "cost")
DEFAULT_POLICY = "lru"
"""Chosen by simulation, docs/benchmarks.md: Eviction policies."""


@dataclass(frozen=True, slots=True)
class BlockUse:
    """What a policy may know of a block file.

    Args:
        fingerprint_directory: the folder it lies in, the fingerprint's first 12 digits.
        modified_ns: its modification time in Unix nanoseconds.
        size_bytes: length of the file.
    """

    fingerprint_directory: str
    modified_ns: int
    size_bytes: int


class Policy(Protocol):
    """Orders blocks for eviction."""

    def rank(self, use: BlockUse) -> float:
        """Return a number to sort by; the lowest leaves first. Within one fingerprint it never falls with the time."""
        ...


@dataclass(frozen=True, slots=True)
class Lru:
    """The least recently wanted block leaves first, whatever model it is of."""

    def rank(self, use: BlockUse) -> float:
        """Return the modification time; a float tells times 256 ns apart, and neighbours in a prefix differ by 1000."""
        return float(use.modified_ns)


@dataclass(frozen=True, slots=True)
class CostAware:
    """The block that has been idle longest for what it costs leaves first: idle time divided by cost.

    Of two blocks idle for equally long the cheaper one leaves first; one of twice the cost stays twice as long.

    Args:
        costs: relative seconds of recomputation per byte, by fingerprint folder, all above zero; 1.0 where unknown
            (costs.py).
        now_ns: the moment of the scan in Unix nanoseconds.
    """

    costs: Mapping[str, float]
    now_ns: int

    def rank(self, use: BlockUse) -> float:
        """Return minus the idle time, in nanoseconds, divided by the cost."""
        return (use.modified_ns - self.now_ns) / self.costs.get(use.fingerprint_directory, 1.0)


def make_policy(name: str, costs: Mapping[str, float], *, now_ns: int) -> Policy:
    """Return the policy of this name, for one scan.

    Args:
        name: one of `POLICY_NAMES`.
        costs: from `costs.read_costs`; empty means that all blocks cost the same.
        now_ns: the moment of the scan in Unix nanoseconds.

    Raises:
        ConfigurationError: no such policy.
    """
    if name == "lru":
        return Lru()
    if name == "cost":
        return CostAware(costs, now_ns)
    raise ConfigurationError(f"eviction policy {name!r} is unknown; choose one of: {', '.join(POLICY_NAMES)}")
