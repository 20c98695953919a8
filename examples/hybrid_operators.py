"""A hybrid model on one pool by calling the operators, eagerly: what a model of your own does in its layers.

A small Bamba (Mamba-2 layers, and attention in some) with random weights answers a batch of prompts of unequal length:
once on transformers' own caches, once with every layer's data in one :class:`pm_ops.HybridPool`. Its attention layers
run through ``pm_ops.adapters.transformers``; its Mamba layers through the function below, which takes a mixer's weights
and calls the operators over states. Halfway, every sequence moves to other pages in one call, its states with its keys
and values, and the pages that it leaves are wiped. The tokens are the same. `examples/hybrid_state.py` compiles a model
as it is instead.
Run: `python examples/hybrid_operators.py`, with or without a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import BambaConfig, BambaForCausalLM
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

import pm_ops
from pm_ops.adapters.paged_batch import PagedBatch
from pm_ops.adapters.transformers import PageMajorLayer
from pm_ops.hybrid import smallest_page_size

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float32
ATTENTION = [2, 5]
CONFIG = BambaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6, attn_layer_indices=ATTENTION,
    num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16,
    mamba_n_groups=2, initializer_range=0.1, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
PROMPTS, TOKENS = (200, 9, 70), 24


def pool_for(config: BambaConfig, num_pages: int) -> pm_ops.HybridPool:
    """Attention pages are made long enough for a page of states."""
    mamba = [i for i in range(config.num_hidden_layers) if i not in ATTENTION]
    width = config.mamba_expand * config.hidden_size + 2 * config.mamba_n_groups * config.mamba_d_state
    states = {
        "conv": ((width, config.mamba_d_conv - 1), DTYPE),
        "ssm": ((config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state), torch.float32),
    }
    state = pm_ops.state_page(mamba, states, align=16)
    shape = len(ATTENTION), config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    one = pm_ops.page_major(*shape, 1, DTYPE)
    page_size = smallest_page_size(one.token_bytes, state.page_bytes)
    attention = pm_ops.page_major(*shape, page_size, DTYPE).numbered(ATTENTION)
    return pm_ops.HybridPool({"attention": attention, "state": state}, num_pages, DEVICE)


class StateLayer(LinearAttentionCacheLayerMixin):
    """What transformers asks a layer with recurrent states; the states themselves are in the pool."""

    is_compileable = False

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this cache's states are in pages; run the model with paged_mixer")

    update_conv_state = update_recurrent_state = lazy_initialization


class HybridCache(Cache):
    """Each sequence owns pages of keys and values, as many as it needs, and one page of states."""

    def __init__(self, pool: pm_ops.HybridPool, config: BambaConfig) -> None:
        self.pool, self.batch = pool, PagedBatch(pool["attention"])
        self.states: list[int] = []
        numbers = range(config.num_hidden_layers)
        super().__init__(layers=[PageMajorLayer(self.batch, i) if i in ATTENTION else StateLayer() for i in numbers])

    def state_indices(self, rows: int) -> Tensor:
        """Each sequence's page of states."""
        if not self.states:
            self.states = self.pool.allocator.alloc(rows)
        return torch.tensor(self.states, device=self.pool.whole.device)

    def move(self, row: int) -> int:
        """One sequence to other pages, in one call for all its layers; returns how many pages moved."""
        old = [*self.batch.rows[row].pages, self.states[row]]
        new = self.pool.allocator.alloc(len(old))
        self.pool.whole.copy(old, new)
        self.pool.whole.zero(old)
        self.pool.allocator.free(old)
        *self.batch.rows[row].pages, self.states[row] = new
        return len(new)


def paged_mixer(
    mixer: Any, hidden_states: Tensor, cache_params: HybridCache, attention_mask: Tensor | None = None, **_: Any
) -> Tensor:
    """A Mamba-2 mixer's forward pass. ``attention_mask``, 2-D, is False for padding, which has no state."""
    rows, length, _ = hidden_states.shape
    layer, number = cache_params.layers[mixer.layer_idx], mixer.layer_idx
    pool, pages = cache_params.pool["state"], cache_params.state_indices(rows)
    sizes = [mixer.intermediate_size, mixer.conv_dim, mixer.num_heads]
    gate, channels, dt = mixer.in_proj(hidden_states).split(sizes, dim=-1)
    filters = dict(bias=mixer.conv1d.bias, silu=True)
    weight = mixer.conv1d.weight.squeeze(1)
    options = dict(D=mixer.D, dt_bias=mixer.dt_bias, dt_softplus=True)
    A = -torch.exp(mixer.A_log.float())

    def split(channels: Tensor) -> list[Tensor]:
        inner, groups = mixer.intermediate_size, mixer.n_groups
        x, B, C = channels.split([inner, groups * mixer.ssm_state_size, groups * mixer.ssm_state_size], dim=-1)
        return [x.unflatten(-1, (mixer.num_heads, -1)), *(rows.unflatten(-1, (groups, -1)) for rows in (B, C))]

    if layer.has_previous_state[0] and length == 1:
        x, B, C = split(pm_ops.conv1d_update(pool, number, channels[:, 0], weight, pages, **filters))
        out = pm_ops.selective_state_update(pool, number, x, dt[:, 0], A, B, C, pages, **options)
    else:
        real = hidden_states.new_ones(rows, length).bool() if attention_mask is None else attention_mask.bool()
        tokens = real.flatten().nonzero()[:, 0]
        start = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0))
        known = torch.full((rows,), layer.has_previous_state[0], device=pages.device)
        new, dt = channels.flatten(0, 1)[tokens], dt.flatten(0, 1)[tokens]
        x, B, C = split(
            pm_ops.conv1d_prefill(pool, number, new, weight, start, pages, **filters, has_initial_state=known)
        )
        y = pm_ops.selective_scan_prefill(
            pool,
            number,
            x,
            dt,
            A,
            B,
            C,
            start,
            pages,
            **options,
            dt_limits=mixer.time_step_limit,
            has_initial_state=known,
        )
        out = y.new_zeros(rows * length, *y.shape[1:]).index_copy_(0, tokens, y)
    layer.has_previous_state[0] = True
    return mixer.out_proj(mixer.norm(out.reshape(rows, length, -1), gate).to(hidden_states.dtype))


def on_pages(model: BambaForCausalLM) -> None:
    """From now on the model's layers read and write pages."""
    model.set_attn_implementation("pm_ops")
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.mamba.forward = functools.partial(paged_mixer, layer.mamba)


def prompts() -> dict[str, Tensor]:
    """A batch, padded on the left."""
    mask = torch.zeros(len(PROMPTS), max(PROMPTS), dtype=torch.long)
    for row, length in zip(mask, PROMPTS, strict=True):
        row[-length:] = 1
    ids = torch.randint(2, CONFIG.vocab_size, mask.shape) * mask
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    model = BambaForCausalLM(CONFIG).to(DEVICE, DTYPE).eval()
    inputs = prompts()
    options: dict[str, Any] = dict(do_sample=False)
    expected = model.generate(**inputs, **options, max_new_tokens=TOKENS)

    on_pages(model)
    pool = pool_for(CONFIG, num_pages=16)
    print(pool)
    cache = HybridCache(pool, CONFIG)
    half = model.generate(**inputs, **options, max_new_tokens=TOKENS // 2, past_key_values=cache)
    moved = sum(cache.move(row) for row in range(len(PROMPTS)))
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, TOKENS // 2), value=1)
    got = model.generate(
        half, attention_mask=mask, **options, max_new_tokens=TOKENS - TOKENS // 2, past_key_values=cache
    )

    used = pool.whole.num_pages - pool.allocator.num_free
    print(f"{len(PROMPTS)} sequences own {used} pages of {pool.whole.page_stride} B, {len(PROMPTS)} of them of states")
    print(f"moved halfway: {moved} pages in {len(PROMPTS)} calls, keys, values and states together")
    print(f"the same {got[:, -TOKENS:].numel()} tokens as on transformers' own caches: {torch.equal(got, expected)}")
    if not torch.equal(got, expected):
        raise SystemExit("the tokens differ")


if __name__ == "__main__":
    main()
