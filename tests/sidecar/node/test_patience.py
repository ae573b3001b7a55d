"""Disks that do not answer."""

import os
import threading

import pytest

from pykvcache_sidecar.node import disks as disks_module
from pykvcache_sidecar.node import survey as survey_module
from pykvcache_sidecar.node.patience import Patience

from .conftest import pool_object


@pytest.fixture
def dead():
    """Lets everything end that waits for a dead disk."""
    released = threading.Event()
    yield released
    released.set()


def test_an_answer_and_an_error_come_back():
    patience = Patience(60.0)
    assert patience.ask("a", lambda: 7) == 7
    with pytest.raises(FileNotFoundError):
        patience.ask("a", lambda: os.stat("/does/not/exist"))
    assert patience.ask("a", lambda: 8) == 8


def test_what_does_not_answer_is_not_asked_again_until_it_does(dead):
    patience, asked, begun = Patience(0.01), [], threading.Event()

    def question():
        asked.append(threading.current_thread())
        begun.set()
        dead.wait()

    for _ in range(3):
        with pytest.raises(TimeoutError):
            patience.ask("a", question)
    assert begun.wait(60)
    assert len(asked) == 1
    dead.set()
    asked[0].join()
    assert Patience(60.0).ask("b", lambda: 1) == 1
    patience.seconds = 60.0
    assert patience.ask("a", lambda: 2) == 2


def test_a_disk_that_hangs_when_the_agent_starts_keeps_no_pool_of_another_disk_waiting(
    monkeypatch, make_node, disk, mounts, tmp_path, dead
):
    mounts.tmpfs(tmp_path / "disk-0-dead")
    describe, find = disks_module._describe, survey_module.find_trees

    def hang_if_dead(place):
        if "dead" in place:
            dead.wait()

    def described(mount, *rest, **named):
        hang_if_dead(mount.point)
        return describe(mount, *rest, **named)

    def found(root):
        hang_if_dead(root)
        return find(root)

    class Brief(Patience):
        """Gives a healthy disk on a busy machine all the time it needs."""

        def ask(self, about, question):
            self.seconds = 0.05 if "dead" in about else 60.0
            return super().ask(about, question)

    monkeypatch.setattr(survey_module, "Patience", Brief)
    monkeypatch.setattr(disks_module, "_describe", described)
    monkeypatch.setattr(survey_module, "find_trees", found)
    node = make_node()
    node.tell(pool_object("good"), pool_object("bad", storage={"path": f"{tmp_path}/disk-0-dead/kv"}))
    node.survey.look()
    assert [str(disk)] == [found.mount_path for found in node.survey.disks()]
    node.manager.round()
    assert {"good", "bad"} == {report.name for report in node.manager.reports()}
