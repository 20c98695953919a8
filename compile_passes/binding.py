"""Tie a model's cache tensors to planes of a pool: their content moves into pages, their memory is given back."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pm_ops import HybridPool, PagePool
from pm_ops.layout import counted

from .cells import Cells
from .coverage import Cover, check_covered, owners, sharing
from .facade import Facade, make_facade, refuse_to_load
from .forms import CachePlane, form_of
from .internals import empty_storage, give_storage, storage_key
from .page_tables import give_pages_back, given_pages, in_columns, layers_with, pools_of, take_pages, whole_pool
from .report import RewriteReport
from .states import named_states, state_form
from .static_cache import attention_caches, states_of


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
        buffer: of the pool.
        planes: every bound cache, in the order given.
        page_table: int32 ``[batch, columns]`` for caches and states with a batch axis, else None. A row has all pages
            of a sequence: ``ceil(seq / page_size)`` of keys and values, then, where states are bound, one of states.
            Compiled graphs read it anew on every call, so that :meth:`move` may change it between calls.
    """

    def __init__(
        self,
        pool: PagePool | HybridPool,
        planes: Sequence[CachePlane],
        stored: Sequence[Stored],
        page_table: Tensor | None,
    ) -> None:
        self.pool, self.buffer = pool, whole_pool(pool).buffer
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
            give_pages_back(pool, page_table)
            raise
        self._hooks = [
            module.register_load_state_dict_pre_hook(refuse_to_load(names))
            for module, names in owners(t for _, t in self._where.values())
        ]
        for s in self._stored:
            cover = functools.partial(Cover, planes=s.planes, nbytes=s.nbytes, cells=self.cells)
            for tensor, _ in s.classes:
                make_facade(tensor, cover(tensor).label, cover, torch.empty(0, device=self.buffer.device))
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
        return Cells(self.buffer, plane, self.page_table)

    def move(self, row: int, pages: Tensor | Sequence[int] | None = None) -> list[int]:
        """Move a sequence to other pages between two calls of the model: keys, values and states, in one copy.

        Args:
            row: of ``page_table``.
            pages: of the pool's allocator, one for each of the row's and in their order, with one owner: the caller,
                who gives them to the binding. Default: ``pool.allocator.alloc`` of as many.

        Returns the pages that the row has now. Those that it had are free, but for what somebody else has retained.

        Raises:
            TypeError: the row is no integer.
            ValueError: the caches have no batch axis, there is no such row, or the pages are too few or too many,
                unknown, named twice, or in the table already.
            RuntimeError: the binding was released, a page is free or has other owners, or the allocator has too few.

        Nothing has been changed then. Where the copy itself fails, the sequence is where it was, and new pages that
        were taken for it are free again.
        """
        pool, table = whole_pool(self.pool), self.page_table
        if self.released:
            raise RuntimeError("this binding was released already")
        if table is None:
            raise ValueError("caches addressed by slot or page take every page of the pool: there is no row to move")
        if isinstance(row, bool):
            raise TypeError(f"row {row} is no integer; give a row of the page table")
        row = operator.index(row)
        if not 0 <= row < table.shape[0]:
            raise ValueError(f"no row {row} in a page table of {counted(table.shape[0], 'sequence')}")
        old = table[row].tolist()
        new = pool.allocator.alloc(len(old)) if pages is None else given_pages(pool, pages, len(old), table)
        try:
            with torch.inference_mode():  # in which tensors of either mode may be written
                pool.copy(old, new)
                table[row] = torch.tensor(new)
        except BaseException:
            if pages is None:
                pool.allocator.free(new)
            raise
        pool.allocator.free(old)
        return new

    def __repr__(self) -> str:
        state = "released from" if self.released else "in"
        return f"Binding({counted(len(self.planes), 'cache')} {state} {self.pool!r})"

    def release(self) -> None:
        """Undo the binding: the caches get memory, their content and their classes back, and the pages are freed.

        Graphs compiled with this binding are recompiled if called again, and then find nothing to rewrite: an error,
        unless their backend is not strict.
        """
        for s in self._stored:
            storage = torch.UntypedStorage(s.nbytes, device=self.buffer.device)
            for plane in s.planes:
                self.cells(plane).drain(storage)
            for tensor, before in s.classes:
                give_storage(tensor, storage)
                tensor.__class__ = before
        for hook in self._hooks:
            hook.remove()
        give_pages_back(self.pool, self.page_table)
        self._where = {}


def bind(
    pool: PagePool | HybridPool,
    cache: Any = None,
    *,
    keys: Iterable[Tensor] | None = None,
    values: Iterable[Tensor] | None = None,
    states: Mapping[str, Iterable[Tensor]] | None = None,
    dims: str | None = None,
) -> Binding:
    """Move caches into a pool's pages and turn the tensors into facades, which hold no memory.

    Args:
        pool: one plane ``"key"`` and ``"value"`` a layer, of the caches' dtype and on their device, without scales, and
            no plane without a cache. A hybrid model's attention pages and state pages are the kinds of a HybridPool,
            whose layers are numbered as in the model.
        cache: a transformers StaticCache after ``early_initialization``, instead of all of the following. The states
            of its linear layers are the planes ``"conv"`` and ``"ssm"``; those not made yet are made, as zeros of the
            plane's dtype, so give that the dtype which the model keeps them in.
        keys, values: the layers' caches in the order of the layout's layers; a stacked cache by its views, such as
            ``keys=kv[0], values=kv[1]``. Forms: ``[slots, heads, head_dim]`` or ``[pages, page_size, heads,
            head_dim]``, addressed by physical slot, which take every page of the pool; ``[batch, heads, seq,
            head_dim]`` or ``[batch, seq, heads, head_dim]``, whose pages come from ``pool.allocator``.
        states: by kind of plane, such as ``"conv"`` and ``"ssm"``, the recurrent states of the layers that have it, in
            order: ``[batch, *shape]``, a sequence's states in a page from ``pool.allocator``, or ``[num_pages,
            *shape]``, addressed by page, which take every page of the pool. Without attention caches beside them,
            states of as many sequences as the pool has pages are taken as addressed by page.
        dims: which form it is, ``"SHD"``, ``"PSHD"``, ``"BHSD"`` or ``"BSHD"``; needed only where a shape fits two.

    From then on compile the model with this binding's backend only; code that another backend compiled raises an
    error. Eager code may ask for sizes, and ``zero_()`` whole caches.

    An index out of a bound cache, an error in eager code, writes nothing and reads zeros. Where the environment has
    ``PM_OPS_CHECKS=1`` it is an error as it is for the operators, a ValueError on the CPU and a device assert on CUDA,
    but for one value: ``len(cache)`` pads the indices of caches that are addressed by slot or page.

    Raises:
        ValueError: the caches do not fit the pool or its free pages, a plane of the pool has no cache, or a storage
            holds more than the caches that are bound. Nothing has been changed then.
    """
    pools = pools_of(pool)
    if cache is None:
        return _bind(pool, pools, keys, values, states or {}, dims)
    if any(given is not None for given in (keys, values, states)):
        raise ValueError("bind takes a cache object, or keys=, values= and states=, not both")
    keys, values = attention_caches(cache)
    batch = keys[0].shape[0] if keys else None
    with states_of(cache, pools, batch) as kept:
        sequences = next((t.shape[0] for own in kept.values() for t in own), batch)
        return _bind(pool, pools, keys, values, kept, dims, sequences)


def _bind(
    pool: PagePool | HybridPool,
    pools: Sequence[PagePool],
    keys: Iterable[Tensor] | None,
    values: Iterable[Tensor] | None,
    states: Mapping[str, Iterable[Tensor]],
    dims: str | None,
    batch: int | None = None,
) -> Binding:
    named, storages = _named(pools, keys, values), dict[int, int]()
    planes = [_plane(pools, layer, kind, t, dims, storages) for layer, kind, t in named]
    recurrent = named_states(pools, states)
    planes += _states(pools, recurrent, planes, storages, batch)
    named += recurrent
    if not named:
        raise ValueError("nothing to bind: pass a cache, keys= and values=, or states=")
    planes = in_columns(pools, planes)
    _check_distinct(planes)
    _check_complete(pools, planes)
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
    return Binding(pool, planes, groups, take_pages(pool, planes))


def _named(
    pools: Sequence[PagePool], keys: Iterable[Tensor] | None, values: Iterable[Tensor] | None
) -> list[tuple[int, str, Tensor]]:
    named: list[tuple[int, str, Tensor]] = []
    for kind, given in (("key", keys), ("value", values)):
        if given is None:
            continue
        tensors, layers = list(given), layers_with(pools, kind)
        if len(tensors) != len(layers):
            caches = counted(len(tensors), f"{kind} cache")
            raise ValueError(f"{caches} for a layout of {counted(len(layers), 'layer')} with a plane {kind!r}")
        named += [(i, kind, t) for i, t in zip(layers, tensors, strict=True)]
    return sorted(named, key=lambda n: n[:2])


def _plane(
    pools: Sequence[PagePool], layer: int, kind: str, tensor: Tensor, dims: str | None, storages: dict[int, int]
) -> CachePlane:
    pool = layers_with(pools, kind)[layer]
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


def _states(
    pools: Sequence[PagePool],
    named: Sequence[tuple[int, str, Tensor]],
    beside: Sequence[CachePlane],
    storages: dict[int, int],
    batch: int | None,
) -> list[CachePlane]:
    batch = next((p.size("B") for p in beside if p.paged), batch)
    by_page = batch is None and bool(beside)
    found = []
    for layer, kind, tensor in named:
        pool = layers_with(pools, kind)[layer]
        _require_plain(f"the {kind} state of layer {layer}", tensor, pool.layout.plane(layer, kind).dtype, pool.device)
        storage = storages.setdefault(storage_key(tensor), len(storages))
        found.append(state_form(pool, layer, kind, tensor, storage, batch, by_page))
    return found


def _check_complete(pools: Sequence[PagePool], planes: Sequence[CachePlane]) -> None:
    """Every plane of the pool has a cache: a page verb would move the others without what the model keeps of them."""
    bound = {(p.layer, p.kind) for p in planes}
    left = sorted({(p.layer, p.kind) for pool in pools for p in pool.layout.planes} - bound)
    if left:
        kinds = ", ".join(sorted({repr(kind) for _, kind in left}))
        raise ValueError(
            f"no cache is given for {counted(len(left), 'plane')} of the pool, {kinds} from layer {left[0][0]} on: "
            "what the model keeps there would stay outside of the pages; pass keys=, values= and states= of every "
            "plane, or bind to a pool without these: of a layout such as layout.part('key'), or one of a HybridPool's"
        )


def _check_distinct(planes: Sequence[CachePlane]) -> None:
    seen: dict[tuple[int, int], CachePlane] = {}
    for plane in planes:
        twin = seen.setdefault((plane.storage, plane.storage_offset * plane.dtype.itemsize), plane)
        if twin is not plane:
            raise ValueError(
                f"the {plane.kind} cache of layer {plane.layer} is the {twin.kind} cache of layer {twin.layer} too; "
                "give each a tensor of its own"
            )
