"""Latent attention against dense float64 attention, on pools that hold NaN outside the stored rows.

On a GPU of compute capability 9 the Hopper kernel makes the calls that it can, in bf16 and fp16 with rows of 512 + 64
and 256 + 64; attention's kernel makes the others. On the CPU the Hopper kernel runs in `gluon_interpreter.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kernels.cases import moved_with_strides, on_each_device
from kernels.gluon_interpreter import Kernel
from kernels.mla_cases import check_mla, mla_case

from pm_ops.kernels import mla_hopper
from pm_ops.kernels.attention import attend_pages
from pm_ops.kernels.attention_plan import plan_of, shape_of
from pm_ops.kernels.mla import mla_attention
from pm_ops.kernels.mla_hopper import splits_of

F32, F16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
MIXED: dict[str, Any] = dict(lens=[13, 21, 0, 30, 3, 9], queries=[1, 21, 0, 6, 5, 0])
CASES: dict[str, dict[str, Any]] = {
    "decode": dict(lens=[13, 1, 30, 0], queries=1),
    "decode, prefill, extend and nothing in one batch": MIXED,
    "padding rows and int64": dict(MIXED, spare_rows=3, index=torch.int64),
    "not causal": dict(MIXED, causal=False),
    "splits": dict(lens=[300, 40, 0], queries=1, page_size=16, width=40, heads=2),
    "a longest sequence that is known": dict(lens=[40, 9], queries=1, width=64, max_seq_len=40),
    "page size 1": dict(MIXED, page_size=1),
    "page size 16": dict(MIXED, page_size=16),
    "page size 64": dict(MIXED, page_size=64),
    "token major pages": dict(MIXED, order="token_major"),
    "huge page ids past the end": dict(MIXED, tail=2**30, width=12),
    "16 heads": dict(MIXED, heads=16),
    "128 heads": dict(lens=[13, 20], queries=[1, 2], heads=128),
    "one head": dict(MIXED, heads=1),
    "rows of 512 + 64": dict(lens=[13, 20], queries=[1, 2], dims=(512, 64), heads=16),
    "rows of 256 + 32": dict(lens=[13, 20], queries=[1, 2], dims=(256, 32)),
    "rows of 40 + 24": dict(MIXED, dims=(40, 24)),
    "a value that is the whole row": dict(MIXED, dims=(48, 0)),
    "fp16": dict(MIXED, dtypes=(F16, F16)),
    "fp8 rows with a scale": dict(MIXED, dtypes=(F16, E4M3), scale=0.5),
    "fp8 rows, fp32 queries": dict(MIXED, dtypes=(F32, E4M3), scale=0.5),
    "huge logits": dict(MIXED, spread=1e3),
}


@on_each_device
@pytest.mark.parametrize("name", CASES)
def test_latent_attention_equals_dense_attention(device, name):
    case = mla_case(device, **CASES[name])
    check_mla(case, mla_attention(case))


def test_the_case_with_splits_is_split():
    case = mla_case("cpu", **CASES["splits"])
    assert plan_of(shape_of(case.attention(), latent=True)).splits > 1


HOPPER: dict[str, Any] = dict(dtypes=(BF16, BF16), dims=(512, 64), page_size=64, heads=128)
RAGGED: dict[str, Any] = dict(lens=[37, 77, 333, 9, 500, 0, 130], queries=[37, 1, 20, 0, 5, 0, 2])
ON_HOPPER: dict[str, dict[str, Any]] = {
    "decode": dict(lens=[1, 63, 64, 65, 128, 129, 500, 0], queries=1),
    "decode, 16 heads": dict(lens=[700, 64, 1, 0], queries=1, heads=16),
    "one sequence in many splits": dict(lens=[5000], queries=1),
    "more splits than tiles": dict(lens=[70, 0, 600], queries=1, width=100),
    "every kind of sequence": dict(RAGGED, heads=16),
    "every kind of sequence, 128 heads": RAGGED,
    "5 heads, padding rows, int64": dict(RAGGED, heads=5, spare_rows=150, index=torch.int64),
    "65 heads": dict(RAGGED, heads=65),
    "two queries a sequence": dict(lens=[2, 90, 257], queries=2),
    "not causal": dict(RAGGED, causal=False, heads=16),
    "fewer keys than queries": dict(lens=[3, 140], queries=[300, 2], heads=16),
    "page size 1": dict(RAGGED, page_size=1, heads=16),
    "page size 3": dict(RAGGED, page_size=3, heads=32),
    "page size 8": dict(RAGGED, page_size=8, heads=16),
    "page size 16": dict(RAGGED, page_size=16, heads=16),
    "page size 48": dict(RAGGED, page_size=48, heads=16),
    "page size 128, token major": dict(RAGGED, page_size=128, heads=16, order="token_major"),
    "huge page ids past the end": dict(RAGGED, tail=2**30, width=20, heads=16),
    "fp16": dict(RAGGED, dtypes=(F16, F16), heads=16),
    "rows of 256 + 64": dict(RAGGED, dims=(256, 64), heads=16),
    "a scale": dict(RAGGED, scale=0.37, heads=16),
    "huge logits": dict(RAGGED, spread=1e3, heads=16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_HOPPER)
@pytest.mark.parametrize("kernel", ["hopper", "triton"])
def test_both_kernels_equal_dense_attention(name, kernel):
    case = mla_case("cuda", **{**HOPPER, **ON_HOPPER[name]})
    if kernel == "triton":
        check_mla(case, attend_pages(case.attention(), latent=True))
    else:
        if not mla_hopper.takes(case):
            pytest.skip("needs compute capability 9")
        check_mla(case, mla_hopper.mla_attention(case))


FEWER: dict[str, Any] = dict(lens=[9, 70, 200, 0, 130], queries=[9, 1, 3, 0, 2])
ELSEWHERE: dict[str, dict[str, Any]] = {
    "one sequence in many splits": dict(lens=[1200], queries=1, heads=3),
    "more splits than tiles": dict(lens=[70, 0, 300], queries=1, width=20, heads=2),
    "every kind of sequence, 128 heads": dict(lens=[70, 0, 130], queries=[1, 0, 2]),
    "65 heads": dict(lens=[70, 9], queries=[1, 2]),
}
"""Smaller in the interpreter."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("late", [False, True], ids=["products at once", "products late"])
@pytest.mark.parametrize("name", ON_HOPPER)
def test_the_hopper_kernels_python_equals_dense_attention(monkeypatch, name, late):
    """Products read shared memory when they are issued, or when they are waited for."""
    monkeypatch.setattr(mla_hopper, "_mla_hopper", Kernel(mla_hopper._mla_hopper, late))
    shorter = FEWER if ON_HOPPER[name]["lens"] is RAGGED["lens"] else {}
    case = mla_case("cpu", **{**HOPPER, **ON_HOPPER[name], **shorter, **ELSEWHERE.get(name, {})})
    check_mla(case, mla_hopper.mla_attention(case))


@pytest.mark.gpu
def test_neither_page_size_nor_page_ids_change_a_bit():
    """Nor does a second run; each pool holds the same rows."""
    rows = torch.randn(3, 700, 1, 576)
    results = []
    for page_size in (1, 16, 64, 64):
        torch.manual_seed(len(results))
        case = mla_case("cuda", [700, 130, 65], 1, **{**HOPPER, "page_size": page_size}, max_seq_len=700)
        view = case.latent_view()
        for b, n in enumerate((700, 130, 65)):
            j = torch.arange(n, device="cuda")
            view[case.page_table[b, j // page_size].long(), j % page_size] = rows[b, :n].to("cuda", BF16)
        case.query.copy_(torch.linspace(-1, 1, case.query.numel()).view_as(case.query))
        results += [mla_attention(case)[0], mla_attention(case)[0]]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
def test_it_replays_in_a_cuda_graph_with_other_lengths_and_pages():
    case = mla_case("cuda", [300, 64, 9], 1, **HOPPER)
    mla_attention(case)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = mla_attention(case)
    for _ in range(2):
        case.query.normal_()
        case.seq_lens.sub_(3)
        case.page_table.copy_(case.page_table.flip(0))
        case.seq_lens.copy_(case.seq_lens.flip(0))
        graph.replay()
        check_mla(case, result)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 64])
def test_pages_past_2_31_elements_are_read(page_size):
    """61 layers' rows of 576: the last page begins behind byte 2^32."""
    small = mla_case("cuda", [9, 70], 1, **{**HOPPER, "page_size": page_size})
    stride = 61 * page_size * 1152
    count = 2**32 // stride + 200
    buffer = torch.full((count * stride + 1152 * page_size,), 255, dtype=torch.uint8, device="cuda")
    plane = [1152 * page_size, stride, 1152, 1152, count]
    table = torch.where(small.page_table < 0, -1, count - 1 - small.page_table)
    case = dataclasses.replace(small, buffer=buffer, latent_plane=plane, page_table=table)
    near, far = small.latent_view(), case.latent_view()
    used = small.page_table[small.page_table >= 0].long()
    far[count - 1 - used] = near[used]
    for kernel in (mla_attention, lambda a: attend_pages(a.attention(), latent=True)):
        out, lse = kernel(case)
        assert torch.equal(out, kernel(small)[0])
        assert torch.equal(lse, kernel(small)[1])


def test_queries_of_any_strides():
    case = mla_case("cpu", **MIXED)
    strided = torch.empty(48, 33, 10).permute(1, 2, 0)[:, ::2]
    strided.copy_(case.query)
    check_mla(case, mla_attention(dataclasses.replace(case, query=moved_with_strides(strided, "cpu"))))


@pytest.mark.parametrize("programs", [1, 2, 80, 128, 132, 133, 4000])
@pytest.mark.parametrize("keys", [0, 1, 64, 4096, 131072])
def test_splits_fill_the_device_and_none_is_there_for_nothing(programs, keys):
    splits = splits_of(programs, keys, 132)
    tiles = max(-(-keys // 64), 1)
    assert 1 <= splits <= max(tiles // 2, 1) and splits <= 128
    if programs == 1 and keys == 131072:
        assert splits > 100
    if programs in (128, 132) or programs > 2000:
        assert splits == 1
