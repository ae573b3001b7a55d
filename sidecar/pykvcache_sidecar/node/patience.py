"""Asking disks what may never be answered: on a thread of its own each, waited for only so long.

Facts: a call that waits for a dead disk cannot be ended, and its thread stays until the disk answers. What they mean:
one disk must not keep the others waiting; and it is not asked again while an earlier question is open, so there are
never more threads than disks. One asking thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Patience:
    """Asks, and goes on without an answer.

    Args:
        seconds: how long each question is waited for.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: dict[str, Future[Any]] = {}

    def ask(self, about: str, question: Callable[[], T]) -> T:
        """Return the answer, or raise what the question raises.

        Args:
            about: whatever hangs together: one question about it is open at a time.

        Raises:
            TimeoutError: no answer in time, or an earlier question about the same is still open.
        """
        earlier = self._open.get(about)
        if earlier is not None and not earlier.done():
            raise TimeoutError(f"{about} still does not answer")
        answer: Future[T] = Future()
        self._open[about] = answer
        threading.Thread(target=_answer, args=(question, answer), name="pykvcache-ask", daemon=True).start()
        result = answer.result(self.seconds)
        del self._open[about]
        return result


def _answer(question: Callable[[], T], answer: "Future[T]") -> None:
    try:
        answer.set_result(question())
    except BaseException as error:  # it belongs to whoever asked
        answer.set_exception(error)
