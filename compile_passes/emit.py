"""Nodes put into a recorded graph, with the fake tensors they stand for."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from .affine import Affine, place
from .internals import has_effect, operator_name, simplified, symbolic
from .rotation import Heads, Rotation, pair_axis
from .terms import Term, aten
from .trace import in_memory_order


class Emitter:
    """Writes into a graph, in front of one node; ``cast`` is the graph's operator ``cast(x, dtype=...)``."""

    def __init__(self, graph: Graph, fakes: FakeTensorMode, cast: Any = aten._to_copy.default) -> None:
        self._graph, self._fakes, self._cast = graph, fakes, cast
        self._trace: Any = None
        self._tables: dict[Any, Node] = {}

    @contextmanager
    def before(self, n: Node) -> Iterator[None]:
        """Nodes go in front of this one, and carry its stack trace."""
        self._trace = n.meta.get("stack_trace")
        with self._graph.inserting_before(n):
            yield

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A node that calls an operator."""
        name = "getitem" if target is operator.getitem else operator_name(target)
        n = self._graph.create_node("call_function", target, args, kwargs, name=name)
        values, named = torch.fx.map_arg((args, kwargs), lambda a: a.meta["val"])
        with self._fakes:
            n.meta["val"] = target(*values, **named)
        if self._trace:
            n.meta["stack_trace"] = self._trace
        return n

    def item(self, n: Node, i: int) -> Node:
        """One of a node's results."""
        return self.call(operator.getitem, n, i)

    def rows(self, heads: Heads, rotation: Rotation) -> Node:
        """Whole heads as ``[T, heads, dim]``, of the root's dtype."""
        frame, root, n = rotation.frame, rotation.root, heads.node
        order = [Affine.of(frame.axis(root, d)) for d in (*frame.tokens, frame.head)]
        order = [along for along in order if along != Affine()]
        last = len(heads.index) - 1
        ones = [d for d in range(last) if heads.index[d] == Affine()]
        n = self._permuted(n, [*ones, *(heads.index.index(along) for along in order), last])
        n = self._shaped(n, [-1, self._size(root, frame.head, heads), frame.dim])
        dtype = root.meta["val"].dtype
        return n if n.meta["val"].dtype == dtype else self.call(self._cast, n, dtype=dtype)

    def table(self, key: Rotation) -> tuple[Node | None, Node]:
        """Positions and cos_sin, or without positions a row of this step's cosines and sines for every token.

        That is made once for all rotations by the same angles.
        """
        if key.table is not None:
            return key.table
        known = (key.cos, key.sin, key.frame.tokens, key.row_axis)
        if known not in self._tables:
            halves = [self._angles(term, key) for term in (key.cos, key.sin) if term is not None]
            self._tables[known] = self.call(aten.cat.default, halves, -1)
        return None, self._tables[known]

    def _angles(self, term: Term, key: Rotation) -> Node:
        """What a term has for every token and pair, ``[T, rotary_dim / 2]``."""
        n, pair, axes = term.node, pair_axis(key.rotary_dim), key.table_axes(term)
        index = place(term.where, n.meta["val"])
        assert axes is not None and index is not None, "a rotation's cosines and sines make up a table"
        for d in reversed(range(len(axes))):
            if axes[d] is None:
                n = self.call(aten.select.int, n, d, index[d].const)
            elif axes[d] == pair and (index[d] != Affine.of(pair) or n.meta["val"].shape[d] != pair.size):
                step = dict(index[d].steps)[pair]
                n = self.call(aten.slice.Tensor, n, d, index[d].const, index[d].last + 1, step)
        kept = [axis for axis in axes if axis is not None]
        dims = [d for d in key.frame.tokens if key.frame.axis(key.root, d).size != 1]
        tokens = [key.frame.axis(key.root, d) for d in dims]
        if key.row_axis in kept:
            tokens = [key.row_axis]
        n = self._permuted(n, [kept.index(axis) for axis in (*tokens, pair) if axis in kept])
        if not set(tokens) <= set(kept):
            for i, axis in enumerate(tokens):
                n = n if axis in kept else self.call(aten.unsqueeze.default, n, i)
            n = self.call(aten.expand.default, n, [*(self._size(key.root, d, key.x) for d in dims), pair.size])
        return self._shaped(n, [-1, pair.size])

    def back(self, out: Node, rotation: Rotation) -> Node:
        """Rows ``[T, heads, dim]`` in the shape and with the strides of a root."""
        frame, root = rotation.frame, rotation.root
        like = root.meta["val"]
        lanes = [d for d in range(like.dim()) if d != frame.head and d not in frame.tokens]
        order = [*frame.tokens, frame.head, *lanes]
        n = self._shaped(out, [self._size(root, d, rotation.x) for d in order])
        n = self._permuted(n, [order.index(d) for d in range(like.dim())])
        if not _alike(n.meta["val"], like):
            dims = in_memory_order(like)
            n = self.call(aten.clone.default, self._permuted(n, dims), memory_format=torch.contiguous_format)
            n = self._permuted(n, [dims.index(d) for d in range(like.dim())])
        return n

    def _permuted(self, n: Node, dims: Sequence[int]) -> Node:
        return n if list(dims) == sorted(dims) else self.call(aten.permute.default, n, list(dims))

    def _shaped(self, n: Node, shape: list[Any]) -> Node:
        x = n.meta["val"]
        static = all(isinstance(size, int) for size in (*x.shape, *shape))
        if static and len(shape) == x.dim() and all(a in (-1, b) for a, b in zip(shape, x.shape, strict=True)):
            return n
        return self.call(aten.reshape.default, n, shape)

    def _size(self, root: Node, d: int, heads: Heads) -> Any:
        """The size of a root's dimension; where it is symbolic, a node that asks the tensor that it comes from."""
        size = root.meta["val"].shape[d]
        if isinstance(size, int):
            return size
        source = next(i for i, along in enumerate(heads.index) if {a.size for a in along.axes} == {symbolic(size)})
        return self.call(aten.sym_size.int, heads.node, source)

    def erase_dead(self) -> None:
        """Erase what nothing uses any more."""
        for n in reversed(list(self._graph.nodes)):
            if n.op == "call_function" and not n.users and not has_effect(n):
                self._graph.erase_node(n)


def _alike(x: Tensor, y: Tensor) -> bool:
    """Are strides equal wherever they matter?"""
    strides = [(simplified(symbolic(a)), simplified(symbolic(b))) for a, b in zip(x.stride(), y.stride(), strict=True)]
    return all(size == 1 or a == b for size, (a, b) in zip(x.shape, strides, strict=True))
