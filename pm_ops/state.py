"""The operators over recurrent states as people call them: with a pool, a layer and one page a sequence.

Each function only fills in the pool's geometry; ``torch.ops.pm_ops.<name>`` is the same operator with ints. A state
index is a page of the pool; :mod:`pm_ops.ops._state` says which page is read and which one is written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .explain import explained
from .pool import PagePool


class StatePlane(NamedTuple):
    """A state plane of a pool, as the operators take it."""

    geometry: list[int]
    """``[offset, page_stride, 0, head_stride, num_pages]``, in bytes; offset includes the pool's base."""
    shape: tuple[int, ...]
    dtype: torch.dtype


def state_plane(pool: PagePool, layer: int, kind: str) -> StatePlane:
    """The plane of a layer's states. Raises ValueError for a plane that is not there or has token slots."""
    plane = pool.layout.plane(layer, kind)
    if plane.token_stride is not None:
        raise ValueError(f"plane {kind!r} of layer {layer} has a row for each token; a state has one for each page")
    return StatePlane(pool.geometry(layer, kind), plane.shape, plane.dtype)


def require_shape(plane: StatePlane, layer: int, kind: str, wanted: tuple[int, ...], what: str) -> None:
    """Raise ValueError where a plane holds states of another shape than the arguments make."""
    if plane.shape != wanted:
        raise ValueError(
            f"{what} make states of {list(wanted)}; plane {kind!r} of layer {layer} is {list(plane.shape)}"
        )


@explained
def conv1d_update(
    pool: PagePool,
    layer: int,
    x: Tensor,
    weight: Tensor,
    state_indices: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = False,
    num_accepted: Tensor | None = None,
    kind: str = "conv",
) -> Tensor:
    """The next token, or tokens, of each sequence through a causal convolution a channel; the states move on.

    Args:
        x: ``[N, dim]``, or ``[N, T, dim]`` for several tokens; float32, float16 or bfloat16, any strides.
        weight, bias: ``[dim, width]`` with a width of 2, 3 or 4, the newest input's tap last, and ``[dim]``.
        state_indices: int32 or int64 ``[N]``, each sequence's page; negative: skipped, with zeros for its result. Or,
            for speculative decoding, ``[N, T]``: where the state after each token goes, negative: nowhere.
        silu: apply it to the result.
        num_accepted: int32 or int64 ``[N]``, with ``[N, T]`` indices: how many of the last step's tokens were accepted.
            The state read is the one in column ``num_accepted - 1``; column 0 where that is not given, or 0.
        kind: the plane's name. Its states are ``(dim, width - 1)``.

    Returns x's shape and dtype, fresh, computed in float32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on CPU also a page out of range or named twice.
        RuntimeError: an input requires grad.
    """
    plane = state_plane(pool, layer, kind)
    require_shape(plane, layer, kind, _conv_state(weight), f"filters {list(weight.shape)}")
    return torch.ops.pm_ops.conv1d_update.default(
        pool.buffer, x, weight, state_indices, plane.geometry, plane.dtype, bias, silu, num_accepted
    )


@explained
def conv1d_prefill(
    pool: PagePool,
    layer: int,
    x: Tensor,
    weight: Tensor,
    query_start: Tensor,
    state_indices: Tensor,
    *,
    bias: Tensor | None = None,
    silu: bool = False,
    has_initial_state: Tensor | None = None,
    kind: str = "conv",
) -> Tensor:
    """Whole sequences, one behind the other, through the same convolution; their last states go to their pages.

    Args:
        x: ``[T, dim]``, any strides.
        weight, bias, silu, kind: as in :func:`conv1d_update`.
        query_start: int32 or int64 ``[B + 1]``, cumulative tokens from 0 on. Rows past the last sequence are padding.
        state_indices: int32 or int64 ``[B]``, each sequence's page; negative: skipped, with zeros for its result. A
            sequence without tokens leaves its page alone.
        has_initial_state: bool ``[B]``: which sequences go on from their page's state; the others, and all without it,
            begin with zeros.

    Returns ``[T, dim]``, fresh, zeros for padding. Raises as :func:`conv1d_update`.
    """
    plane = state_plane(pool, layer, kind)
    require_shape(plane, layer, kind, _conv_state(weight), f"filters {list(weight.shape)}")
    return torch.ops.pm_ops.conv1d_prefill.default(
        pool.buffer, x, weight, query_start, state_indices, plane.geometry, plane.dtype, bias, silu, has_initial_state
    )


@explained
def selective_state_update(
    pool: PagePool,
    layer: int,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state_indices: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limits: tuple[float, float | None] = (0.0, None),
    num_accepted: Tensor | None = None,
    kind: str = "ssm",
) -> Tensor:
    """The next token, or tokens, of each sequence through Mamba-2's state space; the states move on.

    ``state = exp(dt * A) * state + dt * outer(x, B)`` and ``out = state @ C + D * x``, times ``silu(z)``.

    Args:
        x, z: ``[N, heads, head_dim]``, or ``[N, T, heads, head_dim]`` for several tokens; any strides.
        dt: ``[N, heads]`` or ``[N, T, heads]``; used after ``dt_bias``, softplus and limits.
        A, D, dt_bias: ``[heads]``; A is negative.
        B, C: ``[N, groups, state_dim]`` or ``[N, T, groups, state_dim]``; heads are a multiple of groups.
        state_indices, num_accepted: as in :func:`conv1d_update`.
        dt_limits: the least and the largest dt, None: no limit.
        kind: the plane's name. Its states are ``(heads, head_dim, state_dim)``.

    Returns x's shape and dtype, fresh, computed in float32. Raises as :func:`conv1d_update`.
    """
    plane = _ssm_plane(pool, layer, kind, x, B)
    return torch.ops.pm_ops.selective_state_update.default(
        pool.buffer, x, dt, A, B, C, state_indices, plane.geometry, plane.dtype, D, z, dt_bias, dt_softplus, *dt_limits,
        num_accepted,
    )  # fmt: skip


@explained
def selective_scan_prefill(
    pool: PagePool,
    layer: int,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    query_start: Tensor,
    state_indices: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limits: tuple[float, float | None] = (0.0, None),
    has_initial_state: Tensor | None = None,
    kind: str = "ssm",
) -> Tensor:
    """Whole sequences, one behind the other, through the same state space; their last states go to their pages.

    Args:
        x, z: ``[T, heads, head_dim]``; dt: ``[T, heads]``; B, C: ``[T, groups, state_dim]``, any strides.
        A, D, dt_bias, dt_softplus, dt_limits, kind: as in :func:`selective_state_update`.
        query_start, state_indices, has_initial_state: as in :func:`conv1d_prefill`.

    Returns ``[T, heads, head_dim]``, fresh, zeros for padding. On CUDA tokens are multiplied in blocks of 32 in x's
    dtype with float32 sums, so that a NaN may show in all of its block. Raises as :func:`conv1d_update`.
    """
    plane = _ssm_plane(pool, layer, kind, x, B)
    return torch.ops.pm_ops.selective_scan_prefill.default(
        pool.buffer, x, dt, A, B, C, query_start, state_indices, plane.geometry, plane.dtype, D, z, dt_bias,
        dt_softplus, *dt_limits, has_initial_state,
    )  # fmt: skip


def _conv_state(weight: Tensor) -> tuple[int, ...]:
    return (weight.shape[0], weight.shape[1] - 1) if weight.dim() == 2 else ()


def _ssm_plane(pool: PagePool, layer: int, kind: str, x: Tensor, B: Tensor) -> StatePlane:
    plane = state_plane(pool, layer, kind)
    what = f"x {list(x.shape)} and B {list(B.shape)}"
    require_shape(plane, layer, kind, (*x.shape[-2:], *B.shape[-1:]), what)
    return plane
