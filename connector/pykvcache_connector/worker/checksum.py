"""The payload checksum in torch, on the GPU or the CPU; equal to `pykvcache_storage.checksum` in numpy.

Over the payload's 64-bit words as a matrix of rows × 512 columns: Σ (Cⱼ + Rᵢ)·wᵢⱼ mod 2⁶⁴. Every factor is odd, so any
changed word is found; factors differ by position, so swapped, shifted and stale pages are found too. It needs only the
column sums and row sums: two plain reductions, no temporary of the payload's size. int64 wraps like uint64.
"""

import numpy as np
import torch

from pykvcache_storage.checksum import COLUMN_COUNT, column_weights, row_weights


class Checksum:
    """Computes checksums of payloads of one size on one device.

    Args:
        payload_size_bytes: a multiple of 4096.
        device: where the payloads lie.
    """

    def __init__(self, payload_size_bytes: int, device: torch.device) -> None:
        self._rows = payload_size_bytes // (8 * COLUMN_COUNT)
        self._columns = _signed(column_weights(), device)
        self._row_weights = _signed(row_weights(self._rows), device)

    def of(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the checksum as an int64 scalar tensor on the payload's device; on a GPU nothing is waited for.

        Args:
            payload: uint8, shape (payload_size_bytes,), contiguous, 8-byte aligned.
        """
        words = payload.view(torch.int64).view(self._rows, COLUMN_COUNT)
        return (words.sum(0) * self._columns).sum() + (words.sum(1) * self._row_weights).sum()


def unsigned(value: int) -> int:
    """Return an int64 as the uint64 of the same bits, as headers carry it."""
    return value & 0xFFFF_FFFF_FFFF_FFFF


def _signed(weights: "np.ndarray[tuple[int], np.dtype[np.uint64]]", device: torch.device) -> torch.Tensor:
    return torch.from_numpy(weights.view(np.int64).copy()).to(device)
