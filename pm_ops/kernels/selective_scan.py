"""selective_scan_prefill: Mamba-2 over whole sequences, CHUNK tokens at a time, with the state in registers.

A program has BLOCK_P rows of one head's state of one sequence and goes through its chunks in order, so that states are
read from the pool once and written to it once, and none is kept in between. For long sequences there is another way,
:mod:`.selective_chunks`; :func:`in_chunks` chooses. Within a chunk everything is a product of matrices: with `a` the
running sum of `dt * A`,

    out[i] = sum_{j <= i} (C[i] . B[j]) exp(a[i] - a[j]) dt[j] x[j] + exp(a[i]) C[i] . state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import TRITON_DTYPE, cdiv, near, next_power_of_2
from .device import is_hopper, multiprocessors
from .launch import launch
from .selective_chunks import LEAST, kept_bytes, scan_in_chunks
from .state import of_head, silu, step_size, tokens_of

if TYPE_CHECKING:
    from ..ops.selective import SelectiveScanPrefill

_CHUNK, _BLOCK_P, _WARPS, _STAGES = 32, 64, 4, 2
"""Of 16-bit rows, measured on the H200. Chunks of 64 take 1.6 times as long there, 8 warps three times: most products
of 32 rows are too few for the instructions of a whole warp group, which Triton 3.6 would make wait for one another."""
_FLOAT32 = 32, 1
"""BLOCK_P and stages of float32 rows, which need twice the registers and shared memory. One stage is right as no tile
has 64 rows: warp groups multiply those, and read outside of shared memory in a loop of one stage, in Triton 3.6."""
_LONG, _NOT_SHORT, _MUCH = 1024, 256, 2048
"""For :func:`in_chunks`: tokens of a sequence, on average, from which on it is long, and from which on it is not short;
and tokens times heads, a multiprocessor, that are much. On the H200, in µs, in order and in chunks: 128 heads, 1 x 1024
101 and 96, 4 x 1024 245 and 183, 64 x 256 901 and 800, 128 x 128 962 and 985; 16 heads, 1 x 1024 91 and 56, 16 x 1024
123 and 103, 128 x 128 136 and 143."""
_ROOM = 5 << 30
"""Bytes of states that a scan in chunks may keep in between: a prompt of 131,072 tokens with 128 heads has 4.3e9."""


@triton.jit(do_not_specialize=["num_tokens", "batch", "num_pages"])
def _selective_scan_prefill(
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
    query_start,
    state_indices,
    has_initial_state,
    x_at,  # strides of (token, head, dim)
    dt_at,  # (token, head)
    B_at,  # (token, group, dim)
    C_at,
    z_at,
    num_tokens: tl.int64,
    batch,
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
    SOFTPLUS: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    blocks: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    ROW: tl.constexpr = x.dtype.element_ty
    b = tl.program_id(0) // (HEADS * blocks)  # `batch` stands for the padding rows behind the last sequence
    h = tl.program_id(0).to(tl.int64) // blocks % HEADS
    p = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    i = tl.arange(0, CHUNK)
    in_head = p < HEAD_DIM
    in_state = s < STATE_DIM
    start, stop = tokens_of(query_start, b, batch, num_tokens)
    if start >= stop:
        return
    page = tl.load(state_indices + b, mask=b < batch, other=-1).to(tl.int64)
    out += (start * HEADS + h) * HEAD_DIM
    here = i[:, None] * (HEADS * HEAD_DIM) + p[None, :]
    if (page < 0) | (page >= num_pages):
        for first in range(0, stop - start, CHUNK):
            exists = (i < stop - start - first)[:, None] & in_head[None, :]
            tl.store(out + here, tl.zeros([CHUNK, BLOCK_P], ROW), mask=exists)
            out += CHUNK * HEADS * HEAD_DIM
        return

    cell = (buffer + (offset + page * page_stride + h * head_stride)).to(tl.pointer_type(DTYPE))
    cell += p[:, None] * STATE_DIM + s[None, :]
    mask = in_head[:, None] & in_state[None, :]
    state = tl.zeros([BLOCK_P, BLOCK_S], tl.float32)
    if has_initial_state is not None:
        initial = tl.load(has_initial_state + b) != 0
        state += tl.load(cell, mask=mask & initial, other=0.0).to(tl.float32)
    rate, bias, skip = of_head(A, h), of_head(dt_bias, h), of_head(D, h)
    # Addresses are scalars that move on chunk by chunk, and 32-bit offsets from there, which spare registers (`near`)
    x += start * x_at[0] + h * x_at[1]
    dt += start * dt_at[0] + h * dt_at[1]
    B += start * B_at[0] + h // GROUP * B_at[1]
    C += start * C_at[0] + h // GROUP * C_at[1]
    if z is not None:
        z += start * z_at[0] + h * z_at[1]
    tl.debug_barrier()

    count = (stop - start).to(tl.int32)
    for first in range(0, count, CHUNK):
        exists = i < count - first
        mine = exists[:, None] & in_head[None, :]
        whole = exists[:, None] & in_state[None, :]
        step = step_size(tl.load(dt + i * dt_at[0], mask=exists, other=0.0), bias, SOFTPLUS, dt_min, dt_max)
        step = tl.where(exists, step, 0.0)  # rows past the end neither decay nor add
        a = tl.cumsum(step * rate, 0)
        end = tl.sum(step * rate, 0)
        rows = tl.load(x + (i[:, None] * x_at[0] + p[None, :] * x_at[2]), mask=mine, other=0.0)
        key = tl.load(B + (i[:, None] * B_at[0] + s[None, :] * B_at[2]), mask=whole, other=0.0).to(ROW)
        query = tl.load(C + (i[:, None] * C_at[0] + s[None, :] * C_at[2]), mask=whole, other=0.0).to(ROW)

        earlier = i[:, None] >= i[None, :]
        weight = tl.exp(tl.where(earlier, a[:, None] - a[None, :], float("-inf"))) * step[None, :]
        weight *= tl.dot(query, tl.trans(key), input_precision="tf32x3")
        y = tl.dot(query, tl.trans(state).to(ROW), input_precision="tf32x3") * tl.exp(a)[:, None]
        y = tl.dot(weight.to(ROW), rows, y, input_precision="tf32x3")
        y += skip * rows.to(tl.float32)
        if z is not None:
            gate = tl.load(z + (i[:, None] * z_at[0] + p[None, :] * z_at[2]), mask=mine, other=0.0)
            y *= silu(gate.to(tl.float32))
        tl.store(out + here, y.to(ROW), mask=mine)

        added = (key.to(tl.float32) * (tl.exp(end - a) * step)[:, None]).to(ROW)
        state = tl.dot(tl.trans(rows), added, state * tl.exp(end), input_precision="tf32x3")
        x += CHUNK * x_at[0]
        dt += CHUNK * dt_at[0]
        B += CHUNK * B_at[0]
        C += CHUNK * C_at[0]
        out += CHUNK * HEADS * HEAD_DIM
        if z is not None:
            z += CHUNK * z_at[0]
    tl.store(cell, state.to(DTYPE), mask=mask)


def selective_scan_prefill(a: SelectiveScanPrefill) -> Tensor:
    """`pm_ops::selective_scan_prefill`, in chunks or in order."""
    tokens, heads, head_dim = a.x.shape
    state = heads, head_dim, a.B.shape[-1]
    chunks = in_chunks(tokens, a.state_indices.shape[0], state, a.x.dtype, a.x.device)
    return scan_in_chunks(a) if chunks else scan_in_order(a)


def in_chunks(tokens: int, batch: int, state: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all chunks of a sequence are worked at together, not one after the other.

    ``state`` is its shape, ``dtype`` that of the rows. So are long sequences, which one after the other takes long
    however few the heads are, and not quite so long ones where there is much to do, up to :data:`_ROOM`. Only on a
    Hopper, the one GPU it is measured on, and of rows of 16 bits and a state_dim of at most 128, for which its tiles
    are made. The choice follows from the shape alone, since a CUDA graph is replayed for other sequences.
    """
    heads, head_dim, state_dim = state
    work = tokens * heads * cdiv(head_dim, _BLOCK_P)
    if not is_hopper(device) or dtype.itemsize != 2 or state_dim > 128 or work == 0 or batch == 0:
        return False
    if kept_bytes(tokens, batch, state, dtype.itemsize, multiprocessors(device)) > _ROOM:
        return False
    much = work >= _MUCH * multiprocessors(device)
    return tokens >= (_NOT_SHORT if much else _LONG) * batch


def scan_in_order(a: SelectiveScanPrefill) -> Tensor:
    """In one launch, of a program for some rows of each head's state of each sequence."""
    out = a.x.new_empty(a.x.shape)
    if out.numel() == 0:
        return out
    tokens, heads, head_dim = a.x.shape
    groups, state_dim = a.B.shape[-2:]
    batch = a.state_indices.shape[0]
    most, stages = _FLOAT32 if a.x.element_size() == 4 else (_BLOCK_P, _STAGES)
    block_p = min(most, max(LEAST, next_power_of_2(head_dim)))
    x, dt, B, C, z = (None if rows is None else near(rows, _CHUNK) for rows in (a.x, a.dt, a.B, a.C, a.z))
    launch(
        _selective_scan_prefill,
        ((batch + 1) * heads * cdiv(head_dim, block_p),),
        a.buffer,
        x,
        dt,
        a.A.contiguous(),
        B,
        C,
        None if a.D is None else a.D.contiguous(),
        z,
        None if a.dt_bias is None else a.dt_bias.contiguous(),
        out,
        a.query_start.contiguous(),
        a.state_indices.contiguous(),
        None if a.has_initial_state is None else a.has_initial_state.contiguous(),
        *(None if rows is None else tuple(rows.stride()) for rows in (x, dt, B, C, z)),
        tokens,
        batch,
        a.state_plane[4],
        *(a.state_plane[i] for i in (0, 1, 3)),
        a.dt_min,
        math.inf if a.dt_max is None else a.dt_max,
        HEADS=heads,
        HEAD_DIM=head_dim,
        STATE_DIM=state_dim,
        GROUP=heads // groups,
        SOFTPLUS=a.dt_softplus,
        DTYPE=TRITON_DTYPE[a.state_dtype],
        CHUNK=_CHUNK,
        BLOCK_P=block_p,
        BLOCK_S=max(LEAST, next_power_of_2(state_dim)),
        num_warps=_WARPS,
        num_stages=stages,
    )
    return out
