"""The consumers of the Hopper attention kernel: a warpgroup's rows against the tiles that a producer fetched.

The softmax of one tile overlaps the product of the tile before with its values: both products are issued ahead of it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import LN2, LOG2E
from .hopper_tile import BLOCK_M, tile_of


@gluon.jit
def await_tile(barrier, phase, BOXES: gl.constexpr):
    """Wait for a tile, however it was fetched."""
    mbarrier.wait(barrier, phase)
    if not BOXES:
        fence_async_shared()  # rows were written as ordinary stores are; the tensor cores read otherwise


@gluon.jit
def visible_logits(
    x,
    n,
    lo,
    hi,
    full_lo,
    full_hi,
    position,
    cap,
    cap_scale,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """A tile's products, capped, and -inf where a key is hidden."""
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
    return x


@gluon.jit
def advance(x, m, scale):
    """The running maximum with a tile's logits, as it is and in units of log 2 for their exponentials.

    `scale` turns products into logits in units of log 2.
    """
    new_m = gl.maximum(m, gl.max(x, 1))
    return new_m, gl.where(new_m == float("-inf"), 0.0, new_m * scale)  # 0: a row that has seen no key yet


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
    """Take a tile's products into the running maximum and sum."""
    x = visible_logits(
        x, n, lo, hi, full_lo, full_hi, position, cap, cap_scale, window, CAUSAL, WINDOW, SOFTCAP, BLOCK_N, LAYOUT
    )
    new_m, top = advance(x, m, scale)
    p = gl.exp2(x * scale - top[:, None])
    shrink = gl.exp2(m * scale - top)  # after p: the compiled order that was timed
    return p, new_m, l * shrink + gl.sum(p, 1), shrink


@gluon.jit
def consume(
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
    sequences,
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
    BOXES: gl.constexpr,
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
    _, _, _, batch, query_blocks, _, _, kv_heads, window = sequences
    for tile in range(gl.program_id(0), query_blocks * kv_heads, gl.num_programs(0)):
        b, kv_head, start, num, first, earliest, latest, lo, hi, count = tile_of(
            tile, sequences, CAUSAL, WINDOW, BLOCK_Q, BLOCK_N
        )
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
            await_tile(key_full.index(stage), phase, BOXES)
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
                await_tile(key_full.index(stage), phase, BOXES)
                k = key_tiles.index(stage).permute((1, 0))
                x = warpgroup_mma(q_tile, k, zeros, use_acc=False, is_async=True)
                await_tile(value_full.index(earlier), earlier_phase, BOXES)
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
            await_tile(value_full.index(stage), phase, BOXES)
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
