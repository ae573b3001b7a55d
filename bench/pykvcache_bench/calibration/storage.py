"""One calibration of a disk: files are written, read at every point of a grid, and removed, within seconds and bytes.

The most telling points come first and everything is measured up to three times in rounds, so that a run that is cut
off still says something, and a moment's disturbance is outvoted by the median. A point that the time left cannot hold
is skipped. The caller's thread; blocks for as long as the settings say, and as long as the last reads take.
"""

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pykvcache_bench.calibration.device import Disk, disk_below, is_contended
from pykvcache_bench.calibration.measure import PIECE_SIZE_BYTES, Bench, DataFiles, Rate
from pykvcache_bench.calibration.scratch import refuse_too_little, scratch_folder, sweep, usable_bytes
from pykvcache_contract.api.node import ProfilePoint
from pykvcache_contract.calibration import StorageCalibration
from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError, TransientError
from pykvcache_storage.pool import refuse_marker
from pykvcache_storage.probe import probe

BLOCK_SIZES_BYTES = (4 << 20, 1 << 20, 256 << 10, 16 << 20)
CONCURRENCY = ((16, 1), (1, 1), (16, 8), (4, 1), (32, 1), (32, 8))
"""(depth, readers), most telling first: what vLLM uses by default, one block after another, eight requests at once."""
ROUNDS_MAX = 3
WRITE_SHARE = 0.25
"""The part of the time that writing may take."""
BYTES_MIN = 8 * PIECE_SIZE_BYTES
MEMORY_BYTES = 256 << 20
"""Bound of all blocks in flight: 16 MiB each at depth 16. Deeper ones of that size are not measured."""

_SEED = 11
_FILES_MIN = 8
"""So that every reader of eight has a file of its own."""


@dataclass(frozen=True, slots=True)
class CalibrationSettings:
    """What a calibration may take.

    Args:
        seconds: of writing and reading together; the last reads may take longer on a slow disk.
        bytes: of test files, at most; never more than a twentieth of the free space.
        min_free_bytes: what stays free on the filesystem.
    """

    seconds: float = 15.0
    bytes: int = 4 << 30
    min_free_bytes: int = 0


@dataclass(slots=True)
class _Readings:
    """What was seen so far, by point."""

    rates: dict[tuple[int, int, int], list[Rate]] = field(default_factory=dict)
    bytes: int = 0

    def add(self, point: tuple[int, int, int], rate: Rate) -> None:
        self.rates.setdefault(point, []).append(rate)
        self.bytes += rate.bytes

    def best(self) -> float:
        return max((rate.bytes_per_second for rates in self.rates.values() for rate in rates), default=0.0)


def calibrate_storage(
    directory: str,
    settings: CalibrationSettings,
    *,
    on_progress: Callable[[str, float], None] = lambda _what, _share: None,
    find_disk: Callable[[str], Disk | None] = disk_below,
) -> StorageCalibration:
    """Measure the disk that holds a directory.

    Args:
        on_progress: called now and then with what is being done and the share that is done, 0 to 1.

    Raises:
        ConfigurationError, ReadOnlyError, CapacityError: another try would end the same way.
        PoolUnavailableError, TransientError, OSError: another try may succeed.
    """
    _refuse_unavailable(directory)
    sweep(directory)
    with scratch_folder(directory) as folder:
        found = probe(folder)
        size_bytes = usable_bytes(folder, wanted_bytes=settings.bytes, min_free_bytes=settings.min_free_bytes)
        refuse_too_little(directory, found_bytes=size_bytes, needed_bytes=BYTES_MIN)
        disk = find_disk(directory)
        before_bytes = disk.moved_bytes() if disk else None
        files = DataFiles(folder, _file_size(size_bytes))
        bench, started = Bench(found, memory_bytes=MEMORY_BYTES), time.perf_counter()
        written = _write(bench, files, count=size_bytes // files.file_bytes, settings=settings, on_progress=on_progress)
        readings, complete = _read(bench, files, deadline=started + settings.seconds, on_progress=on_progress)
        elapsed = time.perf_counter() - started
        after_bytes = disk.moved_bytes() if disk else None
    ours_bytes = written.bytes + readings.bytes
    contended = is_contended(ours_bytes=ours_bytes, before_bytes=before_bytes, after_bytes=after_bytes)
    points = tuple(_point(point, rates) for point, rates in readings.rates.items())
    return StorageCalibration(
        engine=found.engine,
        buffered=not found.direct_io,
        filesystem=found.filesystem,
        kernel=os.uname().release,
        disk_model=disk.model if disk else "",
        points=points,
        read_bytes_per_second=max(point.read_bytes_per_second for point in points),
        write_bytes_per_second=max(1, round(written.bytes_per_second)),
        contended=contended,
        complete=complete,
        seconds=elapsed,
        bytes=ours_bytes,
    )


def grid(*, block_bytes_max: int, memory_bytes: int) -> list[tuple[int, int, int]]:
    """Return the points (block size, depth, readers) that fit, most telling first."""
    return [
        (block_bytes, depth, readers)
        for depth, readers in CONCURRENCY
        for block_bytes in BLOCK_SIZES_BYTES
        if block_bytes <= block_bytes_max and block_bytes * depth <= memory_bytes
    ]


def _refuse_unavailable(directory: str) -> None:
    if not os.path.isdir(directory):
        raise ConfigurationError(f"{directory} is no directory: create it, or correct the path")
    try:
        refuse_marker(directory)
    except PoolUnavailableError as error:
        raise TransientError(str(error)) from error


def _file_size(size_bytes: int) -> int:
    """Return the length of a test file: the largest block of which eight fit."""
    return max(size for size in BLOCK_SIZES_BYTES if size * _FILES_MIN <= size_bytes)


def _write(
    bench: Bench,
    files: DataFiles,
    *,
    count: int,
    settings: CalibrationSettings,
    on_progress: Callable[[str, float], None],
) -> Rate:
    on_progress("writing", 0.0)
    depth = min(16, bench.depth_max(files.file_bytes), count)
    rate = bench.write(files, count=count, depth=depth, seconds=settings.seconds * WRITE_SHARE)
    refuse_too_little(files.folder, found_bytes=len(files.numbers) * files.file_bytes, needed_bytes=BYTES_MIN)
    return rate


def _read(
    bench: Bench, files: DataFiles, *, deadline: float, on_progress: Callable[[str, float], None]
) -> tuple[_Readings, bool]:
    """Return what was read, and whether every point was."""
    points = grid(block_bytes_max=files.file_bytes, memory_bytes=MEMORY_BYTES)
    places = random.Random(_SEED)
    readings, total = _Readings(), len(points) * ROUNDS_MAX
    begun = time.perf_counter()
    for number in range(total):
        block_bytes, depth, readers = point = points[number % len(points)]
        left = deadline - time.perf_counter()
        on_progress("reading", min(1.0, 1 - left / max(deadline - begun, 1e-9)))
        # One of the deepest may alone take longer than what is left; the first is measured in any case.
        least_seconds = block_bytes * depth / readings.best() if readings.rates else 0.0
        if readings.rates and least_seconds > left:
            continue
        seconds = max(0.0, left) / (total - number)
        rate = bench.read(
            files, block_bytes=block_bytes, depth=depth, start=places.random(), readers=readers, seconds=seconds
        )
        readings.add(point, rate)
    on_progress("reading", 1.0)
    return readings, len(readings.rates) == len(points)


def _point(point: tuple[int, int, int], rates: list[Rate]) -> ProfilePoint:
    block_bytes, depth, readers = point
    return ProfilePoint(
        block_bytes=block_bytes,
        depth=depth,
        readers=readers,
        read_bytes_per_second=max(1, round(statistics.median(rate.bytes_per_second for rate in rates))),
        latency_microseconds=max(1, round(statistics.median(rate.latency_seconds for rate in rates) * 1e6)),
    )
