"""8-bit caches, whose rows attention reads as words of two elements, and their operands in float16."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from kernels.cases import attention_case, check_attention, on_each_device, plan
from kernels.test_attention import INF, hidden, randn

from pm_ops.kernels.attention import attention

F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EIGHT_BITS = [E4M3, E5M2, INT8]
OPTIONS = {
    "decode": dict(lens=[13, 1, 30, 0], queries=1),
    "mixed": dict(lens=[9, 21, 30, 7, 33], queries=[1, 21, 6, 0, 1], spare_rows=3),
    "wide rows": dict(lens=[140, 30], queries=1, dims=(128, 128), page_size=16),
    "dims that fill no tile": dict(lens=[13, 30], queries=[1, 9], dims=(12, 20)),
    "dims 80 and 96": dict(lens=[13, 30], queries=[1, 9], dims=(80, 96)),
    "splits": dict(lens=[200, 40], queries=1, heads=(4, 1), width=90),
    "window, softcap and sinks": dict(lens=[40, 33], queries=[40, 20], window=6, softcap=3.0, sinks=randn(4)),
    "a bias": dict(lens=[13, 30], queries=[1, 9], bias=hidden(2, 4, 9, 30)),
    "head major": dict(lens=[13, 30], queries=[1, 9], order="head_major"),
}


@on_each_device
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("own", [False, True], ids=["one scale", "own scales"])
def test_packed_rows_equal_dense_attention(device, name, dtype, own):
    query = F16 if device == "cpu" else BF16
    scales = {} if own else {"scales": (0.05, 0.03)}
    case = attention_case(device, dtypes=(query, dtype, dtype), own=own, **scales, **OPTIONS[name])
    assert plan(case).packed
    check_attention(case, *attention(case))


@on_each_device
@pytest.mark.parametrize(
    "dtypes",
    [
        (F16, INT8, F32),
        (F32, E4M3, E4M3),
        pytest.param((BF16, E4M3, BF16), marks=pytest.mark.gpu),  # the interpreter rounds to bf16 wrongly
        pytest.param((BF16, BF16, E4M3), marks=pytest.mark.gpu),
    ],
)
def test_rows_that_cannot_be_packed(device, dtypes):
    case = attention_case(device, [13, 30], [1, 9], dtypes=dtypes, scales=(0.25, 0.5))
    assert not plan(case).packed
    check_attention(case, *attention(case))


@on_each_device
def test_rows_at_odd_addresses_are_not_packed(device):
    case = attention_case(device, [13, 30], [1, 9], dtypes=(F16, E4M3, E4M3))
    buffer = torch.cat((case.buffer[:1], case.buffer))
    planes = {f"{kind}_plane": [plane[0] + 1, *plane[1:]]
              for kind, plane in (("key", case.key_plane), ("value", case.value_plane))}  # fmt: skip
    moved = dataclasses.replace(case, buffer=buffer, **planes)
    assert plan(case).packed
    assert not plan(moved).packed
    check_attention(moved, *attention(moved))


@on_each_device
@pytest.mark.parametrize("size", [1e-30, 1e6, 1e30])
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=str)
def test_bfloat16_queries_of_any_size(device, size, dtype):
    """float16 ends at 65504; the logits are of the usual size."""
    case = attention_case(device, [13, 30], [1, 9], dtypes=(BF16, dtype, dtype), spread=size, scales=(0.05, 0.03))
    case = dataclasses.replace(case, softmax_scale=case.softmax_scale / size)
    case.query[0] = 0
    check_attention(case, *attention(case))


@on_each_device
def test_scales_of_values_may_differ_by_any_factor(device):
    """A key with a tiny value scale decides alone; the next one, with a huge one, is all but hidden."""
    dtype = F16 if device == "cpu" else BF16
    case = attention_case(device, [40], [1], dtypes=(dtype, E4M3, E4M3), own=True, page_size=8)
    offset, page_stride, token_stride, head_stride, _ = case.value_scale_plane
    for j in range(40):
        page = int(case.page_table[0, j // 8])
        for head in range(2):
            at = offset + page * page_stride + j % 8 * token_stride + head * head_stride
            case.buffer[at : at + 4].view(F32).fill_(1e-5 if j % 2 else 1e3)
    bias = torch.zeros(1, 1, 1, 40, device=device)
    bias[..., ::2] = -60.0
    case = dataclasses.replace(case, bias=bias)
    out, lse = attention(case)
    scaled = out.double() * 1e5  # to a size at which the tolerances hold
    reference = dataclasses.replace(case, value_scale_plane=None, value_scale=1.0)
    assert out.isfinite().all() and (out != 0).all()
    hidden_keys = dataclasses.replace(reference, bias=bias.masked_fill(bias < 0, -INF))
    expected, expected_lse = attention(hidden_keys)
    torch.testing.assert_close(scaled, expected.double(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)
