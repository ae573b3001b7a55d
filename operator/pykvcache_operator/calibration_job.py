"""The Job that measures one pool's disk on one node: how it is built, how it is seen, what its answer means. Pure.

A Job is pinned by affinity, not by nodeName, which would bypass the scheduler and fail on a full node. It has no API
credential: its answer is its termination message, which whoever runs in the container may have written, so nothing in
it is trusted. All that must be known of a Job stands in its annotations, so that nothing is remembered elsewhere.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from pykvcache_contract.api.pool import KVCachePool, Volume
from pykvcache_contract.calibration import (
    DOCUMENT_SIZE_BYTES_MAX,
    EXIT_UNSUPPORTED,
    MESSAGE_LENGTH_MAX,
    StorageCalibration,
    decode_calibration,
    plain_text,
)
from pykvcache_contract.names import API_GROUP, API_VERSION, DRIVER_NAME, POOL_ATTRIBUTE, POOL_KIND, POOL_NAME_LABEL
from pykvcache_operator.resources import POOL_UID_LABEL

COMPONENT = "calibration"
COMPONENT_LABELS = {"app.kubernetes.io/name": "py-kvcache", "app.kubernetes.io/component": COMPONENT}
"""On Jobs and their pods; by them the operator lists its Jobs and network policies find the pods."""
CONTAINER = "calibrate"
MOUNT_PATH = "/pool"
RESULT_PATH = "/dev/termination-log"
BYTES_MAX = 4 << 30
"""Of test files; the command itself takes at most a twentieth of the free space."""
BYTES_LEAST = 64 << 20
"""Less says nothing about a disk, however small the pool is."""
FULL_SECONDS = 15
SHORT_SECONDS = 3
"""Enough to tell a worn or throttled disk from a healthy one of the same kind."""
DEADLINE_SECONDS = 300
"""Measuring takes seconds: the rest is for the image and for a node that is full at the moment."""
BACKOFF_LIMIT = 2
KEPT_SECONDS = 600
"""How long a Job that has ended waits for us before Kubernetes removes it."""
CALIBRATION_DIRECTORY = "calibration"
"""The node agent's directory for us inside a pool's, where no volume of the CSI driver is mounted."""
USER = 65532
"""Any but root; the directory belongs to nobody in particular."""

ATTEMPT_MAX = 999_999
"""Attempts are no longer counted then."""

NODE_ANNOTATION = f"{API_GROUP}/calibration-node"
KEY_ANNOTATION = f"{API_GROUP}/calibration-key"
ATTEMPT_ANNOTATION = f"{API_GROUP}/calibration-attempt"
SHORT_ANNOTATION = f"{API_GROUP}/calibration-short"

Document = dict[str, Any]
_TAINT_KEYS = ("nvidia.com/gpu", "amd.com/gpu", "habana.ai/gaudi")
"""Nodes with accelerators repel what needs none, sometimes with NoExecute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """What all Jobs have in common.

    Args:
        image: has the `pykvcache` command with its bench extra.
        priority_class: of pods that never preempt others; "" for the cluster's default. Kubernetes takes a preemption
            policy from a class only and refuses pods that name another one themselves.
    """

    namespace: str
    image: str
    image_pull_secrets: tuple[str, ...] = ()
    priority_class: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartJob:
    """A Job to create.

    Args:
        key: what is measured, see `calibration.profile_key`.
        attempt: 1 for the first since the last success.
        short: a few seconds only, to compare with other nodes.
    """

    node: str
    key: str
    attempt: int
    short: bool


class JobState(Enum):
    """How far a Job is."""

    ACTIVE = "active"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob:
    """A Job as the API shows it, with its last pod's end.

    Args:
        finished: when it succeeded or failed; None while it is active.
        job_reason: of its failure, such as DeadlineExceeded.
        message: the termination message; None if no pod's end has been seen (yet).
        container_reason: of the container's end, such as OOMKilled.
    """

    name: str
    pool_uid: str
    node: str
    key: str
    attempt: int
    short: bool
    created: datetime
    is_deleting: bool = False
    state: JobState = JobState.ACTIVE
    finished: datetime | None = None
    job_reason: str = ""
    message: str | None = None
    exit_code: int | None = None
    container_reason: str = ""


@dataclass(frozen=True, slots=True)
class CalibrationFailure:
    """Why there is no measurement: one word for programs, a sentence for people."""

    reason: str
    message: str


def job_name(pool_uid: str, start: StartJob) -> str:
    """Return a Job's name, the same for the same attempt at the same thing: creating it twice creates it once."""
    text = "\n".join((pool_uid, start.node, start.key, str(start.attempt)))
    return f"pykvcache-calibrate-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def build_job(pool: KVCachePool, start: StartJob, settings: JobSettings) -> Document:
    """Return the Job that measures a pool's disk on a node."""
    uid_label = {POOL_UID_LABEL: pool.metadata.uid}
    owner = {"apiVersion": f"{API_GROUP}/{API_VERSION}", "kind": POOL_KIND, "name": pool.name, "uid": pool.metadata.uid}
    on_exit = {"containerName": CONTAINER, "operator": "In", "values": [EXIT_UNSUPPORTED]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(pool.metadata.uid, start),
            "namespace": settings.namespace,
            "labels": {**COMPONENT_LABELS, **uid_label, POOL_NAME_LABEL: pool.name},
            "annotations": {
                NODE_ANNOTATION: start.node,
                KEY_ANNOTATION: start.key,
                ATTEMPT_ANNOTATION: str(start.attempt),
                SHORT_ANNOTATION: str(start.short).lower(),
            },
            "ownerReferences": [owner],
        },
        "spec": {
            "backoffLimit": BACKOFF_LIMIT,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": on_exit},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            # Not the label with the pool's name: on pods it asks for the cache.
            "template": {
                "metadata": {"labels": {**COMPONENT_LABELS, **uid_label}},
                "spec": _pod_spec(pool, start, settings),
            },
        },
    }


def _pod_spec(pool: KVCachePool, start: StartJob, settings: JobSettings) -> Document:
    on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [start.node]}]}
    spec: Document = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [on_node]}}
        },
        "tolerations": [
            {"operator": "Exists", "effect": "NoSchedule"},
            *({"key": key, "operator": "Exists"} for key in _TAINT_KEYS),
        ],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(pool, start, settings)],
        "volumes": [{"name": "pool", **_volume(pool)}],
    }
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    if settings.priority_class:
        spec["priorityClassName"] = settings.priority_class
    return spec


def _container(pool: KVCachePool, start: StartJob, settings: JobSettings) -> Document:
    storage = pool.spec.storage
    seconds = SHORT_SECONDS if start.short else FULL_SECONDS
    size_bytes = min(BYTES_MAX, max(BYTES_LEAST, storage.capacity_per_node_bytes or BYTES_MAX))
    command = ["pykvcache", "calibrate", "storage", MOUNT_PATH, "--result", RESULT_PATH, "--seconds", str(seconds)]
    command += ["--bytes", str(size_bytes), "--min-free", str(storage.min_free_bytes)]
    return {
        "name": CONTAINER,
        "image": settings.image,
        "command": command,
        # A crash before there is a result leaves the last lines of its log.
        "terminationMessagePath": RESULT_PATH,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # 256 MiB of blocks in flight and the interpreter; page cache where direct I/O is refused.
        "resources": {
            "requests": {"cpu": "100m", "memory": "384Mi"},
            "limits": {"cpu": "2", "memory": "768Mi"},
        },
        "volumeMounts": [{"name": "pool", "mountPath": MOUNT_PATH}],
    }


def _volume(pool: KVCachePool) -> Document:
    """Return the pool's volume; its path is what the pool declares, never what a node says."""
    storage = pool.spec.storage
    if storage.volume is Volume.HOST_PATH:
        return {"hostPath": {"path": f"{storage.path}/{pool.name}/{CALIBRATION_DIRECTORY}", "type": "Directory"}}
    return {"csi": {"driver": DRIVER_NAME, "volumeAttributes": {POOL_ATTRIBUTE: pool.name}}}


# ---- from API objects ----


def read_job(job: Mapping[str, Any], pods: Iterable[Mapping[str, Any]]) -> CalibrationJob | None:
    """Return a Job of ours as the API shows it, None for one that we did not make.

    Args:
        pods: any; those of other Jobs are left out.
    """
    metadata = job["metadata"]
    annotations = metadata.get("annotations") or {}
    pool_uid = (metadata.get("labels") or {}).get(POOL_UID_LABEL, "")
    node, key = annotations.get(NODE_ANNOTATION, ""), annotations.get(KEY_ANNOTATION, "")
    attempt = annotations.get(ATTEMPT_ANNOTATION, "")
    if not (pool_uid and node and key and attempt.isdecimal() and len(attempt) <= len(str(ATTEMPT_MAX))):
        return None
    state, finished, reason = _end_of(job)
    ends = [end for pod in pods if _belongs(pod, metadata["uid"]) and (end := _container_end(pod))]
    end = max(ends, key=lambda end: str(end.get("finishedAt", "")), default=None)
    return CalibrationJob(
        name=metadata["name"],
        pool_uid=pool_uid,
        node=node,
        key=key,
        attempt=max(1, int(attempt)),
        short=annotations.get(SHORT_ANNOTATION) == "true",
        created=_time(metadata["creationTimestamp"]),
        is_deleting="deletionTimestamp" in metadata,
        state=state,
        finished=finished,
        job_reason=reason,
        message=None if end is None else str(end.get("message", "")),
        exit_code=None if end is None else int(end["exitCode"]),
        container_reason="" if end is None else str(end.get("reason", "")),
    )


def _end_of(job: Mapping[str, Any]) -> tuple[JobState, datetime | None, str]:
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
            state = JobState.SUCCEEDED if condition["type"] == "Complete" else JobState.FAILED
            return state, _time(condition["lastTransitionTime"]), str(condition.get("reason", ""))
    return JobState.ACTIVE, None, ""


def _belongs(pod: Mapping[str, Any], job_uid: str) -> bool:
    return any(owner["uid"] == job_uid for owner in pod["metadata"].get("ownerReferences") or ())


def _container_end(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        terminated: Mapping[str, Any] | None = (container.get("state") or {}).get("terminated")
        if container.get("name") == CONTAINER and terminated:
            return terminated
    return None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


# ---- answers ----


def is_overdue(job: CalibrationJob) -> bool:
    """Say whether Kubernetes ended a Job at its deadline; its pods say nothing then."""
    return job.job_reason == "DeadlineExceeded"


def _look_at(job: CalibrationJob) -> str:
    """Return where to look; the Job is deleted when this is read, its Events stay for an hour."""
    return f"kubectl get events -A | grep {job.name}"


def parse_result(job: CalibrationJob) -> StorageCalibration | CalibrationFailure:
    """Return what a Job that has ended says, or in words why it says nothing; it may say anything."""
    if is_overdue(job):
        return CalibrationFailure(
            "DeadlineExceeded",
            f"not done within {DEADLINE_SECONDS} s: a policy refused the pod, the node had no room for it, the image "
            f"cannot be pulled, the volume was not mounted, or the disk hangs; {_look_at(job)}",
        )
    if job.message is None or job.exit_code is None:
        return CalibrationFailure(
            "NoResult", f"no pod of it was seen to end: evicted, refused or removed; {_look_at(job)}"
        )
    if job.container_reason == "OOMKilled":
        return CalibrationFailure(
            "OutOfMemory", "the container was killed for its memory; is its image of this release?"
        )
    try:
        said = decode_calibration(job.message)
    except ValueError as error:
        return _unreadable(job, error)
    if isinstance(said, StorageCalibration):
        if job.exit_code == 0:
            return said
        return CalibrationFailure("Crashed", f"it exited with {job.exit_code} after it had measured")
    if job.exit_code == 0:
        return CalibrationFailure("BadResult", "it succeeded and says that it failed; is the image of this release?")
    return CalibrationFailure("Unsupported" if job.exit_code == EXIT_UNSUPPORTED else "NotMeasured", said.message)


def _unreadable(job: CalibrationJob, error: ValueError) -> CalibrationFailure:
    if job.exit_code == 0:
        return CalibrationFailure("BadResult", f"its answer cannot be used: {error}")
    message = (job.message or "")[-DOCUMENT_SIZE_BYTES_MAX:].strip()
    last = plain_text(message.rsplit("\n", 1)[-1], MESSAGE_LENGTH_MAX)
    return CalibrationFailure("Crashed", f"it exited with {job.exit_code}: {last or 'it said nothing'}")
