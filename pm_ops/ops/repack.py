"""``repack_pages``: pages of one layout written as pages of another, bit for bit.

``runs`` is int64 ``[R, 5]``, made by :class:`pm_ops.RepackPlan`: (source offset, source token stride, target offset,
target token stride, bytes), in bytes and relative to the page, of each run of one token that is contiguous on both
sides. A run whose strides are both 0 belongs to the page, not to a token: it moves once a page, which needs equal page
sizes. Token ``t`` of the sequence lies in slot ``t % page_size`` of page ``t // page_size`` of either list.
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
from .pages import require_region, run_view


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
    may be longer than ``tokens`` needs; pages past it are not looked at.
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

    def check(self) -> None:
        if self.source is self.target:
            raise ValueError("source and target are one buffer; within a pool, copy pages (copy_pages) or copy_slots")
        device = self.target.device
        require_region(self.source, self.src_region, "source", "src_region")
        require_region(self.target, self.dst_region, "target", "dst_region")
        require_device("source", self.source, device)
        require_indices("src_pages", self.src_pages, device)
        require_indices("dst_pages", self.dst_pages, device)
        if self.runs.dtype != torch.int64 or self.runs.dim() != 2 or self.runs.shape[1] != 5:
            raise ValueError(f"runs must be int64 [R, 5] (RepackPlan.table), got {describe(self.runs)}")
        require_device("runs", self.runs, device)
        require(self.runs.shape[0] >= 1, lambda: "runs is empty: there is nothing to move")
        require(self.tokens >= 0, lambda: f"tokens={self.tokens} must not be negative")
        _require_enough("src_pages", self.src_pages.shape[0], self.src_page_size, self.tokens)
        _require_enough("dst_pages", self.dst_pages.shape[0], self.dst_page_size, self.tokens)

    def check_values(self) -> None:
        source, source_stride, target, target_stride, nbytes = self.runs.unbind(1)
        state = (source_stride == 0) & (target_stride == 0) & (self.src_page_size == self.dst_page_size)
        fits = nbytes >= 1
        for start, stride, size, region in (
            (source, source_stride, self.src_page_size, self.src_region),
            (target, target_stride, self.dst_page_size, self.dst_region),
        ):
            fits &= (start >= 0) & (stride >= 0) & (start + (size - 1) * stride + nbytes <= region[2])
            fits &= (stride >= nbytes) | state | (size == 1)
        require_values(
            fits,
            lambda: (
                f"runs leave the pages of {self.src_region[2]} and {self.dst_region[2]} bytes, or tokens overlap: "
                f"{self.runs[~fits].tolist()}"
            ),
        )
        src = self.src_pages[: -(-self.tokens // self.src_page_size)]  # those that the tokens need
        dst = self.dst_pages[: -(-self.tokens // self.dst_page_size)]
        require_in_range("src_pages", src, self.src_region[3], "pages in the source")
        require_in_range("dst_pages", dst, self.dst_region[3], "pages in the target")
        require_distinct("dst_pages", dst)

    def check_apart(self) -> None:
        """Refuse tensors that share bytes; needs addresses, which fakes do not have."""
        a, b = self.source.data_ptr(), self.target.data_ptr()
        if a < b + self.target.numel() and b < a + self.source.numel():
            raise ValueError("source and target share memory, so that bytes could be written before they are read")


def _repack_pages_cpu(a: RepackPages) -> None:
    a.check_apart()
    token = torch.arange(a.tokens)
    src, dst = a.src_pages.long()[token // a.src_page_size], a.dst_pages.long()[token // a.dst_page_size]
    kept = (src >= 0) & (dst >= 0)
    token, src, dst = token[kept], src[kept], dst[kept]
    first = token % a.src_page_size == 0  # the token with which a page's states go
    for src_offset, src_stride, dst_offset, dst_stride, nbytes in a.runs.tolist():
        if src_stride == dst_stride == 0:
            source = run_view(a.source, a.src_region, 1, src_offset, 0, nbytes)
            target = run_view(a.target, a.dst_region, 1, dst_offset, 0, nbytes)
            target[dst[first]] = source[src[first]]
        else:
            source = run_view(a.source, a.src_region, a.src_page_size, src_offset, src_stride, nbytes)
            target = run_view(a.target, a.dst_region, a.dst_page_size, dst_offset, dst_stride, nbytes)
            target[dst, token % a.dst_page_size] = source[src, token % a.src_page_size]


define(
    "repack_pages",
    "(Tensor source, Tensor(a!) target, Tensor src_pages, Tensor dst_pages, Tensor runs, SymInt tokens, "
    "SymInt src_page_size, SymInt dst_page_size, SymInt[] src_region, SymInt[] dst_region) -> ()",
    RepackPages,
    fake=lambda a: None,
    cpu=_repack_pages_cpu,
    cuda="repack.repack_pages",
)
