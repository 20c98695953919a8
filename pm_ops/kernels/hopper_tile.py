"""What the parts of the Hopper attention kernel agree on: the tiles of its grid, and the boxes of shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_M = gl.constexpr(128)  # rows of a program, half of them a warpgroup's
COLUMNS = gl.constexpr(64)  # elements of a box's row: 128 bytes, the widest swizzle


@gluon.jit
def _find_sequence(query_start, block, batch, BLOCK_Q: gl.constexpr):
    """As in `attention.py`: sequence b's blocks begin at `query_start[b] // BLOCK_Q + b`."""
    low = batch * 0
    high = batch
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(query_start + middle).to(gl.int32) // BLOCK_Q + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@gluon.jit
def tile_of(
    tile,
    sequences,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """What a tile of the grid is: its sequence, KV head, queries, and the keys [lo, hi) that any of them sees.

    `sequences`: the kernel's arguments of these names, as each part of it hands them on. Without query_start every
    sequence has `uniform` queries.
    """
    query_start, seq_lens, uniform, batch, query_blocks, num_queries, max_keys, kv_heads, window = sequences
    block = query_blocks - 1 - tile // kv_heads  # a sequence's last queries see the most keys: they start first
    if query_start is None:
        blocks = (uniform + BLOCK_Q - 1) // BLOCK_Q
        b = block // blocks
        start = b * uniform
        num = uniform
        first = block % blocks * BLOCK_Q
    else:
        b = _find_sequence(query_start, block, batch, BLOCK_Q)
        start = gl.load(query_start + b).to(gl.int32)
        stop = gl.load(query_start + b + 1, mask=b < batch, other=0).to(gl.int32)
        num = gl.where(b < batch, gl.minimum(stop, num_queries), num_queries) - start  # no row behind the query's last
        first = (block - b - start // BLOCK_Q) * BLOCK_Q
    seq_len = gl.load(seq_lens + b, mask=b < batch, other=0).to(gl.int32)
    earliest = seq_len - num + first
    latest = seq_len - num + gl.minimum(first + BLOCK_Q, num) - 1
    lo = b * 0
    hi = gl.minimum(seq_len, max_keys)
    if CAUSAL:
        hi = gl.minimum(hi, latest + 1)
    if WINDOW:
        lo = gl.maximum(earliest - window + 1, 0)
        if not CAUSAL:
            hi = gl.minimum(hi, latest + window)
    hi = gl.maximum(hi, 0)
    lo = gl.minimum(lo, hi)
    # One tile at least, of hidden keys if need be, so that rows that see nothing take no path of their own
    count = gl.maximum((hi - lo // BLOCK_N * BLOCK_N + BLOCK_N - 1) // BLOCK_N, 1)
    count = gl.where(first < num, count, 0)
    return b, tile % kv_heads, start, num, first, earliest, latest, lo, hi, count
