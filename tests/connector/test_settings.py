"""The connector's options: every one, what is refused, and with which words."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pykvcache_connector.settings import VLLM_KEYS, Settings
from pykvcache_contract.errors import ConfigurationError

POOL = {"pool": "/cache"}


def test_only_the_pool_has_no_default():
    settings = Settings.parse(POOL)
    assert settings.model_dump() == {
        "pool": "/cache",
        "capacity": 0,
        "staging": 1 << 30,
        "engine": "auto",
        "direct_io": "auto",
        "depth": 16,
        "fsync": False,
        "integrity": "payload",
        "loading": "auto",
        "load_bytes_in_flight": 8 << 30,
        "lookup_timeout_seconds": 0.25,
        "load_timeout_seconds": 30.0,
        "when_unfit": "error",
        "create_pool": True,
        "trace": "",
    }


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("pool", "/cache//a/", "/cache/a"),
        ("capacity", "1.5TiB", 3 << 39),
        ("capacity", 4096, 4096),
        ("staging", "512MiB", 512 << 20),
        ("engine", "uring", "uring"),
        ("engine", "threads", "threads"),
        ("direct_io", "on", "on"),
        ("direct_io", "off", "off"),
        ("depth", 1, 1),
        ("depth", 1024, 1024),
        ("fsync", True, True),
        ("integrity", "header", "header"),
        ("load_bytes_in_flight", "100MB", 100_000_000),
        ("lookup_timeout_seconds", 2, 2.0),
        ("load_timeout_seconds", 3600, 3600.0),
        ("when_unfit", "adapt", "adapt"),
        ("create_pool", False, False),
        ("trace", "/log//trace.jsonl", "/log/trace.jsonl"),
        ("trace", "", ""),
    ],
)
def test_every_option_is_taken(name, given_value, value):
    assert getattr(Settings.parse(POOL | {name: given_value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pool", "cache", "'cache' is not an absolute path"),
        ("pool", 7, "string"),
        ("capacity", "64 gigs", "has an unknown unit; use KiB"),
        ("capacity", "lots", "is not a size; write for example 64GiB"),
        ("capacity", 0, "greater than 0"),
        ("capacity", -1, "is negative"),
        ("capacity", None, "None is not a size"),
        ("capacity", 1.5, "1.5 is not a size"),
        ("capacity", True, "True is not a size"),
        ("staging", 0, "greater than 0"),
        ("staging", ["1GiB"], "is not a size"),
        ("engine", "io_uring", "'auto', 'uring' or 'threads'"),
        ("direct_io", True, "'auto', 'on' or 'off'"),
        ("depth", 0, "greater than or equal to 1"),
        ("depth", 1025, "less than or equal to 1024"),
        ("depth", "many", "integer"),
        ("fsync", "perhaps", "boolean"),
        ("integrity", "none", "'payload' or 'header'"),
        ("load_bytes_in_flight", "", "is not a size"),
        ("lookup_timeout_seconds", 0, "greater than 0"),
        ("lookup_timeout_seconds", 61, "less than or equal to 60"),
        ("lookup_timeout_seconds", float("nan"), ""),
        ("load_timeout_seconds", -1, "greater than 0"),
        ("when_unfit", "adapts", "'error' or 'adapt'"),
        ("create_pool", "perhaps", "boolean"),
        ("trace", "trace.jsonl", "'trace.jsonl' is not an absolute path"),
        ("load_timeout_seconds", float("inf"), "less than or equal to 3600"),
    ],
)
def test_a_wrong_value_is_refused_with_option_value_and_remedy(name, value, words):
    with pytest.raises(ConfigurationError) as caught:
        Settings.parse(POOL | {name: value})
    assert f"kv_connector_extra_config: option '{name}' = {value!r}: " in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_pool_is_explained():
    with pytest.raises(ConfigurationError, match="option 'pool' is missing: Pool directory: an absolute path"):
        Settings.parse({})


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("stagging", "staging"),
        ("capacty", "capacity"),
        ("fsynch", "fsync"),
        ("lookup_timeout", "lookup_timeout_seconds"),
        ("block_sizes", "block_size"),
        ("Depth", "depth"),
    ],
)
def test_a_misspelt_option_suggests_the_nearest_name(misspelt, meant):
    with pytest.raises(ConfigurationError, match=f"unknown option '{misspelt}': did you mean '{meant}'?"):
        Settings.parse(POOL | {misspelt: 1})


def test_an_option_like_no_other_lists_them_all():
    with pytest.raises(ConfigurationError) as caught:
        Settings.parse(POOL | {"xyzzy": 1})
    for name in Settings.model_fields:
        assert name in str(caught.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigurationError) as caught:
        Settings.parse({"capacity": "x", "deph": 3})
    for words in ("'pool' is missing", "'capacity' = 'x'", "did you mean 'depth'"):
        assert words in str(caught.value)


def test_vllms_own_keys_pass_through():
    options = POOL | dict.fromkeys(VLLM_KEYS, "anything")
    assert Settings.parse(options) == Settings.parse(POOL)


def test_settings_never_change():
    settings = Settings.parse(POOL)
    with pytest.raises(ValidationError, match="frozen"):
        settings.depth = 3


def test_every_option_is_described_with_its_unit_and_when_to_change_it():
    for field in Settings.model_fields.values():
        assert field.description.endswith(".")
        assert set(field.json_schema_extra) == {"unit", "change"}


anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()) | st.binary()


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from([*Settings.model_fields, "stagging", "other"]), anything))
def test_whatever_is_written_the_answer_is_settings_or_our_error(options):
    with contextlib.suppress(ConfigurationError):
        parsed = Settings.parse(options)
        assert parsed.pool.startswith("/")
        assert parsed.capacity >= 0
