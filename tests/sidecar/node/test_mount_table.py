"""Lines of mountinfo as kernels write them."""

from pykvcache_sidecar.node.mount_table import Mount, read_mount_table, visible_mounts

TABLE = r"""
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
98 27 259:1 /a\040b /mnt/two\040words\134 ro,nosuid shared:5 master:3 - xfs /dev/nvme0n1p1 rw,noquota
99 27 0:44 / /mnt/none rw - tmpfs none
100 27 0:45 / /mnt/none rw - tmpfs  rw
no line at all
""".lstrip()


def test_a_table_is_read_with_escapes_optional_fields_and_both_kinds_of_options(tmp_path):
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    root, words, below, above = read_mount_table(path)
    assert (root.point, root.source, root.options) == ("/", "/dev/vda", {"rw", "relatime", "discard"})
    options = frozenset({"ro", "nosuid", "rw", "noquota"})
    assert words == Mount("259:1", "/a b", "/mnt/two words\\", "xfs", "/dev/nvme0n1p1", options)
    assert visible_mounts([root, words, below, above])["/mnt/none"] is above


def test_the_table_of_this_process_has_a_root():
    assert "/" in visible_mounts(read_mount_table())
