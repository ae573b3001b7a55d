"""Off is off: a connector that cannot start says why once, and does nothing in both halves of an engine."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from pykvcache_connector.connector import PyKVCacheConnector
from pykvcache_connector.messages import ConnectorMetadata, OffMetadata
from pykvcache_connector.off import OffConnector
from pykvcache_connector.startup import check_configuration
from pykvcache_connector.vllm_api import KVConnectorRole
from pykvcache_connector.worker.foothold import Foothold
from pykvcache_contract import metrics, names
from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError
from pykvcache_contract.keys import fingerprint_of
from pykvcache_storage.pool import open_pool

NO_CACHE = SimpleNamespace(kv_cache_groups=[])


def vllm_config(*, block=32, ranks=1, **options):
    """Return vLLM's configuration as far as a start looks at it."""
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector=names.CONNECTOR_CLASS,
            kv_role="kv_both",
            kv_connector_extra_config={"pool": "/cache", "when_unfit": "adapt", **options},
        ),
        cache_config=SimpleNamespace(block_size=block),
        parallel_config=SimpleNamespace(
            rank=1, world_size=2, decode_context_parallel_size=ranks, prefill_context_parallel_size=1
        ),
    )


@pytest.fixture
def log(caplog):
    """What our loggers said: through vLLM's handlers, which a connector adopts, or else through pytest's own."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def start(role, **options):
    return PyKVCacheConnector(vllm_config(**options), role, NO_CACHE)


# ---- a connector that cannot start ----


def test_the_schedulers_half_finds_nothing_and_says_why_once(log):
    connector = start(KVConnectorRole.SCHEDULER, frobnicate=1)
    assert isinstance(connector, OffConnector)
    assert (0, False) == connector.get_num_new_matched_tokens(None, 0)
    assert OffMetadata() == connector.build_connector_meta(None)
    assert (False, None) == connector.request_finished(None, []) == connector.request_finished_all_groups(None, ())
    for call in (connector.on_new_request, connector.update_connector_output, connector.set_xfer_handshake_metadata):
        assert call({}) is None
    connector.set_xfer_handshake_metadata_pp_aware({(1, 0): None})
    assert not connector.requires_kv_delivery
    assert {metrics.ENABLED.name: 0} == connector.get_kv_connector_stats().data["gauges"]
    assert {} == connector.get_kv_connector_stats().data["gauges"], "what did not change does not travel"
    (record,) = [record for record in log.records if "py-kvcache is off" in record.getMessage()]
    assert "unknown option 'frobnicate'" in record.getMessage()
    assert record.exc_info is None, "a wrong option needs no trace"


def test_a_workers_half_tells_the_scheduler_and_does_nothing(log):
    connector = start(KVConnectorRole.WORKER, staging="plenty")
    hello = connector.get_handshake_metadata()
    assert 1 == hello.rank
    assert "'plenty' is not a size" in hello.unavailable
    connector.register_kv_caches({})
    connector.handle_preemptions(OffMetadata())
    connector.bind_connector_metadata(OffMetadata())
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert (None, None) == connector.get_finished(set())
    assert set() == connector.get_block_ids_with_load_errors()
    assert connector.build_connector_worker_meta() is None
    connector.shutdown()
    assert not [record for record in log.records if "py-kvcache is off" in record.getMessage()]


def test_what_vllm_itself_objects_to_turns_it_off_with_a_trace(log):
    connector = start(KVConnectorRole.SCHEDULER)
    assert isinstance(connector, OffConnector)
    assert [record for record in log.records if record.exc_info]


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
def test_without_adapt_a_wrong_option_stops_vllm(role):
    with pytest.raises(ConfigurationError, match="frobnicate"):
        start(role, frobnicate=1, when_unfit="error")


def test_statistics_go_under_the_name_that_vllm_was_told():
    assert names.CONNECTOR_CLASS == type(start(KVConnectorRole.WORKER, frobnicate=1)).__name__


@pytest.mark.parametrize("call", ["handle_preemptions", "bind_connector_metadata"])
def test_a_worker_turns_off_with_its_scheduler(call):
    connector = object.__new__(PyKVCacheConnector)
    connector._config, connector._kv_cache_config = vllm_config(), NO_CACHE
    getattr(connector, call)(OffMetadata())
    assert isinstance(connector, OffConnector)
    connector.bind_connector_metadata(OffMetadata())
    assert not isinstance(connector._get_connector_metadata(), ConnectorMetadata)


@pytest.mark.parametrize("adapts", [False, True])
def test_a_kv_cache_that_vllm_cannot_register_stops_only_who_wants_to_know(adapts, log):
    connector = object.__new__(PyKVCacheConnector)
    connector._config, connector._kv_cache_config, connector._adapts = vllm_config(), NO_CACHE, adapts
    connector.connector_worker = SimpleNamespace(register_kv_caches=lambda caches: 1 / 0)
    if adapts:
        connector.register_kv_caches({})
        assert "ZeroDivisionError: division by zero" == connector.get_handshake_metadata().unavailable
    else:
        with pytest.raises(ZeroDivisionError):
            connector.register_kv_caches({})


# ---- block sizes ----


def attention(block, window=None):
    spec = FullAttentionSpec if window is None else SlidingWindowSpec
    options = {} if window is None else {"sliding_window": window}
    return spec(block_size=block, num_kv_heads=1, head_size=64, dtype=torch.float16, **options)


def mamba(block):
    return MambaSpec(shapes=((1, 1),), dtypes=(torch.float16,), block_size=block)


@pytest.mark.parametrize(
    ("given", "fitting", "specs", "ranks"),
    [
        (256, 256, [attention(32)], 1),
        (100, 128, [attention(32)], 1),
        (1, 32, [attention(32)], 1),
        (-5, 32, [attention(32)], 1),
        ("100", 128, [attention(32)], 1),
        (96, 128, [attention(32)], 2),
        (256, 272, [attention(272)], 1),
        (256, 128, [attention(16), attention(16, 128)], 1),
        (256, 96, [attention(32), attention(32, 100)], 1),
        (64, 64, [attention(16), attention(16, 128)], 1),
        (256, 64, [attention(64, 32)], 1),
        (100, 128, [attention(32), mamba(528)], 1),
        (100, 128, [], 1),
    ],
)
def test_a_block_size_is_made_to_fit(given, fitting, specs, ranks):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    config = vllm_config(block_size=given, ranks=ranks)
    said = check_configuration(config, SimpleNamespace(kv_cache_groups=groups))
    assert fitting == int(config.kv_transfer_config.kv_connector_extra_config["block_size"])
    assert bool(said) == (given != fitting)
    assert f"have {fitting} tokens" in said or not said


def test_without_adapt_a_block_size_that_does_not_fit_is_refused():
    config = vllm_config(block_size=100, when_unfit="error")
    with pytest.raises(ConfigurationError, match=r"block_size = 100 is not a multiple of .* Set it to 128\."):
        check_configuration(config, NO_CACHE)


def test_without_a_block_size_nothing_changes():
    config = vllm_config()
    before = copy.deepcopy(config.kv_transfer_config.kv_connector_extra_config)
    assert "" == check_configuration(config, NO_CACHE)
    assert before.items() <= config.kv_transfer_config.kv_connector_extra_config.items()


# ---- pools that somebody else makes ----


def test_a_pool_that_others_make_is_opened_for_writing_but_never_made(tmp_path):
    with pytest.raises(PoolUnavailableError, match=r"it has no pool\.json"):
        open_pool(str(tmp_path), create=False, for_writing=True)
    assert [] == list(tmp_path.iterdir())
    made = open_pool(str(tmp_path), create=True)
    assert made == open_pool(str(tmp_path), create=False, for_writing=True)


def test_a_blank_disk_stays_blank_until_somebody_else_makes_it_a_pool(tmp_path, mounts, log):
    disk = tmp_path / "disk"
    mounts.tmpfs(disk)
    foothold = Foothold(open_pool(str(disk), create=True), may_create=False)
    foothold.prepare(fingerprint_of({"model": "m"}), {})
    foothold.leave()
    mounts.detach(disk)
    mounts.tmpfs(disk)
    foothold.look()
    assert not foothold.is_there
    assert [] == list(disk.iterdir())
    assert "it has no pool.json" in log.text
    open_pool(str(disk), create=True)
    foothold.look()
    assert foothold.is_there
