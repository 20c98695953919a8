"""Which bytes of a storage a view holds, and which caches lie in them."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .cells import Cells
from .forms import CachePlane
from .internals import base_of, storage_key, without_facades


class Box(NamedTuple):
    """A strided view in bytes: ``run`` of them from ``start`` on, and that again along every ``(stride, size)``."""

    start: int
    run: int
    axes: tuple[tuple[int, int], ...]

    def of(self, units: Tensor, unit: int) -> Tensor:
        """The elements of a tensor, one for every ``unit`` bytes of the storage, that this box holds."""
        sizes, strides = [self.run // unit], [1]
        for stride, size in self.axes:
            sizes.append(size)
            strides.append(stride // unit)
        return units.as_strided(sizes, strides, self.start // unit)


def box_of(x: Tensor | CachePlane) -> Box:
    """A tensor's or a cache's."""
    strides, start = (x.stride, x.storage_offset) if isinstance(x, CachePlane) else (x.stride(), x.storage_offset())
    run, axes, item = x.dtype.itemsize, [], x.dtype.itemsize
    for stride, size in sorted((st * item, n) for st, n in zip(strides, x.shape, strict=True) if n != 1 and st):
        if stride == run:
            run *= size
        else:
            axes.append((stride, size))
    return Box(int(start) * item, run, tuple(axes))


def unit_of(boxes: Sequence[Box], nbytes: int) -> int:
    """The most bytes such that every box holds all or nothing of every such piece of a storage."""
    return math.gcd(nbytes, *(n for box in boxes for n in (box.start, box.run, *(stride for stride, _ in box.axes))))


def check_covered(planes: Sequence[CachePlane], nbytes: int) -> None:
    """Raise ValueError unless every byte of a storage belongs to exactly one of the caches."""
    boxes = [box_of(p) for p in planes]
    unit = unit_of(boxes, nbytes)
    owners_of = torch.zeros(nbytes // unit, dtype=torch.int32)
    for box in boxes:
        box.of(owners_of, unit).add_(1)
    if not bool((owners_of == 1).all()):
        names, held = ", ".join(p.label for p in planes[:4]), sum(math.prod(p.shape) * p.dtype.itemsize for p in planes)
        raise ValueError(
            f"the storage under {names} has {nbytes} bytes, the bound caches in it {held}: its memory could not be "
            "given back without losing the rest; bind every cache that lies in it, once"
        )


class Cover:
    """The bound caches under a view of their storage, which they fill.

    Args:
        view: a tensor, of which only sizes, strides and offset are used.
        planes, nbytes: the caches in its storage, and the size that it had.
        cells: the pages' cells of one of the caches.
    """

    def __init__(
        self, view: Tensor, planes: Sequence[CachePlane], nbytes: int, cells: Callable[[CachePlane], Cells]
    ) -> None:
        with without_facades():
            box, boxes = box_of(view), [box_of(p) for p in planes]
        unit, self._cells = unit_of([box, *boxes], nbytes), cells
        seen = torch.zeros(nbytes // unit, dtype=torch.bool)
        if 0 not in view.shape:
            box.of(seen, unit).fill_(True)
        own = [b.of(seen, unit) for b in boxes]
        self._planes = [p for p, cells_of in zip(planes, own, strict=True) if bool(cells_of.any())]
        self._whole = all(bool(cells_of.all()) for cells_of in own if bool(cells_of.any()))

    @property
    def label(self) -> str:
        """For messages."""
        names = " and ".join(p.label for p in self._planes[:2]) or "no token of a bound cache"
        return names + (" and more" if len(self._planes) > 2 else "")

    def zero(self) -> None:
        """Zero the tokens under the view in their pages; RuntimeError if it covers a cache in part."""
        if not self._whole:
            raise RuntimeError(
                f"eager code calls 'zero_' on a part of {self.label}, which lives in pages; zero whole caches, do it "
                "inside the compiled model, or call binding.release() first"
            )
        for plane in self._planes:
            self._cells(plane).zero()


def sharing(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Every live tensor object over the storages of these, which come first: a model may keep views of its own.

    Raises:
        ValueError: one is of a tensor subclass; it would stay, over memory that was given back.
    """
    found = {id(t): t for t in tensors}
    storages = {storage_key(t) for t in found.values()}
    for other in gc.get_objects():
        if issubclass(type(other), torch.Tensor) and id(other) not in found and _storage(other) in storages:
            if type(other) not in (torch.Tensor, torch.nn.Parameter):
                raise ValueError(f"a {type(other).__name__} shares memory with a cache; only plain tensors may")
            found[id(other)] = other
    for t in list(found.values()):
        base = base_of(t)
        if base is not None and id(base) not in found:
            found[id(base)] = base
    return list(found.values())


def _storage(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return None


def owners(tensors: Iterable[Tensor]) -> list[tuple[torch.nn.Module, list[str]]]:
    """Every live module that has some of these tensors as parameters or buffers, and their names in it."""
    wanted, found = {id(t) for t in tensors}, []
    for module in gc.get_objects():
        if issubclass(type(module), torch.nn.Module):
            named = {**module.__dict__.get("_parameters", {}), **module.__dict__.get("_buffers", {})}
            names = [name for name, t in named.items() if id(t) in wanted]
            if names:
                found.append((module, names))
    return found
