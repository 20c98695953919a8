"""repack_pages: every run of every token from one page to another, in one launch.

A program moves a few runs of several chunks of tokens; a chunk lies in one page on both sides. A row of its tile is one
token of one run; where a run's tokens lie back to back on both sides they are one piece of memory, and the rows share it
out. What is known of the runs is worked out once, before the first chunk. All of a tile is loaded before any of it is
stored. Words are 16 bytes (two int64 a thread, which the compiler joins) where the runs' offsets, strides and lengths
allow it, which is found out from their table, on the device; else 4, or 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .common import on_device

if TYPE_CHECKING:
    from ..ops.repack import RepackPages

_CHUNK = 16  # most tokens of a chunk
_ELEMENTS, _WARPS = 1024, 4  # of a tile, 8 bytes each: four words of 16 bytes a thread
_COLUMNS = 64  # most elements of a tile's row
_PROGRAMS, _CHUNKS = 8192, 16  # programs that are enough for any GPU, and most chunks that one of them moves


@triton.jit
def _move(
    source, target, at, to, size, start, step, longest_joined, longest, UNIT: tl.constexpr, WORD: tl.constexpr,
    EACH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Rows of `size` bytes each, in units of UNIT bytes, each EACH words; joined rows take turns within one piece."""
    SPAN: tl.constexpr = COLUMNS // EACH * UNIT
    # `// UNIT * EACH` shows the compiler that rows begin, and end, at a whole unit
    source = source.to(tl.pointer_type(WORD)) + (at // UNIT * EACH)[:, None]
    target = target.to(tl.pointer_type(WORD)) + (to // UNIT * EACH)[:, None]
    end = (size // UNIT * EACH)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    for i in tl.range(0, tl.maximum(tl.cdiv(longest_joined, TOKENS * SPAN), tl.cdiv(longest, SPAN))):
        word = (start * COLUMNS + i * step * COLUMNS)[:, None] + column
        tl.store(target + word, tl.load(source + word, mask=word < end), mask=word < end)


@triton.jit(do_not_specialize=["tokens", "chunks", "chunks_each", "blocks", "num_runs"])
def _repack_pages(
    source, target, src_pages, dst_pages, runs, tokens: tl.int64, chunks, chunks_each, blocks, num_runs, src_page_size,
    dst_page_size, src_base: tl.int64, src_page_stride: tl.int64, src_num_pages: tl.int64, dst_base: tl.int64,
    dst_page_stride: tl.int64, dst_num_pages: tl.int64, LOW_BITS: tl.constexpr, CHUNK: tl.constexpr,
    TOKENS: tl.constexpr, RUNS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """LOW_BITS: those of the buffers' addresses. TOKENS: CHUNK, rounded up to a power of two."""
    row = tl.arange(0, RUNS * TOKENS)
    r = (tl.program_id(0) % blocks) * RUNS + row // TOKENS
    slot = (row % TOKENS).to(tl.int64)
    exists = r < num_runs
    source_offset = tl.load(runs + r * 5, mask=exists, other=0)
    source_stride = tl.load(runs + r * 5 + 1, mask=exists, other=0)
    target_offset = tl.load(runs + r * 5 + 2, mask=exists, other=0)
    target_stride = tl.load(runs + r * 5 + 3, mask=exists, other=0)
    nbytes = tl.load(runs + r * 5 + 4, mask=exists, other=0)
    state = (source_stride == 0) & (target_stride == 0)
    back_to_back = (source_stride == nbytes) & (target_stride == nbytes)
    joined = state | back_to_back
    piece = tl.where(state, nbytes, CHUNK * nbytes)  # of a joined run, in a whole chunk
    longest_joined = tl.max(tl.where(joined, piece, 0), 0)
    longest = tl.max(tl.where(joined, 0, nbytes), 0)
    low = source_offset | target_offset | tl.where(joined, piece, source_stride | target_stride | nbytes)
    low_tail = low | nbytes
    low = tl.max(low & 15, 0) | tl.max(low & 3, 0)  # 0 where all are multiples of 16; of 4, where it is one
    low_tail = tl.max(low_tail & 15, 0) | tl.max(low_tail & 3, 0)
    at_row = src_base + source_offset + tl.where(joined, 0, slot * source_stride)
    to_row = dst_base + target_offset + tl.where(joined, 0, slot * target_stride)
    start = tl.where(joined, slot, 0)
    step = tl.where(joined, TOKENS, 1).to(tl.int64)
    first = (tl.program_id(0) // blocks).to(tl.int64) * chunks_each
    for i in tl.range(0, tl.minimum(chunks - first, chunks_each)):
        token = (first + i) * CHUNK
        source_page = tl.load(src_pages + token // src_page_size).to(tl.int64)
        target_page = tl.load(dst_pages + token // dst_page_size).to(tl.int64)
        if (source_page >= 0) & (source_page < src_num_pages) & (target_page >= 0) & (target_page < dst_num_pages):
            source_page *= src_page_stride
            target_page *= dst_page_stride
            count = tl.minimum(tokens - token, CHUNK)
            once = tl.where(token % src_page_size == 0, nbytes, 0)
            size = tl.where(back_to_back, count * nbytes, tl.where(slot < count, nbytes, 0))
            size = tl.where(state, once, size)
            at = at_row + (source_page + token % src_page_size * source_stride)
            to = to_row + (target_page + token % dst_page_size * target_stride)
            bits = (src_base + source_page) | (dst_base + target_page) | LOW_BITS | tl.where(count < CHUNK, low_tail, low)
            if bits % 16 == 0:
                _move(source, target, at, to, size, start, step, longest_joined, longest,
                      16, tl.int64, 2, TOKENS, COLUMNS)  # fmt: skip
            elif bits % 4 == 0:
                _move(source, target, at, to, size, start, step, longest_joined, longest,
                      4, tl.int32, 1, TOKENS, COLUMNS)  # fmt: skip
            else:
                _move(source, target, at, to, size, start, step, longest_joined, longest,
                      1, tl.int8, 1, TOKENS, COLUMNS)  # fmt: skip


def repack_pages(a: RepackPages) -> None:
    """`pm_ops::repack_pages`. A page that does not exist, on either side, skips its tokens."""
    a.check_apart()
    num_runs, sizes = a.runs.shape[0], (a.src_page_size, a.dst_page_size)
    if a.tokens == 0 or num_runs == 0:
        return
    common = math.gcd(*sizes)
    chunk = max(n for n in range(1, _CHUNK + 1) if common % n == 0)
    tokens = triton.next_power_of_2(chunk)
    # The runs' lengths are on the device; this is what they are on average where all of a page moves.
    nbytes = min(a.src_region[2] // a.src_page_size, a.dst_region[2] // a.dst_page_size) // num_runs
    columns = min(max(triton.next_power_of_2(nbytes // 8), 4), _COLUMNS, _ELEMENTS // tokens)
    rows = _ELEMENTS // (columns * tokens)
    blocks, chunks = triton.cdiv(num_runs, rows), triton.cdiv(a.tokens, chunk)
    chunks_each = min(max(blocks * chunks // _PROGRAMS, 1), _CHUNKS)
    src_base, src_stride, _, src_pages = a.src_region
    dst_base, dst_stride, _, dst_pages = a.dst_region
    with on_device(a.target):
        _repack_pages[(triton.cdiv(chunks, chunks_each) * blocks,)](
            a.source, a.target, a.src_pages.contiguous(), a.dst_pages.contiguous(), a.runs.contiguous(), a.tokens,
            chunks, chunks_each, blocks, num_runs, *sizes, src_base, src_stride, src_pages, dst_base, dst_stride, dst_pages,
            LOW_BITS=(a.source.data_ptr() | a.target.data_ptr()) % 16, CHUNK=chunk, TOKENS=tokens, RUNS=rows,
            COLUMNS=columns, num_warps=_WARPS,
        )  # fmt: skip
