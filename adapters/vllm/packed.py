"""Packed blocks: the cache of a vLLM that has no layouts (0.26) as one buffer, each block a run of all layers' pages.

That generation plans a tensor of its own for each layer, or for each few layers of different groups, which share it.
Its model runners, V1 and V2, also read a plan in which these tensors lie in one buffer, block by block, made for
DeepSeek V4: :func:`pack` turns the one plan into the other, with as many blocks in as many bytes.

DeepSeek V4 has no state layers, so the runners take no notice of packed blocks where they view states and where they
zero the blocks that attention layers get: :func:`place_states` and :class:`BlockZeroer` do that instead. vLLM's kernels
for states take the stride of blocks from the views, and its Triton kernels address them by 64 bits; Mamba-1's scan does
not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pm_ops import PagePool

from .config import Settings

ORDERS = {"BLNHC": (0, 2, 1, 3), "BLHNC": (0, 1, 2, 3)}
"""Of each layout, in which order ``[blocks, heads, tokens, content]`` lie in memory."""

NAMES = {"NHD": "BLNHC", "HND": "BLHNC"}
"""This generation's names of them, in ``VLLM_KV_CACHE_LAYOUT``."""

ZEROERS = ("_kv_block_zeroer", "kv_block_zeroer")
"""Where the model runners V1 and V2 keep what zeroes blocks."""

MAMBA1_ELEMENTS = 1 << 32
"""``selective_scan_fwd`` multiplies a block's number and its stride, in elements, as ``uint32_t``."""


class PackedViews:
    """What this generation asks an attention backend about its caches; newer ones do not ask."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """``[blocks, heads, tokens, content]``, content being the K row, then the V row, of one (token, head)."""
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """How these axes lie in memory. One tensor over all layers, for connectors that prefer that, is not offered."""
        from vllm.config import get_current_vllm_config

        if include_num_layers_dimension:
            raise NotImplementedError("pm_ops packs the blocks itself")
        settings = Settings.of(get_current_vllm_config())
        assert settings is not None, "the plugin names this backend in configurations that ask for pm_ops"
        return ORDERS[settings.engine_layout]


def refuse(settings: Settings) -> None:
    """Raise for layouts that packed blocks cannot have, before the engine starts."""
    if settings.engine_layout not in ORDERS:
        raise ValueError(
            f"pm_ops: layout {settings.layout} needs a vLLM that has layouts (0.29 or newer); this one supports "
            f"page_major, {', '.join(ORDERS)}"
        )


def pack(config: Any) -> Any:
    """The plan of a cache, a ``KVCacheConfig``, as packed blocks.

    Args:
        config: tensors of ``num_blocks`` pages each; those of several layers are shared by layers of different groups,
            which own different blocks.

    Raises:
        RuntimeError: there is nothing to pack, a tensor is not of whole pages, rows of keys and values differ, or
            states cannot be addressed there.
    """
    blocks, tensors = config.num_blocks, config.kv_cache_tensors
    if not tensors:
        raise RuntimeError("pm_ops: this model keeps no KV cache; run it without pm_ops")
    for tensor in tensors:
        if tensor.block_stride or tensor.size % blocks:
            raise RuntimeError(
                f"pm_ops: the KV cache of {', '.join(tensor.shared_by)} is not {blocks} pages of their own, but "
                f"{tensor.size} bytes with a block stride of {tensor.block_stride}; run this model without pm_ops"
            )
    pages = [tensor.size // blocks for tensor in tensors]
    offsets = [sum(pages[:i]) for i in range(len(pages))]
    packed = [
        replace(tensor, size=sum(pages) * blocks, offset=offset, block_stride=sum(pages))
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]
    places = {layer: tensor for tensor in packed for layer in tensor.shared_by}
    for layer, spec in _specs(config):
        if layer not in places:
            continue
        if hasattr(spec, "shapes"):
            _check_states(layer, spec, places[layer])
        elif getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
            raise RuntimeError(
                f"pm_ops: keys of {spec.head_size} and values of {spec.head_size_v} are not supported with this "
                "vLLM; run this model without pm_ops"
            )
    return replace(config, kv_cache_tensors=packed)


def _specs(config: Any) -> Iterator[tuple[str, Any]]:
    """Every layer's name, and what its cache is."""
    for group in config.kv_cache_groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for layer in group.layer_names:
            yield layer, of_layers.get(layer, group.kv_cache_spec)


def _check_states(layer: str, spec: Any, tensor: Any) -> None:
    """Raise where the states of a ``MambaSpec`` cannot lie at this place of packed blocks."""
    for dtype in spec.dtypes:
        if tensor.offset % dtype.itemsize or tensor.block_stride % dtype.itemsize:
            raise RuntimeError(
                f"pm_ops: {layer} keeps states of {dtype}, which cannot lie {tensor.offset} bytes into blocks of "
                f"{tensor.block_stride}; run this model without pm_ops"
            )
    scanned = spec.dtypes[-1]
    if spec.mamba_type.name == "MAMBA1" and tensor.size > MAMBA1_ELEMENTS * scanned.itemsize:
        raise RuntimeError(
            f"pm_ops: {layer} is a Mamba-1 layer, whose scan in vLLM counts elements by 32 bits, too few of {scanned} "
            f"for a cache of {tensor.size} bytes in one buffer; make it smaller "
            f"(kv_cache_memory_bytes={MAMBA1_ELEMENTS * scanned.itemsize}), or run this model without pm_ops"
        )


def place_states(config: Any, layers: dict[str, Any]) -> None:
    """Move vLLM's views of states, in place, to where :func:`pack` has planned them: whoever holds one sees it.

    The runners view a layer's states at the begin of the buffer, as if blocks were one page long.

    Args:
        config: what :func:`pack` has returned.
        layers: the model's attention and state layers by name, with their caches bound.
    """
    for tensor in config.kv_cache_tensors:
        for states in (layers[layer].kv_cache for layer in tensor.shared_by):
            for state in () if isinstance(states, Tensor) else states:
                size = state.element_size()
                strides = (tensor.block_stride // size, *state.stride()[1:])
                state.as_strided_(state.shape, strides, state.storage_offset() + tensor.offset // size)


class BlockZeroer:
    """Takes the place of vLLM's ``KVBlockZeroer``, which zeroes as many bytes as there are from a block's page of a
    layer to the next block's, and so a part of that one.

    Args:
        pool: of any cache group; a block is zeroed whole, as it belongs to one group.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool

    def zero_block_ids(self, block_ids: list[int]) -> None:
        """Fill these blocks with zero bytes, behind the work that is queued on the device; nothing waits."""
        device = self.pool.device
        ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.pool.zero(ids.to(device, non_blocking=True))


def replace_zeroer(runner: Any, pool: PagePool) -> None:
    """Give a model runner ours, compiled.

    Raises:
        RuntimeError: it has none, so that another one would zero blocks.
    """
    held = [name for name in ZEROERS if getattr(runner, name, None) is not None]
    if not held:
        raise RuntimeError(f"pm_ops: {type(runner).__name__} has none of {', '.join(ZEROERS)}; run without pm_ops")
    zeroer = BlockZeroer(pool)
    zeroer.zero_block_ids([0])  # which is never used
    for name in held:
        setattr(runner, name, zeroer)
