"""``repack_pages``: pages of one layout written as pages of another, bit for bit or in a wider dtype.

``runs`` is int64 ``[R, 6]``, made by :class:`pm_ops.RepackPlan`: (source offset, source token stride, target offset,
target token stride, bytes read, bytes written), in bytes and relative to the page, of each run of one token that is
contiguous on both sides. A run whose strides are both 0 belongs to the page, not to a token: it moves once a page,
which needs equal page sizes. Token ``t`` of the sequence lies in slot ``t % page_size`` of page ``t // page_size`` of
either list. A run that writes more than it reads is of ``src_dtype`` and becomes ``dst_dtype``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._common import (
    define,
    describe,
    require,
    require_device,
    require_distinct,
    require_in_range,
    require_indices,
    require_values,
)
from .pages import require_region, run_view, runs_inside

WIDER = {
    torch.float8_e4m3fn: (torch.float16, torch.bfloat16, torch.float32),
    torch.float8_e5m2: (torch.float16, torch.bfloat16, torch.float32),
    torch.float16: (torch.float32,),
    torch.bfloat16: (torch.float32,),
}
"""The dtypes that have every number of a narrower one. A NaN stays a NaN, of no particular sign and payload."""


def _require_enough(name: str, count: int, page_size: int, tokens: int) -> None:
    require(page_size >= 1, lambda: f"page size {page_size} must be at least 1")
    require(
        count * page_size >= tokens,
        lambda: f"{name} names {count} pages of {page_size} tokens, too few for {tokens} tokens",
    )


@dataclass(slots=True)
class RepackPages:
    """Arguments of ``pm_ops::repack_pages``. What has a page < 0 on either side is skipped.

    ``src_region`` and ``dst_region`` are the pools' ``[base, page_stride, page_bytes, num_pages]``, in bytes. The lists
    may be longer than ``tokens`` needs; pages past it are not looked at. All is on one device, but for ``target``,
    which may be on another GPU that the source's has access to. ``src_dtype`` and ``dst_dtype`` are given where there
    are runs to widen, one of :data:`WIDER` and one of its own.
    """

    source: Tensor
    target: Tensor
    src_pages: Tensor
    dst_pages: Tensor
    runs: Tensor
    tokens: int
    src_page_size: int
    dst_page_size: int
    src_region: Sequence[int]
    dst_region: Sequence[int]
    src_dtype: torch.dtype | None = None
    dst_dtype: torch.dtype | None = None

    def check(self) -> None:
        if self.source is self.target:
            raise ValueError("source and target are one buffer; within a pool, copy pages (copy_pages) or copy_slots")
        device = self.source.device
        require_region(self.source, self.src_region, "source", "src_region")
        require_region(self.target, self.dst_region, "target", "dst_region")
        if {device.type, self.target.device.type} != {"cuda"}:  # of two GPUs, the source's moves the pages
            require_device("target", self.target, device)
        require_indices("src_pages", self.src_pages, device)
        require_indices("dst_pages", self.dst_pages, device)
        if self.runs.dtype != torch.int64 or self.runs.dim() != 2 or self.runs.shape[1] != 6:
            raise ValueError(f"runs must be int64 [R, 6] (RepackPlan.table), got {describe(self.runs)}")
        if (self.src_dtype, self.dst_dtype) != (None, None):
            self._check_dtypes()
        require_device("runs", self.runs, device)
        require(self.runs.shape[0] >= 1, lambda: "runs is empty: there is nothing to move")
        require(self.tokens >= 0, lambda: f"tokens={self.tokens} must not be negative")
        _require_enough("src_pages", self.src_pages.shape[0], self.src_page_size, self.tokens)
        _require_enough("dst_pages", self.dst_pages.shape[0], self.dst_page_size, self.tokens)

    def _check_dtypes(self) -> None:
        if self.dst_dtype not in WIDER.get(self.src_dtype, ()):  # type: ignore[arg-type]
            raise ValueError(
                f"src_dtype {self.src_dtype} and dst_dtype {self.dst_dtype}: give both or neither; dst_dtype must have "
                f"every number of src_dtype: {WIDER}"
            )
        for name, region, item in zip(("src", "dst"), (self.src_region, self.dst_region), self.items, strict=True):
            require(
                region[0] % item == 0 and region[1] % item == 0,
                lambda: f"{name}_region {list(region)}: base and page stride must be multiples of {item} bytes",  # noqa: B023
            )

    @property
    def items(self) -> tuple[int, int]:
        """Bytes of an element that is widened, on either side; 1 and 1 where none is."""
        if self.src_dtype is None or self.dst_dtype is None:
            return 1, 1
        return self.src_dtype.itemsize, self.dst_dtype.itemsize

    def check_values(self) -> None:
        source, source_stride, target, target_stride, read, written = self.runs.unbind(1)
        state = (source_stride == 0) & (target_stride == 0) & (self.src_page_size == self.dst_page_size)
        items = self.items
        wide = written != read
        fits = ~wide | (written * items[0] == read * items[1])
        for start, stride, nbytes, item, size, region in (
            (source, source_stride, read, items[0], self.src_page_size, self.src_region),
            (target, target_stride, written, items[1], self.dst_page_size, self.dst_region),
        ):
            fits &= ~wide | ((start % item == 0) & (stride % item == 0) & (nbytes % item == 0))
            fits &= runs_inside(start, stride, nbytes, size, region[2])
            fits &= (stride >= nbytes) | state | (size == 1)
        require_values(
            fits,
            lambda: (
                f"runs leave the pages of {self.src_region[2]} and {self.dst_region[2]} bytes, tokens overlap, or the "
                f"bytes are not those of {self.src_dtype} and {self.dst_dtype}: {self.runs[~fits].tolist()}"
            ),
        )
        src = self.src_pages[: -(-self.tokens // self.src_page_size)]  # those that the tokens need
        dst = self.dst_pages[: -(-self.tokens // self.dst_page_size)]
        require_in_range("src_pages", src, self.src_region[3], "pages in the source")
        require_in_range("dst_pages", dst, self.dst_region[3], "pages in the target")
        require_distinct("dst_pages", dst)


def _repack_pages_cpu(a: RepackPages) -> None:
    token = torch.arange(a.tokens)
    src, dst = a.src_pages.long()[token // a.src_page_size], a.dst_pages.long()[token // a.dst_page_size]
    kept = (src >= 0) & (dst >= 0)
    token, src, dst = token[kept], src[kept], dst[kept]
    first = token % a.src_page_size == 0  # the token with which a page's states go
    for src_offset, src_stride, dst_offset, dst_stride, read, written in a.runs.tolist():
        of_page = src_stride == dst_stride == 0
        sizes = (1, 1) if of_page else (a.src_page_size, a.dst_page_size)
        chosen = first if of_page else slice(None)
        source = run_view(a.source, a.src_region, sizes[0], src_offset, src_stride, read)
        target = run_view(a.target, a.dst_region, sizes[1], dst_offset, dst_stride, written)
        moved = source[src[chosen], token[chosen] % sizes[0]]
        if read != written:
            assert a.src_dtype is not None and a.dst_dtype is not None
            moved = moved.view(a.src_dtype).to(a.dst_dtype).view(torch.uint8)
        target[dst[chosen], token[chosen] % sizes[1]] = moved


define(
    "repack_pages",
    "(Tensor source, Tensor(a!) target, Tensor src_pages, Tensor dst_pages, Tensor runs, SymInt tokens, "
    "SymInt src_page_size, SymInt dst_page_size, SymInt[] src_region, SymInt[] dst_region, "
    "ScalarType? src_dtype=None, ScalarType? dst_dtype=None) -> ()",
    RepackPages,
    fake=lambda a: None,
    cpu=_repack_pages_cpu,
    cuda="repack.repack_pages",
)
