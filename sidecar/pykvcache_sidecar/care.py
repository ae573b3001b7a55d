"""The loop that cares for a pool: looks whether it may work, works or rests, tells, and waits for the next round.

Runs on a thread of its own, so that a hung disk keeps neither a signal nor an HTTP answer waiting. A round that fails
is logged and counted as no round: after half a minute of such rounds /healthz says so.
"""

import logging
import threading
import time
from collections.abc import Callable

from pykvcache_contract.errors import PyKVCacheError
from pykvcache_sidecar.book import ROUND, Book, Levels
from pykvcache_sidecar.keeper import Keeper
from pykvcache_sidecar.levels import read_levels
from pykvcache_sidecar.settings import CareSettings
from pykvcache_sidecar.watch import REFUSED, STANDBY, WORKING, Standing, Watch, try_open
from pykvcache_storage.pool import Pool
from pykvcache_storage.usage import UsageLedger

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 0.5
"""How long the end waits for a scan and for a block being verified; both may be cut off at any point."""


class Care:
    """Cares for one pool directory.

    Args:
        pool: as opened at the start.
        stopped: ends it.
        clock: Unix time, which may jump.
        monotonic: seconds that never jump.
    """

    def __init__(
        self,
        *,
        settings: CareSettings,
        pool: Pool,
        book: Book,
        stopped: threading.Event,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._book = book
        self._stopped = stopped
        self._clock = clock
        self._monotonic = monotonic
        self._watch = Watch(settings, pool, clock=clock)
        self._keeper: Keeper | None = None
        self._standing: Standing | None = None

    def change(self, settings: CareSettings) -> None:
        """Care with other settings from the next round on; any thread.

        Args:
            settings: of the same pool directory.
        """
        self._settings = settings
        self._book.settings = settings

    def run(self) -> None:
        """Go round until it is stopped."""
        try:
            while not self._stopped.is_set():
                is_busy = self._try_round()
                self._stopped.wait(0.0 if is_busy else self._settings.interval_seconds)
        finally:
            self.rest(CLOSE_SECONDS)
            self._watch.leave()

    def round(self) -> bool:
        """Look and work once; return whether there is more to do at once.

        Raises:
            PyKVCacheError, OSError: the pool refuses.
        """
        standing = self._watch.look()
        self._tell(standing)
        if standing.state == WORKING:
            return self._work()
        self.rest()
        if standing.state == STANDBY:
            directory = self._watch.pool.directory
            self._book.set_levels(read_levels(directory, UsageLedger(directory), self._clock))
        else:
            self._book.set_levels(Levels())
        return False

    def rest(self, timeout_seconds: float = 0.0) -> None:
        """Do nothing on the disk any more, until the next time to work."""
        if self._keeper is not None:
            self._keeper.close(timeout_seconds)
            self._keeper = None
            self._book.forget_scan()

    def _try_round(self) -> bool:
        try:
            is_busy = self.round()
        except Exception as error:
            self._fail(error)
        else:
            self._book.tick()
            return is_busy
        return False

    def _fail(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        if text != self._book.snapshot().problems.get(ROUND):  # else it would be said again every second
            is_expected = isinstance(error, (PyKVCacheError, OSError))
            logger.warning("the pool could not be looked after: %s", text, exc_info=None if is_expected else error)
        self._book.note_error(text)

    def _work(self) -> bool:
        pool, settings = self._watch.pool, self._settings
        if self._keeper is not None and not (self._keeper.uid == pool.uid and self._keeper.follow(settings)):
            self.rest()
        if self._keeper is None:
            self._keeper = Keeper(
                settings=settings,
                pool=pool,
                book=self._book,
                stopped=self._stopped,
                clock=self._clock,
                monotonic=self._monotonic,
            )
        return self._keeper.work()

    def _tell(self, standing: Standing) -> None:
        if standing != self._standing:
            _log(standing)  # first: whoever sees the state finds it in the log
            self._standing = standing
        self._book.set_state(standing.state, standing.reason, uid=self._watch.pool.uid)


class PatientCare:
    """Cares for a pool directory as soon as it can be one; until then tells why not.

    Args:
        stopped: ends it.
    """

    def __init__(self, *, settings: CareSettings, book: Book, stopped: threading.Event) -> None:
        self._settings, self._book, self._stopped = settings, book, stopped
        self._standing: Standing | None = None

    def run(self) -> None:
        """Wait for the pool and care for it, until it is stopped."""
        while not self._stopped.is_set():
            care = self._try_start()
            if care is not None:
                return care.run()
            self._book.tick()
            self._stopped.wait(self._settings.interval_seconds)

    def _try_start(self) -> Care | None:
        try:
            opened = try_open(self._settings)
            if isinstance(opened, Pool):
                return Care(settings=self._settings, pool=opened, book=self._book, stopped=self._stopped)
        except PyKVCacheError as error:
            opened = Standing(REFUSED, str(error))  # it went away at this moment
        except Exception as error:  # the top of the loop: vLLM's pod must not wait for us, whatever it is
            opened = Standing(REFUSED, repr(error))
        if opened != self._standing:
            _log(opened)
            self._standing = opened
        self._book.set_state(opened.state, opened.reason, uid="")
        return None


def _log(standing: Standing) -> None:
    level = logging.INFO if standing.state in {WORKING, STANDBY} else logging.WARNING
    logger.log(level, "state: %s%s", standing.state, f". {standing.reason}" if standing.reason else "")
