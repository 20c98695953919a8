"""Pages between a GPU and pinned host memory, which the GPU reads and writes itself: for runs too short to copy.

The host's memory is in the GPU's address space; what limits the kernel is how many bytes are under way over PCIe.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from .common import WORDS, cdiv, next_power_of_2
from .launch import launch

if TYPE_CHECKING:
    from ..transfer_queue import MovePages

# As measured on an H200. Few programs, so that the model's kernels keep the other multiprocessors; with fewer, pages of
# 8 KiB and both directions at once are slower.
_PROGRAMS, _BLOCK, _WARP_WORDS = 32, 4096, 256


@triton.jit(do_not_specialize=["count", "chunks"])
def _move_pages(
    near, far, pairs, count, chunks, near_start: tl.int64, far_start: tl.int64, near_stride: tl.int64,
    far_stride: tl.int64, nbytes: tl.int64, OUT: tl.constexpr, WORD: tl.constexpr, WORD_BYTES: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    for part in tl.range(tl.program_id(0), count * chunks, tl.num_programs(0)):
        i = (part // chunks).to(tl.int64)
        first = (part % chunks).to(tl.int64) * BLOCK
        word = first + tl.arange(0, BLOCK)
        inside = word < nbytes // WORD_BYTES
        here = near + (near_start + tl.load(pairs + 2 * i) * near_stride)
        there = far + (far_start + tl.load(pairs + 2 * i + 1) * far_stride)
        here = here.to(tl.pointer_type(WORD)) + word
        there = there.to(tl.pointer_type(WORD)) + word
        if OUT:
            tl.store(there, tl.load(here, mask=inside), mask=inside)
        else:
            tl.store(here, tl.load(there, mask=inside), mask=inside)


def move_pages(a: MovePages) -> None:
    """See :class:`~pm_ops.transfer_queue.MovePages`; on the current stream."""
    width = math.gcd(*a.starts, *a.strides, a.nbytes, a.near.data_ptr(), a.far.data_ptr(), 8)
    words = a.nbytes // width
    block = min(_BLOCK, next_power_of_2(words))
    chunks = cdiv(words, block)
    count = len(a.pairs)
    launch(
        _move_pages, (min(_PROGRAMS, count * chunks),), a.near, a.far, a.pairs, count, chunks, *a.starts, *a.strides,
        a.nbytes, OUT=a.out, WORD=WORDS[width], WORD_BYTES=width, BLOCK=block, num_warps=max(block // _WARP_WORDS, 1),
    )  # fmt: skip
