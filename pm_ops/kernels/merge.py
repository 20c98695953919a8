"""Parts of one softmax joined by their log-sum-exps: merge_attention, and the splits of the KV axis."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from .common import LOG2E, cdiv, next_power_of_2
from .launch import Launch, launch

if TYPE_CHECKING:
    from ..ops.merge import MergeAttention


@triton.jit
def _weights(part, top):
    """exp(part - top), 0 where the part is empty, also where all are (top -inf)."""
    return tl.exp2((part - tl.where(top == float("-inf"), 0.0, top)) * LOG2E)


@triton.jit(do_not_specialize=["rows"])
def _merge_attention(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    rows: tl.int64,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    a = tl.load(lse_a + r, mask=r < rows, other=float("-inf"))
    b = tl.load(lse_b + r, mask=r < rows, other=float("-inf"))
    top = tl.maximum(a, b)
    weight_a = _weights(a, top)
    weight_b = _weights(b, top)
    total = weight_a + weight_b
    # an empty part's rows are not read: they may be anything
    at = r[:, None] * DIM + d[None, :]
    x = tl.load(out_a + at, mask=((r < rows) & (weight_a != 0))[:, None] & (d < DIM)[None, :], other=0.0)
    y = tl.load(out_b + at, mask=((r < rows) & (weight_b != 0))[:, None] & (d < DIM)[None, :], other=0.0)
    merged = x.to(tl.float32) * weight_a[:, None] + y.to(tl.float32) * weight_b[:, None]
    merged = merged / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (d < DIM)[None, :])
    tl.store(lse + r, top + tl.log(total), mask=r < rows)


@triton.jit(do_not_specialize=["rows", "num_splits"])
def _merge_splits(
    partial,
    partial_lse,
    out,
    lse,
    rows: tl.int64,
    num_splits: tl.int32,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.load(partial_lse + s * rows + r, mask=s < num_splits, other=float("-inf"))
    top = tl.max(part, 0)
    weight = _weights(part, top)
    total = tl.sum(weight, 0)
    read = (weight != 0)[:, None] & (d < DIM)[None, :]
    x = tl.load(partial + (s * rows + r)[:, None] * DIM + d[None, :], mask=read, other=0.0)
    merged = tl.sum(x * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + r * DIM + d, merged.to(out.dtype.element_ty), mask=d < DIM)
    if lse is not None:
        tl.store(lse + r, top + tl.log(total), mask=tl.program_id(1) == 0)


def merge_attention(a: MergeAttention) -> tuple[Tensor, Tensor]:
    """`pm_ops::merge_attention` in one launch."""
    out, lse = a.out_a.new_empty(a.out_a.shape), a.lse_a.new_empty(a.lse_a.shape)
    rows, dim = lse.numel(), out.shape[2]
    if rows:
        block = next_power_of_2(dim)
        per_program = max(2048 // block, 1)
        parts = (t.contiguous() for t in (a.out_a, a.lse_a, a.out_b, a.lse_b))
        constants = {"DIM": dim, "ROWS": per_program, "BLOCK": block}
        launch(_merge_attention, (cdiv(rows, per_program),), *parts, out, lse, rows, **constants, num_warps=4)
    return out, lse


INVARIANT_SPLITS = 256
"""Most splits that can be joined such that empty ones behind the others change no bit."""


def merge_splits(partial: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor | None, invariant: bool) -> None:
    """Join `partial [splits, T, H, D]` (fp32) by `partial_lse [splits, T, H]` into `out [T, H, D]` and `lse [T, H]`.

    The order of the sums follows from the number of splits, rounded up; `invariant`: from nothing.
    """
    _splits_launch(partial.shape[0], *out.shape, invariant)(partial, partial_lse, out, lse)


@functools.lru_cache(4096)
def _splits_launch(num_splits: int, tokens: int, heads: int, dim: int, invariant: bool) -> Launch:
    rows, block = tokens * heads, min(next_power_of_2(dim), 32 if invariant else 64)
    return Launch(
        _merge_splits,
        (rows, cdiv(dim, block)),
        (rows, num_splits),
        DIM=dim,
        SPLITS=INVARIANT_SPLITS if invariant else next_power_of_2(num_splits),
        BLOCK=block,
        num_warps=4,
    )
