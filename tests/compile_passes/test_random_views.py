"""Views of caches, random ones too, and indices of them: what is located and selected is what torch reads there."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pm_ops.compile_passes.forms import CachePlane
from pm_ops.compile_passes.regions import locate
from pm_ops.compile_passes.report import RewriteError
from pm_ops.compile_passes.selections import select

PAGE = 4
SHAPES = {
    "slots": ("SHD", (12, 4, 4)),
    "slots, two heads": ("SHD", (12, 2, 6)),
    "slots, one head": ("SHD", (12, 1, 4)),
    "pages": ("PSHD", (3, PAGE, 4, 4)),
    "heads first": ("BHSD", (2, 4, 8, 4)),
    "heads first, one sequence": ("BHSD", (1, 4, 8, 4)),
    "heads first, one head": ("BHSD", (3, 1, 8, 4)),
    "tokens first": ("BSHD", (2, 8, 4, 4)),
}


def a_step(x: Tensor, r: random.Random) -> Tensor:
    """A view of a view."""
    d = r.randrange(x.dim())
    n = x.shape[d]
    start = r.randrange(n)
    match r.randrange(11):
        case 0:
            return x.transpose(d, r.randrange(x.dim()))
        case 1:
            return x.permute(r.sample(range(x.dim()), x.dim()))
        case 2:
            return x[(slice(None),) * d + (slice(start, r.randint(start + 1, n), r.choice([1, 1, 2])),)]
        case 3 if x.dim() > 1:
            return x.select(d, start)
        case 4:
            inner = r.choice([i for i in range(1, n + 1) if n % i == 0])
            return x.unflatten(d, (n // inner, inner))
        case 5 | 9 | 10 if d:
            return x.view(*x.shape[: d - 1], -1, *x.shape[d + 1 :])
        case 6:
            return x.unsqueeze(d)
        case 7:
            return x.squeeze()
        case 8 if n == 1:
            return x.expand(*x.shape[:d], 2, *x.shape[d + 1 :])
    return x


def a_view(x: Tensor, r: random.Random) -> Tensor:
    for _ in range(r.randint(1, 6)):
        try:
            x = a_step(x, r)
        except RuntimeError:  # dimensions that do not lie side by side cannot be flattened
            continue
    return x if x.dim() else x[None]


def planes_of(form: str, shape: tuple[int, ...], r: random.Random) -> tuple[Tensor, list[Tensor], list[CachePlane]]:
    """The memory of three layers, all elements of different values, one behind the other or interleaved."""
    elements = torch.arange(3 * math.prod(shape))
    if form == "PSHD" or r.random() < 0.5:
        base = elements.view(3, *shape)
        caches = list(base)
    else:
        base = elements.view(shape[0], 3, *shape[1:])
        caches = list(base.unbind(1))
    return base, caches, [plane_of(c, i, form) for i, c in enumerate(caches)]


def plane_of(cache: Tensor, layer: int, form: str) -> CachePlane:
    shape, start = tuple(cache.shape), int(cache.storage_offset())
    size = dict(zip(form, shape, strict=True))
    heads, dim = size["H"], size["D"]
    return CachePlane(layer, "key", form, shape, cache.stride(), start, cache.dtype, heads, dim, (0,), PAGE, 0)


def rows_at(cache: Tensor, plane: CachePlane, slots: Tensor) -> Tensor:
    """What ``load_kv`` gives, where sequence ``b``'s pages are those from ``b * columns`` on."""
    if not plane.paged:
        return cache.reshape(-1, plane.heads, plane.dim)[slots]
    page, offset = slots // PAGE, slots % PAGE
    row, position = page // plane.columns, page % plane.columns * PAGE + offset
    return cache[row, :, position] if plane.form == "BHSD" else cache[row, position]


REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "heads in front of and behind the elements": ("slots", lambda base: base[1].view(12, 2, 2, 4).transpose(2, 3)),
    "elements in front of and behind the heads": ("slots", lambda base: base[1].view(12, 4, 2, 2).transpose(1, 2)),
    "flat positions of two layers": ("tokens first", lambda base: base.view(48, 4, 4)),
    "flat positions up to the next layer": ("tokens first", lambda base: base.view(48, 4, 4)[8:25]),
    "slots of two layers, in rows": ("slots", lambda base: base.view(4, 9, 4, 4)[:2]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_view_that_holds_other_than_rows_of_one_cache_is_refused(name: str) -> None:
    form, view = REFUSED[name]
    form, shape = SHAPES[form]
    base = torch.arange(3 * math.prod(shape)).view(3, *shape)
    with pytest.raises(RewriteError, match="follow the axes of one bound cache|only a part of the heads"):
        select(locate(view(base), [plane_of(c, i, form) for i, c in enumerate(base)]), [])


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_selected_of_any_view_is_what_torch_reads(name: str) -> None:
    form, shape = SHAPES[name]
    checked = 0
    for seed in range(600):
        r = random.Random(f"{name} {seed}")
        base, caches, planes = planes_of(form, shape, r)
        view = a_view(base if r.random() < 0.5 else r.choice(caches), r)
        try:
            region = locate(view, planes)
            indices = [
                torch.tensor([r.randrange(-n, n) for _ in range(3)])
                if r.random() < 0.3 and d.axis not in "HDR"
                else None
                for n, d in zip(view.shape, region.dims, strict=True)
            ]
            selection = select(region, indices)
        except RewriteError:
            continue
        plane = region.plane
        table = torch.arange(plane.size("B") * plane.columns).view(-1, plane.columns) if plane.paged else None
        slots = selection.slots(table, torch.device("cpu"))
        rows = rows_at(caches[plane.layer], plane, slots)
        expected = view[tuple(slice(None) if i is None else i for i in indices)]
        told = f"seed {seed}: {list(view.shape)}, {view.stride()}, {region}, {indices}"
        assert torch.equal(selection.picked(rows), expected), told
        assert torch.equal(selection.rows(expected), rows), told
        checked += 1
    assert checked > 100
