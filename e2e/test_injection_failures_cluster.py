"""Labelled pods in trouble: without the webhook, without the pool, in shapes that leave us little room.

What is not about vLLM is shown with pods that are none; they must run to their end, whatever becomes of the cache.
"""

import json
import shlex

import pytest

from harness import pools, vllm_pods
from harness.chart import NAMESPACE
from harness.injection import WEBHOOK, ephemeral, installed, labelled, pool_on_disk, restricted
from harness.pools import pool_named
from harness.vllm_pods import FLAGS, INJECTION, WHOLE_TOKENS, Servers, prompts
from harness.waiting import NotYetError, wait_for

# The first test also builds images, a large one among them, and starts the cluster.
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]
POOL = "default"
COMPONENT = "app.kubernetes.io/component=webhook"
OFFLINE = f"""
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("/model", dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=4, block_size=32,
              kv_cache_memory_bytes=67108864, seed=0)
    for prompt in {prompts()!r}:
        output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)[0]
        print("answer", output.num_cached_tokens, repr(output.outputs[0].text), flush=True)
"""


@pytest.fixture(scope="module")
def installation(local_cluster, settings):
    with installed(local_cluster, settings) as chart:
        yield chart


@pytest.fixture(scope="module")
def disk(installation, local_cluster):
    with pool_on_disk(local_cluster, POOL) as disk:
        yield disk


@pytest.fixture
def inside(kubectl, namespace):
    return restricted(kubectl, namespace)


@pytest.fixture
def start(local_cluster, inside, installation):
    """Create a labelled pod that runs a script of a shell, and return what the API server made of it."""

    def start(name: str, script: str, *, pool: str = POOL, **spec):
        inside.apply(labelled(name, pool=pool, image=local_cluster.busybox, script=script, **spec))
        return inside.get("pod", name)

    return start


@pytest.fixture
def add_pool(installation, kubectl):
    made = []

    def add(manifest) -> str:
        kubectl.apply(manifest)
        made.append(manifest["metadata"]["name"])
        return made[-1]

    yield add
    for name in made:
        kubectl.run("delete", "kvcachepool", name, "--ignore-not-found", "--timeout=180s")


def is_injected(pod) -> bool:
    return "pykvcache.io/injected" in pod["metadata"].get("annotations", {})


def end_of(inside, name: str) -> str:
    """Wait until a pod has ended well, and return what it wrote."""
    ended = inside.wait_for_phase(name, "Succeeded", "Failed", limit_s=pools.PATIENCE_S)
    said = inside.logs(name, container="main")
    assert ended["status"]["phase"] == "Succeeded", said
    return said


@pytest.fixture
def webhook(installation, kubectl):
    """Stop the webhook; it works again after the test."""
    system = kubectl.within(NAMESPACE)

    def scale(replicas: int) -> None:
        system.run("scale", f"deployment/{WEBHOOK}", f"--replicas={replicas}")
        system.wait_for(
            "deployment",
            WEBHOOK,
            lambda found: found["status"].get("readyReplicas", 0) == found["status"].get("replicas", 0) == replicas,
            f"to have {replicas}",
            limit_s=120,
        )

    def stop() -> None:
        scale(0)
        # One that is asked to end goes on answering for a while.
        wait_for("its pods to be gone", lambda: not system.list("pods", selector=COMPONENT))

    yield stop
    scale(1)


def test_without_the_webhook_pods_start_without_the_cache_and_an_event_and_the_pool_say_so(
    webhook, disk, start, inside, kubectl
):
    webhook()
    pod = start("missed", "sleep 600")
    assert not is_injected(pod)
    inside.wait_for_phase("missed", "Running", limit_s=180)
    said = event_of(inside, "missed", "CacheNotInjected")
    assert "Delete the pod" in said
    told = pools.wait_for_condition(kubectl, POOL, "InjectionHealthy", "False", reason="MissedPods")
    assert f"{inside.namespace}/missed" in told["message"]
    inside.delete("pod", "missed")
    pools.wait_for_condition(kubectl, POOL, "InjectionHealthy", "True")


def event_of(inside, name: str, reason: str) -> str:
    """Wait for an event about a pod, and return its message."""

    def probe() -> str:
        rows = json.loads(inside.run("get", "events", "-o", "json"))["items"]
        for row in rows:
            if (row["involvedObject"]["name"], row["reason"]) == (name, reason):
                return str(row["message"])
        raise NotYetError(f"events: {[(row['involvedObject']['name'], row['reason']) for row in rows]}")

    return wait_for(f"the event {reason} of {name}", probe, limit_s=120)


def test_while_the_webhook_hangs_pods_start_without_the_cache(disk, start, inside, local_cluster):
    node = local_cluster.nodes[0].sandbox
    node.run("pkill", "-STOP", "-f", "pykvcache-operator webhook")
    try:
        assert not is_injected(start("hung", "echo ran"))
        assert end_of(inside, "hung") == "ran\n"
    finally:
        node.run("pkill", "-CONT", "-f", "pykvcache-operator webhook")
    wait_for("pods to be injected again", lambda: is_injected(start_again(start, inside, "later")), limit_s=180)


def start_again(start, inside, name: str):
    inside.delete("pod", name)
    return start(name, "echo ran")


def test_a_pod_that_is_no_vllm_runs_to_its_end_with_a_pool_of_each_type(disk, start, add_pool, inside):
    """Also a Job's: the native sidecar ends with it."""
    add_pool(ephemeral("scratch"))
    for pool in (POOL, "scratch"):
        pod = start(
            f"ends-{pool}", "ls /pykvcache/library/pykvcache_connector/plugin.py; ls /pykvcache/pool", pool=pool
        )
        assert is_injected(pod)
        assert "pool.json" in end_of(inside, f"ends-{pool}")
    body = start("template", "true", pool="scratch")
    spec = labelled("job", pool="scratch", image=body["spec"]["containers"][0]["image"], script="ls /pykvcache/pool")
    template = {"metadata": {"labels": spec["metadata"]["labels"]}, "spec": spec["spec"]}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": {"template": template}}
    inside.apply(job)
    inside.wait_for("job", "job", lambda found: found["status"].get("succeeded") == 1, "to succeed", limit_s=120)
    (pod,) = inside.list("pods", selector="job-name=job")
    assert [row["name"] for row in pod["spec"]["initContainers"]] == ["pykvcache-library", "pykvcache-sidecar"]


def test_quota_and_limit_range_admit_the_pod_with_what_is_added(disk, start, add_pool, inside):
    add_pool(ephemeral("scratch"))
    hard = {"requests.cpu": "2", "requests.memory": "2Gi", "limits.cpu": "4", "limits.memory": "2Gi", "pods": "3"}
    inside.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "all"}, "spec": {"hard": hard}})
    limits = [{"type": "Container", "max": {"cpu": "1", "memory": "1Gi"}, "min": {"cpu": "5m", "memory": "8Mi"}}]
    inside.apply({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "all"}, "spec": {"limits": limits}})
    # A quota holds nobody back before its namespace was counted for the first time.
    inside.wait_for("resourcequota", "all", lambda quota: quota.get("status", {}).get("used"), "to be counted")
    for pool in (POOL, "scratch"):
        assert is_injected(start(f"counted-{pool}", "ls /pykvcache/pool", pool=pool))
        assert "pool.json" in end_of(inside, f"counted-{pool}")


def test_a_cordoned_node_serves_its_pool_to_pods_that_may_still_come(disk, start, inside, kubectl):
    toleration = {"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}
    kubectl.run("cordon", "node1")
    try:
        start("guest", "ls /pykvcache/pool", tolerations=[toleration], nodeSelector={"kubernetes.io/hostname": "node1"})
        assert "pool.json" in end_of(inside, "guest")
        assert pools.entry(kubectl, "node1", POOL)["state"] == "Ready"
    finally:
        kubectl.run("uncordon", "node1")


def test_vllm_by_a_shell_and_offline_finds_what_a_server_of_another_user_has_stored(disk, inside, local_cluster):
    """The shell's pod has little room: its root is read-only; PYTHONPATH, plugins and seccomp are its own."""
    servers = Servers(inside, local_cluster.nodes[0])
    inside.apply(vllm_pods.pod("server", pool=POOL))
    servers.wait_until_ready(1)
    expected = servers.fill("server", prompts())
    offline = vllm_pods.pod("offline", pool=POOL, command=["python3", "-c", OFFLINE], args=None, readinessProbe=None)
    # An engine of its own process needs no /dev/shm beyond the 64 MiB that each container has.
    container = offline["spec"]["containers"][0]
    container["env"].append({"name": "VLLM_ENABLE_V1_MULTIPROCESSING", "value": "0"})
    container["volumeMounts"] = [row for row in container["volumeMounts"] if row["mountPath"] != "/dev/shm"]
    offline["spec"]["restartPolicy"] = "Never"
    offline["metadata"]["labels"]["app"] = "offline"
    inside.apply(offline)
    inside.apply(by_shell("shell"))
    servers.wait_until_ready(2)
    servers.find("shell", prompts(), expected)
    inside.wait_for_phase("offline", "Succeeded", "Failed", limit_s=vllm_pods.START_S)
    said = inside.logs("offline")
    lines = [line for line in said.splitlines() if line.startswith("answer ")]
    assert [line.split(maxsplit=2)[2] for line in lines] == [repr(text) for text in expected], said
    assert str(WHOLE_TOKENS) in {line.split()[1] for line in lines}, said


def by_shell(name: str):
    pod = vllm_pods.pod(name, pool=POOL, command=["sh", "-c", f"exec vllm serve {shlex.join(FLAGS)}"], args=None)
    container = pod["spec"]["containers"][0]
    container["env"] += [{"name": "PYTHONPATH", "value": "/tmp/of-the-user"}, {"name": "VLLM_PLUGINS", "value": "none"}]
    container["securityContext"] |= {"readOnlyRootFilesystem": True, "runAsUser": 4242, "runAsGroup": 4343}
    container["securityContext"]["seccompProfile"] = {"type": "RuntimeDefault"}
    return pod


def test_vllm_on_a_node_without_the_pool_answers_without_the_cache_and_says_why(
    disk, add_pool, kubectl, inside, local_cluster
):
    add_pool(pool_named("elsewhere", nodeSelector={"e2e.pykvcache.io/no": "node"}, **INJECTION))
    pools.wait_for_condition(kubectl, "elsewhere", "Ready", "False")
    servers = Servers(inside, local_cluster.nodes[0])
    inside.apply(vllm_pods.pod("server", pool="elsewhere"))
    servers.wait_until_ready(1)
    assert is_injected(inside.get("pod", "server"))
    found = servers.answers("server", [*prompts(), *prompts()])
    assert {answer.cached_tokens for answer in found} == {0}
    assert servers.metrics("server")["vllm:pykvcache_enabled"] == 0
    said = inside.logs("server", container="vllm")
    assert "py-kvcache is off" in said
    assert "has no place on this node" in said


def test_vllm_that_is_killed_finds_its_blocks_in_the_emptydir_that_a_sidecar_cares_for(
    disk, add_pool, inside, local_cluster
):
    add_pool(ephemeral("scratch"))
    servers = Servers(inside, local_cluster.nodes[0])
    inside.apply(vllm_pods.pod("server", pool="scratch"))
    servers.wait_until_ready(1)
    expected = servers.fill("server", prompts())
    path = f"/api/v1/namespaces/{inside.namespace}/pods/server:9478/proxy/metrics"
    wait_for("the sidecar to see the blocks", lambda: used_bytes(inside.run("get", "--raw", path)) > 0, limit_s=120)
    inside.exec("server", "sh", "-c", "kill -KILL $(cat /proc/1/task/1/children)", container="vllm")
    inside.wait_for("pod", "server", lambda pod: restarts(pod) == 1, "to have restarted", limit_s=120)
    servers.wait_until_ready(1)
    servers.find("server", prompts(), expected)


def used_bytes(text: str) -> float:
    lines = (line.split() for line in text.splitlines() if line.startswith("pykvcache_pool_used_bytes"))
    return sum(float(value) for _, value in lines)


def restarts(pod) -> int:
    return int(pod["status"]["containerStatuses"][0]["restartCount"])
