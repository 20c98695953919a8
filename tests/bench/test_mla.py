"""Latent attention's cases and peers: each is given what the case says, in both layouts, and what is wrong is seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bench.fakes import CPU, attend, write_files
from torch import Tensor

from pm_ops.bench.baseline import Torch
from pm_ops.bench.case import Case
from pm_ops.bench.implementation import Implementation, Missing, Unsupported
from pm_ops.bench.memory import LAYOUTS
from pm_ops.bench.mla_cases import MLAShape, decode
from pm_ops.bench.mla_work import mla_work
from pm_ops.bench.ours import PmOps, PmOpsMLATriton
from pm_ops.bench.peer_mla import FlashInferLatent, FlashMLA, VLLMLatent
from pm_ops.bench.suites import mla_case

TINY: dict[str, Any] = dict(
    q_heads=4, head_dim=24, value_dim=16, page_size=4, dtype=torch.float32, kv_dtype=torch.float32, layers=3
)
DECODE = decode("", 3, 21, **TINY)
SHAPES = [
    DECODE,
    MLAShape("ragged", (9, 1, 3), (9, 21, 14), **TINY),
    decode("page size 1", 2, 5, **TINY | {"page_size": 1}),
]


def passes(impl: Implementation, shape: MLAShape, layout: str) -> bool:
    case = mla_case("mla", shape)
    work = case.build(CPU, True)
    bound = case.bind(impl, work, layout)
    return all(case.check(bound, work, layout).within(case.tolerance) for _ in range(2))


def rows_of(cache: Tensor, table: Tensor, lens: Tensor) -> list[Tensor]:
    """Each sequence's rows out of pages ``[pages, page_size, 1, dim]``."""
    pages = [cache[table[b, : -(-int(n) // cache.shape[1])].long()] for b, n in enumerate(lens)]
    return [p.flatten(0, 1)[: int(n)] for p, n in zip(pages, lens, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_ours_and_plain_torch_pass(shape: MLAShape, layout: str) -> None:
    assert passes(PmOps(), shape, layout) and passes(Torch(CPU), shape, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_triton_kernel_is_asked_for_and_a_refusal_is_a_note(layout: str) -> None:
    case: Case = mla_case("mla", DECODE)
    with pytest.raises(Unsupported, match="impl='triton' needs CUDA tensors"):
        case.bind(PmOpsMLATriton(), case.build(CPU, True), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_wrong_row_of_one_head_is_seen(layout: str) -> None:
    case: Case = mla_case("mla", DECODE)
    work = case.build(CPU, True)
    bound = case.bind(Torch(CPU), work, layout)
    run = bound.run
    wrong = type(bound)(lambda: run().index_put_((torch.tensor([1]), torch.tensor([2])), torch.tensor(0.5)), bound.out)
    assert case.check(bound, work, layout).within(case.tolerance)
    assert not case.check(wrong, work, layout).within(case.tolerance)


def test_both_layouts_hold_the_same_rows_among_random_bytes() -> None:
    work = mla_work(DECODE, CPU)
    page, layer = (work.memories[layout] for layout in LAYOUTS)
    for b in range(3):
        ids = work.page_table[b, :6].long()
        assert torch.equal(page.key[ids], layer.key[ids])
        assert torch.equal(work.rows(b)[0], page.key[ids].flatten(0, 1)[:21])
        assert torch.equal(work.rows(b)[1], work.rows(b)[0][..., :16])
    assert page.value.data_ptr() == page.key.data_ptr() and page.pool is not None
    assert page.key.stride(0) == 3 * layer.key.stride(0)
    hollow = mla_work(DECODE, CPU, False)
    assert hollow.memories[LAYOUTS[0]].key.stride() == page.key.stride()


def test_bytes_are_counted_once_and_operations_of_both_products() -> None:
    assert DECODE.kv_bytes == 3 * 21 * 24 * 4
    assert DECODE.flops == 2 * 3 * 21 * 4 * (24 + 16)


FILES = {
    "vllm/v1/attention/ops/triton_decode_attention.py": """
from vllm.triton_utils import triton
from bench.fakes import attend
from bench.test_mla import rows_of

def decode_attention_fwd(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
                         page_size=1, logit_cap=0.0, k_scale=None, v_scale=None, is_mla=False):
    assert is_mla and num_kv_splits == attn_logits.shape[2] and page_size == k_buffer.shape[1]
    assert attn_logits.shape[3] == o.shape[2] + 1 and lse.shape == o.shape[:2]
    assert k_scale.shape == v_scale.shape == ()  # else it makes them in the call, which no graph captures
    rows = [rows_of(cache, req_to_token, b_seq_len) for cache in (k_buffer, v_buffer)]
    o.copy_(attend(q, *rows, [1] * len(q), sm_scale))
"""
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_vllms_triton_kernels_get_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    pytest.importorskip("triton")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    impl = VLLMLatent(write_files(tmp_path, FILES))
    assert "triton_decode_attention.py sha256" in impl.version()
    assert passes(impl, DECODE, layout)
    with pytest.raises(Unsupported, match="for decode"):
        passes(impl, SHAPES[1], layout)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """FlashMLA's operator, as vLLM 0.26's library registers it, on the CPU."""
    fragment = torch.library.Library("_flashmla_C", "FRAGMENT")
    fragment.define(
        "dense_decode_fwd(Tensor q, Tensor kcache, int head_size_v, Tensor seqlens_k, Tensor block_table, "
        "float softmax_scale, bool is_causal, Tensor(a)? tile_scheduler_metadata, Tensor(b)? num_splits, "
        "Tensor(c!)? out_) -> (Tensor(c!), Tensor, Tensor(a)?, Tensor(b)?)"
    )

    def forward(q, cache, value_dim, lens, table, scale, causal, plan, splits, out):  # type: ignore[no-untyped-def]
        assert causal and out is None and (plan is None) == (splits is None)
        key = rows_of(cache, table, lens)
        value = [k[..., :value_dim] for k in key]
        result = attend(q.flatten(0, 1), key, value, [q.shape[1]] * len(q), scale).float().unflatten(0, q.shape[:2])
        return result, torch.empty(0), torch.ones(1), torch.ones(1)

    fragment.impl("dense_decode_fwd", forward, "CPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    (tmp_path / "_flashmla_C.abi3.so").write_bytes(b"library")
    yield tmp_path
    fragment._destroy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flashmla_gets_the_case(library: Path, layout: str) -> None:
    impl = FlashMLA(library)
    assert "_flashmla_C.abi3.so sha256" in impl.version()
    sixty_four = TINY | {"page_size": 64}
    assert passes(impl, decode("", 3, 70, **sixty_four), layout)
    assert passes(impl, MLAShape("two queries", (2, 2), (70, 9), **sixty_four), layout)
    with pytest.raises(Unsupported, match="pages of 64"):
        passes(impl, DECODE, layout)
    with pytest.raises(Unsupported, match="equally many queries"):
        passes(impl, MLAShape("ragged", (2, 1), (70, 9), **sixty_four), layout)


class Wrapper:
    """FlashInfer's, on the CPU."""

    def __init__(self, workspace: Tensor) -> None:
        assert workspace.dtype == torch.uint8

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
             causal, sm_scale, q_data_type, kv_data_type):  # type: ignore[no-untyped-def]  # fmt: skip
        assert causal and q_data_type == kv_data_type == torch.float32
        self.starts, self.lens, self.scale = qo_indptr, kv_len_arr, sm_scale
        self.pages = [kv_indices[a:b].long() for a, b in zip(kv_indptr.tolist(), kv_indptr.tolist()[1:], strict=False)]

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out):  # type: ignore[no-untyped-def]
        lens = self.lens.tolist()
        value = [ckv_cache[p].flatten(0, 1)[:n, None] for p, n in zip(self.pages, lens, strict=True)]
        rest = [kpe_cache[p].flatten(0, 1)[:n, None] for p, n in zip(self.pages, lens, strict=True)]
        key = [torch.cat(parts, -1) for parts in zip(value, rest, strict=True)]
        return out.copy_(attend(torch.cat((q_nope, q_pe), -1), key, value, self.starts.diff().tolist(), self.scale))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_flashinfers_wrapper_gets_the_case(monkeypatch: pytest.MonkeyPatch, shape: MLAShape, layout: str) -> None:
    module = ModuleType("flashinfer")
    module.__spec__ = sys.__spec__
    module.__version__ = "0.6"  # type: ignore[attr-defined]
    module.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=Wrapper)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    impl = FlashInferLatent()
    assert impl.version() == "0.6" and passes(impl, shape, layout)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Missing, match="_flashmla_C.abi3.so is neither"):
        FlashMLA(tmp_path)
    with pytest.raises(Missing, match="triton_decode_attention"):
        VLLMLatent(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Missing, match="flashinfer is not installed"):
        FlashInferLatent()
