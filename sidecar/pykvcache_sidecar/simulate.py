"""`pykvcache-sidecar simulate`: replays request traces against pools of several sizes and policies. Touches no pool.

Every pool is simulated side by side while the trace is read once (replay.py, trace.py). Results go to stdout, remarks
and progress to stderr.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from pykvcache_contract.errors import ConfigurationError, PyKVCacheError
from pykvcache_contract.units import format_size, parse_size
from pykvcache_sidecar import signals
from pykvcache_sidecar.costs import read_costs
from pykvcache_sidecar.policy import POLICY_NAMES
from pykvcache_sidecar.replay import Bounds, Endless, Replay, Tally, saved_work, total
from pykvcache_sidecar.trace import Request, Trace, merge

_REPLAYS_MAX = 64
"""Pools side by side; each remembers its blocks."""
_FINGERPRINTS_SHOWN = 8
_PIPE_WIDTH = 160
_PROGRESS_REQUESTS = 256
"""Requests between two updates of the progress bar."""
_POINTS_MIN = 0.05
"""Smaller differences vanish in print."""
_ENDLESS = "endless"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one simulated pool did.

    Args:
        policy: "endless" for the pool without bounds, whose capacity is None.
        saved_work: share of the work for all prompts that hits saved; None if no cost is known.
        tallies: by fingerprint.
    """

    policy: str
    capacity_bytes: int | None
    all: Tally
    saved_work: float | None
    tallies: dict[str, Tally]

    @property
    def merit(self) -> float:
        """Return what policies are compared by."""
        return self.all.hit_rate if self.saved_work is None else self.saved_work


def command(
    traces: list[str] = typer.Argument(..., metavar="TRACE", help="Trace files; several are merged by time."),
    capacity: list[str] = typer.Option(..., "--capacity", metavar="SIZE", help="Size of the pool; may be repeated."),
    policy: list[str] = typer.Option(list(POLICY_NAMES), "--policy", help="lru or cost; may be repeated."),
    high: float = typer.Option(0.9, "--high", help="Share of the capacity above which eviction starts."),
    low: float = typer.Option(0.8, "--low", help="Share of the capacity at which eviction ends."),
    interval: float = typer.Option(1.0, "--interval", help="Seconds between two looks of the sidecar."),
    pool: str = typer.Option(
        "", "--pool", metavar="DIR", help="A pool with the same models: tells what their blocks cost."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object: sizes in bytes, rates from 0 to 1."),
) -> None:
    """Say which hit rate a pool of a given size and eviction policy would have had.

    A trace holds one line a request, with the hashes of its prompt's blocks and no text. vLLM writes one when the
    connector's option "trace" names a file. "hit rate" is the share of prompt tokens found in the pool; "work saved"
    weighs them by what the model takes to compute them, which is what the cost policy is for and needs --pool. The last
    row is a pool without bounds: no policy and no capacity finds more.

    Hits that vLLM would find in GPU memory are counted too, so real savings are smaller, in all rows alike.

    Exit status: 0 fine; 2 a trace or an option cannot be used.

    Example: pykvcache-sidecar simulate requests.jsonl --capacity 64GiB --capacity 256GiB --pool /var/cache/kv
    """
    signals.release()
    try:
        bounds = [_bounds(text, high=high, low=low, interval=interval) for text in dict.fromkeys(capacity)]
        costs = _read_costs(pool) if pool else {}
        replays = [Replay(policy=name, costs=costs, bounds=each) for each in bounds for name in dict.fromkeys(policy)]
        if len(replays) > _REPLAYS_MAX:
            raise ConfigurationError(f"{len(replays)} pools at once are too many; at most {_REPLAYS_MAX}")
        outcomes = _simulate(traces, replays, costs)
    except PyKVCacheError as error:
        _fail(str(error))
    if "cost" in policy and not pool:
        _remark("without --pool every model's blocks cost the same, and the cost policy orders as lru does")
    if as_json:
        typer.echo(json.dumps(_as_document(outcomes, costs), indent=2))
    else:
        _print_outcomes(outcomes)


# ---- work ----


def _bounds(capacity: str, *, high: float, low: float, interval: float) -> Bounds:
    try:
        capacity_bytes = parse_size(capacity)
    except ValueError as error:
        raise ConfigurationError(f"--capacity {error}") from error
    if capacity_bytes == 0:
        raise ConfigurationError("--capacity is zero: name a size, for example 64GiB")
    if not 0 < low < high <= 1:
        raise ConfigurationError(f"--low {low:g} --high {high:g}: both are shares of the capacity, 0 < low < high <= 1")
    if not 0.01 <= interval <= 86_400:
        raise ConfigurationError(f"--interval {interval:g}: between 0.01 and 86400 seconds")
    return Bounds(capacity_bytes, high=high, low=low, interval_seconds=interval)


def _read_costs(pool: str) -> dict[str, float]:
    costs = read_costs(pool)
    if not costs:
        _remark(f"no model in {pool} says what its blocks cost: all count the same")
    return costs


def _simulate(paths: list[str], replays: list[Replay], costs: Mapping[str, float]) -> list[Outcome]:
    endless = Endless()
    traces = [Trace(path) for path in paths]
    count = 0
    for request in _shown(traces):
        count += 1
        endless.serve(request)
        for replay in replays:
            replay.serve(request)
    for remark in (remark for trace in traces for remark in trace.remarks):
        _remark(remark)
    if not count:
        raise ConfigurationError(f"no request in {', '.join(paths)}")
    outcomes = [_outcome(each.policy, each.bounds.capacity_bytes, each.tallies, costs) for each in replays]
    return [*outcomes, _outcome(_ENDLESS, None, endless.tallies, costs)]


def _outcome(policy: str, capacity_bytes: int | None, tallies: dict[str, Tally], costs: Mapping[str, float]) -> Outcome:
    return Outcome(policy, capacity_bytes, total(tallies.values()), saved_work(tallies, costs), tallies)


def _shown(traces: list[Trace]) -> Iterator[Request]:
    """Yield the requests by time, with a progress bar where somebody looks at stderr."""
    console = _stderr()
    size = sum(os.path.getsize(trace.path) for trace in traces if os.path.isfile(trace.path))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=size or None)
        for number, request in enumerate(merge(traces)):
            if number % _PROGRESS_REQUESTS == 0:
                progress.update(task, completed=sum(trace.read_bytes for trace in traces))
            yield request


# ---- for people ----


def _print_outcomes(outcomes: list[Outcome]) -> None:
    out = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    everything = outcomes[-1].all
    table = Table(title=f"{everything.requests} requests, {everything.lookup_tokens} tokens looked up")
    for name in ("capacity", "policy"):
        table.add_column(name, no_wrap=True)
    shown = list(outcomes[-1].tallies)[:_FINGERPRINTS_SHOWN] if len(outcomes[-1].tallies) > 1 else []
    rates = ["hit rate"] if outcomes[-1].saved_work is None else ["hit rate", "work saved"]
    for name in (*rates, "stored", "evicted", "refused", *shown):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(*_cells(outcome, shown))
    out.print(table)
    if len(outcomes[-1].tallies) > _FINGERPRINTS_SHOWN:
        _remark(f"{len(outcomes[-1].tallies) - _FINGERPRINTS_SHOWN} more fingerprints; --json tells all")
    for line in verdicts(outcomes):
        out.print(line)


def _cells(outcome: Outcome, shown: list[str]) -> list[str]:
    sizes = (outcome.all.stored_bytes, outcome.all.evicted_bytes, outcome.all.refused_bytes)
    rates = [outcome.all.hit_rate] + ([] if outcome.saved_work is None else [outcome.saved_work])
    return [
        *(
            ("no bounds", "")
            if outcome.capacity_bytes is None
            else (format_size(outcome.capacity_bytes), outcome.policy)
        ),
        *(f"{rate:.1%}" for rate in rates),
        *(format_size(size) for size in sizes),
        *(f"{outcome.tallies[name].hit_rate:.1%}" for name in shown),
    ]


def verdicts(outcomes: list[Outcome]) -> list[str]:
    """Return a sentence for each capacity: which policy is better, and by how many percentage points."""
    by_capacity: dict[int, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.capacity_bytes is not None:
            by_capacity.setdefault(outcome.capacity_bytes, []).append(outcome)
    return [_verdict(capacity, same) for capacity, same in by_capacity.items() if len(same) > 1]


def _verdict(capacity_bytes: int, outcomes: list[Outcome]) -> str:
    best, second, *_ = sorted(outcomes, key=lambda outcome: -outcome.merit)
    size, gain = format_size(capacity_bytes), 100 * (best.merit - second.merit)
    if gain < _POINTS_MIN:
        return f"{size}: no difference between {best.policy} and {second.policy}."
    if best.saved_work is None:
        return f"{size}: {best.policy} finds {gain:.1f} points more than {second.policy}."
    hits = 100 * (best.all.hit_rate - second.all.hit_rate)
    side = "higher" if hits >= 0 else "lower"
    return (
        f"{size}: {best.policy} saves {gain:.1f} points more work than {second.policy}; "
        f"its hit rate is {abs(hits):.1f} points {side}."
    )


def _stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def _remark(text: str) -> None:
    _stderr().print(f"[yellow]Remark:[/] {escape(text)}")


def _fail(text: str) -> NoReturn:
    _stderr().print(f"[bold red]Error:[/] {escape(text)}")
    raise typer.Exit(2)


# ---- for programs ----


def _as_document(outcomes: list[Outcome], costs: Mapping[str, float]) -> dict[str, Any]:
    return {"costs": dict(costs), "outcomes": [_outcome_document(outcome) for outcome in outcomes]}


def _outcome_document(outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": outcome.policy,
        "capacity_bytes": outcome.capacity_bytes,
        **_tally_document(outcome.all),
        "saved_work": outcome.saved_work,
        "fingerprints": {name: _tally_document(tally) for name, tally in outcome.tallies.items()},
    }


def _tally_document(tally: Tally) -> dict[str, Any]:
    return {**asdict(tally), "hit_rate": tally.hit_rate}
