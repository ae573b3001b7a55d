"""The probe on real directories, and where io_uring is forbidden by a real seccomp filter."""

import errno
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pykvcache_contract.errors import ConfigurationError, PoolUnavailableError, ReadOnlyError
from pykvcache_contract.paths import POOL_FILE
from pykvcache_storage.probe import PublishMethod, filesystem_of, make_ring, probe, probe_read_only
from pykvcache_storage.reactor.liburing import find_library

FORBID = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
error, *numbers = map(int, sys.argv[1].split(","))
# Load the number of the system call; at each forbidden one fail with the errno, else allow.
code = [(0x20, 0, 0, 0)]
for number in numbers:
    code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)]
code.append((0x06, 0, 0, 0x7FFF0000))
program = b"".join(struct.pack("<HBBI", *line) for line in code)
filter_buffer = ctypes.create_string_buffer(program)
header = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(filter_buffer)))
assert libc.prctl(38, 1, 0, 0, 0) == 0, "PR_SET_NO_NEW_PRIVS"
assert libc.prctl(22, 2, header) == 0, "PR_SET_SECCOMP"
"""
IO_URING_SETUP = (425,)
PROBE = """
from pykvcache_storage.probe import probe, make_ring
try:
    result = probe(sys.argv[2], engine=sys.argv[3])
    print(result.engine, result.engine_reason, result.publish.name, result.publish_reason, sep="|")
    make_ring(result, threads=2).close()
except Exception as error:
    print(type(error).__name__, error, sep="|")
"""


def have_liburing() -> bool:
    try:
        find_library()
    except ImportError:
        return False
    return True


needs_uring = pytest.mark.skipif(not have_liburing(), reason="the liburing package is not installed")


def run_python(code: str, *arguments: object) -> list[str]:
    """Run code in a process of its own; return what it prints, split at bars."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.strip().split("|")


def probe_without(numbers: tuple[int, ...], code: int, *arguments: object) -> list[str]:
    """Probe in a process to which a seccomp filter forbids some system calls."""
    return run_python(FORBID + PROBE, ",".join(map(str, (code, *numbers))), *arguments)


@pytest.fixture(params=["disk", "tmpfs"])
def folder(request, tmp_path):
    # Not a name of pytest's own: another run that goes on at the same time has the same.
    with tempfile.TemporaryDirectory(dir=tmp_path if request.param == "disk" else "/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def mount(tmp_path, unmount):
    """Return a function that mounts a filesystem of some type on a fresh directory."""
    mounted = []

    def mount_here(kind: str, options: str = "defaults") -> Path:
        point = tmp_path / kind
        point.mkdir()
        done = subprocess.run(["mount", "-t", kind, "-o", options, "none", point], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount {kind}: {done.stderr.decode().strip()}")
        mounted.append(point)
        return point

    yield mount_here
    for point in mounted:
        unmount(point)


@needs_uring
def test_what_the_probe_finds_works_and_nothing_is_left_behind(folder):
    result = probe(folder)
    assert result.filesystem == filesystem_of(folder)
    assert result.publish is PublishMethod.LINK
    assert result.direct_io == (result.alignment_bytes > 1)
    assert result.alignment_bytes in (1, 512, 1024, 2048, 4096)
    assert list(folder.iterdir()) == []
    ring = make_ring(result)
    assert ring.name == result.engine
    ring.close()


def test_every_choice_is_explained_in_one_sentence(folder):
    result = probe(folder)
    for reason in (result.engine_reason, result.direct_reason, result.publish_reason):
        assert reason
        assert "\n" not in reason


@needs_uring
def test_on_tmpfs_reads_are_sent_to_kernel_threads():
    if filesystem_of("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    assert probe("/dev/shm", engine="uring").force_async
    assert not probe("/dev/shm", engine="threads").force_async


@needs_uring
def test_buffered_reads_are_sent_to_kernel_threads_on_every_filesystem(tmp_path):
    result = probe(tmp_path, engine="uring", direct_io="off")
    assert (result.direct_io, result.alignment_bytes, result.force_async) == (False, 1, True)
    assert "configuration" in result.direct_reason


def test_threads_are_taken_when_asked_for(tmp_path):
    result = probe(tmp_path, engine="threads")
    assert (result.engine, result.force_async) == ("threads", False)
    assert make_ring(result, threads=1).name == "threads"


@needs_uring
@pytest.mark.parametrize(
    ("code", "words"), [(errno.EPERM, "seccomp"), (errno.ENOSYS, "ENOSYS"), (errno.ENOMEM, "RLIMIT_MEMLOCK")]
)
def test_a_refused_io_uring_falls_back_to_threads_and_says_why(tmp_path, code, words):
    engine, reason, *_ = probe_without(IO_URING_SETUP, code, tmp_path, "auto")
    assert engine == "threads"
    assert words in reason
    assert errno.errorcode[code] in reason
    assert list(tmp_path.iterdir()) == []


@needs_uring
def test_io_uring_that_was_asked_for_and_is_refused_is_an_error_with_a_remedy(tmp_path):
    kind, message = probe_without(IO_URING_SETUP, errno.EPERM, tmp_path, "uring")
    assert kind == "ConfigurationError"
    assert "Set engine to auto or threads" in message
    assert list(tmp_path.iterdir()) == []


HIDE_LIBURING = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "liburing" else find_spec(name, package)
"""


@pytest.mark.slow
def test_without_the_liburing_package_threads_are_taken(tmp_path):
    engine, reason, *_ = run_python(HIDE_LIBURING + PROBE, 0, tmp_path, "auto")
    assert engine == "threads"
    assert "the liburing package is not installed" in reason
    assert "pip install liburing" in reason
    kind, _ = run_python(HIDE_LIBURING + PROBE, 0, tmp_path, "uring")
    assert kind == "ConfigurationError"


@needs_uring
def test_the_packages_own_python_module_is_never_imported(tmp_path):
    code = f"import sys\n{PROBE}\nprint('', 'liburing' in sys.modules, sep='|')"
    assert run_python(code, 0, tmp_path, "auto")[-1] == "False"


def test_a_missing_directory_and_a_file_are_not_a_pool(tmp_path):
    with pytest.raises(PoolUnavailableError, match="not a directory"):
        probe(tmp_path / "missing")
    (tmp_path / "file").touch()
    with pytest.raises(PoolUnavailableError, match="not a directory"):
        probe(tmp_path / "file")


def test_a_directory_that_nobody_may_write_is_reported_as_read_only():
    # Not even root may create a directory in /sys.
    with pytest.raises(ReadOnlyError, match="cannot be written"):
        probe("/sys/kernel")


def test_a_read_only_mount_is_reported_as_read_only(mount):
    with pytest.raises(ReadOnlyError, match="mount it read-write"):
        probe(mount("tmpfs", "ro"))


def test_a_filesystem_that_refuses_direct_io_is_used_without_it(mount):
    folder = mount("ramfs")
    result = probe(folder)
    assert not result.direct_io
    assert result.direct_reason == "O_DIRECT is refused (EINVAL) by ramfs"
    with pytest.raises(ConfigurationError, match="Set direct_io to auto or off"):
        probe(folder, direct_io="on")


def test_a_disk_that_is_full_is_probed_all_the_same(mount):
    folder = mount("tmpfs", "size=64k")
    expected = probe(folder)
    with pytest.raises(OSError, match="No space left"):
        (folder / "filler").write_bytes(bytes(1 << 20))
    assert probe(folder) == expected


def test_a_disk_without_room_for_a_name_is_not_usable(mount):
    with pytest.raises(PoolUnavailableError, match="No space left"):
        probe(mount("tmpfs", "nr_inodes=1"))


LINK_CALLS = {"x86_64": (86, 265), "aarch64": (37,)}.get(platform.machine())
RENAMEAT2 = {"x86_64": (316,), "aarch64": (276,)}.get(platform.machine())


@pytest.mark.slow
@pytest.mark.skipif(LINK_CALLS is None, reason="the numbers of the system calls are not known here")
def test_where_links_or_renames_are_refused_the_next_method_is_taken(tmp_path):
    *_, method, reason = probe_without(LINK_CALLS, errno.EPERM, tmp_path, "threads")
    assert method == PublishMethod.RENAME_NOREPLACE.name
    assert "no hard links (EPERM)" in reason
    *_, method, reason = probe_without((*LINK_CALLS, *RENAMEAT2), errno.EINVAL, tmp_path, "threads")
    assert method == PublishMethod.RENAME.name
    assert "the last writer wins" in reason


def test_the_innermost_mount_tells_the_filesystem(tmp_path, mount):
    assert filesystem_of(mount("ramfs")) == "ramfs"
    assert filesystem_of("/proc") == "proc"
    assert filesystem_of(tmp_path) == filesystem_of(tmp_path.parent)


@pytest.mark.parametrize("wanted", ["auto", "threads"])
def test_a_pool_that_can_only_be_read_is_probed_without_making_a_file(folder, wanted):
    (folder / POOL_FILE).write_text("{}")
    expected = probe(folder, engine=wanted)
    found = probe_read_only(folder, engine=wanted)
    names = ("engine", "direct_io", "alignment_bytes", "force_async", "filesystem")
    assert [getattr(found, name) for name in names] == [getattr(expected, name) for name in names]
    assert found.publish_reason == "nothing is published in a read-only pool"
    assert os.listdir(folder) == [POOL_FILE]
    (folder / POOL_FILE).unlink()


def test_what_is_impossible_in_a_read_only_pool_is_refused_as_in_any_other(mount):
    folder = mount("ramfs")
    (folder / POOL_FILE).write_text("{}")
    assert not probe_read_only(folder).direct_io
    with pytest.raises(ConfigurationError, match="Set direct_io to auto or off"):
        probe_read_only(folder, direct_io="on")
