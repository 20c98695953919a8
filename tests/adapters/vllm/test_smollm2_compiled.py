"""As test_smollm2.py, compiled by the engine as it does by default. A file of its own: each layout compiles anew."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm_engine import PROMPTS, engine, generate, smollm2, tokens

from pm_ops.adapters.vllm.rope import HOOK, FuseRope


@pytest.fixture(scope="module")
def stock() -> list[list[int]]:
    with engine(smollm2()) as llm:
        return tokens(generate(llm, PROMPTS))


@pytest.mark.parametrize("layout", ["page_major", "BLNHC", "BLHNC", "BHLNC"])
def test_tokens_of_the_compiled_model_equal_stock(stock: list[list[int]], layout: str) -> None:
    with engine(smollm2(), {"layout": layout}, block_size=16, enforce_eager=False) as llm:
        assert tokens(generate(llm, PROMPTS)) == stock


class Mine(InductorPass):
    """A pass of the user's own in the place where the adapter puts its."""

    def __init__(self) -> None:
        self.stores: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.stores.append(sum("unified_kv_cache_update" in str(n.target) for n in graph.nodes))


def test_fuse_rope_takes_every_layer_beside_the_users_own_pass_and_tokens_equal_stock(stock: list[list[int]]) -> None:
    hooks = {"inductor_compile_config": {HOOK: Mine()}}
    with (
        torch._inductor.config.patch(fx_graph_cache=False),  # the pass sees no code that comes out of a cache
        torch._functorch.config.patch(enable_autograd_cache=False),
        engine(smollm2(), {"fuse_rope": "strict"}, enforce_eager=False, compilation_config=hooks) as llm,
    ):
        assert tokens(generate(llm, PROMPTS)) == stock
        found = llm.llm_engine.vllm_config.compilation_config.inductor_compile_config[HOOK]
    assert isinstance(found, FuseRope) and isinstance(found.before, Mine) and found.before.stores == [30]
    report = found.report
    assert len(report.fused) == 30 and not report.unfused and not report.split
    assert "model.layers.7.self_attn.attn" in report.fused
    assert "NeoX pairs, 64 of 64 elements" in str(report) and "rotary_embedding" in str(report)  # vLLM's own line
