"""What the pools of K and V and those of latents have in common: one buffer of pages, its rows, and copies of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import pm_ops
from pm_ops import PageLayout, PagePool
from pm_ops.ops import _common


class Paged:
    """Mixed into a subclass of a release's pool, in front of it. Slots are SGLang's: page ``slot // page_size``.

    The subclass has ``_layout(page_size)``, its layout, and ``_store_rows(pool, layer, parts, slots)``, which writes
    rows of the planes ``KINDS`` into such a pool as they are.
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
    _layout: Callable[[int], PageLayout]
    _store_rows: Callable[[PagePool, int, list[Tensor], Tensor], None]

    def _allocate(self) -> PagePool:
        from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

        if self.size % self.page_size:
            raise ValueError(
                f"pm_ops: a pool of {self.size} slots has no whole pages of {self.page_size}; choose "
                "--max-total-tokens as a multiple of --page-size"
            )
        layout = self._layout(self.page_size)
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

        The pages that hold a chunk of all layers come over in one copy.
        """
        from sglang.srt.platforms import current_platform

        found: list[Any] = [[] for _ in range(self.layer_num)]
        if self.page_pool is None or not len(indices):
            return found
        current_platform.synchronize()
        for chunk in indices.split(self.cpu_offloading_chunk_size):
            pages, which = torch.unique(chunk // self.page_size, return_inverse=True)
            rows = self.page_pool.gather(pages).cpu()
            host = PagePool(self.page_pool.layout, len(pages), buffer=rows.flatten())
            slots = (which * self.page_size + chunk % self.page_size).cpu()
            for layer, chunks in enumerate(found):
                parts = [pm_ops.load_kv(host, layer, slots, kind).view(self.store_dtype) for kind in self.KINDS]
                chunks.append(parts if len(parts) > 1 else parts[0])
        current_platform.synchronize()
        return found

    def load_cpu_copy(
        self, kv_cache_cpu: list[Any], indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        """Write what ``get_cpu_copy`` gave, chunked in whatever way, to these slots: one copy over a chunk."""
        from sglang.srt.platforms import current_platform

        if self.page_pool is None or not len(indices):
            return
        rows = []
        for chunks in kv_cache_cpu:
            apart = [[chunk] if isinstance(chunk, Tensor) else chunk for chunk in chunks]
            parts = [torch.cat([chunk[i] for chunk in apart]).view(self.dtype) for i in range(len(self.KINDS))]
            if any(len(part) != len(indices) for part in parts):
                raise ValueError(f"rows of {self.KINDS}: {[len(part) for part in parts]} for {len(indices)} slots")
            rows.append(parts)
        entry = self._layout(1)
        current_platform.synchronize()
        size = self.cpu_offloading_chunk_size
        for i, slots in enumerate(indices.split(size)):
            host, every = PagePool(entry, len(slots)), torch.arange(len(slots))
            for layer, parts in enumerate(rows):
                self._store_rows(host, layer, [part[i * size :][: len(slots)] for part in parts], every)
            near = PagePool(entry, len(slots), buffer=host.buffer.to(self.page_pool.device))
            for layer in range(self.layer_num):
                self._store_rows(self.page_pool, layer, [near.view(layer, kind)[:, 0] for kind in self.KINDS], slots)
        current_platform.synchronize()


def without_sink(slots: Tensor) -> Tensor:
    """Where index values are checked, rows of padding, which all go to slot 0, are skipped: they would be refused."""
    checked = slots.device.type == "cpu" or _common.CHECKS
    return slots.masked_fill(slots == 0, -1) if checked else slots
