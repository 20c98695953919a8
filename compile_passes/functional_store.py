"""``pm_ops.store_kv`` in functionalised graphs, where it is wrapped because it writes in place.

::

    out = auto_functionalized_v2(store_kv, key=k, ..., _all_bases=[buffer])    new = store(buffer, k, v, slots, ...)
    new = out[1]                                                          →
    out, _ = attention(new, q, ...)                                            out, _ = attention(new, q, ...)

The functional store stands in front of the first that reads what it has written, so that it is behind the query's
rotation, which Inductor puts behind a store that does not need it; but not behind what writes, as graphs end in writes
to their inputs, of which rows and slots may be some. :func:`wrap` makes operators that write in place of it, or of what
it became.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

import pm_ops.ops.rope
import pm_ops.ops.store  # noqa: F401

from .emit import Emitter
from .internals import WRAPPERS, auto_functionalized_v2, has_effect, unwrapped

_LIBRARY = torch.library.Library("pm_ops_trace", "FRAGMENT")


def _functional(name: str, returns: str) -> Any:
    """An operator with the arguments of ours that returns the new buffer last; no program ever runs it."""
    schema = str(getattr(torch.ops.pm_ops, name).default._schema).removeprefix("pm_ops::")
    _LIBRARY.define(schema.partition(" -> ")[0].replace("Tensor(a!)", "Tensor") + f" -> {returns}")
    return getattr(torch.ops.pm_ops_trace, name).default


STORE = _functional("store_kv", "Tensor")
ROPE_STORE = _functional("rope_store_kv", "(Tensor, Tensor, Tensor)")
IN_PLACE = {STORE: torch.ops.pm_ops.store_kv.default, ROPE_STORE: torch.ops.pm_ops.rope_store_kv.default}


@torch.library.register_fake("pm_ops_trace::store_kv", lib=_LIBRARY)
def _store_fake(buffer: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(buffer)


@torch.library.register_fake("pm_ops_trace::rope_store_kv", lib=_LIBRARY)
def _rope_store_fake(buffer: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key = torch.ops.pm_ops.rope_store_kv.default(buffer, *given, **named)
    return query, key, torch.empty_like(buffer)


def unwrap(emit: Emitter, graph: Graph) -> None:
    """Put a functional store in the place of every wrapped one."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    effects = [n for n in graph.nodes if has_effect(n)]
    for n in [n for n in graph.nodes if n.target in WRAPPERS and n.args[0] is IN_PLACE[STORE]]:
        given = _arguments(n)
        readers = [reader for result in n.users for reader in result.users]
        if given is None or not readers:
            continue
        first = next(effect for effect in effects if order[effect] > order[n])  # the graph's output at the latest
        with emit.before(min(first, *readers, key=order.__getitem__)):
            new = emit.call(STORE, *(given[a.name] for a in STORE._schema.arguments))
        new.meta["stack_trace"] = n.meta.get("stack_trace")
        for result in list(n.users):
            result.replace_all_uses_with(new)
            graph.erase_node(result)
        graph.erase_node(n)


def wrap(emit: Emitter, graph: Graph) -> None:
    """Make operators that write in place of all functional stores."""
    for n in [n for n in graph.nodes if n.target in IN_PLACE]:
        given = dict(zip((a.name for a in n.target._schema.arguments), n.args, strict=True))
        bases = [given.pop("buffer")]
        with emit.before(n):
            new = emit.call(auto_functionalized_v2, IN_PLACE[n.target], **given, _buffer_base_index=0, _all_bases=bases)
            n.replace_all_uses_with(emit.item(new, 1) if n.target is STORE else new)
        graph.erase_node(n)


def layer_of(store: Node) -> str:
    """What reports call the layer that a functional store writes."""
    buffer, plane = store.args[0], store.args[4] or store.args[5]
    while isinstance(buffer, Node) and buffer.target is STORE:
        buffer = buffer.args[0]
    return f"byte {plane[0]} of the pages in {buffer}"  # type: ignore[index]


def _arguments(n: Node) -> dict[str, Any] | None:
    """What a wrapped store is given, by name; None where its buffer is a part of another tensor."""
    if n.target is not auto_functionalized_v2:
        return dict(n.kwargs)
    given, views, bases = unwrapped(n.args[0], n.kwargs)
    base, op, _ = views["buffer"]
    return None if op is not None else {**given, "buffer": bases[base]}
