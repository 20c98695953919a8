"""An engine's own rotary operator, which works in place, is fused with the store behind it once it is registered."""

# ruff: noqa: E501

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from rotary_forms import FORMS
from torch import Tensor

from pm_ops.compile_passes import Rotate, register_rotary_op
from pm_ops.compile_passes.engine_ops import ROTARY_OPS
from pm_ops.compile_passes.rotary_ops import apart

HEADS, DIM, SLOTS = 2, 8, 20


def _rotary(positions: Tensor, query: Tensor, key: Tensor, head_size: int, cache: Tensor, is_neox: bool) -> None:
    """As vLLM's ``_C.rotary_embedding``."""
    rotate = FORMS["vllm_neox" if is_neox else "vllm_gptj"].rotate
    rows = (query.unflatten(-1, (-1, head_size)), key.unflatten(-1, (-1, head_size)))
    for x, turned in zip((query, key), rotate(*rows, positions.flatten(), cache), strict=True):
        x.copy_(turned.flatten(-2))


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    library = torch.library.Library("pm_test_rotary", "DEF")
    library.define(
        "rotary_embedding(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cos_sin_cache, "
        "bool is_neox) -> ()"
    )
    library.impl("rotary_embedding", _rotary, "CPU")
    torch.library.register_fake("pm_test_rotary::rotary_embedding", lambda *a: None, lib=library)
    op = torch.ops.pm_test_rotary.rotary_embedding
    register_rotary_op(op, lambda positions, q, k, dim, cache, neox: Rotate(q, k, positions, cache, dim, not neox))
    yield
    ROTARY_OPS.pop(op.default, None)
    library._destroy()


class Engine(torch.nn.Module):
    """A layer as vLLM has it: q, k and v are columns of one projection."""

    def __init__(self, body: Callable[..., Tensor], neox: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.k, self.v = [torch.randn(SLOTS, HEADS, DIM)], [torch.randn(SLOTS, HEADS, DIM)]
        self.weight, self.body, self.neox = torch.randn(4, 4 * HEADS * DIM), body, neox

    def forward(self, x: Tensor, slots: Tensor, positions: Tensor, cache: Tensor) -> list[Tensor]:
        qkv = x @ self.weight
        q, k, v = qkv.split([2 * HEADS * DIM, HEADS * DIM, HEADS * DIM], -1)
        rotary = lambda: torch.ops.pm_test_rotary.rotary_embedding(positions, q, k, DIM, cache, self.neox)  # noqa: E731
        out = self.body(self.k[0], self.v[0], qkv, q, k, v, slots, rotary)
        return [out, self.k[0][slots], self.v[0][slots]]


def stored(
    k_cache: Tensor, v_cache: Tensor, qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, rotary: Any
) -> Tensor:
    rotary()
    k_cache[slots], v_cache[slots] = k.view(-1, HEADS, DIM), v.view(-1, HEADS, DIM)
    return q.view(-1, 2 * HEADS, DIM) * 2


def arguments(neox: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    table = FORMS["vllm_neox" if neox else "vllm_gptj"].tensors[0]
    return torch.randn(5, 4), torch.tensor([3, 17, 4, 9, 0]), torch.tensor([2, 5, 3, 8, 30]), table


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
def test_the_operator_and_the_store_become_one_by_its_table_and_positions(paged: Any, neox: bool) -> None:
    twin = paged(Engine(stored, neox), fuse_rope=True)
    twin.check(*arguments(neox), exact=True)
    twin.check_pages(0)
    graph = twin.backend.graphs[0]
    assert graph.count("rope_store_kv.default(") == 1 and "pm_test_rotary" not in graph
    assert "cat.default" not in graph and "clone" not in graph
    assert twin.binding.report().fused == 1


def test_the_graph_before_and_after(paged: Any) -> None:
    """``-`` is what fuse_rope takes out, ``+`` what it puts in: the whole table, of which positions find the rows."""
    codes = []
    for fuse in (False, True):
        twin = paged(Engine(stored), fuse_rope=fuse)
        twin.check(*arguments(), exact=True)
        lines = [line.split(";")[0].strip() for line in twin.backend.graphs[0].replace("torch.ops.", "").splitlines()]
        codes.append([line for line in lines if line and not re.match(r"def |clamp|ne = |remainder|masked_fill", line)])
    difference = list(difflib.unified_diff(*codes, n=0, lineterm=""))[2:]
    assert_expected_inline(
        "\n".join(line for line in difference if not line.startswith("@@")),
        """\
-rotary_embedding = pm_test_rotary.rotary_embedding.default(l_positions_, getitem, getitem_1, 8, l_cache_, True)
-view = aten.view.default(getitem_1, [-1, 2, 8])
-view_1 = aten.view.default(getitem_2, [-1, 2, 8])
-store_kv = pm_ops.store_kv.default(pm_buffer, view, view_1, masked_fill, [0, 512, 64, 32, 5], [256, 512, 64, 32, 5], 4, torch.float32, torch.float32)
-view_2 = aten.view.default(getitem, [-1, 4, 8])
-mul = aten.mul.Tensor(view_2, 2)
+view = aten.view.default(getitem, [5, -1, 8])
+view_1 = aten.view.default(getitem_1, [5, -1, 8])
+view_5 = aten.view.default(getitem_2, [-1, 2, 8])
+rope_store_kv = pm_ops.rope_store_kv.default(pm_buffer, view, view_1, view_5, l_positions_, l_cache_, masked_fill, [0, 512, 64, 32, 5], [256, 512, 64, 32, 5], 4, torch.float32, torch.float32, False, None, None, 1e-06, 0.0, 1.0, 1.0, None, None, False, None, None)
+getitem_5 = rope_store_kv[0]
+mul = aten.mul.Tensor(getitem_5, 2)""",
    )


def test_tensors_lie_apart_where_they_are_other_columns_of_one_matrix() -> None:
    x = torch.empty(5, 12)
    q = x[:, :4]
    assert all(apart(a, q) and apart(q, a) for a in (x[:, 4:8], x[1:, 4:8], x[:, 4:].view(5, 2, 4), x[:2, 10]))
    # Columns in part, rows of another width, and rows that are all one, whose columns are in no matrix.
    for a in (x, q, x[1:], x[:, 3:5], x[1:, :2], x.view(10, 6)[:, 4:], x[:1, 4:8].expand(5, 4)):
        assert not apart(a, q) and not apart(q, a)


def test_without_fuse_rope_the_operator_stays(paged: Any) -> None:
    twin = paged(Engine(stored))
    twin.check(*arguments(), exact=True)
    assert twin.backend.graphs[0].count("pm_test_rotary") == 1


def test_an_operator_whose_store_is_not_fused_is_put_back(paged: Any) -> None:
    def body(
        k_cache: Tensor, v_cache: Tensor, qkv: Any, q: Tensor, k: Tensor, v: Tensor, slots: Any, rotary: Any
    ) -> Tensor:
        rotary()
        k_cache[slots], v_cache[slots] = k.view(-1, HEADS, DIM) + 1, v.view(-1, HEADS, DIM)
        return q * 2

    twin = paged(Engine(body), fuse_rope=True, strict=False)
    twin.check(*arguments(), exact=True)
    twin.check_pages(0)
    graph = twin.backend.graphs[0]
    assert graph.count("pm_test_rotary") == 1 and "rope_store_kv" not in graph and "pm_ops_trace" not in graph


@pytest.mark.parametrize("seen", ["whole", "view"])
def test_an_operator_whose_writes_are_seen_through_another_tensor_is_left_in_place(paged: Any, seen: str) -> None:
    def body(
        k_cache: Tensor, v_cache: Tensor, qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Any, rotary: Any
    ) -> Tensor:
        early = q.view(-1, 2 * HEADS, DIM) if seen == "view" else qkv
        rotary()
        k_cache[slots], v_cache[slots] = k.view(-1, HEADS, DIM), v.view(-1, HEADS, DIM)
        return early * 2

    twin = paged(Engine(body), fuse_rope=True, strict=False)
    twin.check(*arguments(), exact=True)
    twin.check_pages(0)
    assert "rope_store_kv" not in twin.backend.graphs[0]
    assert "layer 0" in twin.binding.report().unfused[0]


def test_positions_that_are_no_row_each_leave_the_operator_as_it_is(paged: Any) -> None:
    x, slots, positions, table = arguments()
    twin = paged(Engine(stored), fuse_rope=True, strict=False)
    twin.check(x, slots, positions[None], table)
    twin.check_pages()
    assert twin.binding.report().fused == 0 and "rotary_embedding" in twin.backend.graphs[0]
