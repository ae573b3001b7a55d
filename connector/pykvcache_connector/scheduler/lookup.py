"""Asks the disk which blocks exist, away from the scheduler's thread.

A lookup starts when a request arrives, in one batch per request. Until it is answered the request is deferred; at the
deadline it is a miss.

Facts: what the kernel remembers of 320 blocks is asked in about a millisecond, by one thread as fast as by several,
because they share the interpreter. What it must read from the disk takes 0.4 ms a block on a virtual disk: two folders
and a file, one after the other. Therefore one thread asks, and once the disk turns out slow, helpers ask side by side.

A lookup is a use of the blocks it finds: after the answer was handed over, `uses.py` gets what must be noted of it.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pykvcache_connector.scheduler.trace import Traced
from pykvcache_connector.scheduler.uses import Found, Use, use_of

logger = logging.getLogger(__name__)

MAX_WAITING_REQUESTS = 4096
"""Requests whose lookups may queue; beyond it a request is a miss at once."""

PART_KEYS = 16
"""Blocks asked about before it is decided who asks about the rest."""
PART_SECONDS_MAX = 0.001
"""What a part may take before helpers join in: several times what it takes from the kernel's memory."""
HELPER_COUNT = 16
"""Questions to the disk at once; more do not come back sooner from one disk."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Which of a request's blocks exist, completely and on every rank that writes one."""

    request_id: str
    present: tuple[bytes, ...]
    absent: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Question:
    epoch: int
    request_id: str
    keys: list[bytes]
    paths: Callable[[bytes], list[tuple[str, int]]]
    seconds: float
    traced: Traced | None


@dataclass(frozen=True, slots=True)
class _Part:
    number: int
    question: _Question
    keys: list[bytes]
    results: "queue.SimpleQueue[tuple[int, list[Found]]]"


class Lookup:
    """One thread that answers questions in order of arrival, and helpers for slow disks.

    Args:
        on_damaged: called on a thread of the lookup with a key and path whose file has a wrong size: proved bad.
        on_use: called on the lookup's thread after each answer; must not block.
        clock: monotonic seconds; a parameter for tests.
        wall_clock: Unix time; a parameter for tests.
    """

    def __init__(
        self,
        *,
        on_damaged: Callable[[bytes, str], None],
        on_use: Callable[[Use], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._on_damaged = on_damaged
        self._on_use = on_use
        self._clock = clock
        self._wall_clock = wall_clock
        self._questions: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[int, Answer]] = queue.SimpleQueue()
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._deadlines: dict[str, float] = {}
        self._epoch = 0
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="pykvcache-lookup", daemon=True)
        self._thread.start()

    def ask(
        self,
        request_id: str,
        keys: list[bytes],
        *,
        paths: Callable[[bytes], list[tuple[str, int]]],
        deadline: float,
        traced: Traced | None = None,
    ) -> bool:
        """Start a lookup and return whether it was accepted; False means that too many wait.

        Args:
            paths: gives a key's files, one per rank that writes, each with its expected size in bytes.
            deadline: on the lookup's clock.
            traced: for the request's line in the trace; None for no line.
        """
        if self._questions.qsize() >= MAX_WAITING_REQUESTS:
            return False
        self._questions.put(_Question(self._epoch, request_id, keys, paths, self._wall_clock(), traced))
        self._deadlines[request_id] = deadline
        return True

    def is_pending(self, request_id: str) -> bool:
        """Return whether the answer is still expected: not arrived and not late."""
        deadline = self._deadlines.get(request_id)
        return deadline is not None and self._clock() < deadline

    def is_late(self, request_id: str) -> bool:
        """Return whether the answer missed its deadline."""
        deadline = self._deadlines.get(request_id)
        return deadline is not None and self._clock() >= deadline

    def has_answers(self) -> bool:
        """Return whether `take_answers` would do anything; asked per block, so it costs next to nothing."""
        return not self._answers.empty()

    def take_answers(self) -> list[Answer]:
        """Return the answers that arrived since the last call; never blocks."""
        answers: list[Answer] = []
        while True:
            try:
                epoch, answer = self._answers.get_nowait()
            except queue.Empty:
                return answers
            if epoch == self._epoch:
                self._deadlines.pop(answer.request_id, None)
                answers.append(answer)

    def forget(self, request_id: str) -> None:
        """Stop waiting for a request that is gone."""
        self._deadlines.pop(request_id, None)

    def reset(self) -> None:
        """Stop waiting for everything asked so far: it concerned files that are not ours any more."""
        self._epoch += 1
        self._deadlines.clear()

    def close(self) -> None:
        """End the threads after the question they are at; waiting ones stay unanswered."""
        self._closed = True
        self._questions.put(None)

    def _main(self) -> None:
        while (question := self._questions.get()) is not None and not self._closed:
            found: list[Found] = []
            try:
                found = self._find_all(question)
                answer = _answer(question, found)
            except Exception:
                logger.exception("a lookup failed; its request is a miss")
                answer = Answer(question.request_id, (), ())
            self._answers.put((question.epoch, answer))
            self._tell_use(question, found)
        for _ in self._helpers:
            self._parts.put(None)

    def _tell_use(self, question: _Question, found: list[Found]) -> None:
        try:
            self._on_use(use_of(seconds=question.seconds, keys=question.keys, found=found, traced=question.traced))
        except Exception:
            logger.exception("a use of blocks was not noted; please report it")

    def _find_all(self, question: _Question) -> list[Found]:
        keys = question.keys
        found: list[Found] = []
        while len(found) < len(keys):
            started = time.perf_counter()
            found += self._look(question, keys[len(found) : len(found) + PART_KEYS])
            if len(found) + PART_KEYS < len(keys) and time.perf_counter() - started > PART_SECONDS_MAX:
                found += self._look_side_by_side(question, keys[len(found) :])
        return found

    def _look(self, question: _Question, keys: list[bytes]) -> list[Found]:
        return [self._find(key, question.paths(key)) for key in keys]

    def _look_side_by_side(self, question: _Question, keys: list[bytes]) -> list[Found]:
        results: queue.SimpleQueue[tuple[int, list[Found]]] = queue.SimpleQueue()
        starts = range(0, len(keys), PART_KEYS)
        while len(self._helpers) < HELPER_COUNT:
            helper = threading.Thread(target=self._help, name="pykvcache-lookup-helper", daemon=True)
            helper.start()
            self._helpers.append(helper)
        for start in starts:
            self._parts.put(_Part(start, question, keys[start : start + PART_KEYS], results))
        parts = dict(results.get() for _ in starts)
        return [block for start in starts for block in parts[start]]

    def _help(self) -> None:
        while (part := self._parts.get()) is not None:
            try:
                found = self._look(part.question, part.keys)
            except Exception:
                logger.exception("a part of a lookup failed; its blocks are a miss")
                found = [None] * len(part.keys)
            part.results.put((part.number, found))

    def _find(self, key: bytes, files: list[tuple[str, int]]) -> Found:
        found = []
        for path, size_bytes in files:
            try:
                status = os.stat(path, follow_symlinks=False)
            except OSError:
                return None
            if status.st_size != size_bytes:
                self._on_damaged(key, path)
                return None
            found.append((path, status.st_mtime_ns))
        return found


def _answer(question: _Question, found: Sequence[Found]) -> Answer:
    return Answer(
        question.request_id,
        present=tuple(key for key, files in zip(question.keys, found, strict=True) if files),
        absent=tuple(key for key, files in zip(question.keys, found, strict=True) if not files),
    )
