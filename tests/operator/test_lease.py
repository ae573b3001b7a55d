"""One holder at a time; a lost lease ends the process, a lapsed one is taken over."""

import asyncio

import pytest

from pykvcache_operator import lease as module
from pykvcache_operator.client import ApiError
from pykvcache_operator.lease import Lease, LeaseLostError


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.005)


def lease(api, identity, clock):
    return Lease(api, namespace="ns", name="operator", identity=identity, clock=clock)


def test_the_first_gets_it_and_another_waits_until_it_lapses(fake_server, with_api):
    async def test(api):
        clock = Clock()
        first, second = lease(api, "one", clock), lease(api, "two", clock)
        await first.acquire()
        assert fake_server.objects["operator"]["spec"]["holderIdentity"] == "one"
        waiting = asyncio.ensure_future(second.acquire())
        for _ in range(10):
            clock.now += 1  # renewed each second
            await asyncio.sleep(0.005)
            fake_server.put("operator", holderIdentity="one", renewTime=str(clock.now), leaseTransitions=0)
        assert not waiting.done()
        while not waiting.done():
            clock.now += 8
            await asyncio.sleep(0.01)
        spec = fake_server.objects["operator"]["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("two", 1)

    with_api(test)


def test_a_released_lease_is_taken_at_once(fake_server, with_api):
    async def test(api):
        clock = Clock()
        first, second = lease(api, "one", clock), lease(api, "two", clock)
        await first.acquire()
        await first.release()
        await second.acquire()
        assert second.is_held
        assert not first.is_held

    with_api(test)


def test_a_holder_that_finds_another_name_in_it_gives_up(fake_server, with_api):
    async def test(api):
        mine = lease(api, "one", Clock())
        await mine.acquire()
        fake_server.put("operator", holderIdentity="two", renewTime="later")
        with pytest.raises(LeaseLostError, match="held by two"):
            await mine.keep()
        assert not mine.is_held
        await mine.release()
        assert fake_server.objects["operator"]["spec"]["holderIdentity"] == "two"

    with_api(test)


def test_a_holder_whose_lease_somebody_else_edited_stays_the_holder(fake_server, with_api, monkeypatch):
    async def test(api):
        mine = lease(api, "one", Clock())
        await mine.acquire()
        replace, refused, renewed = api.replace, [], asyncio.Event()

        async def edited_meanwhile(path, body):
            if not refused:
                refused.append(path)
                raise ApiError("409", status=409)
            renewed.set()
            return await replace(path, body)

        monkeypatch.setattr(api, "replace", edited_meanwhile)
        keeping = asyncio.ensure_future(mine.keep())
        await asyncio.wait([keeping, asyncio.ensure_future(renewed.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert refused
        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    with_api(test)


def test_a_holder_that_cannot_renew_gives_up_in_time(fake_server, with_api, monkeypatch):
    async def test(api):
        clock = Clock()
        mine = lease(api, "one", clock)
        await mine.acquire()
        keeping = asyncio.ensure_future(mine.keep())
        await asyncio.sleep(0.02)
        assert not keeping.done()
        await fake_server.stop()
        get = api.get

        async def get_within_a_second(path):
            clock.now += 1
            return await get(path)

        monkeypatch.setattr(api, "get", get_within_a_second)
        await asyncio.wait([keeping])
        with pytest.raises(LeaseLostError, match="could not be renewed"):
            keeping.result()
        assert clock.now < 100 + module.DURATION_SECONDS + 5

    with_api(test)


def test_of_two_that_write_at_once_one_gets_it(fake_server, with_api):
    async def test(api):
        clock = Clock()
        leases = [lease(api, name, clock) for name in ("one", "two", "three")]
        tasks = [asyncio.ensure_future(each.acquire()) for each in leases]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(5):
            await asyncio.sleep(0.005)
        assert sum(each.is_held for each in leases) == 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with_api(test)
