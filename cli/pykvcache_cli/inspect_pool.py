"""`pykvcache inspect`: what a pool holds. Reads only, follows no link, needs neither vLLM nor a running engine."""

import json
import time
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from pykvcache_cli.console import EXIT_PROBLEM, fail, printable, stderr, stdout
from pykvcache_cli.inspect_watch import INTERVAL_SECONDS_MIN, watch_pool
from pykvcache_cli.pool_table import Row, as_document, describe, make_table, sum_bytes, total_text, written_text
from pykvcache_contract.errors import PyKVCacheError
from pykvcache_contract.keys import FINGERPRINT_DIRECTORY_LENGTH, Fingerprint
from pykvcache_storage.inventory import summarise
from pykvcache_storage.pool import Pool, open_pool
from pykvcache_storage.usage import UsageLedger

if TYPE_CHECKING:
    from pykvcache_cli.verification import Findings, Verification


def command(
    pool: str = typer.Argument(..., metavar="POOL", help="The pool directory, as vLLM was given it."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object: sizes in bytes, times in Unix seconds."),
    verify: bool = typer.Option(
        False, "--verify", help="Read every block and check its header, length, key and checksum."
    ),
    fingerprint: str = typer.Option(
        "", "--fingerprint", metavar="FP", help="Only this fingerprint: its first 12 digits or more."
    ),
    watch: bool = typer.Option(
        False, "--watch", help="Go on until Ctrl-C: redraw the table; on a pipe, print a line when something changed."
    ),
    interval: float = typer.Option(
        2.0, "--interval", metavar="SECONDS", min=INTERVAL_SECONDS_MIN, help="With --watch: between two looks."
    ),
) -> None:
    """Show what a pool holds: per fingerprint the model, the number of blocks, their bytes and ages.

    A fingerprint stands for everything that changes the bytes of a block: model, weights, data type, layout, hash seed.
    After a change of one of them there is a second one, and the blocks of the first only wait to be evicted. Temporary
    files belong to stores under way. Quarantined blocks were proved damaged and are never used.

    --watch takes the fill level, what may be written today and the rates from the pool's ledger at every look; blocks
    are counted by walks that take at most a fifth of the time, so in a large pool their number is minutes old. With
    --json it prints one object a line. A pool that is unmounted meanwhile is said to be, and watched again when it is
    back.

    Exit status: 0 fine; 1 a block is damaged or cannot be read; 2 the pool cannot be read.

    Examples: pykvcache inspect /var/cache/kv --verify; pykvcache inspect /var/cache/kv --watch
    """
    _check_options(verify=verify, watch=watch, fingerprint=fingerprint)
    try:
        opened = open_pool(pool, create=False)
        if watch:
            return watch_pool(opened, fingerprint=fingerprint, interval=interval, as_json=as_json)
        rows = _select([describe(opened, summary) for summary in summarise(opened.directory)], wanted=fingerprint)
        verification = _verify(opened, rows) if verify else None
    except PyKVCacheError as error:
        fail(str(error))
    _print(opened, rows, verification, as_json=as_json)
    if verification is not None and not (verification.is_clean and all(row.fingerprint for row in rows)):
        raise typer.Exit(EXIT_PROBLEM)


def _check_options(*, verify: bool, watch: bool, fingerprint: str) -> None:
    if verify and watch:
        fail("--verify reads every block, which --watch would do again and again. Give one of them.")
    if fingerprint and len(fingerprint) < FINGERPRINT_DIRECTORY_LENGTH:
        fail(f"--fingerprint {fingerprint}: give at least {FINGERPRINT_DIRECTORY_LENGTH} digits")


def _select(rows: list[Row], *, wanted: str) -> list[Row]:
    selected = [row for row in rows if row.is_wanted(wanted)]
    if wanted and not selected:
        fail(f"no fingerprint {wanted} in this pool. There: {', '.join(r.summary.directory for r in rows) or 'none'}")
    return selected


def _verify(opened: Pool, rows: list[Row]) -> "Verification":
    try:
        # Imported here because it needs numpy, and a plain look at a pool does not.
        from pykvcache_cli.verification import verify_blocks
    except ModuleNotFoundError as error:
        fail(f"--verify needs {error.name}. Install it: pip install {error.name}")

    known = [row for row in rows if row.fingerprint is not None]
    fingerprints = [Fingerprint(str(row.fingerprint)) for row in known]
    return verify_blocks(opened.directory, fingerprints, total_bytes=sum_bytes(known))


def _print(opened: Pool, rows: list[Row], verification: "Verification | None", *, as_json: bool) -> None:
    usage, now = UsageLedger(opened.directory).usage(), time.time()
    if as_json:
        found = None if verification is None else _verification_document(verification)
        print(json.dumps({**as_document(opened, rows, usage, now=now), "verification": found}, indent=2))
        return
    out = stdout()
    out.print(make_table(opened, rows, now=now))
    out.print(total_text(rows, usage))
    if usage is not None and usage.write_budget_bytes:
        out.print(f"Write budget: {written_text(usage, now)}.")
    _print_remarks(rows, verification)


def _print_remarks(rows: list[Row], verification: "Verification | None") -> None:
    for row in rows:
        if row.problem:
            consequence = "" if verification is None else " Its blocks cannot be verified without."
            stderr().print(f"[yellow]{row.summary.directory}:[/] {escape(printable(row.problem + consequence))}")
    if verification is not None:
        _print_findings("damaged", verification.damaged)
        _print_findings("unreadable", verification.unreadable)
        bad = f"{verification.damaged.count} damaged, {verification.unreadable.count} unreadable"
        stdout().print(f"Verified: {verification.checked} blocks, {bad}.")


def _print_findings(kind: str, findings: "Findings") -> None:
    out = stdout()
    for path, reason in findings.listed:
        out.print(f"[bold red]{kind}[/] {escape(path)}: {escape(printable(reason))}", soft_wrap=True)
    if findings.count > len(findings.listed):
        out.print(f"… and {findings.count - len(findings.listed)} more {kind} blocks")


def _verification_document(verification: "Verification") -> dict[str, Any]:
    return {
        "checked": verification.checked,
        "damaged": verification.damaged.count,
        "unreadable": verification.unreadable.count,
        "findings": [
            {"path": path, "kind": kind, "reason": printable(reason)}
            for kind, findings in (("damaged", verification.damaged), ("unreadable", verification.unreadable))
            for path, reason in findings.listed
        ],
    }
