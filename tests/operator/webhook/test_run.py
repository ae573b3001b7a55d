"""The process as a whole: when it is ready, and how it ends."""

import asyncio
import logging
import os
import re
import signal

import aiohttp
import pytest

from pykvcache_contract.errors import ConfigurationError, TransientError
from pykvcache_operator.webhook import run as module
from pykvcache_operator.webhook.options import make_options
from pykvcache_operator.webhook.run import Webhook


def options(secret, **changes):
    given = {
        "certificate_directory": str(secret.folder),
        "listen": "127.0.0.1:0",
        "metrics_listen": "127.0.0.1:0",
        "connector_image": "connector",
        "sidecar_image": "sidecar",
        "pull_policy": "IfNotPresent",
        "pull_secrets": (),
        "library_resources": "",
        "sidecar_resources": "",
        "watch_seconds": 60.0,
        "grace_seconds": 0.0,
        **changes,
    }
    return make_options(**given)


class Running:
    """One webhook in this process, and a client of its pages and reviews."""

    def __init__(self, api, options_, secret, caplog) -> None:
        self.api, self._secret, self._caplog = api, secret, caplog
        self.task = asyncio.ensure_future(Webhook(api, options_).run())

    async def port(self, of):
        """Return the port of "metrics" or "reviews" when it is open."""
        while not (found := re.search(rf"{of} on port (\d+)", self._caplog.text)):
            await asyncio.wait({self.task}, timeout=0.01)
            assert not self.task.done()
        return int(found[1])

    async def get(self, path):
        url = f"http://127.0.0.1:{await self.port('metrics')}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return answer.status, await answer.text()

    async def becomes(self, status):
        """Wait until /readyz answers so."""
        while (found := await self.get("/readyz"))[0] != status:
            await asyncio.wait({self.task}, timeout=0.01)
        return found[1]

    async def says(self, text):
        """Wait until /readyz says so; return status and all that it says."""
        while text not in (found := await self.get("/readyz"))[1]:
            await asyncio.wait({self.task}, timeout=0.01)
        return found

    async def review(self):
        """Return the answer to a review of a pod without a label."""
        request = {"uid": "u", "object": {}}
        document = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        connector = aiohttp.TCPConnector(ssl=self._secret.client())
        url = f"https://127.0.0.1:{await self.port('reviews')}/mutate"
        async with aiohttp.ClientSession(connector=connector) as session, session.post(url, json=document) as answer:
            return (await answer.json())["response"], answer.headers.get("Connection")


@pytest.fixture
def running(with_api, fake_server, secret, caplog, monkeypatch):
    """Runs `test(running)` beside a webhook; the server's objects are its pools and namespaces."""
    monkeypatch.setattr("pykvcache_operator.informer.PAUSE_SECONDS_MIN", 0.001)
    monkeypatch.setattr("pykvcache_operator.informer.PAUSE_SECONDS_MAX", 0.002)
    monkeypatch.setattr("pykvcache_operator.webhook.certificate_files.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("pykvcache_operator.paths.POOLS", "/things")
    monkeypatch.setattr("pykvcache_operator.paths.NAMESPACES", "/things")

    def run(test, **changes):
        async def inside(api):
            with caplog.at_level(logging.INFO):
                it = Running(api, options(secret, **changes), secret, caplog)
                try:
                    await test(it)
                finally:
                    it.task.cancel()
                    await asyncio.gather(it.task, return_exceptions=True)

        with_api(inside)

    return run


def ask_to_end():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_it_is_ready_once_it_has_a_certificate_and_has_read_the_cluster(running, fake_server, secret):
    fake_server.refusals = [503] * 100_000

    async def test(it):
        status, text = await it.says("waiting for")  # once it has looked for the certificate
        assert status == 503
        assert "reading pools and namespaces" in text
        assert (await it.get("/healthz"))[0] == 200, "a restart would not help"
        secret.issue()
        fake_server.refusals = []
        await it.becomes(200)
        fake_server.refusals = [503] * 100_000
        assert (await it.review())[0] == {"uid": "u", "allowed": True}
        assert (await it.get("/readyz"))[0] == 200, "the API server that is away changes nothing"

    running(test)


@pytest.mark.slow
def test_asked_to_end_it_says_so_and_goes_on_answering_for_a_while(running, secret):
    secret.issue()

    async def test(it):
        await it.becomes(200)
        ask_to_end()
        assert "ending" in await it.becomes(503)
        assert await it.review() == ({"uid": "u", "allowed": True}, "close")
        assert not it.task.done()

    running(test, grace_seconds=600.0)


def test_after_that_while_it_ends_well(running, secret):
    secret.issue()

    async def test(it):
        await it.becomes(200)
        ask_to_end()
        await it.task

    running(test)


def test_a_part_that_ends_ends_the_process_so_that_it_is_started_again(running, secret, monkeypatch):
    async def keep(_self):
        raise RuntimeError("a defect")

    monkeypatch.setattr(module.CertificateFiles, "keep", keep)

    async def test(it):
        with pytest.raises(TransientError) as raised:
            await it.task
        assert "certificate ended: RuntimeError('a defect')" in str(raised.value)

    running(test)


def test_an_address_in_use_is_told_with_its_option(running, secret):
    async def test(it):
        taken = await it.port("metrics")
        second = Webhook(it.api, options(secret, listen=f"127.0.0.1:{taken}"))
        with pytest.raises(ConfigurationError) as raised:
            await second.run()
        assert f"--listen 127.0.0.1:{taken}: " in str(raised.value)

    running(test)
