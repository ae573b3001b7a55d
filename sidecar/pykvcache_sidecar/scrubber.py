"""Reads every block again and again, slowly, and moves aside what is proved damaged, before a request finds it so.

Facts: a disk may return wrong bytes without an error; an error of reading proves nothing. What they mean: only reading
everything finds silent damage, and only `CorruptBlockError` is a proof. Therefore blocks are verified one after the
other at a rate of bytes, without end, and nothing else is ever moved. Blocks whose fingerprint's config.json is missing
cannot be verified and are passed over. A pass begins anew when the process does; nothing is remembered.

One thread of its own, ended within a block. A block is read whole before it is paid for, so the rate holds over
several blocks, not within one.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

from pykvcache_contract.errors import BlockMissingError, CorruptBlockError, PyKVCacheError, TransientError
from pykvcache_contract.keys import Fingerprint
from pykvcache_sidecar.book import Book
from pykvcache_sidecar.pace import TokenBucket, pause_after
from pykvcache_storage.fingerprints import describe
from pykvcache_storage.inventory import STEP_ENTRIES, Kind, PoolFile, fingerprint_directories, walk
from pykvcache_storage.removal import Removed, Remover
from pykvcache_storage.verify import verify_block

logger = logging.getLogger(__name__)

PASS_PAUSE_SECONDS = 60.0
"""Between two passes: a small pool need not be read without end, an empty one not be walked."""
_WHAT_BECAME = {
    Removed.REMOVED: "was moved to quarantine",
    Removed.GONE: "was left alone, it is gone",
    Removed.USED: "was left alone, another one is in its place",
    Removed.FAILED: "could not be moved to quarantine, so loads of it fail until it can be (is the file ours?)",
}


class Scrubber:
    """Verifies the blocks of one pool on a thread.

    Args:
        bytes_per_second: how fast it reads; 0 starts nothing.
        monotonic: clock of the rate.
    """

    def __init__(
        self,
        *,
        pool_directory: str,
        remover: Remover,
        book: Book,
        bytes_per_second: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool_directory = pool_directory
        self._remover = remover
        self._book = book
        self._stopped = threading.Event()
        self._monotonic = monotonic
        self._thread: threading.Thread | None = None
        if bytes_per_second:
            self._bucket = TokenBucket(bytes_per_second, clock=monotonic)
            self._thread = threading.Thread(target=self._run, name="pykvcache-scrub", daemon=True)

    def start(self) -> None:
        """Start scrubbing, if there is a rate."""
        if self._thread is not None:
            self._thread.start()

    def pace(self, bytes_per_second: int) -> None:
        """Read at another rate from the next block on; above zero, as the first one."""
        self._bucket = TokenBucket(bytes_per_second, clock=self._monotonic)

    def stop(self, timeout_seconds: float = 0.0) -> None:
        """End at the next block."""
        self._stopped.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.scrub_once()
            except PyKVCacheError as error:
                logger.warning("scrubbing was interrupted: %s", error)
            except Exception:
                logger.exception("scrubbing was interrupted")
            self._stopped.wait(PASS_PAUSE_SECONDS)

    def scrub_once(self) -> None:
        """Verify every block that is there, once.

        Raises:
            TransientError: a folder cannot be read.
        """
        for name in fingerprint_directories(self._pool_directory):
            fingerprint = describe(self._pool_directory, name).fingerprint
            if fingerprint is not None:
                with contextlib.closing(walk(self._pool_directory, name)) as files:
                    self._scrub(files, fingerprint)

    def _scrub(self, files: Iterator[PoolFile | None], fingerprint: Fingerprint) -> None:
        started = self._monotonic()
        for number, file in enumerate(files, start=1):
            if file is not None and file.kind is Kind.BLOCK and self._verify(file, fingerprint):
                pause = self._bucket.take(file.size_bytes)
            elif number % STEP_ENTRIES == 0:
                pause = pause_after(self._monotonic() - started)
                started = self._monotonic()
            else:
                pause = 0.0
            if self._stopped.wait(pause) if pause else self._stopped.is_set():
                return

    def _verify(self, file: PoolFile, fingerprint: Fingerprint) -> bool:
        """Verify one block; return whether it was read."""
        try:
            verify_block(os.path.join(self._pool_directory, file.path), file.key(fingerprint))
        except BlockMissingError:
            return False
        except TransientError as error:
            logger.warning("a block could not be read, which proves nothing: %s", error)
            return False
        except CorruptBlockError as error:
            outcome = self._remover.quarantine(file)
            logger.warning("a damaged block %s: %s", _WHAT_BECAME[outcome], error)
            # What is in its place now, if anything, was not read: it may be whole.
            self._book.count_scrubbed(file.size_bytes, damaged=outcome not in {Removed.USED, Removed.GONE})
            if outcome is Removed.REMOVED:
                self._book.take_off({file.path.partition("/")[0]: [file.size_bytes]})
            return True
        self._book.count_scrubbed(file.size_bytes, damaged=False)
        return True
