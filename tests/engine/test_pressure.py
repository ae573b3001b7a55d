"""Preempted and aborted requests, and a disk that hangs."""

import pytest

SMALL = {"kv_cache_memory_bytes": 44 * (128 << 10), "max_model_len": 704}
MANY_TOKENS = 96
NEW_TOKENS = 8
LOAD_SECONDS_MAX = 2.0
ONE_REQUEST = {"kv_cache_memory_bytes": 20 * (128 << 10), "max_model_len": 576}
"""Room for the longest prompt and one GPU block more."""
SLOTS = 8
"""As many as the longest prompt has blocks; stores leave some of them to loads."""


@pytest.mark.parametrize(("prefix_caching", "loading"), [(False, "streaming"), (True, "streaming"), (True, "staged")])
def test_requests_are_preempted_while_blocks_are_stored_and_loaded(
    vllm, model, empty_pool, prompts, baseline, connector, prefix_caching, loading
):
    options = {**SMALL, "enable_prefix_caching": prefix_caching}
    expected = baseline(max_tokens=MANY_TOKENS, **options)
    with vllm.engine(model, connector(empty_pool, loading=loading), **options) as engine:
        stored = engine.generate(prompts.tokens, MANY_TOKENS)
        preempted = [engine.metrics("vllm:")["num_preemptions"]]
        before = engine.wait_idle()
        loaded = engine.repeat(
            prompts.tokens,
            until=lambda _: engine.metrics("vllm:")["num_preemptions"] > preempted[0],
            max_tokens=MANY_TOKENS,
        )
        preempted.append(engine.metrics("vllm:")["num_preemptions"])
        metrics = engine.wait_idle()
    assert expected == stored.tokens
    assert [expected] * len(loaded) == [outputs.tokens for outputs in loaded]
    assert 0 < preempted[0] < preempted[1]
    assert metrics["load_blocks"] > 0
    # A request that is preempted asks again, and what it then loads counts again: so must the question.
    hits, lookups = (metrics[name] - before[name] for name in ("hit_tokens|disk", "lookup_tokens"))
    assert 0 < hits <= lookups
    assert 0 == sum(value for name, value in metrics.items() if name.startswith("store_failures"))
    empty_pool.inspect()


def test_preemption_does_not_wait_for_a_disk_that_takes_no_writes(
    vllm, model, empty_pool, prompts, baseline, connector, filled
):
    expected = baseline(max_tokens=MANY_TOKENS, **SMALL, enable_prefix_caching=True)
    staging = 6 * next(filled.pool.glob("*/r0/*/*/*.kvb")).stat().st_size
    with vllm.engine(
        model, connector(empty_pool, staging=staging), faults=True, **SMALL, enable_prefix_caching=True
    ) as engine:
        engine.fault("hold_writes", after=0)
        outputs = engine.generate(prompts.tokens, MANY_TOKENS)
        preempted = engine.metrics("vllm:")["num_preemptions"]
        metrics = engine.metrics("vllm:pykvcache_")
    assert expected == outputs.tokens
    assert preempted > 0
    assert 0 == metrics["store_blocks"]
    assert metrics["declines|store|staging_full"] > 0


def test_issue_3_a_store_that_waits_for_a_slot_is_dropped_before_its_gpu_blocks_are_loaded_over(
    vllm, model, pool, prompts, baseline, connector
):
    """The load gets its GPU blocks in a step in which nothing is computed, and before the next one slots are free."""
    expected = baseline()
    options = connector(pool, staging=SLOTS * pool.blocks()[0].stat().st_size)
    long, short = prompts.tokens[3], prompts.tokens[5]
    with vllm.engine(model, options, faults=True, **ONE_REQUEST) as engine:
        # Under a salt the prompt's blocks are others than those in the pool. Some of its stores get no slot.
        engine.fault("hold_writes", after=0)
        first = engine.generate([long], salt="a tenant")
        other = vllm.call("load_amid_stores", prompt=short, reads=4, stores=SLOTS, max_tokens=NEW_TOKENS)
        metrics = engine.wait_idle()
        again = engine.generate([long], salt="a tenant")
    assert [0] == first.cached
    assert prompts.hits[5] == other["cached"]
    assert [expected[3]] == first.tokens
    assert expected[5] == other["tokens"]
    assert [expected[3]] == again.tokens, "what was stored is what was loaded over it"
    assert 0 < metrics["store_blocks"] < SLOTS
    assert SLOTS == metrics["store_blocks"] + metrics["declines|store|staging_full"]
    assert [64 * metrics["store_blocks"]] == again.cached
    pool.inspect()


def test_a_request_is_aborted_while_its_load_is_in_flight(vllm, model, pool, prompts, baseline, connector):
    expected = baseline()
    with vllm.engine(model, connector(pool), faults=True) as engine:
        outputs = vllm.call("abort_one", prompts=prompts.tokens, victim=3, max_tokens=NEW_TOKENS)
        again = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    others = [tokens for index, tokens in enumerate(expected) if index != 3]
    assert others == [output["tokens"] for output in outputs if output is not None]
    assert expected == again.tokens
    assert prompts.hits == again.cached
    assert 0 == sum(value for name, value in metrics.items() if name.startswith("load_failures"))


def test_a_disk_that_hangs_delays_one_round_of_requests_and_no_later_one(
    vllm, model, pool, prompts, baseline, connector
):
    expected = baseline()
    options = connector(pool, load_timeout_seconds=LOAD_SECONDS_MAX)
    with vllm.engine(model, options, faults=True) as engine:
        engine.generate([[3, 4, 5]])
        engine.fault("hold_reads")
        first = engine.generate(prompts.tokens)
        failed = engine.metrics("vllm:pykvcache_")
        later = [engine.generate(prompts.tokens) for _ in range(2)]
        metrics = engine.metrics("vllm:pykvcache_")
        held = engine.fault("held")
    assert expected == first.tokens
    assert [expected, expected] == [output.tokens for output in later]
    assert held > 0
    reason = "load_failures|timeout"
    assert 0 < failed[reason] == metrics[reason], "a later request waited for the disk"
    assert failed["load_duration_seconds_count"] == metrics["load_duration_seconds_count"]
    assert 0 == metrics["load_blocks"]
    assert [0] * len(prompts.tokens) == later[1].cached
