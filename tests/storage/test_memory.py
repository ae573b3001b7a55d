"""Staging memory: exact slots, a hard cap, huge pages."""

import ctypes
import gc
import mmap
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvcache_contract.errors import ConfigurationError
from pykvcache_contract.units import HUGE_PAGE_SIZE_BYTES, SECTOR_SIZE_BYTES
from pykvcache_storage.memory import MIN_SLOTS, StagingMemory, smallest_budget

MIB = 1 << 20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def mapping_at(address: int) -> tuple[int, str]:
    """Return the size of the mapping around an address and what the kernel tells of it."""
    text = Path("/proc/self/smaps").read_text()
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        first, last = (int(number, 16) for number in part.split(" ")[0].split("-"))
        if first <= address < last:
            return last - first, part
    raise AssertionError("no such mapping")


@given(sectors=st.integers(1, 2000), budget=st.integers(0, 64 * MIB))
def test_slots_are_exact_aligned_and_within_the_budget(sectors, budget):
    size = sectors * SECTOR_SIZE_BYTES
    if budget < smallest_budget(size):
        with pytest.raises(ConfigurationError):
            StagingMemory(slot_size_bytes=size, budget_bytes=budget)
        return
    memory = StagingMemory(slot_size_bytes=size, budget_bytes=budget)
    assert memory.size_bytes <= budget < memory.size_bytes + size
    assert memory.address % HUGE_PAGE_SIZE_BYTES == 0
    for index, slot in enumerate(memory.slots):
        assert (slot.index, slot.address, len(slot.data)) == (index, memory.address + index * size, size)
        assert slot.address % SECTOR_SIZE_BYTES == 0


def test_a_slots_view_and_its_address_are_the_same_memory():
    memory = StagingMemory(slot_size_bytes=SECTOR_SIZE_BYTES, budget_bytes=3 * SECTOR_SIZE_BYTES)
    for slot in memory.slots:
        slot.data[:] = bytes([slot.index + 1]) * SECTOR_SIZE_BYTES
    for slot in memory.slots:
        assert ctypes.string_at(slot.address, SECTOR_SIZE_BYTES) == bytes([slot.index + 1]) * SECTOR_SIZE_BYTES


def test_the_memory_lives_as_long_as_a_slot():
    slot = StagingMemory(slot_size_bytes=SECTOR_SIZE_BYTES, budget_bytes=3 * SECTOR_SIZE_BYTES).slots[2]
    gc.collect()
    slot.data[:4] = b"here"
    assert ctypes.string_at(slot.address, 4) == b"here"


def test_too_small_a_budget_names_the_smallest_that_works():
    with pytest.raises(ConfigurationError, match=str(2 * 28 * MIB)):
        StagingMemory(slot_size_bytes=28 * MIB, budget_bytes=2 * 28 * MIB - 1)
    assert len(StagingMemory(slot_size_bytes=28 * MIB, budget_bytes=2 * 28 * MIB).slots) == MIN_SLOTS


@pytest.mark.parametrize("size", [0, -4096, 1, 4095, 4097])
def test_a_slot_that_is_no_multiple_of_a_sector_is_a_programmers_error(size):
    with pytest.raises(ValueError, match="4096"):
        StagingMemory(slot_size_bytes=size, budget_bytes=MIB)


def huge_bytes(told: str) -> int:
    return int(re.search(r"^AnonHugePages:\s+(\d+) kB", told, re.MULTILINE)[1]) * 1024


def huge_bytes_now(size: int) -> int:
    """Return how much of an ordinary mapping of so many bytes the kernel puts on huge pages now."""
    with mmap.mmap(-1, size + 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        mapping[:: mmap.PAGESIZE] = bytes(len(mapping) // mmap.PAGESIZE)
        view = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        _, told = mapping_at(ctypes.addressof(view))
        del view
        return huge_bytes(told)


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="transparent huge pages are off"
)
def test_touched_slots_lie_on_private_huge_pages():
    memory = StagingMemory(slot_size_bytes=4 * MIB, budget_bytes=16 * MIB)
    assert memory.huge_pages
    for slot in memory.slots:
        slot.data[:: mmap.PAGESIZE] = bytes(len(slot.data) // mmap.PAGESIZE)
    size, told = mapping_at(memory.address)
    assert size >= memory.size_bytes
    assert re.search(r"^VmFlags:.* hg\b", told, re.MULTILINE)
    assert re.search(r"^THPeligible:\s+1$", told, re.MULTILINE)
    # The kernel may lack free huge pages: most must be huge, or as many as anybody gets at this moment.
    assert huge_bytes(told) >= min(memory.size_bytes, huge_bytes_now(memory.size_bytes)) // 2
