"""Which nodes, disks and namespaces belong to a pool."""

import pytest

from pykvcache_contract.api.node import Disk
from pykvcache_contract.api.objects import Metadata
from pykvcache_contract.api.pool import (
    DiskSelector,
    DiskType,
    KVCachePool,
    NamespaceSelector,
    PoolSpec,
    Sharing,
    Storage,
    StorageType,
)
from pykvcache_contract.api.selection import admits, first_disk, node_label, selects

SMALL_SSD = Disk(mount_path="/mnt/a", type=DiskType.SSD, size_bytes=100)
NVME = Disk(mount_path="/mnt/b", type=DiskType.NVME, size_bytes=500)
BIG_HDD = Disk(mount_path="/mnt/c", type=DiskType.HDD, size_bytes=9000)
DISKS = (SMALL_SSD, NVME, BIG_HDD)


def pool(*, path="", kind=StorageType.NODE_LOCAL, **spec):
    storage = Storage(type=kind, capacity_per_node_bytes=2**30, path=path)
    return KVCachePool(metadata=Metadata(name="p"), spec=PoolSpec(storage=storage, **spec))


@pytest.mark.parametrize(
    ("selector", "disk"),
    [
        (None, SMALL_SSD),
        (DiskSelector(), SMALL_SSD),
        (DiskSelector(min_size_bytes=500), NVME),
        (DiskSelector(min_size_bytes=501), BIG_HDD),
        (DiskSelector(types=(DiskType.HDD, DiskType.NVME)), NVME),
        (DiskSelector(types=(DiskType.SSD,), min_size_bytes=101), None),
        (DiskSelector(types=(DiskType.OTHER,)), None),
    ],
)
def test_a_pool_goes_to_the_first_disk_that_suits_and_nowhere_else(selector, disk):
    asked = pool(disk_selector=selector)
    assert first_disk(asked, DISKS) is disk
    assert selects(asked, {}, DISKS) == (disk is not None)


def test_a_node_without_disks_is_desired_unless_disks_are_asked_for():
    assert selects(pool(), {}, ())
    assert selects(pool(path="/mnt/x"), {}, ())
    assert not selects(pool(disk_selector=DiskSelector()), {}, ())


@pytest.mark.parametrize(
    ("labels", "selected"),
    [({}, False), ({"a": "1"}, False), ({"a": "1", "b": "2"}, True), ({"a": "1", "b": ""}, False)],
)
def test_a_node_needs_all_labels_of_the_selector(labels, selected):
    assert selects(pool(node_selector={"a": "1", "b": "2"}), labels, DISKS) == selected


@pytest.mark.parametrize("kind", [StorageType.SHARED_FILESYSTEM, StorageType.EPHEMERAL])
def test_pools_elsewhere_select_no_node(kind):
    assert not selects(pool(kind=kind), {}, DISKS)


@pytest.mark.parametrize("allowed", [None, NamespaceSelector()])
def test_without_a_list_every_namespace_may_mount_its_own_part_and_none_the_common_one(allowed):
    assert admits(pool(allowed_namespaces=allowed), "any", {})
    assert not admits(pool(allowed_namespaces=allowed, sharing=Sharing.POOL), "any", {})


@pytest.mark.parametrize("sharing", Sharing)
@pytest.mark.parametrize(
    ("names", "labels", "admitted"),
    [
        (("a", "b"), {}, True),
        (("a",), {}, False),
        ((), {"team": "x"}, True),
        ((), {"team": "y"}, False),
        ((), {"team": "x", "stage": "prod"}, False),
        (("b",), {"team": "y"}, True),
        (("a",), {"team": "x"}, True),
    ],
)
def test_a_namespace_is_admitted_by_its_name_or_by_all_labels(sharing, names, labels, admitted):
    asked = pool(allowed_namespaces=NamespaceSelector(names=names, match_labels=labels), sharing=sharing)
    assert admits(asked, "b", {"team": "x"}) == admitted


def test_the_label_of_nodes_names_the_pool():
    assert node_label("p") == "pykvcache.io/pool.p"
