"""The benchmark's reference, against a slower one that shares nothing with it, and its measure of error."""

import pytest
import torch
from bench.fakes import SHAPES, attend

from pm_ops.bench import oracle
from pm_ops.bench.oracle import Error, error, rotate
from pm_ops.bench.work import attention_work


@pytest.mark.parametrize("logits", [1 << 27, 60], ids=["at once", "in pieces"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_is_attention_by_the_definition(name: str, logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "_LOGITS", logits)
    work = attention_work(SHAPES[name], torch.device("cpu"))
    s = work.shape
    rows = [work.rows(b) for b in range(len(s.seq_lens))]
    right = attend(work.query, [k.float() for k, _ in rows], [v.float() for _, v in rows], s.query_lens,
                   s.head_dim**-0.5, s.scales, s.window, work.sinks)  # fmt: skip
    assert work.reference.dtype == torch.float64
    torch.testing.assert_close(work.reference, right, rtol=1e-12, atol=1e-12)


def test_rotation_is_a_product_of_complex_numbers() -> None:
    rows, angle, positions = torch.randn(5, 3, 8), torch.rand(7, 4, dtype=torch.float64), torch.tensor([0, 6, 2, 2, 5])
    turned = torch.complex(*rows.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[positions][:, None]
    result = rotate(rows, positions, torch.cat((angle.cos(), angle.sin()), -1))
    torch.testing.assert_close(result, torch.cat((turned.real, turned.imag), -1))


def test_one_wrong_row_among_many_does_not_hide() -> None:
    right = torch.randn(10_000, 1, 4, dtype=torch.float64)
    result = right.clone()
    result[17] *= -1
    found = error(result, right)
    assert found.total < 0.05 and found.worst == pytest.approx(2.0)
    assert not found.within(0.05)
    assert error(right.float(), right).within(1e-6)


def test_what_is_not_finite_or_of_another_shape_is_infinitely_wrong() -> None:
    right = torch.ones(3, 2, 4, dtype=torch.float64)
    for result in (None, torch.ones(3, 2, 5), torch.full((3, 2, 4), torch.nan), torch.full((3, 2, 4), torch.inf)):
        assert error(result, right) == Error(float("inf"), float("inf"))
