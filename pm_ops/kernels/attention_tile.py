"""A tile of keys in attention: loading its rows, and taking it into the running softmax.

Two layouts of the operands. Rows of 16 or 32 bits are tiles [BLOCK_N, dim]. Rows of 8-bit elements can be PACKED: they
are loaded as words of two elements and unpacked into a tile of the even and one of the odd dims, [BLOCK_N, dim / 2]
each. For Q @ K both are halves of the inner axis, for P @ V of the outer one. The tensor cores take 16-bit elements in
pairs along the inner axis; single bytes would have to be gathered one by one, words are not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LOG2E, decoded, slot_offset


@triton.jit
def _load_rows(address, present, DTYPE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Rows of DIM elements at byte addresses, as a tile of BLOCK columns. Absent rows and columns past DIM are 0."""
    d = tl.arange(0, BLOCK)
    element = address.to(tl.pointer_type(DTYPE))[:, None] + d[None, :]
    if MASKED:
        if DIM == BLOCK:
            x = tl.load(element, mask=present[:, None], other=0.0)
        else:
            x = tl.load(element, mask=present[:, None] & (d < DIM)[None, :], other=0.0)
    else:
        if DIM == BLOCK:
            x = tl.load(element)
        else:
            x = tl.load(element, mask=(d < DIM)[None, :], other=0.0)
    return x


@triton.jit
def _unpack(word, DTYPE: tl.constexpr, OWN: tl.constexpr, ASM: tl.constexpr):
    """The low and the high bytes of 16-bit words as float16, which holds every value of the 8-bit types.

    ASM handles two words at a time, in one instruction an element; the interpreter has no inline assembly.
    """
    if ASM:
        if tl.int8 == DTYPE:
            # v + 128 as the last bits of 1024 + (v + 128), less 1152
            even, odd = tl.inline_asm_elementwise(
                """{ .reg .b32 u, x, y; xor.b32 u, $2, 0x80808080;
                prmt.b32 x, u, 0x64646464, 0x4240; prmt.b32 y, u, 0x64646464, 0x4341;
                mov.b32 u, 0x64806480; sub.rn.f16x2 $0, x, u; sub.rn.f16x2 $1, y, u; }""",
                "=r,=r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        elif tl.float8e5 == DTYPE:
            # the first byte of a float16
            even, odd = tl.inline_asm_elementwise(
                """prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;""",
                "=r,=r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            tl.static_assert(tl.float8e4nv == DTYPE)
            even, odd = tl.inline_asm_elementwise(
                """{ .reg .b16 a, b; .reg .b32 x, y; mov.b32 {a, b}, $2;
                cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b;
                prmt.b32 $0, x, y, 0x5410; prmt.b32 $1, x, y, 0x7632; }""",
                "=r,=r,r", [word], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        even = (word & 0xFF).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
        odd = ((word >> 8) & 0xFF).to(tl.uint8).to(DTYPE, bitcast=True).to(tl.float16)
    if tl.int8 == DTYPE and not OWN:
        even = tl.where(even == -128, float("nan"), even)
        odd = tl.where(odd == -128, float("nan"), odd)
    return even, odd


@triton.jit
def _load_scales(scales, plane, page, token, present, MASKED: tl.constexpr):
    """The scale of each key of a tile. Absent ones are 0."""
    address = (scales + slot_offset(page, token, plane[1], plane[2])).to(tl.pointer_type(tl.float32))
    if MASKED:
        x = tl.load(address, mask=present, other=0.0)
    else:
        x = tl.load(address)
    return x


@triton.jit
def attend(
    acc,  # [BLOCK_M, BLOCK_V]; PACKED its even columns
    acc_odd,
    unit,  # of values with scales of their own: what acc is divided by, [BLOCK_M]
    m,
    l,
    q,  # [BLOCK_M, BLOCK_K]; PACKED its even columns; LATENT its first DIM_V ones
    q_odd,  # the others
    position,
    keys,
    values,
    page_table,
    key_page_stride,
    key_token_stride,
    value_page_stride,
    value_token_stride,
    key_scales,
    value_scales,
    key_scale_plane,
    value_scale_plane,
    scale,
    softcap,
    slope,
    bias,
    bias_rows,
    bias_valid,
    bias_key_stride,
    bias_keys,
    window,
    lo,
    hi,
    begin,
    end,
    MASKED: tl.constexpr,
    PACKED: tl.constexpr,
    LATENT: tl.constexpr,
    ASM: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    KEY_DTYPE: tl.constexpr,
    VALUE_DTYPE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    DIM_K: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take the key tiles from `begin` to `end` into the running (acc, m, l); m and the logits are in units of log 2.

    Without MASKED, every key of these tiles is present and visible to every row, but for the bias.

    Where values have scales of their own, P times these is divided by its running maximum, the row's `unit`, so that
    it stays within the range of DOT_DTYPE.
    """
    for n in tl.range(begin, end, BLOCK_N):
        j = n + tl.arange(0, BLOCK_N)
        present = (j >= lo) & (j < hi)
        if MASKED:
            page = tl.load(page_table + j // PAGE_SIZE, mask=present, other=0)
        else:
            page = tl.load(page_table + j // PAGE_SIZE)
        token = j % PAGE_SIZE
        slot = slot_offset(page, token, key_page_stride, key_token_stride)
        if PACKED:
            words = _load_rows(keys + slot, present, tl.int16, DIM_K // 2, BLOCK_K // 2, MASKED)
            even, odd = _unpack(words, KEY_DTYPE, key_scale_plane is not None, ASM)
            x = tl.dot(q, tl.trans(even))
            x = tl.dot(q_odd, tl.trans(odd), x)
        elif LATENT:
            latent = _load_rows(keys + slot, present, KEY_DTYPE, DIM_V, BLOCK_V, MASKED)
            rest = keys + (slot + DIM_V * (KEY_DTYPE.primitive_bitwidth // 8))
            rest = _load_rows(rest, present, KEY_DTYPE, DIM_K - DIM_V, BLOCK_K, MASKED)
            k = decoded(latent, q.dtype, False)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
            x = tl.dot(q_odd, tl.trans(decoded(rest, q.dtype, False)), x, input_precision="ieee")
        else:
            k = _load_rows(keys + slot, present, KEY_DTYPE, DIM_K, BLOCK_K, MASKED)
            k = decoded(k, q.dtype, key_scale_plane is not None)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
        if key_scale_plane is not None:
            x *= _load_scales(key_scales, key_scale_plane, page, token, present, MASKED)[None, :]
        if SOFTCAP:
            # c * tanh(y / c) as c * (1 - 2 / (1 + exp(2 y / c))): finite for every y
            x = (softcap * LOG2E) * (1.0 - 2.0 / (1.0 + tl.exp2(x * (scale * (2.0 * LOG2E) / softcap))))
        else:
            x = x * (scale * LOG2E)
        if ALIBI:
            x += slope[:, None] * (j[None, :] - position[:, None]).to(tl.float32)
        seen = present
        if MASKED or (bias is not None):
            visible = present[None, :]
            if MASKED and CAUSAL:
                visible = visible & (j[None, :] <= position[:, None])
            if MASKED and WINDOW:
                visible = visible & (j[None, :] > position[:, None] - window)
                if not CAUSAL:
                    visible = visible & (j[None, :] < position[:, None] + window)
            if bias is not None:
                at = bias + bias_rows[:, None] + j[None, :].to(tl.int64) * bias_key_stride
                read = bias_valid[:, None] & (j < bias_keys)[None, :]
                if bias.dtype.element_ty == tl.uint8:
                    visible = visible & (tl.load(at, mask=read, other=0) != 0)
                else:
                    added = tl.load(at, mask=read, other=float("-inf")).to(tl.float32)
                    visible = visible & (added != float("-inf"))
                    x += added * LOG2E
                seen = present & (tl.max(visible.to(tl.int32), 0) != 0)
            x = tl.where(visible, x, float("-inf"))
            new_m = tl.maximum(m, tl.max(x, 1))
            top = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen no key yet
        else:
            new_m = tl.maximum(m, tl.max(x, 1))
            top = new_m
        p = tl.exp2(x - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(p, 1)
        if not SAME_STRIDES:
            slot = slot_offset(page, token, value_page_stride, value_token_stride)
        if value_scale_plane is not None:
            p *= _load_scales(value_scales, value_scale_plane, page, token, seen, MASKED or (bias is not None))[None, :]
            carried = unit * shrink
            unit = tl.maximum(carried, tl.max(p, 1))
            inverse = tl.where(unit == 0, 0.0, 1.0 / unit)
            p *= inverse[:, None]
            shrink = tl.where(unit == carried, 1.0, carried * inverse)  # x * (1 / x) may not be 1
        p = p.to(DOT_DTYPE)
        if PACKED:
            words = _load_rows(values + slot, seen, tl.int16, DIM_V // 2, BLOCK_V // 2, MASKED or (bias is not None))
            even, odd = _unpack(words, VALUE_DTYPE, value_scale_plane is not None, ASM)
            acc = tl.dot(p, even, acc * shrink[:, None])
            acc_odd = tl.dot(p, odd, acc_odd * shrink[:, None])
        elif LATENT:
            v = decoded(latent, DOT_DTYPE, False)
            acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        else:
            v = _load_rows(values + slot, seen, VALUE_DTYPE, DIM_V, BLOCK_V, MASKED or (bias is not None))
            v = decoded(v, DOT_DTYPE, value_scale_plane is not None)
            acc = tl.dot(p, v, acc * shrink[:, None], input_precision="ieee")
        m = new_m
    return acc, acc_odd, unit, m, l
