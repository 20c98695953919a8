"""store_kv and load_kv: rows of tokens to and from their slots."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops._quantise import LARGEST
from .common import TRITON_DTYPE, cast_to, cdiv, decoded, next_power_of_2
from .launch import Launch, launch
from .rows import cells_of, load_row, load_scale, one_scale, rows_of, slots_of, store_row, store_rows, tile

if TYPE_CHECKING:
    from ..ops.store import LoadKV, StoreKV


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def _store_kv(
    buffer,
    key,
    value,
    slots,
    key_scale,
    value_scale,
    key_scale_tensor,
    value_scale_tensor,
    key_scale_plane,
    value_scale_plane,
    num_slots: tl.int64,
    capacity: tl.int64,
    key_row_stride: tl.int64,
    key_row_head_stride: tl.int64,
    key_row_dim_stride,  # unannotated: 1 becomes a constant
    key_offset: tl.int64,
    key_page_stride: tl.int64,
    key_token_stride: tl.int64,
    key_head_stride: tl.int64,
    value_row_stride: tl.int64,
    value_row_head_stride: tl.int64,
    value_row_dim_stride,
    value_offset: tl.int64,
    value_page_stride: tl.int64,
    value_token_stride: tl.int64,
    value_head_stride: tl.int64,
    KEY_SCALED: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    KEY_LIMIT: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_SCALED: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    VALUE_LIMIT: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):
    block = tl.program_id(0)
    key_blocks = tl.cdiv(num_slots * KEY_HEADS, ROWS)
    if key is not None:
        if block < key_blocks:
            store_rows(
                buffer, key, slots, key_scale, key_scale_tensor, key_scale_plane, block, num_slots, capacity,
                key_row_stride, key_row_head_stride, key_row_dim_stride,
                key_offset, key_page_stride, key_token_stride, key_head_stride,
                KEY_SCALED, KEY_DTYPE, KEY_LIMIT, PAGE_SIZE, KEY_HEADS, KEY_DIM, KEY_BLOCK, ROWS,
            )  # fmt: skip
    if value is not None:
        if block >= key_blocks:
            store_rows(
                buffer, value, slots, value_scale, value_scale_tensor, value_scale_plane,
                block - key_blocks, num_slots, capacity,
                value_row_stride, value_row_head_stride, value_row_dim_stride,
                value_offset, value_page_stride, value_token_stride, value_head_stride,
                VALUE_SCALED, VALUE_DTYPE, VALUE_LIMIT, PAGE_SIZE, VALUE_HEADS, VALUE_DIM, VALUE_BLOCK, ROWS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_slots", "capacity"])
def _load_kv(
    buffer,
    out,
    slots,
    scale,
    scale_tensor,
    scale_plane,
    num_slots: tl.int64,
    capacity: tl.int64,
    offset: tl.int64,
    page_stride: tl.int64,
    token_stride: tl.int64,
    head_stride: tl.int64,
    CONVERTED: tl.constexpr,
    DTYPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    row, t, h, exists = rows_of(tl.program_id(0), num_slots, HEADS, ROWS)
    page, token, stored = slots_of(slots, t, exists, num_slots, capacity, PAGE_SIZE)
    cell = cells_of(buffer, page, token, h, offset, page_stride, token_stride, head_stride, DTYPE)
    x = load_row(cell, 1, stored, 0, DIM, BLOCK, "")
    if CONVERTED:
        if scale_plane is None:
            factor = one_scale(scale, scale_tensor)
        else:
            factor = load_scale(buffer, page, token, h, stored, scale_plane)[:, None]
        y = decoded(x, tl.float32, scale_plane is not None) * factor
        store_row(out + row * DIM, cast_to(y, out.dtype.element_ty, 0.0), exists, 0, DIM, BLOCK)
    else:
        store_row(out + row * DIM, x, exists, 0, DIM, BLOCK)


class _Side(NamedTuple):
    """What a launch of `_store_kv` needs to know of the key, or of the value; with no heads where it is absent."""

    heads: int = 0
    dim: int = 1
    block: int = 1
    capacities: tuple[int, ...] = ()
    strides: tuple[int, ...] = (0, 0, 1, 0, 0, 0, 0)
    scale_plane: tuple[int, ...] | None = None
    dtype: Any = None
    limit: float = 0.0


_Rows = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype, tuple[int, ...] | None]
"""Shape and strides of rows to store, and the plane, its dtype and its scales' plane."""


def _rows(rows: Tensor | None, plane: Any, dtype: Any, scale_plane: Sequence[int] | None) -> _Rows | None:
    if rows is None:
        return None
    return rows.shape, rows.stride(), tuple(plane), dtype, None if scale_plane is None else tuple(scale_plane)


def _side(rows: _Rows | None) -> _Side:
    if rows is None:
        return _Side()
    (_, heads, dim), strides, (*plane, num_pages), dtype, scale_plane = rows
    return _Side(
        heads=heads,
        dim=dim,
        block=next_power_of_2(dim),
        capacities=(num_pages,) if scale_plane is None else (num_pages, scale_plane[4]),
        strides=(*strides, *plane),
        scale_plane=None if scale_plane is None else scale_plane[:4],
        dtype=TRITON_DTYPE[dtype],
        limit=LARGEST.get(dtype, 0.0),
    )


def store_kv(a: StoreKV) -> None:
    """`pm_ops::store_kv` in one launch, for key and value together."""
    run = _store_launch(
        a.slots.shape[0],
        a.page_size,
        _rows(a.key, a.key_plane, a.key_dtype, a.key_scale_plane),
        _rows(a.value, a.value_plane, a.value_dtype, a.value_scale_plane),
        a.key_scale_tensor is not None or a.key_scale != 1.0,
        a.value_scale_tensor is not None or a.value_scale != 1.0,
    )
    if run is not None:
        slots, scales = a.slots.contiguous(), (a.key_scale, a.value_scale, a.key_scale_tensor, a.value_scale_tensor)
        run(a.buffer, a.key, a.value, slots, *scales)


@functools.lru_cache(4096)
def _store_launch(
    num_slots: int, page_size: int, key: _Rows | None, value: _Rows | None, key_scaled: bool, value_scaled: bool
) -> Launch | None:
    """The launch of these rows; None where there is nothing to store."""
    k, v = _side(key), _side(value)
    if num_slots == 0 or k.heads * k.dim + v.heads * v.dim == 0:
        return None
    _, rows, warps = tile(max(k.dim, v.dim), 1024)
    capacity = min(k.capacities + v.capacities) * page_size
    return Launch(
        _store_kv,
        (cdiv(num_slots * k.heads, rows) + cdiv(num_slots * v.heads, rows),),
        (k.scale_plane, v.scale_plane, num_slots, capacity, *k.strides, *v.strides),
        KEY_SCALED=key_scaled,
        KEY_DTYPE=k.dtype,
        KEY_LIMIT=k.limit,
        KEY_HEADS=k.heads,
        KEY_DIM=k.dim,
        KEY_BLOCK=k.block,
        VALUE_SCALED=value_scaled,
        VALUE_DTYPE=v.dtype,
        VALUE_LIMIT=v.limit,
        VALUE_HEADS=v.heads,
        VALUE_DIM=v.dim,
        VALUE_BLOCK=v.block,
        PAGE_SIZE=page_size,
        ROWS=rows,
        num_warps=warps,
    )


def load_kv(a: LoadKV) -> Tensor:
    """`pm_ops::load_kv` in one launch."""
    num_slots = a.slots.shape[0]
    out = a.buffer.new_empty((num_slots, a.heads, a.dim), dtype=a.out_dtype or a.dtype)
    if out.numel() == 0:
        return out
    block, rows, warps = tile(a.dim, 1024 if num_slots <= 512 else 4096)
    capacity = a.plane[4] if a.scale_plane is None else min(a.plane[4], a.scale_plane[4])
    launch(
        _load_kv,
        (cdiv(num_slots * a.heads, rows),),
        a.buffer,
        out,
        a.slots.contiguous(),
        a.scale,
        a.scale_tensor,
        None if a.scale_plane is None else tuple(a.scale_plane[:4]),
        num_slots,
        capacity * a.page_size,
        *a.plane[:4],
        CONVERTED=a.out_dtype is not None,
        DTYPE=TRITON_DTYPE[a.dtype],
        PAGE_SIZE=a.page_size,
        HEADS=a.heads,
        DIM=a.dim,
        BLOCK=block,
        ROWS=rows,
        num_warps=warps,
    )
    return out
