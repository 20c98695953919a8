"""The tokens that an index picks out of a view of a cache, and their physical slots."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pm_ops.ops import _common

from .regions import ROW_AXES, Region, Size
from .report import RewriteError


@dataclass(frozen=True)
class Selection:
    """Tokens picked out of a view: some of its dimensions indexed by tensors, the others whole, as in ``view[:, i]``.

    ``labels`` are the dimensions of the picked tensor, in order: ``("i", k)`` is the k-th of the broadcast indices,
    ``("d", n)`` the view's n-th dimension. Negative indices count from the end of a view if ``wraps``, else they are
    out of range. Nothing is written for an index out of range, and zeros are read, where eager raises an error. With
    ``PM_OPS_CHECKS=1`` the operator raises one too, but for padding: the length of an axis of physical slots.
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
        """The physical slot of every token, ``[N]``; for an index out of range -1, which the operators skip.

        With ``PM_OPS_CHECKS=1`` it is the first slot behind the pool, which they refuse.
        """
        plane = self.region.plane
        outside: list[Tensor] = []
        refused: list[Tensor] = []
        at = {axis: self._positions(axis, device, outside, refused) for axis in "BST"}
        if not plane.paged:
            slots = at["S"] if isinstance(at["S"], Tensor) else torch.full((1,), at["S"], device=device)
        else:
            assert page_table is not None
            length, size = plane.size("S"), plane.page_size
            if self.region.find("T"):
                flat = at["B"] * length + at["S"] + at["T"]
                at["B"], at["S"] = flat // length, flat % length
            column = at["S"] // size
            slots = page_table[at["B"], column + plane.column if plane.column else column] * size + at["S"] % size
        if outside:
            slots = slots.masked_fill(functools.reduce(operator.or_, outside), -1)
        if refused:
            slots = slots.masked_fill(functools.reduce(operator.or_, refused), plane.geometry[4] * plane.page_size)
        shape = [self.shape[i] for i in self.tokens] or [1]
        return slots if len(shape) == slots.dim() == 1 else slots.expand(shape).reshape(-1)

    def _positions(self, axis: str, device: torch.device, outside: list[Tensor], refused: list[Tensor]) -> Any:
        """Where along an axis every token lies: a number, or a tensor that broadcasts over the token dimensions.

        Such tensors are added to the lists for every index along it: which are out of range, and which of these are
        to be refused.
        """
        position = self.region.start.get(axis, 0)
        for n in self.region.find(axis):
            index, dim = self.indices.get(n), self.region.dims[n]
            if index is None:
                along = torch.arange(dim.size, device=device)
                behind = self._behind(self.labels.index(("d", n)))
            else:
                index = index if index.dim() else index.reshape(1)  # torch indexes with the value of a scalar tensor
                behind = self._behind(max((i for i, (kind, _) in enumerate(self.labels) if kind == "i"), default=-1))
                first = -dim.size if self.wraps else 0
                near = index.clamp(first, dim.size - 1)
                outside.append(_followed(near != index, behind))
                if _common.CHECKS:
                    last = dim.size - 1 if self.region.plane.paged else dim.size
                    refused.append(_followed(index.clamp(first, last) != index, behind))
                along = near % dim.size if self.wraps else near
            along = _followed(along, behind)
            along = along * dim.step if dim.step != 1 else along
            position = along if isinstance(position, int) and position == 0 else along + position
        if isinstance(position, torch.SymInt):  # as a number it would index, and be guarded on its value
            return torch.full((1,), position, dtype=torch.int64, device=device)  # type: ignore[call-overload]
        return position

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
    _check_whole_rows(region)
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
    _check_whole_rows(region)
    tokens = [n for n, d in enumerate(region.dims) if d.axis not in ROW_AXES]
    sizes = [index.shape[n] for n in tokens]
    given = {}
    for at, n in enumerate(tokens):
        own = torch.arange(sizes[at], device=index.device).reshape(-1, *[1] * (len(tokens) - 1 - at))
        given[n] = index.reshape(sizes) if n == dim else own
    labels = tuple(("i", tokens.index(n)) if n in tokens else ("d", n) for n in range(len(region.dims)))
    shape = tuple(sizes[n] if kind == "i" else region.dims[n].size for kind, n in labels)
    return Selection(region, given, labels, shape, wraps=False)


def _check_whole_rows(region: Region) -> None:
    if not region.whole_rows:
        raise RewriteError(f"only a part of the heads or of the elements of a head of {region.plane.label} is named")
