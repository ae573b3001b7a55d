"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.units import HUGE_PAGE_SIZE_BYTES, SECTOR_SIZE_BYTES, format_size, parse_size, round_up


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1K", 1024),
        ("1k", 1024),
        ("1Ki", 1024),
        ("1KiB", 1024),
        ("1kib", 1024),
        ("1KB", 1000),
        ("3Mi", 3 << 20),
        ("3MB", 3_000_000),
        ("64GiB", 64 << 30),
        (" 64 GiB ", 64 << 30),
        ("2 GB", 2_000_000_000),
        ("1.5Mi", 1572864),
        ("0.5KiB", 512),
        ("1.0001KiB", 1024),
        ("2Ti", 2 << 40),
        ("2TB", 2 * 10**12),
        ("1P", 1 << 50),
        ("1PB", 10**15),
        ("9007199254740993", 9007199254740993),
        ("9007199254740993KB", 9007199254740993000),
    ],
)
def test_sizes_are_read_exactly(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "-1", "-1GiB", "+1", "1.", ".5", "1e9", "1,5GiB", "1 2", "1GiB!", "0x10", "1_000", "nan", "inf"],
)
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="is not a size; write for example 64GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1X", "1GiBs", "1Gb/s", "5iB", "5I", "5BiB", "5BI", "1Ei", "1bytes", "1KiKi"])
def test_an_unknown_unit_is_refused(text):
    with pytest.raises(ValueError, match=r"is not a size|has an unknown unit; use KiB, MiB, GiB or TiB"):
        parse_size(text)


@pytest.mark.parametrize("value", [True, False, None, 1.5, 1e9, [1], {}, b"1GiB"])
def test_what_is_neither_text_nor_a_whole_number_is_refused(value):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(value)


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="-1 is negative"):
        parse_size(-1)


def test_a_number_with_hundreds_of_digits_is_a_size_not_a_crash():
    assert parse_size("9" * 400) == 10**400 - 1


@given(st.integers(0, 2**70))
def test_whole_numbers_are_read_back_whatever_their_size(number):
    assert parse_size(str(number)) == parse_size(number) == number
    assert parse_size(f"{number}KiB") == number * 1024


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (28 << 20, "28.0 MiB"),
        (64 << 30, "64.0 GiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_sizes_are_shown_in_powers_of_1024(size_bytes, text):
    assert format_size(size_bytes) == text


@given(st.integers(0, 2**60))
def test_a_size_that_was_shown_can_be_typed_in_again(size_bytes):
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= max(1, size_bytes * 0.05)


@given(st.integers(0, 2**60), st.sampled_from([SECTOR_SIZE_BYTES, HUGE_PAGE_SIZE_BYTES, 1, 7]))
def test_rounding_up_gives_the_next_multiple(size_bytes, alignment):
    rounded = round_up(size_bytes, alignment)
    assert rounded % alignment == 0
    assert 0 <= rounded - size_bytes < alignment
