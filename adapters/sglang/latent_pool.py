"""SGLang's pool of latents (MLA) over a ``PagePool``: one row a token and layer, ``[latent | rotated key]``."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

import pm_ops
from pm_ops import PageLayout
from pm_ops.formats import TOKEN_MAJOR_ALIGN, mla

from .pages import Paged, without_sink

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
"""Element types of rows."""


def latent_layout(
    layout: str, layers: int, page_size: int, dtype: torch.dtype, latent_dim: int, rope_dim: int
) -> PageLayout:
    """Pages of latents.

    Args:
        layout: ``"page_major"``, ``[L0_latent·ps | L1_latent·ps | …]``: the pages of SGLang 0.5.17's unified pool; or
            ``"token_major"``, ``page_size`` entries ``[L0 | L1 | … | pad to 32 B]``: those of 0.5.23's.
        layers, page_size, dtype, latent_dim, rope_dim: as :func:`pm_ops.formats.mla` takes them.
    """
    rows = mla(layers, page_size, dtype, latent_dim=latent_dim, rope_dim=rope_dim)
    if layout == "page_major":
        return rows
    entry = mla(layers, 1, dtype, latent_dim=latent_dim, rope_dim=rope_dim)
    stride = -(-entry.page_bytes // TOKEN_MAJOR_ALIGN) * TOKEN_MAJOR_ALIGN
    planes = tuple(dataclasses.replace(plane, token_stride=stride) for plane in entry.planes)
    return PageLayout(page_size, page_size * stride, planes, "token_major")


@functools.cache
def latent_pool_class(base: type, layout: str) -> type:
    """A subclass of a release's own ``MLATokenToKVPool`` that keeps its cache in pages of ``layout``."""
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

    class PageMajorMLAPool(Paged, base):
        """The latents of all layers in one buffer."""

        pm_ops_layout = layout
        KINDS = ("latent",)

        def __init__(self, *args: Any, **options: Any) -> None:
            if options.get("use_dsa"):
                raise ValueError(
                    "pm_ops: latent attention with an indexer (DSA) is not supported: its keys have a pool of their "
                    "own, of pages of 64; run without PM_OPS"
                )
            super().__init__(*args, **options)

        def _create_buffers(self) -> None:
            if self.dtype not in DTYPES:
                raise ValueError(
                    f"pm_ops: a cache of {self.dtype} is not supported; choose --kv-cache-dtype auto, bfloat16, "
                    "fp8_e4m3 or fp8_e5m2"
                )
            # a model with sliding windows in every layer has an empty pool beside that of windows
            self.page_pool = self._allocate() if self.layer_num else None
            self.kv_buffer = [self._rows(layer, "latent") for layer in range(self.layer_num)]

        def _layout(self) -> PageLayout:
            dims = self.kv_lora_rank, self.qk_rope_head_dim
            return latent_layout(self.pm_ops_layout, self.layer_num, self.page_size, self.dtype, *dims)

        def get_kv_size_bytes(self) -> int:
            """Bytes of the buffer."""
            return 0 if self.page_pool is None else self.page_pool.buffer.numel()

        def set_kv_buffer(
            self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Any, layer_id_override: int | None = None
        ) -> None:
            """Write one whole row a slot, ``[T, 1, latent + rope]``; ``cache_v`` is a part of it, and is left out."""
            self._store(layer, loc_info, layer_id_override, cache_k.flatten(1))

        def set_mla_kv_buffer(
            self,
            layer: Any,
            loc_info: Any,
            cache_k_nope: Tensor,
            cache_k_rope: Tensor | None,
            layer_id_override: int | None = None,
        ) -> None:
            """Write one row a slot in two parts, ``[T, 1, latent]`` and ``[T, 1, rope]``, in one launch."""
            rope = cache_k_rope.flatten(1) if cache_k_rope is not None and self.qk_rope_head_dim else None
            self._store(layer, loc_info, layer_id_override, cache_k_nope.flatten(1), rope)

        def _store(
            self, layer: Any, loc_info: Any, layer_id: int | None, latent: Tensor, rope: Tensor | None = None
        ) -> None:
            assert self.page_pool is not None
            layer_id = layer.layer_id if layer_id is None else layer_id
            slots = without_sink(unwrap_write_loc(loc_info)[0])
            pm_ops.store_latent(self.page_pool, layer_id - self.start_layer, latent, slots, rope=rope)

        def get_mla_kv_buffer(
            self, layer: Any, loc: Tensor, dst_dtype: torch.dtype | None = None
        ) -> tuple[Tensor, Tensor | None]:
            """The rows of these slots, fresh: ``[N, 1, latent]`` and ``[N, 1, rope]``, of ``dst_dtype``."""
            assert self.page_pool is not None
            self.get_key_buffer(layer.layer_id)  # waits for the layer's transfer, where one is under way
            dtype = None if dst_dtype in (None, self.dtype) else dst_dtype
            rows = pm_ops.load_kv(self.page_pool, layer.layer_id - self.start_layer, loc, "latent", out_dtype=dtype)
            latent, rope = (part.contiguous() for part in rows.split((self.kv_lora_rank, self.qk_rope_head_dim), -1))
            return latent, rope if self.qk_rope_head_dim else None

        def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
            """Copy rows of all layers between slots; those that are written and read at once are read first."""
            if tgt_loc.numel():
                self._move(tgt_loc, src_loc)

    PageMajorMLAPool.__module__, PageMajorMLAPool.__qualname__ = __name__, "PageMajorMLAPool"
    return PageMajorMLAPool
