"""Facades: what stands in the model's hands for a cache that lives in pages.

A facade is the model's own tensor object, its class swapped and its memory given back. Compiled code traces through it
as through any tensor, and leaves a mark that only the binding's backend takes out; eager code that touches its data is
told so, instead of reading stale or freed memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .coverage import Cover
from .internals import IN_PAGES, inlined_only, mark_static, without_facades

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
_VIEWS = frozenset(("__getitem__", "select", "narrow"))
_PLACES = frozenset(("device", "is_cuda", "is_cpu", "is_meta", "get_device"))

# Operators that Tensor has in Python, into which Dynamo cannot follow a subclass, and what they compute. Dynamo finds
# these functions by identity, not in a dict.
_OPERATORS: tuple[tuple[Any, Callable[[Any, Any], Any]], ...] = (
    (Tensor.__pow__, torch.pow),
    (Tensor.__floordiv__, torch.floor_divide),
    (Tensor.__rsub__, torch.rsub),
    (Tensor.__rtruediv__, lambda cache, other: torch.reciprocal(cache) * other),
    (Tensor.__rpow__, lambda cache, other: torch.pow(other, cache)),
    (Tensor.__rfloordiv__, lambda cache, other: torch.floor_divide(other, cache)),
    (Tensor.__rmod__, lambda cache, other: torch.remainder(other, cache)),
)

# Writes that are given a tensor. Dynamo forgets the class of one that is written so, and with that all methods below;
# it is let write to a view.
_WRITES: tuple[Any, ...] = (
    *(Tensor.__setitem__, Tensor.index_put_, Tensor.index_copy_, Tensor.index_fill_),
    *(Tensor.copy_, Tensor.scatter_, Tensor.fill_),
)


class Facade(torch.Tensor):
    """A bound cache. Shape, strides, dtype and device are the cache's; there is no data behind them.

    Every facade object has a class of its own, so that a compiled graph is guarded on this very cache: Dynamo guards a
    tensor's type, but neither its identity nor its storage offset.
    """

    label: str = ""
    cover: Callable[[Tensor], Cover]
    place: Tensor  # an empty one on the cache's device: views that eager code makes are on the meta device
    __dlpack_c_exchange_api__ = None  # it would be asked past __torch_function__

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            IN_PAGES(cls.label)
            for method, function in _OPERATORS:
                if func is method:
                    func = function
            with without_facades():
                for method in _WRITES:
                    if func is method:
                        args = (args[0][...], *args[1:])
                return func(*args, **(kwargs or {}))
        return _eager(func, args, kwargs or {})

    def as_subclass(self, cls: Any) -> Any:  # noqa: D102
        _refuse(torch.Tensor.as_subclass, (self,), {})

    # Dynamo cannot follow a subclass into tensor methods that are written in Python; into functions it can.

    def split(self, split_size: Any, dim: int = 0) -> Any:  # noqa: D102
        return torch.split(self, split_size, dim)

    def unflatten(self, dim: Any, sizes: Any) -> Any:  # noqa: D102
        return torch.unflatten(self, dim, sizes)

    def norm(self, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:  # noqa: D102
        return torch.norm(self, p, dim, keepdim, dtype=dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Facade({self.label}, {list(self.shape)}, {self.dtype}, {self.device}; the data is in pages)"


# As a function of its own, which it is where the graph breaks at an operation on a facade, Dynamo would compile the
# marking of a graph, and run the operation itself without facades, on memory that is not there.
inlined_only(Facade.__torch_function__)


@torch.compiler.disable
def _eager(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", str(func))
    if name == "zero_":  # what a cache's reset() does
        facade = args[0]
        type(facade).cover(facade).zero()
        return facade
    if name in _VIEWS and isinstance(args[0], Facade) and not any(map(_by_value, (*args[1:], *kwargs.values()))):
        return _view(func, args, kwargs)
    if name == "__get__":
        name = _property(func)
        allowed = name not in _DATA_PROPERTIES
    else:
        allowed = name in _METADATA
    if not allowed:
        _refuse(func, args, kwargs)
    if name in _PLACES:
        return func(type(args[0]).place)
    with without_facades():
        return func(*args, **kwargs)


def _by_value(index: Any) -> bool:
    """Does indexing with this pick single elements, and make a copy of them?"""
    return any(map(_by_value, index)) if isinstance(index, tuple) else isinstance(index, Tensor | list | bool)


def _view(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """A facade of a part, on the meta device: it has a place among the planes, and can be zeroed."""
    facade, *rest = args
    with without_facades():
        shape, strides, start = facade.shape, facade.stride(), facade.storage_offset()
        end = start + 1 + sum((n - 1) * st for n, st in zip(shape, strides, strict=True))
        whole = torch.empty(max(end, 0), dtype=facade.dtype, device="meta").as_strided(shape, strides, start)
        part = func(whole, *rest, **kwargs)
    kind = type(facade)
    make_facade(part, f"a view of {kind.cover(part).label}", kind.cover, kind.place)
    return part


def _property(accessor: Any) -> str:
    """The name of the property whose getter or setter this is."""
    return getattr(getattr(accessor, "__self__", None), "__name__", "")


def _refuse(func: Callable[..., Any], args: Any, kwargs: Any) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = _property(func)
    given = [a for arg in (*args, *kwargs.values()) for a in (arg if isinstance(arg, list | tuple) else [arg])]
    label = next((a.label for a in given if isinstance(a, Facade)), "a bound cache")
    raise RuntimeError(
        f"eager code calls {name!r} on {label}, which lives in pages and has no data of its own. Run it inside the "
        "compiled model, read it with pm_ops.load_kv or PagePool.view, or call binding.release() first. Inside "
        "torch.compile this means that the graph broke here (TORCH_LOGS=graph_breaks says why), or that Dynamo gave up "
        "on the function at its recompile limit (TORCH_LOGS=recompiles): compile the whole model at once, or raise "
        "torch._dynamo.config.recompile_limit and accumulated_recompile_limit"
    )


def make_facade(tensor: Tensor, label: str, cover: Callable[[Tensor], Cover], place: Tensor) -> None:
    """Turn a tensor object into a facade, in place. Its storage is the caller's to empty.

    ``cover`` is asked what the tensor, or a view of it that eager code makes, is of; ``place`` is on its device.
    """
    tensor.__class__ = type("Facade", (Facade,), {"label": label, "cover": staticmethod(cover), "place": place})
    mark_static(tensor)


def refuse_to_load(names: Sequence[str]) -> Callable[..., None]:
    """A hook for ``load_state_dict`` of a module that has facades under these names: it could replace them silently."""

    def check(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        given = [prefix + name for name in names if prefix + name in state_dict]
        if given:
            raise RuntimeError(
                f"load_state_dict is given {', '.join(given)}: bound caches, which live in pages; leave them out of "
                "the state dict, or call binding.release() first"
            )

    return check
