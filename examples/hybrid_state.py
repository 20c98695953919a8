"""A hybrid model, compiled as it is, on one pool: keys, values and recurrent states in the pages of one buffer.

A small Qwen3-Next (8 layers of gated delta rule, 2 of attention) with random weights goes on from two prompts: once on
transformers' own StaticCache, once with all that the cache holds bound to a :class:`pm_ops.HybridPool`. Halfway, one
call moves a sequence to other pages, its states with its keys and values, and its old pages are wiped. The tokens are
the same. Then one call copies that sequence over the other one, which from there on says the same.
Run: `python examples/hybrid_state.py`, with or without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM, StaticCache

import pm_ops
from pm_ops.compile_passes import bind, page_major_backend
from pm_ops.hybrid import smallest_page_size

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = Qwen3NextConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=10, layer_types=None,
    full_attention_interval=5, num_attention_heads=4, num_key_value_heads=2, head_dim=64, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, mlp_only_layers=list(range(10)),
    initializer_range=0.3, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
BATCH, PROMPT, TOKENS = 2, 40, 24


def pool_for(config: Qwen3NextConfig, num_pages: int) -> pm_ops.HybridPool:
    """Attention pages are made long enough for a page of states; the layers keep their numbers."""
    layers = {t: [i for i, own in enumerate(config.layer_types) if own == t] for t in set(config.layer_types)}
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * key + heads * value
    states = {
        "conv": ((channels, config.linear_conv_kernel_dim), torch.float32),
        "ssm": ((heads, key, value), torch.float32),
    }
    state = pm_ops.state_page(layers["linear_attention"], states, align=16)
    shape = len(layers["full_attention"]), config.num_key_value_heads, config.head_dim
    page_size = smallest_page_size(pm_ops.page_major(*shape, 1, torch.float32).token_bytes, state.page_bytes)
    attention = pm_ops.page_major(*shape, page_size, torch.float32).numbered(layers["full_attention"])
    return pm_ops.HybridPool({"attention": attention, "state": state}, num_pages, DEVICE)


def new_cache(config: Qwen3NextConfig) -> StaticCache:
    """transformers' own, which has not seen a token."""
    cache = StaticCache(config=config, max_cache_len=PROMPT + TOKENS)
    cache.early_initialization(BATCH, config.num_key_value_heads, config.head_dim, torch.float32, DEVICE)
    return cache


def go_on(model: Any, cache: StaticCache, step: Tensor, tokens: int) -> Tensor:
    """The next tokens, the best ones, ``[batch, tokens]``."""
    said, step = [], step.contiguous()  # a step's strides are guarded on
    for _ in range(tokens):
        step = model(step, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        said.append(step)
    return torch.cat(said, 1)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(CONFIG).to(DEVICE).eval()
    prompts = torch.randint(1, CONFIG.vocab_size, (BATCH, PROMPT), device=DEVICE)
    expected = go_on(model, new_cache(CONFIG), prompts, TOKENS)

    pool, cache = pool_for(CONFIG, num_pages=12), new_cache(CONFIG)
    print(pool)
    binding = bind(pool, cache)
    # As is right for one long step, and on the CPU, where the operators are plain torch: rewritten, not made faster.
    prefill = torch.compile(model, backend=page_major_backend(binding, "eager"))
    decode = torch.compile(model, backend=page_major_backend(binding)) if DEVICE.type == "cuda" else prefill

    first = go_on(prefill, cache, prompts, 1)
    half = go_on(decode, cache, first, TOKENS // 2)
    old = binding.page_table[0].tolist()
    moved = binding.move(0)
    pool.whole.zero(old)  # nobody has these now
    rest = go_on(decode, cache, half[:, -1:], TOKENS - TOKENS // 2 - 5)
    got = torch.cat([first, half, rest], 1)
    print(binding.report())
    print(f"moved halfway in one call: {len(moved)} pages, of keys, of values and of states")
    same = torch.equal(got, expected[:, : got.shape[1]])
    print(f"the same {got.numel()} tokens as on transformers' own cache: {same}")

    pool.whole.copy(binding.page_table[0], binding.page_table[1])  # the other sequence is now this one
    fork = go_on(decode, cache, got[:1, -1:].expand(BATCH, 1), 4)
    forked = torch.equal(fork[0], fork[1]) and torch.equal(fork[0], expected[0, got.shape[1] :])
    print(f"copied in one call, the other sequence goes on as this one: {forked}")
    if not (same and forked):
        raise SystemExit("the tokens differ")


if __name__ == "__main__":
    main()
