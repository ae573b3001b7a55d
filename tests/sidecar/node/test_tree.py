"""Trees of pools on a node: prepared, found again, refused and erased, on real mounts and with hostile contents."""

import contextlib
import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from pykvcache_sidecar.node import erase as erase_module
from pykvcache_sidecar.node import filesystems, tree_file
from pykvcache_sidecar.node import tree as tree_module
from pykvcache_sidecar.node.erase import Erased, erase
from pykvcache_sidecar.node.filesystems import Filesystem, filesystem_of
from pykvcache_sidecar.node.folders import READ_FLAGS, open_folder
from pykvcache_sidecar.node.mount_table import Mount, read_mount_table
from pykvcache_sidecar.node.tree import Known, PoolTree, find_trees, prepare
from pykvcache_sidecar.node.tree_file import PoolIdentity, TreeError
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import UsageLedger

POOL = PoolIdentity("fast", "uid-1")
SUCCESSOR = PoolIdentity("fast", "uid-2")


@pytest.fixture
def disk(tmp_path, mounts):
    """A mount point with a filesystem of its own."""
    place = tmp_path / "disk"
    mounts.tmpfs(place)
    return place


@pytest.fixture
def root(disk):
    return disk / "pykvcache"


@pytest.fixture
def tree(root):
    return prepare(str(root), POOL)


@pytest.fixture
def make_disk(tmp_path, mounts):
    """Return a function that makes a filesystem with a UUID in a file and mounts it."""

    def make(place):
        image = tmp_path / f"{len(list(tmp_path.glob('*.ext4')))}.ext4"
        image.touch()
        os.truncate(image, 4 << 20)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        mounts.image(image, place)
        return image

    return make


def known(tree: PoolTree) -> Known:
    return Known(tree.record.generation, tree.record.mount_point)


def reason_of(call, *arguments, **options) -> str:
    with pytest.raises(TreeError) as caught:
        call(*arguments, **options)
    assert str(caught.value) == caught.value.message != ""
    return caught.value.reason


def mode(path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


# ---- prepare ----


def test_a_fresh_pool_gets_its_tree_and_finds_it_again(root, tree):
    assert tree.record.generation == 1
    assert mode(root / "fast") == 0o711
    assert prepare(str(root), POOL) == tree
    assert find_trees(str(root)) == [tree]
    tree.check()
    assert [path.name for path in (root / "fast").iterdir()] == ["node.json"]


def test_missing_folders_above_a_pool_are_made(disk):
    assert prepare(str(disk / "a/b"), POOL).directory == f"{disk}/a/b/fast"


def test_pool_directories_are_pools_that_every_user_may_write_to(root, tree):
    former = os.umask(0o077)
    try:
        leaves = [tree.namespace_directory("team-a"), tree.shared_directory(), tree.calibration_directory()]
    finally:
        os.umask(former)
    assert leaves == [f"{root}/fast/ns/team-a", f"{root}/fast/shared", f"{root}/fast/calibration"]
    assert [mode(leaf) for leaf in leaves] == [0o1777] * 3
    assert mode(root / "fast/ns") == 0o711
    assert [mode(f"{leaves[0]}/{name}") for name in ("pool.json", "usage")] == [0o644, 0o666]
    assert len({open_pool(leaf, create=False).uid for leaf in leaves}) == 3
    assert sorted(tree.leaves()) == sorted(leaves)
    uid = open_pool(leaves[0], create=False).uid
    assert tree.namespace_directory("team-a") == leaves[0]
    assert open_pool(leaves[0], create=False).uid == uid


def test_what_a_kill_left_half_made_is_put_right(root, tree):
    leaf = root / "fast/ns/a"
    leaf.mkdir(parents=True, mode=0o700)
    (root / "fast/ns").chmod(0o700)
    open_pool(str(leaf), create=True)
    (leaf / "usage").touch(mode=0o600)
    tree.namespace_directory("a")
    assert [mode(path) for path in (leaf.parent, leaf, leaf / "usage")] == [0o711, 0o1777, 0o666]


@pytest.mark.parametrize("name", ["pool.json", "usage"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_a_pipe_that_a_pod_planted_is_not_opened_to_all(tree, tmp_path, name, kind):
    planted, secret = Path(tree.shared_directory(), name), tmp_path / "secret"
    secret.touch(mode=0o600)
    planted.unlink()
    if kind == "link":
        planted.symlink_to(secret)
    else:
        os.mkfifo(planted, 0o600)
        os.chown(planted, 4711, 4711)
    with contextlib.suppress(TreeError):
        tree.shared_directory()
    assert mode(secret) == 0o600
    assert kind == "link" or mode(planted) == 0o600


@pytest.mark.slow
def test_two_users_use_one_pool_directory_whoever_comes_first(tree, open_folder, mounts, start_python):
    view = open_folder / "view"  # pods reach it by a mount, not through folders of root
    view.mkdir()
    mounts.bind(tree.shared_directory(), view)
    code = """
import sys
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import UsageLedger
sys.stdin.readline()
{become}
pool = open_pool(sys.argv[1], create=True)
ledger = UsageLedger(sys.argv[1])
ledger.ensure(lambda: 0)
print(pool.writable, ledger.reserve(4096, capacity_bytes=0).name, ledger.used_bytes())
"""
    outputs = []
    for user in (4711, 4712):
        become = f"import os, codecs; codecs.lookup('ascii'); os.setgroups([]); os.setgid({user}); os.setuid({user})"
        process = start_python(code.format(become=become), view)
        outputs.append(process.communicate("go\n", timeout=60)[0].split())
    mounts.unmount(view)
    assert outputs == [["True", "TAKEN", "4096"], ["True", "TAKEN", "8192"]]


def test_retain_follows_the_pool(root, tree):
    kept = prepare(str(root), PoolIdentity("fast", "uid-1", retain=True))
    assert kept.record.identity.retain
    assert kept.record.generation == 1
    assert find_trees(str(root)) == [kept]


def test_a_successor_waits_for_a_tree_to_be_erased_but_takes_over_a_retained_one(root, tree):
    block = os.path.join(tree.namespace_directory("a"), "block")
    open(block, "x").close()
    assert reason_of(prepare, str(root), SUCCESSOR) == "PoolReplaced"
    prepare(str(root), PoolIdentity("fast", "uid-1", retain=True))
    assert prepare(str(root), SUCCESSOR).record.identity == SUCCESSOR
    assert os.path.exists(block)
    assert reason_of(tree.check) == "PoolReplaced"
    assert reason_of(erase, tree) == "PoolReplaced"


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", ".hidden", "a\0b", "x" * 254])
def test_a_hostile_name_of_a_pool_or_namespace_reaches_no_disk(root, tree, name):
    with pytest.raises(ValueError, match="no name"):
        prepare(str(root), PoolIdentity(name, "uid"))
    with pytest.raises(ValueError, match="no name"):
        tree.namespace_directory(name)


@pytest.mark.parametrize("path", ["relative", "/", "/a/../b", "/a//b", "/a/./b", ""])
def test_a_root_that_is_no_plain_path_is_refused(path):
    with pytest.raises(ValueError, match="plain path"):
        prepare(path, POOL)


# ---- disks ----


def test_the_root_filesystem_is_used_only_where_that_is_allowed(tmp_path):
    root = tmp_path / "cache"
    table = read_mount_table()
    if filesystems.holder_of(str(tmp_path), table).point != "/":
        pytest.skip("temporary files are not on the root filesystem here")
    assert reason_of(prepare, str(root), POOL) == "DiskNotMounted"
    assert not root.exists()
    assert prepare(str(root), POOL, allow_root_filesystem=True).record.mount_point == "/"
    assert prepare(str(root), POOL).record.mount_point == "/", "what is there may go on"


def test_a_disk_that_is_not_mounted_is_told_from_a_blank_one(disk, root, tree, mounts):
    mounts.unmount(disk)
    assert reason_of(tree.check) == "DiskNotMounted"
    assert reason_of(tree.shared_directory) == "DiskNotMounted"
    assert reason_of(erase, tree) == "DiskNotMounted"
    for allowed in (False, True):
        assert reason_of(prepare, str(root), POOL, allow_root_filesystem=allowed, known=known(tree)) == "DiskNotMounted"
    assert list(disk.iterdir()) == []
    mounts.tmpfs(disk)
    assert reason_of(tree.check) == "DiskNotMounted"
    again = prepare(str(root), POOL, known=known(tree))
    assert again.record.generation == 2
    assert prepare(str(root), POOL, known=known(tree)) == again


def test_a_copy_of_the_tree_below_the_mount_point_is_not_used(disk, root, tree, mounts, tmp_path):
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", root, copy], check=True)
    mounts.unmount(disk)
    subprocess.run(["cp", "-a", copy, root], check=True)
    assert reason_of(tree.check) == "DiskNotMounted"
    before = (root / "fast/node.json").read_text()
    assert reason_of(prepare, str(root), POOL, allow_root_filesystem=True) == "DiskNotMounted"
    assert reason_of(erase, tree) == "DiskNotMounted"
    assert (root / "fast/node.json").read_text() == before


@pytest.mark.slow
def test_a_filesystem_is_known_by_its_uuid_wherever_it_is_mounted(tmp_path, mounts, make_disk):
    one, two = tmp_path / "one", tmp_path / "two"
    image = make_disk(one)
    tree = prepare(str(one / "cache"), POOL)
    assert tree.record.filesystem.startswith("ext4:")
    mounts.unmount(one)
    mounts.image(image, two)
    assert prepare(str(two / "cache"), POOL).record == tree.record
    make_disk(one)
    subprocess.run(["cp", "-a", two / "cache", one], check=True)
    assert reason_of(tree.check) == "DiskNotMounted", "a copy on another disk"
    assert reason_of(prepare, str(one / "cache"), POOL) == "DiskNotMounted"


def test_a_disk_that_comes_back_after_another_is_a_new_generation(root, tree):
    assert prepare(str(root), POOL, known=Known(5, tree.record.mount_point)).record.generation == 6
    assert prepare(str(root), POOL, known=Known(5, tree.record.mount_point)).record.generation == 6


def test_a_disk_mounted_where_the_root_filesystem_was_used_is_prepared(root):
    assert prepare(str(root), POOL, known=Known(3, "/")).record.generation == 4


def mount_at(point: str, shown: str, *, device: str = "8:1") -> Mount:
    return Mount(device, shown, point, "vfat", "/dev/x", frozenset())


@pytest.mark.parametrize(
    ("mounts_there", "path", "expected"),
    [
        ([("/", "/")], "/mnt/a", "/"),
        ([("/", "/"), ("/mnt/a", "/")], "/mnt/a/x", "/mnt/a"),
        ([("/", "/"), ("/mnt/ab", "/")], "/mnt/a", "/"),
        # In a container that sees the node's directories at the same path.
        ([("/", "/"), ("/mnt/a", "/mnt/a")], "/mnt/a/x", "/"),
        ([("/", "/"), ("/mnt/a/cache", "/cache")], "/mnt/a/cache", "/mnt/a"),
        ([("/", "/"), ("/mnt", "/mnt"), ("/mnt/a", "/")], "/mnt/a", "/mnt/a"),
        ([("/", "/"), ("/mnt", "/@root/mnt")], "/mnt/a", "/"),
    ],
)
def test_a_mount_point_is_told_as_the_node_sees_it(tmp_path, mounts_there, path, expected):
    table = [mount_at(point, shown) for point, shown in mounts_there]
    descriptor = open_folder(str(tmp_path), [], flags=READ_FLAGS)
    try:
        found = filesystem_of(descriptor, path=path, mounts=table)
    finally:
        os.close(descriptor)
    assert found.mount_point == expected
    assert found.is_root == (expected == "/")
    assert found.identity == ""


def test_the_uuid_of_xfs_is_where_its_header_says(tmp_path, monkeypatch):
    def ioctl(_: int, request: int, buffer: bytes) -> bytes:
        assert (request, len(buffer)) == (0x8070_5864, 112)
        return bytes(64) + bytes(range(16)) + b"x" * 32

    monkeypatch.setattr(filesystems.fcntl, "ioctl", ioctl)
    table = [Mount("8:1", "/", "/", "xfs", "/dev/x", frozenset())]
    found = filesystem_of(-1, path=str(tmp_path), mounts=table)
    assert found.identity == "xfs:000102030405060708090a0b0c0d0e0f"


def test_the_later_of_two_mounts_on_a_point_counts(tmp_path):
    table = [mount_at("/a", "/", device="8:1"), mount_at("/a", "/", device="8:2")]
    assert filesystems.holder_of("/a/b", table).device == "8:2"
    with pytest.raises(OSError, match="no mount"):
        filesystems.holder_of("/b", table)


# ---- hostile contents ----


def test_a_directory_with_other_files_is_left_alone(disk, root):
    (root / "fast").mkdir(parents=True)
    (root / "fast/precious").touch()
    assert reason_of(prepare, str(root), POOL) == "ForeignDirectory"
    assert [path.name for path in (root / "fast").iterdir()] == ["precious"]
    assert find_trees(str(root)) == []


def test_what_a_killed_preparation_left_does_not_matter(root, monkeypatch):
    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tree_file.os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(str(root), POOL)
    assert list((root / "fast").iterdir())
    tree = prepare(str(root), POOL)
    assert not erase(tree).more
    assert not (root / "fast").exists()


def a_link(path):
    path.symlink_to("/etc/hostname")


def a_pipe(path):
    os.mkfifo(path)


def a_huge_file(path):
    path.touch()
    os.truncate(path, 1 << 30)


def a_folder(path):
    path.mkdir()


def not_ours(path):
    path.write_text('{"pool": "fast"}')


def another_pools(path):
    record = {"formatVersion": 1, "pool": "slow", "uid": "u", "retain": False, "generation": 1}
    path.write_text(json.dumps({**record, "filesystem": "", "mountPoint": "/"}))


def of_wrong_types(path):
    record = {"formatVersion": 1, "pool": "fast", "uid": 7, "retain": "no", "generation": "1"}
    path.write_text(json.dumps({**record, "filesystem": "", "mountPoint": "/"}))


def no_json(path):
    path.write_bytes(b"\xff{")


@pytest.mark.parametrize(
    "make", [a_link, a_pipe, a_huge_file, a_folder, not_ours, another_pools, of_wrong_types, no_json]
)
def test_a_node_file_that_is_not_ours_is_refused_and_kept(root, tree, make):
    path = root / "fast/node.json"
    path.unlink()
    make(path)
    assert reason_of(prepare, str(root), POOL) == "ForeignDirectory"
    assert reason_of(tree.check) == "ForeignDirectory"
    assert reason_of(erase, tree) == "ForeignDirectory"
    assert find_trees(str(root)) == []
    assert os.path.lexists(path)


@pytest.mark.parametrize("where", ["", "fast", "fast/ns", "fast/ns/a"])
def test_a_link_on_the_way_is_never_followed(disk, tmp_path, tree, where):
    tree.namespace_directory("a")
    outside = tmp_path / "outside"
    outside.mkdir()
    planted = disk / "pykvcache" / where
    planted.rename(disk / "aside")
    planted.symlink_to(outside)
    assert reason_of(tree.namespace_directory, "a") == "ForeignDirectory"
    if where in ("", "fast"):
        assert reason_of(prepare, tree.root, POOL) == "ForeignDirectory"
        assert reason_of(tree.leaves) == "ForeignDirectory"
    else:
        if where == "fast/ns/a":
            assert tree.leaves() == []
        erase(tree)
    assert list(outside.iterdir()) == []
    assert outside.exists()


def test_a_directory_that_another_user_made_is_refused(root, tree):
    (root / "fast/ns").mkdir()
    os.chown(root / "fast/ns", 4711, 4711)
    assert reason_of(tree.namespace_directory, "a") == "ForeignDirectory"
    assert list((root / "fast/ns").iterdir()) == []


def test_a_pool_directory_with_other_files_is_no_pool(root, tree):
    (root / "fast/shared").mkdir()
    (root / "fast/shared/precious").touch()
    assert reason_of(tree.shared_directory) == "ForeignDirectory"


def test_a_full_or_read_only_disk_is_named(disk, root, tree, mounts):
    mounts.remount(disk, "ro")
    assert reason_of(tree.shared_directory) == "DiskReadOnly"
    assert prepare(str(root), POOL) == tree, "what is there can still be read"
    assert reason_of(prepare, str(root), PoolIdentity("slow", "uid-3")) == "DiskReadOnly"
    mounts.remount(disk, "rw,size=64k,nr_inodes=5")
    assert reason_of(tree.shared_directory) == "DiskFull"


# ---- find ----


def test_only_readable_trees_are_found(root, tree, tmp_path):
    other = prepare(str(root), PoolIdentity("slow", "uid-9", retain=True))
    (root / "empty").mkdir()
    (root / "file").touch()
    (root / "link").symlink_to(root / "fast")
    (root / ".hidden").mkdir()
    assert find_trees(str(root)) == [tree, other]
    assert find_trees(str(tmp_path / "missing")) == []
    assert reason_of(find_trees, str(root / "link")) == "ForeignDirectory"


def test_a_root_with_too_many_folders_is_not_read_to_its_end(root, tree, monkeypatch):
    prepare(str(root), PoolIdentity("slow", "uid-9"))
    monkeypatch.setattr(tree_module, "TREES_MAX", 1)
    assert find_trees(str(root)) == [tree]


# ---- erase ----


def fill(directory: str, count: int) -> None:
    for number in range(count):
        os.makedirs(f"{directory}/{number % 3}", exist_ok=True)
        open(f"{directory}/{number % 3}/{number}", "x").close()


def erase_all(tree: PoolTree, **options: int) -> list[Erased]:
    calls = [erase(tree, **options)]
    while calls[-1].more:
        assert len(calls) < 1000
        calls.append(erase(tree, **options))
    return calls


def test_a_tree_is_erased_in_bounded_pieces_and_stays_known_until_the_last(root, tree):
    fill(tree.namespace_directory("a"), 50)
    fill(tree.shared_directory(), 50)
    calls = [erase(tree, entries_max=20)]
    assert find_trees(str(root)) == [tree]
    calls += erase_all(tree, entries_max=20)
    assert all(call.removed <= 20 for call in calls[:-1])
    assert len(calls) >= 5
    assert list(root.iterdir()) == []
    assert prepare(str(root), POOL, known=known(tree)).record.generation == 2


def test_an_erasure_leaves_what_links_point_to(tree, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    leaf = tree.shared_directory()
    os.symlink(tmp_path / "precious", f"{leaf}/folder")
    os.symlink(tmp_path / "precious/file", f"{leaf}/file")
    os.link(f"{leaf}/pool.json", f"{leaf}/again")
    os.mkfifo(f"{leaf}/pipe")
    os.mkdir(f"{leaf}/closed", 0o000)
    assert [call.more for call in erase_all(tree)] == [False]
    assert (tmp_path / "precious/file").exists()
    assert not os.path.lexists(tree.directory)


@pytest.mark.slow
def test_folders_nested_deeper_than_a_path_may_be_long_are_erased(tree):
    descriptor = os.open(tree.shared_directory(), os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("n" * 200, dir_fd=descriptor)
        inner = os.open("n" * 200, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    erase_all(tree)
    assert not os.path.lexists(tree.directory)


def test_a_tree_with_a_mount_inside_is_not_begun(tree, mounts, tmp_path):
    leaf = tree.shared_directory()
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    os.mkdir(f"{leaf}/mounted")
    mounts.bind(precious, Path(leaf, "mounted"))
    with pytest.raises(TreeError, match="unmount"):
        erase(tree)
    assert (precious / "file").exists()
    assert os.path.exists(f"{leaf}/pool.json")
    mounts.unmount(f"{leaf}/mounted")
    assert not erase_all(tree)[-1].more


def test_another_filesystem_mounted_meanwhile_is_not_entered(tree, mounts, monkeypatch):
    leaf = tree.shared_directory()
    mounts.tmpfs(Path(leaf, "mounted"))
    open(f"{leaf}/mounted/file", "x").close()
    monkeypatch.setattr(erase_module, "mounts_inside", lambda *_: [])
    with pytest.raises(TreeError, match="another filesystem"):
        erase_all(tree)
    assert os.path.exists(f"{leaf}/mounted/file")


@pytest.mark.slow
def test_a_file_that_cannot_be_removed_is_named_after_all_others_are_gone(tmp_path, make_disk):
    make_disk(tmp_path / "one")
    tree = prepare(str(tmp_path / "one/cache"), POOL)
    leaf = tree.shared_directory()
    fill(leaf, 10)
    subprocess.run(["chattr", "+i", f"{leaf}/1/1"], check=True)
    try:
        with pytest.raises(TreeError, match=r"/1: Operation not permitted"):
            erase_all(tree)
        assert os.listdir(f"{leaf}/1") == ["1"]
        assert os.listdir(leaf) == ["1"]
    finally:
        subprocess.run(["chattr", "-i", f"{leaf}/1/1"], check=True)
    assert not erase_all(tree)[-1].more


def test_an_erasure_keeps_the_record_when_something_new_came_at_the_last_moment(root, tree, monkeypatch):
    rmdir = os.rmdir

    def rmdir_late(name, **options):
        if name == "fast":
            (root / "fast/late").touch()
        rmdir(name, **options)

    with monkeypatch.context() as patch:
        patch.setattr(erase_module.os, "rmdir", rmdir_late)
        assert reason_of(erase, tree) == "Error"
    assert find_trees(str(root)) == [tree]
    assert not erase(tree).more


def test_a_pool_on_a_mount_point_of_its_own_leaves_it_empty(tmp_path, mounts):
    place = tmp_path / "fast"
    mounts.tmpfs(place)
    tree = prepare(str(tmp_path), POOL)
    assert tree.record.mount_point == str(place)
    tree.shared_directory()
    assert not erase_all(tree)[-1].more
    assert list(place.iterdir()) == []


def test_a_new_usage_record_counts_as_unknown_until_a_count(tree):
    ledger = UsageLedger(tree.shared_directory())
    assert ledger.used_bytes() is None
    assert ledger.ensure(lambda: 8192) == 8192


def test_a_filesystem_tells_where_in_it_a_directory_lies(disk, mounts, tmp_path):
    (disk / "a/b").mkdir(parents=True)
    view = tmp_path / "view"
    view.mkdir()
    mounts.bind(disk / "a", view)
    descriptor = open_folder(str(view), ["b"], flags=READ_FLAGS)
    found = filesystem_of(descriptor, path=f"{view}/b", mounts=read_mount_table())
    os.close(descriptor)
    assert isinstance(found, Filesystem)
    assert found.directory == "/a/b"
