"""Pods as platforms make them: which container gets the cache, how, or why not."""

import json
from pathlib import Path

import pytest
import yaml

from pykvcache_operator.injection.containers import choose
from pykvcache_operator.injection.outcome import Skip
from pykvcache_operator.injection.transfer_config import TransferOptions
from pykvcache_operator.injection.vllm_container import configure

SHAPES = Path(__file__).with_name("shapes")
OPTIONS = TransferOptions(staging_bytes=2**30, block_tokens=256, create_pool=False)

# The container, how vLLM is told, and how many warnings.
INJECTED = {
    "image-only": ("server", "args", 0),
    "production-stack": ("vllm", "variable", 2),
    "kserve-huggingface": ("kserve-container", "variable", 0),
    "kserve-vllm": ("kserve-container", "args", 0),
    "llm-inference-service": ("main", "variable", 0),
    "llm-d-custom": ("vllm", "variable", 0),
    "lws-leader": ("vllm-leader", "variable", 1),
    "lws-worker": ("vllm-worker", "variable", 1),
    "kuberay-worker": ("ray-worker", "variable", 2),
    "batch-job": ("worker", "variable", 1),
}
HAVE_ONE = ["production-stack-lmcache", "llm-inference-service-nixl", "llm-d-decode"]


def configured(name, **annotations):
    pod = yaml.safe_load((SHAPES / f"{name}.yaml").read_text())
    annotations = {**pod["metadata"].get("annotations", {}), **annotations}
    container = pod["spec"]["containers"][choose(pod["spec"], annotations)]
    return configure(container, options=OPTIONS, annotations=annotations, version="1")


def test_every_shape_is_tested():
    assert sorted([*INJECTED, *HAVE_ONE]) == sorted(path.stem for path in SHAPES.glob("*.yaml"))


@pytest.mark.parametrize(("name", "expected"), INJECTED.items())
def test_a_shape_gets_the_cache(name, expected):
    result = configured(name)
    told = [entry["name"] for entry in result.container["env"] if entry["name"] == "PYKVCACHE_KV_TRANSFER_CONFIG"]
    by = "variable" if told else "args"
    assert by == "variable" or "--kv-transfer-config" in result.container["args"]
    assert (result.container["name"], by, len(result.warnings)) == expected, result.warnings


@pytest.mark.parametrize("name", HAVE_ONE)
def test_a_shape_with_a_transfer_of_its_own_is_left_alone(name):
    with pytest.raises(Skip, match="already"):
        configured(name)


def test_llm_ds_decode_pod_is_merged_where_it_asks_for_that():
    result = configured("llm-d-decode", **{"pykvcache.io/on-conflict": "Merge"})
    connectors = json.loads(result.container["args"][-1])["kv_connector_extra_config"]["connectors"]
    assert [item["kv_connector"] for item in connectors] == ["NixlConnector", "PyKVCacheConnector"]


def test_a_jobs_own_path_and_plugins_stay_in_force():
    variables = {entry["name"]: entry.get("value") for entry in configured("batch-job").container["env"]}
    assert variables["PYTHONPATH"] == "/pykvcache/library:/app"
    assert variables["VLLM_PLUGINS"] == "nightly_models,pykvcache"
