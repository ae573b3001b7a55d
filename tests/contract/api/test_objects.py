"""Objects of the API between JSON and dataclasses."""

import dataclasses
from collections.abc import Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as some

from pykvcache_contract.api.fields import Form, api_fields, parse, to_dict
from pykvcache_contract.api.node import (
    POINTS_MAX,
    AgentStatus,
    Disk,
    IOUring,
    KVCacheNode,
    NodePool,
    NodePoolState,
    OperatorStatus,
    Profile,
    ProfilePoint,
    ProfileState,
)
from pykvcache_contract.api.objects import MESSAGE_LENGTH_MAX, Condition, ConditionStatus
from pykvcache_contract.api.pool import (
    FailingNode,
    KVCachePool,
    OnUnavailable,
    PoolSpec,
    PoolStatus,
    ReadRange,
    Sharing,
    StorageType,
)
from pykvcache_contract.errors import ConfigurationError

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
SMALLEST = {"storage": {"type": "NodeLocal", "capacityPerNode": "1Gi"}}


def pool(**spec):
    return {"metadata": {"name": "p", "uid": "u"}, "spec": {**SMALLEST, **spec}}


# ---- any value of any type ----


def values(hint, said):
    """Any value that a field may have."""
    if get_origin(hint) is tuple:
        return some.lists(values(get_args(hint)[0], said), max_size=min(said.max_items, 3)).map(tuple)
    if get_origin(hint) is Mapping:
        return some.dictionaries(some.text(max_size=9), some.text(max_size=9), max_size=min(said.max_items, 3))
    if dataclasses.is_dataclass(hint):
        return objects(hint)
    if issubclass(hint, Enum):
        return some.sampled_from(hint)
    if hint is datetime:
        return some.integers(0, 2**32).map(lambda seconds: datetime.fromtimestamp(seconds, timezone.utc))
    if hint is bool:
        return some.booleans()
    if hint is int:
        most = 10**6 if said.form is Form.DURATION else 2**50
        return some.integers(said.minimum or 0, said.maximum or most)
    length = min(said.max_length, 9)
    return (
        some.from_regex(said.pattern, fullmatch=True).filter(lambda text: len(text) <= said.max_length)
        if (said.pattern)
        else some.text(max_size=length)
    )


def objects(kind):
    fields = [field for field in api_fields(kind) if not field.derived]
    required = {field.attribute: values(field.type, field.said) for field in fields if field.required}
    optional = {field.attribute: values(field.type, field.said) for field in fields if not field.required}
    return some.fixed_dictionaries(required, optional=optional).map(lambda chosen: kind(**chosen))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PoolSpec, PoolStatus, AgentStatus, OperatorStatus], ids=lambda kind: kind.__name__)
def test_every_object_survives_being_written_and_read(kind):
    @given(objects(kind))
    def check(value):
        assert parse(kind, to_dict(value), "x") == value

    check()


# ---- reading ----


def test_a_pool_that_says_little_gets_the_defaults():
    found = KVCachePool.parse(pool())
    assert found.name == "p"
    assert found.spec.storage.capacity_per_node_bytes == 2**30
    assert found.spec.storage.min_free_bytes == 10 * 2**30
    assert found.spec.storage.on_unavailable is OnUnavailable.DEGRADE
    assert (found.spec.eviction.high_watermark_percent, found.spec.eviction.low_watermark_percent) == (90, 80)
    assert found.spec.eviction.unused_after_seconds == 720 * 3600
    assert found.spec.calibration.enabled
    assert found.spec.sharing is Sharing.NAMESPACE
    assert found.spec.disk_selector is None
    assert found.spec.allowed_namespaces is None
    assert found.status == PoolStatus()


def test_metadata_that_kubernetes_bounds_itself_are_read_whatever_their_size():
    document = pool()
    document["metadata"] |= {
        "generation": 3,
        "resourceVersion": "17",
        "deletionTimestamp": "2026-01-31T12:00:00Z",
        "annotations": {f"a{number}": "x" * 9999 for number in range(100)},
        "finalizers": ["pykvcache.io/cleanup"],
        "managedFields": [{}],
    }
    found = KVCachePool.parse(document).metadata
    assert (found.generation, found.resource_version, found.deletion_timestamp) == (3, "17", NOON)
    assert len(found.annotations) == 100
    assert found.finalizers == ("pykvcache.io/cleanup",)


def test_fields_of_a_newer_version_are_left_out_and_null_means_absent():
    spec = {"storage": {**SMALLEST["storage"], "tier": "warm", "path": None}, "memory": {"staging": "8Gi"}}
    assert KVCachePool.parse(pool(**spec, diskSelector=None)) == KVCachePool.parse(pool())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"storage": {"type": "Cloud"}}, "KVCachePool.spec.storage.type is 'Cloud', not NodeLocal or SharedFilesystem"),
        ({"storage": {}}, "KVCachePool.spec.storage.type is missing: Where the blocks lie"),
        ({"storage": "big"}, "KVCachePool.spec.storage must be an object, not str 'big'"),
        ({"minReadyNodes": "1"}, "KVCachePool.spec.minReadyNodes must be a whole number, not str '1'"),
        ({"minReadyNodes": True}, "KVCachePool.spec.minReadyNodes must be a whole number"),
        ({"minReadyNodes": -1}, "KVCachePool.spec.minReadyNodes is -1, at least 0"),
        ({"calibration": {"maxConcurrentNodes": 101}}, "calibration.maxConcurrentNodes is 101, at most 100"),
        ({"calibration": {"enabled": 1}}, "calibration.enabled must be true or false"),
        ({"calibration": {"maxAge": "1d"}}, "calibration.maxAge: '1d' is not a duration"),
        ({"calibration": {"maxAge": "1s"}}, "calibration.maxAge is 1, at least 3600"),
        ({"writeBudgetPerDay": "1TB"}, "writeBudgetPerDay: '1TB' is not a quantity"),
        ({"nodeSelector": ["a"]}, "nodeSelector must be an object"),
        ({"nodeSelector": {"a": 1}}, r"nodeSelector\['a'\] must be a text, not int '1'"),
        ({"nodeSelector": {str(number): "" for number in range(17)}}, "nodeSelector has 17 entries, at most 16"),
        ({"diskSelector": {"types": ["NVMe", "Tape"]}}, r"types\[1\] is 'Tape', not NVMe or SSD or HDD or Other"),
        ({"diskSelector": {"types": "NVMe"}}, "types must be a list"),
        ({"allowedNamespaces": {"names": ["A"]}}, r"names\[0\] is 'A'; write lower-case letters"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        KVCachePool.parse(pool(**spec))


@pytest.mark.parametrize("document", [None, [], {"metadata": {"name": "p"}}, {"spec": SMALLEST}])
def test_what_is_no_pool_at_all_is_refused(document):
    with pytest.raises(ConfigurationError, match=r"^KVCachePool"):
        KVCachePool.parse(document)


GOOD_PATHS = ["", "/a", "/mnt/nvme0/py kv.cache", "/.hidden", "/a/..b", "/..."]
BAD_PATHS = [
    "/",
    "a",
    "a/b",
    "//a",
    "/a/",
    "/a//b",
    "/..",
    "/a/..",
    "/a/../b",
    "/.",
    "/a/./b",
    "/a\n",
    "/a\0b",
    "/" + "a" * 1024,
]


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_a_path_without_detours_is_accepted(path):
    storage = {**SMALLEST["storage"], "path": path}
    assert KVCachePool.parse(pool(storage=storage)).spec.storage.path == path


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_with_detours_is_refused_whatever_the_crd_in_the_cluster_says(path):
    with pytest.raises(ConfigurationError, match=r"storage\.path (is|has)"):
        KVCachePool.parse(pool(storage={**SMALLEST["storage"], "path": path}))


@pytest.mark.parametrize(
    "text", ["2026-01-31T12:00:00Z", "2026-01-31T12:00:00.000000+00:00", "2026-01-31T14:00:00+02:00"]
)
def test_times_are_read_in_all_forms_that_kubernetes_writes(text):
    assert parse(AgentStatus, {"heartbeatTime": text}, "x").heartbeat_time == NOON


@pytest.mark.parametrize("text", ["yesterday", 3, "12:00", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ConfigurationError, match=r"x\.heartbeatTime must be a time such as"):
        parse(AgentStatus, {"heartbeatTime": text}, "x")


# ---- writing ----


def test_the_two_owners_of_a_nodes_status_have_no_field_in_common():
    agent, operator = ({field.name for field in api_fields(kind)} for kind in (AgentStatus, OperatorStatus))
    assert agent
    assert operator
    assert not agent & operator


def test_each_owner_of_a_nodes_status_reads_both_halves_and_sends_its_own():
    disk = Disk(mount_path="/mnt", size_bytes=5)
    profile = Profile(
        pool="p", pool_uid="u", state=ProfileState.MEASURED, measured_at=NOON, read_bytes_per_second=2**30
    )
    agent, operator = AgentStatus(io_uring=IOUring.AVAILABLE, disks=(disk,)), OperatorStatus(profiles=(profile,))
    node = KVCacheNode.parse({"metadata": {"name": "n", "uid": "u"}, "status": {**to_dict(agent), **to_dict(operator)}})
    assert (node.agent, node.operator) == (agent, operator)
    assert (node.name, node.profile("p"), node.profile("q"), node.pool("p")) == ("n", profile, None, None)
    document = node.status_document(node.operator)
    assert document["status"].keys() == {"profiles", "read"}
    assert document["metadata"] == {"name": "n"}
    assert (document["apiVersion"], document["kind"]) == ("pykvcache.io/v1alpha1", "KVCacheNode")
    assert node.status_document(node.agent)["status"].keys() == {"disks", "ioUring", "pools", "ready"}


def test_zeros_and_empty_lists_are_sent_and_empty_texts_are_not():
    sent = to_dict(PoolStatus())
    assert sent["nodesReady"] == 0
    assert sent["failingNodes"] == []
    assert "nodes" not in sent
    assert "readBytesPerSecond" not in sent
    empty = Condition(type="Ready", status=ConditionStatus.TRUE, reason="Fine", message="", last_transition_time=NOON)
    assert to_dict(empty)["message"] == "", "a condition without message is refused by Kubernetes's own tools"


def test_the_texts_of_kubectl_get_follow_from_the_numbers():
    read = ReadRange(lowest=3 * 2**30, highest=5 * 2**30)
    status = PoolStatus(
        nodes_ready=7, nodes_desired=8, capacity_bytes=2**40, used_bytes=2**20, read_bytes_per_second=read
    )
    assert (status.nodes, status.capacity, status.used, status.read) == ("7/8", "1.0 TiB", "1.0 MiB", "3.0 GiB/s")
    ready = NodePool(name="a", uid="u", state=NodePoolState.READY, capacity_bytes=2**30, used_bytes=2**20)
    other = NodePool(name="b", uid="v", state=NodePoolState.NOT_READY, capacity_bytes=2**30, used_bytes=2**20)
    agent = AgentStatus(pools=(ready, other))
    assert (agent.ready, agent.capacity, agent.used) == ("1/2", "1.0 GiB", "1.0 MiB")
    assert AgentStatus(pools=(other,)).capacity == ""
    profiles = [Profile(pool=name, pool_uid=name, state=ProfileState.MEASURED, read_bytes_per_second=rate)
                for name, rate in [("a", 2**31), ("b", 2**30), ("c", 0)]]  # fmt: skip
    assert OperatorStatus(profiles=tuple(profiles)).read == "1.0 GiB/s"


def test_what_somebody_else_wrote_into_a_derived_text_is_not_read():
    assert parse(PoolStatus, {"nodes": "9/9", "nodesReady": 1, "nodesDesired": 2}, "x").nodes == "1/2"


def test_a_long_message_is_cut_and_never_refused():
    failing = FailingNode(name="n", reason="Error", message="é" * 5000)
    sent = to_dict(failing)["message"]
    assert len(sent) == MESSAGE_LENGTH_MAX
    assert sent.endswith("é…")


def test_what_the_api_server_would_refuse_is_not_sent():
    point = ProfilePoint(block_bytes=1, depth=1, readers=1, read_bytes_per_second=1, latency_microseconds=1)
    profile = Profile(pool="p", pool_uid="u", state=ProfileState.MEASURED, points=(point,) * POINTS_MAX)
    assert len(to_dict(profile)["points"]) == POINTS_MAX
    with pytest.raises(ConfigurationError, match="points has 25 entries, at most 24"):
        to_dict(dataclasses.replace(profile, points=(point,) * (POINTS_MAX + 1)))
    with pytest.raises(ConfigurationError, match="depth is 0, at least 1"):
        to_dict(dataclasses.replace(point, depth=0))
    with pytest.raises(ConfigurationError, match="name has 254 characters, at most 253"):
        to_dict(FailingNode(name="n" * 254, reason="Error"))


def test_every_type_of_storage_has_a_name_that_explains_itself():
    assert {kind.value for kind in StorageType} == {"NodeLocal", "SharedFilesystem", "Ephemeral"}
