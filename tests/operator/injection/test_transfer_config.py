"""The kv-transfer-config: ours, and what is found and merged of another."""

import json

import pytest

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.names import HASH_FLAG
from pykvcache_contract.transfer_config import to_json
from pykvcache_operator.injection import commands
from pykvcache_operator.injection.outcome import Skip
from pykvcache_operator.injection.transfer_config import (
    Present,
    TransferOptions,
    find,
    merged,
    ours,
    value_of,
)

OPTIONS = TransferOptions(staging_bytes=2**30, block_tokens=256, create_pool=False)
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def present(*arguments, variables=None, command=("vllm", "serve", "m")):
    return find(commands.read({"name": "c", "command": [*command, *arguments]}), variables or {})


def test_ours_says_what_the_connector_needs_and_nothing_that_kubernetes_expands():
    text = to_json(ours(OPTIONS))
    assert "$" not in text
    assert json.loads(text) == {
        "kv_connector": "PyKVCacheConnector",
        "kv_connector_module_path": "pykvcache_connector.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "PyKVCacheSpec",
            "spec_module_path": "pykvcache_connector.spec",
            "pool": "/pykvcache/pool",
            "staging": 2**30,
            "block_size": 256,
            "when_unfit": "adapt",
            "create_pool": False,
        },
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv-transfer-config={}"],
        ["--kv_transfer_config", "{}"],
        ["--kv_transfer-config={}"],
        ["--kv-transfer-conf", "{}"],
        ["--kv-t={}"],
        ["--kv-transfer-config", "other", "--kv-transfer-config={}"],
    ],
)
def test_every_spelling_is_found_and_the_last_value_counts(arguments):
    assert present(*arguments, "--port", "80") == Present("--kv-transfer-config", "{}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-transfer-config.kv_connector", "X"],
        ["--kv_transfer_config.kv_connector=X"],
        ["--kv-transfer-config={}", "--kv-tr.kv_role", "kv_both"],
        ["--kv-offloading-size", "10"],
        ["--kv_offloading_size=10"],
    ],
)
def test_forms_that_would_override_ours_cannot_be_merged(arguments):
    found = present(*arguments)
    assert found.value is None
    assert "override ours" in found.why_fixed or "another connector" in found.why_fixed


@pytest.mark.parametrize(
    "arguments",
    [[], ["--kv-cache-dtype", "fp8"], ["--kv-offloading-backend", "native"], ["--kv"], ["kv-transfer-config"]],
)
def test_other_flags_are_none(arguments):
    assert present(*arguments) is None


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --kv-transfer-config '{}'",
        "exec vllm serve m --kv_transfer_config=$CONFIG",
        "vllm serve m --kv-transfer-config.kv_connector X",
        "vllm serve m --kv-offloading-size 8",
    ],
)
def test_it_is_found_in_texts_of_shells_and_arguments_of_scripts(text):
    for command in (["sh", "-c", text], ["/start.sh", *text.split()]):
        found = present(command=command)
        assert (found.value, "text of a command" in found.why_fixed) == (None, True)


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_EXTRA", "--kv_transfer_config '{}'"), ("PYKVCACHE_KV_TRANSFER_CONFIG", "{}")]
)
def test_it_is_found_in_variables(name, value):
    assert present(variables={"A": "b", name: value}).place == f"the variable {name}"


def test_our_own_connector_is_told_from_others():
    assert present("--kv-transfer-config", to_json(ours(OPTIONS))).names_us
    assert present("--kv-transfer-config", to_json(merged(Present("x", json.dumps(NIXL)), ours(OPTIONS)))).names_us
    assert not present("--kv-transfer-config", json.dumps(NIXL)).names_us


def test_a_merge_puts_ours_behind_theirs():
    result = merged(Present("x", json.dumps(NIXL)), ours(OPTIONS))
    assert result == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [NIXL, ours(OPTIONS)]},
    }


def test_a_merge_moves_the_engine_id_outwards_where_vllm_wants_it():
    result = merged(Present("x", json.dumps({**NIXL, "engine_id": "e"})), ours(OPTIONS))
    assert (result["engine_id"], result["kv_connector_extra_config"]["connectors"][0]) == ("e", NIXL)


def test_a_merge_with_several_appends_ours_and_keeps_the_rest():
    theirs = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [NIXL], "x": 1},
    }
    result = merged(Present("x", json.dumps(theirs)), ours(OPTIONS))
    assert result["kv_connector_extra_config"] == {"connectors": [NIXL, ours(OPTIONS)], "x": 1}
    assert (result["kv_role"], result["kv_load_failure_policy"]) == ("kv_producer", "recompute")


def test_a_merge_keeps_references_that_kubernetes_expands():
    result = merged(Present("x", '{"kv_connector":"A","kv_ip":"$(IP)"}'), ours(OPTIONS))
    assert '"$(IP)"' in to_json(result)


@pytest.mark.parametrize(
    "value",
    [
        *("", "null", "[]", '"x"', "{}", '{"kv_connector":null}', '{"kv_connector":7}', "{'kv_connector':'A'}"),
        *(
            '{"kv_connector":"A","kv_port":$(PORT)}',
            "[" * 100_000,
            "1" * 10_000,
            '{"kv_connector":"A","b":"\\u0024(X)"}',
        ),
        *('{"kv_connector":"MultiConnector"}', '{"kv_connector":"MultiConnector","kv_connector_extra_config":[]}'),
        '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":{}}}',
    ],
    ids=lambda value: value[:30],
)
def test_what_cannot_be_read_cannot_be_merged(value):
    with pytest.raises(Skip, match=r"^--kv-transfer-config cannot be merged: ") as caught:
        merged(Present("--kv-transfer-config", value), ours(OPTIONS))
    assert caught.value.reason is SkipReason.CONFIGURATION_PRESENT
    assert len(caught.value.message) < 200


def test_what_stands_elsewhere_cannot_be_merged_and_the_message_says_why():
    with pytest.raises(Skip, match=r"^the variable A cannot be merged: A variable is never changed\.$"):
        merged(Present("the variable A", None, "A variable is never changed."), ours(OPTIONS))


def test_the_value_of_a_flag_is_its_last_and_a_flag_without_one_counts():
    assert value_of(["--prefix-caching-hash-algo", "a", "--prefix_caching_hash_algo=b"], HASH_FLAG) == "b"
    assert value_of(["--prefix-caching-hash-algo"], HASH_FLAG) == "(none)"
    assert value_of(["--prefix-match-unit", "a"], HASH_FLAG) == ""
