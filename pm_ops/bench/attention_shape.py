"""The shape of a batch that attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention over a ragged, causal batch. Defaults are an 8B Llama's."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    """Keys of each sequence, those of its query tokens included."""
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    window: int = 0
    sinks: bool = False
    layers: int = 4
    """Of the page-major pool; the one in the middle is read."""

    @property
    def scales(self) -> tuple[float, float]:
        """Key and value scale: stored = x / scale."""
        return (0.5, 0.25) if self.kv_dtype.itemsize == 1 else (1.0, 1.0)

    @property
    def tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.query_lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that have to be read, each once."""
        keys = 0
        for n, s in zip(self.query_lens, self.seq_lens, strict=True):
            keys += min(s, n + self.window - 1) if self.window else s
        return keys * self.kv_heads * (self.head_dim + self.value_dim) * self.kv_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes that have to move: K, V and query read, the result written."""
        return self.kv_bytes + self.tokens * self.q_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products, over the visible (query, key) pairs alone."""
        pairs = 0
        for n, s in zip(self.query_lens, self.seq_lens, strict=True):
            visible = range(s - n + 1, s + 1)
            pairs += sum(min(v, self.window) for v in visible) if self.window else sum(visible)
        return 2 * self.q_heads * (self.head_dim + self.value_dim) * pairs

    @property
    def short(self) -> bool:
        """Whether launching would weigh on the time, so that a CUDA graph is replayed, as engines decode."""
        decode = max(self.query_lens) == 1
        return decode and (len(self.seq_lens) <= 8 or self.kv_bytes < 1 << 28)


def decode(name: str, batch: int, keys: int, **options: Any) -> AttentionShape:
    """One query token for each of ``batch`` sequences of ``keys``; the name says what differs from the defaults."""
    title = f"B{batch} x {keys}"
    return AttentionShape(f"{title}, {name}" if name else title, (1,) * batch, (keys,) * batch, **options)
