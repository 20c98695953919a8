"""The rewritten graphs, as they are handed to the inner backend."""

# ruff: noqa: E501

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor

HEADS, DIM, SLOTS = 2, 8, 20


class Layer(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], body: Any) -> None:
        super().__init__()
        self.k, self.v, self.body = [torch.randn(shape)], [torch.randn(shape)], body

    def forward(self, *args: Any) -> Any:
        return self.body(self.k[0], self.v[0], *args)


def rewritten(paged: Any, shape: tuple[int, ...], body: Any, *args: Any) -> str:
    """The graph's code without deletions, namespaces and the arguments of factories, which vary with the version."""
    twins = paged(Layer(shape, body), pages=5 if len(shape) == 3 else 11)
    twins.check(*args)
    lines = [line.split(";")[0].strip() for line in twins.backend.graphs[0].splitlines()]
    code = "\n".join(line for line in lines if line).replace("torch.ops.", "")
    return re.sub(r", (dtype|device|layout|pin_memory) = (device\(.*?\)|[\w.]+)", "", code)


def test_k_and_v_at_the_same_slots_become_one_store(paged: Any) -> None:
    def body(k: Tensor, v: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        k[slots] = x
        v[slots] = x * 2
        return k[slots]

    code = rewritten(paged, (SLOTS, HEADS, DIM), body, torch.randn(3, HEADS, DIM), torch.tensor([1, 9, 4]))
    assert_expected_inline(
        code,
        """\
def forward(self, l_args_1_, l_args_0_, pm_buffer):
clamp = aten.clamp.default(l_args_1_, -20, 19)
ne = aten.ne.Tensor(clamp, l_args_1_)
remainder = aten.remainder.Scalar(clamp, 20)
masked_fill = aten.masked_fill.Scalar(remainder, ne, -1)
mul = aten.mul.Tensor(l_args_0_, 2)
store_kv = pm_ops.store_kv.default(pm_buffer, l_args_0_, mul, masked_fill, [0, 512, 64, 32, 5], [256, 512, 64, 32, 5], 4, torch.float32, torch.float32)
load_kv = pm_ops.load_kv.default(pm_buffer, masked_fill, [0, 512, 64, 32, 5], 4, 2, 8, torch.float32)
return (load_kv,)""",
    )


def test_a_read_between_the_writes_of_k_and_v_keeps_them_apart(paged: Any) -> None:
    def body(k: Tensor, v: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        k[slots] = x
        y = k[slots] + 1
        v[slots] = y
        return y

    code = rewritten(paged, (SLOTS, HEADS, DIM), body, torch.randn(3, HEADS, DIM), torch.tensor([1, 9, 4]))
    assert_expected_inline(
        code,
        """\
def forward(self, l_args_1_, l_args_0_, pm_buffer):
clamp = aten.clamp.default(l_args_1_, -20, 19)
ne = aten.ne.Tensor(clamp, l_args_1_)
remainder = aten.remainder.Scalar(clamp, 20)
masked_fill = aten.masked_fill.Scalar(remainder, ne, -1)
store_kv = pm_ops.store_kv.default(pm_buffer, l_args_0_, None, masked_fill, [0, 512, 64, 32, 5], None, 4, torch.float32, None)
load_kv = pm_ops.load_kv.default(pm_buffer, masked_fill, [0, 512, 64, 32, 5], 4, 2, 8, torch.float32)
add = aten.add.Tensor(load_kv, 1)
store_kv_1 = pm_ops.store_kv.default(pm_buffer, None, add, masked_fill, None, [256, 512, 64, 32, 5], 4, None, torch.float32)
return (add,)""",
    )


def test_a_batched_cache_goes_through_the_page_table(paged: Any) -> None:
    def body(k: Tensor, v: Tensor, q: Tensor, x: Tensor, pos: Tensor) -> Tensor:
        k.index_copy_(2, pos, x)
        v.index_copy_(2, pos, x)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, x = torch.randn(2, 4, 1, DIM), torch.randn(2, HEADS, 1, DIM)
    code = rewritten(paged, (2, HEADS, 14, DIM), body, q, x, torch.tensor([5]))
    assert_expected_inline(
        code,
        """\
def forward(self, l_args_2_, l_args_1_, l_args_0_, pm_buffer, pm_page_table):
permute = aten.permute.default(l_args_1_, [0, 2, 1, 3])
view = aten.view.default(permute, [-1, 2, 8])
arange = aten.arange.default(2)
view_1 = aten.view.default(arange, [2, 1])
clamp = aten.clamp.default(l_args_2_, 0, 13)
ne = aten.ne.Tensor(clamp, l_args_2_)
floor_divide = aten.floor_divide.default(clamp, 4)
index = aten.index.Tensor(pm_page_table, [view_1, floor_divide])
mul = aten.mul.Tensor(index, 4)
remainder = aten.remainder.Scalar(clamp, 4)
add = aten.add.Tensor(mul, remainder)
masked_fill = aten.masked_fill.Scalar(add, ne, -1)
expand = aten.expand.default(masked_fill, [2, 1])
view_2 = aten.view.default(expand, [-1])
permute_1 = aten.permute.default(l_args_1_, [0, 2, 1, 3])
view_3 = aten.view.default(permute_1, [-1, 2, 8])
store_kv = pm_ops.store_kv.default(pm_buffer, view, view_3, view_2, [0, 512, 64, 32, 11], [256, 512, 64, 32, 11], 4, torch.float32, torch.float32)
transpose = aten.transpose.int(l_args_0_, 1, 2)
view_4 = aten.view.default(transpose, [2, 4, 8])
full = aten.full.default([2], 14)
attention = pm_ops.attention.default(pm_buffer, view_4, pm_page_table, full, None, [0, 512, 64, 32, 11], [256, 512, 64, 32, 11], 4, 2, 8, torch.float32, torch.float32, 0.35355339059327373, False)
getitem = attention[0]
view_5 = aten.view.default(getitem, [2, 1, 4, 8])
transpose_1 = aten.transpose.int(view_5, 1, 2)
return (transpose_1,)""",
    )
