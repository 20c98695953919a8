"""A KV connector that keeps prefixes in a :class:`pm_ops.PageStore`: they outlive the engine, and engines share them.

    --kv-transfer-config '{"kv_connector": "PageStoreConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "pm_ops.adapters.vllm.store_connector",
        "kv_connector_extra_config": {"folder": "/var/cache/pages", "max_bytes": 10000000000}}'

Every full block of a request is one entry, every layer of it one run of bytes, under the hash of all tokens up to its
end. The scheduler promises only what it has read: it reads a prompt's entries, and checks their digests, when it looks
them up, and hands the bytes to the worker; until they are placed they take memory of their own. So a load cannot fail
once it was promised, and what a step computes never rests on blocks that were not there; blocks that a step has filled
are written at its end. What cannot be read (evicted, damaged) was not found, and is computed.

A block is found only with all those in front of it. So a request's entries count as used at one time, and in a store
that is too small for them the last ones are evicted first.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec

from pm_ops import PageLayout, PagePool, PageStore

from .config import Settings
from .layout import bytes_of_page, page_pools
from .tracking import Tracked, filled, hit_source, settings_of

logger = init_logger("vllm.pm_ops.store")
OPTIONS = ("folder", "max_bytes", "model")
MAX_BYTES = 10 << 30
"""Of a store whose size was not given."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.json")
"""The files of a model's folder that decide what it computes."""


@dataclass
class Moves(KVConnectorMetadata):
    """What the worker does around one step."""

    loads: list[tuple[int, Tensor]] = field(default_factory=list)
    """Blocks and the bytes that go there."""
    saves: list[tuple[str, int, int]] = field(default_factory=list)
    """Keys, the blocks that are kept under them, and when these count as used."""


@dataclass
class Pages(KVConnectorHandshakeMetadata):
    """What the worker tells the scheduler when the cache is there: the layout of its pages."""

    layout: PageLayout


class Prompt(Tracked):
    """A request, the keys of its full blocks, and the bytes that were found for some of them."""

    def __init__(self, request: Any, page_size: int, seed: str) -> None:
        super().__init__(request)
        self.page_size = page_size
        self.read: dict[int, Tensor] = {}  # until they have a place
        self.found = 0  # so many blocks were there before it ran
        self.asked = time.time_ns()
        self._digests = [hashlib.sha256((seed + json.dumps(request.cache_salt)).encode()).digest()]

    def key(self, block: int) -> str:
        """The entry of a full block: a hash of all tokens up to its end."""
        while len(self._digests) <= block + 1:
            start = (len(self._digests) - 1) * self.page_size
            tokens = self.request.all_token_ids[start : start + self.page_size]
            self._digests.append(hashlib.sha256(self._digests[-1] + json.dumps(list(tokens)).encode()).digest())
        return self._digests[block + 1].hex()

    def used(self, block: int) -> int:
        """When a block's entry counts as used: with the request's others, those behind it being evicted before it."""
        return self.asked - 1000 * block


class PageStoreConnector(KVConnectorBase_V1):
    """See the module. ``folder`` is needed; ``max_bytes`` defaults to 10 GiB, ``model`` to the model's name.

    Engines of another model (weights' files, configuration), dtype, layout or block size use folders of their own below
    it. Where weights are exchanged while an engine runs, ``reset_prefix_cache(reset_connector=True)`` has to follow:
    the engine shares no more files then. Requests with images, embeddings or a LoRA adapter are not told by their
    tokens alone, and those of streaming sessions may change theirs: they are neither kept nor found.
    """

    requires_kv_delivery = False  # what is lost is computed
    _cache_hit_source = hit_source("DISK")

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = _supported(vllm_config, kv_cache_config)
        self.page_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        options = self._kv_transfer_config.kv_connector_extra_config
        kind = [*_identity(vllm_config), self.settings.layout, self.page_size]
        name = hashlib.sha256(json.dumps(kind, default=str).encode()).hexdigest()[:32]
        model = options.get("model") or vllm_config.model_config.model
        try:
            max_bytes = int(options.get("max_bytes", MAX_BYTES))
        except (TypeError, ValueError):
            raise ValueError(
                f"PageStoreConnector: max_bytes is {options['max_bytes']!r}; it must be a number of bytes"
            ) from None
        block_bytes = bytes_of_page(kv_cache_config)
        if max_bytes < 2 * block_bytes:
            raise ValueError(
                f"PageStoreConnector: max_bytes={max_bytes}, and one block of {self.page_size} tokens is {block_bytes} "
                "bytes; raise max_bytes"
            )
        self.store = PageStore(Path(options["folder"]).expanduser() / name, max_bytes, model=model)
        self.seed = ""  # what all keys begin with
        self.tracked: dict[str, Prompt] = {}
        self.loads: list[tuple[int, Tensor]] = []
        self.layout: PageLayout | None = None
        self.pool: PagePool | None = None

    # In the scheduler.

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Learn from the worker what a page is."""
        (pages,) = metadata.values()
        self.layout = pages.layout

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens behind the computed ones were read; the last token of a prompt is always run."""
        if request.mm_features or request.prompt_embeds is not None or request.lora_request is not None:
            return 0, False  # not told by their token ids
        if request.resumable:
            return 0, False  # its tokens may change
        tracked = self.tracked.setdefault(request.request_id, Prompt(request, self.page_size, self.seed))
        tracked.asked = time.time_ns()
        if request.skip_reading_prefix_cache:
            return 0, False  # vLLM 0.26 would take what was found all the same
        tracked.first = block = num_computed_tokens // self.page_size
        last = (request.num_tokens - 1) // self.page_size
        while block < last and (block in tracked.read or self._read(tracked, block)):
            block += 1
        return (block - tracked.first) * self.page_size, False

    def _read(self, tracked: Prompt, block: int) -> bool:
        """Read a block's entry. False where it is not there, or is damaged and so removed."""
        assert self.layout is not None, "vLLM tells it before it takes requests"
        key, page = tracked.key(block), PagePool(self.layout, 1)
        try:
            if self.store.get(key, page, [0], used=tracked.used(block)) is None:
                return False
        except (ValueError, OSError) as error:
            self._give_up(key, error)
            return False
        tracked.read[block] = page.pages[0]
        return True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note where the blocks that were read go."""
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.place(blocks)
        tracked.kept, tracked.found = 0, tracked.first + num_external_tokens // self.page_size
        self.loads += [(tracked.blocks[0][i], tracked.read[i]) for i in range(tracked.first, tracked.found)]
        tracked.read = {}

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        """What was read, to be placed; and to be written the blocks that this step fills, and those in front of them
        that the engine has and the store has not."""
        moves, self.loads = Moves(loads=self.loads), []
        for tracked, _, blocks in filled(scheduler_output, self.tracked, self.page_size):
            for i in blocks:
                key, used = tracked.key(i), tracked.used(i)
                if i >= tracked.found or not self.store.touch(key, used=used):
                    moves.saves.append((key, tracked.blocks[0][i], used))
        return moves

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request that has ended or was aborted; nothing of it is still to be written."""
        self.tracked.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        """Find nothing that was kept so far, by anybody: keys have a beginning of this engine's own from now on, and
        requests that run are not kept. Files stay, for the engines that share them."""
        self.seed = uuid.uuid4().hex
        self.tracked.clear()
        return True

    # In the worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the cache that the engine has allocated, as one pool."""
        layers = self._vllm_config.compilation_config.static_forward_context
        (self.pool,) = page_pools(self._kv_cache_config, layers, self.settings.layout)
        self.pool.scatter([0], self.pool.gather([0]))  # compiles the kernels; no request is given block 0

    def get_handshake_metadata(self) -> Pages:
        """The layout of the pages, for the scheduler."""
        assert self.pool is not None
        return Pages(self.pool.layout)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Place this step's blocks."""
        assert self.pool is not None
        for block, page in self._get_connector_metadata().loads:
            self.pool.scatter([block], page.unsqueeze(0).to(self.pool.device))

    def wait_for_save(self) -> None:
        """Write the blocks that this step has filled. One that cannot be written is not kept; the engine goes on."""
        assert self.pool is not None
        for key, block, used in self._get_connector_metadata().saves:
            try:
                self.store.put(key, self.pool, [block], used=used)
            except (ValueError, OSError) as error:
                self._give_up(key, error)

    def _give_up(self, key: str, error: Exception) -> None:
        """An entry that can be neither read nor written must not be found again."""
        logger.warning("pm_ops: a block is not kept, and its entry, where there is one, is removed: %s", error)
        with suppress(OSError):
            self.store.discard(key)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was placed before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """A page holds every layer: it is written when the step is over."""


def _supported(vllm_config: Any, kv_cache_config: Any) -> Settings:
    """The engine's settings. Raises ValueError for what the connector cannot do."""
    settings = settings_of(vllm_config, "PageStoreConnector")
    options = vllm_config.kv_transfer_config.kv_connector_extra_config
    if not options.get("folder") or not set(options) <= set(OPTIONS):
        raise ValueError(
            f"PageStoreConnector: kv_connector_extra_config is {options}; it needs a folder, and may have "
            f"{', '.join(OPTIONS[1:])}"
        )
    role = vllm_config.kv_transfer_config.kv_role
    if role != "kv_both":
        raise ValueError(f"PageStoreConnector writes and reads; kv_role is {role}, set it to kv_both")
    if vllm_config.parallel_config.world_size > 1:
        raise ValueError("PageStoreConnector supports one worker; run it without tensor or pipeline parallelism")
    specs = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
    if specs != [FullAttentionSpec.__name__]:
        raise ValueError(
            "PageStoreConnector supports models all of whose layers have full attention, in one cache group; the "
            f"groups of this one are {', '.join(specs)}"
        )
    return settings


def _identity(vllm_config: Any) -> list[Any]:
    """What decides a block's bytes, apart from its tokens and its layout: the model, and one that drafts for it.

    Raises ValueError for a model whose weights cannot be told from others of that name.
    """
    load, cache_dtype = vllm_config.load_config, vllm_config.cache_config.cache_dtype
    drafts = vllm_config.speculative_config
    identity = _model(vllm_config.model_config, load, cache_dtype)
    if drafts is not None and drafts.draft_model_config is not vllm_config.model_config:
        identity += _model(drafts.draft_model_config, drafts.draft_load_config or load, cache_dtype)
    return identity


def _model(model: Any, load: Any, cache_dtype: str) -> list[Any]:
    """What decides what this model writes: a ``ModelConfig`` and a ``LoadConfig``."""
    path = Path(model.model)
    commit = getattr(model.hf_config, "_commit_hash", None)
    if load.load_format == "dummy":
        weights: Any = f"random, seed {model.seed}"
    elif path.exists():
        files = [path] if path.is_file() else sorted({file for glob in WEIGHTS for file in path.glob(glob)})
        weights = [(file.name, (status := file.stat()).st_size, status.st_mtime_ns) for file in files]
    elif commit:
        weights = commit
    else:
        raise ValueError(
            f"PageStoreConnector cannot tell which weights {model.model} has: there is no such folder, and no commit "
            "of the hub is known; give the folder of the model"
        )
    return [
        model.model,
        model.revision,
        model.compute_hash(),
        str(model.dtype),
        cache_dtype,
        load.load_format,
        load.model_loader_extra_config,
        weights,
    ]
