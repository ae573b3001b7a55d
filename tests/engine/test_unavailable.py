"""A pool that cannot be used never costs a request; an option that cannot be meant stops the start with its remedy."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

CHUNKED = {"max_num_batched_tokens": 96, "max_num_seqs": 4}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts a filesystem on a new folder; skip where that is not allowed."""
    mounted: list[Path] = []

    def run(source: str, *arguments: str) -> Path:
        target = tmp_path / f"mounted-{len(mounted)}"
        target.mkdir()
        done = subprocess.run(["mount", *arguments, source, str(target)], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mount is not possible here: {done.stderr.strip()}")
        mounted.append(target)
        return target

    yield run
    for target in mounted:
        subprocess.run(["umount", "--lazy", str(target)], check=True)


def _no_directory(folder: Path) -> Path:
    return folder / "missing"


def _file(folder: Path) -> Path:
    path = folder / "file"
    path.touch()
    return path


def _others_files(folder: Path) -> Path:
    path = folder / "home"
    path.mkdir()
    (path / "thesis.tex").touch()
    return path


def _newer_format(folder: Path) -> Path:
    path = folder / "newer"
    path.mkdir()
    (path / "pool.json").write_text(json.dumps({"format_version": 2}))
    return path


UNUSABLE = {
    "missing": (_no_directory, "Create it: mkdir -p"),
    "no directory": (_file, "is not a directory. Choose a directory."),
    "another's files": (_others_files, "Use an empty directory: mkdir"),
    "another format": (_newer_format, "Use another directory, or the py-kvcache release that made this one."),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_an_unusable_pool_turns_the_cache_off_and_the_log_says_what_to_do(
    vllm, model, prompts, baseline, connector, tmp_path, kind
):
    make, remedy = UNUSABLE[kind]
    expected = baseline()
    with vllm.engine(model, connector(make(tmp_path))) as engine:
        outputs = [engine.generate(prompts.tokens) for _ in range(2)]
        metrics = engine.wait_idle()
        log = vllm.log()
    assert [expected, expected] == [output.tokens for output in outputs]
    assert 0 == metrics["enabled"]
    assert 0 == metrics["store_blocks"] == metrics["load_blocks"]
    (line,) = [line for line in log.splitlines() if "py-kvcache is off, vLLM runs without it" in line]
    assert remedy in line


def test_a_read_only_pool_is_read(vllm, model, pool, prompts, baseline, connector, mount):
    expected = baseline()
    pool.blocks()[0].unlink()
    read_only = mount(str(pool), "--bind", "-o", "ro")
    with vllm.engine(model, connector(read_only)) as engine:
        outputs = [engine.generate(prompts.tokens) for _ in range(2)]
        metrics = engine.wait_idle()
        log = vllm.log()
    assert [expected, expected] == [output.tokens for output in outputs]
    assert 1 == metrics["enabled"]
    assert metrics["load_blocks"] > 0
    assert 0 == metrics["store_blocks"]
    assert "blocks are loaded but not stored" in log
    assert "Mount it writable: mount -o remount,rw, or readOnly: false in the pod." in log


def test_an_empty_read_only_directory_turns_the_cache_off(vllm, model, empty_pool, prompts, baseline, connector, mount):
    expected = baseline()
    read_only = mount(str(empty_pool), "--bind", "-o", "ro")
    with vllm.engine(model, connector(read_only)) as engine:
        outputs = engine.generate(prompts.tokens)
        metrics = engine.wait_idle()
        log = vllm.log()
    assert expected == outputs.tokens
    assert 0 == metrics["enabled"]
    assert "Mount it writable" in log


def test_a_full_disk_keeps_what_fitted_and_drops_the_rest(vllm, model, filled, prompts, baseline, connector, mount):
    expected = baseline()
    small = mount("none", "-t", "tmpfs", "-o", "size=2m")
    with vllm.engine(model, connector(small)) as engine:
        outputs = [engine.generate(prompts.tokens)]
        engine.wait_idle()
        outputs.append(engine.generate(prompts.tokens))
        metrics = engine.wait_idle()
    assert [expected, expected] == [output.tokens for output in outputs]
    assert 1 == metrics["enabled"]
    assert 0 < metrics["store_blocks"] < prompts.blocks
    assert metrics["load_failures|io"] == 0 < metrics["store_failures|capacity"]
    assert metrics["store_blocks"] == len(list(small.glob("*/r0/*/*/*.kvb")))
    assert [] == list(small.glob("*/tmp/*.tmp"))


def test_stores_end_at_the_capacity(vllm, model, empty_pool, filled, prompts, baseline, connector):
    expected = baseline(**CHUNKED)
    size = next(filled.pool.glob("*/r0/*/*/*.kvb")).stat().st_size
    with vllm.engine(model, connector(empty_pool, capacity=5 * size + 1), **CHUNKED) as engine:
        # Stores are declined for a second after one was refused; then the next is tried. In small steps many follow.
        runs = engine.repeat(prompts.tokens, until=lambda grown: grown["declines|store|pool_full"] > 0)
        metrics = engine.wait_idle()
    assert [expected] * len(runs) == [outputs.tokens for outputs in runs]
    assert 5 == metrics["store_blocks"] == len(empty_pool.blocks())
    assert metrics["store_failures|capacity"] > 0
    assert metrics["declines|store|pool_full"] > 0
    assert 5 * size == empty_pool.inspect()["used_bytes"]


WRONG = {
    "unknown": ({"frobnicate": 1}, "unknown option 'frobnicate': options are"),
    "misspelt": ({"stagign": "1GiB"}, "unknown option 'stagign': did you mean 'staging'?"),
    "no size": ({"staging": "plenty"}, "'plenty' is not a size; write for example 64GiB"),
    "no multiple": (
        {"block_size": 48},
        "block_size = 48 is not a multiple of vLLM's block size, 32 tokens. Set it to 64",
    ),
    "relative": ({"pool": "cache"}, "'cache' is not an absolute path"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_option_stops_the_start_with_its_remedy(vllm, model, empty_pool, connector, kind):
    options, message = WRONG[kind]
    engine = vllm.engine(model, {**connector(empty_pool), **options})
    with pytest.raises(RuntimeError, match=re.escape(message)) as caught, engine:
        pass
    assert "ConfigurationError" in str(caught.value)


def test_too_little_staging_memory_stops_the_start_and_the_named_size_works(
    vllm, model, pool, prompts, baseline, connector
):
    expected = baseline()
    engine = vllm.engine(model, connector(pool, staging="64KiB"))
    with pytest.raises(RuntimeError, match="Set staging to at least") as caught, engine:
        pass
    assert "ConfigurationError" in str(caught.value)
    found = re.search(r"Set staging to at least (\d+) bytes", str(caught.value))
    assert found is not None
    with vllm.engine(model, connector(pool, staging=int(found[1]))) as engine:
        outputs = engine.generate(prompts.tokens)
    assert expected == outputs.tokens
    assert prompts.hits == outputs.cached
