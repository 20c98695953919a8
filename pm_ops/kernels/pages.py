"""Page verbs and copy_slots: bytes moved within the pool, or between it and rows of their own.

Overlapping copies equal reading everything before writing anything, in two launches. The first copies every row whose
target no row reads straight to its place, where no read can miss the old bytes or meet the new ones; the others it
stages in a workspace. The second, which starts when every read is done, moves the staged rows to their targets. All
words are as wide as the geometry divides: 16 bytes as two int64 a thread, which the compiler joins, else 8, 4, 2 or 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import on_device, slot_offset

if TYPE_CHECKING:
    from ..ops.pages import CopyPages, CopySlots, GatherPages, ScatterPages, ZeroPages

    PageVerb = CopyPages | GatherPages | ScatterPages | ZeroPages

_WORD = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_BLOCK = 16384  # bytes that a program moves at a time: eight 16-byte words a thread are on their way together
_WARPS = 4
_SCAN_IDS = 1024  # source ids that a program compares with its target at a time
_SCAN_MOST = 2048  # with more ids than these the targets are looked up in a table of the pool's pages instead
_SCATTER_PROGRAMS = 1024  # of the second launch, which mostly finds nothing to do


@triton.jit
def _load_words(address, first, nbytes, exists, WORD: tl.constexpr, WORD_BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Words `first + [0, BLOCK)` of the `nbytes` at an address; 0 past them, or where there is nothing."""
    word = first + tl.arange(0, BLOCK)
    source = address.to(tl.pointer_type(WORD)) + word
    return tl.load(source, mask=(word < nbytes // WORD_BYTES) & exists, other=0, eviction_policy="evict_first")


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


@triton.jit
def _pair(src, dst, i, limit):
    """Row i's source and target, and whether there is anything to copy: both exist, and they differ."""
    source = tl.load(src + i).to(tl.int64)
    target = tl.load(dst + i).to(tl.int64)
    return source, target, (source >= 0) & (source < limit) & (target >= 0) & (target < limit) & (source != target)


@triton.jit
def _must_stage(target, i, src, staged, count, SCAN: tl.constexpr, SCAN_IDS: tl.constexpr):
    """Whether row i's target is the source of a row. Found by a scan and kept for the second launch, or known."""
    if SCAN:
        hits = tl.zeros([SCAN_IDS], tl.int1)
        for start in tl.range(0, count, SCAN_IDS):
            j = start + tl.arange(0, SCAN_IDS)
            hits = hits | (tl.load(src + j, mask=j < count, other=-1).to(tl.int64) == target)
        tl.store(staged + i, tl.max(hits.to(tl.int8), 0))
        return tl.max(hits.to(tl.int8), 0) != 0
    else:
        return tl.load(staged + i) != 0


@triton.jit(do_not_specialize=["count", "chunks", "parts"])
def _copy_pages(
    buffer, rows, src, dst, staged, count, chunks, parts, base: tl.int64, page_stride: tl.int64, page_bytes: tl.int64,
    num_pages: tl.int64, SECOND: tl.constexpr, SCAN: tl.constexpr, SCAN_IDS: tl.constexpr, WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    for part in tl.range(tl.program_id(0), parts, tl.num_programs(0)):
        i = (part // chunks).to(tl.int64)
        first = (part % chunks).to(tl.int64) * BLOCK
        source, target, copied = _pair(src, dst, i, num_pages)
        if copied:
            row = rows + i * page_bytes
            place = buffer + (base + target * page_stride)
            if SECOND:
                if tl.load(staged + i) != 0:
                    x = _load_words(row, first, page_bytes, True, WORD, WORD_BYTES, BLOCK)
                    _store_words(place, first, page_bytes, x, WORD, WORD_BYTES, BLOCK)
            else:
                # asked for before the scan, which passes while they come
                page = buffer + (base + source * page_stride)
                x = _load_words(page, first, page_bytes, True, WORD, WORD_BYTES, BLOCK)
                if _must_stage(target, i, src, staged, count, SCAN, SCAN_IDS):
                    _store_words(row, first, page_bytes, x, WORD, WORD_BYTES, BLOCK)
                else:
                    _store_words(place, first, page_bytes, x, WORD, WORD_BYTES, BLOCK)


@triton.jit
def _copy_words(source, at, target, to, words, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Runs side by side: `words` words of each, from word `at` of the source to word `to` of the target."""
    read = source.to(tl.pointer_type(WORD)) + at[:, None]
    write = target.to(tl.pointer_type(WORD)) + to[:, None]
    for start in tl.range(0, tl.max(words, 0), BLOCK):
        word = start + tl.arange(0, BLOCK)[None, :]
        inside = word < words[:, None]
        x = tl.load(read + word, mask=inside, eviction_policy="evict_first")
        tl.store(write + word, x, mask=inside)


@triton.jit
def _copy_runs(source, at, target, to, nbytes, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Runs side by side, in bytes; those that 16 divides as 16-byte words."""
    wide = ((at | to | nbytes) % 16 == 0) & ALIGNED
    words = tl.where(wide, nbytes // 16 * 2, 0)  # // 16 * 2: so the compiler sees that pairs of words stay together
    _copy_words(source, at // 16 * 2, target, to // 16 * 2, words, tl.int64, BLOCK // 8)
    _copy_words(source, at, target, to, tl.where(wide, 0, nbytes), tl.int8, BLOCK // 4)


@triton.jit(do_not_specialize=["count", "num_runs", "groups", "parts"])
def _copy_slots(
    buffer, rows, src, dst, staged, runs, count, num_runs, groups, parts, capacity: tl.int64, base: tl.int64,
    page_stride: tl.int64, row_bytes: tl.int64, SECOND: tl.constexpr, SCAN: tl.constexpr, SCAN_IDS: tl.constexpr,
    ALIGNED: tl.constexpr, PAGE_SIZE: tl.constexpr, ALL_RUNS: tl.constexpr, RUNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """RUNS runs of one slot a program."""
    for part in tl.range(tl.program_id(0), parts, tl.num_programs(0)):
        i = (part // groups).to(tl.int64)
        first = part % groups * RUNS
        source, target, copied = _pair(src, dst, i, capacity)
        if SECOND:
            copied = copied & (tl.load(staged + i, mask=copied, other=0) != 0)
        if copied:
            r = first + tl.arange(0, RUNS)
            offset = base + tl.load(runs + r * 3, mask=r < num_runs, other=0)
            token_stride = tl.load(runs + r * 3 + 1, mask=r < num_runs, other=0)
            nbytes = tl.load(runs + r * 3 + 2, mask=r < num_runs, other=0)
            at = offset + slot_offset(source // PAGE_SIZE, source % PAGE_SIZE, page_stride, token_stride)
            to = offset + slot_offset(target // PAGE_SIZE, target % PAGE_SIZE, page_stride, token_stride)
            if SECOND:
                row, nbytes = _row(runs, first, nbytes, row_bytes, ALL_RUNS)
                _copy_runs(rows, i * row_bytes + row, buffer, to, nbytes, ALIGNED, BLOCK)
            elif _must_stage(target, i, src, staged, count, SCAN, SCAN_IDS):
                row, nbytes = _row(runs, first, nbytes, row_bytes, ALL_RUNS)
                _copy_runs(buffer, at, rows, i * row_bytes + row, nbytes, ALIGNED, BLOCK)
            else:
                _copy_runs(buffer, at, buffer, to, nbytes, ALIGNED, BLOCK)


@triton.jit
def _row(runs, first, nbytes, row_bytes, ALL_RUNS: tl.constexpr):
    """Where the runs lie in a row of the workspace, each at a multiple of 16; and their bytes, 0 where it is full."""
    r = tl.arange(0, ALL_RUNS)
    earlier = tl.load(runs + r * 3 + 2, mask=r < first, other=0)
    padded = (nbytes + 15) // 16 * 16
    place = tl.sum((earlier + 15) // 16 * 16, 0) + tl.cumsum(padded, 0) - padded
    return place, tl.where(place + nbytes <= row_bytes, nbytes, 0)


def _words(a: PageVerb, rows: Tensor | None) -> tuple[int, dict[str, object]]:
    """Programs a page, and the launch's constants: the widest word that divides every address."""
    base, page_stride, page_bytes, _ = a.region
    width = math.gcd(base, page_stride, page_bytes, a.buffer.data_ptr(), rows.data_ptr() if rows is not None else 0, 8)
    block = min(_BLOCK, triton.next_power_of_2(page_bytes)) // width
    words = {"WORD": _WORD[width], "WORD_BYTES": width, "BLOCK": block, "num_warps": _WARPS}
    return triton.cdiv(page_bytes // width, block), words


def gather_pages(a: GatherPages) -> Tensor:
    """`pm_ops::gather_pages`; pages past the end, where they are not refused, give zeros like those below 0."""
    rows = a.buffer.new_empty((a.pages.shape[0], a.region[2]))
    if rows.numel():
        chunks, words = _words(a, rows)
        with on_device(a.buffer):
            _gather_pages[(rows.shape[0] * chunks,)](a.buffer, rows, a.pages.contiguous(), chunks, *a.region, **words)
    return rows


def _scatter(a: ScatterPages | ZeroPages, rows: Tensor | None) -> None:
    count = a.pages.shape[0]
    if count and a.region[2]:
        chunks, words = _words(a, rows)
        with on_device(a.buffer):
            _scatter_pages[(count * chunks,)](a.buffer, rows, a.pages.contiguous(), chunks, *a.region, **words)


def scatter_pages(a: ScatterPages) -> None:
    """`pm_ops::scatter_pages`."""
    _scatter(a, a.rows.contiguous())


def zero_pages(a: ZeroPages) -> None:
    """`pm_ops::zero_pages`."""
    _scatter(a, None)


def _find_staged(src: Tensor, dst: Tensor, limit: int) -> tuple[Tensor, bool]:
    """A flag a row, whether it must be staged; and whether the first launch is to find that itself by scanning `src`.

    A scan reads all ids from the caches, in each program; past `_SCAN_MOST` a table of `limit` flags costs less.
    """
    if src.shape[0] <= _SCAN_MOST:
        return torch.empty_like(src, dtype=torch.int8), True
    read = torch.zeros(limit + 2, dtype=torch.int8, device=src.device)  # ids out of range share its ends
    read.index_fill_(0, src.long().clamp(-1, limit) + 1, 1)
    return read[dst.long().clamp(-1, limit) + 1], False


def copy_pages(a: CopyPages) -> None:
    """`pm_ops::copy_pages`. A pair of which one is missing copies nothing."""
    count, page_bytes = a.src.shape[0], a.region[2]
    if count == 0 or page_bytes == 0:
        return
    src, dst = a.src.contiguous(), a.dst.contiguous()
    rows = a.buffer.new_empty((count, page_bytes))  # only what is staged touches it
    chunks, words = _words(a, rows)
    parts = count * chunks
    with on_device(a.buffer):
        staged, scan = _find_staged(src, dst, a.region[3])
        for second, programs in ((False, parts), (True, min(parts, _SCATTER_PROGRAMS))):
            _copy_pages[(programs,)](
                a.buffer, rows, src, dst, staged, count, chunks, parts, *a.region,
                SECOND=second, SCAN=scan, SCAN_IDS=_SCAN_IDS, **words,
            )  # fmt: skip


def copy_slots(a: CopySlots) -> None:
    """`pm_ops::copy_slots`. A pair of which one is missing copies nothing."""
    base, page_stride, page_bytes, num_pages = a.region
    count, num_runs = a.src.shape[0], a.runs.shape[0]
    if count == 0 or num_runs == 0:
        return
    src, dst, runs = a.src.contiguous(), a.dst.contiguous(), a.runs.contiguous()
    capacity, slot_bytes = num_pages * a.page_size, page_bytes // a.page_size
    # The runs' lengths are on the device; planes do not overlap, so that all runs of a slot fit in `slot_bytes`.
    row_bytes = (slot_bytes + 15) // 16 * 16 + 16 * num_runs
    rows = a.buffer.new_empty(count * row_bytes)  # only what is staged touches it
    block = min(max(triton.next_power_of_2(slot_bytes // num_runs), 64), 2048)
    all_runs = triton.next_power_of_2(num_runs)
    group = min(_BLOCK // block, all_runs)
    groups = triton.cdiv(num_runs, group)
    parts = count * groups
    with on_device(a.buffer):
        staged, scan = _find_staged(src, dst, capacity)
        for second, programs in ((False, parts), (True, min(parts, _SCATTER_PROGRAMS))):
            _copy_slots[(programs,)](
                a.buffer, rows, src, dst, staged, runs, count, num_runs, groups, parts,
                capacity, base, page_stride, row_bytes,
                SECOND=second, SCAN=scan, SCAN_IDS=_SCAN_IDS, ALIGNED=a.buffer.data_ptr() % 16 == 0,
                PAGE_SIZE=a.page_size, ALL_RUNS=all_runs, RUNS=group, BLOCK=block, num_warps=_WARPS,
            )  # fmt: skip
