"""Engines' own store and attention operators go to pages through the adapters registered for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pm_ops.compile_passes import Attend, Store, register_attention_op, register_store_op
from pm_ops.compile_passes.engine_ops import ENGINE_OPS

HEADS, DIM, PAGE, PAGES = 2, 8, 4, 5


def _store(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    kept = slots >= 0
    at = slots[kept]
    k_cache.view(-1, HEADS, DIM)[at], v_cache.view(-1, HEADS, DIM)[at] = key[kept], value[kept]


def _attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, scale: float) -> Tensor:
    out = torch.zeros_like(query)
    for b, length in enumerate(lens.tolist()):
        k = k_cache[table[b]].reshape(-1, HEADS, DIM)[:length]
        v = v_cache[table[b]].reshape(-1, HEADS, DIM)[:length]
        p = torch.softmax(torch.einsum("hd,shd->hs", query[b], k) * scale, -1)
        out[b] = torch.einsum("hs,shd->hd", p, v)
    return out


def _copy(out: Tensor, value: Tensor) -> None:
    out.copy_(value)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """An engine's operators, as it would define them; the store is written as vLLM's reshape_and_cache."""
    library = torch.library.Library("pm_test_engine", "DEF")
    library.define("store(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()")
    library.define(
        "attend(Tensor query, Tensor k_cache, Tensor v_cache, Tensor table, Tensor lens, float scale) -> Tensor"
    )
    library.define("attend_out(Tensor query, Tensor kv_cache, Tensor table, Tensor lens, Tensor(a!) out) -> ()")
    library.impl("store", _store, "CPU")
    library.impl("attend", _attend, "CPU")
    library.impl(
        "attend_out",
        lambda q, kv, table, lens, out: _copy(out, _attend(q, kv[0], kv[1], table, lens, DIM**-0.5)),
        "CPU",
    )
    torch.library.register_fake("pm_test_engine::store", lambda *a: None, lib=library)
    torch.library.register_fake("pm_test_engine::attend", lambda q, *a: torch.empty_like(q), lib=library)
    torch.library.register_fake("pm_test_engine::attend_out", lambda *a: None, lib=library)
    ops = torch.ops.pm_test_engine
    register_store_op(ops.store, lambda key, value, k, v, slots: Store(slots, key, k, value, v))
    register_attention_op(
        ops.attend.default,
        lambda q, k, v, table, lens, scale: Attend(q, k, v, table, lens, softmax_scale=scale),
    )
    yield ops
    for op in (ops.store.default, ops.attend.default, ops.attend_out.default):
        ENGINE_OPS.pop(op, None)
    library._destroy()


class Engine(torch.nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.k = [torch.randn(PAGES, PAGE, HEADS, DIM) for _ in range(layers)]
        self.v = [torch.randn(PAGES, PAGE, HEADS, DIM) for _ in range(layers)]

    def forward(self, x: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        for k, v in zip(self.k, self.v, strict=True):
            torch.ops.pm_test_engine.store(x, x * 2, k, v, slots)
            x = x + torch.ops.pm_test_engine.attend(x, k, v, table, lens, 0.3)
        return x


def test_registered_store_and_attention_ops_go_to_pages(paged: Any, engine: Any) -> None:
    twins = paged(Engine(), form="PSHD")
    table = torch.tensor([[3, 1], [4, 0], [2, 2]], dtype=torch.int32)
    for slots, lens in (([13, 17, -1], [2, 6, 1]), ([14, 18, 9], [3, 7, 2])):
        x = torch.randn(3, HEADS, DIM)
        twins.check(x, torch.tensor(slots), table, torch.tensor(lens, dtype=torch.int32))
    twins.check_pages()
    report = twins.binding.report()
    assert (report.writes_rewritten, report.reads_rewritten) == (4, 2)
    assert "pm_test_engine" not in twins.backend.graphs[0]


def test_an_unregistered_op_that_writes_a_cache_is_refused(paged: Any, engine: Any) -> None:
    class Unknown(Engine):
        def forward(self, x: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> Tensor:
            torch.ops.pm_test_engine.attend_out(x, torch.stack([x, x]), table, lens, self.k[0][0, :3])  # this line
            return x

    twins = paged(Unknown(), form="PSHD")
    arguments = (torch.randn(3, HEADS, DIM), torch.tensor([1, 2, 3]), torch.zeros(3, 1, dtype=torch.int32))
    with torch.no_grad(), pytest.raises(Exception, match=r"may write to a bound cache[\s\S]*# this line"):
        twins.compiled(*arguments, torch.ones(3, dtype=torch.int32))


def test_one_argument_that_holds_k_and_v_is_taken_apart_by_the_adapter(paged: Any, engine: Any) -> None:
    class Stacked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv = torch.randn(2, PAGES, PAGE, HEADS, DIM)
            self.k, self.v = [self.kv[0]], [self.kv[1]]

        def forward(self, x: Tensor, slots: Tensor, table: Tensor, lens: Tensor) -> Tensor:
            torch.ops.pm_test_engine.store(x, x * 2, self.kv[0], self.kv[1], slots)
            out = torch.empty_like(x)
            torch.ops.pm_test_engine.attend_out(x, self.kv, table, lens, out)
            return out

    register_attention_op(
        engine.attend_out,
        lambda q, kv, table, lens, out: Attend(q, kv[0], kv[1], table, lens, out=out, result=lambda *_: None),
    )
    twins = paged(Stacked(), form="PSHD")
    table, lens = torch.tensor([[3, 1], [4, 0], [2, 2]], dtype=torch.int32), torch.tensor([2, 6, 1])
    twins.check(torch.randn(3, HEADS, DIM), torch.tensor([13, 17, 8]), table, lens)
    twins.check_pages()


def test_an_engine_op_on_a_batched_cache_is_refused(paged: Any, engine: Any) -> None:
    class Batched(Engine):
        def __init__(self) -> None:
            super().__init__()
            self.k = [torch.randn(3, 9, HEADS, DIM) for _ in self.k]
            self.v = [torch.randn(3, 9, HEADS, DIM) for _ in self.v]

    twins = paged(Batched(), pages=9)
    arguments = (torch.randn(3, HEADS, DIM), torch.tensor([1, 2, 3]), torch.zeros(3, 1, dtype=torch.int32))
    with torch.no_grad(), pytest.raises(Exception, match="bound as a BSHD cache"):
        twins.compiled(*arguments, torch.ones(3, dtype=torch.int32))
