"""``--enable-torch-compile``: what SGLang has Inductor compile of our backend, with and without ``fuse_rope``."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_engine

pytestmark = pytest.mark.engines
RELEASE = sglang_engine.require()

import torch
import torch._inductor.config as inductor
from sglang.srt.compilation.torch_compile_decoration import patch_model
from sglang.srt.layers.rotary_embedding import base
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_runner import DIM, Batch, Runner, fill, layer
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.fx_passes.reinplace import ReinplaceCounters
from torch._inductor.utils import fresh_cache

from pm_ops.adapters.sglang import backend as backend_module
from pm_ops.adapters.sglang.backend import PageMajorAttnBackend
from pm_ops.adapters.sglang.config import Settings
from pm_ops.adapters.sglang.rope import FuseRope, add_pass

HEADS, HIDDEN, DRAFTS = 4, 32, 3
DECODE = Batch([1, 7, 20], [1, 1, 1])
VERIFY = Batch([4, 10, 23], [DRAFTS] * 3)


class Block(torch.nn.Module):
    """A layer of Llama's, of SGLang's own parts but for the linear ones, which need process groups."""

    def __init__(self, index: int, window: int) -> None:
        super().__init__()
        self.project = torch.nn.Linear(HIDDEN, (HEADS + 4) * DIM, bias=False)
        self.out = torch.nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.rotary_emb = base.RotaryEmbedding(DIM, DIM, 64, 10000, True, torch.float32)
        self.attn = layer(index, HEADS, window=window)

    def forward(self, x: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        q, k, v = self.project(x).split([HEADS * DIM, 2 * DIM, 2 * DIM], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        return x + self.out(self.attn(q, k, v, forward_batch))


class Model(torch.nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(0, 0), Block(1, window)]).requires_grad_(False)

    def forward(self, x: Tensor, positions: Tensor, forward_batch: Any) -> Tensor:
        for block in self.layers:
            x = block(x, positions, forward_batch)
        return x


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process of its own to the compiler, and one without options to SGLang."""
    monkeypatch.setenv("PM_OPS", "1")
    monkeypatch.setenv("SGLANG_TORCH_COMPILE_MODE", "default")  # else every product is tuned, for minutes
    monkeypatch.setattr(backend_module, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=DRAFTS))
    monkeypatch.setattr(base, "_is_xpu", True)  # a table in float32 and no kernels of vLLM, as on CUDA
    options = SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
    monkeypatch.setattr(base, "get_exec", lambda: options)
    torch._dynamo.reset()
    counters.clear()
    ReinplaceCounters.clear()
    with inductor.patch(post_grad_custom_pre_pass=None), fresh_cache():
        yield


def step_of(windowed: bool) -> tuple[Runner, Any, Tensor, Tensor]:
    """A decode step; with pools of windows one that verifies trees. The hidden states and positions, too."""
    if not windowed:
        runner = Runner("page_major", torch.float32, DECODE)
        forward, positions = runner.forward_batch(ForwardMode.DECODE), torch.tensor(DECODE.lengths) - 1
    else:
        runner = Runner("page_major", torch.float32, VERIFY, windowed=True, spec=SpeculativeAlgorithm.NGRAM)
        lengths = torch.tensor(VERIFY.lengths) - DRAFTS
        tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
        rows = [torch.cat((torch.ones(DRAFTS, n, dtype=torch.bool), tree), 1).flatten() for n in lengths.tolist()]
        spec = NgramVerifyInput(custom_mask=torch.cat(rows), draft_token_num=DRAFTS)
        forward = runner.forward_batch(ForwardMode.TARGET_VERIFY, seq_lens=lengths, seq_lens_cpu=lengths)
        forward.spec_info, positions = spec, (lengths[:, None] + torch.tensor([0, 1, 1])).flatten()
    for index in (0, 1):
        fill(runner, index, torch.float32)
    return runner, forward, torch.randn(len(positions), HIDDEN), positions


class Strict(list[Any]):
    """A list as torch 2.11's Dynamo traces it: an index that is a bool ends the graph, between rotation and store."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, bool):
            raise TypeError("indices must be integers or slices, not <class 'bool'>")
        return super().__getitem__(index)


@pytest.mark.parametrize("windowed", [False, True])
def test_a_step_has_nothing_that_an_older_compiler_cannot_trace(
    windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, forward, hidden, positions = step_of(windowed)
    backend, model = PageMajorAttnBackend(runner), Model(window=8 if windowed else 0)
    backend.init_forward_metadata(forward)
    found = backend_module.pools_of
    monkeypatch.setattr(backend_module, "pools_of", lambda pool: Strict(found(pool)))
    with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
        for block in model.layers:
            block.rotary_emb._forward_method = block.rotary_emb.forward_native
        assert model(hidden, positions, forward).isfinite().all()


@pytest.mark.parametrize(("fuse", "windowed"), [(False, False), (True, False), (True, True)])
def test_a_step_is_compiled_whole_and_in_place(fuse: bool, windowed: bool) -> None:
    """No graph breaks, no copy of the cache, eager's results; fused, a layer's rotation and store are one operator."""
    runner, forward, hidden, positions = step_of(windowed)
    backend, model = PageMajorAttnBackend(runner), Model(window=8 if windowed else 0)
    backend.init_forward_metadata(forward)
    if fuse:
        add_pass(Settings(fuse_rope="strict"), runner.pools, compiled=True)
    before = [pool.page_pool.buffer.clone() for pool in runner.pools]
    with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
        for block in model.layers:
            block.rotary_emb._forward_method = block.rotary_emb.forward_native
        wanted = model(hidden, positions, forward)
        kept = [pool.page_pool.buffer.clone() for pool in runner.pools]
        for pool, bytes_before in zip(runner.pools, before, strict=True):
            pool.page_pool.buffer.copy_(bytes_before)
        with patch_model(model, True, len(hidden), SimpleNamespace(ca_comm=None)) as compiled:
            out = compiled(hidden, positions, forward)
    torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-5)
    for pool, bytes_kept in zip(runner.pools, kept, strict=True):
        found, its = (x.view(torch.float32) for x in (pool.page_pool.buffer, bytes_kept))
        torch.testing.assert_close(found, its, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    assert ReinplaceCounters.get_total_missed() == 0
    if fuse:
        report = inductor.post_grad_custom_pre_pass.report
        assert (report.graphs, len(report.fused), report.unfused) == (1, 2, {}), str(report)


def test_where_nothing_is_compiled_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner("page_major", torch.float32, DECODE)
    with caplog.at_level(logging.WARNING):
        add_pass(Settings(fuse_rope=True), runner.pools, compiled=False)
    assert "does nothing, as SGLang compiles nothing: give it --enable-torch-compile" in caplog.text
    assert inductor.post_grad_custom_pre_pass is None


def test_a_pass_that_is_there_runs_first_and_needs_a_uuid() -> None:
    pools = Runner("page_major", torch.float32, DECODE).pools
    with inductor.patch(post_grad_custom_pre_pass=print), pytest.raises(ValueError, match=r"has no uuid\(\)"):
        add_pass(Settings(fuse_rope=True), pools, compiled=True)
    add_pass(Settings(fuse_rope=True), pools, compiled=True)
    first = inductor.post_grad_custom_pre_pass
    add_pass(Settings(fuse_rope=True), pools, compiled=True)  # for the draft model of the same process
    assert inductor.post_grad_custom_pre_pass is first and isinstance(first, FuseRope) and first.uuid() is not None
    other = FuseRope(first.geometry + " ", False, None)
    assert other.uuid() != first.uuid()
