"""Speculative decoding: stock's tokens, and as many drafts accepted, which only right caches of both models give."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch
import transformers
from vllm_engine import PREFIXES, engine, generate, host_tier, metric, pools, tiny_gemma3, tokens

from pm_ops.adapters.vllm.layout import layer_numbers
from pm_ops.adapters.vllm.rope import HOOK

SMALL = {"block_size": 16, "num_gpu_blocks_override": 30, "max_model_len": 256, "max_num_batched_tokens": 64}
"""Chunks, and too few blocks for all prompts at a time."""


@pytest.fixture(scope="module")
def drafts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A draft model: the model with a little noise, so that some of its tokens are the model's."""
    draft, generator = transformers.AutoModelForCausalLM.from_pretrained(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in (weight for weight in draft.parameters() if weight.dim() > 1):
            weight += torch.randn(weight.shape, generator=generator) * weight.std() * 0.05
    folder = tmp_path_factory.mktemp("draft")
    draft.save_pretrained(folder)
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


def speculating(model: Path, pm_ops: Any, drafts: dict[str, Any], **options: Any) -> Any:
    defaults = {"skip_tokenizer_init": True, "disable_log_stats": False, "speculative_config": dict(drafts)}
    return engine(model, pm_ops, **{**defaults, **options})


@pytest.fixture(scope="module")
def accepted(model: Path, stock: list[list[int]], drafts: dict[str, Any]) -> int:
    """Of the drafts for ``PREFIXES`` in a stock engine, those that were the model's tokens."""
    with speculating(model, None, drafts) as llm:
        assert tokens(generate(llm, PREFIXES)) == stock
        accepted = metric(llm, "spec_decode_num_accepted_tokens")
        assert 50 < accepted < metric(llm, "spec_decode_num_draft_tokens") / 2
    return accepted


@pytest.mark.parametrize("layout", ["page_major", "BHLNC"])
def test_a_draft_models_layers_follow_the_models_own_in_every_page(
    model: Path, stock: list[list[int]], drafts: dict[str, Any], accepted: int, layout: str
) -> None:
    with speculating(model, {"layout": layout}, drafts) as llm:
        (pool,) = pools(llm)
        assert pool.layout.layers == tuple(range(8))
        assert tokens(generate(llm, PREFIXES)) == stock
        assert metric(llm, "spec_decode_num_accepted_tokens") == accepted
        assert tokens(generate(llm, PREFIXES)) == stock, "from the prefix cache"


def test_drafts_of_preempted_requests_and_of_chunks(
    model: Path, stock: list[list[int]], drafts: dict[str, Any], accepted: int
) -> None:
    with speculating(model, True, drafts, **SMALL) as llm:
        assert tokens(generate(llm, PREFIXES)) == stock
        assert metric(llm, "spec_decode_num_accepted_tokens") == accepted
        assert metric(llm, "num_preemptions") > 0


def test_a_draft_model_of_another_shape_shares_the_pages(model: Path, stock: list[list[int]], tmp_path: Path) -> None:
    """The model itself with two copies of each KV head, which is right about every token if its cache is."""
    one = transformers.AutoModelForCausalLM.from_pretrained(model)
    heads, dim = one.config.num_key_value_heads, one.config.hidden_size // one.config.num_attention_heads
    config = transformers.LlamaConfig(**{**one.config.to_dict(), "num_key_value_heads": 2 * heads})
    draft = transformers.LlamaForCausalLM(config)
    weights = one.state_dict()
    for name in (name for name in weights if "k_proj" in name or "v_proj" in name):
        weights[name] = weights[name].view(heads, dim, -1).repeat_interleave(2, 0).flatten(0, 1)
    draft.load_state_dict(weights)
    draft.save_pretrained(tmp_path)
    other = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    with speculating(model, True, other) as llm:
        (pool,) = pools(llm)
        shapes = [pool.layout.plane(layer, "key").shape for layer in pool.layout.layers]
        assert shapes == [(2, 32)] * 4 + [(4, 32)] * 4
        assert tokens(generate(llm, PREFIXES)) == stock
        assert metric(llm, "spec_decode_num_accepted_tokens") == metric(llm, "spec_decode_num_draft_tokens") > 0


def test_both_models_are_fused_when_they_are_compiled(
    model: Path, stock: list[list[int]], drafts: dict[str, Any], accepted: int
) -> None:
    with speculating(model, {"fuse_rope": "strict"}, drafts, enforce_eager=False) as llm:
        assert tokens(generate(llm, PREFIXES)) == stock
        assert metric(llm, "spec_decode_num_accepted_tokens") == accepted
        report = llm.llm_engine.vllm_config.compilation_config.inductor_compile_config[HOOK].report
        assert len(report.fused) == 8


def test_prefixes_come_back_from_host_memory_for_both_models(
    model: Path, stock: list[list[int]], drafts: dict[str, Any], accepted: int
) -> None:
    with speculating(model, True, drafts, block_size=16, kv_transfer_config=host_tier()) as llm:
        assert tokens(generate(llm, PREFIXES)) == stock
        assert metric(llm, "spec_decode_num_accepted_tokens") == accepted
        assert llm.reset_prefix_cache()
        (pool,) = pools(llm)
        pool.pages.view(torch.float32).normal_()  # finite, as vLLM's drafts have keys in view that are not written yet
        assert tokens(generate(llm, PREFIXES)) == stock
        assert metric(llm, "external_prefix_cache_hits") > 300
        assert metric(llm, "spec_decode_num_accepted_tokens") == 2 * accepted


def test_drafts_from_the_prompt_in_windows_and_full_attention(drafts: dict[str, Any], tmp_path: Path) -> None:
    """In a process of its own: this proposer imports numba, beside which vLLM's CPU build starts no other engine."""
    folder = tiny_gemma3(tmp_path)
    with engine(folder, skip_tokenizer_init=True) as llm:
        prompts = [prompt + more for prompt, more in zip(PREFIXES, tokens(generate(llm, PREFIXES)), strict=True)]
        stock = tokens(generate(llm, prompts))
    with (
        pytest.raises(RuntimeError, match="draft models are supported where all layers make one cache group"),
        speculating(folder, True, drafts),
    ):
        pass
    code = """
import json, sys
from pathlib import Path

sys.path.insert(0, "tests")
from vllm_engine import engine, generate, metric, tokens

folder, prompts = json.load(sys.stdin)
drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
options = {"skip_tokenizer_init": True, "disable_log_stats": False, "speculative_config": drafts}
with engine(Path(folder), True, **options) as llm:
    found = tokens(generate(llm, prompts))
    accepted = metric(llm, "spec_decode_num_accepted_tokens")
print(json.dumps([found, accepted]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps([str(folder), prompts]),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found, accepted = json.loads(done.stdout.splitlines()[-1])
    assert found == stock and accepted > 50


def test_numbers_that_are_taken_follow_the_others() -> None:
    def attention(*layers: str) -> list[str]:
        return [f"{layer}.self_attn.attn" for layer in layers]

    own = attention("model.layers.0", "model.layers.1", "model.layers.2")
    eagle, draft = attention("model.layers.3"), attention("draft_model.model.layers.0", "draft_model.model.layers.1")
    assert list(layer_numbers(own + eagle).values()) == [0, 1, 2, 3]
    assert list(layer_numbers(own + draft).values()) == [0, 1, 2, 3, 4]
    mixed = ["model.layers.0.mamba", "model.layers.0.self_attn.attn", "mtp.layers.0.self_attn.attn"]
    assert list(layer_numbers(mixed).values()) == [0, 0, 1]
