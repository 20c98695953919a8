"""gated_delta_prefill: chunks of 64 tokens, in two launches.

`_gated_delta_chunks` computes what does not depend on the state, see there; `_gated_delta_scan` goes from chunk to
chunk. A program holds columns of one value head's state, [key, value], from the page to the page.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import TRITON_DTYPE, cdiv, near, next_power_of_2
from .device import is_hopper, multiprocessors
from .gated_delta import columns, state_cells
from .gated_delta_chunk import CHUNK, _gated_delta_chunks, load_rows
from .launch import Launch
from .padding import zero_padding
from .state import tokens_of

if TYPE_CHECKING:
    from ..ops.gated_delta import GatedDeltaPrefill


@triton.jit(do_not_specialize=["num_tokens", "batch", "num_pages"])
def _gated_delta_scan(
    buffer,
    query,
    key,
    value,
    query_start,
    state_indices,
    has_initial_state,
    scales,
    inverses,
    weights,
    out,
    num_tokens: tl.int64,
    batch,
    num_pages: tl.int64,
    offset: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    query_strides,
    key_strides,
    value_strides,
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
    start, stop = tokens_of(query_start, b, batch, num_tokens)
    count = stop - start
    if count <= 0:
        return
    page = tl.load(state_indices + b).to(tl.int64)
    live = (page >= 0) & (page < num_pages)
    inside = (k < KEY_DIM)[:, None] & (v < VALUE_DIM)[None, :] & live
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
    query += h // GROUP * query_strides[1]
    key += h // GROUP * key_strides[1]
    value += h * value_strides[1]
    inverses += h * CHUNK
    weights += h * CHUNK
    for chunk in range(tl.cdiv(count, CHUNK).to(tl.int32)):
        first = start + chunk * CHUNK
        exists = i < start + count - first
        at = (first + i) * HEADS + h
        record = scales + at * 4
        found_scale = tl.load(record, mask=exists, other=0.0)
        query_scale = tl.load(record + 1, mask=exists, other=0.0)
        change_scale = tl.load(record + 2, mask=exists, other=0.0)
        decay = tl.load(scales + (first * HEADS + h) * 4 + 3)
        queries = load_rows(query, first, i, exists, query_strides[0], k, query_strides[2], KEY_DIM, DTYPE)
        keys = load_rows(key, first, i, exists, key_strides[0], k, key_strides[2], KEY_DIM, DTYPE)
        values = load_rows(value, first, i, exists, value_strides[0], v, value_strides[2], VALUE_DIM, DTYPE)
        inverse = load_rows(inverses, first, i, exists, HEADS * CHUNK, i, 1, CHUNK, DTYPE)
        weight = load_rows(weights, first, i, exists, HEADS * CHUNK, i, 1, CHUNK, DTYPE)

        before = state.to(DTYPE)
        found = tl.dot(keys, before, input_precision=PRECISION) * found_scale[:, None]
        o = tl.dot(queries, before, input_precision=PRECISION) * query_scale[:, None]
        new = (values.to(tl.float32) - found).to(DTYPE)
        change = tl.dot(inverse, new, input_precision=PRECISION) * change_scale[:, None]
        o = tl.dot(weight, new, o, input_precision=PRECISION)
        state = tl.dot(tl.trans(keys), change.to(DTYPE), state * decay, input_precision=PRECISION)
        rows = out + (first * HEADS + h) * VALUE_DIM + (i[:, None] * (HEADS * VALUE_DIM) + v[None, :])
        o = tl.where(live, o, 0.0).to(out.dtype.element_ty)
        tl.store(rows, o, mask=exists[:, None] & (v < VALUE_DIM)[None, :])
    tl.store(cells, state.to(STATE_DTYPE), mask=inside)


def gated_delta_prefill(a: GatedDeltaPrefill) -> Tensor:
    """`pm_ops::gated_delta_prefill` in two launches, and one more for padding rows."""
    tokens, key_heads, key_dim = a.key.shape
    _, heads, value_dim = a.value.shape
    batch = a.state_indices.shape[0]
    out = a.value.new_empty(a.value.shape)
    if tokens == 0:
        return out
    if batch == 0:
        return out.zero_()
    dtype = a.key.dtype if a.key.dtype == a.query.dtype == a.value.dtype else torch.float32
    query, key, value = (near(rows, CHUNK.value) for rows in (a.query, a.key, a.value))
    strides = tuple(x.stride() for x in (query, key, value, a.g, a.beta))
    chunks, scan = _launches(
        tokens, batch, (key_heads, key_dim, heads, value_dim), strides, tuple(a.state_plane), a.state_dtype, dtype,
        a.l2_norm, a.value_first, out.device,
    )  # fmt: skip
    new = functools.partial(torch.empty, device=out.device)
    scales = new(tokens, heads, 4, dtype=torch.float32)
    inverses, weights = (new(tokens, heads, CHUNK.value, dtype=dtype) for _ in range(2))
    start, index = a.query_start.contiguous(), a.state_indices.contiguous()
    a_log, dt_bias, initial = (None if x is None else x.contiguous() for x in (a.a_log, a.dt_bias, a.has_initial_state))
    kept = (scales, inverses, weights)
    chunks(query, key, a.g, a.beta, start, a_log, dt_bias, *kept, a.scale)
    scan(a.buffer, query, key, value, start, index, initial, *kept, out)
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
    device: torch.device,
) -> tuple[Launch, Launch]:
    """The two launches of inputs ``[T, heads, dim]``; ``shape``: key heads and dim, value heads and dim."""
    key_heads, key_dim, heads, value_dim = shape
    query_strides, key_strides, value_strides, g_strides, beta_strides = strides
    offset, page_stride, _, head_stride, num_pages = plane
    shared: dict[str, Any] = dict(
        DTYPE=TRITON_DTYPE[dtype],
        PRECISION="tf32" if dtype.itemsize == 2 else "tf32x3",
        HEADS=heads,
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
    )
    key_block = max(next_power_of_2(key_dim), 16)
    tile = scan_tile(key_dim, value_dim, dtype, batch * heads, device)
    return (
        Launch(
            _gated_delta_chunks,
            (heads * (tokens // CHUNK.value + batch),),
            (tokens, batch, query_strides, key_strides, g_strides, beta_strides),
            L2_NORM=l2_norm,
            KEY_BLOCK=min(columns(key_dim), 128),
            **shared,
            num_warps=4,
            **({"maxnreg": 168} if dtype.itemsize == 2 and is_hopper(device) else {}),  # a third program fits
        ),
        Launch(
            _gated_delta_scan,
            (batch * heads * cdiv(value_dim, tile["VALUE_BLOCK"]),),
            (tokens, batch, num_pages, offset, page_stride, head_stride, query_strides, key_strides, value_strides),
            VALUE_FIRST=value_first,
            STATE_DTYPE=TRITON_DTYPE[state_dtype],
            VALUE_DIM=value_dim,
            KEY_BLOCK=key_block,
            **shared,
            **tile,
        ),
    )


def scan_tile(key_dim: int, value_dim: int, dtype: torch.dtype, heads: int, device: torch.device) -> dict[str, int]:
    """Columns of a state that a program has, its warps and stages. ``heads``: of all sequences together.

    What a chunk loads for 64 columns and 128 keys of 16 bits is 56 KiB: of three stages a Hopper's multiprocessor holds
    one program, of 256 keys it holds two stages. Fewer columns are for calls with few heads, whose programs would leave
    multiprocessors idle, for states that would not fit the registers, and for other GPUs.

    On a Hopper 16-bit rows never have one stage. The descriptors of matrices in shared memory would be the same in
    every chunk, and more than there are uniform registers: ptxas 12.8 keeps them in others and moves them back between
    wgmmas. Some of these then read outside of shared memory: memcheck says so of 192 keys; 32 columns of 128 fault too.
    Two stages of float32 rows would not fit: they have two warps, which a wgmma is not for.
    """
    hopper = is_hopper(device)
    small = dtype.itemsize == 2 and hopper
    columns = 64 if small and key_dim <= 128 and heads * cdiv(value_dim, 64) >= multiprocessors(device) else 32
    columns = min(columns, max(next_power_of_2(value_dim), 16))
    stages = (3 if key_dim <= 128 else 2) if small else 1
    warps = 2 if hopper and not small else 4
    return {"VALUE_BLOCK": columns, "num_warps": warps, "num_stages": stages}
