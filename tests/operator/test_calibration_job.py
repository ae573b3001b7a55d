"""The Job of a calibration: what Kubernetes gets, what is read of it, and answers that nobody should trust."""

import json
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.api.objects import Metadata
from pykvcache_contract.api.pool import KVCachePool, PoolSpec, Storage, StorageType, Volume
from pykvcache_contract.calibration import CalibrationRefusal, StorageCalibration, encode_calibration
from pykvcache_operator.calibration_job import (
    CalibrationFailure,
    CalibrationJob,
    JobSettings,
    JobState,
    StartJob,
    build_job,
    job_name,
    parse_result,
    read_job,
)

POOL = KVCachePool(
    metadata=Metadata(name="nvme", uid="uid-1"),
    spec=PoolSpec(storage=Storage(type=StorageType.NODE_LOCAL, capacity_per_node_bytes=800 << 30, min_free_bytes=123)),
)
START = StartJob(node="gpu-7.example.com", key="0123", attempt=2, short=False)
SETTINGS = JobSettings(namespace="pykvcache-system", image="registry/sidecar:1")
CREATED = datetime(2026, 12, 1, 12, tzinfo=timezone.utc)


def pod_spec(pool: KVCachePool = POOL, start: StartJob = START, settings: JobSettings = SETTINGS) -> dict:
    return build_job(pool, start, settings)["spec"]["template"]["spec"]


# ---- what Kubernetes gets ----


def test_the_scheduler_places_the_pod_and_no_taint_of_a_gpu_repels_it():
    spec = pod_spec()
    assert "nodeName" not in spec
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gpu-7.example.com"]}]}
    assert {"operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
    assert "preemptionPolicy" not in spec, "a pod may not choose one; a priority class does"
    assert "priorityClassName" not in spec
    assert pod_spec(settings=replace(SETTINGS, priority_class="low"))["priorityClassName"] == "low"


def test_the_pod_is_restricted_and_has_no_credential():
    spec = pod_spec()
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert set(container["resources"]) == {"requests", "limits"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)


def test_the_job_ends_by_itself_is_not_repeated_in_vain_and_goes_with_its_pool():
    job = build_job(POOL, START, SETTINGS)
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"], spec["ttlSecondsAfterFinished"]) == (2, 300, 600)
    fail, ignore = spec["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [42])
    assert fail["onExitCodes"]["containerName"] == spec["template"]["spec"]["containers"][0]["name"]
    assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a pod failure policy needs it"
    (owner,) = job["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCachePool", "name": "nvme", "uid": "uid-1"}
    assert job["metadata"]["namespace"] == "pykvcache-system"


def test_the_pod_does_not_ask_for_the_cache_itself():
    job = build_job(POOL, START, SETTINGS)
    assert job["metadata"]["labels"]["pykvcache.io/pool"] == "nvme"
    assert "pykvcache.io/pool" not in job["spec"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize(("short", "seconds"), [(False, "15"), (True, "3")])
def test_the_command_is_bounded_by_the_pool(short, seconds):
    (container,) = pod_spec(start=replace(START, short=short))["containers"]
    command = container["command"]
    options = dict(zip(command[4::2], command[5::2], strict=True))
    assert command[:4] == ["pykvcache", "calibrate", "storage", "/pool"]
    assert options == {
        "--result": container["terminationMessagePath"],
        "--seconds": seconds,
        "--bytes": str(4 << 30),
        "--min-free": "123",
    }
    assert container["volumeMounts"][0]["mountPath"] == "/pool"


@pytest.mark.parametrize(("capacity", "size"), [(1 << 20, 64 << 20), (1 << 30, 1 << 30), (1 << 50, 4 << 30)])
def test_test_files_are_no_larger_than_the_pool_within_reason(capacity, size):
    storage = replace(POOL.spec.storage, capacity_per_node_bytes=capacity)
    (container,) = pod_spec(replace(POOL, spec=replace(POOL.spec, storage=storage)))["containers"]
    assert container["command"][container["command"].index("--bytes") + 1] == str(size)


def test_the_pool_is_mounted_by_csi_or_from_the_calibrations_own_host_directory():
    (volume,) = pod_spec()["volumes"]
    assert volume["csi"] == {"driver": "csi.pykvcache.io", "volumeAttributes": {"pool": "nvme"}}
    storage = replace(POOL.spec.storage, volume=Volume.HOST_PATH, path="/mnt/nvme0/pykvcache")
    (volume,) = pod_spec(replace(POOL, spec=replace(POOL.spec, storage=storage)))["volumes"]
    assert volume["hostPath"] == {"path": "/mnt/nvme0/pykvcache/nvme/calibration", "type": "Directory"}


def test_the_name_is_the_same_for_the_same_attempt_and_for_no_other():
    name = job_name("uid-1", START)
    assert name == job_name("uid-1", replace(START, short=True))
    others = [replace(START, node="n2"), replace(START, key="4567"), replace(START, attempt=3)]
    names = {name, job_name("uid-2", START), *(job_name("uid-1", other) for other in others)}
    assert len(names) == 5
    assert len(name) <= 63
    assert build_job(POOL, START, SETTINGS)["metadata"]["name"] == name


# ---- what is read of it ----


def seen(*, conditions: tuple[dict, ...] = (), **metadata: object) -> dict:
    job = build_job(POOL, START, SETTINGS)
    job["metadata"] |= {"uid": "job-uid", "creationTimestamp": "2026-12-01T12:00:00Z"} | metadata
    job["status"] = {"conditions": list(conditions)}
    return job


def pod(*, message: str = "", exit_code: int = 0, at: str = "2026-12-01T12:00:20Z", job: str = "job-uid") -> dict:
    end = {"exitCode": exit_code, "message": message, "finishedAt": at, "reason": "Completed"}
    return {
        "metadata": {"ownerReferences": [{"uid": job}]},
        "status": {"containerStatuses": [{"name": "calibrate", "state": {"terminated": end}}]},
    }


def condition(kind: str, status: str = "True", reason: str = "") -> dict:
    return {"type": kind, "status": status, "reason": reason, "lastTransitionTime": "2026-12-01T12:00:30Z"}


def test_a_job_is_read_as_it_was_built():
    job = read_job(seen(), [])
    assert job == CalibrationJob(
        name=job_name("uid-1", START),
        pool_uid="uid-1",
        node="gpu-7.example.com",
        key="0123",
        attempt=2,
        short=False,
        created=CREATED,
    )
    short = seen()
    short["metadata"]["annotations"]["pykvcache.io/calibration-short"] = "true"
    assert read_job(short, []).short
    assert read_job(seen(deletionTimestamp="2026-12-01T12:00:00Z"), []).is_deleting


def test_the_end_of_the_last_pod_counts():
    pods = [
        pod(message="first", exit_code=1, at="2026-12-01T12:00:10Z"),
        pod(message="last", exit_code=3),
        pod(message="of another", at="2026-12-01T13:00:00Z", job="other"),
        {"metadata": {}, "status": {}},
        {"metadata": {"ownerReferences": [{"uid": "job-uid"}]}},
    ]
    job = read_job(seen(conditions=(condition("Failed", reason="BackoffLimitExceeded"),)), pods)
    assert (job.state, job.job_reason) == (JobState.FAILED, "BackoffLimitExceeded")
    assert job.finished == datetime(2026, 12, 1, 12, 0, 30, tzinfo=timezone.utc)
    assert (job.message, job.exit_code) == ("last", 3)


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ((), JobState.ACTIVE),
        ((condition("Suspended"),), JobState.ACTIVE),
        ((condition("Complete", "False"),), JobState.ACTIVE),
        ((condition("FailureTarget"),), JobState.ACTIVE),
        ((condition("SuccessCriteriaMet"), condition("Complete")), JobState.SUCCEEDED),
    ],
)
def test_only_a_final_condition_ends_a_job(conditions, state):
    job = read_job(seen(conditions=conditions), [pod()])
    assert job.state is state
    assert (job.finished is None) == (state is JobState.ACTIVE)


@pytest.mark.parametrize("attempt", ["", "-1", "1.5", "x", "9999999", "²"])
def test_a_job_that_we_did_not_make_is_left_out(attempt):
    job = seen()
    job["metadata"]["annotations"]["pykvcache.io/calibration-attempt"] = attempt
    assert read_job(job, []) is None
    assert read_job({"metadata": {"name": "x"}}, []) is None


# ---- answers ----

MEASURED = '{"formatVersion":1,"engine":"uring","buffered":false,"filesystem":"xfs","kernel":"6","diskModel":"",\
"readBytesPerSecond":7,"writeBytesPerSecond":5,"contended":null,"complete":true,"seconds":15,"bytes":9,"points":\
[{"blockBytes":4096,"depth":1,"readers":1,"readBytesPerSecond":7,"latencyMicroseconds":3}]}'


def answer(message: str | None, exit_code: int | None = 0, **fields: object) -> StorageCalibration | CalibrationFailure:
    job = read_job(seen(), [])
    return parse_result(replace(job, message=message, exit_code=exit_code, **fields))


def test_a_measurement_is_taken_only_from_a_container_that_succeeded():
    assert answer(MEASURED).read_bytes_per_second == 7
    assert answer(MEASURED, 1).reason == "Crashed"


@pytest.mark.parametrize(
    ("message", "exit_code", "fields", "reason", "text"),
    [
        (None, None, {"job_reason": "DeadlineExceeded"}, "DeadlineExceeded", "image cannot be pulled"),
        (None, None, {}, "NoResult", "kubectl get events -A | grep pykvcache-calibrate-"),
        ("", 137, {"container_reason": "OOMKilled"}, "OutOfMemory", "memory"),
        ("", 0, {}, "BadResult", "no JSON"),
        ("", 1, {}, "Crashed", "it said nothing"),
        ("Traceback\n  File x\nModuleNotFoundError: rich\n", 1, {}, "Crashed", "ModuleNotFoundError: rich"),
        (MEASURED[:-20], 0, {}, "BadResult", "cut off"),
        (MEASURED.replace(":7", ":NaN"), 0, {}, "BadResult", "NaN is no number"),
        (MEASURED.replace(":7", ":1e999"), 0, {}, "BadResult", "readBytesPerSecond"),
        (MEASURED.replace(":7", ":" + "9" * 40), 0, {}, "BadResult", "readBytesPerSecond"),
        (MEASURED.replace('"formatVersion":1', '"formatVersion":9'), 0, {}, "BadResult", "another release"),
        (encode_calibration(CalibrationRefusal("read-only", False)), 42, {}, "Unsupported", "read-only"),
        (encode_calibration(CalibrationRefusal("busy", True)), 1, {}, "NotMeasured", "busy"),
        (encode_calibration(CalibrationRefusal("busy", True)), 0, {}, "BadResult", "says that it failed"),
        ("\x00\x1b[31m" * 600, 1, {}, "Crashed", "?"),
    ],
)
def test_every_other_answer_is_a_failure_that_people_understand(message, exit_code, fields, reason, text):
    failure = answer(message, exit_code, **fields)
    assert failure.reason == reason
    assert text in failure.message
    assert failure.message.isprintable()
    assert len(failure.message) <= 1024


@given(st.text(max_size=200) | st.binary(max_size=4096).map(lambda raw: raw.decode("latin-1")), st.integers(-1, 300))
def test_any_answer_is_judged_without_an_exception(message, exit_code):
    failure = answer(message, exit_code)
    assert isinstance(failure, CalibrationFailure)
    assert failure.message.isprintable()
    assert len(failure.message) <= 1024


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=9), st.lists, max_leaves=9))
def test_a_document_with_any_value_is_judged_without_an_exception(value):
    for name in json.loads(MEASURED):
        answer(json.dumps(json.loads(MEASURED) | {name: value}))
