"""Injection of random pods: it never raises, it removes and loosens nothing of the user's, and twice is once."""

import copy
import json
from itertools import zip_longest

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from harness.random_pods import anything, damaged, pods
from pykvcache_operator.injection.annotations import LOCAL_VOLUMES_ANNOTATION
from pykvcache_operator.injection.inject import inject
from pykvcache_operator.injection.outcome import Result

OURS = ("pykvcache-library", "pykvcache-sidecar")
STORAGES = [
    {"type": "NodeLocal", "capacityPerNode": "100Gi"},
    {"type": "NodeLocal", "capacityPerNode": "100Gi", "volume": "HostPath", "path": "/mnt/a"},
    {"type": "Ephemeral", "capacity": "100Gi"},
]
storages = st.sampled_from(STORAGES)
CHANGED_IN_VLLM = {"args", "env", "volumeMounts"}
ENVIRONMENT_ADDED_TO = {"PYTHONPATH", "VLLM_PLUGINS"}


def own_containers(pod):
    return [container for container in pod["spec"].get("initContainers") or () if container["name"] in OURS]


def is_restricted(container):
    context = container["securityContext"]
    return (
        context["allowPrivilegeEscalation"] is False
        and context["readOnlyRootFilesystem"] is True
        and context["runAsNonRoot"] is True
        and context["capabilities"] == {"drop": ["ALL"]}
        and context.get("seccompProfile") in (None, {"type": "RuntimeDefault"})
        and context.get("runAsUser") != 0
        and set(context) <= {*CONTEXT_KEYS}
    )


CONTEXT_KEYS = (
    "allowPrivilegeEscalation",
    "readOnlyRootFilesystem",
    "runAsNonRoot",
    "capabilities",
    "seccompProfile",
    "runAsUser",
    "runAsGroup",
    "seLinuxOptions",
)


def starts_with(new, old):
    """Say whether the user's entries still lead a list."""
    return (new or [])[: len(old or [])] == (old or [])


def check_kept(before, after):
    """Assert that a pod still has all that the user wrote, in its order."""
    old, new = before["spec"], after["spec"]
    for key in ("volumes", "initContainers", "imagePullSecrets"):
        assert starts_with(new.get(key), old.get(key))
    changed = {"containers", "volumes", "initContainers", "imagePullSecrets"}
    assert {k: v for k, v in new.items() if k not in changed} == {k: v for k, v in old.items() if k not in changed}
    differing = [(o, n) for o, n in zip_longest(old["containers"], new["containers"]) if o != n]
    assert len(differing) == 1
    check_vllm(*differing[0], is_merged=before["metadata"]["annotations"].get("pykvcache.io/on-conflict") == "Merge")
    metadata, changed_metadata = copy.deepcopy(before["metadata"]), copy.deepcopy(after["metadata"])
    for part in (metadata, changed_metadata):
        for name in ("injected", "skipped", "warnings"):
            (part.get("annotations") or {}).pop(f"pykvcache.io/{name}", None)
        (part.get("annotations") or {}).pop(LOCAL_VOLUMES_ANNOTATION, None)
    assert changed_metadata == {**metadata, "annotations": metadata.get("annotations") or {}}


def check_vllm(old, new, *, is_merged):
    """Assert that vLLM's container got more, and that nothing else about it changed."""
    assert {k: v for k, v in new.items() if k not in CHANGED_IN_VLLM} == {
        k: v for k, v in old.items() if k not in CHANGED_IN_VLLM
    }
    assert is_merged or starts_with(new.get("args"), old.get("args"))
    assert starts_with(new["volumeMounts"], old.get("volumeMounts"))
    kept = [entry for entry in old.get("env") or () if entry["name"] not in ENVIRONMENT_ADDED_TO]
    remaining = iter(new["env"])
    assert all(entry in remaining for entry in kept)  # a subsequence


@pytest.mark.slow
@given(pod=pods(), storage=storages)
def test_the_users_pod_is_all_there_and_ours_is_restricted(injector, pod, storage):
    before, pool = copy.deepcopy(pod), injector.pool(storage=storage)
    outcome = injector(pod, pool)
    assert pod == before
    event(f"{outcome.result.value} {outcome.reason.word if outcome.reason else ''}")
    if outcome.result is Result.INJECTED:
        check_kept(before, outcome.pod)
        assert all(is_restricted(container) for container in own_containers(outcome.pod))


@pytest.mark.slow
@given(pod=pods(), storage=storages)
def test_once_more_changes_nothing_with_the_annotation_or_without(injector, pod, storage):
    pool = injector.pool(storage=storage)
    first = injector(pod, pool)
    if first.result is not Result.INJECTED:
        assert injector(first.pod, pool) == first
        return
    assert injector(first.pod, pool).result is Result.UNCHANGED
    lost = copy.deepcopy(first.pod)
    del lost["metadata"]["annotations"]["pykvcache.io/injected"]
    again = injector(lost, pool)
    assert (again.result, again.pod["spec"]) == (Result.INJECTED, first.pod["spec"])


@pytest.mark.slow
@given(pod=damaged(), storage=storages, is_offline=st.booleans())
def test_no_value_in_any_place_makes_it_raise(injector, pod, storage, is_offline):
    before = copy.deepcopy(pod)
    pools = {"fast": injector.pool(storage=storage)}
    outcome = inject(pod, pools=pools, namespace=None, settings=injector.settings) if is_offline else injector(pod)
    assert pod == before
    event(outcome.result.value)
    json.dumps(outcome.pod)
    assert outcome.result is not Result.SKIPPED or (outcome.reason and outcome.message)


@given(value=anything())
def test_nor_does_a_label_on_nothing_else(injector, value):
    for pod in ({"metadata": {"labels": {"pykvcache.io/pool": value}}}, {"metadata": value}, {"spec": value}):
        assert injector(pod).result in (Result.UNCHANGED, Result.SKIPPED)


@pytest.mark.parametrize("part", ["labels", "annotations"])
@pytest.mark.parametrize("value", [None, [], "text", {"a": 1}, {"a": None}])
def test_labels_and_annotations_that_are_none_are_no_pod_of_ours(injector, part, value):
    pod = injector.pod()
    pod["metadata"][part] = value
    if part == "annotations" and isinstance(value, dict):
        value["pykvcache.io/staging"] = 7
    assert injector(pod).result is (Result.UNCHANGED if part == "labels" else Result.SKIPPED) or value is None
