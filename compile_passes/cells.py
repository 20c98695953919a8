"""The content of caches, moved bit for bit between layer-major tensors and their pages."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pm_ops.ops._common import bits, plane_view

from .forms import CachePlane


class Cells:
    """The cells of a pool that hold a cache's tokens.

    Args:
        buffer: of the pool.
        plane: the cache.
        page_table: of the binding, for caches with a batch axis.
    """

    def __init__(self, buffer: Tensor, plane: CachePlane, page_table: Tensor | None) -> None:
        self.plane = plane
        rows = (plane.page_size, plane.heads, plane.dim, plane.dtype)
        self._cells = bits(plane_view(buffer, plane.geometry, *rows))
        if plane.paged:
            assert page_table is not None
            pages = page_table.long()[:, plane.column : plane.column + plane.columns]
            slots = pages[:, :, None] * plane.page_size + torch.arange(plane.page_size, device=buffer.device)
            slots = slots.flatten(1)[:, : plane.size("S")].flatten()
        else:
            slots = torch.arange(math.prod(plane.shape) // (plane.heads * plane.dim), device=buffer.device)
        self._where = (slots // plane.page_size, slots % plane.page_size)

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Copy the cache that lies in a storage into the pages."""
        self._cells[self._where] = self._rows(storage).reshape(-1, self.plane.heads, self.plane.dim)

    def drain(self, storage: torch.UntypedStorage) -> None:
        """Copy the pages' tokens to where the cache lies in a storage."""
        rows = self._rows(storage)
        rows.copy_(self._cells[self._where].view(rows.shape))

    def zero(self) -> None:
        """Zero the cache's tokens in the pages."""
        self._cells[self._where] = 0

    def _rows(self, storage: torch.UntypedStorage) -> Tensor:
        """The cache as integers, its token axes first: ``[..., heads, dim]``."""
        plane = self.plane
        flat = torch.empty(0, dtype=plane.dtype, device=storage.device).set_(storage)
        cache = bits(flat.as_strided(plane.shape, plane.stride, plane.storage_offset))
        return cache.transpose(1, 2) if plane.form == "BHSD" else cache
