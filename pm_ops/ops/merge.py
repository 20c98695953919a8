"""``merge_attention``: two parts of one softmax, joined by their log-sum-exps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ._common import define, describe, require, require_no_grad

OUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class MergeAttention:
    """Arguments of ``pm_ops::merge_attention``: ``out_* [T, H, D]`` and natural-log ``lse_* [T, H]`` in float32.

    Where both parts are empty (lse -inf) the result is 0, -inf. Attention sinks may be in one part only.
    """

    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor

    def check(self) -> None:
        out_a, out_b = self.out_a, self.out_b
        if torch.is_grad_enabled():
            require_no_grad("merge_attention", out_a=out_a, lse_a=self.lse_a, out_b=out_b, lse_b=self.lse_b)
        if out_a.dim() != 3 or out_a.dtype not in OUT_DTYPES or out_a.dtype != out_b.dtype or out_b.dim() != 3:
            raise ValueError(
                "out_a and out_b must both be [tokens, heads, dim] of float32, float16 or bfloat16: "
                f"{describe(out_a)} and {describe(out_b)}"
            )
        same = out_a.shape == out_b.shape
        require(same, lambda: f"out_a and out_b must be alike: {describe(out_a)} and {describe(out_b)}")
        self._check_lse("lse_a", self.lse_a)
        self._check_lse("lse_b", self.lse_b)
        for name, tensor in (("lse_a", self.lse_a), ("out_b", out_b), ("lse_b", self.lse_b)):
            if tensor.device != out_a.device:
                raise ValueError(f"{name} is on {tensor.device}, out_a on {out_a.device}; move it there")

    def _check_lse(self, name: str, lse: Tensor) -> None:
        wanted = self.out_a.shape[:2]
        if lse.dtype != torch.float32 or lse.dim() != 2:
            raise ValueError(f"{name} must be float32 {list(wanted)}, got {describe(lse)}")
        require(lse.shape == wanted, lambda: f"{name} must be float32 {list(wanted)}, got {describe(lse)}")

    def check_values(self) -> None:
        """Nothing to check: there are no indices."""


def _merge_attention_fake(a: MergeAttention) -> tuple[Tensor, Tensor]:
    shape = a.out_a.shape
    return a.out_a.new_empty(shape), a.lse_a.new_empty(shape[:2])


def _merge_attention_cpu(a: MergeAttention) -> tuple[Tensor, Tensor]:
    top = torch.maximum(a.lse_a, a.lse_b)
    shift = torch.where(top == -torch.inf, 0.0, top)  # two empty parts: weights exp(-inf) = 0, not exp(nan)
    weight_a, weight_b = torch.exp(a.lse_a - shift), torch.exp(a.lse_b - shift)
    total = weight_a + weight_b
    out = torch.zeros(a.out_a.shape, dtype=torch.float32, device=a.out_a.device)
    for part, weight in ((a.out_a, weight_a), (a.out_b, weight_b)):  # by their sum: a large lse's rounding cancels
        out += torch.where(weight[..., None] != 0, part.float() * (weight / total)[..., None], 0.0)
    lse = shift + torch.log(total)
    return out.to(a.out_a.dtype), lse.contiguous()


define(
    "merge_attention",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    MergeAttention,
    fake=_merge_attention_fake,
    cpu=_merge_attention_cpu,
    cuda="merge.merge_attention",
)
