"""The parts of the Hopper kernel for latent attention: consumers that take turns, and the producer of their tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .common import LN2
from .hopper_consume import advance, await_tile, visible_logits
from .hopper_produce import fetch, fetch_rows
from .hopper_tile import tile_of


@gluon.jit
def _tiles_of(sequences, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr):
    """The program's queries and keys, as `tile_of` tells, and which of its tiles its split has: `count` from n on.

    A split behind the last tile has one tile of hidden keys, so that it takes no path of its own.
    """
    b, head_block, start, num, first, earliest, latest, lo, hi, count = tile_of(
        gl.program_id(0), sequences, CAUSAL, False, BLOCK_Q, BLOCK_N
    )
    share = (count + gl.num_programs(1) - 1) // gl.num_programs(1)
    skipped = share * gl.program_id(1)
    count = gl.where(count > 0, gl.maximum(gl.minimum(count - skipped, share), 1), 0)
    return b, head_block, start, num, first, earliest, hi, skipped * BLOCK_N, count


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
def _logits(q_tiles, tiles, full, stage, phase, zeros, STAGES: gl.constexpr, BOXES: gl.constexpr):
    """Begin a tile's products with the queries, each part as soon as it has come."""
    await_tile(full.index(2 * STAGES + stage), phase, BOXES)
    x = warpgroup_mma(q_tiles[2], tiles[2].index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    await_tile(full.index(stage), phase, BOXES)
    x = warpgroup_mma(q_tiles[0], tiles[0].index(stage).permute((1, 0)), x, is_async=True)
    await_tile(full.index(STAGES + stage), phase, BOXES)
    return warpgroup_mma(q_tiles[1], tiles[1].index(stage).permute((1, 0)), x, is_async=True)


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
    empty,
    shared,
    PART: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HALF: gl.constexpr,
    P_LAYOUT: gl.constexpr,
    S_ROWS: gl.constexpr,
    O_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Multiply tile `t` with the probabilities that the other consumer has made of it."""
    p_tile, m_row, shrink_row, ready, made = shared
    stage = t % STAGES
    mbarrier.wait(ready.index(1 - PART), (t // 2) & 1)
    m = m_row.load(S_ROWS)
    shrink = shrink_row.load(S_ROWS)
    acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
    mbarrier.wait(made.index(1 - PART), (t // 2) & 1)
    p = p_tile.load(P_LAYOUT)
    gl.thread_barrier()  # all have read, before the next ones are stored
    await_tile(full.index(PART * STAGES + stage), (t // STAGES) & 1, BOXES)
    _zero_hidden(own.index(stage), n, hi, BLOCK_N, HALF, BOXES)
    acc = warpgroup_mma(p, own.index(stage), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))  # p is in registers until then
    mbarrier.arrive(empty.index(PART * STAGES + stage))
    return acc, m, l * shrink


@gluon.jit
def _give(
    acc,
    m,
    l,
    t,
    n,
    hi,
    full_hi,
    position,
    scale,
    q_tiles,
    tiles,
    full,
    empty,
    shared,
    PART: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HALF: gl.constexpr,
    P_LAYOUT: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Make the probabilities of tile `t`, after tile t - 1 if there is one, and hand them on.

    One thread arrives for all, so a barrier comes first. The compiler has one of its own there, and makes one of both.
    The maximum goes ahead of them, so that the other's sums are shrunk while the exponentials are computed. Tile t - 1
    is given back before tile t is waited for: its place is the next to be filled.
    """
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    p_tile, m_row, shrink_row, ready, made = shared
    own = tiles[PART]
    stage = t % STAGES
    if t > 0:
        acc, m, l = _take(
            acc, l, t - 1, n - BLOCK_N, hi, own, full, empty, shared,
            PART, BLOCK_N, HALF, P_LAYOUT, S_ROWS, O_ROWS, STAGES, BOXES,
        )  # fmt: skip
    zeros = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S_LAYOUT)
    x = _logits(q_tiles, tiles, full, stage, (t // STAGES) & 1, zeros, STAGES, BOXES)
    x = warpgroup_mma_wait(0, deps=(x,))
    mbarrier.arrive(empty.index(2 * STAGES + stage))
    x = visible_logits(x, n, 0, hi, 0, full_hi, position, 0.0, 0.0, 0, CAUSAL, False, False, BLOCK_N, S_LAYOUT)
    new_m, top = advance(x, m, scale)
    shrink = gl.exp2(m * scale - top)
    m = new_m
    m_row.store(m)
    shrink_row.store(shrink)
    gl.thread_barrier()
    mbarrier.arrive(ready.index(PART))
    p = gl.exp2(x * scale - top[:, None])
    l = l * shrink + gl.sum(p, 1)
    p = p.to(p_tile.dtype)
    p_tile.store(p)
    gl.thread_barrier()
    mbarrier.arrive(made.index(PART))
    acc = acc * gl.convert_layout(shrink, O_ROWS)[:, None]
    p = gl.convert_layout(p, P_LAYOUT)
    _zero_hidden(own.index(stage), n, hi, BLOCK_N, HALF, BOXES)
    acc = warpgroup_mma(p, own.index(stage), acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(empty.index(PART * STAGES + stage))
    return acc, m, l


@gluon.jit
def consume(
    q_tiles,
    tiles,
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
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Logits and probabilities of tiles PART, PART + 2, ..., and half PART of the columns of the result.

    Tile t's probabilities, its running maximum and by what that shrinks the sums go through shared memory to the other
    consumer, which has read those of tile t - 1 before: one place is enough.
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
    b, head_block, start, num, first, earliest, hi, n, count = _tiles_of(sequences, CAUSAL, BLOCK_Q, BLOCK_N)
    if count > 0:
        token, head, i, valid = _query_rows(first, start, num, head_block, WIDE, GROUP, HEADS, BLOCK_M)
        at = token * query_stride + head.to(gl.int64) * query_head_stride
        _load_q(q_tiles[PART], query, at, valid, PART * HALF, HALF, WIDE)
        if PART == 1:
            token, head, i, valid = _query_rows(first, start, num, head_block, NARROW, GROUP, HEADS, BLOCK_M)
            at = token * query_stride + head.to(gl.int64) * query_head_stride
            _load_q(q_tiles[2], query, at, valid, VALUE, REST, NARROW)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(both.index(0))
        mbarrier.wait(both.index(0), 0)

        token, head, i, valid = _query_rows(first, start, num, head_block, S_LAYOUT, GROUP, HEADS, BLOCK_M)
        position = earliest + i
        full_hi = hi
        if CAUSAL:
            full_hi = gl.minimum(hi, earliest + 1)
        m = gl.full([BLOCK_M], float("-inf"), gl.float32, S_ROWS)
        l = gl.full([BLOCK_M], 0.0, gl.float32, S_ROWS)
        acc = gl.full([BLOCK_M, HALF], 0.0, gl.float32, O_LAYOUT)
        for t in range(PART, count, 2):
            acc, m, l = _give(
                acc, m, l, t, n + t * BLOCK_N, hi, full_hi, position, scale, q_tiles, tiles, full, empty, shared,
                PART, CAUSAL, BLOCK_M, BLOCK_N, HALF, P_LAYOUT, S_LAYOUT, O_ROWS, STAGES, BOXES,
            )  # fmt: skip
        if count % 2 == PART:  # the last tile is the other's
            acc, m, l = _take(
                acc, l, count - 1, n + (count - 1) * BLOCK_N, hi, tiles[PART], full, empty, shared,
                PART, BLOCK_N, HALF, P_LAYOUT, S_ROWS, O_ROWS, STAGES, BOXES,
            )  # fmt: skip

        sums.index(PART).store(l)
        gl.thread_barrier()
        mbarrier.arrive(both.index(1))
        mbarrier.wait(both.index(1), 0)
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


@gluon.jit
def _fetch_part(
    plane,
    strides,
    boxes,
    full,
    empty,
    pages,
    inside,
    n,
    t,
    PART: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Fetch one of the three parts of tile `t`."""
    stage = t % STAGES
    barrier = full.index(PART * STAGES + stage)
    head = t * 0
    mbarrier.wait(empty.index(PART * STAGES + stage), ((t // STAGES) & 1) ^ 1)
    if BOXES:
        fetch(plane, boxes, barrier, pages, head, n, stage, PAGE_SIZE, ROWS, BLOCK_N, DIM, PART * HALF)
    else:
        fetch_rows(
            plane, strides, boxes, pages, inside, head, n, stage, PAGE_SIZE, ROWS, BLOCK_N, DIM, LAYOUT, PART * HALF
        )
        async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def produce(
    plane,
    strides,
    parts,
    full,
    empty,
    page_table,
    page_table_stride,
    num_pages,
    sequences,
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    VALUE: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Fetch the parts of the program's tiles in the order in which they are consumed, as `hopper_produce.produce`."""
    HALF: gl.constexpr = VALUE // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b, _, _, _, _, _, hi, n, count = _tiles_of(sequences, CAUSAL, BLOCK_M // HEADS, BLOCK_N)
    table = page_table + b.to(gl.int64) * page_table_stride
    for t in range(count):
        pages = ()  # read together, ahead of the wait: one latency for all of them
        inside = ()
        for i in gl.static_range(BLOCK_N // ROWS):
            if BOXES:
                at = n + i * ROWS
                seen = at < hi
                missing = num_pages
            else:
                at = n + i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
                seen = at < hi
                missing = 0
            inside = inside + (seen,)  # type: ignore[assignment]
            page = gl.load(table + at // PAGE_SIZE, mask=seen, other=missing).to(gl.int32)
            pages = pages + (page,)  # type: ignore[assignment]
        for i in gl.static_range(3):  # the rest of the key first: its place has been free for longest
            _fetch_part(
                plane, strides, parts[(i + 2) % 3], full, empty, pages, inside, n, t,
                (i + 2) % 3, PAGE_SIZE, ROWS, HALF if i > 0 else REST, HALF, BLOCK_N, STAGES, BOXES, layout,
            )  # fmt: skip
        n += BLOCK_N
