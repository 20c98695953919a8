"""Rotary embeddings and the stores behind them as one ``rope_store_kv`` a layer.

::

    key   = key * cos + rotate_half(key) * sin              query, _ = rope_store_kv(
    query = query * cos + rotate_half(query) * sin    ->        buffer, query, key, value, None, cos_sin, slots, ...)
    store_kv(buffer, key, value, slots, ...)

The table ``cos_sin`` is made of the graph's own cosines and sines of this step: one row for each token, so that it
needs no positions, once for all layers that share it. That costs one launch a step, in place of the graph's own,
whatever way the model has to come by cosines. A rotation that the pass does not find stays as it is, and the reason is
reported.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from .emit import Emitter
from .internals import has_effect, simplified, storage_key, symbolic
from .page_ops import PageOps
from .precision import exact
from .report import Entry, form_of, user_line
from .rotary_ops import ROTATE, Call, put_back
from .rotation import Rotation, rotations
from .rows import frames, moved, rows_of
from .terms import CASTS, Terms

aten = torch.ops.aten
STORE, ROPE_STORE = torch.ops.pm_ops.store_kv.default, torch.ops.pm_ops.rope_store_kv.default
ROTATED = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ROOTS = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.cat.default,
    aten.stack.default,
    *CASTS,
    operator.getitem,
)


class Unfused(Exception):
    """Why a store stays as it is."""


@dataclass(frozen=True)
class Plan:
    """A store to fuse: its arguments, the rotations, whether the rotated key has other uses, and what those move.

    ``fused`` is the operator that takes the store's place. By names it takes the store's arguments and
    ``rope_store_kv``'s: query, positions, cos_sin and so on. It returns query, key, and what the store returned.
    """

    store: Node
    fused: Any
    given: dict[str, Any]
    query: Rotation
    key: Rotation
    return_key: bool = False
    later: tuple[Node, ...] = ()


def fuse_rope_stores(gm: GraphModule, fakes: FakeTensorMode, pages: PageOps, rotaries: list[Call]) -> list[str]:
    """Fuse what can be in a graph that :class:`PageOps` has recorded, and say so in its entries.

    ``rotaries`` are the engine's operators of which the recording made a functional rotation.

    Returns one line for each store that was left as it is: layer, reason and the user's line.
    """
    own = storage_key(pages.buffer)
    stores = [n for n in _calls(gm.graph, STORE) if storage_key(n.args[0].meta["val"]) == own]  # type: ignore[union-attr]
    calls = dict(zip(_calls(gm.graph, ROTATE), rotaries, strict=True))
    planner, unfused, plans = Planner(gm.graph), [], []
    for store, at in zip(stores, pages.stores, strict=True):
        entry = pages.entries[at[0]]
        try:
            plan = planner.plan(store, ROPE_STORE)
        except Unfused as reason:
            if not _is_fill(store):
                unfused.append(f"layer {entry.layer}: {reason}\n  in {entry.line}")
            continue
        plans.append(plan)
        for i in at:
            pages.entries[i] = replace(pages.entries[i], became="rope_store_kv")
        line, form = user_line(plan.key.root), form_of(plan.key.root)
        pages.entries.append(Entry(entry.layer, ("query", "key"), "rotate", form, line, f"rope_store_kv, {plan.key}"))
    emitter = Emitter(gm.graph, fakes)
    for plan in plans:
        fuse(emitter, plan)
    emitter.erase_dead()
    put_back(emitter, [(n, calls[n]) for n in _calls(gm.graph, ROTATE)])
    emitter.erase_dead()
    return unfused


def _calls(graph: Graph, op: Any) -> list[Node]:
    return graph.find_nodes(op="call_function", target=op)


def _is_fill(store: Node) -> bool:
    """Are there no rows, or one value in all of them, as by ``cache.zero_()``? There is no token in that to rotate."""
    rows = [a.meta["val"] for a in store.args[1:3] if isinstance(a, Node)]
    return all(not any(x.stride()) or 0 in _sizes(x) for x in rows)


class Planner:
    """Finds what each store of a graph can be fused with."""

    def __init__(self, graph: Graph) -> None:
        self.terms = Terms(graph)
        self.roots = [n for n in graph.nodes if n.target in ROOTS and _dtype(n) in ROTATED]
        self._taken: set[Node] = set()  # roots of the stores planned so far
        self._sources: set[Node] = set()  # what these are computed from
        self._needed = {n for n in graph.nodes if n.op == "output" or has_effect(n)}

    def plan(self, store: Node, fused: Any) -> Plan:
        """How to fuse a store, whose operator takes ``key`` and ``value``; raises :class:`Unfused` where it cannot be.

        Without a ``key_dtype`` it is not known what the store casts to, and only the whole of it may round.
        """
        given: dict[str, Any] = {a.name: a.default_value for a in store.target._schema.arguments}  # type: ignore[union-attr]
        given |= dict(zip(given, store.args, strict=False)) | store.kwargs
        if given["key"] is None or given["value"] is None:
            raise Unfused("K and V are stored apart: not in a row, or not to the same slots")
        reason = "its key is no rotary embedding that this pass knows, or is changed between rotation and store"
        for root, scale, through in _key_roots(self.terms, given["key"], given.get("key_dtype")):
            for frame in frames(root, given["key"], through):
                for key in rotations(self.terms, root, frame):
                    alive = self._alive(store)
                    query = next(self._queries(store, key, alive), None)
                    if query is not None:
                        plan = self._complete(Plan(store, fused, given, query, key), scale, alive)
                        self._taken |= {query.root, key.root}
                        self._sources |= {*query.sources, *key.sources}
                        return plan
                    reason = "no query before the store is rotated by the same angles and in the same way as its key"
        raise Unfused(reason)

    def _alive(self, store: Node) -> set[Node]:
        """The nodes that the graph needs without a store."""
        alive = self._needed - {store}
        for n in reversed(self.terms.order):
            if n is not store and n not in alive and not alive.isdisjoint(n.users):
                alive.add(n)
        return alive

    def _queries(self, store: Node, key: Rotation, alive: set[Node]) -> Iterator[Rotation]:
        """Rotations like the key's in front of the store, the nearest first."""
        order, shape = self.terms.order, _sizes(key.root.meta["val"])
        for n in reversed(self.roots):
            if order[n] < order[store] and n is not key.root and n not in self._taken and n in alive:
                sizes = _sizes(n.meta["val"])
                heads = [d for d, (a, b) in enumerate(zip(sizes, shape, strict=False)) if a != b]
                if len(sizes) == len(shape) and set(heads) <= {key.frame.head}:
                    yield from (q for q in rotations(self.terms, n, key.frame) if q.kind == key.kind)

    def _complete(self, plan: Plan, scale: Any, alive: set[Node]) -> Plan:
        """The plan with all that it takes to keep what the graph computes, or :class:`Unfused`."""
        given, roots = dict(plan.given), (plan.query.root, plan.key.root)
        if self._is_written(scale) or any(self._is_written(n) for root in roots for n in moved(root)):
            raise Unfused("its query or key, or the scale of that, is written in place")
        if scale is not None:
            if given["key_scale"] != 1.0 or given["key_scale_tensor"] is not None:
                raise Unfused("its key is quantised twice, in the graph and by the store")
            given["key_scale_tensor" if isinstance(scale, Node) else "key_scale"] = scale
        later, order = [], self.terms.order
        depend: set[Node] = set(roots)
        for n in list(order)[min(order[r] for r in roots) : order[plan.store]]:
            if n not in depend and not depend.isdisjoint(n.all_input_nodes):
                depend.add(n)
                if n in alive:
                    later.append(n)
        if not depend.isdisjoint(n for name, n in given.items() if isinstance(n, Node) and name != "key"):
            raise Unfused("what is stored beside its key is computed from the rotated key or query")
        sources = {*plan.query.sources, *plan.key.sources}
        if not depend.isdisjoint(sources | self._sources) or any(order[n] > order[plan.store] for n in sources):
            raise Unfused("its query or key is rotated once more, or is not whole before the store")
        for n in later:
            near = (n, *n.all_input_nodes)
            if has_effect(n) or given.get("buffer") in near or any(map(self._is_written, near)):
                raise Unfused(f"its rotated query or key is used before the store, in\n  {user_line(n)}")
        return replace(plan, given=given, later=tuple(later), return_key=plan.key.root in alive)

    def _is_written(self, n: Any) -> bool:
        return isinstance(n, Node) and isinstance(n.meta.get("val"), Tensor) and self.terms.is_written(n)


def _dtype(n: Node) -> torch.dtype | None:
    return getattr(n.meta.get("val"), "dtype", None)


def _sizes(x: Tensor) -> list[Any]:
    return [simplified(symbolic(size)) for size in x.shape]


def _key_roots(terms: Terms, rows: Node, stored: torch.dtype | None) -> Iterator[tuple[Node, Any, frozenset[Node]]]:
    """Where a stored key may have been rotated: the node, the scale of a quantisation behind it, and what is between.

    The store casts too, in the same way, and quantises: what does so in the graph goes into it.
    """
    n, scale, through = terms.owner(rows), None, set[Node]()
    if n.target in CASTS and n.meta["val"].dtype in FP8 and n.meta["val"].dtype == stored:
        clamped = terms.owner(n.args[0])  # type: ignore[arg-type]
        limit = torch.finfo(n.meta["val"].dtype).max
        if clamped.target is not aten.clamp.default or tuple(clamped.args[1:]) != (-limit, limit):
            raise Unfused(f"its key is cast to {n.meta['val'].dtype} without a clamp to its range; the store saturates")
        through |= {n, clamped}
        n, scale = terms.owner(clamped.args[0]), 1.0  # type: ignore[arg-type]
        if n.target is aten.div.Tensor and _is_scale(n.args[1], n):
            through.add(n)
            n, scale = terms.owner(n.args[0]), n.args[1]  # type: ignore[arg-type,assignment]
    while True:
        dtype = n.meta["val"].dtype
        if n.target is not aten.clone.default and dtype in ROTATED:
            yield n, scale, frozenset(through)
        elif n.target is not aten.clone.default:
            return
        if n.target not in (aten.clone.default, *CASTS):
            return
        before = n.args[0].meta["val"].dtype  # type: ignore[union-attr]
        if before != dtype and not exact(before, dtype) and dtype != stored:
            return  # rounded to a type between those of the rotation and of the cache
        through.add(n)
        n = terms.owner(n.args[0])  # type: ignore[arg-type]


def _is_scale(x: Any, of: Node) -> bool:
    """One number for all elements: a positive one, or a float32 tensor of one element beside what it scales."""
    if isinstance(x, Node):
        value = x.meta.get("val")
        if not isinstance(value, Tensor) or value.device != of.meta["val"].device:
            return False
        return value.dtype == torch.float32 and value.dim() <= 1 and value.numel() == 1
    limits = torch.finfo(torch.float32)
    return isinstance(x, float | int) and limits.tiny <= x <= limits.max


def fuse(emit: Emitter, plan: Plan) -> None:
    """Put the fused operator in the store's place, and its results in the rotations'."""
    store, given, query, key = plan.store, plan.given, plan.query, plan.key
    with emit.before(store):
        rows: dict[str, Any] = {"query": emit.rows(query.x, query), "key": emit.rows(key.x, key)}
        rows["positions"], rows["cos_sin"] = emit.table(key)
        rows |= {"interleaved": key.interleaved, "return_key": plan.return_key}
        if query.norm is not None and key.norm is not None:
            rows |= {"q_weight": query.norm.weight, "k_weight": key.norm.weight}
            rows |= {"eps": key.norm.eps, "weight_offset": key.norm.offset}
        defaults = {a.name: a.default_value for a in ROPE_STORE._schema.arguments}
        now = dict(zip((a.name for a in store.target._schema.arguments), store.args, strict=False)) | store.kwargs  # type: ignore[union-attr]
        now = {name: n for name, n in now.items() if isinstance(n, Node)}  # a buffer may be what another plan has put
        named = {**defaults, **given, **now, **rows}
        fused = emit.call(plan.fused, *(named[a.name] for a in plan.fused._schema.arguments))
        last = fused
        for i, rotation in enumerate((query, key) if plan.return_key else (query,)):
            last = _replace(emit, rotation, emit.item(fused, i))
        if store.users:
            last = emit.item(fused, 2)
            store.replace_all_uses_with(last)
    for n in plan.later:
        last.append(n)
        last = n
    store.graph.erase_node(store)


def _replace(emit: Emitter, rotation: Rotation, out: Node) -> Node:
    """Rows in place of a rotation, and of what makes rows of it; the last new node."""
    root = rotation.root
    new = emit.back(out, rotation)
    (output,) = root.graph.find_nodes(op="output")
    given_out = {storage_key(n.meta["val"]) for n in output.all_input_nodes if isinstance(n.meta["val"], Tensor)}
    for n, index in moved(root).items():
        own = storage_key(n.meta["val"]) != storage_key(root.meta["val"])
        if own and storage_key(n.meta["val"]) in given_out:
            continue  # a copy that the caller may write to
        if index == rows_of(root, rotation.frame) and n is not root:
            n.replace_all_uses_with(out)
    root.replace_all_uses_with(new)
    return new
