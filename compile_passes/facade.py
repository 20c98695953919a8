"""Facades: what stands in the model's hands for a cache that lives in pages.

A facade is the model's own tensor object, its class swapped and its memory given back. Compiled code traces through it
as through any tensor; eager code that touches its data is told so, instead of reading stale or freed memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Tensor methods that answer from metadata alone. Dynamo and fake tensors ask some of them outside of traced code.
_METADATA = frozenset(
    (
        *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "storage_offset", "__len__"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg"),
        *("is_pinned", "is_shared", "is_set_to", "is_same_size", "_is_view", "_is_zerotensor", "has_names"),
        *("untyped_storage", "_typed_storage", "get_device", "dim_order", "__hash__"),
    )
)
_DATA_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag", "data"))


class Facade(torch.Tensor):
    """A bound cache. Shape, strides, dtype and device are the cache's; there is no data behind them.

    Every facade object has a class of its own, so that a compiled graph is guarded on this very cache: Dynamo guards a
    tensor's type, but neither its identity nor its storage offset.
    """

    label: str = ""
    zero: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _eager(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Facade({self.label}, {list(self.shape)}, {self.dtype}, {self.device}; the data is in pages)"


def _eager(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", str(func))
    if name == "zero_":  # what a cache's reset() does
        type(args[0]).zero()
        return args[0]
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        allowed = name not in _DATA_PROPERTIES
    else:
        allowed = name in _METADATA
    if not allowed:
        given = [a for arg in (*args, *kwargs.values()) for a in (arg if isinstance(arg, list | tuple) else [arg])]
        facade = next((a for a in given if isinstance(a, Facade)), None)
        label = facade.label if facade is not None else "a bound cache"
        raise RuntimeError(
            f"eager code calls {name!r} on {label}, which lives in pages and has no data of its own. Run it inside the "
            "compiled model, read it with pm_ops.load_kv or PagePool.view, or call binding.release() first. Inside "
            "torch.compile this means that the graph broke here: look for the break with TORCH_LOGS=graph_breaks"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def make_facade(tensor: Tensor, label: str, zero: Callable[[], None]) -> type[Tensor]:
    """Turn a tensor object into a facade, in place; returns the class it had. Its storage is the caller's to empty."""
    before = type(tensor)
    tensor.__class__ = type("Facade", (Facade,), {"label": label, "zero": staticmethod(zero)})
    torch._dynamo.mark_static(tensor)
    return before


def sharing(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Every live tensor object over the storages of these, which come first: a model may keep views of its own.

    Raises:
        ValueError: one is of a tensor subclass; it would stay, over memory that was given back.
    """
    found = {id(t): t for t in tensors}
    storages = {t.untyped_storage()._cdata for t in found.values()}
    for other in gc.get_objects():
        if issubclass(type(other), torch.Tensor) and id(other) not in found and _storage(other) in storages:
            if type(other) not in (torch.Tensor, torch.nn.Parameter):
                raise ValueError(f"a {type(other).__name__} shares memory with a cache; only plain tensors may")
            found[id(other)] = other
    for t in list(found.values()):
        if t._base is not None and id(t._base) not in found:
            found[id(t._base)] = t._base
    return list(found.values())


def _storage(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return None
