"""Page verbs: whole pages copied, zeroed, gathered, scattered; and ``copy_slots`` for single tokens.

``region`` is a pool's ``[base, page_stride, page_bytes, num_pages]``, in bytes. A page or slot < 0 is skipped; one past
the end is never touched (and refused where values are checked).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._common import (
    begin,
    define,
    describe,
    require,
    require_buffer,
    require_device,
    require_distinct,
    require_in_range,
    require_indices,
    require_values,
)


def require_region(buffer: Tensor, region: Sequence[int], buffer_name: str = "buffer", name: str = "region") -> None:
    """The buffer is one, and the pages of ``[base, page_stride, page_bytes, num_pages]`` lie in it, apart."""
    require_buffer(buffer, buffer_name)
    if len(region) != 4:
        raise ValueError(f"{name} must be [base, page_stride, page_bytes, num_pages], got {list(region)}")
    base, page_stride, page_bytes, num_pages = region
    nbytes = buffer.shape[0]
    end = base + (num_pages - 1) * page_stride + page_bytes
    for holds in (base >= 0, page_bytes >= 1, page_stride >= page_bytes, num_pages >= 1, end <= nbytes):
        require(
            holds,
            lambda: (
                f"{name} {list(region)} does not lie in a buffer of {nbytes} bytes: [base, page_stride, page_bytes, "
                f"num_pages] must not be negative, pages must not overlap, and the last one ends at byte {end}"
            ),
        )


def _require_pairs(src: Tensor, dst: Tensor, device: torch.device) -> None:
    require_indices("src", src, device)
    require_indices("dst", dst, device)
    require(src.shape[0] == dst.shape[0], lambda: f"src names {src.shape[0]} and dst {dst.shape[0]}; they go in pairs")


def page_view(buffer: Tensor, region: Sequence[int]) -> Tensor:
    """The pages as uint8 ``[num_pages, page_bytes]``, a view."""
    base, page_stride, page_bytes, num_pages = region
    return buffer.as_strided((num_pages, page_bytes), (page_stride, 1), begin(buffer) + base)


def run_view(
    buffer: Tensor, region: Sequence[int], page_size: int, offset: int, token_stride: int, nbytes: int
) -> Tensor:
    """A run of every slot as uint8 ``[num_pages, page_size, nbytes]``, a view."""
    base, page_stride, _, num_pages = region
    start = begin(buffer) + base + offset
    return buffer.as_strided((num_pages, page_size, nbytes), (page_stride, token_stride, 1), start)


def runs_inside(offset: Tensor, stride: Tensor, nbytes: Tensor, page_size: int, page_bytes: int) -> Tensor:
    """Whether a run lies in the page for every slot. Nothing here can leave int64 where the answer is yes."""
    sizes = (offset >= 0) & (stride >= 0) & (nbytes >= 1) & (offset <= page_bytes) & (nbytes <= page_bytes)
    room = page_bytes - offset - nbytes
    return sizes & (room >= 0) & ((stride <= room // max(page_size - 1, 1)) | (page_size == 1))


@dataclass(slots=True)
class CopyPages:
    """Arguments of ``pm_ops::copy_pages``: page ``src[i]`` onto ``dst[i]``, all read before one is written.

    On CUDA a workspace of as many pages is allocated, though only pages that are both source and target go through it:
    copy very large lists in parts that do not overlap.
    """

    buffer: Tensor
    src: Tensor
    dst: Tensor
    region: Sequence[int]

    def check(self) -> None:
        require_region(self.buffer, self.region)
        _require_pairs(self.src, self.dst, self.buffer.device)

    def check_values(self) -> None:
        require_in_range("src", self.src, self.region[3], "pages in the pool")
        require_in_range("dst", self.dst, self.region[3], "pages in the pool")
        require_distinct("dst", torch.where(self.src < 0, -1, self.dst))


def _copy_pages_cpu(a: CopyPages) -> None:
    kept = (a.src >= 0) & (a.dst >= 0)
    pages = page_view(a.buffer, a.region)
    pages[a.dst[kept]] = pages[a.src[kept]]


define(
    "copy_pages",
    "(Tensor(a!) buffer, Tensor src, Tensor dst, SymInt[] region) -> ()",
    CopyPages,
    fake=lambda a: None,
    cpu=_copy_pages_cpu,
    cuda="pages.copy_pages",
)


@dataclass(slots=True)
class _NamedPages:
    """A buffer, its region and the pages that are meant."""

    buffer: Tensor
    pages: Tensor
    region: Sequence[int]

    def check(self) -> None:
        require_region(self.buffer, self.region)
        require_indices("pages", self.pages, self.buffer.device)

    def check_values(self) -> None:
        require_in_range("pages", self.pages, self.region[3], "pages in the pool")


@dataclass(slots=True)
class ZeroPages(_NamedPages):
    """Arguments of ``pm_ops::zero_pages``: these pages become zero bytes, padding included."""


def _zero_pages_cpu(a: ZeroPages) -> None:
    page_view(a.buffer, a.region)[a.pages[a.pages >= 0]] = 0


define(
    "zero_pages",
    "(Tensor(a!) buffer, Tensor pages, SymInt[] region) -> ()",
    ZeroPages,
    fake=lambda a: None,
    cpu=_zero_pages_cpu,
    cuda="pages.zero_pages",
)


@dataclass(slots=True)
class GatherPages(_NamedPages):
    """Arguments of ``pm_ops::gather_pages``: fresh uint8 ``[n, page_bytes]``; page < 0 gives a row of zeros."""


def _gather_pages_fake(a: GatherPages) -> Tensor:
    return a.buffer.new_empty((a.pages.shape[0], a.region[2]))


def _gather_pages_cpu(a: GatherPages) -> Tensor:
    rows = page_view(a.buffer, a.region)[a.pages.clamp(min=0)]
    rows[a.pages < 0] = 0
    return rows


define(
    "gather_pages",
    "(Tensor buffer, Tensor pages, SymInt[] region) -> Tensor",
    GatherPages,
    fake=_gather_pages_fake,
    cpu=_gather_pages_cpu,
    cuda="pages.gather_pages",
)


@dataclass(slots=True)
class ScatterPages:
    """Arguments of ``pm_ops::scatter_pages``: uint8 rows ``[n, page_bytes]`` to these pages."""

    buffer: Tensor
    rows: Tensor
    pages: Tensor
    region: Sequence[int]

    def check(self) -> None:
        require_region(self.buffer, self.region)
        require_indices("pages", self.pages, self.buffer.device)
        rows = self.rows
        if rows.dtype != torch.uint8 or rows.dim() != 2:
            raise ValueError(f"rows must be uint8 [pages, page_bytes], got {describe(rows)}")
        count, wanted = self.pages.shape[0], self.region[2]
        require(rows.shape[0] == count, lambda: f"{rows.shape[0]} rows for {count} pages")
        require(
            rows.shape[1] == wanted,
            lambda: f"rows of {rows.shape[1]} bytes for pages of {wanted}; they must come from this layout",
        )
        require_device("rows", rows, self.buffer.device)

    def check_values(self) -> None:
        require_in_range("pages", self.pages, self.region[3], "pages in the pool")
        require_distinct("pages", self.pages)


def _scatter_pages_cpu(a: ScatterPages) -> None:
    kept = a.pages >= 0
    page_view(a.buffer, a.region)[a.pages[kept]] = a.rows[kept]


define(
    "scatter_pages",
    "(Tensor(a!) buffer, Tensor rows, Tensor pages, SymInt[] region) -> ()",
    ScatterPages,
    fake=lambda a: None,
    cpu=_scatter_pages_cpu,
    cuda="pages.scatter_pages",
)


@dataclass(slots=True)
class CopySlots:
    """Arguments of ``pm_ops::copy_slots``: token slot ``src[i]`` onto ``dst[i]``, every token plane of every layer.

    ``runs`` is int64 ``[R, 3]`` on the buffer's device, ``PagePool.slot_runs``: (offset in the page, token stride,
    bytes) of each run of one slot. All slots are read before one is written.
    """

    buffer: Tensor
    src: Tensor
    dst: Tensor
    runs: Tensor
    page_size: int
    region: Sequence[int]

    def check(self) -> None:
        require_region(self.buffer, self.region)
        _require_pairs(self.src, self.dst, self.buffer.device)
        if self.runs.dtype != torch.int64 or self.runs.dim() != 2 or self.runs.shape[1] != 3:
            raise ValueError(f"runs must be int64 [R, 3] (PagePool.slot_runs), got {describe(self.runs)}")
        require_device("runs", self.runs, self.buffer.device)
        require(self.page_size >= 1, lambda: f"page_size={self.page_size} must be at least 1")
        require(self.runs.shape[0] >= 1, lambda: "runs is empty: this layout has no token planes to copy")

    def check_values(self) -> None:
        offset, token_stride, nbytes = self.runs.unbind(1)
        require_values(
            runs_inside(offset, token_stride, nbytes, self.page_size, self.region[2]),
            lambda: f"runs leave the page of {self.region[2]} bytes: {self.runs.tolist()}",
        )
        slots = self.region[3] * self.page_size
        require_in_range("src", self.src, slots, "slots in the pool")
        require_in_range("dst", self.dst, slots, "slots in the pool")
        require_distinct("dst", torch.where(self.src < 0, -1, self.dst))


def _copy_slots_cpu(a: CopySlots) -> None:
    kept = (a.src >= 0) & (a.dst >= 0)
    src, dst = a.src[kept], a.dst[kept]
    for offset, token_stride, nbytes in a.runs.tolist():
        cells = run_view(a.buffer, a.region, a.page_size, offset, token_stride, nbytes)
        cells[dst // a.page_size, dst % a.page_size] = cells[src // a.page_size, src % a.page_size]


define(
    "copy_slots",
    "(Tensor(a!) buffer, Tensor src, Tensor dst, Tensor runs, SymInt page_size, SymInt[] region) -> ()",
    CopySlots,
    fake=lambda a: None,
    cpu=_copy_slots_cpu,
    cuda="pages.copy_slots",
)
