"""K and V of one layer, in the two layouts that everything is measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import PagePool, page_major
from ..ops._common import bits, plane_view

PAGE_MAJOR, LAYER_MAJOR = "page-major", "layer-major"
LAYOUTS = (PAGE_MAJOR, LAYER_MAJOR)


@dataclass(frozen=True)
class Memory:
    """One layer's K and V: in a page-major pool, or all of K in one run and all of V in another behind it."""

    buffer: Tensor
    key_plane: list[int]
    value_plane: list[int]
    page_size: int
    key: Tensor
    """``[pages, page_size, heads, head_dim]``, a strided view."""
    value: Tensor
    pool: PagePool | None = None
    layer: int = 0

    def rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The stored K and V of these slots, fresh."""
        at = (slots // self.page_size, slots % self.page_size)
        return bits(self.key)[at].view(self.key.dtype), bits(self.value)[at].view(self.value.dtype)

    def write(self, slots: Tensor, rows: tuple[Tensor, Tensor]) -> None:
        """Put rows of :meth:`rows` back."""
        at = (slots // self.page_size, slots % self.page_size)
        bits(self.key)[at], bits(self.value)[at] = bits(rows[0]), bits(rows[1])


def poison(nbytes: int, device: torch.device, fill: bool = True) -> Tensor:
    """Random bytes, uint8 ``[nbytes]``; or without ``fill`` whatever the memory holds."""
    words = torch.empty(-(-nbytes // 8), dtype=torch.int64, device=device)
    return (words.random_() if fill else words).view(torch.uint8)[:nbytes]


def memory(
    layout: str,
    pages: int,
    page_size: int,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    layers: int,
    device: torch.device,
    fill: bool = True,
) -> Memory:
    """Memory for one layer in this layout, poisoned; page-major, it is the middle one of ``layers``."""
    if layout == PAGE_MAJOR:
        page = page_major(layers, heads, dims[0], page_size, dtype, value_dim=dims[1])
        pool = PagePool(page, pages, buffer=poison(pages * page.page_bytes, device, fill))
        layer = layers // 2
        k, v = (pool.geometry(layer, kind) for kind in ("key", "value"))
        return Memory(pool.buffer, k, v, page_size, pool.view(layer, "key"), pool.view(layer, "value"), pool, layer)
    rows = [heads * dim * dtype.itemsize for dim in dims]
    buffer = poison(pages * page_size * sum(rows), device, fill)
    k, v = (
        [offset, page_size * row, row, dim * dtype.itemsize, pages]
        for offset, row, dim in zip((0, pages * page_size * rows[0]), rows, dims, strict=True)
    )
    key, value = (plane_view(buffer, p, page_size, heads, dim, dtype) for p, dim in zip((k, v), dims, strict=True))
    return Memory(buffer, k, v, page_size, key, value)
