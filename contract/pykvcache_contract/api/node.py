"""KVCacheNode: what the node agent finds on its node, and what the operator measured there.

An object has no spec. Its status has two owners under server-side apply: `AgentStatus` is what the node agent says,
`OperatorStatus` what the operator says; no field is in both, so neither can undo the other's writes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from pykvcache_contract.api.fields import derive, parse, says
from pykvcache_contract.api.objects import MESSAGE_LENGTH_MAX, Metadata, status_document
from pykvcache_contract.api.pool import DiskType
from pykvcache_contract.names import NODE_KIND
from pykvcache_contract.units import format_size

DISKS_MAX = 128
POOLS_MAX = 256
PROFILES_MAX = 256
"""With all their points 256 profiles take 0.7 MiB of the 1.5 MiB that an object may have."""
POINTS_MAX = 24


class IOUring(Enum):
    """Whether the node's kernel lets the node agent use io_uring; a pod's own seccomp profile may differ."""

    AVAILABLE = "Available"
    BLOCKED_BY_SYSCTL = "BlockedBySysctl"
    BLOCKED_BY_SECCOMP = "BlockedBySeccomp"
    UNSUPPORTED = "Unsupported"


class NodePoolState(Enum):
    """State of a pool on a node."""

    READY = "Ready"
    NOT_READY = "NotReady"
    DELETING = "Deleting"


class ProfileState(Enum):
    """State of a pool's measurement on a node."""

    MEASURED = "Measured"
    FAILED = "Failed"
    RUNNING = "Running"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """One entry of status.disks: a mounted filesystem that could hold a pool."""

    mount_path: str = field(metadata=says("Where it is mounted on the node.", max_length=1024))
    device: str = field(default="", metadata=says("Its block device, such as /dev/nvme0n1."))
    model: str = field(default="", metadata=says("What the disk calls itself."))
    type: DiskType = field(default=DiskType.OTHER, metadata=says("Kind of disk."))
    size_bytes: int = field(default=0, metadata=says("Size of the filesystem.", minimum=0))
    free_bytes: int = field(default=0, metadata=says("Free on the filesystem, rounded to 1 % of its size.", minimum=0))
    filesystem: str = field(default="", metadata=says("Type of the filesystem, such as xfs.", max_length=64))
    filesystem_uuid: str = field(
        default="", metadata=says("Identity of the filesystem.", name="filesystemUUID", max_length=64)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """One entry of status.pools: a pool on this node."""

    name: str = field(metadata=says("Name of the KVCachePool."))
    uid: str = field(metadata=says("Its uid; another pool may have had this name before.", max_length=64))
    state: NodePoolState = field(metadata=says("Whether pods on this node can use the pool."))
    reason: str = field(default="", metadata=says("Why it is not ready, in one word.", max_length=64))
    message: str = field(default="", metadata=says("Why, and what to do.", max_length=MESSAGE_LENGTH_MAX, clipped=True))
    path: str = field(default="", metadata=says("The pool's directory on the node.", max_length=1100))
    capacity_bytes: int = field(default=0, metadata=says("Bytes the pool may take here.", minimum=0))
    used_bytes: int = field(default=0, metadata=says("Bytes the pool takes here; coarse.", minimum=0))
    generation: int = field(
        default=0, metadata=says("Grows when the directory is prepared anew, for instance on a blank disk.", minimum=0)
    )
    engine: str = field(default="", metadata=says("How files are read: uring (io_uring) or threads.", max_length=64))
    direct_io: bool = field(
        default=False, metadata=says("Whether reads and writes bypass the page cache.", name="directIO")
    )
    publish_method: str = field(
        default="", metadata=says("How a block becomes visible: link or rename.", max_length=64)
    )
    mounts: int = field(default=0, metadata=says("Volumes of pods that are mounted now.", minimum=0))
    disk_model: str = field(default="", metadata=says("Model of the disk that holds it."))
    filesystem: str = field(default="", metadata=says("Type of the filesystem that holds it.", max_length=64))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """The part of the status that the node agent owns."""

    agent_version: str = field(default="", metadata=says("Version of the node agent.", max_length=64))
    kernel: str = field(default="", metadata=says("Release of the node's kernel.", max_length=128))
    io_uring: IOUring | None = field(default=None, metadata=says("Whether io_uring works here, and if not, why."))
    heartbeat_time: datetime | None = field(
        default=None, metadata=says("When the node agent wrote last; about once a minute while it runs.")
    )
    disks: tuple[Disk, ...] = field(
        default=(), metadata=says("Disks that could hold a pool.", max_items=DISKS_MAX, map_key="mountPath")
    )
    pools: tuple[NodePool, ...] = field(
        default=(), metadata=says("Pools on this node.", max_items=POOLS_MAX, map_key="name")
    )
    ready: str = field(init=False, metadata=says("For people: ready/all pools of this node, such as 2/2."))
    capacity: str = field(init=False, metadata=says("For people: bytes that the ready pools may take."))
    used: str = field(init=False, metadata=says("For people: bytes that the ready pools take."))

    def __post_init__(self) -> None:
        """Derive the texts of `kubectl get`; what is unknown stays empty."""
        ready = [pool for pool in self.pools if pool.state is NodePoolState.READY]
        derive(
            self,
            ready=f"{len(ready)}/{len(self.pools)}",
            capacity=format_size(sum(pool.capacity_bytes for pool in ready)) if ready else "",
            used=format_size(sum(pool.used_bytes for pool in ready)) if ready else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One point of a profile: what one combination of block size and concurrency reached."""

    block_bytes: int = field(metadata=says("Size of each block.", minimum=1))
    depth: int = field(metadata=says("Blocks in flight at once, over all readers.", minimum=1))
    readers: int = field(metadata=says("Sequences of blocks read side by side, as of so many requests.", minimum=1))
    read_bytes_per_second: int = field(metadata=says("Bandwidth of all readers together.", minimum=0))
    latency_microseconds: int = field(
        metadata=says("Median time of one block, from its open to its last byte.", minimum=0)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One entry of status.profiles: how fast a pool's disk is on this node."""

    pool: str = field(metadata=says("Name of the KVCachePool."))
    pool_uid: str = field(
        metadata=says(
            "Its uid; a measurement of another pool of this name does not count.", name="poolUID", max_length=64
        )
    )
    state: ProfileState = field(
        metadata=says("What is known: Measured, Failed (see reason), or Running for the first time.")
    )
    measured_at: datetime | None = field(default=None, metadata=says("When it was measured; absent: never."))
    key: str = field(
        default="",
        metadata=says(
            "Hash of what was measured: disk, filesystem, engine, kernel, generation of the directory. Another key: "
            "measured anew.",
            max_length=64,
        ),
    )
    read_bytes_per_second: int = field(default=0, metadata=says("Best read bandwidth of all points.", minimum=0))
    write_bytes_per_second: int = field(default=0, metadata=says("Write bandwidth.", minimum=0))
    contended: bool = field(default=False, metadata=says("Whether others used the disk meanwhile: a lower bound then."))
    engine: str = field(default="", metadata=says("How files were read: uring (io_uring) or threads.", max_length=64))
    points: tuple[ProfilePoint, ...] = field(default=(), metadata=says("What was measured.", max_items=POINTS_MAX))
    failures: int = field(default=0, metadata=says("Failed or disturbed attempts in a row.", minimum=0))
    next_attempt: datetime | None = field(
        default=None, metadata=says("When the next attempt is due after a failed or disturbed one.")
    )
    reason: str = field(
        default="",
        metadata=says(
            "Why the last attempt failed, in one word; or what the figures are if they are not a full measurement: "
            "Inherited, ShortRun, Contended.",
            max_length=64,
        ),
    )
    message: str = field(
        default="",
        metadata=says("The reason in a sentence, and what to do.", max_length=MESSAGE_LENGTH_MAX, clipped=True),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStatus:
    """The part of the status that the operator owns."""

    profiles: tuple[Profile, ...] = field(
        default=(), metadata=says("Measurements of the pools' disks.", max_items=PROFILES_MAX, map_key="pool")
    )
    read: str = field(init=False, metadata=says("For people: lowest measured read bandwidth of the pools' disks."))

    def __post_init__(self) -> None:
        """Derive the text of `kubectl get`; empty while nothing is measured."""
        measured = [profile.read_bytes_per_second for profile in self.profiles if profile.read_bytes_per_second]
        derive(self, read=f"{format_size(min(measured))}/s" if measured else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheNode:
    """The disks and pools of one node, named like the node; created by its node agent, collected with the Node.

    The API has one status; here it is split by owner.
    """

    metadata: Metadata = field(metadata=says("Standard object metadata."))
    agent: AgentStatus = field(default_factory=AgentStatus, metadata=says("What the node agent says.", name="status"))
    operator: OperatorStatus = field(
        default_factory=OperatorStatus, metadata=says("What the operator says.", name="status")
    )

    @staticmethod
    def parse(document: Mapping[str, Any]) -> "KVCacheNode":
        """Return the node of an API object.

        Raises:
            ConfigurationError: the object does not fit; the message starts with the field's path.
        """
        return parse(KVCacheNode, document, NODE_KIND)

    @property
    def name(self) -> str:
        return self.metadata.name

    def status_document(self, status: AgentStatus | OperatorStatus) -> dict[str, Any]:
        """Return what one owner's server-side apply sends to this node's status: all that it owns, and nothing else."""
        return status_document(NODE_KIND, name=self.name, status=status)

    def pool(self, name: str) -> NodePool | None:
        """Return a pool's state here, None where the node agent does not know it."""
        return next((pool for pool in self.agent.pools if pool.name == name), None)

    def profile(self, pool: str) -> Profile | None:
        """Return a pool's measurement here, None where there is none."""
        return next((profile for profile in self.operator.profiles if profile.pool == pool), None)
