"""The places of SGLang that the plugin needs. It goes by what is there, never by version numbers."""

from __future__ import annotations

import importlib
from typing import Any

MODULE = "sglang.srt.mem_cache.kv_cache_configurator"
CONFIGURATOR = f"{MODULE}.KVCacheConfigurator"
RESOLVE = "_resolve_kv_pool_class"
"""The method that chooses a pool's class, from SGLang 0.5.22 on."""
BUILD = ("_build_mha_kv_pool", "_build_hybrid_swa_kv_pool", "_build_hybrid_linear_kv_pool")
"""The methods that take it as ``mha_pool_class``, before."""
BUILD_LATENT = "_build_mla_kv_pool"
"""The method that makes one of its module's ``MLATokenToKVPool``, before."""
FUSED = "sglang.srt.models.utils.enable_fused_set_kv_buffer"
"""Whether a model's rotary kernel writes the cache itself, row by row: it knows dense rows only."""

DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
"""What makes the attention backends of draft models, by names of its own list."""

ROWS = "sglang.srt.speculative.eagle_worker_v2"
"""The module that captures graphs of a draft model's rows, where their attention is of a class that it lists."""

TREES = "sglang.srt.arg_groups.speculative_hook._handle_eagle_family"
"""What refuses, last of all, trees of drafts on pages for attention backends that are not on its own list."""

NEEDED = {
    "KVCacheConfigurator": f"{MODULE}:KVCacheConfigurator.configure",
    "MHATokenToKVPool": "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._create_buffers",
    "MLATokenToKVPool": "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool._create_buffers",
    "models with an indexer": "sglang.srt.configs.model_config:is_deepseek_dsa",
    "moves of a layout's own": "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool._move_kv_cache_impl",
    "buffer descriptions": "sglang.srt.mem_cache.memory_pool:KvBufferDesc",
    "places of writes": "sglang.srt.mem_cache.memory_pool:unwrap_write_loc",
    "pools of sliding windows": "sglang.srt.mem_cache.swa_memory_pool:SWAKVPool",
    "configuration of a process": "sglang.srt.runtime_context:get_exec",
    "fused writes of the rotary kernel": "sglang.srt.models.utils:enable_fused_set_kv_buffer",
    "hooks": "sglang.srt.plugins.hook_registry:HookRegistry.register",
    "registry of attention": "sglang.srt.layers.attention.attention_registry:register_attention_backend",
    "choice of attention": "sglang.srt.server_args:add_attention_backend_choices",
    "masks of drafts": "sglang.srt.layers.attention.verify_mask:VerifyMask",
    "arguments of drafts": "sglang.srt.arg_groups.speculative_hook:_handle_eagle_family",
    "attention of draft models": "sglang.srt.speculative.draft_utils:DraftBackendFactory.create_decode_backend",
    "metadata of attention": (
        "sglang.srt.layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata_out_graph"
    ),
}
"""What every release needs: what it is, and ``module:attributes``."""

VERSIONS = "0.5.17 or 0.5.23"
"""Releases that have them all, and are tested."""


def pool_hooks() -> list[str]:
    """The methods of KVCacheConfigurator that say which class a pool is made from; empty: this release has none."""
    configurator = getattr(importlib.import_module(MODULE), "KVCacheConfigurator", None)
    if hasattr(configurator, RESOLVE):
        return [RESOLVE]
    return [name for name in (*BUILD, BUILD_LATENT) if hasattr(configurator, name)]


def targets() -> list[str]:
    """Everything that the plugin wraps, as SGLang's HookRegistry names it."""
    drafts = (f"{DRAFTS}.{name}" for name in ("create_decode_backend", "create_draft_extend_backend"))
    return [*(f"{CONFIGURATOR}.{name}" for name in (*pool_hooks(), "configure")), FUSED, TREES, *drafts]


def missing() -> list[str]:
    """The hooks that the installed SGLang does not have, in words. Imports SGLang."""
    causes = {what: _absent(path) for what, path in NEEDED.items()}
    found = [f"{what} ({NEEDED[what].replace(':', '.')}{why})" for what, why in causes.items() if why is not None]
    if not found and not pool_hooks():
        found.append(f"choice of the pool ({CONFIGURATOR}.{RESOLVE} or .{BUILD[0]})")
    return found


def _absent(path: str) -> str | None:
    """None: it is there. Else why not, where its module could not even be imported."""
    module, _, attributes = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # whatever a package raises that was built for another environment
        return f": {type(error).__name__}: {error}"
    for name in attributes.split("."):
        if not hasattr(found, name):
            return ""
        found = getattr(found, name)
    return None
