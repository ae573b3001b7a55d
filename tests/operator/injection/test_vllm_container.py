"""vLLM's container is told about its pool, whatever its command looks like."""

import contextlib
import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache_connector.transfer_configs import without_our_arguments
from pykvcache_contract.injection import SkipReason
from pykvcache_contract.transfer_config import to_json
from pykvcache_operator.injection.outcome import Reject, Skip
from pykvcache_operator.injection.transfer_config import TransferOptions, ours
from pykvcache_operator.injection.vllm_container import configure

OPTIONS = TransferOptions(staging_bytes=2**30, block_tokens=256, create_pool=False)
OURS = to_json(ours(OPTIONS))
NIXL = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
HASH = ["--prefix-caching-hash-algo", "sha256_cbor"]
VARIABLE = "PYKVCACHE_KV_TRANSFER_CONFIG"


def configured(on_conflict=None, options=OPTIONS, **container):
    """Configure a container, and make sure that the one that was given stays as it was."""
    given_container = {"name": "c", **container}
    before = copy.deepcopy(given_container)
    annotations = {} if on_conflict is None else {"pykvcache.io/on-conflict": on_conflict}
    try:
        return configure(given_container, options=options, annotations=annotations, version="1.2")
    finally:
        assert given_container == before


def test_a_pod_that_kubectl_applied_itself_is_told_by_a_variable_so_that_it_can_be_applied_again():
    container = {"name": "c", "command": ["vllm", "serve"], "args": ["m"]}
    applied = {"kubectl.kubernetes.io/last-applied-configuration": "{}"}
    changed = configure(container, options=OPTIONS, annotations=applied, version="1.2").container
    assert changed["args"] == ["m"]
    assert variables(changed)[VARIABLE] == OURS


def variables(container):
    return {entry["name"]: entry.get("value") for entry in container["env"]}


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["vllm", "serve", "m"]},
        {"command": ["vllm"], "args": ["serve", "m"]},
        {"command": ["python3", "-m", "vllm.entrypoints.openai.api_server"], "args": ["--model", "$(MODEL)"]},
        {"image": "vllm/vllm-openai:v1", "args": ["--model", "m"]},
        {"command": ["vllm", "serve"], "args": None, "env": None},
    ],
)
def test_an_exec_form_gets_arguments_at_its_end(container):
    result = configured(**container)
    assert result.container["args"] == [*(container.get("args") or []), *HASH, "--kv-transfer-config", OURS]
    assert result.container.get("command") == container.get("command")
    assert VARIABLE not in variables(result.container)
    assert variables(result.container)["PYKVCACHE_INJECTED"] == "1.2"
    assert result.warnings == ()


@pytest.mark.parametrize(
    "container",
    [
        {"image": "vllm/vllm-openai:v1"},
        {"command": ["sh", "-c", "exec vllm serve m"]},
        {"command": ["/vllm/start.sh"], "image": "acme/my-vllm"},
        {"command": ["vllm", "serve", "m", "--config", "/c.yaml"]},
        {"command": ["vllm", "serve", "m", "--", "x"]},
        {"command": ["vllm", "bench", "throughput"]},
        {"command": ["python3", "-c", "from vllm import LLM"]},
    ],
)
def test_every_other_form_keeps_command_and_arguments_and_gets_a_variable(container):
    result = configured(**container)
    assert {key: value for key, value in result.container.items() if key != "env"} == {"name": "c", **container}
    assert variables(result.container)[VARIABLE] == OURS
    assert result.warnings == ()


def test_a_plugin_that_may_be_missing_leaves_arguments_out():
    result = configured(command=["vllm", "serve", "m"], envFrom=[{"secretRef": {"name": "hub"}}])
    assert "args" not in result.container
    assert variables(result.container)[VARIABLE] == OURS
    assert len(result.warnings) == 2


@pytest.mark.parametrize(
    ("entry", "has_variable"),
    [({"value": "--enforce-eager"}, False), ({"valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}, True)],
)
def test_an_argument_that_may_hold_a_configuration_unseen_is_not_overridden(entry, has_variable):
    result = configured(command=["vllm", "serve", "m"], args=["$(EXTRA)"], env=[{"name": "EXTRA", **entry}])
    assert (VARIABLE in variables(result.container)) == has_variable
    assert (result.container["args"] == ["$(EXTRA)"]) == has_variable


def test_something_that_shows_no_sign_of_vllm_gets_a_warning_and_runs_as_before():
    result = configured(image="nginx:1", command=["nginx"], args=["-g", "daemon off;"])
    assert (result.container["command"], result.container["args"]) == (["nginx"], ["-g", "daemon off;"])
    assert "Nothing in the container names vLLM" in result.warnings[0]


@pytest.mark.parametrize(
    "command", [["python3", "-I", "-m", "vllm.entrypoints.openai.api_server"], ["env", "-i", "vllm"]]
)
def test_a_python_that_ignores_our_variables_is_left_without_the_cache(command):
    with pytest.raises(Skip, match="does not see the variables") as caught:
        configured(command=command)
    assert caught.value.reason is SkipReason.UNSUPPORTED_POD


@pytest.mark.parametrize("args", [[], ["--port", "1"], ["--prefix-caching-hash-algo", "sha256"]])
def test_the_plugin_can_take_away_exactly_what_was_appended(args):
    given = ["serve", "m", *args]
    container = configured(command=["vllm"], args=given).container
    assert len(container["args"]) > len(given)
    assert without_our_arguments(container["args"]) == given


NO_LIBRARY = TransferOptions(staging_bytes=1, block_tokens=1, create_pool=True, library_path="")


def test_an_image_that_has_the_library_keeps_its_python_path():
    assert "PYTHONPATH" not in variables(configured(options=NO_LIBRARY, command=["vllm", "serve"]).container)


def test_an_image_that_only_seems_to_have_the_library_starts_all_the_same():
    container = configured(options=NO_LIBRARY, command=["vllm", "serve"]).container
    assert "args" not in container
    assert "PYKVCACHE_KV_TRANSFER_CONFIG" in variables(container)


def test_nothing_is_merged_where_the_library_may_be_missing():
    with pytest.raises(Skip, match="library: InitContainer"):
        configured("Merge", options=NO_LIBRARY, command=["vllm", "serve"], args=["--kv-transfer-config", NIXL])


def test_the_pods_own_hash_algorithm_stays():
    result = configured(command=["vllm", "serve", "m", "--prefix_caching_hash_algo=sha256"])
    assert result.container["args"] == ["--kv-transfer-config", OURS]
    assert result.warnings == ()


def test_an_algorithm_that_can_be_made_to_collide_is_warned_about():
    result = configured(command=["vllm", "serve", "m"], args=["--prefix-caching-hash-algo", "xxhash_cbor"])
    assert "can be made to collide" in result.warnings[0]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("export PYTHONPATH=/app; vllm serve m", 1),
        ("VLLM_PLUGINS=mine vllm serve m", 1),
        ("PYTHONPATH=/app VLLM_PLUGINS=mine vllm serve m", 2),
        ("PYTHONPATH=/app:$PYTHONPATH vllm serve m", 0),
        ("PYTHONPATH=/app:${PYTHONPATH} vllm serve m", 0),
        ("MY_PYTHONPATH=/app vllm serve m", 0),
    ],
)
def test_a_shell_that_replaces_our_variables_is_warned_about(text, count):
    warnings = configured(command=["sh", "-c", text]).warnings
    assert [line.startswith("The command sets ") for line in warnings] == [True] * count


def test_an_engine_over_several_pods_is_warned_about():
    result = configured(command=["sh", "-c", "ray start --head; vllm serve m"])
    assert "several pods runs without the cache" in result.warnings[0]


# ---- a kv-transfer-config that is there already ----


@pytest.mark.parametrize("on_conflict", [None, "Skip"])
def test_a_configuration_of_the_pods_own_stays_alone_and_the_message_offers_the_merge(on_conflict):
    with pytest.raises(
        Skip, match=r"given --kv-transfer-config already. Remove it, or merge both by .*: Merge"
    ) as caught:
        configured(on_conflict, command=["vllm", "serve", "m", "--kv-transfer-config", NIXL])
    assert caught.value.reason is SkipReason.CONFIGURATION_PRESENT


def test_it_is_rejected_where_the_pod_asks_for_that():
    with pytest.raises(Reject, match=r"pykvcache.io/on-conflict is Reject. Remove it, or the label"):
        configured("Reject", command=["sh", "-c", "vllm serve --kv_transfer_config={}"])


@pytest.mark.parametrize("envFrom", [None, [{"secretRef": {"name": "hub"}}]])
def test_it_is_merged_into_one_argument_behind_it(envFrom):
    result = configured("Merge", command=["vllm", "serve"], args=["--kv-transfer-config", NIXL], envFrom=envFrom)
    assert result.container["args"][:2] == ["--kv-transfer-config", NIXL]
    connectors = json.loads(result.container["args"][-1])["kv_connector_extra_config"]["connectors"]
    assert connectors == [json.loads(NIXL), ours(OPTIONS)]
    assert "0.26" in result.warnings[0]


@pytest.mark.parametrize(
    "container",
    [
        {"command": ["sh", "-c", "vllm serve m --kv-transfer-config '{}'"]},
        {"command": ["vllm", "serve", "m", "--kv-transfer-config.kv_connector=X"]},
        {"command": ["vllm", "serve", "m", "--kv-offloading-size", "8"]},
        {"command": ["vllm", "serve", "m", "$(EXTRA)"], "env": [{"name": "EXTRA", "value": "--kv-transfer-config={}"}]},
        {"command": ["vllm", "serve", "m"], "env": [{"name": VARIABLE, "value": NIXL}]},
        {"env": [{"name": VARIABLE, "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}]},
    ],
)
@pytest.mark.parametrize("on_conflict", ["Skip", "Merge"])
def test_what_cannot_be_merged_is_skipped_and_says_why(on_conflict, container):
    with pytest.raises(Skip) as caught:
        configured(on_conflict, **container)
    assert caught.value.reason is SkipReason.CONFIGURATION_PRESENT
    assert any(word in caught.value.message for word in ("never changed", "override ours", "another connector"))
    assert ": Merge" not in caught.value.message


@pytest.mark.parametrize("on_conflict", [None, "Merge", "Skip"])
def test_a_pod_that_names_our_connector_itself_is_left_alone(on_conflict):
    with pytest.raises(Skip, match=r"names PyKVCacheConnector already. Remove it, or the label"):
        configured(on_conflict, command=["vllm", "serve", "m", "--kv-transfer-config", OURS])


@pytest.mark.parametrize("value", ["merge", "", None, 3, ["Skip"], "x" * 9000])
def test_a_wrong_annotation_names_the_three_values(value):
    annotations = {"pykvcache.io/on-conflict": value}
    with pytest.raises(Skip, match="it can be Skip, Merge or Reject") as caught:
        configure({"name": "c"}, options=OPTIONS, annotations=annotations, version="1")
    assert caught.value.reason is SkipReason.BAD_ANNOTATION
    assert len(caught.value.message) < 150


# ---- again ----


@pytest.mark.parametrize(
    ("on_conflict", "container"),
    [
        (None, {"command": ["vllm", "serve", "m"]}),
        (None, {"command": ["vllm", "serve", "m"], "args": [*HASH, "--port", "80"]}),
        (None, {"command": ["sh", "-c", "vllm serve m"]}),
        ("Merge", {"command": ["vllm", "serve", "m"], "args": ["--kv-transfer-config", NIXL]}),
    ],
)
def test_a_second_injection_replaces_the_first(on_conflict, container):
    first = configured(on_conflict, **container)
    other = TransferOptions(staging_bytes=2**31, block_tokens=64, create_pool=True)
    second = configured(on_conflict, other, **first.container)
    assert second == configured(on_conflict, other, **container)
    assert configured(on_conflict, **second.container) == first


def test_arguments_that_came_behind_ours_stay():
    first = configured(command=["vllm", "serve", "m"]).container
    again = configured(**{**first, "args": [*first["args"], "--port", "80"]})
    assert again.container["args"] == ["--port", "80", *first["args"]]


def test_a_variable_that_only_looks_like_an_injection_is_replaced():
    result = configured(command=["vllm", "serve", "m"], env=[{"name": "PYKVCACHE_INJECTED", "value": "mine"}])
    assert (variables(result.container)["PYKVCACHE_INJECTED"], result.container["args"][-1]) == ("1.2", OURS)


# ---- every container ----

STARTS = st.sampled_from(
    [
        *(
            ["vllm", "serve", "m"],
            ["python3", "-um", "vllm.entrypoints.openai.api_server"],
            ["sh", "-c", "vllm serve m"],
        ),
        *(["env", "A=b", "vllm", "serve"], ["env", "-i", "vllm", "serve"], ["/start.sh"], ["tini", "--"], []),
    ]
)
WORDS = st.sampled_from(
    [
        *(
            "vllm",
            "serve",
            "bench",
            "-I",
            "-c",
            "m",
            "--",
            "env",
            "PYTHONPATH=/a",
            "-u",
            "--port",
            "80",
            "",
            "--config",
        ),
        *("--kv-transfer-config", NIXL, "--kv_transfer_config={}", "--kv-t", "--kv-transfer-config.a=1", "$(EXTRA)"),
        *("--kv-offloading-size=1", "--prefix-caching-hash-algo", "xxhash", "ray start", OURS, "$$(X)"),
        '{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":[]}}',
    ]
)
COMMANDS = st.builds(list.__add__, STARTS, st.lists(WORDS, max_size=3))
ARGUMENTS = st.builds(
    list.__add__, st.sampled_from([[], ["--port", "80"], ["serve", "m"]]), st.lists(WORDS, max_size=3)
)
NAMES = st.sampled_from(
    ["PYTHONPATH", "VLLM_PLUGINS", "PYTHONHASHSEED", "POD_NAME", "PYKVCACHE_INJECTED", VARIABLE, "X"]
)
VALUES = st.sampled_from(["", "/a", "/pykvcache/library", "a,pykvcache", "--kv-transfer-config {}", OURS, "$(X)", None])
SOURCES = st.sampled_from(
    [None, {}, {"fieldRef": {"fieldPath": "metadata.name"}}, {"secretKeyRef": {"optional": True}}]
)
ENTRIES = st.builds(
    lambda *parts: dict(zip(("name", "value", "valueFrom"), parts, strict=True)), NAMES, VALUES, SOURCES
)
GARBAGE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5
)
CONTAINERS = st.fixed_dictionaries(
    {"name": st.just("c"), "command": COMMANDS | st.none()},
    optional={
        "image": st.sampled_from(["vllm/vllm-openai:v1", "vllm/vllm-router", "nginx", ""]),
        "args": ARGUMENTS | st.none(),
        "env": st.lists(ENTRIES, max_size=4) | st.none(),
        "envFrom": st.lists(st.just({"secretRef": {"name": "s"}}), max_size=1) | st.none(),
    },
)
BROKEN = st.dictionaries(st.sampled_from(["image", "command", "args", "env", "envFrom"]), GARBAGE, max_size=2)
CONFLICTS = st.sampled_from(["Skip", "Merge", "Reject"])


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(container=CONTAINERS, on_conflict=CONFLICTS, path=st.sampled_from(["", "/library"]))
def test_any_container_is_configured_once_or_refused_and_never_loses_anything(container, on_conflict, path):
    options = TransferOptions(staging_bytes=1, block_tokens=16, create_pool=True, library_path=path)
    try:
        result = configured(on_conflict, options, **container)
    except (Skip, Reject):
        return
    assert configured(on_conflict, options, **result.container).container == result.container
    assert result.container.get("command") == container.get("command")
    assert set(result.container) - set(container) <= {"env", "args"}
    names = [entry["name"] for entry in container.get("env") or []]
    assert set(names) - {VARIABLE} <= set(variables(result.container))
    kept = container.get("args") or []
    if "PYKVCACHE_INJECTED" not in names:
        assert (result.container.get("args") or [])[: len(kept)] == kept


@pytest.mark.slow
@given(container=CONTAINERS, broken=BROKEN, on_conflict=CONFLICTS)
@settings(max_examples=200, deadline=None)
def test_a_container_that_kubernetes_would_refuse_never_breaks_us(container, broken, on_conflict):
    with contextlib.suppress(Skip, Reject):
        configured(on_conflict, **{**container, **broken})
