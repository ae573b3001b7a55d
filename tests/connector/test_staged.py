"""Blocks that are read before they are promised: a worker's side of two-phase loads, on real and simulated disks."""

import threading

import pytest
import torch

from pykvcache_connector.messages import BlockKeysSpec, Identity, StagingOrders, WorkerReport
from pykvcache_connector.settings import Settings
from pykvcache_connector.stats import Counts
from pykvcache_connector.vllm_api import GPULoadStoreSpec, make_offload_key
from pykvcache_connector.worker import transfer as transfer_module
from pykvcache_connector.worker.copies import KVTensors
from pykvcache_connector.worker.handler import Handler
from pykvcache_connector.worker.layout import BlockLayout, whole_blocks
from pykvcache_connector.worker.start import make_transfer
from pykvcache_contract import metrics
from pykvcache_contract.errors import PyKVCacheError
from pykvcache_contract.keys import fingerprint_of
from pykvcache_storage.reactor.operations import Read

SECONDS = 60


class Scheduler:
    """Gives a worker orders; tickets are block numbers plus 1000 × attempt."""

    def __init__(self, worker) -> None:
        self.worker = worker
        self.number = 0

    def order(self, stage=(), release=()) -> None:
        self.number += 1
        tickets = {ticket: self.worker.key(ticket % 1000) for ticket in stage}
        self.worker.transfer.obey(StagingOrders(self.number, tickets, tuple(release)))

    def staged(self) -> set[int]:
        self.worker.step()
        return set(self.worker.report.staged)

    def slots_used(self) -> int:
        return self.worker.transfer._reactor.state().slots_used


@pytest.fixture
def start(make_worker):
    """Start a worker that has blocks 0 to 5 on disk and nothing on the GPU."""

    def make(**options):
        worker = make_worker(**options)
        worker.store_all(range(6))
        expected = [worker.pages(number) for number in range(6)]
        worker.wipe()
        return worker, Scheduler(worker), expected

    return make


def test_staging_touches_no_page_and_a_load_then_needs_no_file(start, until):
    worker, scheduler, expected = start()
    scheduler.order(stage=[0, 1, 2])
    until(lambda: scheduler.staged() == {0, 1, 2})
    assert not any(any(page) for number in range(3) for page in worker.pages(number))
    for number in range(3):
        worker.path(number).unlink()
    assert worker.finish(worker.load([0, 1, 2])).failed_rows == set()
    assert [worker.pages(number) for number in range(3)] == expected[:3]
    worker.expect(3, metrics.LOAD_BLOCKS)
    assert scheduler.slots_used() == 3, "they stay until they are let go"
    scheduler.order(release=[0, 1, 2])
    until(lambda: scheduler.slots_used() == 0)


def test_several_loads_copy_one_staged_block(start, until):
    worker, scheduler, expected = start()
    scheduler.order(stage=[0])
    until(lambda: scheduler.staged() == {0})
    worker.path(0).unlink()
    jobs = [worker.load([0]) for _ in range(5)]
    scheduler.order(release=[0])
    for job in jobs:
        assert worker.finish(job).failed_rows == set()
    assert worker.pages(0) == expected[0]
    until(lambda: scheduler.slots_used() == 0)


def test_a_block_let_go_during_a_copy_keeps_its_slot_until_the_copy_ends(start, until, monkeypatch):
    worker, scheduler, expected = start()
    scheduler.order(stage=[0])
    until(lambda: scheduler.staged() == {0})
    gate = threading.Event()
    copier = worker.transfer._copier
    run = copier._run
    monkeypatch.setattr(copier, "_run", lambda copy: (gate.wait(SECONDS), run(copy))[1])
    job = worker.load([0])
    scheduler.order(release=[0])
    worker.transfer._reactor.barrier().wait(SECONDS)
    assert scheduler.slots_used() == 1
    gate.set()
    assert worker.finish(job).failed_rows == set()
    assert worker.pages(0) == expected[0]
    until(lambda: scheduler.slots_used() == 0)


def test_a_block_that_is_not_staged_is_loaded_by_reading(start, until):
    worker, scheduler, expected = start()
    scheduler.order(stage=[0])
    until(lambda: scheduler.staged() == {0})
    assert worker.finish(worker.load([0, 1])).failed_rows == set()
    assert [worker.pages(number) for number in range(2)] == expected[:2]


@pytest.mark.parametrize("offset", [100, 5000])
def test_a_damaged_block_is_reported_and_moved_aside_and_never_staged(start, until, offset):
    worker, scheduler, _ = start()
    with worker.path(1).open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    scheduler.order(stage=[0, 1])
    until(lambda: scheduler.staged() == {0} and worker.key(1) in worker.report.lost)
    worker.expect(1, metrics.QUARANTINED)
    assert worker.total(metrics.LOAD_FAILED, "corrupt") == 1
    assert not worker.path(1).exists()
    until(lambda: scheduler.slots_used() == 1)


def test_a_missing_block_is_reported(start, until):
    worker, scheduler, _ = start()
    worker.path(3).unlink()
    scheduler.order(stage=[3])
    until(lambda: scheduler.staged() == set() and worker.key(3) in worker.report.lost)
    until(lambda: scheduler.slots_used() == 0)


def test_without_the_payload_check_a_block_is_staged_by_its_header(start, until):
    worker, scheduler, _ = start(integrity="header")
    with worker.path(0).open("r+b") as file:
        file.seek(5000)
        file.write(b"x")
    scheduler.order(stage=[0])
    until(lambda: scheduler.staged() == {0})


def test_the_same_orders_twice_change_nothing_and_a_known_ticket_is_not_read_again(start, until):
    worker, scheduler, _ = start()
    scheduler.order(stage=[0])
    until(lambda: scheduler.staged() == {0})
    worker.path(0).unlink()
    scheduler.number -= 1
    scheduler.order(stage=[1], release=[0])
    scheduler.order(stage=[0])
    worker.transfer._reactor.barrier().wait(SECONDS)
    assert scheduler.slots_used() == 1
    assert scheduler.staged() == {0}


def test_a_block_staged_anew_after_it_was_let_go_is_read_anew(start, until):
    worker, scheduler, _ = start()
    scheduler.order(stage=[0])
    until(lambda: scheduler.staged() == {0})
    worker.path(0).unlink()
    scheduler.order(stage=[1000], release=[0])
    until(lambda: scheduler.staged() == {0} and worker.key(0) in worker.report.lost)


def test_a_new_generation_lets_all_blocks_go_but_not_a_copy_under_way(start, until):
    worker, scheduler, expected = start()
    scheduler.order(stage=[0, 1, 2])
    until(lambda: scheduler.staged() == {0, 1, 2})
    job = worker.load([0])
    worker.use(1)
    assert worker.finish(job).failed_rows == set()
    assert worker.pages(0) == expected[0]
    until(lambda: scheduler.slots_used() == 0)


def test_more_blocks_than_agreed_are_not_staged(start, until):
    worker, scheduler, _ = start(slots=4)
    assert worker.transfer.options.staged_max == 2
    scheduler.order(stage=[0, 1, 2])
    until(lambda: scheduler.staged() == {0, 1})
    worker.transfer._reactor.barrier().wait(SECONDS)
    assert scheduler.slots_used() == 2


def test_stores_go_on_while_all_blocks_that_may_be_are_staged(start, until):
    worker, scheduler, _ = start(slots=4)
    scheduler.order(stage=[0, 1])
    until(lambda: scheduler.staged() == {0, 1})
    worker.store_all(range(10, 30))


def test_waiting_for_a_job_of_staged_blocks_waits_for_its_copy_and_fails_nothing(start, until):
    worker, scheduler, expected = start()
    scheduler.order(stage=[0, 1, 2])
    until(lambda: scheduler.staged() == {0, 1, 2})
    job = worker.load([0, 1, 2])
    worker.transfer.wait({job})
    assert [worker.pages(number) for number in range(3)] == expected[:3]
    assert worker.finish(job).failed_rows == set()


def test_closing_ends_sleeping_tasks_at_once(start, until):
    worker, scheduler, _ = start()
    scheduler.order(stage=[0, 1, 2])
    until(lambda: scheduler.staged() == {0, 1, 2})
    worker.transfer.close(SECONDS)
    assert not worker.transfer._reactor._thread.is_alive()


def test_blocks_that_the_scheduler_forgot_are_let_go_after_an_age(start, until, monkeypatch):
    monkeypatch.setattr(transfer_module, "STAGED_AGE_FACTOR", 0.0)
    worker, scheduler, _ = start()
    scheduler.order(stage=[0, 1])
    # Whether they were staged for a moment is chance.
    until(lambda: worker.step() or not (worker.transfer._staged._blocks or scheduler.slots_used()))


def test_a_hanging_disk_is_noticed_and_what_is_let_go_meanwhile_leaves_when_it_answers(make_simulated_worker, until):
    worker, disk = make_simulated_worker(load_timeout_seconds=0.05)
    scheduler = Scheduler(worker)
    worker.store_all([0])
    disk.hang(Read)
    scheduler.order(stage=[0])
    until(lambda: scheduler.staged() == set() and worker.report.is_stalled)
    scheduler.order(release=[0])
    worker.transfer._reactor.barrier().wait(SECONDS)
    assert scheduler.slots_used() == 1
    disk.release()
    until(lambda: scheduler.slots_used() == 0)


# ---- several groups ----

FULL = BlockLayout((3072, 1000), blocks=2)
WINDOW = BlockLayout((5000,), blocks=2)
ROWS = 64


class Hybrid:
    """A worker of a model with two KV-cache groups, whose blocks differ in size."""

    def __init__(self, pool) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tensors = [
            torch.randint(-128, 128, (ROWS, size), dtype=torch.int8, generator=generator) for size in (3072, 1024, 5120)
        ]
        self.counts = Counts()
        groups = [KVTensors(self.tensors[:2], FULL, 0), KVTensors(self.tensors[2:], WINDOW, 3)]
        self.transfer = make_transfer(
            Settings.parse({"pool": str(pool), "staging": 8 * WINDOW.file_size_bytes}),
            groups,
            rank=0,
            is_replicated=False,
            counts=self.counts,
        )
        self.transfer.use(Identity(0, (fingerprint_of({"model": "hybrid"}),), ({},)))
        self.handler = Handler(self.transfer, can_recompute=False)
        self.report = WorkerReport()

    @staticmethod
    def key(number: int, group: int) -> bytes:
        return bytes(make_offload_key(bytes.fromhex(fingerprint_of({"block": number})), group))

    def finish(self, until, job: int) -> None:
        done: set[int] = set()

        def is_over() -> bool:
            done.update(result.job_id for result in self.handler.get_finished())
            self.take_report()
            return job in done

        until(is_over)

    def take_report(self) -> WorkerReport:
        report = self.transfer.outcomes.take_report()
        if report is not None:
            self.report = self.report.merge(report)
        return self.report


@pytest.fixture
def hybrid(pool):
    worker = Hybrid(pool)
    yield worker
    worker.transfer.close(SECONDS)


def gpu(rows, sizes, indices) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(rows), group_sizes=sizes, block_indices=indices)


def test_blocks_of_two_groups_have_files_of_their_own_size_and_come_back(hybrid, pool, until):
    assert FULL.file_size_bytes != WINDOW.file_size_bytes
    keys = [hybrid.key(0, 0), hybrid.key(1, 0), hybrid.key(1, 3)]
    hybrid.handler.submit_store(1, gpu([2, 3, 4, 5, 8, 9], [4, 2], [0, 2]), BlockKeysSpec(keys))
    hybrid.finish(until, 1)
    until(lambda: set(hybrid.take_report().stored) == set(keys))
    sizes = {path.name[-6:]: path.stat().st_size for path in pool.rglob("*.kvb")}
    assert sizes == {"g0.kvb": FULL.file_size_bytes, "g3.kvb": WINDOW.file_size_bytes}

    before = [tensor.clone() for tensor in hybrid.tensors]
    for tensor in hybrid.tensors:
        tensor.zero_()
    hybrid.transfer.obey(StagingOrders(1, dict(enumerate(keys)), ()))
    until(lambda: set(hybrid.take_report().staged) == {0, 1, 2})
    # To other rows than before: 20 … 23 of the first group; of the window only the last GPU block, row 30.
    hybrid.handler.submit_load(2, BlockKeysSpec(keys), gpu([20, 21, 22, 23, 30], [4, 1], [0, 3]))
    hybrid.finish(until, 2)
    for tensor, old, size in zip(hybrid.tensors[:2], before, (3072, 1000), strict=False):
        assert torch.equal(tensor[20:24, :size], old[2:6, :size])
    assert torch.equal(hybrid.tensors[2][30, :5000], before[2][9, :5000])
    assert not hybrid.tensors[2][31].any()


def test_a_job_may_have_blocks_of_the_last_group_only(hybrid, until):
    key = hybrid.key(4, 3)
    hybrid.handler.submit_store(1, gpu([10, 11], [0, 2], [0, 4]), BlockKeysSpec([key]))
    hybrid.finish(until, 1)
    until(lambda: key in hybrid.take_report().stored)


def test_a_block_whose_front_has_left_the_window_is_not_stored(hybrid, pool, until):
    keys = [hybrid.key(0, 3), hybrid.key(1, 3)]
    hybrid.handler.submit_store(1, gpu([11, 12, 13], [0, 3], [0, 1]), BlockKeysSpec(keys))
    hybrid.finish(until, 1)
    until(lambda: hybrid.take_report().stored == {keys[1]: 1} and hybrid.report.dropped == {keys[0]})
    assert len(list(pool.rglob("*.kvb"))) == 1
    assert hybrid.counts.take().data["counters"]["\t".join((metrics.DECLINED.name, "store", "incomplete"))] == 1


@pytest.mark.parametrize(
    ("rows", "keys", "first", "expected"),
    [
        ([1, 2, 3, 4], 2, 0, [(1, 2), (3, 4)]),
        ([2, 3, 4], 2, 1, [None, (3, 4)]),
        ([1, 2, 3], 2, 0, [None, None]),
        ([1, 3, 4], 2, 2, [None, None]),
        ([2, 4], 2, 1, [None, None]),
        ([], 1, 0, [None]),
    ],
)
def test_only_whole_blocks_are_stored_and_none_where_holes_are_elsewhere(rows, keys, first, expected):
    found = whole_blocks(rows, key_count=keys, first_block=first, blocks=2)
    assert [part and part.rows for part in found] == expected


def test_a_promised_block_that_cannot_be_copied_raises_rather_than_give_wrong_kv(hybrid, until):
    hybrid.handler.submit_load(5, BlockKeysSpec([hybrid.key(9, 0)]), gpu([2, 3], [2, 0], [0, 0]))

    def raises() -> bool:
        try:
            hybrid.handler.get_finished()
        except PyKVCacheError as error:
            return "could not be loaded after they were promised" in str(error)
        return False

    until(raises)
    assert hybrid.handler.take_failed_rows() == set()
