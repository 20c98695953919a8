"""Runs a captured graph with its caches on pages: what the rules call instead of each access becomes the new graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .binding import Binding
from .engine_ops import ENGINE_OPS, scale_arguments
from .forms import CachePlane
from .regions import Region, Selection, locate, select
from .report import Entry, RewriteError, form_of, user_line
from .rules import READS, WRITES
from .sdpa import rewrite_sdpa
from .trace import (
    SDPA,
    Interpreter,
    asks_metadata,
    attribute_to,
    in_memory_order,
    is_mutable,
    is_view,
    laid_out,
    off_record,
    restride,
    storage_key,
    written,
)

# Copies that an attention is read through, as in repeat_kv's expand, clone and view.
COPIES = frozenset(
    (
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.view.default,
    )
)


@dataclass
class PlaneWrite:
    """Rows for the slots of one plane, and where the user wrote that."""

    plane: CachePlane
    rows: Tensor
    slots: Tensor
    form: str
    line: str
    scale: float | Tensor = 1.0


class Rewriter(Interpreter):
    """Interprets the captured graph once, with fake tensors, while the calls are recorded.

    Caches, their views, and copies of them that only an attention reads, stay off the record: these are *shadows*.

    Args:
        graph: the captured graph.
        binding: whose caches.
        storages: the number of the bound storage, by :func:`storage_key` of the caches' fakes.
        materialize: read a cache densely where no rule fits, instead of raising.
    """

    def __init__(self, graph: GraphModule, binding: Binding, storages: dict[int, int], materialize: bool) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.binding = binding
        self.entries: list[Entry] = []
        self.buffer: Tensor
        self.page_table: Tensor | None
        self._storages, self._materialize = storages, materialize
        self._shadows: set[Node] = set()
        self._pending: PlaneWrite | None = None
        self._memo: dict[Any, tuple[Any, Any]] = {}
        self._writes: dict[CachePlane, int] = {}
        self._writes_at: dict[Node, dict[CachePlane, int]] = {}
        self._node: Node

    def rewrite(self, inputs: list[Any], buffer: Tensor, page_table: Tensor | None) -> Any:
        """Run the graph; the caches among the inputs are their fakes, off the record."""
        self.buffer, self.page_table = buffer, page_table
        return self.run(*inputs)

    def run_node(self, n: Node) -> Any:
        """Record a node as it is, or what its rule makes of it."""
        self._node = n
        with self._naming_the_line(), attribute_to(n):
            sources = [m for m in n.all_input_nodes if m in self._shadows]
            if sources:
                result, shadow = self._run_access(n, sources)
            else:
                if n.op == "output" or (n.op == "call_function" and is_mutable(n.target)):
                    self.flush()
                    self._memo.clear()
                result = super().run_node(n)
                shadow = n.op == "placeholder" and self.on_cache(result)
        if shadow:
            self._shadows.add(n)
            self._writes_at[n] = dict(self._writes)
        return result

    def _run_access(self, n: Node, sources: list[Node]) -> tuple[Any, bool]:
        """The value of a node that touches a cache, and whether it is a shadow itself."""
        if n.op == "output":
            raise RewriteError(
                "a view of a bound cache leaves the compiled graph, and would be read or written outside of it; return "
                "a copy of the tokens that are needed, or move the graph break"
            )
        if n.target is SDPA:
            return self._run_sdpa(n), False
        if self._is_shadow_op(n, sources):
            with off_record():
                result = super().run_node(n)
            return result, isinstance(result, Tensor | list | tuple)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        views_only = all(self.on_cache(self.env[m]) for m in sources)
        if n.target in ENGINE_OPS and views_only:
            return ENGINE_OPS[n.target](self, *args, **kwargs), False
        if views_only and args and self.on_cache(args[0]):
            if n.target in WRITES:
                WRITES[n.target](self, *args, **kwargs)
                return args[0], True
            if n.target in READS:
                return restride(READS[n.target](self, *args, **kwargs), n.meta.get("val")), False
        return self.fallback(n, "no rule reads a cache this way"), False

    def _run_sdpa(self, n: Node) -> Any:
        try:
            return restride(rewrite_sdpa(self, n), n.meta.get("val"))
        except RewriteError as error:
            return self.fallback(n, str(error))

    def _is_shadow_op(self, n: Node, sources: list[Node]) -> bool:
        """Views, questions about metadata, and copies that only attentions read."""
        if n.target in COPIES and not all(self.on_cache(self.env[m]) for m in sources):
            return self._only_attended(n)
        if is_view(n.target) or asks_metadata(n.target):
            return True
        return n.target in COPIES and self._only_attended(n)

    def _only_attended(self, n: Node) -> bool:
        return bool(n.users) and all(
            u.target is SDPA or (u.target in COPIES and self._only_attended(u)) for u in n.users
        )

    def on_cache(self, value: Any) -> bool:
        """Is this fake tensor (or are these) a view of a bound cache?"""
        if isinstance(value, list | tuple):
            return bool(value) and all(map(self.on_cache, value))
        return isinstance(value, Tensor) and storage_key(value) in self._storages

    def is_shadow(self, n: Node) -> bool:
        """Is the node's value a cache, a view or a copy of one, off the record?"""
        return n in self._shadows

    def copied(self, n: Node) -> CachePlane:
        """The plane that a shadow copy was made of."""
        while not self.on_cache(self.env[n]):
            n = n.all_input_nodes[0]
        return self.locate(self.env[n]).plane

    def writes_since(self, n: Node, plane: CachePlane) -> bool:
        """Has the plane been written after a shadow node was computed?"""
        return self._writes.get(plane, 0) != self._writes_at[n].get(plane, 0)

    def locate(self, view: Tensor) -> Region:
        """Which part of which cache a view covers."""
        return locate(view, self.binding.storage_planes(self._storages[storage_key(view)]))

    def once(self, key: Any, keep: Any, make: Callable[[], Any]) -> Any:
        """``make()``, once until something is written in place; ``keep`` stays alive, as keys name tensors by id."""
        if key not in self._memo:
            self._memo[key] = (make(), keep)
        return self._memo[key][0]

    def slots(self, selection: Selection) -> Tensor:
        """The selection's slots, computed once where K and V, or several layers, are addressed alike."""
        region, plane = selection.region, selection.region.plane
        space = (plane.form, plane.shape if plane.paged else None, plane.heads == 1, selection.labels, selection.wraps)
        starts = tuple((axis, str(start)) for axis, start in region.start.items())
        dims = tuple((d.axis, d.step, str(d.size)) for d in region.dims)
        indices = tuple((n, id(index)) for n, index in selection.indices.items())
        key = ("slots", space, starts, dims, indices)
        return self.once(key, selection, lambda: selection.slots(self.page_table, self.buffer.device))

    def store(self, selection: Selection, value: Tensor) -> None:
        """Write a value, broadcast to the selection, to its slots; K and V of a layer at one go where both follow."""
        plane = selection.region.plane
        if selection.region.find("x"):
            raise RewriteError("a write through an expanded view names every slot several times")
        value = self.dense(value)
        if value.dtype != plane.dtype:
            value = value.to(plane.dtype)  # torch's own cast, as the cache would have done it
        rows, slots = selection.rows(value), self.slots(selection)
        self.store_rows([PlaneWrite(plane, rows, slots, *self.where())])

    def store_rows(self, writes: list[PlaneWrite]) -> None:
        """Write rows to physical slots. A single plane waits for its partner until the next access."""
        for write in writes:
            self._writes[write.plane] = self._writes.get(write.plane, 0) + 1
        held, self._pending = self._pending, None
        if held is not None and len(writes) == 1 and _partners(held, writes[0]):
            self._emit_store([held, *writes])
        else:
            if held is not None:
                self._emit_store([held])
            if len(writes) == 1:
                self._pending = writes[0]
            else:
                self._emit_store(writes)

    def flush(self) -> None:
        """Emit the write that was held back: what follows may depend on it."""
        held, self._pending = self._pending, None
        if held is not None:
            self._emit_store([held])

    def _emit_store(self, writes: list[PlaneWrite]) -> None:
        by_kind = {"value" if w.plane.kind == "value" else "key": w for w in writes}
        key, value = by_kind.get("key"), by_kind.get("value")
        torch.ops.pm_ops.store_kv(
            self.buffer,
            None if key is None else key.rows,
            None if value is None else value.rows,
            writes[0].slots,
            None if key is None else list(key.plane.geometry),
            None if value is None else list(value.plane.geometry),
            writes[0].plane.page_size,
            None if key is None else key.plane.dtype,
            None if value is None else value.plane.dtype,
            **scale_arguments(1.0 if key is None else key.scale, 1.0 if value is None else value.scale),
        )
        became = "store_kv" if len(writes) == 1 else "store_kv of key and value"
        for w in writes:
            self.entries.append(Entry(w.plane.layer, (w.plane.kind,), "write", w.form, w.line, became))

    def load(self, selection: Selection) -> Tensor:
        """The selection's tokens, gathered from their slots into a fresh tensor."""
        self.flush()
        plane, slots = selection.region.plane, self.slots(selection)
        rows = torch.ops.pm_ops.load_kv(
            self.buffer, slots, list(plane.geometry), plane.page_size, plane.heads, plane.dim, plane.dtype
        )
        return selection.picked(rows)

    def attend(
        self,
        planes: tuple[CachePlane, CachePlane],
        query: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        query_start: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """``pm_ops::attention`` over two planes; the options are its keyword arguments."""
        self.flush()
        key, value = planes
        geometry = (list(key.geometry), list(value.geometry), key.page_size, key.heads, value.dim)
        dtypes = (key.dtype, value.dtype)
        self.note("read", planes, "attention")
        args = (self.buffer, query, page_table, seq_lens, query_start, *geometry, *dtypes)
        return torch.ops.pm_ops.attention(*args, **options)

    def where(self) -> tuple[str, str]:
        """The current node's operator and the user's line."""
        return form_of(self._node), user_line(self._node)

    def note(self, action: str, planes: tuple[CachePlane, ...], became: str) -> None:
        """Report what the current node became."""
        kinds, (form, line) = tuple(p.kind for p in planes), self.where()
        self.entries.append(Entry(planes[0].layer, kinds, action, form, line, became))

    def fallback(self, n: Node, reason: str) -> Any:
        """Run a node on dense copies of the caches it reads, if that was asked for; raise RewriteError if not."""
        if any(self.on_cache(x) for x in written(n.target, *self.fetch_args_kwargs_from_env(n))):
            raise RewriteError(f"{n.target} may write to a bound cache, and has no exact counterpart on pages")
        if not self._materialize:
            raise RewriteError(
                f"{n.target} reads a bound cache: {reason}. Supported are gathers by slot (indexing, index_select, "
                "gather), scaled_dot_product_attention, and registered engine operators; "
                'on_unsupported_read="materialize" copies the cache out of its pages on every call instead'
            )
        return self._call(n)

    def _dense(self, n: Node) -> Any:
        """A node's value, shadows as dense tensors on the record."""
        if n not in self._shadows:
            return self.env[n]
        if self.on_cache(self.env[n]):
            return self.materialize(self.env[n])
        plane = self.copied(n)
        if self.writes_since(n, plane):
            raise RewriteError(f"the cache of {plane.label} is written between its copy and the use of the copy")
        return self._call(n)

    def _call(self, n: Node) -> Any:
        args: Any = torch.fx.map_arg(n.args, self._dense)
        kwargs: Any = torch.fx.map_arg(n.kwargs, self._dense)
        return self.call_function(n.target, args, kwargs)

    def dense(self, value: Tensor) -> Tensor:
        """A value to be written; a view of a cache among them is read first, where that was asked for."""
        if not self.on_cache(value):
            return value
        if not self._materialize:
            raise RewriteError(
                "a view of a bound cache is written into a bound cache; gather the tokens first, as in k[slots], or "
                'pass on_unsupported_read="materialize"'
            )
        return self.materialize(value)

    def materialize(self, view: Tensor) -> Tensor:
        """A dense copy of what a view of a cache covers, with its dimensions in the same order in memory."""
        region = self.locate(view)
        dense = self.load(select(region, []))
        self.note("materialize", (region.plane,), "load_kv of the whole view")
        return laid_out(dense, in_memory_order(view))

    @contextmanager
    def _naming_the_line(self) -> Iterator[None]:
        try:
            yield
        except RewriteError as error:
            line = user_line(self._node)
            raise RewriteError(f"{error}\n  in {line}") from error.__cause__


def _partners(first: PlaneWrite, second: PlaneWrite) -> bool:
    """Are these a layer's K and V, at the very same slots?"""
    kinds = {first.plane.kind, second.plane.kind}
    return kinds == {"key", "value"} and first.plane.layer == second.plane.layer and first.slots is second.slots
