"""The part of gated_delta_prefill that needs no state: each chunk of 64 tokens on its own, all of them at a time.

Within a chunk let c be the running sum of the decays (as powers of two) and A the strictly lower triangle of

    A[i, j] = beta[i] * 2^(c[i] - c[j]) * (k[i] · k[j])

Then a chunk that begins with the state S changes it by the outer products of its keys and the rows of

    (I + A)^-1 beta (v - 2^c (k S))

so that tokens follow one another only from chunk to chunk. Its results are those of S, and of the changes up to each
token with the weights 2^(c[i] - c[j]) * (q[i] · k[j]). Kept are the inverse, times beta, and the weights times that,
64 x 64 each, so that changes and results both follow from v - 2^c (k S), without waiting for one another; and four
numbers a token, which scale what its key finds in S, its result, its change, and S. Differences of c are taken before
the exponential and only where they are at most 0: nothing overflows, however strong the decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gated_delta import L2_EPS, decays, rates
from .state import chunk_of

CHUNK = tl.constexpr(64)


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

    Powers of the whole triangle may be as large as 10^18 where keys are alike. So blocks of 4 on the diagonal are
    inverted first, then with these blocks of 16, then all: with the inverse D of the blocks on the diagonal, and N what
    is left of a, I + a is D^-1 (I + D N). Each time four blocks by four are at stake, whose powers stay small.
    """
    b = tl.arange(0, 4)
    r = tl.arange(0, 16)
    i = tl.arange(0, 64)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(a, [4, 16, 4, 16]), 0.0), 2)
    near = ((r // 4)[:, None] == (r // 4)[None, :])[None, :, :]
    eye = tl.where(r[:, None] == r[None, :], 1.0, 0.0)[None, :, :]
    x = inverse_of_four(tl.where(near, blocks, 0.0), eye, PRECISION)
    n = tl.dot(x, tl.where(near, 0.0, blocks), input_precision=PRECISION)
    x = tl.dot(inverse_of_four(n, eye, PRECISION), x, input_precision=PRECISION)
    d = tl.reshape(tl.where(diagonal, x[:, :, None, :], 0.0), [64, 64])
    far = (i // 16)[:, None] > (i // 16)[None, :]
    n = tl.dot(d, tl.where(far, a, 0.0), input_precision=PRECISION)
    eye = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    return tl.dot(inverse_of_four(n, eye, PRECISION), d, input_precision=PRECISION)


@triton.jit
def inverse_of_four(n, eye, PRECISION: tl.constexpr):
    """(I + n)^-1 of an n whose fourth power is 0."""
    square = tl.dot(n, n, input_precision=PRECISION)
    return eye - n + square - tl.dot(n, square, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "batch"])
def _gated_delta_chunks(
    query,
    key,
    g,
    beta,
    query_start,
    a_log,
    dt_bias,
    scales,
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
    b, _, first, count = chunk_of(query_start, tl.program_id(0) // HEADS, batch, num_tokens, CHUNK)
    if (count <= 0) | (b >= batch):
        return
    i = tl.arange(0, CHUNK)
    exists = i < count
    x = tl.load(g + (first + i) * g_strides[0] + h * g_strides[1], mask=exists, other=0.0)
    c = tl.cumsum(tl.where(exists, decays(x, h, a_log, dt_bias), 0.0), 0)
    last = tl.sum(tl.where(i == tl.minimum(count, CHUNK) - 1, c, 0.0), 0)
    rate = rates(tl.load(beta + (first + i) * beta_strides[0] + h * beta_strides[1], mask=exists, other=0.0), a_log)

    query += h // GROUP * query_strides[1]
    key += h // GROUP * key_strides[1]
    w = tl.zeros([CHUNK, CHUNK], tl.float32)
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    query_square = tl.zeros([CHUNK], tl.float32)
    key_square = tl.zeros([CHUNK], tl.float32)
    for block in tl.static_range(0, KEY_DIM, KEY_BLOCK):
        d = block + tl.arange(0, KEY_BLOCK)
        q = load_rows(query, first, i, exists, query_strides[0], d, query_strides[2], KEY_DIM, DTYPE)
        k = load_rows(key, first, i, exists, key_strides[0], d, key_strides[2], KEY_DIM, DTYPE)
        w = tl.dot(q, tl.trans(k), w, input_precision=PRECISION)
        a = tl.dot(k, tl.trans(k), a, input_precision=PRECISION)
        if L2_NORM:
            query_square += tl.sum(q.to(tl.float32) * q.to(tl.float32), 1)
            key_square += tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
    query_norm = tl.zeros([CHUNK], tl.float32) + scale
    key_norm = tl.zeros([CHUNK], tl.float32) + 1.0
    if L2_NORM:
        query_norm *= tl.rsqrt(query_square + L2_EPS)
        key_norm *= tl.rsqrt(key_square + L2_EPS)
    record = scales + ((first + i) * HEADS + h) * 4
    tl.store(record, tl.exp2(c) * key_norm, mask=exists)
    tl.store(record + 1, tl.exp2(c) * query_norm, mask=exists)
    tl.store(record + 2, tl.exp2(last - c) * key_norm, mask=exists)
    tl.store(record + 3, tl.exp2(last), mask=exists)
    seen = i[:, None] >= i[None, :]
    between = tl.exp2(tl.where(seen, c[:, None] - c[None, :], 0.0)) * key_norm[None, :]
    w = tl.where(seen, w * between * query_norm[:, None], 0.0).to(DTYPE)
    a = tl.where(i[:, None] > i[None, :], a * between * (key_norm * rate)[:, None], 0.0)
    inverse = (unit_lower_inverse(a, PRECISION) * rate[None, :]).to(DTYPE)
    w = tl.dot(w, inverse, input_precision=PRECISION)
    start = (first * HEADS + h) * CHUNK
    tile = i[:, None] * (HEADS * CHUNK) + i[None, :]
    tl.store(inverses + start + tile, inverse, mask=exists[:, None])
    tl.store(weights + start + tile, w.to(DTYPE), mask=exists[:, None])
