"""A KV connector that keeps prefixes in host memory, through a :class:`pm_ops.HostPool`.

    --kv-transfer-config '{"kv_connector": "PageHostConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "pm_ops.adapters.vllm.host_connector",
        "kv_connector_extra_config": {"max_bytes": 100000000000}}'

Every full block of a request is a page, every layer of it one run of bytes, under the engine's own hash of all tokens
up to its end. Blocks that a step has filled are offloaded behind it, and a prompt whose blocks are found waits, while
others run, until they are restored. The scheduler decides alone: it holds a page while a transfer writes or reads it,
so that it is neither evicted nor found half written, and it owns a block of the engine's while that is offloaded,
whatever becomes of the request. Of the other pages the one that was used longest ago is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from .host_settings import ALL, NAME, number_of_pages, require_supported, window_of
from .host_transfers import HostTransfers, Moved, Moves, logger
from .layout import bytes_of_page, page_pools
from .page_index import Page, PageIndex
from .tracking import Tracked, filled, hit_source, settings_of


@dataclass
class HostStats(KVConnectorStats):
    """Pages since the last look: ``offloaded``, ``restored``, ``evicted``, and ``left_out`` where all were in use."""

    def reset(self) -> None:
        """Count from nothing."""
        self.data.clear()

    def add(self, **counts: int) -> None:
        """Count more."""
        for name, count in counts.items():
            self.data[name] = self.data.get(name, 0) + count

    def aggregate(self, other: KVConnectorStats) -> HostStats:
        """Count what the other has counted."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log."""
        return {f"host pages {name}": count for name, count in self.data.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(self.data.values())


@dataclass
class Save:
    """Blocks on their way to the host."""

    pages: list[Page]
    blocks: list[Any]
    """The engine's, of which this is an owner."""
    workers: int
    """That have not reported."""
    failed: bool = False


class Prompt(Tracked):
    """A request, and a page of it, if any, that another one restores, and for which it waits."""

    awaits: Page | None = None


class PageHostConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. Of ``max_bytes``, which every worker takes, or ``max_pages`` one is needed.

    Tokens, LoRA adapters, images, embeddings and the cache's salt tell a block, as they do in the engine's own prefix
    cache. Requests of streaming sessions, whose tokens may change, are neither kept nor found. A block that cannot be
    restored is dropped, and vLLM's ``kv_load_failure_policy`` says whether its request fails or is computed.

    After new weights were loaded, ``reset_prefix_cache(reset_connector=True)`` forgets both caches; but while blocks
    are on their way to the host they are in use, until a later step tells that they have arrived: the scheduler empties
    the engine's cache before it calls a connector, and hears of workers in steps alone. Then it returns False, and the
    engine's own cache stays; with ``reset_running_requests=True``, as in ``LLM.sleep()``, it raises RuntimeError, and
    both stay. Step the engine until ``has_pending_push_work()`` is False, and reset it then.
    """

    requires_kv_delivery = False  # what is lost is computed
    _cache_hit_source = hit_source("HOST")

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = settings_of(vllm_config, NAME)
        require_supported(vllm_config, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self.page_size = specs[0].block_size
        self.windows = [window_of(spec) for spec in specs]
        self.page_bytes = bytes_of_page(kv_cache_config)
        self.num_pages = number_of_pages(self._kv_transfer_config.kv_connector_extra_config, self.page_bytes)
        self.prefix_caching = vllm_config.cache_config.enable_prefix_caching
        self.workers = vllm_config.parallel_config.world_size
        self.index = PageIndex(self.num_pages)
        self.tracked: dict[str, Prompt] = {}
        self.block_pool: Any = None
        self.moves = Moves()
        self.saves: dict[int, Save] = {}
        self.loads: dict[str, list[Page]] = {}
        self.failed: set[str] = set()  # of the loads; workers need not end one in the same step
        self.job = 0
        self.stats = HostStats()
        self.transfers: HostTransfers | None = None

    # In the scheduler.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Learn who owns the engine's blocks."""
        self.block_pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the computed ones are on the host, to be restored between steps.

        None, to be asked again later, while another request restores some of them: then they are in the engine's own
        cache. The last token of a prompt is always run.
        """
        if request.resumable:
            return 0, False  # its tokens may change
        tracked = self.tracked.setdefault(request.request_id, Prompt(request))
        if request.skip_reading_prefix_cache:
            return 0, False
        if tracked.awaits is not None and tracked.awaits.users:
            return None, False
        tracked.first = first = num_computed_tokens // self.page_size
        end = self._found(tracked, (request.num_tokens - 1) // self.page_size)
        if end == first:
            return 0, False
        if self.prefix_caching:
            tracked.awaits = next((page for page in self.index.run(self._needed(tracked, end)) if page.users), None)
            if tracked.awaits is not None:
                return None, False
        return (end - first) * self.page_size, True

    def _found(self, tracked: Prompt, last: int) -> int:
        """The end of the longest prefix, in blocks, that can be restored behind the computed one."""
        find, hashes, first = self.index.find, tracked.request.block_hashes, tracked.first
        end = min(last, len(hashes))
        for group in (group for group, window in enumerate(self.windows) if window == ALL):
            end = first + len(self.index.run(zip(hashes[first:end], repeat(group))))
        windows = {group: window for group, window in enumerate(self.windows) if window != ALL}
        if not windows:
            return end
        best, runs = first, dict.fromkeys(windows, first)  # of each group, the blocks up to here without a gap
        for block in range(first, end):
            for group in windows:
                runs[group] = runs[group] + 1 if find((hashes[block], group)) else 0
            if all(runs[group] >= min(block + 1, window) for group, window in windows.items()):
                best = block + 1
        return best

    def _needed(self, tracked: Tracked, end: int) -> dict[tuple[bytes, int], int]:
        """The keys of what a prefix of so many blocks needs behind the computed ones, and their place in the prefix."""
        hashes = tracked.request.block_hashes
        return {
            (hashes[block], group): block
            for group, window in enumerate(self.windows)
            for block in range(max(tracked.first, end - min(end, window)), end)
        }

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Have what was found restored to the blocks it was given."""
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.place(blocks)
        tracked.kept = 0  # those that the engine found itself are looked after, too
        if num_external_tokens:
            needed = self._needed(tracked, tracked.first + num_external_tokens // self.page_size)
            pages = self.index.run(needed)
            targets = [tracked.blocks[group][block] for (_, group), block in needed.items()]
            assert len(pages) == len(needed) and all(targets), "nothing was evicted since; block 0 is never a target"
            self.index.hold(*pages)
            self.loads[request.request_id] = pages
            self.moves.loads[request.request_id] = [page.number for page in pages], targets

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        """What was found, to be restored; and the blocks that this step fills, to be offloaded."""
        pages: list[Page] = []
        sources: list[int] = []
        windows = list(enumerate(self.windows))[::-1]
        for tracked, computed, blocks in filled(scheduler_output, self.tracked, self.page_size):
            hashes = tracked.request.block_hashes
            seen = {
                (hashes[block], group): tracked.blocks[group][block]
                for block in reversed(blocks)
                for group, window in windows
                if (block + window) * self.page_size > computed  # else the engine may have freed it behind the window
            }
            for key in reversed(self.index.touch(seen)):
                if source := seen[key]:  # block 0 stands for those that were not needed any more
                    page = self.index.add(key)
                    if page is None:
                        self.stats.add(left_out=1)
                    else:
                        pages.append(page)
                        sources.append(source)
        if pages:
            self.job += 1
            owned = [self.block_pool.blocks[block] for block in sources]
            self.block_pool.touch(owned)
            self.saves[self.job] = Save(pages, owned, self.workers)
            self.moves.saves[self.job] = [page.number for page in pages], sources
        moves, self.moves = self.moves, Moves()
        return moves

    def update_connector_output(self, connector_output: Any) -> None:
        """Let go of what has arrived at every worker. What has failed is not found again."""
        moved = connector_output.kv_connector_worker_meta or Moved()
        self.failed |= moved.failed_loads
        for request in moved.failed_loads:
            for page in self.loads[request]:
                self.index.drop(page)
        for request in connector_output.finished_recving or ():
            pages = self.loads.pop(request)
            self.stats.add(restored=0 if request in self.failed else len(pages))
            self.failed.discard(request)
            self._release(pages)
        for job, workers in moved.saved.items():
            save = self.saves[job]
            save.workers -= workers
            save.failed |= job in moved.failed_saves
            if save.workers:
                continue
            for page in save.pages:
                page.ready = not save.failed
                if save.failed:
                    self.index.drop(page)
            self.stats.add(offloaded=0 if save.failed else len(save.pages))
            self._release(save.pages)
            self.block_pool.free_blocks(reversed(save.blocks))
            del self.saves[job]

    def _release(self, pages: list[Page]) -> None:
        self.index.release(*reversed(pages))  # the beginning of a prefix is evicted last

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Forget a request that has ended or was aborted. What is on its way arrives all the same."""
        tracked = self.tracked.pop(request.request_id, None)
        if tracked is not None:
            groups = range(len(self.windows))[::-1]
            self.index.touch((name, group) for name in reversed(request.block_hashes) for group in groups)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to ask the workers again, even where it has nothing to compute."""
        return bool(self.saves or self.loads)

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free without preemption: those on their way to the host that no request owns any more."""
        return any(block.ref_cnt == 1 for save in self.saves.values() for block in save.blocks)

    def reset_cache(self) -> bool:
        """Find nothing of what was kept so far, nor of what is on its way to the host."""
        self.index.clear()
        return True

    def get_kv_connector_stats(self) -> HostStats | None:
        """What was moved since the last call."""
        evicted, self.index.evicted = self.index.evicted, 0
        self.stats.add(evicted=evicted)
        stats, self.stats = self.stats, HostStats()
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> HostStats:
        """The counts, where they are logged."""
        return HostStats(data or {})

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the cache that the engine has allocated; of its groups, which lie over one another, all blocks."""
        layers = self._vllm_config.compilation_config.static_forward_context
        pool = page_pools(self._kv_cache_config, layers, self.settings.layout)[0]
        if pool.layout.page_bytes != self.page_bytes:
            raise RuntimeError(f"{NAME}: blocks have {pool.layout.page_bytes} bytes, not {self.page_bytes} as planned")
        self.transfers = HostTransfers(pool, self.num_pages)
        pinned = " of pinned memory" if pool.device.type == "cuda" else ""
        logger.info("pm_ops: %d pages of %d bytes%s on the host", self.num_pages, self.page_bytes, pinned)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to restore."""
        self._worker.load(self._get_connector_metadata())

    def wait_for_save(self) -> None:
        """Begin to offload what the step has filled; nothing waits."""
        self._worker.save(self._get_connector_metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """The requests whose blocks were restored. Saves are told of by :meth:`build_connector_worker_meta`."""
        return set(), self._worker.poll()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The same, and the requests whose blocks could not be restored: a block's number does not tell its group."""
        results = super().get_transfer_results(finished_req_ids)
        if len(self.windows) > 1:
            results.failed_recving = self._worker.failed_loads()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be restored, of a model with one cache group."""
        return self._worker.failed_blocks() if len(self.windows) == 1 else set()

    def build_connector_worker_meta(self) -> Moved | None:
        """What has arrived, for the scheduler."""
        return self._worker.news()

    def shutdown(self) -> None:
        """Wait for what is on its way, and give the memory back."""
        if self.transfers is not None:
            self.transfers.host.close()

    @property
    def _worker(self) -> HostTransfers:
        assert self.transfers is not None, "vLLM registers the cache first"
        return self.transfers

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests run when their blocks were restored."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A page holds every layer: it is offloaded when the step is over."""
