"""mla_attention: by the Hopper kernel where that can, else by attention's own, which loads a latent row once, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import mla_hopper
from .attention import attend_pages

if TYPE_CHECKING:
    from ..ops.mla import MLAAttention


def mla_attention(a: MLAAttention) -> tuple[Tensor, Tensor]:
    """`pm_ops::mla_attention`."""
    return mla_hopper.mla_attention(a) if mla_hopper.takes(a) else attend_pages(a.attention(), latent=True)
