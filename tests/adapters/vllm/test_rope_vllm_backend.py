"""fuse_rope under vLLM's own compilation, VllmBackend, which it takes on GPUs; on the CPU it has to be talked into it.

Left out are vLLM's own passes, which name CUDA's operators.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode
from vllm.config.compilation import PassConfig
from vllm.platforms.cpu import CpuPlatform
from vllm_engine import engine, generate, random_prompts, tiny_qwen3, tokens

from pm_ops.adapters.vllm.rope import HOOK, FuseRope

LAYERS = 2
RANDOM = random_prompts(512, (5, 17, 64))
NO_PASSES = {f.name: False for f in dataclasses.fields(PassConfig) if f.name.startswith(("fuse_", "enable_qk_norm"))}
COMPILATION = {"mode": CompilationMode.VLLM_COMPILE, "cudagraph_mode": "NONE", "compile_sizes": []}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The mode that was asked for stays, and every engine compiles anew, as the pass sees no code out of a cache."""
    stock = CpuPlatform.check_and_update_config

    def keep_mode(cls: Any, config: Any) -> None:
        mode = config.compilation_config.mode
        stock(config)
        config.compilation_config.mode = mode

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_mode))
    monkeypatch.setattr(FixFunctionalizationPass, "__call__", lambda self, graph: None)
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "1")
    graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"), layers=LAYERS)


@pytest.fixture(scope="module")
def stock(qwen3: Path) -> list[list[int]]:
    with engine(qwen3, skip_tokenizer_init=True) as llm:
        return tokens(generate(llm, RANDOM))


def run(model: Path, fuse_rope: bool | str, **compilation: Any) -> tuple[list[list[int]], Any]:
    """Greedy tokens, and what the pass reports."""
    settings = {**COMPILATION, "pass_config": NO_PASSES, **compilation}
    options = {"skip_tokenizer_init": True, "enforce_eager": False, "compilation_config": settings}
    with engine(model, {"fuse_rope": fuse_rope}, **options) as llm:
        config = llm.llm_engine.vllm_config.compilation_config
        assert config.mode == CompilationMode.VLLM_COMPILE and isinstance(
            config.inductor_compile_config[HOOK], FuseRope
        )
        return tokens(generate(llm, RANDOM)), config.inductor_compile_config[HOOK].report


@pytest.mark.parametrize("how", [{"splitting_ops": []}, {"use_inductor_graph_partition": True}], ids=str)
def test_every_layer_is_fused_where_the_graph_is_not_split(
    qwen3: Path, stock: list[list[int]], how: dict[str, Any]
) -> None:
    got, report = run(qwen3, "strict", **how)
    assert got == stock
    assert len(report.fused) == LAYERS and not report.unfused and not report.split
    assert "QK-norm" in str(report) and report.graphs == 1


def test_where_it_is_split_as_by_default_a_warning_says_what_to_do(
    qwen3: Path, stock: list[list[int]], caplog: Any
) -> None:
    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        got, report = run(qwen3, True)
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    assert got == stock and not report.fused and "splitting_ops" in report.split
    warned = [r.message for r in caplog.records if r.levelno == logging.WARNING and "rope" in r.message]
    assert len(warned) == 2  # when the engine is configured, and at the first graph that rotates keys
    assert all('"splitting_ops": []' in text for text in warned)
