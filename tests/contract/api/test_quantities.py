"""Bytes and durations as Kubernetes writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from pykvcache_contract.api.quantities import (
    QUANTITY_BYTES_MAX,
    format_duration,
    format_quantity,
    parse_duration,
    parse_quantity,
)


@given(some.integers(0, QUANTITY_BYTES_MAX))
def test_every_size_survives_being_written_and_read(size_bytes):
    assert parse_quantity(format_quantity(size_bytes)) == size_bytes
    assert parse_quantity(size_bytes) == size_bytes


@given(some.integers(0, 999999 * 3600 + 3599))
def test_every_duration_survives_being_written_and_read(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("0Gi", 0),
        ("1k", 1000),
        ("1Ki", 1024),
        ("1.5Ti", 3 * 2**39),
        ("500G", 500 * 10**9),
        ("1Ei", 2**60),
        ("0.1", 1),
        ("1.0000001Ki", 1025),
    ],
)
def test_units_are_those_of_kubernetes_and_fractions_count_as_a_byte(text, size_bytes):
    assert parse_quantity(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        "1 ",
        "1\n",
        "-1",
        "+1",
        "1K",
        "1gi",
        "1GiB",
        "1m",
        "1e3",
        ".5",
        "5.",
        "1,5Gi",
        "٣Gi",
        "9" * 20,
        "0x10",
        "2Ei",
        2**60 + 1,
        -1,
        True,
        None,
        1.5,
    ],
)
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match=r"quantity|above"):
        parse_quantity(text)


@pytest.mark.parametrize(("text", "seconds"), [("0s", 0), ("90m", 5400), ("1h30m", 5400), ("1h0m1s", 3601)])
def test_durations_are_hours_minutes_and_seconds_in_this_order(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "1", "s", "1d", "1.5h", "-1h", "1s1h", "1h ", "1h\n", "9999999h", "1ms", 3600, None]
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="write for example 720h"):
        parse_duration(text)
