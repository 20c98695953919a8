"""What the state operators share: a state plane is a plane of pages that hold one token each.

Entry ``(i, …)`` of page ``s`` lies at byte ``offset + s * page_stride + i * head_stride``, contiguous behind the first
axis; ``plane`` is :meth:`PagePool.geometry`'s five numbers, whose token stride is 0. State index ``s`` is a page.

An update takes one or several tokens of each of N sequences. ``state_indices [N]``: the page whose state is read, and
written after the last token. ``[N, T]``, for speculative decoding: the state after token ``t`` goes to page
``state_indices[n, t]``, and the one read is that of page ``state_indices[n, num_accepted[n] - 1]``, the last token
that was accepted of the step before; of column 0 without ``num_accepted``, or where it is 0. A sequence whose page to
read is negative is skipped, with zeros for its result; a negative page to write is not written.

A prefill takes sequences one behind the other in ``query_start``. Sequence ``b`` begins with the state of page
``state_indices[b]`` where ``has_initial_state[b]``, otherwise (or without that argument) with zeros, and its last state
goes to that page. A negative index is skipped, with zeros for its result; a sequence without tokens leaves its page
alone; rows past the last sequence are padding, whose result is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import dtype_name
from ._common import (
    describe,
    plane_view,
    require,
    require_device,
    require_distinct,
    require_in_range,
    require_indices,
    require_plane,
    require_query_start,
    require_values,
)

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def require_state_plane(name: str, nbytes: int, plane: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> None:
    """``{name}_plane`` holds states of this shape and dtype, aligned and inside the buffer of ``nbytes``."""
    if dtype not in STATE_DTYPES:
        supported = ", ".join(map(dtype_name, STATE_DTYPES))
        raise ValueError(f"{name} dtype {dtype_name(dtype)} is not supported for a state; use one of {supported}")
    require_plane(name, nbytes, plane, 1, shape[0], math.prod(shape[1:]), dtype)


def state_view(buffer: Tensor, plane: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The states as a typed strided view ``[num_pages, *shape]``; writes go through."""
    rows = plane_view(buffer, plane, 1, shape[0], math.prod(shape[1:]), dtype)[:, 0]
    return rows.unflatten(2, shape[1:]) if len(shape) > 1 else rows[..., 0]


def require_update_indices(state_indices: Tensor, num_accepted: Tensor | None, batch: int, tokens: int | None) -> None:
    """``state_indices`` is ``[batch]``, or ``[batch, tokens]`` for rows with several tokens a sequence.

    ``num_accepted``, ``[batch]``, goes with the second form alone.
    """
    device = state_indices.device
    require_indices("state_indices", state_indices, device, dim=2 if state_indices.dim() == 2 else 1)
    sizes = state_indices.shape
    require(sizes[0] == batch, lambda: f"state_indices has {sizes[0]} rows for {batch} sequences")
    if len(sizes) == 2:
        if tokens is None:
            raise ValueError(f"state_indices {list(sizes)} has an index for each token; give x a token axis too")
        require(sizes[1] == tokens, lambda: f"state_indices {list(sizes)}: axis 1 must be {tokens}, one for each token")
    if num_accepted is not None:
        if len(sizes) != 2:
            raise ValueError("num_accepted needs state_indices [sequences, tokens], the states to choose from")
        require_indices("num_accepted", num_accepted, device)
        count = num_accepted.shape[0]
        require(count == batch, lambda: f"num_accepted has {count} entries for {batch} sequences")


def require_update_values(state_indices: Tensor, num_accepted: Tensor | None, num_pages: int) -> None:
    """The pages exist, none is named twice, and no more tokens were accepted than there are states."""
    require_in_range("state_indices", state_indices, num_pages, "state pages in the pool")
    require_distinct("state_indices", state_indices.flatten())
    if num_accepted is not None:
        require_values(
            (num_accepted >= 0) & (num_accepted <= state_indices.shape[1]),
            lambda: f"num_accepted {num_accepted.tolist()} must be 0 to {state_indices.shape[1]}",
        )


def update_pages(state_indices: Tensor, num_accepted: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    """The page that each sequence's state is read from, ``[N]``, and the one it is written to after each token.

    The latter is ``[N, tokens]``, -1 where the state is not written.
    """
    index = state_indices.long()
    if index.dim() == 2:
        column = torch.zeros_like(index[:, 0]) if num_accepted is None else (num_accepted.long() - 1).clamp(min=0)
        return index.gather(1, column[:, None])[:, 0], index
    written = index.new_full((len(index), tokens), -1)
    written[:, -1:] = index[:, None]
    return index, written


def require_sequences(query_start: Tensor, state_indices: Tensor, has_initial_state: Tensor | None) -> None:
    """``query_start [B + 1]``, ``state_indices [B]`` and ``has_initial_state [B]`` bool fit one another."""
    device = state_indices.device
    require_indices("state_indices", state_indices, device)
    batch = state_indices.shape[0]
    require_query_start(query_start, batch, device)
    if has_initial_state is not None:
        if has_initial_state.dtype != torch.bool or has_initial_state.dim() != 1:
            raise ValueError(f"has_initial_state must be a 1-D bool tensor, got {describe(has_initial_state)}")
        require_device("has_initial_state", has_initial_state, device)
        count = has_initial_state.shape[0]
        require(count == batch, lambda: f"has_initial_state has {count} entries for {batch} sequences")


def require_sequence_values(query_start: Tensor, state_indices: Tensor, rows: int, num_pages: int) -> None:
    """``query_start`` ascends within the rows; the pages exist, and none is named twice."""
    lengths = query_start[1:] - query_start[:-1]
    require_values(
        torch.cat((query_start[:1] == 0, lengths >= 0, query_start[-1:] <= rows)),
        lambda: f"query_start {query_start.tolist()} must begin at 0, be cumulative, and end within the {rows} rows",
    )
    require_in_range("state_indices", state_indices, num_pages, "state pages in the pool")
    require_distinct("state_indices", state_indices)


def require_rows(name: str, tensor: Tensor | None, shape: Sequence[int], device: torch.device) -> None:
    """A floating-point tensor of this shape on the buffer's device, or None."""
    if tensor is None:
        return
    if tensor.dtype not in STATE_DTYPES or tensor.dim() != len(shape):
        supported = ", ".join(map(dtype_name, STATE_DTYPES))
        raise ValueError(f"{name} must be {list(shape)} of {supported}, got {describe(tensor)}")
    require_device(name, tensor, device)
    for got, wanted in zip(tensor.shape, shape, strict=True):
        require(got == wanted, lambda: f"{name} is {list(tensor.shape)}; it must be {list(shape)}")
