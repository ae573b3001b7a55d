"""Waiting for what other processes do: always with a deadline, and an error that says what was seen last."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Answer = TypeVar("Answer")


class NotYetError(Exception):
    """A probe may raise it to say what is missing."""


def wait_for(what: str, probe: Callable[[], Answer], *, limit_s: float = 120, every_s: float = 0.2) -> Answer:
    """Call the probe until its answer is true, and return that.

    A probe that raises NotYetError, as KubectlError is, or OSError is asked again.

    Raises:
        TimeoutError: not within limit_s; the message holds `what` and the last answer or error.
    """
    end = time.monotonic() + limit_s
    while True:
        try:
            answer = probe()
            if answer:
                return answer
            seen = repr(answer)
        except (NotYetError, OSError) as error:
            seen = f"{type(error).__name__}: {error}"
        if time.monotonic() >= end:
            raise TimeoutError(f"waited {limit_s:g} s for {what}; last seen: {seen[:4000]}")
        time.sleep(every_s)


def say(text: str) -> None:
    """Tell the person who waits; pytest shows it with -s and after a failure."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Say how long something took, or that it failed."""
    started = time.monotonic()
    outcome = "failed: "
    try:
        yield
        outcome = ""
    finally:
        say(f"{time.monotonic() - started:6.1f} s  {outcome}{what}")
