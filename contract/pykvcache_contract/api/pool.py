"""KVCachePool: what a cluster's administrator declares, and what the operator reports about it.

The texts are what `kubectl explain` shows. Rules that need two fields are CEL rules of the CRD, in tools/gen_crds.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any

from pykvcache_contract.api.fields import Form, derive, parse, says
from pykvcache_contract.api.objects import MESSAGE_LENGTH_MAX, Condition, Metadata, status_document
from pykvcache_contract.names import POOL_KIND
from pykvcache_contract.units import format_size

POOL_NAME_LENGTH_MAX = 40
"""Names of pools go into labels, paths and names of claims."""
_PART = r"[^/\x00-\x1f\x7f]"
PATH_PATTERN = rf"(/([^/.\x00-\x1f\x7f]{_PART}*|\.[^/.\x00-\x1f\x7f]{_PART}*|\.\.{_PART}+))*"
"""Parts are not empty, `.` or `..` and hold no control characters. The
regular expressions of Kubernetes have no look-ahead."""
_OBJECT_NAME = "([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?"
_OBJECT_NAME_TEXT = "lower-case letters, digits, '-' and '.'"
FAILING_NODES_MAX = 10
CLAIMS_MAX = 256


class StorageType(Enum):
    """Where the blocks of a pool lie."""

    NODE_LOCAL = "NodeLocal"
    SHARED_FILESYSTEM = "SharedFilesystem"
    EPHEMERAL = "Ephemeral"


class Volume(Enum):
    """How a pod gets a NodeLocal pool."""

    CSI = "CSI"
    HOST_PATH = "HostPath"


class OnUnavailable(Enum):
    """What a pod gets on a node where the pool is not ready."""

    DEGRADE = "Degrade"
    BLOCK = "Block"


class DiskType(Enum):
    """Kind of a disk, as the node agent finds it."""

    NVME = "NVMe"
    SSD = "SSD"
    HDD = "HDD"
    OTHER = "Other"


class EvictionPolicy(Enum):
    """Which blocks leave first."""

    LRU = "LRU"
    COST_AWARE = "CostAware"


class Sharing(Enum):
    """Who sees whose blocks."""

    NAMESPACE = "Namespace"
    POOL = "Pool"


class Library(Enum):
    """How the connector reaches the image of vLLM."""

    INIT_CONTAINER = "InitContainer"
    IMAGE_VOLUME = "ImageVolume"
    NONE = "None"


class DeletionPolicy(Enum):
    """What happens to the data of a deleted pool."""

    DELETE = "Delete"
    RETAIN = "Retain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """spec.storage"""

    type: StorageType = field(
        metadata=says(
            "Where the blocks lie. NodeLocal: on a disk of each node, prepared by the node agent; pods on one node "
            "share them, and they survive pods. SharedFilesystem: on a ReadWriteMany claim. Ephemeral: in each pod's "
            "emptyDir, lost with the pod. Cannot be changed; make a new pool."
        )
    )
    capacity_per_node_bytes: int | None = field(
        default=None,
        metadata=says(
            "NodeLocal, required there: most bytes that the pool takes on each node. May be changed; a smaller value "
            "makes the node agent evict. Example: 800Gi.",
            name="capacityPerNode",
            form=Form.QUANTITY,
            minimum=2**20,
        ),
    )
    capacity_bytes: int | None = field(
        default=None,
        metadata=says(
            "SharedFilesystem with storageClassName: size of each claim, may only grow. Ephemeral: sizeLimit of the "
            "emptyDir. Required in both cases, refused otherwise. Example: 2Ti.",
            name="capacity",
            form=Form.QUANTITY,
            minimum=2**20,
        ),
    )
    min_free_bytes: int = field(
        default=10 * 2**30,
        metadata=says(
            "NodeLocal: what stays free on the disk's filesystem whatever the capacity says. Where the disk also "
            "holds the kubelet's or the container runtime's files keep it above their eviction thresholds (10 % and "
            "15 % of the disk).",
            name="minFree",
            form=Form.QUANTITY,
            minimum=0,
        ),
    )
    path: str = field(
        default="",
        metadata=says(
            "NodeLocal: directory on each node that holds the pool's own directory, below a prefix that the node "
            "agent allows and on a mounted disk. Empty: <mount point>/pykvcache on the first disk that diskSelector "
            "admits. Cannot be changed. Example: /mnt/nvme/pykvcache.",
            pattern=PATH_PATTERN,
            pattern_text="an absolute path without //, . or .. in it and without / at its end",
            max_length=1024,
        ),
    )
    volume: Volume = field(
        default=Volume.CSI,
        metadata=says(
            "NodeLocal: how pods get the pool. CSI: an inline volume of the driver csi.pykvcache.io, which works "
            "under Pod Security restricted and checks the namespace. HostPath: for clusters without CSI drivers; Pod "
            "Security must allow it, and nothing but Pod Security decides who mounts it. Cannot be changed."
        ),
    )
    on_unavailable: OnUnavailable = field(
        default=OnUnavailable.DEGRADE,
        metadata=says(
            "NodeLocal with volume CSI: what a pod gets on a node whose pool is not ready. Degrade: an empty "
            "read-only directory; vLLM runs without the cache. Block: the pod waits in ContainerCreating until the "
            "pool is ready."
        ),
    )
    claim_name: str = field(
        default="",
        metadata=says(
            "SharedFilesystem: name of an existing claim, the same in each allowed namespace. Either this or "
            "storageClassName.",
            pattern=_OBJECT_NAME,
            pattern_text=_OBJECT_NAME_TEXT,
        ),
    )
    storage_class_name: str = field(
        default="",
        metadata=says(
            "SharedFilesystem: the operator makes a ReadWriteMany claim pykvcache-<pool> of this class in each "
            "allowed namespace. Either this or claimName. Cannot be changed.",
            pattern=_OBJECT_NAME,
            pattern_text=_OBJECT_NAME_TEXT,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSelector:
    """spec.diskSelector"""

    min_size_bytes: int | None = field(
        default=None,
        metadata=says(
            "Only disks whose filesystem has at least this size. Example: 1Ti.",
            name="minSize",
            form=Form.QUANTITY,
            minimum=0,
        ),
    )
    types: tuple[DiskType, ...] = field(
        default=(), metadata=says("Only disks of one of these types; empty: of any type.", max_items=4)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """spec.eviction"""

    policy: EvictionPolicy = field(
        default=EvictionPolicy.LRU,
        metadata=says(
            "Which blocks leave first. LRU: those unused for longest. CostAware: also weighs how much it costs to "
            "compute a block again."
        ),
    )
    high_watermark_percent: int = field(
        default=90, metadata=says("Percent of the capacity in use at which eviction begins.", minimum=2, maximum=99)
    )
    low_watermark_percent: int = field(
        default=80,
        metadata=says(
            "Percent of the capacity in use at which eviction stops; below highWatermarkPercent.", minimum=1, maximum=98
        ),
    )
    unused_after_seconds: int = field(
        default=int(timedelta(days=30).total_seconds()),
        metadata=says(
            "Blocks of a model configuration that nobody has used for this long are removed even when there is room, "
            "because an old model is seldom deployed again. 0s: never.",
            name="unusedAfter",
            form=Form.DURATION,
            minimum=0,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Integrity:
    """spec.integrity"""

    scrub_bytes_per_second: int = field(
        default=16 * 2**20,
        metadata=says(
            "How fast stored blocks are read again in the background to find damaged ones before a request does. 0: "
            "not at all; every block is verified when it is loaded in any case.",
            form=Form.QUANTITY,
            minimum=0,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """spec.calibration"""

    enabled: bool = field(
        default=True,
        metadata=says(
            "NodeLocal: measure the disk of each node with a short Job, CPU only, in the operator's namespace. It "
            "never delays a pool's readiness."
        ),
    )
    max_age_seconds: int = field(
        default=int(timedelta(days=30).total_seconds()),
        metadata=says(
            "A measurement older than this is repeated. The annotation pykvcache.io/recalibrate=<time> repeats all of "
            "a pool, or of a node, at once.",
            name="maxAge",
            form=Form.DURATION,
            minimum=3600,
        ),
    )
    max_concurrent_nodes: int = field(
        default=1, metadata=says("Most nodes that measure at the same time.", minimum=1, maximum=100)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSelector:
    """spec.allowedNamespaces"""

    names: tuple[str, ...] = field(
        default=(),
        metadata=says(
            "Namespaces by name.",
            pattern="[a-z0-9]([-a-z0-9]*[a-z0-9])?",
            pattern_text="lower-case letters, digits and '-'",
            max_length=63,
            max_items=256,
        ),
    )
    match_labels: Mapping[str, str] = field(
        default_factory=dict,
        metadata=says(
            "Namespaces that have all of these labels. kubernetes.io/metadata.name is a label that nobody can forge.",
            max_length=63,
            max_items=16,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """spec.memory"""

    staging_bytes: int = field(
        default=2**30,
        metadata=says(
            "Host memory of each vLLM worker (one per GPU) between disk and GPU: a hard limit, which counts to the "
            "memory limit of vLLM's container. A pod may have another by the annotation pykvcache.io/staging.",
            form=Form.QUANTITY,
            minimum=2**24,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """spec.injection"""

    library: Library = field(
        default=Library.INIT_CONTAINER,
        metadata=says(
            "How the connector reaches the image of vLLM. InitContainer: an init container copies it. ImageVolume: the "
            "connector's image is mounted; needs a container runtime that can (containerd 2.1, CRI-O 1.31). None: the "
            "image has it already. A pod may choose otherwise by the annotation pykvcache.io/library."
        ),
    )
    block_tokens: int = field(
        default=256,
        metadata=says(
            "Tokens of one stored block; rounded up to a multiple of vLLM's own block size.", minimum=1, maximum=65536
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """spec"""

    storage: Storage = field(metadata=says("Where the blocks lie and how much room they get."))
    node_selector: Mapping[str, str] = field(
        default_factory=dict,
        metadata=says(
            "NodeLocal: only nodes that have all of these labels. Empty: all nodes on which the node agent runs.",
            max_length=63,
            max_items=16,
        ),
    )
    disk_selector: DiskSelector | None = field(
        default=None,
        metadata=says(
            "NodeLocal without storage.path: only nodes with a mounted disk of this kind, and the pool goes to the "
            "first one. Absent: the first disk that the node agent finds."
        ),
    )
    min_ready_nodes: int = field(
        default=1,
        metadata=says(
            "NodeLocal: the condition Ready is True while the pool is ready on at least this many nodes. 0: also "
            "without any node, for clusters that scale to zero.",
            minimum=0,
            maximum=10000,
        ),
    )
    eviction: Eviction = field(default_factory=Eviction, metadata=says("NodeLocal: how the node agent regains room."))
    integrity: Integrity = field(
        default_factory=Integrity, metadata=says("NodeLocal: how the node agent finds damage.")
    )
    write_budget_per_day_bytes: int = field(
        default=0,
        metadata=says(
            "NodeLocal: most bytes stored per day (UTC) in a node's pool, to spare the SSD; further stores are "
            "declined until midnight. 0: no limit.",
            name="writeBudgetPerDay",
            form=Form.QUANTITY,
            minimum=0,
        ),
    )
    calibration: Calibration = field(
        default_factory=Calibration, metadata=says("NodeLocal: how the disks are measured.")
    )
    sharing: Sharing = field(
        default=Sharing.NAMESPACE,
        metadata=says(
            "Who sees whose blocks. Blocks derive from prompts, and a hit tells that somebody sent the same prompt "
            "before. Namespace: each namespace has a directory of its own. Pool (NodeLocal only): all allowed "
            "namespaces share one; they must trust each other. Cannot be changed."
        ),
    )
    allowed_namespaces: NamespaceSelector | None = field(
        default=None,
        metadata=says(
            "Which namespaces may mount the pool; names or matchLabels, either admits. Absent or empty: every "
            "namespace. Required with sharing Pool and with storageClassName."
        ),
    )
    memory: Memory = field(default_factory=Memory, metadata=says("Memory that vLLM pods spend on the pool."))
    injection: Injection = field(
        default_factory=Injection, metadata=says("How pods labelled pykvcache.io/pool=<this pool> get the cache.")
    )
    deletion_policy: DeletionPolicy = field(
        default=DeletionPolicy.DELETE,
        metadata=says(
            "What happens to the blocks when the pool is deleted. Delete: they are erased, and claims that the "
            "operator made are deleted. Retain: they stay. An existing claim (claimName) is never touched."
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRange:
    """status.readBytesPerSecond"""

    lowest: int = field(metadata=says("Of the slowest calibrated node.", name="min", minimum=0))
    highest: int = field(metadata=says("Of the fastest calibrated node.", name="max", minimum=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingNode:
    """One entry of status.failingNodes."""

    name: str = field(metadata=says("Name of the node."))
    reason: str = field(metadata=says("Why, in one word.", max_length=64))
    message: str = field(default="", metadata=says("Why, and what to do.", max_length=MESSAGE_LENGTH_MAX, clipped=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSize:
    """One entry of status.claims."""

    namespace: str = field(metadata=says("Namespace of the claim."))
    capacity_bytes: int = field(metadata=says("Its size; what was asked for while it is not Bound.", minimum=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """status: written by the operator alone."""

    observed_generation: int = field(
        default=0, metadata=says("The metadata.generation that this status is about.", minimum=0)
    )
    nodes_desired: int = field(default=0, metadata=says("Nodes that should have the pool.", minimum=0))
    nodes_ready: int = field(default=0, metadata=says("Nodes on which the pool is ready.", minimum=0))
    nodes_calibrated: int = field(default=0, metadata=says("Nodes whose disk has a valid measurement.", minimum=0))
    capacity_bytes: int = field(default=0, metadata=says("Bytes the pool may take, over all ready nodes.", minimum=0))
    used_bytes: int = field(default=0, metadata=says("Bytes the pool takes, over all ready nodes; coarse.", minimum=0))
    read_bytes_per_second: ReadRange | None = field(
        default=None, metadata=says("Measured read bandwidth of the calibrated nodes; absent: none is calibrated.")
    )
    injected_pods: int = field(default=0, metadata=says("Pods labelled for this pool that have the cache.", minimum=0))
    skipped_pods: int = field(
        default=0,
        metadata=says("Labelled pods that go without, for a reason that stands in their annotation.", minimum=0),
    )
    missed_pods: int = field(
        default=0, metadata=says("Labelled pods that the webhook did not see, and that go without.", minimum=0)
    )
    failing_nodes: tuple[FailingNode, ...] = field(
        default=(),
        metadata=says(
            f"Nodes that should have the pool and do not; the first {FAILING_NODES_MAX}. `kubectl get kvn` shows all.",
            max_items=FAILING_NODES_MAX,
            map_key="name",
        ),
    )
    claims: tuple[ClaimSize, ...] = field(
        default=(),
        metadata=says(
            "SharedFilesystem: the claims by which pods get the pool; pods of namespaces without one go without the "
            f"cache. The first {CLAIMS_MAX}.",
            max_items=CLAIMS_MAX,
            map_key="namespace",
        ),
    )
    conditions: tuple[Condition, ...] = field(
        default=(),
        metadata=says(
            "Ready: pods can use the pool. NodesReady: on all desired nodes. CapacityOK: no node's disk is too full "
            "for its capacity. Calibrated: all ready nodes have a valid measurement. IOUringAvailable: on all ready "
            "nodes. InjectionHealthy: the webhook saw every labelled pod. Degraded: it works, but not everywhere or "
            "not fully. Deleting: deletion is under way, and what it waits for.",
            max_items=16,
            map_key="type",
        ),
    )
    nodes: str = field(init=False, metadata=says("For people: ready/desired nodes, such as 7/8."))
    capacity: str = field(init=False, metadata=says("For people: capacityBytes, such as 5.5 TiB."))
    used: str = field(init=False, metadata=says("For people: usedBytes."))
    read: str = field(init=False, metadata=says("For people: lowest measured read bandwidth, such as 3.1 GiB/s."))
    pods: str = field(init=False, metadata=says("For people: injected/labelled pods, such as 8/10."))

    def __post_init__(self) -> None:
        """Derive the texts of `kubectl get`; what is unknown stays empty."""
        read = self.read_bytes_per_second
        labelled = self.injected_pods + self.skipped_pods + self.missed_pods
        derive(
            self,
            nodes=f"{self.nodes_ready}/{self.nodes_desired}" if self.nodes_desired else "",
            capacity=format_size(self.capacity_bytes) if self.capacity_bytes else "",
            used=format_size(self.used_bytes) if self.capacity_bytes else "",
            read=f"{format_size(read.lowest)}/s" if read else "",
            pods=f"{self.injected_pods}/{labelled}" if labelled else "",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCachePool:
    """A pool of KV blocks: NVMe-backed volumes on every node, a shared filesystem, or a pod's own scratch space."""

    metadata: Metadata = field(metadata=says("Standard object metadata."))
    spec: PoolSpec = field(metadata=says("What is wanted."))
    status: PoolStatus = field(default_factory=PoolStatus, metadata=says("What is; written by the operator."))

    @staticmethod
    def parse(document: Mapping[str, Any]) -> "KVCachePool":
        """Return the pool of an API object.

        Raises:
            ConfigurationError: the object does not fit; the message starts with the field's path.
        """
        return parse(KVCachePool, document, POOL_KIND)

    @property
    def name(self) -> str:
        return self.metadata.name

    def status_document(self, status: PoolStatus) -> dict[str, Any]:
        """Return what the operator's server-side apply sends to this pool's status."""
        return status_document(POOL_KIND, name=self.name, status=status)
