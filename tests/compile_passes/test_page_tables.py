"""Attention caches in two kinds of page: the same tokens of a sequence lie in columns of their own for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pm_ops
from pm_ops.compile_passes import bind, page_major_backend
from pm_ops.testing import fill_random, slot_bytes, writes_only

BATCH, HEADS, SEQ, DIM, PAGE = 2, 2, 20, 16, 8
Layers = list[Tensor]


def two_kinds() -> pm_ops.HybridPool:
    """Layer 0 in pages of one kind and layer 1 in those of another, alike in everything else."""
    layout = pm_ops.page_major(1, HEADS, DIM, PAGE, torch.float32)
    pool = pm_ops.HybridPool({"first": layout, "second": layout.numbered([1])}, 14)
    fill_random(pool.whole.buffer)
    taken = pool.allocator.alloc(14)
    pool.allocator.free([*taken[1::2], *taken[::2]])
    return pool


def compiled_on(pool: pm_ops.HybridPool, body: Callable[..., Tensor], keys: Layers, values: Layers) -> Any:
    binding = bind(pool, keys=keys, values=values, dims="BHSD")
    return binding, torch.compile(body, backend=page_major_backend(binding, "eager"), fullgraph=True)


def attend(keys: Layers, values: Layers, x: Tensor, at: Tensor) -> Tensor:
    total = x
    for k, v in zip(keys, values, strict=True):
        k.index_copy_(2, at, total)
        v.index_copy_(2, at, total * 2)
        total = total + F.scaled_dot_product_attention(x, k, v)
    return total


def test_the_same_tokens_of_two_kinds_are_in_pages_of_their_own() -> None:
    torch.manual_seed(0)
    pool, keys, values = two_kinds(), *([torch.randn(BATCH, HEADS, SEQ, DIM) for _ in range(2)] for _ in range(2))
    stock = [[t.clone() for t in caches] for caches in (keys, values)]
    binding, compiled = compiled_on(pool, attend, keys, values)
    table = binding.page_table
    assert table is not None and table.shape == (BATCH, 6)
    places = torch.arange(SEQ)
    slots = [table[:, i : i + 3].long()[:, places // PAGE] * PAGE + places % PAGE for i in (0, 3)]
    for first in (3, 15):
        x, at = torch.randn(BATCH, HEADS, 3, DIM), torch.arange(first, first + 3)
        owned = [
            byte
            for layer, name in enumerate(pool)
            for kind in ("key", "value")
            for byte in slot_bytes(pool[name], layer, kind, slots[layer][:, at].flatten().tolist())
        ]
        with writes_only(pool.whole.buffer, owned):
            got = compiled(keys, values, x, at)
        torch.testing.assert_close(got, attend(*stock, x, at))
    for layer, name in enumerate(pool):
        for kind, caches in zip(("key", "value"), stock, strict=True):
            own = pm_ops.load_kv(pool[name], layer, slots[layer].flatten(), kind)
            torch.testing.assert_close(own.view(BATCH, SEQ, HEADS, DIM).transpose(1, 2), caches[layer])


def test_keys_of_one_kind_of_page_do_not_go_with_values_of_another() -> None:
    def mixed(keys: Layers, values: Layers, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, keys[0], values[1])

    caches = [[torch.randn(BATCH, HEADS, SEQ, DIM) for _ in range(2)] for _ in range(2)]
    _, compiled = compiled_on(two_kinds(), mixed, *caches)
    with pytest.raises(Exception, match="attention reads other tokens of layer 0 key than of layer 1 value"):
        compiled(*caches, torch.randn(BATCH, HEADS, 3, DIM))
