"""How fast the sidecar scans and evicts in a large pool, and how much memory that takes.

    python -m pykvcache_bench.eviction --directory DIR [--files 1000000]

Makes files of the real names and sizes without content, last used at random over two weeks, in a new pool below
`--directory`; then starts a real `pykvcache-sidecar run` whose watermarks demand that a tenth of them leaves, and reads
what it did from its /metrics and from the kernel. The ledger says from the start how full the pool is, so room is
needed at once and nothing is paced. The scrubber is off, because these files hold no blocks. All files are removed.

Exits with 1 if another share than a tenth was evicted, or (`--check-order`) a block used later than one that stayed.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pykvcache_bench.files import make_blocks
from pykvcache_bench.processes import Served, sidecar
from pykvcache_contract.keys import Fingerprint, fingerprint_of
from pykvcache_contract.metrics import EVICTED_BLOCKS, SCAN_DURATION, SCAN_FILES
from pykvcache_storage.inventory import iterate_blocks
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import UsageLedger

HIGH, LOW = 0.95, 0.90
FILE_SIZE_BYTES = 16 << 10
"""Small, because the files have no content: the sidecar would believe the disk too small for large ones."""
USED_DAYS = 13.0
"""Younger than what the sidecar drops as unused, which is another reason to evict."""
SHARE_TOLERANCE = 0.01
POLL_SECONDS = 0.05
REST_SECONDS = 5.0
"""Several rounds of the sidecar, and longer than it takes to begin another scan."""


def main() -> int:
    """Make the files, let the sidecar work, print one JSON object, and remove the files."""
    options = _parser().parse_args()
    directory = tempfile.mkdtemp(prefix="eviction-", dir=options.directory)
    try:
        pool = os.path.join(directory, "pool")
        fingerprint = _make_pool(pool)
        make_seconds = make_blocks(pool, fingerprint, options.files, size_bytes=FILE_SIZE_BYTES, days=USED_DAYS)
        print(f"{options.files} files made in {make_seconds:.0f} s", file=sys.stderr, flush=True)
        UsageLedger(pool).recount(lambda: options.files * FILE_SIZE_BYTES)
        result = {"files": options.files, "make_seconds": round(make_seconds, 1)}
        before = _uses(pool) if options.check_order else set()
        result |= _evict(pool, options, log=Path(directory, "sidecar.log"))
        wrong = _out_of_order(before, _uses(pool)) if options.check_order else 0
        result |= {"evicted_out_of_order": wrong} if options.check_order else {}
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(result, indent=2))
    off = abs(result["evicted_blocks"] / options.files - (1 - LOW)) > SHARE_TOLERANCE
    return int(off or wrong > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000, help="how many block files (default: a million)")
    parser.add_argument("--directory", required=True, help="where to make them; needs 4 KiB and two inodes a file")
    parser.add_argument("--policy", default="lru", help="of the sidecar")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="for scan and eviction")
    parser.add_argument(
        "--check-order", action="store_true", help="also walk the pool before and after: were the oldest evicted?"
    )
    return parser


def _make_pool(pool: str) -> Fingerprint:
    identity: dict[str, object] = {"engine": {"model": "eviction"}}
    fingerprint = fingerprint_of(identity)
    os.mkdir(pool)
    open_pool(pool, create=True).prepare_fingerprint(fingerprint, identity)
    return fingerprint


# ---- the sidecar's work ----


def _evict(pool: str, options: argparse.Namespace, *, log: Path) -> dict[str, Any]:
    """Run the sidecar until a tenth of the files is gone."""
    flags = ("--high", str(HIGH), "--low", str(LOW), "--scrub-rate", "0", "--policy", options.policy)
    goal = options.files * (1 - LOW) * (1 - SHARE_TOLERANCE)
    with sidecar(pool, options.files * FILE_SIZE_BYTES, *flags, log=log) as process:
        # The first scan's seconds: where a batch of candidates is too small, there is a second one.
        _, scanned = _when(process, SCAN_FILES.name, 1, options)
        began, first = _when(process, EVICTED_BLOCKS.name, 1, options)
        middle, half = _when(process, EVICTED_BLOCKS.name, goal / 2, options)
        ended, _ = _when(process, EVICTED_BLOCKS.name, goal, options)
        evicted = _at_rest(process, EVICTED_BLOCKS.name)
        resident = process.resident_bytes_max()
    scan_seconds = scanned[SCAN_DURATION.name]
    in_half = half[EVICTED_BLOCKS.name] - first[EVICTED_BLOCKS.name]
    return {
        "scan_seconds": round(scan_seconds, 2),
        "scan_files_per_second": round(scanned[SCAN_FILES.name] / max(scan_seconds, 1e-9)),
        "evicted_blocks": int(evicted),
        "evict_blocks_per_second": round(in_half / (middle - began)) if in_half else None,
        "evict_seconds": round(ended - began, 2),
        "resident_mib_peak": round(resident / 2**20, 1),
    }


def _when(process: Served, name: str, value: float, options: argparse.Namespace) -> tuple[float, dict[str, float]]:
    """Return when a metric was first seen at or above a value, and all metrics then."""
    deadline = time.monotonic() + options.timeout
    while (found := process.metrics())[name] < value:
        if time.monotonic() > deadline:
            sys.exit(f"{name} was {found[name]}, not {value}, after {options.timeout} s:\n{process.log_tail()}")
        time.sleep(POLL_SECONDS)
    return time.perf_counter(), found


def _at_rest(process: Served, name: str) -> float:
    """Return a metric once it has not changed for some rounds of the sidecar: a sidecar that goes on is seen."""
    value, since = -1.0, time.monotonic()
    while time.monotonic() - since < REST_SECONDS:
        if (found := process.metrics()[name]) != value:
            value, since = found, time.monotonic()
        time.sleep(POLL_SECONDS)
    return value


# ---- the order ----


def _uses(pool: str) -> set[tuple[float, str]]:
    return {(file.modified_seconds, file.path) for file in iterate_blocks(pool)}


def _out_of_order(before: set[tuple[float, str]], after: set[tuple[float, str]]) -> int:
    """Return how many blocks were evicted although their last use is later than the oldest that stayed."""
    oldest = min(after)
    return sum(use > oldest for use in before - after)


if __name__ == "__main__":
    sys.exit(main())
