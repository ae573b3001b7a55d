"""`loading: staged`: blocks are read and verified before vLLM is promised them, so nothing is taken back later."""

import time

import pytest

STAGED = {"loading": "staged"}
LOAD_SECONDS_MAX = 4.0


def failures(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("load_failures"))


@pytest.mark.parametrize(
    "engine_options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"enable_prefix_caching": True}, id="prefix caching"),
        pytest.param({"max_num_batched_tokens": 96, "max_num_seqs": 4}, id="chunked prefill"),
    ],
)
def test_all_whole_blocks_are_staged_then_loaded_and_the_tokens_are_the_same(
    vllm, model, pool, prompts, baseline, connector, engine_options
):
    expected = baseline(**engine_options)
    with vllm.engine(model, connector(pool, **STAGED), **engine_options) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert expected == outputs.tokens
    assert prompts.hits == outputs.cached
    assert metrics["load_blocks"] > 0
    assert 0 == failures(metrics)


def test_a_prefix_longer_than_the_staging_memory_is_cut_to_it(vllm, model, pool, prompts, baseline, connector):
    expected = baseline()
    staging = 8 * pool.blocks()[0].stat().st_size
    with vllm.engine(model, connector(pool, staging=staging, **STAGED)) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert 8 == metrics["staging_slots"]
    assert expected == outputs.tokens
    # Two slots are kept for loads that cannot wait, one more for a store.
    assert [min(hit, 5 * 64) for hit in prompts.hits] == outputs.cached


def test_a_damaged_block_is_a_miss_before_anything_is_promised(vllm, model, pool, prompts, baseline, connector):
    expected = baseline()
    names = pool.names()
    for file in pool.blocks():
        with file.open("r+b") as writer:
            writer.seek(4096)
            writer.write(bytes(64))
    with vllm.engine(model, connector(pool, **STAGED)) as engine:
        runs = engine.repeat(prompts.tokens, until=lambda grown: prompts.loads == grown["load_blocks"])
        metrics = engine.wait_idle()
    assert [expected] * len(runs) == [outputs.tokens for outputs in runs]
    assert [0, 0, 0] == prompts.found_first(runs[0].cached)
    # What is promised is loaded, so nothing of it is computed after all.
    assert sum(sum(outputs.cached) for outputs in runs) == 64 * metrics["load_blocks"]
    assert metrics["load_failures|corrupt"] >= len(names) == metrics["quarantined_blocks"]
    assert prompts.hits == runs[-1].cached, [outputs.cached for outputs in runs]
    assert names == pool.names()
    pool.inspect()


def test_a_disk_that_hangs_is_a_miss_at_the_deadline_and_at_once_for_later_requests(
    vllm, model, pool, prompts, baseline, connector
):
    expected = baseline()
    options = connector(pool, load_timeout_seconds=LOAD_SECONDS_MAX, **STAGED)
    with vllm.engine(model, options, faults=True) as engine:
        engine.generate([[3, 4, 5]])
        engine.fault("hold_reads")
        begun = time.monotonic()
        first = engine.generate(prompts.tokens)
        waited = time.monotonic() - begun
        late = engine.metrics("vllm:pykvcache_")
        later = [engine.generate(prompts.tokens) for _ in range(2)]
        metrics = engine.metrics("vllm:pykvcache_")
        held = engine.fault("held")
    assert expected == first.tokens
    assert [expected, expected] == [output.tokens for output in later]
    assert [0] * len(prompts.tokens) == first.cached
    assert held > 0
    assert waited >= LOAD_SECONDS_MAX
    # The first is late; then the disk counts as stalled, and the others are a miss at once.
    reason = "declines|load|staging_timeout"
    assert 0 < late[reason] == metrics[reason], "a later request waited for the disk"
    assert metrics["declines|load|stalled"] > 0
    assert 0 == failures(metrics)


def test_a_request_is_aborted_while_its_blocks_are_staged_and_its_slots_are_free(
    vllm, model, pool, prompts, baseline, connector
):
    expected = baseline()
    with vllm.engine(model, connector(pool, **STAGED), faults=True) as engine:
        outputs = vllm.call("abort_one", prompts=prompts.tokens, victim=3, max_tokens=8)
        again = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    others = [tokens for index, tokens in enumerate(expected) if index != 3]
    assert others == [output["tokens"] for output in outputs if output is not None]
    assert expected == again.tokens
    assert prompts.hits == again.cached
    assert 0 == failures(metrics)


def test_a_reset_lets_staged_blocks_go(vllm, model, pool, prompts, baseline, connector):
    expected = baseline()
    with vllm.engine(model, connector(pool, **STAGED)) as engine:
        engine.generate(prompts.tokens)
        assert vllm.call("reset")
        after = engine.generate(prompts.tokens)
        engine.wait_idle()
        again = engine.generate(prompts.tokens)
    assert expected == after.tokens == again.tokens
    assert [0, 0, 0] == prompts.found_first(after.cached)
    assert prompts.hits == again.cached


def test_a_block_counts_when_both_ranks_have_staged_it(vllm, model, empty_pool, prompts, baseline, connector):
    two_ranks = {"tensor_parallel_size": 2}
    expected = baseline(**two_ranks)
    with vllm.engine(model, connector(empty_pool, **STAGED), **two_ranks) as engine:
        engine.generate(prompts.tokens)
        engine.wait_idle()
        damaged = empty_pool.blocks(rank=1)[0]
        with damaged.open("r+b") as file:
            file.seek(4096)
            file.write(bytes(64))
    with vllm.engine(model, connector(empty_pool, **STAGED), **two_ranks) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert expected == outputs.tokens
    assert metrics["load_failures|corrupt"] == metrics["quarantined_blocks"] == 1
    assert metrics["load_blocks"] > 0
    assert sum(outputs.cached) < sum(prompts.hits)
