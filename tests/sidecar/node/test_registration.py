"""Kubelet finds the driver: both sockets, asked as kubelet asks; sockets that are stale, taken or removed."""

import os
import socket
import stat
from pathlib import Path

import grpc
import pytest

from pykvcache_sidecar.node.csi import NodeService
from pykvcache_sidecar.node.csi_messages import CSI, REGISTRATION
from pykvcache_sidecar.node.registration import Driver
from pykvcache_sidecar.node.sockets import PATH_BYTES_MAX, Endpoint, SocketError

DEADLINE_SECONDS = 60.0


class NoPlaces:
    def place(self, **_: str):
        raise AssertionError("nobody asks for a volume here")


def call(path, method: str, request, response):
    """Connect, ask and hang up, as kubelet does each time."""
    with grpc.insecure_channel(f"unix:{path}") as channel:
        send = channel.unary_unary(
            method, request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
        )
        return send(request, timeout=DEADLINE_SECONDS, wait_for_ready=True)


def register(kubelet: Path, *, error: str = "") -> str:
    """Do what kubelet does with a socket that appeared; return the node's name that the driver tells."""
    (path,) = [entry for entry in (kubelet / "plugins_registry").iterdir() if not entry.name.startswith(".")]
    info = call(path, "/pluginregistration.Registration/GetInfo", REGISTRATION["InfoRequest"](), _INFO)
    assert (info.type, info.name, list(info.supported_versions)) == ("CSIPlugin", "csi.pykvcache.io", ["1.0.0"])
    node = call(info.endpoint, "/csi.v1.Node/NodeGetInfo", CSI["NodeGetInfoRequest"](), CSI["NodeGetInfoResponse"])
    status = REGISTRATION["RegistrationStatus"](plugin_registered=not error, error=error)
    method = "/pluginregistration.Registration/NotifyRegistrationStatus"
    call(path, method, status, REGISTRATION["RegistrationStatusResponse"])
    return node.node_id


_INFO = REGISTRATION["PluginInfo"]


@pytest.fixture
def kubelet(open_folder):
    (open_folder / "plugins_registry").mkdir()
    return open_folder


@pytest.fixture
def make_driver(kubelet):
    drivers: list[Driver] = []

    def make(node: str = "node-1") -> Driver:
        service = NodeService(NoPlaces(), node_name=node, kubelet_directory=str(kubelet), version="1")
        drivers.append(Driver(service, kubelet_directory=str(kubelet)))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.stop()


@pytest.fixture
def driver(make_driver):
    driver = make_driver()
    driver.start()
    return driver


def sockets(kubelet: Path) -> "list[str]":
    return sorted(str(path.relative_to(kubelet)) for path in kubelet.rglob("*") if path.is_socket())


PATHS = ["plugins/csi.pykvcache.io/csi.sock", "plugins_registry/csi.pykvcache.io-reg.sock"]


def test_kubelet_registers_the_driver(kubelet, driver):
    assert "has not asked" in driver.trouble
    assert register(kubelet) == "node-1"
    assert driver.trouble == ""
    assert register(kubelet) == "node-1", "after a restart of kubelet"
    assert [stat.S_IMODE((kubelet / path).stat().st_mode) for path in PATHS] == [0o600] * 2


def test_a_registration_that_failed_is_told_until_one_succeeds(kubelet, driver, caplog):
    register(kubelet, error="no such version")
    assert driver.trouble == "no such version"
    assert "no such version" in caplog.text
    register(kubelet)
    assert driver.trouble == ""


def test_a_driver_that_ends_leaves_no_socket(kubelet, driver):
    assert sockets(kubelet) == PATHS
    driver.stop()
    driver.stop()
    assert sockets(kubelet) == []
    driver.start()
    assert register(kubelet) == "node-1"


@pytest.mark.parametrize("path", PATHS)
def test_a_socket_that_was_removed_is_made_again(kubelet, driver, path, caplog):
    driver.check()
    assert not caplog.text
    (kubelet / path).unlink()
    driver.check()
    assert path in caplog.text
    assert sockets(kubelet) == PATHS
    assert register(kubelet) == "node-1"


def test_folders_that_were_removed_are_made_again_but_not_kubelets(kubelet, driver):
    for path in PATHS:
        (kubelet / path).unlink()
        (kubelet / path).parent.rmdir()
    with pytest.raises(SocketError, match="must exist"):
        driver.check()
    (kubelet / "plugins_registry").mkdir()
    driver.check()
    assert register(kubelet) == "node-1"


def test_sockets_of_a_killed_agent_are_replaced(kubelet, make_driver):
    for path in PATHS:
        (kubelet / path).parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(kubelet / path))
    make_driver().start()
    assert sockets(kubelet) == PATHS
    assert register(kubelet) == "node-1"


def test_a_newer_agent_takes_over_and_the_older_one_leaves_its_sockets_alone(kubelet, driver, make_driver, caplog):
    newer = make_driver("newer")
    newer.start()
    driver.check()
    assert "taken over" in caplog.text
    assert register(kubelet) == "newer"
    driver.stop()
    assert register(kubelet) == "newer"
    assert sockets(kubelet) == PATHS


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("/etc/hostname")])
def test_what_is_no_socket_is_not_replaced(kubelet, make_driver, path, make):
    (kubelet / path).parent.mkdir(parents=True, exist_ok=True)
    make(kubelet / path)
    with pytest.raises(SocketError, match="Remove it"):
        make_driver().start()
    assert os.path.lexists(kubelet / path)
    assert not (kubelet / path).is_socket()


def test_a_wrong_kubelet_directory_is_said_so(kubelet, make_driver):
    (kubelet / "plugins_registry").rmdir()
    with pytest.raises(SocketError, match="--root-dir"):
        make_driver().start()
    assert list(kubelet.iterdir()) == []


def test_a_path_that_is_too_long_for_a_socket_is_said_so(kubelet):
    folder = kubelet / ("x" * PATH_BYTES_MAX)
    folder.mkdir()
    with pytest.raises(SocketError, match="Shorten"):
        Endpoint(f"{folder}/s", [], threads=1).start()
    assert list(folder.iterdir()) == []
