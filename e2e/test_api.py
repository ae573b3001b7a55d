"""What the API server itself makes of pools and nodes: validation, defaults, status, texts; nothing else runs."""

import copy
import json
import uuid
from pathlib import Path

import pytest
import yaml
from kubernetes import client, config

from harness.crds import install_crds
from harness.kubectl import KubectlError

pytestmark = [pytest.mark.e2e, pytest.mark.short, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[1]
API_VERSION = "pykvcache.io/v1alpha1"
BASES = {
    "local": {"type": "NodeLocal", "capacityPerNode": "10Gi"},
    "claim": {"type": "SharedFilesystem", "claimName": "kv-cache"},
    "class": {"type": "SharedFilesystem", "storageClassName": "cephfs", "capacity": "2Ti"},
    "ephemeral": {"type": "Ephemeral", "capacity": "10Gi"},
}
SOME = {"allowedNamespaces": {"names": ["a"]}}


@pytest.fixture(scope="module")
def kubectl(api_server):
    """kubectl for a cluster that knows our kinds."""
    install_crds(api_server.kubectl)
    return api_server.kubectl


@pytest.fixture
def name(kubectl):
    """Name of a pool and of a node of this test."""
    name = f"p{uuid.uuid4().hex[:8]}"
    yield name
    kubectl.delete("kvp", name)
    kubectl.delete("kvn", name)


@pytest.fixture(scope="module")
def pools(kubectl):
    """The API without kubectl, which takes a third of a second each time."""
    with config.new_client_from_config(str(kubectl.kubeconfig)) as connection:
        yield client.CustomObjectsApi(connection)


def pool(name, storage, **spec):
    return {"apiVersion": API_VERSION, "kind": "KVCachePool", "metadata": {"name": name},
            "spec": {"storage": storage, **spec}}  # fmt: skip


def changed(document, change):
    """Return a copy with `change` merged in; None removes."""
    document = copy.deepcopy(document)
    for key, value in change.items():
        if value is None:
            document.pop(key, None)
        elif isinstance(value, dict) and isinstance(document.get(key), dict):
            document[key] = changed(document[key], value)
        else:
            document[key] = value
    return document


def store(**change):
    return {"spec": {"storage": change}}


def spec(**change):
    return {"spec": change}


# base, what is wrong, what is said, a neighbour that is right
REFUSED = [
    ("local", {"metadata": {"name": "a" * 41}}, "at most 40 lower-case letters", {"metadata": {"name": "a" * 40}}),
    ("local", {"metadata": {"name": "a.b"}}, "at most 40 lower-case letters", {"metadata": {"name": "a-b"}}),
    ("local", store(type="Cloud"), 'supported values: "NodeLocal"', {}),
    ("local", store(type=None), "spec.storage.type: Required", {}),
    ("local", spec(storage=None), "spec.storage: Required", {}),
    ("local", store(capacityPerNode=None), "type NodeLocal needs capacityPerNode", {}),
    ("local", store(capacityPerNode="1Ki"), "write bytes from 1Mi to 1Ei", store(capacityPerNode="1Mi")),
    ("local", store(capacityPerNode=1024), "write bytes from 1Mi to 1Ei", store(capacityPerNode=2**20)),
    ("local", store(capacityPerNode="-5Gi"), "write bytes from 1Mi to 1Ei", store(capacityPerNode="1.5Gi")),
    ("local", store(capacityPerNode="5GB"), "write bytes from 1Mi to 1Ei", store(capacityPerNode="5G")),
    ("local", store(capacityPerNode="2Ei"), "write bytes from 1Mi to 1Ei", store(capacityPerNode="1Ei")),
    ("local", store(minFree=-1), "write bytes from 0 to 1Ei", store(minFree=0)),
    ("local", store(capacity="1Gi"), "capacity is for type Ephemeral", {}),
    ("local", store(path="mnt/x"), "write an absolute path", store(path="/mnt/x")),
    ("local", store(path="/mnt/../etc"), "write an absolute path", store(path="/mnt/..etc")),
    ("local", store(path="/mnt/."), "write an absolute path", store(path="/mnt/.a")),
    ("local", store(path="/mnt//x"), "write an absolute path", store(path="/m")),
    ("local", store(path="/mnt/x/"), "write an absolute path", store(path="/mnt/x y")),
    ("local", store(path="/"), "write an absolute path", store(path="")),
    ("local", store(path="/mnt/a\nb"), "write an absolute path", {}),
    ("local", store(path="/" + "a" * 1024), "1024", store(path="/" + "a" * 1023)),
    ("local", store(volume="NFS"), 'supported values: "CSI", "HostPath"', store(volume="HostPath")),
    ("local", store(volume="HostPath", onUnavailable="Block"), "onUnavailable Block needs type NodeLocal",
     store(onUnavailable="Block")),
    ("local", store(claimName="x"), "claimName and storageClassName are for type SharedFilesystem only", {}),
    ("local", spec(storage={"storageClassName": "x", "capacity": "1Gi"}, **SOME),
     "claimName and storageClassName are for type SharedFilesystem only", {}),
    ("local", spec(diskSelector={}, storage={"path": "/mnt/x"}), "storage.path already says which disk",
     spec(diskSelector={})),
    ("local", spec(diskSelector={"types": ["Tape"]}), "Tape", spec(diskSelector={"types": ["NVMe", "SSD"]})),
    ("local", spec(diskSelector={"types": ["SSD", "SSD"]}), "Duplicate", spec(diskSelector={"types": ["SSD"]})),
    ("local", spec(diskSelector={"minSize": "big"}), "write bytes from 0", spec(diskSelector={"minSize": "1T"})),
    ("local", spec(minReadyNodes=-1), "minReadyNodes", spec(minReadyNodes=0)),
    ("local", spec(minReadyNodes="1"), "minReadyNodes", spec(minReadyNodes=10000)),
    ("local", spec(eviction={"highWatermarkPercent": 80}), "lowWatermarkPercent must be below",
     spec(eviction={"highWatermarkPercent": 81})),
    ("local", spec(eviction={"lowWatermarkPercent": 90}), "lowWatermarkPercent must be below",
     spec(eviction={"lowWatermarkPercent": 89})),
    ("local", spec(eviction={"highWatermarkPercent": 100}), "highWatermarkPercent",
     spec(eviction={"highWatermarkPercent": 99})),
    ("local", spec(eviction={"lowWatermarkPercent": 0}), "lowWatermarkPercent",
     spec(eviction={"lowWatermarkPercent": 1})),
    ("local", spec(eviction={"policy": "Random"}), "Random", spec(eviction={"policy": "CostAware"})),
    ("local", spec(eviction={"unusedAfter": "30d"}), "unusedAfter", spec(eviction={"unusedAfter": "0s"})),
    ("local", spec(eviction={"unusedAfter": ""}), "unusedAfter", spec(eviction={"unusedAfter": "1h30m"})),
    ("local", spec(integrity={"scrubBytesPerSecond": "fast"}), "write bytes from 0",
     spec(integrity={"scrubBytesPerSecond": 0})),
    ("local", spec(writeBudgetPerDay="-1"), "write bytes from 0", spec(writeBudgetPerDay="2T")),
    ("local", spec(calibration={"maxAge": "59m"}), "at least 1h", spec(calibration={"maxAge": "60m"})),
    ("local", spec(calibration={"maxConcurrentNodes": 0}), "maxConcurrentNodes",
     spec(calibration={"maxConcurrentNodes": 100})),
    ("local", spec(sharing="Pool"), "name those that may in allowedNamespaces", spec(sharing="Pool", **SOME)),
    ("local", spec(sharing="Pool", allowedNamespaces={}), "name those that may in allowedNamespaces",
     spec(sharing="Pool", allowedNamespaces={"matchLabels": {"a": "b"}})),
    ("local", spec(allowedNamespaces={"names": ["A"]}), "write lower-case letters", spec(allowedNamespaces={})),
    ("local", spec(deletionPolicy="Forget"), "Forget", spec(deletionPolicy="Retain")),
    ("claim", store(claimName=None), "needs either claimName", {}),
    ("claim", store(capacity="1Gi"), "capacity is for type Ephemeral and for storageClassName only", {}),
    ("claim", store(capacityPerNode="1Gi"), "capacityPerNode is for type NodeLocal only", {}),
    ("claim", store(claimName="A_b"), "write lower-case letters", store(claimName="a.b-c")),
    ("claim", store(path="/mnt/x"), "path is for type NodeLocal only", {}),
    ("claim", store(volume="HostPath"), "volume is for type NodeLocal only", store(volume="CSI")),
    ("claim", store(minFree="1Gi"), "minFree is for type NodeLocal only", store(minFree="10240Mi")),
    ("claim", store(onUnavailable="Block"), "onUnavailable Block needs", store(onUnavailable="Degrade")),
    ("claim", spec(nodeSelector={"a": "b"}), "nodeSelector is for storage.type NodeLocal only", spec(nodeSelector={})),
    ("claim", spec(diskSelector={}), "diskSelector is for storage.type NodeLocal only", {}),
    ("claim", spec(minReadyNodes=2), "minReadyNodes is for storage.type NodeLocal only", spec(minReadyNodes=1)),
    ("claim", spec(calibration={"maxAge": "1h"}), "calibration measures the nodes' disks",
     spec(calibration={"enabled": False})),
    ("claim", spec(sharing="Pool", **SOME), "sharing Pool is for storage.type NodeLocal only", spec(**SOME)),
    ("claim", spec(eviction={"highWatermarkPercent": 91}), "eviction is done by the node agent",
     spec(eviction={"highWatermarkPercent": 90})),
    ("class", spec(eviction={"unusedAfter": "1h"}), "eviction is done by the node agent", spec(eviction={})),
    ("ephemeral", spec(eviction={"policy": "CostAware"}), "eviction is done by the node agent",
     spec(eviction={"policy": "LRU"})),
    ("ephemeral", spec(eviction={"lowWatermarkPercent": 81}), "eviction is done by the node agent", {}),
    ("claim", spec(integrity={"scrubBytesPerSecond": 0}), "integrity is watched by the node agent",
     spec(integrity={"scrubBytesPerSecond": 16 * 2**20})),
    ("claim", spec(writeBudgetPerDay=1), "writeBudgetPerDay is kept by the node agent", spec(writeBudgetPerDay=0)),
    ("ephemeral", spec(**SOME), "allowedNamespaces has no effect", {}),
    ("ephemeral", spec(deletionPolicy="Retain"), "deletionPolicy Retain has no effect", spec(deletionPolicy="Delete")),
    ("class", store(capacity=None), "storageClassName needs capacity", {}),
    ("class", store(claimName="x"), "needs either claimName", {}),
    ("class", spec(allowedNamespaces=None), "name those that get one in allowedNamespaces",
     spec(allowedNamespaces={"matchLabels": {"a": "b"}})),
    ("ephemeral", store(capacity=None), "type Ephemeral needs capacity", {}),
    ("ephemeral", store(capacityPerNode="1Gi"), "capacityPerNode is for type NodeLocal only", {}),
]  # fmt: skip

# base, what is changed in an existing pool, what is said, a change that is allowed
UNCHANGEABLE = [
    ("local", {"storage": {"type": "Ephemeral", "capacityPerNode": None, "capacity": "1Gi"}}, "storage.type cannot be",
     {"storage": {"capacityPerNode": "5Gi"}}),
    ("local", {"storage": {"path": "/mnt/y"}}, "storage.path cannot be changed", {"storage": {"minFree": "1Gi"}}),
    ("local", {"storage": {"volume": "HostPath"}}, "storage.volume cannot be changed",
     {"storage": {"onUnavailable": "Block"}}),
    ("local", {"sharing": "Pool", **SOME}, "sharing cannot be changed", SOME),
    ("class", {"storage": {"storageClassName": "nfs"}}, "storage.storageClassName cannot be changed", {"eviction": {}}),
    ("class", {"storage": {"capacity": "1Ti"}}, "capacity of claims can only grow", {"storage": {"capacity": "3Ti"}}),
    ("ephemeral", {"storage": {"capacity": "0"}}, "write bytes from 1Mi", {"storage": {"capacity": "5Gi"}}),
]  # fmt: skip


def base(kind, name):
    return pool(name, BASES[kind], **(SOME if kind == "class" else {}))


def try_out(pools, document):
    """Validate without storing anything."""
    group, version = API_VERSION.split("/")
    pools.create_cluster_custom_object(group, version, "kvcachepools", document, dry_run="All")


def rule_messages(schema):
    """Yield the messages of all rules between fields; a field's own bounds say what to write."""
    for rule in schema.get("x-kubernetes-validations", []):
        if not rule["message"].startswith("write "):
            yield rule["message"]
    for child in schema.get("properties", {}).values():
        yield from rule_messages(child)


@pytest.mark.parametrize(("kind", "bad", "message", "good"), REFUSED)
def test_a_pool_that_cannot_work_is_refused_and_its_neighbour_is_not(pools, kind, bad, message, good):
    document = base(kind, "tried")
    with pytest.raises(client.ApiException) as refusal:
        try_out(pools, changed(document, bad))
    assert refusal.value.status == 422
    assert message in json.loads(refusal.value.body)["message"]
    try_out(pools, changed(document, good))


def test_every_rule_of_the_crd_is_tried():
    tried = [message for _, _, message, _ in [*REFUSED, *UNCHANGEABLE]]
    crd = yaml.safe_load((REPOSITORY / "crds" / "pykvcache.io_kvcachepools.yaml").read_text())
    messages = list(rule_messages(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    assert messages
    assert [] == [message for message in messages if not any(words in message for words in tried)]


@pytest.mark.parametrize(("kind", "bad", "message", "good"), UNCHANGEABLE)
def test_what_would_leave_data_behind_cannot_be_changed(kubectl, name, kind, bad, message, good):
    kubectl.apply(base(kind, name))
    with pytest.raises(KubectlError) as refusal:
        kubectl.patch("kvp", name, {"spec": bad})
    assert message in str(refusal.value)
    kubectl.patch("kvp", name, {"spec": good})


def test_an_unknown_field_is_refused_by_kubectl_which_asks_for_it(kubectl):
    misspelt = json.dumps(changed(base("local", "tried"), store(capacityPerNodes="1Gi")))
    with pytest.raises(KubectlError, match=r'unknown field "spec\.storage\.capacityPerNodes"'):
        kubectl.run("create", "--dry-run=server", "-f", "-", text=misspelt)


def test_defaults_are_visible_in_the_stored_pool(kubectl, name):
    kubectl.apply(base("local", name))
    found = kubectl.get("kvp", name)["spec"]
    assert found["eviction"] == {"policy": "LRU", "highWatermarkPercent": 90, "lowWatermarkPercent": 80,
                                 "unusedAfter": "720h"}  # fmt: skip
    assert found["calibration"] == {"enabled": True, "maxAge": "720h", "maxConcurrentNodes": 1}
    assert found["integrity"] == {"scrubBytesPerSecond": "16Mi"}
    assert (found["storage"]["minFree"], found["storage"]["volume"]) == ("10Gi", "CSI")
    assert (found["sharing"], found["deletionPolicy"], found["minReadyNodes"]) == ("Namespace", "Delete", 1)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_accepted(kubectl, path):
    if "kind: KVCachePool" in path.read_text():
        kubectl.run("create", "--dry-run=server", "--validate=strict", "-f", str(path))
    else:
        kubectl.run("create", "--dry-run=client", "--validate=strict", "-f", str(path))


# ---- status ----


def apply_status(kubectl, kind, name, status, *, manager):
    document = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "status": status}
    apply = ["apply", "--server-side", "--subresource=status", f"--field-manager={manager}", "-f", "-"]
    kubectl.run(*apply, text=json.dumps(document))


def condition(kind, status, reason):
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "x",
        "lastTransitionTime": "2026-01-31T12:00:00Z",
    }


def test_a_status_is_written_apart_from_the_spec_and_each_apart_from_the_other(kubectl, name):
    kubectl.apply({**base("local", name), "status": {"nodesReady": 7}})
    assert "status" not in kubectl.get("kvp", name), "a status that comes with the spec is ignored"
    apply_status(kubectl, "KVCachePool", name, {"nodesReady": 3}, manager="pykvcache-operator")
    found = kubectl.get("kvp", name)
    assert found["status"] == {"nodesReady": 3}
    assert found["metadata"]["generation"] == 1, "a change of the status is no change of what is wanted"


def test_a_pool_shows_in_one_line_how_it_is(kubectl, name):
    kubectl.apply(base("local", name))
    status = {"nodes": "7/8", "capacity": "5.5 TiB", "used": "1.2 TiB", "read": "3.1 GiB/s",
              "conditions": [condition("Ready", "True", "NodesReady")]}  # fmt: skip
    apply_status(kubectl, "KVCachePool", name, status, manager="pykvcache-operator")
    heading, line = kubectl.run("get", "kvp", name).splitlines()
    assert heading.split() == ["NAME", "TYPE", "READY", "REASON", "NODES", "CAPACITY", "USED", "READ", "AGE"]
    shown = [name, "NodeLocal", "True", "NodesReady", "7/8", "5.5", "TiB", "1.2", "TiB", "3.1", "GiB/s"]
    assert line.split()[:-1] == shown
    assert name in kubectl.run("get", "pykvcache")


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [condition("Ready", "Perhaps", "X")]},
        {"conditions": [condition("Ready", "True", "two words")]},
        {"failingNodes": [{"name": f"n{number}", "reason": "Error"} for number in range(11)]},
        {"usedBytes": -1},
    ],
    ids=["unknown status", "reason for people", "too many nodes", "negative"],
)
def test_a_status_that_programs_could_not_read_is_refused(kubectl, name, status):
    kubectl.apply(base("local", name))
    with pytest.raises(KubectlError, match="is invalid"):
        apply_status(kubectl, "KVCachePool", name, status, manager="pykvcache-operator")


def test_the_agent_and_the_operator_write_one_nodes_status_without_undoing_each_other(kubectl, name):
    kubectl.apply({"apiVersion": API_VERSION, "kind": "KVCacheNode", "metadata": {"name": name}})
    pools = [{"name": "p", "uid": "u", "state": "Ready", "capacityBytes": 2**30}]
    agent = {"ioUring": "Available", "pools": pools, "ready": "1/1", "capacity": "1.0 GiB", "used": "0 B"}
    operator = {"profiles": [{"pool": "p", "poolUID": "u", "state": "Measured"}], "read": "3.1 GiB/s"}
    apply_status(kubectl, "KVCacheNode", name, agent, manager="pykvcache-agent")
    apply_status(kubectl, "KVCacheNode", name, operator, manager="pykvcache-operator")
    apply_status(kubectl, "KVCacheNode", name, {**agent, "used": "5 B"}, manager="pykvcache-agent")
    assert kubectl.get("kvn", name)["status"] == {**agent, **operator, "used": "5 B"}
    with pytest.raises(KubectlError, match="conflict with"):
        apply_status(kubectl, "KVCacheNode", name, {**operator, "read": "9 GiB/s"}, manager="pykvcache-agent")
    line = kubectl.run("get", "kvn", name).splitlines()[1]
    assert line.split()[:-1] == [name, "1/1", "1.0", "GiB", "5", "B", "3.1", "GiB/s", "Available"]


# ---- texts ----


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("kvp", "A pool of KV blocks"),
        ("kvp.spec.storage", "most bytes that the pool takes"),
        ("kvp.spec.eviction", "Percent of the capacity in use at which eviction begins"),
        ("kvp.spec.sharing", "Blocks derive from prompts"),
        ("kvp.status", "Ready: pods can use the pool"),
        ("kvn.status.profiles", "Best read bandwidth of all points"),
    ],
)
def test_kubectl_explains_every_field(kubectl, field, text):
    assert text in " ".join(kubectl.run("explain", field).split())
