"""Calls of the operators over states, in pages of random bytes, and what is right: float64, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import pm_ops
from pm_ops import PagePool
from pm_ops.ops._state import state_view
from pm_ops.ops.conv import Conv1dPrefill, Conv1dUpdate
from pm_ops.ops.selective import SelectiveScanPrefill, SelectiveStateUpdate
from pm_ops.testing import fill_random

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CHUNKS = [1, 63, 64, 65, 0, 1025]
"""Lengths around the chunks of a prefill."""
Call = Conv1dUpdate | Conv1dPrefill | SelectiveStateUpdate | SelectiveScanPrefill


def state_pool(shape: Sequence[int], dtype: torch.dtype, num_pages: int, layers: int = 3) -> PagePool:
    """Pages of random bytes with gaps between them, in a larger buffer; the states of layer 1 are numbers.

    In front of page 0 there is room for one more, so that a write to page -1 would be seen.
    """
    layout = pm_ops.state_page(layers, {"state": (tuple(shape), dtype)}, align=16)
    stride = layout.page_bytes + 48
    buffer = torch.zeros(64 + (num_pages + 1) * stride + 16, dtype=torch.uint8)
    fill_random(buffer)
    pool = PagePool(layout, num_pages, buffer=buffer, base=64 + stride, page_stride=stride)
    view = pool.view(1, "state")
    view.copy_(torch.randn(view.shape).to(dtype))
    return pool


def _rows(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers in the middle of a wider tensor of NaN, so that nothing beside them is read unseen."""
    wide = torch.full((*shape[:-1], shape[-1] + 5), torch.nan, dtype=dtype)
    rows = wide[..., 2:-3]
    rows.copy_(torch.randn(tuple(shape)))
    return rows


def _indices(batch: int, per_token: int | None, num_pages: int, skip: bool, dtype: torch.dtype) -> Tensor:
    count = batch * (per_token or 1)
    index = torch.randperm(num_pages)[:count].to(dtype)
    index = index.view(batch, per_token) if per_token else index
    if skip and batch > 1:
        index[1] = -1
    if skip and per_token and per_token > 1:
        index[0, -1] = -1
    return index


def _accepted(batch: int, tokens: int | None, dtype: torch.dtype) -> Tensor:
    """Any number, but one of the first sequence, whose last token has no page."""
    accepted = torch.randint(0, (tokens or 1) + 1, (batch,), dtype=dtype)
    accepted[:1] = 1
    return accepted


def conv_update(
    batch: int, tokens: int | None = None, *, dim: int = 20, width: int = 4, dtype: torch.dtype = F32,
    state_dtype: torch.dtype = F32, per_token: bool = False, bias: bool = True, silu: bool = True, skip: bool = True,
    index_dtype: torch.dtype = torch.int32,
) -> Conv1dUpdate:  # fmt: skip
    pages = 2 + batch * (tokens or 1)
    leading = (batch,) if tokens is None else (batch, tokens)
    pool = state_pool((dim, width - 1), state_dtype, pages)
    index = _indices(batch, tokens if per_token else None, pages, skip, index_dtype)
    accepted = _accepted(batch, tokens, index_dtype) if per_token else None
    rows, weight, taps = _rows((*leading, dim), dtype), torch.randn(dim, width).to(dtype), torch.randn(dim).to(dtype)
    plane = pool.geometry(1, "state")
    return Conv1dUpdate(
        pool.buffer, rows, weight, index, plane, state_dtype, taps if bias else None, silu, accepted
    )  # fmt: skip


def conv_prefill(
    lens: Sequence[int], *, dim: int = 20, width: int = 4, dtype: torch.dtype = F32, state_dtype: torch.dtype = F32,
    bias: bool = True, silu: bool = True, skip: bool = True, initial: bool = True, padding: int = 3,
    index_dtype: torch.dtype = torch.int32,
) -> Conv1dPrefill:  # fmt: skip
    pool = state_pool((dim, width - 1), state_dtype, len(lens) + 2)
    return Conv1dPrefill(
        pool.buffer, _rows((sum(lens) + padding, dim), dtype), torch.randn(dim, width).to(dtype), starts(lens),
        _indices(len(lens), None, len(lens) + 2, skip, index_dtype), pool.geometry(1, "state"), state_dtype,
        torch.randn(dim).to(dtype) if bias else None, silu, _initial(lens) if initial else None,
    )  # fmt: skip


def _mamba(leading: tuple[int, ...], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    (h, g), (p, s) = heads, dims
    shapes = [(*leading, h, p), (*leading, h), (h,), (*leading, g, s), (*leading, g, s)]
    x, dt, A, B, C = (_rows(shape, dtype if i != 2 else F32) for i, shape in enumerate(shapes))
    for rows in (B, C):
        rows.div_(s**0.25)  # so that outputs are about as large as x
    return [x, dt, -A.abs(), B, C]


def _options(leading: tuple[int, ...], heads: int, dim: int, dtype: torch.dtype, gate: bool) -> dict[str, Any]:
    z = _rows((*leading, heads, dim), dtype) if gate else None
    return dict(D=torch.randn(heads), z=z, dt_bias=torch.randn(heads), dt_softplus=True, dt_min=0.05, dt_max=2.0)


def ssm_update(
    batch: int, tokens: int | None = None, *, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (12, 20),
    dtype: torch.dtype = F32, state_dtype: torch.dtype = F32, per_token: bool = False, skip: bool = True,
    gate: bool = True, index_dtype: torch.dtype = torch.int32, **options: Any,
) -> SelectiveStateUpdate:  # fmt: skip
    pages = 2 + batch * (tokens or 1)
    leading = (batch,) if tokens is None else (batch, tokens)
    pool = state_pool((heads[0], *dims), state_dtype, pages)
    index = _indices(batch, tokens if per_token else None, pages, skip, index_dtype)
    accepted = _accepted(batch, tokens, index_dtype) if per_token else None
    return SelectiveStateUpdate(
        pool.buffer, *_mamba(leading, heads, dims, dtype), index, pool.geometry(1, "state"), state_dtype,
        **_options(leading, heads[0], dims[0], dtype, gate) | options, num_accepted=accepted,
    )  # fmt: skip


def ssm_prefill(
    lens: Sequence[int], *, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (12, 20),
    dtype: torch.dtype = F32, state_dtype: torch.dtype = F32, skip: bool = True, initial: bool = True,
    gate: bool = True, padding: int = 3, index_dtype: torch.dtype = torch.int32, **options: Any,
) -> SelectiveScanPrefill:  # fmt: skip
    pool = state_pool((heads[0], *dims), state_dtype, len(lens) + 2)
    rows = (sum(lens) + padding,)
    return SelectiveScanPrefill(
        pool.buffer, *_mamba(rows, heads, dims, dtype), starts(lens),
        _indices(len(lens), None, len(lens) + 2, skip, index_dtype), pool.geometry(1, "state"), state_dtype,
        **_options(rows, heads[0], dims[0], dtype, gate) | options,
        has_initial_state=_initial(lens) if initial else None,
    )  # fmt: skip


def starts(lens: Sequence[int]) -> Tensor:
    return torch.tensor([sum(lens[:b]) for b in range(len(lens) + 1)], dtype=torch.int32)


def _initial(lens: Sequence[int]) -> Tensor:
    return torch.tensor([b % 3 != 2 for b in range(len(lens))])


def copied(a: Any) -> Any:
    """The same call on a buffer of its own."""
    return replace(a, buffer=a.buffer.clone())


def shape_of(a: Call) -> tuple[int, ...]:
    """A state's shape."""
    if isinstance(a, Conv1dUpdate | Conv1dPrefill):
        return a.weight.shape[0], a.weight.shape[1] - 1
    return *a.x.shape[-2:], a.B.shape[-1]


def states_of(a: Call) -> Tensor:
    return state_view(a.buffer, a.state_plane, shape_of(a), a.state_dtype)


def reference(a: Call) -> tuple[Tensor, dict[int, Tensor]]:
    """The right output and the states to be found by page, float64, from the buffer as it is before the call."""
    states = states_of(a).double()
    out = torch.zeros(a.x.shape, dtype=torch.float64)
    put: dict[int, Tensor] = {}
    step = _conv_token if isinstance(a, Conv1dUpdate | Conv1dPrefill) else _ssm_token
    if isinstance(a, Conv1dPrefill | SelectiveScanPrefill):
        begin = a.query_start.tolist()
        for b, page in enumerate(a.state_indices.tolist()):
            if page < 0 or begin[b] == begin[b + 1]:
                continue
            known = a.has_initial_state is not None and bool(a.has_initial_state[b])
            state = states[page] if known else torch.zeros_like(states[page])
            for t in range(begin[b], begin[b + 1]):
                state, out[t] = step(a, state, (t,))
            put[page] = state
        return out, put
    several = a.x.dim() == (3 if isinstance(a, Conv1dUpdate) else 4)
    for n, row in enumerate(a.state_indices.tolist()):
        pages = row if isinstance(row, list) else [row]
        column = 0 if a.num_accepted is None else max(int(a.num_accepted[n]) - 1, 0)
        if pages[column] < 0:
            continue
        state = states[pages[column]]
        tokens = a.x.shape[1] if several else 1
        for t in range(tokens):
            at = (n, t) if several else (n,)
            state, out[at] = step(a, state, at)
            page = pages[t] if isinstance(row, list) else row if t == tokens - 1 else -1
            if page >= 0:
                put[page] = state
    return out, put


def _conv_token(a: Any, state: Tensor, at: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    window = torch.cat((state, a.x[at].double()[:, None]), 1)
    y = (window * a.weight.double()).sum(1)
    if a.bias is not None:
        y = y + a.bias.double()
    return window[:, 1:], y * torch.sigmoid(y) if a.silu else y


def _ssm_token(a: Any, state: Tensor, at: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    x, dt, group = a.x[at].double(), a.dt[at].double(), a.x.shape[-2] // a.B.shape[-2]
    if a.dt_bias is not None:
        dt = dt + a.dt_bias.double()
    if a.dt_softplus:
        dt = torch.log1p(torch.exp(dt))
    dt = dt.clamp(a.dt_min, math.inf if a.dt_max is None else a.dt_max)
    new, y = torch.empty_like(state), torch.empty_like(x)
    for h in range(x.shape[0]):
        b, c = a.B[at][h // group].double(), a.C[at][h // group].double()
        new[h] = torch.exp(dt[h] * a.A[h].double()) * state[h] + dt[h] * torch.outer(x[h], b)
        y[h] = new[h] @ c
    if a.D is not None:
        y = y + a.D.double()[:, None] * x
    return new, y if a.z is None else y * a.z[at].double() * torch.sigmoid(a.z[at].double())


def owned_bytes(a: Call, pages: Sequence[int]) -> list[int]:
    """Every byte of these pages' states."""
    offset, page_stride, _, head_stride, _ = a.state_plane
    heads, *inner = shape_of(a)
    row = math.prod(inner) * a.state_dtype.itemsize
    begins = [offset + page * page_stride + h * head_stride for page in pages for h in range(heads)]
    return [byte for begin in begins for byte in range(begin, begin + row)]
