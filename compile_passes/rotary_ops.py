"""Engines' rotary operators, which rotate query and key in place, made functional while a graph is rewritten.

::

    q, k, v = qkv.split(...)                                q, k, v = qkv.split(...)
    rotary_embedding(positions, q, k, dim, table, neox)  →  q, k = rotate(q, k, positions, table, ...)

That is done where nothing else sees the memory that the operator writes; where something does, it stays. A ``rotate``
that :mod:`rope_store` has not fused becomes the operator again, on copies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .engine_ops import ROTARY_OPS
from .internals import storage_key

if TYPE_CHECKING:
    from .emit import Emitter
    from .rewriter import Rewriter

_LIBRARY = torch.library.Library("pm_ops_trace", "FRAGMENT")
_LIBRARY.define(
    "rotate(Tensor query, Tensor key, Tensor positions, Tensor cos_sin, bool interleaved) -> (Tensor, Tensor)"
)
ROTATE = torch.ops.pm_ops_trace.rotate.default


@torch.library.register_fake("pm_ops_trace::rotate", lib=_LIBRARY)
def _rotate_fake(query: Tensor, key: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


class Call(NamedTuple):
    """A call of an engine's operator: ``args`` has "query", "key", "positions" or "cos_sin" for those, else numbers."""

    target: Any
    args: tuple[Any, ...]
    query_shape: tuple[Any, ...]
    key_shape: tuple[Any, ...]


def rotate(rw: Rewriter, n: Node) -> bool:
    """Record a functional rotation for an operator that rotates in place, unless something else would see that."""
    args, kwargs = rw.fetch_args_kwargs_from_env(n)
    r = ROTARY_OPS[n.target](*args, **kwargs)
    if r is None:
        return False
    sources = {name: getattr(r, name) for name in ("query", "key", "positions", "cos_sin")}
    names = [next((name for name, t in sources.items() if t is a), a) for a in args]
    nodes = [next((m for m in n.all_input_nodes if rw.env[m] is t), None) for t in (r.query, r.key)]
    if kwargs or None in nodes or set(sources) - {a for a in names if isinstance(a, str)} or r.positions.dim() != 1:
        return False
    if any(isinstance(a, Tensor) for a in names) or any(_is_seen(n, m, nodes) for m in nodes if m is not None):
        return False
    shape = (r.positions.shape[0], -1, r.head_dim)
    query, key = ROTATE(r.query.view(shape), r.key.view(shape), r.positions, r.cos_sin, r.interleaved)
    rw.rotaries.append(Call(n.target, tuple(names), tuple(r.query.shape), tuple(r.key.shape)))
    for m, out in zip(nodes, (query, key), strict=True):
        assert m is not None
        rw.env[m] = out.view(rw.env[m].shape)
    return True


def _is_seen(n: Node, written: Node, nodes: list[Node | None]) -> bool:
    """May what ``n`` writes into a tensor be read later on, or outside, other than by that tensor's own name?"""
    x, before = written.meta["val"], True
    earlier: set[Node] = set()
    for m in n.graph.nodes:
        if m is n:
            before = False
        elif before:
            earlier.add(m)
            if m.op in ("placeholder", "get_attr") and _shares(m.meta.get("val"), x):
                return True
        else:
            for source in earlier.intersection(m.all_input_nodes).difference(nodes):
                value = m.meta.get("val") if m.target is operator.getitem else source.meta.get("val")
                values = value if isinstance(value, list | tuple) else [value]
                if any(isinstance(v, Tensor) and _shares(v, x) and not apart(v, x) for v in values):
                    return True
    return False


def _shares(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and storage_key(a) == storage_key(b)


def apart(a: Tensor, b: Tensor) -> bool:
    """Are these different columns of one matrix?"""
    spans = []
    for x in (a, b):
        stride, start = x.stride(0), x.storage_offset()
        width = sum((n - 1) * st for n, st in zip(x.shape[1:], x.stride()[1:], strict=True)) + 1
        if not all(isinstance(v, int) for v in (stride, start, width)) or not stride or start % stride + width > stride:
            return False
        spans.append((stride, start % stride, start % stride + width))
    (stride, first, end), (other, other_first, other_end) = spans
    return stride == other and (end <= other_first or other_end <= first)


def put_back(emit: Emitter, left: Iterable[tuple[Node, Call]]) -> None:
    """Rotations that are left become their operators again, on copies of query and key."""
    for n, call in left:
        with emit.before(n):
            copies = [
                emit.call(torch.ops.aten.clone.default, a, memory_format=torch.contiguous_format) for a in n.args[:2]
            ]
            flat = [
                c if len(shape) == 3 else emit.call(torch.ops.aten.view.default, c, [-1, math.prod(shape[1:])])
                for c, shape in zip(copies, (call.query_shape, call.key_shape), strict=True)
            ]
            given = {"query": flat[0], "key": flat[1], "positions": n.args[2], "cos_sin": n.args[3]}
            emit.call(call.target, *(given[a] if isinstance(a, str) else a for a in call.args))
        for m in n.users:
            m.replace_all_uses_with(copies[m.args[1]])  # type: ignore[index]
