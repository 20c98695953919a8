"""gated_delta_update: one or a few tokens of each sequence, its state read and written where it lies.

A program holds VALUE_BLOCK rows of one value head's state, [VALUE_BLOCK, KEY_BLOCK], in registers from the first token
to the last: a state is read once, and written once for each token after which it is kept.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.gated_delta import L2_EPS as EPSILON
from .common import LOG2E, TRITON_DTYPE, cdiv, next_power_of_2
from .launch import Launch
from .state import first_page, softplus

if TYPE_CHECKING:
    from ..ops.gated_delta import GatedDeltaUpdate

L2_EPS = tl.constexpr(EPSILON)
SMALLEST = tl.constexpr(-64.0)  # of the decays as powers of two: sums of 64 keep what is behind the point


@triton.jit
def decays(x, h, a_log, dt_bias):
    """Each token's decay as a power of two, which is at most 0. NaN stays NaN."""
    x = x.to(tl.float32)
    if a_log is not None:
        x += tl.load(dt_bias + h).to(tl.float32)
        x = -tl.exp(tl.load(a_log + h).to(tl.float32)) * softplus(x)
    x *= LOG2E
    return tl.where(x < SMALLEST, SMALLEST, x)


@triton.jit
def rates(x, a_log):
    """Each token's rate."""
    x = x.to(tl.float32)
    return x if a_log is None else tl.sigmoid(x)


@triton.jit
def state_cells(
    buffer, page, h, offset, page_stride, head_stride, v, k,
    VALUE_DIM: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_FIRST: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Where entries (v, k) of a value head's state are; page and h of 64 bits."""
    head = buffer + (offset + page * page_stride + h * head_stride)
    at = v * KEY_DIM + k if VALUE_FIRST else k * VALUE_DIM + v
    return head.to(tl.pointer_type(DTYPE)) + at


@triton.jit(do_not_specialize=["tokens", "num_pages", "columns"])
def _gated_delta_update(
    buffer,
    out,
    query,
    key,
    value,
    g,
    beta,
    state_indices,
    num_accepted,
    a_log,
    dt_bias,
    scale,
    tokens,
    columns,
    num_pages: tl.int64,
    offset: tl.int64,
    page_stride: tl.int64,
    head_stride: tl.int64,
    query_strides,
    key_strides,
    value_strides,
    g_strides,
    beta_strides,
    ONE_TOKEN: tl.constexpr,
    EACH_TOKEN: tl.constexpr,
    L2_NORM: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (VALUE_DIM + VALUE_BLOCK - 1) // VALUE_BLOCK
    program = tl.program_id(0)
    n = (program // (blocks * HEADS)).to(tl.int64)
    h = (program // blocks % HEADS).to(tl.int64)
    v = program % blocks * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    k = tl.arange(0, KEY_BLOCK)
    page = first_page(state_indices, num_accepted, n, columns)
    live = (page >= 0) & (page < num_pages)
    inside = (v < VALUE_DIM)[:, None] & (k < KEY_DIM)[None, :]
    source = state_cells(
        buffer, page, h, offset, page_stride, head_stride, v[:, None], k[None, :],
        VALUE_DIM, KEY_DIM, VALUE_FIRST, DTYPE,
    )  # fmt: skip
    state = tl.load(source, mask=inside & live, other=0.0).to(tl.float32)

    query += n * query_strides[0] + h // GROUP * query_strides[2]
    key += n * key_strides[0] + h // GROUP * key_strides[2]
    value += n * value_strides[0] + h * value_strides[2]
    g += n * g_strides[0] + h * g_strides[2]
    beta += n * beta_strides[0] + h * beta_strides[2]
    query += k.to(tl.int64) * query_strides[3]
    key += k.to(tl.int64) * key_strides[3]
    value += v.to(tl.int64) * value_strides[3]
    if ONE_TOKEN:
        tokens = 1
    row = out + (n * tokens * HEADS + h) * VALUE_DIM + v
    tl.debug_barrier()  # the state is loaded by every thread before another one stores to it
    for t in range(tokens):
        q = tl.load(query, mask=k < KEY_DIM, other=0.0).to(tl.float32)
        kk = tl.load(key, mask=k < KEY_DIM, other=0.0).to(tl.float32)
        x = tl.load(value, mask=v < VALUE_DIM, other=0.0).to(tl.float32)
        decay = tl.exp2(decays(tl.load(g), h, a_log, dt_bias))
        rate = rates(tl.load(beta), a_log)
        if L2_NORM:
            q *= tl.rsqrt(tl.sum(q * q) + L2_EPS)
            kk *= tl.rsqrt(tl.sum(kk * kk) + L2_EPS)
        state *= decay
        # S q of the new state is that of the old one and change * (k q): the two sums over a state wait for one another
        # no more
        found = tl.sum(state * kk[None, :], 1)
        o = tl.sum(state * q[None, :], 1)
        change = rate * (x - found)
        state += change[:, None] * kk[None, :]
        o = (o + change * tl.sum(kk * q)) * scale
        tl.store(row, tl.where(live, o, 0.0).to(out.dtype.element_ty), mask=v < VALUE_DIM)
        if EACH_TOKEN:
            after = tl.load(state_indices + n * columns + t).to(tl.int64)
            target = state_cells(
                buffer, after, h, offset, page_stride, head_stride, v[:, None], k[None, :],
                VALUE_DIM, KEY_DIM, VALUE_FIRST, DTYPE,
            )  # fmt: skip
            kept = live & (after >= 0) & (after < num_pages)
            tl.store(target, state.to(DTYPE), mask=inside & kept)
        query += query_strides[1]
        key += key_strides[1]
        value += value_strides[1]
        g += g_strides[1]
        beta += beta_strides[1]
        row += HEADS * VALUE_DIM
    if not EACH_TOKEN:
        tl.store(source, state.to(DTYPE), mask=inside & live)


def gated_delta_update(a: GatedDeltaUpdate) -> Tensor:
    """`pm_ops::gated_delta_update` in one launch."""
    out = a.value.new_empty(a.value.shape)
    if out.numel() == 0:
        return out
    rows = [x if a.query.dim() == 4 else x.unsqueeze(1) for x in (a.query, a.key, a.value, a.g, a.beta)]
    run = _update_launch(
        rows[0].shape,
        rows[2].shape,
        tuple(x.stride() for x in rows),
        tuple(a.state_plane),
        a.state_dtype,
        a.state_indices.dim() == 2,
        a.l2_norm,
        a.value_first,
    )
    index = a.state_indices.contiguous()
    accepted, a_log, dt_bias = (None if x is None else x.contiguous() for x in (a.num_accepted, a.a_log, a.dt_bias))
    run(a.buffer, out, *rows, index, accepted, a_log, dt_bias, a.scale)
    return out


@functools.lru_cache(4096)
def _update_launch(
    keys: torch.Size,
    values: torch.Size,
    strides: tuple[tuple[int, ...], ...],
    plane: tuple[int, ...],
    dtype: torch.dtype,
    each_token: bool,
    l2_norm: bool,
    value_first: bool,
) -> Launch:
    """The launch of inputs ``[N, T, heads, dim]``."""
    (sequences, tokens, key_heads, key_dim), (_, _, heads, value_dim) = keys, values
    offset, page_stride, _, head_stride, num_pages = plane
    blocks = update_blocks(key_dim, value_dim, dtype)
    return Launch(
        _gated_delta_update,
        (sequences * heads * cdiv(value_dim, blocks["VALUE_BLOCK"]),),
        (tokens, tokens if each_token else 1, num_pages, offset, page_stride, head_stride, *map(spread, strides)),
        ONE_TOKEN=tokens == 1,
        EACH_TOKEN=each_token,
        L2_NORM=l2_norm,
        VALUE_FIRST=value_first,
        DTYPE=TRITON_DTYPE[dtype],
        HEADS=heads,
        GROUP=heads // key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        KEY_BLOCK=columns(key_dim),
        **blocks,
    )


def columns(key_dim: int) -> int:
    """Columns of a block for all keys: two or more a lane of a warp, so that all lanes get the same sum of a row.

    Of a single product the compiler's contraction of product and sum into an `fma` has each lane add its own, exact, to
    the rounded one of another lane: the lanes' sums differ in the last bit, and whose is stored is not defined.
    """
    return max(next_power_of_2(key_dim), 64)


def update_blocks(key_dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Rows of a state a program, and its warps: 4 KiB and one, the fastest on an H200 for fp32 and for bf16 states.

    Keys of 32 or fewer, whose blocks have twice the columns or more (:func:`columns`), were not measured.
    """
    rows = max(4096 // (next_power_of_2(key_dim) * dtype.itemsize), 1)
    return {"VALUE_BLOCK": min(rows, next_power_of_2(value_dim)), "num_warps": 1}


def spread(strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of ``[N, T, heads]`` or ``[N, T, heads, dim]``, as four."""
    return (*strides, 0)[:4]
