"""How deep a block lies in its request's prefix, and when the request came: what the time of its file will say.

Facts: vLLM offers a request's blocks to be stored over many steps, some at a time, each group's under keys of its own;
blocks of generated tokens become whole long after the prompt's; vLLM 0.26 and later offer a finished request's last
blocks one step after its end. What they mean: nothing needs to be copied, because vLLM keeps the list of a request's
block hashes, which grows as tokens come; an ended request must be known for one more step. And all blocks of a request
carry the time of its arrival, however long it takes, so that the head of a prefix is never older than its tail.

Owned by the scheduler's thread.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pykvcache_connector.vllm_api import split_offload_key
from pykvcache_contract.recency import recency_ns

UNKNOWN_DEPTH = 1_000_000
"""Of a block of a request that is not known: behind the last block of any prefix, so that it leaves first."""


@dataclass(slots=True)
class _Prefix:
    """One request.

    Args:
        hashes: vLLM's own list, which grows.
        starts: by group, where in it the search for the next block begins.
    """

    seconds: float
    hashes: Sequence[bytes]
    starts: dict[int, int] = field(default_factory=dict)


class Prefixes:
    """The prefixes of all requests that vLLM knows; a few words each.

    Args:
        clock: Unix time; a parameter for tests.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._hashes_per_block: Mapping[int, int] = {}
        self._prefixes: dict[str, _Prefix] = {}
        self._ended: list[str] = []

    def __len__(self) -> int:
        return len(self._prefixes)

    def start(self, hashes_per_block: Mapping[int, int]) -> None:
        """Take in how many of vLLM's hashes make an offloaded block, by group; one if not said."""
        self._hashes_per_block = hashes_per_block

    def begin(self, request_id: str, hashes: Sequence[bytes]) -> None:
        """Note the arrival of a request."""
        self._prefixes[request_id] = _Prefix(self._clock(), hashes)

    def recencies_ns(self, request_id: str, keys: Sequence[bytes]) -> list[int]:
        """Return the modification times that files of these blocks get; cheapest if keys come in order."""
        prefix = self._prefixes.get(request_id)
        if prefix is None:
            now = self._clock()
            return [recency_ns(now, UNKNOWN_DEPTH + place) for place in range(len(keys))]
        return [recency_ns(prefix.seconds, self._depth(prefix, key)) for key in keys]

    def end(self, request_id: str) -> None:
        """Note that a request is over; it is forgotten after the next step."""
        self._ended.append(request_id)

    def step_over(self) -> None:
        """Forget the requests that had ended when this step was built."""
        for request_id in self._ended:
            self._prefixes.pop(request_id, None)
        self._ended.clear()

    def _depth(self, prefix: _Prefix, key: bytes) -> int:
        block_hash, group = split_offload_key(key)
        index = _find(prefix.hashes, block_hash, prefix.starts.get(group, 0))
        if index is None:
            return UNKNOWN_DEPTH
        prefix.starts[group] = index + 1
        return index // self._hashes_per_block.get(group, 1)


def _find(hashes: Sequence[bytes], block_hash: bytes, start: int) -> int | None:
    """Return where a hash is, looked for from `start` first."""
    for begin in (start, 0):
        try:
            return hashes.index(block_hash, begin)
        except ValueError:
            continue
    return None
