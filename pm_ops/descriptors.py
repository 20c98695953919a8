"""Pages as transfer engines take them: registered regions, and lists of (address, bytes). No byte moves here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .hybrid import HybridPool
from .layout import PageLayout, PageRun, counted
from .ops._common import page_ids
from .pool import PagePool


class Region(NamedTuple):
    """Memory to register with a transfer engine before any of it is named in a descriptor."""

    address: int
    nbytes: int
    device: torch.device


class Descriptor(NamedTuple):
    """``nbytes`` contiguous bytes from ``address`` on, in the address space of the process that owns the pool."""

    address: int
    nbytes: int


class Copy(NamedTuple):
    """``nbytes`` bytes from address ``src`` to address ``dst``."""

    src: int
    dst: int
    nbytes: int


def page_regions(*pools: PagePool) -> list[Region]:
    """The memory of these pools, first page to last. Pools that lie in one another's gaps share a region."""
    found: list[Region] = []
    spans = [(_address(pool), (pool.num_pages - 1) * pool.page_stride + pool.layout.page_bytes, pool) for pool in pools]
    for address, nbytes, pool in sorted(spans, key=lambda span: (str(span[2].device), span[0])):
        last = found[-1] if found else None
        if last and last.device == pool.device and address < last.address + last.nbytes:
            end = max(last.address + last.nbytes, address + nbytes)
            found[-1] = last._replace(nbytes=end - last.address)
        else:
            found.append(Region(address, nbytes, pool.device))
    return found


def page_descriptors(
    pool: PagePool, pages: Tensor | Sequence[int], layers: Iterable[int] | None = None
) -> list[Descriptor]:
    """Where the bytes of these pages lie: the shortest list in the order of ``pool.gather(pages)``.

    What lies back to back in that order is one run; no byte that was not asked for is in any.

    Args:
        pages: page ids in any order, repeated or not; -1 is refused.
        layers: the data of these layers alone, page by page, ascending by address within a page: for transfers that
            follow the layers, and for pipeline parallelism. In ``page_major`` one run a page for a range of layers.
            Default: whole pages, padding included.
    """
    start, stride = _address(pool), pool.page_stride
    runs = _runs(pool.layout, layers)
    found: list[Descriptor] = []
    begin = end = 0  # the run that may still grow
    for page in checked_pages(pool, pages):
        for offset, nbytes in runs:
            address = start + page * stride + offset
            if address != end:
                if end > begin:
                    found.append(Descriptor(begin, end - begin))
                begin = end = address
            end += nbytes
    if end > begin:
        found.append(Descriptor(begin, end - begin))
    return found


def pair_descriptors(src: Sequence[Descriptor], dst: Sequence[Descriptor]) -> list[Copy]:
    """The fewest copies that carry the bytes of ``src``, in order, to those of ``dst``.

    Transfer engines want both lists cut at the same places; sender's and receiver's pages rarely lie alike.

    Raises:
        ValueError: the two are not of the same number of bytes, or runs of ``dst`` overlap.
    """
    for side in (src, dst):
        if any(run.nbytes < 1 for run in side):
            raise ValueError("a run of less than one byte; make the lists with pm_ops.page_descriptors")
    sizes = [sum(run.nbytes for run in side) for side in (src, dst)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"src has {counted(sizes[0], 'byte')}, dst {sizes[1]}; name as many pages of the same layout")
    ordered = sorted(dst)
    for before, after in pairwise(ordered):
        if before.address + before.nbytes > after.address:
            raise ValueError(f"dst has the byte at {after.address:#x} twice; each page can be written once")
    copies = []
    i = j = read = written = 0  # bytes read of src[i], and written of dst[j]
    while i < len(src):
        nbytes = min(src[i].nbytes - read, dst[j].nbytes - written)
        copies.append(Copy(src[i].address + read, dst[j].address + written, nbytes))
        read, written = read + nbytes, written + nbytes
        if read == src[i].nbytes:
            i, read = i + 1, 0
        if written == dst[j].nbytes:
            j, written = j + 1, 0
    return copies


def count_layer_major(pool: PagePool, pages: Tensor | Sequence[int], layers: Iterable[int] | None = None) -> int:
    """How many runs the same pages would be with every plane a tensor of its own, adjacent pages merged there too."""
    ids = checked_pages(pool, pages)
    wanted = known_layers(pool.layout, layers) if layers is not None else set(pool.layout.layers)
    planes = sum(p.layer in wanted for p in pool.layout.planes)
    return planes * sum(i == 0 or page != ids[i - 1] + 1 for i, page in enumerate(ids))


def checked_pages(pool: PagePool, pages: Tensor | Sequence[int], *, distinct: bool = False) -> list[int]:
    """Page ids as a list. Raises ValueError for what is no page of the pool, -1, fractions and masks included."""
    _require_pool(pool)
    ids = page_ids(pages)
    if ids and not (min(ids) >= 0 and max(ids) < pool.num_pages):
        wrong = next(page for page in ids if not 0 <= page < pool.num_pages)
        raise ValueError(f"page {wrong} is none of the pool's pages 0 to {pool.num_pages - 1}; each has to be there")
    if distinct and len(set(ids)) < len(ids):
        twice = Counter(ids).most_common(1)[0][0]
        raise ValueError(f"page {twice} is named twice; each page can be written once")
    return ids


def _runs(layout: PageLayout, layers: Iterable[int] | None) -> Sequence[PageRun]:
    if layers is None:
        return [PageRun(0, layout.page_bytes)]
    return layout.layer_runs(known_layers(layout, layers))


def known_layers(layout: PageLayout, layers: Iterable[int]) -> set[int]:
    """The layers as a set. Raises ValueError for one that the layout does not have."""
    wanted = set(layers)
    unknown = sorted(wanted - set(layout.layers))
    if unknown:
        raise ValueError(f"no layer {unknown[0]!r} in this layout, whose layers are {list(layout.layers)}")
    return wanted


def require_memory(pool: PagePool) -> None:
    """Raise ValueError for what has no bytes to save, send or fill."""
    _require_pool(pool)
    if pool.device.type == "meta":
        raise ValueError("a pool on the meta device has no memory, and no addresses")


def _require_pool(pool: object) -> None:
    if not isinstance(pool, PagePool):
        remedy = f"; {pool.choice}" if isinstance(pool, HybridPool) else ""
        raise ValueError(f"pool must be a PagePool, such as HostPool.pool, got {type(pool).__name__}{remedy}")


def _address(pool: PagePool) -> int:
    """Address of page 0."""
    require_memory(pool)
    return pool.buffer.data_ptr() + pool.base
