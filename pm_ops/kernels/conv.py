"""conv1d_update and conv1d_prefill: short causal convolutions whose states lie in pages.

One thread loads a channel's state before it stores it, and no other program touches that page's channel: an update's
programs are numbered by sequence and channel, and of a prefill's only those of a sequence's first block do.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .columns import load_columns, store_columns
from .common import TRITON_DTYPE, cdiv, find_sequence, next_power_of_2
from .launch import Launch, launch
from .state import first_page, silu, tokens_of

if TYPE_CHECKING:
    from ..ops.conv import Conv1dPrefill, Conv1dUpdate

_TOKENS, _CHANNELS, _WARPS = 16, 128, 4  # of a block of a prefill
_UPDATE = 256, 4
"""Channels and warps of an update; in words one warp has them all, eight a thread. Measured on an H200."""


@triton.jit
def _states(buffer, page, offset, page_stride, DTYPE: tl.constexpr):
    """Where a page's states begin."""
    return (buffer + (offset + page * page_stride)).to(tl.pointer_type(DTYPE))


@triton.jit(do_not_specialize=["num_pages"])
def _conv1d_update(
    buffer,
    x,
    weight,
    bias,
    out,
    state_indices,
    num_accepted,
    num_pages: tl.int64,
    x_sequence: tl.int64,
    x_token: tl.int64,
    x_dim,  # unannotated: 1 becomes a constant
    weight_dim,
    weight_tap,
    bias_dim,
    offset: tl.int64,
    page_stride: tl.int64,
    channel_stride: tl.int64,  # in elements
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SILU: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    d = first + tl.arange(0, BLOCK)
    exists = d < DIM
    source = first_page(state_indices, num_accepted, n, TOKENS if PER_TOKEN else 1)
    live = (source >= 0) & (source < num_pages)
    row = x + n * x_sequence + d * x_dim
    to = out + n * TOKENS * DIM + d
    if live:
        taps = load_columns(weight, first, weight_dim, weight_tap, DIM, WIDTH, BLOCK, WORDS)
        cell = _states(buffer, source, offset, page_stride, DTYPE)
        inputs = load_columns(cell, first, channel_stride, 1, DIM, WIDTH - 1, BLOCK, WORDS)  # the oldest one first
        shift = tl.zeros([BLOCK], tl.float32)
        if bias is not None:
            shift = tl.load(bias + d * bias_dim, mask=exists, other=0.0).to(tl.float32)
        tl.debug_barrier()
        for t in range(TOKENS):
            new = tl.load(row + t * x_token, mask=exists, other=0.0).to(tl.float32)
            y = shift + new * taps[WIDTH - 1]
            for k in tl.static_range(WIDTH - 2, -1, -1):
                y += inputs[k] * taps[k]
            if SILU:
                y = silu(y)
            tl.store(to + t * DIM, y.to(out.dtype.element_ty), mask=exists)
            inputs = inputs[1:] + (new,)
            if PER_TOKEN or t == TOKENS - 1:
                page = source
                if PER_TOKEN:
                    page = tl.load(state_indices + n * TOKENS + t).to(tl.int64)
                cell = _states(buffer, page, offset, page_stride, DTYPE)
                there = (page >= 0) & (page < num_pages)
                store_columns(cell, inputs, first, channel_stride, there, DIM, WIDTH - 1, BLOCK, WORDS)
    else:
        for t in range(TOKENS):
            tl.store(to + t * DIM, tl.zeros([BLOCK], out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_tokens", "batch", "num_pages"])
def _conv1d_prefill(
    buffer,
    x,
    weight,
    bias,
    out,
    query_start,
    state_indices,
    has_initial_state,
    num_tokens: tl.int64,
    batch,
    num_pages: tl.int64,
    x_token: tl.int64,
    x_dim,
    weight_dim,
    weight_tap,
    bias_dim,
    offset: tl.int64,
    page_stride: tl.int64,
    channel_stride: tl.int64,  # in elements
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    d = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = d < DIM
    s = find_sequence(query_start, block, batch, ROWS)  # `batch` stands for the padding rows behind the last one
    start, stop = tokens_of(query_start, s, batch, num_tokens)
    first = start + ((block - s) - start // ROWS) * ROWS
    if (first < start) | (first >= stop):
        return
    t = first + tl.arange(0, ROWS)
    to = out + t[:, None] * DIM + d[None, :]
    mask = (t < stop)[:, None] & exists[None, :]
    page = tl.load(state_indices + s, mask=s < batch, other=-1).to(tl.int64)
    if (page < 0) | (page >= num_pages):
        tl.store(to, tl.zeros([ROWS, BLOCK], out.dtype.element_ty), mask=mask)
        return
    initial = False
    if has_initial_state is not None:
        initial = tl.load(has_initial_state + s) != 0
    cell = _states(buffer, page, offset, page_stride, DTYPE) + d * channel_stride

    y = tl.zeros([ROWS, BLOCK], tl.float32)
    if bias is not None:
        y += tl.load(bias + d * bias_dim, mask=exists, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(WIDTH):
        at = t - (WIDTH - 1) + k
        tap = tl.load(weight + d * weight_dim + k * weight_tap, mask=exists, other=0.0).to(tl.float32)
        row = x + at[:, None] * x_token + d[None, :] * x_dim
        new = tl.load(row, mask=mask & (at >= start)[:, None], other=0.0).to(tl.float32)
        if k < WIDTH - 1:
            if (first == start) & initial:
                old = cell[None, :] + (at - start + WIDTH - 1)[:, None]
                new += tl.load(old, mask=mask & (at < start)[:, None], other=0.0).to(tl.float32)
        y += new * tap[None, :]
    if SILU:
        y = silu(y)
    tl.store(to, y.to(out.dtype.element_ty), mask=mask)

    if first == start:  # the last state, each column of which is an input or an older column
        new0 = _column(x, cell, 0, start, stop, initial, d, exists, x_token, x_dim, WIDTH)
        new1, new2 = new0, new0
        if WIDTH >= 3:
            new1 = _column(x, cell, 1, start, stop, initial, d, exists, x_token, x_dim, WIDTH)
        if WIDTH >= 4:
            new2 = _column(x, cell, 2, start, stop, initial, d, exists, x_token, x_dim, WIDTH)
        tl.debug_barrier()
        tl.store(cell, new0.to(DTYPE), mask=exists)
        if WIDTH >= 3:
            tl.store(cell + 1, new1.to(DTYPE), mask=exists)
        if WIDTH >= 4:
            tl.store(cell + 2, new2.to(DTYPE), mask=exists)


@triton.jit
def _column(x, cell, j, start, stop, initial, d, exists, x_token, x_dim, WIDTH: tl.constexpr):
    """Column j of the last state, float32."""
    at = stop - (WIDTH - 1) + j
    new = tl.load(x + at * x_token + d * x_dim, mask=exists & (at >= start), other=0.0).to(tl.float32)
    old = tl.load(cell + (at - start + WIDTH - 1), mask=exists & (at < start) & initial, other=0.0).to(tl.float32)
    return new + old


def conv1d_update(a: Conv1dUpdate) -> Tensor:
    """`pm_ops::conv1d_update` in one launch."""
    out = a.x.new_empty(a.x.shape)
    if out.numel() == 0:
        return out
    x = a.x if a.x.dim() == 3 else a.x.unsqueeze(1)
    taps = (*a.weight.stride(), 0 if a.bias is None else a.bias.stride(0))
    each_token, width = a.state_indices.dim() == 2, a.weight.shape[1]
    words = a.weight.data_ptr() % 16 == 0 and a.weight.dtype.itemsize == 2
    run = _update_launch(
        x.shape, x.stride(), width, taps, tuple(a.state_plane), a.state_dtype, each_token, a.silu, words
    )
    accepted = None if a.num_accepted is None else a.num_accepted.contiguous()
    run(a.buffer, x, a.weight, a.bias, out, a.state_indices.contiguous(), accepted)
    return out


@functools.lru_cache(4096)
def _update_launch(
    rows: torch.Size,
    strides: tuple[int, ...],
    width: int,
    taps: tuple[int, ...],
    plane: tuple[int, ...],
    dtype: torch.dtype,
    each_token: bool,
    silu: bool,
    words: bool,
) -> Launch:
    """The launch of rows ``[N, T, dim]``; ``taps``: strides of the filter and of the bias.

    It is in words of 16 bytes where states and filters are 16-bit numbers without gaps, in rows that begin at multiples
    of 16 bytes. ``words``: the filters are 16-bit numbers and begin there.
    """
    (sequences, tokens, dim), (most, warps) = rows, _UPDATE
    offset, page_stride, _, head_stride, num_pages = plane
    dense = taps[:2] == (width, 1) and head_stride == 2 * (width - 1) and dtype.itemsize == 2
    words = words and dense and (offset | page_stride) % 16 == 0 and dim % 8 == 0
    block = min(most, next_power_of_2(dim))
    return Launch(
        _conv1d_update,
        (sequences, cdiv(dim, block)),
        (num_pages, *strides, *taps, offset, page_stride, head_stride // dtype.itemsize),
        DIM=dim,
        WIDTH=width,
        TOKENS=tokens,
        PER_TOKEN=each_token,
        SILU=silu,
        DTYPE=TRITON_DTYPE[dtype],
        BLOCK=block,
        WORDS=words,
        num_warps=1 if words else max(1, min(warps, block // 32)),
    )


def conv1d_prefill(a: Conv1dPrefill) -> Tensor:
    """`pm_ops::conv1d_prefill` in one launch."""
    out = a.x.new_empty(a.x.shape)
    if out.numel() == 0:
        return out
    (tokens, dim), batch = a.x.shape, a.state_indices.shape[0]
    block = min(_CHANNELS, next_power_of_2(dim))
    launch(
        _conv1d_prefill,
        (tokens // _TOKENS + batch + 1, cdiv(dim, block)),
        a.buffer,
        a.x,
        a.weight,
        a.bias,
        out,
        a.query_start.contiguous(),
        a.state_indices.contiguous(),
        None if a.has_initial_state is None else a.has_initial_state.contiguous(),
        tokens,
        batch,
        a.state_plane[4],
        *a.x.stride(),
        *a.weight.stride(),
        0 if a.bias is None else a.bias.stride(0),
        *a.state_plane[:2],
        a.state_plane[3] // a.state_dtype.itemsize,
        DIM=dim,
        WIDTH=a.weight.shape[1],
        SILU=a.silu,
        DTYPE=TRITON_DTYPE[a.state_dtype],
        ROWS=_TOKENS,
        BLOCK=block,
        num_warps=_WARPS,
    )
    return out
