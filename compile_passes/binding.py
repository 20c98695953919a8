"""Tie a model's cache tensors to planes of a pool: their content moves into pages, their memory is given back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pm_ops import PagePool
from pm_ops.layout import counted

from .cells import Cells
from .coverage import Cover, check_covered, owners, sharing
from .facade import Facade, make_facade, refuse_to_load
from .forms import CachePlane, form_of
from .internals import empty_storage, give_storage, storage_key
from .report import RewriteReport
from .states import named_states, state_form


@dataclass(frozen=True)
class Stored:
    """A storage that bound caches lie in, and the tensor objects over it with the classes they had."""

    tensor: Tensor
    nbytes: int
    planes: tuple[CachePlane, ...]
    classes: tuple[tuple[Tensor, type[Tensor]], ...]


class Binding:
    """Caches that live in a pool's pages. Made by :func:`bind`; lives as long as the compiled model is used.

    Attributes:
        pool: the pages.
        planes: every bound cache, in the order given.
        page_table: int32 ``[batch, ceil(seq / page_size)]`` for caches with a batch axis, else None. Compiled graphs
            read it anew on every call, so pages may be moved between calls: copy them, then update it in place.
    """

    def __init__(
        self, pool: PagePool, planes: Sequence[CachePlane], stored: Sequence[Stored], page_table: Tensor | None
    ) -> None:
        self.pool = pool
        self.planes = tuple(planes)
        self.page_table = page_table
        self._stored = tuple(stored)
        self._where = {id(t): (number, t) for number, s in enumerate(stored) for t, _ in s.classes}
        self._report = RewriteReport([(p.layer, p.kind) for p in planes], sum(s.nbytes for s in stored))
        try:
            for s in self._stored:
                for plane in s.planes:
                    self.cells(plane).fill(s.tensor.untyped_storage())
        except BaseException:  # out of memory, say: the caches are as they were, and so are to be the pages
            self._free_pages()
            raise
        self._hooks = [
            module.register_load_state_dict_pre_hook(refuse_to_load(names))
            for module, names in owners(t for _, t in self._where.values())
        ]
        for s in self._stored:
            cover = functools.partial(Cover, planes=s.planes, nbytes=s.nbytes, cells=self.cells)
            for tensor, _ in s.classes:
                make_facade(tensor, cover(tensor).label, cover, torch.empty(0, device=pool.device))
            empty_storage(
                s.tensor, f"{s.planes[0].label} lives in pages and has no data of its own; call binding.release() first"
            )

    def report(self) -> RewriteReport:
        """What the graphs compiled so far do with the caches. Prints as a table."""
        return self._report

    def storage_of(self, tensor: Any) -> int | None:
        """The number of the bound storage that a graph input lies in; None if it is no bound cache."""
        found = self._where.get(id(tensor))
        return found[0] if found is not None and found[1] is tensor else None

    def storage_bytes(self, storage: int) -> int:
        """Bytes that a bound storage had."""
        return self._stored[storage].nbytes

    def storage_planes(self, storage: int) -> tuple[CachePlane, ...]:
        """The caches that lie in a storage."""
        return self._stored[storage].planes

    def cache_bytes(self) -> int:
        """Bytes that the layer-major caches still hold: 0 while bound."""
        return sum(s.tensor.untyped_storage().nbytes() for s in self._stored)

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return not self._where

    def cells(self, plane: CachePlane) -> Cells:
        """Where a bound cache's tokens are in the pages."""
        if self.released:
            raise RuntimeError("this binding was released already")
        return Cells(self.pool, plane, self.page_table)

    def release(self) -> None:
        """Undo the binding: the caches get memory, their content and their classes back, and the pages are freed.

        Graphs compiled with this binding are recompiled if called again, and then find nothing to rewrite: an error,
        unless their backend is not strict.
        """
        for s in self._stored:
            storage = torch.UntypedStorage(s.nbytes, device=self.pool.device)
            for plane in s.planes:
                self.cells(plane).drain(storage)
            for tensor, before in s.classes:
                give_storage(tensor, storage)
                tensor.__class__ = before
        for hook in self._hooks:
            hook.remove()
        self._free_pages()
        self._where = {}

    def _free_pages(self) -> None:
        whole = range(self.pool.reserve_null, self.pool.num_pages)
        self.pool.allocator.free(whole if self.page_table is None else self.page_table.flatten().tolist())


def bind(
    pool: PagePool,
    cache: Any = None,
    *,
    keys: Iterable[Tensor] | None = None,
    values: Iterable[Tensor] | None = None,
    states: Mapping[str, Iterable[Tensor]] | None = None,
    dims: str | None = None,
) -> Binding:
    """Move caches into a pool's pages and turn the tensors into facades, which hold no memory.

    Args:
        pool: one plane ``"key"`` and ``"value"`` a layer, of the caches' dtype and on their device, without scales.
        cache: a transformers StaticCache after ``early_initialization``; instead of keys and values.
        keys, values: the layers' caches in the order of the layout's layers; a stacked cache by its views, such as
            ``keys=kv[0], values=kv[1]``. Forms: ``[slots, heads, head_dim]`` or ``[pages, page_size, heads,
            head_dim]``, addressed by physical slot, which take every page of the pool; ``[batch, heads, seq,
            head_dim]`` or ``[batch, seq, heads, head_dim]``, whose pages come from ``pool.allocator``.
        states: by kind of plane, such as ``"conv"`` and ``"ssm"``, the recurrent states ``[num_pages, *shape]`` of the
            layers that have it, in order. They are addressed by page, and take every page of the pool.
        dims: which form it is, ``"SHD"``, ``"PSHD"``, ``"BHSD"`` or ``"BSHD"``; needed only where a shape fits two.

    From then on compile the model with this binding's backend only; code that another backend compiled raises an
    error. Eager code may ask for sizes, and ``zero_()`` whole caches.

    Raises:
        ValueError: the caches do not fit the pool or its free pages, or a storage holds more than the caches that are
            bound. Nothing has been changed then.
    """
    if not isinstance(pool, PagePool):
        raise ValueError(f"pool must be a pm_ops.PagePool, got {type(pool).__name__}")
    if cache is not None:
        if keys is not None or values is not None:
            raise ValueError("bind takes a cache object, or keys= and values=, not both")
        keys, values = _static_layers(cache)
    named = [] if states is not None and keys is values is None else _named(pool, keys, values)
    storages: dict[int, int] = {}
    planes = [_plane(pool, layer, kind, t, dims, storages) for layer, kind, t in named]
    recurrent = [] if states is None else named_states(pool, states)
    planes += [_state(pool, layer, kind, t, storages) for layer, kind, t in recurrent]
    named += recurrent
    _check_distinct(planes)
    tensors = [t for _, _, t in named]
    objects = sharing(tensors)
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            raise ValueError(
                "a cache lies in memory that torch does not own (numpy, shared memory or a file) and that could not be "
                "given back; bind a clone of it"
            )
    groups: list[Stored] = []
    for number, key in enumerate(storages):
        own = [t for t in objects if storage_key(t) == key]
        inside = tuple(p for p in planes if p.storage == number)
        nbytes = own[0].untyped_storage().nbytes()
        check_covered(inside, nbytes)
        groups.append(Stored(own[0], nbytes, inside, tuple((t, type(t)) for t in own)))
    return Binding(pool, planes, groups, _take_pages(pool, planes))


def _static_layers(cache: Any) -> tuple[list[Tensor], list[Tensor]]:
    layers = list(getattr(cache, "layers", []))
    if not layers:
        raise ValueError(f"{type(cache).__name__} has no layers; pass a StaticCache, or keys= and values=")
    sliding = [i for i, layer in enumerate(layers) if getattr(layer, "is_sliding", False)]
    if sliding:
        raise ValueError(f"layers {sliding} are sliding-window layers, which are not supported yet")
    for i, layer in enumerate(layers):
        if not getattr(layer, "is_compileable", False) or not hasattr(layer, "max_cache_len"):
            raise ValueError(f"layer {i} is a {type(layer).__name__}; only transformers' static layers can be bound")
        if not layer.is_initialized:
            raise ValueError(f"layer {i} has no tensors yet; call cache.early_initialization(...) before bind")
    return [layer.keys for layer in layers], [layer.values for layer in layers]


def _named(
    pool: PagePool, keys: Iterable[Tensor] | None, values: Iterable[Tensor] | None
) -> list[tuple[int, str, Tensor]]:
    if keys is None and values is None:
        raise ValueError("nothing to bind: pass a cache, or keys= and values=")
    layers = pool.layout.layers
    named: list[tuple[int, str, Tensor]] = []
    given_caches = [(kind, t if t is None else list(t)) for kind, t in (("key", keys), ("value", values))]
    for layer in range(len(layers)):
        for kind, tensors in given_caches:
            if tensors is None:
                continue
            if len(tensors) != len(layers):
                given = counted(len(tensors), f"{kind} cache")
                raise ValueError(f"{given} for a layout of {counted(len(layers), 'layer')}; one a layer")
            named.append((layers[layer], kind, tensors[layer]))
    return named


def _plane(
    pool: PagePool, layer: int, kind: str, tensor: Tensor, dims: str | None, storages: dict[int, int]
) -> CachePlane:
    where, plane = f"the {kind} cache of layer {layer}", pool.plane(layer, kind)
    if plane.scales is not None:
        raise ValueError(
            f"{where} would be quantised: its plane has a scale for each token and head, but a bound cache holds what "
            "the model writes; use a layout without scales=True"
        )
    _require_plain(where, tensor, plane.dtype, pool.device)
    form = form_of(tensor, plane.heads, plane.dim, pool.page_size, pool.num_pages, dims)
    storage = storages.setdefault(storage_key(tensor), len(storages))
    found = CachePlane(
        layer, kind, form, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype,
        plane.heads, plane.dim, tuple(plane.geometry), pool.page_size, storage,
    )  # fmt: skip
    nested = all(outer >= inner * n for (_, outer, _), (_, inner, n) in zip(found.axes, found.axes[1:], strict=False))
    if not nested or (form == "PSHD" and not found.merged("P", "S")):
        raise ValueError(f"{where} has shape {list(tensor.shape)} and strides {list(tensor.stride())}: axes overlap")
    return found


def _require_plain(where: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if isinstance(tensor, Facade):
        raise ValueError(f"{where} is bound already; release that binding first")
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"{where} must be a plain torch.Tensor, got {type(tensor).__name__}")
    if tensor.requires_grad:
        raise ValueError(f"{where} requires grad; detach it, caches in pages have no gradient")
    if tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{where} is {tensor.dtype} on {tensor.device}, its plane {dtype} on {device}; they must agree"
        )


def _state(pool: PagePool, layer: int, kind: str, tensor: Tensor, storages: dict[int, int]) -> CachePlane:
    plane = pool.layout.plane(layer, kind)
    _require_plain(f"the {kind} state of layer {layer}", tensor, plane.dtype, pool.device)
    return state_form(pool, layer, kind, tensor, storages.setdefault(storage_key(tensor), len(storages)))


def _take_pages(pool: PagePool, planes: Sequence[CachePlane]) -> Tensor | None:
    """Take the caches' pages from the allocator: a table of them, or for caches addressed by slot all there are."""
    paged = [p for p in planes if p.paged]
    sizes = {(p.size("B"), p.size("S")) for p in paged}
    states = sorted({p.kind for p in planes if pool.layout.plane(p.layer, p.kind).token_stride is None})
    if paged and states:
        raise ValueError(
            f"states {states} are addressed by page and take every page of the pool, where the {paged[0].form} "
            f"{paged[0].kind} cache has a page table; one binding does not take both yet: bind either of them and "
            "leave the other to the model, or call the operators on the pages of a HybridPool"
        )
    if len(sizes) > 1 or 0 < len(paged) < len(planes):
        forms = sorted({f"{p.form} {list(p.shape)}" for p in planes})
        raise ValueError(f"caches of one binding share a page table: one batch and length for all, got {forms}")
    batch, seq = sizes.pop() if paged else (1, (pool.num_pages - pool.reserve_null) * pool.page_size)
    columns = -(-seq // pool.page_size)
    free = pool.allocator.num_free
    if batch * columns > free and not paged:
        raise ValueError(
            f"caches addressed by slot take every page of the pool; {batch * columns - free} of {batch * columns} are "
            "in use: make a pool of their own"
        )
    if batch * columns > free:
        raise ValueError(
            f"caches of {batch} x {counted(seq, 'token')} need {counted(batch * columns, 'page')} of "
            f"{counted(pool.page_size, 'token')}, the pool has {free} free of {pool.num_pages}; give it more pages, or "
            "free some"
        )
    pages = pool.allocator.alloc(batch * columns)
    return torch.tensor(pages, dtype=torch.int32, device=pool.device).view(batch, columns) if paged else None


def _check_distinct(planes: Sequence[CachePlane]) -> None:
    seen: dict[tuple[int, int], CachePlane] = {}
    for plane in planes:
        twin = seen.setdefault((plane.storage, plane.storage_offset * plane.dtype.itemsize), plane)
        if twin is not plane:
            raise ValueError(
                f"the {plane.kind} cache of layer {plane.layer} is the {twin.kind} cache of layer {twin.layer} too; "
                "give each a tensor of its own"
            )
