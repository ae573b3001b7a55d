"""An engine over several pods goes without: a pod cannot know whether the others have the library."""

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

from pykvcache_connector import engine_args
from pykvcache_connector.reach import why_too_far
from pykvcache_contract import names

OURS = {"kv_connector": names.CONNECTOR_CLASS, "kv_connector_module_path": names.CONNECTOR_MODULE, "kv_role": "kv_both"}
TWO = {"data_parallel_size": 2}


def reason(parallel: Any, *, is_headless: bool = False, **arguments: Any) -> str:
    config = SimpleNamespace(parallel_config=parallel)
    return why_too_far(SimpleNamespace(**arguments), config, is_headless=is_headless)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        {**TWO, "data_parallel_size_local": 2},
        {**TWO, "data_parallel_size_local": 1, "data_parallel_external_lb": True},
        {**TWO, "data_parallel_size_local": 1, "data_parallel_external_lb": True, "nnodes": 2},
        {"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_hybrid_lb": True},
    ],
)
def test_an_engine_whose_workers_and_server_are_in_one_pod_may_have_the_cache(options):
    assert "" == reason(ParallelConfig(**options), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp"}, "--nnodes"),
        ({**TWO, "data_parallel_size_local": 1}, "--data-parallel-size-local"),
        ({**TWO, "data_parallel_size_local": 0}, "--data-parallel-size-local"),
        ({**TWO, "data_parallel_size_local": 1, "nnodes": 2}, "--data-parallel-size-local"),
        (
            {
                **TWO,
                "data_parallel_size_local": 2,
                "data_parallel_backend": "ray",
                "distributed_executor_backend": "mp",
            },
            "--data-parallel-backend ray",
        ),
    ],
)
def test_an_engine_that_vllm_spreads_goes_without(options, words):
    found = reason(ParallelConfig(**options), **options)
    assert f"({words})" in found
    assert "Run each engine and its server in one pod" in found


class SomebodysExecutor:
    """It may start its workers anywhere, whatever it is called."""


SomebodysExecutor.__name__ = "MultiprocExecutor"


@pytest.mark.parametrize("executor", [UniProcExecutor, MultiprocExecutor])
def test_vllms_own_executors_stay_in_the_pod_also_when_they_are_given_as_classes(executor):
    assert "" == reason(SimpleNamespace(distributed_executor_backend=executor))


@pytest.mark.parametrize("executor", ["ray", "external_launcher", ExecutorWithExternalLauncher, SomebodysExecutor])
def test_so_does_one_whose_executor_may_start_workers_anywhere(executor):
    assert "its executor is" in reason(SimpleNamespace(distributed_executor_backend=executor))


def test_so_do_engines_of_a_server_elsewhere():
    options = {**TWO, "data_parallel_size_local": 1, "data_parallel_external_lb": True}
    assert "(--headless)" in reason(ParallelConfig(**options), is_headless=True, **options)


def test_processes_of_an_offline_group_have_an_engine_each(monkeypatch):
    monkeypatch.setenv("VLLM_DP_SIZE", "2")
    parallel = ParallelConfig(data_parallel_size_local=1)
    assert 2 == parallel.data_parallel_size
    assert "" == reason(parallel, data_parallel_size=1)


@pytest.fixture
def create_engine_config(monkeypatch, caplog):
    """vLLM's method with the plugin around it; what vLLM makes is as small as can be."""

    def original(self: Any, usage_context: Any = None, headless: bool = False) -> Any:
        return SimpleNamespace(
            kv_transfer_config=self.kv_transfer_config,
            parallel_config=ParallelConfig(tensor_parallel_size=2, nnodes=self.nnodes),
            model_config=SimpleNamespace(is_encoder_decoder=False, multimodal_config=None),
        )

    monkeypatch.setattr(EngineArgs, "create_engine_config", original)
    engine_args.install(json.dumps(OURS))
    logger = logging.getLogger("vllm.pykvcache")
    logger.addHandler(caplog.handler)
    yield EngineArgs.create_engine_config
    logger.removeHandler(caplog.handler)


def arguments(**options: Any) -> Any:
    given = EngineArgs.__new__(EngineArgs)
    vars(given).update(
        {"kv_transfer_config": None, "prefix_caching_hash_algo": EngineArgs.prefix_caching_hash_algo, "nnodes": 1}
        | options
    )
    return given


def test_the_plugin_takes_our_configuration_away_and_says_why(create_engine_config, caplog):
    assert create_engine_config(arguments()).kv_transfer_config is not None
    for far in (arguments(nnodes=2), arguments(nnodes=2, kv_transfer_config=KVTransferConfig(**OURS))):
        assert create_engine_config(far).kv_transfer_config is None
        assert EngineArgs.prefix_caching_hash_algo == far.prefix_caching_hash_algo
    assert "py-kvcache is off: this engine may run in several pods (--nnodes)" in caplog.text


@pytest.mark.parametrize(("given", "options"), [((None, True), {}), ((None,), {"headless": True})])
def test_the_plugin_knows_engines_of_a_server_elsewhere(create_engine_config, given, options):
    assert create_engine_config(arguments(), *given, **options).kv_transfer_config is None
    assert create_engine_config(arguments(), None, headless=False).kv_transfer_config is not None
