"""Publishing by real processes: killed at every step, and two at once with a reader beside them."""

import os
import subprocess
from pathlib import Path

import pytest

from pykvcache_contract.errors import BlockMissingError
from pykvcache_contract.keys import BlockKey, fingerprint_of
from pykvcache_contract.paths import block_path
from pykvcache_storage.pool import open_pool
from pykvcache_storage.recovery import sweep
from pykvcache_storage.verify import verify_block

SIZE_BYTES = 256 * 1024
FINGERPRINT = fingerprint_of({"model": "test"})

PREPARE = """
import os, signal, sys
from pykvcache_contract.header import HEADER_SIZE_BYTES, BlockHeader, encode_header
from pykvcache_contract.keys import BlockKey, fingerprint_of
from pykvcache_contract.paths import block_path, temporary_path
from pykvcache_storage.block import FileAccess
from pykvcache_storage.checksum import checksum
from pykvcache_storage.memory import StagingMemory
from pykvcache_storage.probe import PublishMethod
from pykvcache_storage.publish import publish_block
from pykvcache_storage.reactor.operations import Write
from pykvcache_storage.reactor.system_calls import perform
from pykvcache_storage.recovery import WriterLock

method, fsync, size = PublishMethod(sys.argv[1]), sys.argv[2] == "True", int(sys.argv[3])
fingerprint = fingerprint_of({"model": "test"})
slot = StagingMemory(slot_size_bytes=size, budget_bytes=2 * size).slots[0]

def publication(pool, lock, number):
    key = BlockKey(fingerprint, number.to_bytes(32, "little"), 0, 0)
    payload = slot.data[HEADER_SIZE_BYTES:]
    payload[:] = bytes([number % 251 + 1]) * len(payload)
    slot.data[:HEADER_SIZE_BYTES] = encode_header(BlockHeader(key, len(payload), len(payload), checksum(payload)))
    temporary = f"{pool}/{temporary_path(fingerprint, lock.writer, number)}"
    target = f"{pool}/{block_path(key)}"
    return publish_block(
        slot=slot,
        temporary=temporary,
        target=target,
        modified_ns=10**18,
        access=FileAccess(False),
        method=method,
        fsync=fsync,
    )

def run(task, before=lambda number, operation: None):
    try:
        operation = next(task)
        for number in range(1000):
            before(number, operation)
            result = perform(operation)
            operation = task.throw(OSError(-result, "")) if result < 0 else task.send(result)
    except StopIteration as stop:
        return stop.value.value
"""
DIE_AT_A_STEP = (
    PREPARE
    + """
def publish_until(pool, step):
    def die(number, operation):
        if number == step:
            if isinstance(operation, Write):
                perform(Write(operation.descriptor, operation.address, size // 2, 0))
            os.kill(os.getpid(), signal.SIGKILL)

    lock = WriterLock(pool, fingerprint)
    outcome = run(publication(pool, lock, 1), die)
    lock.close()
    print(outcome, flush=True)

# One process for each line: forked, because importing numpy takes longer than all its steps.
for line in sys.stdin:
    pool, step = line.split()
    child = os.fork()
    if not child:
        publish_until(pool, int(step))
        os._exit(0)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        print("killed", flush=True)
"""
)
PUBLISH_MANY = (
    PREPARE
    + """
lock = WriterLock(sys.argv[4], fingerprint)
print("ready", flush=True)
sys.stdin.readline()
firsts = sum(run(publication(sys.argv[4], lock, number)) == "first" for number in range(int(sys.argv[5])))
lock.close()
print(firsts, flush=True)
"""
)


def key_of(number: int) -> BlockKey:
    return BlockKey(FINGERPRINT, number.to_bytes(32, "little"), 0, 0)


def make_pool(directory: Path) -> Path:
    directory.mkdir()
    open_pool(str(directory), create=True).prepare_fingerprint(FINGERPRINT, {})
    return directory


def temporary_files(pool: Path) -> list[str]:
    return os.listdir(pool / FINGERPRINT[:12] / "tmp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "fsync"), [("link", False), ("link", True), ("rename_noreplace", True), ("rename", True)]
)
def test_a_writer_killed_at_any_step_leaves_only_what_a_sweep_removes(tmp_path, start_python, method, fsync):
    writer = start_python(DIE_AT_A_STEP, method, fsync, SIZE_BYTES)
    outcome = "killed\n"
    for step in range(20):
        pool = make_pool(tmp_path / str(step))
        target = pool / block_path(key_of(1))
        outcome = publish(writer, pool, step)
        if outcome != "killed\n":
            break
        if target.exists():
            verify_block(str(target), key_of(1))
        existed = target.exists() and method != "rename"
        report = sweep(str(pool), FINGERPRINT)
        assert (report.failed, report.living) == (0, 0)
        assert temporary_files(pool) == []
        assert publish(writer, pool, -1) == ("already there\n" if existed else "first\n")
        verify_block(str(target), key_of(1))
        assert temporary_files(pool) == []
    assert outcome == "first\n"
    assert step == {"link": 10, "rename_noreplace": 9, "rename": 9}[method] + 4 * fsync


def publish(writer: "subprocess.Popen[str]", pool: Path, step: int) -> str:
    """Let a new process publish a block and die before one of its steps; return what it says."""
    writer.stdin.write(f"{pool} {step}\n")
    writer.stdin.flush()
    return writer.stdout.readline()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["link", "rename_noreplace", "rename"])
def test_two_processes_that_publish_the_same_blocks_show_complete_ones_only(tmp_path, start_python, method):
    pool, count = make_pool(tmp_path / "pool"), 50
    writers = [start_python(PUBLISH_MANY, method, False, SIZE_BYTES, pool, count) for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    seen = 0
    while seen < count:
        ended = all(writer.poll() is not None for writer in writers)
        try:
            verify_block(str(pool / block_path(key_of(seen))), key_of(seen))
            seen += 1
        except BlockMissingError:
            assert not ended
    published = [int(writer.communicate(timeout=100)[0]) for writer in writers]
    assert sum(published) == (2 * count if method == "rename" else count)
    assert temporary_files(pool) == []
    for number in range(count):
        verify_block(str(pool / block_path(key_of(number))), key_of(number))
