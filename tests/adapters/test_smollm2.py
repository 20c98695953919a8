"""SmolLM2-135M-Instruct in fp32: on pages it says what it says on stock caches."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pm_ops
from pm_ops.compile_passes import bind, page_major_backend
from pm_ops.testing import fill_nan

transformers = pytest.importorskip("transformers")
PageMajorCache = pytest.importorskip("pm_ops.adapters.transformers").PageMajorCache

PROMPTS = (
    "Why is the sky blue?",
    "Hi",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain to a child, step by step, how a hash table works.",
)
TEXT = Path(__file__).parents[2] / "LICENSE"
CHUNK, TOKENS = 250, 1000


@pytest.fixture(scope="module")
def inputs(smollm2: Any) -> Any:
    _, tokenizer = smollm2
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert len(set(batch["attention_mask"].sum(1).tolist())) == 4, "four lengths"
    return batch


@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_for_four_ragged_prompts_equals_stock(smollm2: Any, inputs: Any, num_beams: int) -> None:
    model, _ = smollm2
    how = {"max_new_tokens": 24 if num_beams == 1 else 12, "num_beams": num_beams, "do_sample": False}
    stock = model.generate(**inputs, **how)
    cache = PageMajorCache.for_model(model, num_pages=128)
    fill_nan(cache.pool.buffer)
    model.set_attn_implementation("pm_ops")
    try:
        paged = model.generate(**inputs, past_key_values=cache, **how)
    finally:
        model.set_attn_implementation("sdpa")
    assert torch.equal(paged, stock)
    cache.reset()
    assert cache.pool.allocator.num_free == 128


@torch.no_grad()
def read(model: Callable[..., Any], tokens: Tensor, cache: Any) -> Tensor:
    """The logits of every token, read in chunks, so that all but the first attend over what earlier ones stored."""
    return torch.cat([model(part, past_key_values=cache).logits[0] for part in tokens.split(CHUNK, 1)])


@pytest.fixture(scope="module")
def text(smollm2: Any) -> tuple[Tensor, Tensor]:
    """1000 tokens of a fixed text, and the stock model's logits."""
    model, tokenizer = smollm2
    tokens = tokenizer(TEXT.read_text(), return_tensors="pt")["input_ids"][:, :TOKENS]
    assert tokens.shape == (1, TOKENS)
    return tokens, read(model, tokens, transformers.DynamicCache())


def assert_same_perplexity(
    name: str, tokens: Tensor, logits: Tensor, stock: Tensor, report: Callable[..., None]
) -> None:
    losses = [torch.nn.functional.cross_entropy(x[:-1].double(), tokens[0, 1:]).item() for x in (logits, stock)]
    perplexity, expected = map(math.exp, losses)
    error = float((logits - stock).abs().max())
    report(f"{name}_perplexity", perplexity)
    report(f"{name}_largest_logit_error", error)
    print(f"\n{name}: perplexity {perplexity:.6f}, stock {expected:.6f}; largest logit error {error:.2e}")
    assert perplexity == pytest.approx(expected, rel=1e-5)
    assert 1 < expected < 20, "the text is one that the model can read"
    torch.testing.assert_close(logits, stock, rtol=1e-3, atol=1e-3)


def test_perplexity_on_a_page_major_cache_equals_stock(
    smollm2: Any, text: tuple[Tensor, Tensor], record_property: Callable[..., None]
) -> None:
    model, (tokens, stock) = smollm2[0], text
    cache = PageMajorCache.for_model(model, num_pages=-(-TOKENS // 16))
    fill_nan(cache.pool.buffer)
    model.set_attn_implementation("pm_ops")
    try:
        logits = read(model, tokens, cache)
    finally:
        model.set_attn_implementation("sdpa")
    assert_same_perplexity("PageMajorCache", tokens, logits, stock, record_property)


def test_perplexity_of_the_compiled_static_cache_on_pages_equals_stock(
    smollm2: Any, text: tuple[Tensor, Tensor], record_property: Callable[..., None]
) -> None:
    model, (tokens, stock) = smollm2[0], text
    config = model.config
    heads, dim, length = config.num_key_value_heads, config.head_dim, 1008
    cache = transformers.StaticCache(config=config, max_cache_len=length)
    cache.early_initialization(1, heads, dim, torch.float32, torch.device("cpu"))
    layout = pm_ops.page_major(config.num_hidden_layers, heads, dim, 16, torch.float32)
    binding = bind(pm_ops.PagePool(layout, length // 16), cache)
    compiled = torch.compile(model, backend=page_major_backend(binding, "eager"))
    logits = read(compiled, tokens, cache)
    report = binding.report()
    assert (report.writes_rewritten, report.reads_rewritten, report.materialized) == (60, 30, 0)
    assert_same_perplexity("StaticCache_on_pages", tokens, logits, stock, record_property)
