"""zero_() in eager code zeroes the caches that a view covers whole, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind

LAYERS, HEADS, DIM, PAGE = 2, 2, 8, 4


def make_pool() -> PagePool:
    return PagePool(page_major(LAYERS, HEADS, DIM, PAGE, torch.float32), 10)


def test_zero_zeroes_the_caches_planes_and_nothing_else() -> None:
    keys, values = ([torch.randn(2, HEADS, 13, DIM) for _ in range(LAYERS)] for _ in range(2))
    pool = make_pool()
    pool.buffer.fill_(0xFF)
    binding = bind(pool, keys=keys, values=values)
    before = pool.buffer.clone().view(torch.float32).view(10, LAYERS, 2, PAGE, HEADS, DIM)
    assert keys[1].zero_() is keys[1]
    after = pool.buffer.view(torch.float32).view(10, LAYERS, 2, PAGE, HEADS, DIM)
    assert binding.page_table is not None
    for row in binding.page_table.tolist():
        for position in range(13):
            cell = after[row[position // PAGE], 1, 0, position % PAGE]
            assert not cell.any()
            cell.copy_(before[row[position // PAGE], 1, 0, position % PAGE])
    assert torch.equal(after.view(torch.int32), before.view(torch.int32))


STACKS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], list[Tensor]], Callable[[Tensor], list[Tensor]]]] = {
    "[layer, 2, slot]": ((LAYERS, 2, 40, HEADS, DIM), lambda kv: list(kv[:, 0]), lambda kv: list(kv[:, 1])),
    "[2, layer, slot]": ((2, LAYERS, 40, HEADS, DIM), lambda kv: list(kv[0]), lambda kv: list(kv[1])),
    "[layer, slot, 2]": (
        (LAYERS, 40, 2, HEADS, DIM), lambda kv: list(kv[:, :, 0].unbind()), lambda kv: list(kv[:, :, 1].unbind()),
    ),
    "[slot, layer, 2]": (
        (40, LAYERS, 2, HEADS, DIM), lambda kv: list(kv[:, :, 0].unbind(1)), lambda kv: list(kv[:, :, 1].unbind(1)),
    ),
}  # fmt: skip
# what eager code takes of a stack, and whether that is whole caches
PARTS: list[tuple[str, Callable[[Any], Any], bool]] = [
    ("[layer, 2, slot]", lambda kv: kv[:, 0], True),
    ("[layer, 2, slot]", lambda kv: kv[1], True),
    ("[layer, 2, slot]", lambda kv: kv[0][1], True),
    ("[layer, 2, slot]", lambda kv: kv.select(1, 1), True),
    ("[layer, 2, slot]", lambda kv: kv.narrow(1, 1, 1), True),
    ("[layer, 2, slot]", lambda kv: kv[...], True),
    ("[layer, 2, slot]", lambda kv: kv[2:], True),
    ("[layer, 2, slot]", lambda kv: kv[:, :, :39], False),
    ("[layer, 2, slot]", lambda kv: kv[:, 0, :, :1], False),
    ("[layer, 2, slot]", lambda kv: kv[0, 0, 3], False),
    ("[2, layer, slot]", lambda kv: kv[0], True),
    ("[2, layer, slot]", lambda kv: kv[:, 1], True),
    ("[2, layer, slot]", lambda kv: kv[:, :, ::2], False),
    ("[layer, slot, 2]", lambda kv: kv[0, :, 1], True),
    ("[layer, slot, 2]", lambda kv: kv[:, :, 0], True),
    ("[layer, slot, 2]", lambda kv: kv[:, :20], False),
    ("[layer, slot, 2]", lambda kv: kv[1, 2, 1], False),
    ("[slot, layer, 2]", lambda kv: kv[:, 1, 0], True),
    ("[slot, layer, 2]", lambda kv: kv[:, :, 1], True),
    ("[slot, layer, 2]", lambda kv: kv[:, 1, :, 1], False),
]


@pytest.mark.parametrize("held", [False, True], ids=["made anew", "held"])
@pytest.mark.parametrize(("stack", "part", "whole"), PARTS)
def test_zero_of_a_part_of_a_stack_is_exact_or_refused(
    stack: str, part: Callable[[Any], Any], whole: bool, held: bool
) -> None:
    """A view made of the bound stack, or one that the model made before and has kept."""
    shape, keys, values = STACKS[stack]
    kv = torch.randn(shape)
    want, view = kv.clone(), part(kv)
    binding = bind(make_pool(), keys=keys(kv), values=values(kv))
    before = binding.pool.buffer.clone()
    view = view if held else part(kv)
    if whole:
        part(want).zero_()
        assert view.zero_() is view
    else:
        with pytest.raises(RuntimeError, match="on a part of"):
            view.zero_()
        assert torch.equal(binding.pool.buffer, before)
    binding.release()
    assert torch.equal(kv, want)
