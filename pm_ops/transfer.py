"""Transfer: pages on their way, to wait for, ask about, or cancel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor

from .descriptors import known_layers
from .layout import counted
from .pool import PagePool
from .transfer_plan import Impl, PageRuns, Part, Step

if TYPE_CHECKING:
    import torch

    from .copy_engine import Runs
    from .transfer_queue import TransferQueue


class Transfer:
    """Pages on their way; made by :meth:`pm_ops.HostPool.offload` and ``restore``. It keeps its pools alive.

    Where the device refuses a part of it, the rest of it is left out, and so are queued transfers that were to read
    that; each says so, whenever it is waited for or asked whether it is done. No method can be called while a CUDA
    graph is being captured.

    Attributes:
        source_pages, target_pages: page ids, in the order in which they were named.
        pages: those of the two that are in the host pool.
        impl: what moves them, ``"copy"`` or ``"kernel"``.
        nbytes, bytes_arrived: of all pages, and how much of it is known to have arrived.
        cancelled: whether :meth:`cancel`, or an error, left something out.
        error: what the device, or the host on its behalf, raised when a part of it was to be moved; else None.
        keeps: what has to live until this has arrived.
        held: host pages that were freed in flight, which this is the last to own.
    """

    def __init__(self, queue: TransferQueue, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        self.source_pages, self.target_pages = list(source_pages), list(target_pages)
        self.pages: list[int] = []
        self.impl: Impl = "copy"
        self.nbytes = self.bytes_arrived = 0
        self.cancelled = False
        self.error: BaseException | None = None
        self.keeps: object = None
        self.held: set[int] = set()
        # The rest is the queue's.
        self.queue = queue
        self.by_layer = False
        self.progress: Callable[[Transfer], None] | None = None
        self.order: list[int] = []
        self.steps: deque[Step] = deque()  # not issued yet
        self.moving = 0  # steps that were issued and are not known to have arrived
        self.issued = self.whole = 0  # pages, in order, of which everything was issued, and has arrived
        self.page_runs: PageRuns | None = None
        self.part: Part | None = None
        self.runs: Runs | None = None  # the part's
        self.pairs: Tensor | None = None
        self.begun = False
        self.start: torch.cuda.Event | None = None
        self.after: list[Transfer] = []
        self.readers: list[Transfer] = []  # queued ones, while something of this is
        self.last: torch.cuda.Event | None = None  # None on the CPU, where what was issued has arrived
        self.layers: dict[int, torch.cuda.Event | None] = {}  # those of which everything was issued

    def wait(self) -> None:
        """Make the current CUDA stream wait until all pages have arrived; the host does not wait.

        What is queued of it is issued now, whatever ``max_in_flight`` is. On the CPU nothing is left to wait for.

        Raises:
            RuntimeError: pages were left out, by :meth:`cancel` or after an error.
        """
        self.queue.poll(lambda: bool(self.steps))
        self.require_all()
        self.queue.hold_current_stream(self.last)
        self.queue.tell()

    def wait_layer(self, layer: int) -> None:
        """Like :meth:`wait`, but for one layer's bytes in all pages; of a transfer that was made ``by_layer``.

        Raises:
            ValueError: it was not, or the layout has no such layer.
            RuntimeError: this layer was left out, by :meth:`cancel` or after an error.
        """
        known_layers(self.queue.source.layout, [layer])
        if not self.by_layer:
            raise ValueError("these pages are moved as a whole; restore(..., by_layer=True) them, or wait()")
        if self.source_pages and layer not in self.layers:
            self.queue.poll(lambda: bool(self.steps) and layer not in self.layers)
            if layer not in self.layers:
                self.require_all()
        self.queue.hold_current_stream(self.layers.get(layer))
        self.queue.tell()

    def synchronize(self) -> None:
        """Wait on the host until nothing of it moves any more: all has arrived, or what was issued before a cancel.

        The CPU may look at the pages after that. ``max_in_flight`` holds, and ``progress`` is told, all the while.

        Raises:
            RuntimeError: pages were left out after an error.
        """
        while not self.done():
            self.queue.wait_for_step()

    def done(self) -> bool:
        """Whether nothing of it moves any more, as after :meth:`synchronize`. Waits for nothing; issues what may be.

        Raises:
            RuntimeError: pages were left out after an error.
        """
        self._look()
        if self.error is not None:
            self.require_all()
        return self.finished

    def cancel(self) -> bool:
        """Leave out what has not been issued; whether that was anything. What has been issued still arrives.

        ``arrived`` tells which pages are there in the end. The others hold what they held before or, of a transfer by
        layer, some layers of what they were to hold. Use or free pages when :meth:`done` says so.

        Raises:
            RuntimeError: another transfer, still queued, reads what this one was to write.
        """
        if not self.steps:
            return False
        if any(reader.steps for reader in self.readers):
            raise RuntimeError("a queued transfer reads pages that this one writes; cancel that one first")
        self.queue.drop(self)
        return True

    @property
    def finished(self) -> bool:
        """Whether nothing of it is known to move any more."""
        return not (self.steps or self.moving)

    @property
    def arrived(self) -> list[int]:
        """Positions, ascending, in the lists of pages: those that are known to have arrived as a whole."""
        self._look()
        return sorted(self.order[: self.whole])

    @property
    def left_out(self) -> list[int]:
        """Positions, ascending, of the pages that were left out, or of which something was."""
        return sorted(self.order[self.issued :]) if self.cancelled else []

    @cached_property
    def touched(self) -> tuple[tuple[PagePool, frozenset[int]], tuple[PagePool, frozenset[int]]]:
        """The pages of the source and of the target."""
        queue = self.queue
        return (queue.source, frozenset(self.source_pages)), (queue.target, frozenset(self.target_pages))

    def meets(self, other: Transfer) -> bool:
        """Whether the two have a page of a pool in common."""
        return any(a is b and not ours.isdisjoint(theirs) for a, ours in self.touched for b, theirs in other.touched)

    def reads_from(self, other: Transfer) -> bool:
        """Whether this reads a page that the other writes."""
        (source, ours), (target, theirs) = self.touched[0], other.touched[1]
        return source is target and not ours.isdisjoint(theirs)

    def require_all(self) -> None:
        """Raise RuntimeError where something was left out."""
        issued = f"with {self.issued} of {counted(len(self.order), 'page')} issued, and the others never arrive"
        if self.error is not None:
            raise RuntimeError(f"this transfer failed {issued}: {self.error!r}") from self.error
        if self.cancelled:
            raise RuntimeError(
                f"this transfer was cancelled {issued}: see arrived, and synchronize() before the pages are used or "
                "freed"
            )

    def _look(self) -> None:
        """Notice what has arrived, and tell of it."""
        if not self.finished:
            self.queue.poll()
        self.queue.tell()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Transfer is neither copied nor pickled: its pages are on their way once")

    def __repr__(self) -> str:
        size = f"{counted(len(self.source_pages), 'page')}, {self.bytes_arrived} of {self.nbytes} B arrived"
        return f"Transfer({size}, {self.impl}{', cancelled' if self.cancelled else ''})"
