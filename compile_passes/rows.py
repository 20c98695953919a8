"""A rotated tensor's elements as rows ``[T, heads, dim]``, followed through views and copies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Sequence

from torch import Tensor
from torch.fx import Node

from .affine import Affine, Axis, Index, address, place
from .internals import alike, simplified, storage_key, symbolic
from .rotation import Frame
from .terms import aten


def moved(root: Node, through: Container[Node] = ()) -> dict[Node, Index]:
    """The nodes that hold all of a root's elements, as views and copies of it, and pointwise results in ``through``.

    With each comes the index of an element in it, by axes that are the root's own dimensions.
    """
    found: dict[Node, Index] = {root: _own(root)}
    queue = [root]
    for n in queue:
        index, x = found[n], n.meta["val"]
        for user in n.users:
            y, new = user.meta.get("val"), None
            if user in found or not isinstance(y, Tensor) or user.args[0] is not n or not _same(y.numel(), x.numel()):
                continue
            if storage_key(y) == storage_key(x) and alike(x, y):
                new = place(address(index, x), y)
            elif user.target is aten.clone.default or user in through:
                new = index
            if new is not None:
                found[user] = new
                queue.append(user)
    return found


def frames(root: Node, rows: Node, through: Container[Node]) -> Iterator[Frame]:
    """How a root's dimensions make up rows ``[T, heads, dim]``: several ways where a single head could be any."""
    index = moved(root, through).get(rows)
    if index is None or len(index) != 3:
        return
    own, shape = _own(root), root.meta["val"].shape
    row, heads, lanes = ([d for d in range(len(own)) if own[d].axes & along.axes] for along in index)
    ones = [d for d in range(len(own)) if shape[d] == 1]
    if len(row) + len(heads) + len(lanes) + len(ones) != len(own) or _radix(root, lanes) != index[2]:
        return
    if len(heads) > 1 or (heads and own[heads[0]] != index[1]):
        return
    tokens = next((order for order in itertools.permutations(row) if _radix(root, order) == index[0]), None)
    if tokens is not None:
        for head in heads or ones:
            rest = (d for d in ones if d != head)
            yield Frame((*rest, *tokens), head, math.prod(shape[d] for d in lanes))


def rows_of(root: Node, frame: Frame) -> Index:
    """The index of a root's elements among rows, as :func:`moved` has it."""
    lanes = [d for d in range(len(_own(root))) if d != frame.head and d not in frame.tokens]
    return (_radix(root, frame.tokens), _own(root)[frame.head], _radix(root, lanes))


def _own(root: Node) -> Index:
    return tuple(Affine.of(Axis(f"dim{d}", symbolic(n))) for d, n in enumerate(root.meta["val"].shape))


def _radix(root: Node, dims: Sequence[int]) -> Affine:
    """Dimensions flattened into one, in this order."""
    found, step, own = Affine(), 1, _own(root)
    for d in reversed(dims):
        found = found.plus(own[d], step)
        step = simplified(step * symbolic(root.meta["val"].shape[d]))
    return found


def _same(a: object, b: object) -> bool:
    return bool(simplified(symbolic(a)) == simplified(symbolic(b)))
