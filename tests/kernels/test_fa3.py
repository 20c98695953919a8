"""FlashAttention 3 behind the operator: what it is given, what is refused, what is mended, and which calls it gets."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.cases import CUDA, attention_case, check_attention
from torch import Tensor

import pm_ops
from pm_ops.kernels import fa3
from pm_ops.ops.attention import Attention, AttentionOut
from pm_ops.ops.attention_choice import FA3_QUERIES, choose
from pm_ops.ops.attention_reference import attention_reference

F16, BF16 = torch.float16, torch.bfloat16

ABLE: dict[str, dict[str, Any]] = {
    "decode": dict(lens=[13, 1, 30, 4], queries=1),
    "several queries of each": dict(lens=[13, 5, 30], queries=5),
    "prefill": dict(lens=[37], queries=37),
    "int64 indices": dict(lens=[13, 30], queries=[1, 9], index=torch.int64),
    "no keys": dict(lens=[0, 5, 0], queries=1),
    "no keys, but queries": dict(lens=[0, 6, 0], queries=[2, 3, 1]),
    "fewer keys than queries": dict(lens=[3, 2], queries=[7, 2]),
    "decode, prefill, extend and nothing in one batch": dict(lens=[9, 21, 30, 7, 33], queries=[1, 21, 6, 0, 1]),
    "padding rows": dict(lens=[9, 12], queries=[1, 5], spare_rows=9, max_query_len=5),
    "only padding rows": dict(lens=[0, 0], queries=[0, 0], spare_rows=3),
    "an empty page table": dict(lens=[0, 0], queries=[1, 2], spare_rows=1),
    "an empty page table and sinks": dict(lens=[0, 0], queries=[1, 2], spare_rows=1, sinks=torch.ones(4).to(BF16)),
    "not causal": dict(lens=[9, 21, 2], queries=[3, 21, 4], causal=False),
    "page size 1": dict(lens=[13, 30], queries=[1, 9], page_size=1),
    "page size 3": dict(lens=[13, 30], queries=[1, 9], page_size=3),
    "page size 16": dict(lens=[13, 40], queries=[1, 9], page_size=16),
    "page size 64": dict(lens=[13, 100], queries=[1, 9], page_size=64),
    "page size 128, full tiles of queries": dict(lens=[200, 300], queries=[150, 300], page_size=128),
    "page size 256, full tiles of queries": dict(lens=[200, 300], queries=[150, 300], page_size=256),
    "page size 2048": dict(lens=[13, 70], queries=[1, 2], page_size=2048),
    "group of 5": dict(lens=[13, 30], queries=[1, 9], heads=(10, 2)),
    "no group": dict(lens=[13, 30], queries=[1, 9], heads=(3, 3)),
    "head dim 64": dict(lens=[13, 30], queries=[1, 9], dims=(64, 64)),
    "head dim 80": dict(lens=[13, 30], queries=[1, 9], dims=(80, 80)),
    "head dim 128": dict(lens=[13, 300], queries=[1, 190], dims=(128, 128), page_size=16),
    "head dim 256": dict(lens=[13, 30], queries=[1, 9], dims=(256, 256)),
    "head dims 192 and 128": dict(lens=[13, 30], queries=[1, 9], dims=(192, 128)),
    "token major pages": dict(lens=[13, 30], queries=[1, 9], order="token_major"),
    "head major pages": dict(lens=[13, 30], queries=[1, 9], order="head_major"),
    "huge page ids past the end of a sequence": dict(lens=[13, 0, 30], queries=1, tail=2**30, width=12),
    "huge logits": dict(lens=[13, 30], queries=[1, 9], spread=30.0),
    "softcap": dict(lens=[13, 30], queries=[1, 9], softcap=3.0),
    "sinks": dict(lens=[13, 30, 1, 0], queries=[1, 9, 1, 1], sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]).to(BF16)),
    "another scale": dict(lens=[13, 30], queries=[1, 9], softmax_scale=0.3),
}


def case_of(device: str, dtype: torch.dtype = BF16, **options: Any) -> Attention:
    scale = options.pop("softmax_scale", None)
    case = attention_case(device, dtypes=(dtype,) * 3, **options)
    return case if scale is None else dataclasses.replace(case, softmax_scale=scale)


class FakeLibrary:
    """`fwd` as FlashAttention 3 has it, in plain torch, on views; like it, it leaves padding rows unwritten."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, page_table: Tensor, seq_lens: Tensor,
        query_start: Tensor | None, *, max_query_len: int, max_keys: int, softmax_scale: float, causal: bool,
        softcap: float, leftpad: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        self.calls.append(SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"}))
        for index in (page_table, seq_lens, *(() if query_start is None else (query_start,))):
            assert index.dtype == torch.int32 and index.stride(-1) == 1
        for rows in (query, key, value):
            assert rows.stride(-1) == 1 and rows.data_ptr() % 16 == 0
            assert all(stride * rows.itemsize % 16 == 0 for stride in rows.stride()[:-1])
        batch, (_, page_size, kv_heads, _) = len(seq_lens), key.shape
        assert max_keys == page_table.shape[1] * page_size
        assert len(key) == len(value)  # the library takes one number of pages
        flat = query if query_start is not None else query.flatten(0, 1)
        starts = query_start if query_start is not None else torch.arange(batch + 1) * query.shape[1]
        assert max_query_len >= int(starts.diff().max())
        out = torch.full((*flat.shape[:2], value.shape[3]), torch.nan, dtype=query.dtype)
        lse = torch.full((flat.shape[1], len(flat)), torch.nan)
        for b in range(batch):
            rows, n = slice(starts[b], starts[b + 1]), int(seq_lens[b])
            pages = page_table[b, : -(-n // page_size)].long()
            row_of = [x[pages].flatten(0, 1)[:n].contiguous().view(torch.uint8).flatten() for x in (key, value)]
            buffer = torch.cat(row_of)  # these keys alone, as one page of n tokens
            size = key.shape[3] * key.itemsize
            planes = [
                [at, 1, kv_heads * x.shape[3] * x.itemsize, x.shape[3] * x.itemsize, 1]
                for x, at in ((key, 0), (value, n * kv_heads * size))
            ]
            call = Attention(
                buffer, flat[rows], torch.zeros(1, 1, dtype=torch.int32), seq_lens[b : b + 1], None, *planes, n,
                kv_heads, value.shape[3], key.dtype, value.dtype, softmax_scale, causal=causal, softcap=softcap,
                sinks=sinks, return_lse=True,
            )  # fmt: skip
            if n and rows.start < rows.stop:
                out[rows], of_rows = attention_reference(call)
                lse[:, rows] = of_rows.t()
            else:
                out[rows], lse[:, rows] = 0, -torch.inf
        if query_start is not None:
            return out, lse
        return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)


@pytest.fixture
def interpreted() -> None:
    """Padding rows are zeroed by a kernel, which runs on the CPU where the interpreter runs it."""
    pytest.importorskip("triton")
    if CUDA:
        pytest.skip("kernels are compiled where there is a GPU")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> FakeLibrary:
    """A library on a Hopper card, as far as the CPU can tell."""
    library = FakeLibrary()
    monkeypatch.setattr(fa3, "_found", fa3.Library(library, has_sinks=True))
    monkeypatch.setattr(fa3, "is_hopper", lambda device: True)
    return library


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("name", ABLE)
def test_it_equals_dense_attention_by_the_views_it_is_given(name: str, dtype: torch.dtype, fake: FakeLibrary) -> None:
    case = case_of("cpu", dtype, **ABLE[name])
    check_attention(case, *fa3.attention(case))
    assert len(fake.calls) == (case.page_table.shape[1] > 0)


def test_the_pool_is_handed_over_in_place(fake: FakeLibrary) -> None:
    """No byte of K and V is copied: the views point into the buffer, with the planes' strides."""
    case = case_of("cpu", lens=[9, 12], queries=3, order="head_major", heads=(4, 2))
    fa3.attention(case)
    (call,) = fake.calls
    for view, plane in ((call.key, case.key_plane), (call.value, case.value_plane)):
        assert view.data_ptr() == case.buffer.data_ptr() + plane[0]
        assert [stride * 2 for stride in view.stride()[:3]] == plane[1:4] and view.shape[:3] == (plane[4], 4, 2)
    assert call.query.data_ptr() == case.query.data_ptr() and call.query.shape == (2, 3, 4, 32)
    assert call.leftpad is None


def test_one_plane_may_have_more_pages_than_the_other(fake: FakeLibrary) -> None:
    case = case_of("cpu", lens=[9, 12], queries=3, num_pages=40)
    most = int(case.page_table.max()) + 1
    for kind in ("key_plane", "value_plane"):
        check_attention(case, *fa3.attention(dataclasses.replace(case, **{kind: [*getattr(case, kind)[:4], most]})))
        assert len(fake.calls[-1].key) == most


def test_pages_that_could_be_loaded_whole_are_loaded_row_by_row(fake: FakeLibrary) -> None:
    fa3.attention(case_of("cpu", lens=[9, 12], queries=1, page_size=64))
    assert fake.calls[0].leftpad.tolist() == [0, 0] and fake.calls[0].leftpad.dtype == torch.int32


def test_queries_of_any_strides_and_tables_of_any_strides(fake: FakeLibrary) -> None:
    case = case_of("cpu", lens=[9, 12], queries=3)
    table = case.page_table.t().contiguous().t()
    odd = torch.empty(6 * 4 * 32 + 1, dtype=BF16)[1:].view(6, 4, 32).copy_(case.query)
    flipped = case.query.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    for query in (odd, flipped, torch.cat([case.query] * 3, 1)[:, 4:8]):
        check_attention(case, *fa3.attention(dataclasses.replace(case, query=query, page_table=table)))
    assert fake.calls[-1].query.stride() == (3 * 384, 384, 32, 1)  # the slice of a wider row is not copied


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ALiBi": (dict(alibi_slopes=torch.ones(4)), "no ALiBi"),
    "a bias": (dict(bias=torch.zeros(1, 1, 1, 13)), "no bias"),
    "a window": (dict(window=4), "sliding window reads page ids and values before the window"),
    "fp32": (dict(dtypes=(torch.float32,) * 3), "no float32 queries"),
    "an fp8 cache": (
        dict(dtypes=(BF16, *(torch.float8_e4m3fn,) * 2)),
        "keys and values of the query's dtype, bfloat16",
    ),
    "a cache of another dtype": (dict(dtypes=(F16, F16, BF16)), "keys and values of the query's dtype, float16"),
    "scales": (dict(scales=(0.5, 1.0)), "no scales"),
    "a scale on the device": (dict(value_scale_tensor=torch.ones(1)), "no scales"),
    "a large head": (dict(dims=(264, 264)), "no head dims 264 and 264"),
    "an odd head": (dict(dims=(36, 36)), "no head dims 36 and 36"),
    "unequal heads": (dict(dims=(64, 128)), "no head dims 64 and 128"),
    "fp32 sinks": (dict(sinks=torch.ones(4)), "sinks in bfloat16"),
    "a negative scale": (dict(softmax_scale=-1.0), "softmax_scale=-1.0 is not positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_lacks_is_refused_with_the_reason(name: str, fake: FakeLibrary) -> None:
    options, text = REFUSED[name]
    changes = {"softmax_scale": options.pop("softmax_scale")} if "softmax_scale" in options else {}
    case = attention_case("cpu", [13, 20], [1, 9], **{"dtypes": (BF16,) * 3, **options})
    case = dataclasses.replace(case, **changes)
    assert text in (fa3.reason(case) or "")
    with pytest.raises(
        ValueError, match="impl='fa3' was asked for, but FlashAttention 3 cannot make this call: it|soft"
    ):
        fa3.attention(case)
    assert not fake.calls


def test_planes_that_are_not_aligned_are_refused(fake: FakeLibrary) -> None:
    case = case_of("cpu", lens=[13], queries=1)
    for plane in ([8, *case.key_plane[1:]], [0, case.key_plane[1] - 8, *case.key_plane[2:]]):
        assert "multiples of 16 bytes" in (fa3.reason(dataclasses.replace(case, key_plane=plane)) or "")


def test_another_card_is_refused(fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "is_hopper", lambda device: False)
    assert fa3.reason(case_of("cpu", lens=[13], queries=1)) == "its kernels are for compute capability 9.x"


# -- which library -----------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not looked yet, on a machine without any."""
    monkeypatch.setattr(fa3, "_found", None)
    monkeypatch.setattr(fa3, "is_hopper", lambda device: True)
    monkeypatch.delenv("PM_OPS_FA3", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(fa3.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(fa3, "installed", lambda: None)
    return monkeypatch


def test_without_a_library_the_reason_says_what_was_looked_for(nothing: pytest.MonkeyPatch) -> None:
    case = case_of("cpu", lens=[13], queries=1)
    with pytest.raises(
        ValueError, match=r"neither vllm nor flash_attn_interface is, and PM_OPS_FA3 does not name a _v"
    ):
        fa3.attention(case)


def test_the_environment_names_a_library_and_one_that_does_not_load_is_told(
    nothing: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / fa3.LIBRARY
    path.write_bytes(b"no library")
    nothing.setenv("PM_OPS_FA3", str(path))
    assert f"{path} does not load with torch" in (fa3.reason(case_of("cpu", lens=[13], queries=1)) or "")
    looked = []
    nothing.setattr(fa3, "_found", None)
    nothing.setattr(torch.ops, "load_library", looked.append)
    assert fa3.library() == fa3.library() == fa3.Library(fa3.vllm_forward, True)
    assert looked == [str(path)]  # once


def test_vllms_library_is_found_without_importing_vllm(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "vllm_flash_attn").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('the whole engine is imported')\n")
    file = package / "vllm_flash_attn" / fa3.LIBRARY
    file.write_bytes(b"")
    path = os.pathsep.join([str(tmp_path), str(Path(pm_ops.__file__).parents[1])])
    code = "from pm_ops.kernels import fa3; print(fa3.installed())"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(file)


def test_flash_attn_interface_is_called_by_its_own_names_and_has_no_sinks(
    nothing: pytest.MonkeyPatch, interpreted: None
) -> None:
    module = ModuleType("flash_attn_interface")
    fake = FakeLibrary()

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert return_softmax_lse and window_size == (-1, -1) and num_splits == 0
        return fake(
            q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, max_query_len=max_seqlen_q,
            max_keys=page_table.shape[1] * k_cache.shape[1], softmax_scale=softmax_scale, causal=causal,
            softcap=softcap, leftpad=cache_leftpad, sinks=None,
        )  # fmt: skip

    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    nothing.setitem(sys.modules, "flash_attn_interface", module)
    nothing.setattr(fa3.importlib.util, "find_spec", lambda name: name == "flash_attn_interface" or None)
    for options in (dict(lens=[9, 12], queries=[1, 5], page_size=64), dict(lens=[9, 12], queries=3, softcap=2.0)):
        case = case_of("cpu", **options)
        check_attention(case, *fa3.attention(case))
    sinks = torch.zeros(4, dtype=BF16)
    assert fa3.reason(dataclasses.replace(case, sinks=sinks)) == "flash_attn_interface has no sinks"


def test_vllms_operator_gets_each_argument_in_its_place(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    """Against the schema that vLLM 0.26's library registers."""
    from bench.fakes import FA3_SCHEMAS

    got: dict[str, Any] = {}
    fake = FakeLibrary()

    def fwd(*args: Any) -> list[Tensor]:
        names = [a.name for a in torch.ops._vllm_fa3_C.fwd.default._schema.arguments]
        got.update(zip(names, args, strict=False))
        out, lse = fake(
            got["q"], got["k"], got["v"], got["page_table"], got["seqused_k"], got["cu_seqlens_q"],
            max_query_len=got["max_seqlen_q"], max_keys=got["max_seqlen_k"], softmax_scale=got["softmax_scale"],
            causal=got["is_causal"], softcap=got["softcap"], leftpad=got["leftpad_k"], sinks=got["s_aux"],
        )  # fmt: skip
        return [out, lse, out.new_empty(0), out.new_empty(0)]

    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    try:
        library.define(FA3_SCHEMAS[0])
        library.impl("fwd", fwd, "CPU")
        monkeypatch.setattr(fa3, "_found", None)
        monkeypatch.setattr(fa3, "is_hopper", lambda device: True)
        assert fa3.library() == fa3.Library(fa3.vllm_forward, True)  # loaded already: no file is looked for
        sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).to(BF16)
        case = case_of("cpu", lens=[9, 12], queries=[1, 5], page_size=64, softcap=2.0, sinks=sinks)
        check_attention(case, *fa3.attention(case))
    finally:
        library._destroy()
    unset = {"k_new", "v_new", "q_v", "out", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx",
             "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata",
             "pack_gqa", "cp_tot_seqused_k"}  # fmt: skip
    assert {name for name, value in got.items() if value is None} | {"cp_tot_seqused_k"} == unset
    rest = ("window_size_left", "window_size_right", "num_splits", "sm_margin")
    assert [got[name] for name in rest] == [-1, -1, 0, 0]


# -- which calls -------------------------------------------------------------------------------------------------------


class OnGPU:
    """A tensor's shape and dtype on a device that is not there."""

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda"), tensor.dtype, tensor.shape


def chosen(fake: FakeLibrary, **options: Any) -> str:
    case = case_of("cpu", **options)
    return ": ".join(choose(dataclasses.replace(case, query=OnGPU(case.query))))


def test_auto_takes_it_for_many_queries_of_a_sequence_only(fake: FakeLibrary) -> None:
    most = FA3_QUERIES
    assert chosen(fake, lens=[30, 30], queries=1) == f"triton: a sequence has 1 queries, not more than {most}"
    assert chosen(fake, lens=[30, 30], queries=most).startswith("triton")
    text = "fa3: a sequence has 17 queries, which Triton's kernel for many queries does not take"
    assert chosen(fake, lens=[30, 30], queries=most + 1) == text
    assert chosen(fake, lens=[30, 30], queries=[30, 4]).startswith("fa3: a sequence has 17")  # on average
    assert chosen(fake, lens=[30, 30], queries=[30, 1]).startswith("triton")
    assert chosen(fake, lens=[30, 30], queries=[30, 1], max_query_len=30).startswith("fa3: a sequence has 30")
    assert chosen(fake, lens=[30, 30], queries=[9, 30], max_query_len=0, spare_rows=9).startswith("fa3")


def test_auto_takes_tritons_kernel_for_many_queries_before_it(
    fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pm_ops.ops.attention_choice._hopper_takes", lambda a: True)
    text = "triton: its kernel for many queries takes the 30 of a sequence"
    assert chosen(fake, lens=[30], queries=30) == text


def test_auto_takes_triton_where_it_is_not_able(fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    text = chosen(fake, lens=[30], queries=30, window=9)
    assert text.startswith("triton: FlashAttention 3 cannot make this call: its sliding window")
    monkeypatch.setattr(fa3, "_found", "it is not installed")
    text = chosen(fake, lens=[30], queries=30)
    assert text == "triton: FlashAttention 3 cannot make this call: it is not installed"


def test_a_user_can_ask_what_auto_takes() -> None:
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.float32), 5)
    rows = (torch.zeros(1, 4, 8), torch.tensor([[2, 4]]), torch.tensor([6]))
    assert pm_ops.attention_impl(pool, 1, *rows, window=3) == "reference: the tensors are on the CPU"
    with pytest.raises(ValueError, match="nothing is computed here"):
        pm_ops.attention_impl(pool, 1, *rows, out=torch.empty(0))
    with pytest.raises(ValueError, match="window=-1"):
        pm_ops.attention_impl(pool, 1, *rows, window=-1)


# -- the real one ------------------------------------------------------------------------------------------------------


@pytest.fixture
def real() -> None:
    found = fa3.library()
    if isinstance(found, str):
        pytest.skip(f"FlashAttention 3: {found}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("name", ABLE)
def test_the_real_one_equals_dense_attention_on_a_pool_of_nan(name: str, dtype: torch.dtype, real: None) -> None:
    case = dataclasses.replace(case_of("cuda", dtype, **ABLE[name]), impl="fa3")
    if case.sinks is not None and not fa3.library().has_sinks:  # type: ignore[union-attr]
        pytest.skip("this build has no sinks")
    out, lse = torch.ops.pm_ops.attention(**{f.name: getattr(case, f.name) for f in dataclasses.fields(case)})
    if case.softcap:  # its tanh is the hardware's approximate one
        torch.testing.assert_close(out, attention_reference(case)[0], rtol=5e-2, atol=5e-2)
        return
    check_attention(case, out, lse)


@pytest.mark.gpu
def test_the_real_one_neither_synchronises_nor_changes_from_run_to_run_or_page_to_page(real: None) -> None:
    case = case_of("cuda", lens=[700, 333, 90], queries=[3, 200, 1], heads=(8, 2), dims=(128, 128), page_size=16)
    out, lse = fa3.attention(case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [fa3.attention(case) for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(out, o) and torch.equal(lse, e) for o, e in again)
    order = torch.randperm(case.key_plane[4])
    pages = case.buffer.view(case.key_plane[4], -1)
    moved = torch.empty_like(pages)
    moved[order] = pages
    table = torch.where(case.page_table >= 0, order.cuda()[case.page_table.long()], -1).int()
    other = fa3.attention(dataclasses.replace(case, buffer=moved.flatten(), page_table=table))
    assert torch.equal(out, other[0]) and torch.equal(lse, other[1])


def out_case(case: Attention) -> AttentionOut:
    """The same call, with a place for its output."""
    values = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    out = torch.full((*case.query.shape[:2], case.value_dim), torch.nan, dtype=case.query.dtype)
    return AttentionOut(**values, out=out.to(case.query.device))


@pytest.mark.parametrize("queries", [[1, 9, 0], 2], ids=["ragged", "uniform"])
def test_the_output_goes_where_it_is_wanted(
    fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch, queries: list[int] | int
) -> None:
    """vLLM's build writes there itself; another one's result is for the operator to bring."""
    spare = {} if isinstance(queries, int) else {"spare_rows": 3}
    case = out_case(case_of("cpu", lens=[13, 30, 0], queries=queries, dims=(64, 64), **spare))
    expected, lse = fa3.attention(case)
    assert expected is not case.out and case.out.isnan().all()

    def writes(*args: Any, out: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        result, lse = fake(*args, **options)
        assert out.shape == result.shape
        return out.copy_(result), lse

    monkeypatch.setattr(fa3, "vllm_forward", writes)
    monkeypatch.setattr(fa3, "_found", fa3.Library(writes, has_sinks=True))
    again, again_lse = fa3.attention(case)
    assert again is case.out and torch.equal(again, expected) and torch.equal(again_lse, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [[3, 20, 1], 2], ids=["ragged", "uniform"])
def test_the_real_one_writes_where_it_is_told(real: None, queries: list[int] | int) -> None:
    spare = {} if isinstance(queries, int) else {"spare_rows": 7}
    case = out_case(case_of("cuda", lens=[70, 33, 90], queries=queries, dims=(64, 64), **spare))
    out, lse = fa3.attention(case)
    assert out is case.out
    check_attention(case, out, lse)


@pytest.mark.gpu
def test_the_real_one_replays_in_a_cuda_graph(real: None) -> None:
    case = case_of("cuda", lens=[70, 33, 90], queries=[3, 20, 1], spare_rows=7, dims=(64, 64))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fa3.attention(case)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3.attention(case)
    for lens, starts in (([70, 33, 90], [0, 3, 23, 24]), ([68, 1, 0], [0, 1, 1, 31])):
        case.seq_lens.copy_(torch.tensor(lens))
        case.query_start.copy_(torch.tensor(starts))
        case.query.normal_()
        graph.replay()
        check_attention(case, out, lse)
