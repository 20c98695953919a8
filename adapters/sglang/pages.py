"""What the pools of K and V and those of latents have in common: one buffer of pages, its rows, and copies of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pm_ops import PageLayout, PagePool
from pm_ops.ops import _common

STAGED = 16 << 20
"""Bytes of rows that a copy to the host or back has on the device at once."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Paged:
    """Mixed into a subclass of a release's pool, in front of it. Slots are SGLang's: page ``slot // page_size``.

    The subclass has ``_layout()``, its layout, of planes ``KINDS``.
    """

    KINDS: tuple[str, ...]
    page_pool: PagePool | None
    """The same memory to this library; None: a pool without layers."""
    size: int
    page_size: int
    layer_num: int
    dtype: torch.dtype
    store_dtype: torch.dtype
    device: Any
    cpu_offloading_chunk_size: int
    memory_saver_adapter: Any
    enable_custom_mem_pool: bool
    custom_mem_pool: Any
    _layout: Callable[[], PageLayout]

    def _allocate(self) -> PagePool:
        from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

        if self.size % self.page_size:
            raise ValueError(
                f"pm_ops: a pool of {self.size} slots has no whole pages of {self.page_size}; choose "
                "--max-total-tokens as a multiple of --page-size"
            )
        layout = self._layout()
        num_pages = self.size // self.page_size + 1  # page 0 is where rows of padding are written
        in_pool = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.enable_custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), in_pool:
            buffer = torch.zeros(num_pages * layout.page_bytes, dtype=torch.uint8, device=self.device)
        pool = PagePool(layout, num_pages, buffer=buffer, reserve_null=True)
        pool.allocator.alloc(pool.allocator.num_free)  # they are the engine's to hand out
        return pool

    def _rows(self, layer: int, kind: str) -> Tensor:
        """``[slots, heads, dim]`` where slots are evenly apart, else ``[pages, page_size, heads, dim]``."""
        assert self.page_pool is not None
        view = self.page_pool.view(layer, kind).view(self.store_dtype)
        even = self.page_size == 1 or view.stride(0) == self.page_size * view.stride(1)
        return view.flatten(0, 1) if even else view

    def _clear_buffers(self) -> None:
        self.page_pool = None
        super()._clear_buffers()  # type: ignore[misc]

    def get_contiguous_buf_infos(self) -> tuple[list[int], list[int], list[int]]:
        """``(addresses, bytes, bytes of a page)`` of one region: a page of every layer is one run of it."""
        if self.page_pool is None:
            return [], [], []
        pages = self.page_pool.pages
        return [pages.data_ptr()], [pages.numel()], [pages.shape[1]]

    def _pd_registerable_tensors(self) -> list[Tensor]:
        return [] if self.page_pool is None else [self.page_pool.buffer]

    def _move(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        assert self.page_pool is not None
        self.page_pool.copy_slots(src_loc.flatten(), without_sink(tgt_loc.flatten()))

    def get_cpu_copy(self, indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> list[Any]:
        """The rows of these slots, SGLang's way: for each layer a list of chunks, ``[key, value]`` or latents.

        They are the caller's, contiguous, and from a GPU in pinned memory, as those of SGLang's own pools. Those of
        several layers come over in one copy and are parts of one allocation.
        """
        from sglang.srt.platforms import current_platform

        found: list[Any] = [[] for _ in range(self.layer_num)]
        if self.page_pool is None or not len(indices):
            return found
        current_platform.synchronize()
        for slots in self._slots(indices).split(self.cpu_offloading_chunk_size):
            kinds = [self._read(kind, slots) for kind in self.KINDS]
            for layer, chunks in enumerate(found):
                parts = [rows[layer] for rows in kinds]
                chunks.append(parts if len(parts) > 1 else parts[0])
        current_platform.synchronize()
        return found

    def load_cpu_copy(
        self, kv_cache_cpu: list[Any], indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        """Write what ``get_cpu_copy`` of a pool of this shape gave to these slots.

        Chunks may have been cut otherwise since, in all layers alike. Raises ValueError, before anything is written,
        where rows are not as many as the slots, or not those of such a pool.
        """
        from sglang.srt.platforms import current_platform

        if self.page_pool is None or not len(indices):
            return
        layers = [[[chunk] if isinstance(chunk, Tensor) else chunk for chunk in chunks] for chunks in kv_cache_cpu]
        cuts = self._cuts(layers, len(indices))
        current_platform.synchronize()
        for i, slots in enumerate(self._slots(indices).split(cuts)):
            for which, kind in enumerate(self.KINDS):
                self._write(kind, slots, [chunks[i][which] for chunks in layers])
        current_platform.synchronize()

    def _slots(self, indices: Tensor) -> Tensor:
        """These slots as int64. Raises ValueError for one that the pool has not, where index values are checked."""
        assert self.page_pool is not None
        slots, limit = indices.long(), self.page_pool.num_pages * self.page_size
        if slots.device.type == "cpu" or _common.CHECKS:
            outside = (slots < 0) | (slots >= limit)
            _common.require_values(~outside, lambda: f"slots {slots[outside].tolist()} of a pool of {limit}")
        return slots

    def _cuts(self, layers: list[list[list[Tensor]]], count: int) -> list[int]:
        """How many rows each chunk has, after a look at all of them."""
        if len(layers) != self.layer_num:
            raise ValueError(f"rows of {len(layers)} layers for a pool of {self.layer_num}")
        cuts = [len(parts[0]) for parts in layers[0]]
        for which, kind in enumerate(self.KINDS):
            row = self._rows(0, kind).shape[-2:]
            for layer, chunks in enumerate(layers):
                parts = [chunk[which] for chunk in chunks]
                found = [len(part) for part in parts]
                if sum(found) != count or found != cuts:
                    raise ValueError(
                        f"{kind} rows of layer {layer} are in chunks of {found} for {count} slots; those of the first "
                        f"layer, {cuts}, and of all others must be cut alike and have a row a slot"
                    )
                for part in parts:
                    if part.shape[1:] != row or part.dtype not in (self.store_dtype, self.dtype):
                        raise ValueError(
                            f"{kind} rows of layer {layer} are {list(part.shape[1:])} of {part.dtype}, but a pool of "
                            f"{list(row)} of {self.store_dtype} can load its like alone"
                        )
        return cuts

    def _read(self, kind: str, slots: Tensor) -> list[Tensor]:
        """Rows of each layer on the host, on their way there: ``[slots, heads, dim]``."""
        found: list[Tensor] = []
        for _, planes in self._planes(kind, len(slots)):
            rows = planes[:, slots // self.page_size, slots % self.page_size].contiguous()
            # as of SGLang's own pools: torch takes pinned memory for it, and uses it again once the caller drops it
            found += rows.to("cpu", non_blocking=True).view(self.store_dtype)
        return [rows.view(-1, *self._rows(0, kind).shape[-2:]) for rows in found]

    def _write(self, kind: str, slots: Tensor, parts: list[Tensor]) -> None:
        """Rows of each layer, ``[slots, heads, dim]``, into these slots."""
        for first, planes in self._planes(kind, len(slots)):
            rows = planes.new_empty(len(planes), len(slots), planes.shape[-1])
            for row, part in zip(rows.view(self.store_dtype), parts[first:], strict=False):
                row.copy_(part.view(self.store_dtype).flatten(1), non_blocking=True)
            planes[:, slots // self.page_size, slots % self.page_size] = rows

    def _planes(self, kind: str, count: int) -> Iterator[tuple[int, Tensor]]:
        """Views of the rows of layers on end, ``[layers, pages, page_size, row]``, each with the number of its first.

        They are as many as take ``STAGED`` bytes for ``count`` slots, at least one. In both formats layers are evenly
        apart. Elements are the widest integers that there can be: torch's kernels of indices copy one at a time.
        """
        assert self.page_pool is not None
        view = self.page_pool.view(0, kind).view(torch.uint8)
        view = view.view(*view.shape[:2], -1)
        step = self.page_pool.view(min(1, self.layer_num - 1), kind).data_ptr() - view.data_ptr()
        strides = (step, *view.stride())
        width = math.gcd(8, view.shape[-1], view.storage_offset(), *strides[:-1])
        planes = view.as_strided((self.layer_num, *view.shape), strides).view(INTEGERS[width])
        most = max(1, STAGED // max(1, count * view.shape[-1]))  # a chunk may be empty
        for first in range(0, self.layer_num, most):
            yield first, planes[first : first + most]


def without_sink(slots: Tensor) -> Tensor:
    """Where index values are checked, rows of padding, which all go to slot 0, are skipped: they would be refused."""
    checked = slots.device.type == "cpu" or _common.CHECKS
    return slots.masked_fill(slots == 0, -1) if checked else slots
