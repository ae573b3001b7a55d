"""Damage is found before a request finds it; an error of reading proves nothing."""

import os

import pytest

from pykvcache_contract.errors import TransientError
from pykvcache_contract.paths import quarantine_path
from pykvcache_sidecar import scrubber
from pykvcache_sidecar.book import Book
from pykvcache_sidecar.scrubber import Scrubber
from pykvcache_storage.inventory import count_bytes
from pykvcache_storage.removal import Removed, Remover


def flip_a_bit(path, *, offset=9000):
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


@pytest.fixture
def scrub(pool, make_settings):
    """A scrubber that was not started, so fast that it never rests, and its book."""
    book = Book(make_settings())
    made = Scrubber(
        pool_directory=str(pool.directory),
        remover=Remover(str(pool.directory), pool.ledger),
        book=book,
        bytes_per_second=10**12,
    )
    return made, book


def test_a_flipped_bit_is_found_and_moved_aside_and_nothing_else_is(pool, scrub):
    paths = pool.fill(20)
    flip_a_bit(paths[7])
    scrub[0].scrub_once()
    now = scrub[1].snapshot()
    assert (now.scrubbed_blocks, now.damaged_blocks) == (20, 1)
    assert now.scrubbed_bytes == 20 * pool.block_bytes
    assert [number for number, path in enumerate(paths) if not path.exists()] == [7]
    assert (pool.directory / quarantine_path(pool.key(7))).stat().st_size == pool.block_bytes
    assert pool.ledger.used_bytes() == count_bytes(str(pool.directory))


@pytest.mark.parametrize(
    ("outcome", "damaged"), [(Removed.REMOVED, 1), (Removed.FAILED, 1), (Removed.USED, 0), (Removed.GONE, 0)]
)
def test_a_damaged_block_counts_also_where_it_cannot_be_moved(pool, scrub, monkeypatch, caplog, outcome, damaged):
    paths = pool.fill(3)
    flip_a_bit(paths[1])
    monkeypatch.setattr(Remover, "quarantine", lambda *_: outcome)
    scrub[0].scrub_once()
    now = scrub[1].snapshot()
    assert (now.scrubbed_blocks, now.damaged_blocks) == (3, damaged)
    assert ("could not be moved" in caplog.text) == (outcome is Removed.FAILED)


@pytest.mark.parametrize("damage", ["truncated", "empty", "header"])
def test_every_kind_of_damage_is_found(pool, scrub, damage):
    (path,) = pool.fill(1)
    if damage == "header":
        flip_a_bit(path, offset=50)
    else:
        os.truncate(path, 0 if damage == "empty" else 8192)
    scrub[0].scrub_once()
    assert scrub[1].snapshot().damaged_blocks == 1
    assert not path.exists()


def test_an_error_of_reading_proves_nothing(pool, scrub, monkeypatch):
    paths = pool.fill(5)

    def fail(*_):
        raise TransientError("input/output error")

    monkeypatch.setattr(scrubber, "verify_block", fail)
    scrub[0].scrub_once()
    now = scrub[1].snapshot()
    assert (now.scrubbed_blocks, now.damaged_blocks) == (0, 0)
    assert all(path.exists() for path in paths)


def test_blocks_that_cannot_be_verified_are_passed_over(pool, make_pool, scrub):
    paths = pool.fill(3)
    flip_a_bit(paths[0])
    (pool.directory / pool.fingerprint[:12] / "config.json").unlink()
    other = make_pool(pool.directory, {"engine": {"model": "test/other"}})
    other.write(1)
    scrub[0].scrub_once()
    assert scrub[1].snapshot().scrubbed_blocks == 1
    assert paths[0].exists()


def test_a_rate_of_zero_scrubs_nothing(pool, make_settings):
    remover = Remover(str(pool.directory), pool.ledger)
    book = Book(make_settings())
    off = Scrubber(pool_directory=str(pool.directory), remover=remover, book=book, bytes_per_second=0)
    off.start()
    off.stop(1.0)
    assert book.snapshot().scrubbed_blocks == 0


def test_it_ends_while_it_waits_for_bytes_to_be_paid_for(pool, make_settings, wait_for):
    pool.fill(5)
    book = Book(make_settings())
    remover = Remover(str(pool.directory), pool.ledger)
    slow = Scrubber(pool_directory=str(pool.directory), remover=remover, book=book, bytes_per_second=1)
    slow.start()
    wait_for(lambda: book.snapshot().scrubbed_blocks == 1)
    slow.stop(60.0)
    assert not slow._thread.is_alive()
    assert book.snapshot().scrubbed_blocks == 1
