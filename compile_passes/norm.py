"""The RMSNorm of every head in front of a rotation, recognised by its term."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .precision import as_fine, uncast, widened
from .terms import Term


@dataclass(frozen=True)
class Norm:
    """``x * rsqrt(mean(x * x) + eps) * (offset + weight)``, of the elements of a head."""

    weight: Node
    eps: float
    offset: float


def normed(t: Term, dtype: torch.dtype) -> tuple[Term, Term, Term, float, float] | None:
    """``mul(mul(x, rsqrt(add(mean(square), eps))), weight)`` as x, square, weight, eps and offset.

    Casts may be in between; the weight may be ``add(weight, offset)``, and factors stand in either order.
    """
    for scaled, weight in _factors(t, dtype):
        for x, factor in _factors(scaled, dtype):
            root = uncast(factor, dtype)
            inner = uncast(root.args[0], dtype) if root.op == "rsqrt" else root
            if root.op != "rsqrt" or inner.op != "add" or not isinstance(inner.args[1], float | int):
                continue
            mean, weight, offset = uncast(inner.args[0], dtype), widened(weight), 0.0
            if weight.op == "add" and not as_fine(weight.dtype, dtype):
                continue
            if weight.op == "add" and isinstance(weight.args[1], float | int):
                weight, offset = widened(weight.args[0]), float(weight.args[1])
            elif weight.op == "add" and isinstance(weight.args[0], float | int):
                weight, offset = widened(weight.args[1]), float(weight.args[0])
            if mean.op == "mean" and weight.op == "leaf" and all(as_fine(m.dtype, dtype) for m in (root, inner, mean)):
                return widened(x), mean.args[0], weight, float(inner.args[1]), offset
    return None


def _factors(t: Term, dtype: torch.dtype) -> list[tuple[Term, Term]]:
    """The two factors of a product of terms, in both orders."""
    t = uncast(t, dtype)
    if t.op != "mul" or not as_fine(t.dtype, dtype) or not all(isinstance(a, Term) for a in t.args):
        return []
    return [(t.args[0], t.args[1]), (t.args[1], t.args[0])]


def is_square(t: Term, x: Term) -> bool:
    """Is a term ``pow(x, 2)`` or ``mul(x, x)``?"""
    if t.op == "pow":
        return t.args[1] == 2 and widened(t.args[0]) is x
    return t.op == "mul" and all(isinstance(a, Term) and widened(a) is x for a in t.args)
