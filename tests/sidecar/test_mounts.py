"""Disks that fill up, vanish, come back blank or turn read-only, with real mounts."""

import os
import subprocess

import pytest

from pykvcache_contract.errors import ConfigurationError

pytestmark = pytest.mark.slow

FREES_AT_ONCE = """
from pykvcache_sidecar import signals
signals.hold()
from pykvcache_sidecar import pending
pending.LAG_SECONDS = 2.0  # half a minute otherwise, which a filesystem in memory never needs
"""


@pytest.fixture
def disk(tmp_path, mounts):
    """A mount point with a small tmpfs of its own."""
    place = tmp_path / "disk"
    mounts.tmpfs(place, size="4m")
    return place


@pytest.fixture
def change_mount(wait_for):
    """Return a function that changes a mount as soon as nothing is open: the sidecar opens files for moments only."""

    def change(*command):
        wait_for(lambda: not subprocess.run(command, check=False).returncode, " ".join(map(str, command)))

    return change


def test_a_disk_that_others_fill_makes_the_pool_give_way_down_to_nothing(disk, make_pool, start_sidecar):
    pool = make_pool(disk / "pool")
    pool.fill(100)
    options = ("--capacity", "1GiB", "--min-free", "1MiB", "--scrub-rate", 0)
    sidecar = start_sidecar(pool.directory, *options, before=FREES_AT_ONCE)
    before = sidecar.wait_scanned()
    assert before["evicted"]["blocks"] == 0
    stranger = disk / "stranger"
    stranger.write_bytes(b"x" * (before["free_bytes"] - 500_000))
    # A sidecar that came round while the file grew has made room for a part of it only.
    most = 0.9 * (before["used_bytes"] + 500_000 - (1 << 20))
    status = sidecar.wait_status(lambda status: status["used_bytes"] < most and status["free_bytes"] >= 1 << 20)
    assert status["blocks"] > 0
    assert status["allowed_bytes"] < status["capacity_bytes"]
    with stranger.open("ab") as file:
        file.write(b"x" * (os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 8192))
    sidecar.wait_status(lambda status: status["blocks"] == 0)
    assert pool.ledger.usage().limit_bytes == 1
    stranger.unlink()
    sidecar.wait_status(lambda status: status["allowed_bytes"] > 1 << 20)
    assert pool.ledger.usage().limit_bytes > 1 << 20


def test_a_disk_that_vanishes_leaves_its_bare_mount_point_empty(disk, mounts, make_pool, start_sidecar):
    pool = make_pool(disk)
    pool.fill(95)
    sidecar = start_sidecar(disk, "--capacity", "1GiB", "--require-mount", "--scrub-rate", "1MiB")
    first = sidecar.wait_scanned()
    mounts.detach(disk)
    status = sidecar.wait_state("unmounted")
    assert str(disk) in status["reason"]
    assert [sidecar.get("/readyz")[0], sidecar.get("/healthz")[0]] == [503, 200]
    for _ in range(10):
        assert sidecar.status()["state"] == "unmounted"
    assert list(disk.iterdir()) == []
    mounts.tmpfs(disk, size="4m")
    # The fill level of a blank pool is unknown until the first scan is counted, and told at the end of that round.
    status = sidecar.wait_status(
        lambda status: (
            status["state"] == "working" and status["scan"]["ended_seconds"] and status["used_bytes"] is not None
        )
    )
    assert status["uid"] != first["uid"]
    assert status["blocks"] == status["used_bytes"] == 0
    assert sidecar.get("/readyz")[0] == 200
    mounts.detach(disk)
    sidecar.wait_state("unmounted")
    assert list(disk.iterdir()) == []
    assert "Traceback" not in sidecar.text()


def test_a_disk_that_comes_back_with_its_pool_goes_on(tmp_path, mounts, make_pool, start_sidecar):
    place, aside = tmp_path / "disk", tmp_path / "aside"
    mounts.tmpfs(aside, size="4m")
    place.mkdir()
    mounts.bind(aside, place)
    pool = make_pool(place)
    pool.fill(95)
    sidecar = start_sidecar(place, "--capacity", "1GiB", "--scrub-rate", 0)
    first = sidecar.wait_scanned()
    mounts.detach(place)
    sidecar.wait_state("unmounted")
    mounts.bind(aside, place)
    status = sidecar.wait_status(lambda status: status["state"] == "working" and status["blocks"] == 95)
    assert status["uid"] == first["uid"]


def test_a_disk_that_turns_read_only_is_waited_for(disk, mounts, change_mount, make_pool, start_sidecar):
    pool = make_pool(disk)
    pool.fill(85)
    sidecar = start_sidecar(disk, "--capacity", 100 * pool.block_bytes, "--scrub-rate", "1MiB")
    sidecar.wait_scanned()
    change_mount("mount", "-o", "remount,ro", disk)
    status = sidecar.wait_state("read_only")
    assert "remount,rw" in status["reason"]
    assert [sidecar.get("/readyz")[0], sidecar.get("/healthz")[0]] == [503, 200]
    mounts.remount(disk, "rw")
    sidecar.wait_state("working")
    pool.ledger.reserve(10 * pool.block_bytes, capacity_bytes=10**12)
    sidecar.wait_status(lambda status: status["evicted"]["blocks"] >= 15)
    assert "Traceback" not in sidecar.text()


def test_a_disk_that_is_read_only_at_the_start_is_waited_for(disk, mounts, make_pool, start_sidecar):
    pool = make_pool(disk)
    pool.fill(95)
    mounts.remount(disk, "ro")
    sidecar = start_sidecar(disk, "--capacity", 100 * pool.block_bytes, "--scrub-rate", 0)
    sidecar.wait_state("read_only")
    mounts.remount(disk, "rw")
    sidecar.wait_status(lambda status: status["evicted"]["blocks"] == 15)


def test_the_disk_can_be_unmounted_while_the_pool_is_read_only(disk, change_mount, make_pool, start_sidecar):
    pool = make_pool(disk)
    pool.fill(5)
    sidecar = start_sidecar(disk, "--capacity", "1GiB", "--scrub-rate", 0)
    sidecar.wait_scanned()
    change_mount("mount", "-o", "remount,ro", disk)
    sidecar.wait_state("read_only")
    change_mount("umount", disk)
    sidecar.wait_state("unmounted")


@pytest.mark.parametrize("is_link", [False, True])
def test_a_bind_mount_of_the_same_filesystem_is_a_mount_point_also_behind_a_link(
    disk, tmp_path, mounts, make_settings, is_link
):
    source, place, link = disk / "source", disk / "place", tmp_path / "link"
    source.mkdir()
    place.mkdir()
    link.symlink_to(place)
    settings = make_settings(pool_directory=str(link if is_link else place), require_mount=True)
    with pytest.raises(ConfigurationError, match="no mount point"):
        settings.check_mount()
    mounts.bind(source, place)
    settings.check_mount()
    mounts.unmount(place)
    with pytest.raises(ConfigurationError, match="no mount point"):
        settings.check_mount()


def test_a_sidecar_starts_on_a_link_to_a_disk_if_a_mount_is_required(disk, tmp_path, start_sidecar):
    link = tmp_path / "link"
    link.symlink_to(disk)
    start_sidecar(link, "--capacity", "1GiB", "--require-mount").wait_state("working")
    assert (disk / "pool.json").exists()
