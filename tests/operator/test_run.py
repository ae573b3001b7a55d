"""The process as a whole: when it says that a restart may help."""

import asyncio
from types import SimpleNamespace

import pytest

from pykvcache_operator import run as module
from pykvcache_operator.run import Operator
from pykvcache_operator.settings import make_settings


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time=clock))
    return clock


SETTINGS = make_settings(
    namespace="ns",
    lease_name="operator",
    calibration_image="",
    calibration_pull_secrets=(),
    calibration_priority_class="",
    allowed_host_paths=(),
    listen="127.0.0.1:0",
    watch_seconds=10.0,
    resync_seconds=300.0,
    workers=1,
)


def test_a_standby_that_becomes_active_after_long_is_healthy(with_api, clock):
    async def test(api):
        operator = Operator(api, SETTINGS)
        clock.now += 100_000
        assert await operator._becomes_active()
        assert operator.health_problem() == ""
        clock.now += SETTINGS.stale_seconds + 1
        assert "told nothing about kvcachepools" in operator.health_problem()

    with_api(test)


def test_while_the_definitions_are_missing_it_waits_and_is_healthy(fake_server, with_api, clock, monkeypatch):
    monkeypatch.setattr(module, "API_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(module.paths, "POOLS", "/things")

    async def test(api):
        operator = Operator(api, SETTINGS)
        assert await operator._becomes_active()
        clock.now += 100_000
        fake_server.refusals = [404] * 1000
        task = asyncio.ensure_future(operator._list_pools_patiently())
        while operator.health_problem():
            fake_server.changed.clear()
            await fake_server.changed.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with_api(test)
