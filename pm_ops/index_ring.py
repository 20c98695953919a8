"""IndexRing: page ids in pinned memory, which a kernel reads when its turn comes."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from .transfer import Transfer


class IndexRing:
    """Room for pairs of page ids, used round and round, so that handing ids to a kernel waits for nothing.

    Args:
        rows: int64 ``[n, 2]``, pinned; default 65,536 pairs, 1 MiB. Replaced by more where that is too little.
    """

    def __init__(self, rows: Tensor | None = None) -> None:
        self.rows = _pinned(1 << 16) if rows is None else rows
        self._next = 0
        self._used: deque[tuple[int, int, Transfer]] = deque()

    def put(self, transfer: Transfer) -> Tensor:
        """A copy of a transfer's pairs, which lasts as long as the transfer has it."""
        pairs = transfer.pairs
        assert pairs is not None
        while self._used and self._used[0][2].finished:
            self._used.popleft()
        begin = self._next if self._next + len(pairs) <= len(self.rows) else 0
        end = begin + len(pairs)
        if end > len(self.rows) or any(first < end and begin < last for first, last, _ in self._used):
            self.rows = _pinned(max(2 * len(self.rows), len(pairs)))
            self._used.clear()  # transfers on their way hold the earlier memory
        self._next = end
        self._used.append((begin, end, transfer))
        return self.rows[begin:end].copy_(pairs)


def _pinned(count: int) -> Tensor:
    return torch.empty(count, 2, dtype=torch.int64, pin_memory=torch.cuda.is_available())
