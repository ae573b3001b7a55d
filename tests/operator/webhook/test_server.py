"""The server over real TLS: what it answers, what it refuses, and how it ends."""

import asyncio
import base64
import io
import json
import time

import aiohttp
import pytest

from pykvcache_contract.injection import SkipReason
from pykvcache_contract.metrics import WEBHOOK_METRICS
from pykvcache_operator import server as opening
from pykvcache_operator.injection.outcome import InjectionSettings, Outcome, Result
from pykvcache_operator.webhook import server as module
from pykvcache_operator.webhook.certificate_files import CertificateFiles
from pykvcache_operator.webhook.decide import decider
from pykvcache_operator.webhook.exporter import Metrics
from pykvcache_operator.webhook.known import Known
from pykvcache_operator.webhook.server import Reviews

SETTINGS = InjectionSettings(version="9", connector_image="connector:9", sidecar_image="sidecar:9")


def pod(name="p", **metadata):
    labels = {"pykvcache.io/pool": name}
    containers = [{"name": "vllm", "image": "vllm/vllm-openai", "command": ["vllm", "serve", "m"]}]
    return {"metadata": {"generateName": "a-", "labels": labels, **metadata}, "spec": {"containers": containers}}


def review(document, **changes):
    kind = {"group": "", "version": "v1", "kind": "Pod"}
    request = {"uid": "u", "kind": kind, "operation": "CREATE", "namespace": "team", "object": document, **changes}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


class Served:
    """A server, its metrics, what it knows, and a client."""

    def __init__(self, api, secret, inject) -> None:
        self.known = Known(api, watch_seconds=60, silence_seconds=5, clock=time.monotonic)
        self.metrics = Metrics()
        self.certificate = CertificateFiles(secret.folder, clock=time.time, counted=self.metrics.count_certificate)
        self.certificate.look()
        self.metrics.watch(known=self.known, certificate=self.certificate)
        self.reviews = Reviews(self.known, inject or decider(self.known, SETTINGS), count=self.metrics.count)
        self._secret, self._version = secret, 0

    async def __aenter__(self):
        self._runner = self.reviews.runner()
        tls = self.certificate.listener
        self.port = await opening.listen(self._runner, host="127.0.0.1", port=0, option="--listen", tls=tls)
        connector = aiohttp.TCPConnector(ssl=self._secret.client())
        self.session = aiohttp.ClientSession(f"https://127.0.0.1:{self.port}", connector=connector)
        return self

    async def __aexit__(self, *_error):
        await self.session.close()
        await self._runner.cleanup()

    def put(self, kind, name, **more):
        """Do as if a watch told of an object."""
        self._version += 1
        metadata = {"name": name, "uid": f"u-{name}", "resourceVersion": str(self._version)}
        (informer,) = (informer for informer in self.known.informers if informer.name == kind)
        informer.store.put({"metadata": metadata, **more})

    def read_all(self):
        """Do as if the API server had told all there is: a namespace."""
        for informer in self.known.informers:
            informer.synced.set()
        self.put("namespaces", "team")

    def add_pool(self, name="p", **storage):
        self.put("kvcachepools", name, spec={"storage": {"type": "NodeLocal", "capacityPerNode": "1Gi", **storage}})

    async def send(self, document, **changes):
        """Return the response to a review."""
        async with self.session.post("/mutate", json=review(document, **changes)) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "application/json"
            return (await answer.json())["response"]

    async def post(self, **request):
        """Return status and text of any other request."""
        async with self.session.post("/mutate", **request) as answer:
            return answer.status, await answer.text()

    def count(self, result, reason=""):
        labels = {"result": result, "reason": reason}
        return self.metrics.registry.get_sample_value("pykvcache_webhook_requests_total", labels)


@pytest.fixture
def serving(with_api, secret):
    """Runs `test(served)`; `inject` stands for injection."""

    def run(test, *, inject=None):
        secret.issue()

        async def inside(api):
            async with Served(api, secret, inject) as served:
                await test(served)

        with_api(inside)

    return run


def patched(response):
    return {step["path"]: step["value"] for step in json.loads(base64.b64decode(response["patch"]))}


def test_a_labelled_pod_is_injected(serving):
    async def test(it):
        it.read_all()
        it.add_pool()
        response = await it.send(pod())
        assert response["allowed"] is True
        assert patched(response)["/metadata/annotations"]["pykvcache.io/injected"] == "9"
        assert "connector:9" in json.dumps(patched(response)["/spec/initContainers"])
        assert it.count("injected") == 1

    serving(test)


def test_a_pool_made_a_moment_before_the_pod_is_waited_for(serving, monkeypatch):
    monkeypatch.setattr(module, "UNKNOWN_SECONDS_MAX", 60.0)

    async def test(it):
        it.read_all()
        began, wait_for = asyncio.Event(), it.known.wait_for

        async def told(**what):
            began.set()
            await wait_for(**what)

        monkeypatch.setattr(it.known, "wait_for", told)
        sending = asyncio.ensure_future(it.send(pod()))
        await began.wait()
        it.add_pool()
        assert "patch" in await sending
        assert it.count("injected") == 1

    serving(test)


def test_a_pool_that_nobody_made_is_told_after_a_short_wait(serving, monkeypatch):
    monkeypatch.setattr(module, "UNKNOWN_SECONDS_MAX", 0.01)

    async def test(it):
        it.read_all()
        response = await it.send(pod("absent"))
        assert response["allowed"] is True
        (warning,) = response["warnings"]
        assert "PoolNotFound" in warning
        assert patched(response)["/metadata/annotations"]["pykvcache.io/skipped"].startswith("PoolNotFound: ")
        assert it.count("skipped", "PoolNotFound") == 1

    serving(test)


def test_before_all_was_read_pods_are_admitted_and_told_so(serving, monkeypatch):
    monkeypatch.setattr(module, "UNKNOWN_SECONDS_MAX", 0.01)

    async def test(it):
        it.add_pool()  # namespaces are missing: nobody knows whether the pool admits them
        response = await it.send(pod())
        assert "no answer yet" in patched(response)["/metadata/annotations"]["pykvcache.io/skipped"]
        assert it.count("skipped", SkipReason.WEBHOOK_STARTING.word) == 1

    serving(test)


def test_a_namespace_that_nobody_told_of_gets_no_pool(serving, monkeypatch):
    """It might be one that the pool does not admit."""
    monkeypatch.setattr(module, "UNKNOWN_SECONDS_MAX", 0.01)

    async def test(it):
        it.read_all()
        it.add_pool()
        response = await it.send(pod(), namespace="just-made")
        assert "namespace just-made" in response["warnings"][0]
        assert it.count("skipped", SkipReason.WEBHOOK_STARTING.word) == 1

    serving(test)


def test_a_pool_of_another_version_is_not_called_missing(serving):
    async def test(it):
        it.read_all()
        it.add_pool(type="Quantum")
        response = await it.send(pod())
        assert "spec.storage.type" in response["warnings"][0]
        assert it.count("skipped", SkipReason.POOL_UNREADABLE.word) == 1

    serving(test)


def test_what_is_injected_already_is_let_through_at_once_even_before_all_was_read(serving):
    async def test(it):
        response = await it.send(pod(annotations={"pykvcache.io/injected": "1"}))
        assert response == {"uid": "u", "allowed": True}
        assert it.count("unchanged") == 1

    serving(test)


@pytest.mark.slow
def test_a_pod_of_a_megabyte_is_answered(serving):
    async def test(it):
        it.read_all()
        it.add_pool()
        environment = [{"name": f"N{number}", "value": "x" * 1000} for number in range(1000)]
        document = pod()
        document["spec"]["containers"][0]["env"] = environment
        response = await it.send(document)
        (container,) = patched(response)["/spec/containers"]
        assert container["env"][-1000:] == environment or container["env"][:1000] == environment

    serving(test)


@pytest.mark.parametrize(
    ("request_", "status", "said"),
    [
        ({"data": b"{", "headers": {"Content-Type": "application/json"}}, 400, "no JSON"),
        ({"json": {"kind": "Pod"}}, 400, "no AdmissionReview"),
        ({"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "send application/json"),
        ({"data": io.BytesIO(b" " * (8 * 2**20 + 1)), "headers": {"Content-Type": "application/json"}}, 413, ""),
    ],
)
def test_what_is_no_review_is_refused_with_the_reason(serving, request_, status, said):
    async def test(it):
        found, text = await it.post(**request_)
        assert (found, said in text) == (status, True)
        assert it.count("malformed") == 1

    serving(test)


def test_a_body_that_does_not_come_is_not_waited_for_long(serving, monkeypatch):
    monkeypatch.setattr(module, "BODY_SECONDS_MAX", 0.01)
    monkeypatch.setattr(module, "END_SECONDS_MAX", 0.1)

    async def test(it):
        async def never():
            yield b"{"
            await asyncio.Event().wait()

        status, _ = await it.post(data=never(), headers={"Content-Type": "application/json"})
        assert status == 408

    serving(test)


def test_large_bodies_wait_their_turn_and_small_ones_do_not(serving, monkeypatch):
    monkeypatch.setattr(module, "LARGE_AT_ONCE_MAX", 1)
    monkeypatch.setattr(module, "LARGE_BYTES_MIN", 10_000)
    monkeypatch.setattr(module, "TURN_SECONDS_MAX", 60.0)
    monkeypatch.setattr(module, "BODY_SECONDS_MAX", 60.0)
    large = pod(annotations={"pykvcache.io/injected": "1", "a": "x" * 10_000})

    async def test(it):
        began, end = asyncio.Event(), asyncio.Event()

        async def slow():
            yield b"{"
            began.set()
            await end.wait()
            yield b"}"

        first = asyncio.ensure_future(it.post(data=slow(), headers={"Content-Type": "application/json"}))
        await began.wait()
        while not it.reviews._large.locked():
            await it.send(pod(annotations={"pykvcache.io/injected": "1"}))
        second = asyncio.ensure_future(it.send(large))
        for _ in range(5):
            await it.send(pod(annotations={"pykvcache.io/injected": "1"}))
        assert not second.done()
        end.set()
        assert (await first)[0] == 400
        assert (await second)["allowed"] is True

    serving(test)


def test_a_large_body_whose_turn_does_not_come_is_told_so(serving, monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES_MIN", 10)
    monkeypatch.setattr(module, "LARGE_AT_ONCE_MAX", 0)
    monkeypatch.setattr(module, "TURN_SECONDS_MAX", 0.01)

    async def test(it):
        assert await it.post(json=review(pod())) == (503, "too many large reviews at once\n")

    serving(test)


def test_a_defect_of_ours_is_counted_and_admits_the_pod(serving):
    def explode(_pod, _namespace):
        raise KeyError("x")

    async def test(it):
        it.read_all()
        it.add_pool()
        response = await it.send(pod())
        assert (response["allowed"], "KeyError" in response["warnings"][0]) == (True, True)
        assert it.count("error", "Error") == 1

    serving(test, inject=explode)


def test_one_that_ends_closes_connections_after_their_answer(serving):
    async def test(it):
        await it.send(pod(annotations={"pykvcache.io/injected": "1"}))
        async with it.session.post("/mutate", json=review({})) as answer:
            assert "Connection" not in answer.headers
        it.reviews.is_ending = True
        async with it.session.post("/mutate", json=review({})) as answer:
            assert answer.headers["Connection"] == "close"

    serving(test)


def test_every_declared_metric_is_served_and_no_other(serving):
    async def test(it):
        served = {family.name for family in it.metrics.registry.collect()}
        assert {metric.name.removesuffix("_total") for metric in WEBHOOK_METRICS} == served
        value = it.metrics.registry.get_sample_value
        assert value("pykvcache_webhook_certificate_expiry_timestamp_seconds") == it.certificate.expiry_seconds
        assert value("pykvcache_webhook_certificate_reloads_total", {"result": "success"}) == 1

    serving(test)


@pytest.mark.slow
def test_many_reviews_at_once_are_all_answered(serving):
    def inject(document, _namespace):
        return Outcome(Result.UNCHANGED, document)

    async def test(it):
        it.read_all()
        it.add_pool()
        responses = await asyncio.gather(*(it.send(pod(), uid=str(number)) for number in range(100)))
        assert [response["uid"] for response in responses] == [str(number) for number in range(100)]

    serving(test, inject=inject)
