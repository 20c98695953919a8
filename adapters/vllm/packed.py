"""Packed blocks: the cache of a vLLM that has no layouts (0.26) as one buffer, each block a run of all layers' pages.

That generation plans a tensor of its own for each layer, or for each few layers of different groups, which share it.
Its model runners, V1 and V2, also read a plan in which these tensors lie in one buffer, block by block, made for
DeepSeek V4: :func:`pack` turns the one plan into the other, with as many blocks in as many bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .config import Settings

ORDERS = {"BLNHC": (0, 2, 1, 3), "BLHNC": (0, 1, 2, 3)}
"""Of each layout, in which order ``[blocks, heads, tokens, content]`` lie in memory."""

NAMES = {"NHD": "BLNHC", "HND": "BLHNC"}
"""This generation's names of them, in ``VLLM_KV_CACHE_LAYOUT``."""


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


def refuse(config: Any, settings: Settings) -> None:
    """Raise for what packed blocks cannot do, before the engine starts."""
    model = config.model_config
    if settings.engine_layout not in ORDERS:
        raise ValueError(
            f"pm_ops: layout {settings.layout} needs a vLLM that has layouts (0.29 or newer); this one supports "
            f"page_major, {', '.join(ORDERS)}"
        )
    if model is not None and (model.is_hybrid or model.is_attention_free):
        raise ValueError(
            "pm_ops: this vLLM has no state layers in packed blocks (its views of states, and its zeroing of blocks, "
            "expect a tensor a layer); run this model without pm_ops, or with a vLLM that has layouts, 0.29 or newer"
        )


def pack(config: Any) -> Any:
    """The plan of a cache, a ``KVCacheConfig``, as packed blocks.

    Args:
        config: tensors of ``num_blocks`` pages each; those of several layers are shared by layers of different groups,
            which own different blocks.

    Raises:
        RuntimeError: there is nothing to pack, a tensor is not of whole pages, or rows of keys and values differ.
    """
    blocks, tensors = config.num_blocks, config.kv_cache_tensors
    if not tensors:
        raise RuntimeError("pm_ops: this model keeps no KV cache; run it without pm_ops")
    for group in config.kv_cache_groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec})
        for spec in of_layers.values():
            if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
                raise RuntimeError(
                    f"pm_ops: keys of {spec.head_size} and values of {spec.head_size_v} are not supported with this "
                    "vLLM; run this model without pm_ops"
                )
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
    return replace(config, kv_cache_tensors=packed)
