"""The Hopper kernel against dense float64 attention, on pools that hold NaN outside the stored slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kernels.cases import attention_case, check_attention, pages, scattered_table
from kernels.gluon_interpreter import Kernel

from pm_ops.kernels import attention_hopper
from pm_ops.kernels.attention import attention
from pm_ops.kernels.store import load_kv, store_kv
from pm_ops.ops.store import LoadKV, StoreKV

F16, BF16 = torch.float16, torch.bfloat16
COMMON: dict[str, Any] = dict(dtypes=(BF16,) * 3, page_size=16, dims=(128, 128), heads=(8, 2))
RAGGED: dict[str, Any] = dict(lens=[37, 77, 333, 9, 500, 0, 130], queries=[37, 1, 200, 0, 5, 0, 2])
CASES: dict[str, dict[str, Any]] = {
    # lengths and queries
    "prefill": dict(lens=[300], queries=[300]),
    "queries of every sequence alike": dict(lens=[300, 129, 40], queries=40),
    "every kind of sequence": RAGGED,
    "int64 indices": dict(RAGGED, index=torch.int64),
    "no keys, but queries": dict(lens=[0, 6, 0], queries=[2, 3, 130]),
    "fewer keys than queries": dict(lens=[3, 140], queries=[300, 2]),
    "padding rows": dict(lens=[9, 128], queries=[1, 128], spare_rows=150),
    "only padding rows": dict(lens=[0, 0], queries=[0, 0], spare_rows=3),
    "whole tiles": dict(lens=[256, 128], queries=[128, 64]),
    "not causal": dict(RAGGED, causal=False),
    "huge page ids past the end of a sequence": dict(RAGGED, tail=2**30, width=60),
    # shapes
    "no group": dict(RAGGED, heads=(2, 2)),
    "group of 5": dict(RAGGED, heads=(5, 1)),
    "group of 7": dict(RAGGED, heads=(14, 2)),
    "group of 48": dict(lens=[137, 30], queries=[130, 4], heads=(48, 1)),
    "group of 128": dict(lens=[137], queries=[3], heads=(128, 1)),
    "page size 8": dict(RAGGED, page_size=8),
    "page size 1": dict(RAGGED, page_size=1),
    "page size 4 and a window": dict(RAGGED, page_size=4, window=50),
    "page size 3, dims 64 and 256, token major": dict(RAGGED, page_size=3, dims=(64, 256), order="token_major"),
    "page size 1, head dim 256, head major": dict(RAGGED, page_size=1, dims=(256, 256), order="head_major"),
    "page size 48": dict(RAGGED, page_size=48),
    "page size 64": dict(RAGGED, page_size=64),
    "page size 128": dict(RAGGED, page_size=128),
    "page size 544": dict(RAGGED, page_size=544),
    "head dim 64": dict(RAGGED, dims=(64, 64)),
    "head dim 256": dict(RAGGED, dims=(256, 256)),
    "head dims 128 and 64": dict(RAGGED, dims=(128, 64)),
    "head dims 64 and 256": dict(RAGGED, dims=(64, 256)),
    "token major pages": dict(RAGGED, order="token_major"),
    "head major pages": dict(RAGGED, order="head_major"),
    "one page": dict(lens=[13], queries=[13], num_pages=1, heads=(64, 1)),
    "fp16": dict(RAGGED, dtypes=(F16,) * 3),
    # logits
    "window of 1": dict(RAGGED, window=1),
    "window of 50": dict(RAGGED, window=50),
    "window of 50, not causal": dict(RAGGED, window=50, causal=False),
    "window of 64 in whole tiles": dict(lens=[1024], queries=[512], window=64),
    "window wider than the sequence": dict(RAGGED, window=2**40),
    "softcap": dict(RAGGED, softcap=3.0),
    "softcap of logits near 1e4": dict(RAGGED, softcap=30.0, spread=5e3),
    "huge logits": dict(RAGGED, spread=1e3),
    "sinks": dict(RAGGED, sinks=torch.linspace(-2, 3, 8)),
    "infinitely negative sinks": dict(lens=[13, 0], queries=[9, 2], sinks=torch.full((8,), -torch.inf)),
    "scales": dict(RAGGED, scales=(0.37, 2.5)),
    "everything at once": dict(
        RAGGED, spare_rows=2, window=90, softcap=5.0, sinks=torch.linspace(-2, 3, 8), scales=(0.5, 2.0),
        order="token_major", page_size=24,
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_dense_attention(name):
    case = attention_case("cuda", **{**COMMON, **CASES[name]})
    assert attention_hopper.able(case)
    check_attention(case, *attention_hopper.attention(case))


ON_THE_CPU = [
    "every kind of sequence",
    "fewer keys than queries",
    "page size 1",
    "window of 50, not causal",
    "everything at once",
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
@pytest.mark.parametrize("late", [False, True], ids=["products at once", "products late"])
@pytest.mark.parametrize("name", ON_THE_CPU)
def test_the_kernels_python_equals_dense_attention(monkeypatch, name, late):
    """Products read shared memory when they are issued, or when they are waited for."""
    monkeypatch.setattr(attention_hopper, "_attention_hopper", Kernel(attention_hopper._attention_hopper, late))
    case = attention_case("cpu", **{**COMMON, **CASES[name]})
    check_attention(case, *attention_hopper.attention(case))


@pytest.mark.gpu
def test_results_do_not_depend_on_the_run_nor_on_where_pages_lie():
    case = attention_case("cuda", **{**COMMON, **RAGGED}, num_pages=100)
    out, lse = attention_hopper.attention(case)
    moved = torch.randperm(100, device="cuda")
    page = case.key_plane[1]
    pages = case.buffer.view(100, page)
    elsewhere = torch.empty_like(pages)
    elsewhere[moved] = pages
    table = torch.where(case.page_table < 0, -1, moved[case.page_table.clamp(min=0).long()].int())
    other = dataclasses.replace(case, buffer=elsewhere.view(-1), page_table=table)
    for again in (case, other):
        for first, second in zip((out, lse), attention_hopper.attention(again), strict=True):
            assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_no_bit_depends_on_the_page_size(page_size):
    """The same rows in pages of 16, fetched by the copy engine, and in others; pages of 1 are a layer-major tensor."""
    case = attention_case("cuda", **{**COMMON, **RAGGED, "order": "head_major"})
    slots = sum(case.seq_lens.tolist())
    pool = pages("head_major", page_size, slots // page_size + 9, 1, {"key": (2, 128, 2), "value": (2, 128, 2)})
    pool = pool.to("cuda")
    lens = case.seq_lens.tolist()
    table = scattered_table(lens, page_size, pool.num_pages, tail=-1).cuda()
    for b, n in enumerate(lens):
        j = torch.arange(n, device="cuda")
        old = case.page_table[b, j // 16].long() * 16 + j % 16
        new = table[b, j // page_size].long() * page_size + j % page_size
        for kind, plane in (("key", case.key_plane), ("value", case.value_plane)):
            rows = load_kv(LoadKV(case.buffer, old, plane, 16, 2, 128, BF16))
            planes = (pool.planes[0, kind], None) if kind == "key" else (None, pool.planes[0, kind])
            given = (rows, None) if kind == "key" else (None, rows)
            types = (BF16, None) if kind == "key" else (None, BF16)
            store_kv(StoreKV(pool.buffer, *given, new, *planes, page_size, *types))
    other = dataclasses.replace(
        case, buffer=pool.buffer, page_table=table, page_size=page_size,
        key_plane=pool.planes[0, "key"], value_plane=pool.planes[0, "value"],
    )  # fmt: skip
    for first, second in zip(attention_hopper.attention(case), attention_hopper.attention(other), strict=True):
        assert torch.equal(first, second)


@pytest.mark.gpu
def test_one_plane_may_have_more_pages_than_the_other():
    for lens in ([77], [130], [13]):
        case = attention_case("cuda", lens, [9], **COMMON, num_pages=40)
        used = int(case.page_table.max()) + 1
        for kind in ("key_plane", "value_plane"):
            fewer = dataclasses.replace(case, **{kind: [*getattr(case, kind)[:4], used]})
            check_attention(case, *attention_hopper.attention(fewer))


@pytest.mark.gpu
def test_query_starts_past_the_last_row_write_nothing_behind_it():
    case = attention_case("cuda", [77, 40], [40, 9], **COMMON)
    start = torch.tensor([0, 40, 10_000], dtype=torch.int32, device="cuda")
    out, _ = attention_hopper.attention(dataclasses.replace(case, query_start=start))
    torch.cuda.synchronize()
    whole, _ = attention_hopper.attention(case)
    assert torch.equal(out, whole)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_page_that_stands_for_none_is_behind_the_last_of_both_planes(page_size, monkeypatch):
    """Boxes that no query sees come from there and have to be zeros, also where one plane has more pages."""
    launches: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launches.append(args)

    monkeypatch.setattr(attention_hopper, "_attention_hopper", Kernel())
    case = attention_case("cpu", [40], [40], **{**COMMON, "page_size": page_size})
    for kind in ("key_plane", "value_plane"):
        fewer = getattr(case, kind)[4] - 1
        attention_hopper.attention(dataclasses.replace(case, **{kind: [*getattr(case, kind)[:4], fewer]}))
        keys, values, *_ = args = launches.pop()
        assert keys.shape[0] == values.shape[0] == args[12] == fewer


@pytest.mark.gpu
def test_a_query_that_is_a_slice_of_one_projection():
    case = attention_case("cuda", **{**COMMON, **RAGGED})
    qkv = torch.randn(case.query.shape[0], 12, 128, device="cuda", dtype=BF16)
    case = dataclasses.replace(case, query=qkv[:, :8])
    check_attention(case, *attention_hopper.attention(case))


@pytest.mark.gpu
def test_calls_with_enough_work_go_here_and_agree_with_the_general_kernel(monkeypatch):
    case = attention_case("cuda", [900, 2000, 40], [700, 500, 1], **{**COMMON, "heads": (32, 8)})
    assert attention_hopper.takes(case)
    out, lse = attention(case)
    monkeypatch.setattr(attention_hopper, "takes", lambda a: False)
    general, general_lse = attention(case)
    assert (out.float() - general.float()).norm() / general.float().norm() < 4e-3
    torch.testing.assert_close(lse, general_lse, rtol=1e-4, atol=1e-4)


ABLE: dict[str, dict[str, Any]] = {
    "as it is": {},
    "an ALiBi": dict(alibi_slopes=torch.ones(8)),
    "a bias": dict(bias=torch.ones(1, 1, 1, 40, dtype=torch.bool)),
    "fp32": dict(dtypes=(torch.float32,) * 3),
    "an fp8 cache": dict(dtypes=(BF16, torch.float8_e4m3fn, torch.float8_e4m3fn)),
    "dim 96": dict(dims=(96, 128)),
    "a group of 136": dict(heads=(136, 1)),
}


@pytest.mark.parametrize("change", ABLE)
def test_what_it_cannot_do(change, monkeypatch):
    monkeypatch.setattr(attention_hopper, "is_hopper", lambda device: True)
    case = attention_case("cpu", [40], [40], **{**COMMON, **ABLE[change]})
    assert attention_hopper.able(case) == (change == "as it is")


def test_it_leaves_other_devices_and_decode_alone(monkeypatch):
    case = attention_case("cpu", [40, 40], [40, 1], **COMMON)
    assert not attention_hopper.able(case)
    monkeypatch.setattr(attention_hopper, "is_hopper", lambda device: True)
    assert attention_hopper.takes(dataclasses.replace(case, max_query_len=40))
    assert not attention_hopper.takes(dataclasses.replace(case, max_query_len=1))


def test_it_wants_addresses_of_16_bytes(monkeypatch):
    monkeypatch.setattr(attention_hopper, "is_hopper", lambda device: True)
    case = attention_case("cpu", [40], [40], **COMMON)
    offset, *strides = case.key_plane
    assert not attention_hopper.able(dataclasses.replace(case, key_plane=[offset + 8, *strides]))
    assert not attention_hopper.able(dataclasses.replace(case, query=case.query.transpose(1, 2).contiguous().mT))
