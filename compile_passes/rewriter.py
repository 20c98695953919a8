"""Runs a captured graph with its caches on pages: what the rules call instead of each access becomes the new graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from .binding import Binding
from .engine_ops import ENGINE_OPS, ROTARY_OPS
from .forms import CachePlane
from .internals import asks_metadata, is_mutable, is_view, storage_key, written
from .page_ops import PageOps
from .regions import Region, around, locate, whole
from .report import RewriteError, form_of, user_line
from .rotary_ops import Call, rotate
from .rules import READS, WRITES
from .sdpa import rewrite_sdpa
from .selections import Selection, select
from .trace import SDPA, Interpreter, attribute_to, in_memory_order, laid_out, off_record, restride

# Copies that an attention is read through, as in repeat_kv's expand, clone and view.
COPIES = frozenset(
    (
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.view.default,
    )
)


class Rewriter(Interpreter):
    """Interprets the captured graph once, with fake tensors, while the calls are recorded.

    Caches, their views, and copies of them that only an attention reads, stay off the record: these are *shadows*.

    Args:
        graph: the captured graph.
        binding: whose caches.
        storages: the number of the bound storage, by :func:`storage_key` of the caches' fakes.
        materialize: read a cache densely where no rule fits, instead of raising.
        fuse_rope: make engines' rotary operators functional, as :mod:`rope_store` needs them.

    Attributes:
        rotaries: the operators that were, in order.
    """

    def __init__(
        self,
        graph: GraphModule,
        binding: Binding,
        storages: dict[int, int],
        materialize: bool = False,
        fuse_rope: bool = False,
    ) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.binding, self.pages = binding, PageOps()
        self._storages, self._materialize = storages, materialize
        self._fuse_rope, self.rotaries = fuse_rope, list[Call]()
        self._shadows: set[Node] = set()
        self._writes_at: dict[Node, dict[CachePlane, int]] = {}

    def rewrite(self, inputs: list[Any], buffer: Tensor, page_table: Tensor | None) -> Any:
        """Run the graph; the caches among the inputs are their fakes, off the record."""
        self.pages.buffer, self.pages.page_table = buffer, page_table
        return self.run(*inputs)

    def run_node(self, n: Node) -> Any:
        """Record a node as it is, or what its rule makes of it."""
        self.pages.node = n
        with _naming_the_line(n), attribute_to(n):
            sources = [m for m in n.all_input_nodes if m in self._shadows]
            if sources:
                result, shadow = self._run_access(n, sources)
            elif self._fuse_rope and n.target in ROTARY_OPS and rotate(self, n):
                result, shadow = None, False
            else:
                if n.op == "output" or (n.op == "call_function" and is_mutable(n.target)):
                    self.pages.before_mutation()
                result = super().run_node(n)
                shadow = n.op == "placeholder" and self.on_cache(result)
        if shadow:
            self._shadows.add(n)
            self._writes_at[n] = dict(self.pages.writes)
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
        return self.pages.writes.get(plane, 0) != self._writes_at[n].get(plane, 0)

    def locate(self, view: Tensor) -> Region:
        """Which part of which cache a view covers."""
        return locate(view, self._planes(view))

    def fallback(self, n: Node, reason: str) -> Any:
        """Run a node on dense copies of the caches it reads, if that was asked for; raise RewriteError if not."""
        if any(map(self.on_cache, written(n.target, *self.fetch_args_kwargs_from_env(n)))):
            raise RewriteError(f"{n.target} may write to a bound cache, and has no exact counterpart on pages")
        shadows = (self.env[m] for m in n.all_input_nodes if m in self._shadows)
        if not self._materialize and not all(self.on_cache(x) and self._state(x) for x in shadows):
            raise RewriteError(
                f"{form_of(n)} reads a bound cache: {reason}. Supported are gathers by slot (indexing, index_select, "
                "gather), scaled_dot_product_attention, and registered engine operators; "
                'on_unsupported_read="materialize" copies the cache out of its pages on every call instead'
            )
        found = self._call(n)
        if "val" not in n.meta or n.meta.get("unbacked_bindings"):  # sizes that follow from values are new ones here
            return found
        return tree_map(restride, found, n.meta["val"])  # what a copy becomes may lie otherwise than what a view does

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
        if is_mutable(n.target):
            self.pages.before_mutation()
        return self.call_function(n.target, args, kwargs)

    def store(self, selection: Selection, value: Tensor) -> None:
        """Write a value to a selection; a view of a cache is read first, where that was asked for."""
        if self.on_cache(value):
            if not self._materialize and self._state(value) is None:
                raise RewriteError(
                    "a view of a bound cache is written into a bound cache; gather the tokens first, as in k[slots], "
                    'or pass on_unsupported_read="materialize"'
                )
            value = self.materialize(value)
        self.pages.store(selection, value)

    def materialize(self, view: Tensor) -> Tensor:
        """A dense copy of what a view of a cache covers, with its dimensions in the same order in memory.

        States of sequences are gathered whole, and so is a cache of which the view is no choice of tokens.
        """
        plane = self._state(view)
        if plane is None:
            try:
                selection = select(self.locate(view), [])
            except RewriteError:
                plane = around(view, self._planes(view))
                if plane is None:
                    raise
            else:
                dense = self.pages.load(selection)
                self.pages.note("materialize", (selection.region.plane,), "load_kv of the whole view")
                return laid_out(dense, in_memory_order(view))
        dense = self._gathered(plane, view)
        action, what = ("read", "states") if plane.state_of_sequence else ("materialize", "whole cache")
        self.pages.note(action, (plane,), f"load_kv of the {what}")
        if view.numel() == dense.numel() and view.is_contiguous() and dense.is_contiguous():
            return dense.view(view.shape)
        return dense.as_strided(view.shape, view.stride(), view.storage_offset() - plane.storage_offset)

    def _gathered(self, plane: CachePlane, view: Tensor) -> Tensor:
        """All of a cache without gaps, every element where it is in there, once until something is written."""
        order = sorted(range(len(plane.shape)), key=lambda i: -plane.stride[i])
        make = lambda: laid_out(self.pages.load(select(whole(plane), [])), order)  # noqa: E731
        return self.pages.once(("whole", plane, self.pages.writes.get(plane)), view, make)

    def _state(self, view: Any) -> CachePlane | None:
        """The states of sequences that a view lies in. A model reads them whole, to make the next ones of them."""
        if not isinstance(view, Tensor):
            return None
        return around(view, [p for p in self._planes(view) if p.state_of_sequence])

    def _planes(self, view: Tensor) -> Sequence[CachePlane]:
        """The caches in a view's storage."""
        return self.binding.storage_planes(self._storages[storage_key(view)])


@contextmanager
def _naming_the_line(n: Node) -> Iterator[None]:
    try:
        yield
    except RewriteError as error:
        raise RewriteError(f"{error}\n  in {user_line(n)}") from error.__cause__
