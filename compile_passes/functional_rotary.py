"""Engines' rotary operators in functionalised graphs, where they are wrapped because they rotate in place.

::

    out = auto_functionalized(rotary, query=q, key=k, ...)         turned = rotate(q, k, ...)
    query, key = out[1], out[2]                               →    query, key = turned[0], turned[1]

Query and key may be slices of one base, into which the first version's results are scattered again; the second version
takes bases and gives new ones. What is looked at of a new base is the rotated query, the rotated key, or what lies
beside both, which is the same in the old one; where it is anything else, it stays as it is. The wrapper stays in the
graph anyway, until it is known whether the rotation can be fused: if not, :func:`put_back` gives it its uses again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .emit import Emitter
from .engine_ops import ROTARY_OPS, Rotate
from .internals import (
    WRAPPERS,
    auto_functionalized_v2,
    is_view,
    simplified,
    storage_key,
    symbolic,
    unwrapped,
    written_names,
)
from .rotary_ops import ROTATE, apart
from .terms import aten

SCATTER = aten.slice_scatter.default


class Unwrapped(NamedTuple):
    """A functional rotation, and whose uses it took: nodes made of its results, and the wrapper's own."""

    rotation: Node
    uses: list[tuple[Node, Node]]


def unwrap(emit: Emitter, graph: Graph) -> list[Unwrapped]:
    """Put a functional rotation beside every wrapped one of a registered operator, and give it the uses."""
    found = []
    for n in [n for n in graph.nodes if n.target in WRAPPERS and n.args[0] in ROTARY_OPS]:
        given, bases = _arguments(emit, n)
        r = ROTARY_OPS[n.args[0]](**given)
        with emit.before(n):
            turned = None if r is None else _rotated(emit, r)
        if r is not None and turned is not None:
            rows = {name: turned[i] for i, x in enumerate((r.query, r.key)) for name, y in given.items() if y is x}
            uses = _uses(emit, n, given, rows, bases)
            if uses is not None:
                for new, old in uses:
                    old.replace_all_uses_with(new)
                found.append(Unwrapped(turned[0].args[0], uses))  # type: ignore[arg-type]
    return found


def put_back(left: Unwrapped) -> None:
    """Give the wrapper its uses again."""
    for new, old in left.uses:
        new.replace_all_uses_with(old)


def _arguments(emit: Emitter, n: Node) -> tuple[dict[str, Any], list[Node]]:
    """The operator's arguments by name, and for the second version of the wrapper the bases that it takes."""
    if n.target is not auto_functionalized_v2:
        return dict(n.kwargs), []
    given, views, bases = unwrapped(n.args[0], n.kwargs)
    with emit.before(n):
        for name, (base, op, args) in views.items():
            given[name] = bases[base] if op is None else emit.call(op, bases[base], *args)
    return given, bases


def _rotated(emit: Emitter, r: Rotate) -> tuple[Node, Node] | None:
    """The rotated query and key, ``[T, heads, head_dim]``; None for rows of another form."""
    rows: list[Node] = []
    for x in (r.query, r.key):
        if not isinstance(x, Node) or x.meta["val"].dim() not in (2, 3):
            return None
        last = x.meta["val"].shape[-1]
        if x.meta["val"].dim() == 2 and last % r.head_dim == 0:
            x = emit.call(aten.reshape.default, x, [-1, last // r.head_dim, r.head_dim])
        if x.meta["val"].dim() != 3 or x.meta["val"].shape[-1] != r.head_dim:
            return None
        rows.append(x)
    if not isinstance(r.positions, Node) or r.positions.meta["val"].dim() != 1 or not isinstance(r.cos_sin, Node):
        return None
    rotation = emit.call(ROTATE, *rows, r.positions, r.cos_sin, r.interleaved)
    return emit.item(rotation, 0), emit.item(rotation, 1)


def _uses(
    emit: Emitter, n: Node, given: dict[str, Any], rows: dict[str, Node], bases: list[Node]
) -> list[tuple[Node, Node]] | None:
    """What takes the place of the wrapper's results; None if something else than rotated rows is needed of them."""
    names, first = written_names(n.args[0]), max(1, len(n.args[0]._schema.returns))  # type: ignore[union-attr]
    results: list[tuple[Node, int]] = [(result, result.args[1] - first) for result in n.users]  # type: ignore[operator,misc]
    if set(names) - set(rows) or any(i < 0 for _, i in results):
        return None
    found: list[tuple[Node, Node]] = []
    if bases:
        turned = [(given[name].meta["val"], row) for name, row in rows.items()]
        for result, i in results:
            whole = next((row for x, row in turned if _covers(x, result.meta["val"])), None)
            if whole is not None:
                with emit.before(result):
                    found.append((_shaped(emit, whole, result.meta["val"]), result))
                continue
            looked_at = _looked_at(emit, result, bases[i], turned, {})
            if looked_at is None:
                return None
            found += looked_at
        return found
    shaped = {}
    for result, i in results:
        with emit.before(result):
            shaped[result] = _shaped(emit, rows[names[i]], result.meta["val"])
    for result, row in shaped.items():
        for user in result.users:
            if user.target is SCATTER and user.args[1] is result and user.args[0].target is not SCATTER:  # type: ignore[union-attr]
                base = user.args[0]
                found += _looked_at(emit, user, base, [(_region(user), row)], shaped) or []  # type: ignore[arg-type]
    return found + [(row, result) for result, row in shaped.items()]


def _looked_at(
    emit: Emitter, new: Node, old: Node, turned: list[tuple[Tensor, Node]], results: dict[Node, Node]
) -> list[tuple[Node, Node]] | None:
    """What takes the place of the views of a new base, by the old one and what is rotated in the new one.

    ``turned`` are these regions and their rows; more of ``results`` may be scattered into the base on the way.
    """
    found: list[tuple[Node, Node]] = []
    for user in new.users:
        value: Any = user.meta.get("val")
        if user.target is SCATTER and user.args[0] is new and user.args[1] in results:
            inner = _looked_at(emit, user, old, [*turned, (_region(user), results[user.args[1]])], results)  # type: ignore[index]
        elif not is_view(user.target) or (isinstance(value, Tensor) and not _same_storage(value, new)):
            return None
        else:
            with emit.before(user):
                row = next((row for x, row in turned if isinstance(value, Tensor) and _covers(x, value)), None)
                if row is not None:
                    found.append((_shaped(emit, row, value), user))
                    continue
                twin = emit.call(user.target, *(old if a is new else a for a in user.args), **user.kwargs)
            if isinstance(value, Tensor) and all(apart(value, x) for x, _ in turned):
                found.append((twin, user))
                continue
            inner = _looked_at(emit, user, twin, turned, results)
        if inner is None:
            return None
        found += inner
    return found


def _region(scatter: Node) -> Tensor:
    """Where in its result a ``slice_scatter`` puts rows."""
    value = scatter.meta["val"]
    with value.fake_mode:
        return aten.slice.Tensor(value, *torch.fx.map_arg(scatter.args[2:], lambda a: a.meta["val"]))


def _same_storage(value: Tensor, of: Node) -> bool:
    """Is a view of a node, or of one of its results, one that shares memory?"""
    values = of.meta["val"] if isinstance(of.meta["val"], list | tuple) else [of.meta["val"]]
    return any(storage_key(value) == storage_key(v) for v in values)


def _covers(x: Tensor, value: Tensor) -> bool:
    """Has a view of one base the elements of a view of another, in the same order?"""
    if x.dtype != value.dtype or x.storage_offset() != value.storage_offset():
        return False
    if simplified(symbolic(x.numel())) != simplified(symbolic(value.numel())):
        return False
    if x.dim() == 2 and value.dim() == 3:
        x, value = value, x
    if x.dim() == 3 and value.dim() == 2:
        dense = x.stride(1) == x.shape[2] * x.stride(2)
        return dense and value.shape[1] == x.shape[1] * x.shape[2] and value.stride() == (x.stride(0), x.stride(2))
    return x.shape == value.shape and x.stride() == value.stride()


def _shaped(emit: Emitter, rows: Node, like: Tensor) -> Node:
    """Rotated rows in another form; a node of its own, so that its uses can be given back."""
    return emit.call(aten.reshape.default, rows, [-1, *like.shape[1:]])
