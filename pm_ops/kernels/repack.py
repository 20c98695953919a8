"""repack_pages: every run of every token from one page to another, in one launch.

A program moves a block of tokens, run after run: where each token's pages begin is worked out once, and a run is five
numbers. A row of its tile is one token, so that neither page sizes nor the pages' order matter. All of a tile is loaded
before any of it is stored. Words are 16 bytes (two int64 a thread, which the compiler joins) where the run's offsets,
strides and length allow it, which is found out from the table, on the device; else 4, or 1. Elements that get wider are
loaded and stored one by one, side by side, so that the compiler joins them where that allows it; they are computed from
their bits, since not every card, nor the interpreter, converts every format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .common import on_device
from .peer import writes_to

if TYPE_CHECKING:
    from ..ops.repack import RepackPages

_ELEMENTS, _WARPS = 1024, 8  # of a tile, 8 bytes each: two words of 16 bytes a thread
_LEAST, _MOST = 4, 64  # elements of a tile's row
_REGISTERS = 96  # of a thread that widens, so that two blocks fit a multiprocessor; else it takes 140
_PROGRAMS, _RUNS = 8192, 16  # programs that are enough for any GPU, and most runs that one of them moves
_EXPONENT_AND_MANTISSA = {
    torch.float32: (8, 23),
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
    torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
}  # bits


@triton.jit
def _move(
    source, target, at, to, exists, nbytes, UNIT: tl.constexpr, WORD: tl.constexpr, EACH: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """`nbytes` bytes of every row that exists, in units of UNIT bytes, each EACH words."""
    # `// UNIT * EACH` shows the compiler that rows begin, and end, at a whole unit
    source = source.to(tl.pointer_type(WORD)) + (at // UNIT * EACH)[:, None]
    target = target.to(tl.pointer_type(WORD)) + (to // UNIT * EACH)[:, None]
    words = nbytes // UNIT * EACH
    for first in tl.range(0, words, COLUMNS):
        word = (first + tl.arange(0, COLUMNS))[None, :]
        mask = exists[:, None] & (word < words)
        tl.store(target + word, tl.load(source + word, mask=mask), mask=mask)


@triton.jit
def _move_run(source, target, at, to, exists, nbytes, low, COLUMNS: tl.constexpr):
    """A run as it is, in the widest words that `low`, in which offsets, strides and lengths have their bits, allows."""
    if low % 16 == 0:
        _move(source, target, at, to, exists, nbytes, 16, tl.int64, 2, COLUMNS)
    elif low % 4 == 0:
        _move(source, target, at, to, exists, nbytes, 4, tl.int32, 1, COLUMNS // 2)
    else:
        _move(source, target, at, to, exists, nbytes, 1, tl.int8, 1, COLUMNS // 2)


@triton.jit
def _wider(x, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr, DST_EXPONENT: tl.constexpr, DST_ITEM: tl.constexpr):
    """The bits of a number in a wider format, from its bits. All but bf16 are fp16 numbers first."""
    if EXPONENT == 8:
        return x.to(tl.int32) << 16
    else:
        if MANTISSA == 10:
            half = x.to(tl.float16, bitcast=True)
        elif EXPONENT == 5:
            half = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True)
        else:
            # e4m3fn, with an exponent that fp16 takes for one of 8 less; its one NaN, and no infinity, is all ones
            bits = x.to(tl.int16)
            size = bits & 0x7F
            half = ((size << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
            half = tl.where(size == 0x7F, float("nan"), half)
        if DST_EXPONENT == 5:
            return half.to(tl.int16, bitcast=True)
        elif DST_ITEM == 4:
            return half.to(tl.float32).to(tl.int32, bitcast=True)
        else:
            return (half.to(tl.float32).to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def _widen(
    source, target, at, to, exists, nbytes, SRC_UNIT: tl.constexpr, DST_UNIT: tl.constexpr, EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr, SRC_ITEM: tl.constexpr, DST_EXPONENT: tl.constexpr, DST_ITEM: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """The elements of every row that exists; rows begin at whole units of bytes on either side."""
    source = source.to(tl.pointer_type(tl.int8 if SRC_ITEM == 1 else tl.int16))
    target = target.to(tl.pointer_type(tl.int16 if DST_ITEM == 2 else tl.int32))
    source += (at // SRC_UNIT * (SRC_UNIT // SRC_ITEM))[:, None]
    target += (to // DST_UNIT * (DST_UNIT // DST_ITEM))[:, None]
    count = nbytes // SRC_UNIT * (SRC_UNIT // SRC_ITEM)
    for first in tl.range(0, count, COLUMNS):
        element = (first + tl.arange(0, COLUMNS))[None, :]
        mask = exists[:, None] & (element < count)
        x = tl.load(source + element, mask=mask)
        tl.store(target + element, _wider(x, EXPONENT, MANTISSA, DST_EXPONENT, DST_ITEM), mask=mask)


@triton.jit(do_not_specialize=["tokens", "blocks", "num_runs", "runs_each"])
def _repack_pages(
    source, target, src_pages, dst_pages, runs, tokens: tl.int64, blocks, num_runs, runs_each, src_base: tl.int64,
    src_page_stride: tl.int64, src_num_pages: tl.int64, dst_base: tl.int64, dst_page_stride: tl.int64,
    dst_num_pages: tl.int64, LOW_BITS: tl.constexpr, SRC_SIZE: tl.constexpr, DST_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EXPONENT: tl.constexpr, MANTISSA: tl.constexpr,
    SRC_ITEM: tl.constexpr, DST_EXPONENT: tl.constexpr, DST_ITEM: tl.constexpr
):  # fmt: skip
    """LOW_BITS: those in which pages begin. SRC_SIZE, DST_SIZE: tokens of a page. EXPONENT: 0 where nothing widens."""
    token = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    source_page = tl.load(src_pages + token // SRC_SIZE, mask=token < tokens, other=-1).to(tl.int64)
    target_page = tl.load(dst_pages + token // DST_SIZE, mask=token < tokens, other=-1).to(tl.int64)
    exists = (source_page >= 0) & (source_page < src_num_pages) & (target_page >= 0) & (target_page < dst_num_pages)
    source_page = src_base + source_page * src_page_stride
    target_page = dst_base + target_page * dst_page_stride
    source_slot = (token % SRC_SIZE).to(tl.int32)
    target_slot = (token % DST_SIZE).to(tl.int32)
    first = (tl.program_id(0) % blocks) * runs_each
    for r in tl.range(first, tl.minimum(first + runs_each, num_runs)):
        source_offset = tl.load(runs + r * 6)
        source_stride = tl.load(runs + r * 6 + 1)
        target_offset = tl.load(runs + r * 6 + 2)
        target_stride = tl.load(runs + r * 6 + 3)
        nbytes = tl.load(runs + r * 6 + 4)
        at = source_page + (source_offset + source_slot * source_stride)
        to = target_page + (target_offset + target_slot * target_stride)
        of_page = (source_stride == 0) & (target_stride == 0)  # and so moves with the page's first token
        moved = exists & ((source_slot == 0) | (of_page == 0))
        low = source_offset | source_stride | target_offset | target_stride | nbytes | LOW_BITS
        if EXPONENT == 0:
            _move_run(source, target, at, to, moved, nbytes, low, COLUMNS)
        elif tl.load(runs + r * 6 + 5) == nbytes:
            _move_run(source, target, at, to, moved, nbytes, low, COLUMNS)
        else:
            if low % 16 == 0:
                # as many elements in a unit on either side: else each would have threads of its own for them
                unit: tl.constexpr = 16 * SRC_ITEM // DST_ITEM
                _widen(
                    source, target, at, to, moved, nbytes, unit, 16, EXPONENT, MANTISSA, SRC_ITEM, DST_EXPONENT,
                    DST_ITEM, COLUMNS * 8 // SRC_ITEM
                )  # fmt: skip
            else:
                _widen(
                    source, target, at, to, moved, nbytes, SRC_ITEM, DST_ITEM, EXPONENT, MANTISSA, SRC_ITEM,
                    DST_EXPONENT, DST_ITEM, COLUMNS // 2
                )  # fmt: skip


def repack_pages(a: RepackPages) -> None:
    """`pm_ops::repack_pages`. A page that does not exist, on either side, skips its tokens."""
    num_runs = a.runs.shape[0]
    if a.tokens == 0 or num_runs == 0:
        return
    src_base, src_stride, src_bytes, src_pages = a.src_region
    dst_base, dst_stride, dst_bytes, dst_pages = a.dst_region
    # The runs' lengths are on the device; this is what they are on average where all of a page moves.
    nbytes = min(src_bytes // a.src_page_size, dst_bytes // a.dst_page_size) // num_runs
    columns = min(max(triton.next_power_of_2(nbytes // 8), _LEAST), _MOST)
    rows = _ELEMENTS // columns
    parts = triton.cdiv(a.tokens, rows)
    runs_each = min(max(parts * num_runs // _PROGRAMS, 1), _RUNS)
    blocks = triton.cdiv(num_runs, runs_each)
    src_item, dst_item = a.items
    exponent, mantissa = (0, 0) if a.src_dtype is None else _EXPONENT_AND_MANTISSA[a.src_dtype]
    dst_exponent = 0 if a.dst_dtype is None else _EXPONENT_AND_MANTISSA[a.dst_dtype][0]
    options = {"maxnreg": _REGISTERS} if exponent else {}
    low = src_base | dst_base | src_stride | dst_stride
    with on_device(a.source), writes_to(a.source.device, a.target.device):
        _repack_pages[(parts * blocks,)](
            a.source, a.target, a.src_pages.contiguous(), a.dst_pages.contiguous(), a.runs.contiguous(), a.tokens,
            blocks, num_runs, runs_each, src_base, src_stride, src_pages, dst_base, dst_stride, dst_pages,
            LOW_BITS=low % 16, SRC_SIZE=a.src_page_size, DST_SIZE=a.dst_page_size, TOKENS=rows, COLUMNS=columns,
            EXPONENT=exponent, MANTISSA=mantissa, SRC_ITEM=src_item, DST_EXPONENT=dst_exponent, DST_ITEM=dst_item,
            num_warps=_WARPS, **options,
        )  # fmt: skip
