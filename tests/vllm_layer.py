"""An attention layer as the engine binds it, without the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

import pm_ops
from pm_ops.adapters.vllm.backend import PageMajorImpl
from pm_ops.adapters.vllm.config import Settings

HEADS, DIM = 4, 8


def layer(pool: pm_ops.PagePool, number: int, window: int = 0, impl: str = "auto") -> Any:
    """Over a pool of 2 KV heads of 8, pages of 4 tokens, in vLLM's layout BLNHC."""
    ours: Any = object.__new__(PageMajorImpl)
    ours.settings = Settings("BLNHC", impl)
    ours.num_heads, ours.num_kv_heads, ours.head_size = HEADS, 2, DIM
    ours.scale, ours.window, ours.softcap, ours.sinks, ours.alibi_slopes = 0.3, window, 0.0, None, None
    ours.kv_cache_dtype, ours._takes_fa3, ours._located = "auto", None, {}
    dtype = pool.layout.plane(number, "key").dtype
    content = torch.as_strided(
        pool.buffer.view(dtype), (5, 2, 4, 16), (pool.layout.page_bytes // dtype.itemsize, 16, 32, 1), number * 128
    )
    ours.locate = lambda cache: PageMajorImpl.locate(ours, cache)
    return SimpleNamespace(impl=ours, kv_cache=content, _k_scale_float=1.0, _v_scale_float=1.0)
