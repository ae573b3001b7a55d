"""What the care of a pool costs vLLM: the wall time of prompts with the sidecar evicting and scrubbing, and without.

    python -m pykvcache_bench.care_overhead --directory POOL_PARENT [--model DIR]

One vLLM engine with the connector runs batches of fresh random prompts of equal length, in the order A B B A, one of
each pair beside a `pykvcache-sidecar run`. The sidecar is started before its turn and ended after it: stopped by a
signal it could hold the lock of the pool's ledger, and a store would wait for it. Its turn begins when it has scanned
the pool and evicted what the turns before left; from then on it evicts about as much as vLLM stores, because its high
watermark lies just above its low one, and scrubs at `--scrub-rate`. The pool is first filled to the high watermark with
good blocks older than vLLM's. `--null` starts no sidecar in either turn: the spread of nothing.

Exits with 1 if the throughput with care is below 97 % of that without (but not with `--null`), if the sidecar evicted
or scrubbed nothing in its turns or called a block damaged, or if a block was not stored.
"""

import argparse
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from pykvcache_bench.files import write_block
from pykvcache_bench.processes import Served, sidecar
from pykvcache_bench.turns import Child, add_engine_options, blocks_of_batch, folders, summarise
from pykvcache_contract.keys import fingerprint_of
from pykvcache_contract.names import POOL_METRIC_PREFIX
from pykvcache_storage.inventory import count_bytes
from pykvcache_storage.pool import open_pool
from pykvcache_storage.usage import UsageLedger

GOAL = 0.97
CAPACITY_BATCHES = 40
"""The pool holds so many batches: what two turns without care store does not reach the capacity from the watermark."""
HIGH, LOW = 0.90, 0.89
FILLER_SIZE_BYTES = 512 << 10
FILLER_AGE_SECONDS = 3600.0
COUNTS = ("evicted_blocks_total", "evicted_bytes_total", "scrubbed_blocks_total", "scrubbed_bytes_total")
DAMAGED = "damaged_blocks_total"


def main() -> int:
    """Measure and print; return the exit status."""
    options = _parser().parse_args()
    with folders(options, "care-overhead") as pool:
        child = Child(options, "care-overhead", pool=pool)
        child.ask("run", batch=-1)
        capacity = CAPACITY_BATCHES * int(child.ask("counts")["store_bytes"])
        blocks = fill(pool, int(capacity * HIGH))
        print(f"{blocks} older blocks made, capacity {capacity} bytes", file=sys.stderr, flush=True)
        ratios, seconds, care = _measure(options, child, Care(options, pool, capacity))
        stored = child.ask("counts")["store_blocks"]
        child.end()
    result = _result(options, ratios, seconds) | care
    result |= {"store_blocks": stored, "blocks_expected": (2 * options.pairs + 1) * blocks_of_batch(options)}
    print(json.dumps(result, indent=2))
    failures = _failures(options, result)
    for failure in failures:
        print(f"FAILED: {failure}")
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--scrub-rate", default="8MiB", help="of the sidecar, per second")
    parser.add_argument("--interval", default="1.0", help="of the sidecar, in seconds")
    parser.add_argument("--null", action="store_true", help="no sidecar in either turn: measures the noise")
    return parser


def _measure(
    options: argparse.Namespace, child: Child, care: "Care"
) -> tuple[list[float], list[float], dict[str, float]]:
    """Return the ratios of the seconds with care to those without, the seconds without, and what care did."""
    ratios, plain_seconds = [], []
    for pair in range(options.pairs):
        seconds = {}
        for is_cared in (False, True) if pair % 2 == 0 else (True, False):
            with care.turn() if is_cared and not options.null else contextlib.nullcontext():
                seconds[is_cared] = child.ask("run", batch=2 * pair + is_cared)
        ratios.append(seconds[True] / seconds[False])
        plain_seconds.append(seconds[False])
        print(f"pair {pair + 1}: {seconds[False]:.3f} s and {seconds[True]:.3f} s", file=sys.stderr, flush=True)
    return ratios, plain_seconds, care.counts


def _result(options: argparse.Namespace, ratios: list[float], seconds: list[float]) -> dict[str, Any]:
    summary = summarise(options, ratios, seconds)
    return {"throughput_with_care": round(1 / summary["ratio_median"], 4), **summary}


def _failures(options: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    wrong = []
    if result["store_blocks"] != result["blocks_expected"]:
        wrong.append("not every block was stored, so the ratio means little")
    if options.null:
        return wrong
    if result["throughput_with_care"] < GOAL:
        wrong.append(f"throughput with care {result['throughput_with_care']:.1%} of that without, goal {GOAL:.0%}")
    wrong += [f"{name} is 0: the sidecar did not work" for name in COUNTS if not result[name]]
    if result[DAMAGED]:
        wrong.append(f"{result[DAMAGED]:.0f} blocks were called damaged")
    return wrong


class Care:
    """The sidecar's turns.

    Attributes:
        counts: what it did while it was measured, over all turns, and the processor time that took.
    """

    def __init__(self, options: argparse.Namespace, pool: str, capacity_bytes: int) -> None:
        self.counts = dict.fromkeys((*COUNTS, DAMAGED, "processor_seconds", "turn_seconds"), 0.0)
        self._pool = pool
        self._capacity_bytes = capacity_bytes
        self._log = Path(options.directory, f"{Path(pool).name}-sidecar.log")
        watermarks = ("--high", str(HIGH), "--low", str(LOW))
        self._flags = (*watermarks, "--scrub-rate", options.scrub_rate, "--interval", options.interval)

    @contextlib.contextmanager
    def turn(self) -> Any:
        """Start a sidecar, begin when it has done the work left over, end it afterwards."""
        with sidecar(self._pool, self._capacity_bytes, *self._flags, log=self._log) as process:
            process.wait_for(lambda: self._is_up_to_date(process), "scan and evict", seconds_max=60.0)
            before, began = self._counts(process), time.perf_counter()
            yield
            seconds, after = time.perf_counter() - began, self._counts(process)
        self.counts["turn_seconds"] += seconds
        for name in before:
            self.counts[name] += after[name] - before[name]
        self._log.unlink()

    def _counts(self, process: Served) -> dict[str, float]:
        found = pool_metrics(process) | {"processor_seconds": process.processor_seconds()}
        return {name: found[name] for name in (*COUNTS, DAMAGED, "processor_seconds")}

    def _is_up_to_date(self, process: Served) -> bool:
        found = pool_metrics(process)
        return bool(found["active"] and found["scan_files"] and found["used_bytes"] <= HIGH * self._capacity_bytes)


def pool_metrics(process: Served) -> dict[str, float]:
    """Return the sidecar's samples, summed over labels, by their names without the prefix."""
    return {name.removeprefix(POOL_METRIC_PREFIX): value for name, value in process.metrics().items()}


def fill(pool: str, size_bytes: int) -> int:
    """Fill a pool with good blocks of another fingerprint, older than vLLM's, up to a size; return how many."""
    identity: dict[str, object] = {"engine": {"model": "care-overhead"}}
    fingerprint = fingerprint_of(identity)
    open_pool(pool, create=True).prepare_fingerprint(fingerprint, identity)
    source, used = random.Random(5), time.time() - FILLER_AGE_SECONDS
    count = max(0, size_bytes - count_bytes(pool)) // FILLER_SIZE_BYTES
    for number in range(count):
        write_block(pool, fingerprint, source, size_bytes=FILLER_SIZE_BYTES, used_seconds=used + number / 1000)
    UsageLedger(pool).recount(lambda: count_bytes(pool))
    return count


if __name__ == "__main__":
    sys.exit(main())
