"""The shapes of the suite ``mla``: latent attention, DeepSeek-V3's on a GPU, tiny ones on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .attention_shape import AttentionShape


@dataclass(frozen=True)
class MLAShape(AttentionShape):
    """One layer's latent attention over a ragged, causal batch: one KV head, whose values are part of its keys."""

    q_heads: int = 128
    kv_heads: int = 1
    head_dim: int = 576
    value_dim: int = 512
    page_size: int = 64

    @property
    def row_bytes(self) -> int:
        """One token's row."""
        return self.head_dim * self.kv_dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Rows, each read once for key and value."""
        return sum(self.seq_lens) * self.row_bytes


def decode(name: str, batch: int, keys: int, **options: Any) -> MLAShape:
    """One query token for each of ``batch`` sequences of ``keys``."""
    title = f"B{batch} x {keys}"
    return MLAShape(f"{title}, {name}" if name else title, (1,) * batch, (keys,) * batch, **options)


GPU = (
    decode("128 heads", 64, 4096),
    decode("16 heads", 64, 4096, q_heads=16),
    decode("128 heads", 1, 131072),
    decode("128 heads", 128, 1024),
    decode("128 heads", 8, 4096),
    decode("128 heads, page size 16", 64, 4096, page_size=16),
    decode("128 heads, page size 1", 64, 4096, page_size=1),
    MLAShape("B8, 4 new on 8188, 128 heads", (4,) * 8, (8192,) * 8),
    MLAShape("B4, 512 new on 3584, 16 heads", (512,) * 4, (4096,) * 4, q_heads=16),
)
QUICK = 4

_TINY: dict[str, Any] = dict(
    q_heads=4, head_dim=24, value_dim=16, page_size=4, dtype=torch.float32, kv_dtype=torch.float32, layers=2
)
CPU = (
    decode("", 4, 64, **_TINY),
    MLAShape("2 prefills of 16, 2 decodes of 64", (16, 16, 1, 1), (16, 16, 64, 64), **_TINY),
)
