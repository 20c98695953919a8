"""The attention kernel against dense float64 attention, on pools that hold NaN outside the stored slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from kernels.cases import CUDA, NAN_BYTE, TOLERANCE, attention_case, check_attention, on_each_device, plan

from pm_ops.kernels import attention_plan
from pm_ops.kernels.attention import attention
from pm_ops.ops.attention import Attention

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
INF = float("inf")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def hidden(*shape: int) -> torch.Tensor:
    """A bool bias that shows about two keys in three, and of the last axis always the first."""
    shown = randn(*shape) > -0.4
    shown[..., 0] = True
    return shown


CASES: dict[str, dict[str, Any]] = {
    # lengths and queries
    "decode": dict(lens=[13, 1, 30, 4], queries=1),
    "decode with int64 indices": dict(lens=[13, 1, 30, 4], queries=1, index=torch.int64),
    "several queries of each": dict(lens=[13, 5, 30], queries=5),
    "prefill": dict(lens=[37], queries=37),
    "no keys": dict(lens=[0, 5, 0], queries=1),
    "decode, prefill, extend and nothing in one batch": dict(lens=[9, 21, 30, 7, 33], queries=[1, 21, 6, 0, 1]),
    "no keys, but queries": dict(lens=[0, 6, 0], queries=[2, 3, 1]),
    "fewer keys than queries": dict(lens=[3, 2], queries=[7, 2]),
    "padding rows": dict(lens=[9, 12], queries=[1, 5], spare_rows=9),
    "only padding rows": dict(lens=[0, 0], queries=[0, 0], spare_rows=3),
    "padding rows with sinks": dict(lens=[9, 0], queries=[1, 1], spare_rows=3, sinks=randn(4)),
    "ragged with the longest query known": dict(lens=[9, 12], queries=[1, 5], max_query_len=5),
    "not causal": dict(lens=[9, 21, 2], queries=[3, 21, 4], causal=False),
    # shapes
    "group of 5": dict(lens=[13, 30], queries=[1, 9], heads=(10, 2)),
    "group of 7": dict(lens=[13, 30], queries=[1, 9], heads=(7, 1)),
    "group of 3": dict(lens=[13, 30], queries=[1, 9], heads=(6, 2)),
    "group of 48": dict(lens=[13, 30], queries=[1, 4], heads=(48, 1)),
    "no group": dict(lens=[13, 30], queries=[1, 9], heads=(3, 3)),
    "a group larger than a tile": dict(lens=[13, 7], queries=[1, 2], heads=(40, 1), dims=(260, 16)),
    "page size 1": dict(lens=[13, 30], queries=[1, 9], page_size=1),
    "page size 3": dict(lens=[13, 30], queries=[1, 9], page_size=3),
    "page size 16": dict(lens=[13, 40], queries=[1, 9], page_size=16),
    "page size 48": dict(lens=[13, 100], queries=[1, 9], page_size=48),
    "page size 528": dict(lens=[13, 70], queries=[1, 2], page_size=528),
    "page size 544": dict(lens=[550], queries=1, page_size=544, heads=(2, 1), dims=(16, 16)),
    "page size 2048": dict(lens=[13, 70], queries=[1, 2], page_size=2048),
    "head dim 80": dict(lens=[13, 30], queries=[1, 9], dims=(80, 80)),
    "head dim 96": dict(lens=[13, 30], queries=[1, 9], dims=(96, 96)),
    "head dims 192 and 128": dict(lens=[13, 30], queries=[1, 9], dims=(192, 128)),
    "head dims 12 and 20": dict(lens=[13, 30], queries=[1, 9], dims=(12, 20)),
    "token major pages": dict(lens=[13, 30], queries=[1, 9], order="token_major"),
    "head major pages": dict(lens=[13, 30], queries=[1, 9], order="head_major"),
    "huge page ids past the end of a sequence": dict(lens=[13, 0, 30], queries=1, tail=2**30, width=12),
    # logits
    "window of 1": dict(lens=[5, 6], queries=[1, 6], window=1),
    "window of 4": dict(lens=[3, 4, 5, 6], queries=1, window=4),
    "window of 4 in a prefill": dict(lens=[30, 33], queries=[30, 20], window=4),
    "window of 128 over 256, 257 and 384 keys": dict(lens=[256, 257, 384], queries=1, window=128, heads=(2, 1)),
    "window wider than the sequence": dict(lens=[30], queries=9, window=2**40),
    "window, not causal": dict(lens=[40, 33], queries=[40, 20], window=6, causal=False),
    "softcap": dict(lens=[13, 30], queries=[1, 9], softcap=3.0),
    "softcap of logits near 1e4": dict(lens=[13, 30], queries=[1, 9], softcap=30.0, spread=5e3),
    "huge logits": dict(lens=[13, 30], queries=[1, 9], spread=1e3),
    "sinks": dict(lens=[13, 30, 1, 0], queries=[1, 9, 1, 1], sinks=randn(4)),
    "infinitely negative sinks": dict(lens=[13, 0], queries=1, sinks=torch.tensor([-INF, 1.0, -INF, 0.0])),
    "sinks of a group of 5": dict(lens=[13, 1], queries=1, heads=(5, 1), sinks=randn(5).to(BF16)),
    "ALiBi": dict(lens=[13, 30], queries=[1, 9], alibi_slopes=randn(4).abs()),
    "scales": dict(lens=[13, 30], queries=[1, 9], scales=(0.37, 2.5)),
    # bias
    "bool bias for all": dict(lens=[13, 30], queries=[1, 9], bias=hidden(1, 1, 1, 30)),
    "bool bias of each": dict(lens=[13, 30], queries=[1, 9], bias=hidden(2, 4, 9, 30)),
    "bias for all": dict(lens=[13, 30], queries=[1, 9], bias=randn(1, 1, 1, 30)),
    "bias of each": dict(lens=[13, 30], queries=[1, 9], bias=randn(2, 4, 9, 30).to(F16)),
    "bias of each head, broadcast by stride 0": dict(
        lens=[13, 30], queries=[1, 9], bias=randn(1, 4, 1, 30).expand(2, 4, 9, 30)
    ),
    "bias, transposed and strided": dict(
        lens=[13, 30], queries=[1, 9], bias=randn(60, 9, 1, 2).permute(3, 2, 1, 0)[..., ::2]
    ),
    "bias with hidden keys": dict(
        lens=[13, 30], queries=[1, 9], bias=randn(2, 1, 9, 30).masked_fill(~hidden(2, 1, 9, 30), -INF)
    ),
    "bias that hides everything": dict(lens=[13, 30], queries=[1, 9], bias=torch.zeros(1, 1, 1, 30, dtype=torch.bool)),
    "bias of fewer keys": dict(lens=[13, 30], queries=[1, 9], bias=randn(1, 1, 1, 11)),
    "bias alone, as a tree mask": dict(lens=[13, 30], queries=[4, 4], causal=False, bias=hidden(2, 1, 4, 30)),
    "everything at once": dict(
        lens=[13, 30, 45],
        queries=[1, 9, 45],
        spare_rows=2,
        window=17,
        softcap=5.0,
        sinks=randn(4),
        alibi_slopes=randn(4).abs(),
        bias=randn(3, 4, 1, 45),
        scales=(0.5, 2.0),
        order="token_major",
        page_size=3,
    ),
}


@on_each_device
@pytest.mark.parametrize("name", CASES)
def test_attention_equals_dense_attention(device, name):
    """fp32 in the interpreter; bf16 on the GPU, where each case costs a compilation and bf16 is what is served."""
    dtype = F32 if device == "cpu" else BF16
    case = attention_case(device, **{"dtypes": (dtype,) * 3, **CASES[name]})
    check_attention(case, *attention(case))


@on_each_device
@pytest.mark.parametrize("name", ["decode", "prefill", "everything at once", "page size 3", "head dims 192 and 128"])
@pytest.mark.parametrize("dtype", [F16, pytest.param(F32, marks=pytest.mark.gpu)])
def test_attention_equals_dense_attention_in_fp16_and_fp32(device, name, dtype):
    case = attention_case(device, **{"dtypes": (dtype,) * 3, **CASES[name]})
    check_attention(case, *attention(case))


MIXED = [(F32, F16, F32), (F16, F32, F16), (F32, F32, F16), (F32, BF16, BF16), (F32, E4M3, E5M2), (F16, E5M2, E4M3)]
MIXED += [(F32, INT8, INT8), (F16, INT8, F16)]
MIXED_ON_CUDA = [
    (query, plane, plane)
    for query in (BF16, F16, F32)
    for plane in (BF16, F16, F32, E4M3, E5M2, INT8)
    if plane != query
] + [(BF16, E4M3, BF16), (F16, BF16, E5M2)]


@on_each_device
@pytest.mark.parametrize(
    "dtypes",
    MIXED + [pytest.param(x, marks=pytest.mark.gpu) for x in MIXED_ON_CUDA],
    ids=lambda dtypes: "-".join(str(x).removeprefix("torch.") for x in dtypes),
)
def test_query_key_and_value_may_differ_in_dtype(device, dtypes):
    case = attention_case(device, [13, 30], [1, 9], dtypes=dtypes, scales=(0.25, 0.5))
    check_attention(case, *attention(case))


@on_each_device
@pytest.mark.parametrize("queries", [[1, 1], [1, 9]])
def test_scales_may_be_device_tensors(device, queries):
    case = attention_case(device, [13, 30], queries, dtypes=(F32, E4M3, E4M3), scales=(0.37, 2.5))
    expected = attention(case)
    tensors = {f"{kind}_scale_tensor": torch.tensor([s], device=device) for kind, s in (("key", 0.37), ("value", 2.5))}
    out, lse = attention(dataclasses.replace(case, key_scale=1.0, value_scale=1.0, **tensors))
    torch.testing.assert_close((out, lse), expected, rtol=1e-5, atol=1e-6)
    check_attention(case, out, lse)


@on_each_device
@pytest.mark.parametrize(
    "options",
    [
        dict(lens=[200, 3, 0, 90], queries=1),
        dict(lens=[200], queries=1, width=300, sinks=randn(4)),
        dict(lens=[400, 40], queries=[2, 9], window=150),
        dict(lens=[200, 40], queries=[2, 9], bias=hidden(2, 1, 9, 200), spare_rows=2),
        dict(lens=[200], queries=7, dims=(80, 96), softcap=4.0, scales=(0.5, 2.0)),
    ],
)
def test_splits_of_the_kv_axis_join_to_the_same_result(device, options):
    """Few programs over a wide page table: splits without any keys are among them."""
    dtype = F32 if device == "cpu" else BF16
    case = attention_case(device, **{"heads": (4, 1), "dtypes": (dtype,) * 3, **options})
    assert plan(case).splits > 1
    check_attention(case, *attention(case))


@on_each_device
@pytest.mark.parametrize("queries", [1, [3, 17]])
def test_page_ids_never_change_a_bit_of_the_result(device, queries):
    dtype = F32 if device == "cpu" else BF16
    case = attention_case(device, [70, 33], queries, dtypes=(dtype,) * 3, num_pages=40)
    expected = attention(case)
    order = torch.randperm(40, device=device)
    moved = case.buffer.view(40, -1)[order].flatten()
    where = order.argsort().to(case.page_table.dtype)
    table = torch.where(case.page_table >= 0, where[case.page_table.long()], -1)
    assert not torch.equal(table, case.page_table)
    out, lse = attention(dataclasses.replace(case, buffer=moved, page_table=table))
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


@on_each_device
def test_a_window_of_4_sees_exactly_4_keys_itself_included(device):
    """V is one-hot by position and all logits are equal, so the output is the mask, a quarter each."""
    case = attention_case(device, [3, 4, 5, 6], 1, heads=(1, 1), dims=(16, 8), window=4)
    case.query.zero_()
    for b, n in enumerate([3, 4, 5, 6]):
        slots = [int(case.page_table[b, j // 4]) * 4 + j % 4 for j in range(n)]
        rows = torch.eye(8)[:n, None]
        buffer = case.buffer.cpu()
        oracle.store(buffer, case.value_plane, 4, F32, rows, slots)
        case.buffer.copy_(buffer)
    out, _ = attention(case)
    expected = torch.tensor([[0.0] * 8] * 4)
    for b, n in enumerate([3, 4, 5, 6]):
        expected[b, max(n - 4, 0) : n] = 1 / min(n, 4)
    torch.testing.assert_close(out.cpu().squeeze(1), expected)


@on_each_device
@pytest.mark.parametrize(("tiles", "causal"), [(0, True), (2, True), (2, False)])
def test_tile_boundaries_may_fall_anywhere_in_a_sequence(device, tiles, causal):
    """Lengths of every remainder, so that masks begin and end at each column of a tile; windows of two tiles and 5."""
    dtype = F32 if device == "cpu" else BF16
    tile = plan(attention_case(device, [40], 3, dtypes=(dtype,) * 3)).block_n
    window = tiles * tile + 5 if tiles else 0
    queries = 3 if causal else window + 3  # the first ones do not see the last keys
    lens = list(range((tiles + 1) * tile, (tiles + 2) * tile))
    case = attention_case(
        device,
        lens,
        queries,
        dtypes=(dtype,) * 3,
        heads=(1, 1),
        dims=(16, 16),
        page_size=8,
        window=window,
        causal=causal,
    )
    check_attention(case, *attention(case))


@pytest.mark.skipif(CUDA, reason="looks into the interpreter")
@pytest.mark.parametrize(
    "name", ["decode", "prefill", "everything at once", "page size 48", "window of 4 in a prefill"]
)
@pytest.mark.parametrize("width", [0, 90])
@pytest.mark.parametrize("own", [False, True], ids=["", "own scales"])
def test_only_stored_slots_and_page_table_entries_in_use_are_read(monkeypatch, name, width, own):
    """Of the pool the bytes of stored keys alone, of the table the entries of their pages, and nothing around it."""
    scaled = {"own": True, "scales": (1.0, 1.0), "dtypes": (F32, INT8, INT8)} if own else {}
    case = attention_case("cpu", **{**CASES[name], "width": width, **scaled})
    planes = [(case.key_plane, case.key_dtype.itemsize * case.query.shape[2])]
    planes += [(case.value_plane, case.value_dtype.itemsize * case.value_dim)]
    planes += [(plane, 4) for plane in (case.key_scale_plane, case.value_scale_plane) if plane is not None]
    around = torch.full((case.page_table.numel() + 2000,), 2**30, dtype=torch.int32)
    around[1000:-1000] = case.page_table.flatten()
    case.page_table = around[1000:-1000].view(case.page_table.shape)
    columns = case.page_table.shape[1]
    allowed = np.zeros(around.nbytes, dtype=bool)
    stored = np.zeros(case.buffer.nbytes, dtype=bool)
    for b, n in enumerate(case.seq_lens.tolist()):
        used = (1000 + b * columns) * 4
        allowed[used : used + -(-n // case.page_size) * 4] = True
        for j in range(n):
            slot = int(case.page_table[b, j // case.page_size]) * case.page_size + j % case.page_size
            for plane, row_bytes in planes:
                for head in range(case.kv_heads):
                    at = oracle.address(plane, case.page_size, slot, head)
                    stored[at : at + row_bytes] = True

    read = record_reads(monkeypatch)
    attention(case)
    for tensor, permitted in ((around, allowed), (case.buffer, stored)):
        at = read() - tensor.data_ptr()
        at = at[(at >= 0) & (at < tensor.nbytes)]
        assert len(at)
        assert permitted[at].all()


def record_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], np.ndarray]:
    """From now on note the addresses that kernels load from; the function returns them."""
    from triton.runtime.interpreter import InterpreterBuilder

    addresses: list[np.ndarray] = []
    load = InterpreterBuilder.create_masked_load

    def create_masked_load(self, pointers, mask, *args):
        at, keep = np.broadcast_arrays(pointers.data, mask.data)
        addresses.append(at[keep].astype(np.int64))
        return load(self, pointers, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", create_masked_load)
    return lambda: np.unique(np.concatenate(addresses))


@on_each_device
@pytest.mark.parametrize("width", [2, 70])
def test_lengths_past_the_page_table_read_no_entry_behind_it(device, width):
    """Refused where values are checked; elsewhere the table's keys are all there are. Behind it: pages of NaN."""
    lens = [width * 4]
    case = attention_case(device, lens, [3], causal=False, num_pages=width + 9)
    free = sorted(set(range(width + 9)) - set(case.page_table.flatten().tolist()))
    around = torch.tensor([[*case.page_table[0].tolist(), *free]], dtype=torch.int32, device=device)
    expected, expected_lse = attention(case)
    out, lse = attention(dataclasses.replace(case, page_table=around[:, :width], seq_lens=case.seq_lens + 7))
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.skipif(CUDA, reason="looks into the interpreter")
def test_query_starts_past_the_last_row_write_nothing_behind_it(monkeypatch):
    from triton.runtime.interpreter import InterpreterBuilder

    addresses: list[np.ndarray] = []

    def create_masked_store(self, pointers, value, mask, *args):  # notes, and writes nothing
        at, keep = np.broadcast_arrays(pointers.data, mask.data)
        addresses.append(at[keep].astype(np.int64))

    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", create_masked_store)
    case = attention_case("cpu", [13, 30], [3, 9])
    out, lse = attention(dataclasses.replace(case, query_start=case.query_start + torch.tensor([0, 0, 20])))
    written, inside = np.concatenate(addresses), 0
    for tensor in (out, lse):
        inside += ((written >= tensor.data_ptr()) & (written < tensor.data_ptr() + tensor.nbytes)).sum()
    assert inside == len(written) == out.numel() + lse.numel()


@on_each_device
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("forgotten", [True, False])
def test_pages_before_the_window_may_be_freed_and_hold_nan(device, causal, forgotten):
    """Whether the table still names them or has -1 there."""
    case = attention_case(device, [70, 41], [2, 1], window=9, causal=causal, num_pages=32)
    expected, expected_lse = oracle.attention_of(case)
    first = {0: 70 - 2 - 9 + 1, 1: 41 - 1 - 9 + 1}
    for b, oldest in first.items():
        for column in range(oldest // 4):
            page = int(case.page_table[b, column])
            case.buffer[page * case.key_plane[1] : (page + 1) * case.key_plane[1]] = NAN_BYTE
            if forgotten:
                case.page_table[b, column] = -1
    out, lse = attention(case)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE[F32])
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-4)


@on_each_device
@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("kind", ["key", "value"])
def test_nan_of_a_key_that_the_bias_hides_does_not_leak(device, form, kind):
    case = attention_case(device, [30], 9, causal=False)
    shown = torch.ones(1, 1, 1, 30, dtype=torch.bool)
    shown[..., [3, 17, 29]] = False
    bias = shown if form == "bool" else torch.zeros(1, 1, 1, 30).masked_fill(~shown, -INF)
    case = dataclasses.replace(case, bias=bias.to(device))
    buffer = case.buffer.cpu()
    plane = case.key_plane if kind == "key" else case.value_plane
    for j in (3, 17, 29):
        slot = int(case.page_table[0, j // 4]) * 4 + j % 4
        oracle.store(buffer, plane, 4, F32, torch.full((1, 2, 32), torch.nan), [slot])
    case.buffer.copy_(buffer)
    check_attention(case, *attention(case))


@on_each_device
def test_a_nan_key_reaches_every_query_that_sees_it_and_no_earlier_one(device):
    case = attention_case(device, [40], 40, heads=(1, 1))
    buffer = case.buffer.cpu()
    slot = int(case.page_table[0, 5]) * 4 + 2  # key 22
    oracle.store(buffer, case.key_plane, 4, F32, torch.full((1, 1, 32), torch.nan), [slot])
    case.buffer.copy_(buffer)
    out, _ = attention(case)
    assert out[22:].isnan().all()
    assert out[:22].isfinite().all()


@on_each_device
def test_queries_may_be_slices_of_a_fused_qkv_and_the_output_is_contiguous(device):
    case = attention_case(device, [13, 30], [1, 9])
    expected = attention(case)
    fused = torch.randn(10, (4 + 2 + 2) * 32, device=device)
    fused[:, :128] = case.query.reshape(10, 128)
    sliced = fused.split([128, 64, 64], 1)[0].view(10, 4, 32)
    heads_first = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    dims_first = case.query.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for query in (sliced, heads_first, dims_first):
        out, lse = attention(dataclasses.replace(case, query=query))
        assert out.is_contiguous()
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


@on_each_device
def test_page_table_and_lengths_may_be_strided(device):
    case = attention_case(device, [13, 30], [1, 9])
    expected, _ = attention(case)
    strided = {
        "page_table": torch.stack([case.page_table, case.page_table], -1)[..., 0],
        "seq_lens": torch.stack([case.seq_lens, case.seq_lens], 1)[:, 0],
        "query_start": torch.stack([case.query_start, case.query_start], 1)[:, 0],
    }
    out, _ = attention(dataclasses.replace(case, **strided))
    assert torch.equal(out, expected)
    wide = torch.full((2, 20), -1, dtype=torch.int32, device=device)
    wide[:, : case.page_table.shape[1]] = case.page_table
    out, _ = attention(dataclasses.replace(case, page_table=wide[:, : case.page_table.shape[1]]))
    assert torch.equal(out, expected)


@on_each_device
def test_uniform_batches_need_no_query_start(device):
    case = attention_case(device, [13, 30, 8], [4, 4, 4])
    expected = attention(case)
    out, lse = attention(dataclasses.replace(case, query_start=None))
    torch.testing.assert_close((out, lse), expected, rtol=1e-5, atol=1e-6)


@on_each_device
@pytest.mark.parametrize("return_lse", [True, False])
def test_no_queries_and_no_sequences_are_no_work(device, return_lse):
    case = dataclasses.replace(attention_case(device, [13, 30], 1), return_lse=return_lse)
    for b in (2, 0):
        empty = dataclasses.replace(
            case, query=case.query[:0], seq_lens=case.seq_lens[:b], page_table=case.page_table[:b]
        )
        out, lse = attention(empty)
        assert out.shape == (0, 4, 32)
        assert lse.shape == ((0, 4) if return_lse else (0,))


@on_each_device
def test_rows_without_any_sequence_are_padding(device):
    case = attention_case(device, [13], [3])
    start = torch.zeros(1, dtype=torch.int32, device=device)
    case = dataclasses.replace(case, seq_lens=case.seq_lens[:0], page_table=case.page_table[:0], query_start=start)
    out, lse = attention(case)
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -INF).all()


@on_each_device
@pytest.mark.parametrize("lens", [[13, 30], [13]])
def test_the_log_sum_exp_is_optional(device, lens):
    case = attention_case(device, lens, 1, num_pages=60, width=40)
    expected, _ = attention(case)
    out, lse = attention(dataclasses.replace(case, return_lse=False))
    assert torch.equal(out, expected)
    assert lse.shape == (0,)
    assert lse.dtype == F32


def shapes(**options: Any) -> Attention:
    """A call of these shapes, without memory behind it."""
    defaults: dict[str, Any] = dict(tokens=1, batch=1, heads=(32, 8), dim=128, width=256, page_size=16, dtype=BF16)
    o = {**defaults, **options}
    meta = {"device": "meta"}
    q_heads, kv_heads = o["heads"]
    return Attention(
        torch.empty(0, dtype=torch.uint8, **meta),
        torch.empty(o["tokens"], q_heads, o["dim"], dtype=o["dtype"], **meta),
        torch.empty(o["batch"], o["width"], dtype=torch.int32, **meta),
        torch.empty(o["batch"], dtype=torch.int32, **meta),
        torch.empty(o["batch"] + 1, dtype=torch.int32, **meta) if o.get("ragged") else None,
        [], [], o["page_size"], kv_heads, o["dim"], o["dtype"], o["dtype"],
        softmax_scale=1.0, window=o.get("window", 0), max_query_len=o.get("max_query_len", 0),
    )  # fmt: skip


def test_splits_fill_the_device_and_no_more(monkeypatch):
    monkeypatch.setattr(attention_plan, "multiprocessors", lambda device: 132)
    assert plan(shapes(batch=64, tokens=64)).splits == 1
    assert 32 <= plan(shapes(width=8192)).splits <= attention_plan.MAX_SPLITS
    assert plan(shapes(width=8192, heads=(8, 1))).splits > plan(shapes(width=8192)).splits
    assert plan(shapes(width=4)).splits == 1
    assert plan(shapes(width=8192, window=128)).splits <= 2
    assert plan(shapes(batch=8, tokens=8 * 4096)).splits == 1


@pytest.mark.parametrize(("dim", "block_n"), [(64, 128), (80, 64), (128, 64), (192, 32), (256, 32)])
def test_tiles_of_decode_hold_32_kib(dim, block_n, monkeypatch):
    """Of keys and values, padded to powers of two; with few keys a program at most 64."""
    monkeypatch.setattr(attention_plan, "multiprocessors", lambda device: 132)
    for call, few in (
        (shapes(batch=64, tokens=64, dim=dim), False),
        (shapes(batch=8, tokens=8, dim=dim, width=128), True),  # 8 splits of 2048 keys
        (shapes(batch=64, tokens=64, dim=dim, window=128), True),
    ):
        p = plan(call)
        assert p.block_n == (min(block_n, 64) if few else block_n)
        assert p.block_n * (p.block_k + p.block_v) * 2 <= 32768


def test_tiles_hold_any_group_and_fit(monkeypatch):
    monkeypatch.setattr(attention_plan, "multiprocessors", lambda device: 132)
    for group in (1, 3, 5, 7, 8, 48, 128, 200):
        for tokens in (1, 3, 5000):
            for dtype in (BF16, F32):
                for dim in (16, 80, 128, 192, 256, 576):
                    p = plan(shapes(tokens=tokens, heads=(2 * group, 2), dim=dim, dtype=dtype))
                    assert p.block_q >= 1
                    assert p.block_m >= 16
                    assert p.heads * p.head_blocks >= group
                    assert p.query_blocks * p.block_q >= tokens


@pytest.mark.parametrize("queries", [1, 3, 4, 200])
@pytest.mark.parametrize("batch", [1, 2, 8, 33, 200])
def test_ragged_sequences_of_one_length_are_split_as_others(batch, queries, monkeypatch):
    """Of their blocks up to batch + 1 are empty, which fill no multiprocessor."""
    monkeypatch.setattr(attention_plan, "multiprocessors", lambda device: 132)
    options: dict[str, Any] = dict(batch=batch, tokens=batch * queries, width=512)
    ragged = plan(shapes(ragged=True, max_query_len=queries, **options))
    even = plan(shapes(**options))
    assert ragged.query_blocks > even.query_blocks
    assert dataclasses.replace(ragged, query_blocks=even.query_blocks) == even


@pytest.mark.parametrize("lens", [[1, 1, 1], [0, 0, 9], [33, 0, 1, 32], [5], [64, 7, 7]])
def test_blocks_with_queries_are_no_more_than_are_counted(lens):
    for block_q in (1, 4, 32):
        filled = sum(-(-n // block_q) for n in lens)
        blocks = attention_plan.query_blocks_of(sum(lens), len(lens), True, block_q)
        for longest in (max(lens), sum(lens)):
            counted = attention_plan.filled_blocks_of(blocks, sum(lens), len(lens), longest, block_q)
            assert filled <= counted <= blocks


def test_the_grid_covers_every_ragged_batch():
    """Blocks of sequence b: from query_start[b] // block_q + b on, as many as the next one leaves."""
    for lens in ([1, 1, 1], [0, 0, 9], [33, 0, 1, 32], [5], []):
        tokens = sum(lens) + 3
        p = plan(shapes(tokens=tokens, batch=len(lens), ragged=True))
        starts = [sum(lens[:b]) for b in range(len(lens) + 1)]
        firsts = [start // p.block_q + b for b, start in enumerate(starts)] + [p.query_blocks]
        for b, n in enumerate([*lens, 3]):
            assert (firsts[b + 1] - firsts[b]) * p.block_q >= n
