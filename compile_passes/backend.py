"""The torch.compile backend: a layer-major model in, its graphs on pages out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from .binding import Binding
from .facade import Facade
from .internals import (
    compiled_part,
    drop_marks,
    ends_in_break,
    guard_modules,
    inductor,
    lookup_backend,
    register_backend,
    storage_key,
    wants_gradient,
)
from .report import Entry, RewriteError, user_line
from .rewriter import Rewriter
from .rope_store import fuse_rope_stores
from .trace import cache_fake, capture, finish, fresh_fakes, is_plain_mode, plain_mode, record, static_fake

UNSUPPORTED_READS = ("error", "materialize")


class PageMajorBackend:
    """Rewrites the graphs that touch a binding's caches, and hands every graph to an inner backend.

    Made by :func:`page_major_backend`. ``graphs`` keeps the rewritten graphs' code, in the order they were compiled.
    """

    def __init__(
        self,
        binding: Binding,
        inner: str | Callable[..., Any] = "inductor",
        strict: bool = True,
        on_unsupported_read: str = "error",
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        fuse_rope: bool = False,
    ) -> None:
        if not isinstance(binding, Binding):
            raise ValueError(f"binding must come from pm_ops.compile_passes.bind, got {type(binding).__name__}")
        if on_unsupported_read not in UNSUPPORTED_READS:
            raise ValueError(f"on_unsupported_read={on_unsupported_read!r}; supported: {', '.join(UNSUPPORTED_READS)}")
        self.binding, self.inner, self.strict = binding, _inner(inner), strict
        self.materialize = on_unsupported_read == "materialize"
        self.mode, self.options, self.fuse_rope = mode, dict(options or {}), fuse_rope
        self.graphs: list[str] = []

    def __call__(
        self, gm: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Callable[..., Any]:
        """Compile one graph, as torch.compile asks a backend to."""
        mode, options = mode or self.mode, {**self.options, **(options or {})}
        drop_marks(gm)
        bound = {i: s for i, x in enumerate(inputs) if (s := self.binding.storage_of(x)) is not None}
        for i, x in enumerate(inputs):
            if isinstance(x, Facade) and i not in bound:
                raise RewriteError(
                    f"the model uses {x.label}, which another binding than this backend's put into pages, or of which "
                    "eager code made this view; bind all caches of one compiled model at once, compile anew after "
                    "binding anew, and make views in the compiled model"
                )
        if not bound:
            self._check_touched([], gm)
            return self._compile_inner(gm, inputs, mode, options)
        if wants_gradient(gm, bound):
            raise RewriteError(
                "the model is called with gradients enabled, and a cache in pages has none; call it under "
                "torch.no_grad() or torch.inference_mode()"
            )
        self._check_pool(gm, inputs)
        new, entries = self._rewrite(gm, inputs, bound)
        self._check_touched(entries, gm)
        guard_modules()
        kept = [i for i in range(len(inputs)) if i not in bound]
        added = self._added()
        fakes = [static_fake(tensor) for tensor in added]  # AOTAutograd finds these, as long as they live
        with plain_mode():
            compiled = self._compile_inner(new, [*(inputs[i] for i in kept), *added], mode, options)
        del fakes
        self.binding.report().add(entries)  # now that there is a graph that does so
        self.graphs.append(new.code)
        return _checked(compiled, kept, added, {i: inputs[i] for i in bound})

    def _added(self) -> list[Tensor]:
        table = self.binding.page_table
        return [self.binding.buffer, *([] if table is None else [table])]

    def _check_pool(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Bound caches' accesses are put in order with each other, not with what a model does to the pool by hand."""
        names = dict(zip(map(storage_key, self._added()), ("buffer", "page table"), strict=False))
        placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        for n, x in zip(placeholders, inputs, strict=True):
            name = names.get(storage_key(x)) if isinstance(x, Tensor) and x.layout is torch.strided else None
            if name is not None:
                raise RewriteError(
                    "beside bound caches the model reads or writes the pool that they lie in or its page table, here "
                    f"the {name}; write and read the caches there, or the pool by hand in another compiled function or "
                    f"behind a graph break\n  in {user_line(next(iter(n.users), n))}"
                )

    def _rewrite(
        self, gm: GraphModule, inputs: Sequence[Any], bound: dict[int, int]
    ) -> tuple[GraphModule, list[Entry]]:
        report = self.binding.report()
        with fresh_fakes() as fakes:
            with fakes:
                device = self.binding.buffer.device
                bases = {
                    s: torch.empty(self.binding.storage_bytes(s), dtype=torch.uint8, device=device)
                    for s in set(bound.values())
                }
                caches = {i: cache_fake(inputs[i], bases[s]) for i, s in bound.items()}
            captured = capture(gm, inputs, caches, fakes)
            storages = {storage_key(base): s for s, base in bases.items()}
            rewriter = Rewriter(captured.graph, self.binding, storages, self.materialize, self.fuse_rope)
            kept = [i for i in range(len(inputs)) if i not in bound]
            added = [static_fake(t, fakes) for t in self._added()]

            def run(*args: Any) -> Any:
                given = dict(zip(kept, args, strict=False)) | caches
                table = args[len(kept) + 1] if len(added) > 1 else None
                return rewriter.rewrite([given[i] for i in range(len(inputs))], args[len(kept)], table)

            try:
                with plain_mode():
                    new = record(run, [*(captured.inputs[i] for i in kept), *added], fakes)
                if self.fuse_rope:
                    self._fuse(new, fakes, rewriter)
            except RewriteError as error:
                report.refused.append(str(error))
                raise
        return finish(new, gm, kept, ["pm_buffer", "pm_page_table"][: len(added)]), rewriter.pages.entries

    def _fuse(self, new: GraphModule, fakes: Any, rewriter: Rewriter) -> None:
        unfused = fuse_rope_stores(new, fakes, rewriter.pages, rewriter.rotaries)
        self.binding.report().leave(unfused)
        if unfused and self.strict:
            raise RewriteError(
                "fuse_rope=True leaves these stores as they are; strict=False compiles them so\n" + "\n".join(unfused)
            )

    def _check_touched(self, entries: Sequence[Entry], gm: GraphModule) -> None:
        """A compiled function that touches no bound cache is a mistake; one that graph breaks cut up, if none does."""
        if not self.strict or entries or ends_in_break(gm):
            return
        if self.binding.released:
            raise RewriteError(
                "this backend's binding was released: compile the model with another backend, or bind its caches again "
                "and compile it with the new binding"
            )
        part = compiled_part()
        if part == "start" or (part == "rest" and not self.binding.report().entries):
            raise RewriteError(
                "the compiled function neither writes nor reads a bound cache, so nothing was rewritten: is the model "
                "given the very tensors that were bound? strict=False compiles it as it is"
            )

    def _compile_inner(
        self, gm: GraphModule, inputs: Sequence[Any], mode: str | None, options: dict[str, Any]
    ) -> Callable[..., Any]:
        if self.inner == "inductor":
            return inductor(gm, inputs, mode, options)
        return self.inner(gm, list(inputs), **options)


def _inner(given: Any) -> Any:
    """``"inductor"``, which is given mode and options as torch.compile does, or a backend's function."""
    if callable(given) or given == "inductor":
        return given
    try:
        if isinstance(given, str):
            return lookup_backend(given)
    except RuntimeError:  # there is none of this name
        pass
    names = ", ".join(torch.compiler.list_backends(()))
    raise ValueError(f"inner={given!r} is no backend of torch.compile: pass a function, or one of {names}")


def page_major_backend(
    binding: Binding,
    inner: str | Callable[..., Any] = "inductor",
    *,
    strict: bool = True,
    on_unsupported_read: str = "error",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    fuse_rope: bool = False,
) -> PageMajorBackend:
    """A backend for ``torch.compile(model, backend=...)`` under which bound caches are written and read in pages.

    Args:
        binding: of :func:`bind`.
        inner: what compiles the rewritten graph: ``"inductor"``, another backend's name, or a function.
        strict: raise where a compiled function touches no bound cache. Of one that graph breaks cut into parts, this
            is known at its end only, and only as long as nothing at all was rewritten.
        on_unsupported_read: ``"error"`` names the user's line; ``"materialize"`` copies what is read out of the pages,
            on every call.
        mode, options: for Inductor, as torch.compile has them, such as ``mode="reduce-overhead"``; given to
            torch.compile they have the same effect.
        fuse_rope: turn every layer's rotary embedding, QK-norm and store into one ``rope_store_kv``. That is what a GPU
            wants, one launch in place of several; on the CPU, where Inductor fuses the rotation into one loop and the
            operator is plain torch, it is slower, so it is off unless asked for. It rounds once, where a graph in bf16
            or fp16 may round after every step. A store that it leaves as it is raises an error with strict, and is
            named in the report without.

    Raises:
        ValueError: an argument is of another kind, or there is no backend of this name.

    The first call of the compiled model, or one that compiles it anew, raises
    ``torch._dynamo.exc.BackendCompilerFailed`` where an access to a bound cache has no exact counterpart on pages:
    Dynamo puts all that a backend raises into one. Its message has the reason and the user's line, its
    ``inner_exception`` is the :class:`RewriteError`.
    """
    return PageMajorBackend(binding, inner, strict, on_unsupported_read, mode, options, fuse_rope)


def pm_ops_backend(
    gm: GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """``torch.compile(model, backend="pm_ops", options={"binding": binding, ...})``.

    Options other than :func:`page_major_backend`'s arguments are Inductor's. torch.compile takes no mode beside
    options; ``options={"mode": "reduce-overhead", ...}`` is the same.
    """
    given = dict(options or {})
    binding = given.pop("binding", None)
    if binding is None:
        raise ValueError('backend="pm_ops" needs options={"binding": binding}, made by pm_ops.compile_passes.bind')
    own = {name: given.pop(name) for name in ("inner", "strict", "on_unsupported_read", "fuse_rope") if name in given}
    mode = given.pop("mode", mode)
    return PageMajorBackend(binding, **own)(gm, inputs, mode=mode, options=given)


if not any(e.name == "pm_ops" for e in entry_points(group="torch_dynamo_backends")):
    register_backend(pm_ops_backend, name="pm_ops")  # run uninstalled, from the source tree


def _checked(
    compiled: Callable[..., Any], kept: Sequence[int], added: Sequence[Tensor], caches: dict[int, Any]
) -> Callable[..., Any]:
    """Call the compiled graph without its caches, after making sure that these are the ones it was compiled for."""
    expected, extra = list(caches.items()), tuple(added)

    def run(*args: Any) -> Any:
        for position, cache in expected:
            if args[position] is not cache:
                raise RuntimeError(
                    f"a graph compiled for {cache!r} was called with another tensor, {args[position]!r}; bind every "
                    "cache before the first call, and give the model the very tensors that were bound"
                )
        if is_plain_mode():
            return compiled(*[args[i] for i in kept], *extra)
        with plain_mode():
            return compiled(*[args[i] for i in kept], *extra)

    return run
