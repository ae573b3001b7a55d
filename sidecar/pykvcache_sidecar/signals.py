"""The signals that end a command which runs on: held from its first line, fetched by its main thread.

Facts: a signal acts in any thread that does not block it, and the import of numpy starts threads; threads inherit what
is blocked. The first process of a container loses signals for which it has no handler. What they mean: blocked before
anything else is imported, they wait until somebody asks. No handler, which could run anywhere.
"""

import contextlib
import signal
from collections.abc import Iterator

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def hold() -> None:
    """Keep them waiting: in this thread, and in those that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)


def release() -> None:
    """Let them do in this thread what they usually do, also those that came meanwhile."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _END_SIGNALS)


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Let them end the process for as long as the context lasts, where something may hang.

    Raises:
        SystemExit: one came meanwhile.
    """
    if signal.sigpending().intersection(_END_SIGNALS):
        raise SystemExit(0)
    release()
    try:
        yield
    finally:
        hold()


def wait() -> None:
    """Return when one comes, or at once if one came while they were held."""
    signal.sigwait(_END_SIGNALS)
