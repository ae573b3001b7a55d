"""What the agent remembers over restarts."""

import json
import os

import pytest

from pykvcache_sidecar.node import memory as memory_module
from pykvcache_sidecar.node.memory import Memory, Remembered

HERE = Remembered("default", "/mnt/a/pykvcache", 3, "/mnt/a")


def test_what_is_noted_is_there_after_a_restart_until_it_is_forgotten(tmp_path):
    folder = str(tmp_path / "plugin")
    Memory(folder).note("uid-1", HERE)
    again = Memory(folder)
    assert (again.get("uid-1"), again.get("uid-2"), again.roots()) == (HERE, None, {"/mnt/a/pykvcache"})
    again.forget("uid-1")
    assert Memory(folder).roots() == set()
    assert os.listdir(folder) == ["pools.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        json.dumps({"uid-1": {"pool": "p"}}),
        json.dumps({"uid-1": 7}),
        json.dumps({"uid-1": {"pool": "p", "root": 7, "generation": 1, "mount_point": "/"}}),
        json.dumps({"uid-1": {"pool": "p", "root": "/a", "generation": "1", "mount_point": "/"}}),
    ],
)
def test_a_damaged_file_costs_what_it_held_and_is_written_anew(tmp_path, text):
    (tmp_path / "pools.json").write_text(text)
    memory = Memory(str(tmp_path))
    assert memory.get("uid-1") is None
    memory.note("uid-1", HERE)
    assert Memory(str(tmp_path)).get("uid-1") == HERE


def test_it_is_written_only_when_something_is_new(tmp_path):
    memory = Memory(str(tmp_path))
    memory.note("uid-1", HERE)
    before = os.stat(tmp_path / "pools.json").st_ino
    memory.note("uid-1", HERE)
    memory.forget("uid-2")
    assert os.stat(tmp_path / "pools.json").st_ino == before


def test_the_oldest_is_forgotten_where_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_module, "_POOLS_MAX", 2)
    memory = Memory(str(tmp_path))
    for number in range(3):
        memory.note(f"uid-{number}", HERE)
    assert [bool(memory.get(f"uid-{number}")) for number in range(3)] == [False, True, True]


def test_as_many_as_are_remembered_are_read_again_also_with_long_names(tmp_path):
    memory = Memory(str(tmp_path))
    long = Remembered("p" * 63, "/mnt/" + "r" * 250, 1, "/mnt/" + "m" * 100)
    for number in range(memory_module._POOLS_MAX + 1):
        memory.note(f"{number:036d}", long)
    assert Memory(str(tmp_path)).get(f"{memory_module._POOLS_MAX:036d}") == long


def test_a_folder_that_refuses_costs_only_the_memory(tmp_path, caplog):
    memory = Memory(str(tmp_path / "plugin"))
    (tmp_path / "plugin").rmdir()
    memory.note("uid-1", HERE)
    assert memory.get("uid-1") == HERE
    assert "could not be written" in caplog.text
