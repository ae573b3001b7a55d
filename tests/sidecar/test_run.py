"""The command as a process: signals, kills, two at once, and errors at the start."""

import os
import random
import socket
import subprocess
import time
from pathlib import Path

import pytest

from pykvcache_contract.metrics import SIDECAR_METRICS
from pykvcache_storage.inventory import count_bytes, iterate_blocks
from pykvcache_storage.verify import verify_block

pytestmark = pytest.mark.slow

PATIENT_END = """
from pykvcache_sidecar import signals
signals.hold()
from pykvcache_sidecar import run
run.END_SECONDS = 30.0  # a busy machine is no disk that hangs
"""


def du_bytes(directory: Path) -> int:
    """Return what `du` says about the pool's block files."""
    files = sorted(str(path) for path in directory.rglob("*.kvb"))
    result = subprocess.run(["du", "-cb", *files], capture_output=True, text=True, check=True)
    return int(result.stdout.splitlines()[-1].split()[0])


def metric_values(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_the_numbers_of_a_quiet_pool_are_those_of_du(pool, start_sidecar):
    pool.fill(85)
    sidecar = start_sidecar(pool.directory, "--capacity", 100 * pool.block_bytes)
    status = sidecar.wait_scanned()
    expected = du_bytes(pool.directory)
    assert status["size_bytes"] == status["used_bytes"] == expected == 85 * pool.block_bytes
    assert (status["blocks"], status["state"], status["active"]) == (85, "working", True)
    (row,) = status["fingerprints"]
    assert (row["directory"], row["model"], row["blocks"]) == (pool.fingerprint[:12], "test/llama", 85)
    code, text = sidecar.get("/metrics")
    values = metric_values(text)
    assert code == 200
    assert values["pykvcache_pool_used_bytes"] == expected
    assert values[f'pykvcache_pool_size_bytes{{fingerprint="{pool.fingerprint[:12]}",model="test/llama"}}'] == expected
    assert {name.partition("{")[0] for name in values} == {metric.name for metric in SIDECAR_METRICS}
    assert [sidecar.get(path)[0] for path in ("/healthz", "/readyz", "/status")] == [200] * 3


def test_numbers_follow_an_eviction_without_another_scan(pool, start_sidecar):
    paths = pool.fill(95)
    sidecar = start_sidecar(pool.directory, "--capacity", 100 * pool.block_bytes, "--scrub-rate", 0)
    # The fill level is read at the end of a round, a moment after its evictions are counted.
    status = sidecar.wait_status(
        lambda status: (
            (status["evicted"]["blocks"], status["blocks"]) == (15, 80) and status["used_bytes"] < 95 * pool.block_bytes
        )
    )
    assert status["size_bytes"] == status["used_bytes"] == du_bytes(pool.directory)
    assert status["scan"]["files"] == 95
    assert [path.exists() for path in paths] == [True] * 80 + [False] * 15


def test_the_other_takes_over_when_the_working_one_is_killed(pool, start_sidecar):
    pool.fill(10)
    options = ("--capacity", 100 * pool.block_bytes)
    first = start_sidecar(pool.directory, *options)
    first.wait_state("working")
    second = start_sidecar(pool.directory, *options)
    second.wait_state("standby")
    assert [second.get("/readyz")[0], second.get("/healthz")[0]] == [200, 200]
    first.process.kill()
    second.wait_state("working")
    pool.ledger.reserve(90 * pool.block_bytes, capacity_bytes=10**12)
    second.wait_status(lambda status: status["evicted"]["blocks"])


@pytest.mark.parametrize("work", ["scan", "eviction", "scrub"])
def test_a_signal_ends_it_at_once_during(pool, start_sidecar, work):
    pool.fill(1500)
    options = {
        "scan": ("--capacity", "1GiB", "--scrub-rate", 0),
        "eviction": ("--capacity", pool.block_bytes, "--scrub-rate", 0),
        "scrub": ("--capacity", "1GiB", "--scrub-rate", "100KiB"),
    }[work]
    sidecar = start_sidecar(pool.directory, *options, before=PATIENT_END)
    if work == "eviction":
        sidecar.wait_status(lambda status: status["evicted"]["blocks"])
    elif work == "scrub":
        sidecar.wait_status(lambda status: status["scrub"]["blocks"])
    else:
        sidecar.wait_state("working")
    assert sidecar.terminate() == 0
    assert "stopped" in sidecar.text()
    assert "did not answer" not in sidecar.text()
    assert "Traceback" not in sidecar.text()
    assert pool.ledger.used_bytes() == count_bytes(str(pool.directory))


@pytest.mark.timeout(300)  # starts six processes, one after the other
def test_an_evictor_killed_anywhere_leaves_whole_blocks_and_a_count_that_heals(pool, start_sidecar, wait_for):
    seed = time.time_ns()
    chance = random.Random(seed)
    pool.fill(600)
    left = len(pool.blocks())
    for _ in range(6):
        sidecar = start_sidecar(pool.directory, "--capacity", pool.block_bytes * 100, "--scrub-rate", 0)
        goal = max(100, left - chance.randrange(1, 120))
        wait_for(lambda goal=goal: len(pool.blocks()) <= goal, f"an eviction, seed {seed}")
        sidecar.process.kill()
        sidecar.process.wait()
        left = len(pool.blocks())
        assert pool.ledger.used_bytes() >= count_bytes(str(pool.directory)), f"seed {seed}"
    for file in iterate_blocks(str(pool.directory)):
        verify_block(str(pool.directory / file.path), file.key(pool.fingerprint))
    pool.recount()
    assert pool.ledger.used_bytes() == count_bytes(str(pool.directory))


def test_a_flipped_bit_ends_in_quarantine(pool, start_sidecar):
    paths = pool.fill(20)
    with paths[3].open("r+b") as file:
        file.seek(9000)
        byte = file.read(1)[0]
        file.seek(9000)
        file.write(bytes([byte ^ 1]))
    sidecar = start_sidecar(pool.directory, "--capacity", "1GiB", "--scrub-rate", "1GiB")
    sidecar.wait_status(lambda status: status["scrub"]["damaged"] == 1 and status["scrub"]["blocks"] == 20)
    assert [number for number, path in enumerate(paths) if not path.exists()] == [3]
    assert "moved to quarantine" in sidecar.text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", "0"], ["--capacity is zero"]),
        (["--capacity", "much"], ["--capacity", "64GiB"]),
        (["--capacity", "1GiB", "--high", "0.5"], ["--low 0.8 --high 0.5"]),
        (["--capacity", "1GiB", "--policy", "fifo"], ["--policy", "lru"]),
        (["--capacity", "1GiB", "--require-mount"], ["--require-mount", "no mount point"]),
        (["--capacity", "1GiB", "--listen", "nowhere"], ["--listen", "0.0.0.0:9478"]),
    ],
)
def test_a_wrong_option_ends_the_start_with_what_to_change(pool, start_sidecar, options, words):
    sidecar = start_sidecar(pool.directory, *options)
    assert sidecar.process.wait(60) == 2
    assert [word for word in words if word not in sidecar.text()] == []
    assert "Traceback" not in sidecar.text()


def test_a_directory_that_is_missing_or_foreign_is_refused(tmp_path, start_sidecar):
    missing = start_sidecar(tmp_path / "missing", "--capacity", "1GiB")
    assert missing.process.wait(60) == 2
    assert "mkdir -p" in missing.text()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("mine")
    foreign = start_sidecar(tmp_path / "foreign", "--capacity", "1GiB")
    assert foreign.process.wait(60) == 2
    assert "other files" in foreign.text()
    assert [path.name for path in (tmp_path / "foreign").iterdir()] == ["thesis.tex"]


def test_a_port_in_use_ends_the_start(pool, start_sidecar):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        sidecar = start_sidecar(pool.directory, "--capacity", "1GiB", "--listen", address)
        assert sidecar.process.wait(60) == 2
    assert f"--listen {address}" in sidecar.text()


def test_a_user_who_may_not_write_is_told_and_the_pool_heals(make_pool, open_folder, start_sidecar):
    pool = make_pool(open_folder / "pool")
    pool.fill(95)
    os.chmod(pool.directory, 0o555)
    sidecar = start_sidecar(pool.directory, "--capacity", 100 * pool.block_bytes, user=65534)
    status = sidecar.wait_state("read_only")
    assert "65534" in status["reason"]
    assert sidecar.get("/readyz")[0] == 503
    assert sidecar.get("/healthz")[0] == 200
    pool.give_to(65534)
    os.chmod(pool.directory, 0o755)
    sidecar.wait_status(lambda status: status["evicted"]["blocks"] == 15)


def test_a_ledger_that_may_not_be_changed_is_a_state_and_no_failure(make_pool, open_folder, start_sidecar):
    pool = make_pool(open_folder / "pool")
    pool.fill(5)
    subprocess.run(["chown", "-R", "65534", pool.directory], check=True)
    os.chown(pool.directory / "usage", 0, 0)
    sidecar = start_sidecar(pool.directory, "--capacity", "1GiB", user=65534)
    assert "usage is not writable for user 65534" in sidecar.wait_state("read_only")["reason"]
    os.chown(pool.directory / "usage", 65534, 65534)
    sidecar.wait_state("working")
