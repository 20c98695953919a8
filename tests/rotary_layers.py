"""Layers that rotate and store, beside what they become on pages with fuse_rope and without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from rotary_forms import POSITIONS
from torch import Tensor

HEADS, DIM, SLOTS, LAYERS, TOKENS = 2, 8, 20, 2, 5


class Rotary(torch.nn.Module):
    """Layers that rotate, store, and go on with what they read; ``body`` does it for one of them."""

    def __init__(self, body: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.k = [torch.randn(SLOTS, HEADS, DIM).to(dtype) for _ in range(LAYERS)]
        self.v = [torch.randn(SLOTS, HEADS, DIM).to(dtype) for _ in range(LAYERS)]
        self.body = body

    def forward(self, qkv: Tensor, slots: Tensor, positions: Tensor, *tensors: Tensor) -> list[Tensor]:
        outs = []
        for k_cache, v_cache in zip(self.k, self.v, strict=True):
            q, k, v = qkv.split([2 * HEADS, HEADS, HEADS], 1)
            out = self.body(k_cache, v_cache, q, k, v, slots, positions, *tensors)
            outs += [out, k_cache[slots].float(), v_cache[slots].float()]
            qkv = torch.tanh(qkv + out.amax() * 0.5)
        return outs


def plain(rotate: Callable[..., Any]) -> Callable[..., Tensor]:
    """A layer's body: rotate, store, use the query."""

    def body(
        k_cache: Tensor, v_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, *t: Tensor
    ) -> Tensor:
        q, k = rotate(q, k, positions, *t)
        k_cache[slots], v_cache[slots] = k.to(k_cache.dtype), v.to(v_cache.dtype)
        return q * 2

    return body


def inputs(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    return (
        torch.randn(tokens, 4 * HEADS, DIM).to(dtype),
        torch.randperm(SLOTS)[:tokens],
        torch.randint(POSITIONS, (tokens,)),
    )


def twins(
    paged: Any, body: Callable[..., Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Any]:
    """The model on pages without the fusion, and with it."""
    model = Rotary(body, dtype)
    options = {"dtype": dtype, **options}
    return paged(copy.deepcopy(model), **options), paged(model, fuse_rope=True, **options)


def count(twin: Any, op: str) -> int:
    return sum(f"pm_ops.{op}.default(" in line for line in twin.backend.graphs[-1].splitlines())
