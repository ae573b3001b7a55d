"""Annotations of ours: what users write in them, and how much of ours goes into them."""

import pytest

from pykvcache_contract.api.pool import KVCachePool
from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection.annotations import STAGING_BYTES_MIN, WARNINGS_BYTES_MAX, injected
from pykvcache_operator.injection.outcome import Result, Skip

TOTAL_BYTES_MAX = 256 * 1024
HOSTILE = ["", "a\nb: c", "x" * 100_000, '{"a": [1]}', "\u202e\x00\x1b[31m", "\ud800", "$(POD_NAME)", "__proto__"]


@pytest.mark.parametrize("key", ["library", "staging"])
@pytest.mark.parametrize("value", [*HOSTILE, "initcontainer", "-1Gi", "1Mi", "1e9", "2Ei", "１Gi"])
def test_a_value_that_cannot_be_used_skips_the_pod_and_says_which_can(injector, key, value):
    outcome = injector(injector.pod(annotations={f"pykvcache.io/{key}": value}))
    assert outcome.reason is SkipReason.BAD_ANNOTATION
    assert f"pykvcache.io/{key}" in outcome.message
    assert {"library": "InitContainer or ImageVolume or None", "staging": "2Gi"}[key] in outcome.message
    assert outcome.message.isprintable()
    assert len(outcome.message) <= 1024


@pytest.mark.parametrize("value", HOSTILE)
def test_annotations_of_others_and_odd_keys_of_ours_are_no_concern(injector, value):
    given = {"__proto__": value, "pykvcache.io/other": value, "pykvcache.io/warnings": value}
    outcome = injector(injector.pod(annotations=given))
    assert outcome.result is Result.INJECTED
    kept = {"__proto__": value, "pykvcache.io/other": value}
    assert kept.items() <= outcome.pod["metadata"]["annotations"].items()
    assert "pykvcache.io/warnings" not in outcome.pod["metadata"]["annotations"]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_label_is_an_unknown_pool(injector, value):
    assert injector(injector.pod(pool=value)).reason is SkipReason.POOL_NOT_FOUND


def size(annotations):
    return sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())


def test_a_pod_whose_annotations_are_full_is_left_as_it_is(injector):
    free = len("pykvcache.io/injected") + len("1.2.3")
    fitting = {"a": "x" * (TOTAL_BYTES_MAX - 1 - free)}
    outcome = injector(injector.pod(annotations=fitting))
    assert (outcome.result, size(outcome.pod["metadata"]["annotations"])) == (Result.INJECTED, TOTAL_BYTES_MAX)
    full = injector.pod(annotations={"a": fitting["a"] + "x"})
    outcome = injector(full)
    assert (outcome.reason, outcome.pod is full) == (SkipReason.UNSUPPORTED_POD, True)


def test_bytes_count_not_characters(injector):
    pod = injector.pod(annotations={"a": "é" * (TOTAL_BYTES_MAX // 2)})
    assert injector(pod).reason is SkipReason.UNSUPPORTED_POD


@pytest.mark.parametrize(
    ("storage", "given", "then"),
    [
        ({"type": "NodeLocal", "capacityPerNode": "1Gi"}, None, "pykvcache-library"),
        ({"type": "Ephemeral", "capacity": "1Gi"}, None, "pykvcache-library,pykvcache-pool"),
        ({"type": "Ephemeral", "capacity": "1Gi"}, "shm, pykvcache-pool", "shm, pykvcache-pool,pykvcache-library"),
    ],
)
def test_a_node_may_be_removed_with_volumes_of_ours_on_it(injector, storage, given, then):
    name = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    pod = injector.pod(annotations={name: given} if given else {})
    outcome = injector(pod, injector.pool(storage=storage))
    assert outcome.pod["metadata"]["annotations"][name] == then


def test_a_node_may_be_removed_as_before_where_no_volume_of_ours_lies_on_it(injector):
    pod = injector.pod(annotations={"pykvcache.io/library": "ImageVolume"})
    assert set(injector(pod).pod["metadata"]["annotations"]) == {"pykvcache.io/library", "pykvcache.io/injected"}


def test_warnings_are_one_a_line_and_bounded(injector):
    pod = injector.pod()
    few = injected(pod, version="1", warnings=["a\nb", "c"])["annotations"]["pykvcache.io/warnings"]
    assert few == "a b\nc"
    many = injected(pod, version="1", warnings=["w" * 500] * 100)["annotations"]["pykvcache.io/warnings"]
    assert len(many) <= WARNINGS_BYTES_MAX + len("\nand 100 more")
    assert many.endswith("and 92 more")


def test_a_pod_at_the_limit_with_warnings_is_told_apart(injector):
    with pytest.raises(Skip):
        injected(injector.pod(annotations={"a": "x" * TOTAL_BYTES_MAX}), version="1", warnings=["w"])


def test_the_least_staging_memory_is_that_of_pools():
    def pool(staging):
        spec = {"storage": {"type": "Ephemeral", "capacity": "1Gi"}, "memory": {"stagingBytes": staging}}
        return KVCachePool.parse({"metadata": {"name": "p", "uid": ""}, "spec": spec})

    assert pool(STAGING_BYTES_MIN).spec.memory.staging_bytes == STAGING_BYTES_MIN
    with pytest.raises(ConfigurationError):
        pool(STAGING_BYTES_MIN - 1)
