"""How an attention call is cut into programs: the one place that trades registers, shared memory and parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .common import next_power_of_2
from .device import multiprocessors

if TYPE_CHECKING:
    from ..ops.attention import Attention

MAX_SPLITS = 128
SPLIT_KEYS = 2048
"""Keys of a split where calls are to be batch invariant: a fixed number, whatever else is in the batch."""


@dataclass(frozen=True)
class Plan:
    """How a call is cut into programs: tiles, grid and splits. It follows from shapes, dtypes and the device alone."""

    block_m: int
    block_n: int
    block_k: int
    block_v: int
    packed: bool
    heads: int
    head_blocks: int
    query_blocks: int
    splits: int
    warps: int
    stages: int
    key_dot: torch.dtype
    value_dot: torch.dtype

    @property
    def block_q(self) -> int:
        """Queries a program holds."""
        return self.block_m // self.heads


class Shape(NamedTuple):
    """All that a plan follows from."""

    tokens: int
    q_heads: int
    kv_heads: int
    dim: int
    value_dim: int
    batch: int
    queries: int
    ragged: bool
    keys: int
    max_seq_len: int
    window: int
    causal: bool
    bias: bool
    packed: bool
    value_scaled: bool
    split_keys: int
    latent: bool
    query_dtype: torch.dtype
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    multiprocessors: int


def shape_of(a: Attention, latent: bool = False) -> Shape:
    """What the plan of a call follows from; `latent`: values are the first dims of the keys, of the same bytes."""
    tokens, q_heads, dim = a.query.shape
    return Shape(
        tokens,
        q_heads,
        a.kv_heads,
        dim,
        a.value_dim,
        a.seq_lens.shape[0],
        4 if a.batch_invariant else a.queries_per_sequence,
        a.query_start is not None,
        a.page_table.shape[1] * a.page_size,
        a.max_seq_len,
        a.window,
        a.causal,
        a.bias is not None,
        not latent and _packed(a),
        a.value_scale_plane is not None,
        SPLIT_KEYS if a.batch_invariant else 0,
        latent,
        a.query.dtype,
        a.key_dtype,
        a.value_dtype,
        multiprocessors(a.query.device),
    )


def plan_of(s: Shape) -> Plan:
    """Choose tiles that fit shared memory and registers, and enough splits of the KV axis to fill the device."""
    group = s.q_heads // s.kv_heads
    key_dot, value_dot = _dot_dtypes(s.query_dtype, s.key_dtype, s.value_dtype)
    block_k, block_v = tile_dim(s.dim - s.latent * s.value_dim, s.packed), tile_dim(s.value_dim, s.packed)

    # The accumulator, and a bias's tile, live in registers; fp32 without TF32 runs on the plain cores, in small tiles.
    item, widest = max(key_dot.itemsize, value_dot.itemsize), max(block_k, block_v)
    most_rows = min(max((16384 if item == 2 else 4096) // widest, 16), 64 if s.bias else 128)
    if s.latent and item == 2:
        most_rows = max(min(32768 // block_v, 64), 16)  # for 512 columns 128 registers of each of 256 threads
    heads = min(group, most_rows)
    block_m = min(max(next_power_of_2(max(s.queries, 1) * heads), 16), most_rows)
    block_q, head_blocks = block_m // heads, -(-group // heads)
    query_blocks = query_blocks_of(s.tokens, s.batch, s.ragged, block_q)
    programs = filled_blocks_of(query_blocks, s.tokens, s.batch, s.queries, block_q) * s.kv_heads * head_blocks
    wanted = s.multiprocessors * (4 if block_m <= 32 else 1)
    keys = min(s.keys, s.max_seq_len or s.keys)
    if s.window:
        keys = min(keys, (s.window if s.causal else 2 * s.window) + block_q)

    if item == 4:
        warps, stages, block_n = 8, 2, 16
    elif s.latent:
        warps, stages, block_n = 8 if block_m > 16 else 4, 2, 32  # 144 KiB for rows of 576: A100s have 163
    elif block_m * max(block_v, 128) <= 4096:
        each = s.split_keys or keys // max(wanted // max(programs, 1), 1)
        warps, stages, block_n = _decode_tile(s, block_k, block_v, each)
    elif block_m <= 32:
        warps, stages, block_n = 4, 2 if s.value_scaled else 3, 64
    elif block_m == 128 and widest <= 128:
        warps, stages, block_n = 8, 3, 128
    else:
        warps, stages, block_n = 8 if block_m * widest >= 16384 or s.bias else 4, 2, 64
    while block_n > 16 and block_n * (block_k + block_v) * item * (stages - 1) + block_m * block_k * item > 160 * 1024:
        block_n //= 2

    if s.split_keys:
        splits = max(-(-s.keys // s.split_keys), 1)
    else:
        splits = max(1, min(wanted // max(programs, 1), -(-keys // (2 * block_n)), MAX_SPLITS))
        # A multiprocessor holds four programs of two warps, or three of four: up to three, these are 1 % faster on an
        # H200; beyond, 25 % slower. (Not where splits are fixed: there nothing may follow from the batch.)
        halves = s.key_dtype.itemsize == s.value_dtype.itemsize == 2
        if halves and (warps, widest) == (2, 128) and 2 < programs * splits / s.multiprocessors <= 3:
            warps = 4
    return Plan(
        block_m, block_n, block_k, block_v, s.packed, heads, head_blocks, query_blocks, splits, warps, stages, key_dot,
        value_dot,
    )  # fmt: skip


def _decode_tile(s: Shape, block_k: int, block_v: int, keys: int) -> tuple[int, int, int]:
    """Warps, stages and keys of a tile for few queries, where a program has about so many `keys`. Measured on an H200.

    Decode computes little on a tile. With few threads each of them keeps more loads on their way: two warps are up to
    1.3 times faster than four, but not on rows of 64. Tiles of 32 KiB of keys and values are best for rows of every
    width (others are 2 to 25 % slower); only on 16-bit rows of 64, where a program has 256 keys or fewer, tiles of 16
    KiB are 4 to 10 % faster. A third stage fetches page ids one tile ahead; where rows are wide, or are unpacked in
    registers, two stages are 0.5 to 1.5 % faster.
    """
    widest, most = max(block_k, block_v), 64 if keys < 1024 and not s.packed else 128
    block_n = min(32768 // ((block_k + block_v) * (1 if s.packed else 2)), most)
    return 2 if widest > 64 else 4, 2 if s.packed or widest > 128 else 3, 1 << (max(block_n, 16).bit_length() - 1)


def query_blocks_of(tokens: int, batch: int, ragged: bool, block_q: int) -> int:
    """Blocks of `block_q` queries, none of two sequences; where these are ragged, as many as there may have to be."""
    if ragged:
        return tokens // block_q + batch + 1
    return batch * -(-(tokens // max(batch, 1)) // block_q)


def filled_blocks_of(query_blocks: int, tokens: int, batch: int, queries: int, block_q: int) -> int:
    """How many of these blocks have work, where a sequence has up to `queries`: each of them has one query at least.

    Programs of the others end at once. Where they count, sequences are cut into fewer splits than fill the device.
    """
    return min(query_blocks, tokens, batch * -(-queries // block_q))


def _dot_dtypes(query: torch.dtype, key: torch.dtype, value: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """The operand types of Q @ K and P @ V, such that no operand but P is rounded.

    float16 holds every value of the 8-bit types, and the hardware converts to it in one instruction, to bfloat16 in
    several; what is not sure to be in its range, bfloat16 queries and P times scales, is brought there by the kernel.
    """
    if query == torch.float32:
        return torch.float32, torch.float32
    key_dot = torch.float16 if key.itemsize == 1 else query if key == query else torch.float32
    return key_dot, torch.float16 if value.itemsize == 1 else value


def _packed(a: Attention) -> bool:
    """Whether 8-bit rows are read as words of two elements: 16-bit queries, and every word at a multiple of 2 bytes."""
    return (
        a.key_dtype.itemsize == a.value_dtype.itemsize == 1
        and a.query.dtype.itemsize == 2
        and a.planes_divide_by(2)
        and not any(n % 2 for n in (a.query.shape[2], a.value_dim))
    )


def tile_dim(dim: int, packed: bool = False) -> int:
    """Columns of a tile that holds rows of `dim` elements: a power of two, enough for tl.dot, in halves if packed."""
    return max(next_power_of_2(dim), 32 if packed else 16)
