"""SGLang's trees of drafts, verified without a mask over whole sequences.

A draft sees all of its sequence's prefix, and of the drafts behind that those it descends from and itself. So its
softmax has two parts: over the prefix, where nothing is masked, and over the few pages that hold the drafts, where a
small mask says who sees whom. ``merge_attention`` joins them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import pm_ops
from pm_ops import PagePool


@dataclass
class Tree:
    """The pages with a step's drafts, the first of which may begin with the prefix's end."""

    visible: Tensor
    """bool ``[sequences, 1, drafts, pages * page_size]``: the keys of these pages that a draft sees, by this mask."""
    page_table: Tensor
    """int32 ``[sequences, pages]``."""
    seq_lens: Tensor
    """Keys up to the last draft, from these pages' begin on."""
    page_table_window: Tensor | None = None


def pages_of(drafts: int, page_size: int) -> int:
    """As many pages as so many drafts in a row may touch."""
    return (drafts - 2) // page_size + 2


def tree_of(
    visible: Tensor, prefix: Tensor, drafts: int, page_size: int, table: Tensor, table_window: Tensor | None
) -> Tree:
    """The drafts that follow ``prefix [sequences]`` keys in ``table [sequences, pages]``."""
    pages = torch.arange(pages_of(drafts, page_size), device=prefix.device)
    columns = (torch.div(prefix, page_size, rounding_mode="floor")[:, None] + pages).clamp(max=table.shape[1] - 1)
    windows = None if table_window is None else table_window.gather(1, columns)
    return Tree(visible, table.gather(1, columns), prefix % page_size + drafts, windows)


def visible_of(mask: Tensor, prefix: Tensor, drafts: int, page_size: int, whole: bool) -> Tensor:
    """:attr:`Tree.visible` from SGLang's flat ``custom_mask``, of drafts x drafts cells a sequence.

    Args:
        mask: bool or uint8. Sequences past its end are padding: what they see is unspecified.
        prefix: ``[sequences]``, the keys in front of the drafts.
        whole: a row of the mask has a cell for every key of the prefix, too (SGLang's ``FULL_MASK``).
    """
    cells = (prefix.long() if whole else torch.zeros_like(prefix, dtype=torch.int64)) + drafts  # of a draft's row
    first = (cells.cumsum(0) - cells) * drafts + cells - drafts
    i = torch.arange(drafts, device=prefix.device)[:, None]
    j = torch.arange(pages_of(drafts, page_size) * page_size, device=prefix.device) - (prefix % page_size)[:, None]
    is_draft = ((j >= 0) & (j < drafts))[:, None]
    cell = first[:, None, None] + i * cells[:, None, None] + j.clamp(0, drafts - 1)[:, None]
    return (mask[cell.clamp(max=len(mask) - 1)].bool() & is_draft)[:, None]


def refuse_window(window: int, drafts: int) -> None:
    """Raise ValueError for a window, 0 for none, that :func:`attend` cannot cut in two."""
    if 0 < window < 2 * drafts:
        raise ValueError(
            f"pm_ops: trees of {drafts} drafts are verified in windows of {2 * drafts} keys or more, this layer's has "
            f"{window}; choose fewer --speculative-num-draft-tokens, or --attention-backend triton"
        )


def attend(
    pool: PagePool,
    layer: int,
    query: Tensor,
    table: Tensor,
    prefix: Tensor,
    tree: Tree,
    drafts_table: Tensor,
    *,
    window: int,
    sinks: Tensor | None,
    max_seq_len: int,
    **options: Any,
) -> Tensor:
    """Attention of ``query [sequences * drafts, heads, dim]``; the options are those of :func:`pm_ops.attention`.

    A window counts drafts in their order, as SGLang's Triton backend has it, whatever their depth in the tree.
    """
    drafts = tree.visible.shape[2]
    refuse_window(window, drafts)
    options |= {"causal": False, "return_lse": True}
    # The operator counts from the prefix's last key, where the last draft is `drafts` keys behind.
    narrowed = window - drafts if window else 0
    before = pm_ops.attention(
        pool, layer, query, table, prefix, window=narrowed, sinks=sinks, max_seq_len=max_seq_len, **options
    )
    among = pm_ops.attention(pool, layer, query, drafts_table, tree.seq_lens, bias=tree.visible, **options)
    return pm_ops.merge_attention(*before, *among)[0]
