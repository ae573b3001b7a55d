"""The one table of metrics. docs/metrics.md is generated from it; a test compares it with what a server serves.

Conventions: base units, `_total` on counters, few label values known beforehand, never a key or a request.
"""

from dataclasses import dataclass
from enum import Enum

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import (
    METRIC_PREFIX,
    NODE_METRIC_PREFIX,
    OPERATOR_METRIC_PREFIX,
    POOL_METRIC_PREFIX,
    WEBHOOK_METRIC_PREFIX,
)


class Kind(Enum):
    """Prometheus metric types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of one metric.

    Args:
        help: one sentence; what it counts, in which unit.
        labels: our own label names; vLLM adds `VLLM_LABELS`, which none of ours may repeat: a server of Prometheus
            rejects the whole scrape then.
        initial_labels: label values that exist from the start, at zero.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    initial_labels: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()


VLLM_LABELS = ("model_name", "engine")
TIER_DISK = "disk"

LOAD_FAILURES = ("missing", "corrupt", "io", "timeout", "stopped")
STORE_FAILURES = ("capacity", "read_only", "io", "stopped")
DECLINES = (
    ("lookup", "timeout"),
    ("lookup", "queue_full"),
    ("lookup", "adapter"),
    ("load", "in_flight_limit"),
    ("load", "stalled"),
    ("load", "unreadable"),
    ("load", "staging_timeout"),
    ("store", "pool_full"),
    ("store", "staging_full"),
    ("store", "in_progress"),
    ("store", "incomplete"),
    ("store", "write_budget"),
    ("store", "unavailable"),
)

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def _counter(
    name: str, text: str, labels: tuple[str, ...] = (), initial: tuple[tuple[str, ...], ...] = ((),)
) -> Metric:
    return Metric(METRIC_PREFIX + name, Kind.COUNTER, text, labels, initial)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ("rank",)) -> Metric:
    return Metric(METRIC_PREFIX + name, Kind.GAUGE, text, labels)


def _single(values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


LOOKUP_TOKENS = _counter("lookup_tokens_total", "Prompt tokens that vLLM asked for, beyond its GPU prefix cache.")
HIT_TOKENS = _counter(
    "hit_tokens_total",
    "Of the tokens asked for, those found and sent to be loaded, by tier.",
    ("tier",),
    ((TIER_DISK,),),
)
LOAD_BYTES = _counter("load_bytes_total", "Bytes of KV loaded into KV-cache memory and verified.")
STORE_BYTES = _counter("store_bytes_total", "Bytes written to block files that were then published.")
LOAD_ACTIVE = _counter("load_active_seconds_total", "Time during which at least one load was in flight in a worker.")
STORE_ACTIVE = _counter(
    "store_active_seconds_total", "Time during which at least one block was being stored in a worker."
)
LOAD_BLOCKS = _counter("load_blocks_total", "Offloaded blocks loaded and verified.")
STORE_BLOCKS = _counter("store_blocks_total", "Offloaded blocks written and published by this process.")
LOAD_FAILED = _counter(
    "load_failures_total", "Offloaded blocks recomputed because their load failed.", ("reason",), _single(LOAD_FAILURES)
)
STORE_FAILED = _counter(
    "store_failures_total", "Offloaded blocks not stored because of an error.", ("reason",), _single(STORE_FAILURES)
)
DECLINED = _counter("declines_total", "Requests or blocks passed over on purpose.", ("operation", "reason"), DECLINES)
QUARANTINED = _counter("quarantined_blocks_total", "Damaged block files moved aside.")
LOAD_DURATION = Metric(
    METRIC_PREFIX + "load_duration_seconds",
    Kind.HISTOGRAM,
    "Time from the submission of a request's load to its end.",
    initial_labels=((),),
    buckets=_SECONDS,
)
STORE_DURATION = Metric(
    METRIC_PREFIX + "store_duration_seconds",
    Kind.HISTOGRAM,
    "Time from the start of a block's copy to its publication.",
    initial_labels=((),),
    buckets=_SECONDS,
)
STAGING_BYTES = _gauge("staging_bytes", "Staging memory taken by a worker.")
STAGING_SLOTS = _gauge("staging_slots", "Staging slots of a worker.")
STAGING_USED = _gauge("staging_slots_used", "Staging slots in use.")
QUEUE_DEPTH = _gauge("queue_depth", "Blocks waiting for a staging slot.")
IN_FLIGHT = _gauge("operations_in_flight", "Disk operations submitted and not completed.")
INDEX_KEYS = _gauge("index_keys", "Blocks that the scheduler knows to exist.", ())
ENABLED = _gauge("enabled", "1 if the cache works, 0 if vLLM runs without it; the log says why.", ())
ENGINE_INFO = _gauge("engine_info", "Always 1; how files are accessed.", ("rank", "ring", "direct_io", "publish"))

CONNECTOR_METRICS: tuple[Metric, ...] = (
    LOOKUP_TOKENS,
    HIT_TOKENS,
    LOAD_BYTES,
    LOAD_BLOCKS,
    LOAD_ACTIVE,
    LOAD_DURATION,
    STORE_BYTES,
    STORE_BLOCKS,
    STORE_ACTIVE,
    STORE_DURATION,
    LOAD_FAILED,
    STORE_FAILED,
    DECLINED,
    QUARANTINED,
    STAGING_BYTES,
    STAGING_SLOTS,
    STAGING_USED,
    QUEUE_DEPTH,
    IN_FLIGHT,
    INDEX_KEYS,
    ENABLED,
    ENGINE_INFO,
)
"""Served by vLLM's own /metrics while the connector is configured."""


# ---- the sidecar ----

EVICTION_REASONS = ("capacity", "min_free", "refused", "unused", "quarantine")
POOL_STATES = ("starting", "working", "standby", "read_only", "missing", "unmounted", "replaced", "refused")
FINGERPRINTS_MAX = 32
"""Most fingerprints with series of their own; the rest is added up as `OTHER`."""
OTHER = "other"


def _pool_counter(
    name: str, text: str, labels: tuple[str, ...] = (), initial: tuple[tuple[str, ...], ...] = ((),)
) -> Metric:
    return Metric(POOL_METRIC_PREFIX + name, Kind.COUNTER, text, labels, initial)


def _pool_gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(POOL_METRIC_PREFIX + name, Kind.GAUGE, text, labels)


POOL_CAPACITY = _pool_gauge("capacity_bytes", "Most bytes that the pool may take, as configured.")
POOL_ALLOWED = _pool_gauge(
    "allowed_bytes", "Most bytes that the pool may take now; less than the capacity where the disk is short of room."
)
POOL_USED = _pool_gauge(
    "used_bytes", "Bytes counted against the capacity: blocks, stores under way, temporary and quarantined files."
)
POOL_FREE = _pool_gauge("free_bytes", "Bytes free on the pool's filesystem.")
POOL_BLOCKS = _pool_gauge("blocks", "Blocks in the pool.", ("model", "fingerprint"))
POOL_SIZE = _pool_gauge("size_bytes", "Bytes of the blocks in the pool.", ("model", "fingerprint"))
EVICTED_BLOCKS = _pool_counter(
    "evicted_blocks_total", "Files removed to regain room, by reason.", ("reason",), _single(EVICTION_REASONS)
)
EVICTED_BYTES = _pool_counter(
    "evicted_bytes_total",
    "Bytes of the files removed to regain room, by reason.",
    ("reason",),
    _single(EVICTION_REASONS),
)
EVICTED_AGE = _pool_gauge(
    "last_evicted_block_age_seconds",
    "Time since the last use of the block evicted last for want of room; 0 if none was. Small means: the pool is too "
    "small.",
)
FAILED_REMOVALS = _pool_counter(
    "failed_removals_total", "Files that should have left and could not be removed: not allowed, or the disk refused."
)
SWEPT_FILES = _pool_counter("swept_files_total", "Temporary files of dead writers removed.")
SCRUBBED_BLOCKS = _pool_counter("scrubbed_blocks_total", "Blocks read and verified by the scrubber.")
SCRUBBED_BYTES = _pool_counter("scrubbed_bytes_total", "Bytes read by the scrubber.")
DAMAGED_BLOCKS = _pool_counter(
    "damaged_blocks_total", "Blocks that the scrubber proved damaged; they are moved aside where that is allowed."
)
SCAN_DURATION = _pool_gauge("scan_duration_seconds", "Time that the last scan of the pool took; 0 before the first.")
SCAN_FILES = _pool_gauge("scan_files", "Files that the last scan found.")
DROPPED_FINGERPRINTS = _pool_counter(
    "dropped_fingerprints_total", "Fingerprints removed because nobody used them for long."
)
WRITTEN_TODAY = _pool_gauge("written_bytes_today", "Bytes reserved for stores since midnight, UTC.")
WRITE_BUDGET = _pool_gauge("write_budget_bytes", "Most bytes that may be written a day; 0 is no limit.")
POOL_ACTIVE = _pool_gauge("active", "1 if this sidecar works, 0 if it waits for another one or for the pool.")
POOL_READY = _pool_gauge("ready", "1 if the pool is there and this sidecar works or stands by.")
POOL_STATE = _pool_gauge("state", "1 for the state that the pool is in, 0 for all others.", ("state",))

SIDECAR_METRICS: tuple[Metric, ...] = (
    POOL_CAPACITY,
    POOL_ALLOWED,
    POOL_USED,
    POOL_FREE,
    POOL_BLOCKS,
    POOL_SIZE,
    EVICTED_BLOCKS,
    EVICTED_BYTES,
    EVICTED_AGE,
    FAILED_REMOVALS,
    SWEPT_FILES,
    SCRUBBED_BLOCKS,
    SCRUBBED_BYTES,
    DAMAGED_BLOCKS,
    SCAN_DURATION,
    SCAN_FILES,
    DROPPED_FINGERPRINTS,
    WRITTEN_TODAY,
    WRITE_BUDGET,
    POOL_ACTIVE,
    POOL_READY,
    POOL_STATE,
)
"""Served by `pykvcache-sidecar run` on its own /metrics; by the node agent with the label `pool` before the others."""


# ---- the node agent ----

POOL_LABEL = "pool"
VOLUME_RESULTS = ("mounted", "degraded", "refused")


def _node_gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(NODE_METRIC_PREFIX + name, Kind.GAUGE, text, labels)


def _node_counter(name: str, text: str, labels: tuple[str, ...], initial: tuple[tuple[str, ...], ...]) -> Metric:
    return Metric(NODE_METRIC_PREFIX + name, Kind.COUNTER, text, labels, initial)


NODE_POOL_READY = _node_gauge("pool_ready", "1 if the pool is ready on this node, else 0.", (POOL_LABEL,))
NODE_POOL_MOUNTS = _node_gauge("pool_mounts", "Volumes of pods that show the pool now.", (POOL_LABEL,))
NODE_POOL_DIRECTORIES = _node_gauge(
    "pool_directories",
    "Directories of the pool that are cared for: one for each namespace, or one for all.",
    (POOL_LABEL,),
)
NODE_DISKS = _node_gauge("disks", "Disks found on this node.")
NODE_REGISTERED = _node_gauge("driver_registered", "1 if kubelet has registered the CSI driver, else 0.")
NODE_API_HEARD = _node_gauge(
    "api_last_heard_timestamp_seconds", "Unix time at which the API server was heard last; 0 if never."
)
NODE_VOLUMES = _node_counter(
    "volumes_total",
    "Answers to pods that asked for a volume: with the pool, without it because it is not ready, or none.",
    ("result",),
    _single(VOLUME_RESULTS),
)
NODE_STATUS_WRITES = _node_counter(
    "status_writes_total", "Writes of this node's KVCacheNode.", ("result",), _single(("success", "error"))
)

NODE_METRICS: tuple[Metric, ...] = (
    NODE_POOL_READY,
    NODE_POOL_MOUNTS,
    NODE_POOL_DIRECTORIES,
    NODE_DISKS,
    NODE_REGISTERED,
    NODE_API_HEARD,
    NODE_VOLUMES,
    NODE_STATUS_WRITES,
)
"""Served by `pykvcache-sidecar node`, beside `SIDECAR_METRICS` of every pool."""


# ---- the operator ----

RECONCILE_RESULTS = ("success", "error")
LABELLED_PODS = "labelledpods"
"""Pods of users that are labelled for a pool; `pods` are those of calibration Jobs."""
WATCHED = (
    "kvcachepools",
    "kvcachenodes",
    "nodes",
    "jobs",
    "pods",
    LABELLED_PODS,
    "namespaces",
    "persistentvolumeclaims",
)
REQUEST_VERBS = ("get", "list", "watch", "create", "update", "patch", "apply", "delete")


def _operator_gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(OPERATOR_METRIC_PREFIX + name, Kind.GAUGE, text, labels)


RECONCILES = Metric(
    OPERATOR_METRIC_PREFIX + "reconcile_total",
    Kind.COUNTER,
    "Pools looked at, by result; an error is tried again later.",
    ("result",),
    _single(RECONCILE_RESULTS),
)
RECONCILE_DURATION = Metric(
    OPERATOR_METRIC_PREFIX + "reconcile_duration_seconds",
    Kind.HISTOGRAM,
    "Time to look at one pool and to write what follows.",
    initial_labels=((),),
    buckets=_SECONDS,
)
RECONCILES_WAITING = _operator_gauge("reconcile_waiting", "Pools that are due and not yet looked at.")
LAST_WATCH_EVENT = _operator_gauge(
    "last_watch_event_timestamp_seconds",
    "When the API server last told anything about a kind of object, bookmarks included; Unix time. A kind that no pool "
    "needs is not watched and has no sample.",
    ("resource",),
)
API_REQUESTS = Metric(
    OPERATOR_METRIC_PREFIX + "api_requests_total",
    Kind.COUNTER,
    "Requests sent to the API server, without those of the watch of pools.",
    ("verb",),
    _single(REQUEST_VERBS),
)
IS_LEADER = _operator_gauge("is_leader", "1 if this process is the active one, 0 if it waits for the Lease.")
KNOWN_POOLS = _operator_gauge("pools", "Pools, by the status of their condition Ready.", ("ready",))
POOL_NODES_READY = _operator_gauge("pool_nodes_ready", "Nodes on which a pool is ready.", ("pool",))
POOL_NODES_DESIRED = _operator_gauge("pool_nodes_desired", "Nodes that should have a pool.", ("pool",))

UNKNOWN_POOL = "(unknown)"
"""Value of the label `pool` for pods whose label names none, for it may say anything; no pool can be named so."""
POD_EVENT_RESULTS = ("posted", "known", "dropped", "failed")
INJECTED_PODS = _operator_gauge("injected_pods", "Labelled pods that have the cache.", ("pool",))
SKIPPED_PODS = _operator_gauge(
    "skipped_pods", "Labelled pods that go without, by the reason in their annotation.", ("reason",)
)
MISSED_PODS = _operator_gauge(
    "missed_pods", "Labelled pods that went past the webhook and go without the cache.", ("pool",)
)
POD_EVENTS = Metric(
    OPERATOR_METRIC_PREFIX + "pod_events_total",
    Kind.COUNTER,
    "Events about pods that go without the cache: posted, known from before, dropped because there were too many at "
    "once, or refused by the API server.",
    ("result",),
    _single(POD_EVENT_RESULTS),
)
WEBHOOK_CERTIFICATES = ("authority", "serving")
WEBHOOK_CERTIFICATE_EXPIRY = _operator_gauge(
    "webhook_certificate_expiry_timestamp_seconds",
    "When the webhook's certificate, and that of the authority which signs it, end; Unix time. The active operator "
    "renews them when two thirds of their life are over; without a sample it keeps none.",
    ("certificate",),
)
WEBHOOK_CERTIFICATE_FAILURES = Metric(
    OPERATOR_METRIC_PREFIX + "webhook_certificate_failures_total",
    Kind.COUNTER,
    "Looks at the webhook's certificates that failed; they are looked at every 30 s.",
    initial_labels=((),),
)

OPERATOR_METRICS: tuple[Metric, ...] = (
    RECONCILES,
    RECONCILE_DURATION,
    RECONCILES_WAITING,
    LAST_WATCH_EVENT,
    API_REQUESTS,
    IS_LEADER,
    KNOWN_POOLS,
    POOL_NODES_READY,
    POOL_NODES_DESIRED,
    INJECTED_PODS,
    SKIPPED_PODS,
    MISSED_PODS,
    POD_EVENTS,
    WEBHOOK_CERTIFICATE_EXPIRY,
    WEBHOOK_CERTIFICATE_FAILURES,
)
"""Served by `pykvcache-operator run` on its own /metrics."""


# ---- the webhook ----

SKIPPED = "skipped"
WEBHOOK_RESULTS = (
    *((result, "") for result in ("injected", "unchanged", "rejected", "malformed")),
    *((SKIPPED, reason.word) for reason in SkipReason if reason is not SkipReason.ERROR),
    ("error", SkipReason.ERROR.word),
)
RELOAD_RESULTS = ("success", "error")
WEBHOOK_WATCHED = ("kvcachepools", "namespaces")

WEBHOOK_REQUESTS = Metric(
    WEBHOOK_METRIC_PREFIX + "requests_total",
    Kind.COUNTER,
    "Reviews of pods answered, by what became of the pod; `reason` of those that go without the cache.",
    ("result", "reason"),
    WEBHOOK_RESULTS,
)
WEBHOOK_DURATION = Metric(
    WEBHOOK_METRIC_PREFIX + "duration_seconds",
    Kind.HISTOGRAM,
    "Time from the headers of a review to its answer, waiting for a pool that nobody knows yet included.",
    initial_labels=((),),
    buckets=_SECONDS,
)
CERTIFICATE_EXPIRY = Metric(
    WEBHOOK_METRIC_PREFIX + "certificate_expiry_timestamp_seconds",
    Kind.GAUGE,
    "When the certificate in use ends, Unix time; no sample while there is none.",
)
CERTIFICATE_RELOADS = Metric(
    WEBHOOK_METRIC_PREFIX + "certificate_reloads_total",
    Kind.COUNTER,
    "Certificates found and taken into use, or found and of no use.",
    ("result",),
    _single(RELOAD_RESULTS),
)
WEBHOOK_WATCH_EVENT = Metric(
    WEBHOOK_METRIC_PREFIX + "last_watch_event_timestamp_seconds",
    Kind.GAUGE,
    "When the API server last told anything about a kind of object; Unix time.",
    ("resource",),
)
WEBHOOK_POOLS = Metric(
    WEBHOOK_METRIC_PREFIX + "pools",
    Kind.GAUGE,
    "Pools that the webhook knows, by whether it can read them.",
    ("readable",),
)

WEBHOOK_METRICS: tuple[Metric, ...] = (
    WEBHOOK_REQUESTS,
    WEBHOOK_DURATION,
    CERTIFICATE_EXPIRY,
    CERTIFICATE_RELOADS,
    WEBHOOK_WATCH_EVENT,
    WEBHOOK_POOLS,
)
"""Served by `pykvcache-operator webhook` on its own /metrics."""
