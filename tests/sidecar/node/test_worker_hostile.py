"""What tenants may do in their own directories, which they can write to, and what that costs others: nothing."""

import json
import os
import stat

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pykvcache_contract.api.node import NodePoolState
from pykvcache_sidecar import keeper
from pykvcache_sidecar.node.exporter import NodeCollector, NodeNow, PoolNow
from pykvcache_storage import inventory
from pykvcache_storage.usage import UsageLedger

from .conftest import pool_object


@pytest.fixture
def scans_soon(monkeypatch):
    """Care looks again soon after a scan that led to nothing."""
    monkeypatch.setattr(keeper, "RESCAN_SECONDS_MIN", 0.1)


@pytest.fixture
def directory(scans_soon, node):
    """The directory of one tenant, beside that of another."""
    node.tell(pool_object())
    node.go()
    node.place("team-b")
    place = node.place("team-a").directory
    node.go()
    return place


def states(node):
    (worker,) = node.manager.workers()
    return {os.path.basename(now.pool): now.state for now in worker.snapshots()}


def test_a_directory_whose_identity_was_spoilt_is_a_problem_of_its_own(node, directory, wait_for):
    node.end()
    os.unlink(f"{directory}/pool.json")
    os.mkfifo(f"{directory}/pool.json")
    node.begin()
    assert node.report().state is NodePoolState.READY
    (worker,) = node.manager.workers()
    assert [directory] == list(worker.problems())
    wait_for(lambda: states(node) == {"team-b": "working"})
    assert node.place("team-b").directory
    assert node.place("team-a").directory is None


@pytest.mark.parametrize("target", ["../team-b", "/etc"])
def test_a_link_in_place_of_a_namespaces_directory_is_no_directory(node, directory, target):
    node.end()
    os.rename(directory, f"{directory}-aside")
    os.symlink(target, directory)
    node.begin()
    assert node.report().state is NodePoolState.READY
    place = node.place("team-a")
    assert place.directory is None
    assert "ForeignDirectory" in place.reason


@pytest.mark.slow
def test_the_record_of_the_fill_level_is_writable_for_pods_of_any_user_also_if_it_was_removed(
    node, directory, wait_for
):
    def mode():
        return stat.S_IMODE(os.stat(f"{directory}/usage").st_mode)

    assert mode() == 0o666
    ledger = UsageLedger(directory)
    wait_for(lambda: ledger.usage() is not None)
    os.unlink(f"{directory}/usage")
    wait_for(lambda: os.path.exists(f"{directory}/usage"), "the care to begin a new record")
    node.go()
    assert mode() == 0o666


def make_fingerprint(directory, number, *, model="m"):
    folder = f"{directory}/{number:012x}"
    os.mkdir(folder)
    with open(f"{folder}/config.json", "w") as file:
        json.dump({"fingerprint": f"{number:012x}" + "0" * 52, "identity": {"model": model}}, file)


def snapshot(node, namespace):
    (worker,) = node.manager.workers()
    return next(now for now in worker.snapshots() if now.pool.endswith(f"/{namespace}"))


@pytest.mark.parametrize("model", ["bad \ud800 name", "long" * 10_000, 'quote " and \n'])
def test_a_model_named_by_a_tenant_cannot_spoil_the_nodes_metrics(node, directory, wait_for, model):
    node.end()
    make_fingerprint(directory, 1, model=model)
    node.begin()
    node.go()
    wait_for(lambda: snapshot(node, "team-a").fingerprints)
    (row,) = snapshot(node, "team-a").fingerprints
    row.model.encode()
    assert len(row.model) <= keeper.MODEL_LETTERS_MAX
    pools = tuple(PoolNow(worker.report(), tuple(worker.snapshots()), {}) for worker in node.manager.workers())
    registry = CollectorRegistry()
    registry.register(NodeCollector(lambda: NodeNow(pools, 1, True, 0.0, {}, {})))
    assert b"pykvcache_pool_blocks" in generate_latest(registry)


def test_a_tenant_with_more_fingerprints_than_there_can_be_loses_its_care_and_no_memory_is_filled(
    node, directory, wait_for, monkeypatch
):
    node.end()
    monkeypatch.setattr(inventory, "FINGERPRINTS_MAX", 10)
    for number in range(11):
        make_fingerprint(directory, number)
    node.begin()
    node.go()
    wait_for(lambda: any("more than 10 fingerprints" in words for words in snapshot(node, "team-a").problems.values()))
    assert snapshot(node, "team-a").fingerprints == ()
    wait_for(lambda: snapshot(node, "team-b").scan.ended_seconds)
    assert snapshot(node, "team-b").problems == {}


def test_erasing_leaves_what_links_lead_to(node, directory, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    os.symlink(victim, f"{directory}/link")
    os.link(victim / "precious", f"{tmp_path}/second")
    node.tell(pool_object(deleted=True))
    assert node.report() is None
    assert (victim / "precious").exists()
    assert not os.path.exists(directory)
