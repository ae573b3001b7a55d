"""Traces are read line by line; what is no request is an error that names the line, but for a torn last one."""

import contextlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.errors import ConfigurationError
from pykvcache_sidecar.trace import LINE_SIZE_BYTES_MAX, Trace, merge, parse_request

GOOD = {
    "seconds": 1764512345.25,
    "fingerprint": "0123456789ab",
    "tokens_per_block": 256,
    "block_bytes": 29364224,
    "blocks": ["00f1e2d3c4b5a697", "ffffffffffffffff"],
}


def line(**changes):
    return json.dumps({**GOOD, **changes})


@pytest.fixture
def write(tmp_path):
    """Return a function that writes lines, each with an end, and text behind them; it returns the trace."""

    def written(*lines, torn=""):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join(f"{each}\n" for each in lines) + torn)
        return Trace(str(path))

    return written


def test_a_line_becomes_a_request(write):
    (request,) = write(line())
    assert (1764512345.25, "0123456789ab") == (request.seconds, request.fingerprint)
    assert (256, 29364224) == (request.tokens_per_block, request.block_bytes)
    assert [0x00F1E2D3C4B5A697, 0xFFFFFFFFFFFFFFFF] == request.blocks


def test_a_prompt_shorter_than_a_block_is_a_request_without_blocks(write):
    (request,) = write(line(blocks=[]))
    assert [] == request.blocks


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{", "no JSON"),
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no JSON object"),
        (line(seconds=None), '"seconds" is no Unix time'),
        (line(seconds=True), '"seconds" is no Unix time'),
        (line(seconds=-1), '"seconds" is no Unix time'),
        (line(seconds=float("nan")), '"seconds" is no Unix time'),
        (line(seconds=1e300), '"seconds" is no Unix time'),
        (line(fingerprint="0123456789AB"), '"fingerprint"'),
        (line(fingerprint="0123"), '"fingerprint"'),
        (line(fingerprint=12), '"fingerprint"'),
        (line(tokens_per_block=0), '"tokens_per_block" is no positive number'),
        (line(block_bytes="1"), '"block_bytes" is no positive number'),
        (line(block_bytes=1.5), '"block_bytes" is no positive number'),
        (line(blocks=None), '"blocks" is no list'),
        (line(blocks=["xyz"]), '"blocks" holds something that is no hexadecimal text'),
        (line(blocks=[3]), '"blocks" holds something that is no hexadecimal text'),
        (
            line(block_bytes=4096),
            "has blocks of 256 tokens and 4096 bytes here, of 256 tokens and 29364224 bytes before",
        ),
    ],
)
def test_what_is_no_request_is_refused_with_its_line_and_reason(write, bad, said):
    with pytest.raises(ConfigurationError) as caught:
        list(write(line(), line(), bad, line()))
    assert "trace.jsonl, line 3: " in str(caught.value)
    assert said in str(caught.value)


def test_a_line_that_is_too_long_is_refused_and_not_held_in_memory(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.touch()
    os.truncate(path, LINE_SIZE_BYTES_MAX * 1000)
    with pytest.raises(ConfigurationError, match=f"line 1: longer than {LINE_SIZE_BYTES_MAX} bytes"):
        list(Trace(str(path)))


@pytest.mark.parametrize("length", [1, 30, len(line()) - 1])
def test_a_torn_last_line_is_left_out_with_a_remark(write, length):
    trace = write(line(), torn=line()[:length])
    assert 1 == len(list(trace))
    assert len(trace.remarks) == 1
    assert trace.remarks[0].endswith("the last line, 2, is cut off and left out")


def test_a_whole_last_line_counts_though_its_end_is_missing(write):
    trace = write(line(), torn=line())
    assert 2 == len(list(trace))
    assert [] == trace.remarks


def test_requests_in_disorder_are_kept_with_a_remark(write):
    trace = write(line(seconds=1000), line(seconds=940), line(seconds=939.9), line(seconds=1001))
    assert [1000, 940, 939.9, 1001] == [request.seconds for request in trace]
    assert len(trace.remarks) == 1
    assert "1 requests are older" in trace.remarks[0]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"cannot read the trace .*/none: No such file"):
        list(Trace(str(tmp_path / "none")))


def test_bytes_read_grow_while_the_trace_is_read(write):
    trace = write(line(), line())
    seen = [trace.read_bytes for _ in trace]
    assert [len(line()) + 1, 2 * len(line()) + 2] == seen


def test_traces_are_merged_by_time():
    first, second = ([parse_request(line(seconds=each).encode()) for each in times] for times in ([1, 4], [2, 3]))
    assert [1, 2, 3, 4] == [request.seconds for request in merge([first, second])]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        parse_request(text)
