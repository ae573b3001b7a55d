"""A signal ends a command that runs on, whenever it comes and whichever thread could take it."""

import contextlib
import signal
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ENDED_DURING_IMPORTS = """
import os, signal, sys
class EndsAtNumpy:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGTERM)
sys.meta_path.insert(0, EndsAtNumpy())
"""
HANGS = """
from pykvcache_sidecar import signals
signals.hold()
import threading
from pykvcache_sidecar import run
def hang(*_, **__):
    print("the disk hangs", flush=True)
    threading.Event().wait()
run.open_pool = hang
"""


def blocked(process: int) -> dict[int, tuple[str, int]]:
    """Return name and mask of blocked signals of every thread; one that answered HTTP may be ending at this moment."""
    found = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            found[int(task.name)] = fields["Name"].strip(), int(fields["SigBlk"], 16)
    return found


def test_no_thread_but_the_first_takes_a_signal_that_ends_it(pool, start_sidecar):
    sidecar = start_sidecar(pool.directory, "--capacity", "1GiB")
    sidecar.wait_scanned()
    mask = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1
    tasks = blocked(sidecar.process.pid)
    del tasks[sidecar.process.pid]
    assert len(tasks) > 1
    assert [] == [name for name, signals in tasks.values() if signals & mask != mask]


@pytest.mark.parametrize("options", [[], ["--patient"]])
def test_a_signal_before_everything_is_loaded_is_not_lost(pool, start_sidecar, options):
    sidecar = start_sidecar(pool.directory, "--capacity", "1GiB", *options, before=ENDED_DURING_IMPORTS)
    assert 0 == sidecar.process.wait(60), sidecar.text()
    assert "Traceback" not in sidecar.text()


def test_a_disk_that_hangs_at_the_start_does_not_keep_the_command_from_ending(pool, start_sidecar, wait_for):
    sidecar = start_sidecar(pool.directory, "--capacity", "1GiB", before=HANGS)
    wait_for(lambda: "the disk hangs" in sidecar.text(), "the hang")
    sidecar.process.terminate()
    assert -signal.SIGTERM == sidecar.process.wait(60)
