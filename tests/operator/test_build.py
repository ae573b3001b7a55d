"""What is written, and when it is worth writing."""

from dataclasses import replace

import pytest

from pykvcache_contract.api.node import PROFILES_MAX, Profile, ProfileState
from pykvcache_contract.errors import ConfigurationError
from pykvcache_operator import build
from pykvcache_operator.pods import pod_facts
from pykvcache_operator.resources import Notice, PodCounts, PodsView, Severity
from pykvcache_operator.settings import make_settings


def test_the_finalizer_is_applied_to_the_pool_that_was_seen(world):
    document = build.finalizer(world.pool(finalizers=()).pool)
    assert document["metadata"] == {"name": "p", "uid": "uid-of-p", "finalizers": ["pykvcache.io/cleanup"]}


def test_letting_go_keeps_other_finalizers_and_names_the_version_seen(world):
    pool = world.pool(finalizers=("a/b", "pykvcache.io/cleanup", "c/d")).pool
    assert build.without_finalizer(pool) == {
        "metadata": {"uid": "uid-of-p", "resourceVersion": "7", "finalizers": ["a/b", "c/d"]}
    }


def test_a_node_patch_touches_one_label():
    assert build.node_labels("p", is_ready=True) == {"metadata": {"labels": {"pykvcache.io/pool.p": "ready"}}}
    assert build.node_labels("p", is_ready=False) == {"metadata": {"labels": {"pykvcache.io/pool.p": None}}}


def test_a_claim_can_be_found_again_and_outlives_a_retained_pool(world):
    storage = {"type": "SharedFilesystem", "storageClassName": "fast", "capacity": "2Gi"}
    pool = world.pool(storage=storage, allowedNamespaces={"names": ["x"]}).pool
    document = build.claim(pool, "x")
    assert document["metadata"]["labels"]["pykvcache.io/pool-uid"] == "uid-of-p"
    assert "ownerReferences" not in document["metadata"]
    assert document["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": str(2 * 2**30)}},
    }


def test_an_event_is_bounded(world):
    notice = Notice(Severity.WARNING, "DiskFull", "x" * 5000)
    document = build.event(world.pool().pool, notice, instance="i" * 500, now=world.now)
    assert len(document["note"].encode()) == 1024
    assert len(document["reportingInstance"]) == 128
    assert document["eventTime"] == "2026-01-31T12:00:00.000000Z"
    assert document["regarding"]["uid"] == "uid-of-p"


@pytest.mark.parametrize("letter", ["x", "é", "…", "🙂"])
def test_the_note_of_an_event_is_bounded_in_bytes_as_the_server_counts(world, letter):
    notice = Notice(Severity.WARNING, "DiskFull", letter * 1024)
    note = build.event(world.pool().pool, notice, instance="i", now=world.now)["note"]
    assert 1020 <= len(note.encode()) <= 1024
    assert set(note) <= {letter, "…"}


def test_an_event_about_a_pod_is_the_same_whoever_posts_it(world, make_pod):
    pod = pod_facts(make_pod(name="x" * 253, namespace="n" * 63, uid="0b6d4ae3-1c5f-4f4c-9f0e-2f4f1f0c9a11"))
    notice = Notice(Severity.WARNING, "CacheNotInjected", "é" * 5000)
    first, second = (build.pod_event(pod, notice, instance=i, now=world.now) for i in ("a" * 500, "b"))
    assert first["metadata"] == second["metadata"]
    assert first["metadata"]["namespace"] == "n" * 63
    assert len(first["metadata"]["name"]) <= 253
    assert len(first["note"].encode()) <= 1024
    assert first["regarding"]["uid"] == pod.uid


def test_profiles_of_other_pools_are_written_along(world):
    known = [{"pool": name, "poolUID": "u", "state": "Measured"} for name in ("a", "p", "z")]
    cache = world.view("n", profiles=known).cache
    changed = Profile(pool="p", pool_uid="u", state=ProfileState.FAILED)
    written = build.profiles(cache, "p", changed)["status"]["profiles"]
    assert [(profile["pool"], profile["state"]) for profile in written] == [
        ("a", "Measured"),
        ("p", "Failed"),
        ("z", "Measured"),
    ]
    assert [profile["pool"] for profile in build.profiles(cache, "p", None)["status"]["profiles"]] == ["a", "z"]
    assert "pools" not in build.profiles(cache, "p", None)["status"]


def test_more_profiles_than_a_node_may_have_still_leave_room_for_ours(world):
    known = [{"pool": f"a{number}", "poolUID": "u", "state": "Measured"} for number in range(PROFILES_MAX)]
    changed = Profile(pool="p", pool_uid="u", state=ProfileState.FAILED)
    written = build.profiles(world.view("n", profiles=known).cache, "p", changed)["status"]["profiles"]
    assert len(written) == PROFILES_MAX
    assert "p" in {profile["pool"] for profile in written}


def test_a_status_is_written_when_it_differs_and_soon_when_somebody_waits_for_it(world):
    status = world.decide(world.pool(), world.view("a", world.entry())).status
    current = world.pool().pool.status_document(status)["status"]
    assert not build.status_differs(current, status)
    fuller = replace(status, used_bytes=status.used_bytes + 1)
    assert build.status_differs(current, fuller)
    assert build.is_quiet(current, fuller)
    worse = replace(status, nodes_ready=0)
    assert build.status_differs(current, worse)
    assert not build.is_quiet(current, worse)
    assert build.status_differs({**current, "nodes": "forged"}, status)
    assert build.status_differs({}, status)


def test_pods_that_come_and_go_can_wait_but_the_first_that_is_missed_cannot(world):
    def current(**counts):
        status = world.decide(world.pool(), pods=PodsView(PodCounts(**counts))).status
        return status, world.pool().pool.status_document(status)["status"]

    none, none_document = current()
    few, few_document = current(injected=1, skipped=1)
    missed, missed_document = current(injected=1, missed=1, missed_pods=("a/b",))
    more, _ = current(injected=9, missed=2, missed_pods=("a/b", "a/c"))
    assert build.status_differs(none_document, few)
    assert build.is_quiet(none_document, few)
    assert not build.is_quiet(few_document, missed)
    assert not build.is_quiet({}, missed)
    assert build.is_quiet(missed_document, more)
    assert build.is_quiet(missed_document, none)  # recovery waits, so a state that flaps is written rarely
    assert not build.is_quiet(none_document, replace(none, nodes_ready=7))


def settings(**changes):
    options = {
        "namespace": "ns",
        "lease_name": "lease",
        "calibration_image": "",
        "calibration_pull_secrets": (),
        "calibration_priority_class": "",
        "allowed_host_paths": (),
        "listen": ":0",
        "watch_seconds": 120.0,
        "resync_seconds": 300.0,
        "workers": 20,
    }
    return make_settings(**{**options, **changes})


@pytest.mark.parametrize("path", ["mnt", "/mnt/../etc", "/mnt/", "//mnt", ""])
def test_a_prefix_that_is_no_clean_path_is_refused(path):
    with pytest.raises(ConfigurationError, match="--allowed-host-path"):
        settings(allowed_host_paths=(path,))


@pytest.mark.parametrize("listen", ["9411", "host:", ":99999", ":x"])
def test_an_address_without_a_port_is_refused(listen):
    with pytest.raises(ConfigurationError, match="--listen"):
        settings(listen=listen)


def test_every_process_has_an_identity_of_its_own():
    assert settings().identity != settings().identity
    assert settings(listen="[::1]:80").host == "::1"
