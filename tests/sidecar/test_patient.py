"""`pykvcache-sidecar run --patient`: a pod must start and end whatever is wrong with the pool."""

import os
import socket
import subprocess
import time

import pytest

from pykvcache_contract.metrics import POOL_STATES
from pykvcache_contract.names import UNAVAILABLE_MARKER

pytestmark = pytest.mark.slow

OPTIONS = ("--patient", "--capacity", "1GiB", "--scrub-rate", 0)
HANG = """
from pykvcache_sidecar import signals
signals.hold()
import threading
from pykvcache_sidecar import care, server
server.TICK_SECONDS_MAX = 0.3
care.try_open = lambda settings: threading.Event().wait()
"""
DEFECT = """
from pykvcache_sidecar import care
first, opens = care.try_open, []

def fail_once(settings):
    opens.append(settings)
    if len(opens) == 1:
        raise RuntimeError("a defect")
    return first(settings)

care.try_open = fail_once
"""


def missing(place):
    place.rmdir()
    return place.mkdir


def foreign(place):
    return put(place / "thesis.tex", "mine")


def marked(place):
    return put(place / UNAVAILABLE_MARKER, "DiskNotMounted")


def a_file(place):
    place.rmdir()
    place.write_text("no directory")

    def repair():
        place.unlink()
        place.mkdir()

    return repair


def damaged(place):
    return put(place / "pool.json", "{")


def put(path, text):
    path.write_text(text)
    return path.unlink


# Each returns how it is put right: by one step, after which the sidecar may make its pool at any moment.
WRONG = {"missing": missing, "foreign": foreign, "marked": marked, "a file": a_file, "damaged": damaged}
STATES = {"missing": "missing"}


@pytest.fixture
def place(tmp_path):
    """An empty directory, as the kubelet makes it."""
    place = tmp_path / "volume"
    place.mkdir()
    return place


def answers(sidecar):
    return [sidecar.get(path)[0] for path in ("/healthz", "/readyz")]


def end_quickly(sidecar):
    started = time.monotonic()
    assert sidecar.terminate() == 0
    return time.monotonic() - started


def test_an_empty_directory_becomes_a_pool(place, start_sidecar):
    sidecar = start_sidecar(place, *OPTIONS)
    status = sidecar.wait_state("working")
    assert status["uid"]
    assert (place / "pool.json").is_file()
    assert answers(sidecar) == [200, 200]


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_and_waited_for(place, start_sidecar, what):
    repair = WRONG[what](place)
    sidecar = start_sidecar(place, *OPTIONS)
    status = sidecar.wait_state(STATES.get(what, "refused"))
    assert str(place) in status["reason"] or "not ready on this node" in status["reason"]
    assert answers(sidecar) == [200, 503]
    text = sidecar.get("/metrics")[1]
    assert [f'pykvcache_pool_state{{state="{state}"}} 1.0' in text for state in POOL_STATES].count(True) == 1
    assert sidecar.text().count("state: ") == 1  # looked at twenty times a second
    repair()
    sidecar.wait_state("working")
    assert answers(sidecar) == [200, 200]


@pytest.mark.parametrize("what", [*WRONG, "hang"])
def test_it_ends_at_once_whatever_is_wrong(place, start_sidecar, what):
    if what in WRONG:
        WRONG[what](place)
    sidecar = start_sidecar(place, *OPTIONS, before=HANG if what == "hang" else "")
    sidecar.wait_status(lambda status: status["reason"])
    assert end_quickly(sidecar) < 30  # 1.2 s on an idle machine; the kubelet would kill it after 30


def test_a_disk_that_does_not_answer_is_told_without_asking_for_a_restart(place, start_sidecar):
    sidecar = start_sidecar(place, *OPTIONS, before=HANG)
    status = sidecar.wait_status(lambda status: "does not answer" in status["reason"])
    assert status["state"] == "starting"
    assert answers(sidecar) == [200, 503]


def test_a_defect_of_ours_is_a_state_and_tried_again(place, start_sidecar):
    sidecar = start_sidecar(place, *OPTIONS, before=DEFECT)
    sidecar.wait_state("working")
    assert "a defect" in sidecar.text()


def test_a_directory_that_is_no_mount_point_is_waited_for(place, mounts, start_sidecar):
    sidecar = start_sidecar(place, *OPTIONS, "--require-mount")
    assert "no mount point" in sidecar.wait_state("unmounted")["reason"]
    assert list(place.iterdir()) == []
    mounts.tmpfs(place, size="4m")
    sidecar.wait_state("working")


def test_a_read_only_directory_is_waited_for(place, mounts, start_sidecar):
    mounts.tmpfs(place, size="4m")
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    sidecar = start_sidecar(place, *OPTIONS)
    assert "Read-only" in sidecar.wait_state("read_only")["reason"]
    subprocess.run(["mount", "-o", "remount,rw", place], check=True)
    sidecar.wait_state("working")


def test_a_directory_of_another_user_is_waited_for(open_folder, start_sidecar):
    place = open_folder / "volume"
    place.mkdir(mode=0o755)
    sidecar = start_sidecar(place, *OPTIONS, user=65534)
    assert "65534" in sidecar.wait_state("read_only")["reason"]
    os.chmod(place, 0o777)
    sidecar.wait_state("working")


def test_of_two_on_one_pool_one_works(place, start_sidecar):
    first = start_sidecar(place, *OPTIONS)
    first.wait_state("working")
    second = start_sidecar(place, *OPTIONS)
    second.wait_state("standby")
    first.process.kill()
    second.wait_state("working")


def test_a_port_in_use_costs_only_the_metrics(place, start_sidecar):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        sidecar = start_sidecar(place, *OPTIONS, "--listen", address)
        sidecar.wait_state("working")
    assert f"--listen {address}" in sidecar.text()


@pytest.mark.parametrize("options", [("--capacity", "0"), ("--listen", "nowhere"), ("--listen", "192.0.2.77:1")])
def test_a_wrong_option_still_ends_it(place, start_sidecar, options):
    sidecar = start_sidecar(place, "--patient", "--capacity", "1GiB", *options)
    assert sidecar.process.wait(60) == 2
