"""What is right: attention in float64 by the definition, and how far a result is from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_LOGITS = 1 << 27  # float64 logits held at a time: 1 GiB


class Error(NamedTuple):
    """How far a result is from the right one."""

    total: float
    """Norm of the difference over the norm of the right result; for bytes the share that is wrong."""
    worst: float
    """The same of the worst row, one query's one head: one wrong row among many does not hide in the total."""

    def within(self, tolerance: float) -> bool:
        """Rows vary: the worst of 10^6 may be ten times further off than all together."""
        return self.total <= tolerance and self.worst <= 10 * tolerance


def error(result: Tensor | None, right: Tensor) -> Error:
    """Compare ``[rows, heads, dim]``; infinite where the shape is wrong or anything is not finite."""
    if result is None or result.shape != right.shape or not bool(result.isfinite().all()):
        return Error(float("inf"), float("inf"))
    difference = (result.double() - right).norm(dim=-1)
    size = right.norm(dim=-1)
    total = difference.norm() / size.norm()
    return Error(float(total), float((difference / size.clamp(min=1e-300)).max()))


def rotate(rows: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """RoPE in float64, NeoX pairs: ``rows [T, heads, dim]``; ``cos_sin [positions, dim]``, cosines, then sines."""
    cos, sin = cos_sin[positions].double()[:, None].chunk(2, -1)
    first, second = rows.double().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention_reference(
    query: Tensor,
    rows: Callable[[int], tuple[Tensor, Tensor]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scales: tuple[float, float] = (1.0, 1.0),
    window: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention, float64 ``[Tq, Hq, Dv]``, some query rows of one sequence at a time.

    Args:
        query: ``[Tq, Hq, Dk]``.
        rows: ``rows(b)`` gives the stored K and V of sequence ``b``, ``[seq_len, Hkv, dim]``.
        query_lens, seq_lens: query ``i`` of ``n`` stands at ``seq_len - n + i`` and sees keys up to there.
        scales: of K and V; stored = x / scale.
        window: 0, or how many keys a query sees, itself included.
        sinks: ``[Hq]``, one more logit in each softmax, without a value.
    """
    out, start = [], 0
    for b, (n, s) in enumerate(zip(query_lens, seq_lens, strict=True)):
        key, value = rows(b)
        step = max(_LOGITS // (query.shape[1] * s), 1)
        for i in range(0, n, step):
            count = min(step, n - i)
            end = s - n + i + count
            begin = max(s - n + i - window + 1, 0) if window else 0
            k, v = key[begin:end].double() * scales[0], value[begin:end].double() * scales[1]
            position = torch.arange(end - count, end, device=query.device)[:, None]
            j = torch.arange(begin, end, device=query.device)
            seen = (j <= position) & ((j > position - window) if window else True)
            out.append(_attend(query[start + i : start + i + count].double(), k, v, seen, sinks))
        start += n
    return torch.cat(out)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """One sequence's rows ``q [n, Hq, Dk]`` over ``k [s, Hkv, Dk]``, ``v [s, Hkv, Dv]``; ``seen [n, s]``."""
    n, heads, dim = q.shape
    kv_heads = k.shape[1]
    by_head = q.transpose(0, 1).reshape(kv_heads, heads // kv_heads * n, dim)
    logits = (by_head @ k.permute(1, 2, 0)).view(heads, n, -1).mul_(dim**-0.5).masked_fill_(~seen, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.double()[:, None, None])
    p = logits.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total += (sinks.double()[:, None, None] - top).exp()
    p /= total
    out = p.view(kv_heads, -1, p.shape[-1]) @ v.transpose(0, 1)
    return out.view(heads, n, -1).transpose(0, 1)
