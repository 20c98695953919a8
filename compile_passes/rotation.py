"""Rotary embeddings, and the RMSNorm in front of them, recognised by what they compute.

A rotation is looked for at a *root*, the node whose every head is ``[rotated pairs | elements passed through]``. Two
terms tell: those of a pair's first and of its second element, for all tokens, heads and pairs at once,

::

    first  = a * cos - b * sin        add(mul(a, cos), mul(neg(b), sin)), sub(mul(cos, a), mul(sin, b)), ...
    second = b * cos + a * sin        add(mul(b, cos), mul(a, sin)), ...

where a and b are the pair's elements of one tensor, and cos and sin are the same for every head. So a table that holds
every angle twice, ``cat(freqs, freqs)``, counts if its halves are the same by the graph. ``rope_store_kv`` rounds once,
at the end, where a graph in bf16 may round after every operation: that is looked through, and so are casts in between,
but no rounding to a coarser type than the result's.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch.fx import Node

from .affine import Affine, Axis, Index, mean_axis, place
from .internals import simplified, symbolic
from .norm import Norm, is_square, normed
from .precision import as_fine, exact, uncast, widened
from .rotary_ops import ROTATE
from .terms import CASTS, Term, Terms


@dataclass(frozen=True)
class Frame:
    """What the dimensions of a root are.

    Args:
        tokens: those that make up a row's number, the most significant first.
        head: the heads'.
        dim: elements of a head, which all other dimensions hold.
    """

    tokens: tuple[int, ...]
    head: int
    dim: int

    def index(self, root: Node, lane: Affine) -> Index | None:
        """The index of an element of every head of every token."""
        shape = root.meta["val"].shape
        lanes = [d for d in range(len(shape)) if d != self.head and d not in self.tokens]
        where = place(lane, torch.empty([shape[d] for d in lanes], device="meta"))
        if where is None:
            return None
        index = [Affine.of(self.axis(root, d)) for d in range(len(shape))]
        for d, along in zip(lanes, where, strict=True):
            index[d] = along
        return tuple(index)

    def axis(self, root: Node, d: int) -> Axis:
        """The axis of a token or head dimension."""
        return Axis("head" if d == self.head else f"token{d}", symbolic(root.meta["val"].shape[d]))

    def outer(self, root: Node) -> frozenset[Axis]:
        """The axes of tokens and heads, but for those of size 1."""
        return frozenset(a for d in (*self.tokens, self.head) if (a := self.axis(root, d)).size != 1)


@dataclass(frozen=True)
class Heads:
    """A tensor of whole heads: one dimension for each axis of tokens and heads, the last one a head's elements."""

    node: Node
    index: Index

    def at(self, lane: Affine) -> Index:
        """The index of another element of the heads."""
        return (*self.index[:-1], lane)


@dataclass(frozen=True)
class Rotation:
    """What a root computes.

    Args:
        root: the node.
        x: what is rotated; with a norm, what it is taken of.
        cos, sin: of a pair; they depend on tokens and pairs. None where an engine's operator rotates by ``table``.
        table: positions and cos_sin, as ``rope_store_kv`` has them.
        rotary_dim, interleaved, norm: as ``rope_store_kv`` has them.
    """

    root: Node
    frame: Frame
    x: Heads
    cos: Term | None
    sin: Term | None
    rotary_dim: int
    interleaved: bool
    norm: Norm | None = None
    table: tuple[Node, Node] | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for a query's and a key's rotation that one ``rope_store_kv`` can do."""
        norm = self.norm and (self.norm.eps, self.norm.offset)
        return (self.cos, self.sin, self.table, self.rotary_dim, self.interleaved, self.frame, norm)

    @property
    def sources(self) -> list[Node]:
        """The nodes that it is computed from."""
        table = self.table or [t.node for t in (self.cos, self.sin) if t is not None]
        return [self.x.node, *table, *([] if self.norm is None else [self.norm.weight])]

    @property
    def row_axis(self) -> Axis:
        """The axis of rows, where several dimensions of tokens are flattened."""
        return Axis("row", simplified(math.prod(self.frame.axis(self.root, d).size for d in self.frame.tokens)))

    def table_axes(self, term: Term) -> tuple[Axis | None, ...] | None:
        """What each dimension of cosines or sines steps along: tokens, rows, pairs or nothing; None if unclear."""
        index, pair = place(term.where, term.node.meta["val"]), pair_axis(self.rotary_dim)
        row, step = Affine(), 1
        for d in reversed(self.frame.tokens):
            row = row.plus(Affine.of(self.frame.axis(self.root, d)), step)
            step = simplified(step * self.frame.axis(self.root, d).size)
        axes: list[Axis | None] = []
        for along in index or ():
            if along == row and len(row.steps) > 1:
                axes.append(self.row_axis)
            elif not along.steps and isinstance(along.const, int):
                axes.append(None)
            elif len(along.axes) == 1 and (along == Affine.of(*along.axes) or pair in along.axes):
                axes.extend(along.axes)
            else:
                return None
        return tuple(axes) if pair in axes else None

    def __str__(self) -> str:
        pairs = "GPT-J" if self.interleaved else "NeoX"
        norm = "" if self.norm is None else ", QK-norm"
        return f"{pairs} pairs, {self.rotary_dim} of {self.frame.dim} elements{norm}"


def pair_axis(rotary_dim: int) -> Axis:
    """The axis of a head's pairs."""
    return Axis("pair", rotary_dim // 2)


def rotations(terms: Terms, root: Node, frame: Frame) -> Iterator[Rotation]:
    """What a node may be a rotation of: with its norm, where there is one, then without; more with a single head."""
    if root.target is operator.getitem:
        yield from _by_operator(terms, root, frame)
        return
    for rotary, interleaved in product(_rotary_dims(terms, root, frame.dim), (False, True)):
        step = 2 if interleaved else 1
        pair, rest = pair_axis(rotary), Axis("rest", frame.dim - rotary)
        first = Affine.of(pair, step)
        lanes = [first, first.plus(Affine(const=1 if interleaved else rotary // 2))]
        if rest.size:
            lanes.append(Affine.of(rest, 1, rotary))
        found = [frame.index(root, lane) for lane in lanes]
        if None in found:
            continue
        dtype = root.meta["val"].dtype
        values = [terms.at(root, index) for index in found if index is not None]
        for a, b, cos, sin in _solutions(values[0], values[1], dtype):
            outer = frame.outer(root)
            if frame.axis(root, frame.head) in cos.axes | sin.axes or not cos.axes | sin.axes <= outer | {pair}:
                continue
            x = _heads(terms, a, first, frame.dim, outer)
            if x is None:
                continue
            same = [widened(terms.at(x.node, x.at(lane))) for lane in lanes]
            if same[1] is b and (not rest.size or uncast(same[2], dtype) is uncast(values[2], dtype)):
                plain = Rotation(root, frame, x, cos, sin, rotary, interleaved)
                normed = _with_norm(terms, plain, lanes, outer)
                yield from (r for r in (normed, plain) if r is not None and _fits(terms, r))


def _by_operator(terms: Terms, root: Node, frame: Frame) -> Iterator[Rotation]:
    """One of the results of ``rotate(query, key, positions, cos_sin, interleaved)``."""
    call, result = root.args
    if not isinstance(call, Node) or call.target is not ROTATE:
        return
    *rows, positions, cos_sin, interleaved = call.args
    lane = Affine.of(Axis("lane", frame.dim))
    index = frame.index(root, lane)
    if index is not None:
        x, table = Heads(rows[result], index), (positions, cos_sin)  # type: ignore[index,arg-type]
        rotary_dim = cos_sin.meta["val"].shape[1]  # type: ignore[union-attr]
        found = Rotation(root, frame, x, None, None, rotary_dim, bool(interleaved), table=table)  # type: ignore[arg-type]
        normed = _with_norm(terms, found, [lane], frame.outer(root))
        yield from (r for r in (normed, found) if r is not None and not any(map(terms.is_written, r.sources)))


def _rotary_dims(terms: Terms, root: Node, dim: int) -> Iterator[int]:
    """A whole head, or the first part of one that is put together."""
    if dim % 2 == 0 and dim > 2:
        yield dim
    n = terms.owner(root)
    while n.target in (torch.ops.aten.clone.default, *CASTS):
        n = terms.owner(n.args[0])  # type: ignore[arg-type]
    if n.target is torch.ops.aten.cat.default:
        part = n.args[0][0].meta["val"]  # type: ignore[index,union-attr]
        size = part.shape[-1]
        if isinstance(size, int) and 2 < size < dim and size % 2 == 0:
            yield size


def _solutions(first: Term, second: Term, dtype: torch.dtype) -> Iterator[tuple[Term, Term, Term, Term]]:
    """Every ``a, b, cos, sin`` with ``first = a * cos - b * sin`` and ``second = b * cos + a * sin``."""
    differ, agree = _products(first, dtype), _products(second, dtype)
    if sorted(sign for sign, _ in differ) != [-1, 1] or [sign for sign, _ in agree] != [1, 1]:
        return
    plus = next(factors for sign, factors in differ if sign > 0)
    minus = next(factors for sign, factors in differ if sign < 0)
    for (a, cos), (b, sin), (with_cos, with_sin) in product(
        (plus, plus[::-1]), (minus, minus[::-1]), (agree, agree[::-1])
    ):
        if {b, cos} == set(with_cos[1]) and {a, sin} == set(with_sin[1]):
            yield a, b, cos, sin


def _products(t: Term, dtype: torch.dtype) -> list[tuple[int, tuple[Term, Term]]]:
    """A sum or difference of two products, as their signs and factors; empty for anything else."""
    t, found = uncast(t, dtype), []
    if t.op not in ("add", "sub") or not as_fine(t.dtype, dtype):
        return []
    for sign, part in zip((1, -1 if t.op == "sub" else 1), t.args, strict=False):
        sign, part = _unsigned(part, sign)
        if not isinstance(part, Term) or part.op != "mul" or not as_fine(part.dtype, dtype):
            return []
        sign, a = _unsigned(part.args[0], sign)
        sign, b = _unsigned(part.args[1], sign)
        if not isinstance(a, Term) or not isinstance(b, Term):
            return []
        found.append((sign, (a, b)))
    return found


def _unsigned(t: object, sign: int) -> tuple[int, object]:
    """A term without negations and casts to a wider type on its outside, and its sign."""
    while isinstance(t, Term) and (t.op == "neg" or widened(t) is not t):
        t, sign = (t.args[0], -sign) if t.op == "neg" else (widened(t), sign)
    return sign, t


def _heads(terms: Terms, t: Term, lane: Affine, dim: int, outer: frozenset[Axis]) -> Heads | None:
    """A node of whole heads that has the term's elements at ``lane``."""
    for n in terms.siblings(t.node):
        x = n.meta["val"]
        if x.dim() < 2 or x.shape[-1] != dim or x.dtype != t.dtype or terms.is_written(n):
            continue
        index = place(t.where, x)
        if index is None or index[-1] != lane:
            continue
        held = [along for along in index[:-1] if along != Affine()]
        axes = [axis for along in held for axis in along.axes]
        sizes = [simplified(symbolic(n)) for n in x.shape[:-1] if n != 1]
        if held == list(map(Affine.of, axes)) and len(axes) == len(outer) and sizes == [a.size for a in axes]:
            return Heads(n, index)
    return None


def _fits(terms: Terms, r: Rotation) -> bool:
    """Is nothing written that it uses, all in a dtype that keeps its values, and the table one of rows of tokens?"""
    assert r.cos is not None and r.sin is not None
    kept = not any(map(terms.is_written, r.sources))
    widens = exact(r.x.node.meta["val"].dtype, r.root.meta["val"].dtype) and r.cos.dtype == r.sin.dtype
    return kept and widens and r.cos.dtype.is_floating_point and None not in (r.table_axes(r.cos), r.table_axes(r.sin))


def _with_norm(terms: Terms, found: Rotation, lanes: Sequence[Affine], outer: frozenset[Axis]) -> Rotation | None:
    """The rotation of what its normed heads were; None if they are not normed so."""
    inner: Heads | None = None
    norm: Norm | None = None
    for lane in lanes:
        parts = normed(terms.at(found.x.node, found.x.at(lane)), found.root.meta["val"].dtype)
        if parts is None:
            return None
        x, square, weight, eps, offset = parts
        inner = inner or _heads(terms, x, lane, found.frame.dim, outer)
        if inner is None or widened(terms.at(inner.node, inner.at(lane))) is not x:
            return None
        along = Affine.of(mean_axis(found.frame.dim))
        if not is_square(square, widened(terms.at(inner.node, inner.at(along)))):
            return None
        node = weight.node
        if list(node.meta["val"].shape) != [found.frame.dim] or terms.at(node, (lane,)) is not weight:
            return None
        norm = norm or Norm(node, eps, offset)
        if norm != Norm(node, eps, offset) or terms.is_written(node):
            return None
    assert inner is not None
    return replace(found, x=inner, norm=norm)
