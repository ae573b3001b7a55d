"""The CRDs and the reference say what the types say, and every example is valid; e2e/ tries them for real."""

import re
from pathlib import Path

import pytest
import yaml

from crd_rules import POOL_RULES
from gen_api_docs import REFERENCE_FILE, reference
from gen_crds import CRDS, definitions
from pykvcache_contract import names
from pykvcache_contract.api.pool import KVCachePool

EXAMPLES = sorted((CRDS.parent / "examples").glob("*.yaml"))
KINDS = [names.POOL_PLURAL, names.NODE_PLURAL]


def written(plural):
    return yaml.safe_load((CRDS / f"pykvcache.io_{plural}.yaml").read_text())


def schema(plural):
    return written(plural)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def walk(node, path=""):
    """Yield every schema below one, with its path."""
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}".lstrip("."))
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")
    if "additionalProperties" in node:
        yield from walk(node["additionalProperties"], f"{path}{{}}")


def defaulted(node, value):
    """Fill in defaults as the API server does."""
    if isinstance(value, dict):
        for name, child in node.get("properties", {}).items():
            if name not in value and "default" in child:
                value[name] = yaml.safe_load(yaml.safe_dump(child["default"]))
            if name in value:
                defaulted(child, value[name])
    return value


@pytest.mark.parametrize("plural", KINDS)
def test_the_committed_crds_are_those_of_the_types(plural):
    assert written(plural) == definitions()[plural], "run `make gen` and commit what it writes"


def test_the_committed_reference_is_that_of_the_types():
    assert REFERENCE_FILE.read_text() == reference(), "run `make gen` and commit what it writes"


def test_defaults_of_the_schema_are_those_of_the_types():
    smallest = {"metadata": {"name": "p"}, "spec": {"storage": {"type": "NodeLocal", "capacityPerNode": "1Gi"}}}
    bare = KVCachePool.parse(smallest)
    filled = defaulted(schema(names.POOL_PLURAL), smallest)
    assert filled["spec"]["storage"]["minFree"] == "10Gi"
    assert filled["spec"]["eviction"]["unusedAfter"] == "720h"
    filled = KVCachePool.parse(filled)
    assert bare.spec == filled.spec


@pytest.mark.parametrize("plural", KINDS)
def test_the_status_has_no_defaults_which_would_undo_its_second_owner(plural):
    assert [] == [path for path, node in walk(schema(plural)) if path.startswith("status") and "default" in node]


@pytest.mark.parametrize("plural", KINDS)
def test_everything_has_a_bound(plural):
    """CEL's cost is estimated from the bounds, and a status without bounds can grow beyond what etcd takes."""
    for path, node in walk(schema(plural)):
        if path in ("apiVersion", "kind", "metadata"):
            continue
        if node.get("type") == "array":
            assert "maxItems" in node, path
        elif "additionalProperties" in node:
            assert "maxProperties" in node, path
        elif node.get("type") == "string" or "x-kubernetes-int-or-string" in node:
            assert {"maxLength", "enum", "format"} & node.keys(), path


@pytest.mark.parametrize("plural", KINDS)
def test_every_field_explains_itself_in_sentences(plural):
    for path, node in walk(schema(plural)):
        if path and not path.endswith(("]", "}")) and path not in ("apiVersion", "kind", "metadata"):
            assert re.fullmatch(r"[A-Z].{10,}\.", node.get("description", ""), re.DOTALL), path


def test_every_rule_is_in_the_schema():
    """A rule whose path is misspelt would be left out without a word."""
    found = {
        (path, rule["rule"]) for path, node in walk(schema(names.POOL_PLURAL))
        for rule in node.get("x-kubernetes-validations", [])
    }  # fmt: skip
    assert [] == [rule for path, rules in POOL_RULES.items() for rule in rules if (path, rule.rule) not in found]


def test_every_rule_says_what_to_do():
    for rules in POOL_RULES.values():
        for rule in rules:
            assert re.search(r"remove|use|needs|name those|must be below|make a new pool|Make a new pool", rule.message)


def test_a_list_that_two_managers_may_write_is_keyed():
    keys = {path: node["x-kubernetes-list-map-keys"] for path, node in walk(schema(names.NODE_PLURAL))
            if node.get("x-kubernetes-list-type") == "map"}  # fmt: skip
    assert keys == {"status.disks": ["mountPath"], "status.pools": ["name"], "status.profiles": ["pool"]}


@pytest.mark.parametrize("plural", KINDS)
def test_a_crd_outlives_its_chart_and_has_short_names(plural):
    document = written(plural)
    assert document["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert document["spec"]["scope"] == "Cluster"
    assert document["spec"]["names"]["shortNames"] == [{"kvcachepools": "kvp", "kvcachenodes": "kvn"}[plural]]
    assert document["spec"]["versions"][0]["subresources"] == {"status": {}}


# ---- examples ----


def test_there_is_an_example_of_each_way_to_store():
    pools = [found for path in EXAMPLES for found in documents(path) if found["kind"] == names.POOL_KIND]
    storages = [KVCachePool.parse(pool).spec.storage for pool in pools]
    ways = {(storage.type.value, storage.volume.value, bool(storage.claim_name)) for storage in storages}
    assert ways == {
        ("NodeLocal", "CSI", False),
        ("NodeLocal", "HostPath", False),
        ("SharedFilesystem", "CSI", True),
        ("SharedFilesystem", "CSI", False),
        ("Ephemeral", "CSI", False),
    }
    assert len({pool["metadata"]["name"] for pool in pools}) == len(pools), "all of them can be applied together"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_has_no_field_that_the_schema_does_not_know(path):
    pools = [found for found in documents(path) if found["kind"] == names.POOL_KIND]
    assert [] == [field for pool in pools for field in unknown(schema(names.POOL_PLURAL), pool, "")]


def test_the_example_pod_mounts_the_example_pool():
    folder = EXAMPLES[0].parent
    volume = example(folder / "pod-writes.yaml")["spec"]["volumes"][0]
    assert volume["csi"]["driver"] == names.DRIVER_NAME
    assert volume["csi"]["volumeAttributes"] == {names.POOL_ATTRIBUTE: "default"}
    assert example(folder / "nodelocal.yaml")["metadata"]["name"] == "default"


def test_the_example_of_vllm_is_labelled_for_the_example_pool():
    folder = EXAMPLES[0].parent
    deployment, *_ = documents(folder / "vllm.yaml")
    pool = example(folder / "nodelocal.yaml")["metadata"]["name"]
    assert deployment["spec"]["template"]["metadata"]["labels"][names.POOL_NAME_LABEL] == pool


def documents(path: Path):
    return list(yaml.safe_load_all(path.read_text()))


def example(path: Path):
    (document,) = documents(path)
    return document


def unknown(node, value, path):
    """Yield the paths of fields that are not in the schema, outside metadata."""
    if "properties" in node:
        for name, child in value.items():
            if name not in node["properties"]:
                yield f"{path}.{name}"
            elif path or name != "metadata":
                yield from unknown(node["properties"][name], child, f"{path}.{name}")


def test_a_misspelt_field_of_an_example_would_be_found():
    wrong = {"spec": {"storage": {"typ": "NodeLocal"}}, "metadata": {"name": "p"}}
    assert list(unknown(schema(names.POOL_PLURAL), wrong, "")) == [".spec.storage.typ"]
