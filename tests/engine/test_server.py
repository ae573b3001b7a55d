"""A real `vllm serve` with the flags that `pykvcache vllm-args` prints."""

import os
import random
import re
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pykvcache_cli import vllm_server
from pykvcache_contract.metrics import CONNECTOR_METRICS, Kind

ENGINE_FLAGS = [
    "--dtype=float32",
    "--block-size=32",
    "--kv-cache-memory-bytes=67108864",
    "--max-model-len=2048",
    "--max-num-seqs=8",
    "--no-enable-prefix-caching",
    "--enforce-eager",
    "--seed=0",
]
PREFIX = "vllm:pykvcache_"
ROUNDS_MAX = 40
BLOCKS = 450 // 64
STORE_SECONDS_MAX = 120.0


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what `vllm-args` tells may set the hash seed."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "1")


def _printed_flags(pool: Path) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the flags that a user would paste."""
    command = [sys.executable, "-m", "pykvcache_cli.main", "vllm-args", "--pool", str(pool), "--block-size", "64"]
    done = subprocess.run([*command, "--staging", "32MiB"], capture_output=True, text=True, check=True)
    exports, flags = done.stdout.strip().split("\n")
    name, _, value = exports.removeprefix("export ").partition("=")
    return {name: value}, shlex.split(flags)


def _prompts() -> list[str]:
    source = random.Random(5)
    common = "".join(source.choices("abcdefgh ", k=450))
    return [common[:length] + str(length) for length in (200, 300, 450)]


def _by_family(text: str) -> dict[str, str]:
    """Return the types of our families as /metrics declares them."""
    lines = [line.split() for line in text.splitlines() if line.startswith(f"# TYPE {PREFIX}")]
    return {fields[2]: fields[3] for fields in lines if not fields[2].endswith("_created")}


def _late_lookups(server: vllm_server.VllmServer) -> float:
    """Return how many requests went without the cache because their lookup took too long."""
    line = rf"^{PREFIX}declines_total\{{[^}}]*operation=\"lookup\",reason=\"timeout\"[^}}]*\}} (\S+)$"
    found = re.findall(line, server.metrics_text(), re.MULTILINE)
    assert found, "no such series"
    return sum(map(float, found))


def _wait_for_blocks(pool: Path) -> None:
    """Wait until all whole blocks of the longest prompt, whose beginning the others are, are stored."""
    deadline = time.monotonic() + STORE_SECONDS_MAX
    never = threading.Event()
    while len(list(pool.glob("*/r0/*/*/*.kvb"))) < BLOCKS:
        assert time.monotonic() < deadline, "blocks are missing"
        never.wait(0.1)


def _ask(server: vllm_server.VllmServer, model: Path) -> tuple[list[str], dict[str, float]]:
    """Return the completions of all prompts, one after the other, and by how much our metrics grew."""
    before = server.metrics()
    texts = [server.complete(str(model), prompt, max_tokens=16).text for prompt in _prompts()]
    after = server.metrics()
    grown = {name.removeprefix(PREFIX): after[name] - before.get(name, 0) for name in after if name.startswith(PREFIX)}
    return texts, grown


def test_a_server_with_the_printed_flags_serves_from_disk_and_shows_exactly_the_documented_metrics(
    model, tmp_path, environment
):
    pool, log = tmp_path / "pool", tmp_path / "serve.log"
    variables, flags = _printed_flags(pool)
    with vllm_server.running(str(model), [*ENGINE_FLAGS, *flags], environment=variables, log=log) as server:
        declared = _by_family(server.metrics_text())
        first, _ = _ask(server, model)
        _wait_for_blocks(pool)
        # With these flags a lookup that takes a quarter of a second is a miss, by design; a busy machine may need that.
        # Such a round says nothing; every other one must hit.
        for _ in range(ROUNDS_MAX):
            late = _late_lookups(server)
            second, grown = _ask(server, model)
            assert first == second
            if _late_lookups(server) == late:
                break
        shown = server.metrics()

    kinds = {Kind.COUNTER: "counter", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}
    assert {metric.name: kinds[metric.kind] for metric in CONNECTOR_METRICS} == declared
    # The last step of a request may be counted with the next request only, so nothing here is compared exactly.
    assert 0 < grown["hit_tokens_total"] <= grown["lookup_tokens_total"]
    assert grown["hit_tokens_total"] / grown["lookup_tokens_total"] > 0.8
    (size,) = {file.stat().st_size - 4096 for file in pool.glob("*/r0/*/*/*.kvb")}
    assert 0 < grown["load_bytes_total"] == grown["load_blocks_total"] * size
    bandwidth = grown["load_bytes_total"] / grown["load_active_seconds_total"]
    assert 1e5 < bandwidth < 1e12
    assert 1 == shown[f"{PREFIX}enabled"] == shown[f"{PREFIX}engine_info"]
    assert os.path.getsize(log) > 0


def test_a_server_with_a_misspelt_option_ends_and_says_what_was_meant(model, tmp_path, environment):
    pool, log = tmp_path / "pool", tmp_path / "serve.log"
    variables, flags = _printed_flags(pool)
    flags = [flag.replace('"staging"', '"stagign"') for flag in flags]
    server = vllm_server.running(str(model), [*ENGINE_FLAGS, *flags], environment=variables, log=log)
    with pytest.raises(vllm_server.ServerError, match="vLLM ended with status"), server:
        pass
    assert "unknown option 'stagign': did you mean 'staging'?" in log.read_text()
