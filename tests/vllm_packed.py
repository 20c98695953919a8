"""Plans of a cache as vLLM 0.26 makes them, without that vLLM, and what its model runners make of packed ones."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pm_ops.adapters.vllm.packed import ORDERS, PackedViews


@dataclass
class KVCacheTensor:
    """The fields of vLLM 0.26's."""

    size: int
    shared_by: list[str]
    offset: int = 0
    block_stride: int = 0


@dataclass
class KVCacheConfig:
    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[Any] = field(default_factory=list)


def views(config: KVCacheConfig, layout: str, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """What vLLM's model runners make of a packed plan: one allocation, and a view of it for each layer."""
    first = config.kv_cache_tensors[0]
    backing = torch.zeros(first.size, dtype=torch.int8)
    shape = PackedViews.get_kv_cache_shape(config.num_blocks, tokens, heads, dim)
    order = ORDERS[layout]
    page = shape[1] * shape[2] * shape[3]
    made = []
    for tensor in config.kv_cache_tensors:
        assert tensor.size == first.size, "the runners allocate the first tensor's size, once"
        columns = slice(tensor.offset, tensor.offset + page * dtype.itemsize)
        raw = backing.view(-1, tensor.block_stride)[:, columns].view(dtype)
        made.append(raw.view([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(4)]))
    return made
