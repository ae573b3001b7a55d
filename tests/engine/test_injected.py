"""vLLM as injection starts it: our library on PYTHONPATH, options in the environment or among the arguments.

Whatever does not fit, vLLM starts and answers; the log says in one line why the cache is off.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from pykvcache_cli import vllm_server
from pykvcache_contract import names

OFF = "py-kvcache is off"


def transfer_config(pool, **changed):
    """Return what injection writes."""
    options = {"pool": str(pool), "staging": 16 << 20, "block_size": 100, "when_unfit": "adapt", "create_pool": True}
    return {
        "kv_connector": names.CONNECTOR_CLASS,
        "kv_connector_module_path": names.CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": names.SPEC_CLASS,
            "spec_module_path": names.SPEC_MODULE,
            "lookup_timeout_seconds": 30,
            **options,
            **changed,
        },
    }


def off_lines(log):
    return [line for line in log.splitlines() if OFF in line]


# ---- options that do not fit ----


def _mark(pool: Path) -> None:
    (pool / "pykvcache-unavailable").write_text("NoSuitableDisk: none of 2 disks is empty")


UNFIT = {
    "unknown option": ({"frobnicate": 1}, "unknown option 'frobnicate'"),
    "staging too small": ({"staging": "64KiB"}, "Set staging to at least"),
    "no number": ({"block_size": "many"}, "ValueError"),
    "both sizes": (
        {"spec_module_path": "pykvcache_connector.missing"},
        "No module named 'pykvcache_connector.missing'",
    ),
    "not yet a pool": ({"create_pool": False}, "is not a cache pool: it has no pool.json"),
    "not ready": (_mark, "the pool was not ready on this node when the pod started (NoSuitableDisk"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_whatever_does_not_fit_turns_the_cache_off_where_vllm_must_start(
    vllm, model, prompts, baseline, connector, empty_pool, kind
):
    changed, words = UNFIT[kind]
    if callable(changed):
        changed(empty_pool.path)
        changed = {}
    before = {*os.listdir(empty_pool), *(["pool.json"] if kind == "staging too small" else [])}
    expected = baseline()
    with vllm.engine(model, connector(empty_pool, when_unfit="adapt", **changed)) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.metrics("vllm:pykvcache_")
        log = vllm.log()
    assert expected == outputs.tokens
    assert 0 == metrics["enabled"]
    (line,) = off_lines(log)
    assert words in line
    assert before == set(os.listdir(empty_pool)), "nothing was stored"


# ---- the library on PYTHONPATH, options in the environment ----


@pytest.fixture
def injected(spawn, library, empty_pool):
    """A process as in a container whose command takes no arguments: everything is in its environment."""
    return spawn(
        PYTHONPATH=str(library),
        PYKVCACHE_INJECTED="0.2.0",
        PYKVCACHE_KV_TRANSFER_CONFIG=json.dumps(transfer_config(empty_pool)),
        VLLM_PLUGINS="lora_filesystem_resolver,pykvcache",
    )


def test_an_injected_engine_finds_its_blocks_after_a_restart_and_users_choices_stay(
    injected, model, empty_pool, prompts, baseline
):
    expected = baseline()
    with injected.engine(model) as engine:
        outputs = [engine.generate(prompts.tokens)]
        engine.wait_idle()
        log = injected.log()
    with injected.engine(model) as engine:
        outputs.append(engine.generate(prompts.tokens))
    assert [expected, expected] == [output.tokens for output in outputs]
    assert [len(prompt) // 128 * 128 for prompt in prompts.tokens] == outputs[1].cached
    assert [] == off_lines(log)
    assert "block_size = 100 does not suit vLLM's blocks of 32 tokens: offloaded blocks have 128 tokens" in log
    assert len(empty_pool.blocks()) > 0

    ours = injected.call("configure", model=str(model), transfer=None, options={})
    assert (names.CONNECTOR_CLASS, "sha256_cbor") == (ours["connector"], ours["hash"])
    theirs = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    options = {"prefix_caching_hash_algo": "xxhash"}
    own = injected.call("configure", model=str(model), transfer=theirs, options=options)
    assert ("DecodeBenchConnector", "xxhash") == (own["connector"], own["hash"])
    assert "with DecodeBenchConnector. Leave it out to have the cache" in injected.log()
    hidden = injected.call("configure", model=str(model), transfer=None, options={"kv_offloading_size": 1.0})
    assert "OffloadingConnector" == hidden["connector"]
    assert "pool" not in hidden["extra"]


# ---- a library that does not suit this vLLM, options among the arguments ----


@pytest.fixture
def broken_library(library, tmp_path):
    """The library, as if this vLLM lacked something that it needs."""
    folder = tmp_path / "library"
    shutil.copytree(library, folder)
    with (folder / "pykvcache_connector" / "vllm_api.py").open("a") as file:
        file.write("\nfrom vllm.v1.kv_offload.base import NotYetInvented\n")
    return folder


def test_a_server_starts_without_a_library_that_does_not_suit_it_and_without_flags_that_it_does_not_know(
    model, tmp_path, empty_pool, broken_library
):
    log = tmp_path / "serve.log"
    transfer = {**transfer_config(empty_pool), "kv_field_of_2030": 1}
    flags = ["--dtype=float32", "--kv-cache-memory-bytes=67108864", "--max-model-len=1024", "--enforce-eager"]
    flags += ["--prefix-caching-hash-algo", "sha256_cbor", "--kv-transfer-config", json.dumps(transfer)]
    variables = {"PYTHONPATH": str(broken_library), "PYKVCACHE_INJECTED": "0.2.0", "HF_HUB_OFFLINE": "1"}
    with vllm_server.running(str(model), flags, environment=variables, log=log) as server:
        answer = server.complete(str(model), "once upon a time", max_tokens=4)
    assert len(answer.text) > 0
    (line,) = off_lines(log.read_text())
    assert "this image has vLLM 0." in line
    assert "NotYetInvented" in line
    assert "py-kvcache knows vLLM 0.22 to 0.33" in line
    assert [] == os.listdir(empty_pool)
