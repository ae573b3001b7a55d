"""How large a pod may become."""

import json
from itertools import accumulate, repeat

import pytest

from pykvcache_contract.injection import SkipReason
from pykvcache_operator.injection.outcome import Result
from pykvcache_operator.injection.parts import SIZE_BYTES_MAX, size_bytes


def test_the_estimate_is_never_below_and_a_few_percent_above_the_json_of_a_pod(injector, shapes):
    for pod in shapes.values():
        written = len(json.dumps(pod, separators=(",", ":"), ensure_ascii=False).encode())
        assert written <= size_bytes(pod) <= 1.15 * written


@pytest.mark.parametrize("text", ["x", "é", "\ud800", "𝄞"])
def test_long_texts_count_by_their_bytes(text):
    assert size_bytes(text * 1000) == len(text.encode(errors="surrogatepass")) * 1000 + 3


def test_depth_is_no_matter():
    *_, deep = accumulate(repeat(None, 100_000), lambda inner, _: [inner], initial=[])
    assert size_bytes(deep) == 3 * 100_001


def test_a_pod_becomes_no_larger_than_is_surely_accepted(injector):
    def pod(count):
        return injector.pod(container={"env": [{"name": "LARGE", "value": "x" * count}]})

    room = SIZE_BYTES_MAX - size_bytes(injector(pod(0)).pod)
    assert injector(pod(room)).result is Result.INJECTED
    too_large = injector(pod(room + 1))
    assert too_large.reason is SkipReason.UNSUPPORTED_POD
    assert too_large.pod["metadata"]["annotations"]["pykvcache.io/skipped"].startswith("UnsupportedPod: ")
    huge = pod(SIZE_BYTES_MAX)
    assert injector(huge).pod is huge
