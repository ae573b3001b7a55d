"""The operator tells which labelled pods go without the cache, against a real API server.

No webhook is there: what it would write onto pods, tests write, and pods without it are those it missed. They stay
Pending, as nobody runs them.
"""

import json
import re
import time
import uuid
from contextlib import ExitStack

import pytest

from harness.kubectl import KubectlError
from harness.operators import Operators, condition
from harness.waiting import NotYetError, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
INJECTED = {"pykvcache.io/injected": "0.2.0"}
AT_ONCE = 31  # Events; then one a second
QUIET_S = 30  # between writes of a status that nobody waits for


@pytest.fixture
def operators(api_server, crds, namespace, tmp_path):
    with ExitStack() as stack:
        yield Operators(tmp_path, kubeconfig=api_server.kubeconfig, namespace=namespace, stack=stack)


class Team:
    """A pool, and the labelled pods of a namespace."""

    def __init__(self, kubectl, namespace) -> None:
        self._cluster, self._namespace, self.pool = kubectl, namespace, f"p-{uuid.uuid4().hex[:6]}"
        self.kubectl = kubectl.within(namespace)
        self.kubectl.wait_for("serviceaccount", "default", bool, "to exist")
        storage = {"type": "Ephemeral", "capacity": "1Gi"}
        head = {"apiVersion": "pykvcache.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": self.pool}}
        kubectl.apply({**head, "spec": {"storage": storage}})

    def add(self, *names, pool=None, annotations=None, volumes=("pykvcache-pool",), labels=None) -> None:
        """Make pods as they are after the webhook, which left these annotations."""
        labels = {"pykvcache.io/pool": pool or self.pool} if labels is None else labels
        spec = {
            "containers": [{"name": "vllm", "image": "none.invalid/vllm"}],
            "volumes": [{"name": volume, "emptyDir": {}} for volume in volumes],
        }
        metadata = {"labels": labels, "annotations": annotations or {}}
        self.kubectl.apply(
            *(
                {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "name": name}, "spec": spec}
                for name in names
            )
        )

    def remove(self, *names) -> None:
        self.kubectl.run("delete", "pod", *names, "--force", "--grace-period=0")

    def wait_for(self, status, reason, *, limit_s=180):
        """Wait until the pool's condition InjectionHealthy is so, and return the pool's status."""
        what = f"to have InjectionHealthy={status} {reason}"
        wanted = (status, reason)
        found = self._cluster.wait_for(
            "kvcachepool", self.pool, lambda pool: condition(pool, "InjectionHealthy") == wanted, what, limit_s=limit_s
        )
        return found["status"]

    def wait_for_numbers(self, injected, skipped, missed, *, limit_s=180):
        def has(pool):
            status = pool.get("status", {})
            names = ("injectedPods", "skippedPods", "missedPods")
            return [status.get(name) for name in names] == [injected, skipped, missed]

        what = f"to have {injected}, {skipped} and {missed} pods"
        return self._cluster.wait_for("kvcachepool", self.pool, has, what, limit_s=limit_s)["status"]

    def message(self):
        conditions = self._cluster.get("kvcachepool", self.pool)["status"]["conditions"]
        return next(c["message"] for c in conditions if c["type"] == "InjectionHealthy")

    def events(self, name=""):
        """Return (reason, note) of the Events on a pod, or on all."""
        found = json.loads(self.kubectl.run("get", "events.v1.events.k8s.io", "-o", "json"))["items"]
        about = [event for event in found if event["regarding"]["kind"] == "Pod"]
        ours = [event for event in about if event["reportingController"] == "pykvcache.io/operator"]
        return [(e["reason"], e["note"]) for e in ours if name in ("", e["regarding"]["name"])]

    def wait_for_event(self, name):
        def found():
            if not (events := self.events(name)):
                raise NotYetError("none")
            return events

        return wait_for(f"an event on {name}", found, limit_s=180)

    def clear(self) -> None:
        self._cluster.delete("kvcachepool", self.pool, wait=False)
        try:
            self._cluster.patch("kvcachepool", self.pool, {"metadata": {"finalizers": None}})
        except KubectlError:
            pass  # it is gone by now


@pytest.fixture
def team(crds, kubectl, namespace):
    team = Team(kubectl, namespace)
    yield team
    team.clear()


def test_every_pod_is_accounted_for_and_told_why_it_goes_without(operators, team):
    operator = operators.start(follow_pods=True).wait_until_active()
    team.wait_for("True", "NoPods")
    team.add("a", "b", annotations=INJECTED)
    team.wait_for("True", "AllInjected")
    team.add("skipped", annotations={"pykvcache.io/skipped": "NamespaceNotAllowed: ask whoever runs the pool"})
    team.add("hostile", annotations={"pykvcache.io/skipped": "\x1b[31m" + "x" * 5000})
    team.add("warned", annotations={**INJECTED, "pykvcache.io/warnings": "staging takes half of its memory"})
    team.wait_for("True", "SomeSkipped")
    assert "skipped (NamespaceNotAllowed)" in team.message()
    team.add("missed")
    team.add("copied", annotations=INJECTED, volumes=())
    team.wait_for("False", "MissedPods")
    status = team.wait_for_numbers(3, 2, 2)
    assert status["pods"] == "3/7"
    assert team.wait_for_event("missed")[0][0] == "CacheNotInjected"
    assert "Remove the annotation" in team.wait_for_event("copied")[0][1]
    skipped = ("CacheSkipped", "NamespaceNotAllowed: ask whoever runs the pool")
    assert team.wait_for_event("skipped") == [skipped]
    assert team.wait_for_event("hostile")[0][1].startswith("Error: ?[31mxxx")
    assert team.wait_for_event("warned") == [("CacheWarnings", "staging takes half of its memory")]
    assert team.events("a") == []
    assert operator.metric(f'pykvcache_operator_injected_pods{{pool="{team.pool}"}}') == 3
    assert operator.metric(f'pykvcache_operator_missed_pods{{pool="{team.pool}"}}') == 2
    assert operator.metric('pykvcache_operator_skipped_pods{reason="NamespaceNotAllowed"}') == 1
    team.remove("missed", "copied", "skipped", "hostile")
    assert team.wait_for("True", "AllInjected")["pods"] == "3/3"


def test_a_label_that_comes_later_or_names_no_pool_is_a_missed_pod(operators, team):
    operator = operators.start(follow_pods=True).wait_until_active()
    team.add("late", labels={"app": "vllm"})
    team.add("typo", pool="nonsense")
    team.wait_for("True", "NoPods")
    team.wait_for_event("typo")
    assert operator.metric(re.escape('pykvcache_operator_missed_pods{pool="(unknown)"}')) >= 1
    team.kubectl.run("label", "pod", "late", f"pykvcache.io/pool={team.pool}")
    team.wait_for("False", "MissedPods")
    assert "Delete the pod" in team.wait_for_event("late")[0][1]
    team.kubectl.run("label", "pod", "late", "pykvcache.io/pool-")
    team.wait_for("True", "NoPods")


def test_pods_that_have_ended_do_not_count(operators, team):
    operators.start(follow_pods=True).wait_until_active()
    team.add("job", "runs")
    team.wait_for_numbers(0, 0, 2)
    team.kubectl.patch("pod", "job", {"status": {"phase": "Succeeded"}}, subresource="status")
    team.wait_for_numbers(0, 0, 1)


def test_a_restarted_operator_tells_nothing_twice(operators, team):
    first = operators.start(follow_pods=True).wait_until_active()
    team.add("missed")
    team.wait_for_event("missed")
    first.ask_to_end()
    assert first.wait_for_end() == 0
    second = operators.start(follow_pods=True).wait_until_active()

    def knows():
        return second.metric('pykvcache_operator_pod_events_total{result="known"}') >= 1

    wait_for("the event to be known", knows, limit_s=180)
    assert len(team.events("missed")) == 1
    team.wait_for("False", "MissedPods")


def test_an_operator_that_may_not_list_pods_says_so_and_does_the_rest(operators, team, kubectl, namespace, tmp_path):
    rules = [
        {"apiGroups": ["pykvcache.io"], "resources": ["*"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["nodes", "namespaces"], "verbs": ["*"]},
        {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["create"]},
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["*"]},
    ]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": namespace}}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": namespace}
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    kubectl.apply(
        {**role, "rules": rules}, {**role, "kind": "ClusterRoleBinding", "roleRef": reference, "subjects": [subject]}
    )
    config = json.loads(kubectl.kubeconfig.read_text())
    token = team.kubectl.run("create", "token", "default").strip()
    config["users"] = [{"name": user["name"], "user": {"token": token}} for user in config["users"]]
    (limited := tmp_path / "limited.conf").write_text(json.dumps(config))
    try:
        operators.start(kubeconfig=limited, follow_pods=True).wait_until_active()
        team.wait_for("Unknown", "PodsUnreadable")
        assert condition(kubectl.get("kvcachepool", team.pool), "Ready") == ("True", "Ready")
        team.add("missed")
        listing = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
        kubectl.apply({**role, "rules": [*rules, listing]})
        team.wait_for("False", "MissedPods", limit_s=180)
        team.wait_for_event("missed")
    finally:
        kubectl.delete("clusterrole", namespace)
        kubectl.delete("clusterrolebinding", namespace)


def test_a_roll_out_without_a_webhook_floods_nobody(operators, team):
    """All pods are counted, Events are rationed, and the status is written a few times."""
    count = 150
    operator = operators.start(follow_pods=True).wait_until_active()
    team.wait_for("True", "NoPods")
    before, started = operator.metric('pykvcache_operator_api_requests_total{verb="apply"}'), time.monotonic()
    team.add(*(f"vllm-{number}" for number in range(count)))
    team.wait_for_numbers(0, 0, count, limit_s=240)
    message = team.message()
    assert message.startswith(f"{count} of {count} labelled pods went past the webhook")
    assert f"and {count - 5} more" in message
    posted = operator.metric('pykvcache_operator_pod_events_total{result="posted"}')
    writes = operator.metric('pykvcache_operator_api_requests_total{verb="apply"}') - before
    took_s = time.monotonic() - started
    assert 0 < posted <= AT_ONCE + took_s
    assert writes <= 3 + 2 * took_s / QUIET_S


@pytest.mark.short
def test_the_figures_name_pools_and_reasons_only(operators, team):
    """Whatever people write on pods must not make series."""
    operator = operators.start(follow_pods=True).wait_until_active()
    team.add("stranger", pool="from-somebody", annotations={"pykvcache.io/skipped": "Unheard-of: x"})
    team.wait_for_event("stranger")
    text = operator.get("/metrics")[1]
    labels = set(re.findall(r'pykvcache_operator_(?:injected|missed|skipped)_pods\{\w+="([^"]*)"\}', text))
    assert {"(unknown)", team.pool, "Error"} <= labels
    assert labels.isdisjoint({"stranger", "from-somebody", "Unheard-of"})
