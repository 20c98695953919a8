"""What our worker does in front of vLLM's own on CUDA; that one is played, and so nothing needs a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch

from pm_ops.adapters.vllm import hooks, worker_cuda
from pm_ops.adapters.vllm.config import Settings
from pm_ops.adapters.vllm.worker_cuda import PageMajorGPUWorker, PageMajorWorker, Worker
from pm_ops.kernels import fa3


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every look for FlashAttention 3, which is not there."""
    found: list[str] = []
    monkeypatch.setattr(fa3, "library", lambda: (found.append("looked"), "no such file")[1])
    monkeypatch.setattr(PageMajorWorker, "__init__", lambda self, config: setattr(self, "pm_ops_settings", config.ours))
    return found


def config(settings: Settings, drafts: Any = None) -> Any:
    """As much of a ``VllmConfig`` as our worker reads when it is made."""
    return SimpleNamespace(ours=settings, speculative_config=drafts)


def test_flash_attention_3_is_looked_for_where_it_was_asked_for(loads: list[str]) -> None:
    for impl in ("auto", "triton"):
        PageMajorGPUWorker(config(Settings(impl=impl)))
    assert loads == []
    with pytest.raises(RuntimeError, match="impl fa3 was asked for, but FlashAttention 3 is not there: no such file"):
        PageMajorGPUWorker(config(Settings(impl="fa3")))


def test_that_drafts_have_never_run_here_is_said(loads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(hooks, "generation", lambda: hooks.PACKED)
    monkeypatch.setattr(worker_cuda.logger, "warning", said.append)
    PageMajorGPUWorker(config(Settings()))
    assert said == []
    PageMajorGPUWorker(config(Settings(), drafts={"method": "ngram"}))
    assert said == ["pm_ops: speculative decoding has run in vLLM's CPU build alone, never on CUDA"]


@pytest.mark.parametrize("zeroing", [False, True])
def test_the_cache_is_packed_where_vllm_has_no_layouts(zeroing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    plan = SimpleNamespace(kv_cache_groups=[])
    packed = SimpleNamespace(kv_cache_groups=[], needs_kv_cache_zeroing=zeroing)
    monkeypatch.setattr(worker_cuda, "pack", lambda config: (done.append(("pack", config)), packed)[1])
    monkeypatch.setattr(worker_cuda, "place_states", lambda *call: done.append(("place", *call)))
    monkeypatch.setattr(worker_cuda, "replace_zeroer", lambda *call: done.append(("zero", *call)))
    monkeypatch.setattr(Worker, "initialize_from_config", lambda self, config: done.append(("vLLM's", config)))
    monkeypatch.setattr(PageMajorWorker, "pools", ["a pool", "another"])
    worker: Any = object.__new__(PageMajorGPUWorker)
    worker.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"a": 1}))
    worker.model_runner = "a runner"
    monkeypatch.setattr(hooks, "generation", lambda: hooks.LAYOUTS)
    worker.allocate_cache(plan)
    assert done == [("vLLM's", plan)]
    done.clear()
    monkeypatch.setattr(hooks, "generation", lambda: hooks.PACKED)
    worker.allocate_cache(plan)
    steps = [("pack", plan), ("vLLM's", packed), ("place", packed, {"a": 1}), ("zero", "a runner", "a pool")]
    assert done == (steps if zeroing else steps[:3])


def test_our_kernels_are_compiled_before_vllm_captures_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(worker_cuda, "warm_up", lambda *call: done.append((call, torch.is_inference_mode_enabled())))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    monkeypatch.setattr(Worker, "compile_or_warm_up_model", lambda self: done.append("vLLM's") or 2.5)
    worker: Any = object.__new__(PageMajorGPUWorker)
    worker.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"a": 1}),
        model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=99),
    )
    assert worker.compile_or_warm_up_model() == 2.5
    assert done == [(({"a": 1}, torch.bfloat16, 99), True), "waited", "vLLM's"]
