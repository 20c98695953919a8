"""Page verbs and copy_slots: bytes between the pool and rows of a workspace.

Copies go through a fresh workspace, all reads before the first write, so overlapping sources and destinations need no
care. Both directions move words as wide as the geometry divides: 16 bytes as two int64 a thread, which the compiler
joins where strides allow it, else 8, 4, 2 or 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import slot_offset
from .launch import launch

if TYPE_CHECKING:
    from ..ops.pages import CopyPages, CopySlots, GatherPages, ScatterPages, ZeroPages

    PageVerb = CopyPages | GatherPages | ScatterPages | ZeroPages

_WORD = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_PAGE_BLOCK = 8192  # bytes a program moves of a page: four 16-byte words a thread
_RUN_BLOCK = 2048  # bytes of a token's run that a program moves at a time


@triton.jit
def _gather_pages(
    buffer,
    rows,
    pages,
    chunks,
    base: tl.int64,
    page_stride: tl.int64,
    page_bytes: tl.int64,
    num_pages: tl.int64,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) // chunks
    page = tl.load(pages + i).to(tl.int64)
    word = (tl.program_id(0) % chunks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < page_bytes // WORD_BYTES
    source = (buffer + (base + page * page_stride)).to(tl.pointer_type(WORD))
    x = tl.load(source + word, mask=inside & (page >= 0) & (page < num_pages), other=0)
    tl.store((rows + i.to(tl.int64) * page_bytes).to(tl.pointer_type(WORD)) + word, x, mask=inside)


@triton.jit
def _scatter_pages(
    buffer,
    rows,  # None: zeros
    pages,
    sources,  # the pages that the rows were gathered from: a row without one is not written; or None
    chunks,
    base: tl.int64,
    page_stride: tl.int64,
    page_bytes: tl.int64,
    num_pages: tl.int64,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) // chunks
    page = tl.load(pages + i).to(tl.int64)
    word = (tl.program_id(0) % chunks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    written = (word < page_bytes // WORD_BYTES) & (page >= 0) & (page < num_pages)
    if sources is not None:
        source = tl.load(sources + i).to(tl.int64)
        written = written & (source >= 0) & (source < num_pages)
    if rows is None:
        x = tl.zeros([BLOCK], WORD)
    else:
        x = tl.load((rows + i.to(tl.int64) * page_bytes).to(tl.pointer_type(WORD)) + word, mask=written)
    tl.store((buffer + (base + page * page_stride)).to(tl.pointer_type(WORD)) + word, x, mask=written)


@triton.jit
def _copy_run(source, target, words, WORD: tl.constexpr, BLOCK: tl.constexpr):
    source = source.to(tl.pointer_type(WORD))
    target = target.to(tl.pointer_type(WORD))
    for start in tl.range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(target + word, tl.load(source + word, mask=word < words), mask=word < words)


@triton.jit(do_not_specialize=["num_runs"])
def _move_slots(
    buffer,
    rows,
    slots,
    partners,
    runs,
    num_runs,
    capacity: tl.int64,
    base: tl.int64,
    page_stride: tl.int64,
    row_bytes: tl.int64,
    GATHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    RUNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One run of one slot to its place in the slot's workspace row, or back; nothing if its partner does not exist."""
    i = (tl.program_id(0) // num_runs).to(tl.int64)
    r = tl.program_id(0) % num_runs
    slot = tl.load(slots + i).to(tl.int64)
    partner = tl.load(partners + i).to(tl.int64)
    offset = tl.load(runs + r * 3)
    token_stride = tl.load(runs + r * 3 + 1)
    nbytes = tl.load(runs + r * 3 + 2)
    before = tl.arange(0, RUNS)
    earlier = tl.load(runs + before * 3 + 2, mask=before < r, other=0)
    at = tl.sum((earlier + 15) // 16 * 16, 0)  # every run starts at a multiple of 16 in the workspace
    if (slot >= 0) & (slot < capacity) & (partner >= 0) & (partner < capacity) & (at + nbytes <= row_bytes):
        cell = base + offset + slot_offset(slot // PAGE_SIZE, slot % PAGE_SIZE, page_stride, token_stride)
        place = i * row_bytes + at
        if ((cell | nbytes) % 16 == 0) & ALIGNED:
            # written so that the compiler sees the multiple of 16; a hint on `cell` would hold in the other branch too
            cell = cell // 16 * 16
            place = place // 16 * 16
            if GATHER:
                _copy_run(buffer + cell, rows + place, nbytes // 16 * 2, tl.int64, BLOCK // 8)
            else:
                _copy_run(rows + place, buffer + cell, nbytes // 16 * 2, tl.int64, BLOCK // 8)
        else:
            if GATHER:
                _copy_run(buffer + cell, rows + place, nbytes, tl.int8, BLOCK // 4)
            else:
                _copy_run(rows + place, buffer + cell, nbytes, tl.int8, BLOCK // 4)


def _page_words(a: PageVerb, rows: Tensor | None) -> tuple[int, dict[str, object]]:
    """Programs a page, and the launch's constants: the widest word that divides every address."""
    base, page_stride, page_bytes, _ = a.region
    width = math.gcd(base, page_stride, page_bytes, a.buffer.data_ptr(), rows.data_ptr() if rows is not None else 0, 8)
    block = min(_PAGE_BLOCK, triton.next_power_of_2(page_bytes)) // width
    return triton.cdiv(page_bytes // width, block), {"WORD": _WORD[width], "WORD_BYTES": width, "BLOCK": block}


def _gather(a: CopyPages | GatherPages, pages: Tensor) -> Tensor:
    rows = a.buffer.new_empty((pages.shape[0], a.region[2]))
    if rows.numel():
        chunks, words = _page_words(a, rows)
        args = (a.buffer, rows, pages.contiguous(), chunks, *a.region)
        launch(_gather_pages, (pages.shape[0] * chunks,), *args, **words, num_warps=4)
    return rows


def _scatter(a: PageVerb, rows: Tensor | None, pages: Tensor, sources: Tensor | None) -> None:
    if pages.shape[0] and a.region[2]:
        chunks, words = _page_words(a, rows)
        args = (a.buffer, rows, pages.contiguous(), sources, chunks, *a.region)
        launch(_scatter_pages, (pages.shape[0] * chunks,), *args, **words, num_warps=4)


def gather_pages(a: GatherPages) -> Tensor:
    """`pm_ops::gather_pages`; pages past the end, where they are not refused, give zeros like those below 0."""
    return _gather(a, a.pages)


def scatter_pages(a: ScatterPages) -> None:
    """`pm_ops::scatter_pages`."""
    _scatter(a, a.rows.contiguous(), a.pages, None)


def zero_pages(a: ZeroPages) -> None:
    """`pm_ops::zero_pages`."""
    _scatter(a, None, a.pages, None)


def copy_pages(a: CopyPages) -> None:
    """`pm_ops::copy_pages`, through a workspace of `len(src)` pages. A pair of which one is missing copies nothing."""
    _scatter(a, _gather(a, a.src), a.dst, a.src.contiguous())


def copy_slots(a: CopySlots) -> None:
    """`pm_ops::copy_slots`, through a workspace of `len(src)` tokens."""
    base, page_stride, page_bytes, num_pages = a.region
    num_slots, num_runs = a.src.shape[0], a.runs.shape[0]
    if num_slots == 0 or num_runs == 0:
        return
    # The runs' lengths are on the device; planes do not overlap, so that all tokens' runs fit a page.
    row_bytes = (page_bytes // a.page_size + 15) // 16 * 16 + 16 * num_runs
    rows = torch.empty(num_slots * row_bytes, dtype=torch.uint8, device=a.buffer.device)
    src, dst, runs = a.src.contiguous(), a.dst.contiguous(), a.runs.contiguous()
    for gather, slots, partners in ((True, src, dst), (False, dst, src)):
        launch(
            _move_slots,
            (num_slots * num_runs,),
            a.buffer,
            rows,
            slots,
            partners,
            runs,
            num_runs,
            num_pages * a.page_size,
            base,
            page_stride,
            row_bytes,
            GATHER=gather,
            ALIGNED=a.buffer.data_ptr() % 16 == 0,
            PAGE_SIZE=a.page_size,
            RUNS=triton.next_power_of_2(num_runs),
            BLOCK=_RUN_BLOCK,
            num_warps=1,
        )
