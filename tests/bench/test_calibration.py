"""Calibration of a disk: real files, small; nothing stays behind however a run ends."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pykvcache_bench.calibration import measure, scratch, storage
from pykvcache_bench.calibration.device import Disk, disk_below, is_contended
from pykvcache_bench.calibration.measure import Bench, DataFiles
from pykvcache_bench.calibration.scratch import PREFIX, scratch_folder, sweep, usable_bytes
from pykvcache_bench.calibration.storage import CalibrationSettings, calibrate_storage, grid
from pykvcache_cli import calibrate
from pykvcache_cli.main import app
from pykvcache_contract.api.node import POINTS_MAX
from pykvcache_contract.calibration import CalibrationRefusal, decode_calibration
from pykvcache_contract.errors import CapacityError, ConfigurationError, TransientError
from pykvcache_contract.names import UNAVAILABLE_MARKER
from pykvcache_storage.probe import ProbeResult, probe
from pykvcache_storage.reactor.operations import Await
from pykvcache_storage.reactor.reactor import Reactor

SMALL = CalibrationSettings(seconds=0.1, bytes=8 << 20)

# The command itself, which says on its output when it is in the middle of its work.
TELLING = """
import pykvcache_cli.calibrate as command
from pykvcache_cli.main import main

measure = command.calibrate_storage
tell = lambda what, share: print(what, flush=True)
command.calibrate_storage = lambda directory, settings, on_progress: measure(directory, settings, on_progress=tell)
main()
"""


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MEMORY_BYTES", 16 << 20)


@pytest.fixture
def found(tmp_path: Path) -> ProbeResult:
    return probe(tmp_path)


@pytest.fixture
def run() -> Callable:
    """Return a function that runs `pykvcache calibrate storage` with arguments."""
    return lambda *arguments: CliRunner().invoke(app, ["calibrate", "storage", *map(str, arguments)])


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="pykvcache-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


# ---- the measurement ----


@pytest.mark.slow
def test_a_disk_is_measured_and_nothing_stays_behind(tmp_path):
    measured = calibrate_storage(str(tmp_path), SMALL)
    assert os.listdir(tmp_path) == []
    assert 1 <= len(measured.points) <= POINTS_MAX
    assert measured.read_bytes_per_second == max(point.read_bytes_per_second for point in measured.points)
    assert measured.write_bytes_per_second > 0
    assert measured.points[0].block_bytes == 1 << 20, "eight files of at most 8 MiB together"
    assert measured.kernel == os.uname().release


@pytest.mark.parametrize("engine", ["uring", "threads"])
@pytest.mark.parametrize("direct", [True, False])
def test_every_engine_is_measured_with_and_without_the_page_cache(tmp_path, found, engine, direct):
    if (engine == "uring" and found.engine != "uring") or (direct and not found.direct_io):
        pytest.skip(f"not possible here: {found}")
    bench = Bench(replace(found, engine=engine, direct_io=direct, force_async=not direct), memory_bytes=8 << 20)
    files = DataFiles(str(tmp_path), 1 << 20)
    written = bench.write(files, count=8, depth=4, seconds=60)
    assert written.bytes == 8 << 20
    assert sorted(files.numbers) == list(range(8))
    read = bench.read(files, block_bytes=256 << 10, depth=16, start=0.7, readers=8, seconds=0)
    assert read.bytes == 16 * (256 << 10), "each of eight readers has two in flight"
    assert 0 < read.latency_seconds <= read.seconds


def test_the_files_hold_what_no_filesystem_compresses(tmp_path, found):
    bench = Bench(found, memory_bytes=8 << 20)
    files = DataFiles(str(tmp_path), 1 << 20)
    bench.write(files, count=8, depth=4, seconds=60)
    contents = [Path(files.path(number)).read_bytes() for number in range(8)]
    assert all(len(set(content[:4096])) > 200 for content in contents)
    assert len({content[:8] for content in contents}) == 8


def test_through_the_page_cache_no_block_is_read_twice_and_the_cache_is_dropped_first(tmp_path, found, monkeypatch):
    bench = Bench(replace(found, direct_io=False, force_async=found.engine == "uring"), memory_bytes=8 << 20)
    files = DataFiles(str(tmp_path), 1 << 20)
    bench.write(files, count=2, depth=1, seconds=60)
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: dropped.append(arguments[3]))
    read = bench.read(files, block_bytes=1 << 20, depth=1, start=0, readers=1, seconds=60)
    assert read.bytes == 2 << 20
    assert dropped == [os.POSIX_FADV_DONTNEED] * 2


def test_readers_begin_at_equal_distances_and_wrap_around(tmp_path, found):
    files = DataFiles("/d", 1 << 20, numbers=[3, 1])
    assert files.block_count(256 << 10) == 8
    assert files.place(0, 256 << 10) == ("/d/3.dat", 0)
    assert files.place(7, 256 << 10) == ("/d/1.dat", 768 << 10)


def test_the_grid_fits_memory_and_the_document(monkeypatch):
    points = grid(block_bytes_max=16 << 20, memory_bytes=256 << 20)
    assert len(set(points)) == len(points) == 22
    assert points[0] == (4 << 20, 16, 1)
    assert all(block_bytes * depth <= 256 << 20 and depth >= readers for block_bytes, depth, readers in points)
    assert len(grid(block_bytes_max=16 << 20, memory_bytes=1 << 30)) <= POINTS_MAX
    assert {size for size, _, _ in grid(block_bytes_max=256 << 10, memory_bytes=1 << 30)} == {256 << 10}


def test_a_run_without_time_still_says_something_and_that_it_was_cut_off(tmp_path):
    measured = calibrate_storage(str(tmp_path), replace(SMALL, seconds=0.0))
    assert len(measured.points) == 1
    assert not measured.complete


@pytest.mark.slow
def test_the_progress_ends_at_the_end(tmp_path):
    told: list[tuple[str, float]] = []
    calibrate_storage(str(tmp_path), SMALL, on_progress=lambda what, share: told.append((what, share)))
    assert told[0] == ("writing", 0.0)
    assert told[-1] == ("reading", 1.0)
    assert all(0 <= share <= 1 for _, share in told)


def test_a_full_disk_ends_the_writing_and_what_fits_is_measured(tmp_path, found, monkeypatch):
    bench = Bench(found, memory_bytes=8 << 20)
    files = DataFiles(str(tmp_path), 1 << 20)
    real = Bench._write_file

    def full_after_three(self: Bench, path: str, address: int, size_bytes: int) -> Iterator:
        if len(files.numbers) >= 3:
            raise OSError(28, "No space left on device")
        return (yield from real(self, path, address, size_bytes))

    monkeypatch.setattr(Bench, "_write_file", full_after_three)
    bench.write(files, count=100, depth=1, seconds=60)
    assert len(files.numbers) == 3
    assert bench.read(files, block_bytes=1 << 20, depth=1, start=0, readers=1, seconds=0).bytes > 0


def test_a_failing_disk_is_another_try(tmp_path, found, monkeypatch):
    bench = Bench(found, memory_bytes=8 << 20)
    files = DataFiles(str(tmp_path), 1 << 20)
    bench.write(files, count=2, depth=1, seconds=60)
    os.unlink(files.path(0))
    with pytest.raises(OSError, match="No such file"):
        bench.read(files, block_bytes=1 << 20, depth=2, start=0, readers=1, seconds=5)


# ---- room ----


def test_at_most_a_twentieth_of_the_free_space_is_used_and_what_must_stay_free_stays(tmp_path, monkeypatch):
    status = os.statvfs(tmp_path)
    free_bytes = status.f_bavail * status.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _path: status)
    assert usable_bytes(str(tmp_path), wanted_bytes=free_bytes, min_free_bytes=0) == int(free_bytes * 0.05)
    assert usable_bytes(str(tmp_path), wanted_bytes=4096, min_free_bytes=0) == 4096
    assert usable_bytes(str(tmp_path), wanted_bytes=free_bytes, min_free_bytes=free_bytes - 5) == 5
    assert usable_bytes(str(tmp_path), wanted_bytes=4096, min_free_bytes=free_bytes + 5) == -5


def test_no_room_is_never_tried_again_and_leaves_nothing(tmp_path, run):
    result = run(tmp_path, "--min-free", 1 << 60)
    assert result.exit_code == 42
    assert "are needed: free some space" in " ".join(result.output.split())
    assert os.listdir(tmp_path) == []
    with pytest.raises(CapacityError):
        calibrate_storage(str(tmp_path), replace(SMALL, min_free_bytes=1 << 60))


# ---- others on the same disk ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("readings", "contended"), [((1000, 1000), False), ((1000, 1 << 50), True), ((1000, None), None)]
)
def test_others_are_noticed_above_a_fifth_of_what_we_move(tmp_path, monkeypatch, readings, contended):
    counters = iter(readings)
    monkeypatch.setattr(Disk, "moved_bytes", lambda _disk: next(counters))
    measured = calibrate_storage(str(tmp_path), SMALL, find_disk=lambda _: Disk(tmp_path, "ACME 9000"))
    assert measured.contended is contended
    assert measured.disk_model == "ACME 9000"
    assert next(counters, "all read") == "all read"


@pytest.mark.slow
def test_without_a_visible_disk_contention_is_unknown(tmp_path):
    measured = calibrate_storage(str(tmp_path), SMALL, find_disk=lambda _: None)
    assert measured.contended is None
    assert measured.disk_model == ""


@pytest.mark.parametrize(
    ("after", "contended"), [(100, False), (1100, False), (1300, False), (1301, True), (None, None)]
)
def test_exactly_a_fifth_is_not_contended(after, contended):
    assert is_contended(ours_bytes=1000, before_bytes=100, after_bytes=after) is contended


def make_sysfs(root: Path, directory: Path, names: list[str]) -> None:
    """Make a sysfs in which a directory's device is the first name, which lies on the second, and so on."""
    device = os.stat(directory).st_dev
    for name in names:
        (root / "devices" / name / "slaves").mkdir(parents=True)
    for upper, lower in itertools.pairwise(names):
        (root / "devices" / upper / "slaves" / os.path.basename(lower)).symlink_to(root / "devices" / lower)
    (root / "dev/block").mkdir(parents=True)
    (root / "dev/block" / f"{os.major(device)}:{os.minor(device)}").symlink_to(root / "devices" / names[0])


def test_the_whole_disk_below_a_volume_and_a_partition_counts(tmp_path):
    sysfs = tmp_path / "sys"
    make_sysfs(sysfs, tmp_path, ["dm-1", "dm-0", "nvme0n1/nvme0n1p1"])
    (sysfs / "devices/nvme0n1/nvme0n1p1/partition").write_text("1\n")
    (sysfs / "devices/nvme0n1/stat").write_text("1 2 10 4 5 6 20 8\n")
    (sysfs / "devices/nvme0n1/device").mkdir()
    (sysfs / "devices/nvme0n1/device/model").write_text("ACME  9000   \n")
    disk = disk_below(str(tmp_path), sysfs=sysfs)
    assert disk is not None
    assert disk.model == "ACME 9000"
    assert disk.moved_bytes() == 30 * 512


def test_a_volume_over_two_disks_is_its_own_disk(tmp_path):
    sysfs = tmp_path / "sys"
    make_sysfs(sysfs, tmp_path, ["md0", "sda"])
    (sysfs / "devices/md0/slaves/sdb").symlink_to(sysfs / "devices/sda")
    (sysfs / "devices/md0/stat").write_text("nonsense\n")
    disk = disk_below(str(tmp_path), sysfs=sysfs)
    assert disk is not None
    assert disk.folder.name == "md0"
    assert disk.model == ""
    assert disk.moved_bytes() is None


def test_a_disk_that_sysfs_does_not_show_is_unknown(tmp_path):
    assert disk_below(str(tmp_path), sysfs=tmp_path / "nothing") is None


# ---- nothing stays behind ----


def test_folders_of_dead_runs_are_swept_and_those_of_living_ones_stay(tmp_path):
    dead = tmp_path / f"{PREFIX}0123456789abcdef"
    dead.mkdir()
    (dead / "7.dat").write_bytes(b"x")
    (tmp_path / f"{PREFIX}strange").mkdir()
    (tmp_path / "blocks").mkdir()
    with scratch_folder(str(tmp_path)) as living:
        assert sweep(str(tmp_path)) == 1
        assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(living), f"{PREFIX}strange", "blocks"])
    assert sorted(os.listdir(tmp_path)) == sorted([f"{PREFIX}strange", "blocks"])


def test_a_link_with_our_name_is_not_followed(tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    (tmp_path / f"{PREFIX}0123456789abcdef").symlink_to(tmp_path / "precious")
    (tmp_path / f"{PREFIX}fedcba9876543210").write_text("a file")
    assert sweep(str(tmp_path)) == 0
    assert (tmp_path / "precious/file").exists()


def test_without_flock_age_decides(tmp_path, monkeypatch):
    folder = tmp_path / f"{PREFIX}0123456789abcdef"
    folder.mkdir()

    def refuse(*_arguments: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(scratch.fcntl, "flock", refuse)
    made = folder.stat().st_mtime
    assert sweep(str(tmp_path), clock=lambda: made + scratch.AGE_LIMIT_SECONDS - 1) == 0
    assert sweep(str(tmp_path), clock=lambda: made + scratch.AGE_LIMIT_SECONDS) == 1
    with scratch_folder(str(tmp_path)) as path:
        assert os.path.isdir(path)


def test_a_new_folder_that_a_sweep_takes_is_made_again(tmp_path, monkeypatch):
    real, swept = scratch._hold, []

    def swept_once(descriptor: int) -> bool | None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].rmdir()
        return real(descriptor)

    monkeypatch.setattr(scratch, "_hold", swept_once)
    with scratch_folder(str(tmp_path)) as path:
        assert os.path.isdir(path)
        assert path != str(swept[0])


@pytest.mark.slow
def test_a_signal_removes_everything_and_says_so_in_the_result(tmp_path, start_python):
    pool, result = tmp_path / "pool", tmp_path / "result"
    pool.mkdir()
    process = start_python(
        TELLING, "calibrate", "storage", pool, "--bytes", "8MiB", "--seconds", 60, "--result", result
    )
    wait_until_it_reads(process)
    assert os.listdir(pool) != []
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert os.listdir(pool) == []
    assert decode_calibration(result.read_text()) == CalibrationRefusal("the measurement was stopped by a signal", True)


@pytest.mark.slow
def test_what_a_killed_run_leaves_the_next_one_removes(tmp_path, start_python, run):
    process = start_python(TELLING, "calibrate", "storage", tmp_path, "--bytes", "8MiB", "--seconds", 60)
    wait_until_it_reads(process)
    process.kill()
    process.communicate()
    assert [name.startswith(PREFIX) for name in os.listdir(tmp_path)] == [True]
    assert run(tmp_path, "--bytes", "8MiB", "--seconds", "0.1").exit_code == 0
    assert os.listdir(tmp_path) == []


def wait_until_it_reads(process: "subprocess.Popen[str]") -> None:
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line == "reading\n":
            return
    raise AssertionError(f"it ended without reading: {seen}")


# ---- the command ----


@pytest.mark.slow
def test_people_get_a_table_and_programs_the_document(tmp_path, run):
    pool, result = tmp_path / "pool", tmp_path / "result"
    pool.mkdir()
    result.touch()
    inode = result.stat().st_ino
    shown = run(pool, "--bytes", "8MiB", "--seconds", "0.1", "--result", result)
    assert shown.exit_code == 0, shown.output
    assert "readers" in shown.output
    assert "Reads " in shown.output
    assert result.stat().st_ino == inode, "a termination message must be written in place"
    measured = decode_calibration(result.read_text())
    printed = run(pool, "--bytes", "8MiB", "--seconds", "0.1", "--json")
    assert decode_calibration(json.dumps(json.loads(printed.stdout))).engine == measured.engine


def test_a_directory_that_cannot_be_written_exits_42_and_says_why_in_the_result(open_directory, run, monkeypatch):
    pool, result = open_directory / "pool", open_directory / "result"
    pool.mkdir(mode=0o555)

    def measure_as_nobody(directory: str, settings: CalibrationSettings, **options: Any) -> None:
        user = os.geteuid()
        os.seteuid(user or 65534)
        try:
            calibrate_storage(directory, settings, **options)
        finally:
            os.seteuid(user)

    monkeypatch.setattr(calibrate, "calibrate_storage", measure_as_nobody)
    shown = run(pool, "--result", result)
    assert shown.exit_code == 42, shown.output
    assert "cannot be written" in shown.output
    refusal = decode_calibration(result.read_text())
    assert "mount it read-write, or give access" in refusal.message
    assert refusal.retry is False


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_directory_exits_42(tmp_path, run, name):
    (tmp_path / "file").touch()
    result = run(tmp_path / name)
    assert result.exit_code == 42
    assert "is no directory" in result.output


def test_a_pool_that_is_not_available_yet_is_tried_again(tmp_path, run):
    (tmp_path / UNAVAILABLE_MARKER).write_text("DiskNotMounted: mount the disk\n")
    result = run(tmp_path)
    assert result.exit_code == 1
    assert "DiskNotMounted: mount the disk" in result.output


def test_a_disk_that_hangs_is_tried_again_and_keeps_its_memory(tmp_path, monkeypatch):
    stop, stopped, abandoned = Reactor.stop, [], len(measure._ABANDONED)
    asked, answers = threading.Event(), threading.Event()

    def answer_late(resume: Callable[[int], None]) -> None:
        asked.set()
        assert answers.wait(100)
        resume(0)

    def hang(_bench: Bench, *_arguments: Any) -> Iterator:
        return (yield Await(lambda resume: threading.Thread(target=answer_late, args=[resume]).start()))

    def stop_soon(reactor: Reactor, _seconds: float) -> bool:
        stopped.append(reactor)
        return asked.wait(100) and stop(reactor, 0)

    monkeypatch.setattr(measure, "HANG_SECONDS", 0.0)
    monkeypatch.setattr(Bench, "_write_file", hang)
    monkeypatch.setattr(Reactor, "stop", stop_soon)
    with pytest.raises(TransientError, match="has not answered"):
        calibrate_storage(str(tmp_path), SMALL)
    assert len(measure._ABANDONED) == abandoned + 1, "the kernel may still write there"
    answers.set()
    assert [stop(reactor, 100) for reactor in stopped] == [True]
    measure._ABANDONED.pop()


@pytest.mark.parametrize(
    "arguments", [["--bytes", "many"], ["--min-free", "-1"], ["--seconds", "0"], ["--seconds", "nan"]]
)
def test_wrong_arguments_are_explained(tmp_path, run, arguments):
    result = run(tmp_path, *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_no_directory_in_which_files_can_be_made_is_a_configuration_error():
    with pytest.raises(ConfigurationError), scratch_folder("/proc/self"):
        pass
