"""Nodes may say anything that the API lets through: every pool is decided all the same, and what is decided fits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache_operator import build
from pykvcache_operator.calibration import RecordProfile, plan
from pykvcache_operator.decide import decide
from pykvcache_operator.resources import Observation

from .conftest import UID, World

WORLD = World()
TIMES = st.sampled_from(["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", WORLD.text(0), WORLD.text(-60)])
NUMBERS = st.sampled_from([0, 1, 2**40, 2**63 - 1])
TEXTS = st.sampled_from(
    ["", "p", "Bad reason!", "ünï", "/", "/mnt/a", "/mnt/a/p", "..", "a/../b", "\x1b[31m", "x" * 60]
)
UIDS = st.sampled_from([UID, UID, UID, "another"])


def entries(name: str) -> st.SearchStrategy[dict]:
    numbers = dict.fromkeys(("capacityBytes", "usedBytes", "mounts", "generation"), NUMBERS)
    texts = dict.fromkeys(("reason", "message", "path", "diskModel", "engine"), TEXTS)
    state = st.sampled_from(["Ready", "Ready", "NotReady", "Deleting"])
    return st.fixed_dictionaries({"name": st.just(name), "uid": UIDS, "state": state, **numbers, **texts})


def profiles(name: str) -> st.SearchStrategy[dict]:
    state = st.sampled_from(["Measured", "Failed", "Running"])
    facts = {"pool": st.just(name), "poolUID": UIDS, "state": state, "reason": TEXTS, "message": TEXTS}
    figures = {"failures": NUMBERS, "readBytesPerSecond": NUMBERS, "nextAttempt": TIMES, "key": st.just("k")}
    return st.fixed_dictionaries({**facts, **figures}, optional={"measuredAt": TIMES})


@st.composite
def views(draw: st.DrawFn, name: str):
    names = draw(st.sampled_from([["p"], ["q"], ["p", "q"]]))
    facts = {
        "heartbeatTime": draw(TIMES),
        "disks": [{"mountPath": draw(TEXTS), "type": "NVMe", "sizeBytes": draw(NUMBERS)}],
        "profiles": [draw(profiles(pool)) for pool in names],
    }
    return WORLD.view(name, *(draw(entries(pool)) for pool in names), is_ready=draw(st.booleans()), **facts)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_decision_and_a_plan_are_made_and_can_be_written(data):
    nodes = tuple(data.draw(views(name)) for name in ("a", "b"))
    asked = {"pykvcache.io/recalibrate": data.draw(TIMES)}
    item = WORLD.pool(deleted_s=data.draw(st.sampled_from([None, 1, 10_000])), annotations=asked)
    decision = decide(Observation(item=item, nodes=nodes), WORLD.now)
    if decision.status is not None:
        item.pool.status_document(decision.status)
    for notice in decision.notices:
        build.event(item.pool, notice, instance="test", now=WORLD.now)
    caches = {view.name: view.cache for view in nodes}
    planned = plan(item.pool, nodes=caches.values(), reachable=caches, jobs=(), now=WORLD.now)
    for action in planned.actions:
        if isinstance(action, RecordProfile):
            build.profiles(caches[action.node], "p", action.profile)


@pytest.fixture(scope="module", autouse=True)
def one_key():
    """Profiles are about what is there: all keys are one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pykvcache_operator.calibration.profile_key", lambda _node, _entry: "k")
        yield
