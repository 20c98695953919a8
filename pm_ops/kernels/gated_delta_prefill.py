"""gated_delta_prefill: chunks of 64 tokens, in three launches.

1. `_gated_delta_chunks`: what of a chunk does not depend on the state, see there.
2. `_gated_delta_states`: from chunk to chunk. A program holds columns of one value head's state, [key, value],
   from the page to the page; the state that each chunk begins with is kept for
3. `_gated_delta_outputs`: the chunks' results, again all of them at a time.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import TRITON_DTYPE, cdiv, next_power_of_2
from .gated_delta import L2_EPS, state_cells
from .gated_delta_chunk import CHUNK, _gated_delta_chunks, chunk_of, load_rows
from .launch import Launch
from .padding import zero_padding

if TYPE_CHECKING:
    from ..ops.gated_delta import GatedDeltaPrefill


@triton.jit(do_not_specialize=["num_tokens", "num_pages"])
def _gated_delta_states(
    buffer,
    key,
    value,
    query_start,
    state_indices,
    has_initial_state,
    decay_sums,
    key_norms,
    inverses,
    changes,
    states,
    num_tokens: tl.int64,
    num_pages: tl.int64,
    offset: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    key_strides,
    value_strides,
    L2_NORM: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (VALUE_DIM + VALUE_BLOCK - 1) // VALUE_BLOCK
    b = tl.program_id(0) // (blocks * HEADS)
    h = (tl.program_id(0) // blocks % HEADS).to(tl.int64)
    v = tl.program_id(0) % blocks * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    k = tl.arange(0, KEY_BLOCK)
    start = tl.load(query_start + b).to(tl.int64)
    count = tl.minimum(tl.load(query_start + b + 1).to(tl.int64), num_tokens) - start
    page = tl.load(state_indices + b).to(tl.int64)
    if (count <= 0) | (page < 0) | (page >= num_pages):
        return

    inside = (k < KEY_DIM)[:, None] & (v < VALUE_DIM)[None, :]
    cells = state_cells(
        buffer, page, h, offset, page_stride, head_stride, v[None, :], k[:, None],
        VALUE_DIM, KEY_DIM, VALUE_FIRST, STATE_DTYPE,
    )  # fmt: skip
    if has_initial_state is None:
        state = tl.zeros([KEY_BLOCK, VALUE_BLOCK], tl.float32)
    else:
        initial = tl.load(has_initial_state + b) != 0
        state = tl.load(cells, mask=inside & initial, other=0.0).to(tl.float32)

    i = tl.arange(0, CHUNK)
    key += h // GROUP * key_strides[1]
    value += h * value_strides[1]
    states += ((start // CHUNK + b) * HEADS + h) * (KEY_DIM * VALUE_DIM)
    for chunk in range(tl.cdiv(count, CHUNK).to(tl.int32)):
        first = start + chunk * CHUNK
        exists = i < start + count - first
        tl.store(states + k[:, None] * VALUE_DIM + v[None, :], state.to(DTYPE), mask=inside)
        states += HEADS * KEY_DIM * VALUE_DIM
        c = tl.load(decay_sums + (first + i) * HEADS + h, mask=exists, other=0.0)
        last = tl.load(decay_sums + (tl.minimum(first + CHUNK, start + count) - 1) * HEADS + h)
        norm = 1.0
        if L2_NORM:
            norm = tl.load(key_norms + (first + i) * HEADS + h, mask=exists, other=0.0)

        keys = load_rows(key, first, i, exists, key_strides[0], k, key_strides[2], KEY_DIM, DTYPE)
        values = load_rows(value, first, i, exists, value_strides[0], v, value_strides[2], VALUE_DIM, DTYPE)
        inverse = load_rows(inverses + h * CHUNK, first, i, exists, HEADS * CHUNK, i, 1, CHUNK, DTYPE)
        found = tl.dot(keys, state.to(DTYPE), input_precision=PRECISION) * (tl.exp2(c) * norm)[:, None]
        change = tl.dot(inverse, (values.to(tl.float32) - found).to(DTYPE), input_precision=PRECISION)
        at = changes + (first * HEADS + h) * VALUE_DIM + i[:, None] * (HEADS * VALUE_DIM) + v[None, :]
        tl.store(at, change.to(DTYPE), mask=exists[:, None] & (v < VALUE_DIM)[None, :])
        change *= (tl.exp2(tl.where(exists, last - c, 0.0)) * norm)[:, None]
        state = tl.dot(tl.trans(keys), change.to(DTYPE), state * tl.exp2(last), input_precision=PRECISION)
    tl.store(cells, state.to(STATE_DTYPE), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "batch", "num_pages"])
def _gated_delta_outputs(
    query,
    key,
    query_start,
    state_indices,
    decay_sums,
    key_norms,
    changes,
    states,
    out,
    scale,
    num_tokens: tl.int64,
    batch,
    num_pages: tl.int64,
    query_strides,
    key_strides,
    L2_NORM: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (VALUE_DIM + VALUE_BLOCK - 1) // VALUE_BLOCK
    h = (tl.program_id(0) // blocks).to(tl.int64)
    v = tl.program_id(0) % blocks * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    slot = tl.program_id(1).to(tl.int64)
    b, first, count = chunk_of(query_start, tl.program_id(1), batch, num_tokens)
    if count <= 0:
        return
    i = tl.arange(0, CHUNK)
    exists = i < count
    columns = (v < VALUE_DIM)[None, :]
    cells = out + (first * HEADS + h) * VALUE_DIM + i[:, None] * (HEADS * VALUE_DIM) + v[None, :]
    page = tl.load(state_indices + b).to(tl.int64)
    if (page < 0) | (page >= num_pages):
        tl.store(cells, tl.zeros([CHUNK, VALUE_BLOCK], out.dtype.element_ty), mask=exists[:, None] & columns)
        return

    d = tl.arange(0, KEY_BLOCK)
    kh = h // GROUP
    q = load_rows(
        query + kh * query_strides[1], first, i, exists, query_strides[0], d, query_strides[2], KEY_DIM, DTYPE
    )
    k = load_rows(key + kh * key_strides[1], first, i, exists, key_strides[0], d, key_strides[2], KEY_DIM, DTYPE)
    state = tl.load(
        states + (slot * HEADS + h) * (KEY_DIM * VALUE_DIM) + d[:, None] * VALUE_DIM + v[None, :],
        mask=(d < KEY_DIM)[:, None] & columns,
        other=0.0,
    )
    change = load_rows(changes + h * VALUE_DIM, first, i, exists, HEADS * VALUE_DIM, v, 1, VALUE_DIM, DTYPE)
    at = (first + i) * HEADS + h
    c = tl.load(decay_sums + at, mask=exists, other=0.0)
    visible = (i[:, None] >= i[None, :]) & exists[:, None]
    a = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    a *= tl.exp2(tl.where(visible, c[:, None] - c[None, :], 0.0))
    if L2_NORM:
        a *= tl.load(key_norms + at, mask=exists, other=0.0)[None, :]
    o = tl.dot(q, state, input_precision=PRECISION) * tl.exp2(c)[:, None]
    o = tl.dot(tl.where(visible, a, 0.0).to(DTYPE), change, o, input_precision=PRECISION) * scale
    if L2_NORM:
        o *= tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + L2_EPS)[:, None]
    tl.store(cells, o.to(out.dtype.element_ty), mask=exists[:, None] & columns)


def gated_delta_prefill(a: GatedDeltaPrefill) -> Tensor:
    """`pm_ops::gated_delta_prefill` in three launches, and one more for padding rows."""
    tokens, key_heads, key_dim = a.key.shape
    _, heads, value_dim = a.value.shape
    batch = a.state_indices.shape[0]
    out = a.value.new_empty(a.value.shape)
    if tokens == 0:
        return out
    if batch == 0:
        return out.zero_()
    dtype = a.key.dtype if a.key.dtype == a.query.dtype == a.value.dtype else torch.float32
    strides = tuple(x.stride() for x in (a.query, a.key, a.value, a.g, a.beta))
    chunks, states, outputs = _launches(
        tokens, batch, (key_heads, key_dim, heads, value_dim), strides, tuple(a.state_plane), a.state_dtype, dtype,
        a.l2_norm, a.value_first,
    )  # fmt: skip
    new = functools.partial(torch.empty, device=out.device)
    decay_sums = new(tokens, heads, dtype=torch.float32)
    key_norms = new(tokens, heads, dtype=torch.float32) if a.l2_norm else None
    inverses, changes = new(tokens, heads, CHUNK.value, dtype=dtype), new(tokens, heads, value_dim, dtype=dtype)
    kept = new(tokens // CHUNK.value + batch, heads, key_dim, value_dim, dtype=dtype)
    start, index = a.query_start.contiguous(), a.state_indices.contiguous()
    a_log, dt_bias, initial = (None if x is None else x.contiguous() for x in (a.a_log, a.dt_bias, a.has_initial_state))
    chunks(a.key, a.g, a.beta, start, a_log, dt_bias, decay_sums, key_norms, inverses)
    states(a.buffer, a.key, a.value, start, index, initial, decay_sums, key_norms, inverses, changes, kept)
    outputs(a.query, a.key, start, index, decay_sums, key_norms, changes, kept, out, a.scale)
    zero_padding(out, start)
    return out


@functools.lru_cache(4096)
def _launches(
    tokens: int,
    batch: int,
    shape: tuple[int, int, int, int],
    strides: tuple[tuple[int, ...], ...],
    plane: tuple[int, ...],
    state_dtype: torch.dtype,
    dtype: torch.dtype,
    l2_norm: bool,
    value_first: bool,
) -> tuple[Launch, Launch, Launch]:
    """The three launches of inputs ``[T, heads, dim]``; ``shape``: key heads and dim, value heads and dim."""
    key_heads, key_dim, heads, value_dim = shape
    query_strides, key_strides, value_strides, g_strides, beta_strides = strides
    offset, page_stride, _, head_stride, num_pages = plane
    slots = tokens // CHUNK.value + batch
    shared: dict[str, Any] = dict(
        L2_NORM=l2_norm,
        DTYPE=TRITON_DTYPE[dtype],
        PRECISION="tf32" if dtype.itemsize == 2 else "tf32x3",
        HEADS=heads,
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        KEY_BLOCK=max(next_power_of_2(key_dim), 16),
    )
    tiles = prefill_tiles(key_dim, value_dim, dtype)
    of_states = heads * cdiv(value_dim, tiles[1]["VALUE_BLOCK"])
    of_outputs = heads * cdiv(value_dim, tiles[2]["VALUE_BLOCK"])
    return (
        Launch(
            _gated_delta_chunks,
            (heads, slots),
            (tokens, batch, key_strides, g_strides, beta_strides),
            **shared,
            **tiles[0],
        ),
        Launch(
            _gated_delta_states,
            (batch * of_states,),
            (tokens, num_pages, offset, page_stride, head_stride, key_strides, value_strides),
            VALUE_FIRST=value_first,
            STATE_DTYPE=TRITON_DTYPE[state_dtype],
            VALUE_DIM=value_dim,
            **shared,
            **tiles[1],
        ),
        Launch(
            _gated_delta_outputs,
            (of_outputs, slots),
            (tokens, batch, num_pages, query_strides, key_strides),
            VALUE_DIM=value_dim,
            **shared,
            **tiles[2],
        ),
    )


def prefill_tiles(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[dict[str, int], ...]:
    """Columns of values a program, warps and stages of the three kernels."""
    whole = max(next_power_of_2(value_dim), 16)
    wide = 64 if dtype.itemsize == 2 and key_dim <= 128 else 32
    return (
        {"num_warps": 4, "num_stages": 2},
        {"VALUE_BLOCK": min(whole, wide), "num_warps": 4, "num_stages": 2 if wide == 64 else 1},
        {"VALUE_BLOCK": min(whole, wide), "num_warps": 4, "num_stages": 2},
    )
