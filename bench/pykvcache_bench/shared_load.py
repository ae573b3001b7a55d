"""The load of shared_pool: prompts by a Zipf law, clients that compare answers, and a sampler of the pool's size.

Clients and sampler are threads of the bench's process; what they count is guarded by a lock or read after they ended.
"""

import argparse
import concurrent.futures
import contextlib
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pykvcache_bench.processes import ProcessError, Served
from pykvcache_contract.errors import TransientError
from pykvcache_storage.inventory import fingerprint_directories, walk
from pykvcache_storage.usage import UsageLedger

SAMPLE_SECONDS = 0.2
WALK_SHARE = 1 / 5
"""The most of the time that walks may take: they share the processors with what is measured."""
WALKS_MAX = 5
"""A walk is no snapshot: a block removed behind it and one stored before it are both counted. A pool that is too large
stays so; a miscount of five walks in a row is one that we take for real."""
REFERENCE_CLIENTS = 4
FAILURES_LISTED = 5


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts, and in which order they are wanted.

    Args:
        prompts: token ids: a document, a question, one token.
        order: numbers of prompts, one per request: by the popularity of their documents.
        block_count: how many different blocks all prompts have: the working set.
    """

    prompts: list[list[int]]
    order: list[int]
    block_count: int

    @classmethod
    def of(cls, options: argparse.Namespace) -> "Workload":
        """Make up documents and questions; equal for equal options."""
        source = random.Random(options.seed)
        tokens = range(3, options.vocabulary + 1)
        prompts, weights = [], []
        for place in range(1, options.documents + 1):
            document = source.choices(tokens, k=options.document_blocks * options.offload_block)
            for _ in range(options.questions):
                prompts.append(document + source.choices(tokens, k=options.offload_block + 1))
                weights.append(place**-options.zipf)
        blocks = options.documents * (options.document_blocks + options.questions)
        count = math.ceil(options.rate * 60 * options.minutes)
        return cls(prompts, source.choices(range(len(prompts)), weights, k=count), blocks)

    @staticmethod
    def prompt_tokens(options: argparse.Namespace) -> int:
        """Return the length of every prompt."""
        blocks: int = options.document_blocks + 1
        return blocks * int(options.offload_block) + 1


def complete(server: Served, prompt: list[int], options: argparse.Namespace) -> list[int]:
    """Return the greedy answer to a prompt, as token ids."""
    body = {"model": options.model, "prompt": prompt, "max_tokens": options.new_tokens, "temperature": 0}
    answer = server.post("/v1/completions", {**body, "ignore_eos": True, "return_token_ids": True})
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def reference_answers(server: Served, workload: Workload, options: argparse.Namespace) -> dict[int, list[int]]:
    """Return the answer to every prompt that is wanted, by its number."""
    numbers = sorted(set(workload.order))
    with concurrent.futures.ThreadPoolExecutor(REFERENCE_CLIENTS) as clients:
        answers = clients.map(lambda number: complete(server, workload.prompts[number], options), numbers)
        return dict(zip(numbers, answers, strict=True))


class Answers:
    """Compares answers with the reference, and counts."""

    def __init__(self, reference: dict[int, list[int]]) -> None:
        self._reference = reference
        self._lock = threading.Lock()  # guards what follows
        self._requests = self._differing = 0
        self._failures: list[str] = []

    def note(self, number: int, tokens: list[int]) -> None:
        """Take the answer to a prompt."""
        with self._lock:
            self._requests += 1
            self._differing += tokens != self._reference[number]

    def note_failure(self, error: Exception) -> None:
        """Take a request that had no answer."""
        with self._lock:
            self._requests += 1
            self._failures.append(repr(error))

    def counts(self) -> dict[str, Any]:
        """Return the result's part."""
        return {
            "requests": self._requests,
            "failed_requests": len(self._failures),
            "differing_outputs": self._differing,
            "failed": self._failures[:FAILURES_LISTED],
        }


class Clients:
    """Threads that send prompts at their times, each to its server, until all are sent or the time is over."""

    def __init__(
        self, servers: list[Served], workload: Workload, answers: Answers, options: argparse.Namespace
    ) -> None:
        self._servers = servers
        self._prompts = workload.prompts
        self._answers = answers
        self._options = options
        self._requests = enumerate(workload.order)  # its `next` is atomic
        self._started = 0.0

    def run(self) -> None:
        """Return when the last answer is there."""
        self._started = time.monotonic()
        threads = [
            threading.Thread(target=self._send, args=(server,))
            for server in self._servers
            for _ in range(self._options.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, server: Served) -> None:
        for place, number in self._requests:
            start = self._started + place / self._options.rate
            if time.monotonic() >= self._started + 60 * self._options.minutes:
                return
            time.sleep(max(0.0, start - time.monotonic()))
            try:
                self._answers.note(number, complete(server, self._prompts[number], self._options))
            except (OSError, ValueError, LookupError, ProcessError) as error:
                self._answers.note_failure(error)


class SizeSampler:
    """A thread that measures the pool while it is `running`: its ledger five times a second, its files by walks.

    The ledger counts what is reserved, which is never less than what the files take; the walks say whether it is right.
    """

    def __init__(self, pool: str, capacity_bytes: int) -> None:
        self._pool = pool
        self._capacity_bytes = capacity_bytes
        self._ledger = UsageLedger(pool)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._samples = self._walks = self._above = self._unreadable = self._walked_bytes_max = 0
        self._ledger_bytes_max = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Measure while the context lasts."""
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()

    def counts(self) -> dict[str, int]:
        """Return the result's part."""
        return {
            "samples": self._samples,
            "walks": self._walks,
            "walks_failed": self._unreadable,
            "samples_above": self._above,
            "ledger_bytes_max": self._ledger_bytes_max,
            "walked_bytes_max": self._walked_bytes_max,
        }

    def _run(self) -> None:
        walk_at = 0.0
        while not self._is_over.wait(SAMPLE_SECONDS):
            used = self._ledger.used_bytes() or 0
            self._samples += 1
            self._above += used > self._capacity_bytes
            self._ledger_bytes_max = max(self._ledger_bytes_max, used)
            started = time.monotonic()
            if started >= walk_at:
                self._walk()
                ended = time.monotonic()
                walk_at = ended + (ended - started) * (1 / WALK_SHARE - 1)

    def _walk(self) -> None:
        try:
            used = self._measure()
        except TransientError:
            self._unreadable += 1
            return
        self._walks += 1
        self._above += used > self._capacity_bytes
        self._walked_bytes_max = max(self._walked_bytes_max, used)

    def _measure(self) -> int:
        """Return the bytes of all files of the pool; of several walks the smallest, where one finds too much."""
        used = files_size_bytes(self._pool)
        for _ in range(WALKS_MAX - 1):
            if used <= self._capacity_bytes:
                break
            used = min(used, files_size_bytes(self._pool))
        return used


def files_size_bytes(pool: str) -> int:
    """Return the bytes of the blocks, temporary and quarantined files.

    A block that is being published has two names for a moment, and is counted once.

    Raises:
        TransientError: a folder cannot be read.
    """
    sizes: dict[int, int] = {}
    for name in fingerprint_directories(pool):
        sizes |= {file.inode: file.size_bytes for file in walk(pool, name) if file is not None}
    return sum(sizes.values())
