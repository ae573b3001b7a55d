"""Noting the uses of blocks in the times of their files, and in the access trace: real files, real owners."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import threading

import pytest

from pykvcache_connector.messages import Identity
from pykvcache_connector.scheduler import trace as trace_module
from pykvcache_connector.scheduler import uses as uses_module
from pykvcache_connector.scheduler.lookup import Lookup
from pykvcache_connector.scheduler.manager import Manager
from pykvcache_connector.scheduler.trace import Trace, Traced
from pykvcache_connector.scheduler.uses import MAX_REFUSALS, PAUSE_SECONDS, Refresher, Use, Uses, due_files, use_of
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.vllm_api import GroupShape, make_offload_key
from pykvcache_contract.keys import fingerprint_of
from pykvcache_contract.recency import recency_ns

NOW = 1_800_000_003.5
OLD = recency_ns(NOW - 3600, 7)
TRACED = Traced(fingerprint_of({"model": "test"}), group=0, tokens_per_block=256, block_bytes=1 << 20)
NOBODY = 65534


def key(number: int, *, group: int = 0) -> bytes:
    return bytes(make_offload_key(bytes.fromhex(fingerprint_of({"block": number})), group))


@pytest.fixture
def make_files(tmp_path):
    """Return a function that makes files of a modification time."""

    def make(count: int, *, modified_ns: int = OLD) -> list[str]:
        paths = [str(tmp_path / f"{number}.kvb") for number in range(count)]
        for path in paths:
            with open(path, "wb"):
                os.utime(path, ns=(modified_ns, modified_ns))
        return paths

    return make


def times(paths: list[str]) -> list[int]:
    return [os.stat(path).st_mtime_ns for path in paths]


# ---- which files ----


def due(keys, found) -> list[tuple[str, int]]:
    return due_files(seconds=NOW, keys=keys, found=found)


def test_files_not_noted_within_this_minute_are_due_with_their_depth():
    found = [[("a", OLD)], [("b", recency_ns(NOW, 1))], None, [("d", recency_ns(NOW - 60, 3))]]
    assert due([key(number) for number in range(4)], found) == [("a", recency_ns(NOW, 0)), ("d", recency_ns(NOW, 3))]


def test_all_ranks_files_of_a_block_get_the_same_time():
    found = [None, [("r0", OLD), ("r1", OLD)]]
    assert due([key(0), key(1)], found) == [("r0", recency_ns(NOW, 1)), ("r1", recency_ns(NOW, 1))]


def test_the_depth_begins_anew_with_each_group():
    keys = [key(0), key(1), key(0, group=1), key(1, group=1)]
    files = due(keys, [[(str(place), OLD)] for place in range(4)])
    assert [modified for _, modified in files] == [recency_ns(NOW, depth) for depth in (0, 1, 0, 1)]


def test_a_question_that_failed_notes_nothing():
    assert due([key(0)], []) == []


@pytest.mark.parametrize("traced", [None, TRACED])
def test_what_is_kept_of_a_request_is_its_due_files_and_only_for_a_trace_its_keys(traced):
    keys, found = [key(0), key(1)], [[("a", OLD)], [("b", recency_ns(NOW, 1))]]
    use = use_of(seconds=NOW, keys=keys, found=found, traced=traced)
    assert use == Use(NOW, [("a", recency_ns(NOW, 0))], keys if traced else (), traced)


# ---- setting times ----


def test_times_are_set_to_the_nanosecond_and_sorted_by_them_the_tail_leaves_first(make_files):
    paths = make_files(5)
    Refresher().refresh(due([key(number) for number in range(5)], [[(path, OLD)] for path in paths]))
    assert times(paths) == [recency_ns(NOW, depth) for depth in range(5)]
    assert sorted(paths, key=lambda path: os.stat(path).st_mtime_ns) == paths[::-1]


def test_a_file_that_is_gone_and_a_link_are_passed_over(make_files, tmp_path):
    victim, missing, last = make_files(3)
    link = str(tmp_path / "link")
    os.symlink(victim, link)
    os.unlink(missing)
    refresher = Refresher()
    refresher.refresh([(missing, 1), (f"{victim}/below", 1), (link, 1), (last, recency_ns(NOW, 0))])
    assert times([victim, last]) == [OLD, recency_ns(NOW, 0)]
    assert not refresher.is_paused


def test_a_read_only_pool_is_tried_again_after_a_pause_with_one_line(
    make_files, read_only_view, tmp_path, caplog, clock
):
    paths = make_files(3)
    caplog.set_level(logging.INFO)
    view = read_only_view(tmp_path)
    refresher = Refresher(clock)
    for _ in range(3):
        refresher.refresh([(str(view / os.path.basename(path)), recency_ns(NOW, 0)) for path in paths])
        assert refresher.is_paused
        clock.advance(PAUSE_SECONDS)
    assert times(paths) == [OLD] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    refresher.refresh([(path, recency_ns(NOW, 0)) for path in paths])
    assert times(paths) == [recency_ns(NOW, 0)] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@contextlib.contextmanager
def as_nobody():
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_a_file_of_another_user_gets_the_time_of_now_where_it_may_be_written(make_files, tmp_path):
    foreign, writable, own = paths = make_files(3)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    os.chmod(writable, 0o666)
    os.chown(own, NOBODY, NOBODY)
    refresher = Refresher()
    with as_nobody():
        refresher.refresh([(path, recency_ns(NOW, 1)) for path in paths])
    assert not refresher.is_paused
    assert times([foreign, own]) == [OLD, recency_ns(NOW, 1)]
    assert times([writable]) not in ([OLD], [recency_ns(NOW, 1)])


def refuse(monkeypatch, code: int) -> list[str]:
    """Let no file's time be set; return a list of the paths that are tried."""
    tried: list[str] = []

    def utime(path: str, **_options: object) -> None:
        tried.append(path)
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(uses_module.os, "utime", utime)
    return tried


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
def test_after_many_refusals_in_a_row_no_more_files_are_tried_for_a_minute(monkeypatch, caplog, clock, code):
    tried, refresher = refuse(monkeypatch, code), Refresher(clock)
    files = [(str(number), 1) for number in range(2 * MAX_REFUSALS)]
    for _ in range(2):
        tried.clear()
        refresher.refresh(files)
        clock.advance(PAUSE_SECONDS - 0.1)
        refresher.refresh(files)
        assert len(set(tried)) == MAX_REFUSALS
        assert refresher.is_paused
        clock.advance(0.1)
        assert not refresher.is_paused
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_each_reason_of_a_pause_is_logged_once_until_a_time_was_set(make_files, monkeypatch, caplog, clock):
    (good,) = make_files(1)
    refresher = Refresher(clock)
    for round_codes in ((errno.EIO, errno.EROFS, errno.EIO, errno.EROFS), (errno.EIO,)):
        for code in round_codes:
            with monkeypatch.context() as patch:
                refuse(patch, code)
                refresher.refresh([(str(number), 1) for number in range(MAX_REFUSALS)])
            clock.advance(PAUSE_SECONDS)
        refresher.refresh([(good, recency_ns(NOW, 0))])
    expected = [os.strerror(code) for code in (errno.EIO, errno.EROFS, errno.EIO)]
    assert expected == [record.args[1] for record in caplog.records if record.levelname == "WARNING"]


def test_a_success_between_refusals_keeps_refreshing_on(make_files, monkeypatch):
    (good,) = make_files(1)
    refresher, real = Refresher(), os.utime

    def utime(path: str, **options: object) -> None:
        if path != good:
            raise PermissionError(errno.EACCES, "refused", path)
        real(path, **options)

    monkeypatch.setattr(uses_module.os, "utime", utime)
    for _ in range(3):
        refresher.refresh([(str(number), 1) for number in range(MAX_REFUSALS - 1)])
        refresher.refresh([(good, 1)])
    assert not refresher.is_paused


# ---- the thread ----


@pytest.fixture
def make_uses():
    started = []

    def make(trace: Trace | None = None) -> Uses:
        started.append(Uses(trace))
        return started[-1]

    yield make
    for uses in started:
        uses.close(60)
        assert not uses._thread.is_alive()


def test_uses_are_noted_in_the_background(make_uses, make_files):
    paths, uses = make_files(3), make_uses()
    uses.note(Use(NOW, [(path, recency_ns(NOW, depth)) for depth, path in enumerate(paths)]))
    uses.close(60)
    assert times(paths) == [recency_ns(NOW, depth) for depth in range(3)]


def test_a_disk_that_hangs_delays_nobody_and_what_waits_is_bounded(make_uses, monkeypatch):
    reached, opened, noted = threading.Event(), threading.Event(), []

    def utime(path: str, **_options: object) -> None:
        noted.append(path)
        reached.set()
        assert opened.wait(60)

    monkeypatch.setattr(uses_module.os, "utime", utime)
    monkeypatch.setattr(uses_module, "MAX_WAITING_FILES", 6)
    uses = make_uses()
    uses.note(Use(NOW, [("first", 1)]))
    assert reached.wait(60)
    for number in range(10):
        uses.note(Use(NOW, [(f"{number}.{rank}", 1) for rank in range(2)]))
    assert uses._waiting.qsize() == 3
    opened.set()
    uses.close(60)
    assert noted == ["first", "0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert uses._waiting_files == 0


def test_a_request_with_more_files_than_may_wait_is_noted_when_nothing_else_waits(make_uses, make_files, monkeypatch):
    monkeypatch.setattr(uses_module, "MAX_WAITING_FILES", 2)
    paths, uses = make_files(3), make_uses()
    uses.note(Use(NOW, [(path, recency_ns(NOW, 0)) for path in paths]))
    uses.close(60)
    assert times(paths) == [recency_ns(NOW, 0)] * 3


def test_keys_that_wait_for_the_trace_are_bounded_and_a_request_with_nothing_to_note_does_not_wait(
    make_uses, monkeypatch, tmp_path
):
    reached, opened = threading.Event(), threading.Event()

    def utime(_path: str, **_options: object) -> None:
        reached.set()
        assert opened.wait(60)

    monkeypatch.setattr(uses_module.os, "utime", utime)
    monkeypatch.setattr(uses_module, "MAX_WAITING_FILES", 5)
    uses = make_uses(Trace(str(tmp_path / "trace.jsonl")))
    uses.note(Use(NOW, [("first", 1)]))
    assert reached.wait(60)
    for _ in range(10):
        uses.note(Use(NOW, []))
        uses.note(Use(NOW, [], [key(0), key(1)], TRACED))
    assert uses._waiting.qsize() == 2
    opened.set()


def test_a_mistake_in_one_use_does_not_end_the_thread(make_uses, make_files):
    (path,), uses = make_files(1), make_uses()
    uses.note(Use(NOW, [("only a path",)]))
    uses.note(Use(NOW, [(path, recency_ns(NOW, 0))]))
    uses.close(60)
    assert times([path]) == [recency_ns(NOW, 0)]


def test_a_use_that_cannot_be_noted_does_not_end_the_lookup(until, caplog):
    def fail(_use: Use) -> None:
        raise RuntimeError

    lookup, answers = Lookup(on_damaged=lambda *_: None, on_use=fail), []
    for request in ("a", "b"):
        lookup.ask(request, [key(0)], paths=lambda _: [("/nowhere", 1)], deadline=0.0)
    until(lambda: answers.extend(lookup.take_answers()) or len(answers) == 2)
    lookup.close()
    lookup._thread.join(60)
    assert not lookup._thread.is_alive()
    assert "was not noted" in caplog.records[0].message


# ---- the trace ----


def lines(path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_request_is_one_line_of_shortened_hashes_of_one_group(make_uses, tmp_path):
    path = tmp_path / "trace.jsonl"
    uses = make_uses(Trace(str(path)))
    keys = [key(0), key(1), key(2), key(0, group=1)]
    uses.note(Use(NOW, [], keys, TRACED))
    uses.note(Use(NOW + 1, [], [key(5)], TRACED))
    uses.note(Use(NOW + 2, [("nowhere", 1)]))
    uses.close(60)
    first = {
        "seconds": NOW,
        "fingerprint": TRACED.fingerprint[:12],
        "tokens_per_block": 256,
        "block_bytes": 1 << 20,
        "blocks": [fingerprint_of({"block": number})[:16] for number in range(3)],
    }
    second = first | {"seconds": NOW + 1, "blocks": [fingerprint_of({"block": 5})[:16]]}
    assert lines(path) == [first, second]


def test_a_line_is_on_the_disk_when_no_further_request_waits(make_uses, tmp_path, until):
    path = tmp_path / "trace.jsonl"
    uses = make_uses(Trace(str(path)))
    uses.note(Use(NOW, [], [key(0)], TRACED))
    until(lambda: path.exists() and len(path.read_text().splitlines()) == 1)


FULL, WINDOW = GroupShape(0, 1, 64), GroupShape(1, 1, 64, window_blocks=2)


@pytest.mark.parametrize(
    ("shapes", "group", "tokens", "size"),
    [
        ((FULL,), 0, 64, 2 * 100),
        ((FULL, WINDOW), 0, 64, 2 * (100 + 7)),
        ((WINDOW, FULL), 0, 64, 2 * (100 + 7)),
        ((WINDOW,), 1, 64, 2 * 7),
        ((dataclasses.replace(WINDOW, tokens_per_block=16), FULL), 0, 64, 2 * (100 + 4 * 7)),
        ((FULL, dataclasses.replace(WINDOW, tokens_per_block=256)), 0, 64, 2 * (100 + 7)),
    ],
)
def test_the_trace_lists_full_attention_where_there_is_some_and_counts_the_bytes_of_all_groups(
    tmp_path, until, shapes, group, tokens, size
):
    path = tmp_path / "trace.jsonl"
    manager = Manager(Settings.parse({"pool": str(tmp_path), "trace": str(path)}), Counts())
    identity = Identity(0, (TRACED.fingerprint,) * 2, ({}, {}))
    manager.start(lambda _: identity, block_sizes=({0: 100, 1: 7},) * 2, writers=(0, 1), shapes=shapes)
    manager.begin("r", [key(5 + shape.group, group=shape.group) for shape in shapes], hashes=[])
    until(lambda: path.exists() and path.read_text())
    manager.shutdown()
    (line,) = lines(path)
    assert line["blocks"] == [fingerprint_of({"block": 5 + group})[:16]]
    assert (line["tokens_per_block"], line["block_bytes"]) == (tokens, size)


def test_two_engines_append_whole_lines_to_one_file(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_module, "BUFFER_SIZE_BYTES", 1000)
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    traces = [Trace(str(path)) for _ in range(2)]
    for number in range(100):
        for trace in traces:
            trace.add(TRACED, seconds=NOW, keys=[key(number)])
    for trace in traces:
        trace.close()
    assert len(lines(path)) == 201


def test_at_its_limit_the_trace_ends_with_one_line_in_the_log(tmp_path, caplog):
    path = tmp_path / "trace.jsonl"
    trace = Trace(str(path), size_max_bytes=1000)
    for _ in range(20):
        trace.add(TRACED, seconds=NOW, keys=[key(0)])
        trace.flush()
    trace.close()
    assert trace.is_off
    assert 800 < path.stat().st_size <= 1000
    assert len(lines(path)) == path.read_text().count("\n")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "reached 1000 bytes" in caplog.records[0].message


@pytest.mark.parametrize("kind", ["missing folder", "folder", "pipe without reader", "full"])
def test_an_error_ends_the_trace_with_one_line_in_the_log(tmp_path, caplog, kind):
    path = tmp_path / "trace.jsonl"
    if kind == "missing folder":
        path = tmp_path / "missing" / "trace.jsonl"
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe without reader":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/full")
    trace = Trace(str(path))
    for _ in range(3):
        trace.add(TRACED, seconds=NOW, keys=[key(0)])
        trace.flush()
    trace.close()
    assert trace.is_off
    assert len(caplog.records) == 1
    assert str(path) in caplog.records[0].message
