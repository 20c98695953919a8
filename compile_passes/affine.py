"""Elements of tensors by affine indices: an index along every dimension, and an address in the storage.

An index is a sum of axes times steps: with axes ``b``, ``t`` and ``i``, element ``[b, t, 32 + i]`` stands for a whole
block of elements at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from .internals import never_negative, quotient, simplified, symbolic, value_at_hand

Number = Any  # an int, or a sympy expression where a size is symbolic


class Axis(NamedTuple):
    """A variable of an index, from 0 to ``size - 1``."""

    name: str
    size: Number


@dataclass(frozen=True)
class Affine:
    """``const`` and the sum of axes times their steps: an index along a dimension, or an address in a storage."""

    steps: frozenset[tuple[Axis, Number]] = frozenset()
    const: Number = 0

    @staticmethod
    def of(axis: Axis, step: Number = 1, const: Number = 0) -> Affine:
        """``const + step * axis``; an axis of size 1 is always 0."""
        return Affine(frozenset() if axis.size == 1 else frozenset(((axis, step),)), const)

    def plus(self, other: Affine, times: Number = 1) -> Affine:
        """``self + other * times``."""
        if not other.steps and other.const == 0:
            return self
        steps = dict(self.steps)
        for axis, step in other.steps:
            steps[axis] = simplified(steps.get(axis, 0) + step * times)
        return Affine(frozenset(steps.items()), simplified(self.const + other.const * times))

    @property
    def axes(self) -> frozenset[Axis]:
        """Those that it depends on."""
        return frozenset(axis for axis, _ in self.steps)

    @property
    def last(self) -> Number:
        """The largest value."""
        return simplified(self.const + sum(step * (axis.size - 1) for axis, step in self.steps))

    def below(self, size: Number) -> bool:
        """Is every value less?"""
        return never_negative(simplified(size - 1 - self.last))


Index = tuple[Affine, ...]


def address(index: Sequence[Affine], x: Tensor) -> Affine:
    """Where in its storage an element lies, in elements."""
    found = Affine(const=symbolic(x.storage_offset()))
    for along, size, stride in zip(index, x.shape, x.stride(), strict=True):
        if size != 1:
            found = found.plus(along, symbolic(stride))
    return found


def place(where: Affine, x: Tensor) -> Index | None:
    """The index of the element of a tensor that lies at an address; None if none is known to."""
    dims: list[tuple[int, int, Number, Number]] = []  # the widest stride's value first
    for d, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        hint = value_at_hand(stride)
        if hint is None:
            return None
        if size != 1 and hint:
            dims.append((hint, d, symbolic(stride), symbolic(size)))
    dims.sort(reverse=True, key=lambda dim: dim[0])
    index, rest = [Affine()] * x.dim(), simplified(where.const - symbolic(x.storage_offset()))
    for axis, step in where.steps:
        found = next(((d, q) for _, d, stride, _ in dims if (q := quotient(step, stride)) is not None), None)
        if found is None:
            return None
        index[found[0]] = index[found[0]].plus(Affine.of(axis, found[1]))
    for hint, d, stride, _ in dims:
        if isinstance(rest, int) and rest >= hint:
            if not isinstance(stride, int):
                return None
            index[d] = index[d].plus(Affine(const=rest // stride))
            rest %= stride
    return tuple(index) if rest == 0 and all(index[d].below(size) for _, d, _, size in dims) else None


def mean_axis(size: Number) -> Axis:
    """The axis that a mean is taken over."""
    return Axis("mean", size)
