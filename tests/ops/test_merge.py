"""merge_attention against one softmax over both parts, in float64."""

import pytest
import torch

import pm_ops


def part(tokens, heads, keys, dim):
    logits = torch.randn(tokens, heads, keys, dtype=torch.float64) * 3
    values = torch.randn(tokens, heads, keys, dim, dtype=torch.float64)
    return logits, values


def attend(logits, values):
    out = (torch.softmax(logits, -1)[..., None] * values).sum(2)
    return out, torch.logsumexp(logits, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_parts_give_the_softmax_over_both(dtype):
    (la, va), (lb, vb) = part(5, 3, 7, 16), part(5, 3, 2, 16)
    expected, expected_lse = attend(torch.cat((la, lb), 2), torch.cat((va, vb), 2))
    (oa, ea), (ob, eb) = attend(la, va), attend(lb, vb)
    out, lse = pm_ops.merge_attention(oa.to(dtype), ea.float(), ob.to(dtype), eb.float())
    error = ((out.double() - expected).norm() / expected.norm()).item()
    assert error < {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}[dtype] and out.dtype == dtype
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


def test_an_empty_part_changes_nothing_and_two_give_zero():
    (la, va) = part(3, 2, 4, 8)
    out_a, lse_a = (x.float() for x in attend(la, va))
    nan, empty = torch.full_like(out_a, torch.nan), torch.full_like(lse_a, -torch.inf)
    for order in ((out_a, lse_a, nan, empty), (nan, empty, out_a, lse_a)):
        out, lse = pm_ops.merge_attention(*order)
        assert torch.equal(out, out_a) and torch.equal(lse, lse_a)
    out, lse = pm_ops.merge_attention(nan, empty, nan, empty)
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, empty)


def test_large_log_sum_exps_do_not_overflow():
    ones = torch.ones(1, 1, 4)
    out, lse = pm_ops.merge_attention(ones, torch.tensor([[900.0]]), 3 * ones, torch.tensor([[900.0]]))
    assert out.flatten().tolist() == [2.0] * 4 and lse.item() == pytest.approx(900.6931, abs=1e-3)


def test_a_part_that_is_not_a_number_shows_in_the_result():
    out, lse = torch.ones(2, 1, 4), torch.zeros(2, 1)
    bad_out, bad_lse = out.clone(), lse.clone()
    bad_out[0], bad_lse[0] = torch.nan, torch.nan
    for order in ((bad_out, bad_lse, out, lse), (out, lse, bad_out, bad_lse)):
        merged, merged_lse = pm_ops.merge_attention(*order)
        assert merged[0].isnan().all() and merged_lse[0].isnan().all()
        assert merged[1].eq(1).all() and merged_lse[1].isfinite().all()


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    out, lse = torch.ones(2, 3, 4), torch.ones(2, 3)
    with pytest.raises(ValueError, match="lse_b must be float32"):
        pm_ops.merge_attention(out, lse, out, lse.double())
    with pytest.raises(ValueError, match="out_a and out_b"):
        pm_ops.merge_attention(out, lse, out[:1], lse)
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        pm_ops.merge_attention(out.int(), lse, out.int(), lse)
    with pytest.raises(ValueError, match="lse_b is on meta"):
        pm_ops.merge_attention(out, lse, out, lse.to("meta"))


def test_strided_parts_give_contiguous_results():
    out, lse = torch.randn(2, 3, 4, 5), torch.randn(2, 4, 3)
    got = pm_ops.merge_attention(out[0], lse[0].T, out[1], lse[1].T)
    expected = pm_ops.merge_attention(out[0], lse[0].T.contiguous(), out[1], lse[1].T.contiguous())
    assert all(torch.equal(g, e) and g.is_contiguous() for g, e in zip(got, expected, strict=True))
