"""PagePool: one buffer, its layout, typed views and page verbs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .allocator import PageAllocator
from .layout import PageLayout, dtype_name


class PagePool:
    """One kind of page over one contiguous uint8 buffer. Page ``i`` is the run of bytes at ``base + i * page_stride``.

    Args:
        layout: the page's geometry.
        num_pages: pages of the pool.
        device: where a new buffer is allocated; zero-filled, so that a slot never written reads as zeros.
        buffer: use this 1-D contiguous uint8 tensor with storage offset 0 instead (several pools may share one).
        base: bytes from the buffer's start to page 0.
        page_stride: bytes from one page to the next; default ``layout.page_bytes``.
        reserve_null: keep page 0 out of the allocator, as a sink for padding.

    Raises:
        ValueError: the buffer is of another kind or too small, or base and stride do not fit the layout's dtypes.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        device: torch.device | str = "cpu",
        *,
        buffer: Tensor | None = None,
        base: int = 0,
        page_stride: int | None = None,
        reserve_null: bool = False,
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.base = base
        self.page_stride = layout.page_bytes if page_stride is None else page_stride
        self.allocator = PageAllocator(num_pages, reserve_null=reserve_null)
        self._check_geometry()
        end = base + (num_pages - 1) * self.page_stride + layout.page_bytes
        self.buffer = torch.zeros(end, dtype=torch.uint8, device=device) if buffer is None else _checked(buffer, end)
        self._geometry = {(p.layer, p.kind): self._plane_geometry(p.layer, p.kind) for p in layout.planes}
        self.slot_runs = torch.tensor(layout.slot_runs, dtype=torch.int64, device=self.device).reshape(-1, 3)
        """``[R, 3]`` int64 on the pool's device: ``layout.slot_runs``, as :func:`pm_ops.copy_slots` takes them."""

    @property
    def device(self) -> torch.device:
        """Where the buffer lives."""
        return self.buffer.device

    @property
    def page_size(self) -> int:
        """Token slots of a page."""
        return self.layout.page_size

    @property
    def num_slots(self) -> int:
        """Token slots of the pool; slot = page * page_size + offset."""
        return self.num_pages * self.page_size

    @property
    def region(self) -> list[int]:
        """``[base, page_stride, page_bytes, num_pages]``, in bytes: the page operators' argument."""
        return [self.base, self.page_stride, self.layout.page_bytes, self.num_pages]

    def geometry(self, layer: int, kind: str) -> list[int]:
        """``[offset, page_stride, token_stride, head_stride, num_pages]``, in bytes: the token operators' argument.

        ``offset`` includes the pool's base. A state plane's token stride is 0.
        """
        found = self._geometry.get((layer, kind))
        return list(found) if found is not None else self._plane_geometry(layer, kind)

    def view(self, layer: int, kind: str) -> Tensor:
        """A plane as a typed strided view ``[num_pages, page_size, heads, dim]``; writes go through.

        A state plane gives ``[num_pages, *shape]``.
        """
        plane = self.layout.plane(layer, kind)
        item = plane.dtype.itemsize
        inner = [1]
        for size in reversed(plane.shape[2:]):
            inner.insert(0, inner[0] * size)
        shape = [self.num_pages, *plane.shape]
        strides = [self.page_stride // item, plane.head_stride // item, *inner[: len(plane.shape) - 1]]
        if plane.token_stride is not None:
            shape.insert(1, self.page_size)
            strides.insert(1, plane.token_stride // item)
        typed = self.buffer[: self.buffer.numel() // item * item].view(plane.dtype)
        return typed.as_strided(shape, strides, (self.base + plane.offset) // item)

    @property
    def pages(self) -> Tensor:
        """The pool as uint8 ``[num_pages, page_bytes]``, a view: row ``i`` is page ``i``."""
        return self.buffer.as_strided((self.num_pages, self.layout.page_bytes), (self.page_stride, 1), self.base)

    def gather(self, pages: Tensor | Sequence[int]) -> Tensor:
        """Fresh uint8 ``[n, page_bytes]``: every layer of these pages, one row each. Page < 0 gives zeros."""
        return torch.ops.pm_ops.gather_pages(self.buffer, self._ids(pages), self.region)

    def scatter(self, pages: Tensor | Sequence[int], rows: Tensor) -> None:
        """Write rows of :meth:`gather` to these pages. Page < 0 is skipped."""
        torch.ops.pm_ops.scatter_pages(self.buffer, rows, self._ids(pages), self.region)

    def copy(self, src: Tensor | Sequence[int], dst: Tensor | Sequence[int]) -> None:
        """Copy pages onto pages, as if all were read before the first is written."""
        torch.ops.pm_ops.copy_pages(self.buffer, self._ids(src), self._ids(dst), self.region)

    def zero(self, pages: Tensor | Sequence[int]) -> None:
        """Fill pages with zero bytes, padding included."""
        torch.ops.pm_ops.zero_pages(self.buffer, self._ids(pages), self.region)

    def copy_slots(self, src: Tensor | Sequence[int], dst: Tensor | Sequence[int]) -> None:
        """Copy token slots onto token slots, every token plane of every layer; all are read before one is written."""
        args = (self._ids(src), self._ids(dst), self.slot_runs, self.page_size, self.region)
        torch.ops.pm_ops.copy_slots(self.buffer, *args)

    def writable(self, page: int) -> int:
        """A page that the caller may write alone: itself, or a new page with its bytes where it was shared."""
        own = self.allocator.writable(page)
        if own != page:
            self.copy([page], [own])
        return own

    def __repr__(self) -> str:
        size = f"{self.num_pages} pages of {self.layout.page_bytes} B"
        return f"PagePool({self.layout.name}, {size}, {self.page_size} tokens a page, {self.device})"

    def _plane_geometry(self, layer: int, kind: str) -> list[int]:
        plane = self.layout.plane(layer, kind)
        token_stride = plane.token_stride or 0
        return [self.base + plane.offset, self.page_stride, token_stride, plane.head_stride, self.num_pages]

    def _ids(self, ids: Tensor | Sequence[int]) -> Tensor:
        return ids if isinstance(ids, Tensor) else torch.tensor(ids, dtype=torch.int64, device=self.device)

    def _check_geometry(self) -> None:
        if self.page_stride < self.layout.page_bytes or self.base < 0:
            raise ValueError(
                f"base={self.base}, page_stride={self.page_stride}: base must not be negative, and pages of "
                f"{self.layout.page_bytes} bytes must not overlap"
            )
        for dtype in {p.dtype for p in self.layout.planes}:
            if self.base % dtype.itemsize or self.page_stride % dtype.itemsize:
                raise ValueError(
                    f"base={self.base} and page_stride={self.page_stride} must be multiples of "
                    f"{dtype_name(dtype)}'s {dtype.itemsize} bytes"
                )


def _checked(buffer: Tensor, end: int) -> Tensor:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.storage_offset():
        raise ValueError(
            f"buffer must be a 1-D contiguous uint8 tensor with storage offset 0, got {dtype_name(buffer.dtype)} "
            f"{list(buffer.shape)} strides {list(buffer.stride())} offset {buffer.storage_offset()}; "
            "for a region of a larger buffer pass base="
        )
    if buffer.numel() < end:
        raise ValueError(f"buffer holds {buffer.numel()} bytes, the pool's pages end at byte {end}")
    return buffer
