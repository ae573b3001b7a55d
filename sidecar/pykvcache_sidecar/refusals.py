"""Which refused stores the sidecar makes room for: not those against which the last room that it made did not help.

What a refusal means and when room has helped is arithmetic in `limits.py`; this remembers from one refusal to the next.
Belongs to the caring thread, for as long as it may work. A restart forgets, and then one more eviction, of what lies
between the watermarks, may be for nothing.
"""

import contextlib
import logging
from collections.abc import Callable

from pykvcache_contract.errors import CapacityError
from pykvcache_contract.units import format_size
from pykvcache_sidecar.limits import RoomMade, has_helped
from pykvcache_storage.usage import UsageLedger

logger = logging.getLogger(__name__)

IGNORED_SECONDS = 3600.0
"""How long no refusal is heeded after room did not help. What refuses then (a quota that others use up, no inodes) is
cured by people, in hours; an error of ours costs one hour of stores, not a fifth of the pool every few seconds."""


class Refusals:
    """Remembers what was done about the last refusal.

    Args:
        monotonic: seconds that never jump.
    """

    def __init__(self, ledger: UsageLedger, *, monotonic: Callable[[], float]) -> None:
        self._ledger = ledger
        self._monotonic = monotonic
        self._made: RoomMade | None = None
        self._ignored_until = monotonic()
        self._has_warned = False

    def heed(self, refused_bytes: int) -> int:
        """Return the level of a refusal to make room for, 0 if there is none; one that room does not cure is forgotten.

        After the time of ignoring, a refusal at the same level is ignored again; only one further up is heeded.

        Raises:
            ReadOnlyError, TransientError: the refusal stays noted.
        """
        if not refused_bytes:
            return 0
        if self._monotonic() >= self._ignored_until:
            if self._made is None or has_helped(self._made, refused_bytes):
                self._has_warned = False
                return refused_bytes
            self._ignore(self._made)
        self._forget()
        return 0

    def settle(self, *, refused_bytes: int, used_bytes: int, has_evicted: bool) -> None:
        """Forget a refusal because the pool is below it now.

        Args:
            has_evicted: blocks were evicted for its sake, so that the next refusal tells whether that helped.

        Raises:
            ReadOnlyError, TransientError: the refusal stays noted.
        """
        self._forget()
        if has_evicted:
            self._made = RoomMade(refused_bytes, left_bytes=used_bytes)

    def _forget(self) -> None:
        # Copy-on-write filesystems need room to change a byte; what could not be forgotten is met again next round.
        with contextlib.suppress(CapacityError):
            self._ledger.forget_refusal()

    def _ignore(self, made: RoomMade) -> None:
        self._ignored_until = self._monotonic() + IGNORED_SECONDS
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "stores are refused although the pool shrank from %s to %s: nothing more is evicted for that. Look at "
                "quotas and inodes (df -i) of the pool's filesystem, or set a capacity below the quota",
                format_size(made.refused_bytes),
                format_size(made.left_bytes),
            )
