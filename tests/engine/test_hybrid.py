"""A model with sliding-window and full attention: two KV-cache groups, of which vLLM loads different blocks."""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HYBRID_MODEL = Path(__file__).with_name("hybrid_model.py")
WINDOW_BLOCKS = 2
"""Offloaded blocks of 64 tokens that a window of 96 tokens reaches back."""
LOAD_SECONDS_MAX = 4.0


@dataclass(frozen=True)
class Hybrid:
    """The model, a pool with the blocks of all prompts, and outputs without the cache by engine options."""

    model: Path
    pool: Path
    expected: Callable[..., list[list[int]]]


@pytest.fixture(scope="module")
def made(processes, prompts, connector, tmp_path_factory) -> tuple[Path, Path]:
    """The model, and a pool that a process filled which has ended."""
    model = tmp_path_factory.mktemp("hybrid-model")
    subprocess.run(
        [sys.executable, str(HYBRID_MODEL), str(model)], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    pool = tmp_path_factory.mktemp("hybrid-pool")
    process = processes.spawn()
    process.receive()
    with process.engine(model, connector(pool)) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    process.kill()
    assert [0, 0, 0] == prompts.found_first(outputs.cached)
    assert 1 == metrics["enabled"]
    return model, pool


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[int]]]:
    return {}


@pytest.fixture
def hybrid(vllm, made, prompts, known, tmp_path) -> Hybrid:
    """The model and a copy of the filled pool, to be damaged."""
    model, filled = made

    def expected(**options: Any) -> list[list[int]]:
        key = str(sorted(options.items()))
        if key not in known:
            with vllm.engine(model, **options) as engine:
                known[key] = engine.generate(prompts.tokens).tokens
        return known[key]

    return Hybrid(model, Path(shutil.copytree(filled, tmp_path / "pool")), expected)


def files_of(pool: Path, group: int) -> list[Path]:
    return sorted(pool.glob(f"*/r0/*/*/*_g{group}.kvb"))


def zero_payload(file: Path) -> None:
    size = file.stat().st_size
    with file.open("r+b") as writer:
        writer.seek(4096)
        writer.write(bytes(size - 4096))


def are_full_hits(cached: list[int], prompts) -> bool:
    """Return whether each prompt got all that a full pool can serve.

    With sliding windows vLLM computes the last token itself. A prompt that ends with a block is then served up to that
    token by 0.22, and up to the block before by 0.32, which does not store the window of such an end.
    """
    lengths = [len(tokens) for tokens in prompts.tokens]
    return all(
        (length - 1) // 64 * 64 <= hit <= min(whole, length - 1)
        for hit, whole, length in zip(cached, prompts.hits, lengths, strict=True)
    )


def failures(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("load_failures"))


def check(pool: Path) -> None:
    """Every block in the pool must be good."""
    command = [sys.executable, "-m", "pykvcache_cli.main", "inspect", str(pool), "--verify", "--json"]
    subprocess.run(command, check=True, stdout=subprocess.PIPE)


def test_both_groups_are_stored(hybrid, prompts):
    assert prompts.blocks >= len(files_of(hybrid.pool, 0)) > 0
    assert prompts.blocks >= len(files_of(hybrid.pool, 1)) > 0
    check(hybrid.pool)


@pytest.mark.parametrize(
    "engine_options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"enable_prefix_caching": True}, id="prefix caching"),
        pytest.param({"max_num_batched_tokens": 96, "max_num_seqs": 4}, id="chunked prefill"),
    ],
)
def test_a_new_process_loads_prefixes_and_window_ends_and_computes_the_same_tokens(
    vllm, hybrid, prompts, connector, engine_options
):
    expected = hybrid.expected(**engine_options)
    with vllm.engine(hybrid.model, connector(hybrid.pool), **engine_options) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
        again = engine.generate(prompts.tokens)
    assert expected == outputs.tokens == again.tokens
    assert are_full_hits(outputs.cached, prompts)
    if "enable_prefix_caching" not in engine_options:
        prefix_blocks = sum(-(-hit // 64) for hit in outputs.cached)
        assert prefix_blocks + WINDOW_BLOCKS * len(prompts.tokens) == metrics["load_blocks"]
    assert 0 == failures(metrics)


def test_without_the_payload_check_damage_changes_outputs(vllm, hybrid, prompts, connector):
    """The negative control, for each group: these tests would see a wrong KV cache."""
    expected = hybrid.expected()
    for group in (0, 1):
        for file in files_of(hybrid.pool, group):
            zero_payload(file)
        with vllm.engine(hybrid.model, connector(hybrid.pool, integrity="header")) as engine:
            outputs = engine.generate(prompts.tokens)
        assert are_full_hits(outputs.cached, prompts)
        assert expected != outputs.tokens
        expected = outputs.tokens


@pytest.mark.parametrize("group", [0, 1])
def test_damaged_blocks_of_one_group_are_a_miss_for_both(vllm, hybrid, prompts, connector, group):
    expected = hybrid.expected()
    damaged = files_of(hybrid.pool, group)
    for file in damaged:
        zero_payload(file)
    with vllm.engine(hybrid.model, connector(hybrid.pool)) as engine:
        runs = engine.repeat(prompts.tokens, until=lambda grown: 0 == grown["store_blocks"] == failures(grown))
        metrics = engine.wait_idle()
    assert [expected] * len(runs) == [outputs.tokens for outputs in runs]
    assert [0, 0, 0] == prompts.found_first(runs[0].cached)
    assert metrics["load_failures|corrupt"] > 0
    assert are_full_hits(runs[-1].cached, prompts), [outputs.cached for outputs in runs]


def test_some_damaged_blocks_shorten_the_prefix(vllm, hybrid, prompts, connector):
    expected = hybrid.expected()
    source = random.Random(3)
    files = files_of(hybrid.pool, 0) + files_of(hybrid.pool, 1)
    for file in source.sample(files, 5):
        zero_payload(file)
    with vllm.engine(hybrid.model, connector(hybrid.pool)) as engine:
        outputs = [engine.generate(prompts.tokens) for _ in range(3)]
    assert [expected] * 3 == [output.tokens for output in outputs]


def test_a_prefix_longer_than_the_staging_memory_is_cut(vllm, hybrid, prompts, connector):
    expected = hybrid.expected()
    staging = 10 * files_of(hybrid.pool, 0)[0].stat().st_size
    with vllm.engine(hybrid.model, connector(hybrid.pool, staging=staging)) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert 10 == metrics["staging_slots"]
    assert expected == outputs.tokens
    # 7 blocks can be staged at once, 2 or 3 of them for the window: 4 blocks of prefix at least, if its window's
    # blocks are on disk there.
    assert all(cached <= 5 * 64 for cached in outputs.cached)
    assert sum(outputs.cached) > 0


def test_a_disk_that_hangs_is_a_miss_at_the_deadline(vllm, hybrid, prompts, connector):
    expected = hybrid.expected()
    options = connector(hybrid.pool, load_timeout_seconds=LOAD_SECONDS_MAX)
    with vllm.engine(hybrid.model, options, faults=True) as engine:
        engine.generate([[3, 4, 5]])
        engine.fault("hold_reads")
        outputs = [engine.generate(prompts.tokens) for _ in range(2)]
        engine.fault("release")
        metrics = engine.wait_idle()
    assert [expected, expected] == [output.tokens for output in outputs]
    assert [0] * len(prompts.tokens) == outputs[0].cached
    assert metrics["declines|load|staging_timeout"] > 0
    assert 0 == metrics["load_blocks"]


def test_files_that_vanish_after_the_lookup_are_recomputed(vllm, hybrid, prompts, connector):
    expected = hybrid.expected()
    with vllm.engine(hybrid.model, connector(hybrid.pool), faults=True) as engine:
        engine.fault("delete_after_lookups", pool=str(hybrid.pool), count=len(prompts.tokens))
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert expected == outputs.tokens
    assert metrics["load_failures|missing"] > 0


def test_requests_are_preempted_while_blocks_are_stored_and_loaded(vllm, hybrid, prompts, connector, tmp_path):
    small = {"kv_cache_memory_bytes": 72 * (64 << 10), "max_model_len": 704, "max_num_batched_tokens": 704}
    many_tokens = 96
    with vllm.engine(hybrid.model, **small) as engine:
        expected = engine.generate(prompts.tokens, many_tokens).tokens
    (tmp_path / "fresh").mkdir()
    with vllm.engine(hybrid.model, connector(tmp_path / "fresh"), **small) as engine:
        outputs = [engine.generate(prompts.tokens, many_tokens) for _ in range(3)]
        preempted = engine.metrics("vllm:")["num_preemptions"]
        metrics = engine.wait_idle()
    assert [expected] * 3 == [output.tokens for output in outputs]
    assert preempted > 0
    assert metrics["load_blocks"] > 0
    assert 0 == failures(metrics)
    check(tmp_path / "fresh")


def test_two_ranks_stage_and_load_each_its_own_files(vllm, hybrid, prompts, connector, tmp_path):
    two_ranks = {"tensor_parallel_size": 2}
    expected = hybrid.expected(**two_ranks)
    (tmp_path / "fresh").mkdir()
    for run in range(2):
        with vllm.engine(hybrid.model, connector(tmp_path / "fresh"), **two_ranks) as engine:
            outputs = engine.generate(prompts.tokens)
            metrics = engine.wait_idle()
        assert expected == outputs.tokens
        assert are_full_hits(outputs.cached, prompts) if run else [0, 0, 0] == prompts.found_first(outputs.cached)
        assert 0 == failures(metrics)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"loading": "streaming"}, "loading = streaming does not work", id="streaming"),
        pytest.param({"staging": "264KiB"}, "Set staging to at least", id="staging"),
    ],
)
def test_an_option_that_cannot_work_stops_the_engine_with_the_remedy(vllm, hybrid, connector, options, message):
    with (
        pytest.raises(Exception, match=message),
        vllm.engine(hybrid.model, connector(hybrid.pool, **options)),
    ):
        pass


def test_offloaded_blocks_longer_than_the_window_turn_the_cache_off(vllm, hybrid, prompts, connector):
    expected = hybrid.expected()
    with vllm.engine(hybrid.model, connector(hybrid.pool, block_size=128)) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.metrics("vllm:pykvcache_")
        log = vllm.log()
    assert expected == outputs.tokens
    assert 0 == metrics["enabled"]
    assert "Set block_size in kv_connector_extra_config to at most 96" in log
