"""How a block file's modification time says when the block was last wanted, and how deep in its prefix it lies.

Facts: a prefix is useful only as far as its head is there; one request wants all blocks of its prefix at once; a
write to the inode for every use would wear the disk. What they mean: within one use, the tail must leave before the
head, and a use counts only to the minute. Therefore the time is the begin of the minute of the use, minus one
microsecond for every block before it in its prefix: sorted by this time, older uses come first, and within one use
the tail before its head. A use is due in every minute of the clock that is not the noted one: a tail stored now gets
this minute, so a head that was wanted with it must get it too. Where a filesystem keeps whole seconds the depth is
lost, and nothing else.

Pure arithmetic; touches no disk.
"""

QUANTUM_SECONDS = 60
_QUANTUM_NS = QUANTUM_SECONDS * 10**9
_STEP_NS = 1000
MAX_DEPTH = _QUANTUM_NS // _STEP_NS - 1


def recency_ns(now_seconds: float, depth: int) -> int:
    """Return the modification time, in nanoseconds, of a block wanted now.

    Args:
        now_seconds: Unix time.
        depth: number of blocks before it in its prefix; more than `MAX_DEPTH` counts as that.

    >>> recency_ns(125.5, 0), recency_ns(125.5, 3)
    (120000000000, 119999997000)
    """
    return int(now_seconds // QUANTUM_SECONDS) * _QUANTUM_NS - min(depth, MAX_DEPTH) * _STEP_NS


def is_due(modified_ns: int, now_seconds: float) -> bool:
    """Return whether a use now must be noted: the noted one lies in an earlier minute of the clock, or in the future.

    Not due is a time that another program set to its "now" within this minute, nor one a minute ahead: clocks of nodes
    differ by less, and a head must not fall behind a tail.

    >>> [is_due(recency_ns(125.5, 3), now) for now in (126.0, 179.0, 180.0, 61.0, 60.0)]
    [False, False, True, False, True]
    >>> is_due(150 * 10**9, 170.0)
    False
    """
    elapsed_ns = int(now_seconds * 10**9) - _use_ns(modified_ns)
    return not -_QUANTUM_NS < elapsed_ns < _QUANTUM_NS


def depth_of(modified_ns: int) -> int:
    """Return the depth that a modification time tells; arbitrary for a time that `recency_ns` did not make.

    >>> depth_of(recency_ns(125.5, 3))
    3
    """
    return (_use_ns(modified_ns) - modified_ns) // _STEP_NS


def _use_ns(modified_ns: int) -> int:
    return -(-modified_ns // _QUANTUM_NS) * _QUANTUM_NS
