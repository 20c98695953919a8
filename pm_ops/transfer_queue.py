"""TransferQueue: moves pages between two pools of equal layout, one transfer after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .capture import refuse_capture
from .copy_engine import Runs, copy_runs
from .index_ring import IndexRing
from .ops._common import kernel
from .pool import PagePool
from .transfer import Transfer
from .transfer_plan import Impl, Step, parts_of, plan_transfer

TURN = 8 << 20
"""Bytes after which the other stream's turn begins, some microseconds later, when the step that is under way ends."""


@dataclass(slots=True)
class MovePages:
    """Arguments of the kernel: ``nbytes`` of every page, from ``near`` to ``far`` (``out``) or back.

    Args:
        near, far: uint8 buffers: a GPU's, and a pinned one of the host. They may begin anywhere.
        pairs: pinned int64 ``[n, 2]``: the page in ``near`` and the one in ``far``. Stays as it is until the kernel has
            run.
        starts: where page 0 has these bytes, in ``near`` and in ``far``.
        strides: bytes from one page to the next in each.
    """

    near: Tensor
    far: Tensor
    pairs: Tensor
    starts: tuple[int, int]
    strides: tuple[int, int]
    nbytes: int
    out: bool


_move_pages = kernel("transfer.move_pages")


class TransferQueue:
    """Moves pages from one pool to another of equal layout, in the order of the calls, on CUDA streams of its own.

    Two streams take turns, each behind the other: the copy engine keeps to a stream that has work, and so lets others,
    such as an engine's copy of the tokens that it sampled, in between two turns alone. On an H200 with 1 GiB in flight
    that copy came up to 1.2 ms late with turns of 64 MiB, which is what the steps of a long transfer grow to, and 19 ms
    with a single stream, for which the engine stood still.

    Bytes go straight from buffer to buffer, so that no staging memory is needed, nor bounded. Pages that are adjacent
    on both sides move as one run. Two implementations:

    - ``"copy"``: the GPU's copy engines, which leave all multiprocessors to the model. 0.5 to 1 µs of host time a run.
    - ``"kernel"``: a kernel of 32 programs that reads and writes the host's memory itself, for a GPU and pinned memory.
      One launch, whatever the number of pages, whose ids it reads from a ring of pinned memory: 1 MiB, or more where
      more ids are in flight.
    - ``"auto"``: the kernel where runs are shorter than 32 KiB on average; by layer, than 128 KiB.

    256 scattered pages to and from the host by a single stream a direction, in GB/s, on an H200 whose pinned copies
    reach 54.6 and 55.1 (with two, 4 GiB of pages of 2 MiB reach 0.97 of them):

    =======  ===========  ===============  ===========  ===============
    page     copy         both directions  kernel       both directions
    =======  ===========  ===============  ===========  ===============
    2 MiB    55.4 / 55.1  100              50.7 / 47.6  62
    512 KiB  55.1 / 54.8  100              51.0 / 49.0  68
    128 KiB  53.9 / 53.2  97               50.8 / 49.2  71
    64 KiB   52.3 / 52.5  95               50.7 / 48.8  70
    32 KiB   51.2 / 48.6  89               49.6 / 47.8  68
    8 KiB    42.2 / 42.2  73               44.0 / 41.7  57
    =======  ===========  ===============  ===========  ===============

    That is the device's time, of calls made while it had other work to do. The threshold is where the copy engines are
    no slower, and both directions at once faster by a third; what they take of the host, 0.5 µs a run, is less than the
    1.5 µs a page that the call takes with either. With some 15,000 copies pending, which is 1 GiB in runs of 64 KiB,
    the driver makes it wait: by layer, where a page is a run in each, that many are soon reached.

    Args:
        source, target: one on the CPU, the other there, too, or on CUDA; then the CPU's memory has to be pinned.
        max_in_flight: bytes that may have been issued and not arrived; a page that is larger goes alone. More is
            queued, and issued by later calls: of ``submit``, or of any method of a transfer, ``done`` included. So no
            call waits on the host for others.

    Raises:
        ValueError: the layouts differ, neither pool is on the CPU, or the host's memory is not pinned.
    """

    def __init__(self, source: PagePool, target: PagePool, *, max_in_flight: int = 1 << 30) -> None:
        if source.layout != target.layout:
            raise ValueError(
                f"pages move between equal layouts, got {source.layout.name} ({source.layout.fingerprint}) and "
                f"{target.layout.name} ({target.layout.fingerprint}); repack them with pm_ops.RepackPlan"
            )
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight={max_in_flight}: give the bytes that may be on their way, 1 or more")
        self.source, self.target = source, target
        self.max_in_flight = max_in_flight
        self.in_flight = 0
        self._queued: deque[Transfer] = deque()
        self._moving: deque[tuple[Transfer, Step, torch.cuda.Event | None]] = deque()
        self._news: dict[Transfer, None] = {}  # of which more was found to have arrived, and progress is to be told
        types = sorted(pool.device.type for pool in (source, target))
        if types not in (["cpu", "cpu"], ["cpu", "cuda"]):
            raise ValueError(
                f"pages move between the CPU and CUDA, or on the CPU, not from {source.device} to {target.device}; "
                "from one GPU to another pm_ops.RepackPlan moves them"
            )
        self._out = source.device.type == "cuda"
        near, far = (source, target) if self._out else (target, source)
        self.gpu = near.device if near.device.type == "cuda" else None
        if self.gpu is not None and not far.buffer.is_pinned():
            raise ValueError("the host's memory is not pinned, so that the GPU cannot reach it; use pm_ops.HostPool")
        self.streams = [torch.cuda.Stream(self.gpu) for _ in range(2)] if self.gpu is not None else []
        self.stream = self.streams[0] if self.streams else None
        """The one that has the next step."""
        self._turn = 0
        """Bytes of the steps that it was given since the other's turn."""
        self._ring = IndexRing() if self.gpu is not None else None
        """For the kernel, where that can be used."""

    def prepare(
        self,
        source_pages: Sequence[int],
        target_pages: Sequence[int],
        *,
        by_layer: bool = False,
        impl: str = "auto",
        progress: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """A transfer that is yet to be submitted.

        Args:
            source_pages: known to the pool; read until the transfer has arrived.
            target_pages: as many, distinct.
            by_layer: layer after layer instead of page after page, for :meth:`Transfer.wait_layer`; padding is not
                moved.
            impl: ``"copy"``, ``"kernel"``, or ``"auto"``.
            progress: for :meth:`tell`.

        Raises:
            ValueError: ``impl`` cannot be had here, or the layout scatters a layer's bytes over the page.
        """
        self.require(impl)
        transfer = Transfer(self, source_pages, target_pages)
        transfer.by_layer, transfer.progress = by_layer, progress
        if not transfer.source_pages:
            parts_of(self.source.layout, by_layer)
            return transfer
        chosen: Impl | None = "kernel" if impl == "kernel" else "copy"
        if impl == "auto" and self._ring is not None:
            chosen = None
        pages = transfer.source_pages, transfer.target_pages
        most = self.max_in_flight // 2  # so that the device has one step to do while it is given the next
        plan = plan_transfer(self.source, self.target, *pages, by_layer=by_layer, impl=chosen, most=most)
        transfer.impl, transfer.order, transfer.page_runs, transfer.steps = plan.impl, plan.order, plan.runs, plan.steps
        transfer.nbytes = sum(step.nbytes for step in plan.steps)
        if plan.impl == "kernel":
            transfer.pairs = torch.stack(plan.pages if self._out else plan.pages[::-1], 1)
        return transfer

    def require(self, impl: str) -> None:
        """Refuse an implementation that cannot be had, as :meth:`prepare` does."""
        if impl not in ("auto", "copy", "kernel"):
            raise ValueError(f'impl={impl!r}: give "auto", "copy" or "kernel"')
        if impl == "kernel" and self._ring is None:
            where = f"{self.source.device} to {self.target.device}"
            raise ValueError(f'impl="kernel" is for a GPU and pinned host memory, not from {where}; use "copy"')

    def submit(self, transfer: Transfer, after: Sequence[Transfer] = ()) -> None:
        """Begin a transfer after the work that is queued on the GPU's current stream.

        Args:
            after: transfers of other queues that come first.

        Raises:
            RuntimeError: it cannot be moved; nothing of it moves then, nor will.
        """
        if not transfer.steps:
            return
        self._refuse_capture()
        transfer.start = torch.cuda.current_stream(self.gpu).record_event() if self.gpu is not None else None
        transfer.after = [earlier for earlier in after if not earlier.finished]
        for earlier in transfer.after:
            if earlier.steps and transfer.reads_from(earlier):
                earlier.readers.append(transfer)
        self._queued.append(transfer)
        try:
            self.poll()
            transfer.require_all()
        except BaseException as error:
            transfer.progress = None
            self._abandon(transfer, error)
            raise

    def poll(self, needed: Callable[[], bool] = lambda: False) -> None:
        """Notice what has arrived, and issue what may be in flight; and, while ``needed()``, what may not.

        What arrives meanwhile makes no room, or the host could be held by one call as long as the device by the work.
        Calls nothing of the user's; and an error is not raised but kept by the transfer that it befell.
        """
        self._refuse_capture()
        self._notice()
        while self._push(needed):
            if self.stream is None:
                self._notice()

    def tell(self) -> None:
        """Call ``progress`` of each transfer of which :meth:`poll` has found more to have arrived since it was called.

        The last thing that a method of a transfer does, since a callback may do anything that its caller may.
        """
        while self._news:
            transfer = next(iter(self._news))
            del self._news[transfer]
            if transfer.progress is not None:
                transfer.progress(transfer)

    def finish(self, transfer: Transfer) -> None:
        """Wait on the host until nothing of a transfer moves any more."""
        self.poll()
        while not transfer.finished:
            self.wait_for_step()
            self.poll()

    def wait_for_step(self) -> None:
        """Wait on the host for the earliest step on its way."""
        if self._moving and (mark := self._moving[0][2]) is not None:
            mark.synchronize()

    def issue(self, transfer: Transfer) -> None:
        """Issue what is queued up to the end of a transfer, whatever is in flight."""
        while transfer.steps:
            self._push(lambda: True)

    def drop(self, transfer: Transfer, error: BaseException | None = None) -> None:
        """Issue no more of a transfer, nor of those that are queued and read what it was to write."""
        if transfer.steps:
            transfer.steps.clear()
            transfer.after.clear()
            transfer.cancelled, transfer.error = True, error
            self._queued.remove(transfer)
            self._let_go(transfer)
            for reader in transfer.readers:
                reader.queue.drop(reader, error)
            transfer.readers.clear()

    def hold_current_stream(self, mark: torch.cuda.Event | None) -> None:
        """The GPU's current stream waits for the mark."""
        if mark is not None and self.gpu is not None:
            self._refuse_capture()
            torch.cuda.current_stream(self.gpu).wait_event(mark)

    def _refuse_capture(self) -> None:
        if self.gpu is not None:
            refuse_capture("the host issues transfers and asks what has arrived; do so outside", self.gpu)

    def _push(self, needed: Callable[[], bool]) -> bool:
        """Issue the next step, if it may be in flight or is needed; whether anything changed."""
        if not self._queued:
            return False
        transfer = self._queued[0]
        step = transfer.steps[0]
        if self.in_flight and self.in_flight + step.nbytes > self.max_in_flight and not needed():
            return False
        try:
            if not transfer.begun:
                self._begin(transfer)
            if transfer.steps:  # else one that it reads has failed
                self._issue(transfer, step)
        except BaseException as error:
            self._abandon(transfer, error)  # or it would stand in the way of all others
            if not isinstance(error, Exception):
                raise
        return True

    def _abandon(self, transfer: Transfer, error: BaseException) -> None:
        """Drop a transfer, and wait for what the device may have been given of it without a mark behind."""
        self.drop(transfer, error)
        if self.stream is not None:
            self.stream.synchronize()

    def _begin(self, transfer: Transfer) -> None:
        """Have the stream wait for what comes before a transfer."""
        for earlier in transfer.after:
            earlier.queue.issue(earlier)
        if self.stream is not None:
            for mark in (transfer.start, *(earlier.last for earlier in transfer.after)):
                if mark is not None:
                    self.stream.wait_event(mark)
        transfer.start = None
        transfer.after.clear()
        if transfer.pairs is not None and self._ring is not None:
            transfer.pairs = self._ring.put(transfer)
        transfer.begun = True

    def _issue(self, transfer: Transfer, step: Step) -> None:
        self._move(transfer, step)
        mark = self.stream.record_event() if self.stream is not None else None
        self._turn += step.nbytes
        if mark is not None and self._turn >= TURN:
            following = self.streams[self.stream is self.streams[0]]
            following.wait_event(mark)
            self.stream, self._turn = following, 0
        transfer.steps.popleft()
        if not transfer.steps:
            self._queued.popleft()
            transfer.readers.clear()
        transfer.last = mark
        transfer.issued = max(transfer.issued, step.whole)
        layer = step.part.layer
        if layer is not None and (not transfer.steps or transfer.steps[0].part.layer != layer):
            transfer.layers[layer] = mark
        transfer.moving += 1
        self.in_flight += step.nbytes
        self._moving.append((transfer, step, mark))

    def _notice(self) -> None:
        while self._moving:
            transfer, step, mark = self._moving[0]
            if mark is not None and not mark.query():
                return
            self._moving.popleft()
            self.in_flight -= step.nbytes
            transfer.moving -= 1
            transfer.whole = max(transfer.whole, step.whole)
            transfer.bytes_arrived += step.nbytes
            if transfer.progress is not None:
                self._news[transfer] = None
            self._let_go(transfer)

    @staticmethod
    def _let_go(transfer: Transfer) -> None:
        if transfer.finished:
            transfer.keeps = None

    def _move(self, transfer: Transfer, step: Step) -> None:
        part = step.part
        if transfer.page_runs is not None:
            if transfer.part is not part:
                transfer.part, pages = part, transfer.page_runs
                source, target = self.source.buffer.data_ptr(), self.target.buffer.data_ptr()
                sides = pages.source + (source + part.offset), pages.target + (target + part.offset)
                transfer.runs = Runs(*sides, pages.pages * part.nbytes)
            assert transfer.runs is not None
            copy_runs(self.source.buffer, self.target.buffer, transfer.runs, step.first, step.last, self.stream)
        else:
            assert transfer.pairs is not None
            near, far = (self.source, self.target) if self._out else (self.target, self.source)
            starts, strides = (near.base + part.offset, far.base + part.offset), (near.page_stride, far.page_stride)
            pairs = transfer.pairs[step.first : step.last]
            with torch.cuda.stream(self.stream):
                _move_pages(MovePages(near.buffer, far.buffer, pairs, starts, strides, part.nbytes, self._out))
