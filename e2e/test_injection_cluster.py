"""One label on a user's vLLM Deployment: what it gives, and what remains without it. Real vLLM on the CPU."""

import json

import pytest

from harness import pools
from harness.injection import installed, pool_on_disk, restricted, take_pool_away
from harness.prometheus import Prometheus
from harness.vllm_pods import NAME, Servers, example, prompts
from harness.waiting import wait_for

# The first test also builds images, a large one among them, and starts the cluster.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def installation(local_cluster, settings):
    with installed(local_cluster, settings) as chart:
        yield chart


@pytest.fixture
def pool(installation, local_cluster):
    with pool_on_disk(local_cluster, "default"):
        yield "default"


@pytest.fixture
def inside(kubectl, namespace):
    return restricted(kubectl, namespace)


@pytest.fixture
def prometheus(local_cluster):
    prometheus = Prometheus(local_cluster.nodes[0])
    yield prometheus
    prometheus.stop()


@pytest.mark.short
def test_one_label_lets_new_pods_answer_from_what_earlier_ones_stored_and_without_it_they_answer_the_same(
    pool, inside, kubectl, prometheus, local_cluster
):
    servers = Servers(inside, local_cluster.nodes[0])
    inside.apply(example(pool=pool, node="node1"))
    (first,) = servers.wait_until_ready(1)
    expected = servers.fill(first, prompts())
    wait_for_status(kubectl, pool, injected=1)

    inside.delete("pod", first, wait=False)
    inside.run("scale", f"deployment/{NAME}", "--replicas=2")
    replacements = servers.wait_until_ready(2, without=[first])
    prometheus.scrape(servers.pods())
    for pod in replacements:
        servers.find(pod, prompts(), expected)
        assert servers.metrics(pod)["vllm:pykvcache_enabled"] == 1
        wait_until_scraped(servers, prometheus, pod, expected)
    wait_for_status(kubectl, pool, injected=2)

    take_pool_away(kubectl, pool)
    for pod in replacements:
        assert servers.answers(pod, prompts()) == [(text, 0) for text in expected]

    inside.run("scale", f"deployment/{NAME}", "--replicas=1")
    off = [{"op": "remove", "path": "/spec/template/metadata/labels/pykvcache.io~1pool"}]
    inside.run("patch", "deployment", NAME, "--type=json", "-p", json.dumps(off))
    (plain,) = servers.wait_until_ready(1, without=replacements)
    assert servers.answers(plain, prompts()) == [(text, 0) for text in expected]
    assert "pykvcache" not in json.dumps(inside.get("pod", plain)["spec"])
    assert "vllm:pykvcache_enabled" not in servers.metrics(plain)


def wait_for_status(kubectl, pool: str, *, injected: int) -> None:
    """Wait until the pool's status tells what it holds, and how many pods have it."""

    def told(found) -> bool:
        status = found.get("status", {})
        return status.get("usedBytes", 0) > 0 and status.get("injectedPods") == injected

    found = kubectl.wait_for("kvcachepool", pool, told, f"to tell its use and {injected} pods", limit_s=120)
    assert found["status"].get("missedPods", 0) == 0
    pools.wait_for_condition(kubectl, pool, "InjectionHealthy", "True")


def wait_until_scraped(servers: Servers, prometheus: Prometheus, pod: str, expected: list[str]) -> None:
    """Wait until Prometheus computes a pod's hit rate and bandwidth, while requests hit."""
    window = f'{{pod="{pod}"}}[5m]'
    hits, lookups = (f"rate(vllm:pykvcache_{name}_tokens_total{window})" for name in ("hit", "lookup"))
    loaded, active = (f"rate(vllm:pykvcache_load_{name}_total{window})" for name in ("bytes", "active_seconds"))

    def measured() -> bool:
        servers.find(pod, prompts()[1:2], expected[1:2])
        hit_rate = prometheus.value(f"{hits} / ignoring(tier) {lookups}")
        return 0 < hit_rate <= 1 and 1e5 < prometheus.value(f"{loaded} / {active}") < 1e12

    wait_for(f"{pod} in Prometheus", measured, limit_s=120, every_s=1)
