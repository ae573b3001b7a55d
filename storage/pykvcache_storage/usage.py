"""How full a pool is, shared by all processes that store in it, without a scan on the way of a store.

`<pool>/usage` is one record of 128 bytes, changed under flock. A store reserves its bytes before it writes; whoever
removes a block releases them. The sum of successful reservations never exceeds the capacity, whichever processes make
them. The record also carries what the sidecar allows: a capacity below the writers' own, and bytes to write a day.

Facts: a process may be killed between reserving and publishing; a power cut may tear the record; a scan takes minutes
and sees only what is published. What they mean: the number drifts, and only a recount puts it right; a recount must
not lose what is reserved and not yet visible. Therefore a leak lasts until the next recount, a record with a wrong
CRC counts as unknown (nothing is stored until a recount), and a recount adds to what it counted every reservation
made since a moment at least `SETTLE_SECONDS` before its start. It errs upwards, by the stores of a minute or two.

Facts: a new UTC day brings a new write budget; clocks are set, and hosts that share a pool differ by seconds. What they
mean: a day that ends twice must not bring two budgets, and a clock that was years ahead once must not end stores. So
the day in the record never goes back by one: whoever is a day behind spends the newer day's budget. A record further
ahead than that was written by a wrong clock: its day is set to today, and its bytes stay until the day ends.

A quota refuses stores while the filesystem still looks empty. So a writer that was refused notes the fill level, and
the sidecar takes it for the pool's limit until it has made room. Of several refusals until then the highest level
stays: those that come while blocks are being evicted would lower the limit with every block.

A lost or damaged record, and a writer of a release before limits, forget the limits; the sidecar sets them every round.

Every call opens the file anew (about 15 µs in all): a descriptor kept would be shared with forked children and would
outlive a removed file. Where the filesystem knows no flock, a lock of this process stands in: `shared` is then False,
and several processes together may exceed the capacity until the next recount. Any thread; blocks for at most
`LOCK_TIMEOUT_SECONDS`.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from enum import Enum
from operator import attrgetter

from pykvcache_contract.errors import PoolUnavailableError, TransientError
from pykvcache_contract.paths import USAGE_FILE
from pykvcache_storage.block import translate
from pykvcache_storage.sharing import share_file

RECORD_SIZE_BYTES = 128
SETTLE_SECONDS = 60.0
"""No store takes longer from its reservation to its publication or release."""

DEFAULT_CAPACITY_BYTES = 64 << 30
"""Where neither a writer nor a sidecar set a limit: enough to be of use, and few disks are smaller."""

LOCK_TIMEOUT_SECONDS = 1.0
"""The lock is held for microseconds; a holder that keeps it longer was stopped or sits on a hung filesystem."""

_MAGIC = b"PYKVUSE\0"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQddQdQdQQQQQ")
_CRC = struct.Struct("<I")
_DAY_SECONDS = 86400
_NO_FLOCK = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_POLL_SECONDS = 0.0005
_READ_ATTEMPTS = 20
"""A reader without the lock may see a record half written; the next look finds it whole, or one some moments later: a
writer may lose the processor half-way."""

_PROCESS_LOCK = threading.Lock()


class Reserved(Enum):
    """What became of a reservation; only TAKEN took room."""

    TAKEN = "taken"
    FULL = "full"
    UNKNOWN = "unknown"
    """The fill level is not known; a recount is due."""
    WRITE_BUDGET = "write budget"
    """The pool has room, but no more may be written now."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What the file says, in the order of the file.

    Args:
        used_bytes: reserved and not released.
        added_bytes: all that was ever reserved; only grows.
        recount_seconds: when the last recount ended, Unix time.
        reserve_seconds: when the last reservation was made.
        older_added, older_seconds: `added_bytes` at a moment at least `SETTLE_SECONDS` before the newer one.
        newer_added, newer_seconds: the same at a later moment.
        limit_bytes: the most that may be used, whatever a writer's own capacity; 0 for no limit.
        write_budget_bytes: the most that may be reserved in a UTC day; 0 for no limit.
        written_day: the last day of a reservation, in days since 1970.
        written_bytes: reserved on that day; what was released again counts too, because it may have been written.
        refused_bytes: `used_bytes` when the filesystem had no room for a store, the most since the sidecar last made
            some; 0 if it had room.
    """

    used_bytes: int = 0
    added_bytes: int = 0
    recount_seconds: float = 0.0
    reserve_seconds: float = 0.0
    older_added: int = 0
    older_seconds: float = 0.0
    newer_added: int = 0
    newer_seconds: float = 0.0
    limit_bytes: int = 0
    write_budget_bytes: int = 0
    written_day: int = 0
    written_bytes: int = 0
    refused_bytes: int = 0


_VALUES = attrgetter(*(field.name for field in fields(Usage)))


class UsageLedger:
    """The fill level of one pool.

    Attributes:
        shared: False once a call found that the filesystem knows no flock.
    """

    def __init__(self, pool_directory: str, *, clock: Callable[[], float] = time.time) -> None:
        self.path = os.path.join(pool_directory, USAGE_FILE)
        self.shared = True
        self._clock = clock

    def reserve(self, size_bytes: int, *, capacity_bytes: int, is_repeated: bool = True) -> Reserved:
        """Take room for one block, or take nothing and say why.

        Args:
            capacity_bytes: the caller's own limit, 0 for none; the record's applies too, and without either
                `DEFAULT_CAPACITY_BYTES`.
            is_repeated: the block was wanted before, so that it may use the whole day's write budget; else it may use
                only what has accrued since midnight.

        Raises:
            ReadOnlyError, CapacityError, TransientError: the file cannot be changed; skip this store.
        """
        with self._locked(create=False) as descriptor:
            usage = _read(descriptor) if descriptor >= 0 else None
            if usage is None:
                return Reserved.UNKNOWN
            now = self._clock()
            usage = _on_day(usage, _day(now))
            if usage.used_bytes + size_bytes > _capacity(usage, capacity_bytes):
                return Reserved.FULL
            if usage.write_budget_bytes and size_bytes > _writable(usage, now, is_repeated=is_repeated):
                return Reserved.WRITE_BUDGET
            _write(descriptor, _reserved(usage, size_bytes, now))
            return Reserved.TAKEN

    def set_limits(self, *, capacity_bytes: int, write_budget_bytes: int) -> None:
        """Limit all writers from now on, for the sidecar; 0 takes a limit away, 1 byte of capacity stops all stores.

        Without a valid record nothing is limited, and nothing needs to be: nobody stores until a recount.

        Raises:
            ReadOnlyError, CapacityError, TransientError: the limits are as before.
        """
        with self._locked(create=False) as descriptor:
            usage = _read(descriptor) if descriptor >= 0 else None
            if usage is None:
                return
            limited = replace(usage, limit_bytes=capacity_bytes, write_budget_bytes=write_budget_bytes)
            if limited != usage:  # Asked every second, and a disk wears.
                _write(descriptor, limited)

    def release(self, size_bytes: int, *, recount_seconds: float | None = None) -> None:
        """Give back the room of a removed block or of a store that was not published.

        Args:
            recount_seconds: from `last_recount` before a published file was removed. A recount that ended since may
                have missed the file already, so then nothing is given back.

        Raises:
            ReadOnlyError, TransientError: the room stays taken until the next recount.
        """
        with self._locked(create=False) as descriptor:
            usage = _read(descriptor) if descriptor >= 0 else None
            if usage is not None and recount_seconds in (None, usage.recount_seconds):
                _write(descriptor, replace(usage, used_bytes=max(0, usage.used_bytes - size_bytes)))

    def refuse(self, size_bytes: int) -> None:
        """Give back the room of a store for which the filesystem had none, and note how full the pool was.

        Raises:
            ReadOnlyError, CapacityError, TransientError: neither is noted.
        """
        with self._locked(create=False) as descriptor:
            usage = _read(descriptor) if descriptor >= 0 else None
            if usage is not None:
                used = max(0, usage.used_bytes - size_bytes)
                refused = max(1, used, usage.refused_bytes)
                _write(descriptor, replace(usage, used_bytes=used, refused_bytes=refused))

    def forget_refusal(self) -> None:
        """Take a refusal as over; for the sidecar, once it has made room or found that none helps.

        Raises:
            ReadOnlyError, CapacityError, TransientError: the refusal stays noted.
        """
        with self._locked(create=False) as descriptor:
            usage = _read(descriptor) if descriptor >= 0 else None
            if usage is not None and usage.refused_bytes:
                _write(descriptor, replace(usage, refused_bytes=0))

    def usage(self) -> Usage | None:
        """Return the record without locking, None if it is missing or damaged. Cheap; opens and reads one file."""
        for attempt in range(_READ_ATTEMPTS):
            if attempt > _READ_ATTEMPTS // 2:
                time.sleep(_POLL_SECONDS)
            try:
                descriptor = os.open(self.path, os.O_RDONLY | _OPEN_FLAGS)
                try:
                    data = os.pread(descriptor, RECORD_SIZE_BYTES, 0)
                finally:
                    os.close(descriptor)
            except OSError:
                return None
            if _is_whole(data):
                return _parsed(data)
            if len(data) != RECORD_SIZE_BYTES:
                return None  # the first record of all is never seen in part
        return None

    def used_bytes(self) -> int | None:
        """Return the bytes in use, None if unknown: then a `recount` is due."""
        usage = self.usage()
        return None if usage is None else usage.used_bytes

    def last_recount(self) -> float:
        """Return when the last recount ended, -1 if the fill level is unknown."""
        usage = self.usage()
        return -1.0 if usage is None else usage.recount_seconds

    def ensure(self, count_bytes: Callable[[], int]) -> int:
        """Return the bytes in use; recount first if they are unknown. For start-up, off the hot path."""
        used = self.used_bytes()
        return self.recount(count_bytes) if used is None else used

    def recount(self, count_bytes: Callable[[], int]) -> int:
        """Set the bytes in use to what is there, plus what may be under way; return them.

        Args:
            count_bytes: scans the pool (`inventory.count_bytes`); may take minutes, nothing is locked meanwhile.
        """
        mark = self.begin_recount()
        return self.finish_recount(mark, counted_bytes=count_bytes())

    def begin_recount(self) -> int:
        """Return a mark to be taken before a scan begins.

        Raises:
            ReadOnlyError, CapacityError, TransientError: the record cannot be read; taken for a lost one, the count
                would be off by all that was ever stored.
        """
        with self._locked(create=False) as descriptor:
            usage = _read(descriptor) if descriptor >= 0 else None
        return 0 if usage is None else _settled(usage, self._clock())

    def finish_recount(self, mark: int, *, counted_bytes: int) -> int:
        """Set the bytes in use after a scan; return them. Several processes may do this at once."""
        with self._locked(create=True) as descriptor:
            usage = _read(descriptor) or Usage()
            # Below the mark: the record was lost and begun anew since, so all it holds was added meanwhile.
            added = usage.added_bytes - mark if usage.added_bytes >= mark else usage.added_bytes
            _write(descriptor, replace(usage, used_bytes=counted_bytes + added, recount_seconds=self._clock()))
        share_file(self.path)  # it may be new
        return counted_bytes + added

    @contextlib.contextmanager
    def _locked(self, *, create: bool) -> Iterator[int]:
        """Yield a descriptor of the locked file, -1 if there is none."""
        try:
            with contextlib.ExitStack() as stack:
                yield self._open_locked(stack, os.O_CREAT if create else 0)
        except OSError as error:
            raise translate(error, operation="update", path=self.path) from error

    def _open_locked(self, stack: contextlib.ExitStack, flags: int) -> int:
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while True:
            try:
                descriptor = os.open(self.path, os.O_RDWR | _OPEN_FLAGS | flags, 0o666)
            except FileNotFoundError as error:
                if flags:
                    raise PoolUnavailableError(f"{self.path}: the pool directory is gone") from error
                return -1
            stack.callback(os.close, descriptor)
            self._lock(descriptor, stack, deadline)
            if os.fstat(descriptor).st_nlink:
                return descriptor
            stack.close()  # Removed between opening and locking: look for the new one.

    def _lock(self, descriptor: int, stack: contextlib.ExitStack, deadline: float) -> None:
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TransientError(f"{self.path} has been locked for {LOCK_TIMEOUT_SECONDS} s") from None
                time.sleep(_POLL_SECONDS)
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                self.shared = False
                stack.enter_context(_PROCESS_LOCK)
                return None


def _reserved(usage: Usage, size_bytes: int, now: float) -> Usage:
    if abs(now - usage.newer_seconds) >= SETTLE_SECONDS:
        usage = replace(
            usage,
            older_added=usage.newer_added,
            older_seconds=usage.newer_seconds,
            newer_added=usage.added_bytes,
            newer_seconds=now,
        )
    return replace(
        usage,
        used_bytes=usage.used_bytes + size_bytes,
        added_bytes=usage.added_bytes + size_bytes,
        reserve_seconds=now,
        written_bytes=usage.written_bytes + size_bytes,
    )


def _capacity(usage: Usage, own_bytes: int) -> int:
    limits = [limit for limit in (usage.limit_bytes, own_bytes) if limit]
    return min(limits, default=DEFAULT_CAPACITY_BYTES)


def _day(now: float) -> int:
    return int(max(now, 0.0) // _DAY_SECONDS)


def _on_day(usage: Usage, today: int) -> Usage:
    """Begin a new day's budget; see the module's text for days that go back."""
    if today > usage.written_day:
        return replace(usage, written_day=today, written_bytes=0)
    return replace(usage, written_day=today) if today < usage.written_day - 1 else usage


def _writable(usage: Usage, now: float, *, is_repeated: bool) -> int:
    """Return how many bytes of the day's budget are left; for new blocks, of the part that has accrued evenly."""
    share = 1.0 if is_repeated else max(now, 0.0) % _DAY_SECONDS / _DAY_SECONDS
    return int(usage.write_budget_bytes * share) - usage.written_bytes


def _settled(usage: Usage, now: float) -> int:
    """Return how much had been reserved at a moment so long ago that all of it is published or released."""
    moment = now - SETTLE_SECONDS
    if usage.reserve_seconds <= moment:
        return usage.added_bytes
    return usage.newer_added if usage.newer_seconds <= moment else usage.older_added


def _read(descriptor: int) -> Usage | None:
    data = os.pread(descriptor, RECORD_SIZE_BYTES, 0)
    return _parsed(data) if _is_whole(data) else None


def _is_whole(data: bytes) -> bool:
    return len(data) == RECORD_SIZE_BYTES and _CRC.unpack(data[-_CRC.size :])[0] == zlib.crc32(data[: -_CRC.size])


def _parsed(data: bytes) -> Usage | None:
    magic, version, _, *values = _FIELDS.unpack_from(data)
    return Usage(*values) if (magic, version) == (_MAGIC, _VERSION) else None


def _write(descriptor: int, usage: Usage) -> None:
    body = _FIELDS.pack(_MAGIC, _VERSION, 0, *_VALUES(usage)).ljust(RECORD_SIZE_BYTES - _CRC.size, b"\0")
    if os.pwrite(descriptor, body + _CRC.pack(zlib.crc32(body)), 0) != RECORD_SIZE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
