"""Opening pool directories: creation by several processes at once, and every directory that must be refused."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pykvcache_contract.errors import PoolUnavailableError
from pykvcache_contract.keys import Fingerprint
from pykvcache_contract.names import UNAVAILABLE_MARKER
from pykvcache_storage import documents
from pykvcache_storage.pool import open_pool

NOBODY = 65534
OPEN_AND_PRINT = """
import sys
from pykvcache_contract.keys import fingerprint_of
from pykvcache_storage.pool import open_pool
print("ready", flush=True)
sys.stdin.readline()
pool = open_pool(sys.argv[1], create=True)
pool.prepare_fingerprint(fingerprint_of({"model": "test"}), {"model": "test"})
print(pool.uid, flush=True)
"""


def refusal(directory: Path, *, create: bool = True) -> str:
    with pytest.raises(PoolUnavailableError) as caught:
        open_pool(str(directory), create=create)
    return str(caught.value)


def test_an_empty_directory_becomes_a_pool_and_stays_the_same_one(tmp_path: Path) -> None:
    first = open_pool(str(tmp_path), create=True)
    assert first.writable
    assert open_pool(str(tmp_path), create=True) == first
    assert open_pool(str(tmp_path), create=False) == first
    assert os.listdir(tmp_path) == ["pool.json"]


@pytest.mark.slow
def test_processes_that_start_at_once_agree_on_one_pool(tmp_path: Path, start_python: Callable) -> None:
    processes = [start_python(OPEN_AND_PRINT, tmp_path) for _ in range(6)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    uids = {process.communicate()[0].strip() for process in processes}
    assert uids == {open_pool(str(tmp_path), create=False).uid}
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_missing_directory_is_not_created_and_the_remedy_is_a_command(tmp_path: Path) -> None:
    message = refusal(tmp_path / "no pool")
    assert f"mkdir -p '{tmp_path}/no pool'" in message
    assert not (tmp_path / "no pool").exists()


def test_a_link_to_nothing_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert "symbolic link to nothing" in refusal(tmp_path / "link")


def test_the_pool_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert open_pool(str(tmp_path / "link"), create=True).writable


def test_a_file_is_not_a_pool(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is not a directory" in refusal(tmp_path / "file")


def test_a_directory_with_other_files_is_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    message = refusal(tmp_path)
    assert "'thesis.tex'" in message
    assert "does not adopt" in message
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("name", ["lost+found", ".snapshot", "profiles", "usage", "care.lock", "0123456789ab"])
def test_a_directory_with_only_system_files_or_ours_becomes_a_pool(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert open_pool(str(tmp_path), create=True).writable


def test_the_stand_in_for_a_pool_that_is_not_ready_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / UNAVAILABLE_MARKER).write_text("DiskNotMounted: mount the disk\n")
    for create in (True, False):
        with pytest.raises(PoolUnavailableError, match=r"not ready on this node.*DiskNotMounted: mount the disk"):
            open_pool(str(tmp_path), create=create)
    assert [UNAVAILABLE_MARKER] == os.listdir(tmp_path)


def test_the_stand_ins_file_in_a_pool_means_nothing_and_a_pipe_of_its_name_stops_nobody(tmp_path: Path) -> None:
    pipe = tmp_path / UNAVAILABLE_MARKER
    os.mkfifo(pipe)
    with pytest.raises(PoolUnavailableError, match="not ready on this node"):
        open_pool(str(tmp_path), create=True)
    pipe.unlink()
    uid = open_pool(str(tmp_path), create=True).uid
    os.mkfifo(pipe)
    assert uid == open_pool(str(tmp_path), create=True).uid


def test_without_create_an_empty_directory_is_not_a_pool_and_stays_empty(tmp_path: Path) -> None:
    assert "is not a cache pool" in refusal(tmp_path, create=False)
    assert os.listdir(tmp_path) == []


def test_another_format_version_is_refused_and_both_are_named(tmp_path: Path) -> None:
    open_pool(str(tmp_path), create=True)
    path = tmp_path / "pool.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 7}))
    message = refusal(tmp_path)
    assert "version 7" in message
    assert "version 1" in message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format_version": 1, "uid": 3}', '{"format_version": "1"}', " " * 300_000]
)
def test_a_damaged_pool_file_is_named_with_a_remedy_that_works(tmp_path: Path, text: str) -> None:
    (tmp_path / "pool.json").write_text(text)
    (tmp_path / "0123456789ab").mkdir()
    assert f"rm {tmp_path}/pool.json" in refusal(tmp_path)
    (tmp_path / "pool.json").unlink()
    assert open_pool(str(tmp_path), create=True).writable


def test_a_pool_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    pool.mkdir()
    (tmp_path / "elsewhere").write_text("{}")
    (pool / "pool.json").symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in refusal(pool)


def test_a_pool_file_that_is_a_named_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pool.json")
    assert "not a regular file" in refusal(tmp_path)


def test_a_pool_on_a_read_only_mount_opens_for_loads(
    tmp_path: Path, fingerprint: Fingerprint, read_only_view: Callable[[Path], Path]
) -> None:
    directory = tmp_path / "pool"
    directory.mkdir()
    uid = open_pool(str(directory), create=True).uid
    view = read_only_view(directory)
    for create in (True, False):
        pool = open_pool(str(view), create=create)
        assert (pool.uid, pool.writable) == (uid, False)
        assert pool.read_only_reason
    pool.prepare_fingerprint(fingerprint, {"model": "test"})


def test_an_empty_read_only_directory_cannot_become_a_pool(
    tmp_path: Path, read_only_view: Callable[[Path], Path]
) -> None:
    (tmp_path / "pool").mkdir()
    message = refusal(read_only_view(tmp_path / "pool"))
    assert "Read-only" in message
    assert "remount,rw" in message


@pytest.mark.slow
def test_another_user_without_permission_reads_but_does_not_write(start_python: Callable) -> None:
    code = """
import os, sys, tempfile
from pykvcache_storage.pool import open_pool
with tempfile.TemporaryDirectory() as directory:
    open_pool(directory, create=True)
    os.chmod(directory, 0o755)
    if os.fork() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        pool = open_pool(directory, create=True)
        print(pool.writable, pool.read_only_reason, flush=True)
        os._exit(0)
    os.wait()
"""
    output = start_python(code).communicate()[0]
    assert output.startswith("False")
    assert "chown -R 65534" in output


@pytest.mark.slow
def test_a_directory_that_another_user_closed_is_not_readable(start_python: Callable) -> None:
    code = """
import os, sys, tempfile
from pykvcache_storage.pool import open_pool
with tempfile.TemporaryDirectory() as directory:
    if os.fork() == 0:
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        try:
            open_pool(directory, create=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    os.wait()
"""
    output = start_python(code).communicate()[0]
    assert output.startswith("PoolUnavailableError")
    assert "not readable for user 65534" in output


def test_a_fingerprint_gets_its_folders_and_a_description_for_people(tmp_path: Path, fingerprint: Fingerprint) -> None:
    pool = open_pool(str(tmp_path), create=True)
    folder = Path(pool.prepare_fingerprint(fingerprint, {"model": "a/b"}))
    assert folder == tmp_path / fingerprint[:12]
    assert sorted(os.listdir(folder)) == ["config.json", "quarantine", "tmp"]
    config = json.loads((folder / "config.json").read_text())
    assert config == {"format_version": 1, "fingerprint": fingerprint, "identity": {"model": "a/b"}}
    assert pool.prepare_fingerprint(fingerprint, {"model": "a/b"}) == str(folder)


def test_two_fingerprints_with_equal_first_digits_are_told_apart(tmp_path: Path, fingerprint: Fingerprint) -> None:
    pool = open_pool(str(tmp_path), create=True)
    pool.prepare_fingerprint(fingerprint, {})
    twin = Fingerprint(fingerprint[:12] + "0" * 52)
    with pytest.raises(PoolUnavailableError, match=f"belongs to fingerprint {fingerprint}"):
        pool.prepare_fingerprint(twin, {})


@pytest.mark.parametrize("text", ["{}", "", '{"fingerprint": 7}'])
def test_a_damaged_description_is_named_with_a_remedy(tmp_path: Path, fingerprint: Fingerprint, text: str) -> None:
    pool = open_pool(str(tmp_path), create=True)
    path = Path(pool.prepare_fingerprint(fingerprint, {})) / "config.json"
    path.write_text(text)
    with pytest.raises(PoolUnavailableError, match=f"rm {path}"):
        pool.prepare_fingerprint(fingerprint, {})


@pytest.mark.parametrize("component", ["", "tmp", "quarantine"])
def test_a_link_inside_the_pool_is_refused(tmp_path: Path, fingerprint: Fingerprint, component: str) -> None:
    directory, outside = tmp_path / "pool", tmp_path / "outside"
    directory.mkdir()
    outside.mkdir()
    pool = open_pool(str(directory), create=True)
    link = directory / fingerprint[:12] / component
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(PoolUnavailableError, match="not a directory"):
        pool.prepare_fingerprint(fingerprint, {})
    assert os.listdir(outside) == []


def test_without_hard_links_the_first_writer_still_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(documents.os, "link", no_links)
    path = tmp_path / "pool.json"
    assert documents.create_document(str(path), {"writer": 1})
    assert not documents.create_document(str(path), {"writer": 2})
    assert json.loads(path.read_text()) == {"writer": 1}
    assert os.listdir(tmp_path) == ["pool.json"]
