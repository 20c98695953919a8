"""mla_attention: by the Hopper kernel where it can, else by attention's kernel, which loads a latent row once, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from . import mla_hopper
from .attention import attend_pages

if TYPE_CHECKING:
    from ..ops.mla import MLAAttention


def mla_attention(a: MLAAttention) -> tuple[Tensor, Tensor]:
    """`pm_ops::mla_attention`. Raises ValueError where ``impl="hopper"`` cannot make the call."""
    if a.impl != "triton":
        reason = mla_hopper.reason(a)
        if reason is None:
            return mla_hopper.mla_attention(a)
        if a.impl == "hopper":
            raise ValueError(
                f"impl='hopper' was asked for, but that kernel cannot make this call: {reason}; "
                "use impl='triton' or 'auto'"
            )
    return attend_pages(a.attention(), latent=True)
