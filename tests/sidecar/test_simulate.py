"""`pykvcache-sidecar simulate`: a table for people, JSON for programs, and errors that say what to change."""

import json

import pytest
from typer.testing import CliRunner

from pykvcache_sidecar.commands import app

SMALL, LARGE = "5a" * 6, "1a" * 6
MIB = 2**20


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], prog_name="pykvcache-sidecar")


def outcomes(*arguments):
    """Return what --json tells, by policy and capacity; remarks are left out."""
    result = simulate(*arguments, "--json")
    assert 0 == result.exit_code, result.output
    return {(row["policy"], row["capacity_bytes"]): row for row in json.loads(result.stdout)["outcomes"]}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a trace of (seconds, fingerprint, blocks) and returns its path."""

    def written(*requests, name="trace.jsonl"):
        lines = [
            {
                "seconds": 1_764_500_000 + seconds,
                "fingerprint": fingerprint,
                "tokens_per_block": 256,
                "block_bytes": MIB,
                "blocks": [f"{block:016x}" for block in blocks],
            }
            for seconds, fingerprint, blocks in requests
        ]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return tmp_path / name

    return written


@pytest.fixture
def alternating(write):
    """A trace in which a small and a large model want their prefix again and again: ten blocks each, a pool has ten."""
    return write(*((300 * number, (SMALL, LARGE)[number % 2], range(10)) for number in range(40)))


@pytest.fixture
def pool(tmp_path):
    """A pool that knows what both models cost."""
    for name, hidden in ((SMALL, 1024), (LARGE, 8192)):
        model = {"hidden_size": hidden, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
        identity = {
            "engine": {"hf_config": {key: repr(value) for key, value in model.items()}},
            "layout": {"page_sizes_bytes": [65536] * 32, "gpu_blocks": 16},
            "hashing": {"block_tokens": 256},
        }
        folder = tmp_path / "pool" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"identity": identity}))
    return tmp_path / "pool"


def test_a_table_shows_every_policy_and_capacity_and_what_no_pool_exceeds(alternating):
    result = simulate(alternating, "--capacity", "10MiB", "--capacity", "1GiB")
    assert 0 == result.exit_code
    rows = [line for line in result.stdout.splitlines() if "│" in line]
    cells = [tuple(cell.strip() for cell in row.split("│")[1:4]) for row in rows]
    assert [("10.0 MiB", "lru"), ("10.0 MiB", "cost"), ("1.0 GiB", "lru"), ("1.0 GiB", "cost"), ("no bounds", "")] == [
        row[:2] for row in cells
    ]
    assert ["95.0%"] * 3 == [row[2] for row in cells[2:]]
    assert "40 requests, 102400 tokens looked up" in result.stdout


def test_the_cost_policy_keeps_what_is_dear_and_the_verdict_says_by_how_much(alternating, pool):
    found = outcomes(alternating, "--capacity", "10MiB", "--pool", pool)
    lru, cost = (found[name, 10 * MIB] for name in ("lru", "cost"))
    assert cost["saved_work"] > lru["saved_work"] + 0.1
    assert cost["fingerprints"][LARGE]["hit_rate"] > lru["fingerprints"][LARGE]["hit_rate"]
    gain = 100 * (cost["saved_work"] - lru["saved_work"])
    result = simulate(alternating, "--capacity", "10MiB", "--pool", pool)
    assert f"10.0 MiB: cost saves {gain:.1f} points more work than lru" in result.stdout


def test_without_a_pool_both_policies_are_equal_and_the_remark_says_why(alternating):
    result = simulate(alternating, "--capacity", "10MiB")
    assert "10.0 MiB: no difference between lru and cost" in result.stdout
    assert "work saved" not in result.stdout
    assert "without --pool" in result.stderr
    found = outcomes(alternating, "--capacity", "10MiB")
    assert found["lru", 10 * MIB]["hit_tokens"] == found["cost", 10 * MIB]["hit_tokens"]
    assert found["lru", 10 * MIB]["saved_work"] is None


def test_json_tells_tokens_bytes_and_each_fingerprint(alternating):
    row = outcomes(alternating, "--capacity", "1GiB", "--policy", "lru")["lru", 1 << 30]
    assert (40, 400 * 256, 380 * 256) == (row["requests"], row["lookup_tokens"], row["hit_tokens"])
    assert (20 * MIB, 0, 0) == (row["stored_bytes"], row["evicted_bytes"], row["refused_bytes"])
    assert {SMALL, LARGE} == set(row["fingerprints"])
    assert 20 == row["fingerprints"][SMALL]["requests"]


def test_traces_of_several_vllm_are_one(write):
    first = write((0, SMALL, [1, 2]), (20, SMALL, [1, 2]), name="first.jsonl")
    second = write((10, SMALL, [1, 2]), (30, SMALL, [1, 2]), name="second.jsonl")
    row = outcomes(first, second, "--capacity", "1GiB")["lru", 1 << 30]
    assert (8 * 256, 6 * 256) == (row["lookup_tokens"], row["hit_tokens"])


def test_watermarks_and_interval_are_used(write):
    trace = write((0, SMALL, range(10)), (5, SMALL, []), (6, SMALL, []))
    low = outcomes(trace, "--capacity", "10MiB", "--high", "0.5", "--low", "0.2")["lru", 10 * MIB]
    assert 8 * MIB == low["evicted_bytes"]
    late = outcomes(trace, "--capacity", "10MiB", "--interval", "3600")["lru", 10 * MIB]
    assert 0 == late["evicted_bytes"]


def test_a_torn_last_line_is_a_remark(alternating):
    alternating.write_text(alternating.read_text() + '{"seconds": 17')
    result = simulate(alternating, "--capacity", "1GiB")
    assert 0 == result.exit_code
    assert "the last line, 41, is cut off" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--capacity", "much"], "--capacity 'much' is not a size; write for example 64GiB"),
        (["--capacity", "0"], "--capacity is zero"),
        (["--capacity", "1GiB", "--policy", "fifo"], "'fifo' is unknown; choose one of: lru, cost"),
        (["--capacity", "1GiB", "--low", "0.9"], "0 < low < high <= 1"),
        (["--capacity", "1GiB", "--high", "nan"], "0 < low < high <= 1"),
        (["--capacity", "1GiB", "--interval", "0"], "--interval 0: between"),
        (["--capacity", "1GiB", "--pool", "/nowhere/at/all"], "list /nowhere/at/all: No such file"),
        ([part for size in range(1, 34) for part in ("--capacity", f"{size}GiB")], "66 pools at once are too many"),
    ],
)
def test_an_option_that_cannot_be_used_is_an_error_that_says_why(alternating, arguments, said):
    result = simulate(alternating, *arguments)
    assert 2 == result.exit_code
    assert said in result.stderr
    assert "" == result.stdout


def test_a_bad_line_is_named(alternating):
    alternating.write_text(alternating.read_text() + "{}\n")
    result = simulate(alternating, "--capacity", "1GiB")
    assert 2 == result.exit_code
    assert 'trace.jsonl, line 41: "seconds" is no Unix time' in result.stderr


def test_an_empty_trace_is_an_error(write):
    result = simulate(write(), "--capacity", "1GiB")
    assert 2 == result.exit_code
    assert "no request in" in result.stderr


def test_help_teaches_with_an_example():
    result = simulate("--help")
    assert 0 == result.exit_code
    assert "Example: pykvcache-sidecar simulate requests.jsonl --capacity 64GiB" in result.stdout
