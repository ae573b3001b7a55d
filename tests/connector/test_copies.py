"""Rows, pages and payloads: split, copied both ways in host memory, and summed up."""

import os
import queue

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pykvcache_connector.worker.checksum import Checksum, unsigned
from pykvcache_connector.worker.copies import Copy, HostCopier, KVTensors, payload_of
from pykvcache_connector.worker.layout import BlockLayout, BlockRows, split_rows
from pykvcache_contract.header import HEADER_SIZE_BYTES
from pykvcache_contract.units import SECTOR_SIZE_BYTES
from pykvcache_storage.checksum import checksum
from pykvcache_storage.memory import StagingMemory

CPU = torch.device("cpu")

# ---- rows ----


@given(blocks=st.integers(1, 9), first_block=st.integers(0, 40), count=st.integers(1, 60))
def test_every_row_belongs_to_the_block_at_its_position(blocks, first_block, count):
    rows = list(range(1000, 1000 + count))
    keys = (first_block + count - 1) // blocks - first_block // blocks + 1
    parts = split_rows(rows, key_count=keys, first_block=first_block, blocks=blocks)
    assert len(parts) == keys
    assert [row for part in parts for row in part.rows] == rows
    for number, part in enumerate(parts):
        assert part.rows, "no block without rows"
        for page, row in enumerate(part.rows, part.first_page):
            position = first_block + row - 1000
            assert (position // blocks, position % blocks) == (first_block // blocks + number, page)


@given(blocks=st.integers(1, 9), first_block=st.integers(0, 40), count=st.integers(0, 60), keys=st.integers(0, 8))
def test_rows_that_do_not_fit_the_keys_are_our_mistake(blocks, first_block, count, keys):
    room = keys * blocks - first_block % blocks if keys else 0
    if count > room:
        with pytest.raises(ValueError, match="do not fit"):
            split_rows(list(range(count)), key_count=keys, first_block=first_block, blocks=blocks)


def test_rows_may_be_numpy_numbers():
    (part,) = split_rows(np.arange(2, dtype=np.int32), key_count=1, first_block=0, blocks=2)
    assert [type(row) for row in part.rows] == [int, int]


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=5), st.integers(1, 20))
def test_a_layouts_segments_fill_the_payload_without_gaps(pages, blocks):
    layout = BlockLayout(tuple(pages), blocks)
    end = 0
    for (offset, size), page in zip(layout.segments(), pages, strict=True):
        assert (offset, size) == (end, page)
        end += blocks * page
    assert end == layout.used_size_bytes <= layout.payload_size_bytes
    assert layout.payload_size_bytes % SECTOR_SIZE_BYTES == 0
    assert layout.payload_size_bytes - layout.used_size_bytes < SECTOR_SIZE_BYTES
    assert layout.file_size_bytes == layout.payload_size_bytes + HEADER_SIZE_BYTES


# ---- checksum ----


@settings(max_examples=30)
@given(st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_torch_and_numpy_agree_on_every_payload(pages, seed):
    payload = np.random.default_rng(seed).integers(0, 256, pages * SECTOR_SIZE_BYTES, dtype=np.uint8)
    found = Checksum(len(payload), CPU).of(torch.from_numpy(payload))
    assert unsigned(int(found)) == checksum(payload)


@given(used=st.integers(1, 3 * SECTOR_SIZE_BYTES), fill=st.integers(0, 255))
def test_torch_and_numpy_agree_on_padded_payloads(used, fill):
    payload = np.zeros(-(-used // SECTOR_SIZE_BYTES) * SECTOR_SIZE_BYTES, np.uint8)
    payload[:used] = fill
    assert unsigned(int(Checksum(len(payload), CPU).of(torch.from_numpy(payload)))) == checksum(payload)


def test_the_largest_words_wrap_alike():
    payload = np.full(64 * SECTOR_SIZE_BYTES, 255, np.uint8)
    assert unsigned(int(Checksum(len(payload), CPU).of(torch.from_numpy(payload)))) == checksum(payload)


# ---- copies ----


class Bench:
    """A host copier between tensors of pages and two slots."""

    def __init__(self, *, pages: tuple[int, ...], row_sizes: tuple[int, ...], blocks: int = 4, rows: int = 32) -> None:
        self.layout = BlockLayout(pages, blocks)
        generator = torch.Generator().manual_seed(1)
        self.tensors = [
            torch.randint(-128, 128, (rows, size), dtype=torch.int8, generator=generator) for size in row_sizes
        ]
        size = self.layout.file_size_bytes
        self.memory = StagingMemory(slot_size_bytes=size, budget_bytes=2 * size)
        self.copier = HostCopier(KVTensors(self.tensors, self.layout))
        self.results: queue.SimpleQueue[object] = queue.SimpleQueue()

    def copy(self, rows: tuple[int, ...], *, is_store: bool, first_page: int = 0, slot: int = 0, checks=True) -> object:
        part = BlockRows(rows, first_page)
        ready = self.copier.mark()
        self.copier.submit(Copy(self.memory.slots[slot], part, ready, is_store, checks, self.results.put))
        return self.results.get(timeout=60)

    def expected_payload(self, rows: tuple[int, ...]) -> bytes:
        parts = [
            self.tensors[index][row, :page].numpy().tobytes()
            for index, page in enumerate(self.layout.page_sizes_bytes)
            for row in rows
        ]
        return b"".join(parts).ljust(self.layout.payload_size_bytes, b"\0")

    def payload(self, slot: int = 0) -> bytes:
        return bytes(self.memory.slots[slot].data[HEADER_SIZE_BYTES:])


SHAPES = {
    "one tensor, whole rows": ((1024,), (1024,)),
    "several tensors": ((1024, 512, 4096), (1024, 512, 4096)),
    "rows longer than pages": ((1000, 504), (1024, 640)),
    "pages of odd sizes": ((13, 7, 1001), (13, 7, 1001)),
    "odd pages before even ones": ((3, 1024), (3, 1024)),
    "rows of odd sizes": ((1024, 1024), (1031, 1027)),
    "a page of one byte": ((1,), (1,)),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def bench(request):
    pages, row_sizes = request.param
    bench = Bench(pages=pages, row_sizes=row_sizes)
    yield bench
    bench.copier.close()


@pytest.fixture
def small_bench():
    bench = Bench(pages=(1000, 504), row_sizes=(1024, 640))
    yield bench
    bench.copier.close()


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (31, 7, 19, 2)])
def test_a_payload_holds_the_pages_of_each_tensor_in_turn_and_zeros(bench, rows):
    bench.memory.slots[0].data[:] = b"\xee" * len(bench.memory.slots[0].data)
    found = bench.copy(rows, is_store=True)
    assert bench.payload() == bench.expected_payload(rows)
    assert found == checksum(bench.payload())


def test_pages_return_to_other_rows_and_nothing_else_changes(bench):
    bench.copy((5, 6, 7, 8), is_store=True)
    before = [tensor.clone() for tensor in bench.tensors]
    found = bench.copy((20, 4, 30, 11), is_store=False)
    assert found == checksum(bench.payload())
    for tensor, old, page in zip(bench.tensors, before, bench.layout.page_sizes_bytes, strict=True):
        old[[20, 4, 30, 11], :page] = old[[5, 6, 7, 8], :page]
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("first_page", [1, 2, 3])
def test_a_load_may_begin_behind_the_first_page(bench, first_page):
    bench.copy((0, 1, 2, 3), is_store=True)
    rows = (10, 11, 12)[: 4 - first_page]
    before = [tensor.clone() for tensor in bench.tensors]
    found = bench.copy(rows, is_store=False, first_page=first_page)
    assert found == checksum(bench.payload()), "the whole payload is checked"
    for tensor, old, page in zip(bench.tensors, before, bench.layout.page_sizes_bytes, strict=True):
        for row, source in zip(rows, range(first_page, 4), strict=True):
            old[row, :page] = old[source, :page]
        assert torch.equal(tensor, old)


def test_a_load_may_end_before_the_last_page(small_bench):
    small_bench.copy((0, 1, 2, 3), is_store=True)
    small_bench.copy((10, 11), is_store=False, first_page=1)
    assert torch.equal(small_bench.tensors[0][10:12, :1000], small_bench.tensors[0][1:3, :1000])


def test_stale_bytes_of_a_slot_never_leak_into_a_payload(small_bench):
    small_bench.memory.slots[0].data[:] = b"\xff" * len(small_bench.memory.slots[0].data)
    small_bench.copy((0, 1, 2, 3), is_store=True)
    used = small_bench.layout.used_size_bytes
    assert used < small_bench.layout.payload_size_bytes
    assert not any(small_bench.payload()[used:])


def test_a_store_of_less_than_a_block_fails_instead_of_leaking(small_bench):
    assert isinstance(small_bench.copy((0, 1, 2), is_store=True), ValueError)
    assert small_bench.copy((0, 1, 2, 3), is_store=True) == checksum(small_bench.payload())


def test_a_copy_that_fails_hands_over_its_error_and_the_next_one_runs(small_bench):
    assert isinstance(small_bench.copy((0, 1, 2, 999), is_store=True), Exception)
    assert isinstance(small_bench.copy((0, 1, 2, 3), is_store=True), int)


def test_without_a_wish_for_a_checksum_none_is_computed(small_bench):
    assert small_bench.copy((0, 1, 2, 3), is_store=True, checks=False) == 0


def test_a_payload_is_the_slots_own_memory(small_bench):
    slot = small_bench.memory.slots[1]
    payload_of(slot)[0] = 77
    assert slot.data[HEADER_SIZE_BYTES] == 77


def test_slots_do_not_touch_each_other(small_bench):
    small_bench.copy((0, 1, 2, 3), is_store=True, slot=0)
    first = small_bench.payload(0)
    small_bench.copy((4, 5, 6, 7), is_store=True, slot=1)
    assert small_bench.payload(0) == first


def test_what_a_gpu_gathers_and_scatters_is_what_the_host_does(bench):
    """The same functions of torch, on the CPU."""
    tensors = KVTensors(bench.tensors, bench.layout)
    payload = torch.zeros(bench.layout.payload_size_bytes, dtype=torch.uint8)
    tensors.gather(torch.tensor([5, 2, 9, 4]), payload)
    assert bytes(payload.numpy()) == bench.expected_payload((5, 2, 9, 4))
    tensors.scatter(torch.tensor([20, 21]), 1, payload)
    assert bench.expected_payload((20, 21)) == bench.expected_payload((2, 9))
    with pytest.raises(ValueError, match="no whole offloaded block"):
        tensors.gather(torch.tensor([5, 2, 9]), payload)


def test_copies_on_the_host_start_no_threads_that_would_fight_with_vllms():
    bench = Bench(pages=(1 << 20,), row_sizes=(1 << 20,))
    before = set(os.listdir("/proc/self/task"))
    bench.copy((0, 1, 2, 3), is_store=True)
    bench.copy((4, 5, 6, 7), is_store=False)
    assert set(os.listdir("/proc/self/task")) - before == set(), "threads of others may end meanwhile"
    bench.copier.close()
