"""mla_attention on Hopper: one warp or four fetch latent rows, two warpgroups compute on them.

A program holds 64 rows, BLOCK_Q queries of one sequence x query heads, and their [64, V] result: half of its columns in
the registers of each of two consumer warpgroups. Tiles of BLOCK_N latent rows lie in shared memory in three parts, the
left and the right half of the value and the rest of the key. The warpgroups take turns: one computes a tile's logits
and softmax and hands the probabilities to the other, and each multiplies them with its half of the tile. So one's
softmax runs beside the other's products, and a row is loaded once for key and value, and for all of the 64 rows. Shared
memory has two tiles: logits begin with the first PIECES of a tile that have come.

Parts are boxes as in `attention_hopper.py`, fetched in the same two ways, and the same holds of rows that no query
sees. Tiles and the order of sums do not depend on the page size.

Tests run this kernel's Python on the CPU, too (`tests/kernels/gluon_interpreter.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..layout import dtype_name
from .attention_hopper import COPIED_ROWS, descriptor
from .attention_plan import MAX_SPLITS, filled_blocks_of, query_blocks_of
from .common import LOG2E, on_device
from .device import is_hopper, multiprocessors
from .hopper_tile import COLUMNS
from .merge import merge_splits
from .mla_hopper_consume import consume
from .mla_hopper_produce import produce

if TYPE_CHECKING:
    from ..ops.mla import MLAAttention

BLOCK_M = 64
BLOCK_N = 64
PIECES = 2  # of each half of a tile
_REST = 64
_VALUES = (256, 512)


@gluon.jit
def _barriers(number: gl.constexpr, count: gl.constexpr):
    """Each by itself: the compiler has all threads meet between waits for two barriers of one array."""
    barriers = ()
    for _ in gl.static_range(number):
        barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(barrier, count=count)
        barriers = barriers + (barrier,)  # type: ignore[assignment]
    return barriers


@gluon.jit(
    do_not_specialize=["num_pages", "uniform", "batch", "query_blocks", "num_queries", "max_keys", "head_blocks"]
)
def _mla_hopper(
    latent_plane,  # BOXES: a descriptor [num_pages, 1, page_size, dim]; else a pointer
    strides,  # None, or of page, token and head, in units of 16 bytes
    query,
    query_stride,
    query_head_stride,
    out,  # [T, Hq, V]; with SPLIT [splits, T, Hq, V] fp32
    lse,  # [T, Hq] fp32, or None; with SPLIT [splits, T, Hq]
    page_table,
    page_table_stride,
    num_pages,
    query_start,
    seq_lens,
    scale,
    out_scale,
    uniform,
    batch,
    query_blocks,
    num_queries,
    max_keys,
    head_blocks,
    CAUSAL: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    GROUP: gl.constexpr,
    HEADS: gl.constexpr,
    VALUE: gl.constexpr,
    REST: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PIECES: gl.constexpr,
    SPLIT: gl.constexpr,
    BOXES: gl.constexpr,
):
    HALF: gl.constexpr = VALUE // 2
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    dtype: gl.constexpr = query.dtype.element_ty
    boxes: gl.constexpr = 2 * (BLOCK_N // ROWS)
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    box: gl.constexpr = latent_plane.layout if BOXES else tile
    shape: gl.constexpr = [1, 1, ROWS, COLUMNS] if BOXES else [ROWS, COLUMNS]
    left_boxes = gl.allocate_shared_memory(dtype, [boxes * (HALF // COLUMNS)] + shape, box)
    right_boxes = gl.allocate_shared_memory(dtype, [boxes * (HALF // COLUMNS)] + shape, box)
    rest_boxes = gl.allocate_shared_memory(dtype, [boxes * (REST // COLUMNS)] + shape, box)
    left = left_boxes._reinterpret(dtype, [2, BLOCK_N, HALF], tile)
    right = right_boxes._reinterpret(dtype, [2, BLOCK_N, HALF], tile)
    rest = rest_boxes._reinterpret(dtype, [2, BLOCK_N, REST], tile)
    left_keys = left_boxes._reinterpret(dtype, [2 * PIECES, BLOCK_N, HALF // PIECES], tile)
    right_keys = right_boxes._reinterpret(dtype, [2 * PIECES, BLOCK_N, HALF // PIECES], tile)
    left_q = gl.allocate_shared_memory(dtype, [BLOCK_M, HALF], tile)
    right_q = gl.allocate_shared_memory(dtype, [BLOCK_M, HALF], tile)
    rest_q = gl.allocate_shared_memory(dtype, [BLOCK_M, REST], tile)
    left_qs = left_q._reinterpret(dtype, [PIECES, BLOCK_M, HALF // PIECES], tile)
    right_qs = right_q._reinterpret(dtype, [PIECES, BLOCK_M, HALF // PIECES], tile)
    p_tile = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], tile)
    m_row = gl.allocate_shared_memory(gl.float32, [BLOCK_M], row)
    shrink_row = gl.allocate_shared_memory(gl.float32, [BLOCK_M], row)
    sums = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], row)
    # Two places of a tile: for each a barrier of each piece of the left half, the right one, and the rest
    full = _barriers(2 * (2 * PIECES + 1), 1 if BOXES else 128)  # the copy engine, or each thread that copies
    empty = _barriers(6, 1)
    ready = _barriers(2, 1)  # a warpgroup's maximum
    made = _barriers(2, 1)  # and its probabilities
    both = _barriers(2, 2)  # queries loaded; sums stored
    window = 0
    sequences = (query_start, seq_lens, uniform, batch, query_blocks, num_queries, max_keys, head_blocks, window)
    parts = (left_boxes, right_boxes, rest_boxes)
    tiles = (left, right)
    keys = (left_keys, right_keys, rest)
    shared = (p_tile, m_row, shrink_row, ready, made)
    q_tile = (left_q, right_q, rest_q)
    q_tiles = (left_qs, right_qs, rest_q)
    # fmt: off
    gl.warp_specialize(
        [
            (consume, (
                q_tile, q_tiles, tiles, keys, full, empty, shared, sums, both,
                query, query_stride, query_head_stride, out, lse, scale, out_scale, sequences,
                FIRST, CAUSAL, GROUP, HEADS, VALUE, REST, BLOCK_M, BLOCK_N, PIECES, SPLIT, BOXES,
            )),
            (consume, (
                q_tile, q_tiles, tiles, keys, full, empty, shared, sums, both,
                query, query_stride, query_head_stride, out, lse, scale, out_scale, sequences,
                SECOND, CAUSAL, GROUP, HEADS, VALUE, REST, BLOCK_M, BLOCK_N, PIECES, SPLIT, BOXES,
            )),
            (produce, (
                latent_plane, strides, parts, full, empty,
                page_table, page_table_stride, num_pages, sequences,
                CAUSAL, PAGE_SIZE, ROWS, HEADS, VALUE, REST, BLOCK_M, BLOCK_N, PIECES, BOXES,
            )),
        ],
        [4, 1 if BOXES else 4],
        [240, 24] if BOXES else [216, 72],
    )
    # fmt: on


def reason(a: MLAAttention) -> str | None:
    """Why this kernel cannot make a call; None if it can."""
    dim = a.query.shape[2]
    rules: tuple[tuple[bool, Callable[[], str]], ...] = (
        (a.query.dtype in (torch.float16, torch.bfloat16), lambda: f"it takes no {dtype_name(a.query.dtype)} queries"),
        (a.query.dtype == a.dtype, lambda: f"it takes rows of the query's dtype, {dtype_name(a.query.dtype)}"),
        (
            a.value_dim in _VALUES and dim == a.value_dim + _REST,
            lambda: (
                f"it takes rows of {' or '.join(f'{n} + {_REST}' for n in _VALUES)}, "
                f"not of {a.value_dim} + {dim - a.value_dim}"
            ),
        ),
        (a.scale_tensor is None, lambda: "it takes no scale as a tensor"),
        (
            a.softmax_scale * a.scale > 0,
            lambda: f"softmax_scale={a.softmax_scale} times scale={a.scale} is not positive",
        ),
        (a.query.stride(2) == 1, lambda: "it takes queries whose elements lie side by side"),
        (
            not any(n % 16 for n in a.latent_plane[:4]),
            lambda: "it takes a plane whose offset and strides are multiples of 16 bytes",
        ),
        (is_hopper(a.query.device), lambda: "it is for compute capability 9.x"),
    )
    return next((text() for holds, text in rules if not holds), None)


def mla_attention(a: MLAAttention) -> tuple[Tensor, Tensor]:
    """`pm_ops::mla_attention`, of calls that :func:`reason` has none against: one launch, or two with splits."""
    tokens, q_heads, _ = a.query.shape
    batch = a.seq_lens.shape[0]
    out = a.query.new_empty((tokens, q_heads, a.value_dim))
    lse = a.query.new_empty((tokens, q_heads) if a.return_lse else (0,), dtype=torch.float32)
    if tokens == 0 or q_heads == 0:
        return out, lse
    heads = min(q_heads, BLOCK_M)
    head_blocks = -(-q_heads // heads)
    query_blocks = query_blocks_of(tokens, batch, a.query_start is not None, BLOCK_M // heads)
    filled = filled_blocks_of(query_blocks, tokens, batch, a.max_query_len or tokens, BLOCK_M // heads)
    page_table = a.page_table if a.page_table.stride(1) == 1 else a.page_table.contiguous()
    max_keys = min(page_table.shape[1] * a.page_size, 2**31 - 1)
    longest = min(max_keys, a.max_seq_len or max_keys)
    splits = splits_of(filled * head_blocks, longest, multiprocessors(a.query.device))
    partial, partial_lse = out, lse if a.return_lse else None
    if splits > 1:
        partial = a.query.new_empty((splits, tokens, q_heads, a.value_dim), dtype=torch.float32)
        partial_lse = a.query.new_empty((splits, tokens, q_heads), dtype=torch.float32)
    rows = min(a.page_size & -a.page_size, BLOCK_N)  # a power of two that divides the page
    boxes = rows >= 8
    latent = a.latent_view()
    with on_device(a.buffer):
        _mla_hopper[(query_blocks * head_blocks, splits)](
            descriptor(latent, rows) if boxes else latent,
            None if boxes else tuple(st // 8 for st in latent.stride()[:3]),
            a.query,
            *a.query.stride()[:2],
            partial,
            partial_lse,
            page_table,
            page_table.stride(0),
            a.latent_plane[4],
            None if a.query_start is None else a.query_start.contiguous(),
            a.seq_lens.contiguous(),
            a.softmax_scale * a.scale * LOG2E.value,
            a.scale,
            tokens // max(batch, 1),
            batch,
            query_blocks,
            tokens,
            max_keys,
            head_blocks,
            CAUSAL=a.causal,
            PAGE_SIZE=a.page_size,
            ROWS=rows if boxes else COPIED_ROWS,
            GROUP=q_heads,
            HEADS=heads,
            VALUE=a.value_dim,
            REST=_REST,
            BLOCK_M=BLOCK_M,
            BLOCK_N=BLOCK_N,
            PIECES=PIECES,
            SPLIT=splits > 1,
            BOXES=boxes,
            num_warps=4,
        )
    if splits > 1:
        assert partial_lse is not None
        merge_splits(partial, partial_lse, out, lse if a.return_lse else None, False)
    return out, lse


@functools.lru_cache(4096)
def splits_of(programs: int, keys: int, multiprocessors: int) -> int:
    """How often to split the KV axis, such that the last round of programs, one a multiprocessor, is as full as can be.

    In units of a tile's time: a program takes about four to begin and end, and joining the splits about eight. From two
    rounds of programs on there are no splits, whose results would be much to write and to read.
    """
    tiles = max(-(-keys // BLOCK_N), 1)
    if programs >= 2 * multiprocessors:
        return 1

    def cost(splits: int) -> int:
        rounds = -(-programs * splits // multiprocessors)
        return rounds * (-(-tiles // splits) + 4) + (8 if splits > 1 else 0)

    return min(range(1, min(-(-tiles // 2), MAX_SPLITS, multiprocessors) + 1), key=cost)
