"""Latent attention against dense float64 attention, on pools that hold NaN outside the stored rows.

By attention's kernel, and on a GPU of compute capability 9 also by the Hopper kernel, which is for bf16 and fp16 with
rows of 512 + 64 and 256 + 64. On the CPU that runs in `gluon_interpreter.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.cases import moved_with_strides, on_each_device
from kernels.gluon_interpreter import Kernel
from kernels.mla_cases import check_mla, mla_case
from torch import Tensor

from pm_ops.kernels import mla_hopper
from pm_ops.kernels.attention_plan import plan_of, shape_of
from pm_ops.kernels.device import is_hopper
from pm_ops.kernels.mla import mla_attention
from pm_ops.kernels.mla_hopper import splits_of
from pm_ops.ops.mla import MLAAttention

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
    "page size 1, pages at odd multiples of 16 bytes": dict(RAGGED, page_size=1, heads=16, gap=16),
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


@pytest.fixture(params=["triton", "hopper"])
def kernel(request: pytest.FixtureRequest) -> Callable[[MLAAttention], tuple[Tensor, Tensor]]:
    if request.param == "hopper" and not is_hopper(torch.device("cuda")):
        pytest.skip("needs compute capability 9")
    return lambda case: mla_attention(dataclasses.replace(case, impl=request.param))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_HOPPER)
def test_both_kernels_equal_dense_attention(name, kernel):
    case = mla_case("cuda", **{**HOPPER, **ON_HOPPER[name]})
    check_mla(case, kernel(case))


FEWER: dict[str, Any] = dict(lens=[9, 70, 200, 0, 130], queries=[9, 1, 3, 0, 2])
ELSEWHERE: dict[str, dict[str, Any]] = {
    "one sequence in many splits": dict(lens=[1200], queries=1, heads=3),
    "more splits than tiles": dict(lens=[70], queries=1, width=20, heads=2),  # 4 splits of 2 tiles
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("page_size", [1, 64])
def test_the_hopper_kernel_reads_no_page_behind_the_table(monkeypatch, page_size):
    """A length beyond the table, which nothing checks on a GPU, is that of the table."""
    monkeypatch.setattr(mla_hopper, "_mla_hopper", Kernel(mla_hopper._mla_hopper, False))
    case = mla_case("cpu", [128], 1, **{**HOPPER, "heads": 2, "page_size": page_size})
    behind = torch.full((1, 128), 2**30, dtype=torch.int32)  # columns that are the next row's
    table = torch.cat((case.page_table, behind), 1)[:, : 128 // page_size]
    beyond = dataclasses.replace(case, page_table=table, seq_lens=torch.tensor([200]))
    check_mla(case, mla_hopper.mla_attention(beyond))


REFUSED: dict[str, tuple[Callable[[MLAAttention], dict[str, Any]], str]] = {
    "fp32": (lambda c: {"query": c.query.float()}, "it takes no float32 queries"),
    "fp8 rows": (lambda c: {"dtype": E4M3}, "it takes rows of the query's dtype, bfloat16"),
    "dims": (lambda c: {"value_dim": 500}, r"it takes rows of 256 \+ 64 or 512 \+ 64, not of 500 \+ 76"),
    "a scale as a tensor": (lambda c: {"scale_tensor": torch.ones(1)}, "it takes no scale as a tensor"),
    "softmax_scale": (lambda c: {"softmax_scale": -1.0}, "softmax_scale=-1.0 times scale=1.0 is not positive"),
    "strides": (lambda c: {"query": c.query.mT.contiguous().mT}, "it takes queries whose elements lie side by side"),
    "offset": (lambda c: {"latent_plane": [8, *c.latent_plane[1:]]}, "offset and strides are multiples of 16 bytes"),
    "device": (lambda c: {}, "it is for compute capability 9.x"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_hopper_kernel_that_was_asked_for_is_refused_with_the_reason(name):
    change, reason = REFUSED[name]
    case = mla_case("cpu", [9], 1, **HOPPER)
    with pytest.raises(
        ValueError, match=f"impl='hopper' was asked for, but that kernel cannot make this call: .*{reason}"
    ):
        mla_attention(dataclasses.replace(case, **change(case), impl="hopper"))


def test_which_kernel_makes_a_call(monkeypatch):
    """Auto takes the Hopper kernel where it can make the call."""
    case = mla_case("cpu", [9], 1, **HOPPER)
    monkeypatch.setattr(mla_hopper, "is_hopper", lambda device: True)
    monkeypatch.setattr(mla_hopper, "mla_attention", lambda a: "hopper")
    monkeypatch.setattr("pm_ops.kernels.mla.attend_pages", lambda a, latent: "triton")
    taken = {impl: mla_attention(dataclasses.replace(case, impl=impl)) for impl in ("auto", "triton", "hopper")}
    assert taken == {"auto": "hopper", "triton": "triton", "hopper": "hopper"}
    assert mla_attention(dataclasses.replace(case, scale_tensor=torch.ones(1))) == "triton"
    monkeypatch.setattr(mla_hopper, "is_hopper", lambda device: False)
    assert mla_attention(case) == "triton"


@pytest.mark.gpu
def test_neither_page_size_nor_page_ids_change_a_bit(kernel):
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
        results += [kernel(case)[0], kernel(case)[0]]
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
def test_it_replays_in_a_cuda_graph_with_other_lengths_and_pages(kernel):
    case = mla_case("cuda", [300, 64, 9], 1, **HOPPER)
    kernel(case)  # compiles
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = kernel(case)
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
def test_pages_past_2_31_elements_are_read(page_size, kernel):
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
    out, lse = kernel(case)
    assert torch.equal(out, kernel(small)[0])
    assert torch.equal(lse, kernel(small)[1])


def test_queries_of_any_strides():
    case = mla_case("cpu", **MIXED)
    strided = torch.empty(48, 33, 10).permute(1, 2, 0)[:, ::2]
    strided.copy_(case.query)
    check_mla(case, mla_attention(dataclasses.replace(case, query=moved_with_strides(strided, "cpu"))))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the launch is stood in for")
@pytest.mark.parametrize(("heads", "max_query_len", "programs"), [(128, 0, 64), (128, 4, 64), (16, 4, 8), (16, 0, 17)])
def test_empty_blocks_of_a_ragged_call_do_not_keep_it_from_being_split(monkeypatch, heads, max_query_len, programs):
    """8 sequences of 4 new tokens on 8188: of 41 blocks of one query 9 are empty, and of 17 of four, as can be told."""
    grids = []

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **options: grids.append(grid)

    monkeypatch.setattr(mla_hopper, "_mla_hopper", Launch())
    monkeypatch.setattr(mla_hopper, "merge_splits", lambda *args: None)
    monkeypatch.setattr(mla_hopper, "multiprocessors", lambda device: 132)
    case = mla_case("cpu", [64] * 8, [4] * 8, **{**HOPPER, "heads": heads, "width": 128})
    mla_hopper.mla_attention(dataclasses.replace(case, max_query_len=max_query_len, max_seq_len=8192))
    (blocks, splits), *more = grids
    assert not more
    assert blocks == (82 if heads == 128 else 17)
    assert splits == splits_of(programs, 8192, 132)
    if heads == 128:
        assert splits == 2  # 128 programs, one a multiprocessor


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
