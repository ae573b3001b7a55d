"""Names are done once per burst, never twice at once, and again after failures."""

import asyncio
import itertools

import pytest

from pykvcache_contract.errors import TransientError
from pykvcache_operator import work as module
from pykvcache_operator.work import Work


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "DEBOUNCE_SECONDS", 0.0)
    monkeypatch.setattr(module, "BACKOFF_SECONDS_MIN", 0.001)


def run(test, handle, *, workers=4):
    async def main():
        work = Work(handle, workers=workers)
        task = asyncio.ensure_future(work.run())
        try:
            await asyncio.wait_for(test(work), 60)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_a_burst_is_one_round():
    done, finished = [], asyncio.Event()

    async def handle(name):
        done.append(name)
        if name == "last":
            finished.set()

    async def test(work):
        for _ in range(100):
            work.add("a", 0)
        work.add("last", 0.02)
        await finished.wait()
        assert done == ["a", "last"]

    run(test, handle)


def test_an_earlier_time_wins_over_a_later_one():
    finished = asyncio.Event()

    async def handle(_name):
        finished.set()

    async def test(work):
        work.add("a", 1000)
        work.add("a", 0)
        work.add("a", 1000)
        await finished.wait()

    run(test, handle)


def test_news_during_a_round_makes_another_one_afterwards():
    started, release, again = asyncio.Event(), asyncio.Event(), asyncio.Event()
    log = []

    async def handle(_name):
        log.append("start")
        (again if started.is_set() else started).set()
        await release.wait()
        log.append("end")

    async def test(work):
        work.add("a", 0)
        await started.wait()
        work.add("a", 0)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert log == ["start"]
        assert work.waiting == 1
        release.set()
        await again.wait()
        assert log[:3] == ["start", "end", "start"]

    run(test, handle)


@pytest.mark.parametrize("error", [TransientError("later"), ValueError("a mistake")])
def test_a_failure_comes_back_and_does_not_stop_others(error, caplog):
    rounds, finished = [], asyncio.Event()

    async def handle(name):
        rounds.append(name)
        if rounds.count("bad") < 3 and name == "bad":
            raise error
        if name == "bad":
            finished.set()

    async def test(work):
        work.add("bad", 0)
        work.add("good", 0)
        await finished.wait()
        assert sorted(rounds) == ["bad", "bad", "bad", "good"]
        assert "could not reconcile pool bad" in caplog.text

    run(test, handle, workers=1)


def test_others_get_their_turn_between_rounds_that_wait_for_nothing():
    """Else the Lease is lost while thousands of pools are looked at."""
    done, turns, finished = [], [], asyncio.Event()

    async def handle(name):
        done.append(name)
        if len(done) == 500:
            finished.set()

    async def others():
        while len(done) < 500:
            turns.append(len(done))
            await asyncio.sleep(0)
        turns.append(len(done))

    async def test(work):
        for number in range(500):
            work.add(str(number), 0)
        await asyncio.gather(others(), finished.wait())
        assert max(after - before for before, after in itertools.pairwise(turns)) <= 4

    run(test, handle)


def test_a_name_that_asks_for_it_is_done_again():
    rounds, finished = [], asyncio.Event()

    async def handle(_name):
        rounds.append(1)
        if len(rounds) == 3:
            finished.set()
            return None
        return 0.001

    async def test(work):
        work.add("a", 0)
        await finished.wait()

    run(test, handle)
