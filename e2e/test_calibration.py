"""What a real API server and Job controller make of a calibration Job; its pods end as the test says."""

import json
import uuid

import pytest

from harness.crds import install_crds
from harness.waiting import NotYetError, wait_for
from pykvcache_contract.api.pool import KVCachePool
from pykvcache_contract.calibration import CalibrationRefusal, encode_calibration
from pykvcache_operator.calibration_job import (
    CalibrationFailure,
    JobSettings,
    JobState,
    StartJob,
    build_job,
    parse_result,
    read_job,
)

pytestmark = [pytest.mark.e2e, pytest.mark.short, pytest.mark.slow]

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
LOW = {"value": -10, "preemptionPolicy": "Never", "globalDefault": False}


@pytest.fixture
def pool(kubectl):
    """A pool that owns Jobs."""
    install_crds(kubectl)
    name = f"p{uuid.uuid4().hex[:8]}"
    spec = {"storage": {"type": "NodeLocal", "capacityPerNode": "10Gi"}}
    kubectl.apply(
        {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": name}, "spec": spec}
    )
    yield KVCachePool.parse(kubectl.get("kvcachepool", name))
    kubectl.delete("kvcachepool", name)


@pytest.fixture
def restricted(kubectl, namespace):
    """kubectl for a namespace like the operator's."""
    kubectl.patch("namespace", namespace, {"metadata": {"labels": RESTRICTED}})
    return kubectl.within(namespace)


@pytest.fixture
def priority_class(kubectl):
    """Name of a class of pods that never preempt others."""
    name = f"low-{uuid.uuid4().hex[:8]}"
    kubectl.apply({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, **LOW})
    yield name
    kubectl.delete("priorityclass", name)


def only_pod(kubectl):
    """Return the one pod of the namespace."""
    pods = kubectl.list("pods")
    if len(pods) != 1:
        raise NotYetError(f"{len(pods)} pods; events: {[event['message'] for event in kubectl.list('events')]}")
    return pods[0]


def has_ended(kubectl, name):
    """Return the Job as we read it, once it has ended."""
    job = read_job(kubectl.get("job", name), kubectl.list("pods"))
    if job.state is JobState.ACTIVE:
        raise NotYetError(json.dumps(kubectl.get("job", name)["status"]))
    return job


def test_the_job_makes_a_restricted_pod_that_preempts_nobody_and_exit_42_ends_it(
    api_server, restricted, namespace, pool, priority_class
):
    settings = JobSettings(namespace=namespace, image="registry/sidecar:1", priority_class=priority_class)
    start = StartJob(node="gpu-7", key="0123", attempt=3, short=True)
    built = build_job(pool, start, settings)
    restricted.apply(built)
    pod = wait_for("the pod", lambda: only_pod(restricted), limit_s=120)
    assert pod["spec"]["preemptionPolicy"] == "Never"
    name = built["metadata"]["name"]
    seen = read_job(restricted.get("job", name), [pod])
    assert (seen.node, seen.key, seen.attempt, seen.short, seen.state) == ("gpu-7", "0123", 3, True, JobState.ACTIVE)

    message = encode_calibration(CalibrationRefusal("/pool cannot be written: mount it read-write", retry=False))
    end = {"exitCode": 42, "message": message, "reason": "Error", "finishedAt": "2026-12-01T12:00:20Z"}
    container = {"name": "calibrate", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Failed", "containerStatuses": [{**container, "state": {"terminated": end}}]}
    restricted.patch("pod", pod["metadata"]["name"], {"status": status}, subresource="status")
    job = wait_for("the end of the Job", lambda: has_ended(restricted, name), limit_s=120)
    assert (job.state, job.job_reason) == (JobState.FAILED, "PodFailurePolicy")
    said = "/pool cannot be written: mount it read-write"
    assert parse_result(job) == CalibrationFailure("Unsupported", said)
