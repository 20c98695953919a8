"""transformers' own models with fuse_rope=True: one rope_store_kv a layer, logits and pages bit-equal in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind, page_major_backend

transformers = pytest.importorskip("transformers")

LAYERS, HEAD_DIM, MAX_LEN, PAGE, BATCH = 2, 8, 16, 4, 2
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "attn_implementation": "sdpa",
}
GROUPED = {"num_key_value_heads": 2, "head_dim": HEAD_DIM}
MODELS = {
    "Llama": ("LlamaConfig", GROUPED, "NeoX pairs, 8 of 8 elements"),
    "Qwen3": ("Qwen3Config", GROUPED, "NeoX pairs, 8 of 8 elements, QK-norm"),
    "Gemma3": (
        "Gemma3TextConfig",
        {**GROUPED, "layer_types": ["full_attention"] * LAYERS},
        "NeoX pairs, 8 of 8 elements, QK-norm",
    ),
    "Phi": ("PhiConfig", {"partial_rotary_factor": 0.5}, "NeoX pairs, 4 of 8 elements"),
    "GPTNeoX": ("GPTNeoXConfig", {"rotary_pct": 0.5}, "NeoX pairs, 4 of 8 elements"),
}


def run(name: str, fuse_rope: bool) -> tuple[list[torch.Tensor], PagePool, Any, Any]:
    """Prefill and two decode steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config_name, options, _ = MODELS[name]
    config = getattr(transformers, config_name)(**SIZES, **options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    cache = transformers.StaticCache(config=config, max_cache_len=MAX_LEN)
    cache.early_initialization(BATCH, heads, HEAD_DIM, torch.float32, torch.device("cpu"))
    pool = PagePool(page_major(LAYERS, heads, HEAD_DIM, PAGE, torch.float32), BATCH * MAX_LEN // PAGE + 1)
    pool.buffer.fill_(0xFF)
    binding = bind(pool, cache)
    backend = page_major_backend(binding, inner="eager", fuse_rope=fuse_rope)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    step, logits = torch.randint(96, (BATCH, 5)), []
    with torch.no_grad():
        for _ in range(3):
            logits.append(compiled(step, past_key_values=cache).logits)
            step = logits[-1][:, -1:].argmax(-1)
    return logits, pool, backend, binding.report()


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_fused_and_nothing_changes(name: str) -> None:
    (expected, before, _, _), (got, after, backend, report) = run(name, False), run(name, True)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(after.buffer, before.buffer)
    for graph in backend.graphs:  # of the prefill and of a decode step
        assert graph.count("rope_store_kv.default(") == LAYERS and "ops.store_kv.default(" not in graph
        if name == "Llama":  # the constant lengths too are one launch a step, not one a layer
            assert graph.count("aten.full.default(") == 1
    assert report.fused == LAYERS and not report.unfused
    rotations = [e for e in report.entries if e.action == "rotate"]
    assert {e.became for e in rotations} == {f"rope_store_kv, {MODELS[name][2]}"}
    assert all("modeling_" in e.line for e in rotations)
