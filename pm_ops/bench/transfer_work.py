"""The data of the suite ``transfer``: device and host memory in both layouts, and two pools to repack between."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .. import HostPool, PagePool, RepackPlan
from ..ops._common import bits
from .limits import other_gpu
from .memory import LAYER_MAJOR, PAGE_MAJOR, poison
from .transfer_cases import RepackShape, TransferShape


class Sides(NamedTuple):
    """A cache and the place on the host for some of its pages, both uint8 ``[parts, pages, part_bytes]``.

    Page-major a page is one part; layer-major it is ``2 * layers`` of them, each in a tensor of its own.
    """

    device: Tensor
    host: Tensor
    """Pinned where the cache is on a GPU."""


@dataclass
class TransferWork:
    """Which pages go where. All ids are lists, as schedulers have them, in an order of no meaning."""

    shape: TransferShape
    pool: PagePool
    host: HostPool
    src: list[int]
    """Device pages to offload."""
    dst: list[int]
    """Device pages to restore to; none of ``src``."""
    saved: list[int]
    """Host pages to restore, allocated."""
    spare: list[int]
    """The other host pages, free."""
    _sides: dict[str, Sides] = field(default_factory=dict)

    def sides(self, layout: str) -> Sides:
        """Device and host memory in this layout; the host's page-major memory is the host pool's."""
        if layout not in self._sides:
            self._sides[layout] = self._page_major() if layout == PAGE_MAJOR else self._layer_major()
        return self._sides[layout]

    def first_layer(self, layout: str) -> Tensor:
        """Layer 0 of every device page, a view ``[pages, layer_bytes]`` or ``[2, pages, layer_bytes / 2]``."""
        device = self.sides(layout).device
        if layout == LAYER_MAJOR:
            return device[:2]
        return device[0, :, : self.pool.layout.page_bytes // self.shape.layers]

    def _page_major(self) -> Sides:
        return Sides(self.pool.pages[None], self.host.pool.pages[None])

    def _layer_major(self) -> Sides:
        parts = 2 * self.shape.layers
        size = self.pool.layout.page_bytes // parts
        device = poison(self.pool.buffer.numel(), self.pool.device).view(parts, -1, size)
        pinned = self.pool.device.type == "cuda"
        host = torch.empty(parts, self.shape.host_pages, size, dtype=torch.uint8, pin_memory=pinned)
        return Sides(device, host)


def transfer_work(shape: TransferShape, device: torch.device, fill: bool = True) -> TransferWork:
    """Make the data of a transfer. What the memory holds is up to the check, which fills it anew each time."""
    torch.manual_seed(0)
    layout = shape.layout
    pool = PagePool(layout, shape.pages, buffer=poison(shape.pages * layout.page_bytes, device, fill))
    host = HostPool(pool, num_pages=shape.host_pages)
    saved = host.pool.allocator.alloc(shape.count)
    spare = sorted(set(range(shape.host_pages)) - set(saved))
    ids = torch.randperm(shape.pages).tolist()
    return TransferWork(shape, pool, host, ids[: shape.count], ids[-shape.count :], saved, spare)


@dataclass
class RepackWork:
    """Two pools of random bytes, and the pages of one sequence in each."""

    shape: RepackShape
    plan: RepackPlan
    source: PagePool
    target: PagePool
    src: Tensor
    dst: Tensor

    def expected(self) -> Tensor:
        """The target's buffer as it has to be after the call: the sequence's rows written by plain indexing."""
        right = PagePool(self.plan.target, self.target.num_pages, buffer=self.target.buffer.clone())
        t = torch.arange(self.shape.tokens, device=self.src.device)
        sides = ((self.src, self.source), (self.dst, self.target))
        rows, cells = ((ids[t // pool.page_size].to(pool.device), (t % pool.page_size).to(pool.device))
                       for ids, pool in sides)  # fmt: skip
        first, at, count = self.shape.heads or (0, 0, self.shape.kv_heads)
        for ours, theirs in self.plan.layer_pairs:
            for kind in self.plan.source.kinds(ours):
                moved = bits(self.source.view(ours, kind))[(*rows, slice(first, first + count))].to(right.device)
                wide = moved.view(self.shape.dtype).to(self.shape.dtypes[1])
                bits(right.view(theirs, kind))[(*cells, slice(at, at + count))] = bits(wide)
        return right.buffer


def repack_work(shape: RepackShape, device: torch.device, fill: bool = True) -> RepackWork:
    """Make the data of a repack: pools twice as large as the sequence, its pages shuffled."""
    torch.manual_seed(0)
    plan, pools, ids = shape.plan, [], []
    other = other_gpu(device) if shape.peer else device
    for layout, place in ((plan.source, device), (plan.target, other)):
        count = shape.tokens // layout.page_size
        pools.append(PagePool(layout, 2 * count, buffer=poison(2 * count * layout.page_bytes, place, fill)))
        ids.append(torch.randperm(2 * count, device=device)[:count].clone())
    return RepackWork(shape, plan, pools[0], pools[1], ids[0], ids[1])
