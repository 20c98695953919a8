"""What a call that failed was given: an argument of the wrong kind is named in our words instead of torch's."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .hybrid import HybridPool
from .pool import PagePool

NUMBERS: dict[str, tuple[Any, str]] = {
    "int": (numbers.Integral | torch.SymInt, "an integer"),
    "float": (numbers.Real | torch.SymFloat, "a number"),
}
"""By annotation, what such an argument may be, in Python and in words."""

P = ParamSpec("P")
R = TypeVar("R")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Raise ValueError where a call fails and an argument is not what the annotation says: a list for a tensor, say.

    Nothing is looked at before a call has failed.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (AttributeError, TypeError, RuntimeError):
            found = _wrong_kind(function, args, kwargs)
            if found is None:
                raise
        raise ValueError(found)

    return call


def _wrong_kind(function: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """What is wrong with the first argument that is not of its parameter's kind; None if all are."""
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # missing or unknown arguments: Python's own message says which
    pool = given.get("pool")
    device = pool.device if isinstance(pool, PagePool) else "the other tensors' device"
    for name, value in given.items():
        wanted, got = signature.parameters[name].annotation, _type_name(value)
        absent = value is None and wanted.endswith("None")
        if wanted == "PagePool" and not isinstance(value, PagePool):
            remedy = "pass the pool itself, not its buffer or a view of it"
            remedy = value.choice if isinstance(value, HybridPool) else remedy
            return f"{name} must be a pm_ops.PagePool, got {got}; {remedy}"
        kinds, noun = NUMBERS.get(wanted.removesuffix(" | None"), (object, ""))
        if not isinstance(value, kinds) and not absent:
            return f"{name} must be {noun}, got {got}"
        if wanted == "Scale" and not isinstance(value, numbers.Real | Tensor):
            return f"{name} must be a float or a tensor of one float32 element, got {got}"
        if wanted.startswith("Tensor") and not absent and not isinstance(value, Tensor):
            return f"{name} must be a tensor on {device}, got {got}; torch.as_tensor makes one of a list or an array"
    return None


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ in ("builtins", "torch") else f"{kind.__module__}.{kind.__qualname__}"
