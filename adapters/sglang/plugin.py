"""The entry point ``sglang.srt.plugins: pm_ops``.

SGLang loads plugins early in every process, and only logs what they raise. So loading installs hooks, no more; whether
they took effect is seen when the pool has been built, and there an error stops the engine.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from . import hooks
from .config import HOW, Settings

BACKEND = "pm_ops"
STRIDED = ("triton", "fa3", "flashinfer", "torch_native", BACKEND)
"""Attention backends that find a slot by its stride, as token_major needs it."""
STRIDED_LATENTS = ("triton", BACKEND)
"""Those that do so for latents, too."""
ANY = "run without PM_OPS"

logger = logging.getLogger(__name__)


def register() -> None:
    """Hook the making of the KV cache, and add the attention backend ``pm_ops``. Called by SGLang, once a process."""
    # An Exception would be logged, and the engine would run on without us.
    try:
        if Settings.asked() is None:
            return
    except ValueError as error:
        raise SystemExit(str(error)) from error
    try:
        _install()
    except Exception as error:
        raise SystemExit(
            f"pm_ops: its plugin cannot be installed into this SGLang: {type(error).__name__}: {error}. The adapter is "
            f"tested with {hooks.VERSIONS}: install one of them, or {ANY}"
        ) from error


def _install() -> None:
    absent = hooks.missing()
    if absent:
        raise SystemExit(
            f"pm_ops: this SGLang has no {'; no '.join(absent)}. The adapter is tested with {hooks.VERSIONS}: install "
            f"one of them, or {ANY}"
        )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    register_attention_backend(BACKEND)(_make_backend)
    add_attention_backend_choices([BACKEND])
    its = {
        hooks.RESOLVE: _resolve,
        hooks.BUILD_LATENT: _build_latent,
        "configure": _configure,
        hooks.FUSED.rpartition(".")[2]: _never_fused,
        hooks.TREES.rpartition(".")[2]: _trees_on_pages,
        "create_decode_backend": _draft_steps,
        "create_draft_extend_backend": _draft_rows,
    }
    for target in hooks.targets():
        HookRegistry.register(target, its.get(target.rpartition(".")[2], _build), HookType.AROUND)
    apply = HookRegistry.apply_hooks

    def apply_hooks() -> None:
        apply()
        _check_hooks()  # none of ours would look for the others where none is in place

    HookRegistry.apply_hooks = staticmethod(apply_hooks)


def _check_hooks() -> None:
    """SGLang logs a hook that it could not put in place, and goes on. Every hook looks for the others."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    failed = [target for target in hooks.targets() if target not in HookRegistry._patched]
    if failed:
        raise RuntimeError(
            f"pm_ops: SGLang could not hook {', '.join(failed)}; its log says why (another plugin may replace the same "
            f"function). Leave that out, or {ANY}"
        )


def _make_backend(runner: Any) -> Any:
    from .latent_backend import make_backend

    return make_backend(runner)


def _draft_steps(original: Any, factory: Any) -> Any:
    """A draft model's attention while it drafts; none is needed where its only token comes with the rows before."""
    name = factory.draft_attn_backend or _backends()["decode_attention_backend"]
    if name != BACKEND or factory.speculative_num_steps <= 1:
        return original(factory)
    from .draft import PageMajorMultiStepDraft

    made = PageMajorMultiStepDraft(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    for backend in (made, *made.attn_backends):
        _name(backend)
    return made


def _draft_rows(original: Any, factory: Any) -> Any:
    """A draft model's attention over the tokens that were accepted."""
    from sglang.srt.runtime_context import get_spec

    phase = "decode" if get_spec().speculative_attention_mode == "decode" else "prefill"
    name = factory.draft_attn_backend or _backends()[f"{phase}_attention_backend"]
    if name != BACKEND:
        return original(factory)
    _capture_rows()
    return _name(_make_backend(factory.draft_model_runner))


def _capture_rows() -> None:
    """Have SGLang capture graphs of these rows for our backend, too: its list begins with its Triton backend's class.

    Not a hook as the others are: the module is there only where drafts are, and imports the whole scheduler.
    """
    module = sys.modules.get(hooks.ROWS)
    if module is None:  # another worker's, which captures none
        return
    from .backend import PageMajorAttnBackend

    stock = getattr(module, "TritonAttnBackend", None)
    if stock is None:
        logger.warning(
            "pm_ops: this SGLang lists attention backends otherwise in %s; rows of accepted drafts run without CUDA "
            "graphs, which takes time in each step. The adapter is tested with %s",
            hooks.ROWS, hooks.VERSIONS,
        )  # fmt: skip
    elif not isinstance(stock, tuple):
        module.TritonAttnBackend = (stock, PageMajorAttnBackend)  # type: ignore[attr-defined]


def _name(backend: Any) -> Any:
    """Backends of the registry get theirs from SGLang."""
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = BACKEND
    return backend


def _backends() -> dict[str, str]:
    """The attention backends of prompts and of decode steps."""
    from sglang.srt.runtime_context import get_exec

    kernel, names = get_exec().kernel, ("prefill_attention_backend", "decode_attention_backend")
    return {name: getattr(kernel, name, None) or kernel.attention_backend for name in names}


def _never_fused(original: Any, *args: Any, **options: Any) -> bool:
    """Rows of pages are not dense; the pool's own store is one launch, too."""
    return False


def _trees_on_pages(original: Any, server_args: Any) -> None:
    """SGLang drafts trees on pages with backends of a list; ours does it, too. Nothing is checked after that."""
    try:
        original(server_args)
    except ValueError as error:
        text = str(error)
        if not text.startswith("speculative_eagle_topk > 1 with page_size > 1") or f"={BACKEND!r}" not in text:
            raise


def _resolve(original: Any, configurator: Any, *, kind: str, default: type) -> type:
    """From SGLang 0.5.22 on: the class of a pool."""
    chosen = original(configurator, kind=kind, default=default)
    return _ours(chosen) if kind in ("mha", "mla") else chosen


def _build(original: Any, configurator: Any, *, mha_pool_class: type, **options: Any) -> Any:
    """Before: a pool that is made from a given class."""
    return original(configurator, mha_pool_class=_ours(mha_pool_class), **options)


def _build_latent(original: Any, configurator: Any, **options: Any) -> Any:
    """The same for latents: SGLang takes their class out of its module, so that is where it is exchanged."""
    module = importlib.import_module(hooks.MODULE)
    stock = module.MLATokenToKVPool
    module.MLATokenToKVPool = _ours(stock)  # type: ignore[attr-defined]
    try:
        return original(configurator, **options)
    finally:
        module.MLATokenToKVPool = stock  # type: ignore[attr-defined]


def _ours(chosen: type) -> type:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from .latent_pool import latent_pool_class
    from .pool import pool_class

    _check_hooks()
    make = {MHATokenToKVPool: pool_class, MLATokenToKVPool: latent_pool_class}.get(chosen)
    if make is None:
        raise ValueError(f"pm_ops: this platform brings a KV pool of its own, {chosen.__qualname__}; {ANY}")
    return make(chosen, _settings().layout)


def _configure(original: Any, configurator: Any, **options: Any) -> Any:
    """Refuse what cannot work, build the pools, and make sure that they are ours."""
    from sglang.srt.runtime_context import get_exec

    from .pool import MARK, pools_of

    settings = _settings()
    _check_hooks()
    refuse(configurator)
    result = original(configurator, **options)
    for pool in pools_of(result.token_to_kv_pool):
        if getattr(pool, MARK, None) != settings.layout:
            raise RuntimeError(
                f"pm_ops: SGLang built a {type(pool).__qualname__} for this model's KV cache, which pm_ops does not "
                "support: it replaces the MHATokenToKVPool of dense attention and of sliding windows and the "
                f"MLATokenToKVPool of latent attention alone; {ANY}"
            )
        logger.info("pm_ops: the KV cache is %s", pool.page_pool)
    if settings.fuse_rope:
        from .rope import add_pass

        add_pass(settings, pools_of(result.token_to_kv_pool), get_exec().graph.enable_torch_compile)
    return result


def _settings() -> Settings:
    settings = Settings.asked()
    if settings is None:
        raise RuntimeError(
            f"pm_ops: PM_OPS was set when the plugin was loaded, and is no more; {HOW} for every process"
        )
    return settings


def refuse(configurator: Any) -> None:
    """Raise ValueError for what the adapter cannot do, before memory is taken."""
    import torch
    from sglang.srt.runtime_context import (
        get_disagg,
        get_memory,
        get_observability,
        get_server_args,
        get_spec,
    )

    memory, spec, settings = get_memory(), get_spec(), _settings()
    device = str(configurator.device).partition(":")[0]
    if device == "cuda" and torch.version.hip:
        device = "cuda, by ROCm"
    if device not in ("cuda", "cpu"):
        raise ValueError(f"pm_ops: SGLang runs on {device}; cuda and cpu are supported: {ANY}")
    for flag, why in (
        ("enable_page_major_kv_layout", "pm_ops brings the layout itself: leave it out"),
        ("enable_unified_memory", "it brings a pool of its own: leave one of them out"),
        ("enable_hierarchical_cache", "its copies know one dense tensor a layer: leave it out"),
        ("enable_lmcache", "it reads one dense tensor a layer: leave it out"),
        ("enable_flexkv", "it reads one dense tensor a layer: leave it out"),
        ("radix_cache_backend", "a prefix cache from elsewhere may read one dense tensor a layer: leave it out"),
        ("enable_hisparse", "it brings a pool of its own: leave one of them out"),
    ):
        if getattr(memory, flag, False):
            raise ValueError(f"pm_ops: --{flag.replace('_', '-')} is not supported: {why}")
    if get_disagg().disaggregation_mode != "null":
        raise ValueError(
            "pm_ops: SGLang's disaggregation sends one region a layer, and a cache of pages is one region; leave "
            "--disaggregation-mode out"
        )
    if get_observability().kv_canary != "none":
        raise ValueError("pm_ops: --kv-canary is not supported: it watches one dense tensor a layer; leave it out")
    if configurator.post_capture_kv_active:
        raise ValueError("pm_ops: SGLANG_ENABLE_POST_CAPTURE_KV_SIZING backs one tensor a layer; unset it")
    readable: tuple[str, ...] = STRIDED
    if configurator.use_mla_backend:
        _refuse_latents(configurator)
        readable = STRIDED_LATENTS
    if settings.layout == "page_major" and configurator.page_size > 1:
        readable = (BACKEND,)
    backends = _backends()
    draft = spec.speculative_draft_attention_backend
    own = [draft] if draft is not None and configurator.is_draft_worker else list(backends.values())
    if configurator.use_mla_backend and BACKEND in own:
        from .latent_backend import refuse_latents

        refuse_latents(settings.impl, configurator.spec_algorithm)
    if draft is not None:
        backends["speculative_draft_attention_backend"] = draft
    if BACKEND in backends.values() and get_server_args().dcp_size > 1:
        raise ValueError(
            "pm_ops: its attention backend does not work with --dcp-size: it attends over a whole sequence; leave it "
            "out, or choose --attention-backend triton with layout token_major"
        )
    if BACKEND in (draft or backends["prefill_attention_backend"], draft or backends["decode_attention_backend"]):
        for flag in ("enable_multi_layer_eagle", "speculative_draft_window_size"):
            if getattr(spec, flag):
                raise ValueError(
                    f"pm_ops: its attention backend does not serve draft models with --{flag.replace('_', '-')}; leave "
                    "it out, or choose --speculative-draft-attention-backend triton with layout token_major"
                )
    for name, chosen in backends.items():
        if chosen not in readable:
            raise ValueError(
                f"pm_ops: {name} {chosen} cannot read pages of layout {settings.layout}; choose --attention-backend "
                f"{' or '.join(readable)}"
                + (", or layout token_major, which SGLang's own backends read" if readable == (BACKEND,) else "")
            )


def _refuse_latents(configurator: Any) -> None:
    """What is not supported with latent attention (MLA) alone."""
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.runtime_context import get_server_args

    from .latent_pool import DTYPES

    for holds, what, then in (
        (
            is_deepseek_dsa(configurator.model_config.hf_config),
            "with an indexer (DSA)",
            f"its keys have a pool of their own: {ANY}",
        ),
        (configurator.mambaish_config is not None, "beside state layers", ANY),
        (
            configurator.kv_cache_dtype not in DTYPES,
            f"with a cache of {configurator.kv_cache_dtype}",
            "choose --kv-cache-dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2",
        ),
        (get_server_args().dcp_size > 1, "split over ranks", "leave --dcp-size out"),
    ):
        if holds:
            raise ValueError(f"pm_ops: latent attention (MLA) {what} is not supported; {then}")
