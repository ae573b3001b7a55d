"""The document of a measurement: round trips, bounds, and a reader that trusts nothing."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.api.node import POINTS_MAX, ProfilePoint
from pykvcache_contract.calibration import (
    DOCUMENT_SIZE_BYTES_MAX,
    CalibrationRefusal,
    StorageCalibration,
    decode_calibration,
    encode_calibration,
)

POINT = ProfilePoint(
    block_bytes=4 << 20, depth=16, readers=8, read_bytes_per_second=3_000_000_000, latency_microseconds=21_000
)
MEASURED = StorageCalibration(
    engine="uring",
    buffered=False,
    filesystem="xfs",
    kernel="6.8.0",
    disk_model="SAMSUNG MZQL21T9",
    points=(POINT, replace(POINT, depth=32)),
    read_bytes_per_second=3_000_000_000,
    write_bytes_per_second=2_000_000_000,
    contended=None,
    complete=True,
    seconds=14.9,
    bytes=40 << 30,
)
HUGE = 10**13


def changed(**fields: object) -> str:
    return json.dumps(json.loads(encode_calibration(MEASURED)) | fields)


@pytest.mark.parametrize("contended", [True, False, None])
def test_what_was_measured_comes_back(contended):
    measured = replace(MEASURED, contended=contended)
    assert decode_calibration(encode_calibration(measured)) == measured


@pytest.mark.parametrize("retry", [True, False])
def test_a_refusal_comes_back(retry):
    refusal = CalibrationRefusal("/pool cannot be written: mount it read-write", retry)
    assert decode_calibration(encode_calibration(refusal)) == refusal


def test_the_largest_document_fits_a_termination_message_and_is_read():
    point = ProfilePoint(
        block_bytes=1 << 30, depth=1024, readers=1024, read_bytes_per_second=HUGE, latency_microseconds=600_000_000
    )
    measured = StorageCalibration(
        engine='"' * 99,
        buffered=False,
        filesystem="\x00\\" * 99,
        kernel="ü" * 99,
        disk_model='\\"' * 99,
        points=(point,) * 99,
        read_bytes_per_second=HUGE,
        write_bytes_per_second=HUGE,
        contended=False,
        complete=False,
        seconds=3599.9,
        bytes=1 << 50,
    )
    text = encode_calibration(measured)
    assert len(text.encode()) <= DOCUMENT_SIZE_BYTES_MAX
    assert len(decode_calibration(text).points) == POINTS_MAX
    assert len(encode_calibration(CalibrationRefusal('"' * 9999, True))) <= DOCUMENT_SIZE_BYTES_MAX


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no JSON"),
        (encode_calibration(MEASURED)[:-1], "cut off"),
        ("[" * 4000, "no JSON"),
        ("[]", "no JSON object"),
        ("{}", "formatVersion"),
        (changed(formatVersion=2), "another release"),
        ("x" * (DOCUMENT_SIZE_BYTES_MAX + 1), "at most 4096"),
        (changed(points=[]), "points"),
        (changed(points=[{}] * 25), "points"),
        (changed(points=[7]), "a point is no object"),
        (changed(readBytesPerSecond=float("nan")), "NaN is no number"),
        (changed(readBytesPerSecond=float("inf")), "Infinity is no number"),
        (changed(readBytesPerSecond=10**30), "readBytesPerSecond"),
        (changed(readBytesPerSecond=0), "readBytesPerSecond"),
        (changed(readBytesPerSecond=-1), "readBytesPerSecond"),
        (changed(readBytesPerSecond=True), "readBytesPerSecond"),
        (changed(readBytesPerSecond="7"), "readBytesPerSecond"),
        (changed(writeBytesPerSecond=1.5), "writeBytesPerSecond"),
        (changed(contended="no"), "contended"),
        (changed(buffered=None), "buffered"),
        (changed(seconds=-1), "seconds"),
        (changed(engine="x" * 65), "engine"),
        (changed(kernel=None), "kernel"),
    ],
)
def test_nonsense_is_refused_with_what_is_wrong(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        decode_calibration(text)


def test_texts_come_back_without_control_characters():
    measured = decode_calibration(changed(diskModel="a\x1b[31m\nb"))
    assert measured.disk_model == "a?[31m?b"


@given(st.text() | st.recursive(st.none() | st.floats() | st.integers(), st.lists, max_leaves=5).map(json.dumps))
def test_any_text_is_a_document_or_a_value_error(text):
    with pytest.raises(ValueError):
        decode_calibration(text)


@given(
    st.sampled_from(sorted(json.loads(encode_calibration(MEASURED)))),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80) | st.just({}) | st.just([]),
)
def test_any_value_of_any_field_is_accepted_within_bounds_or_refused(name, value):
    try:
        measured = decode_calibration(changed(**{name: value}))
    except ValueError:
        return
    assert 1 <= measured.read_bytes_per_second <= HUGE
    assert decode_calibration(encode_calibration(measured)) == replace(measured, seconds=round(measured.seconds, 1))
