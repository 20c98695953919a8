"""Terms: two elements of a graph's tensors have one term if, and only if, the graph shows that they are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pm_ops.compile_passes.affine import Affine, Axis
from pm_ops.compile_passes.terms import Term, Terms

ROW, LANE = Axis("row", 3), Axis("lane", 4)


def terms_of(f: Callable[..., Any], *args: Tensor) -> Callable[..., Term]:
    """``at(i, lane)``: the term of the i-th output's ``[row, lane]``, for all rows and lanes."""
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        graph = make_fx(f)(*args).graph
    terms, (output,) = Terms(graph), graph.find_nodes(op="output")
    return lambda i, lane: terms.at(output.args[0][i], (Affine.of(ROW), lane))


def test_halves_of_a_concatenation_are_equal_if_they_are_of_one_tensor() -> None:
    at = terms_of(lambda x, y: (torch.cat((x, x), -1).cos(), torch.cat((x, y), -1).cos()), *torch.randn(2, 3, 4))
    first, second = Affine.of(LANE), Affine.of(LANE, 1, 4)
    assert at(0, first) is at(0, second) is at(1, first)
    assert at(1, first) is not at(1, second)


def test_elements_are_the_same_whatever_views_and_copies_lead_to_them() -> None:
    def f(x: Tensor) -> Any:
        pairs = x.reshape(3, 4, 2).transpose(0, 1).contiguous().transpose(0, 1)
        return x[:, ::2] + 1, pairs[..., 0] + 1, pairs.flatten(1)[:, ::2] + 1, x[:, 1::2] + 1, x[:, ::2] + 2

    at = terms_of(f, torch.randn(3, 8))
    found = [at(i, Affine.of(LANE)) for i in range(5)]
    assert found[0] is found[1] is found[2]
    assert found[0] is not found[3] and found[0] is not found[4]


def test_repeated_calls_are_equal_unless_what_they_read_was_written_between() -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Any:
        first = (x @ y, z @ y)
        z.add_(1)
        return *first, x @ y, z @ y

    at = terms_of(f, torch.randn(3, 3), torch.randn(3, 4), torch.randn(3, 3))
    x_y, z_y, again, after = (at(i, Affine.of(LANE)) for i in range(4))
    assert x_y is again and z_y is not after


def test_a_tensor_written_in_place_is_what_it_was_before_and_what_was_written_after() -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        before = y.cos()
        y.add_(1)
        return before, y.cos(), (x * 2).cos(), (x * 2 + 1).cos()

    at = terms_of(f, torch.randn(3, 4))
    before, after, times, plus = (at(i, Affine.of(LANE)) for i in range(4))
    assert before is times and after is plus and before is not after


def test_torchs_rms_norm_is_the_norm_written_out() -> None:
    def f(x: Tensor, weight: Tensor) -> Any:
        own = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5) * weight
        return torch.nn.functional.rms_norm(x, [4], weight, 0.5), own, x * weight

    at = terms_of(f, torch.randn(3, 4), torch.randn(4))
    assert at(0, Affine.of(LANE)) is at(1, Affine.of(LANE)) is not at(2, Affine.of(LANE))


def test_what_is_written_in_part_is_something_else_after_every_write() -> None:
    def f(x: Tensor) -> Any:
        y = x * 2
        y[:2].add_(1)
        once = y.cos(), y.view(torch.int32) + 0
        y[:2].add_(1)
        return *once, y.cos(), y.view(torch.int32) + 0, (x * 2 + 1).cos()

    at = terms_of(f, torch.randn(3, 4))
    once, bits, twice, later, whole = (at(i, Affine.of(LANE)) for i in range(5))
    assert once is not twice and bits is not later and once is not whole


def test_two_tensors_made_alike_differ_once_they_are_written() -> None:
    def f(x: Tensor, i: Tensor) -> Any:
        first, second = torch.zeros(3, 4), torch.zeros(3, 4)
        before = first + 0, second + 0
        first[i], second[i] = x, x * 2
        return *before, first + 0, second + 0

    at = terms_of(f, torch.randn(3, 4), torch.tensor([2, 0, 1]))
    found = [at(i, Affine.of(LANE)) for i in range(4)]
    assert found[0] is found[1] and len(set(found)) == 3


def test_what_is_joined_with_a_wider_type_is_cast() -> None:
    at = terms_of(lambda x, y: (torch.cat((x, y), -1), x.float()), torch.randn(3, 4).half(), torch.randn(3, 4))
    assert at(0, Affine.of(LANE)) is at(1, Affine.of(LANE))
