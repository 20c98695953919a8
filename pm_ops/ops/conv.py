"""``conv1d_update`` and ``conv1d_prefill``: short causal convolutions, one filter a channel, their state in pages.

A state is ``(dim, width - 1)``: each channel's last inputs, the newest one last. See :mod:`pm_ops.ops._state` for
which page is read and which one is written. ``out[t] = bias + sum_k weight[k] * input[t - width + 1 + k]``, through
silu where asked for, in float32, rounded once to x's dtype; what is stored is x in the state's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._common import define, describe, require, require_buffer, require_device, require_no_grad
from ._state import (
    STATE_DTYPES,
    require_rows,
    require_sequence_values,
    require_sequences,
    require_state_plane,
    require_update_indices,
    require_update_values,
    state_view,
    update_pages,
)

WIDTHS = (2, 3, 4)


def _require_filter(
    x: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor, plane: Sequence[int], dtype: torch.dtype
) -> None:
    """Rows ``[..., dim]``, a filter for each channel, and a plane of their states."""
    require_buffer(buffer)
    if x.dtype not in STATE_DTYPES:
        raise ValueError(f"x must be float32, float16 or bfloat16, got {describe(x)}")
    require_device("x", x, buffer.device)
    if weight.dim() != 2 or weight.shape[1] not in WIDTHS:
        raise ValueError(f"weight must be [dim, width] with a width of 2, 3 or 4, got {describe(weight)}")
    dim, width = x.shape[-1], weight.shape[1]
    require_rows("weight", weight, (dim, width), buffer.device)
    require_rows("bias", bias, (dim,), buffer.device)
    require(dim >= 1, lambda: f"x must have at least one channel, got {describe(x)}")
    require_state_plane("state", buffer.shape[0], plane, (dim, width - 1), dtype)


def _filtered(window: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """``window [..., dim, width - 1 + n]`` float32 → ``[..., n, dim]``."""
    y = (window.unfold(-1, weight.shape[1], 1) * weight.float()[:, None]).sum(-1)
    if bias is not None:
        y = y + bias.float()[:, None]
    return (torch.nn.functional.silu(y) if silu else y).transpose(-1, -2)


@dataclass(slots=True)
class Conv1dUpdate:
    """Arguments of ``pm_ops::conv1d_update``: the next token, or next tokens, of each of N sequences.

    ``x [N, dim]`` or ``[N, T, dim]``, ``weight [dim, width]``, ``bias [dim]``; returns x's shape and dtype, fresh.
    """

    buffer: Tensor
    x: Tensor
    weight: Tensor
    state_indices: Tensor
    state_plane: Sequence[int]
    state_dtype: torch.dtype
    bias: Tensor | None = None
    silu: bool = False
    num_accepted: Tensor | None = None

    def check(self) -> None:
        if torch.is_grad_enabled():
            require_no_grad("conv1d_update", x=self.x, weight=self.weight, bias=self.bias)
        if self.x.dim() not in (2, 3):
            raise ValueError(f"x must be [sequences, dim] or [sequences, tokens, dim], got {describe(self.x)}")
        _require_filter(self.x, self.weight, self.bias, self.buffer, self.state_plane, self.state_dtype)
        require_device("state_indices", self.state_indices, self.buffer.device)
        tokens = self.x.shape[1] if self.x.dim() == 3 else None
        require_update_indices(self.state_indices, self.num_accepted, self.x.shape[0], tokens)

    def check_values(self) -> None:
        require_update_values(self.state_indices, self.num_accepted, self.state_plane[4])


def _update(a: Conv1dUpdate) -> Tensor:
    x = a.x if a.x.dim() == 3 else a.x[:, None]
    tokens, (dim, width) = x.shape[1], a.weight.shape
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if tokens == 0:
        return out
    source, target = update_pages(a.state_indices, a.num_accepted, tokens)
    live = source >= 0
    states = state_view(a.buffer, a.state_plane, (dim, width - 1), a.state_dtype)
    window = torch.cat((states[source[live]].float(), x[live].float().transpose(1, 2)), 2)
    out[live] = _filtered(window, a.weight, a.bias, a.silu).to(x.dtype)
    for t in range(tokens):
        page = target[live, t]
        states[page[page >= 0]] = window[page >= 0, :, t + 1 : t + width].to(a.state_dtype)
    return out.view(a.x.shape)


define(
    "conv1d_update",
    "(Tensor(a!) buffer, Tensor x, Tensor weight, Tensor state_indices, SymInt[] state_plane, ScalarType state_dtype, "
    "Tensor? bias=None, bool silu=False, Tensor? num_accepted=None) -> Tensor",
    Conv1dUpdate,
    fake=lambda a: a.x.new_empty(a.x.shape),
    cpu=_update,
    cuda="conv.conv1d_update",
)


@dataclass(slots=True)
class Conv1dPrefill:
    """Arguments of ``pm_ops::conv1d_prefill``: sequences one behind the other.

    ``x [T, dim]``, any strides, ``weight [dim, width]``, ``bias [dim]``, ``query_start [B + 1]``; returns ``[T, dim]``,
    fresh.
    """

    buffer: Tensor
    x: Tensor
    weight: Tensor
    query_start: Tensor
    state_indices: Tensor
    state_plane: Sequence[int]
    state_dtype: torch.dtype
    bias: Tensor | None = None
    silu: bool = False
    has_initial_state: Tensor | None = None

    def check(self) -> None:
        if torch.is_grad_enabled():
            require_no_grad("conv1d_prefill", x=self.x, weight=self.weight, bias=self.bias)
        if self.x.dim() != 2:
            raise ValueError(f"x must be rows [tokens, dim], got {describe(self.x)}")
        _require_filter(self.x, self.weight, self.bias, self.buffer, self.state_plane, self.state_dtype)
        require_device("state_indices", self.state_indices, self.buffer.device)
        require_sequences(self.query_start, self.state_indices, self.has_initial_state)

    def check_values(self) -> None:
        require_sequence_values(self.query_start, self.state_indices, self.x.shape[0], self.state_plane[4])


def _prefill(a: Conv1dPrefill) -> Tensor:
    dim, width = a.weight.shape
    states = state_view(a.buffer, a.state_plane, (dim, width - 1), a.state_dtype)
    out = torch.zeros_like(a.x, memory_format=torch.contiguous_format)
    starts = a.query_start.tolist()
    for b, page in enumerate(a.state_indices.tolist()):
        rows = slice(starts[b], starts[b + 1])
        if page < 0 or rows.start == rows.stop:
            continue
        initial = a.has_initial_state is not None and bool(a.has_initial_state[b])
        before = states[page].float() if initial else torch.zeros(dim, width - 1, dtype=torch.float32)
        window = torch.cat((before, a.x[rows].float().T), 1)
        out[rows] = _filtered(window, a.weight, a.bias, a.silu).to(a.x.dtype)
        states[page] = window[:, 1 - width :].to(a.state_dtype)
    return out


define(
    "conv1d_prefill",
    "(Tensor(a!) buffer, Tensor x, Tensor weight, Tensor query_start, Tensor state_indices, SymInt[] state_plane, "
    "ScalarType state_dtype, Tensor? bias=None, bool silu=False, Tensor? has_initial_state=None) -> Tensor",
    Conv1dPrefill,
    fake=lambda a: a.x.new_empty(a.x.shape),
    cpu=_prefill,
    cuda="conv.conv1d_prefill",
)
