"""What the manager wants of a pool's worker, and what all workers share: values only."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pykvcache_contract.api.node import Disk, Profile
from pykvcache_contract.api.pool import KVCachePool
from pykvcache_sidecar.node.memory import Memory
from pykvcache_sidecar.node.settings import NodeSettings


class Aim(Enum):
    """What is to become of a pool on this node."""

    KEEP = "keep"
    LEAVE = "leave"
    """It does not belong here any more: nobody cares for it once no pod mounts it, and its files stay."""
    ERASE = "erase"
    """It is deleted: erased, or left as it is if it is to be retained, once no pod mounts it."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the manager wants.

    Args:
        pool: as the API server told it last; None for a tree whose object nobody has seen.
        force: erase it although pods mount it.
        profile: what was measured, for the connectors.
        namespaces: that get their directory before anybody asks, because no CSI driver will.
    """

    aim: Aim
    pool: KVCachePool | None = None
    force: bool = False
    profile: Profile | None = None
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers of a node share.

    Args:
        disks: returns those found last; never blocks.
        held: mount point and bytes of every pool that is cared for, by uid; each worker changes its own entry.
    """

    settings: NodeSettings
    memory: Memory
    disks: Callable[[], Sequence[Disk]]
    monotonic: Callable[[], float] = time.monotonic
    held: dict[str, tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One pool directory of a pool.

    Args:
        namespace: empty for the directory of all, or of the operator.
    """

    namespace: str = ""
    is_calibration: bool = False
