"""Which part of which cache a view covers. Everything is read off sizes, strides and storage offset.

A view's every dimension steps along one axis of its cache; that tells what ``k[:, :, a:b]``, ``kv[layer]``,
``k.view(-1, H, D)`` or ``k.transpose(1, 2)`` is, without a list of the operators that made it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .forms import CachePlane
from .internals import DataDependent, divisible, guard_or_false, settled, sum_of_terms, symbolic_terms, value_at_hand
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
        return full_heads and full_dim and (not heads or not elements or max(heads) < min(elements))

    def _full(self, at: list[int], size: int) -> bool:
        """Do these dimensions, one inside the other, step through all of an axis?"""
        step: Size = 1
        for dim in (self.dims[i] for i in reversed(at)):
            if dim.step != step:
                return False
            step = step * dim.size
        return bool(step == size)


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
    except DataDependent as error:
        raise _undecided() from error
    names = ", ".join(p.label for p in planes[:4])
    raise RewriteError(
        f"a view of shape {list(view.shape)}, strides {list(view.stride())} does not follow the axes of one bound "
        f"cache (of {names}); views may slice, index, flatten or transpose the cache of one layer"
    )


def whole(plane: CachePlane) -> Region:
    """All of a cache."""
    steps = {"P": ("S", plane.size("S"))}  # pages are slots, too
    dims = [
        Dim("1", 0, 1) if n == 1 else Dim(*steps.get(axis, (axis, 1)), n)
        for axis, n in zip(plane.form, plane.shape, strict=True)
    ]
    return Region(plane, tuple(dims), dict.fromkeys(plane.form, 0))


def around(view: Tensor, planes: Sequence[CachePlane]) -> CachePlane | None:
    """The cache that a view lies in, whatever the view's dimensions are, where the cache has no gaps."""
    try:
        for plane in planes:
            first = view.storage_offset() - plane.storage_offset
            last = first + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))
            if plane.gapless and view.dtype == plane.dtype and first >= 0 and last < math.prod(plane.shape):
                return plane
    except DataDependent:
        pass
    return None


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
    rest, terms = _hint(offset) - plane.storage_offset, symbolic_terms(offset)
    if any(guard_or_false(settled(n) == 0) for n in view.shape):  # no token; k[n:n] may begin behind the last one
        end = axes[0][1] * axes[0][2] if axes else 1
        return {axis: 0 for axis, _, _ in axes} if 0 <= rest <= end else None
    if rest < 0:
        return None
    start: dict[str, Size] = {}
    for axis, stride, size in axes:
        start[axis], rest = divmod(rest, stride)
        if start[axis] >= size:
            return None
        along = [t for t in terms if divisible(t, stride)]
        if along:
            terms = [t for t in terms if t not in along]
            moved = sum_of_terms(along, stride, offset)
            start[axis] = moved + (start[axis] - _hint(moved))
            if not 0 <= start[axis] < size:  # becomes a guard
                return None
    return None if rest or terms else start


def _hint(x: Size) -> int:
    value = value_at_hand(x)
    if value is None:
        raise _undecided()
    return value


def _dims(view: Tensor, plane: CachePlane, start: dict[str, Size]) -> tuple[Dim, ...] | None:
    dims = []
    for size, stride in zip(view.shape, view.stride(), strict=True):
        found = _dim(settled(size), settled(stride), plane, start)
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
