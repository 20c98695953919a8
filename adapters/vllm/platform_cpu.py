"""What vLLM's CPU platform decides for every engine, decided anew for those that asked for pm_ops, and for no other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import pm_ops

from .backend import PATH, PageMajorBackend
from .config import Settings


def open_platform() -> None:
    """Hook the platform's choice of attention and of block sizes. Any number of times."""
    _wrap("get_attn_backend_cls", _choose_attention)
    _wrap("update_block_size_for_backend", _choose_block_size)


def _wrap(name: str, ours: Callable[..., Any]) -> None:
    """Make ``ours(stock, …)`` the platform's class method of this name."""
    stock = getattr(CpuPlatform, name).__func__
    if hasattr(stock, "pm_ops_original"):
        return

    @functools.wraps(stock)
    def method(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(functools.partial(stock, cls), *args, **kwargs)

    method.pm_ops_original = stock  # type: ignore[attr-defined]
    setattr(CpuPlatform, name, classmethod(method))


def _choose_attention(
    stock: Callable[..., Any], selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
) -> Any:
    """The platform itself takes CPU_ATTN whatever is asked for, and validates nothing."""
    asked = selected_backend is AttentionBackendEnum.CUSTOM and Settings.of(get_current_vllm_config())
    if not asked:
        return stock(selected_backend, attn_selector_config, num_heads)
    reasons = PageMajorBackend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
    if reasons:
        raise ValueError(
            f"pm_ops {pm_ops.__version__} cannot serve this model's attention: {'; '.join(reasons)}. "
            f"It was asked for {attn_selector_config}. Run it without pm_ops"
        )
    return PATH


def _choose_block_size(stock: Callable[..., Any], vllm_config: Any) -> None:
    """The platform makes attention blocks as large as a state, so that all are alike; packed blocks need not be."""
    settings, cache = Settings.of(vllm_config), vllm_config.cache_config
    if settings is None or settings.hybrid_blocks != "small":
        stock(vllm_config)
    elif cache.mamba_cache_mode == "align":  # states are cached where blocks end, as the platform has it
        cache.mamba_block_size = cache.block_size
