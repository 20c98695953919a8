"""The part of gated_delta_prefill that needs no state: each chunk of 64 tokens on its own, all of them at a time.

Within a chunk let c be the running sum of the decays (as powers of two) and A the strictly lower triangle of

    A[i, j] = beta[i] * 2^(c[i] - c[j]) * (k[i] · k[j])

Then a chunk that begins with the state S changes it by the outer products of its keys and the rows of

    (I + A)^-1 beta (v - 2^c (k S))

so that tokens follow one another only from chunk to chunk. Its results are those of S, and of the changes up to each
token with the weights 2^(c[i] - c[j]) * (q[i] · k[j]). The inverse, times beta, and the weights are kept, 64 x 64 each.
Differences of c are taken before the exponential and only where they are at most 0: nothing overflows, however strong
the decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import find_sequence
from .gated_delta import L2_EPS, decays, rates
from .state import tokens_of

CHUNK = tl.constexpr(64)


@triton.jit
def chunk_of(query_start, slot, batch, num_tokens):
    """The sequence of a chunk's slot, its first token, that of the chunk, and the tokens from there to the end.

    There are none where the slot is one too many, or past the last sequence. Sequence b's chunks begin at slot
    `query_start[b] // 64 + b`.
    """
    b = find_sequence(query_start, slot, batch, CHUNK)
    start, stop = tokens_of(query_start, b, batch, num_tokens)
    first = start + (slot - start // CHUNK - b).to(tl.int64) * CHUNK
    return b, first, tl.where((b < batch) & (first >= start), stop - first, 0)


@triton.jit
def load_rows(x, first, row, exists, stride, d, dim_stride, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """Rows `first + row` of one head, [rows, elements]; zeros where they or their elements do not exist.

    Within a chunk offsets have 32 bits: see `common.near`.
    """
    at = row[:, None] * stride + d[None, :] * dim_stride
    mask = exists[:, None] & (d < DIM)[None, :]
    return tl.load(x + first * stride + at, mask=mask, other=0.0).to(DTYPE)


@triton.jit
def unit_lower_inverse(a, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [64, 64] in fp32.

    The blocks of 16 on the diagonal are inverted exactly, row by row, since powers of a whole triangle may be as large
    as 10^18 where keys are alike. With D of these, and N what is left of a, I + a is D^-1 (I + D N), and (D N)^4 is 0.
    """
    b = tl.arange(0, 4)
    r = tl.arange(0, 16)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(a, [4, 16, 4, 16]), 0.0), 2)
    x = tl.broadcast_to(tl.where(r[:, None] == r[None, :], 1.0, 0.0)[None, :, :], [4, 16, 16])
    for i in range(1, 16):
        here = (r == i)[None, :, None]
        row = tl.sum(tl.where(here, blocks, 0.0), 1)
        x -= tl.where(here, tl.sum(row[:, :, None] * x, 1)[:, None, :], 0.0)
    d = tl.reshape(tl.where(diagonal, x[:, :, None, :], 0.0), [64, 64])
    i = tl.arange(0, 64)
    n = tl.where((i // 16)[:, None] > (i // 16)[None, :], a, 0.0)
    m = tl.dot(d, n, input_precision=PRECISION)
    square = tl.dot(m, m, input_precision=PRECISION)
    series = tl.where(i[:, None] == i[None, :], 1.0, 0.0) - m + square - tl.dot(m, square, input_precision=PRECISION)
    return tl.dot(series, d, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "batch"])
def _gated_delta_chunks(
    query,
    key,
    g,
    beta,
    query_start,
    a_log,
    dt_bias,
    decay_sums,
    query_norms,
    key_norms,
    inverses,
    weights,
    scale,
    num_tokens: tl.int64,
    batch,
    query_strides,
    key_strides,
    g_strides,
    beta_strides,
    L2_NORM: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
):
    h = (tl.program_id(0) % HEADS).to(tl.int64)
    _, first, count = chunk_of(query_start, tl.program_id(0) // HEADS, batch, num_tokens)
    if count <= 0:
        return
    i = tl.arange(0, CHUNK)
    exists = i < count
    at = (first + i) * HEADS + h

    x = tl.load(g + (first + i) * g_strides[0] + h * g_strides[1], mask=exists, other=0.0)
    c = tl.cumsum(tl.where(exists, decays(x, h, a_log, dt_bias), 0.0), 0)
    tl.store(decay_sums + at, c, mask=exists)
    rate = rates(tl.load(beta + (first + i) * beta_strides[0] + h * beta_strides[1], mask=exists, other=0.0), a_log)

    d = tl.arange(0, KEY_BLOCK)
    query += h // GROUP * query_strides[1]
    key += h // GROUP * key_strides[1]
    q = load_rows(query, first, i, exists, query_strides[0], d, query_strides[2], KEY_DIM, DTYPE)
    k = load_rows(key, first, i, exists, key_strides[0], d, key_strides[2], KEY_DIM, DTYPE)
    seen = i[:, None] >= i[None, :]
    between = tl.exp2(tl.where(seen, c[:, None] - c[None, :], 0.0))
    w = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * rate[:, None]
    if L2_NORM:
        query_norm = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + L2_EPS) * scale
        key_norm = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + L2_EPS)
        tl.store(query_norms + at, query_norm, mask=exists)
        tl.store(key_norms + at, key_norm, mask=exists)
        w *= query_norm[:, None] * key_norm[None, :]
        a *= key_norm[:, None] * key_norm[None, :]
    else:
        w *= scale
    start = (first * HEADS + h) * CHUNK
    tile = i[:, None] * (HEADS * CHUNK) + i[None, :]
    tl.store(weights + start + tile, tl.where(seen, w, 0.0).to(DTYPE), mask=exists[:, None])
    inverse = unit_lower_inverse(tl.where(i[:, None] > i[None, :], a, 0.0), PRECISION)
    tl.store(inverses + start + tile, (inverse * rate[None, :]).to(DTYPE), mask=exists[:, None])
