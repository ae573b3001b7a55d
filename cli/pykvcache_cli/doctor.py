"""`pykvcache doctor`: what will be used on this machine and in this pool, why, and how to repair the rest."""

import json
import os
from dataclasses import asdict

import typer
from rich.markup import escape
from rich.table import Table

from pykvcache_cli.checks import Finding, Level, check_engine_anywhere, check_machine, check_pool
from pykvcache_cli.console import EXIT_PROBLEM, fail, printable, stdout
from pykvcache_contract.units import parse_size

_STYLES = {Level.FINE: "green", Level.WARNING: "yellow", Level.FATAL: "bold red"}


def command(
    pool: str = typer.Argument("", metavar="POOL", help="The pool directory, or an empty one that will become it."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object with every finding."),
    capacity: str = typer.Option(
        "", "--capacity", metavar="SIZE", help="What the pool may hold, as in vLLM's configuration, e.g. 64GiB."
    ),
) -> None:
    """Say what py-kvcache will use here and why: engine, direct I/O, publish method, space, versions.

    Run it where vLLM runs: in the same container, as the same user, with the same environment. Everything is tried for
    real in a temporary folder of the pool, which is removed. A warning costs speed or hits; an error keeps the pool
    from being used, and vLLM then runs without the cache.

    Exit status: 0 usable, perhaps with warnings; 1 something prevents use; 2 wrong arguments.

    Example: pykvcache doctor /var/cache/kv --capacity 64GiB
    """
    try:
        capacity_bytes = parse_size(capacity) if capacity else None
    except ValueError as error:
        fail(f"--capacity: {error}")
    findings = list(check_machine())
    findings += check_pool(os.path.abspath(pool), capacity_bytes) if pool else check_engine_anywhere()
    usable = all(finding.level is not Level.FATAL for finding in findings)
    if as_json:
        rows = [{**asdict(finding), "level": finding.level.value} for finding in findings]
        print(json.dumps({"usable": usable, "findings": rows}, indent=2))
    else:
        _print_findings(findings, usable=usable)
    if not usable:
        raise typer.Exit(EXIT_PROBLEM)


def _print_findings(findings: list[Finding], *, usable: bool) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.level]
        cells = (finding.subject, finding.value, finding.reason)
        subject, value, reason = (escape(printable(cell)) for cell in cells)
        table.add_row(subject, f"[{style}]{value}[/]", reason)
    out = stdout()
    out.print(table)
    problems = [finding for finding in findings if finding.level is not Level.FINE]
    out.print()
    for number, finding in enumerate(problems, start=1):
        mark = f"[{_STYLES[finding.level]}]{finding.level.value}[/]"
        remedy = escape(printable(finding.remedy))
        out.print(f"{number}. {mark} {finding.subject}: {remedy}", soft_wrap=True)
    verdict = "The cache can be used." if usable else "The cache cannot be used like this."
    out.print(f"{verdict} {len(problems)} {'problem' if len(problems) == 1 else 'problems'}.")
