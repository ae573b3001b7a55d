"""What the nodes say about a NodeLocal pool: who should have it, who has it, what is wrong elsewhere.

Pure. One node that is not ready makes a pool Degraded, never not Ready, while `minReadyNodes` nodes have it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import PurePosixPath

from pykvcache_contract.api.node import Disk, IOUring, KVCacheNode, NodePool, NodePoolState, Profile
from pykvcache_contract.api.pool import FAILING_NODES_MAX, FailingNode, KVCachePool, PoolStatus, ReadRange, Volume
from pykvcache_contract.api.selection import node_label, selects
from pykvcache_contract.names import (
    CONDITION_CALIBRATED,
    CONDITION_CAPACITY_OK,
    CONDITION_DEGRADED,
    CONDITION_IO_URING,
    CONDITION_NODES_READY,
    CONDITION_READY,
    POOL_LABEL_READY,
    REASON_NOT_PREPARED,
    REASON_PATH_NOT_ALLOWED,
)
from pykvcache_contract.units import format_size
from pykvcache_operator.conditions import REASON_PREPARING, Finding, word
from pykvcache_operator.resources import NodeView, Observation

SILENT_AFTER = timedelta(minutes=5)
"""A node agent writes every minute; five times that, and it is not there or has no way to the API server. A time as far
in the future says as little: of an agent with such a clock nobody would notice that it is gone."""
BYTES_MAX = 2**63 - 1
"""What a number of the API can hold; nodes may say anything, and their sum must still be written."""
NAMES_MAX = 3
"""Nodes that a message names; status.failingNodes has more."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node that should have the pool."""

    view: NodeView
    entry: NodePool | None
    profile: Profile | None
    failure: FailingNode | None


@dataclass(frozen=True, slots=True)
class Finds:
    """All that follows from the nodes."""

    status: PoolStatus
    findings: tuple[Finding, ...]
    label_nodes: tuple[str, ...]
    unlabel_nodes: tuple[str, ...]
    again_seconds: float | None


def look(seen: Observation, now: datetime) -> Finds:
    """Sum up what the nodes say."""
    desired = [state(view, seen.pool, now) for view in seen.nodes if is_desired(view, seen.pool)]
    ready = [node for node in desired if node.failure is None]
    label = node_label(seen.pool.name)
    ready_names = {node.view.name for node in ready}
    labelled = {v.name for v in seen.nodes if v.node is not None and v.node.labels.get(label) == POOL_LABEL_READY}
    return Finds(
        status=_status(desired, ready),
        findings=tuple(_findings(seen, desired, ready)),
        label_nodes=tuple(sorted(ready_names - labelled)),
        unlabel_nodes=tuple(
            sorted(v.name for v in seen.nodes if v.node and label in v.node.labels and v.name not in ready_names)
        ),
        again_seconds=_silence_seconds(desired, now),
    )


def is_desired(view: NodeView, pool: KVCachePool) -> bool:
    """Say whether a node should have the pool."""
    disks = view.cache.agent.disks if view.cache else ()
    return view.node is not None and selects(pool, view.node.labels, disks)


def is_silent(cache: KVCacheNode, now: datetime) -> bool:
    """Say whether a node's agent has not been heard for long."""
    heartbeat = cache.agent.heartbeat_time
    return heartbeat is None or abs(now - heartbeat) > SILENT_AFTER


def state(view: NodeView, pool: KVCachePool, now: datetime) -> NodeState:
    """Return what is known of the pool on a node that should have it."""
    entry = view.cache.pool(pool.name) if view.cache else None
    if entry is not None and entry.uid != pool.metadata.uid:
        entry = None  # a pool of the same name that was deleted before
    profile = view.cache.profile(pool.name) if view.cache else None
    if profile is not None and profile.pool_uid != pool.metadata.uid:
        profile = None
    why = _failure(view, entry, now)
    failure = FailingNode(name=view.name, reason=why[0], message=why[1]) if why else None
    return NodeState(view, entry, profile, failure)


def _failure(view: NodeView, entry: NodePool | None, now: datetime) -> tuple[str, str] | None:
    """Return why a node does not have the pool: reason and message; None if it has it."""
    if view.node is None or not view.node.is_ready:
        return "NodeNotReady", "the node is not Ready: its kubelet does not report"
    if view.is_unread:
        return (
            "NodeAgentOfAnotherVersion",
            "what the node agent reports cannot be read: upgrade the operator, see its log",
        )
    if view.cache is None:
        return "NoNodeAgent", "no node agent has reported from this node; does its pod run there?"
    if is_silent(view.cache, now):
        return (
            "NodeAgentSilent",
            "the node agent has not reported for 5 minutes, or the node's clock is as wrong; look at its pod on this "
            "node, then at the clock",
        )
    if entry is None:
        return REASON_NOT_PREPARED, "the node agent has not prepared the pool yet"
    if entry.state is not NodePoolState.READY:
        return word(entry.reason), entry.message or f"the node agent says {entry.state.value} without more"
    return None


def _status(desired: Sequence[NodeState], ready: Sequence[NodeState]) -> PoolStatus:
    entries = [node.entry for node in ready if node.entry]
    measured = [node.profile for node in ready if node.profile and node.profile.measured_at]
    speeds = [profile.read_bytes_per_second for profile in measured]
    failing = sorted((node.failure for node in desired if node.failure), key=lambda failure: failure.name)
    return PoolStatus(
        nodes_desired=len(desired),
        nodes_ready=len(ready),
        nodes_calibrated=len(measured),
        capacity_bytes=min(BYTES_MAX, sum(entry.capacity_bytes for entry in entries)),
        used_bytes=min(BYTES_MAX, sum(entry.used_bytes for entry in entries)),
        read_bytes_per_second=ReadRange(lowest=min(speeds), highest=max(speeds)) if speeds else None,
        failing_nodes=tuple(failing[:FAILING_NODES_MAX]),
    )


def _findings(seen: Observation, desired: Sequence[NodeState], ready: Sequence[NodeState]) -> Iterable[Finding]:
    refusal = why_refused(seen.pool, seen.allowed_host_paths)
    main = Finding(CONDITION_READY, False, *refusal) if refusal else _ready(seen.pool, desired, ready)
    yield main
    yield _nodes_ready(desired, ready)
    yield _degraded(desired, is_ready=bool(main.holds))
    yield _capacity(seen, desired)
    yield _io_uring(ready)
    if seen.is_calibrating and seen.pool.spec.calibration.enabled:
        yield _calibrated(ready)


def why_refused(pool: KVCachePool, allowed_host_paths: Sequence[str]) -> tuple[str, str] | None:
    """Return why nobody may use the pool as it is declared: reason and message; None if it is fine."""
    storage = pool.spec.storage
    if storage.volume is not Volume.HOST_PATH:
        return None
    if any(PurePosixPath(storage.path).is_relative_to(prefix) for prefix in allowed_host_paths if storage.path):
        return None
    allowed = ", ".join(allowed_host_paths) or "none"
    return (
        REASON_PATH_NOT_ALLOWED,
        f"volume HostPath needs a storage.path under an allowed prefix ({allowed}), not {storage.path!r}. Make a new "
        "pool with another path, or allow the prefix: value storage.allowedPaths of the chart",
    )


def _ready(pool: KVCachePool, desired: Sequence[NodeState], ready: Sequence[NodeState]) -> Finding:
    needed = pool.spec.min_ready_nodes
    count = f"{len(ready)} of {len(desired)} nodes ready"
    if len(ready) >= needed:
        return Finding(CONDITION_READY, True, "Ready", f"{count}, at least {needed} needed")
    if not desired:
        return Finding(
            CONDITION_READY,
            False,
            "NoNodes",
            "no node matches nodeSelector and diskSelector. Label nodes, change the selectors, or set minReadyNodes: 0 "
            "if that is meant",
        )
    failures = [node.failure for node in desired if node.failure]
    if not failures:
        advice = "let nodeSelector and diskSelector match more nodes, or lower minReadyNodes"
        return Finding(CONDITION_READY, False, "NotEnoughNodes", f"{count}, at least {needed} needed: {advice}")
    if all(failure.reason == REASON_NOT_PREPARED for failure in failures):
        return Finding(CONDITION_READY, False, REASON_PREPARING, f"{count}, at least {needed} needed; being prepared")
    return Finding(CONDITION_READY, False, "NotEnoughNodes", f"{count}, at least {needed} needed: {_name(failures)}")


def _nodes_ready(desired: Sequence[NodeState], ready: Sequence[NodeState]) -> Finding:
    if len(ready) == len(desired):
        word_of_none = "AllNodesReady" if desired else "NoNodes"
        return Finding(
            CONDITION_NODES_READY, True, word_of_none, f"ready on all {len(desired)} nodes that should have it"
        )
    failures = [node.failure for node in desired if node.failure]
    return Finding(CONDITION_NODES_READY, False, _most_common(failures), _name(failures))


def _degraded(desired: Sequence[NodeState], *, is_ready: bool) -> Finding:
    failures = [node.failure for node in desired if node.failure]
    if is_ready and failures:
        return Finding(CONDITION_DEGRADED, True, _most_common(failures), f"it works, but not on {_name(failures)}")
    message = "no node is without the pool" if not failures else "it does not work at all, see Ready"
    return Finding(CONDITION_DEGRADED, False, "NotDegraded", message)


def _most_common(failures: Sequence[FailingNode]) -> str:
    counts = Counter(failure.reason for failure in failures)
    return min(counts, key=lambda reason: (-counts[reason], reason))


def _name(failures: Sequence[FailingNode]) -> str:
    """Return the first failing nodes with their reasons, the same text for the same failures."""
    ordered = sorted(failures, key=lambda failure: failure.name)
    named = "; ".join(f"{failure.name}: {failure.reason}: {failure.message}" for failure in ordered[:NAMES_MAX])
    rest = len(failures) - NAMES_MAX
    return named + (f"; and {rest} more, see `kubectl get kvcachenodes`" if rest > 0 else "")


def _capacity(seen: Observation, desired: Sequence[NodeState]) -> Finding:
    problems = []
    for node in sorted(desired, key=lambda node: node.view.name):
        if node.entry is not None and node.view.cache is not None and node.entry.path:
            problems += _overcommitment(node.view.cache, node.entry, seen.min_free_bytes)
    if not problems:
        return Finding(CONDITION_CAPACITY_OK, True, "CapacityOK", "no disk is promised more than it has")
    rest = f"; and on {len(problems) - NAMES_MAX} more nodes" if len(problems) > NAMES_MAX else ""
    advice = ". Lower capacityPerNode, or put a pool on another disk; until then pools evict before they are full"
    return Finding(CONDITION_CAPACITY_OK, False, "CapacityExceedsDisk", "; ".join(problems[:NAMES_MAX]) + rest + advice)


def _overcommitment(cache: KVCacheNode, entry: NodePool, min_free_bytes: Mapping[str, int]) -> list[str]:
    """Say it if the disk of an entry is promised more than it has: to its pools, and to stay free."""
    disk = _disk_of(entry.path, cache.agent.disks)
    if disk is None or not disk.size_bytes:
        return []
    others = (other for other in cache.agent.pools if other.state is not NodePoolState.DELETING and other.path)
    sharing = [other for other in others if _disk_of(other.path, cache.agent.disks) is disk]
    promised = sum(other.capacity_bytes for other in sharing)
    free = max((min_free_bytes.get(other.name, 0) for other in sharing), default=0)
    if promised + free <= disk.size_bytes:
        return []
    names = ", ".join(sorted(other.name for other in sharing)[:NAMES_MAX])
    return [
        f"{cache.name}: {disk.mount_path} has {format_size(disk.size_bytes)}, but {format_size(promised)} are promised "
        f"({names}) and {format_size(free)} shall stay free"
    ]


def _disk_of(path: str, disks: Sequence[Disk]) -> Disk | None:
    """Return the disk that holds a path: the deepest mount point above it."""
    above = [disk for disk in disks if PurePosixPath(path).is_relative_to(disk.mount_path)]
    return max(above, key=lambda disk: len(disk.mount_path), default=None)


def _io_uring(ready: Sequence[NodeState]) -> Finding:
    reports = {node.view.name: node.view.cache.agent.io_uring for node in ready if node.view.cache}
    known = {name: report for name, report in reports.items() if report is not None}
    without = sorted(name for name, report in known.items() if report is not IOUring.AVAILABLE)
    if without:
        names = ", ".join(without[:NAMES_MAX])
        return Finding(
            CONDITION_IO_URING,
            False,
            known[without[0]].value,
            f"not on {len(without)} of {len(known)} ready nodes ({names}): slower threads read there. "
            "sysctl kernel.io_uring_disabled=0 allows it; a pod's seccomp profile must allow it, too",
        )
    if not known:
        return Finding(CONDITION_IO_URING, None, "NotReported", "no ready node has said so far")
    return Finding(
        CONDITION_IO_URING, True, "Available", "on all ready nodes; a pod's seccomp profile must allow it, too"
    )


def _calibrated(ready: Sequence[NodeState]) -> Finding:
    missing = sorted(node.view.name for node in ready if not (node.profile and node.profile.measured_at))
    if not ready:
        return Finding(CONDITION_CALIBRATED, False, "NoReadyNodes", "no ready node to measure")
    if not missing:
        return Finding(CONDITION_CALIBRATED, True, "Calibrated", f"all {len(ready)} ready nodes are measured")
    failed = sorted(
        (node for node in ready if node.profile and node.profile.reason and not node.profile.measured_at),
        key=lambda node: node.view.name,
    )
    if failed and failed[0].profile:
        first = failed[0].profile
        text = f"{failed[0].view.name}: {first.message}; {len(missing)} of {len(ready)} ready nodes are not measured"
        return Finding(CONDITION_CALIBRATED, False, word(first.reason), text)
    names = ", ".join(missing[:NAMES_MAX])
    return Finding(CONDITION_CALIBRATED, False, "Measuring", f"{len(missing)} of {len(ready)} nodes wait: {names}")


def _silence_seconds(desired: Sequence[NodeState], now: datetime) -> float | None:
    """Return when the first node agent would be silent, if nothing more came from it."""
    heartbeats = (node.view.cache.agent.heartbeat_time for node in desired if node.view.cache)
    near = [beat for beat in heartbeats if beat and abs(now - beat) <= SILENT_AFTER]
    left = [(beat + SILENT_AFTER - now).total_seconds() for beat in near]
    return max(min(left), 0.0) + 1.0 if left else None
