"""Volumes of pods, really mounted: their flags, being asked twice, being killed half-way, hostile paths."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from pykvcache_sidecar.node import mounts as mounts_module
from pykvcache_sidecar.node.mount_table import read_mount_table
from pykvcache_sidecar.node.mounts import Target, mounts_of

MARKER = "pykvcache-unavailable"
HARMLESS = os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC


def is_mounted(path):
    return any(mount.point == path for mount in read_mount_table())


@pytest.fixture
def disk(tmp_path, mounts):
    """A disk with a directory to be mounted, and one beside it."""
    place = tmp_path / "disk"
    mounts.tmpfs(place)
    for name in ("pool", "other"):
        (place / name).mkdir()
        (place / name / "name").write_text(name)
    return place


@pytest.fixture
def kubelet(tmp_path):
    """Kubelet's directory with the folder of one volume; whatever is mounted in it is gone at the end."""
    folder = tmp_path / "a kubelet\\"  # the mount table escapes blanks and backslashes
    (folder / "pods/uid").mkdir(parents=True)
    yield folder
    for mount in reversed(read_mount_table()):
        if mount.point.startswith(str(tmp_path / "a kubelet")):
            subprocess.run(["umount", "-l", mount.point], check=False)


@pytest.fixture
def target(kubelet, disk):
    return Target(f"{kubelet}/pods/uid/mount", kubelet_directory=str(kubelet))


@pytest.fixture
def path(target):
    return Path(target.path)


def flags_of(path: Path) -> int:
    return os.statvfs(path).f_flag & (HARMLESS | os.ST_RDONLY)


def stacked_on(path: Path) -> int:
    return sum(mount.point == str(path) for mount in read_mount_table())


def test_a_directory_is_shown_without_programs_devices_and_changes_of_user(target, path, disk):
    target.mount_directory(f"{disk}/pool", read_only=False)
    assert is_mounted(target.path)
    assert flags_of(path) == HARMLESS
    (path / "new").write_text("from the pod")
    assert (disk / "pool/new").read_text() == "from the pod"
    (path / "program").write_text("#!/bin/sh\n")
    (path / "program").chmod(0o755)
    with pytest.raises(PermissionError):
        subprocess.run([path / "program"], check=False)
    assert flags_of(disk) == 0, "the disk's own mount keeps its flags"


def test_a_read_only_volume_cannot_be_written(target, path, disk):
    target.mount_directory(f"{disk}/pool", read_only=True)
    assert flags_of(path) == HARMLESS | os.ST_RDONLY
    with pytest.raises(OSError, match="Read-only"):
        (path / "new").touch()
    (disk / "pool/new").touch()


def test_what_is_mounted_read_only_on_the_node_stays_so(target, path, disk, tmp_path, mounts):
    view = tmp_path / "view"
    view.mkdir()
    mounts.bind(disk / "pool", view)
    mounts.remount(view, "bind,ro")
    for _ in range(2):
        target.mount_directory(str(view), read_only=False)
        assert flags_of(path) == HARMLESS | os.ST_RDONLY


@pytest.mark.parametrize("read_only", [False, True])
def test_the_same_call_again_mounts_nothing(target, path, disk, read_only, monkeypatch):
    target.mount_directory(f"{disk}/pool", read_only=read_only)
    monkeypatch.setattr(mounts_module, "_mount", None)
    monkeypatch.setattr(mounts_module, "_unmount", None)
    target.mount_directory(f"{disk}/pool", read_only=read_only)
    assert stacked_on(path) == 1


def test_something_else_on_the_target_is_replaced(target, path, disk):
    target.mount_directory(f"{disk}/other", read_only=False)
    target.mount_directory(f"{disk}/pool", read_only=False)
    assert (path / "name").read_text() == "pool"
    target.mount_directory(f"{disk}/pool", read_only=True)
    assert flags_of(path) & os.ST_RDONLY
    target.mount_marker("the disk is away")
    assert [entry.name for entry in path.iterdir()] == [MARKER]
    target.mount_directory(f"{disk}/pool", read_only=False)
    assert (path / "name").read_text() == "pool"
    assert stacked_on(path) == 1


def test_a_mount_that_hides_the_right_one_is_taken_away(target, path, disk, mounts):
    target.mount_directory(f"{disk}/pool", read_only=False)
    mounts.bind(disk / "other", path)
    assert stacked_on(path) == 2
    target.mount_directory(f"{disk}/pool", read_only=False)
    assert stacked_on(path) == 1
    assert (path / "name").read_text() == "pool"


def test_what_the_right_mount_hides_is_taken_away_too(target, path, disk, mounts):
    path.mkdir()
    mounts.bind(disk / "other", path)
    mounts.bind(disk / "pool", path)
    mounts.remount(path, "bind,nosuid,nodev,noexec")
    target.mount_directory(f"{disk}/pool", read_only=False)
    assert stacked_on(path) == 1


def test_running_containers_keep_what_was_replaced(target, path, disk):
    target.mount_directory(f"{disk}/other", read_only=False)
    with (path / "name").open() as held:
        target.mount_directory(f"{disk}/pool", read_only=False)
        assert held.read() == "other"


# ---- the marker ----


def test_the_marker_says_why_and_cannot_be_changed(target, path):
    target.mount_marker("DiskNotMounted: mount /mnt/a")
    assert [entry.name for entry in path.iterdir()] == [MARKER]
    assert (path / MARKER).read_text() == "DiskNotMounted: mount /mnt/a\n"
    assert stat.S_IMODE((path / MARKER).stat().st_mode) == 0o644
    assert flags_of(path) == HARMLESS | os.ST_RDONLY
    with pytest.raises(OSError, match="Read-only"):
        (path / "new").touch()
    assert is_mounted(target.path)


def test_a_long_reason_is_cut_and_an_odd_one_is_written(target, path):
    target.mount_marker("x" * 100_000)
    assert len((path / MARKER).read_bytes()) < 5000
    target.unmount()
    target.mount_marker("bad \udcff letter")
    assert (path / MARKER).read_text() == "bad ? letter\n"


def test_a_complete_marker_stays(target, path, monkeypatch):
    target.mount_marker("first")
    monkeypatch.setattr(mounts_module, "_mount", None)
    target.mount_marker("second")
    assert (path / MARKER).read_text() == "first\n"


# ---- unmounting ----


def test_unmounting_removes_all_and_may_be_repeated(target, path, disk, mounts):
    target.mount_directory(f"{disk}/pool", read_only=False)
    mounts.bind(disk / "other", path)
    for _ in range(2):
        target.unmount()
        assert not path.exists()
        assert not is_mounted(target.path)
    assert (disk / "pool/name").exists()


def test_unmounting_where_nothing_ever_was_is_fine(kubelet):
    Target(f"{kubelet}/pods/gone/mount", kubelet_directory=str(kubelet)).unmount()
    (kubelet / "pods/uid/mount").mkdir()
    Target(f"{kubelet}/pods/uid/mount", kubelet_directory=str(kubelet)).unmount()
    assert list((kubelet / "pods/uid").iterdir()) == []


def test_a_volume_in_use_is_taken_away_all_the_same(target, path, disk):
    target.mount_directory(f"{disk}/pool", read_only=False)
    with (path / "name").open() as held:
        target.unmount()
        assert not path.exists()
        assert held.read() == "pool"


def test_files_below_the_mount_are_kept_and_named(target, path, disk):
    path.mkdir()
    (path / "precious").touch()
    target.mount_directory(f"{disk}/pool", read_only=False)
    with pytest.raises(OSError, match="not empty"):
        target.unmount()
    assert not is_mounted(target.path)
    assert (path / "precious").exists()


def test_more_stacked_mounts_than_one_call_takes_are_an_error_and_left_to_the_next(target, path, disk, mounts):
    path.mkdir()
    for _ in range(mounts_module.STACKED_MAX + 1):
        mounts.bind(disk / "other", path)
    with pytest.raises(OSError, match="stacked"):
        target.unmount()
    target.unmount()
    assert not path.exists()


def test_what_reaches_the_node_by_propagation_has_the_flags_too(kubelet, disk, path, start_python):
    """As in a container: the agent has a mount namespace of its own, whose mounts reach the node's."""
    subprocess.run(["mount", "--bind", kubelet, kubelet], check=True)
    try:
        subprocess.run(["mount", "--make-shared", kubelet], check=True)
        code = """
import ctypes, sys
from pykvcache_sidecar.node.mounts import Target

assert ctypes.CDLL(None).unshare(0x20000) == 0
Target(sys.argv[1], kubelet_directory=sys.argv[2]).mount_directory(sys.argv[3], read_only=True)
"""
        process = start_python(code, path, kubelet, disk / "pool")
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        assert flags_of(path) == HARMLESS | os.ST_RDONLY
    finally:
        subprocess.run(["umount", "-R", "-l", kubelet], check=True)


# ---- killed half-way ----

KILLED = """
import errno, os, signal, sys
from pykvcache_sidecar.node import mounts
real, calls = mounts._mount, 0

def mount(*arguments, **options):
    global calls
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    calls += 1
    real(*arguments, **options)

def too_old(*_, **__):
    raise OSError(errno.ENOSYS, "this kernel attaches no clones")

mounts._mount, mounts._attach_clone = mount, too_old
target = mounts.Target(sys.argv[1], kubelet_directory=sys.argv[2])
if sys.argv[4]:
    target.mount_directory(sys.argv[4], read_only=False)
else:
    target.mount_marker("why")
"""


@pytest.mark.slow
@pytest.mark.parametrize("mounted_before", [0, 1], ids=["before the mount", "between mount and flags"])
@pytest.mark.parametrize("kind", ["directory", "marker"])
def test_a_mount_that_was_cut_short_is_completed_by_the_next_call(
    target, path, kubelet, disk, start_python, mounted_before, kind
):
    directory = str(disk / "pool") if kind == "directory" else ""
    process = start_python(KILLED, path, kubelet, mounted_before, directory)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == -9, output
    assert stacked_on(path) == mounted_before
    if directory:
        target.mount_directory(directory, read_only=False)
        assert flags_of(path) == HARMLESS
    else:
        target.mount_marker("again")
        assert (path / MARKER).read_text() == "again\n"
    assert stacked_on(path) == 1


def test_a_marker_that_was_not_finished_is_made_anew(target, path, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(mounts_module, "_write_reason", killed)
        with pytest.raises(KeyboardInterrupt):
            target.mount_marker("first")
    assert list(path.iterdir()) == []
    target.mount_marker("second")
    assert (path / MARKER).read_text() == "second\n"


# ---- hostile paths ----


@pytest.mark.parametrize("suffix", ["", "/", "/../outside", "/pods/../../outside", "//pods", "/pods/./uid", "-other/x"])
def test_a_target_that_is_not_plainly_below_kubelets_directory_is_refused(kubelet, suffix):
    with pytest.raises(ValueError, match="plain path"):
        Target(f"{kubelet}{suffix}", kubelet_directory=str(kubelet))


@pytest.mark.parametrize("where", ["pods", "pods/uid", "pods/uid/mount"])
def test_a_link_in_the_targets_path_is_not_followed(target, kubelet, disk, tmp_path, where):
    outside = tmp_path / "outside"
    (outside / "uid/mount").mkdir(parents=True)
    (outside / "mount").mkdir()
    planted = kubelet / where
    if planted.exists():
        planted.rename(tmp_path / "aside")
    planted.symlink_to(outside)
    calls = [
        lambda: target.mount_directory(f"{disk}/pool", read_only=False),
        lambda: target.mount_marker("why"),
        target.unmount,
    ]
    for call in calls:
        with pytest.raises(OSError, match=r"link|Not a directory"):
            call()
    assert [mount.point for mount in read_mount_table() if mount.point.startswith(str(tmp_path))] == [str(disk)]
    assert sorted(folder.name for folder in outside.iterdir()) == ["mount", "uid"]


def test_a_link_in_the_sources_path_is_not_followed(target, path, disk, tmp_path):
    (tmp_path / "link").symlink_to(disk)
    for source in (f"{tmp_path}/link/pool", f"{tmp_path}/link"):
        with pytest.raises(OSError, match="link"):
            target.mount_directory(source, read_only=False)
    with pytest.raises(FileNotFoundError):
        target.mount_directory(f"{disk}/missing", read_only=False)
    with pytest.raises(OSError, match="link"):
        target.mount_directory(f"{disk}/pool/name", read_only=False)
    for source in ("", "relative", f"{disk}/../x"):
        with pytest.raises(ValueError, match="plain"):
            target.mount_directory(source, read_only=False)
    assert not path.exists()


def test_kubelets_directory_itself_may_be_a_link(kubelet, disk, tmp_path):
    link = tmp_path / "kubelet-link"
    link.symlink_to(kubelet)
    target = Target(f"{link}/pods/uid/mount", kubelet_directory=str(link))
    for _ in range(2):
        target.mount_directory(f"{disk}/pool", read_only=False)
        assert stacked_on(kubelet / "pods/uid/mount") == 1
    target.unmount()
    assert not (kubelet / "pods/uid/mount").exists()


# ---- counting ----


def test_the_mounts_of_a_pool_are_counted_in_kubelets_directory_only(kubelet, disk, tmp_path, mounts):
    pool = disk / "pool"
    (pool / "ns/a").mkdir(parents=True)
    (disk / "pool-other").mkdir()
    assert mounts_of(str(pool), below=str(kubelet)) == 0
    sources = [pool / "ns/a", pool / "ns/a", pool, disk / "pool-other", disk / "other"]
    targets = [Target(f"{kubelet}/pods/uid/{n}", kubelet_directory=str(kubelet)) for n in range(len(sources))]
    for target, source in zip(targets, sources, strict=True):
        target.mount_directory(str(source), read_only=False)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    mounts.bind(pool, elsewhere)
    assert mounts_of(str(pool), below=str(kubelet)) == 3
    assert mounts_of(str(pool / "ns/a"), below=str(kubelet)) == 2
    assert mounts_of(str(disk / "other"), below=str(kubelet)) == 1
    targets[0].unmount()
    assert mounts_of(str(pool), below=str(kubelet)) == 2


def test_mounts_of_a_directory_that_was_removed_still_count(kubelet, disk, target):
    (disk / "pool/name").unlink()
    target.mount_directory(f"{disk}/pool", read_only=False)
    (disk / "pool").rmdir()
    assert mounts_of(f"{disk}/pool", below=str(kubelet)) == 1


def test_another_disk_on_the_same_path_has_no_mounts(kubelet, disk, target, mounts):
    target.mount_directory(f"{disk}/pool", read_only=False)
    mounts.detach(disk)
    mounts.tmpfs(disk)
    assert mounts_of(f"{disk}/pool", below=str(kubelet)) == 0
    target.unmount()
