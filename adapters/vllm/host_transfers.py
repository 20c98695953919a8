"""The worker's half of :mod:`pm_ops.adapters.vllm.host_connector`: pages between the engine's cache and the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.logger import init_logger

from pm_ops import HostPool, PagePool
from pm_ops.transfer import Transfer

logger = init_logger("vllm.pm_ops.host")
PAGES_IN_FLIGHT = 8192
"""In each direction. Half of what CUDA takes before a call waits, and enough to last for a long step: what goes beyond
is issued when the next one begins."""


@dataclass
class Moves(KVConnectorMetadata):
    """What a step begins: pages of the host, as the scheduler numbers them, and as many blocks."""

    loads: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    """By request; before the step's own work or behind it."""
    saves: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """By job; behind the step's work."""


@dataclass
class Moved(KVConnectorWorkerMetadata):
    """What has arrived since the last step, at one worker or at several."""

    saved: Counter[int] = field(default_factory=Counter)
    """Jobs, and how many workers have done them, well or not."""
    failed_saves: set[int] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Moved:
        """Both workers' news."""
        assert isinstance(other, Moved)
        return Moved(
            self.saved + other.saved, self.failed_saves | other.failed_saves, self.failed_loads | other.failed_loads
        )


class HostTransfers:
    """What is on its way, and where the scheduler's pages lie in a :class:`pm_ops.HostPool`.

    Args:
        pool: the engine's cache; a block is a page, of whatever cache group.
        num_pages: of the host, pinned where the cache is on CUDA.
    """

    def __init__(self, pool: PagePool, num_pages: int) -> None:
        in_flight = max(PAGES_IN_FLIGHT * pool.layout.page_bytes, 1 << 30)
        self.host = HostPool(pool, num_pages, max_in_flight=in_flight)
        self._places: dict[int, int] = {}
        self._loads: dict[str, tuple[Transfer, list[int]]] = {}
        self._saves: dict[int, tuple[Transfer, list[int]]] = {}
        self._ended: set[str] = set()
        self._failed: dict[str, list[int]] = {}
        self._moved = Moved()

    def load(self, moves: Moves) -> None:
        """Begin a step's loads, after the work that is queued on the device: blocks may be read by it."""
        for request, (pages, blocks) in moves.loads.items():
            places = [self._places[page] for page in pages]
            try:
                self._loads[request] = self.host.restore(places, blocks), blocks
            except RuntimeError as error:
                self._load_failed(request, blocks, error)

    def save(self, moves: Moves) -> None:
        """Begin a step's saves, after the work that is queued on the device, which has filled the blocks."""
        for job, (pages, blocks) in moves.saves.items():
            self.host.free([self._places.pop(page) for page in pages if page in self._places])  # evicted
            try:
                transfer = self.host.offload(blocks)
            except RuntimeError as error:
                self._save_failed(job, error)
            else:
                self._saves[job] = transfer, pages
                self._places.update(zip(pages, transfer.pages, strict=True))

    def poll(self) -> set[str]:
        """The requests whose loads have ended since the last call, well or not."""
        for job, (transfer, pages) in list(self._saves.items()):
            try:
                if not transfer.done():
                    continue
                self._moved.saved[job] += 1
            except RuntimeError as error:
                self._save_failed(job, error)
                self.host.free([self._places.pop(page) for page in pages])
            del self._saves[job]
        for request, (transfer, blocks) in list(self._loads.items()):
            try:
                if not transfer.done():
                    continue
                self._ended.add(request)
            except RuntimeError as error:
                self._load_failed(request, blocks, error)
            del self._loads[request]
        ended, self._ended = self._ended, set()
        return ended

    def news(self) -> Moved | None:
        """What :meth:`poll` has found, once."""
        moved, self._moved = self._moved, Moved()
        return moved if moved != Moved() else None

    def failed_loads(self) -> set[str]:
        """Those among the loads that have ended that went wrong, once."""
        failed, self._failed = self._failed, {}
        return set(failed)

    def failed_blocks(self) -> set[int]:
        """Their blocks, instead."""
        failed, self._failed = self._failed, {}
        return {block for blocks in failed.values() for block in blocks}

    def _load_failed(self, request: str, blocks: list[int], error: RuntimeError) -> None:
        logger.warning("pm_ops: %d blocks of request %s cannot be restored: %s", len(blocks), request, error)
        self._failed[request] = blocks
        self._moved.failed_loads.add(request)
        self._ended.add(request)

    def _save_failed(self, job: int, error: RuntimeError) -> None:
        logger.warning("pm_ops: blocks are not kept, they cannot be offloaded: %s", error)
        self._moved.saved[job] += 1
        self._moved.failed_saves.add(job)
