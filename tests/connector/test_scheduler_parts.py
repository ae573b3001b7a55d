"""Index, admission and lookup of the scheduler's half, each alone."""

import os
import queue
import threading

import pytest

from pykvcache_connector.scheduler import lookup as lookup_module
from pykvcache_connector.scheduler.admission import FULL_SECONDS, OVER_BUDGET_SECONDS, Admission
from pykvcache_connector.scheduler.index import DENIAL_SECONDS, DROPPED_SHARE, Index
from pykvcache_connector.scheduler.lookup import HELPER_COUNT, PART_KEYS, Answer, Lookup
from pykvcache_connector.scheduler.uses import Use

SIZE = 8192


# ---- index ----


def test_the_oldest_keys_go_when_the_index_is_full(clock):
    index = Index(3, clock=clock)
    for number in range(5):
        index.add(bytes([number]))
        assert len(index) <= 3
    assert [bytes([number]) in index for number in range(5)] == [False, False, True, True, True]


def test_a_large_full_index_drops_a_share_of_its_keys_at_once(clock):
    capacity = 2 * DROPPED_SHARE
    index = Index(capacity, clock=clock)
    keys = [number.to_bytes(2, "big") for number in range(capacity + 1)]
    for key in keys:
        index.add(key)
    assert len(index) == capacity - 1
    assert [key in index for key in keys[:3]] == [False, False, True]
    assert keys[-1] in index


def test_an_answer_adds_what_is_there_and_removes_what_is_not(clock):
    index = Index(3, clock=clock)
    for key in (b"old", b"gone", b"denied"):
        index.add(key)
    index.deny(b"denied")
    index.learn(present=(b"new", b"denied"), absent=(b"gone", b"unknown"))
    assert [key in index for key in (b"old", b"gone", b"denied", b"new")] == [True, False, False, True]
    index.learn(present=(b"1", b"2", b"3", b"4"), absent=())
    assert [key in index for key in (b"old", b"new", b"1", b"2", b"3", b"4")] == [False, False, False, True, True, True]


def test_a_key_is_present_from_its_addition_to_its_removal(clock):
    index = Index(clock=clock)
    assert b"a" not in index
    index.add(b"a")
    index.add(b"a")
    assert b"a" in index
    assert len(index) == 1
    index.discard(b"a")
    index.discard(b"a")
    assert b"a" not in index


def test_a_denied_key_stays_missing_until_its_time_is_over(clock):
    index = Index(clock=clock)
    index.add(b"a")
    index.deny(b"a")
    assert b"a" not in index
    clock.advance(DENIAL_SECONDS - 1)
    index.add(b"a")
    assert index.is_denied(b"a")
    assert b"a" not in index
    clock.advance(1)
    assert not index.is_denied(b"a")
    index.add(b"a")
    assert b"a" in index


def test_denials_are_bounded_like_keys(clock):
    index = Index(2, clock=clock)
    for key in (b"a", b"b", b"c"):
        index.deny(key)
    assert [index.is_denied(key) for key in (b"a", b"b", b"c")] == [False, True, True]


def test_clearing_forgets_keys_and_denials(clock):
    index = Index(clock=clock)
    index.add(b"a")
    index.deny(b"b")
    index.clear()
    assert len(index) == 0
    assert not index.is_denied(b"b")


# ---- admission ----


def test_loads_start_up_to_the_limit_and_again_as_others_end(clock):
    admission = Admission(100, clock=clock)
    assert admission.may_start(60)
    admission.started(60)
    assert admission.may_start(40)
    assert not admission.may_start(41)
    admission.finished(60)
    assert admission.may_start(100)


def test_a_load_larger_than_the_limit_starts_alone(clock):
    admission = Admission(100, clock=clock)
    assert admission.may_start(500)
    admission.started(500)
    assert not admission.may_start(1)


def test_ends_that_were_not_begun_here_never_make_room_twice(clock):
    admission = Admission(100, clock=clock)
    admission.finished(50)
    admission.started(100)
    assert not admission.may_start(1)


def test_a_reset_forgets_loads_in_flight(clock):
    admission = Admission(100, clock=clock)
    admission.started(100)
    admission.reset()
    assert admission.may_start(100)


def test_a_full_pool_counts_for_a_while_after_its_last_report(clock):
    admission = Admission(100, clock=clock)
    assert admission.full_reason() == ""
    admission.note(full_reason="pool_full")
    clock.advance(FULL_SECONDS / 2)
    admission.note()
    assert admission.full_reason() == "pool_full"
    admission.note(full_reason="unavailable")
    clock.advance(FULL_SECONDS * 0.9)
    assert admission.full_reason() == "unavailable"
    clock.advance(FULL_SECONDS * 0.1)
    assert admission.full_reason() == ""


@pytest.mark.parametrize(("once", "spent"), [(True, False), (False, True), (True, True)])
def test_blocks_wanted_once_and_all_blocks_exceed_the_budget_for_a_while_each(clock, once, spent):
    admission = Admission(100, clock=clock)
    admission.note(is_over_budget=once, is_budget_spent=spent)
    clock.advance(OVER_BUDGET_SECONDS - 1)
    admission.note()
    assert (admission.is_over_budget(), admission.is_budget_spent()) == (once, spent)
    clock.advance(1)
    assert (admission.is_over_budget(), admission.is_budget_spent()) == (False, False)


def test_a_disk_is_stalled_until_it_is_said_to_have_recovered(clock):
    admission = Admission(100, clock=clock)
    assert not admission.is_stalled()
    admission.note(is_stalled=True)
    clock.advance(3600)
    admission.note(is_stalled=None)
    assert admission.is_stalled()
    admission.note(is_stalled=False)
    assert not admission.is_stalled()


def test_a_reset_forgets_a_stalled_disk(clock):
    admission = Admission(100, clock=clock)
    admission.note(is_stalled=True)
    admission.reset()
    assert not admission.is_stalled()


# ---- lookup ----


@pytest.fixture
def damaged() -> list[tuple[bytes, str]]:
    return []


@pytest.fixture
def used() -> list[Use]:
    return []


@pytest.fixture
def make_lookup(damaged, used, clock):
    lookups = []

    def make() -> Lookup:
        lookups.append(
            Lookup(on_damaged=lambda key, path: damaged.append((key, path)), on_use=used.append, clock=clock)
        )
        return lookups[-1]

    yield make
    for lookup in lookups:
        lookup.close()
        lookup._thread.join(60)
        assert not lookup._thread.is_alive()


@pytest.fixture
def lookup(make_lookup) -> Lookup:
    return make_lookup()


@pytest.fixture
def paths(tmp_path):
    """Two ranks' files of each key."""
    return lambda key: [(str(tmp_path / f"{key.hex()}-{rank}"), SIZE) for rank in (0, 1)]


class Gate:
    """Keeps the lookup's thread busy until it is opened."""

    def __init__(self, lookup: Lookup) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        lookup.ask("gate", [b"gate"], paths=self._wait, deadline=0.0)
        assert self.reached.wait(60)

    def _wait(self, _key: bytes) -> list[tuple[str, int]]:
        self.reached.set()
        assert self.opened.wait(60)
        return [("/nowhere", 0)]


def make_files(paths, key: bytes, *, ranks=(0, 1), size: int = SIZE) -> None:
    for rank in ranks:
        path, _ = paths(key)[rank]
        with open(path, "wb") as file:
            file.truncate(size)


def answers_of(lookup: Lookup, until, count: int) -> list[Answer]:
    answers: list[Answer] = []

    def are_there() -> bool:
        answers.extend(answer for answer in lookup.take_answers() if answer.request_id != "gate")
        return len(answers) >= count

    until(are_there)
    return answers


def test_a_block_is_present_when_every_rank_has_its_file(lookup, paths, until, clock):
    make_files(paths, b"whole")
    make_files(paths, b"half", ranks=[1])
    lookup.ask("r", [b"whole", b"half", b"none"], paths=paths, deadline=clock() + 1)
    assert lookup.is_pending("r")
    assert answers_of(lookup, until, 1) == [Answer("r", (b"whole",), (b"half", b"none"))]
    assert not lookup.is_pending("r")
    assert not lookup.is_late("r")


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 4096])
def test_a_file_of_a_wrong_size_is_absent_and_reported_as_damaged(lookup, paths, until, clock, damaged, size):
    make_files(paths, b"k")
    make_files(paths, b"k", ranks=[1], size=size)
    lookup.ask("r", [b"k"], paths=paths, deadline=clock() + 1)
    assert answers_of(lookup, until, 1) == [Answer("r", (), (b"k",))]
    assert damaged == [(b"k", paths(b"k")[1][0])]


def test_a_symbolic_link_is_not_followed(lookup, paths, until, clock, tmp_path):
    make_files(paths, b"k")
    real, link = paths(b"k")[0][0], paths(b"k")[1][0]
    os.unlink(link)
    os.symlink(real, link)
    lookup.ask("r", [b"k"], paths=paths, deadline=clock() + 1)
    assert answers_of(lookup, until, 1)[0].absent == (b"k",)


def test_answers_come_in_the_order_of_the_questions(lookup, paths, until, clock):
    for number in range(20):
        lookup.ask(f"r{number}", [b"k"], paths=paths, deadline=clock() + 1)
    assert [answer.request_id for answer in answers_of(lookup, until, 20)] == [f"r{number}" for number in range(20)]


def test_320_blocks_are_answered_in_one_batch(lookup, paths, until, clock):
    keys = [number.to_bytes(2, "big") for number in range(320)]
    for key in keys[:300]:
        make_files(paths, key)
    lookup.ask("r", keys, paths=paths, deadline=clock() + 1)
    (answer,) = answers_of(lookup, until, 1)
    assert answer.present == tuple(keys[:300])
    assert answer.absent == tuple(keys[300:])


def test_on_a_slow_disk_helpers_ask_side_by_side_and_end_with_the_lookup(make_lookup, paths, until, clock, monkeypatch):
    monkeypatch.setattr(lookup_module, "PART_SECONDS_MAX", -1.0)
    lookup = make_lookup()
    keys = [number.to_bytes(2, "big") for number in range(PART_KEYS * (HELPER_COUNT + 1) + 1)]
    for key in keys[::3]:
        make_files(paths, key)
    together = threading.Barrier(HELPER_COUNT)
    waiting = set(keys[PART_KEYS::PART_KEYS][:HELPER_COUNT])

    def meet(key: bytes) -> list[tuple[str, int]]:
        if key in waiting:
            together.wait(60)
        return paths(key)

    lookup.ask("r", keys, paths=meet, deadline=clock() + 1)
    (answer,) = answers_of(lookup, until, 1)
    assert answer.present == tuple(keys[::3])
    assert set(answer.absent) == set(keys) - set(keys[::3])
    helpers = list(lookup._helpers)
    assert len(helpers) == HELPER_COUNT
    lookup.close()
    for helper in helpers:
        helper.join(60)
        assert not helper.is_alive()


def test_a_part_that_fails_is_a_miss_and_the_rest_is_answered(make_lookup, paths, until, clock, monkeypatch):
    monkeypatch.setattr(lookup_module, "PART_SECONDS_MAX", -1.0)
    lookup = make_lookup()
    keys = [number.to_bytes(2, "big") for number in range(3 * PART_KEYS)]
    for key in keys:
        make_files(paths, key)

    def broken(key: bytes) -> list[tuple[str, int]]:
        if key == keys[PART_KEYS]:
            raise queue.Empty
        return paths(key)

    lookup.ask("r", keys, paths=broken, deadline=clock() + 1)
    (answer,) = answers_of(lookup, until, 1)
    assert answer.present == tuple(keys[:PART_KEYS] + keys[2 * PART_KEYS :])


def test_a_late_answer_is_late_from_its_deadline_on_and_still_comes(lookup, paths, until, clock):
    gate = Gate(lookup)
    make_files(paths, b"k")
    lookup.ask("r", [b"k"], paths=paths, deadline=clock() + 1)
    clock.advance(0.99)
    assert (lookup.is_pending("r"), lookup.is_late("r")) == (True, False)
    clock.advance(0.01)
    assert (lookup.is_pending("r"), lookup.is_late("r")) == (False, True)
    lookup.forget("r")
    assert (lookup.is_pending("r"), lookup.is_late("r")) == (False, False)
    gate.opened.set()
    assert answers_of(lookup, until, 1)[0].present == (b"k",)
    assert not lookup.is_late("r")


def test_a_request_nobody_asked_about_is_neither_pending_nor_late(lookup):
    assert not lookup.is_pending("r")
    assert not lookup.is_late("r")
    lookup.forget("r")


def test_beyond_the_queue_a_question_is_refused(make_lookup, paths, until, clock, monkeypatch):
    monkeypatch.setattr(lookup_module, "MAX_WAITING_REQUESTS", 2)
    lookup = make_lookup()
    gate = Gate(lookup)
    accepted = [lookup.ask(f"r{number}", [b"k"], paths=paths, deadline=clock() + 1) for number in range(4)]
    assert accepted == [True, True, False, False]
    assert not lookup.is_pending("r3")
    gate.opened.set()
    assert len(answers_of(lookup, until, 2)) == 2


def test_closing_with_a_full_queue_drops_what_waits(make_lookup, paths, clock, monkeypatch):
    monkeypatch.setattr(lookup_module, "MAX_WAITING_REQUESTS", 2)
    lookup = make_lookup()
    gate = Gate(lookup)
    for number in range(2):
        lookup.ask(f"r{number}", [b"k"], paths=paths, deadline=clock() + 1)
    closing = threading.Thread(target=lookup.close)
    closing.start()
    gate.opened.set()
    closing.join(60)
    assert not closing.is_alive()


def test_a_question_that_fails_is_a_miss_and_the_thread_goes_on(lookup, paths, until, clock):
    def broken(_key: bytes) -> list[tuple[str, int]]:
        raise queue.Empty

    make_files(paths, b"k")
    lookup.ask("broken", [b"k"], paths=broken, deadline=clock() + 1)
    lookup.ask("r", [b"k"], paths=paths, deadline=clock() + 1)
    assert answers_of(lookup, until, 2) == [Answer("broken", (), ()), Answer("r", (b"k",), ())]


def test_after_a_reset_older_answers_concern_nobody(lookup, paths, until, clock):
    gate = Gate(lookup)
    make_files(paths, b"old")
    make_files(paths, b"new")
    lookup.ask("r", [b"old"], paths=paths, deadline=clock() + 1)
    lookup.reset()
    assert not lookup.is_pending("r")
    lookup.ask("r", [b"new"], paths=paths, deadline=clock() + 1)
    gate.opened.set()
    assert answers_of(lookup, until, 1) == [Answer("r", (b"new",), ())]
