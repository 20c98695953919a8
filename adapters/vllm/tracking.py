"""What KV connectors keep in vLLM's scheduler: requests, where their blocks lie, and which of them a step fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from .config import HOW, Settings


class Tracked:
    """A request in the scheduler.

    Attributes:
        request: vLLM's.
        first: the block from which on the connector was asked for more.
        blocks: of each cache group, the engine's block for every ``page_size`` tokens.
        kept: so many blocks, from the beginning, were seen to.
    """

    def __init__(self, request: Any) -> None:
        self.request = request
        self.first = 0
        self.blocks: list[list[int]] = []
        self.kept = 0

    def place(self, blocks: Any) -> None:
        """Note where the request lies: vLLM's ``KVCacheBlocks``."""
        self.blocks = [list(group) for group in blocks.get_block_ids()]


Request = TypeVar("Request", bound=Tracked)


def filled(output: Any, tracked: Mapping[str, Request], page_size: int) -> Iterator[tuple[Request, int, range]]:
    """Tracked requests of a step, how many tokens of each were computed before, and the blocks to see to, if any.

    Those are full when the step is over, and of known tokens: an engine that schedules ahead gets to know a token, and
    with it what the block holds, a step later.
    """
    for new in output.scheduled_new_reqs:
        if (request := tracked.get(new.req_id)) is not None:
            request.blocks = [list(group) for group in new.block_ids]
            yield from _filled(request, new.num_computed_tokens, output.num_scheduled_tokens[new.req_id], page_size)
    cached = output.scheduled_cached_reqs
    for i, name in enumerate(cached.req_ids):
        if (request := tracked.get(name)) is None:
            continue
        blocks = cached.new_block_ids[i]
        if blocks is not None:
            if name in cached.resumed_req_ids:
                request.blocks = [[] for _ in blocks]
            for group, more in zip(request.blocks, blocks, strict=True):
                group += more
        yield from _filled(request, cached.num_computed_tokens[i], output.num_scheduled_tokens[name], page_size)


def _filled(request: Request, computed: int, scheduled: int, page_size: int) -> Iterator[tuple[Request, int, range]]:
    full = (computed + scheduled) // page_size
    if full > request.kept:  # seldom, of requests that decode
        full = min(full, len(request.request.all_token_ids) // page_size)
        if full > request.kept:
            yield request, computed, range(request.kept, full)
            request.kept = full


def settings_of(vllm_config: Any, connector: str) -> Settings:
    """The engine's settings. Raises ValueError where it was not asked for pm_ops."""
    settings = Settings.of(vllm_config)
    if settings is None:
        raise ValueError(f"{connector} keeps pm_ops' pages, and pm_ops was not asked for: {HOW}")
    return settings


def hit_source(name: str) -> Any:
    """vLLM's ``CacheHitSource`` of this name; None where vLLM counts the hits of all connectors together."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource[name]
