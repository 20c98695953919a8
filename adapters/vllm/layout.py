"""Where vLLM's cache lies, in the operators' terms: one buffer, planes in bytes, pools of pages.

vLLM hands a layer its cache as ``[blocks, heads, tokens, content]``, a strided view of one allocation; content is the
K row, then the V row, of one (token, head). A block of ours is a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pm_ops import PageLayout, PagePool, Plane

STATES = ("conv", "ssm")


class LayerCache(NamedTuple):
    """One attention layer's cache, as the operators take it."""

    buffer: Tensor
    """uint8, the whole allocation."""
    key: list[int]
    """``[offset, page_stride, token_stride, head_stride, num_pages]``, in bytes."""
    value: list[int]
    page_size: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def planes(self, layer: int) -> list[Plane]:
        """K and V as planes of a page."""
        return [
            Plane(layer, kind, offset, token, head, (self.heads, dim), self.dtype)
            for kind, (offset, _, token, head, _), dim in (
                ("key", self.key, self.key_dim),
                ("value", self.value, self.value_dim),
            )
        ]


def locate(cache: Tensor, layout: str, key_dim: int, dtype: torch.dtype) -> LayerCache:
    """Read the geometry off vLLM's view of one layer.

    Args:
        cache: ``[blocks, heads, tokens, key_dim + value_dim]``, elements as wide as ``dtype``'s.
        layout: ``"page_major"`` reinterprets each block's run, which must be one of BLNHC, as ``[K of all tokens | V of
            all tokens]``; every other name means what the view says.
    """
    pages, heads, tokens, content = cache.shape
    size = cache.element_size()
    offset = int(cache.storage_offset()) * size
    page, head, token = (int(stride) * size for stride in cache.stride()[:3])
    key_row, value_row = key_dim * size, (content - key_dim) * size
    key, value = [offset, page, token, head, pages], [offset + key_row, page, token, head, pages]
    if layout == "page_major":
        run = [heads * content * size, content * size]
        if [token, head] != run and tokens * heads > 1:
            raise ValueError(
                f"page_major needs blocks of vLLM's layout BLNHC, token and head strides {run}, got {[token, head]}"
            )
        key = [offset, page, heads * key_row, key_row, pages]
        value = [offset + tokens * heads * key_row, page, heads * value_row, value_row, pages]
    return LayerCache(whole_buffer(cache), key, value, tokens, heads, key_dim, content - key_dim, dtype)


def whole_buffer(tensor: Tensor) -> Tensor:
    """The allocation that a view lies in, as 1-D uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def page_pools(config: Any, layers: dict[str, Any], name: str) -> list[PagePool]:
    """A pool for each of the engine's cache groups, all over its one buffer, page ``i`` being block ``i``.

    Groups overlay one another in a block: a block belongs to one group at a time. Layers keep the model's numbers, a
    draft model's come after them. The pools' allocators have no free page: the engine alone hands blocks out.

    Args:
        config: vLLM's ``KVCacheConfig``.
        layers: attention and state layers by name, with their caches bound: the model's, then the draft model's.
        name: of the layout, for people.

    Raises:
        RuntimeError: the cache is not one buffer of whole pages, or a layer is not read by pm_ops.
    """
    placed = {layer for tensor in config.kv_cache_tensors for layer in _layers_of(tensor)}
    strides = {tensor.block_stride for tensor in config.kv_cache_tensors}
    sizes = {tensor.size for tensor in config.kv_cache_tensors}
    if len(strides) != 1 or len(sizes) != 1:
        raise RuntimeError(f"pm_ops: the KV cache is not one run of pages: strides {strides} in buffers of {sizes}")
    page_bytes = strides.pop()
    cached = {layer for group in config.kv_cache_groups for layer in group.layer_names}
    numbers = layer_numbers(layer for layer in layers if layer in cached)
    pools = []
    buffers: dict[int, Tensor] = {}
    for group in config.kv_cache_groups:
        planes: list[Plane] = []
        tokens = 1
        for layer in (layer for layer in group.layer_names if layer in placed):
            number, cache = numbers[layer], layers[layer].kv_cache
            if isinstance(cache, Tensor):
                impl = layers[layer].impl
                if not hasattr(impl, "locate"):
                    raise RuntimeError(f"pm_ops: {layer} is read by {type(impl).__name__}, not by pm_ops")
                located = impl.locate(cache)
                planes += located.planes(number)
                tokens = located.page_size
            else:
                planes += _states(number, cache)
            for view in [cache] if isinstance(cache, Tensor) else cache:
                buffers[view.untyped_storage().data_ptr()] = whole_buffer(view)
                step = view.stride(0) * view.element_size()
                if len(view) != config.num_blocks or step != page_bytes:
                    raise RuntimeError(
                        f"pm_ops: {layer} has {len(view)} blocks, {step} bytes apart; the cache has "
                        f"{config.num_blocks} of {page_bytes} bytes"
                    )
        if len(buffers) > 1:
            raise RuntimeError(f"pm_ops: the KV cache lies in {len(buffers)} buffers; it must be one run of pages")
        if planes:
            (buffer,) = buffers.values()
            layout = PageLayout(tokens, page_bytes, tuple(planes), name)
            pool = PagePool(layout, config.num_blocks, buffer=buffer, reserve_null=True)
            pool.allocator.alloc(pool.allocator.num_free)  # they are the engine's to hand out
            pools.append(pool)
    return pools


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """Each layer's number in its model. Those of a draft model that counts from 0 again come after the model's own.

    Args:
        names: such as ``model.layers.0.self_attn.attn``, then ``draft_model.model.layers.0.self_attn.attn``.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    models: dict[str, dict[str, int]] = {}
    for name in names:
        number: int = extract_layer_index(name)
        models.setdefault(name.partition(f".{number}.")[0], {})[name] = number
    numbers: dict[str, int] = {}
    for model in models.values():
        taken = set(numbers.values())
        first = 0 if taken.isdisjoint(model.values()) else 1 + max(taken)
        numbers |= {name: first + number for name, number in model.items()}
    return numbers


def bytes_of_page(kv_cache_config: Any) -> int:
    """Of a block, all layers. Where the worker is to pack the blocks (vLLM 0.26), the plan has a tensor a layer."""
    tensors, blocks = kv_cache_config.kv_cache_tensors, kv_cache_config.num_blocks
    strides: set[int] = {tensor.block_stride for tensor in tensors}
    return max(strides) if all(strides) else sum(tensor.size for tensor in tensors) // blocks


def _layers_of(tensor: Any) -> list[str]:
    """The layers that a ``KVCacheTensor`` is for; ``shared_by`` is its name in vLLM 0.26."""
    layers: list[str] = tensor.layers if hasattr(tensor, "layers") else tensor.shared_by
    return layers


def _states(number: int, states: Iterable[Tensor]) -> list[Plane]:
    """The state planes of a layer: each ``[blocks, *shape]``, contiguous within a block."""
    planes = []
    for i, state in enumerate(states):
        size = state.element_size()
        kind = STATES[i] if i < len(STATES) else f"state{i}"
        offset, stride = int(state.storage_offset()) * size, int(state.stride(1)) * size
        planes.append(Plane(number, kind, offset, None, stride, tuple(state.shape[1:]), state.dtype))
    return planes
