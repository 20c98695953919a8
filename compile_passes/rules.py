"""The write and read rules: one function an ATen form, in dicts keyed by operator.

A rule gets the rewriter and the node's arguments; views of caches among them are fake tensors that stand for the cache.
A write rule stores; a read rule returns the tensor that takes the node's place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .regions import ROW_AXES
from .report import RewriteError
from .selections import Selection, select, select_elementwise

if TYPE_CHECKING:
    from .rewriter import Rewriter

aten = torch.ops.aten

WRITES: dict[Any, Callable[..., None]] = {}
READS: dict[Any, Callable[..., Any]] = {}


def _rule(table: dict[Any, Callable[..., Any]], *ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        table.update(dict.fromkeys(ops, function))
        return function

    return register


@_rule(WRITES, aten.index_put_.default, aten._index_put_impl_.default)
def _index_put(
    rw: Rewriter, view: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *_: Any
) -> None:
    """``k[slots] = x``, ``k[page, offset] = x``, ``k[:, :, pos] = x``: ``index_put_(view, [None, ..., i], x)``"""
    if accumulate:
        raise RewriteError("accumulate=True adds to what the cache holds; only plain writes can go to pages")
    rw.store(select(rw.locate(view), indices), values)


@_rule(WRITES, aten.index_copy_.default)
def _index_copy(rw: Rewriter, view: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """``k.index_copy_(dim, pos, x)``: ``index_copy_(view, dim, pos, x)``"""
    rw.store(_along(rw, view, dim, index), source)


@_rule(WRITES, aten.copy_.default)
def _copy(rw: Rewriter, view: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    """``k[a:b] = x``, ``k[:, :, a:b].copy_(x)``: ``copy_(view, x)``"""
    rw.store(select(rw.locate(view), []), source)


@_rule(WRITES, aten.scatter_.src)
def _scatter(rw: Rewriter, view: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """``k.scatter_(dim, pos[..., None, None].expand_as(x), x)``: ``scatter_(view, dim, index, x)``"""
    selection = _elementwise(rw, view, dim, index)
    rw.store(selection, source[tuple(slice(0, n) for n in index.shape)])


@_rule(WRITES, aten.zero_.default)
def _zero(rw: Rewriter, view: Tensor) -> None:
    """``k.zero_()``, ``k[a:b].zero_()``: ``zero_(view)``"""
    rw.store(select(rw.locate(view), []), _scalar(rw, view, 0.0))


@_rule(WRITES, aten.fill_.Scalar, aten.fill_.Tensor)
def _fill(rw: Rewriter, view: Tensor, value: Any) -> None:
    """``k[a:b] = 0.0``, ``k.fill_(0)``: ``fill_(view, value)``"""
    rw.store(select(rw.locate(view), []), _scalar(rw, view, value))


@_rule(WRITES, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)
def _index_fill(rw: Rewriter, view: Tensor, dim: int, index: Tensor, value: Any) -> None:
    """``k.index_fill_(dim, slots, 0.0)``: ``index_fill_(view, dim, slots, value)``"""
    rw.store(_along(rw, view, dim, index, wraps=True), _scalar(rw, view, value))


@_rule(READS, aten.index.Tensor)
def _index(rw: Rewriter, view: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """``k[slots]``, ``k[page, offset]``, ``k[:, :, pos]``: ``index(view, [None, ..., i])``"""
    return _gather(rw, select(rw.locate(view), indices))


@_rule(READS, aten.index_select.default)
def _index_select(rw: Rewriter, view: Tensor, dim: int, index: Tensor) -> Tensor:
    """``k.index_select(dim, slots)``: ``index_select(view, dim, slots)``"""
    return _gather(rw, _along(rw, view, dim, index))


@_rule(READS, aten.gather.default)
def _gather_along(rw: Rewriter, view: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """``k.gather(dim, pos[..., None, None].expand(...))``: ``gather(view, dim, index)``"""
    return _gather(rw, _elementwise(rw, view, dim, index))


def _gather(rw: Rewriter, selection: Selection) -> Tensor:
    found = rw.pages.load(selection)
    rw.pages.note("read", (selection.region.plane,), "load_kv")
    return found.contiguous()


def _scalar(rw: Rewriter, view: Tensor, value: Any) -> Tensor:
    """One value, for every element."""
    device = rw.pages.buffer.device
    return value.to(device) if isinstance(value, Tensor) else torch.full((), value, dtype=view.dtype, device=device)


def _along(rw: Rewriter, view: Tensor, dim: int, index: Tensor, wraps: bool = False) -> Selection:
    """``view[:, ..., index]``: one dimension indexed by a vector; only some operators count negative indices back."""
    indices: list[Tensor | None] = [None] * view.dim()
    indices[dim] = index if index.dim() else index.reshape(1)
    return select(rw.locate(view), indices, wraps)


def _elementwise(rw: Rewriter, view: Tensor, dim: int, index: Tensor) -> Selection:
    """scatter's and gather's index, which names a position for every element, where it is the same for a whole row."""
    region, dim = rw.locate(view), dim % view.dim()
    rows = [n for n, d in enumerate(region.dims) if d.axis in ROW_AXES]
    for n in rows:
        if n == dim or (index.shape[n] > 1 and index.stride(n) != 0):
            raise RewriteError(
                "the index differs from head to head or from element to element; expand one position a token over them"
            )
        if index.shape[n] != view.shape[n]:
            raise RewriteError("the index covers only a part of the heads or of the elements of a head")
    index = index[tuple(slice(0, 1) if n in rows else slice(None) for n in range(view.dim()))]
    return select_elementwise(region, dim, index)
