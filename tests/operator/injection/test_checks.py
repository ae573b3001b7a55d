"""Why a labelled pod goes without the cache."""

import pytest

from pykvcache_contract.api.pool import FAILING_NODES_MAX
from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection.inject import inject
from pykvcache_operator.injection.outcome import Result

HOST_PATH = {"type": "NodeLocal", "capacityPerNode": "1Gi", "path": "/mnt/a", "volume": "HostPath"}
CLAIM = {"type": "SharedFilesystem", "claimName": "kv"}
ALLOWED = {"names": ["team"]}


def ready(status, reason, message="because", **more):
    when = "2026-01-31T12:00:00Z"
    condition = {"type": "Ready", "status": status, "reason": reason, "message": message, "lastTransitionTime": when}
    return {"conditions": [condition], **more}


def reason_of(outcome):
    """Return why a pod was skipped; the annotation must say the same."""
    if outcome.result is not Result.SKIPPED:
        return None
    text = outcome.pod["metadata"]["annotations"]["pykvcache.io/skipped"]
    assert text == f"{outcome.reason.word}: {outcome.message}"
    assert outcome.message
    return outcome.reason


def test_a_pool_that_is_not_there_or_on_its_way_out_is_named(injector):
    missing = injector(injector.pod(pool="fats"))
    assert reason_of(missing) is SkipReason.POOL_NOT_FOUND
    assert "'fats'" in missing.message
    assert reason_of(injector(injector.pod(pool=""))) is SkipReason.POOL_NOT_FOUND
    assert reason_of(injector(injector.pod(), injector.pool(deleted=True))) is SkipReason.POOL_DELETED


def test_a_skipped_pod_differs_by_one_annotation_only(injector):
    pod = injector.pod(pool="fats", annotations={"a": "b"})
    new = injector(pod).pod
    assert new["metadata"]["annotations"].pop("pykvcache.io/skipped")
    assert new == pod


def test_only_namespaces_that_the_pool_admits_get_it(injector):
    by_name = injector.pool(allowedNamespaces=ALLOWED)
    by_label = injector.pool(allowedNamespaces={"matchLabels": {"tier": "gold"}})
    assert reason_of(injector(injector.pod(), by_name)) is None
    assert reason_of(injector(injector.pod(), by_label)) is SkipReason.NAMESPACE_NOT_ALLOWED
    assert reason_of(injector(injector.pod(), by_label, labels={"tier": "gold"})) is None


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        ("baseline", SkipReason.POD_SECURITY),
        ("restricted", SkipReason.POD_SECURITY),
        ("privileged", None),
        (None, None),
    ],
)
def test_host_paths_are_not_tried_where_pod_security_refuses_them(injector, level, reason):
    labels = {"pod-security.kubernetes.io/enforce": level} if level else {}
    assert reason_of(injector(injector.pod(), injector.pool(storage=HOST_PATH), labels=labels)) is reason
    assert reason_of(injector(injector.pod(), labels=labels)) is None


def test_a_host_path_is_the_namespaces_own_or_that_of_all(injector):
    def path(**spec):
        return injector(injector.pod(), injector.pool(storage=HOST_PATH, **spec)).pod["spec"]["volumes"][-1]["hostPath"]

    assert path() == {"path": "/mnt/a/fast/ns/team", "type": "DirectoryOrCreate"}
    assert path(sharing="Pool", allowedNamespaces=ALLOWED)["path"] == "/mnt/a/fast/shared"


def test_a_host_path_that_nobody_can_name_is_a_reason(injector):
    without = injector.pool(storage={**HOST_PATH, "path": ""})
    assert reason_of(injector(injector.pod(), without)) is SkipReason.POOL_NOT_READY
    refused = injector.pool(storage=HOST_PATH, status=ready("False", "PathNotAllowed"))
    assert reason_of(injector(injector.pod(), refused)) is SkipReason.POOL_NOT_READY
    waiting = injector.pool(storage=HOST_PATH, status=ready("False", "NotEnoughNodes"))
    assert reason_of(injector(injector.pod(), waiting)) is None


def test_offline_a_host_path_needs_the_namespace(injector):
    def offline(pod):
        pools = {"fast": injector.pool(storage=HOST_PATH)}
        return inject(pod, pools=pools, namespace=None, settings=injector.settings)

    assert reason_of(offline(injector.pod())) is SkipReason.POOL_NOT_READY
    pod = injector.pod()
    pod["metadata"]["namespace"] = "x"
    assert offline(pod).pod["spec"]["volumes"][-1]["hostPath"]["path"] == "/mnt/a/fast/ns/x"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({}, SkipReason.POOL_NOT_READY),
        (ready("False", "ClaimNotFound"), SkipReason.POOL_NOT_READY),
        (ready("False", "ClaimPending"), None),
        (ready("True", "ClaimBound"), None),
        (ready("True", "ClaimBound", claims=[{"namespace": "team", "capacityBytes": 1}]), None),
        (ready("True", "ClaimBound", claims=[{"namespace": "other", "capacityBytes": 1}]), SkipReason.POOL_NOT_READY),
        (ready("True", "ClaimBound", claims=[{"namespace": f"n{i}", "capacityBytes": 1} for i in range(256)]), None),
    ],
)
def test_no_pod_waits_for_a_claim_that_is_missing(injector, status, reason):
    assert reason_of(injector(injector.pod(), injector.pool(storage=CLAIM, status=status))) is reason


def test_a_node_local_pool_that_is_not_ready_is_mounted_all_the_same(injector):
    failing = [{"name": "a", "reason": "DiskNotMounted"}]
    pool = injector.pool(status=ready("False", "NotEnoughNodes", nodesDesired=1, failingNodes=failing))
    assert reason_of(injector(injector.pod(), pool)) is None


def test_where_no_node_has_an_agent_no_pod_waits_for_its_driver(injector):
    failing = [{"name": name, "reason": "NoNodeAgent"} for name in ("a", "b")]
    nowhere = injector.pool(status=ready("False", "NotEnoughNodes", nodesDesired=2, failingNodes=failing))
    somewhere = injector.pool(status=ready("False", "NotEnoughNodes", nodesDesired=3, failingNodes=failing))
    assert reason_of(injector(injector.pod(), nowhere)) is SkipReason.POOL_NOT_READY
    assert reason_of(injector(injector.pod(), somewhere)) is None


@pytest.mark.parametrize(("ready_count", "reason"), [(0, SkipReason.POOL_NOT_READY), (1, None)])
def test_of_a_large_cluster_without_agents_the_first_nodes_tell(injector, ready_count, reason):
    failing = [{"name": f"n{index}", "reason": "NoNodeAgent"} for index in range(FAILING_NODES_MAX)]
    counts = {"nodesDesired": 500, "nodesReady": ready_count, "failingNodes": failing}
    pool = injector.pool(status=ready("False", "NotEnoughNodes", **counts))
    assert reason_of(injector(injector.pod(), pool)) is reason


@pytest.mark.parametrize("spec", [{"os": {"name": "windows"}}, {"nodeSelector": {"kubernetes.io/os": "windows"}}])
def test_windows_pods_stay_as_they_are(injector, spec):
    assert reason_of(injector(injector.pod(**spec))) is SkipReason.UNSUPPORTED_POD


def test_a_static_pod_is_changed_in_its_file_or_not_at_all(injector):
    pod = injector.pod(annotations={"kubernetes.io/config.mirror": "hash"})
    assert reason_of(injector(pod)) is SkipReason.UNSUPPORTED_POD


@pytest.mark.parametrize(
    "spec",
    [
        {"initContainers": [{"name": "pykvcache-library"}]},
        {"initContainers": [{"name": "pykvcache-sidecar", "restartPolicy": "Always"}]},
        {"volumes": [{"name": "pykvcache-pool", "emptyDir": {}}]},
        {"container": {"volumeMounts": [{"name": "mine", "mountPath": "/pykvcache/pool"}]}},
        {"container": {"volumeMounts": [{"name": "mine", "mountPath": "//pykvcache/x/../library/"}]}},
        {"container": {"volumeMounts": [{"name": "mine", "mountPath": "/pykvcache"}]}},
        {"container": {"volumeDevices": [{"name": "mine", "devicePath": "/pykvcache/pool"}]}},
    ],
)
def test_what_the_user_has_under_a_name_of_ours_stays_the_users(injector, spec):
    assert reason_of(injector(injector.pod(**spec))) is SkipReason.NAME_TAKEN


def test_paths_that_only_look_like_ours_are_no_reason(injector):
    mounts = [{"name": "mine", "mountPath": path} for path in ("/pykvcache2", "/a/pykvcache", "/")]
    assert reason_of(injector(injector.pod(container={"volumeMounts": mounts}))) is None
