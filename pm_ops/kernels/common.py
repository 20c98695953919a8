"""What the kernels share: the slot address, the sequence of a block, the names of dtypes in Triton, and the device.

Kernels take the pool's uint8 buffer and strides in bytes, as the ops do, and cast an address to the plane's dtype last.
So the compiler sees which strides are multiples of 16 and vectorises where the geometry allows it. That buffers begin
at a multiple of 16 bytes is taken as given: operators refuse others before they launch a kernel.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
}
WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
"""By bytes: what is moved as it is. Two of the widest a thread are what the compiler joins to 16 bytes."""
LOG2E = tl.constexpr(1.4426950408889634)  # softmax is computed with exp2, the hardware's exponential
LN2 = tl.constexpr(0.6931471805599453)
ROUND = tl.constexpr(1.5 * 2**23)  # x + ROUND - ROUND is x rounded to an integer, to nearest even, for |x| < 2^22


@triton.jit
def slot_offset(page, token, page_stride, token_stride):
    """Byte offset of slot `page * page_size + token` in its plane. 64-bit: page strides pass 2^31 elements early."""
    return page.to(tl.int64) * page_stride + token.to(tl.int64) * token_stride


@triton.jit
def find_sequence(query_start, block, batch, BLOCK_Q):
    """The sequence of a block of BLOCK_Q rows, by bisection; `batch` stands for the padding rows behind the last one.

    Sequence b's blocks begin at `query_start[b] // BLOCK_Q + b`, which leaves each as many blocks as it can need.
    """
    low = tl.zeros([], tl.int32)
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def cast_to(x, DTYPE: tl.constexpr, LIMIT: tl.constexpr):
    """Round to nearest even; with a LIMIT clamp first, so that infinities and overflow saturate and NaN stays NaN.

    int8 has no NaN: -128, which no number gives, stands for it.
    """
    if LIMIT > 0:
        x = x.to(tl.float32)
        x = tl.where(x > LIMIT, LIMIT, x)
        x = tl.where(x < -LIMIT, -LIMIT, x)
    if x.dtype == tl.float64:
        x = x.to(tl.float32)  # there is no conversion from fp64 to the narrow types
    if tl.int8 == DTYPE:
        x = tl.where(x == x, (x + ROUND) - ROUND, -128.0)
    return x.to(DTYPE)


@triton.jit
def decoded(x, DTYPE: tl.constexpr, OWN: tl.constexpr):
    """Stored elements as numbers. In int8 -128 stands for NaN; where rows have scales of their OWN, those tell."""
    if x.dtype == tl.int8 and not OWN:
        x = tl.where(x == -128, float("nan"), x.to(tl.float32))
    return x.to(DTYPE)


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up. Triton's own, on the host, takes ten times as long; so does its `next_power_of_2`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


def near(x: Tensor, rows: int) -> Tensor:
    """``x [T, ..., dim]``, so many rows of which lie within 2^31 elements: a copy where they are further apart."""
    return x if rows * x.stride(0) + x.shape[-1] * x.stride(-1) < 1 << 31 else x.contiguous()


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensor's. CPU tensors are the interpreter's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
