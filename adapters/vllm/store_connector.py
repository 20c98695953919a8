"""A KV connector that keeps prefixes in a :class:`pm_ops.PageStore`: they outlive the engine, and engines share them.

    --kv-transfer-config '{"kv_connector": "PageStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "pm_ops.adapters.vllm.store_connector",
        "kv_connector_extra_config": {"folder": "/var/cache/pages", "max_bytes": 10000000000}}'

Every full block of a request is one entry, every layer of it one run of bytes, under the hash of all tokens up to its
end. A prompt's blocks that are found are read before it is run, in the engine's step; blocks that a step has filled are
written at its end. What cannot be read (evicted meanwhile, damaged) is computed instead.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from pm_ops import PagePool, PageStore

from .config import HOW, Settings
from .layout import page_pools

logger = init_logger("vllm.pm_ops.store")
OPTIONS = ("folder", "max_bytes", "model")
MAX_BYTES = 10 << 30
"""Of a store whose size was not given."""


@dataclass
class Move:
    """One block of a request and its entry."""

    request: str
    key: str
    block: int


@dataclass
class Moves(KVConnectorMetadata):
    """What the worker does around one step."""

    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


class Tracked:
    """A request in the scheduler: the keys of its full blocks, where they lie, and how many of them are kept."""

    def __init__(self, request: Any, page_size: int) -> None:
        self.request = request
        self.page_size = page_size
        self.found = 0  # the first block that was looked up
        self.kept = 0
        self.blocks: list[int] = []
        lora = request.lora_request.lora_name if request.lora_request else None
        self._digests = [hashlib.sha256(json.dumps([request.cache_salt, lora]).encode()).digest()]

    def key(self, block: int) -> str:
        """The entry of a full block: a hash of all tokens up to its end."""
        while len(self._digests) <= block + 1:
            start = (len(self._digests) - 1) * self.page_size
            tokens = self.request.all_token_ids[start : start + self.page_size]
            self._digests.append(hashlib.sha256(self._digests[-1] + json.dumps(list(tokens)).encode()).digest())
        return self._digests[block + 1].hex()

    def move(self, block: int) -> Move:
        """One of its blocks and that block's entry."""
        return Move(self.request.request_id, self.key(block), self.blocks[block])


class PageStoreConnector(KVConnectorBase_V1):
    """See the module. ``folder`` is needed; ``max_bytes`` defaults to 10 GiB, ``model`` to the model's name.

    Engines of another model, dtype, layout or block size use folders of their own below it.
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = _supported(vllm_config, kv_cache_config)
        self.page_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        options = self._kv_transfer_config.kv_connector_extra_config
        model = options.get("model") or vllm_config.model_config.model
        kind = [model, str(vllm_config.model_config.revision), str(vllm_config.model_config.dtype)]
        kind += [vllm_config.cache_config.cache_dtype, self.settings.layout, str(self.page_size)]
        folder = Path(options["folder"]) / hashlib.sha256(json.dumps(kind).encode()).hexdigest()[:16]
        self.store = PageStore(folder, int(options.get("max_bytes", MAX_BYTES)), model=model)
        self.tracked: dict[str, Tracked] = {}
        self.loads: list[Move] = []
        self.pool: PagePool | None = None
        self.failed_blocks: set[int] = set()
        self.failed_requests: set[str] = set()

    # In the scheduler.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens behind the computed ones are in the store; the last token of a prompt is always run."""
        if request.mm_features or request.prompt_embeds is not None:
            return 0, False  # not told by their token ids
        tracked = self.tracked.setdefault(request.request_id, Tracked(request, self.page_size))
        tracked.found = block = num_computed_tokens // self.page_size
        last = (request.num_tokens - 1) // self.page_size
        while block < last and tracked.key(block) in self.store:
            block += 1
        return (block - tracked.found) * self.page_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note where the blocks that were found are to be read to."""
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.blocks = list(blocks.get_block_ids()[0])
        tracked.kept = tracked.found + num_external_tokens // self.page_size
        self.loads += [tracked.move(block) for block in range(tracked.found, tracked.kept)]

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        """What was found, to be read; and the blocks that this step fills, to be written."""
        moves, self.loads = Moves(loads=self.loads), []
        for request, computed, blocks, replace in _scheduled(scheduler_output):
            tracked = self.tracked.get(request)
            if tracked is None:
                continue
            tracked.blocks = blocks if replace else tracked.blocks + blocks
            known = len(tracked.request.all_token_ids)
            full = min(computed + scheduler_output.num_scheduled_tokens[request], known) // self.page_size
            moves.saves += [tracked.move(block) for block in range(tracked.kept, full)]
            tracked.kept = max(tracked.kept, full)
        return moves

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request that has ended or was aborted; nothing of it is still to be written."""
        self.tracked.pop(request.request_id, None)
        return False, None

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the cache that the engine has allocated, as one pool."""
        layers = self._vllm_config.compilation_config.static_forward_context
        (self.pool,) = page_pools(self._kv_cache_config, layers, self.settings.layout)
        page_bytes = self.pool.layout.page_bytes
        if self.store.max_bytes < 2 * page_bytes:
            raise ValueError(
                f"PageStoreConnector: max_bytes={self.store.max_bytes}, and one block of {self.page_size} tokens is "
                f"{page_bytes} bytes; raise max_bytes"
            )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Read this step's blocks. Those that cannot be read are told to the scheduler, which has them computed."""
        assert self.pool is not None
        for move in self._get_connector_metadata().loads:
            if not self._whole(self.store.get, move):
                self.failed_blocks.add(move.block)
                self.failed_requests.add(move.request)

    def wait_for_save(self) -> None:
        """Write the blocks that this step has filled; not of requests that ran on blocks that could not be read."""
        assert self.pool is not None
        for move in self._get_connector_metadata().saves:
            if move.request not in self.failed_requests:
                self._whole(self.store.put, move)

    def _whole(self, verb: Callable[..., Any], move: Move) -> bool:
        """Read or write an entry. False where it is not there, or is damaged and so removed; the engine goes on."""
        try:
            return verb(move.key, self.pool, [move.block]) is not None
        except (ValueError, OSError) as error:
            logger.warning("pm_ops: an entry can be neither read nor written and is removed: %s", error)
            self.store.discard(move.key)
            return False

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be read in this step."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """Nothing is moved between steps."""
        self.failed_requests -= finished_req_ids
        return None, None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was read before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A page holds every layer: it is written when the step is over."""


def _supported(vllm_config: Any, kv_cache_config: Any) -> Settings:
    """The engine's settings. Raises ValueError for what the connector cannot do."""
    settings = Settings.of(vllm_config)
    if settings is None:
        raise ValueError(f"PageStoreConnector keeps pm_ops' pages, and pm_ops was not asked for: {HOW}")
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    if not options.get("folder") or not set(options) <= set(OPTIONS):
        raise ValueError(
            f"PageStoreConnector: kv_connector_extra_config is {options}; it needs a folder, and may have "
            f"{', '.join(OPTIONS[1:])}"
        )
    if vllm_config.parallel_config.world_size > 1:
        raise ValueError("PageStoreConnector supports one worker; run it without tensor or pipeline parallelism")
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ValueError(f"PageStoreConnector supports models with one cache group, this one has {groups}")
    return settings


def _scheduled(output: Any) -> Iterator[tuple[str, int, list[int], bool]]:
    """``(request, computed tokens, blocks, whether these are all of its blocks)`` of every request in a step."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, list(new.block_ids[0]), True
    cached = output.scheduled_cached_reqs
    for i, request in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[i]
        resumed = request in cached.resumed_req_ids
        yield request, cached.num_computed_tokens[i], list(blocks[0]) if blocks else [], resumed
