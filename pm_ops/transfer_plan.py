"""How a transfer of pages is made: which implementation moves which bytes, in which steps. No byte moves here."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from operator import sub
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .layout import PageLayout
from .pool import PagePool

KERNEL_BELOW, KERNEL_BELOW_BY_LAYER = 32 << 10, 128 << 10
"""Bytes of a run, on average, below which ``impl="auto"`` is the kernel: of whole pages, and of the parts of a transfer
by layer. :class:`~pm_ops.transfer_queue.TransferQueue` has the measurements."""
STEP_LEAST, STEP_MOST = 4 << 20, 64 << 20
"""Bytes that are given to the device at once. Copies begin with the least: the driver starts none before it has all."""
_LAYER_RUNS = 4  # of a page: K, V, and the scales of each

Impl = Literal["copy", "kernel"]


class Part(NamedTuple):
    """The bytes of every page that are moved together: the whole page, or a run of one layer's."""

    layer: int | None
    offset: int
    nbytes: int


class Step(NamedTuple):
    """What is given to the device at once: a part of some pages."""

    part: Part
    first: int
    """The runs from ``first`` to ``last``; for the kernel, the pages."""
    last: int
    whole: int
    """How many pages are complete when this has arrived."""
    nbytes: int


class PageRuns(NamedTuple):
    """Pages that are copied together: int64 tensors of one length."""

    source: Tensor
    """Where the first page of each begins in the source's buffer, in bytes."""
    target: Tensor
    pages: Tensor
    """How many there are, back to back on both sides."""


class TransferPlan(NamedTuple):
    """What is to be done, in order."""

    impl: Impl
    order: list[int]
    """Positions in the lists of pages, in the order in which these are moved: ascending by source page."""
    pages: tuple[Tensor, Tensor]
    """Source and target page ids in that order, int64."""
    runs: PageRuns | None
    """For copies."""
    steps: deque[Step]


def parts_of(layout: PageLayout, by_layer: bool) -> list[Part]:
    """What of a page is moved together, in order. Raises ValueError where a layer's bytes are in too many places."""
    if not by_layer:
        return [Part(None, 0, layout.page_bytes)]
    found = {layer: layout.layer_runs([layer]) for layer in layout.layers}
    for layer, runs in found.items():
        if len(runs) > _LAYER_RUNS:
            raise ValueError(
                f"by_layer: {layout.name} has the bytes of layer {layer} in {len(runs)} places of every page, and each "
                f"would be a copy of its own; {_LAYER_RUNS} are supported: use a layout that keeps a layer together, "
                "such as page_major, or move whole pages"
            )
    return [Part(layer, *run) for layer, runs in found.items() for run in runs]


def plan_transfer(
    source: PagePool,
    target: PagePool,
    source_pages: list[int],
    target_pages: list[int],
    *,
    by_layer: bool,
    impl: Impl | None,
    most: int,
) -> TransferPlan:
    """Cut a transfer into steps. Whole pages that are adjacent on both sides are copied as one run.

    In lists of Python: for some hundred pages they take less time than a dozen calls of torch.

    Args:
        source_pages, target_pages: at least one.
        impl: None takes the kernel for short runs.
        most: bytes of a step, unless a page alone has more.
    """
    count, parts, page_bytes = len(source_pages), parts_of(source.layout, by_layer), source.layout.page_bytes
    order = sorted(range(count), key=source_pages.__getitem__)
    ours, theirs = [source_pages[i] for i in order], [target_pages[i] for i in order]
    firsts = list(range(count))
    if not by_layer and source.page_stride == target.page_stride == page_bytes:
        strides = zip(map(sub, ours[1:], ours), map(sub, theirs[1:], theirs), strict=True)
        firsts = [0, *(i for i, stride in enumerate(strides, 1) if stride != (1, 1))]
    if impl is None:
        mean = sum(part.nbytes for part in parts) * count / (len(firsts) * len(parts))
        impl = "kernel" if mean < (KERNEL_BELOW_BY_LAYER if by_layer else KERNEL_BELOW) else "copy"
    ends = _ends(count, max(part.nbytes for part in parts), STEP_LEAST if impl == "copy" else STEP_MOST, most)
    cuts, pages = [0, *ends], (_int64(ours), _int64(theirs))
    runs = None
    if impl == "copy":
        firsts = sorted({*firsts, *ends[:-1]})
        begins = _int64(firsts)
        runs = PageRuns(
            source.base + pages[0][begins] * source.page_stride,
            target.base + pages[1][begins] * target.page_stride,
            _int64(list(map(sub, [*firsts[1:], count], firsts))),
        )
        cuts = [bisect_left(firsts, end) for end in cuts]
    steps: deque[Step] = deque()
    for part in parts:
        for i, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            whole = end if part is parts[-1] else 0
            steps.append(Step(part, cuts[i], cuts[i + 1], whole, (end - begin) * part.nbytes))
    return TransferPlan(impl, order, pages, runs, steps)


def _ends(count: int, page_bytes: int, first: int, most: int) -> list[int]:
    """Where the pages are cut into steps: the first of so many bytes, each later one twice as many up to the most."""
    ends, most = [0], min(most, STEP_MOST)
    size = min(first, most)
    while ends[-1] < count:
        ends.append(min(ends[-1] + max(size // page_bytes, 1), count))
        size = min(2 * size, most)
    return ends[1:]


def _int64(numbers: list[int]) -> Tensor:
    """As ``torch.tensor``, which takes each number by itself, several times as long."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)
