"""Disks as the mount table and sysfs tell of them, in trees like those of real machines."""

import os
from pathlib import Path

import pytest

from pykvcache_contract.api.fields import to_dict
from pykvcache_contract.api.node import AgentStatus
from pykvcache_contract.api.pool import DiskType
from pykvcache_sidecar.node.disks import DEVICE_LETTERS_MAX, discover
from pykvcache_sidecar.node.patience import Patience


class Machine:
    """A mount table, a sysfs and a /dev below one directory; the disks' mount points are plain folders of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines: list[str] = []
        self.patience_seconds = 60.0
        (root / "proc" / "self").mkdir(parents=True)
        (root / "sys" / "dev" / "block").mkdir(parents=True)
        (root / "sys" / "class" / "block").mkdir(parents=True)

    def device(self, path: str, number: str, *, rotational: str = "", model: str = "") -> Path:
        """Make a device's folder below /sys/devices and the links to it."""
        node = self.root / "sys" / "devices" / path
        (node / "slaves").mkdir(parents=True)
        if rotational:
            (node / "queue").mkdir()
            (node / "queue" / "rotational").write_text(rotational + "\n")
        if model:
            (node / "device").mkdir()
            (node / "device" / "model").write_text(f"{model}     \n")
        (self.root / "sys" / "dev" / "block" / number).symlink_to(node)
        (self.root / "sys" / "class" / "block" / node.name).symlink_to(node)
        return node

    def mount(self, place: str, number: str, *, root: str = "/", kind: str = "exfat", source: str = "none") -> None:
        point = self.root / place
        point.mkdir(parents=True, exist_ok=True)
        escaped = str(point).replace(" ", "\\040")
        self.lines.append(f"{len(self.lines) + 20} 1 {number} {root} {escaped} rw - {kind} {source} rw\n")

    def disks(self, *patterns: str):
        (self.root / "proc" / "self" / "mountinfo").write_text("".join(self.lines))
        places = [f"{self.root}/{pattern}" for pattern in patterns]
        patience = Patience(self.patience_seconds)
        return discover(places, patience=patience, proc=self.root / "proc", sysfs=self.root / "sys")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_partition_of_an_nvme_disk_is_told_with_the_disks_model(machine):
    machine.device("nvme0n1", "259:0", rotational="0", model="Amazon EC2 NVMe Instance Storage")
    partition = machine.device("nvme0n1/nvme0n1p1", "259:1")
    (partition / "partition").write_text("1\n")
    machine.mount("mnt/local disk", "259:1", source="/dev/nvme0n1p1")
    (disk,) = machine.disks("mnt/local*")
    assert (disk.device, disk.model, disk.type) == (
        "/dev/nvme0n1p1",
        "Amazon EC2 NVMe Instance Storage",
        DiskType.NVME,
    )
    assert disk.mount_path == f"{machine.root}/mnt/local disk"
    status = os.statvfs(machine.root)
    assert disk.size_bytes == status.f_blocks * status.f_frsize
    assert disk.free_bytes % (disk.size_bytes // 100) == 0


@pytest.mark.parametrize(
    ("name", "rotational", "kind"),
    [
        ("sda", "1", DiskType.HDD),
        ("sda", "0", DiskType.SSD),
        ("vda", "1", DiskType.OTHER),
        ("loop3", "0", DiskType.OTHER),
        ("sdb", "", DiskType.OTHER),
    ],
)
def test_the_kind_of_a_disk_is_what_sysfs_says_where_that_means_anything(machine, name, rotational, kind):
    machine.device(name, "8:0", rotational=rotational)
    machine.mount("mnt/a", "8:0", source=f"/dev/{name}")
    assert [kind] == [disk.type for disk in machine.disks("mnt/a")]


@pytest.mark.parametrize(
    ("below", "kind"), [(("nvme0n1", "nvme1n1"), DiskType.NVME), (("nvme0n1", "sda"), DiskType.OTHER)]
)
def test_a_raid_is_of_the_kind_that_all_its_disks_are_of(machine, below, kind):
    raid, mapper = machine.device("virtual/md0", "9:0", rotational="0"), machine.device("virtual/dm-0", "253:0")
    (mapper / "slaves" / "md0").symlink_to(raid)
    for number, name in enumerate(below):
        disk = machine.device(name, f"259:{number}", rotational="0", model=f"M{number}")
        (raid / "slaves" / name).symlink_to(disk)
    machine.mount("mnt/raid", "253:0", source="/dev/mapper/vg-lv")
    (disk,) = machine.disks("mnt/raid")
    assert (disk.type, disk.model, disk.device) == (kind, "M0", "/dev/dm-0")


def test_a_filesystem_with_numbers_of_its_own_is_found_by_the_name_of_its_device(machine):
    machine.device("nvme2n1", "259:7")
    machine.mount("mnt/a", "0:45", root="/@data", kind="btrfs", source="/dev/nvme2n1")
    assert [DiskType.NVME] == [disk.type for disk in machine.disks("mnt/a")]


def test_what_no_device_is_behind_is_of_another_kind(machine):
    machine.mount("mnt/memory", "0:99", kind="tmpfs", source="tmpfs")
    (disk,) = machine.disks("mnt/*")
    assert (disk.type, disk.device, disk.model, disk.filesystem_uuid) == (DiskType.OTHER, "tmpfs", "", "")


def test_only_whole_filesystems_at_matching_places_count(machine):
    machine.mount("mnt/disks/one", "8:1")
    machine.mount("mnt/disks/one/deeper", "8:2")
    machine.mount("mnt/disks/bound", "8:3", root="/var/folder")
    machine.mount("mnt/other", "8:4")
    assert [f"{machine.root}/mnt/disks/one"] == [disk.mount_path for disk in machine.disks("mnt/disks/*")]


def test_a_disk_that_cannot_be_asked_is_left_out(machine):
    machine.mount("mnt/a", "8:1")
    machine.mount("mnt/b", "8:2")
    (machine.root / "mnt" / "a").rmdir()
    assert [f"{machine.root}/mnt/b"] == [disk.mount_path for disk in machine.disks("mnt/*")]


def test_a_real_tmpfs_at_a_real_place_is_found(tmp_path, mounts):
    place = tmp_path / "nvme7"
    mounts.tmpfs(place, size="8m")
    (disk,) = discover([f"{tmp_path}/nvme*"], patience=Patience(60.0))
    assert (disk.mount_path, disk.filesystem, disk.size_bytes) == (str(place), "tmpfs", 8 << 20)


def test_a_network_disk_of_a_long_name_does_not_keep_the_status_from_being_written(machine):
    machine.mount("mnt/net", "0:50", kind="nfs4", source="server:/" + "x" * 1000)
    status = AgentStatus(disks=tuple(machine.disks("mnt/*")))
    assert len(to_dict(status)["disks"][0]["device"]) == DEVICE_LETTERS_MAX
