"""selective_state_update: a token or a few of Mamba-2 for each sequence, as fast as states are read and written.

A program has BLOCK_P rows of one head's state, and its tokens one after another. Strides come as tuples.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import TRITON_DTYPE, cdiv, next_power_of_2
from .launch import Launch
from .state import first_page, of_head, silu, step_size

if TYPE_CHECKING:
    from ..ops.selective import SelectiveStateUpdate

_BYTES, _PER_WARP = 16384, 1024  # of a state, a program; elements of a warp


@triton.jit(do_not_specialize=["num_pages"])
def _selective_state_update(
    buffer,
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    out,
    state_indices,
    num_accepted,
    x_at,  # strides of (sequence, token, head, dim)
    dt_at,  # (sequence, token, head)
    B_at,  # (sequence, token, group, dim)
    C_at,
    z_at,
    num_pages: tl.int64,
    offset: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    blocks: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    n = tl.program_id(0).to(tl.int64) // (HEADS * blocks)
    h = tl.program_id(0).to(tl.int64) // blocks % HEADS
    p = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    in_head = p < HEAD_DIM
    in_state = s < STATE_DIM
    mask = in_head[:, None] & in_state[None, :]
    to = out + (n * TOKENS * HEADS + h) * HEAD_DIM + p
    source = first_page(state_indices, num_accepted, n, TOKENS if PER_TOKEN else 1)
    if (source < 0) | (source >= num_pages):
        for t in range(TOKENS):
            tl.store(to + t * (HEADS * HEAD_DIM), tl.zeros([BLOCK_P], out.dtype.element_ty), mask=in_head)
        return

    inside = p[:, None] * STATE_DIM + s[None, :]
    cell = (buffer + (offset + source * page_stride + h * head_stride)).to(tl.pointer_type(DTYPE))
    state = tl.load(cell + inside, mask=mask, other=0.0).to(tl.float32)
    rate, bias, skip = of_head(A, h), of_head(dt_bias, h), of_head(D, h)
    x += n * x_at[0] + h * x_at[2] + p.to(tl.int64) * x_at[3]
    dt += n * dt_at[0] + h * dt_at[2]
    B += n * B_at[0] + h // GROUP * B_at[2] + s.to(tl.int64) * B_at[3]
    C += n * C_at[0] + h // GROUP * C_at[2] + s.to(tl.int64) * C_at[3]
    if z is not None:
        z += n * z_at[0] + h * z_at[2] + p.to(tl.int64) * z_at[3]
    tl.debug_barrier()
    for t in range(TOKENS):
        row = tl.load(x, mask=in_head, other=0.0).to(tl.float32)
        b = tl.load(B, mask=in_state, other=0.0).to(tl.float32)
        c = tl.load(C, mask=in_state, other=0.0).to(tl.float32)
        step = step_size(tl.load(dt), bias, SOFTPLUS, dt_min, dt_max)
        state = state * tl.exp(step * rate) + (step * row)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + skip * row
        if z is not None:
            y *= silu(tl.load(z, mask=in_head, other=0.0).to(tl.float32))
        tl.store(to + t * (HEADS * HEAD_DIM), y.to(out.dtype.element_ty), mask=in_head)
        if PER_TOKEN:
            page = tl.load(state_indices + n * TOKENS + t).to(tl.int64)
            if (page >= 0) & (page < num_pages):
                cell = (buffer + (offset + page * page_stride + h * head_stride)).to(tl.pointer_type(DTYPE))
                tl.store(cell + inside, state.to(DTYPE), mask=mask)
        x += x_at[1]
        dt += dt_at[1]
        B += B_at[1]
        C += C_at[1]
        if z is not None:
            z += z_at[1]
    if not PER_TOKEN:
        tl.store(cell + inside, state.to(DTYPE), mask=mask)


def selective_state_update(a: SelectiveStateUpdate) -> Tensor:
    """`pm_ops::selective_state_update` in one launch."""
    out = a.x.new_empty(a.x.shape)
    if out.numel() == 0:
        return out
    several, (groups, state_dim) = a.x.dim() == 4, a.B.shape[-2:]
    run = _update_launch(
        a.x.shape if several else (a.x.shape[0], 1, *a.x.shape[1:]),
        groups,
        state_dim,
        tuple(_strides(rows, several) for rows in (a.x, a.dt, a.B, a.C, a.z)),
        tuple(a.state_plane),
        a.state_dtype,
        a.state_indices.dim() == 2,
        a.dt_softplus,
        a.dt_min,
        math.inf if a.dt_max is None else a.dt_max,
    )
    A, index = a.A.contiguous(), a.state_indices.contiguous()
    D, dt_bias, accepted = (None if x is None else x.contiguous() for x in (a.D, a.dt_bias, a.num_accepted))
    run(a.buffer, a.x, a.dt, A, a.B, a.C, D, a.z, dt_bias, out, index, accepted)
    return out


@functools.lru_cache(4096)
def _update_launch(
    rows: tuple[int, ...],
    groups: int,
    state_dim: int,
    strides: tuple[tuple[int, ...] | None, ...],
    plane: tuple[int, ...],
    dtype: torch.dtype,
    each_token: bool,
    softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Launch:
    """The launch of rows ``[N, T, heads, head_dim]``; the strides are of x, dt, B, C and z."""
    sequences, tokens, heads, head_dim = rows
    offset, page_stride, _, head_stride, num_pages = plane
    block_s = next_power_of_2(state_dim)
    block_p = min(next_power_of_2(head_dim), max(1, _BYTES // dtype.itemsize // block_s))
    return Launch(
        _selective_state_update,
        (sequences * heads * cdiv(head_dim, block_p),),
        (*strides, num_pages, offset, page_stride, head_stride, dt_min, dt_max),
        HEADS=heads,
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        GROUP=heads // groups,
        TOKENS=tokens,
        PER_TOKEN=each_token,
        SOFTPLUS=softplus,
        DTYPE=TRITON_DTYPE[dtype],
        BLOCK_P=block_p,
        BLOCK_S=block_s,
        num_warps=max(1, min(8, block_p * block_s // _PER_WARP)),
    )


def _strides(rows: Tensor | None, several: bool) -> tuple[int, ...] | None:
    """With a stride for the token axis."""
    if rows is None:
        return None
    first, *rest = rows.stride()
    return (first, *rest) if several else (first, 0, *rest)
