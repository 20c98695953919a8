"""fuse_rope in the engine: one launch a layer in place of rotation, norm and cache write, and the tokens of stock.

More in test_smollm2_compiled.py, which has a real model compiled anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch
import transformers
from torch._inductor.custom_graph_pass import CustomGraphPass
from vllm import EngineArgs
from vllm_engine import assert_depends_on_context, engine, generate, random_prompts, save_tiny, tiny_qwen3, tokens

from pm_ops.adapters.vllm import hooks
from pm_ops.adapters.vllm.plugin import register
from pm_ops.adapters.vllm.rope import HOOK, FuseRope
from pm_ops.compile_passes.engine_ops import NORM_OPS, ROTARY_OPS

RANDOM = random_prompts(512, (5, 17, 64, 100))


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    """The pass sees what is compiled, not what comes out of a cache; the C++ may."""
    graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"), layers=3)


def fusion(llm: Any) -> FuseRope:
    found = llm.llm_engine.vllm_config.compilation_config.inductor_compile_config[HOOK]
    assert isinstance(found, FuseRope)
    return found


def test_qk_norm_and_the_rotary_operator_go_into_the_store(qwen3: Path) -> None:
    with engine(qwen3, skip_tokenizer_init=True) as llm:
        stock = tokens(generate(llm, RANDOM))
        assert_depends_on_context(llm, RANDOM[1])
    options = {"enforce_eager": False, "skip_tokenizer_init": True}
    operator = {"custom_ops": ["+rotary_embedding"]}
    with engine(qwen3, {"fuse_rope": True}, compilation_config=operator, **options) as llm:
        assert tokens(generate(llm, RANDOM)) == stock
        report = fusion(llm).report
        assert len(report.fused) == 3 and not report.unfused
        assert "QK-norm" in str(report) and "torch.ops._C.rotary_embedding" in str(report)


def test_strict_stops_at_a_model_whose_keys_are_not_rotated(tmp_path: Path) -> None:
    """GPT-2: its positions are embedded."""
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=512, n_embd=128, n_layer=2, n_head=4))
    folder = save_tiny(model, tmp_path)
    with (
        pytest.raises(Exception, match=r"(?s)0 layers of this graph are fused.*no rotary embedding.*strict: without"),
        engine(folder, {"fuse_rope": "strict"}, enforce_eager=False, skip_tokenizer_init=True),
    ):
        pass


def configure(model: Path, pm_ops: Any, **options: Any) -> Any:
    register()
    args = EngineArgs(
        str(model), dtype="float32", skip_tokenizer_init=True, additional_config={"pm_ops": pm_ops}, **options
    )
    return args.create_engine_config()


def test_the_key_of_compiled_code_is_of_the_geometry(qwen3: Path) -> None:
    asked = [
        ({}, {}),
        ({"fuse_rope": True}, {}),
        ({"fuse_rope": True}, {"block_size": 64}),
        ({"fuse_rope": True, "layout": "BLNHC"}, {}),
        ({"fuse_rope": "strict"}, {}),
    ]
    configs = [configure(qwen3, pm_ops, **options) for pm_ops, options in asked]
    hooks = [config.compilation_config.inductor_compile_config.get(HOOK) for config in configs]
    assert hooks[0] is None and len({hook.uuid() for hook in hooks[1:]}) == 4
    assert len({config.compute_hash() for config in configs}) == 5
    again = configure(qwen3, {"fuse_rope": True}).compilation_config.inductor_compile_config[HOOK]
    assert again.uuid() == hooks[1].uuid()


class Theirs(CustomGraphPass):
    """A user's pass, of this name in the key of compiled code."""

    def __init__(self, name: Any) -> None:
        self.name = name

    def __call__(self, graph: Any) -> None: ...

    def uuid(self) -> Any:
        return self.name


def test_another_pass_runs_first_and_has_to_tell_itself_from_others(qwen3: Path) -> None:
    def behind(theirs: Any) -> Any:
        return configure(qwen3, {"fuse_rope": True}, compilation_config={"inductor_compile_config": {HOOK: theirs}})

    one, two = Theirs("one"), Theirs("two")
    assert behind(one).compilation_config.inductor_compile_config[HOOK].before.name == "one"
    assert behind(one).compute_hash() != behind(two).compute_hash()
    for nameless in (Theirs(None), lambda graph: None):
        with pytest.raises(ValueError, match=f"{HOOK} is .*, which has no uuid.*make it a .*CustomGraphPass"):
            behind(nameless)


def test_what_nobody_can_tell_apart_is_not_given_to_vllms_cache(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be found again: unlike Inductor, vLLM takes None for the name of this pass."""
    config = configure(qwen3, {"fuse_rope": True})
    config.compute_hash()
    for registered in (NORM_OPS, ROTARY_OPS):
        with monkeypatch.context() as patch:
            patch.setitem(registered, torch.ops.aten.sin.default, lambda *args: None)
            with pytest.raises(ValueError, match=r"no uuid\(\) .*perhaps a lambda .*or leave fuse_rope out"):
                config.compute_hash()
    config.compute_hash()


def test_an_operator_that_this_vllm_lacks_is_named_where_the_fusion_is_asked_for(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(hooks.FUSE_ROPE, "operator of norms", "torch:ops.vllm_ir.another_norm")
    with pytest.raises(RuntimeError, match=r"no operator of norms \(torch.ops.vllm_ir.another_norm\); leave it out"):
        configure(qwen3, {"fuse_rope": True})
    assert configure(qwen3, {}).attention_config.backend is not None


def test_what_keeps_it_from_doing_anything_is_said_when_the_engine_is_configured(
    qwen3: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        configure(qwen3, {"fuse_rope": True}, enforce_eager=True)
        assert "vLLM compiles nothing" in caplog.text
        caplog.clear()
        split = {"splitting_ops": ["vllm::unified_kv_cache_update"]}
        configure(qwen3, {"fuse_rope": True}, compilation_config=split)
        assert '"splitting_ops": []' in caplog.text and '"use_inductor_graph_partition": true' in caplog.text
        caplog.clear()
        configure(qwen3, {"fuse_rope": True})
        assert "fuse_rope" not in caplog.text
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
