"""Namespaces that are gone, and what their pods had stored."""

import os

import pytest

from pykvcache_contract.api.node import NodePoolState
from pykvcache_sidecar.node import worker as worker_module
from pykvcache_sidecar.node.api import ApiError
from pykvcache_sidecar.node.cluster import Cluster
from pykvcache_sidecar.node.namespaces import NamespaceCheck
from pykvcache_sidecar.node.watcher import KubernetesSource

from .conftest import pool_object


@pytest.fixture
def living():
    """The namespaces that exist; empty: the API server does not answer."""
    return {"default", "team-a", "team-b"}


@pytest.fixture
def check(node, living):
    """Return a function that compares, and lets the pools' workers go round."""
    checking = NamespaceCheck(workers=node.manager.workers, list_namespaces=lambda: frozenset(living) or None)

    def run():
        checking.check()
        node.go()

    node.tell(pool_object())
    node.go()
    for name in ("team-a", "team-b"):
        directory = node.place(name).directory
        with open(f"{directory}/secret-{name}", "w") as file:
            file.write("x")
    node.go()
    return run


@pytest.fixture
def folder(disk):
    return disk / "pykvcache" / "default" / "ns"


def test_what_a_namespace_left_is_erased_when_it_is_gone_and_nothing_else(node, check, living, folder):
    check()
    assert {"team-a", "team-b"} == set(os.listdir(folder))
    living.remove("team-a")
    check()
    assert ["team-b"] == os.listdir(folder)
    assert os.path.exists(folder / "team-b" / "secret-team-b")
    (worker,) = node.manager.workers()
    assert ["team-b"] == [os.path.basename(now.pool) for now in worker.snapshots()]


def test_a_pool_in_which_no_namespace_has_a_directory_has_nothing_to_erase(node, caplog):
    node.tell(pool_object())
    node.go()
    assert "former namespaces" not in caplog.text


def test_a_namespace_of_the_same_name_begins_with_an_empty_directory(node, check, living):
    living.remove("team-a")
    check()
    directory = node.place("team-a").directory
    assert os.path.exists(f"{directory}/pool.json")
    assert not os.path.exists(f"{directory}/secret-team-a")


def test_while_the_api_server_does_not_answer_nothing_is_erased(check, living, folder):
    living.clear()
    check()
    assert {"team-a", "team-b"} == set(os.listdir(folder))


def test_a_directory_that_a_pod_still_mounts_stays_until_the_pod_has_ended(node, check, living, folder, mounts):
    target = node.root / "kubelet" / "pods" / "uid-1" / "mount"
    target.mkdir(parents=True)
    mounts.bind(folder / "team-a", target)
    living.remove("team-a")
    check()
    assert {"team-a", "team-b"} == set(os.listdir(folder))
    mounts.unmount(target)
    check()
    assert ["team-b"] == os.listdir(folder)


def test_a_judgement_that_could_not_be_carried_out_at_once_is_forgotten(node, check, living, folder):
    living.remove("team-a")
    (worker,) = node.manager.workers()
    worker.clear_out(frozenset({"team-a"}))
    node.steady[0] += worker_module.STALL_SECONDS + 1
    node.go()
    assert {"team-a", "team-b"} == set(os.listdir(folder))


def test_a_large_directory_is_erased_in_pieces_and_a_restart_goes_on(node, check, living, folder, monkeypatch):
    monkeypatch.setattr(worker_module, "CLEAR_OUT_ENTRIES_MAX", 5)
    for number in range(20):
        (folder / "team-a" / f"file-{number}").touch()
    living.remove("team-a")
    check()
    assert [name[0] for name in os.listdir(folder) if name != "team-b"] == ["."]
    node.end()
    node.begin()
    for _ in range(10):
        assert node.report().state is NodePoolState.READY
    assert ["team-b"] == os.listdir(folder)


def test_namespaces_that_are_gone_make_room_for_others(node, check, living, monkeypatch):
    monkeypatch.setattr(worker_module, "NAMESPACES_MAX", 2)
    assert node.place("team-c").directory is None
    living.remove("team-a")
    check()
    assert node.place("team-c").directory


def test_what_cannot_be_erased_is_no_trouble_of_the_pools(node, check, living, folder, monkeypatch, caplog):
    def refuse(*_, **__):
        raise worker_module.TreeError("Error", "an immutable file")

    monkeypatch.setattr(worker_module, "erase_aside", refuse)
    living.remove("team-a")
    check()
    check()
    assert node.report().state is NodePoolState.READY
    assert caplog.text.count("an immutable file") == 1


@pytest.mark.parametrize("answer", [ApiError("away"), []])
def test_no_answer_is_not_the_same_as_no_namespace(answer):
    class Away:
        def list(self, path):
            if isinstance(answer, Exception):
                raise answer
            return answer, "1"

    assert KubernetesSource(Away(), Cluster(), node_name="node-1").list_namespaces() is None
