"""Several ranks of one engine, and several engines on one pool."""

TWO_RANKS = {"tensor_parallel_size": 2}


def test_two_ranks_store_and_load_and_a_block_needs_the_files_of_both(
    vllm, model, empty_pool, prompts, baseline, connector
):
    expected = baseline(**TWO_RANKS)
    with vllm.engine(model, connector(empty_pool), **TWO_RANKS) as engine:

        def new_files(prompt: list[int], rank: int):
            before = set(empty_pool.blocks(rank))
            engine.generate([prompt])
            engine.wait_idle()
            return sorted(set(empty_pool.blocks(rank)) - before)

        new_files(prompts.tokens[0][: 2 * 64 + 5], rank=1)
        (third,) = new_files(prompts.tokens[0][: 3 * 64 + 5], rank=1)
        (first_of_last,) = new_files(prompts.tokens[4][: 64 + 5], rank=0)
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert expected == outputs.tokens
    assert 2 * prompts.blocks == metrics["store_blocks"]
    assert prompts.blocks == len(empty_pool.names(rank=0))
    assert empty_pool.names(rank=0) == empty_pool.names(rank=1)
    empty_pool.inspect()

    third.unlink()
    with first_of_last.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(64))
    with vllm.engine(model, connector(empty_pool), **TWO_RANKS) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
        again = engine.repeat(prompts.tokens, until=lambda grown: 2 * prompts.loads == grown["load_blocks"])
    assert expected == outputs.tokens
    # The others may find more, once the first has stored its third block.
    assert 2 * 64 == outputs.cached[0] == min(outputs.cached[:4])
    assert 1 == metrics["load_failures|corrupt"] == metrics["quarantined_blocks"]
    assert [expected] * len(again) == [run.tokens for run in again]
    assert prompts.hits == again[-1].cached, [run.cached for run in again]
    assert prompts.blocks == len(empty_pool.names(rank=0))
    assert empty_pool.names(rank=0) == empty_pool.names(rank=1)
    empty_pool.inspect()


def test_two_engines_fill_one_empty_pool_together(
    vllm, spawn, model, empty_pool, prompts, baseline, connector, tmp_path
):
    expected = baseline()
    other = spawn()
    marks = [str(tmp_path / name) for name in ("one", "other")]
    with (
        vllm.engine(model, connector(empty_pool)) as one,
        other.engine(model, connector(empty_pool)) as two,
    ):
        for process, mine, theirs in ((vllm, *marks), (other, *reversed(marks))):
            process.send("meet", mine=mine, other=theirs)
        for process in (vllm, other):
            process.receive()
        for engine in (one, two):
            engine.begin_generate(prompts.tokens)
        outputs = [engine.end_generate() for engine in (one, two)]
        stored = sum(engine.wait_idle()["store_blocks"] for engine in (one, two))
        again = [engine.generate(prompts.tokens) for engine in (one, two)]
    assert [expected, expected] == [output.tokens for output in outputs]
    assert [expected, expected] == [output.tokens for output in again]
    assert [prompts.hits, prompts.hits] == [output.cached for output in again]
    assert prompts.blocks == stored
    found = empty_pool.inspect()
    assert prompts.blocks == found["blocks"] == found["verification"]["checked"]
    assert found["size_bytes"] == found["used_bytes"]
    assert [] == empty_pool.temporaries()
