"""HostPool: pages in host memory beside a pool, and the transfers between the two."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .descriptors import checked_pages
from .layout import counted
from .pool import PagePool
from .transfer import Transfer
from .transfer_queue import TransferQueue

Progress = Callable[[Transfer], None]


class HostPool:
    """Pages of a pool's layout in host memory, pinned where the pool is on CUDA, and what moves pages between the two.

    Transfers run beside the model, on a CUDA stream for each direction, from buffer to buffer: nothing is staged. No
    call waits on the host, except :meth:`offload` where the only host pages left are those that were freed in flight.
    The order is kept on the device:

    - A transfer begins after the work that is queued on the current stream when it is called, so that ``offload`` moves
      what was stored, and ``restore`` overwrites nothing that is still read.
    - Work that uses restored pages, or overwrites offloaded ones, is queued after :meth:`Transfer.wait`, or when
      :meth:`Transfer.done` says so. Free pages of ``pool`` then, too, since whoever gets them will write.
    - Transfers of one HostPool that have a page in common, on either side, follow one another by themselves.
    - Host pages may be freed in flight: they are not handed out before the transfer has arrived.

    On a CPU pool a transfer is a plain copy that has been made when the call returns.

    One thread at a time may use a HostPool and its transfers: nothing here takes a lock. No thread is started either,
    and callbacks run in the thread that calls.

    Args:
        pool: on CUDA or on the CPU; of any layout, base and stride.
        num_pages: host pages, back to back. For CUDA they are page-locked until the HostPool is dropped, which waits on
            the host for what is in flight. Locking took 0.15 s a GiB beside an H200.
        max_in_flight: bytes that are given to the device ahead in each direction. What goes beyond that is queued, and
            issued by later calls, :meth:`Transfer.done` included, or all at once by :meth:`Transfer.wait`. It bounds
            how long an urgent transfer, or a cancelled one, waits for others.

    Attributes:
        pool: the :class:`PagePool` of the host pages, with an allocator of its own; page verbs, :class:`PageStore` and
            ``save_pages`` take it, after :meth:`Transfer.synchronize`. Free its pages by :meth:`free`.

    Raises:
        ValueError: the pool is neither on CUDA nor on the CPU.
        RuntimeError: the memory cannot be page-locked.
    """

    def __init__(self, pool: PagePool, num_pages: int, *, max_in_flight: int = 1 << 30) -> None:
        if pool.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a pool on {pool.device} has no host tier; put it on CUDA or on the CPU")
        self.pool = PagePool(pool.layout, num_pages)
        if pool.device.type == "cuda":
            _pin(self.pool.buffer, pool.device)
        self._out = TransferQueue(pool, self.pool, max_in_flight=max_in_flight)
        self._in = TransferQueue(self.pool, pool, max_in_flight=max_in_flight)
        self._active: list[Transfer] = []
        self._unwritten: set[int] = set()
        streams = [queue.stream for queue in (self._out, self._in) if queue.stream is not None]
        weakref.finalize(self, _release, streams, self.pool.buffer, pool.buffer)

    def offload(
        self, page_ids: Tensor | Sequence[int], *, impl: str = "auto", progress: Progress | None = None
    ) -> Transfer:
        """Copy pages of the pool to host pages, which the transfer names in ``pages``, one for each.

        Args:
            page_ids: distinct. A tensor on CUDA is read back, which waits for the device.
            impl: ``"copy"``, ``"kernel"``, or ``"auto"``: see :class:`~pm_ops.transfer_queue.TransferQueue`.
            progress: called with the transfer when a part of it is found to have arrived, in the call that finds it.

        Raises:
            RuntimeError: fewer host pages are free, or a CUDA graph is being captured. Nothing is moved.
            ValueError: a page id is unknown or named twice, or ``impl`` cannot be had here.
        """
        ids = checked_pages(self._out.source, page_ids, distinct=True)
        self._out.require(impl)
        transfer = self._out.prepare(ids, self._alloc(ids), impl=impl, progress=progress)
        transfer.pages = transfer.target_pages
        try:
            return self._submit(transfer)
        except BaseException:
            self.free(transfer.pages)
            raise

    def restore(
        self,
        pages: Tensor | Sequence[int],
        page_ids: Tensor | Sequence[int],
        *,
        by_layer: bool = False,
        impl: str = "auto",
        progress: Progress | None = None,
    ) -> Transfer:
        """Copy host pages, which stay as they are, to as many pages of the pool.

        Args:
            pages: host pages that have an owner, such as ``offload(...).pages`` or some of them.
            page_ids: pages of the pool, distinct.
            by_layer: layer after layer, so that :meth:`Transfer.wait_layer` lets a model's first layer begin while
                later ones are still on their way. Padding between planes is not moved. A layer's bytes have to lie
                together in the page, as in ``page_major`` and in vLLM's BLNHC and BLHNC.
            impl, progress: as in :meth:`offload`.

        Raises:
            ValueError: page ids are unknown, named twice, or of different numbers; a host page was never written, since
                its offload was cancelled; the layout scatters a layer; or ``impl`` cannot be had here.
            RuntimeError: a host page has no owner, or a CUDA graph is being captured.
        """
        sources = checked_pages(self.pool, pages)
        targets = checked_pages(self._in.target, page_ids, distinct=True)
        if len(sources) != len(targets):
            raise ValueError(f"{counted(len(sources), 'host page')} for {len(targets)} of the pool; they go in pairs")
        self._settle()
        if self._held() or not all(map(self.pool.allocator.refcount, sources)):
            self._require_owned(dict.fromkeys(sources, 1), "restore")
        transfer = self._in.prepare(sources, targets, by_layer=by_layer, impl=impl, progress=progress)
        transfer.pages = transfer.source_pages
        missing = self._unwritten.intersection(sources)
        if missing:
            raise ValueError(f"host page {min(missing)} was never written: its offload was cancelled")
        return self._submit(transfer)

    def free(self, pages: Tensor | Sequence[int]) -> None:
        """One owner less for each host page, like :meth:`PageAllocator.free`. Those in flight are reused after that.

        Raises:
            ValueError: a page is unknown.
            RuntimeError: a page has no owner.
        """
        ids = checked_pages(self.pool, pages)
        self._settle()
        if self._active:
            times = Counter(ids)
            self._require_owned(times, "free")
            for transfer in self._active:  # becomes an owner of what it uses
                more = times.keys() & set(transfer.pages) - transfer.held
                self.pool.allocator.retain(more)
                transfer.held |= more
        self.pool.allocator.free(ids)
        self._unwritten.difference_update(ids)

    def _alloc(self, page_ids: list[int]) -> list[int]:
        """A host page for each page: in the same order, so that pages that are adjacent stay so."""
        allocator, count = self.pool.allocator, len(page_ids)
        if count > allocator.num_free:
            self._settle()
            waiting = sum(allocator.refcount(page) == times for page, times in self._held().items())
            if count <= allocator.num_free + waiting:
                while count > allocator.num_free and (user := next((t for t in self._active if t.held), None)):
                    user.synchronize()
                    self._settle()
        free = sorted(allocator.alloc(count))
        pages = [0] * count
        for place, page in zip(sorted(range(count), key=page_ids.__getitem__), free, strict=True):
            pages[place] = page
        return pages

    def _submit(self, transfer: Transfer) -> Transfer:
        self._settle()
        after = [other for other in self._active if other.queue is not transfer.queue and other.meets(transfer)]
        transfer.keeps = self
        self._active.append(transfer)
        transfer.queue.submit(transfer, after)
        return transfer

    def _require_owned(self, times: Mapping[int, int], verb: str) -> None:
        """Raise RuntimeError for a host page with fewer owners than this, not counting transfers."""
        held = self._held()
        for page, count in times.items():
            owners = self.pool.allocator.refcount(page) - held[page]
            if count > owners:
                often = f" {count} times" if count > 1 else ""
                raise RuntimeError(f"cannot {verb} host page {page}{often}: it has {counted(owners, 'owner')}")

    def _held(self) -> Counter[int]:
        """How many transfers own a host page that was freed in flight."""
        return Counter(page for transfer in self._active for page in transfer.held)

    def _settle(self) -> None:
        """Notice what has arrived, and give up what it held."""
        for queue in (self._out, self._in):
            queue.poll()
        for transfer in list(self._active):
            if transfer.cancelled and transfer.queue is self._out:
                self._unwritten.update({transfer.pages[i] for i in transfer.left_out} - transfer.held)
            if transfer.finished:
                self._active.remove(transfer)
                self.pool.allocator.free(transfer.held)


def _pin(buffer: Tensor, device: torch.device) -> None:
    """Page-lock memory as it is: torch's own pinned allocations are rounded up to a power of two."""
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 1))  # 1: for every device
    if error:
        raise RuntimeError(
            f"{counted(buffer.numel(), 'byte')} of host memory cannot be page-locked (CUDA error {error}); take fewer "
            "pages, or allow the process to lock more memory"
        )


def _release(streams: list[torch.cuda.Stream], host: Tensor, other: Tensor) -> None:
    """Give memory back when nothing is on its way any more."""
    for stream in streams:
        stream.synchronize()
    if streams:
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
