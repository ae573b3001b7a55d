"""The io_uring ring: one system call hands over everything that is queued and sleeps until something is done.

Facts about the world:
    - The kernel reads a request at submission; an exception between taking a request slot and filling it leaves a
      stale request in the queue.
    - With DEFER_TASKRUN the kernel finishes requests only while their thread waits, so that thread is never
      interrupted; the ring then belongs to the one thread that enabled it.
    - On tmpfs, and for cached reads, the kernel copies the data inside the submission call: one thread would do all
      copying. IOSQE_ASYNC sends such a request to a kernel worker thread instead.
    - The kernel accounts a thread that waits on a ring as waiting for a disk: an idle reactor would look like iowait.
    - A ring may be closed while requests are in flight; they are cancelled later, behind our back.

What they mean for us:
    - A request is packed to bytes first and copied into its slot in one step that cannot fail.
    - The ring is made disabled in the constructor, so that a refusal is known early, and enabled by the first `wait`.
    - `wake` writes to an eventfd on which a poll is always armed. A poll owns no memory, so it may outlive the ring.
    - No more requests are handed over than the completion queue holds, so that it never overflows.
    - io_uring has no utimensat: one helper thread touches files and wakes the ring.
"""

import ctypes
import os
import struct
import threading
import time
from collections import deque
from errno import EAGAIN, EBUSY, EINTR, EINVAL, ETIME

from pykvcache_storage.reactor import liburing
from pykvcache_storage.reactor.operations import Close, Read, RingOperation, Sync, Touch, Write
from pykvcache_storage.reactor.requests import (
    REQUEST_SIZE_BYTES,
    SQE_ASYNC,
    WAKE_TOKEN,
    PathBuffer,
    data_request,
    descriptor_request,
    path_request,
    wake_request,
)
from pykvcache_storage.reactor.ring_threads import MAX_COMPLETIONS, Workers

# Values of linux/io_uring.h.
_SETUP_CLAMP = 1 << 4
_SETUP_R_DISABLED = 1 << 6
_SETUP_SUBMIT_ALL = 1 << 7
_SETUP_SINGLE_ISSUER = 1 << 12
_SETUP_DEFER_TASKRUN = 1 << 13
_BASIC = _SETUP_CLAMP | _SETUP_R_DISABLED
_FLAGS_NEWEST_FIRST = (_BASIC | _SETUP_SUBMIT_ALL | _SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN, _BASIC)

_unpack = struct.Struct("<Qi4x").unpack
"""A completion: user data, result."""
_COMPLETION_SIZE_BYTES = 16
_WAKE_COUNT = 1 << 32
_TOUCH_COUNT = 1
"""What one `wake` and one finished touch add to the eventfd: the sum tells how many touches there are to fetch."""
_PAUSE_SECONDS = 0.001
"""How long to wait when the kernel has no memory for a request (EAGAIN); a completion ends it early."""


class UringRing:
    """Implements `Ring` with io_uring.

    Args:
        entries: how many requests one system call hands over; more are queued here. Rounded up to a power of two.
        force_async: send reads and writes to kernel worker threads; `probe` knows where that is needed.

    Raises:
        ImportError: the liburing package is missing or does not load.
        OSError: the kernel, a sysctl or a seccomp profile refuses io_uring (ENOSYS, EPERM), or no memory (ENOMEM).
    """

    name = "uring"

    def __init__(self, *, entries: int = 256, force_async: bool = False) -> None:
        self._library = liburing.load()
        self._memory = ctypes.create_string_buffer(liburing.RING_STRUCT_SIZE_BYTES)
        self._ring = ctypes.addressof(self._memory)
        parameters = self._set_up(entries)
        self._enabled = False
        self._in_kernel_limit = parameters.cq_entries
        self._in_kernel = 0
        self._data_flags = SQE_ASYNC if force_async else 0
        self._queued: deque[bytes] = deque()
        self._kept: dict[int, list[PathBuffer]] = {}
        self._refused: list[tuple[int, int]] = []
        self._touched: deque[tuple[int, int]] = deque()
        self._helper: Workers | None = None
        self._timespec = liburing.Timespec()
        self._first_completion = ctypes.c_void_p()
        self._completions = (ctypes.c_uint64 * MAX_COMPLETIONS)()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Guards _event against a `wake` on another thread while the ring is being closed.
        self._event_lock = threading.Lock()
        self._map_slots(parameters.sq_entries)

    def _set_up(self, entries: int) -> liburing.Parameters:
        for flags in _FLAGS_NEWEST_FIRST:
            parameters = liburing.Parameters(flags=flags)
            result = self._library.queue_init(entries, self._ring, ctypes.byref(parameters))
            if result != -EINVAL:
                break
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        if self._library.set_iowait is not None:
            # Kernels before 6.15 refuse; there an idle reactor merely looks like iowait.
            self._library.set_iowait(self._ring, False)
        return parameters

    def _map_slots(self, count: int) -> None:
        """Find where the kernel's request slots lie: the first is handed out first, and takes the poll for `wake`."""
        address = self._library.get_sqe(self._ring)
        assert address is not None, "a fresh ring has free slots"
        self._slots_address = address
        self._slots = memoryview((ctypes.c_char * (REQUEST_SIZE_BYTES * count)).from_address(address)).cast("B")
        self._slots[:REQUEST_SIZE_BYTES] = wake_request(self._event)
        self._in_kernel = 1

    def submit(self, operation: RingOperation, token: int) -> None:
        """Queue one operation; see `Ring.submit`."""
        try:
            if isinstance(operation, (Read, Write)):
                self._queued.append(data_request(operation, token, flags=self._data_flags))
            elif isinstance(operation, (Sync, Close)):
                self._queued.append(descriptor_request(operation, token))
            elif isinstance(operation, Touch):
                self._touch(operation, token)
            else:
                request, self._kept[token] = path_request(operation, token)
                self._queued.append(request)
        except (ValueError, struct.error):
            # A NUL in a path or a number that fits no field: what the kernel would answer if it could see it.
            self._refused.append((token, -EINVAL))

    def _touch(self, operation: Touch, token: int) -> None:
        if self._helper is None:
            self._helper = Workers(1, self._touch_done)
        self._helper.put(operation, token)

    def _touch_done(self, token: int, result: int) -> None:
        self._touched.append((token, result))
        self._notify(_TOUCH_COUNT)

    def wait(self, timeout_seconds: float | None) -> list[tuple[int, int]]:
        """Hand over what is queued, sleep until something completed; see `Ring.wait`."""
        if not self._enabled:
            self._enable()
        self._enter(0 if self._refused else timeout_seconds)
        completions, self._refused = self._refused, []
        self._reap(completions)
        return completions

    def _enable(self) -> None:
        """Make the calling thread the owner of the ring."""
        if self._event < 0:
            raise ValueError("the ring is closed")
        result = self._library.enable_rings(self._ring)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        self._enabled = True

    def _enter(self, timeout_seconds: float | None) -> None:
        """Submit and sleep until a completion or the timeout; signals and a lack of kernel memory only repeat it."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        left = timeout_seconds
        while True:
            self._fill()
            result = self._submit_and_wait(left)
            if result in (-EAGAIN, -EBUSY):
                result = self._pause(left)
            if result >= 0:
                return
            if result not in (-ETIME, -EINTR):
                raise OSError(-result, os.strerror(-result))
            if deadline is not None and (left := deadline - time.monotonic()) <= 0:
                return

    def _submit_and_wait(self, timeout_seconds: float | None) -> int:
        timespec = None if timeout_seconds is None else self._timespec_of(timeout_seconds)
        return self._library.submit_and_wait(self._ring, ctypes.byref(self._first_completion), 1, timespec, None)

    def _pause(self, timeout_seconds: float | None) -> int:
        """Sleep without submitting, until a completion frees kernel memory or for a moment."""
        pause = _PAUSE_SECONDS if timeout_seconds is None else min(timeout_seconds, _PAUSE_SECONDS)
        return self._library.wait(self._ring, ctypes.byref(self._first_completion), 1, self._timespec_of(pause), None)

    def _timespec_of(self, seconds: float) -> int:
        whole = int(seconds)
        self._timespec.seconds, self._timespec.nanoseconds = whole, int((seconds - whole) * 1e9)
        return ctypes.addressof(self._timespec)

    def _fill(self) -> None:
        """Copy queued requests into free slots, and hand those over when no slot is free."""
        queued, slots, get_sqe = self._queued, self._slots, self._library.get_sqe
        while queued and self._in_kernel < self._in_kernel_limit:
            address = get_sqe(self._ring)
            if address is None:
                if self._library.submit(self._ring) <= 0:
                    return
                continue
            start = address - self._slots_address
            slots[start : start + REQUEST_SIZE_BYTES] = queued.popleft()
            self._in_kernel += 1

    def _reap(self, completions: list[tuple[int, int]]) -> None:
        count = self._library.peek_completions(self._ring, self._completions, MAX_COMPLETIONS)
        kept = self._kept
        for address in self._completions[:count]:
            token, result = _unpack(ctypes.string_at(address, _COMPLETION_SIZE_BYTES))
            if token == WAKE_TOKEN:
                completions += self._rearm()
            else:
                kept.pop(token, None)
                completions.append((token, result))
        self._library.advance(self._ring, count)
        self._in_kernel -= count

    def _rearm(self) -> list[tuple[int, int]]:
        """Empty the eventfd, watch it again (a `wake` in between completes the new poll at once), return touches."""
        self._queued.appendleft(wake_request(self._event))
        touch_count = os.eventfd_read(self._event) % _WAKE_COUNT
        return [self._touched.popleft() for _ in range(touch_count)]

    def wake(self) -> None:
        """Make `wait` return; without effect once the ring is closed."""
        self._notify(_WAKE_COUNT)

    def _notify(self, count: int) -> None:
        with self._event_lock:
            if self._event >= 0:
                os.eventfd_write(self._event, count)

    def close(self) -> None:
        """Release the ring. Nothing but the poll is in flight."""
        if self._helper is not None:
            self._helper.close()
        with self._event_lock:
            if self._event < 0:
                return
            os.close(self._event)
            self._event, self._enabled = -1, False
        self._library.queue_exit(self._ring)
