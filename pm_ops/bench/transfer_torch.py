"""Plain torch between device and host, and between layouts: a copy for each run of bytes, or a gather and one copy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .implementation import TRANSFER, Bound, Implementation, Unsupported
from .memory import LAYER_MAJOR, PAGE_MAJOR
from .streams import Two
from .transfer_cases import RepackShape
from .transfer_work import RepackWork, TransferWork

Copies = list[tuple[Tensor, Tensor]]
"""Targets and their sources."""
_TURN = 16
"""Copies in one direction before as many in the other, where both go at once."""


def one_by_one(work: TransferWork, layout: str) -> Bound:
    """A copy for each part of each page: one page-major, two a layer layer-major. Views are made ahead of the call."""
    device, host = work.sides(layout)
    copies = [
        *(_pairs(host, device, work.spare, work.src) if work.shape.verb in ("offload", "both ways") else ()),
        *(_pairs(device, host, work.dst, work.saved) if work.shape.verb != "offload" else ()),
    ]
    if work.shape.verb != "both ways":
        return Bound(lambda: _copy(copies))
    half, streams = len(copies) // 2, Two(work.pool.device)
    return Bound(lambda: _alternately(streams, copies[:half], copies[half:]))


class TorchStaged(Implementation):
    """Pages gathered into one run of device memory, which is one copy; and back. On the host they lie side by side."""

    name = "torch_staged"
    kinds = TRANSFER
    scope = "it is a second way to move pages to the host and back, and nothing else"
    compiles = False

    def transfer(self, work: TransferWork, layout: str) -> Bound:
        """``index_select`` and one copy to the host; one copy from it and ``index_copy_``.

        Layer-major the two tensors of a layer can come before the next layer's, and do so where layers are waited for.
        """
        (device, host), verb = work.sides(layout), work.shape.verb
        if verb == "offload":
            return Bound(*_gather_and_copy(device, work.src))
        restore, incoming = _copy_and_scatter(device, work.dst)
        streams, layers = Two(device.device), work.shape.layers if layout == LAYER_MAJOR else 1

        def by_layer(waited: int) -> None:
            """The current stream waits for so many layers."""
            streams.begin()
            for layer in range(layers):
                with streams.on(0):
                    restore(slice(2 * layer, 2 * layer + 2))
                if layer + 1 == waited:
                    streams.end()

        def prepare() -> None:
            incoming.copy_(host[:, work.saved])

        if verb == "both ways":
            offload, outgoing = _gather_and_copy(device, work.src)
            return Bound(lambda: streams.run(offload, restore), outgoing, prepare=prepare)
        verbs: dict[str, Callable[[], None]] = {
            "restore": restore,
            "first layer": lambda: by_layer(1),
            "last layer": lambda: by_layer(layers),
        }
        return Bound(verbs[verb], prepare=prepare)


def _gather_and_copy(cache: Tensor, ids: list[int]) -> tuple[Callable[[], None], Tensor]:
    """A call, and the pinned memory that the pages are in after it, ``[parts, count, part_bytes]``."""
    words, staged, run = _staging(cache, len(ids))
    pages = torch.tensor(ids, device=cache.device)

    def call() -> None:
        torch.index_select(words, 1, pages, out=staged)
        run.copy_(staged, non_blocking=True)

    return call, run.view(torch.uint8)


def _copy_and_scatter(cache: Tensor, ids: list[int]) -> tuple[Callable[..., None], Tensor]:
    """A call for some or all parts, and the pinned memory that it takes the pages from."""
    words, staged, run = _staging(cache, len(ids))
    pages = torch.tensor(ids, device=cache.device)

    def call(parts: slice = slice(None)) -> None:
        staged[parts].copy_(run[parts], non_blocking=True)
        words[parts].index_copy_(1, pages, staged[parts])

    return call, run.view(torch.uint8)


def _staging(cache: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The cache, device memory and pinned memory for so many of its pages, in words that can be indexed fast."""
    words = cache.view(torch.int64 if cache.shape[2] % 8 == 0 else torch.uint8)
    staged = words.new_empty(len(words), count, words.shape[2])
    return words, staged, torch.empty(staged.shape, dtype=words.dtype, pin_memory=cache.is_cuda)


def repack(work: RepackWork, layout: str) -> Bound:
    """One gather and one assignment of the target's rows, over views that name the same elements."""
    if layout != PAGE_MAJOR:
        raise Unsupported("a layer-major cache is no pages of a layout: there is nothing to repack")
    shape = work.shape
    source, target = (_by_token(shape, side, pool.pages) for side, pool in enumerate((work.source, work.target)))
    if shape.heads is not None:
        source = source[:, :, :, :, shape.heads[0] : shape.heads[0] + shape.heads[2]]
    small, large = shape.page_sizes
    if small == large:
        return Bound(lambda: _assign(target, work.dst, source[work.src]))
    target = target.unflatten(1, (large // small, small))
    return Bound(lambda: _assign(target, work.dst, source[work.src].unflatten(0, (-1, large // small))))


def _by_token(shape: RepackShape, side: int, pages: Tensor) -> Tensor:
    """Pages as ``[pages, tokens, layers, K and V, heads, head_dim]``, a view."""
    heads = shape.heads[2] if side == 1 and shape.heads is not None else shape.kv_heads
    layers, tokens, dim = shape.layers, shape.page_sizes[side], shape.head_dim
    elements = pages.view(shape.dtypes[side])
    if shape.formats[side] == "page_major":
        return elements.view(-1, layers, 2, tokens, heads, dim).permute(0, 3, 1, 2, 4, 5)
    return elements.view(-1, layers, tokens, heads, 2, dim).permute(0, 2, 1, 4, 3, 5)


def _assign(target: Tensor, ids: Tensor, rows: Tensor) -> None:
    target[ids] = rows.to(target.dtype)


def _pairs(target: Tensor, source: Tensor, to: list[int], at: list[int]) -> Copies:
    """Part after part, so that the first layers' come first."""
    parts = zip(target, source, strict=True)
    return [(there[t], here[s]) for there, here in parts for t, s in zip(to, at, strict=True)]


def _copy(copies: Copies) -> None:
    for target, source in copies:
        target.copy_(source, non_blocking=True)


def _alternately(streams: Two, first: Copies, second: Copies) -> None:
    """Both lists at once, some copies of one and some of the other, so that neither waits for the other's calls."""
    streams.begin()
    for i in range(0, len(first), _TURN):
        for number, copies in enumerate((first, second)):
            with streams.on(number):
                _copy(copies[i : i + _TURN])
    streams.end()
