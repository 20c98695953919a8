"""SGLang's pool of keys and values over a ``PagePool``: its class's contract, one buffer of pages under it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import pm_ops
from pm_ops import PageLayout

from .pages import Paged, without_sink

FORMATS = {"token_major": pm_ops.token_major, "page_major": pm_ops.page_major}
LABEL = "page_major"
"""What SGLang is told of the layout, whichever it is: that it is not one of its own per-layer ones."""
MARK = "pm_ops_layout"
"""The attribute that pools of ours have and others have not."""


@functools.cache
def pool_class(base: type, layout: str) -> type:
    """A subclass of a release's own ``MHATokenToKVPool`` that keeps its cache in pages of ``layout``.

    It is made here, not declared, because importing pm_ops must not import SGLang.
    """
    from sglang.srt.mem_cache.memory_pool import KvBufferDesc, unwrap_write_loc

    class PageMajorKVPool(Paged, base):
        """K and V of all layers in one buffer."""

        pm_ops_layout = layout
        KINDS = ("key", "value")

        def __init__(self, *args: Any, **options: Any) -> None:
            if options.get("quant_method") is not None:
                raise ValueError(
                    f"pm_ops: a cache quantised by {type(options['quant_method']).__name__} is not supported; choose "
                    "--kv-cache-dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2, or run without PM_OPS"
                )
            # SGLang's tiled copies know one dense tensor a layer.
            super().__init__(*args, **{**options, "kv_cache_layout": LABEL, "enable_kv_cache_copy": False})

        def _create_buffers(self) -> None:
            self.k_scale_buffer = self.v_scale_buffer = None
            self.native_k_scale_buffer = self.native_v_scale_buffer = None
            self.dq_k_buffer = self.dq_v_buffer = None
            self.page_pool, self.k_buffer, self.v_buffer = None, [], []
            if self.layer_num:  # a model with sliding windows in every layer has an empty pool beside that of windows
                self.page_pool = self._allocate()
                self.k_buffer = [self._rows(layer, "key") for layer in range(self.layer_num)]
                self.v_buffer = [self._rows(layer, "value") for layer in range(self.layer_num)]
            buffers = self.k_buffer + self.v_buffer
            pointers = [buffer.data_ptr() for buffer in buffers]
            self.data_ptrs = torch.tensor(pointers, dtype=torch.uint64, device=self.device)
            self.k_data_ptrs, self.v_data_ptrs = self.data_ptrs[: self.layer_num], self.data_ptrs[self.layer_num :]
            strides = [buffer.stride(0) * buffer.element_size() for buffer in buffers]
            self.data_strides = torch.tensor(strides, dtype=torch.int64, device=self.device)
            self._kv_buffer_descs = self._build_kv_buffer_descs()

        def _layout(self) -> PageLayout:
            make, heads = FORMATS[self.pm_ops_layout], (self.head_num, self.head_dim)
            return make(self.layer_num, *heads, self.page_size, self.dtype, value_dim=self.v_head_dim)

        def _build_kv_buffer_descs(self) -> list[Any]:
            if self.page_pool is None:
                return []
            shape = tuple(self.page_pool.pages.shape)
            return [KvBufferDesc("pages", shape, row_bytes=shape[1], tokens_per_row=self.page_size)]

        def get_kv_size_bytes(self) -> tuple[int, int]:
            """Bytes of K and of V; padding counts as V."""
            if self.page_pool is None:
                return 0, 0
            keys = sum(buffer.numel() * buffer.element_size() for buffer in self.k_buffer)
            return keys, self.page_pool.buffer.numel() - keys

        def set_kv_buffer(
            self,
            layer: Any,
            loc_info: Any,
            cache_k: Tensor,
            cache_v: Tensor,
            k_scale: float | Tensor | None = None,
            v_scale: float | Tensor | None = None,
            layer_id_override: int | None = None,
            dcp_kv_mask: Tensor | None = None,
        ) -> None:
            """Write one row a slot, in one launch: scaled, rounded and stored. The rows are left as they are."""
            slots = unwrap_write_loc(loc_info)[0]
            if dcp_kv_mask is not None:
                slots = torch.where(dcp_kv_mask.bool(), slots, -1)
            layer_id = layer.layer_id if layer_id_override is None else layer_id_override
            self._store(layer_id, slots, cache_k, cache_v, k_scale, v_scale)

        def set_kv_buffer_prefix_valid(
            self,
            layer: Any,
            loc_2d: Tensor,
            commit_lens: Tensor,
            cache_k: Tensor,
            cache_v: Tensor,
            k_scale: float | Tensor | None = None,
            v_scale: float | Tensor | None = None,
            layer_id_override: int | None = None,
        ) -> None:
            """Write the first ``commit_lens[i]`` rows of sequence ``i`` to the first slots of ``loc_2d[i]``."""
            if loc_2d.dim() != 2 or commit_lens.shape != loc_2d.shape[:1] or len(cache_k) != loc_2d.numel():
                raise ValueError(
                    f"loc_2d must be [sequences, slots], commit_lens [sequences] and one row a slot, got "
                    f"{list(loc_2d.shape)}, {list(commit_lens.shape)} and {len(cache_k)} rows"
                )
            loc_2d, commit_lens = loc_2d.to(cache_k.device), commit_lens.to(cache_k.device)
            committed = torch.arange(loc_2d.shape[1], device=loc_2d.device) < commit_lens[:, None]
            slots = torch.where(committed, loc_2d, -1).flatten()
            layer_id = layer.layer_id if layer_id_override is None else layer_id_override
            self._store(layer_id, slots, cache_k, cache_v, k_scale, v_scale)

        def _store(self, layer_id: int, slots: Tensor, key: Tensor, value: Tensor, k_scale: Any, v_scale: Any) -> None:
            assert self.page_pool is not None
            pm_ops.store_kv(
                self.page_pool,
                layer_id - self.start_layer,
                key if key.dim() == 3 else key.unflatten(-1, (self.head_num, self.head_dim)),
                value if value.dim() == 3 else value.unflatten(-1, (self.head_num, self.v_head_dim)),
                without_sink(slots),
                # SGLang scales what it casts, and takes rows of the cache's dtype as they are
                key_scale=1.0 if k_scale is None or key.dtype == self.dtype else k_scale,
                value_scale=1.0 if v_scale is None or value.dtype == self.dtype else v_scale,
            )

        def _move_kv_cache_impl(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
            self._move(tgt_loc, src_loc)

    PageMajorKVPool.__module__, PageMajorKVPool.__qualname__ = __name__, "PageMajorKVPool"
    return PageMajorKVPool


def pools_of(pool: Any) -> list[Any]:
    """The pools that SGLang's pool consists of: those of full attention and of windows, where it is made of two."""
    parts = [getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")]
    return [part for part in parts if part is not None] or [pool]
