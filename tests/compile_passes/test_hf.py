"""transformers' own Llama with its own StaticCache, compiled: nothing in it knows of pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind, page_major_backend

transformers = pytest.importorskip("transformers")

LAYERS, KV_HEADS, HEAD_DIM, MAX_LEN, PAGE = 2, 2, 8, 30, 4


def make_model(dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    torch.manual_seed(0)
    options = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 64,
        "attn_implementation": "sdpa",
        **config,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).to(dtype).eval()


def make_cache(model: Any, batch: int) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=MAX_LEN)
    cache.early_initialization(batch, KV_HEADS, HEAD_DIM, model.dtype, torch.device("cpu"))
    return cache


def make_pool(dtype: torch.dtype, batch: int) -> PagePool:
    pool = PagePool(page_major(LAYERS, KV_HEADS, HEAD_DIM, PAGE, dtype), batch * -(-MAX_LEN // PAGE) + 3)
    pool.buffer.fill_(0xFF)
    return pool


def greedy(model: Any, cache: Any, prompt: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill, then one token at a time; the ids and the last logits."""
    ids, logits = prompt, torch.empty(0)
    step = prompt
    with torch.no_grad():
        for _ in range(tokens):
            logits = model(step, past_key_values=cache, use_cache=True).logits[:, -1]
            step = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, step], 1)
    return ids, logits


@pytest.mark.parametrize("batch", [1, 2])
def test_llama_with_a_static_cache_generates_what_stock_generates(batch: int) -> None:
    model, prompt = make_model(), torch.randint(0, 96, (batch, 7))
    stock = make_cache(model, batch)
    want, want_logits = greedy(model, stock, prompt, 8)
    cache, pool = make_cache(model, batch), make_pool(torch.float32, batch)
    binding = bind(pool, cache)
    assert binding.cache_bytes() == 0
    compiled = torch.compile(model, backend=page_major_backend(binding, inner="eager"), fullgraph=True)
    got, got_logits = greedy(compiled, cache, prompt, 8)
    assert torch.equal(got, want)
    torch.testing.assert_close(got_logits, want_logits, rtol=1e-5, atol=1e-5)
    report = binding.report()
    assert (report.writes_rewritten, report.reads_rewritten, report.materialized) == (2 * LAYERS, LAYERS, 0)
    assert "cache_utils.py" in str(report)
    cache.reset()  # zeroes the planes, and the model starts anew
    assert torch.equal(greedy(compiled, cache, prompt, 8)[0], want)
    binding.release()
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)


def test_llama_through_inductor_has_no_clone_of_the_pool() -> None:
    from torch._dynamo.utils import ReinplaceCounters
    from torch._inductor.utils import run_and_get_code

    model, prompt = make_model(), torch.randint(0, 96, (1, 7))
    want, _ = greedy(model, make_cache(model, 1), prompt, 6)
    cache, pool = make_cache(model, 1), make_pool(torch.float32, 1)
    binding = bind(pool, cache)
    compiled = torch.compile(model, backend=page_major_backend(binding), fullgraph=True)
    ReinplaceCounters.clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        (got, _), code = run_and_get_code(greedy, compiled, cache, prompt, 6)
    assert torch.equal(got, want)
    assert ReinplaceCounters.get_total_missed() == 0
    assert len(code) == 2  # prefill and decode
    for source in code:
        assert source.count("torch.ops.pm_ops.store_kv.default(arg") == LAYERS
        assert source.count("torch.ops.pm_ops.attention.default(arg") == LAYERS
        assert f"empty_strided_cpu(({pool.buffer.numel()}," not in source


def test_eager_attention_is_refused_naming_transformers_line_and_materialized_on_request() -> None:
    model, prompt = make_model(attn_implementation="eager"), torch.randint(0, 96, (1, 7))
    want, _ = greedy(model, make_cache(model, 1), prompt, 4)
    cache = make_cache(model, 1)
    binding = bind(make_pool(torch.float32, 1), cache)
    with pytest.raises(Exception, match=r"RewriteError.*[\s\S]*modeling_llama\.py"):
        greedy(torch.compile(model, backend=page_major_backend(binding, inner="eager")), cache, prompt, 1)
    cache.layers[0].cumulative_length.zero_()
    backend = page_major_backend(binding, inner="eager", on_unsupported_read="materialize")
    torch._dynamo.reset()
    got, _ = greedy(torch.compile(model, backend=backend), cache, prompt, 4)
    assert torch.equal(got, want)
    assert binding.report().materialized == 2 * LAYERS


def test_generate_with_a_bound_static_cache_gives_stocks_tokens() -> None:
    model, prompt = make_model(), torch.randint(3, 96, (1, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(prompt, past_key_values=make_cache(model, 1), disable_compile=True, **options)
    cache = make_cache(model, 1)
    binding = bind(make_pool(torch.float32, 1), cache)
    model.forward = torch.compile(model.forward, backend=page_major_backend(binding, inner="eager"))
    got = model.generate(prompt, past_key_values=cache, disable_compile=True, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["lazy", "sliding", "dynamic"])
def test_other_caches_are_refused(kind: str) -> None:
    model = make_model()
    if kind == "lazy":
        cache, message = transformers.StaticCache(config=model.config, max_cache_len=MAX_LEN), "early_initialization"
    elif kind == "sliding":
        config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)
        cache, message = transformers.StaticCache(config=config, max_cache_len=MAX_LEN), "sliding-window"
    else:
        cache, message = transformers.DynamicCache(config=model.config), "static layers"
    with pytest.raises(ValueError, match=message):
        bind(make_pool(torch.float32, 1), cache)
