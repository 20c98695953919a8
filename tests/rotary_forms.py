"""Rotary embeddings as models write them: ``rotate(q, k, positions, *tensors)`` of rows ``[T, heads, dim]``.

Each works in the layout and by the operations of the code that it is named after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DIM, POSITIONS = 8, 40
Pair = tuple[Tensor, Tensor]


class Form(NamedTuple):
    """How a model rotates, what ``rope_store_kv`` calls that, and the tensors besides positions that it takes."""

    rotate: Callable[..., Pair]
    says: str
    tensors: tuple[Tensor, ...]
    grows: bool = False  # does a bf16 graph compute in float32 and round once?


def _half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def _every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[:, :, :, 1::2], x[:, :, :, ::2]), dim=-1).flatten(-2)


def _angles(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Pair:
    freqs = (inv_freq[None, :, None].float() @ positions[None, None, :].float()).transpose(1, 2)
    emb = torch.cat((freqs, freqs), dim=-1)
    return (emb.cos() * 1.0).to(x.dtype), (emb.sin() * 1.0).to(x.dtype)


def _heads_first(x: Tensor) -> Tensor:
    return x[None].transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2)[0]


def llama(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor) -> Pair:
    """transformers, ``modeling_llama.py``: cosines in the graph, of every angle twice."""
    cos, sin = (t.unsqueeze(1) for t in _angles(q, positions, inv_freq))
    q, k = _heads_first(q), _heads_first(k)
    return _rows((q * cos) + (_half(q) * sin)), _rows((k * cos) + (_half(k) * sin))


def _norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    dtype, x = x.dtype, x.to(torch.float32)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return weight * x.to(dtype)


def qwen3(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, q_weight: Tensor, k_weight: Tensor) -> Pair:
    """``modeling_qwen3.py``: RMSNorm of every head first."""
    return llama(_norm(q, q_weight), _norm(k, k_weight), positions, inv_freq)


def gemma3(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, q_weight: Tensor, k_weight: Tensor) -> Pair:
    """``modeling_gemma3.py``: a norm whose factor is 1 + weight, behind the transpose."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (y * (1.0 + weight.float())).type_as(x)

    cos, sin = (t.unsqueeze(1) for t in _angles(q, positions, inv_freq))
    q, k = norm(_heads_first(q), q_weight), norm(_heads_first(k), k_weight)
    return _rows((q * cos) + (_half(q) * sin)), _rows((k * cos) + (_half(k) * sin))


def rms_norm(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor, q_weight: Tensor, k_weight: Tensor) -> Pair:
    """``torch.nn.RMSNorm``, which writes in place within."""
    q, k = F.rms_norm(q, (DIM,), q_weight, 1e-6), F.rms_norm(k, (DIM,), k_weight, 1e-6)
    return llama(q, k, positions, inv_freq)


def phi(q: Tensor, k: Tensor, positions: Tensor, inv_freq: Tensor) -> Pair:
    """``modeling_phi.py``, ``modeling_gpt_neox.py``: only the first elements are rotated."""
    cos, sin = (t.unsqueeze(1) for t in _angles(q, positions, inv_freq[: DIM // 4]))
    size, q, k = cos.shape[-1], _heads_first(q), _heads_first(k)
    q_rot, q_pass, k_rot, k_pass = q[..., :size], q[..., size:], k[..., :size], k[..., size:]
    q_rot, k_rot = (q_rot * cos) + (_half(q_rot) * sin), (k_rot * cos) + (_half(k_rot) * sin)
    return _rows(torch.cat((q_rot, q_pass), dim=-1)), _rows(torch.cat((k_rot, k_pass), dim=-1))


def gptj(q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> Pair:
    """``modeling_gptj.py``: neighbours are pairs, and a table of sines and cosines is gathered from."""
    sin, cos = torch.split(table[positions][None], table.shape[-1] // 2, dim=-1)
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    size, q, k = cos.shape[-1], q[None], k[None]
    k_rot, q_rot = k[:, :, :, :size], q[:, :, :, :size]
    k_rot, q_rot = (k_rot * cos) + (_every_two(k_rot) * sin), (q_rot * cos) + (_every_two(q_rot) * sin)
    return torch.cat([q_rot, q[:, :, :, size:]], dim=-1)[0], torch.cat([k_rot, k[:, :, :, size:]], dim=-1)[0]


def gpt_fast(q: Tensor, k: Tensor, positions: Tensor, freqs_cis: Tensor) -> Pair:
    """gpt-fast, ``model.py``: neighbours are pairs, cosine and sine lie side by side."""
    freqs = freqs_cis[positions]

    def rotate(x: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cis = freqs.view(1, pairs.size(1), 1, pairs.size(3), 2)
        turned = torch.stack(
            [
                pairs[..., 0] * cis[..., 0] - pairs[..., 1] * cis[..., 1],
                pairs[..., 1] * cis[..., 0] + pairs[..., 0] * cis[..., 1],
            ],
            -1,
        )
        return turned.flatten(3).type_as(x)

    return rotate(q[None])[0], rotate(k[None])[0]


def _vllm(q: Tensor, k: Tensor, positions: Tensor, cache: Tensor, neox: bool) -> Pair:
    cos, sin = cache.index_select(0, positions).chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        shape, x = x.shape, x.view(positions.shape[0], -1, DIM)
        x_rot, x_pass = x[..., : cache.shape[1]], x[..., cache.shape[1] :]
        c, s = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
        x1, x2 = torch.chunk(x_rot, 2, dim=-1) if neox else (x_rot[..., ::2], x_rot[..., 1::2])
        o1, o2 = x1 * c - x2 * s, x2 * c + x1 * s
        turned = torch.cat((o1, o2), dim=-1) if neox else torch.stack((o1, o2), dim=-1).flatten(-2)
        return torch.cat((turned, x_pass), dim=-1).reshape(shape)

    flat = rotate(q.flatten(1)), rotate(k.flatten(1))
    return flat[0].view(q.shape), flat[1].view(k.shape)


def vllm_neox(q: Tensor, k: Tensor, positions: Tensor, cache: Tensor) -> Pair:
    """vLLM, ``rotary_embedding/base.py``, ``forward_native``."""
    return _vllm(q, k, positions, cache, True)


def vllm_gptj(q: Tensor, k: Tensor, positions: Tensor, cache: Tensor) -> Pair:
    """The same with ``is_neox_style=False``."""
    return _vllm(q, k, positions, cache, False)


def _forms() -> dict[str, Form]:
    inv_freq = 1.0 / (10.0 ** (torch.arange(0, DIM, 2) / DIM))
    weights = (torch.linspace(0.5, 1.5, DIM), torch.linspace(1.25, -0.25, DIM))
    angles = torch.outer(torch.arange(POSITIONS).float(), inv_freq)
    part = torch.outer(torch.arange(POSITIONS).float(), inv_freq[: DIM // 4])
    whole = torch.cat((angles.cos(), angles.sin()), -1)
    few = torch.cat((part.cos(), part.sin()), -1)
    return {
        "llama": Form(llama, "NeoX pairs, 8 of 8 elements", (inv_freq,)),
        "qwen3": Form(qwen3, "NeoX pairs, 8 of 8 elements, QK-norm", (inv_freq, *weights)),
        "gemma3": Form(gemma3, "NeoX pairs, 8 of 8 elements, QK-norm", (inv_freq, *weights)),
        "rms_norm": Form(rms_norm, "NeoX pairs, 8 of 8 elements, QK-norm", (inv_freq, *weights)),
        "phi": Form(phi, "NeoX pairs, 4 of 8 elements", (inv_freq,)),
        "gptj": Form(gptj, "GPT-J pairs, 4 of 8 elements", (torch.cat((part.sin(), part.cos()), -1),)),
        "gpt_fast": Form(
            gpt_fast, "GPT-J pairs, 8 of 8 elements", (torch.stack((angles.cos(), angles.sin()), -1),), grows=True
        ),
        "vllm_neox": Form(vllm_neox, "NeoX pairs, 8 of 8 elements", (whole,)),
        "vllm_gptj": Form(vllm_gptj, "GPT-J pairs, 4 of 8 elements", (few,)),
    }


FORMS = _forms()
