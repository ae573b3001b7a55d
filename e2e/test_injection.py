"""What the API server says about injected pods: accepted wherever the pod was accepted as it came."""

import json
import uuid
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from harness.random_pods import pods
from harness.waiting import wait_for
from pykvcache_contract.api.pool import KVCachePool
from pykvcache_operator.injection.inject import inject
from pykvcache_operator.injection.outcome import InjectionSettings, Result
from pykvcache_operator.resources import NamespaceFacts

pytestmark = [pytest.mark.e2e, pytest.mark.short, pytest.mark.slow]

SHAPES = sorted((Path(__file__).parents[1] / "tests/operator/injection/shapes").glob("*.yaml"))
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
SETTINGS = InjectionSettings(version="1.2.3", connector_image="r/connector:1", sidecar_image="r/sidecar:1")
STORAGES = {
    "csi": {"type": "NodeLocal", "capacityPerNode": "10Gi"},
    "ephemeral": {"type": "Ephemeral", "capacity": "10Gi"},
    "host-path": {"type": "NodeLocal", "capacityPerNode": "10Gi", "volume": "HostPath", "path": "/mnt/a"},
}
EXAMPLES = 150
ADDED_BYTES_MAX = 6000


@pytest.fixture(scope="module")
def api(api_server):
    """The API without kubectl, which takes a third of a second each time."""
    with config.new_client_from_config(str(api_server.kubectl.kubeconfig)) as connection:
        yield client.CoreV1Api(connection)


@pytest.fixture(scope="module")
def make_namespace(api):
    """Makes a namespace with labels, in which pods can be made; its deletion is not waited for."""
    made = []

    def make(labels=None):
        name = f"injection-{uuid.uuid4().hex[:8]}"
        api.create_namespace({"metadata": {"name": name, "labels": labels or {}}})
        made.append(name)
        api.create_namespaced_service_account(name, {"metadata": {"name": "ours"}})
        return NamespaceFacts(name, labels or {}, False)

    yield make
    for name in made:
        api.delete_namespace(name)


def refusal(api, namespace, pod, *, is_dry=True):
    """Return why the API server refuses a pod, empty if it does not."""
    body = {**pod, "metadata": {**pod["metadata"], "namespace": namespace.name}}
    body["spec"] = {**pod["spec"], "serviceAccountName": "ours"}  # the default one comes some time later
    try:
        api.create_namespaced_pod(
            namespace.name, body, **({"dry_run": "All"} if is_dry else {}), _preload_content=False
        )
    except ApiException as error:
        return json.loads(error.body)["message"]
    return ""


def injected(pod, namespace, storage=STORAGES["ephemeral"]):
    name = pod["metadata"]["labels"]["pykvcache.io/pool"]
    pool = KVCachePool.parse({"metadata": {"name": name, "uid": "u"}, "spec": {"storage": storage}})
    return inject(pod, pools={name: pool}, namespace=namespace, settings=SETTINGS)


def vllm(**spec):
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai",
        "command": ["vllm", "serve", "m"],
        **spec.pop("container", {}),
    }
    metadata = {"generateName": "p-", "labels": {"pykvcache.io/pool": "fast"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container], **spec}}


def restricted():
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    of_pod = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    return vllm(container={"securityContext": context}, securityContext=of_pod)


@pytest.mark.parametrize("path", SHAPES, ids=lambda path: path.stem)
def test_the_pods_of_platforms_are_still_accepted(api, make_namespace, path):
    namespace, pod = make_namespace(), yaml.safe_load(path.read_text())
    assert refusal(api, namespace, pod) == ""
    assert refusal(api, namespace, injected(pod, namespace).pod) == ""


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_a_pod_that_restricted_admits_is_admitted_with_every_kind_of_pool(api, make_namespace, storage):
    namespace = make_namespace(RESTRICTED)
    assert refusal(api, namespace, restricted()) == ""
    for library in ("InitContainer", "ImageVolume", "None"):
        pod = restricted()
        pod["metadata"]["annotations"] = {"pykvcache.io/library": library}
        outcome = injected(pod, namespace, storage)
        is_refused = "volume" in storage
        assert outcome.result is (Result.SKIPPED if is_refused else Result.INJECTED)
        assert refusal(api, namespace, outcome.pod) == ""


@pytest.mark.parametrize("labels", [{}, RESTRICTED], ids=["privileged", "restricted"])
def test_random_pods_that_are_accepted_are_accepted_with_the_cache(api, make_namespace, labels):
    namespace, counts = make_namespace(labels), {"accepted": 0, "injected": 0}

    # The same pods in each run: of others it could happen that the cache suits fewer than are asked for below.
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(pod=pods(is_restricted=bool(labels)), storage=st.sampled_from(list(STORAGES.values())))
    def check(pod, storage):
        if refusal(api, namespace, pod):
            return
        counts["accepted"] += 1
        outcome = injected(pod, namespace, storage)
        counts["injected"] += outcome.result is Result.INJECTED
        assert refusal(api, namespace, outcome.pod) == ""

    check()
    assert counts["accepted"] >= 100, counts
    assert counts["injected"] >= 40, counts


HARD = {"requests.cpu": "4", "limits.cpu": "4", "requests.memory": "8Gi", "limits.memory": "8Gi", "pods": "5"}
RANGE = {
    "type": "Container",
    "min": {"cpu": "10m", "memory": "16Mi"},
    "max": {"cpu": "4", "memory": "8Gi"},
    "maxLimitRequestRatio": {"cpu": "1", "memory": "1"},
}
WIDE = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "1Gi"}}


@pytest.mark.parametrize(
    ("objects", "bad", "sign"),
    [
        ({"quota": HARD}, {}, "must specify"),
        ({"limit_range": RANGE}, WIDE, "ratio"),
        ({"quota": HARD, "limit_range": RANGE}, WIDE, "ratio"),
    ],
    ids=["quota", "limit-range", "both"],
)
def test_quotas_and_limit_ranges_that_admit_the_pod_admit_it_with_the_cache(api, make_namespace, objects, bad, sign):
    namespace = make_namespace()
    if "quota" in objects:
        api.create_namespaced_resource_quota(namespace.name, {"metadata": {"name": "q"}, "spec": {"hard": HARD}})
        wait_for("the quota to count", lambda: api.read_namespaced_resource_quota("q", namespace.name).status.used)
    if "limit_range" in objects:
        api.create_namespaced_limit_range(namespace.name, {"metadata": {"name": "l"}, "spec": {"limits": [RANGE]}})
    refused = vllm(container={"resources": bad})
    wait_for(f"a refusal: {sign}", lambda: sign in refusal(api, namespace, refused))
    size = {"cpu": "2", "memory": "4Gi"}
    pod = vllm(container={"resources": {"requests": size, "limits": size}})
    assert refusal(api, namespace, pod) == ""
    for storage in STORAGES.values():
        outcome = injected(pod, namespace, storage)
        assert (outcome.result, refusal(api, namespace, outcome.pod)) == (Result.INJECTED, "")


def test_a_guaranteed_pod_stays_one(api, make_namespace):
    namespace, size = make_namespace(), {"cpu": "2", "memory": "4Gi"}
    pod = vllm(container={"resources": {"requests": size, "limits": size}})
    for document in (pod, injected(pod, namespace).pod):
        body = {**document, "spec": {**document["spec"], "serviceAccountName": "ours"}}
        assert api.create_namespaced_pod(namespace.name, body, dry_run="All").status.qos_class == "Guaranteed"


@pytest.mark.parametrize(
    "pod",
    [
        vllm(resources={"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}}),
        vllm(container={"resources": {"limits": {"ephemeral-storage": "1Gi"}}}),
        vllm(hostNetwork=True, container={"ports": [{"containerPort": 8000}]}),
        vllm(container={"ports": [{"containerPort": 9478, "name": "pykvcache"}]}),
    ],
    ids=["of-the-pod", "ephemeral-storage", "host-network", "port-taken"],
)
def test_pods_that_leave_no_room_for_ours_are_accepted_with_the_cache(api, make_namespace, pod):
    namespace = make_namespace()
    outcome = injected(pod, namespace)
    assert (outcome.result, refusal(api, namespace, outcome.pod)) == (Result.INJECTED, "")


@pytest.mark.parametrize(
    "value", ["a\nb: c", "x" * 200_000, '{"a": [1]}', "\u202e\x01\x1b[31m", "__proto__", "$(HOME)"]
)
def test_hostile_annotations_neither_refuse_a_pod_nor_get_into_ours(api, make_namespace, value):
    namespace = make_namespace()
    for key in ("library", "staging", "on-conflict", "container", "skipped", "warnings", "__proto__"):
        pod = vllm()
        pod["metadata"]["annotations"] = {f"pykvcache.io/{key.strip('_')}": value}
        assert refusal(api, namespace, pod) == ""
        outcome = injected(pod, namespace)
        assert refusal(api, namespace, outcome.pod) == ""
        ours = outcome.pod["metadata"]["annotations"].get("pykvcache.io/skipped", "")
        assert len(ours) <= 1024
        assert ours.isprintable()


def large(size_bytes):
    """Return a pod of a size, as JSON."""
    pod = vllm(container={"env": [{"name": "LARGE", "value": ""}]})
    pod["spec"]["containers"][0]["env"][0]["value"] = "x" * (size_bytes - len(json.dumps(pod, separators=(",", ":"))))
    return pod


def test_a_pod_as_large_as_the_api_server_takes_is_still_taken(api, make_namespace):
    namespace = make_namespace()
    accepted, refused = 2**20, 2 * 2**20  # etcd counts only what is really written
    while refused - accepted > 100:
        middle = (accepted + refused) // 2
        is_accepted = refusal(api, namespace, large(middle), is_dry=False) == ""
        accepted, refused = (middle, refused) if is_accepted else (accepted, middle)
    largest = injected(large(accepted), namespace)
    assert largest.result is Result.SKIPPED
    assert refusal(api, namespace, largest.pod, is_dry=False) == ""
    for size_bytes in (2**20, 1_390_000, 1_399_500):
        outcome = injected(large(size_bytes), namespace)
        assert refusal(api, namespace, outcome.pod, is_dry=False) == ""
        assert size_bytes > 1_390_000 or outcome.result is Result.INJECTED


def test_what_is_added_is_small(make_namespace):
    pod, namespace = restricted(), make_namespace()
    added = len(json.dumps(injected(pod, namespace).pod)) - len(json.dumps(pod))
    assert added < ADDED_BYTES_MAX
