"""PagePool: one buffer, its layout, typed views and page verbs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .allocator import PageAllocator
from .capture import refuse_capture
from .layout import PageLayout, Plane, counted, dtype_name
from .ops._common import page_ids, plane_view
from .ops.pages import page_view


class PoolPlane(NamedTuple):
    """A token plane of a pool, as the operators take it."""

    geometry: list[int]
    """``[offset, page_stride, token_stride, head_stride, num_pages]``, in bytes; offset includes the pool's base."""
    heads: int
    dim: int
    dtype: torch.dtype
    scales: list[int] | None
    """The geometry of the plane with a scale for each of its tokens and heads, where there is one."""


class PagePool:
    """One kind of page over one contiguous uint8 buffer. Page ``i`` is the run of bytes at ``base + i * page_stride``.

    Args:
        layout: the page's geometry.
        num_pages: pages of the pool.
        device: where a new buffer is allocated (default: CPU), zero-filled, so that a slot never written reads as
            zeros.
        buffer: use this 1-D contiguous uint8 tensor with storage offset 0 instead (several pools may share one). The
            operators take it where it begins at a multiple of 16 bytes, as what torch allocates does.
        base: bytes from the buffer's start to page 0.
        page_stride: bytes from one page to the next; default ``layout.page_bytes``.
        reserve_null: keep page 0 out of the allocator, as a sink for padding.
        allocator: share another pool's allocator, for pools that lie in the same pages.

    Raises:
        ValueError: the layout is none, the device unknown, the buffer of another kind or too small, or base and stride
            do not fit the layout's dtypes.
        RuntimeError: the device is a CUDA device, and torch sees none.
    """

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        device: torch.device | str | None = None,
        *,
        buffer: Tensor | None = None,
        base: int = 0,
        page_stride: int | None = None,
        reserve_null: bool = False,
        allocator: PageAllocator | None = None,
    ) -> None:
        if not isinstance(layout, PageLayout) or not hasattr(num_pages, "__index__"):
            given = f"{type(layout).__name__} and {type(num_pages).__name__}"
            raise ValueError(f"a pool needs a PageLayout, such as page_major(...), and a number of pages, got {given}")
        self.layout = layout
        self.num_pages = num_pages
        self.base = base
        self.page_stride = layout.page_bytes if page_stride is None else page_stride
        self.reserve_null = reserve_null
        self._check_geometry()
        end = base + (num_pages - 1) * self.page_stride + layout.page_bytes
        if buffer is None:
            _check_device(device)
            buffer = torch.zeros(end, dtype=torch.uint8, device=device or "cpu")
        else:
            _check_buffer(buffer, end, device)
        self.buffer = buffer
        if allocator is not None:
            self.allocator = allocator
        self._planes: dict[tuple[int, str], PoolPlane] = {}
        self._even = {p.kind: _even(layout, p.kind) for p in layout.planes}
        self.scaled_kinds = layout.scaled_kinds
        self.slot_runs = torch.tensor(layout.slot_runs, dtype=torch.int64, device=self.device).reshape(-1, 3)
        """``[R, 3]`` int64 on the pool's device: ``layout.slot_runs``, as the operator ``copy_slots`` takes them."""

    @cached_property
    def allocator(self) -> PageAllocator:
        """Which pages are in use; made at the first look."""
        return PageAllocator(self.num_pages, reserve_null=self.reserve_null)

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

    def plane(self, layer: int, kind: str) -> PoolPlane:
        """A token plane as the operators take it.

        Raises ValueError for a plane that is not there or is a state, and for scales of another form.
        """
        if type(layer) is not int or torch.compiler.is_compiling():
            return self._plane(layer, kind)  # a number in the graph, which is no key
        found = self._planes.get((layer, kind))
        if found is None:
            found = self._planes[layer, kind] = self._plane(layer, kind)
        return found

    def _plane(self, layer: int, kind: str) -> PoolPlane:
        plane, step = self._located(layer, kind)
        if plane.token_stride is None:
            raise ValueError(f"plane {kind!r} of layer {layer} is a state: it has no token slots")
        heads, dim = plane.shape
        scales = self._scales(layer, f"{kind}_scale", heads) if kind in self.scaled_kinds else None
        return PoolPlane(self._geometry(plane, layer * step), heads, dim, plane.dtype, scales)

    def geometry(self, layer: int, kind: str) -> list[int]:
        """``[offset, page_stride, token_stride, head_stride, num_pages]`` of any plane; a state's token stride is 0."""
        plane, step = self._located(layer, kind)
        return self._geometry(plane, layer * step)

    def view(self, layer: int, kind: str) -> Tensor:
        """A plane as a typed strided view ``[num_pages, page_size, heads, dim]``; writes go through.

        A state plane gives ``[num_pages, *shape]``. In compiled code it is for reading: torch refuses the writes.
        """
        plane = self.layout.plane(layer, kind)
        if plane.token_stride is not None:
            heads, dim = plane.shape
            return plane_view(self.buffer, self.geometry(layer, kind), self.page_size, heads, dim, plane.dtype)
        row = plane.row_bytes // plane.dtype.itemsize
        rows = plane_view(self.buffer, self.geometry(layer, kind), 1, plane.shape[0], row, plane.dtype)
        return rows[:, 0].unflatten(2, plane.shape[1:] or (1,)).view(self.num_pages, *plane.shape)

    @property
    def pages(self) -> Tensor:
        """The pool as uint8 ``[num_pages, page_bytes]``, a view: row ``i`` is page ``i``."""
        return page_view(self.buffer, self.region)

    def gather(self, pages: Tensor | Sequence[int]) -> Tensor:
        """Fresh uint8 ``[n, page_bytes]``: every layer of these pages, one row each. Page < 0 gives zeros."""
        return torch.ops.pm_ops.gather_pages(self.buffer, self._ids(pages), self.region)

    def scatter(self, pages: Tensor | Sequence[int], rows: Tensor) -> None:
        """Write rows of :meth:`gather` to these pages. Page < 0 is skipped."""
        if not isinstance(rows, Tensor):
            raise ValueError(f"rows must be a tensor, as gather gives it, got {type(rows).__name__}; pages come first")
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
        size = f"{counted(self.num_pages, 'page')} of {self.layout.page_bytes} B"
        return f"PagePool({self.layout.name}, {size}, {counted(self.page_size, 'token')} a page, {self.device})"

    def _located(self, layer: int, kind: str) -> tuple[Plane, int]:
        """A plane, and the bytes to add to its offset for each layer.

        Where the layers are alike this is layer 0's plane and a step, so that compiled code keeps the layer as a
        number, and one graph serves all layers.
        """
        even = self._even.get(kind)
        if even is not None and 0 <= layer < len(self.layout.layers):
            return even
        return self.layout.plane(layer, kind), 0

    def _scales(self, layer: int, kind: str, heads: int) -> list[int] | None:
        """The geometry of a plane of scales; None in a layer that has none."""
        if self._even[kind] is None and kind not in self.layout.kinds(layer):
            return None
        plane, step = self._located(layer, kind)
        if plane.shape != (heads, 1) or plane.dtype != torch.float32 or plane.token_stride is None:
            raise ValueError(f"scales are float32 ({heads}, 1) of every token, one a head; the layout has {plane}")
        return self._geometry(plane, layer * step)

    def _geometry(self, plane: Plane, shift: int) -> list[int]:
        offset = self.base + plane.offset + shift
        return [offset, self.page_stride, plane.token_stride or 0, plane.head_stride, self.num_pages]

    def _ids(self, ids: Tensor | Sequence[int]) -> Tensor:
        if isinstance(ids, Tensor):
            return ids
        if self.device.type == "cuda" and not torch.compiler.is_dynamo_compiling():
            refuse_capture("ids in a list are copied to the GPU; pass a tensor that is there", self.device)
        return torch.tensor(page_ids(ids, "ids"), dtype=torch.int64, device=self.device)

    def _check_geometry(self) -> None:
        if self.num_pages < 1 + self.reserve_null:
            raise ValueError(f"num_pages={self.num_pages} leaves no page to hand out; need {1 + self.reserve_null}")
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


def _even(layout: PageLayout, kind: str) -> tuple[Plane, int] | None:
    """Layer 0's plane and the bytes from one layer's to the next, where all layers have alike, evenly spaced ones."""
    planes = sorted((p for p in layout.planes if p.kind == kind), key=lambda p: p.layer)
    first = planes[0]
    step = planes[1].offset - first.offset if len(planes) > 1 else 0
    like = (first.token_stride, first.head_stride, first.shape, first.dtype)
    for layer, p in enumerate(planes):
        if p.layer != layer or p.offset != first.offset + layer * step:
            return None
        if (p.token_stride, p.head_stride, p.shape, p.dtype) != like:
            return None
    return (first, step) if len(planes) == len(layout.layers) else None


def _check_device(device: torch.device | str | None) -> None:
    try:
        kind = "cpu" if device is None else torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is no device of torch's; use 'cuda', 'cuda:1' or 'cpu'") from error
    if kind != "cuda" or torch.cuda.is_available():
        return
    built = torch.version.cuda or torch.version.hip
    reason = "no usable GPU or driver was found" if built else "it was built for the CPU only"
    raise RuntimeError(
        f"device={str(device)!r}, but torch {torch.__version__} sees no CUDA device: {reason}. Install a CUDA build of "
        "torch on a machine with a GPU, or leave device out for a pool on the CPU"
    )


def _check_buffer(buffer: Tensor, end: int, device: torch.device | str | None) -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.storage_offset():
        raise ValueError(
            f"buffer must be a 1-D contiguous uint8 tensor with storage offset 0, got {dtype_name(buffer.dtype)} "
            f"{list(buffer.shape)} strides {list(buffer.stride())} offset {buffer.storage_offset()}; "
            "for a region of a larger buffer pass base="
        )
    if buffer.numel() < end:
        raise ValueError(f"buffer holds {counted(buffer.numel(), 'byte')}, the pool's pages end at byte {end}")
    wanted, index = None if device is None else torch.device(device), buffer.device.index or 0
    if wanted is not None and (wanted.type != buffer.device.type or wanted.index not in (None, index)):
        raise ValueError(f"device={device} but the buffer is on {buffer.device}; leave device out")
