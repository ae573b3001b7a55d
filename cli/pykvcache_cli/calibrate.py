"""`pykvcache calibrate storage`: measure the disk of a directory, show it to people and to programs.

A measurement is refused or stopped in a way that leaves nothing behind: signals become an exception in the main thread,
so that the folder of test files goes away. Where a result file is given, a failure is written there too.
"""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pykvcache_bench.calibration.storage import CalibrationSettings, calibrate_storage
from pykvcache_cli.console import fail, stderr, stdout
from pykvcache_contract.api.node import ProfilePoint
from pykvcache_contract.calibration import (
    EXIT_TRY_AGAIN,
    EXIT_UNSUPPORTED,
    CalibrationRefusal,
    StorageCalibration,
    encode_calibration,
)
from pykvcache_contract.errors import CapacityError, ConfigurationError, PyKVCacheError, ReadOnlyError
from pykvcache_contract.units import format_size, parse_size

SECONDS_MIN, SECONDS_MAX = 0.1, 600.0

command = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
_NEVER_RETRY = (CapacityError, ConfigurationError, ReadOnlyError)


class _Stopped(BaseException):
    """A signal asks the process to end."""

    def __init__(self, number: int) -> None:
        self.number = number


@command.callback()
def _group() -> None:
    """Measure what this machine's hardware can do for the cache.

    `pykvcache calibrate storage DIR` measures the disk that holds a directory, with the code that vLLM will use.
    """


@command.command()
def storage(
    directory: str = typer.Argument(..., metavar="DIR", help="A directory on the disk: the pool's, or any other."),
    seconds: float = typer.Option(15.0, "--seconds", help=f"How long to measure, {SECONDS_MIN} to {SECONDS_MAX:.0f}."),
    size: str = typer.Option(
        "4GiB", "--bytes", metavar="SIZE", help="Test files of this size at most, and of a twentieth of the free space."
    ),
    min_free: str = typer.Option("0", "--min-free", metavar="SIZE", help="What must stay free on the filesystem."),
    result: str = typer.Option(
        "", "--result", metavar="FILE", help="Also write the JSON there, in place, at most 4096 bytes; failures too."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the JSON instead of a table."),
) -> None:
    """Measure how fast the disk of a directory reads and writes KV blocks.

    Writes test files into a hidden folder of DIR, reads them back in blocks of 256 KiB to 16 MiB, 1 to 32 in flight, by
    one request or by eight at once, and removes them, also when it is stopped; what a killed run left, the next one
    removes. It uses the engine and the direct I/O that the cache would use there (`pykvcache doctor DIR` says which).
    No GPU takes part.

    "contended" means that others moved more than a fifth as many bytes on that disk meanwhile: then the disk can do
    more than this says. "buffered" means that direct I/O is refused there, and figures include the page cache's work.

    Exit status: 0 measured; 1 not this time, try again; 2 wrong arguments; 42 never here: read-only, no space, no
    directory.

    Example: pykvcache calibrate storage /var/cache/kv --seconds 5
    """
    try:
        settings = CalibrationSettings(seconds, parse_size(size), parse_size(min_free))
    except ValueError as error:
        fail(f"--bytes or --min-free: {error}")
    if not SECONDS_MIN <= seconds <= SECONDS_MAX:
        fail(f"--seconds {seconds} is not from {SECONDS_MIN} to {SECONDS_MAX:.0f}")
    try:
        with _signals_raise(), _progress(quiet=as_json) as on_progress:
            measured = calibrate_storage(directory, settings, on_progress=on_progress)
    except (PyKVCacheError, OSError) as error:
        _refuse(error, result)
    except _Stopped as stop:
        _write_result(result, CalibrationRefusal("the measurement was stopped by a signal", retry=True))
        raise typer.Exit(128 + stop.number) from None
    _write_result(result, measured)
    _show(measured, as_json=as_json)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Let the first signal to end raise an exception here, and further ones not disturb the clean-up."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    former = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """Show on a terminal how far the measurement is."""
    console = stderr()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("preparing", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share)


def _refuse(error: Exception, result: str) -> NoReturn:
    retry = not isinstance(error, _NEVER_RETRY)
    _write_result(result, CalibrationRefusal(str(error), retry=retry))
    fail(str(error), exit_code=EXIT_TRY_AGAIN if retry else EXIT_UNSUPPORTED)


def _write_result(path: str, outcome: StorageCalibration | CalibrationRefusal) -> None:
    """Write the document in place: a container's termination message is a file that must not be replaced."""
    if not path:
        return
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(encode_calibration(outcome))
    except OSError as error:
        fail(f"--result {path} cannot be written: {error.strerror}", exit_code=EXIT_TRY_AGAIN)


def _show(measured: StorageCalibration, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json.loads(encode_calibration(measured)), indent=2))
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("block")
    table.add_column("depth", justify="right")
    table.add_column("readers", justify="right")
    table.add_column("read/s", justify="right")
    table.add_column("latency", justify="right")
    for point in sorted(measured.points, key=_by_concurrency):
        latency = f"{point.latency_microseconds / 1000:.2f} ms"
        rate = format_size(point.read_bytes_per_second)
        table.add_row(format_size(point.block_bytes), str(point.depth), str(point.readers), rate, latency)
    out = stdout()
    out.print(table)
    out.print()
    out.print(_summary(measured), soft_wrap=True, markup=False)


def _by_concurrency(point: ProfilePoint) -> tuple[int, int, int]:
    return point.readers, point.depth, point.block_bytes


def _summary(measured: StorageCalibration) -> str:
    where = f"{measured.filesystem} on {measured.disk_model or 'a disk without a model name'}"
    how = f"{measured.engine}, {'buffered' if measured.buffered else 'direct I/O'}, kernel {measured.kernel}"
    read, write = format_size(measured.read_bytes_per_second), format_size(measured.write_bytes_per_second)
    told = {
        True: "contended: others used the disk too",
        False: "not contended",
        None: "others' use is not visible here",
    }
    cut = "" if measured.complete else " Time did not suffice for every point: give more --seconds."
    return (
        f"Reads {read}/s at best, writes {write}/s ({where}; {how}; {told[measured.contended]}). "
        f"Moved {format_size(measured.bytes)} in {measured.seconds:.1f} s.{cut}"
    )
