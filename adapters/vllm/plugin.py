"""The entry point ``vllm.general_plugins: pm_ops``.

vLLM loads plugins before it has a configuration, and in every process. So loading only hooks the making of
configurations; an engine that asks gets our worker class and our attention backend written into its own configuration,
which then carry everything to where it is used. Other engines, of the same process too, are left as they are.
"""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from . import hooks
from .config import HOW, KEY, Settings, write_environment

METHODS = ("ngram", "draft_model")
"""Of speculative decoding, under vLLM's names: those that were tried."""


def register() -> None:
    """Hook the making of ``VllmConfig``. Called by vLLM, any number of times."""
    from vllm.config import VllmConfig

    original = VllmConfig.__post_init__
    if hasattr(original, "pm_ops_original"):
        return

    @functools.wraps(original)
    def post_init(self: Any) -> None:
        write_environment(self)
        settings = Settings.of(self)
        if settings is None:
            original(self)
            return
        # vLLM only logs what it could not load. Here an ImportError stops the engine that asked, and no other one.
        from . import connectors, rope

        # Every way of asking for the same gives the same hash.
        self.additional_config = {**self.additional_config, KEY: asdict(settings)}
        _refuse(self, settings)
        _choose_attention(self)
        original(self)
        # vLLM chooses a connector itself where kv_offloading_size is given.
        connectors.refuse(self.kv_transfer_config, settings)
        _choose_worker(self, settings)
        rope.add_pass(self, settings)

    post_init.pm_ops_original = original  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = post_init


def _refuse(config: Any, settings: Settings) -> None:
    """Raise for what the adapter cannot do, before the engine starts."""
    from vllm import envs

    from . import packed

    absent = hooks.missing(hooks.needed(hooks.device()))
    if absent:
        raise RuntimeError(
            f"pm_ops: this vLLM has no {'; no '.join(absent)}. The adapter needs vLLM {hooks.VERSION}: "
            f"upgrade it, or leave the entry {KEY!r} and PM_OPS out"
        )
    named = requested = envs.VLLM_KV_CACHE_LAYOUT
    if hooks.generation() == hooks.PACKED:
        packed.refuse(settings)
        requested = packed.NAMES.get(named, named)
    if requested is not None and requested != settings.engine_layout:
        raise ValueError(
            f"VLLM_KV_CACHE_LAYOUT={named}, but pm_ops was asked for layout {settings.layout}, which needs "
            f"{settings.engine_layout} there; unset the variable, or ask pm_ops for the layout: {HOW}"
        )
    hybrid = config.model_config is not None and config.model_config.is_hybrid
    if hybrid and settings.layout == "BHLNC":
        raise ValueError(
            "pm_ops: BHLNC puts heads before layers, and this model's state layers have no such heads; ask for layout "
            "page_major, BLNHC or BLHNC"
        )
    if not hybrid and settings.hybrid_blocks != "aligned":
        raise ValueError(
            f"pm_ops: hybrid_blocks={settings.hybrid_blocks} is for models with attention and state layers, which this "
            "one is not; leave it out"
        )
    if config.speculative_config is not None:
        _refuse_drafts(config.model_config, config.speculative_config)


def _refuse_drafts(model: Any, drafts: Any) -> None:
    """Raise for drafts that were never tried. Which cache groups there are, the worker knows later."""
    remedy = "leave speculative_config out, or run without pm_ops"
    if drafts.method not in METHODS:
        raise ValueError(
            f"pm_ops: speculative decoding by {drafts.method} is not supported, by {' and '.join(METHODS)} it is; "
            f"{remedy}"
        )
    if model.has_inner_state or drafts.draft_model_config.has_inner_state:
        raise ValueError(f"pm_ops: speculative decoding by or of models with state layers is not supported; {remedy}")


def _choose_attention(config: Any) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    attention = config.attention_config
    if attention.backend not in (None, AttentionBackendEnum.CUSTOM) or attention.backend_per_kind:
        chosen = attention.backend_per_kind or attention.backend.name
        raise ValueError(
            f"attention backend {chosen} and pm_ops were both asked for; pm_ops brings the attention that reads its "
            "layout. Leave one of them out"
        )
    attention.backend = AttentionBackendEnum.CUSTOM


def _choose_worker(config: Any, settings: Settings) -> None:
    device, generation = hooks.device(), hooks.generation()
    if (generation, device) not in hooks.WORKERS:
        raise RuntimeError(
            f"pm_ops: vLLM runs on {device}; this adapter supports {hooks.supported(generation)}. Leave the entry "
            f"{KEY!r} and PM_OPS out"
        )
    if device == "cpu" and settings.impl not in ("auto", "reference"):
        raise ValueError(f"pm_ops: impl {settings.impl} needs a GPU, and vLLM runs on the CPU; ask for auto")
    if device == "cpu" and config.use_v2_model_runner:
        raise ValueError("pm_ops: vLLM's model runner V2 is not supported; set VLLM_USE_V2_MODEL_RUNNER=0")
    if device == "cuda":
        _refuse_on_gpu(config, settings)
    stock, ours = hooks.WORKERS[generation, device]
    parallel = config.parallel_config
    if parallel.worker_cls not in (stock, ours):
        raise ValueError(
            f"pm_ops: worker_cls is {parallel.worker_cls}, and pm_ops brings a worker of its own, which takes the "
            f"place of {stock}; leave one of them out"
        )
    parallel.worker_cls = ours


def _refuse_on_gpu(config: Any, settings: Settings) -> None:
    """Raise for what a CUDA graph would freeze or could not hold, and for what is hooked on the CPU alone."""
    graphs = config.compilation_config.cudagraph_mode
    if settings.impl == "reference" and graphs:
        raise ValueError(
            f"pm_ops: impl reference waits for the GPU, which CUDA graphs ({graphs.name}) cannot hold; ask for auto, "
            "or add enforce_eager"
        )
    if settings.hybrid_blocks != "aligned":
        raise ValueError(
            f"pm_ops: hybrid_blocks={settings.hybrid_blocks} is not supported on a GPU: vLLM 0.26 plans pages of one "
            "size for all layers, and newer ones have not run there; leave it out"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):  # newer versions have no such thing
        raise ValueError(
            "pm_ops: scales of an fp8 cache that are found while serving (calculate_kv_scales) are not supported on a "
            "GPU; leave it out, or take a checkpoint that has scales"
        )
