"""merge_attention's kernel: two parts of one softmax."""

from __future__ import annotations

from dataclasses import replace

import oracle
import pytest
import torch
from kernels.cases import TOLERANCE, attention_case, on_each_device

from pm_ops.kernels.attention import attention
from pm_ops.kernels.merge import merge_attention
from pm_ops.ops.merge import MergeAttention

F32, F16 = torch.float32, torch.float16
BF16_ON_CUDA = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)


def check(out_a, lse_a, out_b, lse_b):
    out, lse = merge_attention(MergeAttention(out_a, lse_a, out_b, lse_b))
    expected, expected_lse = oracle.merge(*(t.cpu() for t in (out_a, lse_a, out_b, lse_b)))
    assert out.dtype == out_a.dtype
    assert out.is_contiguous()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE[out.dtype])
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-6, atol=1e-5)


@on_each_device
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("dim", [16, 20, 80])
def test_parts_are_weighted_by_their_log_sum_exps(device, dtype, dim):
    a, b = torch.randn(2, 7, 3, dim, device=device).to(dtype)
    lse_a, lse_b = torch.randn(2, 7, 3, device=device) * 20
    check(a, lse_a, b, lse_b)


@on_each_device
def test_an_empty_part_counts_nothing_whatever_it_holds_and_two_give_zero(device):
    a, b = torch.full((4, 2, 16), torch.nan, device=device), torch.randn(4, 2, 16, device=device)
    lse_a = torch.full((4, 2), -torch.inf, device=device)
    lse_b = torch.randn(4, 2, device=device)
    lse_b[2] = -torch.inf
    b[2] = torch.nan
    check(a, lse_a, b, lse_b)
    check(b, lse_b, a, lse_a)


@on_each_device
def test_a_part_that_is_not_a_number_shows_in_the_result(device):
    nan, ones = (torch.full((1, 1, 16), x, device=device) for x in (torch.nan, 1.0))
    for first, second in ((nan, ones), (ones, nan)):
        out, lse = merge_attention(MergeAttention(first, first[..., 0], second, second[..., 0]))
        assert out.isnan().all()
        assert lse.isnan().all()


@on_each_device
def test_extreme_log_sum_exps_stay_finite(device):
    a, b = torch.randn(2, 3, 1, 16, device=device)
    lse_a = torch.tensor([[1e4], [-1e4], [88.0]], device=device)
    lse_b = torch.tensor([[-1e4], [1e4], [88.0]], device=device)
    check(a, lse_a, b, lse_b)


@on_each_device
def test_parts_may_be_strided_and_none_is_no_work(device):
    a, b = torch.randn(2, 3, 5, 16, device=device).transpose(1, 2)
    lse_a, lse_b = torch.randn(2, 3, 5, device=device).transpose(1, 2)
    check(a, lse_a, b, lse_b)
    check(a[:0], lse_a[:0], b[:0], lse_b[:0])


@on_each_device
@pytest.mark.parametrize("dtype", [F32, BF16_ON_CUDA])
def test_a_shared_prefix_merged_with_its_suffixes_is_attention_over_both(device, dtype):
    """Cascade: the first 8 keys and the rest attended apart, the sinks in one part only."""
    whole = attention_case(device, [20, 8, 13], 1, dtypes=(dtype,) * 3, page_size=4, causal=False, sinks=torch.randn(4))
    first, rest = torch.tensor([8, 8, 8], device=device), torch.tensor([12, 0, 5], device=device)
    prefix = replace(whole, page_table=whole.page_table[:, :2], seq_lens=first, sinks=None)
    suffix = replace(whole, page_table=whole.page_table[:, 2:], seq_lens=rest)
    out, lse = merge_attention(MergeAttention(*attention(prefix), *attention(suffix)))
    expected, expected_lse = oracle.attention_of(whole)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-4)
