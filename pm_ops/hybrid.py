"""Pools for hybrid models: several kinds of page over one buffer.

:class:`HybridPool` gives all kinds the same bytes a page and one allocator, so that any free page may become a page of
keys and values, of a sliding-window group, or of a sequence's state. :class:`TwoEndedPool` is for two kinds whose pages
differ much in size: they grow toward each other from the buffer's two ends.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor

from .allocator import PageAllocator
from .layout import PageLayout, Plane, counted
from .pool import PagePool

ALIGN = 16
"""Bytes that a page's stride is a multiple of, so that every page is fit for 16-byte loads."""

Pages = Tensor | Sequence[int]


class HybridPool(Mapping[str, PagePool]):
    """Kinds of page over one buffer, by name: a page is as long as the longest kind's, and may hold any of them.

    A sequence owns pages of several kinds, all from ``allocator``. ``pool[kind]`` is the :class:`PagePool` of one kind,
    with its planes. ``whole`` is the same pages as bytes of any kind: one call there copies, gathers, scatters, zeroes,
    or (with :class:`HostPool`) offloads them all together.

    Args:
        kinds: the layout of each, such as ``{"attention": page_major(2, …).numbered([3, 7]), "state": state_page(…)}``.
        num_pages: pages of the buffer, of all kinds together.
        device: where the buffer is allocated (default: CPU), zero-filled.
        buffer: use this 1-D contiguous uint8 tensor instead.
        reserve_null: keep page 0 out of the allocator, as a sink for padding.

    Raises:
        ValueError: there is no kind, or two of them have the same plane of a layer; and as :class:`PagePool`.
    """

    def __init__(
        self,
        kinds: Mapping[str, PageLayout],
        num_pages: int,
        device: torch.device | str | None = None,
        *,
        buffer: Tensor | None = None,
        reserve_null: bool = False,
    ) -> None:
        _require_disjoint(kinds)
        stride = max(layout.page_bytes for layout in kinds.values())
        stride = -(-stride // ALIGN) * ALIGN
        bytes_of_any = Plane(0, "page", 0, None, 1, (stride,), torch.uint8)
        layout = PageLayout(1, stride, (bytes_of_any,), " | ".join(kinds))
        self.whole = PagePool(layout, num_pages, device, buffer=buffer, reserve_null=reserve_null)
        self.allocator = self.whole.allocator
        shared = dict(buffer=self.whole.buffer, page_stride=stride, reserve_null=reserve_null)
        self._pools = {
            name: PagePool(layout, num_pages, **shared, allocator=self.allocator)  # type: ignore[arg-type]
            for name, layout in kinds.items()
        }

    def __getitem__(self, kind: str) -> PagePool:
        if kind not in self._pools:
            raise KeyError(f"no kind of page {kind!r}; there are {', '.join(map(repr, self._pools))}")
        return self._pools[kind]

    if not TYPE_CHECKING:  # a type checker knows what there is

        def __getattr__(self, name: str) -> NoReturn:
            remedy = "" if name.startswith("_") else f"; {self.choice}"
            raise AttributeError(f"a HybridPool has no attribute {name!r}{remedy}", name=name, obj=self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def choice(self) -> str:
        """Which :class:`PagePool` to take where one is wanted, for messages."""
        kinds = " or ".join(f"pool[{name!r}]" for name in self._pools)
        return f"take pool.whole for pages of any kind, {kinds} for the planes of one kind"

    @property
    def padding(self) -> dict[str, int]:
        """Bytes at the end of a page that each kind leaves unused."""
        return {name: self.whole.page_stride - pool.layout.page_bytes for name, pool in self.items()}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {pool.layout.page_bytes} B" for name, pool in self.items())
        pages = counted(self.whole.num_pages, "page")
        return f"HybridPool({pages} of {self.whole.page_stride} B: {sizes}, {self.whole.device})"


class TwoEndedPool:
    """Two kinds of page in one buffer: ``low`` from its first byte up, ``high`` from its last byte down.

    Each hands out the free page nearest its own end. A kind has room until its pages would meet the other's outermost
    one in use; what is freed between others in use can be taken by its own kind alone. A page's stride is rounded up to
    a multiple of 16 bytes.

    Args:
        low, high: the layouts.
        nbytes: of the buffer, rounded down to a multiple of 16.
        device: where it is allocated (default: CPU), zero-filled.

    Raises:
        ValueError: the buffer does not hold a page of each kind, or both have the same plane of a layer.
        RuntimeError: the device is a CUDA device, and torch sees none.
    """

    def __init__(
        self, low: PageLayout, high: PageLayout, nbytes: int, device: torch.device | str | None = None
    ) -> None:
        _require_disjoint({"low": low, "high": high})
        nbytes = nbytes // ALIGN * ALIGN
        sizes = [-(-layout.page_bytes // ALIGN) * ALIGN for layout in (low, high)]
        if sum(sizes) > nbytes:
            raise ValueError(
                f"{counted(nbytes, 'byte')} do not hold a page of each kind, of {sizes[0]} and {sizes[1]} bytes"
            )
        counts = [nbytes // size for size in sizes]
        ends = _End(counts[0], sizes[0], nbytes, False), _End(counts[1], sizes[1], nbytes, True)
        ends[0].other, ends[1].other = ends[1], ends[0]
        # Allocated as one opaque page, so that a missing device is told in the pool's words.
        whole = PageLayout(1, nbytes, (Plane(0, "bytes", 0, None, 1, (nbytes,), torch.uint8),), "bytes")
        self.buffer = PagePool(whole, 1, device).buffer
        self.low = PagePool(low, counts[0], buffer=self.buffer, page_stride=sizes[0], allocator=ends[0])
        base = nbytes - counts[1] * sizes[1]
        self.high = PagePool(high, counts[1], buffer=self.buffer, base=base, page_stride=sizes[1], allocator=ends[1])

    def copy(self, low: tuple[Pages, Pages], high: tuple[Pages, Pages]) -> None:
        """Copy pages of both kinds, ``(src, dst)`` of each: a sequence whole."""
        self.low.copy(*low)
        self.high.copy(*high)


class _End(PageAllocator):
    """The allocator of one end. A page's *rank* is its distance from that end, in pages."""

    other: _End

    def __init__(self, num_pages: int, page_bytes: int, nbytes: int, down: bool) -> None:
        super().__init__(num_pages)
        self.page_bytes, self.nbytes, self.down = page_bytes, nbytes, down
        self._free.sort(key=self._rank, reverse=True)  # the next page to hand out is the last one

    def _rank(self, page: int) -> int:
        return self.num_pages - 1 - page if self.down else page

    @property
    def extent(self) -> int:
        """Bytes from the end to the outermost page in use, that one included."""
        low, high = 0, len(self._free)  # the first free pages are all those beyond it
        while low < high:
            middle = (low + high) // 2
            if self._rank(self._free[middle]) == self.num_pages - 1 - middle:
                low = middle + 1
            else:
                high = middle
        return (self.num_pages - low) * self.page_bytes

    @property
    def num_free(self) -> int:
        """Pages that could be handed out now, together."""
        room = (self.nbytes - self.other.extent) // self.page_bytes
        low, high = 0, len(self._free)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._rank(self._free[middle]) < room else (middle + 1, high)
        return len(self._free) - low

    def alloc(self, n: int = 1) -> list[int]:
        """``n`` free pages, those nearest the end. Raises RuntimeError where they would meet the other kind's."""
        if n > 0 and n > self.num_free:
            raise RuntimeError(
                f"out of pages: {n} asked for, {self.num_free} free; the other kind of page holds "
                f"{counted(self.other.extent, 'byte')} of {self.nbytes}: free some of either kind, or make the pool "
                "larger"
            )
        return super().alloc(n)

    def free(self, pages: Tensor | Iterable[int]) -> None:
        """As :meth:`PageAllocator.free`."""
        before = len(self._free)
        super().free(pages)
        freed = self._free[before:]
        del self._free[before:]
        for page in freed:
            insort(self._free, page, key=lambda page: -self._rank(page))


def _require_disjoint(kinds: Mapping[str, PageLayout]) -> None:
    if not kinds:
        raise ValueError("give at least one kind of page: a name and its layout")
    seen: dict[tuple[int, str], str] = {}
    for name, layout in kinds.items():
        for plane in layout.planes:
            other = seen.setdefault((plane.layer, plane.kind), name)
            if other != name:
                raise ValueError(
                    f"{other!r} and {name!r} both have a plane {plane.kind!r} of layer {plane.layer}; number the "
                    "layers of each as in the model, with PageLayout.numbered"
                )


def smallest_page_size(token_bytes: int, page_bytes: int, multiple: int = 16) -> int:
    """Tokens of a page that holds at least ``page_bytes``: the page size at which attention pages fit a state's.

    Args:
        token_bytes: of one token in all attention layers (``PageLayout.token_bytes``).
        page_bytes: of the state's page.
        multiple: what the page size is to be a multiple of.
    """
    if min(token_bytes, page_bytes, multiple) < 1:
        raise ValueError(f"token_bytes={token_bytes}, page_bytes={page_bytes} and multiple={multiple} must be positive")
    return math.ceil(page_bytes / (token_bytes * multiple)) * multiple
