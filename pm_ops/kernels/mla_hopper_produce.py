"""The producer of the Hopper kernel for latent attention: tiles of rows into shared memory, piece by piece."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from .hopper_produce import fetch, fetch_rows
from .hopper_tile import tile_of


@gluon.jit
def tiles_of(sequences, CAUSAL: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr):
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
def _fetch_piece(
    plane,
    strides,
    boxes,
    full,
    pages,
    inside,
    n,
    piece: gl.constexpr,
    FIRST: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BOXES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Fetch columns FIRST to FIRST + DIM of a tile as piece number `piece` of `boxes`."""
    head = n * 0
    if BOXES:
        fetch(plane, boxes, full, pages, head, n, piece, PAGE_SIZE, ROWS, BLOCK_N, DIM, FIRST)
    else:
        fetch_rows(plane, strides, boxes, pages, inside, head, n, piece, PAGE_SIZE, ROWS, BLOCK_N, DIM, LAYOUT, FIRST)
        async_copy.mbarrier_arrive(full, increment_count=False)


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
    PIECES: gl.constexpr,
    BOXES: gl.constexpr,
):
    """Fetch the program's tiles in the order in which they are consumed, as `hopper_produce.produce`.

    Of a tile the rest of the key comes first: its place has been free for longest.
    """
    WIDTH: gl.constexpr = VALUE // 2 // PIECES
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    b, _, _, _, _, _, hi, n, count = tiles_of(sequences, CAUSAL, BLOCK_M // HEADS, BLOCK_N)
    table = page_table + b.to(gl.int64) * page_table_stride
    for t in range(0, count, 2):
        free = ((t // 2) & 1) ^ 1
        for place in gl.static_range(2):
            if t + place < count:
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
                mbarrier.wait(empty[4 + place], free)
                _fetch_piece(
                    plane, strides, parts[2], full[4 * PIECES + place], pages, inside, n, place,
                    VALUE, PAGE_SIZE, ROWS, REST, BLOCK_N, BOXES, layout,
                )  # fmt: skip
                for part in gl.static_range(2):
                    mbarrier.wait(empty[2 * part + place], free)
                    for i in gl.static_range(PIECES):
                        _fetch_piece(
                            plane, strides, parts[part], full[(2 * part + place) * PIECES + i], pages, inside, n,
                            place * PIECES + i, (part * PIECES + i) * WIDTH,
                            PAGE_SIZE, ROWS, WIDTH, BLOCK_N, BOXES, layout,
                        )  # fmt: skip
                n += BLOCK_N
