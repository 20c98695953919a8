"""Padding rows of a ragged batch: how many there are is known on the device only."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_PROGRAMS = 128


@triton.jit(do_not_specialize=["batch"])
def _zero_padding(out, query_start, batch, elements: tl.int64, row: tl.int64, BLOCK: tl.constexpr):
    first = tl.maximum(tl.load(query_start + batch).to(tl.int64), 0) * row
    for start in tl.range(first + tl.program_id(0) * BLOCK, elements, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.zeros([BLOCK], out.dtype.element_ty), mask=at < elements)


def zero_padding(out: Tensor, query_start: Tensor) -> None:
    """Zero the rows of the contiguous ``out [Tq, ...]`` from ``query_start[-1]`` on."""
    assert out.is_contiguous()
    args = (out, query_start, query_start.shape[0] - 1, out.numel(), out.stride(0))
    launch(_zero_padding, (_PROGRAMS,), *args, BLOCK=1024)
