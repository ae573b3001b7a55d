"""What all sub-commands share in talking to people: tables, errors, ages. Results go to stdout, remarks to stderr."""

import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

EXIT_PROBLEM = 1
"""The command worked and found something wrong."""

EXIT_UNUSABLE = 2
"""The command could not do what it was asked to."""

_PIPE_WIDTH = 160
"""Columns when stdout is no terminal, so that a table in a log is not cut to 80."""


def stdout() -> Console:
    """Return a console for results."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def stderr() -> Console:
    """Return a console for remarks and progress."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str, *, exit_code: int = EXIT_UNUSABLE) -> NoReturn:
    """Print an error and end the command."""
    stderr().print(f"[bold red]Error:[/] {escape(message)}")
    raise typer.Exit(exit_code)


def printable(text: str) -> str:
    """Return text that any terminal can show: bytes that are no UTF-8 become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def format_age(seconds: float | None) -> str:
    """Return an age for people, in its largest unit.

    >>> format_age(None), format_age(-3), format_age(59), format_age(7260), format_age(200_000)
    ('-', '0 s', '59 s', '2 h', '2 d')
    """
    if seconds is None:
        return "-"
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
