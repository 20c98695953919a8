"""store_kv and load_kv: rows of tokens to and from their slots.

A program handles TOKENS tokens x BLOCK elements of their flattened [heads, dim] rows. Heads and dim are compile-time
constants, so that `r // DIM` and `r % DIM` keep the contiguity that vector loads need; strides and offsets are not, so
that all layers of a pool share one compiled kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import SATURATES, TRITON_DTYPE, cast_to, on_device, slot_offset

if TYPE_CHECKING:
    from ..ops.store import LoadKV, StoreKV


@triton.jit
def _tile(
    slots,
    num_tokens,
    capacity,
    block,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """This program's tokens, their page and token in it, head and element, and which of them exist and have a slot."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + t, mask=t < num_tokens, other=-1).to(tl.int64)
    r = block * BLOCK + tl.arange(0, BLOCK)
    exists = (t < num_tokens)[:, None] & (r < HEADS * DIM)[None, :]
    stored = exists & ((slot >= 0) & (slot < capacity))[:, None]
    page = slot // PAGE_SIZE
    return (
        t[:, None],
        page[:, None],
        (slot % PAGE_SIZE)[:, None],
        (r // DIM)[None, :],
        (r % DIM)[None, :],
        exists,
        stored,
    )


@triton.jit
def _store_block(
    buffer,
    rows,
    slots,
    scale,
    scale_tensor,
    num_tokens,
    capacity,
    block,
    offset,
    page_stride,
    token_stride,
    head_stride,
    row_stride,
    row_head_stride,
    row_dim_stride,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    LIMIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t, page, token, h, d, exists, stored = _tile(
        slots, num_tokens, capacity, block, PAGE_SIZE, HEADS, DIM, TOKENS, BLOCK
    )
    x = tl.load(rows + t * row_stride + h.to(tl.int64) * row_head_stride + d.to(tl.int64) * row_dim_stride, mask=stored)
    if SCALED:
        if scale_tensor is not None:
            scale = tl.load(scale_tensor).to(tl.float32)
        x = tl.div_rn(x.to(tl.float32), scale)
    address = buffer + (offset + slot_offset(page, token, page_stride, token_stride) + h.to(tl.int64) * head_stride)
    tl.store(address.to(tl.pointer_type(DTYPE)) + d, cast_to(x, DTYPE, LIMIT), mask=stored)


@triton.jit(do_not_specialize=["num_tokens", "capacity"])
def _store_kv(
    buffer,
    key,
    value,
    slots,
    key_scale,
    value_scale,
    key_scale_tensor,
    value_scale_tensor,
    num_tokens: tl.int64,
    capacity: tl.int64,
    key_offset: tl.int64,
    key_page_stride: tl.int64,
    key_token_stride: tl.int64,
    key_head_stride: tl.int64,
    key_row_stride: tl.int64,
    key_row_head_stride: tl.int64,
    key_row_dim_stride,  # unannotated: 1 becomes a constant
    value_offset: tl.int64,
    value_page_stride: tl.int64,
    value_token_stride: tl.int64,
    value_head_stride: tl.int64,
    value_row_stride: tl.int64,
    value_row_head_stride: tl.int64,
    value_row_dim_stride,
    KEY_SCALED: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    KEY_LIMIT: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCKS: tl.constexpr,
    VALUE_SCALED: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    VALUE_LIMIT: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(1)
    if key is not None:
        if block < KEY_BLOCKS:
            _store_block(
                buffer, key, slots, key_scale, key_scale_tensor, num_tokens, capacity, block,
                key_offset, key_page_stride, key_token_stride, key_head_stride,
                key_row_stride, key_row_head_stride, key_row_dim_stride,
                KEY_SCALED, KEY_DTYPE, KEY_LIMIT, PAGE_SIZE, KEY_HEADS, KEY_DIM, TOKENS, BLOCK,
            )  # fmt: skip
    if value is not None:
        if block >= KEY_BLOCKS:
            _store_block(
                buffer, value, slots, value_scale, value_scale_tensor, num_tokens, capacity, block - KEY_BLOCKS,
                value_offset, value_page_stride, value_token_stride, value_head_stride,
                value_row_stride, value_row_head_stride, value_row_dim_stride,
                VALUE_SCALED, VALUE_DTYPE, VALUE_LIMIT, PAGE_SIZE, VALUE_HEADS, VALUE_DIM, TOKENS, BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "capacity"])
def _load_kv(
    buffer,
    out,
    slots,
    scale,
    scale_tensor,
    num_tokens: tl.int64,
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
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t, page, token, h, d, exists, stored = _tile(
        slots, num_tokens, capacity, tl.program_id(1), PAGE_SIZE, HEADS, DIM, TOKENS, BLOCK
    )
    address = buffer + (offset + slot_offset(page, token, page_stride, token_stride) + h.to(tl.int64) * head_stride)
    x = tl.load(address.to(tl.pointer_type(DTYPE)) + d, mask=stored, other=0.0)
    if CONVERTED:
        if scale_tensor is not None:
            scale = tl.load(scale_tensor).to(tl.float32)
        x = x.to(tl.float32) * scale
    tl.store(out + t * (HEADS * DIM) + h * DIM + d, cast_to(x, out.dtype.element_ty, 0.0), mask=exists)


def _blocks(num_tokens: int, row: int) -> tuple[int, int, int]:
    """TOKENS, BLOCK and warps: one token a program while there are few, then enough to hide the latency of loads."""
    block = min(triton.next_power_of_2(row), 1024)
    tokens = 1 if num_tokens <= 512 else 4096 // block
    return tokens, block, min(max(tokens * block // 256, 1), 8)


class _Side(NamedTuple):
    """What a launch of `_store_kv` needs to know of the key, or of the value; with no heads where it is absent."""

    heads: int = 0
    dim: int = 1
    capacity: int = 0
    strides: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 1)
    dtype: Any = None
    limit: float = 0.0
    scaled: bool = False


def _side(
    rows: Tensor | None,
    plane: Sequence[int] | None,
    dtype: torch.dtype | None,
    page_size: int,
    scale: float,
    scale_tensor: Tensor | None,
) -> _Side:
    if rows is None or plane is None or dtype is None:
        return _Side()
    *strides, num_pages = plane
    return _Side(
        heads=rows.shape[1],
        dim=rows.shape[2],
        capacity=num_pages * page_size,
        strides=(*strides, *rows.stride()),
        dtype=TRITON_DTYPE[dtype],
        limit=SATURATES.get(dtype, 0.0),
        scaled=scale_tensor is not None or scale != 1.0,
    )


def store_kv(a: StoreKV) -> None:
    """`pm_ops::store_kv` in one launch, for key and value together."""
    k = _side(a.key, a.key_plane, a.key_dtype, a.page_size, a.key_scale, a.key_scale_tensor)
    v = _side(a.value, a.value_plane, a.value_dtype, a.page_size, a.value_scale, a.value_scale_tensor)
    num_tokens, row = a.slots.shape[0], max(k.heads * k.dim, v.heads * v.dim)
    if num_tokens == 0 or row == 0:
        return
    tokens, block, warps = _blocks(num_tokens, row)
    key_blocks, value_blocks = triton.cdiv(k.heads * k.dim, block), triton.cdiv(v.heads * v.dim, block)
    with on_device(a.buffer):
        _store_kv[(triton.cdiv(num_tokens, tokens), key_blocks + value_blocks)](
            a.buffer,
            a.key,
            a.value,
            a.slots.contiguous(),
            a.key_scale,
            a.value_scale,
            a.key_scale_tensor,
            a.value_scale_tensor,
            num_tokens,
            min(side.capacity for side in (k, v) if side.dtype is not None),
            *k.strides,
            *v.strides,
            KEY_SCALED=k.scaled,
            KEY_DTYPE=k.dtype,
            KEY_LIMIT=k.limit,
            KEY_HEADS=k.heads,
            KEY_DIM=k.dim,
            KEY_BLOCKS=key_blocks,
            VALUE_SCALED=v.scaled,
            VALUE_DTYPE=v.dtype,
            VALUE_LIMIT=v.limit,
            VALUE_HEADS=v.heads,
            VALUE_DIM=v.dim,
            PAGE_SIZE=a.page_size,
            TOKENS=tokens,
            BLOCK=block,
            num_warps=warps,
        )


def load_kv(a: LoadKV) -> Tensor:
    """`pm_ops::load_kv` in one launch."""
    num_tokens, row = a.slots.shape[0], a.heads * a.dim
    out = a.buffer.new_empty((num_tokens, a.heads, a.dim), dtype=a.out_dtype or a.dtype)
    if out.numel() == 0:
        return out
    tokens, block, warps = _blocks(num_tokens, row)
    *strides, num_pages = a.plane
    with on_device(a.buffer):
        _load_kv[(triton.cdiv(num_tokens, tokens), triton.cdiv(row, block))](
            a.buffer,
            out,
            a.slots.contiguous(),
            a.scale,
            a.scale_tensor,
            num_tokens,
            num_pages * a.page_size,
            *strides,
            CONVERTED=a.out_dtype is not None,
            DTYPE=TRITON_DTYPE[a.dtype],
            PAGE_SIZE=a.page_size,
            HEADS=a.heads,
            DIM=a.dim,
            TOKENS=tokens,
            BLOCK=block,
            num_warps=warps,
        )
    return out
