"""HostPool: pages in host memory beside a pool, and the transfers between the two."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import torch
from torch import Tensor

from .descriptors import checked_pages, require_memory
from .layout import counted
from .pool import PagePool
from .transfer import Transfer
from .transfer_queue import TransferQueue

Progress = Callable[[Transfer], None]


class HostPool:
    """Pages of a pool's layout in host memory, pinned where the pool is on CUDA, and what moves pages between the two.

    Transfers run beside the model, on CUDA streams for each direction, from buffer to buffer: nothing is staged. No
    call waits on the host, except :meth:`offload` where the only host pages left are those that were freed in flight.
    The order is kept on the device:

    - A transfer begins after the work that is queued on the current stream when it is called, so that ``offload`` moves
      what was stored, and ``restore`` overwrites nothing that is still read.
    - Work that uses restored pages, or overwrites offloaded ones, is queued after :meth:`Transfer.wait`, or when
      :meth:`Transfer.done` says so. Free pages of ``pool`` then, too, since whoever gets them will write.
    - Transfers of this HostPool that have a page in common, on either side, follow one another by themselves. Those of
      two HostPools, and of pools that overlay one buffer, do so by :meth:`Transfer.wait` alone.
    - Host pages may be freed in flight: they are not handed out before the transfer has arrived.

    On a CPU pool a transfer is a plain copy that has been made when the call returns.

    One thread at a time may use a HostPool and its transfers: nothing here takes a lock. No thread is started either.
    No method can be called while a CUDA graph is being captured.

    Args:
        pool: on CUDA or on the CPU; of any layout, base and stride.
        num_pages: host pages, back to back. For CUDA they are page-locked until :meth:`close`, or until the HostPool is
            dropped, which waits on the host for what is in flight. Locking took 0.15 s a GiB beside an H200. Drivers
            from r580 on lock less than 512 GiB at once.
        max_in_flight: bytes that are given to the device ahead in each direction; a page that is larger goes alone.
            What goes beyond that is queued, and issued by later calls, :meth:`Transfer.done` included, or all at once
            by :meth:`Transfer.wait`. It bounds how long an urgent transfer, or a cancelled one, waits for others.

    Attributes:
        pool: the :class:`PagePool` of the host pages, with an allocator of its own; page verbs, :class:`PageStore` and
            ``save_pages`` take it, after :meth:`Transfer.synchronize`. Free its pages by :meth:`free`.

    Raises:
        ValueError: the pool is neither on CUDA nor on the CPU, or ``max_in_flight`` is less than 1.
        RuntimeError: the memory cannot be page-locked.
    """

    def __init__(self, pool: PagePool, num_pages: int, *, max_in_flight: int = 1 << 30) -> None:
        require_memory(pool)
        if pool.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a pool on {pool.device} has no host tier; put it on CUDA or on the CPU")
        self.pool = PagePool(pool.layout, num_pages)
        streams: list[torch.cuda.Stream] = []
        if pool.device.type == "cuda":
            _pin(self.pool.buffer, pool.device)
        # Before anything else can fail; it keeps both buffers, which have to outlast what is on its way.
        memory = self.pool.buffer, pool.buffer
        self._memory = weakref.finalize(self, _release, os.getpid(), pool.device, streams, *memory)
        self._out = TransferQueue(pool, self.pool, max_in_flight=max_in_flight)
        self._in = TransferQueue(self.pool, pool, max_in_flight=max_in_flight)
        streams += self._out.streams + self._in.streams
        self._active: list[Transfer] = []
        self._unwritten: set[int] = set()

    def offload(
        self, page_ids: Tensor | Sequence[int], *, impl: str = "auto", progress: Progress | None = None
    ) -> Transfer:
        """Copy pages of the pool to host pages, which the transfer names in ``pages``, one for each.

        Args:
            page_ids: distinct. A tensor on CUDA is read back, which waits for the device.
            impl: ``"copy"``, ``"kernel"``, or ``"auto"``: see :class:`~pm_ops.transfer_queue.TransferQueue`.
            progress: called with the transfer when more of it was found to have arrived, once for all that was found,
                by ``done``, ``arrived``, ``wait``, ``wait_layer`` and ``synchronize`` of any transfer in this
                direction, after their own work; never by a method of the HostPool. It may use the pools, begin
                transfers and cancel them; what it raises comes out of the method that called it.

        Raises:
            RuntimeError: fewer host pages are free, a CUDA graph is being captured, or the device refuses the transfer.
                Nothing is on its way then.
            ValueError: a page id is unknown or named twice, or ``impl`` cannot be had here.
        """
        self._settle()
        ids = checked_pages(self._out.source, page_ids, distinct=True)
        self._out.require(impl)
        pages = self._alloc(ids)
        try:
            return self._submit(self._out.prepare(ids, pages, impl=impl, progress=progress), pages)
        except BaseException:
            self._give_up(pages)
            raise

    def restore(
        self,
        host_pages: Tensor | Sequence[int],
        page_ids: Tensor | Sequence[int],
        *,
        by_layer: bool = False,
        impl: str = "auto",
        progress: Progress | None = None,
    ) -> Transfer:
        """Copy host pages, which stay as they are, to as many pages of the pool.

        Args:
            host_pages: those that have an owner, such as ``offload(...).pages`` or some of them.
            page_ids: pages of the pool, distinct.
            by_layer: layer after layer, so that :meth:`Transfer.wait_layer` lets a model's first layer begin while
                later ones are still on their way. Padding between planes is not moved. A layer's bytes have to lie
                in few places of the page, as in ``page_major``, in vLLM's BLNHC and BLHNC, and in HiCache's
                ``page_first_direct``.
            impl, progress: as in :meth:`offload`.

        Raises:
            ValueError: page ids are unknown, named twice, or of different numbers; a host page was left out by its
                offload, and not freed and allocated again since; the layout scatters a layer; or ``impl`` cannot be had
                here.
            RuntimeError: a host page has no owner, a CUDA graph is being captured, or the device refuses the transfer.
                Nothing is on its way then.
        """
        self._settle()  # the state that is checked is the one in which the transfer begins
        sources = checked_pages(self.pool, host_pages)
        targets = checked_pages(self._in.target, page_ids, distinct=True)
        if len(sources) != len(targets):
            raise ValueError(f"{counted(len(sources), 'host page')} for {len(targets)} of the pool; they go in pairs")
        if self._held() or not all(map(self.pool.allocator.refcount, sources)):
            self._require_owned(dict.fromkeys(sources, 1), "restore")
        transfer = self._in.prepare(sources, targets, by_layer=by_layer, impl=impl, progress=progress)
        missing = self._unwritten.intersection(sources)
        if missing:
            raise ValueError(
                f"host page {min(missing)} was never written: its offload was cancelled, or failed. To fill it in "
                "another way, free it and take a page of host.pool.allocator"
            )
        return self._submit(transfer, transfer.source_pages)

    def free(self, host_pages: Tensor | Sequence[int]) -> None:
        """One owner less for each host page, like :meth:`PageAllocator.free`. Those in flight are reused after that.

        Raises:
            ValueError: a page is unknown.
            RuntimeError: a page has no owner.
        """
        self._settle()
        ids = checked_pages(self.pool, host_pages)
        if self._active:
            times = Counter(ids)
            self._require_owned(times, "free")
            for transfer in self._active:  # becomes an owner of what it uses
                more = times.keys() & set(transfer.pages) - transfer.held
                self.pool.allocator.retain(more)
                transfer.held |= more
        self._give_up(ids)

    def close(self) -> None:
        """Wait on the host until all transfers have arrived, and unlock the memory. Nothing can be moved after that."""
        if self._memory.alive:
            for transfer in self._active:
                transfer.queue.finish(transfer)
            self._settle()
            self._memory()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a HostPool is neither copied nor pickled: its memory is one process's; make another")

    def __repr__(self) -> str:
        state = f"{self.pool.allocator.num_free} free" if self._memory.alive else "closed"
        size = f"{counted(self.pool.num_pages, 'page')} of {self.pool.layout.page_bytes} B"
        return f"HostPool({size}, {state}, for {self._out.source!r})"

    def _alloc(self, page_ids: list[int]) -> list[int]:
        """A host page for each page: in the same order, so that pages that are adjacent stay so."""
        allocator, count = self.pool.allocator, len(page_ids)
        if count > allocator.num_free:
            waiting = sum(allocator.refcount(page) == times for page, times in self._held().items())
            if count <= allocator.num_free + waiting:
                while count > allocator.num_free:
                    user = next(transfer for transfer in self._active if transfer.held)
                    user.queue.finish(user)
                    self._settle()
            else:
                raise RuntimeError(
                    f"out of host pages: {count} asked for, {allocator.num_free} of {allocator.num_pages} free, "
                    f"{waiting} more when transfers have arrived; free some first, or make a HostPool of more"
                )
        free = sorted(allocator.alloc(count))
        pages = [0] * count
        for place, page in zip(sorted(range(count), key=page_ids.__getitem__), free, strict=True):
            pages[place] = page
        return pages

    def _submit(self, transfer: Transfer, host_pages: list[int]) -> Transfer:
        transfer.pages = host_pages
        after = [other for other in self._active if other.queue is not transfer.queue and other.meets(transfer)]
        if transfer.steps:
            transfer.keeps = self
            transfer.queue.submit(transfer, after)
            self._active.append(transfer)
        return transfer

    def _give_up(self, pages: Iterable[int]) -> None:
        """One owner less for each page. With the last one goes what is known of its bytes."""
        self.pool.allocator.free(pages)
        if self._unwritten:
            self._unwritten.difference_update(page for page in pages if not self.pool.allocator.refcount(page))

    def _require_owned(self, times: Mapping[int, int], verb: str) -> None:
        """Raise RuntimeError for a host page with fewer owners than this, not counting transfers."""
        held = self._held()
        for page, count in times.items():
            owners = self.pool.allocator.refcount(page) - held[page]
            if count > owners:
                often = f" {count} times" if count > 1 else ""
                raise RuntimeError(
                    f"cannot {verb} host page {page}{often}: it has {counted(owners, 'owner')}; an offload's pages "
                    "have one until they are freed"
                )

    def _held(self) -> Counter[int]:
        """How many transfers own a host page that was freed in flight."""
        return Counter(page for transfer in self._active for page in transfer.held)

    def _settle(self) -> None:
        """Notice what has arrived, and give up what it held. Calls nothing of the user's."""
        if not self._memory.alive:
            raise RuntimeError("this HostPool was closed, and its memory is not the GPU's to reach any more")
        for queue in (self._out, self._in):
            queue.poll()
        for transfer in list(self._active):
            if transfer.cancelled and transfer.queue is self._out:
                self._unwritten.update(transfer.pages[i] for i in transfer.left_out)
            if transfer.finished:
                self._active.remove(transfer)
                self._give_up(transfer.held)


def _pin(buffer: Tensor, device: torch.device) -> None:
    """Page-lock memory as it is: torch's own pinned allocations are rounded up to a power of two."""
    with torch.cuda.device(device):
        error = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 1))  # 1: for every device
        if error:
            with suppress(RuntimeError):
                torch.ones(1, device=device)  # a launch asks for the thread's last error: this one, not the user's next
    if error:
        raise RuntimeError(
            f"{counted(buffer.numel(), 'byte')} of host memory cannot be page-locked (CUDA error {error}); take fewer "
            "pages (drivers from r580 on lock less than 512 GiB at once), or allow the process to lock more memory"
        )


def _release(pid: int, device: torch.device, streams: list[torch.cuda.Stream], host: Tensor, other: Tensor) -> None:
    """Give memory back when nothing is on its way any more. A child that was forked has none of it, nor CUDA."""
    if os.getpid() != pid:
        return
    for stream in streams:
        stream.synchronize()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
