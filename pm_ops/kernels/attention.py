"""attention over pages: one kernel for decode, prefill and mixed batches.

A program holds BLOCK_M rows: BLOCK_Q consecutive queries of one sequence x the query heads that share one KV head, so
that keys and values are read once for all of them whatever the group's size. It walks its sequence's keys in tiles of
BLOCK_N, whatever the page size, with an online softmax in fp32. Where the grid alone would not fill the device, the
programs also split the KV axis and `merge_splits` joins their parts.

Which keys a tile reads follows from positions alone, never from page ids, so results do not depend on where pages lie.
They do depend on the number of splits, and that on shapes: batch, heads, page table width, and the device.

Keys past the sequence, past the last key that the program's queries see, or before the first one, are never loaded, nor
are their page ids and scales; with a bias, nor are values that it hides from all rows of the program. So what lies in
unstored, freed or hidden slots has no influence. A non-finite value of a key that one query of a program sees may reach
the other queries of that program (0 * NaN in P @ V), all of the same sequence and at most BLOCK_Q apart.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import attention_hopper
from .attention_plan import Shape, plan_of, shape_of
from .attention_tile import attend
from .common import LN2, LOG2E, TRITON_DTYPE, find_sequence
from .launch import Launch
from .merge import merge_splits

if TYPE_CHECKING:
    from ..ops.attention import Attention


@triton.jit(do_not_specialize=["num_queries", "uniform", "batch", "max_keys", "split_keys", "window", "bias_queries"])
def _attention(
    buffer,
    query,
    page_table,
    seq_lens,
    query_start,  # None: every sequence has `uniform` queries
    sinks,
    alibi_slopes,
    bias,
    key_scale_tensor,
    value_scale_tensor,
    key_scale_plane,  # (offset, page_stride, token_stride, head_stride) of a scale a key, or None
    value_scale_plane,
    out,  # [T, Hq, Dv] of the query's dtype; with SPLIT [splits, T, Hq, Dv] fp32
    lse,  # [T, Hq] fp32, or None; with SPLIT [splits, T, Hq]
    softmax_scale,
    value_scale,
    softcap,
    num_queries: tl.int64,
    uniform: tl.int32,
    batch: tl.int32,
    max_keys: tl.int32,
    split_keys: tl.int32,
    window: tl.int32,
    query_stride: tl.int64,
    query_head_stride: tl.int64,
    query_dim_stride,  # unannotated: 1 becomes a constant
    page_table_stride: tl.int64,
    key_offset: tl.int64,
    key_page_stride: tl.int64,
    key_token_stride: tl.int64,
    key_head_stride: tl.int64,
    value_offset: tl.int64,
    value_page_stride: tl.int64,
    value_token_stride: tl.int64,
    value_head_stride: tl.int64,
    bias_stride: tl.int64,
    bias_head_stride: tl.int64,
    bias_query_stride: tl.int64,
    bias_key_stride,
    bias_queries: tl.int32,
    bias_keys: tl.int32,
    PACKED: tl.constexpr,
    LATENT: tl.constexpr,
    ASM: tl.constexpr,
    NORMALISE: tl.constexpr,
    INVARIANT: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLIT: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    KEY_DOT_DTYPE: tl.constexpr,
    VALUE_DOT_DTYPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # a sequence's last queries see the most keys: they start first
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    num_heads = tl.num_programs(1) // HEAD_BLOCKS * GROUP
    split = tl.program_id(2)

    # Which queries: [first, num) of sequence b, whose rows begin at `start`
    if query_start is None:
        blocks = tl.cdiv(uniform, BLOCK_Q)
        b = block // blocks
        start = b.to(tl.int64) * uniform
        num = uniform
        first = block % blocks * BLOCK_Q
    else:
        b = find_sequence(query_start, block, batch, BLOCK_Q)
        start = tl.load(query_start + b).to(tl.int64)
        stop = tl.load(query_start + b + 1, mask=b < batch, other=0).to(tl.int64)
        num = (tl.where(b < batch, stop, num_queries) - start).to(tl.int32)
        first = ((block - b) - start // BLOCK_Q).to(tl.int32) * BLOCK_Q
    if first >= num:
        return
    seq_len = tl.load(seq_lens + b, mask=b < batch, other=0).to(tl.int32)

    # Which rows: heads vary fastest
    row = tl.arange(0, BLOCK_M)
    i = first + row // HEADS
    member = tl.program_id(1) % HEAD_BLOCKS * HEADS + row % HEADS
    head = kv_head * GROUP + member
    t = start + i
    valid = (row < BLOCK_Q * HEADS) & (i < num) & (member < GROUP) & (t < num_queries)
    position = seq_len - num + i

    # Which keys: [lo, hi) are visible to some row, [full_lo, full_hi) to all
    earliest = seq_len - num + first
    latest = seq_len - num + tl.minimum(first + BLOCK_Q, num) - 1
    lo = tl.zeros([], tl.int32)
    hi = tl.minimum(seq_len, max_keys)
    full_hi = hi
    if CAUSAL:
        hi = tl.minimum(hi, latest + 1)
        full_hi = tl.minimum(full_hi, earliest + 1)
    if WINDOW:
        lo = tl.maximum(lo, earliest - window + 1)
        if not CAUSAL:
            hi = tl.minimum(hi, latest + window)
            full_hi = tl.minimum(full_hi, earliest + window)
    begin = lo // BLOCK_N * BLOCK_N
    end = hi
    if INVARIANT:  # splits at fixed keys
        end = tl.minimum(hi, (split + 1) * split_keys)
        begin = tl.minimum(tl.maximum(begin, split * split_keys), end)
    elif SPLIT:
        tiles = tl.cdiv(tl.maximum(hi - begin, 0), BLOCK_N)
        share = tl.cdiv(tiles, tl.num_programs(2)) * BLOCK_N
        begin += split * share
        end = tl.minimum(hi, begin + share)
    left = begin
    right = begin
    if not INVARIANT:  # there the same instructions compute every tile, whatever other rows of the program see
        if WINDOW:
            left = tl.minimum(tl.maximum(tl.cdiv(latest - window + 1, BLOCK_N) * BLOCK_N, begin), end)
        right = tl.minimum(tl.maximum(full_hi // BLOCK_N * BLOCK_N, left), end)

    q_row = query + (t * query_stride + head.to(tl.int64) * query_head_stride)[:, None]
    q_odd = row
    if PACKED:
        d = 2 * tl.arange(0, BLOCK_K // 2)
        mask = valid[:, None] & (d < DIM_K)[None, :]
        q = tl.load(q_row + d[None, :].to(tl.int64) * query_dim_stride, mask=mask, other=0.0)
        q_odd = tl.load(q_row + (d + 1)[None, :].to(tl.int64) * query_dim_stride, mask=mask, other=0.0)
    elif LATENT:
        d = tl.arange(0, BLOCK_V)
        mask = valid[:, None] & (d < DIM_V)[None, :]
        q = tl.load(q_row + d[None, :].to(tl.int64) * query_dim_stride, mask=mask, other=0.0)
        d = DIM_V + tl.arange(0, BLOCK_K)
        mask = valid[:, None] & (d < DIM_K)[None, :]
        q_odd = tl.load(q_row + d[None, :].to(tl.int64) * query_dim_stride, mask=mask, other=0.0)
    else:
        d = tl.arange(0, BLOCK_K)
        mask = valid[:, None] & (d < DIM_K)[None, :]
        q = tl.load(q_row + d[None, :].to(tl.int64) * query_dim_stride, mask=mask, other=0.0)
    scale = softmax_scale
    if key_scale_tensor is not None:
        scale = softmax_scale * tl.load(key_scale_tensor)
    if NORMALISE:  # rows to [1, 2) by a power of two, which is exact
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        if PACKED or LATENT:
            largest = tl.maximum(largest, tl.max(tl.abs(q_odd.to(tl.float32)), 1))
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        inverse = ((254 << 23) - exponent).to(tl.float32, bitcast=True)[:, None]
        q = q.to(tl.float32) * inverse
        if PACKED or LATENT:
            q_odd = q_odd.to(tl.float32) * inverse
        scale = scale * exponent.to(tl.float32, bitcast=True)[:, None]
    q = q.to(KEY_DOT_DTYPE)
    if PACKED or LATENT:
        q_odd = q_odd.to(KEY_DOT_DTYPE)
    out_scale = value_scale
    if value_scale_tensor is not None:
        out_scale = tl.load(value_scale_tensor)
    keys = buffer + (key_offset + kv_head.to(tl.int64) * key_head_stride)
    values = buffer + (value_offset + kv_head.to(tl.int64) * value_head_stride)
    key_scales = buffer
    if key_scale_plane is not None:
        key_scales = buffer + (key_scale_plane[0] + kv_head.to(tl.int64) * key_scale_plane[3])
    value_scales = buffer
    if value_scale_plane is not None:
        value_scales = buffer + (value_scale_plane[0] + kv_head.to(tl.int64) * value_scale_plane[3])
    table = page_table + b.to(tl.int64) * page_table_stride

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc_odd = l
    if PACKED:
        acc = tl.zeros([BLOCK_M, BLOCK_V // 2], tl.float32)
        acc_odd = tl.zeros([BLOCK_M, BLOCK_V // 2], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    unit = l
    if sinks is not None:  # one more logit, in the first split alone
        with_sink = valid & (b < batch) & (split == 0)
        m = tl.load(sinks + head, mask=with_sink, other=float("-inf")).to(tl.float32) * LOG2E
        l = tl.where(m == float("-inf"), 0.0, 1.0)
    slope = l
    if alibi_slopes is not None:
        slope = tl.load(alibi_slopes + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
    bias_rows = t
    if bias is not None:
        bias_rows = b.to(tl.int64) * bias_stride + head.to(tl.int64) * bias_head_stride
        bias_rows += i.to(tl.int64) * bias_query_stride
    bias_valid = valid & (i < bias_queries)

    # In three parts, of which the middle one needs no masks
    for part in tl.static_range(3):
        if part == 0:
            part_begin = begin
            part_end = left
        elif part == 1:
            part_begin = left
            part_end = right
        else:
            part_begin = right
            part_end = end
        if WINDOW or part > 0:
            acc, acc_odd, unit, m, l = attend(
                acc, acc_odd, unit, m, l, q, q_odd, position, keys, values, table,
                key_page_stride, key_token_stride, value_page_stride, value_token_stride,
                key_scales, value_scales, key_scale_plane, value_scale_plane, scale, softcap, slope,
                bias, bias_rows, bias_valid, bias_key_stride, bias_keys, window, lo, hi, part_begin, part_end,
                part != 1, PACKED, LATENT, ASM, SAME_STRIDES, CAUSAL, WINDOW, SOFTCAP, alibi_slopes is not None,
                KEY_DTYPE, VALUE_DTYPE, VALUE_DOT_DTYPE, PAGE_SIZE, DIM_K, DIM_V, BLOCK_K, BLOCK_V, BLOCK_N,
            )  # fmt: skip

    # l is 0 only where nothing was seen, and then acc is 0 and m -inf
    factor = out_scale / tl.where(l == 0, 1.0, l)
    if value_scale_plane is not None:
        factor *= unit
    if PACKED:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_M, BLOCK_V])
    acc = acc * factor[:, None]
    out_row = t * num_heads + head
    if SPLIT:
        out_row += split.to(tl.int64) * num_queries * num_heads
    d = tl.arange(0, BLOCK_V)
    mask = valid[:, None] & (d < DIM_V)[None, :]
    tl.store(out + out_row[:, None] * DIM_V + d[None, :], acc.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + out_row, (m + tl.log2(l)) * LN2, mask=valid)


def attention(a: Attention) -> tuple[Tensor, Tensor]:
    """`pm_ops::attention`. `impl` was chosen by the operator."""
    return attention_hopper.attention(a) if attention_hopper.takes(a) else attend_pages(a)


def attend_pages(a: Attention, latent: bool = False) -> tuple[Tensor, Tensor]:
    """One launch of the kernel above, or two where the KV axis is split.

    `latent`: the one value head is the first dims of the key, and its plane the key's; a row is loaded once for both.
    """
    tokens, q_heads, dim = a.query.shape
    out = a.new_out()
    lse = a.query.new_empty((tokens, q_heads) if a.return_lse else (0,), dtype=torch.float32)
    if tokens == 0 or q_heads == 0:
        return out, lse
    bias, bias_numbers = _bias(a.bias)
    page_table = a.page_table if a.page_table.stride(1) == 1 else a.page_table.contiguous()
    planes = (*a.key_plane[:4], *a.value_plane[:4])
    strides = (*a.query.stride(), page_table.stride(0), *planes, *bias_numbers)
    splits, run = _launch(shape_of(a, latent), a.page_size, strides, a.softcap > 0, a.buffer.is_cuda)
    partial, partial_lse = out, lse if a.return_lse else None
    if splits > 1:
        partial = a.query.new_empty((splits, tokens, q_heads, a.value_dim), dtype=torch.float32)
        partial_lse = a.query.new_empty((splits, tokens, q_heads), dtype=torch.float32)
    run(
        a.buffer,
        a.query,
        page_table,
        a.seq_lens.contiguous(),
        None if a.query_start is None else a.query_start.contiguous(),
        None if a.sinks is None else a.sinks.contiguous(),
        None if a.alibi_slopes is None else a.alibi_slopes.contiguous(),
        bias,
        a.key_scale_tensor,
        a.value_scale_tensor,
        None if a.key_scale_plane is None else tuple(a.key_scale_plane[:4]),
        None if a.value_scale_plane is None else tuple(a.value_scale_plane[:4]),
        partial,
        partial_lse,
        a.softmax_scale if a.key_scale_tensor is not None else a.softmax_scale * a.key_scale,
        a.value_scale,
        a.softcap,
    )
    if splits > 1:
        assert partial_lse is not None
        merge_splits(partial, partial_lse, out, lse if a.return_lse else None, a.batch_invariant)
    return out, lse


@functools.lru_cache(4096)
def _launch(s: Shape, page_size: int, strides: tuple[int, ...], softcap: bool, asm: bool) -> tuple[int, Launch]:
    """The number of splits and the launch; `strides` are the kernel's last numbers, from `query_stride` on."""
    p = plan_of(s)
    (_, *key_strides, _), (_, *value_strides, _) = strides[4:8], strides[8:12]
    run = Launch(
        _attention,
        (p.query_blocks, s.kv_heads * p.head_blocks, p.splits),
        (
            s.tokens,
            s.tokens // max(s.batch, 1),
            s.batch,
            min(s.keys, 2**31 - 1),
            s.split_keys,
            min(s.window, 1 << 30),
            *strides,
        ),
        PACKED=p.packed,
        LATENT=s.latent,
        ASM=asm,
        NORMALISE=p.key_dot == torch.float16 and s.query_dtype != torch.float16,
        INVARIANT=s.split_keys > 0,
        SAME_STRIDES=key_strides == value_strides,
        CAUSAL=s.causal,
        WINDOW=s.window > 0,
        SOFTCAP=softcap,
        SPLIT=p.splits > 1,
        KEY_DTYPE=TRITON_DTYPE[s.key_dtype],
        VALUE_DTYPE=TRITON_DTYPE[s.value_dtype],
        KEY_DOT_DTYPE=TRITON_DTYPE[p.key_dot],
        VALUE_DOT_DTYPE=TRITON_DTYPE[p.value_dot],
        PAGE_SIZE=page_size,
        GROUP=s.q_heads // s.kv_heads,
        HEADS=p.heads,
        HEAD_BLOCKS=p.head_blocks,
        DIM_K=s.dim,
        DIM_V=s.value_dim,
        BLOCK_K=p.block_k,
        BLOCK_V=p.block_v,
        BLOCK_M=p.block_m,
        BLOCK_Q=p.block_q,
        BLOCK_N=p.block_n,
        num_warps=p.warps,
        num_stages=p.stages,
    )
    return p.splits, run


def _bias(bias: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """A bias for the kernel, bool as bytes; its strides, 0 where broadcast, and its numbers of query rows and keys."""
    if bias is None:
        return None, (0, 0, 0, 0, 0, 0)
    sizes = bias.shape
    strides = [0 if size == 1 else stride for size, stride in zip(sizes[:3], bias.stride(), strict=False)]
    rows = 2**31 - 1 if sizes[2] == 1 else sizes[2]
    numbers = (*strides, bias.stride(3), rows, sizes[3])
    return bias.view(torch.uint8) if bias.dtype == torch.bool else bias, numbers
