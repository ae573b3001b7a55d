"""Kubelet's calls over a real socket, real mounts; only who is allowed where is a stand-in."""

import os
import subprocess
import threading
from pathlib import Path

import grpc
import pytest

from pykvcache_sidecar.node.csi import NodeService
from pykvcache_sidecar.node.csi_messages import CSI
from pykvcache_sidecar.node.mount_table import read_mount_table
from pykvcache_sidecar.node.places import Code, Place, Refusal
from pykvcache_sidecar.node.sockets import Endpoint

DEADLINE_SECONDS = 60.0
UID = "0f3b0c1e-uid"
PREFIX = "csi.storage.k8s.io/"
POD_INFO = {
    f"{PREFIX}ephemeral": "true",
    f"{PREFIX}pod.namespace": "team-a",
    f"{PREFIX}pod.name": "vllm-0",
    f"{PREFIX}pod.uid": UID,
    f"{PREFIX}serviceAccount.name": "default",
}


class StandInPlaces:
    """Answers or refuses as the test says; notes what it was asked."""

    def __init__(self) -> None:
        self.answer: Place | Exception = Place(None, "nothing said")
        self.asked: list[dict[str, str]] = []
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def place(self, **asked: str) -> Place:
        self.asked.append(asked)
        self.entered.set()
        assert self.go_on.wait(DEADLINE_SECONDS)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Client:
    """Calls the service as kubelet does."""

    def __init__(self, socket: str, kubelet: Path) -> None:
        self.kubelet = kubelet
        self.channel = grpc.insecure_channel(f"unix:{socket}")

    def call(self, name: str, *, service: str = "Node", later: bool = False, **fields):
        method = self.channel.unary_unary(
            f"/csi.v1.{service}/{name}",
            request_serializer=CSI[f"{name}Request"].SerializeToString,
            response_deserializer=CSI[f"{name}Response"].FromString,
        )
        request = CSI[f"{name}Request"](**fields)
        send = method.future if later else method
        return send(request, timeout=DEADLINE_SECONDS, wait_for_ready=True)

    def target(self, volume: str = "cache", uid: str = UID) -> Path:
        return self.kubelet / "pods" / uid / "volumes/kubernetes.io~csi" / volume / "mount"

    def publish(self, **given):
        fields = {
            "volume_id": "csi-1",
            "target_path": str(self.target()),
            "volume_capability": {"mount": {}, "access_mode": {"mode": 1}},
            "volume_context": {"pool": "fast", **POD_INFO},
        }
        return self.call("NodePublishVolume", **{**fields, **given})

    def unpublish(self, **given):
        return self.call("NodeUnpublishVolume", **{"volume_id": "csi-1", "target_path": str(self.target()), **given})

    def refused(self, call, **fields) -> "tuple[str, str]":
        with pytest.raises(grpc.RpcError) as caught:
            call(**fields)
        return caught.value.code().name, caught.value.details()


@pytest.fixture
def places():
    return StandInPlaces()


@pytest.fixture
def client(open_folder, places):
    kubelet = open_folder / "kubelet"
    service = NodeService(places, node_name="node-1", kubelet_directory=str(kubelet), version="1.2.3")
    kubelet.mkdir()
    socket = f"{kubelet}/csi.sock"
    endpoint = Endpoint(socket, service.handlers(), threads=2)
    endpoint.start()
    client = Client(socket, kubelet)
    client.target().parent.mkdir(parents=True)
    yield client
    places.go_on.set()
    client.channel.close()
    endpoint.stop()
    for mount in reversed(read_mount_table()):
        if mount.point.startswith(f"{kubelet}/"):
            subprocess.run(["umount", "-l", mount.point], check=False)


@pytest.fixture
def pool(tmp_path, mounts):
    disk = tmp_path / "disk"
    mounts.tmpfs(disk)
    (disk / "pool").mkdir()
    return disk / "pool"


def test_it_says_what_it_is(client):
    info = client.call("GetPluginInfo", service="Identity")
    assert (info.name, info.vendor_version) == ("csi.pykvcache.io", "1.2.3")
    assert client.call("NodeGetInfo").node_id == "node-1"
    client.call("Probe", service="Identity")
    client.call("GetPluginCapabilities", service="Identity")
    client.call("NodeGetCapabilities")


def test_a_method_that_nobody_serves_is_said_to_be_unknown(client):
    stage = client.channel.unary_unary("/csi.v1.Node/NodeStageVolume")
    assert client.refused(stage, request=b"", wait_for_ready=True)[0] == "UNIMPLEMENTED"


def test_what_is_no_message_is_refused(client):
    publish = client.channel.unary_unary("/csi.v1.Node/NodePublishVolume")
    assert client.refused(publish, request=b"\xff\xff", wait_for_ready=True)[0] == "INTERNAL"
    client.call("NodeGetInfo")


def test_a_pod_gets_its_directory_and_gives_it_back(client, places, pool):
    places.answer = Place(str(pool))
    for _ in range(2):
        client.publish()
        assert [str(client.target())] == [m.point for m in read_mount_table() if m.point == str(client.target())]
    (client.target() / "block").touch()
    assert (pool / "block").exists()
    asked = {"pool": "fast", "namespace": "team-a", "pod": "vllm-0", "service_account": "default"}
    assert places.asked == [asked] * 2
    for _ in range(2):
        client.unpublish()
        assert not client.target().exists()
    assert (pool / "block").exists()


def test_a_volume_asked_for_read_only_is(client, places, pool):
    places.answer = Place(str(pool))
    client.publish(readonly=True)
    assert os.statvfs(client.target()).f_flag & os.ST_RDONLY


def test_a_pod_without_a_disk_starts_with_the_marker_and_gets_the_pool_when_asked_again(client, places, pool, caplog):
    places.answer = Place(None, "DiskNotMounted: mount /mnt/a")
    client.publish()
    assert (client.target() / "pykvcache-unavailable").read_text() == "DiskNotMounted: mount /mnt/a\n"
    assert "DiskNotMounted" in caplog.text
    places.answer = Place(str(pool))
    client.publish()
    assert list(client.target().iterdir()) == []


@pytest.mark.parametrize("code", list(Code))
def test_a_refusal_reaches_kubelet_with_its_code_and_message(client, places, code):
    places.answer = Refusal(code, "pool fast is not for team-a: add it to allowedNamespaces")
    expected = (code.name, "pool fast is not for team-a: add it to allowedNamespaces")
    assert client.refused(client.publish) == expected
    assert not client.target().exists(), "so that kubelet can remove the volume"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"volume_id": ""}, "volume_id"),
        ({"target_path": ""}, "target_path"),
        ({"target_path": "relative"}, "target_path"),
        ({"target_path": "/etc"}, "--root-dir"),
        ({"volume_capability": None}, "volumeMode"),
        ({"volume_capability": {"block": {}}}, "volumeMode"),
        ({"volume_capability": {"mount": {"fs_type": "ext4"}}}, "fsType"),
        ({"volume_capability": {"mount": {"mount_flags": ["exec", "dev"]}}}, r"exec, dev"),
        ({"secrets": {"a": "b"}}, "nodePublishSecretRef"),
        ({"volume_context": {**POD_INFO}}, "Name a KVCachePool"),
        ({"volume_context": {**POD_INFO, "pool": ""}}, "Name a KVCachePool"),
        ({"volume_context": {**POD_INFO, "pool": "a", "size": "1", "Pool": "b"}}, "Pool, size. Known are: pool"),
        ({"volume_context": {"pool": "a"}}, "podInfoOnMount"),
        ({"volume_context": {**POD_INFO, "pool": "a", f"{PREFIX}pod.namespace": ""}}, "podInfoOnMount"),
        ({"volume_context": {**POD_INFO, "pool": "a", f"{PREFIX}ephemeral": "false"}}, "inline"),
        ({"volume_context": {**POD_INFO, "pool": "a", f"{PREFIX}ephemeral": ""}}, "inline"),
        ({"volume_context": {**POD_INFO, "pool": "a", f"{PREFIX}pod.uid": "forged"}}, "podInfoOnMount"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_with_what_to_change(client, places, pool, fields, says):
    places.answer = Place(str(pool))
    code, details = client.refused(client.publish, **fields)
    assert code == "INVALID_ARGUMENT"
    assert says in details
    assert places.asked == []
    assert not client.target().exists()


@pytest.mark.parametrize(
    "path",
    [
        "pods/{uid}/volumes/kubernetes.io~csi/cache",
        "pods/{uid}/volumes/kubernetes.io~empty-dir/cache/mount",
        "pods/{uid}/volumes/kubernetes.io~csi/../../../other/mount",
        "plugins/kubernetes.io/csi/pv/globalmount",
        "pods/{uid}/volumes/kubernetes.io~csi/cache/mount/",
    ],
)
@pytest.mark.parametrize("name", ["publish", "unpublish"])
def test_a_target_that_is_no_volume_of_a_pod_is_refused(client, places, pool, path, name):
    places.answer = Place(str(pool))
    target = f"{client.kubelet}/{path.format(uid=UID)}"
    assert client.refused(getattr(client, name), target_path=target)[0] == "INVALID_ARGUMENT"


def test_a_link_in_the_target_is_not_followed_and_the_service_goes_on(client, places, pool, tmp_path):
    places.answer = Place(str(pool))
    client.target().symlink_to(tmp_path)
    for call in (client.publish, client.unpublish):
        code, details = client.refused(call)
        assert code == "UNAVAILABLE"
        assert "link" in details
    assert str(tmp_path) not in {mount.point for mount in read_mount_table()}
    client.target().unlink()
    client.publish()


def test_a_directory_that_is_gone_is_worth_asking_again(client, places, pool):
    places.answer = Place(str(pool / "missing"))
    code, details = client.refused(client.publish)
    assert code == "UNAVAILABLE"
    assert "No such file" in details
    (pool / "missing").mkdir()
    client.publish()


@pytest.mark.parametrize("error", [ValueError("of our own"), KeyError("pool"), OSError(5, "Input/output error")])
def test_an_error_of_our_own_is_logged_and_worth_asking_again(client, places, error, caplog):
    places.answer = error
    code, details = client.refused(client.publish)
    assert code == "UNAVAILABLE"
    assert "log" in details
    assert "Traceback" in caplog.text


def test_a_second_call_for_a_target_at_work_is_refused_but_not_one_for_another(client, places, pool):
    places.answer = Place(str(pool))
    places.go_on.clear()
    first = client.call(
        "NodePublishVolume",
        later=True,
        volume_id="csi-1",
        target_path=str(client.target()),
        volume_capability={"mount": {}},
        volume_context={"pool": "fast", **POD_INFO},
    )
    assert places.entered.wait(DEADLINE_SECONDS)
    for call in (client.publish, client.unpublish):
        code, details = client.refused(call)
        assert code == "UNAVAILABLE"
        assert "still at work" in details
    client.unpublish(target_path=str(client.target("another")))
    places.go_on.set()
    first.result(DEADLINE_SECONDS)
    client.unpublish()
    assert not client.target().exists()


def test_unpublishing_what_never_was_is_fine(client):
    client.unpublish(target_path=str(client.target(uid="gone")))


def test_a_refusal_is_logged_without_a_traceback(client, caplog):
    client.refused(client.publish, volume_id="")
    assert "volume_id" in caplog.text
    assert "Traceback" not in caplog.text
