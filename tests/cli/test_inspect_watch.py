"""`pykvcache inspect --watch`: real pools that change meanwhile; the pause between two looks is the test's."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pykvcache_cli import inspect_watch
from pykvcache_cli.inspect_watch import Watcher, line, watch_pool
from pykvcache_storage.inventory import count_bytes
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import UsageLedger

BLOCK_SIZE_BYTES = 4096 + 2 * 4096
DEADLINE_SECONDS = 60
PRINTED_TIME_LENGTH = len("2026-11-30T12:00:00Z")


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watcher(pool: Path, clock: Clock) -> Callable[..., Watcher]:
    def make(*, fingerprint: str = "", interval: float = 1.0) -> Watcher:
        return Watcher(open_pool(str(pool), create=False), fingerprint=fingerprint, interval=interval, clock=clock)

    return make


@pytest.fixture
def watch(pool: Path, clock: Clock, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return a function that watches while steps happen, one in each pause, then Ctrl-C; it returns the lines."""

    def run(*steps: Callable[[], object], as_json: bool = False) -> list[str]:
        left = list(steps)

        def pause(seconds: float) -> None:
            clock.now += seconds
            if not left:
                raise KeyboardInterrupt
            left.pop(0)()

        opened = open_pool(str(pool), create=False)
        watch_pool(opened, fingerprint="", interval=1.0, as_json=as_json, clock=clock, pause=pause)
        return capsys.readouterr().out.splitlines()

    return run


def nothing() -> None:
    pass


def du_bytes(pool: Path) -> int:
    command = f"find {pool} -name '*.kvb' -print0 | du -B1 --files0-from=- -c | tail -1"
    output = subprocess.run(command, shell=True, capture_output=True, text=True, check=True).stdout
    return int(output.split()[0])


# ---- numbers ----


def test_sizes_agree_with_du_after_blocks_came_and_went(pool: Path, watch: Callable, write_block: Callable) -> None:
    blocks = [write_block(number, pages=1 + number % 5) for number in range(20)]
    lines = watch(blocks[0].unlink, lambda: write_block(77, pages=9), as_json=True)
    documents = [json.loads(text) for text in lines]
    assert [20, 19, 20] == [document["blocks"] for document in documents]
    assert du_bytes(pool) == documents[-1]["size_bytes"] == sum(path.stat().st_size for path in pool.rglob("*.kvb"))


def test_used_and_written_bytes_stand_against_their_limits(pool: Path, watch: Callable) -> None:
    ledger = UsageLedger(str(pool))
    ledger.recount(lambda: 0)
    ledger.set_limits(capacity_bytes=4 << 20, write_budget_bytes=8 << 20)
    ledger.reserve(1 << 20, capacity_bytes=64 << 20)
    text = watch()[0]
    assert "1.0 MiB counted against the capacity, 4.0 MiB allowed (25%)" in text
    assert "written today 1.0 MiB of 8.0 MiB" in text
    document = json.loads(watch(as_json=True)[0])
    assert (1 << 20, 4 << 20) == (document["used_bytes"], document["limit_bytes"])
    assert (1 << 20, 8 << 20) == (document["written_bytes"], document["write_budget_bytes"])


def test_what_was_written_on_an_earlier_day_is_not_written_today(pool: Path, watch: Callable) -> None:
    long_ago = UsageLedger(str(pool), clock=lambda: 1_700_000_000.0)
    long_ago.recount(lambda: 0)
    long_ago.reserve(1 << 20, capacity_bytes=64 << 20)
    document = json.loads(watch(as_json=True)[0])
    assert (1 << 20, 0) == (document["used_bytes"], document["written_bytes"])


def test_a_pool_without_limits_shows_none(pool: Path, watch: Callable) -> None:
    assert "no fill level recorded yet" in watch()[0]
    document = json.loads(watch(as_json=True)[0])
    assert [None] * 4 == [document[f"{name}_bytes"] for name in ("used", "limit", "written", "write_budget")]


def test_rates_are_blocks_stored_and_removed_since_the_last_look(
    pool: Path, clock: Clock, watcher: Callable, write_block: Callable
) -> None:
    blocks = [write_block(number) for number in range(4)]
    ledger = UsageLedger(str(pool))
    ledger.recount(lambda: count_bytes(str(pool)))
    watched = watcher()
    assert watched.look().rates is None
    for path in blocks[:2]:
        path.unlink()
        ledger.release(BLOCK_SIZE_BYTES)
    for number in range(10, 16):
        write_block(number)
        ledger.reserve(BLOCK_SIZE_BYTES, capacity_bytes=1 << 30)
    clock.now += 2.0
    look = watched.look()
    assert (3.0, 1.0) == (look.rates.stored_blocks(), look.rates.removed_blocks())
    assert "stored 3.0 blocks/s, removed 1.0 blocks/s" in line(look)
    clock.now += 2.0
    assert (0.0, 0.0) == (watched.look().rates.stored_blocks(), watched.look().rates.removed_blocks())


def test_a_recount_is_no_rate(pool: Path, clock: Clock, watcher: Callable, write_block: Callable) -> None:
    write_block(1)
    UsageLedger(str(pool)).recount(lambda: 1 << 30)
    watched = watcher()
    watched.look()
    UsageLedger(str(pool)).recount(lambda: BLOCK_SIZE_BYTES)
    clock.now += 1.0
    assert watched.look().rates is None
    clock.now += 1.0
    assert watched.look().rates is not None


def test_only_the_fingerprint_asked_for_is_shown(pool: Path, watcher: Callable, write_block: Callable) -> None:
    write_block(1)
    (pool / "0123456789ab").mkdir()
    assert 2 == len(watcher().look().rows)
    wanted = next(pool.glob("*/config.json")).parent.name
    assert [wanted] == [row.summary.directory for row in watcher(fingerprint=wanted.upper()).look().rows]


# ---- walks ----


@pytest.fixture
def slow_walk(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make a walk take ten steps of half a second each; the list grows by one a step."""
    steps: list[int] = []

    def walk(pool_directory: str) -> Iterator[None]:
        for number in range(10):
            steps.append(number)
            clock.now += 0.5
            yield
        return []

    monkeypatch.setattr(inspect_watch, "summarise_in_steps", walk)
    return steps


def test_walks_take_at_most_a_fifth_of_the_time(clock: Clock, watcher: Callable, slow_walk: list[int]) -> None:
    started, watched = clock.now, watcher()
    for _ in range(100):
        watched.look()
        clock.now += 1.0
    assert 0.5 * len(slow_walk) <= (clock.now - started) / 5 + 0.5
    assert len(slow_walk) >= 20


def test_until_the_first_walk_ends_the_ledger_is_shown_and_nothing_is_called_empty(
    pool: Path, watcher: Callable, slow_walk: list[int]
) -> None:
    UsageLedger(str(pool)).recount(lambda: 5 << 20)
    text = line(watcher().look())
    assert "counting …; 5.0 MiB counted against the capacity" in text
    assert "0 blocks" not in text


# ---- a pipe ----


def test_a_pipe_gets_a_line_when_something_changed_and_none_otherwise(watch: Callable, write_block: Callable) -> None:
    lines = watch(nothing, nothing, lambda: write_block(1), nothing)
    assert ["0 blocks, 0 B", "1 blocks, 12.0 KiB"] == [
        text[PRINTED_TIME_LENGTH:].strip().partition(";")[0] for text in lines
    ]


def test_json_is_one_object_a_line_at_every_look(watch: Callable, write_block: Callable) -> None:
    write_block(1)
    documents = [json.loads(text) for text in watch(nothing, nothing, as_json=True)]
    assert [1, 1, 1] == [document["blocks"] for document in documents]
    assert "meta/llama-test" == documents[0]["fingerprints"][0]["model"]
    assert documents[0]["seconds"] <= documents[2]["seconds"]


# ---- a pool that goes away ----


@pytest.fixture
def mounted(pool: Path) -> Iterator[Callable[[], None]]:
    """Mount a disk on the pool directory and make it a pool; yield a function that unmounts it."""

    def mount() -> None:
        done = subprocess.run(["mount", "-t", "tmpfs", "none", pool], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounts are not allowed here: {done.stderr.strip()}")

    mount()
    open_pool(str(pool), create=True)
    yield lambda: subprocess.run(["umount", pool], check=True)
    if os.path.ismount(pool):
        subprocess.run(["umount", pool], check=True)


def test_an_unmounted_pool_is_said_to_be_and_its_numbers_are_not_shown(watch: Callable, mounted: Callable) -> None:
    lines = watch(mounted, nothing)
    assert 2 == len(lines)
    assert "0 blocks" in lines[0]
    assert "mount" in lines[1]
    assert "blocks" not in lines[1][PRINTED_TIME_LENGTH:]


def test_json_of_a_pool_that_is_away_has_a_problem_and_no_numbers(watch: Callable, mounted: Callable) -> None:
    before, after = (json.loads(text) for text in watch(mounted, as_json=True))
    assert before["problem"] is None
    assert after["problem"]
    assert "blocks" not in after


def test_a_pool_that_comes_back_is_watched_again(pool: Path, watch: Callable, write_block: Callable) -> None:
    write_block(1)
    away = pool.with_name("away")
    lines = watch(lambda: pool.rename(away), lambda: away.rename(pool), lambda: write_block(2))
    shown = [text[PRINTED_TIME_LENGTH:].strip() for text in lines]
    assert ["1 blocks", "1 blocks", "2 blocks"] == [text.partition(",")[0] for text in shown[:1] + shown[2:]]
    assert str(pool) in shown[1]


@pytest.mark.parametrize("created", ["now", "2020-01-01T00:00:00+00:00"])
def test_another_pool_in_its_place_is_watched_from_then_on(
    pool: Path, watch: Callable, write_block: Callable, created: str
) -> None:
    write_block(1)

    def replace() -> None:
        pool.rename(pool.with_name("old"))
        pool.mkdir()
        open_pool(str(pool), create=True)
        if created != "now":
            document = json.loads((pool / "pool.json").read_text())
            (pool / "pool.json").write_text(json.dumps({**document, "created": created}))

    documents = [json.loads(text) for text in watch(replace, nothing, as_json=True)]
    assert documents[0]["uid"] != documents[-1]["uid"]
    assert [1, 0, 0] == [document["blocks"] for document in documents]


def test_an_emptied_pool_is_said_to_be_blank_until_it_is_prepared_anew(
    pool: Path, watch: Callable, write_block: Callable
) -> None:
    write_block(1)

    def empty() -> None:
        pool.rename(pool.with_name("old"))
        pool.mkdir()

    lines = watch(empty, nothing, lambda: open_pool(str(pool), create=True))
    assert 3 == len(lines)
    assert "holds no pool any more" in lines[1]
    assert "0 blocks" in lines[2]
    assert sorted(os.listdir(pool)) == ["pool.json"]


# ---- the command ----


def hear_ctrl_c() -> None:
    """Undo what a shell does to programs in the background, which are deaf to Ctrl-C; CI may run there."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments: object, stdout: int) -> "subprocess.Popen[Any]":
    command = [sys.executable, "-m", "pykvcache_cli.main", "inspect", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "160"}
    return subprocess.Popen(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        env=environment,
        preexec_fn=hear_ctrl_c,
    )


@pytest.mark.slow
def test_ctrl_c_ends_it_with_status_0(pool: Path, write_block: Callable) -> None:
    write_block(1)
    process = start(pool, "--watch", "--interval", "0.1", stdout=subprocess.PIPE)
    try:
        assert b"1 blocks" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
        assert (0, b"") == (process.returncode, err)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_terminal_gets_the_table_redrawn_in_place(pool: Path, write_block: Callable) -> None:
    write_block(1)
    ours, theirs = pty.openpty()
    process = start(pool, "--watch", "--interval", "0.1", stdout=theirs)
    os.close(theirs)
    try:
        assert read_until(ours, "1 blocks, 12.0 KiB")
        write_block(2)
        assert read_until(ours, "2 blocks, 24.0 KiB")
        process.send_signal(signal.SIGINT)
        read_to_end(ours)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
        assert (0, b"") == (process.returncode, err)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def read_until(descriptor: int, text: str) -> bool:
    """Return whether a terminal shows a text before the deadline."""
    seen = ""
    while select.select([descriptor], [], [], DEADLINE_SECONDS)[0]:
        seen += os.read(descriptor, 65536).decode(errors="replace")
        if text in seen:
            return True
    return False


def read_to_end(descriptor: int) -> None:
    """Read what a program still shows until it closes its terminal, which holds 4 KiB: more would never be written."""
    with contextlib.suppress(OSError):  # a terminal that nobody else has open any more
        while select.select([descriptor], [], [], DEADLINE_SECONDS)[0] and os.read(descriptor, 65536):
            continue


def test_watching_and_verifying_at_once_is_refused(run: Callable, pool: Path) -> None:
    result = run("inspect", pool, "--watch", "--verify")
    assert 2 == result.exit_code
    assert "--watch" in result.output


def test_a_missing_pool_is_an_error_when_watching_begins(run: Callable, tmp_path: Path) -> None:
    assert 2 == run("inspect", tmp_path / "gone", "--watch").exit_code
