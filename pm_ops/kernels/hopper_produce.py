"""The producer of the Hopper attention kernel: pages into shared memory, by the copy engine or row by row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from .hopper_tile import COLUMNS, tile_of


@gluon.jit
def fetch(
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
    FIRST: gl.constexpr = 0,
):
    """Have a tile fetched from its pages, from dim FIRST on; the barrier's phase ends when all of it has come."""
    mbarrier.expect(barrier, BLOCK_N * DIM * 2)
    for i in gl.static_range(BLOCK_N // ROWS):
        for c in gl.static_range(DIM // COLUMNS):
            box = boxes.index((stage * (DIM // COLUMNS) + c) * (BLOCK_N // ROWS) + i)
            at = [pages[i], kv_head, (n + i * ROWS) % PAGE_SIZE, FIRST + c * COLUMNS]
            tma.async_copy_global_to_shared(plane, at, barrier, box)


@gluon.jit
def zero_outside(boxes, stage, n, edge, lo, hi, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
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
def fetch_rows(
    plane,
    strides,
    boxes,
    pages,
    seen,
    kv_head,
    n,
    stage,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
    FIRST: gl.constexpr = 0,
):
    """Have a tile fetched row by row, from dim FIRST on, 16 bytes a thread; rows that are not seen become zeros.

    `strides` are in units of 16 bytes: as elements they would not tell the compiler that rows begin at a multiple of 8.
    """
    d = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    for i in gl.static_range(BLOCK_N // ROWS):
        token = (n + i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))) % PAGE_SIZE
        unit = pages[i].to(gl.int64) * strides[0] + token.to(gl.int64) * strides[1] + kv_head.to(gl.int64) * strides[2]
        for c in gl.static_range(DIM // COLUMNS):
            box = boxes.index((stage * (DIM // COLUMNS) + c) * (BLOCK_N // ROWS) + i)
            address = plane + (unit * 8)[:, None] + (FIRST + c * COLUMNS + d)[None, :]
            async_copy.async_copy_global_to_shared(box, address, mask=seen[i][:, None])


@gluon.jit
def produce(
    key_plane,
    value_plane,
    key_strides,
    value_strides,
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
    sequences,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    DIM_K: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Fetch the key and value tiles of all of this program's tiles, in the order in which they are consumed.

    BOXES: one warp has the copy engine do it. Without, for pages too small for boxes, each thread of four warps copies
    16 bytes at a time.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    filled = 0
    edges = 0
    _, _, _, _, query_blocks, _, _, kv_heads, _ = sequences
    for tile in range(gl.program_id(0), query_blocks * kv_heads, gl.num_programs(0)):
        b, kv_head, start, num, first, earliest, latest, lo, hi, count = tile_of(
            tile, sequences, CAUSAL, WINDOW, BLOCK_Q, BLOCK_N
        )
        table = page_table + b.to(gl.int64) * page_table_stride
        begin = lo // BLOCK_N * BLOCK_N
        for j in range(count):
            n = begin + j * BLOCK_N
            stage = filled % STAGES
            phase = (filled // STAGES) & 1
            pages = ()  # read together, ahead of the wait: one latency for all of them
            if BOXES:
                for i in gl.static_range(BLOCK_N // ROWS):
                    at = n + i * ROWS
                    seen = (at + ROWS > lo) & (at < hi)
                    pages = pages + (gl.load(table + at // PAGE_SIZE, mask=seen, other=num_pages).to(gl.int32),)  # type: ignore[assignment]
                mbarrier.wait(key_empty.index(stage), phase ^ 1)
                fetch(
                    key_plane,
                    key_boxes,
                    key_full.index(stage),
                    pages,
                    kv_head,
                    n,
                    stage,
                    PAGE_SIZE,
                    ROWS,
                    BLOCK_N,
                    DIM_K,
                )
                mbarrier.wait(value_empty.index(stage), phase ^ 1)
                low_edge = (n < lo) & (lo % ROWS != 0)
                high_edge = (n + BLOCK_N > hi) & (hi % ROWS != 0)
                if low_edge | high_edge:
                    fetch(
                        value_plane, value_boxes, value_edge, pages, kv_head, n, stage, PAGE_SIZE, ROWS, BLOCK_N, DIM_V
                    )
                    mbarrier.wait(value_edge, edges & 1)
                    edges += 1
                    if low_edge:
                        zero_outside(value_boxes, stage, n, lo, lo, hi, ROWS, BLOCK_N, DIM_V)
                    if high_edge:
                        zero_outside(value_boxes, stage, n, hi, lo, hi, ROWS, BLOCK_N, DIM_V)
                    fence_async_shared()
                    gl.thread_barrier()
                    mbarrier.arrive(value_full.index(stage))
                else:
                    full = value_full.index(stage)
                    fetch(value_plane, value_boxes, full, pages, kv_head, n, stage, PAGE_SIZE, ROWS, BLOCK_N, DIM_V)
            else:
                inside = ()
                for i in gl.static_range(BLOCK_N // ROWS):
                    at = n + i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
                    seen = (at >= lo) & (at < hi)
                    inside = inside + (seen,)  # type: ignore[assignment]
                    pages = pages + (gl.load(table + at // PAGE_SIZE, mask=seen, other=0).to(gl.int32),)  # type: ignore[assignment]
                mbarrier.wait(key_empty.index(stage), phase ^ 1)
                fetch_rows(
                    key_plane, key_strides, key_boxes, pages, inside, kv_head, n, stage,
                    PAGE_SIZE, ROWS, BLOCK_N, DIM_K, layout,
                )  # fmt: skip
                async_copy.mbarrier_arrive(key_full.index(stage), increment_count=False)
                mbarrier.wait(value_empty.index(stage), phase ^ 1)
                fetch_rows(
                    value_plane, value_strides, value_boxes, pages, inside, kv_head, n, stage,
                    PAGE_SIZE, ROWS, BLOCK_N, DIM_V, layout,
                )  # fmt: skip
                async_copy.mbarrier_arrive(value_full.index(stage), increment_count=False)
            filled += 1
