"""The environment of vLLM's container: what the pod sets stays in force."""

import pytest

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection import environment
from pykvcache_operator.injection.outcome import Skip

LIBRARY = "/pykvcache/library"
REQUIRED = {"configMapKeyRef": {"name": "settings", "key": "k"}}
OPTIONAL = {"configMapKeyRef": {"name": "settings", "key": "k", "optional": True}}


def variable(name, value):
    return {"name": name, "valueFrom": value} if isinstance(value, dict) else {"name": name, "value": value}


def extended(*entries, library_path=LIBRARY, transfer_config=None, **container):
    """Return entries and warnings, as the container would have them."""
    read = environment.read({"name": "c", "env": list(entries), **container})
    return environment.extend(read, version="1.2", library_path=library_path, transfer_config=transfer_config)


def value_in(entries, name):
    """Return what the process sees, as Kubernetes works it out: in order, with references to what came before."""
    seen = {}
    for entry in entries:
        text = entry.get("value") or "" if not entry.get("valueFrom") else "<from elsewhere>"
        for known, value in seen.items():
            text = text.replace(f"$({known})", value)
        seen[entry["name"]] = text
    return seen.get(name)


def test_an_empty_one_gets_everything():
    entries, warnings = extended()
    assert entries == [
        variable("PYTHONPATH", LIBRARY),
        variable("PYTHONHASHSEED", "0"),
        variable("POD_NAME", {"fieldRef": {"fieldPath": "metadata.name"}}),
        variable("POD_NAMESPACE", {"fieldRef": {"fieldPath": "metadata.namespace"}}),
        variable("NODE_NAME", {"fieldRef": {"fieldPath": "spec.nodeName"}}),
        variable("PYKVCACHE_INJECTED", "1.2"),
    ]
    assert warnings == ()


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "POD_NAME", "POD_NAMESPACE", "NODE_NAME"])
@pytest.mark.parametrize("value", ["theirs", "", REQUIRED])
def test_what_the_pod_sets_is_not_overridden(name, value):
    entries, _ = extended(variable(name, value))
    assert [entry for entry in entries if entry["name"] == name] == [variable(name, value)]


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("/app", f"{LIBRARY}:/app"),
        ("/app:/b", f"{LIBRARY}:/app:/b"),
        ("", LIBRARY),
        (None, LIBRARY),
        (f"/app:{LIBRARY}", f"/app:{LIBRARY}"),
        (f"{LIBRARY}-of-mine", f"{LIBRARY}:{LIBRARY}-of-mine"),
        ("{}:/a", f"{LIBRARY}:{{}}:/a"),
        (REQUIRED, f"{LIBRARY}:<from elsewhere>"),
        (OPTIONAL, f"{LIBRARY}:<from elsewhere>"),
    ],
)
def test_the_library_comes_before_the_pods_own_path(value, seen):
    entries, _ = extended(variable("ROOT", "/r"), variable("PYTHONPATH", value), variable("Z", "z"))
    assert value_in(entries, "PYTHONPATH") == seen
    assert [entry["name"] for entry in entries][-1] == "PYKVCACHE_INJECTED"


def test_references_in_the_pods_path_still_work():
    entries, _ = extended(variable("ROOT", "/r"), variable("PYTHONPATH", "$(ROOT)/lib"))
    assert value_in(entries, "PYTHONPATH") == f"{LIBRARY}:/r/lib"


def test_of_two_entries_the_last_counts_and_gets_the_library():
    entries, _ = extended(variable("PYTHONPATH", "/one"), variable("PYTHONPATH", "/two"))
    assert value_in(entries, "PYTHONPATH") == f"{LIBRARY}:/two"
    assert entries[0] == variable("PYTHONPATH", "/one")


def test_an_image_that_has_the_library_keeps_its_path():
    assert value_in(extended(library_path="")[0], "PYTHONPATH") is None
    assert value_in(extended(variable("PYTHONPATH", "/app"), library_path="")[0], "PYTHONPATH") == "/app"


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("a,b", "a,b,pykvcache"),
        ("", "pykvcache"),
        ("a,pykvcache,b", "a,pykvcache,b"),
        ("a, pykvcache", "a, pykvcache,pykvcache"),  # vLLM does not strip
        (REQUIRED, "<from elsewhere>,pykvcache"),
        ({"fieldRef": {"fieldPath": "metadata.labels['p']"}}, "<from elsewhere>,pykvcache"),
    ],
)
def test_a_list_of_plugins_gets_ours(value, seen):
    entries, warnings = extended(variable("VLLM_PLUGINS", value))
    assert (value_in(entries, "VLLM_PLUGINS"), warnings) == (seen, ())
    assert environment.is_plugin_certain(environment.read({"env": [variable("VLLM_PLUGINS", value)]}))


def test_without_a_list_vllm_loads_all_and_none_is_made():
    assert value_in(extended()[0], "VLLM_PLUGINS") is None


def test_a_list_that_may_not_exist_is_left_alone_with_a_warning():
    theirs = variable("VLLM_PLUGINS", OPTIONAL)
    entries, warnings = extended(theirs)
    assert theirs in entries
    assert "without `pykvcache` in it the cache stays off" in warnings[0]
    assert not environment.is_plugin_certain(environment.read({"env": [theirs]}))


def test_variables_of_other_sources_are_warned_about_unless_env_has_the_name():
    sources = [{"secretRef": {"name": "s"}}]
    assert len(extended(envFrom=sources)[1]) == 2
    known = [variable("PYTHONPATH", "/a"), variable("VLLM_PLUGINS", "a")]
    assert extended(*known, envFrom=sources)[1] == ()
    assert environment.is_plugin_certain(environment.read({"env": known, "envFrom": sources}))
    assert not environment.is_plugin_certain(environment.read({"envFrom": sources}))


def test_the_configuration_of_the_plugin_comes_last():
    assert extended(transfer_config="{}")[0][-1] == variable("PYKVCACHE_KV_TRANSFER_CONFIG", "{}")


@pytest.mark.parametrize(
    "value",
    [
        {"A": "b"},
        "A=b",
        [None],
        ["A"],
        [{}],
        [{"name": 1}],
        [{"name": "A", "value": 1}],
        [{"name": "A", "value": True}],
        [{"name": "A", "valueFrom": "x"}],
    ],
)
def test_what_kubernetes_would_refuse_is_skipped_with_advice(value):
    with pytest.raises(Skip, match=r"env is not a list .*Quote numbers") as caught:
        environment.read({"name": "c", "env": value})
    assert caught.value.reason is SkipReason.UNSUPPORTED_POD


def test_no_environment_at_all_is_an_empty_one():
    assert environment.read({"name": "c"}) == environment.read({"name": "c", "env": None, "envFrom": None})
