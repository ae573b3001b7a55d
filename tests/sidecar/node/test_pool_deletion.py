"""Pools that are deleted: what is erased, when, and what stays."""

import errno
import json
import os
import subprocess
import threading

import pytest

from pykvcache_contract.api.node import NodePoolState
from pykvcache_sidecar.keeper import Keeper
from pykvcache_sidecar.node import worker as worker_module

from .conftest import pool_object, state

READY, DELETING = NodePoolState.READY, NodePoolState.DELETING


def test_a_deleted_pool_is_erased_and_then_told_no_more(node, disk):
    node.tell(pool_object())
    node.go()
    node.place()
    node.tell(pool_object(deleted=True))
    assert node.report() is None
    assert list((disk / "pykvcache").iterdir()) == []


def test_a_pool_that_pods_mount_waits_unless_it_is_forced(node, disk, mounts):
    node.tell(pool_object())
    node.go()
    target = node.root / "kubelet" / "pods" / "uid-1" / "mount"
    target.mkdir(parents=True)
    mounts.bind(node.place().directory, target)
    assert node.report().mounts == 1
    node.tell(pool_object(deleted=True))
    assert state(node.report()) == (DELETING, "InUse")
    place = node.place()
    assert (place.directory, "being deleted" in place.reason) == (None, True)
    node.tell(pool_object(deleted=True, annotations={"pykvcache.io/force-delete": "true"}))
    assert node.report() is None
    assert list((disk / "pykvcache").iterdir()) == []


def test_a_pool_that_vanished_without_notice_is_erased_when_its_pods_are_gone(node, disk, mounts):
    node.tell(pool_object())
    node.go()
    target = node.root / "kubelet" / "pods" / "uid-1" / "mount"
    target.mkdir(parents=True)
    mounts.bind(node.place().directory, target)
    node.tell()
    assert state(node.report()) == (DELETING, "InUse")
    mounts.unmount(target)
    assert node.report() is None
    assert list((disk / "pykvcache").iterdir()) == []


def test_retained_files_stay_and_a_new_pool_of_the_name_takes_them_over(node, disk):
    node.tell(pool_object(deletionPolicy="Retain"))
    node.go()
    directory = node.place().directory
    (node.root / "disk" / "pykvcache" / "default" / "ns" / "team-a" / "kept").write_text("x")
    node.tell(pool_object(deletionPolicy="Retain", deleted=True))
    assert node.report() is None
    node.tell()
    node.go()
    assert os.path.exists(f"{directory}/kept")
    node.tell(pool_object(uid="another"))
    assert node.report().uid == "another"
    assert os.path.exists(f"{directory}/kept")


def test_a_new_pool_of_the_name_begins_empty_as_soon_as_the_old_one_is_erased(node, disk):
    node.tell(pool_object(uid="old"))
    node.go()
    (node.root / "disk" / "pykvcache" / "default" / "ns").mkdir(exist_ok=True)
    directory = node.place().directory
    open(f"{directory}/mark", "w").close()
    node.tell(pool_object(uid="new"))
    node.go()
    report = node.report()
    assert (report.uid, state(report)) == ("new", (READY, ""))
    assert not os.path.exists(f"{node.place().directory}/mark")


@pytest.mark.slow
def test_an_orphan_is_erased_when_the_api_server_confirms_that_its_pool_is_gone(node, disk):
    node.tell(pool_object())
    node.go()
    node.end()
    node.living = frozenset({"uid-default"})  # a newer list knows it: only our watch lags
    node.begin()
    node.tell()
    node.go()
    assert (disk / "pykvcache" / "default").exists()
    node.living = None
    node.go()
    assert list((disk / "pykvcache").iterdir()) == []


def test_an_orphan_is_found_after_a_restart_also_below_a_path_that_no_pool_names_any_more(node, disk):
    node.tell(pool_object(storage={"path": f"{disk}/deep/er"}))
    node.go()
    node.end()
    node.begin()
    node.tell()
    node.go()
    assert list((disk / "deep" / "er").iterdir()) == []


def test_an_orphan_is_adopted_once_although_the_next_survey_is_seconds_away(node, disk):
    node.tell(pool_object())
    node.go()
    node.end()
    node.begin()
    node.tell()
    node.go()
    assert list((disk / "pykvcache").iterdir()) == []
    for _ in range(3):
        node.manager.round()
        for worker in node.manager.workers():
            worker.round()
    assert len(node.started) == 1


def test_a_retained_orphan_and_one_of_an_unreadable_pool_stay(node, disk):
    node.tell(pool_object("kept", deletionPolicy="Retain"), pool_object("newer"))
    node.go()
    node.end()
    node.begin()
    node.tell(unreadable=frozenset({"uid-newer"}))
    node.go()
    assert {"kept", "newer"} == set(os.listdir(disk / "pykvcache"))


def test_a_pool_whose_disk_is_gone_too_is_forgotten_and_erased_when_the_disk_comes_back(node, disk, mounts, tmp_path):
    keep = tmp_path / "keep"
    keep.mkdir()
    node.tell(pool_object())
    node.go()
    mounts.bind(disk, keep)
    mounts.unmount(disk)
    node.tell(pool_object(deleted=True))
    assert state(node.report()) == (DELETING, "DiskNotMounted")
    node.tell()
    assert node.report() is None
    subprocess.run(["mount", "--bind", keep, disk], check=True)
    node.go()
    assert list((disk / "pykvcache").iterdir()) == []


def test_a_pool_is_not_erased_while_nobody_knows_who_mounts_it(node, disk, monkeypatch):
    node.tell(pool_object())
    node.go()
    directory = node.place().directory
    mounts_of = worker_module.mounts_of

    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(worker_module, "mounts_of", refuse)
    node.tell(pool_object(deleted=True))
    assert state(node.report()) == (DELETING, "Error")
    assert os.path.exists(directory)
    monkeypatch.setattr(worker_module, "mounts_of", mounts_of)
    assert node.report() is None


def test_a_pool_in_deletion_whose_disk_is_away_since_a_restart_is_looked_for_once(node, disk, mounts):
    node.tell(pool_object())
    node.go()
    node.end()
    mounts.detach(disk)
    node.begin()
    node.tell(pool_object(deleted=True))
    for _ in range(3):
        assert node.report() is None
    assert len(node.started) == 1


def test_a_retained_tree_that_a_new_pool_took_over_meanwhile_is_left_to_it(node, disk, mounts):
    node.tell(pool_object(uid="old", deletionPolicy="Retain"))
    node.go()
    target = node.root / "kubelet" / "pods" / "uid-1" / "mount"
    target.mkdir(parents=True)
    mounts.bind(node.place().directory, target)
    node.tell(pool_object(uid="new"))
    node.go()
    mounts.unmount(target)
    node.go()
    assert ["new"] == [worker.uid for worker in node.manager.workers()]
    assert json.loads((disk / "pykvcache" / "default" / "node.json").read_text())["uid"] == "new"


def test_the_directory_of_a_namespace_called_calibration_is_cared_for_like_any_other(node, mounts):
    node.tell(pool_object())
    node.go()
    target = node.root / "kubelet" / "pods" / "uid-1" / "mount"
    target.mkdir(parents=True)
    mounts.bind(node.place("calibration").directory, target)
    node.tell(pool_object(deleted=True))
    assert state(node.report()) == (DELETING, "InUse")
    assert len(node.manager.workers()[0].snapshots()) == 1


def test_nothing_is_erased_while_the_care_of_it_is_at_work(node, monkeypatch, wait_for):
    begun, go_on = threading.Event(), threading.Event()

    def work(_):
        begun.set()
        go_on.wait(60)
        return False

    monkeypatch.setattr(worker_module, "CARE_END_SECONDS", 0.01)
    monkeypatch.setattr(Keeper, "work", work)
    node.tell(pool_object())
    node.go()
    directory = node.place().directory
    node.go()
    assert begun.wait(60)
    node.tell(pool_object(deleted=True))
    assert state(node.report()) == (DELETING, "")
    assert os.path.exists(f"{directory}/pool.json")
    go_on.set()
    wait_for(lambda: node.report() is None)


# ---- two agents for a moment, as when a pod is replaced ----


def test_two_agents_prepare_one_tree_one_of_them_cares_and_both_may_erase(make_node, disk, wait_for):
    def states(node):
        return [now.state for worker in node.manager.workers() for now in worker.snapshots()]

    first, second = make_node(), make_node()
    for node in (first, second):
        node.tell(pool_object())
        assert state(node.report()) == (READY, "")
    assert first.place().directory == second.place().directory
    for node in (first, second):
        node.go()
        wait_for(lambda node=node: states(node) in (["working"], ["standby"]))
    assert {"working", "standby"} == {*states(first), *states(second)}
    first.end()
    wait_for(lambda: states(second) == ["working"])
    first.begin()
    first.tell(pool_object())
    first.go()
    for node in (first, second):
        node.tell(pool_object(deleted=True))

    def is_erased():
        first.go()  # again, where the care of the second has just made something
        return list((disk / "pykvcache").iterdir()) == []

    wait_for(is_erased)
    second.go()
    second.tell()
    assert (first.report(), second.report()) == (None, None)
    assert second.manager.workers() == []
