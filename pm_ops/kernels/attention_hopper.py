"""attention for many queries on Hopper: one warp or four fetch pages while two warpgroups compute.

A program holds 128 rows, BLOCK_Q consecutive queries of one sequence x the query heads that share one KV head, as in
`attention.py`, and consists of three parts. The producer has the key and value tiles of BLOCK_N tokens brought into
shared memory in boxes of ROWS tokens x 64 elements, 128-byte rows swizzled as wgmma wants them, so that the boxes of
one tile, one behind the other, are the tile. Where pages are multiples of 8 tokens a box is a part of one page, and the
copy engine (TMA) fetches it; else the producer's four warps copy row by row. Each of two consumer warpgroups computes
64 rows. Tiles, sums and their order do not depend on the page size, so the bits of a result do not either.

Rows of keys that no query of the program sees become zeros: whole boxes come from past the last page, which the copy
engine fills with zeros, and values in a box at the edge are zeroed before they are used, since 0 * NaN would reach the
output; logits of hidden keys are replaced. Page ids of such rows are not read. So what `attention.py` grants holds.

Gluon has no interpreter; tests run these kernels' Python on the CPU (`tests/kernels/gluon_interpreter.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .attention_plan import query_blocks_of
from .common import LOG2E, on_device
from .device import is_hopper, multiprocessors
from .hopper_consume import consume
from .hopper_produce import produce
from .hopper_tile import BLOCK_M, COLUMNS

if TYPE_CHECKING:
    from ..ops.attention import Attention

_BOX = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
COPIED_ROWS = 32  # tokens of a box that is copied row by row
_DIMS = (64, 128, 256)
_LONG = 16384  # keys from which on programs differ too much in length for one list of tiles a multiprocessor


@gluon.jit(
    do_not_specialize=["num_pages", "uniform", "batch", "query_blocks", "num_queries", "max_keys", "kv_heads", "window"]
)
def _attention_hopper(
    key_plane,  # BOXES: descriptors [num_pages, heads, page_size, dim]; else pointers
    value_plane,
    key_strides,  # None, or of page, token and head, in units of 16 bytes
    value_strides,
    query,
    query_stride,
    query_head_stride,
    out,  # [T, Hq, Dv]
    lse,  # [T, Hq] fp32, or None
    sinks,
    page_table,
    page_table_stride,
    num_pages,
    query_start,
    seq_lens,
    scale,
    cap,
    cap_scale,
    out_scale,
    uniform,
    batch,
    query_blocks,
    num_queries,
    max_keys,
    kv_heads,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    DIM_K: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    BOXES: gl.constexpr,
):
    BLOCK_Q: gl.constexpr = BLOCK_M // HEADS
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    dtype: gl.constexpr = query.dtype.element_ty
    boxes: gl.constexpr = STAGES * (BLOCK_N // ROWS)
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    box: gl.constexpr = key_plane.layout if BOXES else tile
    shape: gl.constexpr = [1, 1, ROWS, COLUMNS] if BOXES else [ROWS, COLUMNS]
    key_boxes = gl.allocate_shared_memory(dtype, [boxes * (DIM_K // COLUMNS)] + shape, box)
    value_boxes = gl.allocate_shared_memory(dtype, [boxes * (DIM_V // COLUMNS)] + shape, box)
    key_tiles = key_boxes._reinterpret(dtype, [STAGES, BLOCK_N, DIM_K], tile)
    value_tiles = value_boxes._reinterpret(dtype, [STAGES, BLOCK_N, DIM_V], tile)
    first_q = gl.allocate_shared_memory(dtype, [BLOCK_M // 2, DIM_K], tile)
    second_q = gl.allocate_shared_memory(dtype, [BLOCK_M // 2, DIM_K], tile)
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_edge = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(key_full.index(s), count=1 if BOXES else 128)  # the copy engine, or each thread that copies
        mbarrier.init(key_empty.index(s), count=2)
        mbarrier.init(value_full.index(s), count=1 if BOXES else 128)
        mbarrier.init(value_empty.index(s), count=2)
    mbarrier.init(value_edge, count=1)
    sequences = (query_start, seq_lens, uniform, batch, query_blocks, num_queries, max_keys, kv_heads, window)
    # fmt: off
    gl.warp_specialize(
        [
            (consume, (
                first_q, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty,
                query, query_stride, query_head_stride, out, lse, sinks, scale, cap, cap_scale, out_scale,
                sequences,
                FIRST, CAUSAL, WINDOW, SOFTCAP, HEADS, DIM_K, DIM_V, BLOCK_Q, BLOCK_N, STAGES, BOXES,
            )),
            (consume, (
                second_q, key_tiles, value_tiles, key_full, key_empty, value_full, value_empty,
                query, query_stride, query_head_stride, out, lse, sinks, scale, cap, cap_scale, out_scale,
                sequences,
                SECOND, CAUSAL, WINDOW, SOFTCAP, HEADS, DIM_K, DIM_V, BLOCK_Q, BLOCK_N, STAGES, BOXES,
            )),
            (produce, (
                key_plane, value_plane, key_strides, value_strides, key_boxes, value_boxes,
                key_full, key_empty, value_full, value_empty, value_edge, page_table, page_table_stride, num_pages,
                sequences,
                CAUSAL, WINDOW, PAGE_SIZE, ROWS, DIM_K, DIM_V, BLOCK_Q, BLOCK_N, STAGES, BOXES,
            )),
        ],
        [4, 1 if BOXES else 4],
        [232, 40] if BOXES else [216, 72],
    )
    # fmt: on


def able(a: Attention) -> bool:
    """Whether these kernels can do a call.

    They are for compute capability 9, caches of the query's 16-bit dtype at 16-byte strides, dims of 64, 128 or 256,
    and neither ALiBi nor bias.
    """
    q_heads, dim = a.query.shape[1:]
    return (
        is_hopper(a.query.device)
        and a.query.dtype in (torch.float16, torch.bfloat16)
        and a.query.dtype == a.key_dtype == a.value_dtype
        and dim in _DIMS
        and a.value_dim in _DIMS
        and q_heads // a.kv_heads <= BLOCK_M.value
        and a.alibi_slopes is None
        and a.bias is None
        and not a.batch_invariant
        and a.key_scale_tensor is None
        and a.value_scale_tensor is None
        and a.softmax_scale * a.key_scale > 0
        and a.query.stride(2) == 1
        and a.planes_divide_by(16)
    )


def takes(a: Attention) -> bool:
    """Whether they should: they can, and there is work for 128 rows a program and half a device of programs."""
    group = a.query.shape[1] // a.kv_heads
    return (
        a.queries_per_sequence * group >= BLOCK_M.value
        and able(a)
        and 2 * _query_blocks(a) * a.kv_heads >= multiprocessors(a.query.device)
    )


def attention(a: Attention) -> tuple[Tensor, Tensor]:
    """`pm_ops::attention`, of calls that :func:`takes` approves of: one launch."""
    tokens, q_heads, dim = a.query.shape
    batch = a.seq_lens.shape[0]
    out = a.new_out()
    lse = a.query.new_empty((tokens, q_heads) if a.return_lse else (0,), dtype=torch.float32)
    block_n = _block_n(dim, a.value_dim)
    rows = min(a.page_size & -a.page_size, 64, block_n)  # a power of two that divides the page
    boxes = rows >= 8
    keys: Tensor | TensorDescriptor
    values: Tensor | TensorDescriptor
    keys, values = a.plane_views()
    num_pages = keys.shape[0]  # the page behind the last has to be none of either plane
    key_strides, value_strides = None, None
    if boxes:
        keys, values = descriptor(keys, rows), descriptor(values, rows)
    else:
        rows = COPIED_ROWS
        key_strides, value_strides = (tuple(st // 8 for st in plane.stride()[:3]) for plane in (keys, values))
    page_table = a.page_table if a.page_table.stride(1) == 1 else a.page_table.contiguous()
    max_keys = min(page_table.shape[1] * a.page_size, 2**31 - 1)
    longest = min(max_keys, a.max_seq_len or max_keys)
    query_blocks = _query_blocks(a)
    programs = query_blocks * a.kv_heads
    scale = a.softmax_scale * a.key_scale
    capped = a.softcap > 0
    with on_device(a.buffer):
        _attention_hopper[(programs if longest >= _LONG else min(programs, multiprocessors(a.query.device)),)](
            keys,
            values,
            key_strides,
            value_strides,
            a.query,
            *a.query.stride()[:2],
            out,
            lse if a.return_lse else None,
            None if a.sinks is None else a.sinks.contiguous(),
            page_table,
            page_table.stride(0),
            num_pages,
            None if a.query_start is None else a.query_start.contiguous(),
            a.seq_lens.contiguous(),
            1.0 if capped else scale * LOG2E.value,
            a.softcap * LOG2E.value,
            scale * 2 * LOG2E.value / a.softcap if capped else 0.0,
            a.value_scale,
            tokens // max(batch, 1),
            batch,
            query_blocks,
            tokens,
            max_keys,
            a.kv_heads,
            min(a.window, 1 << 30),
            CAUSAL=a.causal,
            WINDOW=a.window > 0,
            SOFTCAP=capped,
            PAGE_SIZE=a.page_size,
            ROWS=rows,
            HEADS=q_heads // a.kv_heads,
            DIM_K=dim,
            DIM_V=a.value_dim,
            BLOCK_N=block_n,
            STAGES=2,
            BOXES=boxes,
            num_warps=4,
        )
    return out, lse


def _query_blocks(a: Attention) -> int:
    tokens, q_heads, _ = a.query.shape
    block_q = BLOCK_M.value // (q_heads // a.kv_heads)
    return query_blocks_of(tokens, a.seq_lens.shape[0], a.query_start is not None, block_q)


def _block_n(*dims: int) -> int:
    return 128 if max(dims) <= 128 else 64  # two stages of keys and values, and the queries, in 227 KiB


def descriptor(plane: Tensor, rows: int) -> TensorDescriptor:
    """A plane for the copy engine, as [num_pages, heads, page_size, dim]."""
    view = plane.transpose(1, 2)
    # The stride of an axis of one entry is never used, but the copy engine refuses 0
    strides = [st if size > 1 else view.shape[3] for size, st in zip(view.shape, view.stride(), strict=True)]
    return TensorDescriptor(view, list(view.shape), [*strides[:3], 1], [1, 1, rows, COLUMNS.value], _BOX)
