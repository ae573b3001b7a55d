"""Eviction policies on traces of several kinds: hit rates and work saved, as `pykvcache-sidecar simulate` tells them.

    python -m pykvcache_bench.policies [--requests 40000] [--shares 0.05 0.2 0.5] [--seed 1] [--keep DIR]

The traces are made here. One request a second; blocks of 256 tokens; the models have the shapes of Llama 3 8B (small,
32 MiB a block) and 70B (large, 80 MiB, on four GPUs).

Chats: conversations whose popularity follows Zipf's law; each request repeats the history and adds 1 to 4 blocks, and a
new conversation begins after 96. Prompts: 50 system prompts of 8 to 96 blocks, some much more popular than others, and
1 to 4 blocks that nobody wants again. Scans: documents of 32 to 192 blocks that nobody wants again. Mixed kinds give
the share of requests of each part.

A pool's size is a share of all distinct blocks of its trace. `--keep` leaves traces and the models' descriptions there,
to try other settings by hand.
"""

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

POLICIES = ("lru", "cost")
BLOCK_TOKENS = 256
PAGE_TOKENS = 16
CONVERSATIONS = 2000
HISTORY_BLOCKS_MAX = 96
FIRST_SECONDS = 1_764_500_000.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model's shape; all have 8 KV heads of 128 and 16-bit values.

    Args:
        folder: first digits of its fingerprint.
    """

    folder: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    ranks: int

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block, all ranks together."""
        return BLOCK_TOKENS * self.layers * 2 * 8 * 128 * 2

    def describe(self) -> dict[str, Any]:
        """Return a config.json as the connector writes it, as far as costs need it."""
        model = {"hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads}
        model |= {"num_key_value_heads": 8, "intermediate_size": self.intermediate}
        page = self.block_bytes * PAGE_TOKENS // BLOCK_TOKENS // self.ranks // self.layers
        return {
            "identity": {
                "engine": {"hf_config": {k: repr(v) for k, v in model.items()}, "tensor_parallel": self.ranks},
                "layout": {"page_sizes_bytes": [page] * self.layers, "gpu_blocks": BLOCK_TOKENS // PAGE_TOKENS},
                "hashing": {"block_tokens": BLOCK_TOKENS},
            }
        }


SMALL = Model("5a5a5a5a5a5a", layers=32, hidden=4096, heads=32, intermediate=14336, ranks=1)
LARGE = Model("1a1a1a1a1a1a", layers=80, hidden=8192, heads=64, intermediate=28672, ranks=4)


class Blocks:
    """Makes block hashes and counts their bytes."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.made_bytes = 0

    def make(self, count: int, model: Model) -> list[str]:
        """Return new blocks."""
        self.made_bytes += count * model.block_bytes
        return [f"{self._rng.getrandbits(64):016x}" for _ in range(count)]


class Source(Protocol):
    """One kind of requests."""

    def next(self) -> list[str]:
        """Return the blocks of the next request, head first."""
        ...


class Zipf:
    """Chooses numbers below `count`, number n with a weight of 1 / (n + 1)."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self._rng = rng
        self._numbers = range(count)
        self._weights = list(itertools.accumulate(1 / (number + 1) for number in self._numbers))

    def choose(self) -> int:
        """Return one number."""
        return self._rng.choices(self._numbers, cum_weights=self._weights)[0]


class Chats:
    """Conversations with growing histories."""

    def __init__(self, rng: random.Random, blocks: Blocks, model: Model) -> None:
        self._rng, self._blocks, self._model = rng, blocks, model
        self._who = Zipf(rng, CONVERSATIONS)
        self._histories: dict[int, list[str]] = {}

    def next(self) -> list[str]:
        """Return a history with a new turn."""
        history = self._histories.setdefault(self._who.choose(), [])
        if len(history) > HISTORY_BLOCKS_MAX:
            history.clear()
        history += self._blocks.make(self._rng.randint(1, 4), self._model)
        return history


class Prompts:
    """System prompts that many requests share."""

    def __init__(self, rng: random.Random, blocks: Blocks, model: Model) -> None:
        self._rng, self._blocks, self._model = rng, blocks, model
        self._which = Zipf(rng, 50)
        self._prompts: dict[int, list[str]] = {}

    def next(self) -> list[str]:
        """Return a system prompt and something of its own."""
        number = self._which.choose()
        if number not in self._prompts:
            self._prompts[number] = self._blocks.make(self._rng.randint(8, 96), self._model)
        return self._prompts[number] + self._blocks.make(self._rng.randint(1, 4), self._model)


class Scans:
    """Documents that are read once."""

    def __init__(self, rng: random.Random, blocks: Blocks, model: Model) -> None:
        self._rng, self._blocks, self._model = rng, blocks, model

    def next(self) -> list[str]:
        """Return a new document."""
        return self._blocks.make(self._rng.randint(32, 192), self._model)


Part = tuple[int, Callable[[random.Random, Blocks, Model], Source], Model]
KINDS: dict[str, list[Part]] = {
    "chats": [(1, Chats, SMALL)],
    "prompts": [(1, Prompts, SMALL)],
    "chats 80, scans 20": [(80, Chats, SMALL), (20, Scans, SMALL)],
    "small chats 50, large chats 50": [(50, Chats, SMALL), (50, Chats, LARGE)],
    "small chats 80, large chats 20": [(80, Chats, SMALL), (20, Chats, LARGE)],
    "small chats 20, large chats 80": [(20, Chats, SMALL), (80, Chats, LARGE)],
    "small scans 20, large chats 80": [(20, Scans, SMALL), (80, Chats, LARGE)],
    "small chats 80, large scans 20": [(80, Chats, SMALL), (20, Scans, LARGE)],
    "small prompts 80, large chats 20": [(80, Prompts, SMALL), (20, Chats, LARGE)],
}


def main() -> int:
    """Make the traces, simulate, and print a table."""
    options = _parser().parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        pool = make_pool(folder / "pool")
        print(_row("requests", "pool", *(f"hits {name}" for name in POLICIES), "no bounds", *POLICIES, "no bounds"))
        for kind, parts in KINDS.items():
            trace = folder / f"{kind.replace(', ', '-').replace(' ', '-')}.jsonl"
            distinct_bytes = write_trace(trace, parts, count=options.requests, seed=options.seed)
            for line in simulate(trace, pool, [int(share * distinct_bytes) for share in options.shares]):
                print(_row(kind, *line), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pykvcache_bench.policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=40_000, help="of each trace (default: 40000)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.2, 0.5], help="of all distinct blocks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", help="folder for traces; without it they are removed")
    return parser


def make_pool(folder: Path) -> Path:
    """Write the descriptions of the models, as a pool has them."""
    for model in (SMALL, LARGE):
        (folder / model.folder).mkdir(parents=True, exist_ok=True)
        (folder / model.folder / "config.json").write_text(json.dumps(model.describe(), indent=2))
    return folder


def write_trace(path: Path, parts: list[Part], *, count: int, seed: int) -> int:
    """Write a trace of so many requests and return the bytes of all distinct blocks."""
    rng = random.Random(seed)
    blocks = Blocks(rng)
    with path.open("w") as file:
        for line in _lines(rng, blocks, parts, count):
            file.write(json.dumps(line) + "\n")
    return blocks.made_bytes


def _lines(rng: random.Random, blocks: Blocks, parts: list[Part], count: int) -> Iterator[dict[str, Any]]:
    sources = [(make(rng, blocks, model), model) for _, make, model in parts]
    seconds = FIRST_SECONDS
    for _ in range(count):
        seconds += rng.expovariate(1.0)
        source, model = rng.choices(sources, [weight for weight, _, _ in parts])[0]
        yield {
            "seconds": seconds,
            "fingerprint": model.folder,
            "tokens_per_block": BLOCK_TOKENS,
            "block_bytes": model.block_bytes,
            "blocks": source.next(),
        }


def simulate(trace: Path, pool: Path, capacities: list[int]) -> Iterator[list[str]]:
    """Yield a line for each capacity: hit rates and shares of work saved, per policy and without bounds."""
    command = [sys.executable, "-m", "pykvcache_sidecar.main", "simulate", str(trace), "--pool", str(pool), "--json"]
    command += [text for name in POLICIES for text in ("--policy", name)]
    command += [text for size in capacities for text in ("--capacity", str(size))]
    *outcomes, endless = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["outcomes"]
    for size in capacities:
        same = {row["policy"]: row for row in outcomes if row["capacity_bytes"] == size}
        rows = [*(same[name] for name in POLICIES), endless]
        yield [
            f"{size / 2**40:.2f} TiB",
            *(f"{100 * row[key]:.1f}" for key in ("hit_rate", "saved_work") for row in rows),
        ]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
