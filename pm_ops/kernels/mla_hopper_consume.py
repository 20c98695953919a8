"""The consumers of the Hopper kernel for latent attention, which take turns in making a tile's probabilities."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import LN2
from .hopper_consume import advance, await_tile, visible_logits
from .mla_hopper_produce import tiles_of


@gluon.jit
def _load_q(q_tile, query, at, valid, FIRST: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    d = FIRST + gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    q_tile.store(gl.load(query + at[:, None] + d[None, :], mask=valid[:, None], other=0.0))


@gluon.jit
def _query_rows(first, start, num, head_block, LAYOUT: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr,
                BLOCK_M: gl.constexpr):  # fmt: skip
    """Rows of the program: their token, head, which query of the program they are of, and whether they are any."""
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    i = first + row // HEADS
    head = head_block * HEADS + row % HEADS
    valid = (i < num) & (row < BLOCK_M // HEADS * HEADS) & (head < GROUP)
    return (start + i).to(gl.int64), head, row // HEADS, valid


@gluon.jit
def _logits(q_tiles, keys, full, phase, zeros, PLACE: gl.constexpr, PIECES: gl.constexpr, BOXES: gl.constexpr):
    """Begin a tile's products with the queries, each piece as soon as it has come: 2 * PIECES + 1 products."""
    await_tile(full[4 * PIECES + PLACE], phase, BOXES)
    x = warpgroup_mma(q_tiles[2], keys[2].index(PLACE).permute((1, 0)), zeros, use_acc=False, is_async=True)
    for part in gl.static_range(2):
        for i in gl.static_range(PIECES):
            await_tile(full[(2 * part + PLACE) * PIECES + i], phase, BOXES)
            k = keys[part].index(PLACE * PIECES + i).permute((1, 0))
            x = warpgroup_mma(q_tiles[part].index(i), k, x, is_async=True)
    return x


@gluon.jit
def _zero_hidden(tile, n, hi, BLOCK_N: gl.constexpr, DIM: gl.constexpr, BOXES: gl.constexpr):
    """Zero the rows from `hi` on of a tile that begins at key `n`. Rows that were copied one by one are zeros there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    if BOXES:
        if n + BLOCK_N > hi:
            for i in gl.static_range(0, BLOCK_N, 16):
                rows = tile.slice(i, 16)
                visible = n + i + gl.arange(0, 16, gl.SliceLayout(1, layout)) < hi
                rows.store(gl.where(visible[:, None], rows.load(layout), 0.0))
            fence_async_shared()
            gl.thread_barrier()


@gluon.jit
def _take(
    acc,
    l,
    t,
    n,
    hi,
    own,
    full,
    shared,
    PART: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HALF: gl.constexpr,
    P_LAYOUT: gl.constexpr,
    S_ROWS: gl.constexpr,
    O_ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Begin to multiply tile `t` with the probabilities that the other consumer has made of it."""
    p_tile, m_row, shrink_row, ready, made = shared
    PLACE: gl.constexpr = 1 - PART
    phase = (t // 2) & 1
    mbarrier.wait(ready[1 - PART], phase)
    m = m_row.load(S_ROWS)
    shrink = shrink_row.load(S_ROWS)
    acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
    mbarrier.wait(made[1 - PART], phase)
    p = p_tile.load(P_LAYOUT)
    gl.thread_barrier()  # all have read, before the next ones are stored
    for i in gl.static_range(PIECES):
        await_tile(full[(2 * PART + PLACE) * PIECES + i], phase, BOXES)
    _zero_hidden(own.index(PLACE), n, hi, BLOCK_N, HALF, BOXES)
    acc = warpgroup_mma(p, own.index(PLACE), acc, is_async=True)
    return acc, p, m, l * shrink


@gluon.jit
def _give(
    x,
    m,
    l,
    n,
    hi,
    full_hi,
    position,
    scale,
    shared,
    PART: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):
    """Make a tile's probabilities of its logits, and hand them on.

    One thread arrives for all, so a barrier comes first. The compiler has one of its own there, and makes one of both.
    The maximum goes ahead of them, so that the other's sums are shrunk while the exponentials are computed.
    """
    p_tile, m_row, shrink_row, ready, made = shared
    x = visible_logits(x, n, 0, hi, 0, full_hi, position, 0.0, 0.0, 0, CAUSAL, False, False, BLOCK_N, S_LAYOUT)
    new_m, top = advance(x, m, scale)
    shrink = gl.exp2(m * scale - top)
    m_row.store(new_m)
    shrink_row.store(shrink)
    gl.thread_barrier()
    mbarrier.arrive(ready[PART])
    p = gl.exp2(x * scale - top[:, None])
    l = l * shrink + gl.sum(p, 1)
    p = p.to(p_tile.dtype)
    p_tile.store(p)
    gl.thread_barrier()
    mbarrier.arrive(made[PART])
    return p, new_m, l, shrink


@gluon.jit
def consume(
    q_tile,
    q_tiles,
    tiles,
    keys,
    full,
    empty,
    shared,
    sums,
    both,
    query,
    query_stride,
    query_head_stride,
    out,
    lse,
    scale,
    out_scale,
    sequences,
    PART: gl.constexpr,
    CAUSAL: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    VALUE: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PIECES: gl.constexpr,
    SPLIT: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Logits and probabilities of tiles PART, PART + 2, ..., and half PART of the columns of the result.

    Tile t's probabilities, its running maximum and by what that shrinks the sums go through shared memory to the other
    consumer, which has read those of tile t - 1 before: one place is enough. Tile t lies in place t % 2, and a place is
    filled again when both have multiplied with their halves of the tile in it.

    The first consumer takes tile t - 1 and then makes the logits of tile t, which fill the place that the take has
    freed two tiles before. The second begins its logits before it takes: tile t is there with tile t - 1, its logits
    are made beside the other's, and the products of the take beside its softmax.
    """
    HALF: gl.constexpr = VALUE // 2
    BLOCK_Q: gl.constexpr = BLOCK_M // HEADS
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [256 // REST, REST // 8], [4, 1], [1, 0])
    b, head_block, start, num, first, earliest, hi, n, count = tiles_of(sequences, CAUSAL, BLOCK_Q, BLOCK_N)
    if count > 0:
        token, head, i, valid = _query_rows(first, start, num, head_block, WIDE, GROUP, HEADS, BLOCK_M)
        at = token * query_stride + head.to(gl.int64) * query_head_stride
        _load_q(q_tile[PART], query, at, valid, PART * HALF, HALF, WIDE)
        if PART == 1:
            token, head, i, valid = _query_rows(first, start, num, head_block, NARROW, GROUP, HEADS, BLOCK_M)
            at = token * query_stride + head.to(gl.int64) * query_head_stride
            _load_q(q_tile[2], query, at, valid, VALUE, REST, NARROW)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(both[0])
        mbarrier.wait(both[0], 0)

        token, head, i, valid = _query_rows(first, start, num, head_block, S_LAYOUT, GROUP, HEADS, BLOCK_M)
        position = earliest + i
        full_hi = hi
        if CAUSAL:
            full_hi = gl.minimum(hi, earliest + 1)
        m = gl.full([BLOCK_M], float("-inf"), gl.float32, S_ROWS)
        l = gl.full([BLOCK_M], 0.0, gl.float32, S_ROWS)
        acc = gl.full([BLOCK_M, HALF], 0.0, gl.float32, O_LAYOUT)
        own = tiles[PART]
        zeros = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
        for t in range(PART, count, 2):
            k = n + t * BLOCK_N
            phase = (t // 2) & 1
            if PART == 0:
                if t > 0:
                    acc, p, m, l = _take(
                        acc, l, t - 1, k - BLOCK_N, hi, own, full, shared,
                        PART, BLOCK_N, HALF, P_LAYOUT, S_ROWS, O_ROWS, PIECES, BOXES,
                    )  # fmt: skip
                    acc, p = warpgroup_mma_wait(0, deps=(acc, p))  # p is in registers until then
                    mbarrier.arrive(empty[1])
                x = _logits(q_tiles, keys, full, phase, zeros, 0, PIECES, BOXES)
                x = warpgroup_mma_wait(0, deps=(x,))
                mbarrier.arrive(empty[4])
                p, m, l, shrink = _give(
                    x, m, l, k, hi, full_hi, position, scale, shared, PART, CAUSAL, BLOCK_N, S_LAYOUT
                )
            else:
                x = _logits(q_tiles, keys, full, phase, zeros, 1, PIECES, BOXES)
                # No wait: without it the compiler has one for all products before it lets the sums be shrunk
                acc = warpgroup_mma_wait(2 * PIECES + 1, deps=(acc,))
                acc, taken, m, l = _take(
                    acc, l, t - 1, k - BLOCK_N, hi, own, full, shared,
                    PART, BLOCK_N, HALF, P_LAYOUT, S_ROWS, O_ROWS, PIECES, BOXES,
                )  # fmt: skip
                x = warpgroup_mma_wait(1, deps=(x,))
                mbarrier.arrive(empty[5])
                p, m, l, shrink = _give(
                    x, m, l, k, hi, full_hi, position, scale, shared, PART, CAUSAL, BLOCK_N, S_LAYOUT
                )
                acc, taken = warpgroup_mma_wait(0, deps=(acc, taken))
                mbarrier.arrive(empty[2])
            acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
            p = gl.convert_layout(p, P_LAYOUT)
            _zero_hidden(own.index(PART), k, hi, BLOCK_N, HALF, BOXES)
            acc = warpgroup_mma(p, own.index(PART), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))
            mbarrier.arrive(empty[3 * PART])
        if count % 2 == PART:  # the last tile is the other's
            acc, p, m, l = _take(
                acc, l, count - 1, n + (count - 1) * BLOCK_N, hi, own, full, shared,
                PART, BLOCK_N, HALF, P_LAYOUT, S_ROWS, O_ROWS, PIECES, BOXES,
            )  # fmt: skip
            acc, p = warpgroup_mma_wait(0, deps=(acc, p))

        sums.index(PART).store(l)
        gl.thread_barrier()
        mbarrier.arrive(both[1])
        mbarrier.wait(both[1], 0)
        l += sums.index(1 - PART).load(S_ROWS)
        # l is 0 only where nothing was seen, and then acc is 0 and m -inf
        row = token * GROUP + head
        if SPLIT:
            row += gl.program_id(1).to(gl.int64) * sequences[5] * GROUP
        if PART == 0:
            if lse is not None:
                gl.store(lse + row, (m * scale + gl.log2(l)) * LN2, mask=valid)
        factor = gl.convert_layout(out_scale / gl.where(l == 0, 1.0, l), O_ROWS)
        y = (acc * factor[:, None]).to(out.dtype.element_ty)
        at = gl.convert_layout(row, O_ROWS) * VALUE + PART * HALF
        d = gl.arange(0, HALF, gl.SliceLayout(0, O_LAYOUT))
        gl.store(out + at[:, None] + d[None, :], y, mask=gl.convert_layout(valid, O_ROWS)[:, None])
