"""Page verbs and copy_slots: bytes moved within the pool, or between it and rows of their own.

Overlapping copies equal reading everything before writing anything. A first launch writes straight to a target only if
that is no row's source, so that no read of the launch, in whatever order, meets a byte written by it; the other rows it
stages in a workspace. A second launch, which begins when every read is done, moves the staged rows to their targets.
Which rows are staged each program of a short copy of pages finds out for its own row; else that is a launch before.
All words are as wide as the geometry divides: 16 bytes as two int64 a thread, which the compiler joins, else 8, 4, 2 or
1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import WORDS, cdiv, next_power_of_2, slot_offset
from .launch import launch

if TYPE_CHECKING:
    from ..ops.pages import CopyPages, CopySlots, GatherPages, ScatterPages, ZeroPages

    PageVerb = CopyPages | GatherPages | ScatterPages | ZeroPages

# Block sizes as measured on an H200.
_PAGE_WORDS, _WARP_WORDS = 8192, 512  # of a page that a program and a warp move: eight pairs of words a thread at once
_RUN_BLOCK, _RUN_WARPS = 2048, 1  # bytes of a slot's run that a program moves at a time
_SECOND_WARPS = 2048  # of a copy's second launch, which mostly finds nothing to do
_COMPARE_HERE = 512  # ids up to which the programs that copy pages compare their target with every source themselves
_COMPARE_MOST = 4096  # ids up to which each target is compared with every source; more are looked up in a table
_FLAGS = tl.constexpr(1024)  # rows' flags that are looked at together


@triton.jit
def _load_words(address, first, nbytes, exists, WORD: tl.constexpr, WORD_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Words `first + [0, BLOCK)` of the `nbytes` at an address; 0 past them, or where there is nothing."""
    word = first + tl.arange(0, BLOCK)
    source = address.to(tl.pointer_type(WORD)) + word
    return tl.load(source, mask=(word < nbytes // WORD_BYTES) & exists, other=0)


@triton.jit
def _store_words(address, first, nbytes, x, WORD: tl.constexpr, WORD_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    word = first + tl.arange(0, BLOCK)
    tl.store(address.to(tl.pointer_type(WORD)) + word, x, mask=word < nbytes // WORD_BYTES)


@triton.jit(do_not_specialize=["chunks"])
def _gather_pages(
    buffer, rows, pages, chunks, base: tl.int64, page_stride: tl.int64, page_bytes: tl.int64, num_pages: tl.int64,
    WORD: tl.constexpr, WORD_BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = (tl.program_id(0) // chunks).to(tl.int64)
    first = (tl.program_id(0) % chunks).to(tl.int64) * BLOCK
    page = tl.load(pages + i).to(tl.int64)
    exists = (page >= 0) & (page < num_pages)
    x = _load_words(buffer + (base + page * page_stride), first, page_bytes, exists, WORD, WORD_BYTES, BLOCK)
    _store_words(rows + i * page_bytes, first, page_bytes, x, WORD, WORD_BYTES, BLOCK)


@triton.jit(do_not_specialize=["chunks"])
def _scatter_pages(
    buffer, rows, pages, chunks, base: tl.int64, page_stride: tl.int64, page_bytes: tl.int64, num_pages: tl.int64,
    WORD: tl.constexpr, WORD_BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i = (tl.program_id(0) // chunks).to(tl.int64)
    first = (tl.program_id(0) % chunks).to(tl.int64) * BLOCK
    page = tl.load(pages + i).to(tl.int64)
    if (page >= 0) & (page < num_pages):
        if rows is None:
            x = tl.zeros([BLOCK], WORD)
        else:
            x = _load_words(rows + i * page_bytes, first, page_bytes, True, WORD, WORD_BYTES, BLOCK)
        _store_words(buffer + (base + page * page_stride), first, page_bytes, x, WORD, WORD_BYTES, BLOCK)


@triton.jit(do_not_specialize=["count"])
def _compare(src, dst, staged, count, ROWS: tl.constexpr, IDS: tl.constexpr):
    """Whether each of ROWS targets is the source of a row; those that skip are of none."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = tl.load(dst + tl.minimum(i, count - 1))
    hits = tl.zeros([ROWS, IDS], tl.int1)
    for start in tl.range(0, count, IDS):
        j = tl.minimum(start + tl.arange(0, IDS), count - 1)
        hits = hits | (target[:, None] == tl.load(src + j)[None, :])
    tl.store(staged + i, tl.where(target >= 0, tl.max(hits.to(tl.int8), 1), 0), mask=i < count)


@triton.jit
def _pair(src, dst, i, limit):
    """Row i's source and target, and whether there is anything to copy: both exist, and they differ."""
    source = tl.load(src + i).to(tl.int64)
    target = tl.load(dst + i).to(tl.int64)
    return source, target, (source >= 0) & (source < limit) & (target >= 0) & (target < limit) & (source != target)


@triton.jit
def _parts(staged, count, parts, SECOND: tl.constexpr):
    """How many parts there are to look at: none in the second launch, where no row is staged."""
    if SECOND:
        found = tl.zeros([_FLAGS], tl.int8)
        for start in tl.range(0, count, _FLAGS):
            i = start + tl.arange(0, _FLAGS)
            found = found | tl.load(staged + i, mask=i < count, other=0)
        parts = tl.where(tl.max(found, 0) != 0, parts, 0)
    return parts


@triton.jit(do_not_specialize=["count", "chunks", "parts"])
def _copy_pages(
    buffer, rows, src, dst, staged, count, chunks, parts, base: tl.int64, page_stride: tl.int64, page_bytes: tl.int64,
    num_pages: tl.int64, SECOND: tl.constexpr, IDS: tl.constexpr, WORD: tl.constexpr, WORD_BYTES: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """IDS: 0, or at least as many as there are rows, for a first launch that finds out what is staged."""
    for part in tl.range(tl.program_id(0), _parts(staged, count, parts, SECOND), tl.num_programs(0)):
        i = (part // chunks).to(tl.int64)
        first = (part % chunks).to(tl.int64) * BLOCK
        source, target, copied = _pair(src, dst, i, num_pages)
        if IDS > 0:
            j = tl.arange(0, IDS)
            read = (tl.load(src + j, mask=j < count, other=-1) == target) & (target >= 0)
            through = tl.max(read.to(tl.int32), 0) != 0
            if first == 0:
                tl.store(staged + i, through.to(tl.int8))
        else:
            through = tl.load(staged + i) != 0
        if SECOND:
            copied = copied & through
        if copied:
            row = rows + i * page_bytes
            if SECOND:
                x = _load_words(row, first, page_bytes, True, WORD, WORD_BYTES, BLOCK)
            else:
                x = _load_words(
                    buffer + (base + source * page_stride), first, page_bytes, True, WORD, WORD_BYTES, BLOCK
                )
            if through and not SECOND:
                _store_words(row, first, page_bytes, x, WORD, WORD_BYTES, BLOCK)
            else:
                _store_words(buffer + (base + target * page_stride), first, page_bytes, x, WORD, WORD_BYTES, BLOCK)


@triton.jit
def _copy_words(source, target, words, WORD: tl.constexpr, BLOCK: tl.constexpr):
    source = source.to(tl.pointer_type(WORD))
    target = target.to(tl.pointer_type(WORD))
    for start in tl.range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)


@triton.jit
def _copy_run(source, at, target, to, nbytes, BLOCK: tl.constexpr):
    """A run of bytes from `source + at` to `target + to`."""
    if (at | to | nbytes) % 16 == 0:
        # written so that the compiler sees the multiples of 16; a hint on `at` would hold in the other branch too
        _copy_words(source + at // 16 * 16, target + to // 16 * 16, nbytes // 16 * 2, tl.int64, BLOCK // 8)
    else:
        _copy_words(source + at, target + to, nbytes, tl.int8, BLOCK // 4)


@triton.jit(do_not_specialize=["count", "num_runs", "parts"])
def _copy_slots(
    buffer, rows, src, dst, staged, runs, count, num_runs, parts, capacity: tl.int64, base: tl.int64,
    page_stride: tl.int64, row_bytes: tl.int64, SECOND: tl.constexpr, PAGE_SIZE: tl.constexpr, RUNS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    for part in tl.range(tl.program_id(0), _parts(staged, count, parts, SECOND), tl.num_programs(0)):
        i = (part // num_runs).to(tl.int64)
        r = part % num_runs
        source, target, copied = _pair(src, dst, i, capacity)
        through = tl.load(staged + i) != 0
        offset = base + tl.load(runs + r * 3)
        token_stride = tl.load(runs + r * 3 + 1)
        nbytes = tl.load(runs + r * 3 + 2)
        if copied:
            at = offset + slot_offset(source // PAGE_SIZE, source % PAGE_SIZE, page_stride, token_stride)
            to = offset + slot_offset(target // PAGE_SIZE, target % PAGE_SIZE, page_stride, token_stride)
            if through:
                earlier = tl.arange(0, RUNS)
                earlier = tl.load(runs + earlier * 3 + 2, mask=earlier < r, other=0)
                place = tl.sum((earlier + 15) // 16 * 16, 0)  # in the row, where every run starts at a multiple of 16
                nbytes = tl.where(place + nbytes <= row_bytes, nbytes, 0)
                place += i * row_bytes
                if SECOND:
                    _copy_run(rows, place, buffer, to, nbytes, BLOCK)
                else:
                    _copy_run(buffer, at, rows, place, nbytes, BLOCK)
            elif not SECOND:
                _copy_run(buffer, at, buffer, to, nbytes, BLOCK)


def _words(a: PageVerb, rows: Tensor | None) -> tuple[int, dict[str, object]]:
    """Programs a page, and the launch's constants: the widest word that divides every address.

    Rows may begin anywhere; of buffers the operators take those that begin at a multiple of 16 bytes.
    """
    base, page_stride, page_bytes, _ = a.region
    width = math.gcd(base, page_stride, page_bytes, 0 if rows is None else rows.data_ptr(), 8)
    count = page_bytes // width
    block = min(_PAGE_WORDS, next_power_of_2(count))
    words = {"WORD": WORDS[width], "WORD_BYTES": width, "BLOCK": block, "num_warps": max(block // _WARP_WORDS, 1)}
    return cdiv(count, block), words


def gather_pages(a: GatherPages) -> Tensor:
    """`pm_ops::gather_pages`; pages past the end, where they are not refused, give zeros like those below 0."""
    rows = a.buffer.new_empty((a.pages.shape[0], a.region[2]))
    if rows.numel():
        chunks, words = _words(a, rows)
        args = (a.buffer, rows, a.pages.contiguous(), chunks, *a.region)
        launch(_gather_pages, (rows.shape[0] * chunks,), *args, **words)
    return rows


def _scatter(a: ScatterPages | ZeroPages, rows: Tensor | None) -> None:
    count = a.pages.shape[0]
    if count and a.region[2]:
        chunks, words = _words(a, rows)
        args = (a.buffer, rows, a.pages.contiguous(), chunks, *a.region)
        launch(_scatter_pages, (count * chunks,), *args, **words)


def scatter_pages(a: ScatterPages) -> None:
    """`pm_ops::scatter_pages`."""
    _scatter(a, a.rows.contiguous())


def zero_pages(a: ZeroPages) -> None:
    """`pm_ops::zero_pages`."""
    _scatter(a, None)


def _find_staged(src: Tensor, dst: Tensor, limit: int) -> Tensor:
    """A flag a row: its target is read. `limit`: pages or slots of the pool."""
    count = src.shape[0]
    if count > _COMPARE_MOST:
        read = torch.zeros(limit + 2, dtype=torch.int8, device=src.device)  # ids out of range share its ends
        read.index_fill_(0, src.long().clamp(-1, limit) + 1, 1)
        read[:1].zero_()  # targets that skip
        return read[dst.long().clamp(-1, limit) + 1]
    staged = torch.empty(count, dtype=torch.int8, device=src.device)
    launch(_compare, (cdiv(count, 16),), src, dst, staged, count, ROWS=16, IDS=512, num_warps=8)
    return staged


def copy_pages(a: CopyPages) -> None:
    """`pm_ops::copy_pages`. A pair of which one is missing copies nothing."""
    count, page_bytes = a.src.shape[0], a.region[2]
    if count == 0 or page_bytes == 0:
        return
    src, dst = a.src.contiguous(), a.dst.contiguous()
    rows = a.buffer.new_empty((count, page_bytes))  # only what is staged touches it
    chunks, words = _words(a, rows)
    parts = count * chunks
    few = count <= _COMPARE_HERE
    staged = torch.empty(count, dtype=torch.int8, device=src.device) if few else _find_staged(src, dst, a.region[3])
    for second in (False, True)[:count]:  # a row alone is never staged
        programs = min(parts, _SECOND_WARPS * _WARP_WORDS // _PAGE_WORDS) if second else parts
        args = (a.buffer, rows, src, dst, staged, count, chunks, parts, *a.region)
        launch(_copy_pages, (programs,), *args, SECOND=second, IDS=_COMPARE_HERE if few and not second else 0, **words)


def copy_slots(a: CopySlots) -> None:
    """`pm_ops::copy_slots`. A pair of which one is missing copies nothing."""
    base, page_stride, page_bytes, num_pages = a.region
    count, num_runs = a.src.shape[0], a.runs.shape[0]
    if count == 0 or num_runs == 0:
        return
    src, dst, runs = a.src.contiguous(), a.dst.contiguous(), a.runs.contiguous()
    capacity, parts = num_pages * a.page_size, count * num_runs
    # The runs' lengths are on the device; planes do not overlap, so that all runs of a slot fit in its share of a page.
    row_bytes = (page_bytes // a.page_size + 15) // 16 * 16 + 16 * num_runs
    rows = a.buffer.new_empty(count * row_bytes)  # only what is staged touches it
    staged = _find_staged(src, dst, capacity)
    for second in (False, True)[:count]:  # a row alone is never staged
        programs = min(parts, _SECOND_WARPS // _RUN_WARPS) if second else parts
        launch(
            _copy_slots, (programs,), a.buffer, rows, src, dst, staged, runs, count, num_runs, parts, capacity, base,
            page_stride, row_bytes, SECOND=second, PAGE_SIZE=a.page_size, RUNS=next_power_of_2(num_runs),
            BLOCK=_RUN_BLOCK, num_warps=_RUN_WARPS,
        )  # fmt: skip
