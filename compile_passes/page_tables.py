"""The pages that bound caches take: a row of a page table for each sequence, or every page there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pm_ops import HybridPool, PagePool
from pm_ops.descriptors import checked_pages
from pm_ops.layout import counted

from .forms import CachePlane


def pools_of(pool: Any) -> tuple[PagePool, ...]:
    """The kinds of page of a pool, one pool each. Raises ValueError for anything else than the two classes."""
    if isinstance(pool, HybridPool):
        return tuple(pool.values())
    if isinstance(pool, PagePool):
        return (pool,)
    raise ValueError(f"pool must be a pm_ops.PagePool or a pm_ops.HybridPool, got {type(pool).__name__}")


def whole_pool(pool: PagePool | HybridPool) -> PagePool:
    """The pool whose pages are of any kind."""
    return pool.whole if isinstance(pool, HybridPool) else pool


def layers_with(pools: Sequence[PagePool], kind: str) -> dict[int, PagePool]:
    """Every layer that has a plane of this kind, in order, and the pool that the plane is in."""
    found = {plane.layer: pool for pool in pools for plane in pool.layout.planes if plane.kind == kind}
    return dict(sorted(found.items()))


def in_columns(pools: Sequence[PagePool], planes: Sequence[CachePlane]) -> list[CachePlane]:
    """The planes, with the first columns of their pages: a kind of page has columns of its own, and so have states."""
    begin: dict[tuple[int, bool], int] = {}
    placed, end = [], 0
    for plane in planes:
        pool = layers_with(pools, plane.kind)[plane.layer]
        key = (pools.index(pool), plane.state_of_sequence)
        if plane.paged and key not in begin:
            begin[key] = end
            end += plane.columns
        placed.append(replace(plane, column=begin.get(key, 0)))
    return placed


def take_pages(pool: PagePool | HybridPool, planes: Sequence[CachePlane]) -> Tensor | None:
    """Take the caches' pages from the allocator: a table of them, or None where caches by slot take all there are.

    Raises:
        ValueError: the caches are of several batches or lengths, or there are not enough pages. Nothing is taken then.
    """
    whole = whole_pool(pool)
    paged = [p for p in planes if p.paged]
    sizes = {p.size("B") for p in paged}, {p.size("S") for p in paged if not p.state_of_sequence}
    if any(len(size) > 1 for size in sizes) or 0 < len(paged) < len(planes):
        forms = sorted({f"{p.form} {list(p.shape)}" for p in planes})
        raise ValueError(f"caches of one binding share a page table: one batch and length for all, got {forms}")
    if not paged:
        _take_all(pool, planes)
        return None
    batch, columns = sizes[0].pop(), max(p.column + p.columns for p in planes)
    if batch * columns > whole.allocator.num_free:
        raise ValueError(
            f"{_needed(planes)} need {counted(batch * columns, 'page')}{_of_tokens(planes)}, the pool has "
            f"{whole.allocator.num_free} free of {whole.num_pages}; give it more pages, or free some"
        )
    pages = whole.allocator.alloc(batch * columns)
    return torch.tensor(pages, dtype=torch.int32, device=whole.device).view(batch, columns)


def _needed(planes: Sequence[CachePlane]) -> str:
    caches, states = ([p for p in planes if p.state_of_sequence == wanted] for wanted in (False, True))
    batch = planes[0].size("B")
    names = [f"caches of {batch} x {counted(caches[0].size('S'), 'token')}"] if caches else []
    return " and ".join([*names, *([f"states of {counted(batch, 'sequence')}"] if states else [])])


def _of_tokens(planes: Sequence[CachePlane]) -> str:
    sizes = {p.page_size for p in planes}
    return f" of {counted(sizes.pop(), 'token')}" if len(sizes) == 1 and not planes[-1].state_of_sequence else ""


def _take_all(pool: PagePool | HybridPool, planes: Sequence[CachePlane]) -> None:
    whole = whole_pool(pool)
    kinds = {next(i for i, p in enumerate(pools_of(pool)) if (c.layer, c.kind) in _planes(p)) for c in planes}
    if len(kinds) > 1:
        names = [list(pool)[i] for i in sorted(kinds)] if isinstance(pool, HybridPool) else []
        raise ValueError(
            f"caches addressed by slot or page take every page of the pool, but those of the kinds {names} would lie "
            "in the same bytes; give caches and states a batch axis, so that each sequence has pages of its own"
        )
    wanted = whole.num_pages - whole.reserve_null
    if wanted > whole.allocator.num_free:
        raise ValueError(
            f"caches addressed by slot take every page of the pool; {wanted - whole.allocator.num_free} of {wanted} "
            "are in use: make a pool of their own"
        )
    whole.allocator.alloc(wanted)


def _planes(pool: PagePool) -> set[tuple[int, str]]:
    return {(p.layer, p.kind) for p in pool.layout.planes}


def given_pages(pool: PagePool, pages: Tensor | Sequence[int], count: int, page_table: Tensor) -> list[int]:
    """Pages that a caller owns and gives to a table, as a list of so many.

    Raises:
        ValueError: they are of another number, unknown, named twice, or in the table already.
        RuntimeError: one is free, or has other owners.
    """
    ids = checked_pages(pool, pages, distinct=True)
    if len(ids) != count:
        raise ValueError(f"{counted(len(ids), 'page')} for a sequence of {count}; give one for each")
    if bound := sorted(set(ids) & set(page_table.flatten().tolist())):
        raise ValueError(f"pages {bound} are in the page table already; give pages of pool.allocator.alloc")
    for page in ids:
        owners = pool.allocator.refcount(page)
        if owners != 1:
            raise RuntimeError(
                f"page {page} has {counted(owners, 'owner')}; give pages of pool.allocator.alloc, which nobody else has"
            )
    return ids


def give_pages_back(pool: PagePool | HybridPool, page_table: Tensor | None) -> None:
    """Free what :func:`take_pages` took; with a table, the pages that it names now."""
    whole = whole_pool(pool)
    pages = range(whole.reserve_null, whole.num_pages) if page_table is None else page_table.flatten().tolist()
    whole.allocator.free(pages)
