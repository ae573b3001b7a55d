"""Whatever happened to block files, outputs are right; what is proved bad is moved aside and stored anew."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

HEADER = 4096


def _zero_payload(file: Path) -> None:
    _overwrite(file, HEADER, bytes(file.stat().st_size - HEADER))


def _flip_bit(file: Path, offset: int) -> None:
    with file.open("rb") as reader:
        reader.seek(offset)
        (byte,) = reader.read(1)
    _overwrite(file, offset, bytes([byte ^ 0x10]))


def _flip_payload_bit(file: Path) -> None:
    _flip_bit(file, random.Random(file.name).randrange(HEADER, file.stat().st_size))


def _flip_header_bit(file: Path) -> None:
    _flip_bit(file, 24)


def _swap_pages(file: Path) -> None:
    data = file.read_bytes()
    first, second = data[HEADER : 2 * HEADER], data[2 * HEADER : 3 * HEADER]
    _overwrite(file, HEADER, second + first)


def _zero(file: Path) -> None:
    _overwrite(file, 0, bytes(file.stat().st_size))


def _overwrite(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as writer:
        writer.seek(offset)
        writer.write(data)


def _truncate(file: Path) -> None:
    with file.open("r+b") as writer:
        writer.truncate(file.stat().st_size - 4096)


def _lengthen(file: Path) -> None:
    with file.open("ab") as writer:
        writer.write(bytes(4096))


def _damage_each(damage: Callable[[Path], None]) -> Callable[[list[Path]], None]:
    def all_files(files: list[Path]) -> None:
        for file in files:
            damage(file)

    return all_files


def _exchange_contents(files: list[Path]) -> None:
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, [contents[-1], *contents[:-1]], strict=True):
        file.write_bytes(content)


PAYLOAD = {
    "a bit of the payload": _damage_each(_flip_payload_bit),
    "two pages exchanged": _damage_each(_swap_pages),
    "a payload of zeros": _damage_each(_zero_payload),
}
HEADERS = {
    "a file of zeros": _damage_each(_zero),
    "a bit of the header": _damage_each(_flip_header_bit),
    "another block's content": _exchange_contents,
}
SIZES = {"a page too few": _damage_each(_truncate), "a page too many": _damage_each(_lengthen)}


@pytest.mark.parametrize("damage", PAYLOAD | HEADERS)
def test_a_damaged_block_is_found_recomputed_moved_aside_and_stored_anew(
    vllm, model, pool, prompts, baseline, connector, damage
):
    expected = baseline()
    names = pool.names()
    (PAYLOAD | HEADERS)[damage](pool.blocks())
    with vllm.engine(model, connector(pool)) as engine:
        runs = engine.repeat(prompts.tokens, until=lambda grown: prompts.loads == grown["load_blocks"])
        metrics = engine.wait_idle()
    assert [expected] * len(runs) == [outputs.tokens for outputs in runs]
    assert prompts.hits == runs[-1].cached, [outputs.cached for outputs in runs]
    assert metrics["load_failures|corrupt"] >= len(names) == metrics["quarantined_blocks"]
    assert 0 == metrics["load_failures|io"]
    assert len(names) == len(pool.quarantined())
    assert names == pool.names()
    pool.inspect()


@pytest.mark.parametrize("damage", SIZES)
def test_a_block_file_of_a_wrong_size_is_found_by_the_lookup(vllm, model, pool, prompts, baseline, connector, damage):
    expected = baseline()
    names = pool.names()
    SIZES[damage](pool.blocks())
    with vllm.engine(model, connector(pool)) as engine:
        first = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
        second = engine.generate(prompts.tokens)
    assert expected == first.tokens
    assert expected == second.tokens
    assert [0, 0, 0] == prompts.found_first(first.cached)
    assert prompts.hits == second.cached
    assert len(names) == metrics["quarantined_blocks"] == len(pool.quarantined())
    assert 0 == sum(value for name, value in metrics.items() if name.startswith("load_failures"))
    assert names == pool.names()
    pool.inspect()


def test_without_the_payload_check_the_same_damage_changes_outputs(vllm, model, pool, prompts, baseline, connector):
    """The negative control: these tests would see a wrong KV cache."""
    expected = baseline()
    for file in pool.blocks():
        _zero_payload(file)
    with vllm.engine(model, connector(pool, integrity="header")) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert prompts.hits == outputs.cached
    assert 0 == metrics["load_failures|corrupt"]
    assert expected != outputs.tokens


@pytest.mark.parametrize(("prefix_caching", "loading"), [(False, "streaming"), (True, "streaming"), (False, "staged")])
def test_files_that_vanish_between_lookup_and_load_are_recomputed_without_a_loop(
    vllm, model, pool, prompts, baseline, connector, prefix_caching, loading
):
    expected = baseline(enable_prefix_caching=prefix_caching)
    names = pool.names()
    options = connector(pool, loading=loading)
    with vllm.engine(model, options, faults=True, enable_prefix_caching=prefix_caching) as engine:
        engine.fault("delete_after_lookups", pool=str(pool), count=len(prompts.tokens))
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
    assert expected == outputs.tokens
    assert metrics["load_failures|missing"] > 0
    assert metrics["load_duration_seconds_count"] <= 2 * len(prompts.tokens)
    assert set(pool.names()) <= set(names)
    pool.inspect()
