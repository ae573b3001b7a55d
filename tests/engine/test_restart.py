"""Resets, killed writers and hash seeds: what a later engine finds, and what it must not find."""


def test_after_a_reset_nothing_old_is_hit_and_the_next_process_finds_the_old_blocks_again(
    vllm, model, pool, prompts, baseline, connector
):
    expected = baseline(enable_prefix_caching=True)
    (base,) = pool.fingerprints()
    with vllm.engine(model, connector(pool), enable_prefix_caching=True) as engine:
        before = engine.generate(prompts.tokens)
        engine.wait_idle()
        assert vllm.call("reset")
        after = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
        (new,) = set(pool.fingerprints()) - {base}
        assert vllm.call("reset")
        engine.generate(prompts.tokens)
        engine.wait_idle()
        assert 3 == len(pool.fingerprints())
    assert [expected, expected] == [before.tokens, after.tokens]
    assert prompts.hits == before.cached
    assert 64 * prompts.blocks == metrics["hit_tokens|disk"], "something was loaded after the reset"
    assert prompts.blocks == metrics["store_blocks"]
    assert prompts.blocks == len(list(pool.path.glob(f"{new}/r0/*/*/*.kvb")))

    with vllm.engine(model, connector(pool), enable_prefix_caching=True) as engine:
        restarted = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert expected == restarted.tokens
    assert prompts.hits == restarted.cached
    assert 0 == metrics["store_blocks"]
    pool.inspect()


def test_a_reset_keeps_what_is_stored_from_then_on(vllm, model, empty_pool, prompts, baseline, connector):
    expected = baseline()
    with vllm.engine(model, connector(empty_pool)) as engine:
        assert vllm.call("reset")
        engine.generate(prompts.tokens)
        engine.wait_idle()
        outputs = engine.generate(prompts.tokens)
    assert expected == outputs.tokens
    assert prompts.hits == outputs.cached


def test_an_engine_killed_while_it_stores_leaves_no_half_block(
    spawn, vllm, model, empty_pool, prompts, baseline, connector
):
    expected = baseline()
    victim = spawn()
    with victim.engine(model, connector(empty_pool), faults=True) as engine:
        # Five blocks are published; of the others half is written, and then nothing comes any more.
        engine.fault("hold_writes", after=5)
        engine.generate(prompts.tokens)
        engine.wait_until(lambda metrics: 5 == metrics["store_blocks"] and prompts.blocks - 5 == engine.fault("held"))
        victim.kill()
    assert 5 == len(empty_pool.blocks())
    assert prompts.blocks - 5 == len(empty_pool.temporaries())

    with vllm.engine(model, connector(empty_pool)) as engine:
        outputs = engine.generate(prompts.tokens)
        engine.wait_idle()
        assert "removed temporary files of dead writers" in vllm.log()
        assert [] == empty_pool.temporaries()
        empty_pool.inspect()
        again = engine.generate(prompts.tokens)
    assert expected == outputs.tokens
    assert expected == again.tokens
    assert prompts.hits == again.cached
    assert prompts.blocks == empty_pool.inspect()["verification"]["checked"]


def test_without_a_hash_seed_blocks_are_found_again_or_the_cache_is_off_and_says_why(
    spawn, vllm, model, empty_pool, prompts, baseline, connector
):
    expected = baseline()
    process = spawn(PYTHONHASHSEED=None)
    with process.engine(model, connector(empty_pool)) as engine:
        first = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
        log = process.log()
    assert expected == first.tokens
    if metrics["enabled"] == 0:
        # This vLLM draws a new seed in every process.
        assert "Set PYTHONHASHSEED=0 in the environment of vLLM" in log
        assert [] == empty_pool.blocks()
        return
    process.kill()
    another = spawn(PYTHONHASHSEED=None)
    with another.engine(model, connector(empty_pool)) as engine:
        second = engine.generate(prompts.tokens)
    assert expected == second.tokens
    assert prompts.hits == second.cached
