"""What one process stored, another one loads, and the tokens are those of an engine without the cache."""

import json
import os

import pytest

from pykvcache_contract.recency import depth_of

CHUNKED = {"max_num_batched_tokens": 96, "max_num_seqs": 4}


def test_storing_changes_no_output_and_every_block_is_stored_once(filled, prompts, baseline):
    assert baseline() == filled.outputs.tokens
    assert [0, 0, 0] == prompts.found_first(filled.outputs.cached)
    assert prompts.blocks == filled.metrics["store_blocks"]
    files = list(filled.pool.glob("*/r0/*/*/*.kvb"))
    assert prompts.blocks == len(files)
    assert sum(file.stat().st_size for file in files) == filled.metrics["store_bytes"]


@pytest.mark.parametrize(
    ("engine_options", "cache_options"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({"enable_prefix_caching": True}, {}, id="prefix caching"),
        pytest.param(CHUNKED, {}, id="chunked prefill"),
        pytest.param({}, {"engine": "threads"}, id="thread ring"),
        pytest.param({}, {"direct_io": "off"}, id="page cache"),
        pytest.param({}, {"integrity": "header"}, id="header only"),
    ],
)
def test_a_new_process_loads_all_whole_blocks_and_computes_the_same_tokens(
    vllm, model, pool, prompts, baseline, connector, engine_options, cache_options
):
    expected = baseline(**engine_options)
    with vllm.engine(model, connector(pool, **cache_options), **engine_options) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert expected == outputs.tokens
    shared = "enable_prefix_caching" in engine_options
    loads = prompts.blocks if shared else prompts.loads
    assert prompts.hits == outputs.cached
    assert loads == metrics["load_blocks"]
    assert loads * (pool.blocks()[0].stat().st_size - 4096) == metrics["load_bytes"]
    assert 64 * loads == metrics["hit_tokens|disk"]
    assert metrics["hit_tokens|disk"] <= metrics["lookup_tokens"]
    assert 0 == metrics["store_blocks"]


def test_chunked_prefill_stores_the_same_blocks(vllm, model, empty_pool, filled, prompts, baseline, connector):
    expected = baseline(**CHUNKED)
    with vllm.engine(model, connector(empty_pool), **CHUNKED) as engine:
        outputs = engine.generate(prompts.tokens)
        engine.wait_idle()
    assert expected == outputs.tokens
    assert sorted(file.name for file in filled.pool.glob("*/r0/*/*/*.kvb")) == empty_pool.names()
    assert empty_pool.inspect()["verification"]["checked"] == prompts.blocks


def test_a_prefix_longer_than_the_staging_memory_loads_completely(vllm, model, pool, prompts, baseline, connector):
    expected = baseline()
    staging = 2 * pool.blocks()[0].stat().st_size
    with vllm.engine(model, connector(pool, staging=staging)) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert 2 == metrics["staging_slots"]
    assert expected == outputs.tokens
    assert prompts.hits == outputs.cached


def test_files_tell_how_deep_their_blocks_lie_from_the_first_moment_and_after_a_later_lookup(
    vllm, model, empty_pool, prompts, connector, tmp_path
):
    trace = tmp_path / "trace.jsonl"
    with vllm.engine(model, connector(empty_pool, trace=str(trace))) as engine:
        engine.generate(prompts.tokens)
        engine.wait_idle()
        # The trace and the times of files are written after the answers, which wait for neither.
        engine.wait_until(lambda _: trace.exists() and trace.read_text().count("\n") == len(prompts.tokens))
        requests = [json.loads(line) for line in trace.read_text().splitlines()]
        stored = depths_of(empty_pool)
        for file in empty_pool.blocks():
            os.utime(file, (0, 0))
        engine.generate(prompts.tokens)
        engine.wait_until(lambda _: all(file.stat().st_mtime > 1e9 for file in empty_pool.blocks()))
    assert sorted(len(tokens) // 64 for tokens in prompts.tokens) == sorted(
        len(request["blocks"]) for request in requests
    )
    expected = {block: depth for request in requests for depth, block in enumerate(request["blocks"])}
    assert expected == stored
    assert expected == depths_of(empty_pool)
    assert {empty_pool.blocks()[0].stat().st_size} == {request["block_bytes"] for request in requests}


def depths_of(pool) -> dict[str, int]:
    """Return the depth that each block's file tells, by the first digits of its hash."""
    return {file.name[:16]: depth_of(file.stat().st_mtime_ns) for file in pool.blocks()}


def test_a_salted_prompt_finds_only_blocks_of_its_own_salt(vllm, model, pool, prompts, baseline, connector):
    expected = baseline()
    with vllm.engine(model, connector(pool)) as engine:
        for salt in ("one tenant", "another"):
            first = engine.generate(prompts.tokens, salt=salt)
            engine.wait_idle()
            second = engine.generate(prompts.tokens, salt=salt)
            assert [expected, expected] == [first.tokens, second.tokens]
            assert [0, 0, 0] == prompts.found_first(first.cached)
            assert prompts.hits == second.cached


def test_a_request_for_prompt_log_probabilities_loads_nothing(vllm, model, pool, prompts, baseline, connector):
    expected = baseline()
    with vllm.engine(model, connector(pool)) as engine:
        outputs = engine.generate(prompts.tokens, prompt_logprobs=1)
        metrics = engine.wait_idle()
    assert expected == outputs.tokens
    assert [len(prompt) for prompt in prompts.tokens] == outputs.logprobs
    assert 0 == metrics["load_blocks"]
