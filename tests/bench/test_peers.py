"""Every peer's adapter gives its kernel what the case says, under the kernel's own names, in both layouts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.fakes import (
    CPU,
    FA3_SCHEMAS,
    ROPE,
    ROWS,
    SGLANG_FILES,
    SHAPES,
    STORE,
    VLLM_FILES,
    flashinfer,
    paged,
    write_files,
)
from torch import Tensor

from pm_ops.bench.case import Case
from pm_ops.bench.cases import PagesShape
from pm_ops.bench.implementation import Implementation, Missing, Unsupported
from pm_ops.bench.memory import LAYER_MAJOR, LAYOUTS, PAGE_MAJOR
from pm_ops.bench.ours import PmOpsFA3
from pm_ops.bench.peer_fa3 import FA3
from pm_ops.bench.peer_flashinfer import FlashInfer
from pm_ops.bench.peer_sglang import SGLang, SGLangOneLaunch
from pm_ops.bench.peer_vllm import VLLM
from pm_ops.bench.peers import FACTORIES, find
from pm_ops.bench.suites import attention_case, pages_case, rope_case, store_case
from pm_ops.kernels import fa3 as fa3_kernels

pytest.importorskip("triton")


def passes(impl: Implementation, case: Case, layout: str) -> bool:
    work = case.build(CPU, True)
    bound = case.bind(impl, work, layout)
    tolerance = case.tolerance if bound.tolerance is None else bound.tolerance
    return all(case.check(bound, work, layout).within(tolerance) for _ in range(2))


@pytest.fixture
def vllm(tmp_path: Path) -> VLLM:
    return VLLM(write_files(tmp_path, VLLM_FILES))


@pytest.fixture
def sglang(tmp_path: Path) -> SGLang:
    return SGLang(write_files(tmp_path, SGLANG_FILES))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    module = flashinfer()
    module.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return FlashInfer()


class FakeFA3:
    """The library's two operators on the CPU; keeps the schedules that calls came with."""

    def __init__(self) -> None:
        self.schedules: list[Tensor | None] = []
        self.planned: list[Any] = []
        self.library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
        for schema in FA3_SCHEMAS:
            self.library.define(schema)
        self.library.impl("fwd", self.fwd, "CPU")
        self.library.impl("get_scheduler_metadata", self.schedule, "CPU")

    def fwd(self, q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
            max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
            q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
            is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank,
            cp_tot_seqused_k):  # fmt: skip
        assert is_causal and softcap == 0 and cp_world_size == 1 and q.dtype == k.dtype == v.dtype
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(seqused_k.max()))
        assert (window_size_left < 0) == (window_size_right < 0)
        scales = (1.0, 1.0)
        if q.dtype.itemsize == 1:
            assert q_descale.shape == k_descale.shape == (len(seqused_k), k.shape[2]) and q_descale.unique() == 1
            scales = (k_descale.unique().item(), v_descale.unique().item())
        self.schedules.append(scheduler_metadata)
        out.copy_(paged(q.float(), k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, scales=scales,
                        window=window_size_left + 1, sinks=s_aux))  # fmt: skip
        return [out, torch.empty(0)]

    def schedule(self, batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype,
                 seqused_k, cu_seqlens_q, *rest):  # fmt: skip
        self.planned.append((batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, *rest))
        return torch.zeros(1)


@pytest.fixture
def fa3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FA3, FakeFA3]]:
    (tmp_path / "_vllm_fa3_C.abi3.so").write_bytes(b"a library")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(fa3_kernels, "_found", None)  # put back what the process had
    fake = FakeFA3()
    yield FA3(tmp_path), fake
    fake.library._destroy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_vllm_attends(name: str, layout: str, vllm: VLLM) -> None:
    assert passes(vllm, attention_case("decode", SHAPES[name]), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_sglang_attends(name: str, layout: str, sglang: SGLang) -> None:
    assert passes(sglang, attention_case("decode", SHAPES[name]), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_fa3_attends(name: str, layout: str, fa3: tuple[FA3, FakeFA3]) -> None:
    assert passes(fa3[0], attention_case("decode", SHAPES[name]), layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SHAPES)
def test_flashinfer_attends(name: str, layout: str, flash: FlashInfer) -> None:
    shape = SHAPES[name]
    case = attention_case("decode", shape)
    with pytest.raises(Unsupported, match="multiples of 64"):
        case.bind(flash, case.build(CPU, True), layout)
    wide = replace(shape, head_dim=128 if name == "unequal" else 64, value_dim=64)
    if name == "unequal":
        with pytest.raises(Unsupported, match="equal strides"):
            passes(flash, attention_case("decode", wide), layout)
    else:
        assert passes(flash, attention_case("decode", wide), layout)


def test_fa3_is_scheduled_ahead_with_the_same_shapes(fa3: tuple[FA3, FakeFA3]) -> None:
    case = attention_case("decode", SHAPES["window"])
    bound = case.bind(fa3[0], case.build(CPU, True), PAGE_MAJOR)
    assert fa3[1].planned == [(3, 1, 21, 4, 2, 8, 8, None, None, None, None, 4, 0, True, 4, 0, False, 0, None, 0)]
    assert bound.note == "scheduled within the call"  # the faster one, where a GPU tells which


def test_what_the_operator_refuses_is_unsupported_and_told(fa3: tuple[FA3, FakeFA3]) -> None:
    case = attention_case("decode", SHAPES["decode"])
    with pytest.raises(Unsupported, match="impl='fa3' needs CUDA tensors"):
        case.bind(PmOpsFA3(fa3[0]), case.build(CPU, True), PAGE_MAJOR)


def test_a_window_and_a_dtype_that_a_kernel_does_not_take_are_said(vllm: VLLM, sglang: SGLang) -> None:
    unequal = replace(SHAPES["fp8"], head_dim=16)
    with pytest.raises(Unsupported, match="unequal K and V dims takes no quantised"):
        passes(vllm, attention_case("decode", unequal), PAGE_MAJOR)
    prefill = replace(SHAPES["prefill"], kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(Unsupported, match="new rows in the query's dtype"):
        passes(sglang, attention_case("prefill", prefill), PAGE_MAJOR)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stores_and_rotation_put_rows_where_they_belong(
    layout: str, vllm: VLLM, sglang: SGLang, flash: FlashInfer
) -> None:
    for peer in (vllm, sglang, flash):
        assert passes(peer, store_case("store", STORE), layout)
    for peer in (sglang, flash):
        assert passes(peer, rope_case("store", ROPE), layout)


def test_sglang_moves_tokens_in_launches_of_its_pools_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = pages_case("pages", PagesShape("move", "move", 10, **{**ROWS, "pages": 12}))
    folder = write_files(tmp_path, SGLANG_FILES)
    launches: list[int] = []
    for kind, launch in ((SGLang, 4), (SGLangOneLaunch, SGLangOneLaunch._launch)):
        monkeypatch.setattr(kind, "_launch", launch)
        peer = kind(folder)
        move = peer._move
        peer._move = lambda *args, move=move: (launches.append(args[4]), move(*args))
        assert passes(peer, case, LAYER_MAJOR)
        with pytest.raises(Unsupported, match="one contiguous tensor"):
            passes(peer, case, PAGE_MAJOR)
    assert launches == [4, 4, 2, 4, 4, 2, 10, 10]


def test_every_kind_a_peer_claims_is_one_it_has_a_method_for() -> None:
    methods = {
        "store": "store",
        "host store": "store",
        "rope and store": "rope_store",
        "pages": "pages",
        "move": "pages",
    }
    for kind in (VLLM, SGLang, SGLangOneLaunch, FA3, FlashInfer):
        for name in kind.kinds:
            method = methods.get(name, "attention")
            assert getattr(kind, method) is not getattr(Implementation, method), (kind, name)
        assert kind.scope


def test_a_library_that_is_not_there_or_does_not_load_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Missing, match="neither in vLLM's installation nor in the folder"):
        FA3(tmp_path)
    (tmp_path / "_vllm_fa3_C.abi3.so").write_bytes(b"no library")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(Missing, match="does not load with torch"):
        FA3(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(Missing, match=r"compute capability 9.x"):
        FA3(tmp_path)


def test_on_the_cpu_only_plain_torch_is_a_peer_and_the_others_say_why() -> None:
    found, missing = find(FACTORIES, None, CPU)
    assert {"pm_ops", "torch"} <= {impl.name for impl in found}
    assert {"fa3", "flashinfer", "vllm", "sglang", "sglang_one_launch"} <= set(missing)
    assert set(missing) | {impl.name for impl in found} == set(FACTORIES)
    assert missing["fa3"] == "its kernels need a CUDA device"
    with pytest.raises(ValueError, match=r"--impl triton is unknown; there are pm_ops, "):
        find(["pm_ops", "triton"], None, CPU)


def test_on_a_gpu_each_peer_that_is_not_there_says_what_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("flashinfer", "vllm", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    gpu = torch.device("cuda")
    found, missing = find(["torch", "fa3", "flashinfer", "vllm", "sglang"], None, gpu)
    assert [impl.name for impl in found] == ["torch"] and "decode" not in found[0].kinds and found[0].scope
    assert "_vllm_fa3_C.abi3.so is neither" in missing["fa3"] and missing["flashinfer"] == "flashinfer is not installed"
    assert missing["vllm"].startswith("vllm.v1.attention.ops.triton_unified_attention is not installed")
    assert missing["sglang"].startswith("sglang.kernels.ops.attention.decode_attention is not installed")
