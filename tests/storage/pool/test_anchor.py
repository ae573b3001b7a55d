"""Recognising a pool again: real mounts that come, go and are replaced under an anchor."""

import gc
import json
import os
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest

from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_contract.keys import Fingerprint
from pykvcache_storage import anchor as anchor_module
from pykvcache_storage.anchor import Anchor, PoolState
from pykvcache_storage.pool import open_pool


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "place"
    directory.mkdir()
    return directory


def unmount(target: Path, *options: str) -> None:
    subprocess.run(["umount", *options, target], check=True)


def age(directory: Path) -> None:
    """Make a pool look as if it had been created long ago."""
    document = json.loads((directory / "pool.json").read_text())
    (directory / "pool.json").write_text(json.dumps({**document, "created": "2020-01-01T00:00:00+00:00"}))


def anchored(directory: Path) -> Anchor:
    return Anchor.of(open_pool(str(directory), create=True))


def test_a_pool_in_a_plain_folder_stays_the_same_while_it_fills(place: Path, fingerprint: Fingerprint) -> None:
    anchor = anchored(place)
    open_pool(str(place), create=True).prepare_fingerprint(fingerprint, {})
    assert anchor.state() is PoolState.SAME
    assert not anchor.was_mount_point
    assert anchor.describe() == f"{place} is pool {anchor.uid}, as before."


def test_a_removed_folder_is_missing_until_it_is_back(place: Path) -> None:
    anchor = anchored(place)
    place.rename(place.parent / "elsewhere")
    assert anchor.state() is PoolState.MISSING
    assert "mount its disk" in anchor.describe()
    (place.parent / "elsewhere").rename(place)
    assert anchor.state() is PoolState.SAME


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format_version": 2}', b'{"format_version": 1}'])
def test_a_damaged_identity_or_another_format_is_missing(place: Path, content: bytes) -> None:
    anchor = anchored(place)
    (place / "pool.json").write_bytes(content)
    assert anchor.state() is PoolState.MISSING
    assert str(place) in anchor.describe()


def test_a_file_in_place_of_the_folder_is_missing(place: Path) -> None:
    anchor = anchored(place)
    shutil.rmtree(place)
    place.write_text("")
    assert anchor.state() is PoolState.MISSING


@pytest.mark.parametrize("keeps_inode", [True, False])
def test_an_emptied_folder_is_blank(place: Path, keeps_inode: bool) -> None:
    anchor = anchored(place)
    if keeps_inode:
        (place / "pool.json").unlink()
        (place / "lost+found").mkdir()
    else:
        shutil.rmtree(place)
        place.mkdir()
    assert anchor.state() is PoolState.BLANK
    assert "is prepared anew" in anchor.describe()


def test_of_several_that_see_a_blank_disk_the_first_prepares_it_for_all(place: Path, mounts) -> None:
    mounts.tmpfs(place)
    anchors = [anchored(place) for _ in range(3)]
    unmount(place)
    mounts.tmpfs(place)
    for index, anchor in enumerate(anchors):
        assert anchor.state() is PoolState.BLANK
        anchors[index] = anchored(place)
    assert len({anchor.uid for anchor in anchors}) == 1
    assert {anchor.state() for anchor in anchors} == {PoolState.SAME}


@pytest.mark.parametrize(("late_by", "state"), [(6.0, PoolState.BLANK), (-6.5, PoolState.REPLACED)])
def test_a_pool_created_before_ours_was_last_seen_is_another_one(place: Path, late_by: float, state: PoolState) -> None:
    now = 1_800_000_000.0
    pool = open_pool(str(place), create=True)
    anchor = Anchor.of(pool, clock=lambda: now)
    document = json.loads((place / "pool.json").read_text())
    created = datetime.fromtimestamp(now + late_by, timezone.utc).isoformat(timespec="seconds")
    (place / "pool.json").write_text(json.dumps({**document, "uid": "f" * 32, "created": created}))
    assert anchor.state() is state
    assert "f" * 32 in anchor.describe()
    (place / "pool.json").write_text(json.dumps({**document, "uid": "f" * 32, "created": "yesterday"}))
    assert anchor.state() is PoolState.REPLACED


def test_foreign_files_in_an_emptied_folder_are_not_blank(place: Path) -> None:
    anchor = anchored(place)
    (place / "pool.json").rename(place / "thesis.txt")
    assert anchor.state() is PoolState.REPLACED


def test_an_unmounted_disk_is_noticed_whatever_lies_below_the_mount_point(place: Path, mounts) -> None:
    anchored(place)  # an old pool below
    mounts.tmpfs(place)
    anchor = anchored(place)
    assert anchor.was_mount_point
    assert anchor.state() is PoolState.SAME
    shutil.copy(place / "pool.json", place.parent / "copy.json")
    unmount(place)
    assert anchor.state() is PoolState.UNMOUNTED
    assert f"{place} was the mount point" in anchor.describe()
    shutil.copy(place.parent / "copy.json", place / "pool.json")
    assert anchor.state() is PoolState.UNMOUNTED
    (place / "pool.json").unlink()
    assert anchor.state() is PoolState.UNMOUNTED
    place.rmdir()
    assert anchor.state() is PoolState.MISSING


def test_a_lazy_unmount_under_open_files_is_noticed_and_an_anchor_holds_none(place: Path, mounts) -> None:
    mounts.tmpfs(place)
    anchor = anchored(place)
    with open(place / "pool.json"):
        unmount(place, "-l")
        assert anchor.state() is PoolState.UNMOUNTED
    mounts.tmpfs(place)
    anchor = anchored(place)
    anchor.state()
    unmount(place)  # not lazily: EBUSY if anything were open
    assert anchor.state() is PoolState.UNMOUNTED


def test_a_blank_disk_on_the_same_mount_point_is_blank_and_another_pools_disk_replaced(place: Path, mounts) -> None:
    mounts.tmpfs(place)
    anchor = anchored(place)
    unmount(place)
    mounts.tmpfs(place)
    assert anchor.state() is PoolState.BLANK
    anchored(place)
    age(place)
    assert anchor.state() is PoolState.REPLACED
    assert "mount the former disk" in anchor.describe()


def test_the_same_pool_is_back_when_its_disk_is_mounted_again_under_another_device_number(place: Path, mounts) -> None:
    mounts.tmpfs(place)
    anchor = anchored(place)
    shutil.copy(place / "pool.json", place.parent / "copy.json")
    mounts.bind(place, place.parent / "other")  # keeps the device number, which the next disk would get again
    unmount(place)
    mounts.tmpfs(place)
    shutil.copy(place.parent / "copy.json", place / "pool.json")
    assert os.stat(place).st_dev != anchor.device
    assert anchor.state() is PoolState.SAME


def test_a_bind_mount_of_the_same_filesystem_is_a_mount_point(place: Path, mounts) -> None:
    disk = place.parent / "disk"
    disk.mkdir()
    mounts.bind(disk, place)
    anchor = anchored(place)
    assert anchor.was_mount_point
    assert not os.path.ismount(place)
    unmount(place)
    assert anchor.state() is PoolState.UNMOUNTED
    mounts.bind(disk, place)
    assert anchor.state() is PoolState.SAME


def test_a_folder_mounted_onto_itself_is_a_mount_point(place: Path, mounts) -> None:
    mounts.bind(place, place)
    anchor = anchored(place)
    unmount(place)
    assert anchor.state() is PoolState.UNMOUNTED


def test_a_pool_in_a_folder_of_a_disk_is_bound_to_the_disks_mount_point(place: Path, mounts) -> None:
    (place / "pool").mkdir()  # below the mount point
    mounts.tmpfs(place)
    (place / "pool").mkdir()
    anchor = anchored(place / "pool")
    assert (anchor.mount_point, anchor.was_mount_point) == (str(place), False)
    unmount(place)
    assert anchor.state() is PoolState.UNMOUNTED
    (place / "pool").rmdir()
    assert anchor.state() is PoolState.UNMOUNTED
    mounts.tmpfs(place)
    assert anchor.state() is PoolState.MISSING
    (place / "pool").mkdir()
    assert anchor.state() is PoolState.BLANK


def test_a_disk_mounted_over_the_pool_replaces_it_even_with_a_copy(place: Path, mounts) -> None:
    anchor = anchored(place)
    shutil.copy(place / "pool.json", place.parent / "copy.json")
    mounts.tmpfs(place)
    assert anchor.state() is PoolState.REPLACED
    shutil.copy(place.parent / "copy.json", place / "pool.json")
    assert anchor.state() is PoolState.REPLACED
    assert "another filesystem" in anchor.describe()
    unmount(place)
    assert anchor.state() is PoolState.SAME


def test_a_link_may_lead_to_the_pool_and_is_followed_anew_each_time(place: Path) -> None:
    link = place.parent / "link"
    link.symlink_to(place)
    anchor = anchored(link)
    assert (anchor.directory, anchor.place) == (str(link), str(place))
    link.unlink()
    assert anchor.state() is PoolState.MISSING
    (place.parent / "other").mkdir()
    link.symlink_to(place.parent / "other")
    assert anchor.state() is PoolState.REPLACED


def test_a_pool_that_is_gone_before_it_is_noted_is_an_error(place: Path) -> None:
    pool = open_pool(str(place), create=True)
    (place / "pool.json").unlink()
    with pytest.raises(PoolUnavailableError, match="holds no pool any more"):
        Anchor.of(pool)
    place.rmdir()
    with pytest.raises(PoolUnavailableError, match="Mount its disk"):
        Anchor.of(pool)


def test_without_mount_ids_device_numbers_stand_in(place: Path, mounts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor_module, "_told_mount_id", lambda _: "")
    mounts.tmpfs(place)
    anchor = anchored(place)
    assert anchor.was_mount_point
    unmount(place)
    assert anchor.state() is PoolState.UNMOUNTED


def test_an_unreadable_pool_is_missing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    anchor = anchored(place)

    def fail(_: str) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(anchor_module, "read_identity", fail)
    assert anchor.state() is PoolState.MISSING
    assert "Input/output error" in anchor.describe()


def test_looking_leaves_no_descriptor_open(place: Path) -> None:
    anchor = anchored(place)
    gc.collect()  # what others left may close its files at any moment
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        anchor.state()
    shutil.rmtree(place)
    anchor.state()
    assert os.listdir("/proc/self/fd") == before
