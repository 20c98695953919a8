"""selective_scan_prefill for long sequences: parallel over their chunks, in three or four launches.

With `a` the running sum of `dt * A` within a chunk, and `state` the state at its beginning,

    out[i] = sum_{j <= i} (C[i] . B[j]) exp(a[i] - a[j]) dt[j] x[j] + exp(a[i]) C[i] . state

so outputs of all chunks are independent once their states are known. `_selective_steps` computes dt and `a`, of all
chunks at a time. `_selective_states` computes states: its programs go through a segment of a sequence each, many
chunks, with the state in float32 registers; a sequence's first segment begins with the state of its page, the others
with nothing. Where there may be several segments `_selective_segments` goes from one to the next: what each begins
with, and the page at the end. `_selective_outputs` adds to what a chunk's state gives what that of its segment does,
decayed; its programs have a chunk of some heads with the same B and C.

What is kept in between, for T tokens: states at the beginning of each chunk in x's dtype, `T / 64 * heads * head_dim *
state_dim` elements (537 MB for 16,384 tokens of 128 heads of 64 x 128, twice as much as x); two numbers for each token
and head; and of segments, where there are several, a state in float32 and one in x's dtype. Chunks and segments begin
anew with every sequence: one of either more than the tokens make is held for each sequence. All of it is allocated by
what the host knows, the numbers of tokens and sequences, so that a CUDA graph serves whatever the starts say.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import LOG2E, TRITON_DTYPE, cdiv, near, next_power_of_2
from .device import multiprocessors
from .launch import launch
from .state import chunk_of, of_head, silu, step_size, tokens_of

if TYPE_CHECKING:
    from ..ops.selective import SelectiveScanPrefill


@dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    ``chunk`` tokens from one state that is kept to the next; ``block_p`` rows of a head's state a program, ``shared``
    heads of a program for outputs, at most; and warps and stages of the programs for states and outputs.
    """

    chunk: int = 64
    block_p: int = 64
    shared: int = 16
    state_warps: int = 4
    state_stages: int = 4
    out_warps: int = 4
    out_stages: int = 2


TILES = Tiles()
"""Measured on the H200. Chunks of 128 take 0.8 of the time for states there and 1.2 times as long for outputs; with a
stage more for these, or 8 warps, fewer programs fit a multiprocessor."""
_SHORTEST = 512
"""Tokens of a segment, at least."""
_HEADS = 16
"""Of a program for steps."""
_CELLS = 2048
"""Of a state, a program that goes from segment to segment."""
LEAST = 32
"""Rows and columns of a tile, at least, so that none is spread over fewer than all warps."""


@triton.jit(do_not_specialize=["num_tokens", "batch"])
def _selective_steps(
    dt,
    A,
    dt_bias,
    query_start,
    sums,
    steps,
    dt_at,  # strides of (token, head)
    num_tokens: tl.int64,
    batch,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """dt as it is used, and the running sum of its products with A, as powers of two, of one chunk of some heads."""
    blocks: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    slot = tl.program_id(0) // blocks
    b, start, first, left = chunk_of(query_start, slot, batch, num_tokens, CHUNK)
    if (left <= 0) | (b >= batch):
        return
    i = tl.arange(0, CHUNK)[:, None]
    h = (tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
    mask = (i < left) & (h < HEADS)
    h = tl.minimum(h, HEADS - 1)
    step = tl.load(dt + first * dt_at[0] + (i * dt_at[0] + h * dt_at[1]), mask=mask, other=0.0)
    step = step_size(step, of_head(dt_bias, h), SOFTPLUS, dt_min, dt_max)
    step = tl.where(mask, step, 0.0)  # rows past the end neither decay nor add
    a = tl.cumsum(step, 0) * (of_head(A, h) * LOG2E)
    at = (start // CHUNK + b + (first - start) // CHUNK) * (HEADS * CHUNK) + (h * CHUNK + i)
    own = tl.program_id(0) % blocks * BLOCK_H + tl.arange(0, BLOCK_H)[None, :] < HEADS
    tl.store(sums + at, a, mask=own)
    tl.store(steps + at, step, mask=own)


@triton.jit(do_not_specialize=["num_tokens", "batch", "num_pages", "segment"])
def _selective_states(
    buffer,
    x,
    B,
    query_start,
    state_indices,
    has_initial_state,
    sums,
    steps,
    states,
    before,
    segments,
    decays,
    x_at,  # strides of (token, head, dim)
    B_at,  # (token, group, dim)
    num_tokens: tl.int64,
    batch,
    segment,
    num_pages: tl.int64,
    offset: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """From chunk to chunk of a segment: the state at the beginning of each, and the decay since the segment's."""
    blocks: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    ROW: tl.constexpr = x.dtype.element_ty
    block = tl.program_id(0) % blocks
    h = tl.program_id(0).to(tl.int64) // blocks % HEADS
    slot = tl.program_id(0) // (HEADS * blocks)
    b, start, first, left = chunk_of(query_start, slot, batch, num_tokens, segment)
    if (left <= 0) | (b >= batch):
        return
    page = tl.load(state_indices + b).to(tl.int64)
    if (page < 0) | (page >= num_pages):
        return
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    s = tl.arange(0, BLOCK_S)
    i = tl.arange(0, CHUNK)
    in_head = p < HEAD_DIM
    in_state = s < STATE_DIM
    mask = in_state[:, None] & in_head[None, :]
    kept = s[:, None] * HEAD_DIM + p[None, :]  # in between states are transposed, as their products are
    own = block == 0  # of a head's programs the one that stores what is the same for all
    begins = first == start
    count = tl.minimum(left, segment).to(tl.int32)

    cell = (buffer + (offset + page * page_stride + h * head_stride)).to(tl.pointer_type(DTYPE))
    cell += p[None, :] * STATE_DIM + s[:, None]
    state = tl.zeros([BLOCK_S, BLOCK_P], tl.float32)
    if has_initial_state is not None:
        initial = (tl.load(has_initial_state + b) != 0) & begins
        state += tl.load(cell, mask=mask & initial, other=0.0).to(tl.float32)
    x += first * x_at[0] + h * x_at[1]
    B += first * B_at[0] + h // GROUP * B_at[1]
    at = (start // CHUNK + b + (first - start) // CHUNK) * HEADS + h
    sums += at * CHUNK
    steps += at * CHUNK
    states += at * (HEAD_DIM * STATE_DIM)
    before += at
    tl.debug_barrier()

    total = 0.0
    for done in range(0, count, CHUNK):
        exists = i < count - done
        mine = exists[:, None] & in_head[None, :]
        whole = exists[:, None] & in_state[None, :]
        a = tl.load(sums + i)
        step = tl.load(steps + i)
        end = tl.load(sums + (CHUNK - 1))
        rows = tl.load(x + (i[:, None] * x_at[0] + p[None, :] * x_at[2]), mask=mine, other=0.0)
        key = tl.load(B + (i[:, None] * B_at[0] + s[None, :] * B_at[2]), mask=whole, other=0.0).to(ROW)
        tl.store(states + kept, state.to(ROW), mask=mask)
        tl.store(before, total, mask=own)
        added = (rows.to(tl.float32) * (tl.exp2(end - a) * step)[:, None]).to(ROW)
        state = tl.dot(tl.trans(key), added, state * tl.exp2(end), input_precision="tf32x3")
        total += end
        x += CHUNK * x_at[0]
        B += CHUNK * B_at[0]
        sums += HEADS * CHUNK
        steps += HEADS * CHUNK
        states += HEADS * HEAD_DIM * STATE_DIM
        before += HEADS
    alone = begins & (left <= segment)
    tl.store(cell, state.to(DTYPE), mask=mask & alone)
    if segments is not None:
        at = slot.to(tl.int64) * HEADS + h
        tl.store(segments + at * (HEAD_DIM * STATE_DIM) + kept, state, mask=mask & (not alone))
        tl.store(decays + at, total, mask=own & (not alone))


@triton.jit(do_not_specialize=["num_tokens", "batch", "num_pages", "segment"])
def _selective_segments(
    buffer,
    query_start,
    state_indices,
    segments,
    decays,
    earliest,
    num_tokens: tl.int64,
    batch,
    segment,
    num_pages: tl.int64,
    offset: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From segment to segment: what each begins with, in the dtype of `earliest`; and the last state to the page."""
    blocks: tl.constexpr = (HEAD_DIM * STATE_DIM + BLOCK - 1) // BLOCK
    b = tl.program_id(0) // (HEADS * blocks)
    h = tl.program_id(0).to(tl.int64) // blocks % HEADS
    cells = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = cells < HEAD_DIM * STATE_DIM
    start, stop = tokens_of(query_start, b, batch, num_tokens)
    count = stop - start
    if count <= segment:
        return
    page = tl.load(state_indices + b).to(tl.int64)
    if (page < 0) | (page >= num_pages):
        return
    at = (start // segment + b) * HEADS + h
    state = tl.load(segments + at * (HEAD_DIM * STATE_DIM) + cells, mask=mask, other=0.0)
    for _ in range(1, tl.cdiv(count, segment).to(tl.int32)):
        at += HEADS
        own = tl.load(segments + at * (HEAD_DIM * STATE_DIM) + cells, mask=mask, other=0.0)
        tl.store(earliest + at * (HEAD_DIM * STATE_DIM) + cells, state.to(earliest.dtype.element_ty), mask=mask)
        state = state * tl.exp2(tl.load(decays + at)) + own
    cell = (buffer + (offset + page * page_stride + h * head_stride)).to(tl.pointer_type(DTYPE))
    tl.store(cell + (cells % HEAD_DIM * STATE_DIM + cells // HEAD_DIM), state.to(DTYPE), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "batch", "num_pages", "segment"])
def _selective_outputs(
    x,
    B,
    C,
    D,
    z,
    out,
    query_start,
    state_indices,
    sums,
    steps,
    states,
    before,
    earliest,
    x_at,
    B_at,
    C_at,
    z_at,
    num_tokens: tl.int64,
    batch,
    segment,
    num_pages: tl.int64,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    blocks: tl.constexpr = (HEAD_DIM + BLOCK_P - 1) // BLOCK_P
    parts: tl.constexpr = HEADS // SHARED
    ROW: tl.constexpr = x.dtype.element_ty
    p = tl.program_id(0) % blocks * BLOCK_P + tl.arange(0, BLOCK_P)
    h = tl.program_id(0).to(tl.int64) // blocks % parts * SHARED
    slot = tl.program_id(0) // (parts * blocks)
    b, start, first, left = chunk_of(query_start, slot, batch, num_tokens, CHUNK)
    if left <= 0:
        return
    s = tl.arange(0, BLOCK_S)
    i = tl.arange(0, CHUNK)
    exists = i < left
    in_head = p < HEAD_DIM
    in_state = s < STATE_DIM
    mine = exists[:, None] & in_head[None, :]
    here = i[:, None] * (HEADS * HEAD_DIM) + p[None, :]
    out += (first * HEADS + h) * HEAD_DIM
    page = tl.load(state_indices + b, mask=b < batch, other=-1).to(tl.int64)
    if (page < 0) | (page >= num_pages):
        for n in tl.static_range(SHARED):
            tl.store(out + n * HEAD_DIM + here, tl.zeros([CHUNK, BLOCK_P], ROW), mask=mine)
        return

    whole = exists[:, None] & in_state[None, :]
    B += first * B_at[0] + h // GROUP * B_at[1]
    C += first * C_at[0] + h // GROUP * C_at[1]
    query = tl.load(C + (i[:, None] * C_at[0] + s[None, :] * C_at[2]), mask=whole, other=0.0).to(ROW)
    key = tl.load(B + (i[:, None] * B_at[0] + s[None, :] * B_at[2]), mask=whole, other=0.0).to(ROW)
    score = tl.dot(query, tl.trans(key), input_precision="tf32x3")
    earlier = (i[:, None] >= i[None, :]) & exists[:, None]

    x += first * x_at[0] + h * x_at[1]
    if z is not None:
        z += first * z_at[0] + h * z_at[1]
    at = (start // CHUNK + b + (first - start) // CHUNK) * HEADS + h
    sums += at * CHUNK
    steps += at * CHUNK
    states += at * (HEAD_DIM * STATE_DIM)
    before += at
    follows = first - start >= segment
    if earliest is not None:
        earliest += ((start // segment + b + (first - start) // segment) * HEADS + h) * (HEAD_DIM * STATE_DIM)
    kept = s[:, None] * HEAD_DIM + p[None, :]
    inside = in_state[:, None] & in_head[None, :]
    for n in range(SHARED):
        state = tl.load(states + kept, mask=inside, other=0.0)
        a = tl.load(sums + i)
        step = tl.load(steps + i)
        rows = tl.load(x + (i[:, None] * x_at[0] + p[None, :] * x_at[2]), mask=mine, other=0.0)
        skip = of_head(D, h + n)
        y = tl.zeros([CHUNK, BLOCK_P], tl.float32)
        if earliest is not None:
            of_segment = tl.load(earliest + kept, mask=inside & follows, other=0.0)
            decay = tl.exp2(tl.load(before))
            y = tl.dot(query, of_segment, y, input_precision="tf32x3") * decay
        y = tl.dot(query, state, y, input_precision="tf32x3") * tl.exp2(a)[:, None]
        weight = tl.exp2(tl.where(earlier, a[:, None] - a[None, :], float("-inf"))) * step[None, :]
        y = tl.dot((weight * score).to(ROW), rows, y, input_precision="tf32x3")
        y += skip * rows.to(tl.float32)
        if z is not None:
            gate = tl.load(z + (i[:, None] * z_at[0] + p[None, :] * z_at[2]), mask=mine, other=0.0)
            y *= silu(gate.to(tl.float32))
            z += z_at[1]
        tl.store(out + here, y.to(ROW), mask=mine)
        out += HEAD_DIM
        x += x_at[1]
        sums += CHUNK
        steps += CHUNK
        states += HEAD_DIM * STATE_DIM
        before += 1
        if earliest is not None:
            earliest += HEAD_DIM * STATE_DIM


def scan_in_chunks(a: SelectiveScanPrefill, tiles: Tiles = TILES) -> Tensor:
    """`pm_ops::selective_scan_prefill`, whatever its shape; there are sequences and rows."""
    tokens, heads, head_dim = a.x.shape
    groups, state_dim = a.B.shape[-2:]
    batch = a.state_indices.shape[0]
    out = a.x.new_empty(a.x.shape)
    chunk = tiles.chunk
    segment = segment_of(tokens, heads, multiprocessors(out.device))
    num_chunks, num_segments = tokens // chunk + batch, tokens // segment + batch
    block_p = min(tiles.block_p, max(LEAST, next_power_of_2(head_dim)))
    blocks, each = cdiv(head_dim, block_p), heads // groups
    shared = math.gcd(each, tiles.shared)
    new = functools.partial(torch.empty, dtype=torch.float32, device=out.device)
    sums, steps = new(num_chunks, heads, chunk), new(num_chunks, heads, chunk)
    states, before = new(num_chunks, heads, head_dim, state_dim, dtype=a.x.dtype), new(num_chunks, heads)
    several = tokens > segment
    segments = new(num_segments, heads, head_dim, state_dim) if several else None
    decays = new(num_segments, heads) if several else None
    earliest = new(num_segments, heads, head_dim, state_dim, dtype=a.x.dtype) if several else None

    x, dt, B, C, z = (None if rows is None else near(rows, chunk) for rows in (a.x, a.dt, a.B, a.C, a.z))
    x_at, dt_at, B_at, C_at, z_at = (None if rows is None else tuple(rows.stride()) for rows in (x, dt, B, C, z))
    start, index = a.query_start.contiguous(), a.state_indices.contiguous()
    page = (a.state_plane[4], *(a.state_plane[n] for n in (0, 1, 3)))
    types = dict(HEADS=heads, DTYPE=TRITON_DTYPE[a.state_dtype])
    shape = dict(HEADS=heads, HEAD_DIM=head_dim, STATE_DIM=state_dim, GROUP=each, CHUNK=chunk)
    shape |= dict(BLOCK_P=block_p, BLOCK_S=max(LEAST, next_power_of_2(state_dim)))
    launch(
        _selective_steps,
        (num_chunks * cdiv(heads, _HEADS),),
        dt,
        a.A.contiguous(),
        None if a.dt_bias is None else a.dt_bias.contiguous(),
        *(start, sums, steps, dt_at, tokens, batch),
        a.dt_min,
        math.inf if a.dt_max is None else a.dt_max,
        HEADS=heads,
        SOFTPLUS=a.dt_softplus,
        CHUNK=chunk,
        BLOCK_H=_HEADS,
    )
    launch(
        _selective_states,
        (num_segments * heads * blocks,),
        *(a.buffer, x, B, start, index),
        None if a.has_initial_state is None else a.has_initial_state.contiguous(),
        *(sums, steps, states, before, segments, decays),
        *(x_at, B_at),
        *(tokens, batch, segment, *page),
        **shape | types,
        num_warps=tiles.state_warps,
        num_stages=tiles.state_stages,
    )
    if several:
        launch(
            _selective_segments,
            (batch * heads * cdiv(head_dim * state_dim, _CELLS),),
            *(a.buffer, start, index, segments, decays, earliest),
            *(tokens, batch, segment, *page),
            **types,
            HEAD_DIM=head_dim,
            STATE_DIM=state_dim,
            BLOCK=_CELLS,
        )
    launch(
        _selective_outputs,
        ((num_chunks + 1) * (heads // shared) * blocks,),
        *(x, B, C, None if a.D is None else a.D.contiguous(), z, out, start, index),
        *(sums, steps, states, before, earliest),
        *(x_at, B_at, C_at, z_at),
        *(tokens, batch, segment, a.state_plane[4]),
        **shape,
        SHARED=shared,
        num_warps=tiles.out_warps,
        num_stages=tiles.out_stages,
    )
    return out


def kept_bytes(tokens: int, batch: int, state: tuple[int, int, int], item: int, multiprocessors: int) -> int:
    """Bytes of the states that are kept in between, of chunks and of segments; ``item``: those of an element of x."""
    segment = segment_of(tokens, state[0], multiprocessors)
    segments = tokens // segment + batch if tokens > segment else 0
    return math.prod(state) * ((tokens // TILES.chunk + batch) * item + segments * (4 + item))


def segment_of(tokens: int, heads: int, multiprocessors: int) -> int:
    """Tokens of a segment, a power of two: all where heads alone make about as many programs for the states as there
    are multiprocessors, else as many as make two programs for each of these, about.

    Segments cost a launch, and a product for each chunk behind the first one: of 128 heads 16,384 tokens take 613 µs as
    one on the H200, 649 as two, 661 as four; of 16 heads 108 as sixteen, 122 as thirty-two. How long one is follows
    from the tokens of all sequences together, not from how they are spread over them.
    """
    segment = next_power_of_2(cdiv(tokens * heads, multiprocessors))
    return segment if segment >= tokens else max(segment // 2, _SHORTEST)
