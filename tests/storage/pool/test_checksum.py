"""The payload checksum against a slow reference, and the faults that it must find."""

import functools
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache_storage.checksum import CHECKSUM_MASK, checksum, column_weights, row_weights

PAGE = 4096


@functools.cache
def splitmix64_reference(counter: int) -> int:
    z = (counter + 1) * 0x9E3779B97F4A7C15 & CHECKSUM_MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & CHECKSUM_MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & CHECKSUM_MASK
    return z ^ z >> 31


def checksum_reference(payload: bytes) -> int:
    total = 0
    for index, (word,) in enumerate(struct.iter_unpack("<Q", payload)):
        row, column = divmod(index, 512)
        weight = (splitmix64_reference(column) | 1) + (splitmix64_reference(2**32 + row) & ~1)
        total += weight * word
    return total & CHECKSUM_MASK


def generic_payload(seed: int, pages: int) -> bytearray:
    return bytearray(random.Random(seed).randbytes(pages * PAGE))


payloads = st.builds(generic_payload, st.integers(0, 2**32), st.integers(2, 5))


def test_splitmix64_gives_the_published_first_outputs_of_seed_zero() -> None:
    assert splitmix64_reference(0) == 0xE220A8397B1DCDAF
    assert splitmix64_reference(1) == 0x6E789E6AA1B965F4
    assert int(column_weights()[0]) == 0xE220A8397B1DCDAF | 1


def test_the_value_of_format_v1_never_changes() -> None:
    assert checksum(bytes(range(256)) * 48) == 0x64D0F46062117910


def test_column_weights_are_odd_and_row_weights_even_and_all_differ() -> None:
    columns, rows = column_weights(), row_weights(20000)
    assert np.all(columns % 2 == 1)
    assert np.all(rows % 2 == 0)
    assert len(set(columns.tolist())) == 512
    assert len(set(rows.tolist())) == 20000


def test_cached_weights_cannot_be_changed_by_a_caller() -> None:
    with pytest.raises(ValueError, match="read-only"):
        row_weights(3)[0] = 1


@settings(deadline=None, max_examples=20)
@given(payloads)
def test_it_equals_the_definition_in_plain_integers(payload: bytearray) -> None:
    assert checksum(payload) == checksum_reference(bytes(payload))


@pytest.mark.parametrize("pages", [1, 127, 128, 129, 300])
def test_it_equals_the_definition_around_the_step_size(pages: int) -> None:
    payload = bytes(generic_payload(pages, pages))
    assert checksum(payload) == checksum_reference(payload)


def test_every_kind_of_buffer_gives_the_same_value() -> None:
    payload = generic_payload(7, 4)
    array = np.frombuffer(payload, np.float16).reshape(4, 2, -1)
    assert checksum(bytes(payload)) == checksum(memoryview(payload)) == checksum(array)


@settings(deadline=None)
@given(payloads, st.data())
def test_the_checksums_of_pieces_add_up(payload: bytearray, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(payload) // PAGE - 1))
    head = checksum(payload[: cut * PAGE])
    tail = checksum(payload[cut * PAGE :], first_row=cut)
    assert checksum(payload) == (head + tail) & CHECKSUM_MASK


@settings(deadline=None)
@given(payloads, st.integers(0), st.integers(1, 255))
def test_any_single_changed_byte_is_found(payload: bytearray, position: int, flip: int) -> None:
    before = checksum(payload)
    payload[position % len(payload)] ^= flip
    assert checksum(payload) != before


@settings(deadline=None)
@given(payloads, st.integers(0), st.integers(0))
def test_two_swapped_words_are_found(payload: bytearray, one: int, two: int) -> None:
    words = np.frombuffer(payload, "<u8").copy()
    one, two = one % len(words), two % len(words)
    before = checksum(words)
    words[[one, two]] = words[[two, one]]
    assert (checksum(words) == before) == (one == two)


@settings(deadline=None)
@given(payloads, st.integers(0), st.integers(1))
def test_two_swapped_pages_are_found(payload: bytearray, one: int, step: int) -> None:
    pages = np.frombuffer(payload, "<u8").reshape(-1, 512).copy()
    one %= len(pages)
    two = (one + 1 + step % (len(pages) - 1)) % len(pages)
    before = checksum(pages)
    pages[[one, two]] = pages[[two, one]]
    assert checksum(pages) != before


@settings(deadline=None)
@given(payloads, st.integers(1))
def test_a_shifted_payload_is_found(payload: bytearray, shift: int) -> None:
    shift = 1 + shift % (len(payload) - 1)
    assert checksum(payload[shift:] + payload[:shift]) != checksum(payload)
    assert checksum(bytes(shift) + payload[:-shift]) != checksum(payload)


@settings(deadline=None)
@given(payloads, st.integers(0))
def test_a_zeroed_page_is_found(payload: bytearray, page: int) -> None:
    before = checksum(payload)
    page %= len(payload) // PAGE
    payload[page * PAGE : (page + 1) * PAGE] = bytes(PAGE)
    assert checksum(payload) != before


def test_an_all_zero_payload_gives_zero_so_that_only_the_header_protects_it() -> None:
    assert checksum(bytes(64 * PAGE)) == 0


def test_an_empty_payload_gives_zero() -> None:
    assert checksum(b"") == 0


@pytest.mark.parametrize("size", [1, 4095, 4104])
def test_a_length_that_is_no_multiple_of_4096_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="4096"):
        checksum(bytes(size))
