"""Following the API server and writing to it, with a stand-in that fails when a test wants it to."""

import errno
import threading
from dataclasses import replace

import pytest

from pykvcache_contract.api.node import AgentStatus, Disk, IOUring
from pykvcache_contract.api.pool import DiskType
from pykvcache_sidecar.node.api import ApiError
from pykvcache_sidecar.node.cluster import Cluster
from pykvcache_sidecar.node.kernel import explain, io_uring
from pykvcache_sidecar.node.watcher import (
    CACHE_NODES_PATH,
    NAMESPACES_PATH,
    POOLS_PATH,
    KubernetesSource,
    Watcher,
)
from pykvcache_sidecar.node.writer import HEARTBEAT_SECONDS, SIZES_SECONDS_MIN, StatusWriter
from pykvcache_storage.probe import probe


def pool_document(name, version="1", **spec):
    storage = {"type": "NodeLocal", "capacityPerNode": "1Gi"}
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": version},
        "spec": {"storage": storage, **spec},
    }


def bookmark(version):
    return "BOOKMARK", {"metadata": {"resourceVersion": version}}


class StandInApi:
    """Answers lists and watches from scripts; an error among the answers is raised. The last script ends the test."""

    def __init__(self, stopped):
        self.stopped = stopped
        self.lists = []
        self.watches = []
        self.asked = []
        self.applied = []
        self.refusal = None

    def list(self, path, query=None):
        self.asked.append("list")
        answer = self.lists.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def watch(self, path, *, version, query=None):
        self.asked.append(f"watch {version}")
        events = self.watches.pop(0)
        if not self.watches:
            self.stopped.set()
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield event

    def apply(self, path, body):
        if self.refusal is not None:
            raise self.refusal
        self.applied.append((path, body))
        return body


@pytest.fixture
def stopped(monkeypatch):
    monkeypatch.setattr("pykvcache_sidecar.node.watcher.PAUSE_SECONDS_MIN", 0.001)
    return threading.Event()


@pytest.fixture
def api(stopped):
    return StandInApi(stopped)


@pytest.fixture
def told(api, stopped):
    """Return a function that follows to the end of the scripts and returns everything that was told."""
    seen = []

    def follow():
        Watcher(api, POOLS_PATH, tell=lambda found: seen.append(sorted(found)), heard=lambda: None).run(stopped)
        return seen

    return follow


def test_a_watch_goes_on_where_the_last_one_ended(api, told):
    api.lists = [([pool_document("a")], "10")]
    api.watches = [[("ADDED", pool_document("b", "11")), bookmark("15")], [("DELETED", pool_document("a", "16"))]]
    assert told() == [["a"], ["a", "b"], ["b"]]
    assert api.asked == ["list", "watch 10", "watch 15"]


def test_what_happened_while_a_version_expired_is_found_by_a_new_list(api, told):
    api.lists = [([pool_document("a")], "10"), ([pool_document("c")], "90")]
    api.watches = [[ApiError("too old", status=410)], []]
    assert told() == [["a"], ["c"]]


@pytest.mark.parametrize("events", [[ApiError("connection reset")], [bookmark("10"), ApiError("silent")]])
def test_a_broken_connection_costs_no_list_and_forgets_nothing(api, told, events):
    api.lists = [([pool_document("a")], "10")]
    api.watches = [events, [("MODIFIED", pool_document("a", "12"))]]
    assert told() == [["a"], ["a"]]
    assert api.asked == ["list", "watch 10", "watch 10"]


def test_a_server_that_does_not_answer_is_asked_again_and_complained_of_once(api, told, caplog):
    api.lists = [ApiError("refused"), ApiError("refused"), ([], "1")]
    api.watches = [[]]
    assert told() == [[]]
    assert caplog.text.count("does not tell of") == 1


def test_a_pool_that_cannot_be_read_exists_and_keeps_no_other_waiting(api, caplog):
    cluster = Cluster()
    source = KubernetesSource(api, cluster, node_name="node-1")
    bad = pool_document("bad", sharing="Everybody")
    for _ in range(2):
        source._tell_pools({"good": pool_document("good"), "bad": bad})
    view = cluster.view()
    assert set(view.pools) == {"good"}
    assert view.uids == {"uid-good", "uid-bad"}
    assert caplog.text.count("is left alone") == 1
    assert "sharing" in caplog.text


@pytest.mark.parametrize(
    ("spec", "needed"),
    [
        ({}, False),
        ({"allowedNamespaces": {"names": ["a"]}}, False),
        ({"allowedNamespaces": {"matchLabels": {"a": "b"}}}, True),
        ({"storage": {"type": "NodeLocal", "capacityPerNode": "1Gi", "volume": "HostPath", "path": "/mnt/a"}}, True),
    ],
)
def test_namespaces_are_followed_only_for_pools_that_need_them(api, spec, needed):
    cluster = Cluster()
    KubernetesSource(api, cluster, node_name="node-1")._tell_pools({"p": pool_document("p", **spec)})
    assert cluster.view().needs_namespaces is needed
    assert NAMESPACES_PATH not in api.asked


def test_pools_that_exist_now_are_unknown_when_the_server_does_not_answer(api):
    source = KubernetesSource(api, Cluster(), node_name="node-1")
    api.lists = [([pool_document("a")], "1"), ApiError("refused")]
    assert source.list_uids() == {"uid-a"}
    assert source.list_uids() is None


def test_a_change_wakes_whoever_waits_and_the_same_again_does_not():
    changes = []
    cluster = Cluster()
    cluster.on_change = lambda: changes.append(1)
    for _ in range(2):
        cluster.update(labels={"a": "b"})
    assert len(changes) == 1


# ---- writing ----


class Writing:
    def __init__(self, api):
        self.steady = [1000.0]
        self.status = AgentStatus(kernel="6.1")
        self.cluster = Cluster()
        self.api = api
        self.writer = StatusWriter(
            api,
            cluster=self.cluster,
            node_name="node-1",
            status=lambda: self.status,
            clock=lambda: 1_700_000_000.0 + self.steady[0],
            monotonic=lambda: self.steady[0],
        )

    def after(self, seconds):
        self.steady[0] += seconds
        return self.writer.write_if_due()


@pytest.fixture
def writing(api):
    writing = Writing(api)
    writing.cluster.update(node_uid="node-uid")
    return writing


def test_the_object_is_made_as_the_nodes_and_then_its_status_is_written(writing, api):
    assert writing.after(0)
    (made, owned), (path, body) = api.applied
    assert (made, path) == (f"{CACHE_NODES_PATH}/node-1", f"{CACHE_NODES_PATH}/node-1/status")
    assert owned["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-uid"}
    ]
    assert (body["status"]["kernel"], body["status"]["heartbeatTime"][:4]) == ("6.1", "2023")


def test_nothing_is_written_before_the_node_is_known(api):
    assert not Writing(api).after(0)
    assert api.applied == []


def test_changes_are_written_soon_but_not_at_once_and_nothing_else_but_the_heartbeat(writing):
    assert [writing.after(seconds) for seconds in (0, 1, 10)] == [True, False, False]
    writing.status = replace(writing.status, kernel="6.2")
    assert writing.after(0)
    writing.status = replace(writing.status, kernel="6.3")
    assert [writing.after(seconds) for seconds in (1, 3.9, 0.2)] == [False, False, True]
    assert [writing.after(seconds) for seconds in (HEARTBEAT_SECONDS - 1, 2)] == [False, True]


def test_sizes_alone_are_written_more_seldom(writing):
    def disk(free_bytes):
        return Disk(mount_path="/mnt/a", type=DiskType.OTHER, size_bytes=100, free_bytes=free_bytes)

    writing.status = replace(writing.status, disks=(disk(9),))
    assert writing.after(0)
    writing.status = replace(writing.status, disks=(disk(8),))
    assert [writing.after(seconds) for seconds in (6, SIZES_SECONDS_MIN - 7, 2)] == [False, False, True]
    writing.status = replace(writing.status, disks=(disk(7),), kernel="6.4")
    assert writing.after(6)


def test_what_could_not_be_written_is_written_next_time(writing, api):
    api.refusal = ApiError("away")
    for _ in range(2):
        with pytest.raises(ApiError):
            writing.after(10)
    api.refusal = None
    assert writing.after(0)


def test_a_node_that_was_made_again_gets_an_object_of_its_own(writing, api):
    writing.after(0)
    writing.cluster.update(node_uid="another")
    assert writing.after(1)
    assert api.applied[2][1]["metadata"]["ownerReferences"][0]["uid"] == "another"


def test_reading_the_node_goes_on_after_any_error(api, stopped):
    """The client reads its token from a file, which may be away for a moment."""
    answers = [PermissionError("token"), KeyError("metadata"), {"metadata": {"uid": "node-uid", "labels": {"a": "b"}}}]

    def get(_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        stopped.set()
        return answer

    api.get = get
    cluster = Cluster()
    KubernetesSource(api, cluster, node_name="node-1")._follow_node(stopped)
    assert (cluster.view().labels, cluster.view().node_uid) == ({"a": "b"}, "node-uid")


# ---- the kernel ----


@pytest.mark.parametrize(
    ("code", "sysctl", "meaning"),
    [
        (errno.EPERM, "2\n", IOUring.BLOCKED_BY_SYSCTL),
        (errno.EPERM, "0\n", IOUring.BLOCKED_BY_SECCOMP),
        (errno.EPERM, None, IOUring.BLOCKED_BY_SECCOMP),
        (errno.ENOSYS, "0\n", IOUring.UNSUPPORTED),
        (errno.ENOMEM, "0\n", IOUring.UNSUPPORTED),
    ],
)
def test_a_ring_that_is_refused_is_explained(tmp_path, code, sysctl, meaning):
    path = tmp_path / "io_uring_disabled"
    if sysctl is not None:
        path.write_text(sysctl)
    assert explain(OSError(code, "refused"), path) is meaning


def test_this_kernel_says_the_same_as_the_probe_of_a_directory(tmp_path):
    assert (io_uring() is IOUring.AVAILABLE) == (probe(tmp_path).engine == "uring")
