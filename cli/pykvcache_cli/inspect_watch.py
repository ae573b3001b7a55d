"""`pykvcache inspect --watch`: the same picture again and again, until Ctrl-C.

Facts: a walk over a million blocks takes half a minute; the ledger's record is read in microseconds and counts every
byte stored or removed; a pool's disk may vanish and come back meanwhile. What they mean: blocks cannot be counted at
every look, and numbers of a vanished pool are no numbers. Therefore every look reads the ledger, and walks go on in
between, in pieces that take at most a fifth of the time; until the next walk ends, the last one's counts stay. Rates
come from the ledger: bytes stored and removed since the last look, in blocks of the mean size of the last walk. While
the pool is away, only that is said. While a long walk is under way, its folder is open, and `umount` finds it busy.

One thread. Reads only.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape

from pykvcache_cli.console import format_age, printable, stdout
from pykvcache_cli.pool_table import (
    Row,
    as_document,
    count_blocks,
    describe,
    make_table,
    sum_bytes,
    total_text,
    used_text,
    written_text,
)
from pykvcache_contract.errors import PyKVCacheError
from pykvcache_contract.units import format_size
from pykvcache_storage.anchor import Anchor, PoolState
from pykvcache_storage.inventory import FingerprintSummary, Steps, summarise_in_steps
from pykvcache_storage.pool import Pool, open_pool
from pykvcache_storage.usage import Usage, UsageLedger

INTERVAL_SECONDS_MIN = 0.1
WALK_SHARE = 1 / 5
"""The most of the time that walks may take."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What was stored and removed per second since the last look, by the ledger.

    Args:
        block_bytes: mean size of a block in the last walk, 0 if there was none.
    """

    stored_bytes: float
    removed_bytes: float
    block_bytes: float

    def stored_blocks(self) -> float | None:
        """Return blocks per second, None if their size is not known yet."""
        return self.stored_bytes / self.block_bytes if self.block_bytes else None

    def removed_blocks(self) -> float | None:
        """Return blocks per second, None if their size is not known yet."""
        return self.removed_bytes / self.block_bytes if self.block_bytes else None


@dataclass(frozen=True, slots=True)
class Look:
    """The pool at one moment.

    Args:
        seconds: when, Unix time.
        rows: of the last walk that ended; `walked_seconds` says when that was, None if none has ended yet.
        rates: None at the first look, and where the ledger was recounted since the last one.
        problem: why the pool cannot be looked at; the rest is then empty.
    """

    pool: Pool
    seconds: float
    rows: tuple[Row, ...] = ()
    walked_seconds: float | None = None
    usage: Usage | None = None
    rates: Rates | None = None
    problem: str = ""


class Watcher:
    """Looks at one pool repeatedly; `look` takes at most a fifth of the interval, plus one step of a walk."""

    def __init__(
        self, pool: Pool, *, fingerprint: str, interval: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fingerprint = fingerprint
        self._piece_seconds = interval * WALK_SHARE
        self._clock = clock
        self._begin(pool)

    def _begin(self, pool: Pool) -> None:
        self._anchor = Anchor.of(pool)
        self._pool = pool
        self._ledger = UsageLedger(pool.directory)
        self._last: Look | None = None
        self._last_clock = 0.0
        self._forget_walk()

    def _forget_walk(self) -> None:
        self._walk: Steps[list[FingerprintSummary]] | None = None
        self._rows: tuple[Row, ...] = ()
        self._walked_seconds: float | None = None
        self._walk_again_at = self._clock()

    def look(self) -> Look:
        """Return what is to be shown now."""
        if problem := self._problem():
            self._forget_walk()
            self._last = None
            return Look(self._pool, time.time(), problem=problem)
        try:
            self._go_on_walking()
        except PyKVCacheError as error:
            self._walk = None
            return Look(self._pool, time.time(), usage=self._ledger.usage(), problem=str(error))
        usage, now = self._ledger.usage(), self._clock()
        look = Look(self._pool, time.time(), self._rows, self._walked_seconds, usage, self._rates(usage, now))
        self._last, self._last_clock = look, now
        return look

    def _problem(self) -> str:
        """Return why this is not the pool that was opened; another pool in its place is watched from now on."""
        state = self._anchor.state()
        if state in (PoolState.REPLACED, PoolState.BLANK):  # A blank one may have been prepared anew by others.
            try:
                self._begin(open_pool(self._pool.directory, create=False))
            except PyKVCacheError:
                return self._anchor.describe()
            return ""
        return "" if state is PoolState.SAME else self._anchor.describe()

    def _go_on_walking(self) -> None:
        started = self._clock()
        if started < self._walk_again_at:
            return
        self._walk = self._walk or summarise_in_steps(self._pool.directory)
        try:
            while self._clock() - started <= self._piece_seconds:
                next(self._walk)
        except StopIteration as stop:
            rows = [describe(self._pool, summary) for summary in stop.value]
            self._rows = tuple(row for row in rows if row.is_wanted(self._fingerprint))
            self._walked_seconds = time.time()
            self._walk = None
        ended = self._clock()
        self._walk_again_at = ended + (ended - started) * (1 / WALK_SHARE - 1)

    def _rates(self, usage: Usage | None, now: float) -> Rates | None:
        before = self._last.usage if self._last is not None else None
        if usage is None or before is None or usage.recount_seconds != before.recount_seconds:
            return None
        elapsed = max(now - self._last_clock, 1e-3)
        stored = max(0, usage.added_bytes - before.added_bytes)
        removed = max(0, stored - (usage.used_bytes - before.used_bytes))
        blocks = count_blocks(list(self._rows))
        return Rates(stored / elapsed, removed / elapsed, sum_bytes(list(self._rows)) / blocks if blocks else 0.0)


def watch_pool(
    pool: Pool,
    *,
    fingerprint: str,
    interval: float,
    as_json: bool,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show a pool until Ctrl-C: as a live table, as lines on a pipe, or as one JSON object per look."""
    watcher = Watcher(pool, fingerprint=fingerprint, interval=interval, clock=clock)
    with contextlib.suppress(KeyboardInterrupt), _display(as_json) as show:
        while True:
            started = clock()
            show(watcher.look())
            pause(max(0.0, interval - (clock() - started)))


@contextlib.contextmanager
def _display(as_json: bool) -> Iterator[Callable[[Look], None]]:
    console = stdout()
    if as_json:
        yield lambda look: print(json.dumps(look_document(look)), flush=True)
    elif console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda look: live.update(render(look), refresh=True)
    else:
        yield _Lines().show


class _Lines:
    """Prints a line when something but the time and the rates has changed."""

    def __init__(self) -> None:
        self._shown: object = None

    def show(self, look: Look) -> None:
        usage = look.usage and (look.usage.used_bytes, look.usage.limit_bytes, written_text(look.usage, look.seconds))
        state = (look.problem, count_blocks(list(look.rows)), sum_bytes(list(look.rows)), usage)
        if state != self._shown:
            self._shown = state
            print(line(look), flush=True)


# ---- one look, in three ways ----


def render(look: Look) -> RenderableType:
    """Return the table with the remarks below it."""
    if look.problem:
        return f"[bold red]Not readable now:[/] {escape(printable(look.problem))}"
    rows = list(look.rows)
    usage = look.usage
    remarks = [total_text(rows, usage) if look.walked_seconds else f"Counting blocks …; {used_text(usage)}."]
    if usage is not None:
        remarks.append(", ".join(part for part in (written_text(usage, look.seconds), rates_text(look.rates)) if part))
    if look.walked_seconds:
        remarks.append(f"[dim]Blocks counted {format_age(look.seconds - look.walked_seconds)} ago. Ctrl-C ends.[/]")
    return Group(make_table(look.pool, rows, now=look.seconds), *remarks)


def line(look: Look) -> str:
    """Return one line for a log.

    The time is UTC, as the write budget's day is.
    """
    when = datetime.fromtimestamp(look.seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    if look.problem:
        return f"{when}  {printable(look.problem)}"
    rows = list(look.rows)
    counted = f"{count_blocks(rows)} blocks, {format_size(sum_bytes(rows))}" if look.walked_seconds else "counting …"
    parts = (counted, used_text(look.usage), written_text(look.usage, look.seconds), rates_text(look.rates))
    return "  ".join((when, "; ".join(part for part in parts if part)))


def rates_text(rates: Rates | None) -> str:
    """Return the rates for people, empty if there are none yet."""
    if rates is None:
        return ""
    stored, removed = rates.stored_blocks(), rates.removed_blocks()
    if stored is None or removed is None:
        return f"stored {format_size(int(rates.stored_bytes))}/s, removed {format_size(int(rates.removed_bytes))}/s"
    return f"stored {stored:.1f} blocks/s, removed {removed:.1f} blocks/s"


def look_document(look: Look) -> dict[str, Any]:
    """Return one look as JSON shows it; without numbers while the pool is away."""
    if look.problem:
        return {"seconds": look.seconds, "pool": printable(look.pool.directory), "problem": printable(look.problem)}
    return {
        "seconds": look.seconds,
        **as_document(look.pool, list(look.rows), look.usage, now=look.seconds),
        "walked_seconds": look.walked_seconds,
        "stored_blocks_per_second": look.rates and look.rates.stored_blocks(),
        "removed_blocks_per_second": look.rates and look.rates.removed_blocks(),
        "problem": None,
    }
