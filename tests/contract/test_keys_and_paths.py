"""Block keys and pool paths: golden values, because every process must find the same file."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pykvcache_contract import paths
from pykvcache_contract.keys import BlockKey, Fingerprint, fingerprint_of

FINGERPRINT = Fingerprint("0123456789abcdef" * 4)
KEY = BlockKey(FINGERPRINT, bytes.fromhex("00ff10" + "ab" * 29), group=12, rank=3)
WRITER = "c0ffee" * 5 + "42"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=10,
)
keys = st.builds(
    BlockKey,
    st.binary(min_size=32, max_size=32).map(lambda data: Fingerprint(data.hex())),
    st.binary(min_size=3, max_size=64),
    st.integers(0, 9999),
    st.integers(0, 99999),
)


def test_paths_of_format_v1_never_drift():
    name = "00ff10" + "ab" * 29
    assert paths.block_path(KEY) == f"0123456789ab/r3/00f/f1/{name}_g12.kvb"
    assert paths.quarantine_path(KEY) == f"0123456789ab/quarantine/r3_{name}_g12.kvb"
    assert paths.temporary_path(FINGERPRINT, WRITER, 7) == f"0123456789ab/tmp/{WRITER}-7.tmp"
    assert paths.writer_lock_path(FINGERPRINT, WRITER) == f"0123456789ab/tmp/{WRITER}.lock"
    assert (paths.POOL_FILE, paths.USAGE_FILE, paths.CONFIG_FILE) == ("pool.json", "usage", "config.json")
    assert paths.FORMAT_VERSION == 1


@given(keys)
def test_every_name_is_one_that_inventory_and_sweep_know(key):
    fingerprint, rank, first, second, name = paths.block_path(key).split("/")
    assert paths.FINGERPRINT_DIRECTORY.fullmatch(fingerprint)
    assert paths.RANK_DIRECTORY.fullmatch(rank)[1] == str(key.rank)
    match = paths.BLOCK_FILE.fullmatch(name)
    assert bytes.fromhex(match[1]) == key.block_hash
    assert int(match[2]) == key.group
    assert name.startswith(first + second)
    assert (len(first), len(second)) == (3, 2)


@given(st.lists(keys, min_size=2, max_size=2, unique=True))
def test_different_keys_of_a_fingerprint_have_different_files(pair):
    one, other = (BlockKey(FINGERPRINT, key.block_hash, key.group, key.rank) for key in pair)
    if one != other:
        assert paths.block_path(one) != paths.block_path(other)
        assert paths.quarantine_path(one) != paths.quarantine_path(other)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 2**64))
def test_temporary_names_and_locks_are_found_by_a_sweep(writer, number):
    name = paths.temporary_path(FINGERPRINT, writer.hex(), number).rsplit("/", 1)[1]
    assert paths.TEMPORARY_FILE.fullmatch(name).groups() == (writer.hex(), str(number))
    lock = paths.writer_lock_path(FINGERPRINT, writer.hex()).rsplit("/", 1)[1]
    assert paths.WRITER_LOCK.fullmatch(lock)[1] == writer.hex()
    assert not paths.BLOCK_FILE.fullmatch(name)


def test_the_fingerprint_function_never_drifts():
    identity = {"model": "é", "sizes": [1, 2], "nested": {"b": None, "a": True}}
    assert fingerprint_of(identity) == "ba5d7ef01700c8f2b81a7e47ea05c76f1effeb06f9df9b10cdcaaed2cce012a4"


@settings(max_examples=30)
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_a_fingerprint_does_not_depend_on_the_order_of_keys(identity):
    value = fingerprint_of(identity)
    assert value == fingerprint_of(dict(reversed(identity.items())))
    assert len(bytes.fromhex(value)) == 32
    assert paths.FINGERPRINT_DIRECTORY.fullmatch(paths.fingerprint_directory(value))


def in_order(value):
    """Return a value with the keys of its dictionaries in order, which means nothing to a fingerprint."""
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(item) for item in value] if isinstance(value, list) else value


@settings(max_examples=30)
@given(st.text(), json_values, json_values)
@example("a", {"b": 1, "c": 2}, {"c": 2, "b": 1})
def test_a_fingerprint_changes_with_any_value(name, one, other):
    if repr(in_order(one)) != repr(in_order(other)):
        assert fingerprint_of({name: one}) != fingerprint_of({name: other})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_what_has_no_canonical_text_has_no_fingerprint(value):
    with pytest.raises((ValueError, TypeError)):
        fingerprint_of({"a": value})


@pytest.mark.parametrize("size", [0, 65, 1000])
def test_a_block_hash_of_an_impossible_length_is_refused(size):
    with pytest.raises(ValueError, match=f"1 to 64 bytes, not {size}"):
        BlockKey(FINGERPRINT, bytes(size), 0, 0)


@pytest.mark.parametrize(("group", "rank"), [(-1, 0), (0, -1)])
def test_negative_groups_and_ranks_are_refused(group, rank):
    with pytest.raises(ValueError, match="zero or more"):
        BlockKey(FINGERPRINT, b"x" * 32, group, rank)
