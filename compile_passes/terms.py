"""What the elements of a graph's tensors are computed from: a term for every way to name elements.

Where an element, or a block of them named by an :mod:`affine` index, lies in its storage follows from strides alone, so
no view operator has a rule: what counts is the node that made the storage. Pointwise operators become terms over the
elements they read, ``cat`` and ``stack`` lead to one of their inputs, copies to theirs; every other node is a leaf.
Equal terms are one object, so two ways to compute the same are equal if they are the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .affine import Affine, Axis, Index, address, mean_axis, place
from .engine_ops import NORM_OPS
from .internals import (
    alike,
    is_mutable,
    is_operator,
    is_pointwise,
    is_repeatable,
    operator_name,
    simplified,
    storage_key,
    symbolic,
    written,
)

aten = torch.ops.aten
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
DEPTH = 64  # of terms: those of a rotation have a third of that, those of a residual stream as many as the model


@dataclass(frozen=True, eq=False)
class Term:
    """An operator, by its name, on terms and numbers, or a leaf.

    ``node`` and ``where`` say of which storage, and where in it, the graph has this term's elements; ``dtype`` is
    theirs. ``axes`` are all that they depend on.
    """

    op: str
    args: tuple[Any, ...]
    node: Node
    where: Affine
    dtype: torch.dtype
    axes: frozenset[Axis]


class Terms:
    """The terms of one graph.

    Attributes:
        order: every node's place in the program.
        writers: by storage, the nodes that write to it in place.
        views: by storage, the nodes that lie in it, its owner first.
    """

    def __init__(self, graph: Graph) -> None:
        self.order: dict[Node, int] = {n: i for i, n in enumerate(graph.nodes)}
        self.writers: dict[int, list[Node]] = {}
        self.views: dict[int, list[Node]] = {}
        self._known: dict[tuple[Node, Affine, int], Term] = {}
        self._terms: dict[Any, Term] = {}
        self._firsts: dict[Node, Node] = {}
        self._calls: dict[Any, Node] = {}
        self._depth = 0
        for n in graph.nodes:
            x = n.meta.get("val")
            if isinstance(x, Tensor):
                self.views.setdefault(storage_key(x), []).append(n)
            for node in _written(n):
                self.writers.setdefault(storage_key(node.meta["val"]), []).append(n)
        for n in graph.nodes:
            self._firsts[n] = self._calls.setdefault(self._call(n), n)

    def owner(self, n: Node) -> Node:
        """The node that made the storage a tensor lies in."""
        return self.siblings(n)[0]

    def siblings(self, n: Node) -> list[Node]:
        """Every node that lies in the same storage as a tensor, itself among them."""
        return self.views[storage_key(n.meta["val"])]

    def is_written(self, n: Node) -> bool:
        """Does anything in the graph write to a tensor's storage?"""
        return storage_key(n.meta["val"]) in self.writers

    def at(self, n: Node, index: Sequence[Affine], reader: Node | None = None) -> Term:
        """The term of an element of a node's tensor, as a later node reads it; None stands for the last one."""
        x, owner, written = n.meta["val"], self.owner(n), self.writers.get(storage_key(n.meta["val"]), [])
        before = [w for w in written if reader is None or self.order[w] < self.order[reader]]
        if not alike(x, owner.meta["val"]):
            return self._term("view", (n, tuple(index), len(before)), n, address(index, x), x.dtype, _axes(index))
        key = (owner, address(index, x), len(before))
        if key not in self._known:
            self._known[key] = self._stored(owner, key[1], before)
        return self._known[key]

    def _stored(self, owner: Node, where: Affine, before: Sequence[Node]) -> Term:
        """The term of what lies at an address of a storage after some nodes wrote there."""
        x = owner.meta["val"]
        made = before[-1] if before else owner
        index = place(where, x) if made.op == "call_function" and self._depth < DEPTH else None
        if before and not _writes_whole(made, x):
            index = None
        self._depth += 1
        found = None if index is None else self._made(made, index, owner, where)
        self._depth -= 1
        if found is None:
            first = owner if before else self._firsts[owner]
            found = self._term("leaf", (first, where, len(before)), first, where, x.dtype, where.axes)
        return found

    def _call(self, n: Node) -> Any:
        """Equal for calls of one operator on the same values: layers may compute their angles one by one."""
        if n.op == "call_function" and is_repeatable(n.target):
            return (n.target, self._named(n.args), self._named(n.kwargs))
        return n

    def _named(self, a: Any) -> Any:
        """An argument, equal where its values are; what is written in place is equal to nothing."""
        if isinstance(a, list | tuple):
            return tuple(map(self._named, a))
        if isinstance(a, dict):
            return tuple((key, self._named(a[key])) for key in sorted(a))
        if isinstance(a, Node):
            x = a.meta.get("val")
            if not isinstance(x, Tensor):
                return self._firsts[a]
            if self.is_written(a):
                return object()
            sizes = [simplified(symbolic(n)) for n in (*x.shape, *x.stride(), x.storage_offset())]
            return (self._firsts[self.owner(a)], x.dtype, x.is_neg(), x.is_conj(), *sizes)
        return (type(a), a)

    def _made(self, n: Any, index: Index, owner: Node, where: Affine) -> Term | None:
        """The term that a node makes of the elements it reads; None for a leaf."""
        if n.target in (aten.clone.default, aten.lift_fresh_copy.default):
            return self.at(n.args[0], index, n)
        if n.target in CASTS:
            return self._cast(n, index, owner, where)
        if n.target is aten.cat.default:
            return self._joined(n, index, owner, where)
        if n.target is aten.stack.default:
            dim = (n.args[1] if len(n.args) > 1 else 0) % len(index)
            at, rest = index[dim], (*index[:dim], *index[dim + 1 :])
            known = not at.steps and isinstance(at.const, int)
            return self._part(n.args[0][at.const], rest, n, owner, where) if known else None
        if n.target is aten.mean.dim and not n.kwargs:
            return self._mean(n, index, owner, where)
        if n.target in NORM_OPS:
            return self._norm(n, index, owner, where)
        if is_pointwise(n.target) and not n.kwargs:
            args = [self._read(a, index, n) for a in n.args]
            if all(isinstance(a, Term | int | float | None) or _is_number(a) for a in args):
                return self._op(operator_name(n.target).removesuffix("_"), args, owner, where)
        return None

    def _read(self, argument: Any, index: Index, reader: Node) -> Any:
        """An argument of a pointwise operator: a term, or what it is if it is no tensor."""
        if not isinstance(argument, Node) or not isinstance(argument.meta.get("val"), Tensor):
            return argument
        shape = argument.meta["val"].shape
        own = index[len(index) - len(shape) :]
        return self.at(argument, [Affine() if n == 1 else i for n, i in zip(shape, own, strict=True)], reader)

    def _cast(self, n: Any, index: Index, owner: Node, where: Affine) -> Term | None:
        """``_to_copy(x, dtype=...)``, Inductor's ``convert_element_type(x, dtype)``: a cast, or a copy."""
        before, after = n.args[0].meta["val"], owner.meta["val"]
        if before.device != after.device:
            return None
        inner = self.at(n.args[0], index, n)
        return inner if before.dtype == after.dtype else self._op("cast", [inner], owner, where)

    def _part(self, part: Node, index: Index, n: Node, owner: Node, where: Affine) -> Term:
        """An element that was put together with others, whose type may be wider."""
        inner = self.at(part, index, n)
        return inner if inner.dtype == owner.meta["val"].dtype else self._op("cast", [inner], owner, where)

    def _joined(self, n: Any, index: Index, owner: Node, where: Affine) -> Term | None:
        """``cat([a, b], dim)`` where all of the elements lie in one of them."""
        dim = (n.args[1] if len(n.args) > 1 else 0) % len(index)
        start = 0
        for part in n.args[0]:
            size = part.meta["val"].shape[dim] if part.meta["val"].dim() == len(index) else None
            own = index[dim].plus(Affine(const=-start))
            if not isinstance(size, int) or not isinstance(own.const, int):
                return None
            if own.const >= 0 and own.below(size):
                return self._part(part, (*index[:dim], own, *index[dim + 1 :]), n, owner, where)
            start += size
        return None

    def _mean(self, n: Any, index: Index, owner: Node, where: Affine) -> Term | None:
        """``mean(x, [dim], keepdim)``: the mean over an axis of its own."""
        source, dims = n.args[0], n.args[1]
        if len(dims or ()) != 1:
            return None
        dim, keeps = dims[0] % source.meta["val"].dim(), len(n.args) > 2 and n.args[2]
        along = Affine.of(mean_axis(symbolic(source.meta["val"].shape[dim])))
        inner = (*index[:dim], along, *index[dim + 1 if keeps else dim :])
        return self._op("mean", [self.at(source, inner, n)], owner, where, without=along.axes)

    def _norm(self, n: Any, index: Index, owner: Node, where: Affine) -> Term | None:
        """An engine's norm operator, as the operations that it stands for."""
        norm = NORM_OPS[n.target](*n.args, **n.kwargs)
        if norm is None:
            return None
        along = Affine.of(mean_axis(symbolic(norm.x.meta["val"].shape[-1])))
        x, others = self.at(norm.x, index, n), self.at(norm.x, (*index[:-1], along), n)

        def op(name: str, *args: Any, without: frozenset[Axis] = frozenset()) -> Term:
            return self._op(name, args, owner, where, without)

        mean = op("mean", op("mul", others, others), without=along.axes)
        scaled = op("mul", x, op("rsqrt", op("add", mean, norm.eps)))
        return op("mul", scaled, self.at(norm.weight, index[-1:], n))

    def _op(
        self, op: str, args: Sequence[Any], owner: Node, where: Affine, without: frozenset[Axis] = frozenset()
    ) -> Term:
        axes = frozenset[Axis]().union(*(a.axes for a in args if isinstance(a, Term))) - without
        return self._term(op, tuple(args), owner, where, owner.meta["val"].dtype, axes)

    def _term(
        self, op: str, args: tuple[Any, ...], node: Node, where: Affine, dtype: torch.dtype, axes: frozenset[Axis]
    ) -> Term:
        key = (op, dtype, *((type(a), a) for a in args))
        if key not in self._terms:
            self._terms[key] = Term(op, args, node, where, dtype, axes)
        return self._terms[key]


def _axes(index: Sequence[Affine]) -> frozenset[Axis]:
    return frozenset[Axis]().union(*(i.axes for i in index))


def _written(n: Node) -> list[Node]:
    """The tensors that a node writes to in place."""
    if n.op != "call_function" or not is_mutable(n.target):
        return []
    found = written(n.target, n.args, n.kwargs) if is_operator(n.target) else n.all_input_nodes
    return [m for m in found if isinstance(m, Node) and isinstance(m.meta.get("val"), Tensor)]


def _is_number(a: Any) -> bool:
    """Is this a node that stands for a symbolic number? It is the same wherever it is used."""
    return isinstance(a, Node) and isinstance(a.meta.get("val"), torch.SymInt | torch.SymFloat)


def _writes_whole(writer: Node, x: Tensor) -> bool:
    """Is this ``x.op_(...)`` on all of a storage, the operator a pointwise one?"""
    target = writer.args[0].meta["val"] if writer.args and isinstance(writer.args[0], Node) else None
    same = target is not None and (target.shape, target.stride()) == (x.shape, x.stride())
    return same and is_pointwise(writer.target)
