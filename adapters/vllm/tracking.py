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
    """Each tracked request of a step, how many tokens were computed before, and the blocks to see to.

    Those are full when the step is over, and of known tokens: an engine that schedules ahead gets to know a token, and
    with it what the block holds, a step later.
    """
    for name, computed, blocks, whole in _scheduled(output):
        request = tracked.get(name)
        if request is None:
            continue
        if whole:
            request.blocks = blocks
        else:
            for group, more in zip(request.blocks, blocks, strict=False):  # none at all where there are no new ones
                group += more
        known = len(request.request.all_token_ids)
        full = min(computed + output.num_scheduled_tokens[name], known) // page_size
        yield request, computed, range(request.kept, full)
        request.kept = max(request.kept, full)


def _scheduled(output: Any) -> Iterator[tuple[str, int, list[list[int]], bool]]:
    """``(request, computed tokens, blocks of each group, whether they are all of its blocks)`` of a step's requests."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, [list(group) for group in new.block_ids], True
    cached = output.scheduled_cached_reqs
    for i, request in enumerate(cached.req_ids):
        blocks = [list(group) for group in cached.new_block_ids[i] or ()]
        yield request, cached.num_computed_tokens[i], blocks, request in cached.resumed_req_ids


def settings_of(vllm_config: Any, connector: str) -> Settings:
    """The engine's settings. Raises ValueError where it was not asked for pm_ops."""
    settings = Settings.of(vllm_config)
    if settings is None:
        raise ValueError(f"{connector} keeps pm_ops' pages, and pm_ops was not asked for: {HOW}")
    return settings
