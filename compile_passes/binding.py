"""Tie a model's cache tensors to planes of a pool: their content moves into pages, their memory is given back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pm_ops import PagePool
from pm_ops.layout import counted

from .facade import Facade, make_facade, sharing
from .forms import CachePlane, form_of
from .report import RewriteReport


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
        graph_broke: whether Dynamo has stopped a graph in the middle of a frame; the caches may be in one to come.
    """

    def __init__(
        self, pool: PagePool, planes: Sequence[CachePlane], stored: Sequence[Stored], page_table: Tensor | None
    ) -> None:
        self.pool = pool
        self.planes = tuple(planes)
        self.page_table = page_table
        self.graph_broke = False
        self._stored = tuple(stored)
        self._where = {id(t): (number, t) for number, s in enumerate(stored) for t, _ in s.classes}
        released = sum(s.nbytes for s in stored)
        self._report = RewriteReport([(p.layer, p.kind) for p in planes], released)

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

    def zero(self, planes: Iterable[CachePlane]) -> None:
        """Zero the tokens of these caches in the pages."""
        for plane in planes:
            cells, slots = self._cells(plane)
            cells[slots // plane.page_size, slots % plane.page_size] = 0

    def release(self) -> None:
        """Undo the binding: the caches get their memory, their content and their classes back, and the pages are freed.

        Graphs compiled with this binding are recompiled if called again, and then find nothing to rewrite.
        """
        if not self._where:
            raise RuntimeError("this binding was released already")
        for s in self._stored:
            with torch._C.DisableTorchFunctionSubclass():
                s.tensor.untyped_storage().resize_(s.nbytes)
                for plane in s.planes:
                    cells, slots = self._cells(plane)
                    found = cells[slots // plane.page_size, slots % plane.page_size]
                    _rows(_bits(_cache(s.tensor, plane)), plane).copy_(found.view(*_row_shape(plane)))
            for tensor, before in s.classes:
                tensor.__class__ = before
        whole = range(self.pool.reserve_null, self.pool.num_pages)
        self.pool.allocator.free(whole if self.page_table is None else self.page_table.flatten().tolist())
        self._where = {}

    def _fill(self, tensor: Tensor, plane: CachePlane) -> None:
        cells, slots = self._cells(plane)
        rows = _rows(_bits(_cache(tensor, plane)), plane)
        cells[slots // plane.page_size, slots % plane.page_size] = rows.reshape(-1, plane.heads, plane.dim)

    def _cells(self, plane: CachePlane) -> tuple[Tensor, Tensor]:
        """The plane's rows as integers, and the slots of the cache's tokens in the order of :func:`_rows`."""
        cells, size = _bits(self.pool.view(plane.layer, plane.kind)), plane.page_size
        if not plane.paged:
            return cells, torch.arange(math.prod(_row_shape(plane)[:-2]), device=cells.device)
        assert self.page_table is not None
        slots = self.page_table.long()[:, :, None] * size + torch.arange(size, device=cells.device)
        return cells, slots.flatten(1)[:, : plane.size("S")].flatten()


def bind(
    pool: PagePool,
    cache: Any = None,
    *,
    keys: Sequence[Tensor] | Tensor | None = None,
    values: Sequence[Tensor] | Tensor | None = None,
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
        dims: which form it is, ``"SHD"``, ``"PSHD"``, ``"BHSD"`` or ``"BSHD"``; needed only where a shape fits two.

    From then on compile the model with this binding's backend only: any other would read memory that is gone, and may
    crash.

    Raises:
        ValueError: the caches do not fit the pool or its free pages, or a storage holds more than the caches that are
            bound. Nothing has been changed then.
    """
    if cache is not None:
        if keys is not None or values is not None:
            raise ValueError("bind takes a cache object, or keys= and values=, not both")
        keys, values = _static_layers(cache)
    named = _named(pool, keys, values)
    storages: dict[int, int] = {}
    planes = [_plane(pool, layer, kind, t, dims, storages) for layer, kind, t in named]
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
    for number, cdata in enumerate(storages):
        own = [t for t in objects if t.untyped_storage()._cdata == cdata]
        inside = tuple(p for p in planes if p.storage == number)
        nbytes = own[0].untyped_storage().nbytes()
        _check_covered(inside, nbytes)
        groups.append(Stored(own[0], nbytes, inside, tuple((t, type(t)) for t in own)))
    binding = Binding(pool, planes, groups, _take_pages(pool, planes))
    for group in groups:
        for plane in group.planes:
            binding._fill(group.tensor, plane)
        for tensor, _ in group.classes:
            _hide(binding, tensor, group)
        with torch._C.DisableTorchFunctionSubclass():
            group.tensor.untyped_storage().resize_(0)
    return binding


def _hide(binding: Binding, tensor: Tensor, group: Stored) -> None:
    start, item = tensor.storage_offset() * tensor.dtype.itemsize, tensor.dtype.itemsize
    extent = sum((n - 1) * st for n, st in zip(tensor.shape, tensor.stride(), strict=True)) * item + item
    inside = [p for p in group.planes if start <= p.storage_offset * p.dtype.itemsize < start + extent]
    whole = sum(math.prod(p.shape) for p in inside) == tensor.numel()
    label = " and ".join(p.label for p in inside[:2]) + (" and more" if len(inside) > 2 else "")

    def zero() -> None:
        if not whole:
            raise RuntimeError(f"zero_() on a part of the cache of {label}, which lives in pages; zero the whole cache")
        binding.zero(inside)

    make_facade(tensor, label or "a bound cache", zero)


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
    pool: PagePool, keys: Sequence[Tensor] | Tensor | None, values: Sequence[Tensor] | Tensor | None
) -> list[tuple[int, str, Tensor]]:
    if keys is None and values is None:
        raise ValueError("nothing to bind: pass a cache, or keys= and values=")
    layers = pool.layout.layers
    named: list[tuple[int, str, Tensor]] = []
    for layer in range(len(layers)):
        for kind, tensors in (("key", keys), ("value", values)):
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
    if isinstance(tensor, Facade):
        raise ValueError(f"{where} is bound already; release that binding first")
    if not isinstance(tensor, Tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ValueError(f"{where} must be a plain torch.Tensor, got {type(tensor).__name__}")
    if tensor.requires_grad:
        raise ValueError(f"{where} requires grad; detach it, caches in pages have no gradient")
    if tensor.dtype != plane.dtype or tensor.device != pool.device:
        raise ValueError(
            f"{where} is {tensor.dtype} on {tensor.device}, its plane {plane.dtype} on {pool.device}; they must agree"
        )
    form = form_of(tensor, plane.heads, plane.dim, pool.page_size, pool.num_pages, dims)
    storage = storages.setdefault(tensor.untyped_storage()._cdata, len(storages))
    found = CachePlane(
        layer, kind, form, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype,
        plane.heads, plane.dim, tuple(plane.geometry), pool.page_size, storage,
    )  # fmt: skip
    nested = all(outer >= inner * n for (_, outer, _), (_, inner, n) in zip(found.axes, found.axes[1:], strict=False))
    if not nested or (form == "PSHD" and not found.merged("P", "S")):
        raise ValueError(f"{where} has shape {list(tensor.shape)} and strides {list(tensor.stride())}: axes overlap")
    return found


def _take_pages(pool: PagePool, planes: Sequence[CachePlane]) -> Tensor | None:
    """Take the caches' pages from the allocator: a table of them, or for caches addressed by slot all there are."""
    paged = [p for p in planes if p.paged]
    sizes = {(p.size("B"), p.size("S")) for p in paged}
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


def _check_covered(planes: Sequence[CachePlane], nbytes: int) -> None:
    held = sum(math.prod(p.shape) * p.dtype.itemsize for p in planes)
    if held != nbytes or not all(_disjoint(p, q) for p, q in itertools.combinations(planes, 2)):
        names = ", ".join(p.label for p in planes[:4])
        raise ValueError(
            f"the storage under {names} has {nbytes} bytes, the bound caches in it {held}: its memory could not be "
            "given back without losing the rest; bind every cache that lies in it, once"
        )


def _disjoint(p: CachePlane, q: CachePlane) -> bool:
    low, high = sorted((p, q), key=lambda plane: plane.storage_offset)
    apart = high.storage_offset - low.storage_offset
    extent = 1 + sum((size - 1) * stride for _, stride, size in low.axes)
    return apart >= extent or ([*p.axes] == [*q.axes] and not _steps(apart, p.axes))


def _steps(apart: int, axes: Sequence[tuple[str, int, int]]) -> bool:
    """Are two elements of one cache, ``apart`` in memory, a whole number of steps along its axes from each other?"""
    if not axes:
        return apart == 0
    (_, stride, size), *inner = axes
    near = (apart // stride, apart // stride + 1)
    return any(abs(n) < size and _steps(apart - n * stride, inner) for n in near)


def _bits(x: Tensor) -> Tensor:
    """The same bytes as integers, so that copies keep them as they are, fp8 and NaN included."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def _cache(tensor: Tensor, plane: CachePlane) -> Tensor:
    flat = torch.empty(0, dtype=plane.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return flat.as_strided(plane.shape, plane.stride, plane.storage_offset)


def _rows(cache: Tensor, plane: CachePlane) -> Tensor:
    """The cache with its token axes first: ``[..., heads, dim]``."""
    return cache.transpose(1, 2) if plane.form == "BHSD" else cache


def _row_shape(plane: CachePlane) -> tuple[int, ...]:
    shape = plane.shape
    return (shape[0], shape[2], shape[1], shape[3]) if plane.form == "BHSD" else shape
