"""From a view of a cache to the slots it names. Everything is read off sizes, strides and storage offset.

A view's every dimension steps along one axis of its cache; that tells what ``k[:, :, a:b]``, ``kv[layer]``,
``k.view(-1, H, D)`` or ``k.transpose(1, 2)`` is, without a list of the operators that made it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, guard_or_false

from .forms import CachePlane
from .report import RewriteError

ROW_AXES = "HDR"
Size = Any  # int or SymInt


@dataclass(frozen=True)
class Dim:
    """One dimension of a view: it steps ``step`` at a time, ``size`` times, along an axis of the cache.

    ``axis`` is a letter of the cache's form, ``T`` (sequences and positions flattened), ``R`` (heads and elements
    flattened), ``1`` (size 1) or ``x`` (expanded: size without a step).
    """

    axis: str
    step: int
    size: Size


@dataclass(frozen=True)
class Region:
    """The part of one cache that a view covers: its dimensions, and where each axis starts."""

    plane: CachePlane
    dims: tuple[Dim, ...]
    start: dict[str, Size]

    def find(self, axis: str) -> list[int]:
        """Positions of the view's dimensions along an axis."""
        return [i for i, d in enumerate(self.dims) if d.axis == axis]

    @property
    def whole_rows(self) -> bool:
        """Does the view hold every head and element of its tokens, heads before elements?"""
        plane, heads, elements = self.plane, self.find("H"), self.find("D")
        if self.start.get("H", 0) != 0 or self.start.get("D", 0) != 0:
            return False
        if self.find("R"):
            return not heads and not elements
        full_heads = plane.heads == 1 if not heads else self._full(heads, plane.heads)
        full_dim = plane.dim == 1 if not elements else self._full(elements, plane.dim)
        return full_heads and full_dim and (not heads or not elements or heads < elements)

    def _full(self, at: list[int], size: int) -> bool:
        return len(at) == 1 and self.dims[at[0]].step == 1 and self.dims[at[0]].size == size


def locate(view: Tensor, planes: Sequence[CachePlane]) -> Region:
    """Which part of which cache a view covers.

    Raises:
        RewriteError: it covers several caches, its dimensions do not step along a cache's axes, or where it lies
            depends on the values of a tensor.
    """
    if view.dtype != planes[0].dtype:
        raise RewriteError(f"a view of a {planes[0].dtype} cache as {view.dtype}; only its own elements can be named")
    try:
        for plane in planes:
            start = _starts(view, plane)
            dims = None if start is None else _dims(view, plane, start)
            if start is not None and dims is not None:
                return Region(plane, dims, start)
    except GuardOnDataDependentSymNode as error:
        raise _undecided() from error
    names = ", ".join(p.label for p in planes[:4])
    raise RewriteError(
        f"a view of shape {list(view.shape)}, strides {list(view.stride())} does not follow the axes of one bound "
        f"cache (of {names}); views may slice, index, flatten or transpose the cache of one layer"
    )


def _undecided() -> RewriteError:
    return RewriteError(
        "where a view of a cache begins or ends is a number read from a tensor; index with the tensor, as in k[slots]"
    )


def _starts(view: Tensor, plane: CachePlane) -> dict[str, Size] | None:
    """Where the view begins on each axis; None if it begins outside the plane.

    A symbolic offset is placed by its hint. Each of its terms moves along the widest axis whose stride divides it, and
    guards keep every axis within its size: there, no two cells have one offset.
    """
    offset: Size = view.storage_offset()
    axes = plane.axes
    rest, terms = _hint(offset) - plane.storage_offset, _terms(offset)
    if any(guard_or_false(n == 0) for n in view.shape):  # no token at all, and k[n:n] may begin behind the last one
        end = axes[0][1] * axes[0][2] if axes else 1
        return {axis: 0 for axis, _, _ in axes} if 0 <= rest <= end else None
    if rest < 0:
        return None
    start: dict[str, Size] = {}
    for axis, stride, size in axes:
        start[axis], rest = divmod(rest, stride)
        if start[axis] >= size:
            return None
        along = [t for t in terms if t.as_coeff_Mul()[0] % stride == 0]
        if along:
            terms = [t for t in terms if t not in along]
            moved = offset.node.shape_env.create_symintnode(sympy.Add(*along) / stride, hint=None)
            start[axis] = moved + (start[axis] - _hint(moved))
            if not 0 <= start[axis] < size:  # becomes a guard
                return None
    return None if rest or terms else start


def _hint(x: Size) -> int:
    """The value at hand of a number that may be symbolic."""
    if isinstance(x, int):
        return x
    if not x.node.has_hint():
        raise _undecided()
    return int(x.node.hint)


def _terms(x: Size) -> list[Any]:
    """The symbolic summands of a number, each a whole number times an expression."""
    if isinstance(x, int):
        return []
    _, rest = sympy.expand(x.node.expr).as_coeff_Add()
    terms = [t for t in sympy.Add.make_args(rest) if t != 0]
    return terms if all(t.as_coeff_Mul()[0].is_Integer for t in terms) else [sum(terms)]


def _dims(view: Tensor, plane: CachePlane, start: dict[str, Size]) -> tuple[Dim, ...] | None:
    dims = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        found = _dim(size, stride, plane, start)
        if found is None:
            return None
        dims.append(found)
    for axis, _, size in plane.axes:  # several dimensions along one axis: the last of all must lie on it
        along = [d for d in dims if d.axis == axis]
        if len(along) > 1 and start[axis] + _reach(along) >= size:
            return None
    flat = [d for d in dims if d.axis == "T"]
    if flat:  # nor may sequences and positions, flattened, run into what lies behind the plane
        length, rows, positions = plane.size("S"), *([d for d in dims if d.axis == axis] for axis in "BS")
        first = start.get("B", 0) * length + start.get("S", 0)
        if first + _reach(rows) * length + _reach(positions) + _reach(flat) >= plane.size("B") * length:
            return None
    return tuple(dims)


def _reach(dims: Sequence[Dim]) -> Size:
    """How far behind their first step these dimensions' last one lies."""
    return sum(d.step * (d.size - 1) for d in dims)


def _dim(size: Size, stride: Size, plane: CachePlane, start: dict[str, Size]) -> Dim | None:
    if isinstance(size, int) and size == 1:
        return Dim("1", 0, 1)
    if not isinstance(stride, int):
        return None
    if stride == 0:
        return Dim("x", 0, size)
    for axis, axis_stride, axis_size in plane.axes:
        if stride % axis_stride:
            continue
        step = stride // axis_stride
        if start[axis] + step * (size - 1) < axis_size:
            return Dim(axis, step, size)
        if axis == "S" and plane.paged and plane.merged("B", "S"):
            return Dim("T", step, size)
        if axis == "D" and plane.merged("H", "D") and step == 1 and size == plane.heads * plane.dim:
            return Dim("R", 1, size)
        return None
    return None


@dataclass(frozen=True)
class Selection:
    """Tokens picked out of a view: some of its dimensions indexed by tensors, the others whole, as in ``view[:, i]``.

    ``labels`` are the dimensions of the picked tensor, in order: ``("i", k)`` is the k-th of the broadcast indices,
    ``("d", n)`` the view's n-th dimension. Negative indices count from the end of a view if ``wraps``, else they are
    out of range. Nothing is written for an index out of range, and zeros are read; eager raises an error there.
    """

    region: Region
    indices: dict[int, Tensor]
    labels: tuple[tuple[str, int], ...]
    shape: tuple[Size, ...]
    wraps: bool

    @property
    def tokens(self) -> list[int]:
        """Positions of the picked tensor's token dimensions."""
        return [i for i, (kind, n) in enumerate(self.labels) if kind == "i" or not self._is_row(n)]

    def _is_row(self, n: int) -> bool:
        return self.region.dims[n].axis in ROW_AXES

    def rows(self, picked: Tensor) -> Tensor:
        """A tensor that broadcasts to the picked one's shape, as token rows ``[N, heads, dim]``."""
        plane, tokens = self.region.plane, self.tokens
        order = tokens + [i for i in range(len(self.labels)) if i not in tokens]
        if tuple(picked.shape) != self.shape:
            picked = picked.expand(self.shape)
        rows = picked if order == sorted(order) else picked.permute(order)
        flat = rows.dim() == 3 and len(tokens) == 1 and rows.shape[1:] == (plane.heads, plane.dim)
        return rows if flat else rows.reshape(-1, plane.heads, plane.dim)

    def picked(self, rows: Tensor) -> Tensor:
        """Token rows ``[N, heads, dim]`` as the picked tensor."""
        tokens = self.tokens
        order = tokens + [i for i in range(len(self.labels)) if i not in tokens]
        shape = [self.shape[i] for i in order]
        found = rows if len(tokens) == 1 and len(shape) == rows.dim() else rows.view(shape)
        return found if order == sorted(order) else found.permute([order.index(i) for i in range(len(order))])

    def slots(self, page_table: Tensor | None, device: torch.device) -> Tensor:
        """The physical slot of every token, ``[N]``; -1, which the operators skip, for an index out of range."""
        plane, outside = self.region.plane, []
        at: dict[str, Any] = {}
        for axis in "BST":
            at[axis], found = self._positions(axis, device)
            outside += found
        if not plane.paged:
            slots = at["S"] if isinstance(at["S"], Tensor) else torch.full((1,), at["S"], device=device)
        else:
            assert page_table is not None
            length, size = plane.size("S"), plane.page_size
            if self.region.find("T"):
                flat = at["B"] * length + at["S"] + at["T"]
                at["B"], at["S"] = flat // length, flat % length
            slots = page_table[at["B"], at["S"] // size] * size + at["S"] % size
        if outside:
            slots = slots.masked_fill(functools.reduce(operator.or_, outside), -1)
        shape = [self.shape[i] for i in self.tokens] or [1]
        return slots if len(shape) == slots.dim() == 1 else slots.expand(shape).reshape(-1)

    def _positions(self, axis: str, device: torch.device) -> tuple[Any, list[Tensor]]:
        """Where along an axis every token lies, and for every index along it, which are out of range.

        The first is a number, or like the others a tensor that broadcasts over the token dimensions.
        """
        position, outside = self.region.start.get(axis, 0), []
        for n in self.region.find(axis):
            index, dim = self.indices.get(n), self.region.dims[n]
            if index is None:
                along = torch.arange(dim.size, device=device)
                behind = self._behind(self.labels.index(("d", n)))
            else:
                index = index if index.dim() else index.reshape(1)  # torch indexes with the value of a scalar tensor
                behind = self._behind(max((i for i, (kind, _) in enumerate(self.labels) if kind == "i"), default=-1))
                near = index.clamp(-dim.size if self.wraps else 0, dim.size - 1)
                outside.append(_followed(near != index, behind))
                along = near % dim.size if self.wraps else near
            along = _followed(along, behind)
            along = along * dim.step if dim.step != 1 else along
            position = along if isinstance(position, int) and position == 0 else along + position
        if isinstance(position, torch.SymInt):  # as a number it would index, and be guarded on its value
            return torch.full((1,), position, dtype=torch.int64, device=device), outside  # type: ignore[call-overload]
        return position, outside

    def _behind(self, last: int) -> int:
        """Token dimensions behind a label; -1 stands for an index without dimensions, which has none behind it."""
        return sum(i > last for i in self.tokens) if last >= 0 else 0


def _followed(x: Tensor, dims: int) -> Tensor:
    """A tensor with so many dimensions of size 1 behind its own."""
    return x.reshape(*x.shape, *[1] * dims) if dims else x


def select(region: Region, indices: Sequence[Tensor | None], wraps: bool = True) -> Selection:
    """What ``view[indices]`` picks: one index or None for every dimension of the view, missing ones None.

    ``wraps``: negative indices count from the end.

    Raises:
        RewriteError: an index is a mask, or is on heads or elements; or the view does not hold whole rows.
    """
    given = {n: i for n, i in enumerate(indices) if i is not None}
    for n, index in given.items():
        if index.dtype not in (torch.int32, torch.int64):
            raise RewriteError(
                f"an index of dtype {index.dtype} selects a number of tokens that depends on its values; index with "
                "int32 or int64 slots"
            )
        if region.dims[n].axis in ROW_AXES:
            raise RewriteError(
                f"dimension {n} of the view, heads or elements of a head, is indexed; only tokens can be"
            )
    if not region.whole_rows:
        raise RewriteError(f"only a part of the heads or of the elements of a head of {region.plane.label} is named")
    rest: list[tuple[str, int]] = [("d", n) for n in range(len(region.dims)) if n not in given]
    shape = torch.broadcast_shapes(*(i.shape for i in given.values())) if given else ()
    at = sum(n < min(given) for _, n in rest) if given and max(given) - min(given) == len(given) - 1 else 0
    labels = [*rest[:at], *(("i", k) for k in range(len(shape))), *rest[at:]]
    sizes = tuple(shape[n] if kind == "i" else region.dims[n].size for kind, n in labels)
    return Selection(region, given, tuple(labels), sizes, wraps)


def select_elementwise(region: Region, dim: int, index: Tensor) -> Selection:
    """What scatter and gather pick: ``index`` along ``dim``, every other token dimension at its own position.

    ``index`` has the view's dimensions, heads and elements of size 1.
    """
    if not region.whole_rows:
        raise RewriteError(f"only a part of the heads or of the elements of a head of {region.plane.label} is named")
    tokens = [n for n, d in enumerate(region.dims) if d.axis not in ROW_AXES]
    sizes = [index.shape[n] for n in tokens]
    given = {}
    for at, n in enumerate(tokens):
        own = torch.arange(sizes[at], device=index.device).reshape(-1, *[1] * (len(tokens) - 1 - at))
        given[n] = index.reshape(sizes) if n == dim else own
    labels = tuple(("i", tokens.index(n)) if n in tokens else ("d", n) for n in range(len(region.dims)))
    shape = tuple(sizes[n] if kind == "i" else region.dims[n].size for kind, n in labels)
    return Selection(region, given, labels, shape, wraps=False)
