"""Small hybrid models of transformers with random weights, their caches, and pools that take all that a cache holds."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import pm_ops
from pm_ops.hybrid import smallest_page_size
from pm_ops.testing import fill_random

BATCH, MAX_LEN = 2, 40
STATES, ATTENTION = "linear_attention", "full_attention"


def in_torch(modeling: Any) -> None:
    """Let a model's functions be those written in torch: kernels of other packages would write states in no graph."""
    for name, function in vars(modeling).copy().items():
        if inspect.isfunction(function) and function.__module__ == modeling.__name__:
            setattr(modeling, name, inspect.unwrap(function))


def qwen3_next(transformers: Any, types: Sequence[str]) -> Any:
    """Gated delta rule and attention. Weights are large enough for tokens to depend on all tokens before."""
    in_torch(transformers.models.qwen3_next.modeling_qwen3_next)
    config = transformers.Qwen3NextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, head_dim=16, num_attention_heads=2, num_key_value_heads=1,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        num_hidden_layers=len(types), layer_types=list(types), mlp_only_layers=list(range(len(types))),
        initializer_range=0.3, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config).eval()


def bamba(transformers: Any, types: Sequence[str]) -> Any:
    """Mamba-2 and attention."""
    in_torch(transformers.models.bamba.modeling_bamba)
    config = transformers.BambaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=len(types), num_attention_heads=2,
        attn_layer_indices=[i for i, t in enumerate(types) if t == ATTENTION], num_key_value_heads=1, mamba_n_heads=8,
        mamba_d_head=8, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=16, initializer_range=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return transformers.BambaForCausalLM(config).eval()


def falcon_h1(transformers: Any, layers: int) -> Any:
    """Mamba-2 and attention side by side in every layer."""
    in_torch(transformers.models.falcon_h1.modeling_falcon_h1)
    config = transformers.FalconH1Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8,
        mamba_n_groups=2, mamba_chunk_size=16, initializer_range=0.3, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.FalconH1ForCausalLM(config).eval()


FAMILIES = {"qwen3_next": qwen3_next, "bamba": bamba}


def make_cache(transformers: Any, model: Any) -> Any:
    """A StaticCache that has seen no token; its states are not made yet."""
    config, parameter = model.config, next(model.parameters())
    cache = transformers.StaticCache(config=config, max_cache_len=MAX_LEN)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(BATCH, config.num_key_value_heads, head_dim, parameter.dtype, parameter.device)
    return cache


def state_layout(like: Any) -> pm_ops.PageLayout:
    """A page of the states that a cache holds after its first tokens, whatever their shapes are."""
    layers = [i for i, layer in enumerate(like.layers) if hasattr(layer, "conv_states")]
    kept = like.layers[layers[0]]
    states = {"conv": kept.conv_states[0], "ssm": kept.recurrent_states[0]}
    return pm_ops.state_page(layers, {kind: (tuple(s.shape[1:]), s.dtype) for kind, s in states.items()}, align=16)


def make_pool(like: Any, num_pages: int) -> pm_ops.HybridPool:
    """A pool of random bytes for a cache like this one, that has seen tokens. Its free pages are in no order."""
    state, layers = state_layout(like), [i for i, layer in enumerate(like.layers) if hasattr(layer, "keys")]
    keys = like.layers[layers[0]].keys
    shape = (len(layers), keys.shape[1], keys.shape[3])
    page_size = smallest_page_size(pm_ops.page_major(*shape, 1, keys.dtype).token_bytes, state.page_bytes, multiple=8)
    attention = pm_ops.page_major(*shape, min(page_size, 16), keys.dtype).numbered(layers)
    pool = pm_ops.HybridPool({"attention": attention, "state": state}, num_pages, keys.device)
    fill_random(pool.whole.buffer)
    taken = pool.allocator.alloc(num_pages)
    pool.allocator.free([*taken[1::2], *taken[::2]])
    return pool


def greedy(model: Any, cache: Any, step: Tensor, tokens: int) -> Tensor:
    """The next tokens, ``[batch, tokens]``."""
    said, step = [], step.contiguous()
    with torch.no_grad():
        for _ in range(tokens):
            step = model(step, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            said.append(step)
    return torch.cat(said, 1)
