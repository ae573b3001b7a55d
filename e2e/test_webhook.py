"""The webhook behind a real API server: pods get the cache, and start without it whatever is wrong with the webhook."""

import datetime as dt
import json
import subprocess
import time
import uuid
from contextlib import ExitStack

import pytest

from harness.kubectl import KubectlError
from harness.waiting import NotYetError, wait_for
from harness.webhooks import Site

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

INJECTED, SKIPPED = "pykvcache.io/injected", "pykvcache.io/skipped"
LABEL = "pykvcache.io/pool"


@pytest.fixture
def site(api_server, crds, namespace, tmp_path):
    """A place for this test's webhook; its namespace can take pods."""
    inside = api_server.kubectl.within(namespace)
    inside.wait_for("serviceaccount", "default", lambda found: True, "to be made")
    site = Site(tmp_path, kubectl=api_server.kubectl, namespace=namespace)
    site.issue()
    yield site
    site.clear()


@pytest.fixture
def stack():
    """Ends what a test started."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pool(kubectl, crds):
    """Name of a pool of this test."""
    name = f"p{uuid.uuid4().hex[:8]}"
    kubectl.apply(pool_document(name))
    yield name
    kubectl.delete("kvp", name, wait=False)


def pool_document(name, **storage):
    storage = storage or {"type": "NodeLocal", "capacityPerNode": "1Gi"}
    head = {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCachePool"}
    return {**head, "metadata": {"name": name}, "spec": {"storage": storage}}


def pod(title, pool, *, annotations=None, environment=(), **container):
    """Return a vLLM pod that is labelled for a pool; None: for none."""
    vllm = {"name": "vllm", "image": "vllm/vllm-openai", "command": ["vllm", "serve", "m"], "env": list(environment)}
    metadata = {"name": title, "labels": {LABEL: pool} if pool else {}, "annotations": annotations or {}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [{**vllm, **container}]}}


class Maker:
    """Makes pods with kubectl, and tells what kubectl tells."""

    def __init__(self, kubectl) -> None:
        self.kubectl = kubectl

    def create(self, document, *flags):
        """Return the pod as it was made, and kubectl's warnings.

        Raises:
            KubectlError: it was refused.
        """
        command = self.kubectl.command("create", "-o", "json", "-f", "-", *flags)
        done = subprocess.run(command, input=json.dumps(document), capture_output=True, text=True, check=False)
        if done.returncode:
            raise KubectlError(done.stderr)
        return json.loads(done.stdout), done.stderr

    def dry_run(self, document):
        return self.create(document, "--dry-run=server")[0]


@pytest.fixture
def maker(kubectl, namespace):
    return Maker(kubectl.within(namespace))


@pytest.fixture
def serve(site, stack, maker, pool):
    """Starts the webhook and waits until the API server sends it pods."""

    def serve(*, before="", **changes):
        webhook = site.start(before=before)
        stack.callback(webhook.kill)
        webhook.wait_until_ready()
        site.configure("m-ours", **changes)
        wait_until_sent(webhook, maker, pool)
        return webhook

    return serve


def wait_until_sent(webhook, maker, pool):
    """Wait until the API server knows the configuration."""

    def is_sent():
        before = webhook.count()
        maker.dry_run(pod("probe", pool))
        return webhook.count() > before

    wait_for("the API server to send pods", is_sent)


def annotation(document, key):
    return document["metadata"].get("annotations", {}).get(key, "")


def is_injected(document):
    """Say whether a pod has the cache: all of it, once."""
    spec = document["spec"]
    libraries = [c for c in spec.get("initContainers", []) if c["name"] == "pykvcache-library"]
    (vllm,) = [c for c in spec["containers"] if c["name"] == "vllm"]
    options = [argument for argument in vllm.get("args", []) if argument.startswith("--kv-transfer-config")]
    marks = (bool(annotation(document, INJECTED)), len(libraries), len(options))
    assert marks in {(True, 1, 1), (False, 0, 0)}, f"neither whole nor not at all: {marks}"
    return marks[0]


# ---- pods that get the cache, and those that do not ----


@pytest.mark.short
def test_a_labelled_pod_gets_the_cache(serve, maker, pool):
    webhook = serve()
    made, warnings = maker.create(pod("labelled", pool))
    assert is_injected(made)
    assert "Warning" not in warnings
    assert webhook.count("injected") >= 1


@pytest.mark.short
def test_a_pod_without_the_label_is_never_sent(serve, maker):
    webhook = serve()
    before = webhook.count()
    made, _ = maker.create(pod("unlabelled", None))
    assert not is_injected(made)
    assert webhook.count() == before


@pytest.mark.short
def test_one_that_cannot_have_it_says_why_on_the_pod_and_to_who_made_it(serve, maker):
    webhook = serve()
    made, warnings = maker.create(pod("labelled", "nobody-made-it"))
    assert not is_injected(made)
    assert annotation(made, SKIPPED).startswith("PoolNotFound: ")
    assert "Warning: py-kvcache: this pod goes without the cache: PoolNotFound: " in warnings
    assert webhook.count("skipped", "PoolNotFound") == 1


@pytest.mark.short
def test_one_that_asks_to_be_refused_is_refused_with_the_reason(serve, maker, pool):
    serve()
    config = ["--kv-transfer-config", '{"kv_connector":"Other","kv_role":"kv_both"}']
    document = pod("own", pool, annotations={"pykvcache.io/on-conflict": "Reject"}, args=config)
    with pytest.raises(KubectlError, match=r'"pods\.pykvcache\.io" denied the request'):
        maker.create(document)


def test_a_dry_run_shows_what_would_be_and_makes_nothing(serve, maker, pool):
    serve()
    assert is_injected(maker.dry_run(pod("dry", pool)))
    assert maker.kubectl.find("pod", "dry") is None


# A pod waits a second for news of its pool, which must not decide here: the machine may be busy.
PATIENT = """
import pykvcache_operator.webhook.server as server
server.UNKNOWN_SECONDS_MAX = 20.0
"""


@pytest.mark.short
def test_a_pool_and_a_pod_of_one_file_find_each_other(serve, maker, kubectl):
    serve(before=PATIENT)
    name = f"p{uuid.uuid4().hex[:8]}"
    documents = [pool_document(name), pod("at-once", name)]
    text = "\n---\n".join(map(json.dumps, documents))
    try:
        maker.kubectl.run("create", "-f", "-", text=text)
        assert is_injected(maker.kubectl.get("pod", "at-once"))
    finally:
        kubectl.delete("kvp", name, wait=False)


def test_pods_of_a_deployment_get_it_and_their_template_stays_as_it_is(serve, maker, pool):
    serve()
    template = pod("unused", pool)
    labels = {**template["metadata"]["labels"], "app": "vllm"}
    spec = {
        "replicas": 2,
        "selector": {"matchLabels": {"app": "vllm"}},
        "template": {"metadata": {"labels": labels}, "spec": template["spec"]},
    }
    head = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"}}
    made, _ = maker.create({**head, "spec": spec})

    def pods():
        found = maker.kubectl.list("pods", selector="app=vllm")
        return found if len(found) == 2 else None

    assert [True, True] == [is_injected(found) for found in wait_for("both pods", pods)]
    assert "initContainers" not in made["spec"]["template"]["spec"]


def test_a_pod_of_a_megabyte_is_made(serve, maker, pool):
    webhook = serve()
    environment = [{"name": f"N{number}", "value": "x" * 1000} for number in range(1000)]
    made, _ = maker.create(pod("huge", pool, environment=environment))
    (container,) = made["spec"]["containers"]
    assert {row["name"] for row in environment} <= {row["name"] for row in container["env"]}
    assert webhook.count("injected") >= 2


# ---- other webhooks around ours ----


def add_helper(pod):
    """Put a container before all others, as meshes do."""
    if all(container["name"] != "helper" for container in pod["spec"]["containers"]):
        pod["spec"]["containers"].insert(0, {"name": "helper", "image": "helper"})


def add_argument(pod):
    """Change vLLM's arguments."""
    for container in pod["spec"]["containers"]:
        if container["name"] == "vllm" and "--seed=1" not in container.get("args", []):
            container["args"] = [*container.get("args", []), "--seed=1"]


def add_vllm(pod):
    """Put vLLM itself in, as operators do that keep it out of what users write."""
    if all(container["name"] != "vllm" for container in pod["spec"]["containers"]):
        pod["spec"]["containers"].append({"name": "vllm", "image": "vllm", "command": ["vllm", "serve", "m"]})


@pytest.mark.parametrize("place", ["a-before", "z-after"])
@pytest.mark.parametrize("change", [add_helper, add_argument])
def test_other_webhooks_around_ours_leave_the_pod_injected_once(serve, site, stack, maker, pool, place, change):
    serve()
    other = site.other(change)
    stack.callback(other.stop)
    site.configure(place, port=other.port, matchConditions=[])
    wait_for("the other one to be called", lambda: maker.dry_run(pod("probe", pool)) and other.calls)
    made, _ = maker.create(pod("both", pool))
    assert is_injected(made)
    names = [container["name"] for container in made["spec"]["containers"]]
    assert names == (["helper", "vllm"] if change is add_helper else ["vllm"])
    assert change is add_helper or made["spec"]["containers"][0]["args"].count("--seed=1") == 1


def test_a_pod_that_becomes_one_of_vllm_after_us_is_looked_at_again(serve, site, stack, maker, pool):
    webhook = serve()
    document = pod("late", pool, name="main", annotations={"pykvcache.io/container": "vllm"})
    skipped = maker.dry_run(document)
    assert annotation(skipped, SKIPPED)
    other = site.other(add_vllm)
    stack.callback(other.stop)
    site.configure("z-after", port=other.port, matchConditions=[])
    wait_for("the other one to be called", lambda: maker.dry_run(pod("probe", pool)) and other.calls)
    before = webhook.count("injected"), webhook.count("skipped")
    made, warnings = maker.create(document)
    assert is_injected(made)
    assert SKIPPED not in made["metadata"]["annotations"]
    assert before == (webhook.count("injected") - 1, webhook.count("skipped") - 1)
    assert "goes without the cache" in warnings, "of the first look: nobody can take it back"


# ---- whatever is wrong with the webhook, pods start ----


@pytest.mark.short
def test_while_it_is_down_pods_start_without_the_cache(serve, maker, pool):
    webhook = serve()
    assert webhook.ask_to_end() == 0
    made, _ = maker.create(pod("down", pool))
    assert not is_injected(made)
    assert annotation(made, SKIPPED) == "", "nobody looked at it"


def test_while_it_is_frozen_pods_start_when_the_time_is_up(serve, maker, pool):
    webhook = serve(timeoutSeconds=2)
    webhook.pause()
    try:
        started = time.monotonic()
        made, _ = maker.create(pod("slow", pool))
        assert not is_injected(made)
        assert time.monotonic() - started >= 2
    finally:
        webhook.resume()
    wait_for("it to be back", lambda: is_injected(maker.dry_run(pod("back", pool))))


@pytest.mark.short
def test_with_an_expired_certificate_pods_start_and_it_says_so(site, stack, maker, pool):
    site.issue(life=dt.timedelta(hours=-1))
    webhook = site.start()
    stack.callback(webhook.kill)
    site.configure("m-ours")
    wait_for("its pages", lambda: "has expired" in webhook.get("/readyz")[1])
    for number in range(3):
        made, _ = maker.create(pod(f"expired{number}", pool))
        assert not is_injected(made)
    assert webhook.count() == 0
    site.issue()
    wait_for("the new certificate", lambda: webhook.get("/readyz")[0] == 200)
    wait_for("pods to be injected", lambda: is_injected(maker.dry_run(pod("valid", pool))))


BREAK = """
import pykvcache_operator.webhook.decide as decide
def inject(pod, **_known):
    raise KeyError("hf_secret")
decide.inject = inject
"""


@pytest.mark.short
def test_a_defect_of_ours_lets_the_pod_through_with_a_warning(serve, maker, pool):
    webhook = serve(before=BREAK)
    made, warnings = maker.create(pod("defect", pool))
    assert not is_injected(made)
    assert "Warning: py-kvcache could not look at this pod: KeyError. It goes without the cache." in warnings
    assert webhook.count("error", "Error") >= 1
    assert "hf_secret" not in webhook.log.read_text()


def test_a_restarted_api_server_changes_nothing(serve, maker, pool, api_server):
    webhook = serve()
    api_server.restart_apiserver()
    assert webhook.get("/readyz")[0] == 200
    wait_for("pods to be injected", lambda: is_injected(maker.dry_run(pod("again", pool))))
    name = f"p{uuid.uuid4().hex[:8]}"
    maker.kubectl.apply(pool_document(name))
    wait_for("new pools to be known", lambda: is_injected(maker.dry_run(pod("new", name))))
    maker.kubectl.delete("kvp", name, wait=False)


def test_a_pool_that_is_changed_or_goes_is_noticed(serve, maker, pool, kubectl):
    serve()
    assert is_injected(maker.dry_run(pod("before", pool)))
    kubectl.patch("kvp", pool, {"spec": {"allowedNamespaces": {"names": ["elsewhere"]}}})

    def reason():
        found = annotation(maker.dry_run(pod("after", pool)), SKIPPED).partition(":")[0]
        if not found:
            raise NotYetError("still injected")
        return found

    assert wait_for("the change", reason) == "NamespaceNotAllowed"
    kubectl.delete("kvp", pool)
    wait_for("its end", lambda: reason() == "PoolNotFound")
