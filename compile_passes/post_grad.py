"""The fusion for engines, whose caches are not in the graph: a pass over what Inductor compiles.

::

    key   = key * cos + rotate_half(key) * sin              query, key, done = fused(
    query = query * cos + rotate_half(query) * sin    ->        query, key, value, None, cos_sin, ..., layer)
    done  = store(key, value, layer)

``store`` and ``fused`` are the engine's own, made known by :func:`register_fused_store`; ``pm_ops.store_kv`` that is in
such a graph becomes ``rope_store_kv``. Rotary embeddings, and the norms of heads in front of them, are found as
:mod:`rope_store` finds them: by what they compute.

::

    torch._inductor.config.post_grad_custom_pre_pass = RopeStorePass(geometry="...")
"""

from __future__ import annotations

import hashlib
import logging
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node

import pm_ops.ops.rope

from . import functional_store
from .emit import Emitter
from .engine_ops import NORM_OPS, ROTARY_OPS
from .functional_rotary import put_back, unwrap
from .internals import has_effect, is_view, overloads, storage_key
from .report import RewriteError, user_line
from .rope_store import Planner, Unfused, fuse
from .rotation import Frame, rotations

CAST = torch.ops.prims.convert_element_type.default


class FusedStore(NamedTuple):
    """``fused`` takes the place of a store; ``layer`` names one from the store's node."""

    fused: Any
    layer: Callable[[Node], str]


FUSED_STORES: dict[Any, FusedStore] = {}


def register_fused_store(store: Any, fused: Any, layer: Callable[[Node], str]) -> None:
    """Let :class:`RopeStorePass` turn a store and the rotations in front of it into one operator.

    Args:
        store: an operator (overload, or all of a packet) with arguments ``key`` and ``value``, rows ``[T, heads, dim]``
            that it stores to places of its own knowledge, and any others. It returns one tensor, or nothing.
        fused: an overload that by names takes what the store takes and of ``rope_store_kv``'s arguments ``query,
            positions, cos_sin, interleaved, q_weight, k_weight, eps, weight_offset, return_key``. It returns rotated
            query and key as ``rope_store_kv`` does, and third what the store returns.
        layer: from the store's node to what reports call the layer.

    Raises:
        ValueError: one of them is no operator, or lacks such arguments.
    """
    found = overloads(store)
    if not found or len(overloads(fused)) != 1:
        raise ValueError(
            f"expected operators such as torch.ops.engine.store and torch.ops.engine.fused.default, got {store!r} and "
            f"{fused!r}"
        )
    takes = {a.name for a in overloads(fused)[0]._schema.arguments}
    for op in found:
        given = {a.name for a in op._schema.arguments}
        missing = ({"key", "value"} - given) | ({*given, *ROTARY_ARGUMENTS} - takes)
        if missing:
            raise ValueError(f"{op} and {fused}: no argument {', '.join(sorted(missing))}")
        FUSED_STORES[op] = FusedStore(overloads(fused)[0], layer)


ROTARY_ARGUMENTS = (
    "query",
    "positions",
    "cos_sin",
    "interleaved",
    "q_weight",
    "k_weight",
    "eps",
    "weight_offset",
    "return_key",
)
register_fused_store(functional_store.STORE, functional_store.ROPE_STORE, functional_store.layer_of)


@dataclass
class PassReport:
    """What became of the stores in the graphs that a pass has seen.

    Code that comes out of a cache is not compiled, and then no pass sees it.

    Args:
        graphs: how many graphs were seen.
        fused: by layer, the rotation that goes with its store and the user's line.
        unfused: by layer, why its store stays as it is, and the user's line.
        split: where a key is rotated in a graph that stores none, if that was seen.
    """

    graphs: int = 0
    fused: dict[str, str] = field(default_factory=dict)
    unfused: dict[str, str] = field(default_factory=dict)
    split: str = ""

    def __str__(self) -> str:
        lines = [f"{self.graphs} graphs: rotation and store fused in {len(self.fused)} layers"]
        alike: dict[str, list[str]] = {}
        for layer, what in self.fused.items():
            alike.setdefault(what, []).append(layer)
        lines += [f"  {len(layers)} x {what}: {_some(layers)}" for what, layers in alike.items()]
        lines += [f"  not fused: {layer}: {reason}" for layer, reason in self.unfused.items()]
        lines += [f"  not fused: {self.split}"] if self.split else []
        return "\n".join(lines)


class RopeStorePass(CustomGraphPass):
    """A pass for ``torch._inductor.config.post_grad_custom_pre_pass``.

    Args:
        geometry: what the fused operators are for, for example a layout's JSON; part of the key of compiled code.
        strict: raise :class:`RewriteError` where a layer is left unfused, instead of a warning.
        before: another pass to run first.
        log: the logger's name.

    Attributes:
        remedy: what to do where a layer's rotation and its store are not in one graph.
    """

    remedy = "let the engine compile without splitting its graphs at the store operator"

    def __init__(
        self, geometry: str, strict: bool = False, before: Callable[[Graph], Any] | None = None, log: str = __name__
    ) -> None:
        self.geometry, self.strict, self.before, self.log = geometry, strict, before, logging.getLogger(log)
        self.report = PassReport()

    def __call__(self, graph: Graph) -> None:
        """Fuse what can be in one graph, and say what cannot."""
        if self.before is not None:
            self.before(graph)
        fakes = _fakes(graph)
        if fakes is None:
            return
        _refresh(graph, fakes)
        emitter = Emitter(graph, fakes, CAST)
        functional_store.unwrap(emitter, graph)
        stores = [n for n in graph.nodes if n.target in FUSED_STORES]
        unwrapped = unwrap(emitter, graph)
        _refresh(graph, fakes)
        planner, unfused, plans, times = Planner(graph), {}, [], Counter[str]()
        for store in stores:
            layer = FUSED_STORES[store.target].layer(store)
            times[layer] += 1
            layer += f", store {times[layer]}" if times[layer] > 1 else ""
            try:
                plan = planner.plan(store, FUSED_STORES[store.target].fused)
            except Unfused as reason:
                unfused[layer] = f"{reason}\n  in {user_line(store)}"
                continue
            plans.append(plan)
            self.report.fused[layer] = f"{plan.key}, {user_line(plan.key.root)}"
        rotated = None if stores else next(_rotated(planner), None)
        for plan in plans:
            fuse(emitter, plan)
        alive = _alive(graph)
        for left in unwrapped:
            if left.rotation in alive:
                put_back(left)
        emitter.erase_dead()
        functional_store.wrap(emitter, graph)
        _refresh(graph, fakes)
        self.report.graphs += 1
        self._tell(unfused, rotated, len(plans))

    def _tell(self, unfused: dict[str, str], rotated: Node | None, fused: int) -> None:
        known = {} if self.strict else self.report.unfused  # a warning says each layer once
        said = [f"{layer}: {reason}" for layer, reason in unfused.items() if layer not in known]
        self.report.unfused |= unfused
        if rotated is not None and (self.strict or not self.report.split):
            self.report.split = f"a graph rotates keys and stores none, in {user_line(rotated)}\n{self.remedy}"
            said.append(self.report.split)
        self.log.info("rope_store_kv: %s", self.report)
        if not said:
            return
        what = f"rope_store_kv: {fused} layers of this graph are fused, but not\n" + "\n".join(said)
        if self.strict:
            raise RewriteError(f"{what}\nstrict: without it these are compiled as they are")
        self.log.warning("%s", what)

    @staticmethod
    def require_uuid(before: Any, where: str) -> None:
        """Raise ValueError for a pass that stands at ``where`` already, None for none, and has no ``uuid()``."""
        if before is not None and _uuid_of(before) is None:
            raise ValueError(
                f"pm_ops: {where} is {before!r}, which has no uuid() that tells it from other passes, so that code "
                "compiled with another one would be used again; make it a CustomGraphPass (of "
                "torch._inductor.custom_graph_pass) whose uuid() is not None"
            )

    def uuid(self) -> str | None:
        """Equal where compiled code may be used again; None keeps Inductor from that.

        That is so where ``before`` has none, and where an operator's adapter is no function that its module has by its
        name: nobody knows what a lambda does, or a ``functools.partial``.
        """
        other = "" if self.before is None else _uuid_of(self.before)
        if other is None:
            return None
        found = hashlib.sha256(repr((self.geometry, self.strict, other)).encode())
        for op, to in sorted(FUSED_STORES.items(), key=_named):
            found.update(f"{op._schema} {to.fused._schema}".encode())
        for operators in (NORM_OPS, ROTARY_OPS):
            for op, adapter in sorted(operators.items(), key=_named):
                file = _file_of(adapter)
                if file is None:
                    return None
                found.update(f"{op} {adapter.__module__}.{adapter.__qualname__}".encode())
                found.update(file.read_bytes())
        for path in self.sources():
            found.update(path.read_bytes())
        return found.hexdigest()

    @staticmethod
    def sources() -> list[Path]:
        """The files that decide what a graph becomes, apart from those of registered operators' adapters."""
        return [*sorted(Path(__file__).parent.glob("*.py")), Path(pm_ops.ops.rope.__file__)]


def _named(registered: tuple[Any, Any]) -> str:
    """Of an operator and what it is registered with, the operator's name."""
    return str(registered[0])


def _file_of(function: Any) -> Path | None:
    """Where a function is written that its module has by its name; None for any other."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    try:
        known = operator.attrgetter(function.__qualname__)(module)
    except AttributeError:
        return None
    file = getattr(module, "__file__", None)
    return Path(file) if file is not None and known is function else None


def _uuid_of(given: Any) -> Any:
    return getattr(given, "uuid", lambda: None)()


def _fakes(graph: Graph) -> FakeTensorMode | None:
    """The mode of a graph's fake values."""
    values = (n.meta.get("val") for n in graph.nodes)
    return next((v.fake_mode for v in values if isinstance(v, FakeTensor)), None)


def _refresh(graph: Graph, fakes: FakeTensorMode) -> None:
    """Fake values for nodes that have none, as other passes may leave them, and for views of what is another now."""
    with fakes:
        for n in graph.nodes:
            if n.op == "call_function" and ("val" not in n.meta or _is_stale(n)):
                args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda a: a.meta["val"])
                n.meta["val"] = n.target(*args, **kwargs)


def _is_stale(n: Node) -> bool:
    """Is this a view whose value lies in another storage than its source's?"""
    if not is_view(n.target) or not n.args or not isinstance(n.args[0], Node):
        return False
    value, source = (_first(m.meta["val"], n) for m in (n, n.args[0]))
    return value is not None and source is not None and storage_key(value) != storage_key(source)


def _first(value: Any, n: Node) -> Tensor | None:
    """A node's value; of several, which a view that splits has, the one that its user takes."""
    if isinstance(value, list | tuple) and value:
        value = value[n.args[1]] if n.target is operator.getitem else value[0]  # type: ignore[index]
    return value if isinstance(value, Tensor) else None


def _rotated(planner: Planner) -> Iterator[Node]:
    """The nodes of ``[..., heads, dim]`` that are rotated."""
    for n in planner.roots:
        dims = n.meta["val"].dim()
        if dims >= 3 and isinstance(n.meta["val"].shape[-1], int):
            frame = Frame(tuple(range(dims - 2)), dims - 2, n.meta["val"].shape[-1])
            if next(rotations(planner.terms, n, frame), None) is not None:
                yield n


def _alive(graph: Graph) -> set[Node]:
    """The nodes that results and effects depend on."""
    alive: set[Node] = set()
    for n in reversed(graph.nodes):
        if n.op == "output" or has_effect(n) or not alive.isdisjoint(n.users):
            alive.add(n)
    return alive


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]}"
