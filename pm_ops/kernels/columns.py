"""Rows of up to four numbers, such as a channel's filter or its last inputs, as one tensor for each of their columns.

A column's elements are a row apart, so that loads of columns move two bytes each. Where rows are dense, eight of them
are whole words of 16 bytes: those are loaded and stored instead, and taken apart in the registers of the thread that
has the eight rows. The layout of every tensor here, and so of all that is computed with them, is eight rows a thread.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_columns(
    rows,
    first,
    row_stride,
    step,
    DIM: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Elements 0 to N - 1 of rows `first` to `first + BLOCK - 1`, float32, as N tensors; zeros past the last of DIM.

    Strides are in elements. WORDS: rows are N numbers of 16 bits without gaps, and DIM is a multiple of 8.
    """
    d = first + tl.arange(0, BLOCK)
    columns: tl.tuple = ()
    if WORDS:
        words: tl.tuple = ()
        for i in tl.static_range(N):
            at = _words(rows, first, i, N, BLOCK)
            exists = (first // 8 + tl.arange(0, BLOCK // 8) < DIM // 8)[:, None]
            even, odd = tl.load(at, mask=exists, other=0).reshape(BLOCK // 8, 2, 2).split()
            w0, w2 = even.split()
            w1, w3 = odd.split()
            words += (w0, w1, w2, w3)
        for j in tl.static_range(N):
            columns += (_column(words, j, N, BLOCK, rows.dtype.element_ty).to(tl.float32),)
    else:
        for j in tl.static_range(N):
            columns += (tl.load(rows + (d * row_stride + j * step), mask=d < DIM, other=0.0).to(tl.float32),)
    return columns


@triton.jit
def store_columns(
    rows,
    columns,
    first,
    row_stride,
    there,
    DIM: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Put N tensors of float32 where :func:`load_columns`, with a step of 1, finds them, if the page is `there`."""
    d = first + tl.arange(0, BLOCK)
    if WORDS:
        halves: tl.tuple = ()
        for j in tl.static_range(N):
            halves += (_rows(columns[j].to(rows.dtype.element_ty), BLOCK),)
        words: tl.tuple = ()
        for e in tl.static_range(0, 8 * N, 2):
            words += (halves[e % N][e // N] | (halves[(e + 1) % N][(e + 1) // N] << 16),)
        for i in tl.static_range(N):
            even, odd = tl.join(words[4 * i], words[4 * i + 2]), tl.join(words[4 * i + 1], words[4 * i + 3])
            exists = (first // 8 + tl.arange(0, BLOCK // 8) < DIM // 8)[:, None]
            at = _words(rows, first, i, N, BLOCK)
            tl.store(at, tl.join(even, odd).reshape(BLOCK // 8, 4), mask=exists & there)
    else:
        for j in tl.static_range(N):
            at = rows + (d * row_stride + j)
            tl.store(at, columns[j].to(rows.dtype.element_ty), mask=(d < DIM) & there)


@triton.jit
def _words(rows, first, i: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Where word i of every eight rows' N words of 16 bytes lies, as four of 4 bytes."""
    group = first // 8 + tl.arange(0, BLOCK // 8)
    return rows.to(tl.pointer_type(tl.int32)) + (group[:, None] * (4 * N) + (4 * i + tl.arange(0, 4))[None, :])


@triton.jit
def _half(words, e: tl.constexpr, DTYPE: tl.constexpr):
    """Number e of eight rows."""
    return (words[e // 2] >> (16 * (e % 2))).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _column(words, j: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Element j of each row, in the rows' order: what is joined last varies fastest."""
    x04 = tl.join(_half(words, j, DTYPE), _half(words, 4 * N + j, DTYPE))
    x26 = tl.join(_half(words, 2 * N + j, DTYPE), _half(words, 6 * N + j, DTYPE))
    x15 = tl.join(_half(words, N + j, DTYPE), _half(words, 5 * N + j, DTYPE))
    x37 = tl.join(_half(words, 3 * N + j, DTYPE), _half(words, 7 * N + j, DTYPE))
    return tl.join(tl.join(x04, x26), tl.join(x15, x37)).reshape(BLOCK)


@triton.jit
def _rows(column, BLOCK: tl.constexpr):
    """The other way: the bits of each of eight rows' number, in 32."""
    bits = column.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    even, odd = bits.reshape(BLOCK // 8, 2, 2, 2).split()
    x04, x26 = even.split()
    x15, x37 = odd.split()
    x0, x4 = x04.split()
    x2, x6 = x26.split()
    x1, x5 = x15.split()
    x3, x7 = x37.split()
    return x0, x1, x2, x3, x4, x5, x6, x7
