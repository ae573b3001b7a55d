"""How long a scan of a large pool takes, and how much memory: `python -m pykvcache_bench.inventory --help`.

Makes files of the real names and sizes without content in a new folder below `--directory`, scans them, removes them.
The fan-out gives nearly every block a folder of its own, so folders, not files, decide the time.
"""

import argparse
import json
import resource
import shutil
import sys
import tempfile
import time

from pykvcache_bench.files import make_blocks
from pykvcache_contract.keys import fingerprint_of
from pykvcache_storage.inventory import count_bytes_in_steps, summarise_in_steps


def main() -> int:
    """Make, scan and remove the files; print one JSON object."""
    arguments = _parser().parse_args()
    pool = tempfile.mkdtemp(prefix="inventory-", dir=arguments.directory)
    try:
        make_seconds = make_blocks(pool, fingerprint_of({"model": "inventory"}), arguments.files)
        before = _resident_mib()
        summary, cold = _timed_summary(pool)
        count_seconds, longest_step = _timed_count(pool)
        result = {
            "files": summary,
            "make_seconds": round(make_seconds, 2),
            "summarise_seconds": round(cold, 2),
            "count_bytes_seconds": round(count_seconds, 2),
            "longest_step_ms": round(longest_step * 1000, 1),
            "resident_mib_before": round(before, 1),
            "resident_mib_peak": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }
        print(json.dumps(result, indent=2))
    finally:
        shutil.rmtree(pool, ignore_errors=True)
    return 0 if summary == arguments.files else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pykvcache_bench.inventory", description=__doc__)
    parser.add_argument("--files", type=int, default=1_000_000, help="how many block files (default: a million)")
    parser.add_argument("--directory", required=True, help="where to make them; needs 4 KiB per file and free inodes")
    return parser


def _timed_summary(pool: str) -> tuple[int, float]:
    start = time.perf_counter()
    steps = summarise_in_steps(pool)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return sum(summary.blocks.count for summary in stop.value), time.perf_counter() - start


def _timed_count(pool: str) -> tuple[float, float]:
    """Return the seconds of a whole count and of its longest step."""
    start = last = time.perf_counter()
    longest = 0.0
    for _ in count_bytes_in_steps(pool):
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return time.perf_counter() - start, longest


def _resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


if __name__ == "__main__":
    sys.exit(main())
