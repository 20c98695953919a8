"""Rows of tokens to and from the pool: what the kernels that store or load them share.

A row is one head of one token. A program handles ROWS rows as a tile of ROWS x BLOCK elements, BLOCK being the row's
length rounded up to a power of two; programs are numbered over all rows, whatever the number of heads. Heads and dim
are compile-time constants, so that divisions by them are cheap; strides and offsets are not, so that all layers of a
pool share one compiled kernel.

What there is one of a row (token, head, slot, scale, whether it exists) is `[ROWS]`, elements are `[ROWS, BLOCK]`.
A plane of scales comes as a tuple, `(offset, page_stride, token_stride, head_stride)`, or None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import cast_to, next_power_of_2, slot_offset

TINY = tl.constexpr(2.0**-126)  # the smallest normal fp32


@triton.jit
def rows_of(block, num_tokens, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """This program's rows, their token and head, and which of them exist."""
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row // HEADS, row % HEADS, row < num_tokens * HEADS


@triton.jit
def slots_of(slots, t, exists, num_slots, capacity, PAGE_SIZE: tl.constexpr):
    """The page of each row's slot and the token in it, and which of the rows have a slot."""
    slot = tl.load(slots + t, mask=exists & (t < num_slots), other=-1).to(tl.int64)
    return slot // PAGE_SIZE, slot % PAGE_SIZE, (slot >= 0) & (slot < capacity)


@triton.jit
def cells_of(buffer, page, token, h, offset, page_stride, token_stride, head_stride, DTYPE: tl.constexpr):
    """Where in a plane the rows begin."""
    address = offset + slot_offset(page, token, page_stride, token_stride) + h * head_stride
    return (buffer + address).to(tl.pointer_type(DTYPE))


@triton.jit
def load_row(row, stride, exists, START: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, EVICT: tl.constexpr):
    """Elements from START on, as they are; zeros where there are none. EVICT: the L2 cache's policy, or ""."""
    d = START + tl.arange(0, BLOCK)[None, :]
    mask = exists[:, None] & (d < DIM)
    return tl.load(row[:, None] + d.to(tl.int64) * stride, mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def store_row(row, x, exists, START: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Elements from START on."""
    d = START + tl.arange(0, BLOCK)[None, :]
    tl.store(row[:, None] + d, x, mask=exists[:, None] & (d < DIM))


@triton.jit
def one_scale(scale, scale_tensor):
    """The scale of a whole tensor, where it was given as a device tensor."""
    if scale_tensor is not None:
        scale = tl.load(scale_tensor).to(tl.float32)
    return scale


@triton.jit
def largest(x):
    """The largest magnitude of each row in fp32; inf where there is a NaN."""
    size = tl.abs(x.to(tl.float32))
    return tl.max(tl.where(size == size, size, float("inf")), 1)


@triton.jit
def own_scale(size, LIMIT: tl.constexpr):
    """The scale of a row whose largest magnitude is `size`; NaN where that is not finite. See `StoreKV`."""
    scale = tl.where(size == 0, 1.0, tl.maximum(tl.div_rn(size, LIMIT), TINY))
    return tl.where(size == float("inf"), float("nan"), scale)


@triton.jit
def store_scale(buffer, page, token, h, scale, stored, plane):
    """The scales of rows to their cells."""
    tl.store(cells_of(buffer, page, token, h, plane[0], plane[1], plane[2], plane[3], tl.float32), scale, mask=stored)


@triton.jit
def load_scale(buffer, page, token, h, stored, plane):
    """The scales of rows; 0 where a row has no slot."""
    cell = cells_of(buffer, page, token, h, plane[0], plane[1], plane[2], plane[3], tl.float32)
    return tl.load(cell, mask=stored, other=0.0)


@triton.jit
def quantised(x, scale, SCALED: tl.constexpr, OWN: tl.constexpr, DTYPE: tl.constexpr, LIMIT: tl.constexpr):
    """`x / scale` in fp32 as DTYPE, if SCALED by one scale; or by the rows' OWN, and then zeros where that is NaN."""
    if OWN:
        x = tl.where((scale == scale)[:, None], tl.div_rn(x.to(tl.float32), scale[:, None]), 0.0)
    elif SCALED:
        x = tl.div_rn(x.to(tl.float32), scale)
    return cast_to(x, DTYPE, LIMIT)


@triton.jit
def store_rows(
    buffer,
    rows,
    slots,
    scale,
    scale_tensor,
    scale_plane,
    block,
    num_slots,
    capacity,
    row_stride,
    row_head_stride,
    row_dim_stride,
    offset,
    page_stride,
    token_stride,
    head_stride,
    SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
    LIMIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A program's rows `[num_slots, HEADS, DIM]` to their slots, by one scale or each by its own."""
    row, t, h, exists = rows_of(block, num_slots, HEADS, ROWS)
    page, token, stored = slots_of(slots, t, exists, num_slots, capacity, PAGE_SIZE)
    # Whether stored or not, so that the load waits for no slot; evicted first, so that stored rows stay in the cache.
    x = load_row(rows + (t * row_stride + h * row_head_stride), row_dim_stride, exists, 0, DIM, BLOCK, "evict_first")
    if scale_plane is None:
        y = quantised(x, one_scale(scale, scale_tensor), SCALED, False, DTYPE, LIMIT)
    else:
        own = own_scale(largest(x), LIMIT)
        store_scale(buffer, page, token, h, own, stored, scale_plane)
        y = quantised(x, own, False, True, DTYPE, LIMIT)
    cell = cells_of(buffer, page, token, h, offset, page_stride, token_stride, head_stride, DTYPE)
    store_row(cell, y, stored, 0, DIM, BLOCK)


def tile(dim: int, elements: int) -> tuple[int, int, int]:
    """BLOCK, ROWS and warps of programs of so many elements, or of one row if that is more.

    Measured on an H200 in bf16, 1 to 8192 tokens: stores take 1024, one load of 16 bytes for each thread, and larger
    programs were no faster beyond noise. Rotations take 2048, one load of 16 bytes for the first and one for the
    second elements of pairs; with 1024 these would be of 8 bytes, and 8192 tokens were 3 % slower.
    """
    block = next_power_of_2(dim)
    rows = max(elements // block, 1)
    return block, rows, 4 if rows * block <= 2048 else 8
