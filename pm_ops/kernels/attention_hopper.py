"""attention for many queries on Hopper: the copy engine fetches pages while two warpgroups compute.

A program holds 128 rows, BLOCK_Q consecutive queries of one sequence x the query heads that share one KV head, as in
`attention.py`, and consists of three parts. The producer, one warp, has the copy engine (TMA) fetch the key and value
tiles of BLOCK_N tokens into shared memory, box by box: a box is ROWS tokens x 64 elements of one page, 128-byte rows
swizzled as wgmma wants them, so that the boxes of one tile, one behind the other, are the tile. Each of two consumer
warpgroups computes 64 rows; the softmax of one tile overlaps the products of the one before.

Boxes without a visible key are fetched from past the last page, which the copy engine fills with zeros, and their page
ids are not read. Values of hidden keys in a box at the edge of what the program sees are zeroed before they are used,
since 0 * NaN would reach the output; logits of hidden keys are replaced. So the guarantees of `attention.py` hold here.

Gluon has no interpreter: what these kernels compute is tested on a GPU only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..ops._common import plane_view
from .attention_plan import multiprocessors, queries_of
from .common import on_device

if TYPE_CHECKING:
    from ..ops.attention import Attention

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
BLOCK_M = gl.constexpr(128)  # rows of a program, half of them a warpgroup's
COLUMNS = gl.constexpr(64)  # elements of a box's row: 128 bytes, the widest swizzle
_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
_DIMS = (64, 128, 256)
_LONG = 16384  # keys from which on programs differ too much in length for one list of tiles a multiprocessor


@gluon.jit
def _find_sequence(query_start, block, batch, BLOCK_Q: gl.constexpr):
    """As in `attention.py`: sequence b's blocks begin at `query_start[b] // BLOCK_Q + b`."""
    low = batch * 0
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(query_start + middle).to(gl.int32) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@gluon.jit
def _tile(
    tile,
    query_start,  # None: every sequence has `uniform` queries
    seq_lens,
    uniform,
    batch,
    query_blocks,
    num_queries,
    max_keys,
    kv_heads,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """What a tile of the grid is: its sequence, KV head, queries, and the keys [lo, hi) that any of them sees."""
    block = query_blocks - 1 - tile // kv_heads  # a sequence's last queries see the most keys: they start first
    if query_start is None:
        blocks = (uniform + BLOCK_Q - 1) // BLOCK_Q
        b = block // blocks
        start = b * uniform
        num = uniform
        first = block % blocks * BLOCK_Q
    else:
        b = _find_sequence(query_start, block, batch, BLOCK_Q)
        start = gl.load(query_start + b).to(gl.int32)
        stop = gl.load(query_start + b + 1, mask=b < batch, other=0).to(gl.int32)
        num = gl.where(b < batch, stop, num_queries) - start
        first = (block - b - start // BLOCK_Q) * BLOCK_Q
    seq_len = gl.load(seq_lens + b, mask=b < batch, other=0).to(gl.int32)
    earliest = seq_len - num + first
    latest = seq_len - num + gl.minimum(first + BLOCK_Q, num) - 1
    lo = b * 0
    hi = gl.minimum(seq_len, max_keys)
    if CAUSAL:
        hi = gl.minimum(hi, latest + 1)
    if WINDOW:
        lo = gl.maximum(earliest - window + 1, 0)
        if not CAUSAL:
            hi = gl.minimum(hi, latest + window)
    hi = gl.maximum(hi, 0)
    lo = gl.minimum(lo, hi)
    # One tile at least, of hidden keys if need be, so that rows that see nothing take no path of their own
    count = gl.maximum((hi - lo // BLOCK_N * BLOCK_N + BLOCK_N - 1) // BLOCK_N, 1)
    count = gl.where(first < num, count, 0)
    return b, tile % kv_heads, start, num, first, earliest, latest, lo, hi, count


@gluon.jit
def _fetch(
    plane,
    boxes,
    barrier,
    pages,
    kv_head,
    n,
    stage,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
):
    """Have a tile fetched from its pages; the barrier's phase ends when all of it has come."""
    mbarrier.expect(barrier, BLOCK_N * DIM * 2)
    for i in gl.static_range(BLOCK_N // ROWS):
        for c in gl.static_range(DIM // COLUMNS):
            box = boxes.index((stage * (DIM // COLUMNS) + c) * (BLOCK_N // ROWS) + i)
            at = [pages[i], kv_head, (n + i * ROWS) % PAGE_SIZE, c * COLUMNS]
            tma.async_copy_global_to_shared(plane, at, barrier, box)


@gluon.jit
def _zero_outside(boxes, stage, n, edge, lo, hi, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """Zero the tokens outside [lo, hi) in the boxes that hold token `edge`."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 4, 8], [1, 1, 1, 1], [3, 2, 1, 0])
    along: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    i = (edge - n) // ROWS
    token = n + i * ROWS + gl.arange(0, ROWS, along)
    inside = ((token >= lo) & (token < hi))[None, None, :, None]
    for c in gl.static_range(DIM // COLUMNS):
        box = boxes.index((stage * (DIM // COLUMNS) + c) * (BLOCK_N // ROWS) + i)
        box.store(gl.where(inside, box.load(layout), 0.0))


@gluon.jit
def _produce(
    key_plane,
    value_plane,
    key_boxes,
    value_boxes,
    key_full,
    key_empty,
    value_full,
    value_empty,
    value_edge,
    page_table,
    page_table_stride,
    num_pages,
    query_start,
    seq_lens,
    uniform,
    batch,
    query_blocks,
    num_queries,
    max_keys,
    kv_heads,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    DIM_K: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    filled = 0
    edges = 0
    for tile in range(gl.program_id(0), query_blocks * kv_heads, gl.num_programs(0)):
        b, kv_head, start, num, first, earliest, latest, lo, hi, count = _tile(
            tile, query_start, seq_lens, uniform, batch, query_blocks, num_queries, max_keys, kv_heads, window,
            CAUSAL, WINDOW, BLOCK_Q, BLOCK_N,
        )  # fmt: skip
        table = page_table + b.to(gl.int64) * page_table_stride
        begin = lo // BLOCK_N * BLOCK_N
        for j in range(count):
            n = begin + j * BLOCK_N
            stage = filled % STAGES
            phase = (filled // STAGES) & 1
            pages = ()  # read together, ahead of the wait: one latency for all of them
            for i in gl.static_range(BLOCK_N // ROWS):
                at = n + i * ROWS
                seen = (at + ROWS > lo) & (at < hi)
                pages = pages + (gl.load(table + at // PAGE_SIZE, mask=seen, other=num_pages).to(gl.int32),)  # type: ignore[assignment]
            mbarrier.wait(key_empty.index(stage), phase ^ 1)
            _fetch(
                key_plane, key_boxes, key_full.index(stage), pages, kv_head, n, stage, PAGE_SIZE, ROWS, BLOCK_N, DIM_K
            )
            mbarrier.wait(value_empty.index(stage), phase ^ 1)
            low_edge = (n < lo) & (lo % ROWS != 0)
            high_edge = (n + BLOCK_N > hi) & (hi % ROWS != 0)
            if low_edge | high_edge:
                _fetch(value_plane, value_boxes, value_edge, pages, kv_head, n, stage, PAGE_SIZE, ROWS, BLOCK_N, DIM_V)
                mbarrier.wait(value_edge, edges & 1)
                edges += 1
                if low_edge:
                    _zero_outside(value_boxes, stage, n, lo, lo, hi, ROWS, BLOCK_N, DIM_V)
                if high_edge:
                    _zero_outside(value_boxes, stage, n, hi, lo, hi, ROWS, BLOCK_N, DIM_V)
                fence_async_shared()
                mbarrier.arrive(value_full.index(stage))
            else:
                full = value_full.index(stage)
                _fetch(value_plane, value_boxes, full, pages, kv_head, n, stage, PAGE_SIZE, ROWS, BLOCK_N, DIM_V)
            filled += 1


@gluon.jit
def _softmax(
    x,
    m,
    l,
    n,
    lo,
    hi,
    full_lo,
    full_hi,
    position,
    scale,
    cap,
    cap_scale,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Take a tile's products into the running maximum and sum; `scale` turns products into logits in units of log 2."""
    if SOFTCAP:
        x = cap * (1.0 - 2.0 / (1.0 + gl.exp2(x * cap_scale)))
    if (n < full_lo) | (n + BLOCK_N > full_hi):
        j = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        visible = ((j >= lo) & (j < hi))[None, :]
        if CAUSAL:
            visible = visible & (j[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (j[None, :] > position[:, None] - window)
            if not CAUSAL:
                visible = visible & (j[None, :] < position[:, None] + window)
        x = gl.where(visible, x, float("-inf"))
    new_m = gl.maximum(m, gl.max(x, 1))
    top = gl.where(new_m == float("-inf"), 0.0, new_m * scale)  # a row that has seen no key yet
    p = gl.exp2(x * scale - top[:, None])
    shrink = gl.exp2(m * scale - top)
    return p, new_m, l * shrink + gl.sum(p, 1), shrink


@gluon.jit
def _consume(
    q_tile,
    key_tiles,
    value_tiles,
    key_full,
    key_empty,
    value_full,
    value_empty,
    query,
    query_stride,
    query_head_stride,
    out,
    lse,
    sinks,
    scale,
    cap,
    cap_scale,
    out_scale,
    query_start,
    seq_lens,
    uniform,
    batch,
    query_blocks,
    num_queries,
    max_keys,
    kv_heads,
    window,
    PART: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    HEADS: gl.constexpr,
    DIM_K: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Rows PART * 64 to PART * 64 + 64 of every tile."""
    M: gl.constexpr = BLOCK_M // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM_V, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    Q_GLOBAL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM_K, DIM_K // 8], [4, 1], [1, 0])
    O_GLOBAL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM_V, DIM_V // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = query.dtype.element_ty
    used = 0
    for tile in range(gl.program_id(0), query_blocks * kv_heads, gl.num_programs(0)):
        b, kv_head, start, num, first, earliest, latest, lo, hi, count = _tile(
            tile, query_start, seq_lens, uniform, batch, query_blocks, num_queries, max_keys, kv_heads, window,
            CAUSAL, WINDOW, BLOCK_Q, BLOCK_N,
        )  # fmt: skip
        if count > 0:
            # Rows: heads vary fastest
            row = PART * M + gl.arange(0, M, gl.SliceLayout(1, Q_GLOBAL))
            i = first + row // HEADS
            head = kv_head * HEADS + row % HEADS
            at = (start + i).to(gl.int64) * query_stride + head.to(gl.int64) * query_head_stride
            d = gl.arange(0, DIM_K, gl.SliceLayout(0, Q_GLOBAL))
            valid = (i < num) & (row < BLOCK_Q * HEADS)
            q = gl.load(query + at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
            gl.thread_barrier()  # the last tile's products have read q_tile
            q_tile.store(q)
            fence_async_shared()
            gl.thread_barrier()

            row = PART * M + gl.arange(0, M, S_ROWS)
            i = first + row // HEADS
            head = kv_head * HEADS + row % HEADS
            valid = (i < num) & (row < BLOCK_Q * HEADS)
            position = earliest + row // HEADS
            full_lo = lo
            full_hi = hi
            if CAUSAL:
                full_hi = gl.minimum(full_hi, earliest + 1)
            if WINDOW:
                full_lo = gl.maximum(full_lo, latest - window + 1)
                if not CAUSAL:
                    full_hi = gl.minimum(full_hi, earliest + window)
            m = gl.full([M], float("-inf"), gl.float32, S_ROWS)
            l = gl.full([M], 0.0, gl.float32, S_ROWS)
            if sinks is not None:  # one more logit
                sink = gl.load(sinks + head, mask=valid & (b < batch), other=float("-inf")).to(gl.float32)
                m = sink * (LOG2E / scale)
                l = gl.where(m == float("-inf"), 0.0, 1.0)
            zeros = gl.full([M, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
            acc = gl.full([M, DIM_V], 0.0, gl.float32, O_LAYOUT)

            n = lo // BLOCK_N * BLOCK_N
            stage = used % STAGES
            phase = (used // STAGES) & 1
            mbarrier.wait(key_full.index(stage), phase)
            k = key_tiles.index(stage).permute((1, 0))
            x = warpgroup_mma(q_tile, k, zeros, use_acc=False, is_async=True)
            x = warpgroup_mma_wait(0, deps=(x,))
            mbarrier.arrive(key_empty.index(stage))
            p, m, l, shrink = _softmax(
                x, m, l, n, lo, hi, full_lo, full_hi, position, scale, cap, cap_scale, window,
                CAUSAL, WINDOW, SOFTCAP, BLOCK_N, S_LAYOUT,
            )  # fmt: skip
            p = gl.convert_layout(p.to(dtype), P_LAYOUT)
            for _ in range(1, count):
                n += BLOCK_N
                used += 1
                earlier = stage
                earlier_phase = phase
                stage = used % STAGES
                phase = (used // STAGES) & 1
                mbarrier.wait(key_full.index(stage), phase)
                k = key_tiles.index(stage).permute((1, 0))
                x = warpgroup_mma(q_tile, k, zeros, use_acc=False, is_async=True)
                mbarrier.wait(value_full.index(earlier), earlier_phase)
                acc = warpgroup_mma(p, value_tiles.index(earlier), acc, is_async=True)
                x = warpgroup_mma_wait(1, deps=(x,))
                mbarrier.arrive(key_empty.index(stage))
                next_p, m, l, shrink = _softmax(
                    x, m, l, n, lo, hi, full_lo, full_hi, position, scale, cap, cap_scale, window,
                    CAUSAL, WINDOW, SOFTCAP, BLOCK_N, S_LAYOUT,
                )  # fmt: skip
                acc, p = warpgroup_mma_wait(0, deps=(acc, p))  # p is in registers until then
                mbarrier.arrive(value_empty.index(earlier))
                acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
                p = gl.convert_layout(next_p.to(dtype), P_LAYOUT)
            mbarrier.wait(value_full.index(stage), phase)
            acc = warpgroup_mma(p, value_tiles.index(stage), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(value_empty.index(stage))
            used += 1

            # l is 0 only where nothing was seen, and then acc is 0 and m -inf
            num_heads = kv_heads * HEADS
            if lse is not None:
                at = (start + i).to(gl.int64) * num_heads + head
                gl.store(lse + at, (m * scale + gl.log2(l)) * LN2, mask=valid)
            factor = gl.convert_layout(out_scale / gl.where(l == 0, 1.0, l), O_ROWS)
            y = gl.convert_layout((acc * factor[:, None]).to(dtype), O_GLOBAL)
            row = PART * M + gl.arange(0, M, gl.SliceLayout(1, O_GLOBAL))
            i = first + row // HEADS
            at = ((start + i).to(gl.int64) * num_heads + kv_head * HEADS + row % HEADS) * DIM_V
            d = gl.arange(0, DIM_V, gl.SliceLayout(0, O_GLOBAL))
            valid = (i < num) & (row < BLOCK_Q * HEADS)
            gl.store(out + at[:, None] + d[None, :], y, mask=valid[:, None])


@gluon.jit(
    do_not_specialize=["num_pages", "uniform", "batch", "query_blocks", "num_queries", "max_keys", "kv_heads", "window"]
)
def _attention_hopper(
    key_plane,  # descriptors [num_pages, heads, page_size, dim]
    value_plane,
    query,
    query_stride,
    query_head_stride,
    out,  # [T, Hq, Dv]
    lse,  # [T, Hq] fp32, or None
    sinks,
    page_table,
    page_table_stride,
    num_pages,
    query_start,
    seq_lens,
    scale,
    cap,
    cap_scale,
    out_scale,
    uniform,
    batch,
    query_blocks,
    num_queries,
    max_keys,
    kv_heads,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    DIM_K: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCK_Q: gl.constexpr = BLOCK_M // HEADS
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    dtype: gl.constexpr = query.dtype.element_ty
    boxes: gl.constexpr = STAGES * (BLOCK_N // ROWS)
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    key_boxes = gl.allocate_shared_memory(dtype, [boxes * (DIM_K // COLUMNS), 1, 1, ROWS, COLUMNS], key_plane.layout)
    value_boxes = gl.allocate_shared_memory(
        dtype, [boxes * (DIM_V // COLUMNS), 1, 1, ROWS, COLUMNS], value_plane.layout
    )
    key_tiles = key_boxes._reinterpret(dtype, [STAGES, BLOCK_N, DIM_K], tile)
    value_tiles = value_boxes._reinterpret(dtype, [STAGES, BLOCK_N, DIM_V], tile)
    first_q = gl.allocate_shared_memory(dtype, [BLOCK_M // 2, DIM_K], tile)
    second_q = gl.allocate_shared_memory(dtype, [BLOCK_M // 2, DIM_K], tile)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_edge = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(key_full.index(s), count=1)
        mbarrier.init(key_empty.index(s), count=2)
        mbarrier.init(value_full.index(s), count=1)
        mbarrier.init(value_empty.index(s), count=2)
    mbarrier.init(value_edge, count=1)
    gl.warp_specialize(
        [
            (_consume, (
                first_q, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty,
                query, query_stride, query_head_stride, out, lse, sinks, scale, cap, cap_scale, out_scale,
                query_start, seq_lens, uniform, batch, query_blocks, num_queries, max_keys, kv_heads, window,
                FIRST, CAUSAL, WINDOW, SOFTCAP, HEADS, DIM_K, DIM_V, BLOCK_Q, BLOCK_N, STAGES,
            )),
            (_consume, (
                second_q, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty,
                query, query_stride, query_head_stride, out, lse, sinks, scale, cap, cap_scale, out_scale,
                query_start, seq_lens, uniform, batch, query_blocks, num_queries, max_keys, kv_heads, window,
                SECOND, CAUSAL, WINDOW, SOFTCAP, HEADS, DIM_K, DIM_V, BLOCK_Q, BLOCK_N, STAGES,
            )),
            (_produce, (
                key_plane, value_plane, key_boxes, value_boxes, key_full, key_empty, value_full, value_empty,
                value_edge, page_table, page_table_stride, num_pages,
                query_start, seq_lens, uniform, batch, query_blocks, num_queries, max_keys, kv_heads, window,
                CAUSAL, WINDOW, PAGE_SIZE, ROWS, DIM_K, DIM_V, BLOCK_Q, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


def able(a: Attention) -> bool:
    """Whether these kernels can do a call.

    They are for compute capability 9, caches of the query's 16-bit dtype, dims of 64, 128 or 256, pages of a multiple
    of 8 tokens at 16-byte strides, and neither ALiBi nor bias.
    """
    q_heads, dim = a.query.shape[1:]
    return (
        _is_hopper(a.query.device)
        and a.query.dtype in (torch.float16, torch.bfloat16)
        and a.query.dtype == a.key_dtype == a.value_dtype
        and dim in _DIMS
        and a.value_dim in _DIMS
        and q_heads // a.kv_heads <= BLOCK_M.value
        and _box_rows(a.page_size, _block_n(dim, a.value_dim)) >= 8
        and a.alibi_slopes is None
        and a.bias is None
        and not a.batch_invariant
        and a.key_scale_tensor is None
        and a.value_scale_tensor is None
        and a.softmax_scale * a.key_scale > 0
        and a.query.stride(2) == 1
        and a.buffer.data_ptr() % 16 == 0
        and not any(n % 16 for plane in (a.key_plane, a.value_plane) for n in plane[:4])
    )


def takes(a: Attention) -> bool:
    """Whether they should: they can, and there is work for 128 rows a program and half a device of programs."""
    group = a.query.shape[1] // a.kv_heads
    return (
        queries_of(a) * group >= BLOCK_M.value
        and able(a)
        and 2 * _query_blocks(a) * a.kv_heads >= multiprocessors(a.query.device)
    )


def attention(a: Attention) -> tuple[Tensor, Tensor]:
    """`pm_ops::attention`, of calls that :func:`takes` approves of: one launch."""
    tokens, q_heads, dim = a.query.shape
    batch = a.seq_lens.shape[0]
    out = a.query.new_empty((tokens, q_heads, a.value_dim))
    lse = a.query.new_empty((tokens, q_heads) if a.return_lse else (0,), dtype=torch.float32)
    block_n = _block_n(dim, a.value_dim)
    rows = _box_rows(a.page_size, block_n)
    keys = _descriptor(a.buffer, a.key_plane, a.page_size, a.kv_heads, dim, a.key_dtype, rows)
    values = _descriptor(a.buffer, a.value_plane, a.page_size, a.kv_heads, a.value_dim, a.value_dtype, rows)
    page_table = a.page_table if a.page_table.stride(1) == 1 else a.page_table.contiguous()
    max_keys = min(page_table.shape[1] * a.page_size, 2**31 - 1)
    longest = min(max_keys, a.max_seq_len or max_keys)
    query_blocks = _query_blocks(a)
    programs = query_blocks * a.kv_heads
    scale = a.softmax_scale * a.key_scale
    capped = a.softcap > 0
    with on_device(a.buffer):
        _attention_hopper[(programs if longest >= _LONG else min(programs, multiprocessors(a.query.device)),)](
            keys,
            values,
            a.query,
            *a.query.stride()[:2],
            out,
            lse if a.return_lse else None,
            None if a.sinks is None else a.sinks.contiguous(),
            page_table,
            page_table.stride(0),
            min(a.key_plane[4], a.value_plane[4]),
            None if a.query_start is None else a.query_start.contiguous(),
            a.seq_lens.contiguous(),
            1.0 if capped else scale * LOG2E.value,
            a.softcap * LOG2E.value,
            scale * 2 * LOG2E.value / a.softcap if capped else 0.0,
            a.value_scale,
            tokens // max(batch, 1),
            batch,
            query_blocks,
            tokens,
            max_keys,
            a.kv_heads,
            min(a.window, 1 << 30),
            CAUSAL=a.causal,
            WINDOW=a.window > 0,
            SOFTCAP=capped,
            PAGE_SIZE=a.page_size,
            ROWS=rows,
            HEADS=q_heads // a.kv_heads,
            DIM_K=dim,
            DIM_V=a.value_dim,
            BLOCK_N=block_n,
            STAGES=2,
            num_warps=4,
        )
    return out, lse


def _query_blocks(a: Attention) -> int:
    tokens, q_heads, _ = a.query.shape
    block_q, batch = BLOCK_M.value // (q_heads // a.kv_heads), a.seq_lens.shape[0]
    if a.query_start is None:
        return batch * -(-(tokens // max(batch, 1)) // block_q)
    return tokens // block_q + batch + 1


def _block_n(*dims: int) -> int:
    return 128 if max(dims) <= 128 else 64  # two stages of keys and values, and the queries, in 227 KiB


def _box_rows(page_size: int, block_n: int) -> int:
    """Tokens of a box: a power of two that divides the page. More than 64 would not make it faster."""
    return min(page_size & -page_size, block_n, 64)


def _descriptor(
    buffer: Tensor, plane: Sequence[int], page_size: int, heads: int, dim: int, dtype: torch.dtype, rows: int
) -> TensorDescriptor:
    """A plane for the copy engine, as [num_pages, heads, page_size, dim]."""
    view = plane_view(buffer, plane, page_size, heads, dim, dtype).transpose(1, 2)
    # The stride of an axis of one entry is never used, but the copy engine refuses 0
    strides = [stride if size > 1 else dim for size, stride in zip(view.shape, view.stride(), strict=True)]
    return TensorDescriptor(view, list(view.shape), [*strides[:3], 1], [1, 1, rows, COLUMNS.value], _BOX)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
