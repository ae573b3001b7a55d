"""One label on a user's vLLM Deployment: what it gives, and what remains without it. Real vLLM on the CPU."""

import json
import random

import pytest

from harness import pools, vllm_image
from harness.chart import Installation
from harness.pools import Disk, pool_named
from harness.prometheus import Prometheus
from harness.vllm_pods import BLOCK_TOKENS, INJECTION, NAME, Servers, example
from harness.waiting import NotYetError, wait_for

# The first test also builds images, a large one among them, and starts the cluster.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]
PROMPT_TOKENS = 500  # the tokenizer makes one of each letter
WHOLE = PROMPT_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS  # of them, those in whole blocks
CONFIGURATION = "mutatingwebhookconfiguration"


@pytest.fixture(scope="module")
def installation(local_cluster, settings):
    """The chart, and an image that users have."""
    chart = Installation(local_cluster, cache=settings.cache)
    try:
        local_cluster.load(vllm_image.build(settings.cache), vllm_image.name())
        chart.install()
        wait_for("the webhook to be called", lambda: has_bundle(local_cluster.kubectl), limit_s=120)
        yield chart
    finally:
        chart.remove()


def has_bundle(kubectl) -> bool:
    """Whether API servers can check the webhook's certificate."""
    (webhook,) = kubectl.get(CONFIGURATION, "pykvcache-webhook")["webhooks"]
    return bool(webhook["clientConfig"].get("caBundle"))


@pytest.fixture
def pool(installation, local_cluster, kubectl):
    """A pool on a disk of the first node."""
    disk = Disk(local_cluster.nodes[0], "/mnt/pykvcache-e2e", size="1G")
    try:
        disk.attach()
        kubectl.apply(pool_named("default", storage={"capacityPerNode": "512Mi"}, **INJECTION))
        pools.wait_for_state(kubectl, "node1", "default", "Ready")
        yield "default"
        kubectl.run("delete", "kvcachepool", "default", "--ignore-not-found", "--timeout=60s")
    finally:
        disk.remove()


@pytest.fixture
def inside(kubectl, namespace):
    """kubectl for a namespace under Pod Security `restricted`."""
    kubectl.patch(
        "namespace", namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    )
    return kubectl.within(namespace)


@pytest.fixture
def prometheus(local_cluster):
    prometheus = Prometheus(local_cluster.nodes[0])
    yield prometheus
    prometheus.stop()


def prompts() -> list[str]:
    """Return prompts that begin alike, and one of its own."""
    source = random.Random(7)
    draw = [("".join(source.choices("abcdefgh ", k=PROMPT_TOKENS))) for _ in range(2)]
    return [*draw, draw[0][:300] + draw[1][300:]]


def texts_of(servers: Servers, pod: str) -> list[str]:
    return [servers.complete(pod, prompt).text for prompt in prompts()]


@pytest.mark.short
def test_one_label_lets_new_pods_answer_from_what_earlier_ones_stored_and_without_it_they_answer_the_same(
    pool, inside, kubectl, prometheus
):
    servers = Servers(inside)
    inside.apply(example(pool=pool, node="node1"))
    (first,) = servers.wait_until_ready(1)
    expected = fill(servers, first)
    pools_own_numbers(kubectl, pool, injected=1)

    inside.delete("pod", first, wait=False)
    inside.run("scale", f"deployment/{NAME}", "--replicas=2")
    replacements = servers.wait_until_ready(2, without=[first])
    for pod in replacements:
        answer = servers.complete(pod, prompts()[0])
        assert (answer.text, answer.cached_tokens) == (expected[0], WHOLE)
        assert texts_of(servers, pod) == expected
        measured = servers.metrics(pod)
        assert measured["vllm:pykvcache_enabled"] == 1
        assert measured["vllm:pykvcache_hit_tokens_total"] >= WHOLE
    are_scraped(servers, prometheus, replacements)
    pools_own_numbers(kubectl, pool, injected=2)

    take_pool_away(kubectl, pool)
    for pod in replacements:
        assert texts_of(servers, pod) == expected

    label_off = [{"op": "remove", "path": "/spec/template/metadata/labels/pykvcache.io~1pool"}]
    inside.run("scale", f"deployment/{NAME}", "--replicas=1")
    inside.run("patch", "deployment", NAME, "--type=json", "-p", json.dumps(label_off))
    (plain,) = servers.wait_until_ready(1, without=replacements)
    assert texts_of(servers, plain) == expected
    spec = inside.get("pod", plain)["spec"]
    assert "pykvcache" not in json.dumps(spec)
    assert "vllm:pykvcache_enabled" not in servers.metrics(plain)


def fill(servers: Servers, pod: str) -> list[str]:
    """Let a pod answer and store until all whole blocks are on the disk; return the answers."""
    expected = texts_of(servers, pod)

    def stored() -> bool:
        servers.complete(pod, "counts travel with steps", max_tokens=2)
        blocks = servers.metrics(pod).get("vllm:pykvcache_store_blocks_total", 0)
        if blocks < 2 * WHOLE / BLOCK_TOKENS:
            raise NotYetError(f"blocks stored: {blocks}")
        return True

    wait_for("the blocks to be stored", stored, limit_s=120)
    return expected


def pools_own_numbers(kubectl, pool: str, *, injected: int) -> None:
    """Wait until the pool's status tells what it holds, and who has it."""

    def told(found) -> bool:
        status = found.get("status", {})
        return status.get("usedBytes", 0) > 0 and status.get("injectedPods") == injected

    found = kubectl.wait_for("kvcachepool", pool, told, f"to tell its use and {injected} pods", limit_s=120)
    assert found["status"].get("missedPods", 0) == 0
    pools.wait_for_condition(kubectl, pool, "InjectionHealthy", "True")


def are_scraped(servers: Servers, prometheus: Prometheus, pods: list[str]) -> None:
    """Wait until Prometheus computes hit rate and bandwidth of each pod, while requests hit."""
    for pod in pods:
        window = f'{{pod="{pod}"}}[5m]'
        hits, lookups = (f"rate(vllm:pykvcache_{name}_tokens_total{window})" for name in ("hit", "lookup"))
        loaded, active = (f"rate(vllm:pykvcache_load_{name}_total{window})" for name in ("bytes", "active_seconds"))

        def measured(pod=pod, hit_rate=f"{hits} / ignoring(tier) {lookups}", bandwidth=f"{loaded} / {active}") -> bool:
            assert servers.complete(pod, prompts()[1]).cached_tokens == WHOLE
            return 0 < prometheus.value(hit_rate) <= 1 and 1e5 < prometheus.value(bandwidth) < 1e12

        wait_for(f"{pod} in Prometheus", measured, limit_s=120, every_s=1)


def take_pool_away(kubectl, pool: str) -> None:
    """Delete a pool although pods use it, and wait until it is gone."""
    kubectl.delete("kvcachepool", pool, wait=False)
    pools.wait_for_condition(kubectl, pool, "Deleting", "True", reason="InUse")
    kubectl.patch("kvcachepool", pool, {"metadata": {"annotations": {"pykvcache.io/force-delete": "true"}}})
    pools.wait_until_gone(kubectl, "kvcachepool", pool)
