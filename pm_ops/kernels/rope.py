"""rope_store_kv: query and key rotated, key and value stored, in one launch.

The programs of a launch are shared out, in this order, to the rows of query, of key and of value. A row's pairs are
loaded as two tiles, the first elements and the second ones, and what is not rotated as a third. Products must not be
fused into sums, or the result would not be that of a rotation by separate operators: the launch asks the compiler for
that (`enable_fp_fusion`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops._quantise import LARGEST
from .common import TRITON_DTYPE, cdiv, next_power_of_2
from .launch import Launch
from .rows import (
    cells_of,
    largest,
    load_row,
    one_scale,
    own_scale,
    quantised,
    rows_of,
    slots_of,
    store_row,
    store_rows,
    store_scale,
    tile,
)

if TYPE_CHECKING:
    from ..ops.rope import RopeStoreKV


@triton.jit
def _load_pairs(
    row,
    stride,
    exists,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVICT: tl.constexpr,
):
    """The first and the second elements of the pairs of rows, in fp32; zeros where there are none."""
    if INTERLEAVED:  # one vectorised load, then apart
        x = load_row(row, stride, exists, 0, 2 * HALF, 2 * BLOCK, EVICT).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], BLOCK, 2)))
    else:
        first = load_row(row, stride, exists, 0, HALF, BLOCK, EVICT)
        second = load_row(row, stride, exists, HALF, 2 * HALF, BLOCK, EVICT)
        first, second = first.to(tl.float32), second.to(tl.float32)
    return first, second


@triton.jit
def _store_pairs(
    row,
    first,
    second,
    rest,
    exists,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    if INTERLEAVED:
        d = tl.arange(0, 2 * BLOCK)[None, :]
        tl.store(row[:, None] + d, tl.interleave(first, second), mask=exists[:, None] & (d < 2 * HALF))
    else:
        d = tl.arange(0, BLOCK)[None, :]
        tl.store(row[:, None] + d, first, mask=exists[:, None] & (d < HALF))
        tl.store(row[:, None] + (d + HALF), second, mask=exists[:, None] & (d < HALF))
    if DIM > 2 * HALF:
        store_row(row, rest, exists, 2 * HALF, DIM, REST_BLOCK)


@triton.jit
def _rotated(
    row,
    weight,
    positions,
    cos_sin,
    t,
    exists,
    max_position,
    eps,
    weight_offset,
    stride,
    table_stride,
    table_dim_stride,
    DTYPE: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """First and second elements of the pairs and the rest, after norm and rotation, rounded to the rows' own dtype."""
    first, second = _load_pairs(row, stride, exists, HALF, BLOCK, INTERLEAVED, "evict_first")
    rest = first  # stands for none
    if DIM > 2 * HALF:
        rest = load_row(row, stride, exists, 2 * HALF, DIM, REST_BLOCK, "evict_first")
    # Without a barrier ptxas issues these loads, which wait for nothing, only once the position has come.
    tl.debug_barrier()
    position = t.to(tl.int64)
    if positions is not None:
        position = tl.load(positions + t, mask=exists, other=0).to(tl.int64)
    known = (position >= 0) & (position < max_position)
    cos, sin = _load_pairs(cos_sin + position * table_stride, table_dim_stride, exists & known, HALF, BLOCK, False, "")
    cos = tl.where(known[:, None], cos, float("nan"))
    if weight is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if DIM > 2 * HALF:
            rest = rest.to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        weights = weight + tl.zeros([1], tl.int32)  # one row, of all heads
        one = tl.full([1], 1, tl.int1)
        first_weight, second_weight = _load_pairs(weights, 1, one, HALF, BLOCK, INTERLEAVED, "")
        factor = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, 1.0 * DIM) + eps))[:, None]
        first = first * factor * (weight_offset + first_weight)
        second = second * factor * (weight_offset + second_weight)
        if DIM > 2 * HALF:
            rest_weight = load_row(weights, 1, one, 2 * HALF, DIM, REST_BLOCK, "").to(tl.float32)
            rest = rest * factor * (weight_offset + rest_weight)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    return turned_first.to(DTYPE), turned_second.to(DTYPE), rest.to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "capacity", "max_position"])
def _rope_store_kv(
    buffer,
    query,
    key,
    value,
    query_out,
    key_out,
    positions,
    cos_sin,
    slots,
    q_weight,
    k_weight,
    eps,
    weight_offset,
    key_scale,
    value_scale,
    key_scale_tensor,
    value_scale_tensor,
    key_scale_plane,
    value_scale_plane,
    num_tokens: tl.int64,
    num_slots: tl.int64,
    capacity: tl.int64,
    max_position: tl.int64,
    query_stride: tl.int64,
    query_head_stride: tl.int64,
    query_dim_stride,  # unannotated: 1 becomes a constant
    key_stride: tl.int64,
    key_head_stride: tl.int64,
    key_dim_stride,
    value_stride: tl.int64,
    value_head_stride: tl.int64,
    value_dim_stride,
    table_stride: tl.int64,
    table_dim_stride,
    key_plane_offset: tl.int64,
    key_page_stride: tl.int64,
    key_token_stride: tl.int64,
    key_plane_head_stride: tl.int64,
    value_plane_offset: tl.int64,
    value_page_stride: tl.int64,
    value_token_stride: tl.int64,
    value_plane_head_stride: tl.int64,
    KEY_SCALED: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    KEY_LIMIT: tl.constexpr,
    VALUE_SCALED: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    VALUE_LIMIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    QUERY_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Names of tiles are a branch's own: the branches' dtypes may differ, and a variable's type may not.
    block = tl.program_id(0)
    query_blocks = tl.cdiv(num_tokens * QUERY_HEADS, ROWS)
    key_blocks = tl.cdiv(num_tokens * KEY_HEADS, ROWS)
    if block < query_blocks:
        row, t, h, exists = rows_of(block, num_tokens, QUERY_HEADS, ROWS)
        q_first, q_second, q_rest = _rotated(
            query + (t * query_stride + h * query_head_stride), q_weight, positions, cos_sin, t, exists,
            max_position, eps, weight_offset, query_dim_stride, table_stride, table_dim_stride,
            query.dtype.element_ty, DIM, HALF, BLOCK, REST_BLOCK, INTERLEAVED,
        )  # fmt: skip
        _store_pairs(
            query_out + row * DIM, q_first, q_second, q_rest, exists, DIM, HALF, BLOCK, REST_BLOCK, INTERLEAVED
        )
    elif block < query_blocks + key_blocks:
        row, t, h, exists = rows_of(block - query_blocks, num_tokens, KEY_HEADS, ROWS)
        page, token, stored = slots_of(slots, t, exists, num_slots, capacity, PAGE_SIZE)
        if key_out is None:
            exists = exists & (t < num_slots)  # not `stored`: the loads of rows then wait for no slot
        k_first, k_second, k_rest = _rotated(
            key + (t * key_stride + h * key_head_stride), k_weight, positions, cos_sin, t, exists,
            max_position, eps, weight_offset, key_dim_stride, table_stride, table_dim_stride,
            key.dtype.element_ty, DIM, HALF, BLOCK, REST_BLOCK, INTERLEAVED,
        )  # fmt: skip
        if key_out is not None:
            _store_pairs(
                key_out + row * DIM, k_first, k_second, k_rest, exists, DIM, HALF, BLOCK, REST_BLOCK, INTERLEAVED
            )
        OWN: tl.constexpr = key_scale_plane is not None
        if OWN:
            size = tl.maximum(largest(k_first), largest(k_second))
            if DIM > 2 * HALF:
                size = tl.maximum(size, largest(k_rest))
            k_scale = own_scale(size, KEY_LIMIT)
            store_scale(buffer, page, token, h, k_scale, stored, key_scale_plane)
        else:
            k_scale = one_scale(key_scale, key_scale_tensor)
        _store_pairs(
            cells_of(
                buffer, page, token, h,
                key_plane_offset, key_page_stride, key_token_stride, key_plane_head_stride, KEY_DTYPE,
            ),
            quantised(k_first, k_scale, KEY_SCALED, OWN, KEY_DTYPE, KEY_LIMIT),
            quantised(k_second, k_scale, KEY_SCALED, OWN, KEY_DTYPE, KEY_LIMIT),
            quantised(k_rest, k_scale, KEY_SCALED, OWN, KEY_DTYPE, KEY_LIMIT),
            stored, DIM, HALF, BLOCK, REST_BLOCK, INTERLEAVED,
        )  # fmt: skip
    else:
        store_rows(
            buffer, value, slots, value_scale, value_scale_tensor, value_scale_plane,
            block - query_blocks - key_blocks, num_slots, capacity,
            value_stride, value_head_stride, value_dim_stride,
            value_plane_offset, value_page_stride, value_token_stride, value_plane_head_stride,
            VALUE_SCALED, VALUE_DTYPE, VALUE_LIMIT, PAGE_SIZE, VALUE_HEADS, VALUE_DIM, VALUE_BLOCK, ROWS,
        )  # fmt: skip


def rope_store_kv(a: RopeStoreKV) -> tuple[Tensor, Tensor]:
    """`pm_ops::rope_store_kv` in one launch."""
    query, key, value = a.query, a.key, a.value
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    key_out = torch.empty(key.shape if a.return_key else 0, dtype=key.dtype, device=key.device)
    run = _launch(
        (query.shape, key.shape, value.shape, a.cos_sin.shape, a.slots.shape),
        (*query.stride(), *key.stride(), *value.stride(), *a.cos_sin.stride()),
        tuple(
            None if p is None else tuple(p)
            for p in (a.key_plane, a.value_plane, a.key_scale_plane, a.value_scale_plane)
        ),
        a.page_size,
        (a.key_dtype, a.value_dtype),
        (
            a.key_scale_tensor is not None or a.key_scale != 1.0,
            a.value_scale_tensor is not None or a.value_scale != 1.0,
        ),
        a.interleaved,
    )
    if run is not None:
        run(
            a.buffer,
            query,
            key,
            value,
            query_out,
            key_out if a.return_key else None,
            None if a.positions is None else a.positions.contiguous(),
            a.cos_sin,
            a.slots.contiguous(),
            None if a.q_weight is None else a.q_weight.contiguous(),
            None if a.k_weight is None else a.k_weight.contiguous(),
            a.eps,
            a.weight_offset,
            a.key_scale,
            a.value_scale,
            a.key_scale_tensor,
            a.value_scale_tensor,
        )
    return query_out, key_out


@functools.lru_cache(4096)
def _launch(
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[int, ...],
    planes: tuple[tuple[int, ...] | None, ...],
    page_size: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    scaled: tuple[bool, bool],
    interleaved: bool,
) -> Launch | None:
    """The launch of these shapes of query, key, value, cos_sin and slots; None where there is nothing to do."""
    (num_tokens, query_heads, dim), (_, key_heads, _), (_, value_heads, value_dim) = shapes[:3]
    (max_position, rotary_dim), (num_slots,) = shapes[3:]
    half = rotary_dim // 2
    _, rows, warps = tile(max(dim, value_dim), 2048)
    programs = (
        cdiv(num_tokens * query_heads, rows) + cdiv(num_tokens * key_heads, rows) + cdiv(num_slots * value_heads, rows)
    )
    if programs == 0:
        return None
    key_plane, value_plane, key_scale_plane, value_scale_plane = (None if p is None else p[:4] for p in planes)
    assert key_plane is not None and value_plane is not None
    return Launch(
        _rope_store_kv,
        (programs,),
        (
            key_scale_plane,
            value_scale_plane,
            num_tokens,
            num_slots,
            min(p[4] for p in planes if p is not None) * page_size,
            max_position,
            *strides,
            *key_plane,
            *value_plane,
        ),
        KEY_SCALED=scaled[0],
        KEY_DTYPE=TRITON_DTYPE[dtypes[0]],
        KEY_LIMIT=LARGEST.get(dtypes[0], 0.0),
        VALUE_SCALED=scaled[1],
        VALUE_DTYPE=TRITON_DTYPE[dtypes[1]],
        VALUE_LIMIT=LARGEST.get(dtypes[1], 0.0),
        PAGE_SIZE=page_size,
        QUERY_HEADS=query_heads,
        KEY_HEADS=key_heads,
        VALUE_HEADS=value_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        HALF=half,
        INTERLEAVED=interleaved,
        BLOCK=next_power_of_2(half),
        REST_BLOCK=next_power_of_2(dim - 2 * half),
        VALUE_BLOCK=next_power_of_2(value_dim),
        ROWS=rows,
        num_warps=warps,
        enable_fp_fusion=False,
    )
