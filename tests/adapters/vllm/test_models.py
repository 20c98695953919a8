"""Tiny models of every kind of layer, random weights: stock's tokens, and the same in every layout."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import psutil
import transformers
from vllm_engine import (
    SIZES,
    assert_depends_on_context,
    engine,
    generate,
    metric,
    pools,
    random_prompts,
    save_tiny,
    tiny_gemma3,
    tiny_llama,
    tokens,
)

PROMPTS = random_prompts(512, (5, 17, 31, 40, 64, 77, 100, 150))
LAYOUTS = ("page_major", "BLNHC", "BLHNC", "BHLNC")


def shared_caches() -> Any:
    """Gemma 4: heads of full attention are larger, and the last layers read the caches of those before."""
    changes = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 32}
    changes |= {"global_head_dim": 64, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16}
    sizes = {**SIZES, **changes, "vocab_size_per_layer_input": 512}
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**sizes))


def softcap() -> Any:
    """Gemma 2: logits capped, windows in every other layer."""
    changes = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "sliding_window": 32}
    changes |= {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**{**SIZES, **changes}))


def alibi() -> Any:
    """Bloom: slopes instead of rotations, as many KV heads as query heads."""
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=512, hidden_size=128, n_layer=4, n_head=4))


def sinks() -> Any:
    """gpt-oss: a sink a head, windows in every other layer, experts."""
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"layer_types": kinds, "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**{**SIZES, **changes, "intermediate_size": 128}))
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2)
    return model


def gated_delta_net() -> Any:
    """Qwen3-Next: three layers of recurrent state to one of attention."""
    linear = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1, 2]}
    sizes = {"linear_num_value_heads": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    config = transformers.Qwen3NextConfig(**{**SIZES, "head_dim": 64, **linear, **experts, **sizes})
    return transformers.Qwen3NextForCausalLM(config).to(torch.bfloat16)


def mamba2() -> Any:
    """Falcon-H1: recurrent state and attention in every layer."""
    states = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_chunk_size": 32}
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**SIZES, **states, pad_token_id=0))


def test_sliding_and_full_layers_give_the_same_tokens_in_every_layout(tmp_path: Path) -> None:
    folder = tiny_gemma3(tmp_path)
    with engine(folder, skip_tokenizer_init=True) as llm:
        assert_depends_on_context(llm, PROMPTS[3])
        stock = tokens(generate(llm, PROMPTS))
    for layout in LAYOUTS:
        with engine(folder, {"layout": layout}, skip_tokenizer_init=True) as llm:
            groups = pools(llm)
            assert [pool.layout.layers for pool in groups] == [(0, 3), (1, 4), (2, 5)]
            assert len({pool.buffer.data_ptr() for pool in groups}) == 1, "groups share one buffer of pages"
            assert tokens(generate(llm, PROMPTS)) == stock, layout
            assert tokens(generate(llm, PROMPTS)) == stock, f"{layout}, from the prefix cache"
    few = {"block_size": 16, "num_gpu_blocks_override": 50, "max_model_len": 256, "max_num_batched_tokens": 64}
    with engine(folder, True, skip_tokenizer_init=True, **few, disable_log_stats=False) as llm:
        assert tokens(generate(llm, PROMPTS)) == stock, "groups that take each other's blocks"
        assert metric(llm, "num_preemptions") > 0


def test_a_hybrid_of_state_and_attention_layers_gives_the_same_tokens_in_every_layout(tmp_path: Path) -> None:
    folder = save_tiny(gated_delta_net(), tmp_path)
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    with engine(folder, **options) as llm:
        assert_depends_on_context(llm, PROMPTS[3])
        stock = tokens(generate(llm, PROMPTS))
    for layout in LAYOUTS[:3]:
        with engine(folder, {"layout": layout}, **options) as llm:
            kinds = [pool.layout.kinds(pool.layout.layers[0]) for pool in pools(llm)]
            assert sorted(kinds) == [("conv", "ssm")] * 3 + [("key", "value")]
            assert tokens(generate(llm, PROMPTS)) == stock, layout
            assert tokens(generate(llm, PROMPTS)) == stock, f"{layout}, from the prefix cache"
    with engine(folder, {"hybrid_blocks": "small"}, **options, num_gpu_blocks_override=16) as llm:
        assert {pool.num_pages for pool in pools(llm)} == {16}
        assert tokens(generate(llm, PROMPTS)) == stock, "states in blocks that were keys, and the other way round"
    with (
        pytest.raises(ValueError, match="ask for layout page_major, BLNHC or BLHNC"),
        engine(folder, {"layout": "BHLNC"}, **options),
    ):
        pass
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    with (
        pytest.raises(ValueError, match="speculative decoding by or of models with state layers is not supported"),
        engine(folder, True, **options, speculative_config=drafts),
    ):
        pass


def test_mamba_2_beside_attention_gives_the_same_tokens(tmp_path: Path) -> None:
    """Without the prefix cache, with which vLLM's own CPU build ends at the first prompt."""
    folder = save_tiny(mamba2(), tmp_path)
    options = {"skip_tokenizer_init": True, "enable_prefix_caching": False}
    with engine(folder, **options) as llm:
        assert_depends_on_context(llm, PROMPTS[3])
        stock = tokens(generate(llm, PROMPTS))
    with engine(folder, True, **options, num_gpu_blocks_override=10, disable_log_stats=False) as llm:
        kinds = [pool.layout.kinds(pool.layout.layers[0]) for pool in pools(llm)]
        assert sorted(kinds) == [("conv", "ssm"), ("key", "value")]
        for _ in range(2):
            assert tokens(generate(llm, PROMPTS)) == stock, "states in blocks that were keys, and the other way round"
        assert metric(llm, "num_preemptions") > 0


def test_small_hybrid_blocks_find_shorter_prefixes_and_give_the_same_tokens(tmp_path: Path) -> None:
    folder = save_tiny(gated_delta_net(), tmp_path)
    options = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
    prompts = random_prompts(512, (300, 290, 200))
    found = {}
    for blocks in ("aligned", "small"):
        with engine(folder, {"hybrid_blocks": blocks}, **options) as llm:
            attention = next(pool for pool in pools(llm) if "key" in pool.layout.kinds(pool.layout.layers[0]))
            first, again = (generate(llm, prompts) for _ in range(2))
            assert tokens(first) == tokens(again)
            hits = [output.num_cached_tokens for output in again]
            found[blocks] = tokens(first), attention.page_size, attention.num_pages, hits
    (aligned, small) = found["aligned"], found["small"]
    assert aligned[0] == small[0]
    assert (aligned[1], small[1]) == (640, 128), "tokens of a block"
    assert small[2] > 1.2 * aligned[2], "blocks in the same memory"
    assert (aligned[3], small[3]) == ([0, 0, 0], [256, 256, 128]), "tokens found in the prefix cache"


@pytest.mark.parametrize("make", [softcap, alibi, sinks, shared_caches])
def test_other_kinds_of_attention(tmp_path: Path, make: Callable[[], Any]) -> None:
    folder = save_tiny(make(), tmp_path)
    with engine(folder, skip_tokenizer_init=True) as llm:
        assert_depends_on_context(llm, PROMPTS[3])
        stock = tokens(generate(llm, PROMPTS))
    with engine(folder, True, skip_tokenizer_init=True) as llm:
        assert tokens(generate(llm, PROMPTS)) == stock


def test_prompts_in_chunks_and_a_cache_that_is_too_small_for_all(tmp_path: Path) -> None:
    """Chunked prefill mixes long prompts with decodes; with few blocks the engine preempts and recomputes."""
    folder = tiny_llama(tmp_path)
    options = {"skip_tokenizer_init": True}
    with engine(folder, **options) as llm:
        assert_depends_on_context(llm, PROMPTS[3])
        stock = tokens(generate(llm, PROMPTS))
    small = {"block_size": 16, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 24, "max_model_len": 256}
    with engine(folder, True, **options, **small, disable_log_stats=False) as llm:
        assert pools(llm)[0].num_pages == 24
        assert tokens(generate(llm, PROMPTS)) == stock
        assert metric(llm, "num_preemptions") > 0


def first_layer(llm: Any) -> list[torch.Tensor]:
    """K and V of a prompt's first block, before any attention: what they are depends on nothing that was cached."""
    generate(llm, PROMPTS[7:])
    (pool,) = pools(llm)
    return [pool.view(0, kind)[1].clone() for kind in ("key", "value")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """A model, and its first layer in a cache of the model's dtype."""
    folder = tiny_llama(tmp_path_factory.mktemp("llama"))
    with engine(folder, True, skip_tokenizer_init=True) as llm:
        return folder, first_layer(llm)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2), ("bfloat16", torch.bfloat16)],
)
def test_a_cache_of_another_dtype_gives_the_same_tokens_in_every_layout(
    plain: tuple[Path, list[torch.Tensor]], dtype: str, stored: torch.dtype
) -> None:
    """With scales too, powers of two: the bytes are others, the values all but the same."""
    folder, rows = plain
    found = []
    for layout in ("page_major", "BLHNC"):
        with engine(folder, {"layout": layout}, skip_tokenizer_init=True, kv_cache_dtype=dtype) as llm:
            for kept, row in zip(first_layer(llm), rows, strict=True):
                assert kept.dtype == stored and torch.equal(kept.float(), row.to(stored).float())
            assert_depends_on_context(llm, PROMPTS[3])
            found.append(tokens(generate(llm, PROMPTS)))
            if stored == torch.bfloat16:
                continue
            for layer in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values():
                layer._k_scale_float, layer._v_scale_float = 0.5, 2.0
            assert llm.reset_prefix_cache()
            (pool,) = pools(llm)
            pool.zero(range(pool.num_pages))
            scaled = tokens(generate(llm, PROMPTS))
            assert [row[:8] for row in scaled] == [row[:8] for row in found[-1]]
            for kind, scale, row in zip(("key", "value"), (0.5, 2.0), rows, strict=True):
                written = pool.view(0, kind)[1:].float().flatten(1)
                expected = (row / scale).to(stored).float().flatten()
                assert bool((written == expected).all(1).any()), f"{kind}s are stored by their scale"
    assert found[0] == found[1]


def test_an_engine_that_was_shut_down_gives_its_cache_back_though_the_model_lives(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    with engine(folder, True, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 30) as llm:
        generate(llm, PROMPTS[:1])
        pools(llm)[0].buffer.fill_(1)  # every byte of it is really there
        model = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.model
        before = psutil.Process().memory_info().rss
    del llm
    gc.collect()
    assert model is not None and before - psutil.Process().memory_info().rss > 900 << 20


def test_two_workers_that_share_the_heads_give_the_same_tokens(tmp_path: Path) -> None:
    """Tensor parallelism: each worker is a process of its own and keeps pages of its own."""
    folder = tiny_llama(tmp_path)
    with engine(folder, skip_tokenizer_init=True) as llm:
        assert_depends_on_context(llm, PROMPTS[3])
        stock = tokens(generate(llm, PROMPTS))
    with engine(folder, True, skip_tokenizer_init=True, tensor_parallel_size=2) as llm:
        assert tokens(generate(llm, PROMPTS)) == stock
