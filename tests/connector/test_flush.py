"""Issue 3: in which steps the workers hear that stores must let go of their GPU blocks before anything else happens."""

from types import SimpleNamespace

import pytest

from pykvcache_connector import connector as module
from pykvcache_connector.connector import PyKVCacheConnector
from pykvcache_connector.scheduler.manager import Manager
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.vllm_api import OffloadingConnectorMetadata

FLUSHED = {7}


@pytest.fixture
def scheduler_half(tmp_path, monkeypatch):
    """A connector of which vLLM's part is only what it says of a step: these loads, and flush job 7."""
    said = SimpleNamespace(load_jobs={})

    def build(_self, _output):
        return OffloadingConnectorMetadata(load_jobs=said.load_jobs, store_jobs={}, jobs_to_flush=set(FLUSHED))

    monkeypatch.setattr(module.OffloadingConnector, "build_connector_meta", build)
    monkeypatch.setattr(module.OffloadingConnector, "reset_cache", lambda _self: True)
    connector = PyKVCacheConnector.__new__(PyKVCacheConnector)
    manager = Manager(Settings.parse({"pool": str(tmp_path)}), Counts())
    connector.connector_scheduler = SimpleNamespace(manager=manager)
    connector._reset_pending = False

    def flushed(*, tokens=0, preempted=None, loads=()):
        said.load_jobs = dict.fromkeys(loads)
        step = SimpleNamespace(total_num_scheduled_tokens=tokens, preempted_req_ids=preempted)
        return connector.build_connector_meta(step).jobs_to_flush

    yield SimpleNamespace(flushed=flushed, connector=connector)
    manager.shutdown()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param({"tokens": 1}, id="something is computed"),
        pytest.param({"loads": [3]}, id="nothing is computed but a load begins"),
        pytest.param({"preempted": {"request"}}, id="nothing is computed but a request is preempted"),
    ],
)
def test_issue_3_stores_are_flushed_in_each_step_in_which_gpu_blocks_may_change_hands(scheduler_half, step):
    assert scheduler_half.flushed(**step) == FLUSHED


@pytest.mark.parametrize("preempted", [None, set()])
def test_stores_that_wait_for_a_slot_go_on_in_a_step_in_which_no_gpu_block_changes_hands(scheduler_half, preempted):
    assert scheduler_half.flushed(preempted=preempted) is None


def test_after_a_reset_stores_are_flushed_once_whatever_happens_in_the_step(scheduler_half):
    scheduler_half.connector.reset_cache()
    assert scheduler_half.flushed() == FLUSHED
    assert scheduler_half.flushed() is None
