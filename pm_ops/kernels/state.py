"""What the kernels over states share: which page is read, which tokens are a sequence's, and functions of numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import find_sequence


@triton.jit
def first_page(state_indices, num_accepted, n, columns):
    """The page that sequence n's state is read from, 64-bit; `state_indices` has so many columns."""
    column = 0
    if num_accepted is not None:
        column = tl.minimum(tl.maximum(tl.load(num_accepted + n) - 1, 0), columns - 1).to(tl.int32)
    return tl.load(state_indices + n * columns + column).to(tl.int64)


@triton.jit
def tokens_of(query_start, b, batch, num_tokens):
    """Sequence b's first token and the one behind its last, 64-bit; `batch` stands for the padding rows.

    They are never outside of `[0, num_tokens]`, whatever query_start says; where that descends there are none.
    """
    start = tl.load(query_start + b).to(tl.int64)
    stop = tl.load(query_start + b + 1, mask=b < batch, other=0).to(tl.int64)
    stop = tl.where(b < batch, stop, num_tokens)
    return tl.maximum(start, 0), tl.minimum(stop, num_tokens)


@triton.jit
def chunk_of(query_start, slot, batch, num_tokens, CHUNK):
    """The sequence of a chunk's slot, its first token, that of the chunk, and the tokens from there to the end.

    There are none where the slot is one too many. Sequence b's chunks begin at slot `query_start[b] // CHUNK + b`;
    `batch` stands for the padding rows behind the last one.
    """
    b = find_sequence(query_start, slot, batch, CHUNK)
    start, stop = tokens_of(query_start, b, batch, num_tokens)
    first = start + (slot - start // CHUNK - b).to(tl.int64) * CHUNK
    return b, start, first, tl.where(first >= start, stop - first, 0)


@triton.jit
def of_head(numbers, h):
    """Head h's number, float32; 0 where there are none."""
    number = 0.0
    if numbers is not None:
        number = tl.load(numbers + h).to(tl.float32)
    return number


@triton.jit
def silu(y):
    """y times its sigmoid."""
    return y / (1 + tl.exp(-y))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32. NaN stays NaN."""
    e = tl.exp(-tl.abs(x))  # log1p(e), exact to the last bits where e is small
    u = 1 + e
    y = tl.where(x > 0, x, 0.0) + tl.where(u == 1, e, tl.log(u) * (e / tl.where(u == 1, 1.0, u - 1)))
    return tl.where(x != x, x, y)


@triton.jit
def step_size(dt, dt_bias, SOFTPLUS: tl.constexpr, low, high):
    """Mamba-2's dt as it is used: float32, after bias, softplus and limits. NaN stays NaN."""
    dt = dt.to(tl.float32) + dt_bias
    if SOFTPLUS:
        dt = softplus(dt)
    dt = tl.where(dt < low, low, dt)
    return tl.where(dt > high, high, dt)
