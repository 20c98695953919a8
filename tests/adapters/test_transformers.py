"""model.generate on a PageMajorCache gives the stock model's tokens, and what it cannot do it refuses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pm_ops
from pm_ops.testing import fill_nan

transformers = pytest.importorskip("transformers")
NAME = "pm_ops"
PageMajorCache = pytest.importorskip("pm_ops.adapters.transformers").PageMajorCache

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough for the whole prefix to decide the next token
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes})).eval()


def gemma2_softcap() -> Any:
    config = transformers.Gemma2Config(
        **{**SIZES, "layer_types": ["full_attention"] * 3, "head_dim": 8, "attn_logit_softcapping": 2.0}
    )
    model = transformers.Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")  # stock SDPA leaves the softcap out
    return model


def gpt_oss_sinks() -> Any:
    config = transformers.GptOssConfig(
        **{
            **SIZES,
            "layer_types": ["full_attention"] * 3,
            "head_dim": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        }
    )
    model = transformers.GptOssForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "llama GQA": llama,
    "llama MHA": lambda: llama(num_key_value_heads=4),
    "llama MQA, head_dim 24": lambda: llama(num_key_value_heads=1, head_dim=24),
    "gpt-neox, partial rotary": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"})
    ).eval(),
    "qwen3, QK norm": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16)).eval(),
    "gemma2, softcap": gemma2_softcap,
    "gpt-oss, sinks": gpt_oss_sinks,
}


def ragged(lengths: tuple[int, ...] = (7, 1, 4, 11)) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the left."""
    width = max(lengths)
    mask = torch.tensor([[i >= width - n for i in range(width)] for n in lengths]).long()
    return {"input_ids": torch.randint(3, 97, mask.shape) * mask, "attention_mask": mask}


def poisoned(model: Any, num_pages: int = 64, page_size: int = 4) -> PageMajorCache:
    """A cache over a pool full of NaN: what is read must have been stored."""
    cache = PageMajorCache.for_model(model, num_pages, page_size)
    fill_nan(cache.pool.buffer)
    return cache


def on_pages(model: Any, inputs: dict[str, torch.Tensor], cache: PageMajorCache | None = None, **how: Any) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        return model.generate(**inputs, past_key_values=cache or poisoned(model), **how)
    finally:
        model.set_attn_implementation(before)


HOW = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_a_ragged_batch_equal_stock(name: str) -> None:
    model, inputs = MODELS[name](), ragged()
    stock = model.generate(**inputs, **HOW)
    pages = on_pages(model, inputs, **HOW)
    assert torch.equal(pages.sequences, stock.sequences)
    for got, want in zip(pages.logits, stock.logits, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    other = model.generate(**{**inputs, "input_ids": inputs["input_ids"].roll(1, 0)}, **HOW)
    assert not torch.equal(other.sequences[:, -12:], stock.sequences[:, -12:]), "the prompt decides the tokens"


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("num_beams", [2, 3])
def test_beams_equal_stock_and_free_what_they_leave(page_size: int, num_beams: int) -> None:
    model, inputs = llama(), ragged()
    how = {"num_beams": num_beams, "num_return_sequences": 2, "max_new_tokens": 14, "do_sample": False}
    cache = poisoned(model, 256, page_size)
    assert torch.equal(on_pages(model, inputs, cache, **how), model.generate(**inputs, **how))
    held = {page for row in cache.rows for page in row.pages}
    assert cache.pool.allocator.num_free == 256 - len(held)
    assert len(held) < sum(len(row.pages) for row in cache.rows), "beams share pages"
    cache.reset()
    assert cache.pool.allocator.num_free == 256


def test_sampling_with_the_same_seed_equals_stock() -> None:
    model, inputs = llama(), ragged()
    how = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
    torch.manual_seed(1)
    stock = model.generate(**inputs, **how)
    torch.manual_seed(1)
    assert torch.equal(on_pages(model, inputs, **how), stock)


def test_chunked_prefill_equals_stock_even_where_a_chunk_is_all_padding() -> None:
    model, inputs = llama(), ragged((11, 2, 5))
    how = {"max_new_tokens": 8, "do_sample": False}
    stock = model.generate(**inputs, **how)
    assert torch.equal(on_pages(model, inputs, prefill_chunk_size=4, **how), stock)


def test_prompt_lookup_decoding_crops_and_equals_stock() -> None:
    model = llama()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    how = {"max_new_tokens": 20, "do_sample": False}
    cache = poisoned(model)
    crops = []
    stock_crop = cache.crop
    cache.crop = lambda n: (crops.append(n), stock_crop(n))  # type: ignore[method-assign]
    assert torch.equal(
        on_pages(model, inputs, cache, prompt_lookup_num_tokens=4, **how), model.generate(**inputs, **how)
    )
    assert any(crops), "candidates were rejected"


def test_a_conversation_goes_on_with_the_same_cache() -> None:
    model, first = llama(), ragged((6, 3))
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    second = ragged((2, 4))
    outputs = []
    for run, cache in ((on_pages, poisoned(model)), (None, transformers.DynamicCache())):
        generate = run or (lambda m, i, c, **h: m.generate(**i, past_key_values=c, **h))
        turn = generate(model, first, cache, **how)
        mask = torch.cat((first["attention_mask"], torch.ones(2, 5, dtype=torch.long), second["attention_mask"]), 1)
        inputs = {"input_ids": torch.cat((turn, second["input_ids"]), 1), "attention_mask": mask}
        outputs.append(generate(model, inputs, cache, **how))
    assert torch.equal(*outputs)


def test_a_prompt_cache_is_reused_by_deepcopy_and_by_crop() -> None:
    model = llama()
    prompt = torch.randint(3, 97, (1, 9))
    model.set_attn_implementation(NAME)
    cache = poisoned(model)
    with torch.no_grad():
        model(prompt, past_key_values=cache)
        twin = copy.deepcopy(cache)
        tails = torch.randint(3, 97, (2, 1, 4))
        answers = [model(tail, past_key_values=c).logits for tail, c in zip(tails, (cache, twin), strict=True)]
        cache.crop(-4)
        again = model(tails[1], past_key_values=cache).logits
    model.set_attn_implementation("sdpa")
    for tail, got in zip(tails, answers, strict=True):
        want = model(torch.cat((prompt, tail), 1)).logits[:, 9:]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again, answers[1], rtol=0, atol=0)


def test_a_ready_made_mask_is_honoured() -> None:
    model, tokens = llama(), torch.randint(3, 97, (2, 8))
    seen = torch.rand(2, 1, 8, 8) < 0.5
    seen |= torch.eye(8, dtype=torch.bool)
    stock = model(tokens, attention_mask=seen).logits
    model.set_attn_implementation(NAME)
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        for mask in (seen, additive):
            got = model(tokens, attention_mask=mask, past_key_values=poisoned(model)).logits
            torch.testing.assert_close(got, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layout",
    [
        pm_ops.token_major(3, 2, 8, 4, torch.float32),
        pm_ops.vllm(3, 2, 8, 4, torch.float32, "BLNHC"),
        pm_ops.vllm(3, 2, 8, 4, torch.float32, "BHLNC"),
    ],
    ids=lambda layout: layout.name,
)
def test_every_layout_gives_the_same_logits_bit_for_bit(layout: pm_ops.PageLayout) -> None:
    model, inputs = llama(), ragged()
    caches = [poisoned(model), PageMajorCache(pm_ops.PagePool(layout, 64))]
    one, two = (on_pages(model, inputs, cache, **HOW) for cache in caches)
    assert torch.equal(one.sequences, two.sequences)
    assert all(torch.equal(a, b) for a, b in zip(one.logits, two.logits, strict=True))


def test_keys_and_values_read_as_a_dense_cache() -> None:
    model, inputs = llama(), ragged()
    stock = transformers.DynamicCache()
    model.generate(**inputs, past_key_values=stock, max_new_tokens=6, do_sample=False)
    cache = poisoned(model)
    on_pages(model, inputs, cache, max_new_tokens=6, do_sample=False)
    assert cache.get_seq_length() == stock.get_seq_length()
    real = torch.cat((inputs["attention_mask"], torch.ones(4, 5, dtype=torch.long)), 1).bool()[:, None, :, None]
    for ours, theirs in zip(cache.layers, stock.layers, strict=True):
        torch.testing.assert_close(ours.keys, torch.where(real, theirs.keys, 0.0), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, torch.where(real, theirs.values, 0.0), rtol=1e-4, atol=1e-4)


def test_padding_on_the_right_and_in_the_middle_equals_stock() -> None:
    model, inputs = llama(), ragged((7, 4, 6))
    mask = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1]])
    position = (mask.cumsum(1) - 1).clamp(min=0)
    how = {"attention_mask": mask, "position_ids": position}
    stock = model(inputs["input_ids"], **how).logits
    model.set_attn_implementation(NAME)
    cache = poisoned(model)
    with torch.no_grad():
        got = model(inputs["input_ids"], past_key_values=cache, **how).logits
    torch.testing.assert_close(got[mask.bool()], stock[mask.bool()], rtol=1e-4, atol=1e-4)
    assert [row.length for row in cache.rows] == [3, 4, 1]


def test_padding_takes_no_pages() -> None:
    model, inputs = llama(), ragged((12, 2))
    cache = poisoned(model)
    on_pages(model, inputs, cache, max_new_tokens=1, do_sample=False)
    assert [len(row.pages) for row in cache.rows] == [3, 1]


def test_stored_bf16_of_a_fp32_model_is_the_rounded_key() -> None:
    model, inputs = llama(), ragged((5, 5))
    exact, rounded = poisoned(model), PageMajorCache.for_model(model, 16, 4, dtype=torch.bfloat16)
    for cache in (exact, rounded):
        on_pages(model, inputs, cache, max_new_tokens=1, do_sample=False)
    assert torch.equal(rounded.layers[0].keys, exact.layers[0].keys.bfloat16())


def test_a_pool_of_int8_without_scales_is_refused() -> None:
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.int8), 4)
    with pytest.raises(ValueError, match="the key plane of layer 0 is int8; .* int8 in a layout with scales=True"):
        PageMajorCache(pool)


@pytest.mark.parametrize(
    ("dtype", "step"), [(torch.int8, 1 / 254), (torch.float8_e4m3fn, 1 / 16), (torch.float8_e5m2, 1 / 8)], ids=str
)
def test_an_8_bit_cache_keeps_a_scale_for_each_token_and_head(dtype: torch.dtype, step: float) -> None:
    """Keys are within half a step of each row's largest; the finer the step, the nearer are the logits."""
    model, inputs = llama(), ragged((5, 5))
    exact, small = poisoned(model), PageMajorCache.for_model(model, 64, 4, dtype=dtype)
    fill_nan(small.pool.buffer)
    want = on_pages(model, inputs, exact, **{**HOW, "max_new_tokens": 1})
    got = on_pages(model, inputs, small, **{**HOW, "max_new_tokens": 1})
    keys, stored = exact.layers[0].keys[:, :, :5], small.layers[0].keys[:, :, :5]
    size = keys.abs().amax(-1, keepdim=True)
    assert 0 < ((stored - keys).abs() / size).max() <= 1.001 * step
    error = (got.logits[0] - want.logits[0]).norm() / want.logits[0].norm()
    assert 0 < error < 8 * step
    assert small.pool.layout.token_bytes < exact.pool.layout.token_bytes / 2


@pytest.mark.gpu
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generate_on_the_gpu_equals_stock(num_beams: int) -> None:
    model, inputs = llama().cuda(), {name: x.cuda() for name, x in ragged().items()}
    how = {"max_new_tokens": 12, "do_sample": False, "num_beams": num_beams}
    stock = model.generate(**inputs, **how)
    assert torch.equal(on_pages(model, inputs, poisoned(model, 128, 16), **how), stock)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_the_cache_without_the_attention_function_is_refused() -> None:
    for implementation in ("sdpa", "eager"):
        model = llama()
        model.set_attn_implementation(implementation)
        with pytest.raises(RuntimeError, match=r"model\.set_attn_implementation\('pm_ops'\)"):
            model.generate(**ragged(), past_key_values=poisoned(model), max_new_tokens=2)


def test_the_attention_function_without_the_cache_is_refused() -> None:
    model = llama()
    model.set_attn_implementation(NAME)
    says = r"another cache or none.*; pass past_key_values=PageMajorCache\.for_model"
    for use_cache in (True, False):
        with pytest.raises(ValueError, match=says):
            model(torch.ones(1, 3, dtype=torch.long), use_cache=use_cache)
    dynamic, static = transformers.DynamicCache(), transformers.StaticCache(config=model.config, max_cache_len=8)
    for cache in (dynamic, static):
        with pytest.raises(ValueError, match=says):
            model.generate(**ragged((3, 3)), past_key_values=cache, max_new_tokens=2)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)  # a ready-made one: the mask function is not asked
    with pytest.raises(ValueError, match=says):
        model(torch.ones(1, 3, dtype=torch.long), attention_mask=mask, past_key_values=transformers.DynamicCache())


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 3, 3, dtype=torch.bool)], ids=["2-D mask", "4-D mask"])
def test_torch_compile_is_refused_and_nothing_is_stored(fullgraph: bool, mask: torch.Tensor | None) -> None:
    model = llama()
    model.set_attn_implementation(NAME)
    cache = poisoned(model)
    before = cache.pool.buffer.clone()
    torch._dynamo.reset()
    with (
        torch.no_grad(),
        pytest.raises(RuntimeError, match=r"compile it with a StaticCache: .*bind\(pool, static_cache"),
    ):
        torch.compile(model, backend="eager", fullgraph=fullgraph)(
            torch.ones(1, 3, dtype=torch.long), attention_mask=mask, past_key_values=cache
        )
    assert torch.equal(cache.pool.buffer, before) and cache.rows == []


def test_a_used_cache_says_how_to_start_anew() -> None:
    """The commonest mistake: a second prompt on the cache of the first. The message names the call that helps."""
    model = llama()
    how = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    cache = poisoned(model)
    on_pages(model, ragged((7, 4)), cache, **how)
    assert cache.get_seq_length() == 11
    for lengths in ((7, 4), (9, 9), (3, 2, 5), (5,)):
        with pytest.raises(ValueError, match=r"the cache holds 11 tokens already: cache\.reset\(\) starts anew"):
            on_pages(model, ragged(lengths), cache, **how)
    cache.reset()
    inputs = ragged((9, 9))
    assert torch.equal(on_pages(model, inputs, cache, **how), model.generate(**inputs, **how))


def test_gradients_are_refused() -> None:
    model = llama()
    model.set_attn_implementation(NAME)
    with pytest.raises(RuntimeError, match="no_grad"):
        model(torch.ones(1, 3, dtype=torch.long), past_key_values=poisoned(model))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: transformers.MistralConfig(**SIZES, sliding_window=8), "layers of type sliding_attention"),
        (lambda: transformers.Gemma2Config(**SIZES), "sliding_attention"),
        (lambda: transformers.T5Config(), "encoder-decoder"),
        (lambda: transformers.DeepseekV3Config(**SIZES), "latent attention"),
    ],
)
def test_models_that_pages_do_not_hold_are_refused(config: Callable[[], Any], says: str) -> None:
    class Model:
        dtype, device = torch.float32, torch.device("cpu")

    model = Model()
    model.config = config()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=says):
        PageMajorCache.for_model(model, 4)


def test_a_sliding_window_model_on_a_hand_made_pool_is_refused() -> None:
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=4)).eval()
    pool = pm_ops.PagePool(pm_ops.page_major(3, 2, 8, 4, torch.float32), 8)
    with pytest.raises(ValueError, match="sliding_attention"):
        on_pages(model, ragged(), PageMajorCache(pool), max_new_tokens=2)
    assert not pool.buffer.any()


def test_a_pool_of_another_shape_is_refused_before_a_byte_is_written() -> None:
    model = llama()
    pool = pm_ops.PagePool(pm_ops.page_major(3, 1, 8, 4, torch.float32), 8)
    with pytest.raises(ValueError, match="layer 0 holds"):
        on_pages(model, ragged(), PageMajorCache(pool), max_new_tokens=2)
    assert not pool.buffer.any()
    layout = pm_ops.page_major(2, 1, 8, 4, torch.float32)
    keys = pm_ops.PageLayout(4, layout.page_bytes, tuple(p for p in layout.planes if p.kind == "key"))
    with pytest.raises(ValueError, match="a key and a value plane"):
        PageMajorCache(pm_ops.PagePool(keys, 8))


def test_attention_weights_and_single_layers_are_refused() -> None:
    model = llama()
    with pytest.raises(ValueError, match="output_attentions"):
        on_pages(model, ragged(), max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    for call in (lambda layer: layer.reset(), lambda layer: layer.crop(-1), lambda layer: layer.reorder_cache([0])):
        with pytest.raises(RuntimeError, match="a page holds every layer"):
            call(poisoned(model).layers[0])
