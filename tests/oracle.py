"""What the operators must do, written once more from the byte formula: loops over bytes, slots, queries and heads.

Nothing here calls pm_ops. Element ``d`` of head ``h`` of a slot lies at byte

    offset + (slot // page_size) * page_stride + (slot % page_size) * token_stride + h * head_stride + d * itemsize

of the buffer, a plane being ``[offset, page_stride, token_stride, head_stride, num_pages]``. Numbers are float64. All
functions take CPU tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FP8 = {torch.float8_e4m3fn: (4, 3, 7), torch.float8_e5m2: (5, 2, 15)}
"""Exponent bits, mantissa bits and bias."""
FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def address(plane: Sequence[int], page_size: int, slot: int, head: int = 0, byte: int = 0) -> int:
    """Byte of the buffer at which a slot's head begins, plus ``byte``."""
    offset, page_stride, token_stride, head_stride, _ = plane
    return offset + (slot // page_size) * page_stride + (slot % page_size) * token_stride + head * head_stride + byte


def read(buffer: Tensor, plane: Sequence[int], page_size: int, slot: int, heads: int, row_bytes: int) -> np.ndarray:
    """The bytes of a slot, ``[heads, row_bytes]`` uint8."""
    starts = [address(plane, page_size, slot, head) for head in range(heads)]
    return np.stack([buffer[at : at + row_bytes].numpy() for at in starts])


def write(buffer: Tensor, plane: Sequence[int], page_size: int, slot: int, rows: np.ndarray) -> set[int]:
    """Put ``rows [heads, row_bytes]`` uint8 into a slot; returns the bytes it covers."""
    touched: set[int] = set()
    for head, row in enumerate(rows):
        at = address(plane, page_size, slot, head)
        buffer[at : at + len(row)] = torch.from_numpy(row.copy())
        touched.update(range(at, at + len(row)))
    return touched


def store(
    buffer: Tensor,
    plane: Sequence[int],
    page_size: int,
    dtype: torch.dtype,
    rows: Tensor,
    slots: Iterable[int],
    scale: float = 1.0,
    scale_plane: Sequence[int] | None = None,
) -> set[int]:
    """Write ``rows [T, H, D]`` to slots, skipping those below 0 and past the end; returns the bytes it covered.

    With a ``scale_plane`` each (token, head) by a scale of its own, which is written there.
    """
    touched: set[int] = set()
    for i, slot in enumerate(slots):
        if 0 <= slot < plane[4] * page_size:
            if scale_plane is None:
                touched |= write(buffer, plane, page_size, slot, encode(rows[i], dtype, scale))
                continue
            scales = np.array([[row_scale(row, dtype)] for row in rows[i]], dtype=np.float32)
            heads = [
                encode(r, dtype, s) if s == s else r.new_zeros(len(r), dtype=torch.uint8).numpy()
                for r, s in zip(rows[i], scales[:, 0], strict=True)
            ]
            touched |= write(buffer, plane, page_size, slot, np.stack(heads))
            touched |= write(buffer, scale_plane, page_size, slot, scales.view(np.uint8))
    return touched


def row_scale(row: Tensor, dtype: torch.dtype) -> np.float32:
    """A row's own scale: its largest magnitude over the dtype's, never subnormal; 1 for zeros, NaN for NaN and inf."""
    values = row.float().numpy()
    if not np.isfinite(values).all():
        return np.float32(np.nan)
    largest = np.abs(values).max()
    limit = 127.0 if dtype == torch.int8 else FP8_MAX[dtype]
    return max(largest / np.float32(limit), np.float32(2.0**-126)) if largest else np.float32(1)


def load(
    buffer: Tensor, plane: Sequence[int], page_size: int, dtype: torch.dtype, slots: Iterable[int], heads: int, dim: int
) -> np.ndarray:
    """The rows of slots as float64 ``[N, heads, dim]``; zeros below 0."""
    rows = []
    for slot in slots:
        row = np.zeros((heads, dim))
        if slot >= 0:
            row = decode(read(buffer, plane, page_size, slot, heads, dim * dtype.itemsize), dtype)
        rows.append(row)
    return np.stack(rows) if rows else np.zeros((0, heads, dim))


@functools.cache
def fp8_values(dtype: torch.dtype) -> np.ndarray:
    """The 256 values of an 8-bit format, by its definition (e4m3fn has no infinities, e5m2 is IEEE-like)."""
    exponent_bits, mantissa_bits, bias = FP8[dtype]
    values = np.empty(256)
    for code in range(256):
        exponent = (code & 0x7F) >> mantissa_bits
        mantissa = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
        value = (1 + mantissa) * 2.0 ** (exponent - bias) if exponent else mantissa * 2.0 ** (1 - bias)
        if dtype == torch.float8_e4m3fn and code & 0x7F == 0x7F:
            value = math.nan
        if dtype == torch.float8_e5m2 and exponent == (1 << exponent_bits) - 1:
            value = math.nan if mantissa else math.inf
        values[code] = -value if code & 0x80 else value
    return values


def decode(data: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """uint8 ``[..., n * itemsize]`` to float64 ``[..., n]``."""
    data = np.ascontiguousarray(data)
    if dtype in FP8:
        return fp8_values(dtype)[data]
    if dtype == torch.int8:
        return data.view(np.int8).astype(np.float64)
    if dtype == torch.bfloat16:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view({torch.float16: np.float16, torch.float32: np.float32}[dtype]).astype(np.float64)


def encode(x: Tensor, dtype: torch.dtype, scale: float = 1.0) -> np.ndarray:
    """The bytes ``[..., n * itemsize]`` of x / scale, computed in fp32 and rounded to nearest even; fp8 and int8
    saturate, and int8 has -128 for NaN."""
    values = x.detach().float().numpy()
    if scale != 1.0:
        values = values / np.float32(scale)
    if dtype in FP8:
        return _encode_fp8(values, dtype)
    if dtype == torch.int8:
        whole = np.rint(np.clip(values, -127, 127))
        return np.where(np.isnan(values), -128, whole).astype(np.int8).view(np.uint8)
    if dtype == torch.bfloat16:
        bits = values.astype(np.float32).view(np.uint32)
        rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where(np.isnan(values), 0x7FC0, rounded)
        return np.ascontiguousarray(rounded.astype(np.uint16)).view(np.uint8)
    with np.errstate(over="ignore"):
        narrow = values.astype({torch.float16: np.float16, torch.float32: np.float32}[dtype])
    return np.ascontiguousarray(narrow).view(np.uint8)


def _encode_fp8(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """By search: the nearest finite value of the same sign, of two equally near ones the one with the even code."""
    finite = [code for code in range(0x80) if np.isfinite(fp8_values(dtype)[code])]
    magnitudes = fp8_values(dtype)[finite]  # ascending, as codes do
    size = np.minimum(np.abs(values.astype(np.float64)), magnitudes[-1])
    above = np.clip(np.searchsorted(magnitudes, size), 1, len(finite) - 1)
    below = above - 1
    to_above, to_below = magnitudes[above] - size, size - magnitudes[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(up, above, below) | np.where(np.signbit(values), 0x80, 0)
    return np.where(np.isnan(values), 0x7F, codes).astype(np.uint8)


def attention(
    buffer: Tensor,
    query: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor | None,
    key_plane: Sequence[int],
    value_plane: Sequence[int],
    page_size: int,
    kv_heads: int,
    value_dim: int,
    key_dtype: torch.dtype,
    value_dtype: torch.dtype,
    *,
    softmax_scale: float,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    key_scale_tensor: Tensor | None = None,
    value_scale_tensor: Tensor | None = None,
    key_scale_plane: Sequence[int] | None = None,
    value_scale_plane: Sequence[int] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """``pm_ops::attention`` over every (query, head) on its own: out ``[Tq, Hq, Dv]`` and lse ``[Tq, Hq]``, float64.

    Only keys that a query sees are looked at. Further arguments (hints, ``impl``) change nothing.
    """
    tokens, heads, dim = query.shape
    batch = len(seq_lens)
    queries = query.to(torch.float64).numpy()
    k_scale = key_scale if key_scale_tensor is None else key_scale_tensor.item()
    v_scale = value_scale if value_scale_tensor is None else value_scale_tensor.item()
    starts = [b * (tokens // max(batch, 1)) for b in range(batch + 1)] if query_start is None else query_start.tolist()
    out, lse = np.zeros((tokens, heads, value_dim)), np.full((tokens, heads), -np.inf)
    for b in range(batch):
        n, s = starts[b + 1] - starts[b], int(seq_lens[b])
        slots = [int(page_table[b, j // page_size]) * page_size + j % page_size for j in range(s)] if n else []
        keys = load(buffer, key_plane, page_size, key_dtype, slots, kv_heads, dim) * k_scale
        values = load(buffer, value_plane, page_size, value_dtype, slots, kv_heads, value_dim) * v_scale
        if key_scale_plane is not None:
            keys = keys * load(buffer, key_scale_plane, page_size, torch.float32, slots, kv_heads, 1)
        if value_scale_plane is not None:
            values = values * load(buffer, value_scale_plane, page_size, torch.float32, slots, kv_heads, 1)
        for i in range(n):
            position = s - n + i
            for h in range(heads):
                kv = h // (heads // kv_heads)
                seen = [j for j in range(s) if _sees(position, j, causal, window)]
                logits = keys[seen, kv] @ queries[starts[b] + i, h] * softmax_scale
                if softcap:
                    logits = softcap * np.tanh(logits / softcap)
                if alibi_slopes is not None:
                    logits = logits + float(alibi_slopes[h]) * (np.array(seen, dtype=np.float64) - position)
                if bias is not None:
                    added = _bias(bias, b, h, i, seen)
                    logits, seen = logits + added, [j for j, x in zip(seen, added, strict=True) if x != -np.inf]
                    logits = logits[added != -np.inf]
                sink = None if sinks is None else float(sinks[h])
                row, total = _softmax(logits, sink)
                out[starts[b] + i, h] = row @ values[seen, kv]
                lse[starts[b] + i, h] = total
    return torch.from_numpy(out), torch.from_numpy(lse)


def attention_of(arguments: Any) -> tuple[Tensor, Tensor]:
    """:func:`attention` of a ``pm_ops.ops.attention.Attention``, its tensors brought to the CPU."""
    values = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(arguments)}
    return attention(**{k: v.cpu() if isinstance(v, Tensor) else v for k, v in values.items()})


def _sees(position: int, j: int, causal: bool, window: int) -> bool:
    if causal and j > position:
        return False
    return not window or abs(position - j) < window


def _bias(bias: Tensor, b: int, h: int, i: int, keys: list[int]) -> np.ndarray:
    """The bias of these keys, as numbers to add; -inf where hidden, and past the bias's last key."""
    row = bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, i if bias.shape[2] > 1 else 0]
    added = np.full(len(keys), -np.inf)
    for at, j in enumerate(keys):
        if j < len(row):
            added[at] = (0.0 if row[j] else -np.inf) if bias.dtype == torch.bool else float(row[j])
    return added


def _softmax(logits: np.ndarray, sink: float | None) -> tuple[np.ndarray, float]:
    """Probabilities of the logits and the log-sum-exp, the sink counted in both."""
    everything = logits if sink is None else np.append(logits, sink)
    if len(everything) == 0 or everything.max() == -np.inf:
        return np.zeros(len(logits)), -np.inf
    top = everything.max()
    lse = top + math.log(np.exp(everything - top).sum())
    return np.exp(logits - lse), lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """``pm_ops::merge_attention`` row by row, in float64."""
    out, lse = np.zeros(out_a.shape), np.full(lse_a.shape, -np.inf)
    for index in np.ndindex(*lse_a.shape):
        parts = [(o[index].double().numpy(), float(e[index])) for o, e in ((out_a, lse_a), (out_b, lse_b))]
        weights, lse[index] = _softmax(np.array([e for _, e in parts]), None)
        out[index] = sum((w * o for (o, _), w in zip(parts, weights, strict=True) if w), np.zeros(out_a.shape[-1]))
    return torch.from_numpy(out), torch.from_numpy(lse)


def page_bytes(region: Sequence[int], page: int) -> range:
    """The bytes of a page; ``region`` is ``[base, page_stride, page_bytes, num_pages]``."""
    base, page_stride, nbytes, _ = region
    return range(base + page * page_stride, base + page * page_stride + nbytes)
