"""`pykvcache-sidecar run`: cares for one pool directory until it is told to stop.

The main thread waits for SIGTERM or SIGINT; caring, scanning, scrubbing and HTTP have threads of their own. The end
takes less than two seconds, whatever they do, and may cut them off anywhere: each removal is one system call, and what
a kill leaves behind is a count that errs upwards until the next scan.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import NoReturn

import typer

from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError
from pykvcache_contract.units import format_size
from pykvcache_sidecar import signals
from pykvcache_sidecar.book import Book
from pykvcache_sidecar.care import Care, PatientCare
from pykvcache_sidecar.policy import DEFAULT_POLICY, POLICY_NAMES
from pykvcache_sidecar.server import PoolAnswers, serve
from pykvcache_sidecar.settings import CareSettings, parse_listen, parse_size_option
from pykvcache_storage.pool import open_pool

logger = logging.getLogger(__name__)

EXIT_UNUSABLE = 2
END_SECONDS = 1.2
"""How long the end waits for the caring thread; a disk that hangs longer is left alone."""
_DAY_SECONDS = 86_400
_HOUR_SECONDS = 3_600


def command(
    pool: str = typer.Option(
        ..., "--pool", metavar="DIR", help="The pool directory, as vLLM is given it. It must exist."
    ),
    capacity: str = typer.Option(
        ...,
        metavar="SIZE",
        help="Most that the pool may take, for example 64GiB. Writers stop there, eviction keeps below.",
    ),
    high: float = typer.Option(
        0.9, help="Evict when the pool takes more than this share of its capacity; below 1, where writers stop."
    ),
    low: float = typer.Option(0.8, help="Evict down to this share."),
    min_free: str = typer.Option(
        "0", metavar="SIZE", help="Keep this much of the filesystem free, whoever fills it: the pool gives way."
    ),
    write_budget: str = typer.Option(
        "0", metavar="SIZE", help="Most that may be written a day (UTC), to spare the disk; 0 for no limit."
    ),
    policy: str = typer.Option(
        DEFAULT_POLICY,
        metavar="|".join(POLICY_NAMES),
        help="What leaves first: lru, the block unused for longest; cost, weighed with what recomputing it costs.",
    ),
    scrub_rate: str = typer.Option(
        "8MiB", metavar="SIZE", help="Read and verify blocks at this many bytes a second; 0 to leave it out."
    ),
    unused_days: float = typer.Option(
        14.0,
        help="Remove a fingerprint (a model that changed, a vLLM that was upgraded) unused for so long; 0 for never.",
    ),
    quarantine_hours: float = typer.Option(
        24.0,
        help="Keep damaged files for so long, to be looked at; when something must be evicted they leave first, "
        "whatever their age.",
    ),
    require_mount: bool = typer.Option(
        False,
        "--require-mount",
        help="Refuse to start unless DIR is a mount point, or a link to one: a forgotten disk fills no other one.",
    ),
    listen: str = typer.Option(
        "0.0.0.0:9478", metavar="ADDRESS:PORT", help="Where /metrics, /healthz, /readyz and /status are served."
    ),
    interval: float = typer.Option(1.0, help="Seconds between two looks at the pool, at most 10."),
    patient: bool = typer.Option(
        False, "--patient", help="For pods: start whatever is wrong with DIR or the port, and wait until it is well."
    ),
) -> None:
    """Keep one pool within its bounds and whole, and tell how it is. Runs until SIGTERM or SIGINT.

    It evicts from the high to the low watermark, least recently used first and tails of prefixes before their heads;
    removes what killed writers left; verifies blocks and moves damaged ones aside; does nothing while the pool's disk
    is not mounted. Several may run on one pool: one works, the others stand by. Without it a pool that is full stays
    full, and stores nothing more. The limits stay in the pool when it ends.

    Exit status: 0 after a signal; 2 if an option is wrong or, without --patient, the directory cannot be a pool.

    Example: pykvcache-sidecar run --pool /var/cache/kv --capacity 64GiB --min-free 10GiB
    """
    try:
        host, port = parse_listen(listen)
        settings = CareSettings(
            pool_directory=os.path.abspath(pool),
            capacity_bytes=parse_size_option("--capacity", capacity),
            high=high,
            low=low,
            min_free_bytes=parse_size_option("--min-free", min_free),
            write_budget_bytes=parse_size_option("--write-budget", write_budget),
            policy=policy,
            scrub_bytes_per_second=parse_size_option("--scrub-rate", scrub_rate),
            unused_seconds=unused_days * _DAY_SECONDS,
            quarantine_seconds=quarantine_hours * _HOUR_SECONDS,
            require_mount=require_mount,
            interval_seconds=interval,
        )
        start_logging()
        (care_patiently if patient else care)(settings, host=host, port=port)
    except (ConfigurationError, PoolUnavailableError) as error:
        fail(str(error))


def care(settings: CareSettings, *, host: str, port: int) -> None:
    """Open the pool and care for it until a signal comes.

    Args:
        host, port: where HTTP is served; port 0 takes a free one.

    Raises:
        ConfigurationError, PoolUnavailableError: the start failed; nothing runs.
    """
    with signals.released():
        if os.path.isdir(settings.pool_directory):
            settings.check_mount()
        pool = open_pool(settings.pool_directory, create=True)
    book, stopped = Book(settings), threading.Event()
    server = serve(PoolAnswers(book).paths, host=host, port=port)
    logger.info("%s; listening on %s:%s", _announcement(settings, pool.uid), host, server.server_address[1])
    _until_signal(Care(settings=settings, pool=pool, book=book, stopped=stopped).run, server=server, stopped=stopped)


def care_patiently(settings: CareSettings, *, host: str, port: int) -> None:
    """Serve HTTP at once, on a free port if that one is taken, and care for the pool when there is one, until a signal.

    Raises:
        ConfigurationError: the host is no address of this machine; nothing runs.
    """
    signals.hold()
    book, stopped = Book(settings), threading.Event()
    answers = PoolAnswers(book, is_patient=True).paths
    try:
        server = serve(answers, host=host, port=port)
    except ConfigurationError as error:
        logger.warning("%s Listening on a free port meanwhile, where nobody looks for metrics.", error)
        server = serve(answers, host=host, port=0)
    logger.info("%s; listening on %s:%s", _announcement(settings, ""), host, server.server_address[1])
    _until_signal(PatientCare(settings=settings, book=book, stopped=stopped).run, server=server, stopped=stopped)


def _until_signal(caring: Callable[[], None], *, server: ThreadingHTTPServer, stopped: threading.Event) -> None:
    thread = threading.Thread(target=caring, name="pykvcache-care", daemon=True)
    thread.start()
    signals.wait()
    stopped.set()
    server.shutdown()
    server.server_close()
    thread.join(END_SECONDS)
    if thread.is_alive():
        # It sits on a disk that does not answer; waiting longer, or cleaning up, would not help.
        logger.warning("stopped while the disk did not answer")
        logging.shutdown()
        os._exit(0)
    logger.info("stopped")


def _announcement(settings: CareSettings, uid: str) -> str:
    known = f" (uid {uid})" if uid else ""
    parts = [
        f"caring for {settings.pool_directory}{known}: at most {format_size(settings.capacity_bytes)}",
        f"evicting from {settings.high:.0%} to {settings.low:.0%} by {settings.policy}",
    ]
    if settings.min_free_bytes:
        parts.append(f"keeping {format_size(settings.min_free_bytes)} of the disk free")
    if settings.write_budget_bytes:
        parts.append(f"writing at most {format_size(settings.write_budget_bytes)} a day")
    if settings.scrub_bytes_per_second:
        parts.append(f"verifying {format_size(settings.scrub_bytes_per_second)} a second")
    return ", ".join(parts)


def start_logging() -> None:
    """Send log lines to stderr, in the form of every command that runs on."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


def fail(message: str) -> NoReturn:
    """End the command with a message about its options."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(EXIT_UNUSABLE)
