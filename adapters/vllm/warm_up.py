"""Kernels compiled before the first request waits for them, as vLLM does it for its own.

Which variant of a kernel a call takes follows from how many queries a sequence has, and whether there is work enough
without splitting the keys; and whether all have one query, for which vLLM's decodes have no ``query_start``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .backend import PageMajorImpl, PageMajorMetadata

TOKENS = 1024
"""Of the largest call, at least; and the most sequences of any."""
ROWS = 1 << 15
"""Tokens times heads of the largest call, which is of more tokens where a rank has few heads: from 16,896 on, calls of
many queries have a program of 128 rows for each of 132 multiprocessors, and the kernels for so much work take over."""


def warm_up(layers: dict[str, Any], dtype: torch.dtype, max_seq_len: int) -> int:
    """Run attention in every kind of layer, on queries of 0 and on page 0, which holds nothing. Returns how many calls.

    Args:
        layers: the model's attention and state layers by name, with their caches bound.
        dtype: of the queries.
        max_seq_len: keys that the longest sequence may have.
    """
    seen, calls = set(), 0
    for layer in layers.values():
        impl = layer.impl if hasattr(layer, "impl") else None
        if not isinstance(impl, PageMajorImpl) or kind(impl) in seen:
            continue
        seen.add(kind(impl))
        cache: Tensor = layer.kv_cache
        located = impl.locate(cache)
        tokens = max(TOKENS, ROWS // impl.num_heads)
        for step in steps(tokens, located.page_size, max_seq_len, cache.device):
            query = torch.zeros(step.tokens, impl.num_heads, impl.head_size, dtype=dtype, device=cache.device)
            output = query.new_empty(step.tokens, impl.num_heads, located.value_dim)
            impl.forward(layer, query, query, query, cache, step, output)
            calls += 1
    return calls


def kind(impl: PageMajorImpl) -> tuple[Any, ...]:
    """All of a layer that its kernels may follow from."""
    extras = (impl.sinks is None, impl.alibi_slopes is None)
    return (
        impl.num_heads,
        impl.num_kv_heads,
        impl.head_size,
        impl.window,
        impl.softcap > 0,
        impl.kv_cache_dtype,
        *extras,
    )


def steps(tokens: int, page_size: int, max_seq_len: int, device: torch.device) -> Iterator[PageMajorMetadata]:
    """Of 1, 2, 4, ... queries: one sequence, whose keys are split, and as many as fit, whose keys are not.

    Of one query each, with ``query_start``, as in a padded batch, and without it, as in a batch of decodes. The last
    one comes again as a prompt, for which FlashAttention 3 may be taken.
    """
    width = -(-max_seq_len // page_size)
    queries = 1
    while queries <= min(tokens, max_seq_len):
        for batch in {1, min(TOKENS, tokens // queries)}:
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * queries
            for query_start in (starts, None) if queries == 1 else (starts,):
                step = PageMajorMetadata(
                    tokens=batch * queries,
                    query_start=query_start,
                    seq_lens=torch.full((batch,), queries, dtype=torch.int32, device=device),
                    page_table=torch.zeros(batch, width, dtype=torch.int32, device=device),
                    max_query_len=queries,
                    max_seq_len=max_seq_len,
                    causal=True,
                    prompts=False,
                )
                yield step
        queries *= 2
    yield replace(step, prompts=True)
