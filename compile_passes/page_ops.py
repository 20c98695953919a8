"""What a cache's accesses become: the pm_ops operators, recorded on the buffer and page table of the new graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pm_ops.ops._common import ROW_DTYPES

from .forms import CachePlane
from .report import Entry, RewriteError, form_of, user_line
from .selections import Selection

Scale = float | Tensor


@dataclass
class PlaneWrite:
    """Rows for the slots of one plane, and where the user wrote that."""

    plane: CachePlane
    rows: Tensor
    slots: Tensor
    form: str
    line: str
    scale: Scale = 1.0


class PageOps:
    """The operators that take the place of a graph's accesses.

    Attributes:
        buffer, page_table: the new graph's inputs.
        node: the node of the captured graph that is being rewritten.
        entries: what became of the accesses so far.
        stores: for each ``store_kv`` recorded, its entries' places among them.
        writes: how often each plane has been written so far.
    """

    buffer: Tensor
    page_table: Tensor | None
    node: Node

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.stores: list[range] = []
        self.writes: dict[CachePlane, int] = {}
        self._pending: PlaneWrite | None = None
        self._memo: dict[Any, tuple[Any, Any]] = {}

    def once(self, key: Any, keep: Any, make: Callable[[], Any]) -> Any:
        """``make()``, once until something is written in place; ``keep`` stays alive, as keys name tensors by id.

        With ``keep=None`` it is made of no tensor, and once for all of the graph.
        """
        if key not in self._memo:
            self._memo[key] = (make(), keep)
        return self._memo[key][0]

    def slots(self, selection: Selection) -> Tensor:
        """The selection's slots, computed once where K and V, or several layers, are addressed alike."""
        region, plane = selection.region, selection.region.plane
        shape = plane.shape if plane.paged and not plane.state_of_sequence else None
        space = (plane.form, plane.column, shape, plane.heads == 1, selection.labels, selection.wraps)
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
        if plane.dtype not in ROW_DTYPES:
            raise RewriteError(
                f"the cache of {plane.label} is {plane.dtype}, which store_kv only quantises to: write it by an "
                "engine's operator, which register_store_op gives a scale"
            )
        if value.dtype != plane.dtype:
            value = value.to(plane.dtype)  # torch's own cast, as the cache would have done it
        self.store_rows([PlaneWrite(plane, selection.rows(value), self.slots(selection), *self.where())])

    def store_rows(self, writes: list[PlaneWrite]) -> None:
        """Write rows to physical slots. A single plane waits for its partner until the next access."""
        for write in writes:
            self.writes[write.plane] = self.writes.get(write.plane, 0) + 1
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

    def before_mutation(self) -> None:
        """Something outside of the caches is written in place, maybe what was computed or held back so far."""
        self.flush()
        self._memo = {key: made for key, made in self._memo.items() if made[1] is None}

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
        self.stores.append(range(len(self.entries), len(self.entries) + len(writes)))
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
        """``pm_ops::attention`` over a key and a value plane; the options are its keyword arguments."""
        self.flush()
        key, value = planes
        geometry = (list(key.geometry), list(value.geometry), key.page_size, key.heads, value.dim)
        self.note("read", planes, "attention")
        args = (self.buffer, query, page_table, seq_lens, query_start, *geometry, key.dtype, value.dtype)
        return torch.ops.pm_ops.attention(*args, **options)

    def where(self) -> tuple[str, str]:
        """The current node's operator and the user's line."""
        return form_of(self.node), user_line(self.node)

    def note(self, action: str, planes: tuple[CachePlane, ...], became: str) -> None:
        """Report what the current node became."""
        form, line = self.where()
        layer, kinds, last = planes[0].layer, tuple(p.kind for p in planes), planes[-1].layer
        self.entries.append(Entry(layer, kinds, action, form, line, became, None if last == layer else last))


def scale_arguments(key: Scale, value: Scale) -> dict[str, Any]:
    """Scales as the operators take them: a float, or a tensor of one element."""
    return {
        "key_scale": 1.0 if isinstance(key, Tensor) else key,
        "value_scale": 1.0 if isinstance(value, Tensor) else value,
        "key_scale_tensor": key if isinstance(key, Tensor) else None,
        "value_scale_tensor": value if isinstance(value, Tensor) else None,
    }


def _partners(first: PlaneWrite, second: PlaneWrite) -> bool:
    """Are these a layer's K and V, at the very same slots?"""
    kinds = {first.plane.kind, second.plane.kind}
    return kinds == {"key", "value"} and first.plane.layer == second.plane.layer and first.slots is second.slots
