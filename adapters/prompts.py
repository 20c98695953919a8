"""Prompts, which engines' attention backends give to FlashAttention 3 where ``impl`` is "auto" and it is there."""

from __future__ import annotations

from pm_ops.ops.attention_choice import FA3_QUERIES


def reads_prompts(queries: int, keys: int) -> bool:
    """Whether most of some sequence is this step's: a prompt that is read for the first time.

    Args:
        queries: the most that a sequence has in this step.
        keys: of the longest sequence, this step's included.
    """
    return queries > FA3_QUERIES and 2 * queries > keys
