"""What the kubelet makes for pods with a hostPath volume before the pool was ever prepared there."""

import os
import stat
from pathlib import Path

import pytest

from pykvcache_sidecar.node.tree import prepare
from pykvcache_sidecar.node.tree_file import PoolIdentity, TreeError

POOL = PoolIdentity("fast", "uid-1")


@pytest.fixture
def root(tmp_path, mounts):
    """A place for pools on a disk."""
    mounts.tmpfs(tmp_path / "disk")
    return tmp_path / "disk" / "pykvcache"


def test_what_the_kubelet_makes_for_pods_that_come_before_the_pool_is_taken_over(root):
    for place in ("fast/ns/a", "fast/ns/b", "fast/shared"):
        (root / place).mkdir(parents=True)
    tree = prepare(str(root), POOL)
    assert stat.S_IMODE((root / "fast").stat().st_mode) == 0o711
    assert Path(tree.namespace_directory("a")).stat().st_mode & 0o7777 == 0o1777
    assert (root / "fast/ns/a/pool.json").exists()


@pytest.mark.parametrize("place", ["ns/a/precious", "shared/precious", "ns/precious"])
def test_a_file_in_what_looks_like_it_was_made_for_pods_is_left_alone(root, place):
    path = root / "fast" / place
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(TreeError) as caught:
        prepare(str(root), POOL)
    assert caught.value.reason == "ForeignDirectory"
    assert path.exists()


@pytest.mark.parametrize("spoil", [lambda path: os.chown(path, 4711, 4711), lambda path: path.chmod(0o777)])
def test_a_directory_that_others_may_write_was_not_made_for_pods(root, spoil):
    (root / "fast/ns/a").mkdir(parents=True)
    spoil(root / "fast/ns/a")
    with pytest.raises(TreeError) as caught:
        prepare(str(root), POOL)
    assert caught.value.reason == "ForeignDirectory"
