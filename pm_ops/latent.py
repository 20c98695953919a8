"""Multi-head latent attention (DeepSeek's MLA) with a pool and a layer: the faces of :mod:`pm_ops.ops.mla`.

The layout is :func:`pm_ops.formats.mla`. A row is stored by ``store_kv``'s operator: a latent row is a key of one head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .explain import explained
from .ops._quantise import Scale, scale_arguments
from .pool import PagePool, PoolPlane


@explained
def store_latent(
    pool: PagePool, layer: int, latent: Tensor, slots: Tensor, *, rope: Tensor | None = None, scale: Scale = 1.0
) -> None:
    """Write latent rows to their slots, in one launch.

    Args:
        latent: ``[T, D]``, whole rows; or with ``rope`` their first part, any strides and floating dtype.
        rope: ``[T, R]``, the rest of each row, the rotated key; it need not lie beside the latent.
        slots: int32 or int64 ``[N]``, N <= T: row ``i`` goes to ``slots[i]``; rows past N are padding. slot < 0 is
            skipped, slot >= capacity is never written.
        scale: stored = x / scale, rounded to nearest even; fp8 saturates. A float, or one float32 element.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on CPU also an index out of range or named twice.
        RuntimeError: an input requires grad.
    """
    plane = _latent(pool, layer)
    parts = [part for part in (latent, rope) if part is not None]
    if any(part.dim() != 2 for part in parts) or sum(part.shape[-1] for part in parts) != plane.dim:
        got = " and ".join(str(list(part.shape)) for part in parts)
        raise ValueError(f"latent rows are {got}, layer {layer} holds rows of {plane.dim}, whole or in two parts")
    offset, *strides = plane.geometry
    second = None if rope is None else [offset + latent.shape[1] * plane.dtype.itemsize, *strides]
    number, tensor = scale_arguments(scale)
    torch.ops.pm_ops.store_kv.default(
        pool.buffer,
        latent[:, None],
        None if rope is None else rope[:, None],
        slots,
        plane.geometry,
        second,
        pool.page_size,
        plane.dtype,
        None if rope is None else plane.dtype,
        number,
        1.0 if rope is None else number,
        tensor,
        None if rope is None else tensor,
    )


@explained
def store_index_key(pool: PagePool, layer: int, key: Tensor, slots: Tensor) -> None:
    """Write an indexer's keys, each quantised by its own scale, which goes beside it: one launch.

    Args:
        key: ``[T, index_dim]``, any strides and floating dtype.
        slots: as in :func:`store_latent`.

    The scale of a row is its largest magnitude over the dtype's largest number (448 in float8_e4m3fn); see
    :class:`pm_ops.ops.store.StoreKV`. Read back with ``load_kv(pool, layer, slots, "index_key", out_dtype=…)``.
    """
    plane = pool.plane(layer, "index_key")
    if key.dim() != 2 or key.shape[1] != plane.dim:
        raise ValueError(f"index keys are {list(key.shape)}, layer {layer} holds rows [tokens, {plane.dim}]")
    row = (key[:, None], None, slots, plane.geometry, None, pool.page_size, plane.dtype, None)
    torch.ops.pm_ops.store_kv.default(pool.buffer, *row, key_scale_plane=plane.scales)


@explained
def mla_attention(
    pool: PagePool,
    layer: int,
    query: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    value_dim: int = 512,
    query_start: Tensor | None = None,
    causal: bool = True,
    scale: Scale = 1.0,
    max_query_len: int = 0,
    max_seq_len: int = 0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Latent attention over the layer's pages, absorbed form: decode, prefill and mixed batches in one call.

    Args:
        query: ``[Tq, Hq, D]``, any strides: each head's ``q_nope @ W_UK`` beside its rotated part.
        page_table, seq_lens, query_start, causal, max_query_len, max_seq_len: as in :func:`pm_ops.attention`.
        softmax_scale: factor of the logits; no default, since it follows from the dims before absorption: DeepSeek-V3's
            is ``192 ** -0.5``, and YaRN's factor squared.
        value_dim: how many of a row's first elements are the value, too.
        scale: as in :func:`store_latent`.
        return_lse: also return ``lse [Tq, Hq]`` float32, natural log.
        impl: ``"auto"``, ``"triton"``, ``"hopper"`` or ``"reference"``, see :class:`pm_ops.ops.mla.MLAAttention`.

    Returns ``out [Tq, Hq, value_dim]``, or ``(out, lse)``. A row that sees no key gives 0 and -inf. The order of sums
    depends on the batch, as in :func:`pm_ops.attention` without ``batch_invariant``.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the implementation cannot make the call; on CPU also
            lengths or page ids out of range.
        RuntimeError: an input requires grad.
    """
    plane = _latent(pool, layer)
    if query.dim() == 0 or query.shape[-1] != plane.dim:
        raise ValueError(f"query is {list(query.shape)}; layer {layer} has latent rows of {plane.dim}")
    out, lse = torch.ops.pm_ops.mla_attention.default(
        pool.buffer,
        query,
        page_table,
        seq_lens,
        query_start,
        plane.geometry,
        pool.page_size,
        value_dim,
        plane.dtype,
        softmax_scale,
        causal,
        *scale_arguments(scale),
        max_query_len,
        return_lse,
        max_seq_len,
        impl,
    )
    return (out, lse) if return_lse else out


def _latent(pool: PagePool, layer: int) -> PoolPlane:
    plane = pool.plane(layer, "latent")
    if plane.heads != 1:
        raise ValueError(f"layer {layer}'s latent plane has {plane.heads} heads; latent rows have one")
    if plane.scales is not None:
        raise ValueError(f"layer {layer} has a scale for each latent row, which is not supported; leave that plane out")
    return plane
