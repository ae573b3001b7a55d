"""What storing costs: the wall time of prompts never seen before, with and without the connector.

    python -m pykvcache_bench.store_overhead --directory POOL_PARENT [--model DIR]

Two vLLM processes with equal settings live at the same time, one of them with the connector and a new, empty pool. They
take turns, in the order A B B A, with equal batches of fresh random prompts; the other one idles meanwhile. So slow
minutes of the machine hit both, and each pair gives one ratio. Before the turn changes, the first one's stores have
ended, outside of the measured time.

Two processes with equal settings differ by up to 3 % for as long as they live, the later one being slower, whatever
they do. So both are started anew for every session, in turn the one and the other first, and the result is the
geometric mean of the sessions' medians. `--null` leaves the connector out of both: the spread of nothing.

What matters is how many bytes of KV a unit of computing makes. Without `--model` it is a Llama of 120 million
parameters with random weights: 34 bytes per million floating-point operations, twice those of Llama-3.2-3B in 16 bits,
on processors that compute and store. The tests' tiny model (1400 bytes) shows the worst case.
Exits with 1 if a block was not stored, because the ratio would then mean nothing.
"""

import argparse
import json
import os
import statistics
import sys
from typing import Any

from pykvcache_bench.turns import Child, add_engine_options, blocks_of_batch, folders, summarise


def main() -> int:
    """Measure and print; return the exit status."""
    options = _parser().parse_args()
    with folders(options, "store-overhead") as directory:
        sessions = [_session(options, directory, number) for number in range(options.sessions)]
    result = {
        "ratio": round(statistics.geometric_mean(session["ratio_median"] for session in sessions), 4),
        "sessions": sessions,
        "store_blocks": sum(session["store_blocks"] for session in sessions),
        # The first batch of each child warms it up, and is stored too.
        "blocks_expected": 0 if options.null else options.sessions * (options.pairs + 1) * blocks_of_batch(options),
    }
    print(json.dumps(result, indent=2))
    return 0 if result["store_blocks"] == result["blocks_expected"] else 1


def _session(options: argparse.Namespace, directory: str, number: int) -> dict[str, Any]:
    """Return the ratios of two new processes, and what was stored."""
    pool = os.path.join(directory, str(number))
    os.mkdir(pool)
    pools = {"plain": None, "stored": None if options.null else pool}
    names = list(pools) if number % 2 == 0 else list(pools)[::-1]
    children = {name: Child(options, name, pool=pools[name]) for name in names}
    ratios, seconds = _measure(options, children["plain"], children["stored"])
    counts = children["stored"].ask("counts")
    for child in children.values():
        child.end()
    return {"first": names[0], **summarise(options, ratios, seconds), **counts}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--sessions", type=int, default=4, help="pairs of processes (default: 4)")
    parser.set_defaults(pairs=8)
    parser.add_argument("--null", action="store_true", help="no connector in either: measures the noise")
    return parser


def _measure(options: argparse.Namespace, plain: Child, stored: Child) -> tuple[list[float], list[float]]:
    """Return the ratios, and the seconds of a batch without the connector."""
    for child in (plain, stored):
        child.ask("run", batch=-1)
    ratios, plain_seconds = [], []
    for pair in range(options.pairs):
        order = (plain, stored) if pair % 2 == 0 else (stored, plain)
        seconds = {child: child.ask("run", batch=pair) for child in order}
        ratios.append(seconds[stored] / seconds[plain])
        plain_seconds.append(seconds[plain])
        print(f"pair {pair + 1}: {seconds[plain]:.3f} s and {seconds[stored]:.3f} s", file=sys.stderr, flush=True)
    return ratios, plain_seconds


if __name__ == "__main__":
    sys.exit(main())
