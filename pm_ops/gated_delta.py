"""The gated delta rule as people call it: with a pool and a layer instead of a buffer and byte strides."""

from __future__ import annotations

import torch
from torch import Tensor

from .explain import explained
from .pool import PagePool
from .state import StatePlane, require_shape, state_plane


@explained
def gated_delta_update(
    pool: PagePool,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state_indices: Tensor,
    *,
    scale: float | None = None,
    l2_norm: bool = False,
    value_first: bool = True,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    num_accepted: Tensor | None = None,
    kind: str = "ssm",
) -> Tensor:
    """The next token, or next tokens, of each of N sequences, whose states are read and written in their pages.

    Args:
        query, key: ``[N, Hk, K]``, or ``[N, T, Hk, K]`` for T tokens a sequence; float32, float16 or bfloat16, any
            strides (slices of one projection, say), as are all others.
        value: ``[N, Hv, V]`` or ``[N, T, Hv, V]``; Hv is a multiple of Hk.
        g, beta: ``[N, Hv]`` or ``[N, T, Hv]``, the logarithm of the decay and the rate.
        state_indices: int32 or int64 ``[N]``, each sequence's page, or ``[N, T]``, a page for the state after each
            token. Negative: skipped, the result is 0.
        scale: of the result; default ``K ** -0.5``.
        l2_norm: divide each query and key by its length first.
        value_first: the layer's states are ``(Hv, V, K)``, as engines keep them; if not ``(Hv, K, V)``.
        a_log, dt_bias: ``[Hv]``. With them the decay is ``-exp(a_log) * softplus(g + dt_bias)``, the rate
            ``sigmoid(beta)``.
        num_accepted: ``[N]``, with ``state_indices [N, T]``: begin with the state in column ``num_accepted - 1``.
        kind: the plane's.

    Returns what :class:`pm_ops.ops.gated_delta.GatedDeltaUpdate` tells, of value's shape and dtype, fresh.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on CPU also a page out of range or named twice.
        RuntimeError: an input requires grad.
    """
    plane = _plane(pool, layer, kind, value, key, value_first)
    return torch.ops.pm_ops.gated_delta_update.default(
        pool.buffer,
        query,
        key,
        value,
        g,
        beta,
        state_indices,
        plane.geometry,
        plane.dtype,
        key.shape[-1] ** -0.5 if scale is None else scale,
        l2_norm,
        value_first,
        a_log,
        dt_bias,
        num_accepted,
    )


@explained
def gated_delta_prefill(
    pool: PagePool,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    query_start: Tensor,
    state_indices: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    scale: float | None = None,
    l2_norm: bool = False,
    value_first: bool = True,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    kind: str = "ssm",
) -> Tensor:
    """Sequences one behind the other; the state after each one's last token goes to its page.

    Args:
        query, key: ``[T, Hk, K]``; value ``[T, Hv, V]``; g and beta ``[T, Hv]``; otherwise as in
            :func:`gated_delta_update`, and so are scale, l2_norm, value_first, a_log, dt_bias and kind.
        query_start: int32 or int64 ``[B + 1]``, cumulative tokens from 0 on. Rows past the last sequence are padding.
        state_indices: int32 or int64 ``[B]``, each sequence's page; negative: skipped, the result is 0. A sequence
            without tokens leaves its page alone.
        has_initial_state: bool ``[B]``, whether a sequence begins with the state in its page instead of zeros; None:
            none does.

    Returns ``[T, Hv, V]`` of value's dtype, fresh; padding rows are 0. On CUDA a sequence's tokens are multiplied in
    chunks of 64, so that a NaN in key, value, g or beta shows in all of its chunk.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on CPU also lengths or pages out of range, or a page twice.
        RuntimeError: an input requires grad.
    """
    plane = _plane(pool, layer, kind, value, key, value_first)
    return torch.ops.pm_ops.gated_delta_prefill.default(
        pool.buffer,
        query,
        key,
        value,
        g,
        beta,
        query_start,
        state_indices,
        plane.geometry,
        plane.dtype,
        key.shape[-1] ** -0.5 if scale is None else scale,
        l2_norm,
        value_first,
        a_log,
        dt_bias,
        has_initial_state,
    )


def _plane(pool: PagePool, layer: int, kind: str, value: Tensor, key: Tensor, value_first: bool) -> StatePlane:
    """The layer's plane, which holds states of these heads and dims."""
    plane = state_plane(pool, layer, kind)
    heads, dims = value.shape[-2:-1], (*value.shape[-1:], *key.shape[-1:])
    what = f"value {list(value.shape)} and key {list(key.shape)} with value_first={value_first}"
    require_shape(plane, layer, kind, (*heads, *(dims if value_first else dims[::-1])), what)
    return plane
