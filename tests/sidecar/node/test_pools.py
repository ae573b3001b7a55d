"""Pools on a node: where they go, what pods get, and what changes do to them."""

import fcntl
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pykvcache_contract.api.node import NodePoolState, Profile, ProfileState
from pykvcache_sidecar.node import caretakers as caretakers_module
from pykvcache_sidecar.node import worker as worker_module
from pykvcache_sidecar.node.places import Code, Refusal
from pykvcache_sidecar.settings import CANDIDATES_MAX
from pykvcache_storage.usage import UsageLedger

from .conftest import OPERATOR_NAMESPACE, pool_object, state

READY, NOT_READY = NodePoolState.READY, NodePoolState.NOT_READY


# ---- finding a place ----


def test_a_pool_without_a_path_goes_to_the_first_disk_and_is_ready(node, disk):
    node.tell(pool_object())
    report = node.report()
    assert state(report) == (READY, "")
    assert report.path == f"{disk}/pykvcache/default"
    assert (report.filesystem, report.generation, report.capacity_bytes, report.mounts) == ("tmpfs", 1, 4 << 20, 0)
    assert report.engine in {"uring", "threads"}
    assert report.publish_method == "link"


def test_nothing_is_done_before_the_api_server_has_told_of_pools_and_labels(make_node, disk):
    node = make_node()
    node.go()
    node.cluster.update(labels={})
    node.go()
    assert node.manager.workers() == []
    with pytest.raises(Refusal, match="has not reached the API server") as refusal:
        node.place()
    assert refusal.value.code is Code.UNAVAILABLE
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"storage": {"path": "{root}/elsewhere/kv"}}, "PathNotAllowed"),
        ({"storage": {"path": "{root}/disk-2/kv"}}, "PathNotAllowed"),
        ({"storage": {"path": "{root}/other/kv"}}, "DiskNotMounted"),
        ({"storage": {"path": "{root}/disk/kv"}}, ""),
    ],
)
def test_a_path_must_be_allowed_and_on_a_disk(node, tmp_path, spec, reason):
    spec["storage"]["path"] = spec["storage"]["path"].format(root=tmp_path)
    node.tell(pool_object(**spec))
    report = node.report()
    assert report.reason == reason
    assert (report.state is READY) == (reason == "")
    assert not (tmp_path / "elsewhere").exists()
    assert not (tmp_path / "other").exists()


def test_a_node_without_disks_says_so_and_heals_when_one_is_mounted(make_node, tmp_path, mounts):
    node = make_node()
    node.tell(pool_object())
    assert state(node.report()) == (NOT_READY, "NoSuitableDisk")
    mounts.tmpfs(tmp_path / "disk9")
    assert state(node.report()) == (READY, "")


def test_a_pool_that_selects_other_nodes_or_disks_is_not_here(node):
    node.tell(
        pool_object("labelled", nodeSelector={"gpu": "yes"}),
        pool_object("fast", diskSelector={"types": ["NVMe"]}),
        pool_object("big", diskSelector={"minSize": "1Ti"}),
        pool_object("any", diskSelector={"types": ["Other"]}),
    )
    node.go()
    assert ["any"] == [report.name for report in node.manager.reports()]
    place = node.place(pool="labelled")
    assert place.directory is None
    assert "nodeSelector" in place.reason


# ---- what pods get ----


def test_each_namespace_gets_its_own_directory_which_is_a_pool_and_is_cared_for(node, disk, wait_for):
    node.tell(pool_object())
    node.go()
    places = [node.place(namespace).directory for namespace in ("team-a", "team-b", "team-a")]
    assert places == [f"{disk}/pykvcache/default/ns/{name}" for name in ("team-a", "team-b", "team-a")]
    assert os.stat(places[0]).st_mode & 0o7777 == 0o1777
    assert os.path.exists(f"{places[0]}/pool.json")
    node.go()
    (worker,) = node.manager.workers()
    wait_for(lambda: [now.state for now in worker.snapshots()] == ["working", "working"])
    wait_for(lambda: [2 << 20, 2 << 20] == [now.levels.allowed_bytes for now in worker.snapshots()])


def test_a_shared_pool_gives_all_the_same_and_refuses_who_is_not_allowed(node, disk):
    node.tell(pool_object(sharing="Pool", allowedNamespaces={"names": ["team-a", "team-b"]}))
    node.go()
    assert {node.place(namespace).directory for namespace in ("team-a", "team-b")} == {
        f"{disk}/pykvcache/default/shared"
    }
    with pytest.raises(Refusal, match="namespace team-c may not mount") as refusal:
        node.place("team-c")
    assert refusal.value.code is Code.PERMISSION_DENIED


def test_namespaces_are_allowed_by_their_labels_once_these_are_known(node):
    node.tell(pool_object(allowedNamespaces={"matchLabels": {"cache": "yes"}}))
    node.go()
    with pytest.raises(Refusal, match="not known yet") as refusal:
        node.place("team-a")
    assert refusal.value.code is Code.UNAVAILABLE
    node.cluster.update(namespaces={"team-a": {"cache": "yes"}, "team-b": {}})
    assert node.place("team-a").directory
    with pytest.raises(Refusal) as refusal:
        node.place("team-b")
    assert refusal.value.code is Code.PERMISSION_DENIED


def test_the_operators_namespace_gets_the_directory_for_calibration_that_nobody_cares_for(node, disk):
    node.tell(pool_object(allowedNamespaces={"names": ["team-a"]}))
    node.go()
    assert node.place(OPERATOR_NAMESPACE).directory == f"{disk}/pykvcache/default/calibration"
    node.go()
    assert node.manager.workers()[0].snapshots() == []


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("missing", Code.NOT_FOUND, "kubectl get kvcachepools"),
        ("hostpath", Code.INVALID_ARGUMENT, "hostPath"),
        ("new", Code.UNAVAILABLE, "being prepared"),
    ],
)
def test_a_pod_that_names_no_usable_pool_is_told_what_is_wrong(node, disk, name, code, words):
    hostpath = pool_object("hostpath", storage={"volume": "HostPath", "path": f"{disk}/kv"})
    node.tell(hostpath)
    node.go()
    node.tell(hostpath, pool_object("new"))
    with pytest.raises(Refusal, match=words) as refusal:
        node.place(pool=name)
    assert refusal.value.code is code


@pytest.mark.parametrize("policy", ["Degrade", "Block"])
def test_a_pod_starts_without_cache_or_waits_while_the_pool_is_not_ready(make_node, policy):
    node = make_node()
    node.tell(pool_object(storage={"onUnavailable": policy}))
    node.go()
    if policy == "Degrade":
        place = node.place()
        assert place.directory is None
        assert "NoSuitableDisk" in place.reason
    else:
        with pytest.raises(Refusal, match="NoSuitableDisk") as refusal:
            node.place()
        assert refusal.value.code is Code.UNAVAILABLE


def test_a_host_path_pool_makes_the_directories_of_all_that_may_mount_it(node, disk):
    spec = {"storage": {"volume": "HostPath", "path": f"{disk}/kv"}, "allowedNamespaces": {"matchLabels": {"c": "y"}}}
    node.tell(pool_object(**spec), namespaces={"team-a": {"c": "y"}, "team-b": {}})
    node.go()
    assert {"team-a"} == set(os.listdir(disk / "kv" / "default" / "ns"))


def test_a_namespace_without_a_directory_is_told_and_keeps_no_other_waiting(node, disk, monkeypatch):
    monkeypatch.setattr(worker_module, "NAMESPACES_MAX", 2)
    namespaces = {name: {} for name in ("team-a", "team-b", "team-c")}
    node.tell(pool_object(storage={"volume": "HostPath", "path": f"{disk}/kv"}), namespaces=namespaces)
    report = node.report()
    assert report.state is READY
    assert "the most there may be" in report.message
    assert {"team-a", "team-b"} == set(os.listdir(disk / "kv" / "default" / "ns"))


def test_more_namespaces_than_a_pool_may_have_start_without_cache(node, monkeypatch):
    monkeypatch.setattr(worker_module, "NAMESPACES_MAX", 2)
    node.tell(pool_object())
    node.go()
    found = [node.place(name) for name in ("team-a", "team-b", "team-c", "team-a")]
    assert [bool(place.directory) for place in found] == [True, True, False, True]
    assert "the most there may be" in found[2].reason


# ---- disks that go and come ----


def test_a_disk_that_vanishes_is_waited_for_and_nothing_is_written_below_its_mount_point(node, disk, mounts):
    node.tell(pool_object())
    node.go()
    assert node.place().directory
    mounts.detach(disk)
    report = node.report()
    assert state(report) == (NOT_READY, "DiskNotMounted")
    assert node.place().directory is None
    assert list(disk.iterdir()) == []


def test_a_blank_disk_in_its_place_is_prepared_anew_with_another_generation(node, disk, mounts):
    node.tell(pool_object())
    node.go()
    node.place()
    mounts.detach(disk)
    node.go()
    mounts.tmpfs(disk)
    report = node.report()
    assert (state(report), report.generation) == ((READY, ""), 2)
    assert os.path.isdir(node.place().directory)


def test_after_a_restart_a_pool_waits_for_its_own_disk_and_takes_no_other(node, disk, mounts, tmp_path):
    node.tell(pool_object())
    node.go()
    node.end()
    mounts.detach(disk)
    mounts.tmpfs(tmp_path / "disk2")
    node.begin()
    assert state(node.report()) == (NOT_READY, "DiskNotMounted")
    assert list((tmp_path / "disk2").iterdir()) == []


def test_a_restart_that_has_lost_its_memory_finds_the_pool_where_it_is(node, disk, mounts, tmp_path):
    node.tell(pool_object())
    node.go()
    node.end()
    mounts.tmpfs(tmp_path / "disk-before")
    os.unlink(f"{node.settings.plugin_directory}/pools.json")
    node.begin()
    report = node.report()
    assert (report.path, report.generation) == (f"{disk}/pykvcache/default", 1)


def test_a_read_only_disk_is_told_and_what_is_there_can_still_be_read(node, disk, mounts):
    node.tell(pool_object())
    node.go()
    before = node.place("team-a").directory
    node.manager.workers()[0].close(10.0)  # its files are open for a moment now and then
    mounts.remount(disk, "ro")
    assert state(node.report()) == (NOT_READY, "DiskReadOnly")
    assert node.place("team-a").directory == before
    assert node.place("team-b").directory is None


@pytest.mark.slow
def test_a_disk_that_others_fill_is_told_until_there_is_room(node, disk, wait_for):
    node.tell(pool_object(storage={"minFree": "1Mi"}))
    node.go()
    node.place()
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "stranger").write_bytes(b"x" * (free - (1 << 19)))
    wait_for(lambda: node.report().reason == "DiskFull")
    (disk / "stranger").unlink()
    wait_for(lambda: node.report().state is READY)


@pytest.mark.slow
def test_a_full_disk_is_cared_for_after_a_restart_because_only_care_makes_room(node, disk, mounts, make_pool, wait_for):
    node.tell(pool_object())
    node.go()
    blocks = make_pool(Path(node.place().directory))
    blocks.fill(100)
    node.go()
    node.end()
    lock = os.open(blocks.directory / "care.lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)  # so that care makes room when the test has looked, and not before
    inodes = os.statvfs(disk)
    mounts.remount(disk, f"nr_inodes={inodes.f_files - inodes.f_ffree}")
    with pytest.raises(OSError, match="No space left"):
        os.mkdir(disk / "one-more")
    node.begin()
    node.tell(pool_object(storage={"capacityPerNode": "1Mi"}))
    assert state(node.report()) == (NOT_READY, "DiskFull")
    assert node.place().directory
    os.close(lock)
    wait_for(lambda: node.report().state is READY)


def test_somebody_elses_directory_is_left_alone(node, disk):
    (disk / "pykvcache" / "default").mkdir(parents=True)
    (disk / "pykvcache" / "default" / "thesis.tex").write_text("mine")
    node.tell(pool_object())
    assert state(node.report()) == (NOT_READY, "ForeignDirectory")
    assert ["thesis.tex"] == os.listdir(disk / "pykvcache" / "default")


def test_a_worker_that_hangs_is_not_ready_and_keeps_no_pod_waiting(node):
    node.tell(pool_object())
    node.go()
    node.steady[0] += worker_module.STALL_SECONDS + 1
    (report,) = node.manager.reports()
    assert state(report) == (NOT_READY, "Error")
    assert (
        "has not answered"
        in node.manager.place(pool="default", namespace="team-a", pod="pod", service_account="default").reason
    )


@pytest.mark.slow
def test_pools_of_one_disk_make_room_for_a_shortage_together(node, make_pool, wait_for, monkeypatch):
    pools = [pool_object(name, storage={"minFree": "2Mi"}) for name in ("small", "large")]
    node.tell(*pools)
    node.go()
    places = {name: Path(node.place(pool=name).directory) for name in ("small", "large")}
    node.end()
    for name, blocks in (("small", 25), ("large", 75)):
        make_pool(places[name]).fill(blocks)
    node.begin()
    wait_for(lambda: node.go() or sum(report.used_bytes for report in node.manager.reports()) > 1_500_000)
    monkeypatch.setattr(caretakers_module, "free_bytes", lambda _: 1 << 20)  # only for the parts; nothing is evicted
    for _ in range(2):
        node.go()
    floors = [
        caretaker.settings.min_free_bytes - (1 << 20)
        for worker in node.manager.workers()
        for caretaker in worker._caretakers._caretakers.values()
    ]
    assert sum(floors) == pytest.approx(1 << 20, rel=0.01)
    assert max(floors) == pytest.approx(3 * min(floors), rel=0.1)


def test_many_namespaces_share_the_memory_for_candidates_of_one(node):
    node.tell(pool_object())
    node.go()
    for number in range(4):
        node.place(f"team-{number}")
    node.go()
    caretakers = node.manager.workers()[0]._caretakers._caretakers.values()
    assert sum(caretaker.settings.candidates_max for caretaker in caretakers) == CANDIDATES_MAX


# ---- changes ----


def test_a_changed_capacity_reaches_the_ledger_of_each_directory(node, make_pool, wait_for):
    node.tell(pool_object())
    node.go()
    ledger = UsageLedger(node.place().directory)
    node.go()
    wait_for(lambda: ledger.usage() is not None and ledger.usage().limit_bytes == 4 << 20)
    node.tell(pool_object(storage={"capacityPerNode": "2Mi"}))
    node.go()
    wait_for(lambda: ledger.usage().limit_bytes == 2 << 20)


def test_a_profile_is_put_into_every_directory_and_taken_away_again(node, disk):
    node.tell(pool_object(calibration={"enabled": False}))
    node.go()
    first = node.place("team-a").directory
    profile = Profile(pool="default", pool_uid="uid-default", state=ProfileState.MEASURED, read_bytes_per_second=7)
    node.cluster.update(profiles=(profile,))
    node.go()
    second = node.place("team-b").directory
    for directory in (first, second):
        with open(f"{directory}/profiles/storage.json") as file:
            assert json.load(file)["readBytesPerSecond"] == 7
    node.cluster.update(profiles=())
    node.go()
    assert [os.listdir(f"{directory}/profiles") for directory in (first, second)] == [[], []]


def test_a_link_planted_as_profiles_is_not_followed(node, tmp_path):
    node.tell(pool_object())
    node.go()
    directory = node.place("team-a").directory
    (tmp_path / "victim").mkdir()
    os.rmdir(f"{directory}/profiles")
    os.symlink(tmp_path / "victim", f"{directory}/profiles")
    node.cluster.update(profiles=(Profile(pool="default", pool_uid="uid-default", state=ProfileState.MEASURED),))
    assert node.report().state is READY
    assert list((tmp_path / "victim").iterdir()) == []


def test_a_disk_that_is_not_selected_any_more_is_left_but_one_that_vanished_is_waited_for(node, disk, mounts):
    node.tell(pool_object(diskSelector={"types": ["Other"]}))
    assert state(node.report()) == (READY, "")
    mounts.detach(disk)
    assert state(node.report()) == (NOT_READY, "DiskNotMounted")
    mounts.tmpfs(disk)
    assert state(node.report()) == (READY, "")
    node.tell(pool_object(diskSelector={"types": ["NVMe"]}))
    assert node.report() is None


def test_a_node_that_is_not_selected_any_more_keeps_the_files_and_cares_no_more(node, disk):
    node.tell(pool_object(nodeSelector={"gpu": "yes"}), labels={"gpu": "yes"})
    assert state(node.report()) == (READY, "")
    node.tell(pool_object(nodeSelector={"gpu": "yes"}), labels={})
    assert node.report() is None
    assert (disk / "pykvcache" / "default" / "node.json").exists()
    node.tell(pool_object(nodeSelector={"gpu": "yes"}), labels={"gpu": "yes"})
    report = node.report()
    assert (report.state, report.generation) == (READY, 1)


@pytest.mark.slow
def test_a_restart_evicts_nothing_of_a_namespace_that_has_more_than_an_equal_part(node, make_pool, wait_for):
    node.tell(pool_object())
    node.go()
    busy, _ = make_pool(Path(node.place("busy").directory)), node.place("idle")

    def limit():
        node.go()
        usage = busy.ledger.usage()
        return 0 if usage is None else usage.limit_bytes

    wait_for(lambda: limit() >= 2 << 20)
    busy.fill(100)
    wait_for(lambda: limit() >= 25 << 17)
    busy.fill(160)
    wait_for(lambda: limit() >= 29 << 17)
    assert len(busy.blocks()) == 160
    node.end()
    node.begin()
    node.go()
    (worker,) = node.manager.workers()
    wait_for(lambda: all(now.scan.ended_seconds for now in worker.snapshots()))
    for _ in range(5):
        assert limit() >= 29 << 17
    assert len(busy.blocks()) == 160


def test_a_fill_level_that_a_tenant_made_up_reaches_neither_status_nor_other_tenants(node, disk, wait_for):
    node.tell(pool_object())
    node.go()
    lied, honest = node.place("team-a").directory, UsageLedger(node.place("team-b").directory)
    node.go()
    wait_for(lambda: UsageLedger(lied).usage() is not None)
    (worker,) = node.manager.workers()
    ledger = UsageLedger(lied)
    ledger.recount(lambda: 1 << 63)
    wait_for(lambda: any((now.levels.used_bytes or 0) >= 1 << 63 for now in worker.snapshots()))
    report = node.report()
    assert report.used_bytes <= 2 * report.capacity_bytes
    wait_for(lambda: (node.go(), honest.usage())[1] is not None and honest.usage().limit_bytes >= 1 << 20)


def test_a_care_that_cannot_be_started_is_a_problem_of_its_directory_and_is_tried_again(node, monkeypatch):
    class NoMoreThreads(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    node.tell(pool_object())
    node.go()
    directory = node.place().directory
    node.end()
    node.begin()
    with monkeypatch.context() as patch:
        patch.setattr(caretakers_module, "threading", SimpleNamespace(Thread=NoMoreThreads, Event=threading.Event))
        node.go()
        (worker,) = node.manager.workers()
        assert [directory] == list(worker.problems())
    node.go()
    assert worker.problems() == {}
    assert len(worker.snapshots()) == 1
