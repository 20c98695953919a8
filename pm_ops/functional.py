"""The operators as people call them: with a pool and a layer instead of buffers and byte strides.

Each function only fills in the pool's geometry; ``torch.ops.pm_ops.<name>`` is the same operator with ints, for
compiler passes and engines. Eager or compiled, CPU or CUDA. The page verbs are methods of :class:`PagePool`. In
compiled code give scales as device tensors: each float is a graph of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .explain import explained
from .layout import counted
from .ops._quantise import Scale, scale_arguments
from .ops.attention import Attention
from .ops.attention_choice import choose
from .pool import PagePool


@explained
def store_kv(
    pool: PagePool,
    layer: int,
    key: Tensor | None,
    value: Tensor | None,
    slots: Tensor,
    *,
    key_scale: Scale = 1.0,
    value_scale: Scale = 1.0,
) -> None:
    """Write token rows to their slots, K and V (or one of them) in one launch.

    Args:
        key, value: ``[T, heads, dim]`` of the layer's geometry, any strides and floating dtype.
        slots: int32 or int64 ``[N]``, N <= T: row ``i`` goes to ``slots[i]``; rows past N are padding. slot < 0 is
            skipped, slot >= capacity is never written.
        key_scale, value_scale: stored = x / scale, rounded to nearest even; fp8 and int8 saturate. A float, or one
            float32 element on the pool's device. A layout with ``scales=True`` takes none: each row gets a scale of its
            own, which is stored beside it, see :class:`pm_ops.ops.store.StoreKV`. Without, int8 needs one.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on CPU also an index out of range or named twice.
        RuntimeError: an input requires grad.
    """
    key_plane, key_dtype, key_scales = _rows_plane(pool, layer, "key", key)
    value_plane, value_dtype, value_scales = _rows_plane(pool, layer, "value", value)
    args = (pool.buffer, key, value, slots, key_plane, value_plane, pool.page_size, key_dtype, value_dtype)
    torch.ops.pm_ops.store_kv.default(*args, *_scale_arguments(key_scale, value_scale), key_scales, value_scales)


@explained
def rope_store_kv(
    pool: PagePool,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor,
    slots: Tensor,
    *,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    key_scale: Scale = 1.0,
    value_scale: Scale = 1.0,
    return_key: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rotate query and key by their positions and write key and value to their slots, in one launch.

    Args:
        query, key, value: ``[T, Hq, D]``, ``[T, Hk, D]``, ``[T, Hv, Dv]``, any strides (slices of one projection, say);
            query and key float32, float16 or bfloat16. They are not written.
        positions: int32 or int64 ``[T]``, each token's row of ``cos_sin``; None: ``cos_sin`` has T rows, one a token.
        cos_sin: ``[max_position, R]``, R / 2 cosines, then R / 2 sines; elements from R on are not rotated.
        slots, key_scale, value_scale: as in :func:`store_kv`. Rows without a slot are rotated all the same.
        interleaved: pairs are neighbours (GPT-J) instead of R / 2 apart (GPT-NeoX).
        q_weight, k_weight: ``[D]``, RMSNorm over each head before the rotation (QK-norm), both or neither.
        eps, weight_offset: of that norm, whose factor is ``weight_offset + weight``; 1 for Gemma.
        return_key: also return the rotated key.

    Returns the rotated query, fresh and contiguous, or ``(query, key)``. Computed in float32 and rounded once to the
    dtype they came in, and from that the key is stored: without weights the result is, bit for bit, that of a rotation
    in float32, a cast and :func:`store_kv`. The exact order is in :class:`pm_ops.ops.rope.RopeStoreKV`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on CPU also a slot or position out of range, or a slot twice.
        RuntimeError: an input requires grad.
    """
    key_plane, key_dtype, key_scales = _rows_plane(pool, layer, "key", key)
    value_plane, value_dtype, value_scales = _rows_plane(pool, layer, "value", value)
    rotated_query, rotated_key = torch.ops.pm_ops.rope_store_kv.default(
        pool.buffer,
        query,
        key,
        value,
        positions,
        cos_sin,
        slots,
        key_plane,
        value_plane,
        pool.page_size,
        key_dtype,
        value_dtype,
        interleaved,
        q_weight,
        k_weight,
        eps,
        weight_offset,
        *_scale_arguments(key_scale, value_scale),
        return_key,
        key_scales,
        value_scales,
    )
    return (rotated_query, rotated_key) if return_key else rotated_query


@explained
def load_kv(
    pool: PagePool,
    layer: int,
    slots: Tensor,
    kind: str = "key",
    *,
    scale: Scale = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The rows of these slots of one plane, fresh ``[N, heads, dim]``; slot < 0 gives zeros.

    Without ``out_dtype`` the stored elements, bit for bit; with it ``stored * scale``, cast. In a layout with
    ``scales=True`` that is each row's own scale.
    """
    geometry, heads, dim, dtype, scales = pool.plane(layer, kind)
    return torch.ops.pm_ops.load_kv.default(
        pool.buffer,
        slots,
        geometry,
        pool.page_size,
        heads,
        dim,
        dtype,
        *scale_arguments(scale),
        out_dtype,
        None if out_dtype is None else scales,
    )


@explained
def attention(
    pool: PagePool,
    layer: int,
    query: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    query_start: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    key_scale: Scale = 1.0,
    value_scale: Scale = 1.0,
    max_query_len: int = 0,
    max_seq_len: int = 0,
    batch_invariant: bool = False,
    return_lse: bool = False,
    impl: str = "auto",
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the layer's pages: decode, prefill and mixed batches in one call.

    Args:
        query: ``[Tq, Hq, Dk]``, any strides; Hq is a multiple of the layer's KV heads.
        page_table: int32 or int64 ``[B, W]``, physical page ids.
        seq_lens: int32 or int64 ``[B]``, keys of each sequence, those of this step included.
        query_start: ``[B + 1]``, cumulative query tokens from 0 on; None: every sequence has ``Tq / B``, a decode step
            one. Rows past the last sequence are padding.
        softmax_scale: default ``Dk ** -0.5``.
        causal: aligned bottom right: a sequence's last query sees its last key.
        window: 0, or how many keys a query sees, itself included.
        softcap: 0, or ``c`` in ``c * tanh(logit / c)``.
        sinks, alibi_slopes: ``[Hq]``.
        bias: bool (True: visible) or floating point (added) ``[B or 1, Hq or 1, Lq or 1, S]``, ``Lq`` being the most
            query tokens of one sequence. Column ``j`` is key ``j``; keys past ``S`` are hidden.
        key_scale, value_scale: as in :func:`store_kv`.
        max_query_len: 0, or at least the most query tokens of one sequence, which helps to choose a kernel. Queries
            past it may be left out of the result; where indices are checked they are refused.
        max_seq_len: 0, or about the most keys of one sequence, a hint for tables that are much wider.
        batch_invariant: make a row's bits independent of what else is in the call (CUDA; slower).
        return_lse: also return ``lse [Tq, Hq]`` float32, natural log.
        impl: ``"auto"``, ``"triton"``, ``"fa3"`` or ``"reference"``; :func:`attention_impl` tells what auto takes.
        out: contiguous ``[Tq, Hq, Dv]`` of the query's dtype; written and returned instead of a new tensor.

    Returns ``out [Tq, Hq, Dv]``, or ``(out, lse)``. A row that sees no key gives 0 and -inf. Each argument's exact
    meaning, and what may influence a row, is in :class:`pm_ops.ops.attention.Attention`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or both ``out`` and ``return_lse`` are given; on CPU also
            lengths or page ids out of range.
        RuntimeError: an input requires grad.
    """
    if out is not None and return_lse:
        raise ValueError("attention writes to out, or returns lse, not both; leave one of them away")
    key, value = pool.plane(layer, "key"), pool.plane(layer, "value")
    if query.dim() == 0 or query.shape[-1] != key.dim or value.heads != key.heads:
        raise ValueError(
            f"query is {list(query.shape)}; layer {layer} has keys of {counted(key.heads, 'head')} x {key.dim} and "
            f"values of {counted(value.heads, 'head')} x {value.dim}: query's last axis must be the key's, and their "
            "heads must be equal"
        )
    arguments = (
        pool.buffer,
        query,
        page_table,
        seq_lens,
        query_start,
        key.geometry,
        value.geometry,
        pool.page_size,
        key.heads,
        value.dim,
        key.dtype,
        value.dtype,
        key.dim**-0.5 if softmax_scale is None else softmax_scale,
        causal,
        window,
        softcap,
        sinks,
        alibi_slopes,
        bias,
        *_scale_arguments(key_scale, value_scale),
        max_query_len,
        return_lse,
        impl,
        key.scales,
        value.scales,
        batch_invariant,
        max_seq_len,
    )
    if out is not None:
        torch.ops.pm_ops.attention_out.default(*arguments, out=out)
        return out
    out, lse = torch.ops.pm_ops.attention.default(*arguments)
    return (out, lse) if return_lse else out


class _Recorder(TorchDispatchMode):
    """Keeps the arguments of a call of the attention operator, checked, and makes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.pm_ops.attention.default:
            return func(*args, **kwargs or {})
        self.call = Attention(*args, **kwargs or {})
        self.call.check()
        return args[1], args[1]


def attention_call(*args: Any, **kwargs: Any) -> Attention:
    """The operator's arguments in this call of :func:`attention`, checked; nothing is computed.

    Same arguments, without ``out``, and same errors, but those of what no fake tensor has: values and addresses.
    """
    if kwargs.get("out") is not None:
        raise ValueError("nothing is computed here, so there is nothing to write; call this without out")
    with _Recorder() as recorder:
        attention(*args, **kwargs)
    return recorder.call


def attention_impl(*args: Any, **kwargs: Any) -> str:
    """What ``impl="auto"`` takes for this call of :func:`attention`, and why, as in ``"triton: a sequence has ..."``.

    Same arguments, without ``out``, and same errors as :func:`attention`, which is not computed; but values of indices,
    and where the buffer begins in memory, are not looked at.
    """
    return ": ".join(choose(attention_call(*args, **kwargs)))


@explained
def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two parts of one softmax: ``out_* [T, H, D]``, natural-log ``lse_* [T, H]`` float32.

    Two empty parts give 0 and -inf. Sinks may be in one part only.
    """
    return torch.ops.pm_ops.merge_attention.default(out_a, lse_a, out_b, lse_b)


def _rows_plane(
    pool: PagePool, layer: int, kind: str, rows: Tensor | None
) -> tuple[list[int] | None, torch.dtype | None, list[int] | None]:
    """A plane's geometry and dtype, and its scales' geometry, for rows to store; None for no rows."""
    if rows is None:
        return None, None, None
    plane = pool.plane(layer, kind)
    if rows.dim() != 3 or rows.shape[1] != plane.heads or rows.shape[2] != plane.dim:
        raise ValueError(
            f"{kind} rows are {list(rows.shape)}, layer {layer} holds [tokens, {plane.heads}, {plane.dim}]"
        )
    return plane.geometry, plane.dtype, plane.scales


def _scale_arguments(key_scale: Scale, value_scale: Scale) -> tuple[float, float, Tensor | None, Tensor | None]:
    """Of key and value, in the schemas' order."""
    (key, key_tensor), (value, value_tensor) = scale_arguments(key_scale), scale_arguments(value_scale)
    return key, value, key_tensor, value_tensor
