"""Prompts, which engines' attention backends give to FlashAttention 3 where ``impl`` is "auto" and it is there."""

from __future__ import annotations

from pm_ops.ops.attention_choice import FA3_QUERIES

CHUNK = 2048
"""So many queries of a sequence are a prompt's, however long it is already.

On an H200 FlashAttention 3 takes 5 to 14 % less time than our kernel for chunks of 2,048 to 8,192 queries, before which
lie none to 24,576 keys; for 512 queries on 7,680 keys it takes 5 % more. Steps that mix such a chunk with decodes were
not measured.
"""


def reads_prompts(queries: int, keys: int) -> bool:
    """Whether some sequence is read for the first time, for the most part or in a long chunk.

    Args:
        queries: the most that a sequence has in this step.
        keys: of the longest sequence, this step's included.
    """
    return queries > FA3_QUERIES and (2 * queries > keys or queries >= CHUNK)
