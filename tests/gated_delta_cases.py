"""Calls of the gated delta rule and what is right: float64, one token and one head at a time.

Whatever must not be read is NaN: pages whose state no sequence begins with, rows of skipped sequences and padding rows,
and what lies beside the rows in the tensors that they are slices of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from state_cases import F32, starts, state_pool
from torch import Tensor

from pm_ops.ops._state import state_view
from pm_ops.ops.gated_delta import GatedDeltaPrefill, GatedDeltaUpdate

Call = GatedDeltaUpdate | GatedDeltaPrefill


def _rows(shape: tuple[int, ...], dtype: torch.dtype, alive: Tensor, numbers: Tensor) -> Tensor:
    """Numbers as a slice of a wider tensor of NaN, and NaN in rows that are not alive."""
    wide = torch.full((*shape[:-1], shape[-1] + 16), torch.nan, dtype=dtype)
    rows = wide[..., 8:-8]
    rows.copy_(numbers)
    rows[~alive] = torch.nan
    return rows


def _inputs(
    alive: Tensor, heads: tuple[int, int], dims: tuple[int, int], dtypes: Sequence[torch.dtype], decay: float,
    raw: bool, l2_norm: bool,
) -> dict[str, Any]:  # fmt: skip
    """``heads``, ``dims``: of value and key; ``dtypes``: of query, key, value, g and beta."""
    (hv, hk), (dv, dk), rows = heads, dims, tuple(alive.shape)
    length = 1.0 if l2_norm else dk**-0.5  # longer keys would make a state grow without bound
    g, beta = torch.randn(*rows, hv) * decay, torch.randn(*rows, hv)
    numbers = {
        "query": torch.randn(*rows, hk, dk),
        "key": torch.randn(*rows, hk, dk) * length,
        "value": torch.randn(*rows, hv, dv),
        "g": g if raw else -g.abs(),
        "beta": beta if raw else beta.sigmoid(),
    }
    made = {
        name: _rows(tuple(x.shape), dtype, alive, x) for (name, x), dtype in zip(numbers.items(), dtypes, strict=True)
    }
    weights = {"a_log": torch.randn(hv), "dt_bias": torch.randn(hv)} if raw else {}
    return made | weights | {"l2_norm": l2_norm, "scale": dk**-0.5}


def _pool(
    heads: int, dims: tuple[int, int], dtype: torch.dtype, pages: int, read: Sequence[int], value_first: bool
) -> dict[str, Any]:
    shape = (heads, *(dims if value_first else dims[::-1]))
    pool = state_pool(shape, dtype, pages)
    states = pool.view(1, "state")
    unread = [p for p in range(pages) if p not in read]  # NaN, but not all of it: a NaN written there would not show
    states[unread] = states[unread].masked_fill(torch.rand(len(unread), *shape) < 0.5, torch.nan)
    plane = {"state_plane": pool.geometry(1, "state"), "state_dtype": dtype}
    return {"buffer": pool.buffer, **plane, "value_first": value_first}


def update_case(
    batch: int, tokens: int | None = None, *, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (12, 20),
    dtypes: Sequence[torch.dtype] = (F32,) * 5, state_dtype: torch.dtype = F32, each: bool = False,
    accepted: bool = True, index: torch.dtype = torch.int32, value_first: bool = True, raw: bool = False,
    l2_norm: bool = True, decay: float = 1.0,
) -> GatedDeltaUpdate:  # fmt: skip
    """The second of several sequences is skipped; ``each``: a page for the state after each token, one not written."""
    per = (tokens or 1) if each else 1
    pages = 2 + batch * per
    ids = torch.randperm(pages)[: batch * per].view(batch, per).to(index)
    column = torch.zeros(batch, dtype=torch.int64)
    if each and accepted:
        column = torch.arange(batch) % per
    if batch > 1:
        ids[1, column[1]] = -1
    if each and per > 1:
        ids[0, (column[0] + 1) % per] = -1
    first = ids.gather(1, column[:, None])[:, 0]
    alive = (first >= 0)[(...,) + (None,) * (tokens is not None)].expand(batch, *([] if tokens is None else [tokens]))
    return GatedDeltaUpdate(
        **_pool(heads[0], dims, state_dtype, pages, first.tolist(), value_first),
        **_inputs(alive, heads, dims, dtypes, decay, raw, l2_norm),
        state_indices=ids if each else ids[:, 0],
        num_accepted=(column + 1).to(index) if each and accepted else None,
    )


def prefill_case(
    lens: Sequence[int], *, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (12, 20),
    dtypes: Sequence[torch.dtype] = (F32,) * 5, state_dtype: torch.dtype = F32, index: torch.dtype = torch.int32,
    value_first: bool = True, raw: bool = False, l2_norm: bool = True, decay: float = 1.0, initial: bool = True,
    padding: int = 3, skip: bool = True,
) -> GatedDeltaPrefill:  # fmt: skip
    """The second of several sequences is skipped; every third begins with zeros, and without ``initial`` all do."""
    batch, pages = len(lens), len(lens) + 2
    ids = torch.randperm(pages)[:batch].to(index)
    alive = torch.tensor([True] * sum(lens) + [False] * padding, dtype=torch.bool)
    if skip and batch > 1:
        ids[1] = -1
        alive[lens[0] : lens[0] + lens[1]] = False
    known = torch.tensor([initial and b % 3 != 2 for b in range(batch)], dtype=torch.bool)
    return GatedDeltaPrefill(
        **_pool(heads[0], dims, state_dtype, pages, ids[known].tolist(), value_first),
        **_inputs(alive, heads, dims, dtypes, decay, raw, l2_norm),
        query_start=starts(lens).to(index),
        state_indices=ids,
        has_initial_state=known if initial else None,
    )


def parts_of(a: GatedDeltaPrefill, length: int) -> list[GatedDeltaPrefill]:
    """The call of one sequence as two on the same buffer, the first one of so many tokens."""
    total = int(a.query_start[1])
    rows = ("query", "key", "value", "g", "beta")
    first = replace(a, **{name: getattr(a, name)[:length] for name in rows}, query_start=starts([length]))
    rest = {name: getattr(a, name)[length:total] for name in rows} | {"query_start": starts([total - length])}
    return [first, replace(a, **rest, has_initial_state=torch.tensor([True]))]


def shape_of(a: Call) -> tuple[int, int, int]:
    """A page's states."""
    dims = (a.value.shape[-1], a.key.shape[-1])
    return (a.value.shape[-2], *(dims if a.value_first else dims[::-1]))


def states_of(a: Call) -> Tensor:
    """``[num_pages, Hv, V, K]``, a view."""
    states = state_view(a.buffer, a.state_plane, shape_of(a), a.state_dtype)
    return states if a.value_first else states.transpose(2, 3)


def owned_bytes(a: Call, pages: Sequence[int]) -> list[int]:
    """Every byte of these pages' states."""
    offset, page_stride, _, head_stride, _ = a.state_plane
    heads, *inner = shape_of(a)
    row = math.prod(inner) * a.state_dtype.itemsize
    begins = [offset + page * page_stride + h * head_stride for page in pages for h in range(heads)]
    return [byte for begin in begins for byte in range(begin, begin + row)]


def reference(a: Call) -> tuple[Tensor, dict[int, Tensor]]:
    """The right output, and by page the states to be found there, from the buffer as it is before the call."""
    states = states_of(a).double()
    out = torch.zeros(a.value.shape, dtype=torch.float64)
    put: dict[int, Tensor] = {}
    if isinstance(a, GatedDeltaPrefill):
        begin = a.query_start.tolist()
        for b, page in enumerate(a.state_indices.tolist()):
            if page < 0 or begin[b] == begin[b + 1]:
                continue
            known = a.has_initial_state is not None and bool(a.has_initial_state[b])
            state = states[page] if known else torch.zeros_like(states[page])
            for t in range(begin[b], begin[b + 1]):
                state, out[t] = _token(a, state, (t,))
            put[page] = state
        return out, put
    several = a.value.dim() == 4
    tokens = a.value.shape[1] if several else 1
    for n, row in enumerate(a.state_indices.tolist()):
        row = row if isinstance(row, list) else [row]
        page = row[0 if a.num_accepted is None else int(a.num_accepted[n]) - 1]
        if page < 0:
            continue
        state = states[page]
        for t in range(tokens):
            at = (n, t) if several else (n,)
            state, out[at] = _token(a, state, at)
            page = row[t] if a.state_indices.dim() == 2 else row[0] if t == tokens - 1 else -1
            if page >= 0:
                put[page] = state
    return out, put


def _token(a: Call, state: Tensor, at: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """One token's states ``[Hv, V, K]`` and results ``[Hv, V]``."""
    new, out = torch.empty_like(state), torch.empty(state.shape[:2], dtype=torch.float64)
    for h in range(state.shape[0]):
        source = h // (a.value.shape[-2] // a.key.shape[-2])
        q, k, v = a.query[at][source].double(), a.key[at][source].double(), a.value[at][h].double()
        g, beta = float(a.g[at][h]), float(a.beta[at][h])
        if a.l2_norm:
            q, k = (x / math.sqrt(float(x @ x) + 1e-6) for x in (q, k))
        if a.a_log is not None:
            x = g + float(a.dt_bias[h])
            g = -math.exp(float(a.a_log[h])) * (x if x > 30 else math.log1p(math.exp(x)))
            beta = 1 / (1 + math.exp(-beta))
        decayed = math.exp(g) * state[h]
        new[h] = decayed + beta * torch.outer(v - decayed @ k, k)
        out[h] = a.scale * (new[h] @ q)
    return new, out
