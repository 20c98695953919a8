"""The operators ``attention`` and ``attention_out``, and which implementation makes a call of theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common import define, kernel
from .attention import Attention, AttentionOut
from .attention_reference import attention_reference

FA3_QUERIES = 16
"""``impl="auto"`` may take FlashAttention 3 for more queries of a sequence than these."""

_IMPLEMENTATIONS = {
    "triton": kernel("attention.attention"),
    "fa3": kernel("fa3.attention"),
    "reference": attention_reference,
}
_fa3_reason = kernel("fa3.reason")
_hopper_takes = kernel("attention_hopper.takes")


def choose(a: Attention) -> tuple[str, str]:
    """What ``impl="auto"`` takes for this call, and why. It follows from shapes, dtypes and the machine."""
    if a.query.device.type == "cpu":
        return "reference", "the tensors are on the CPU"
    queries = a.queries_per_sequence
    if queries <= FA3_QUERIES:
        return "triton", f"a sequence has {queries} queries, not more than {FA3_QUERIES}"
    if _hopper_takes(a):
        return "triton", f"its kernel for many queries takes the {queries} of a sequence"
    reason = _fa3_reason(a)
    if reason is not None:
        return "triton", f"FlashAttention 3 cannot make this call: {reason}"
    return "fa3", f"a sequence has {queries} queries, which Triton's kernel for many queries does not take"


def _attention_cuda(a: Attention) -> tuple[Tensor, Tensor]:
    return _IMPLEMENTATIONS[choose(a)[0] if a.impl == "auto" else a.impl](a)


def _attention_fake(a: Attention) -> tuple[Tensor, Tensor]:
    tokens, heads = a.query.shape[:2]
    lse = (tokens, heads) if a.return_lse else (0,)
    return a.query.new_empty((tokens, heads, a.value_dim)), a.query.new_empty(lse, dtype=torch.float32)


_ARGUMENTS = (
    "Tensor buffer, Tensor query, Tensor page_table, Tensor seq_lens, Tensor? query_start, SymInt[] key_plane, "
    "SymInt[] value_plane, SymInt page_size, SymInt kv_heads, SymInt value_dim, ScalarType key_dtype, "
    "ScalarType value_dtype, float softmax_scale, bool causal=True, SymInt window=0, float softcap=0.0, "
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? bias=None, float key_scale=1.0, float value_scale=1.0, "
    "Tensor? key_scale_tensor=None, Tensor? value_scale_tensor=None, SymInt max_query_len=0, bool return_lse=False, "
    'str impl="auto", SymInt[]? key_scale_plane=None, SymInt[]? value_scale_plane=None, '
    "bool batch_invariant=False, SymInt max_seq_len=0"
)

define(
    "attention",
    f"({_ARGUMENTS}) -> (Tensor, Tensor)",
    Attention,
    fake=_attention_fake,
    cpu=attention_reference,
    cuda=_attention_cuda,
)

define(
    "attention_out",
    f"({_ARGUMENTS}, *, Tensor(a!) out) -> ()",
    AttentionOut,
    fake=lambda a: None,
    cpu=lambda a: a.fill(attention_reference(a)[0]),
    cuda=lambda a: a.fill(_attention_cuda(a)[0]),
)
