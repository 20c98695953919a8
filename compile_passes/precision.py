"""Which roundings on the way to a result are looked through: those that a fused operator may leave out."""

from __future__ import annotations

import torch

from .terms import Term


def widened(t: Term) -> Term:
    """What was cast to a wider type, which changes no value."""
    while t.op == "cast" and exact(t.args[0].dtype, t.dtype):
        t = t.args[0]
    return t


def exact(before: torch.dtype, after: torch.dtype) -> bool:
    """Does a cast keep every value?"""
    floating = before.is_floating_point and after.is_floating_point
    return before == after or (floating and before.itemsize < after.itemsize >= 4)


def as_fine(dtype: torch.dtype, result: torch.dtype) -> bool:
    """May what becomes a result of one type be rounded to another on the way, without a loss but for that rounding?"""
    return dtype in (result, torch.float32)


def uncast(t: Term, result: torch.dtype) -> Term:
    """What was cast, to a wider type or one as fine as the result's."""
    while t.op == "cast" and (as_fine(t.dtype, result) or exact(t.args[0].dtype, t.dtype)):
        if not t.args[0].dtype.is_floating_point:
            break
        t = t.args[0]
    return t
