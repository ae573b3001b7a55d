"""Two users in one pool: each may remove, count and read what the other made, where the pool directory says so."""

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from pykvcache_contract.keys import fingerprint_of
from pykvcache_storage import sharing
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import UsageLedger

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as two other users")

IDENTITY = {"engine": {"model": "test/llama"}, "epoch": None}
FOLDER = fingerprint_of(IDENTITY)[:12]
VLLM, SIDECAR = 2000, 3000
NOBODY = 0xFFFFFFFF
AS_USER = """
import os, sys
from pykvcache_storage import pool, usage, sharing
from pykvcache_contract.keys import fingerprint_of

user, mask, directory = int(sys.argv[1]), int(sys.argv[2], 8), sys.argv[3]
os.setgroups([] if len(sys.argv) < 5 else [int(sys.argv[4])])
os.setgid(user)
os.setuid(user)
os.umask(mask)
"""
STORE = """
opened = pool.open_pool(directory, create=True)
folder = opened.prepare_fingerprint(fingerprint_of({"engine": {"model": "test/llama"}, "epoch": None}), {})
os.makedirs(folder + "/r0/abc/de", exist_ok=True)
open(folder + "/r0/abc/de/block.kvb", "xb").write(b"block")
usage.UsageLedger(directory).recount(lambda: 5)
"""
LOOK_AFTER = """
opened = pool.open_pool(directory, create=True)
ledger = usage.UsageLedger(directory)
ledger.ensure(lambda: 0)
ledger.set_limits(capacity_bytes=1, write_budget_bytes=0)
for folder, _, names in os.walk(directory, topdown=False):
    for name in names:
        if name.endswith(".kvb"):
            assert open(os.path.join(folder, name), "rb").read() == b"block"
            os.unlink(os.path.join(folder, name))
            os.rmdir(folder)
            os.rmdir(os.path.dirname(folder))
            ledger.release(5)
"""


def run_as(user, code, directory, *, umask="022", group=None):
    groups = [] if group is None else [str(group)]
    command = [sys.executable, "-c", AS_USER + code, str(user), umask, str(directory), *groups]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stderr


@pytest.fixture
def volume():
    """A directory as the kubelet makes an emptyDir."""
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    folder.chmod(0o777)
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


def blocks(volume):
    return list(volume.rglob("*.kvb"))


@pytest.mark.parametrize("umask", ["022", "077"])
@pytest.mark.parametrize("store_user", [0, VLLM])
def test_the_sidecar_evicts_what_vllm_stored(volume, umask, store_user):
    assert run_as(store_user, STORE, volume, umask=umask) == ""
    assert len(blocks(volume)) == 1
    assert run_as(SIDECAR, LOOK_AFTER, volume, umask=umask) == ""
    assert blocks(volume) == []
    assert run_as(store_user, STORE, volume, umask=umask) == ""


@pytest.mark.parametrize("umask", ["022", "077"])
def test_vllm_stores_in_what_the_sidecar_made_first(volume, umask):
    assert run_as(SIDECAR, LOOK_AFTER, volume, umask=umask) == ""
    assert run_as(VLLM, STORE, volume, umask=umask) == ""
    assert run_as(SIDECAR, LOOK_AFTER, volume, umask=umask) == ""
    assert blocks(volume) == []


def test_a_volume_of_a_group_is_shared_by_the_group_and_nobody_else(volume):
    os.chown(volume, 0, 4000)
    volume.chmod(0o2775)
    assert run_as(VLLM, STORE, volume, group=4000) == ""
    assert "PermissionError" in run_as(SIDECAR, LOOK_AFTER, volume)
    assert len(blocks(volume)) == 1
    assert run_as(SIDECAR, LOOK_AFTER, volume, group=4000) == ""
    assert blocks(volume) == []


def test_in_a_sticky_pool_each_keeps_its_own(volume):
    volume.chmod(0o1777)
    assert run_as(VLLM, STORE, volume) == ""
    assert stat.S_IMODE((volume / FOLDER).stat().st_mode) == 0o755
    assert "PermissionError" in run_as(SIDECAR, LOOK_AFTER, volume)
    assert len(blocks(volume)) == 1


def test_a_pool_that_only_its_owner_may_write_stays_so(volume):
    volume.chmod(0o755)
    folder = open_pool(str(volume), create=True).prepare_fingerprint(fingerprint_of(IDENTITY), IDENTITY)
    UsageLedger(str(volume)).recount(lambda: 0)
    assert stat.S_IMODE(os.stat(folder).st_mode) & 0o022 == 0
    assert stat.S_IMODE((volume / "usage").stat().st_mode) & 0o022 == 0


def test_what_another_user_owns_is_left_alone(volume):
    (volume / FOLDER).mkdir(mode=0o700)
    os.chown(volume / FOLDER, SIDECAR, SIDECAR)
    (volume / FOLDER).chmod(0o755)
    assert run_as(VLLM, STORE, volume) != ""
    assert stat.S_IMODE((volume / FOLDER).stat().st_mode) == 0o755


@pytest.mark.parametrize("mode", [0o775, 0o770])
def test_a_group_that_the_kernel_does_not_hand_down_gets_nothing(volume, mode):
    os.chown(volume, 0, 4000)
    volume.chmod(mode)
    assert run_as(VLLM, STORE, volume, group=4000) == ""
    made = [path.stat() for path in volume.rglob("*")]
    assert made
    assert [oct(status.st_mode) for status in made if status.st_mode & stat.S_IWGRP] == []


def test_what_an_administrator_said_by_acl_stays(volume):
    # What `setfacl -m u:3000:rwx -m d:u:3000:rwx` makes of a directory whose group may read only.
    named = struct.pack("<I" + "HHI" * 5, 2, 1, 7, NOBODY, 2, 7, SIDECAR, 4, 5, NOBODY, 16, 7, NOBODY, 32, 5, NOBODY)
    volume.chmod(0o755)
    os.chown(volume, VLLM, 0)
    for name in ("system.posix_acl_access", "system.posix_acl_default"):
        os.setxattr(volume, name, named)
    assert volume.stat().st_mode & stat.S_IWGRP, "the mask"
    assert run_as(VLLM, STORE, volume) == ""
    assert os.getxattr(volume / FOLDER, "system.posix_acl_default") == named
    assert run_as(SIDECAR, LOOK_AFTER, volume) == ""


def test_a_hard_link_is_left_alone(volume):
    secret = volume / "elsewhere"
    secret.write_text("secret")
    secret.chmod(0o600)
    os.link(secret, volume / "usage")
    sharing.share_file(str(volume / "usage"))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    (volume / "usage").unlink()
    sharing.share_file(str(secret))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o666


def test_the_acl_is_one_that_the_kernel_takes_for_the_mode(volume):
    folder = volume / "folder"
    folder.mkdir(mode=0o700)
    sharing.share_folder(str(folder), pool_directory=str(volume))
    (folder / "below").mkdir()
    assert stat.S_IMODE((folder / "below").stat().st_mode) == 0o777
    assert os.listxattr(folder) == ["system.posix_acl_default"]
