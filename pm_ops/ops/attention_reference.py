"""``attention`` in plain torch: the specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._common import plane_view, without_autocast
from ._quantise import dequantise, scale_value
from .attention import Attention


def attention_reference(a: Attention) -> tuple[Tensor, Tensor]:
    """The specification: dense float32 attention, one sequence at a time."""
    return without_autocast(a.query.device.type, _attention, a)


def _attention(a: Attention) -> tuple[Tensor, Tensor]:
    tokens, heads, key_dim = a.query.shape
    out = torch.zeros(tokens, heads, a.value_dim, dtype=torch.float32, device=a.query.device)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=a.query.device)
    key_scale = scale_value(a.key_scale, a.key_scale_tensor)
    value_scale = scale_value(a.value_scale, a.value_scale_tensor)
    key = (a.key_plane, key_dim, a.key_dtype, key_scale, a.key_scale_plane)
    value = (a.value_plane, a.value_dim, a.value_dtype, value_scale, a.value_scale_plane)
    lengths, batch = a.seq_lens.tolist(), a.seq_lens.shape[0]
    uniform = tokens // max(batch, 1)
    starts = [b * uniform for b in range(batch + 1)] if a.query_start is None else a.query_start.tolist()
    for b in range(batch):
        rows = slice(starts[b], starts[b + 1])
        if starts[b] == starts[b + 1]:
            continue
        oldest = lengths[b] - (starts[b + 1] - starts[b]) - a.window + 1 if a.window else 0
        first = max(oldest, 0) // a.page_size  # pages before every query's window may be gone
        table = a.page_table[b, first : -(-lengths[b] // a.page_size)].long()
        length = max(lengths[b] - first * a.page_size, 0)
        k, v = _rows(a, table, length, *key), _rows(a, table, length, *value)
        out[rows], lse[rows] = _attend(a, b, first * a.page_size, a.query[rows].float(), k, v)
    return out.to(a.query.dtype), lse if a.return_lse else lse.new_empty(0)


def _rows(
    a: Attention,
    table: Tensor,
    length: int,
    plane: Sequence[int],
    dim: int,
    dtype: torch.dtype,
    scale: float | Tensor,
    scale_plane: Sequence[int] | None,
) -> Tensor:
    """A sequence's first ``length`` rows of a plane, ``[length, kv_heads, dim]`` float32."""

    def stored(plane: Sequence[int], dim: int, dtype: torch.dtype) -> Tensor:
        pages = plane_view(a.buffer, plane, a.page_size, a.kv_heads, dim, dtype)[table]
        return pages.reshape(-1, a.kv_heads, dim)[:length]

    scales = None if scale_plane is None else stored(scale_plane, 1, torch.float32)
    return dequantise(stored(plane, dim, dtype), scale, scales)


def _attend(a: Attention, b: int, first: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence: ``q [n, Hq, Dk]``, its keys from ``first`` on ``k [s, Hkv, Dk]`` and ``v [s, Hkv, Dv]``."""
    n, heads, _ = q.shape
    end = first + k.shape[0]
    group = heads // a.kv_heads
    q = q.transpose(0, 1).reshape(a.kv_heads, group * n, -1)
    logits = (q @ k.permute(1, 2, 0)).view(heads, n, -1) * a.softmax_scale
    if a.softcap:
        logits = a.softcap * torch.tanh(logits / a.softcap)
    position = torch.arange(end - n, end, device=q.device)[:, None]
    j = torch.arange(first, end, device=q.device)
    if a.alibi_slopes is not None:
        logits = logits + a.alibi_slopes.float()[:, None, None] * (j - position)
    visible = torch.ones(n, k.shape[0], dtype=torch.bool, device=q.device)
    if a.causal:
        visible &= j <= position
    if a.window:
        visible &= (j - position).abs() < a.window
    visible = visible.expand(heads, -1, -1)
    if a.bias is not None:
        logits, visible = _biased(a.bias[b % a.bias.shape[0], ..., first:], logits, visible)
    logits = torch.where(visible, logits, -torch.inf)
    if a.sinks is not None:
        logits = torch.cat((logits, a.sinks.float()[:, None, None].expand(-1, n, 1)), -1)
    top = logits.amax(-1, keepdim=True) if logits.shape[-1] else logits.new_full((heads, n, 1), -torch.inf)
    shift = torch.where(top == -torch.inf, 0.0, top)
    p = torch.exp(logits - shift)
    total = p.sum(-1, keepdim=True)
    lse = (shift + torch.log(total)).squeeze(-1)
    p = torch.where(total == 0, 0.0, p / total)[..., : k.shape[0]]
    seen = visible.reshape(a.kv_heads, group * n, -1).any(1)  # a key nobody sees: 0 * NaN must not leak
    v = torch.where(seen[..., None], v.transpose(0, 1), 0.0)
    out = (p.reshape(a.kv_heads, group * n, -1) @ v).view(heads, n, -1)
    return out.transpose(0, 1), lse.transpose(0, 1)


def _biased(bias: Tensor, logits: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    heads, n, s = logits.shape
    bias = bias[:, : n if bias.shape[1] > 1 else 1, :s].expand(heads, n, -1)
    short = s - bias.shape[-1]
    if bias.dtype == torch.bool:
        return logits, visible & torch.nn.functional.pad(bias, (0, short), value=False)
    bias = torch.nn.functional.pad(bias.float(), (0, short), value=-torch.inf)
    return logits + bias, visible & (bias != -torch.inf)
