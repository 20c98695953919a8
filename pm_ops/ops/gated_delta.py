"""``gated_delta_update`` and ``gated_delta_prefill``: the gated delta rule, its state in pages.

A value head's state ``S`` maps keys to values. Token ``t``, with its key ``k``, value ``v``, decay ``g`` (a logarithm,
at most 0) and rate ``beta``, makes of it

    S = exp(g) * S
    S = S + beta * (v - S k) k^T
    out = scale * S q

in float32; out is rounded once, to value's dtype, and the state where it is stored. See :mod:`pm_ops.ops._state` for
which page is read and which one is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ._common import define, describe, require, require_buffer, require_device, require_finite, require_no_grad
from ._state import (
    require_rows,
    require_sequence_values,
    require_sequences,
    require_state_plane,
    require_update_indices,
    require_update_values,
    state_view,
    update_pages,
)

L2_EPS = 1e-6
"""Added to the sum of squares of a query or key whose length is divided out; as in every other implementation."""
LARGEST_DIM = 256
"""Of keys and of values: a program holds a state's whole key axis."""


@dataclass(slots=True)
class GatedDeltaUpdate:
    """Arguments of ``pm_ops::gated_delta_update``: the next token, or next tokens, of each of N sequences.

    Returns ``[N, Hv, V]``, or ``[N, T, Hv, V]``, fresh, of value's dtype.

    Args:
        buffer: the pool's.
        query, key: ``[N, Hk, K]``, or ``[N, T, Hk, K]`` for T tokens a sequence; any strides. K and V are 1 to 256.
        value: ``[N, Hv, V]`` or ``[N, T, Hv, V]``; Hv is a multiple of Hk, and value head h goes with key head
            ``h // (Hv // Hk)``.
        g, beta: ``[N, Hv]`` or ``[N, T, Hv]``. With ``a_log`` they are the model's raw projections, see there.
        state_indices, num_accepted: see :mod:`pm_ops.ops._state`.
        state_plane, state_dtype: of the states, float32, float16 or bfloat16.
        scale: of the result, usually ``K ** -0.5``.
        l2_norm: divide each query and key by ``sqrt(sum of its squares + 1e-6)`` first.
        value_first: a state is ``(Hv, V, K)``, as vLLM and SGLang keep it; if not ``(Hv, K, V)``, as transformers does.
        a_log, dt_bias: ``[Hv]``, both or neither. With them the decay is ``-exp(a_log) * softplus(g + dt_bias)``, and
            the rate is ``sigmoid(beta)``.
    """

    buffer: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    state_indices: Tensor
    state_plane: Sequence[int]
    state_dtype: torch.dtype
    scale: float
    l2_norm: bool = False
    value_first: bool = True
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    num_accepted: Tensor | None = None

    def check(self) -> None:
        if self.query.dim() not in (3, 4):
            raise ValueError(
                "query must be [sequences, heads, dim] or [sequences, tokens, heads, dim], got " + describe(self.query)
            )
        _check("gated_delta_update", self)
        tokens = self.query.shape[1] if self.query.dim() == 4 else None
        require_update_indices(self.state_indices, self.num_accepted, self.query.shape[0], tokens)

    def check_values(self) -> None:
        require_update_values(self.state_indices, self.num_accepted, self.state_plane[4])


@dataclass(slots=True)
class GatedDeltaPrefill:
    """Arguments of ``pm_ops::gated_delta_prefill``: sequences one behind the other.

    Returns ``[T, Hv, V]``, fresh, of value's dtype. ``query_start [B + 1]``; rows past the last sequence are padding,
    whose result is 0. ``query [T, Hk, K]``, ``value [T, Hv, V]`` and ``g [T, Hv]`` and all others as in
    :class:`GatedDeltaUpdate`; ``has_initial_state`` as in :mod:`pm_ops.ops._state`.

    On CUDA tokens are taken 64 at a time. Sums are in float32; factors are rounded to the dtype of query, key and value
    if all have the same one of 16 bits, and are float32 (as products of three TF32 numbers) if not. A decay ``exp(g)``
    below 2^-64 counts as 2^-64, in an update too. A NaN in key, value, g or beta makes the results of all 64
    tokens NaN, also of those before it.
    """

    buffer: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    query_start: Tensor
    state_indices: Tensor
    state_plane: Sequence[int]
    state_dtype: torch.dtype
    scale: float
    l2_norm: bool = False
    value_first: bool = True
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None
    has_initial_state: Tensor | None = None

    def check(self) -> None:
        if self.query.dim() != 3:
            raise ValueError(f"query must be [tokens, heads, dim], got {describe(self.query)}")
        _check("gated_delta_prefill", self)
        require_device("query_start", self.query_start, self.buffer.device)
        require_sequences(self.query_start, self.state_indices, self.has_initial_state)

    def check_values(self) -> None:
        require_sequence_values(self.query_start, self.state_indices, self.query.shape[0], self.state_plane[4])


def _check(op: str, a: GatedDeltaUpdate | GatedDeltaPrefill) -> None:
    """Inputs of some leading axes fit one another and the plane."""
    device = a.buffer.device
    require_buffer(a.buffer)
    if torch.is_grad_enabled():
        inputs = {"query": a.query, "key": a.key, "value": a.value, "g": a.g, "beta": a.beta}
        require_no_grad(op, **inputs, a_log=a.a_log, dt_bias=a.dt_bias)
    if a.value.dim() != a.query.dim():
        raise ValueError(f"value must have as many axes as query, {a.query.dim()}, got {describe(a.value)}")
    *rows, key_heads, key_dim = a.query.shape
    heads, value_dim = a.value.shape[-2:]
    require_rows("query", a.query, (*rows, key_heads, key_dim), device)
    require_rows("key", a.key, (*rows, key_heads, key_dim), device)
    require_rows("value", a.value, (*rows, heads, value_dim), device)
    require_rows("g", a.g, (*rows, heads), device)
    require_rows("beta", a.beta, (*rows, heads), device)
    if (a.a_log is None) != (a.dt_bias is None):
        raise ValueError("a_log and dt_bias come together or not at all")
    require_rows("a_log", a.a_log, (heads,), device)
    require_rows("dt_bias", a.dt_bias, (heads,), device)
    require(
        (key_heads >= 1) & (heads >= 1) & (heads % torch.sym_max(key_heads, 1) == 0),
        lambda: f"value has {heads} heads, key {key_heads}: the former must be a multiple of the latter",
    )
    require(
        (key_dim >= 1) & (key_dim <= LARGEST_DIM) & (value_dim >= 1) & (value_dim <= LARGEST_DIM),
        lambda: f"key and value dims are {key_dim} and {value_dim}; supported are 1 to {LARGEST_DIM}",
    )
    require_finite(scale=a.scale)
    require_state_plane("state", a.buffer.shape[0], a.state_plane, _state_shape(a), a.state_dtype)
    require_device("state_indices", a.state_indices, device)


def _state_shape(a: GatedDeltaUpdate | GatedDeltaPrefill) -> tuple[int, int, int]:
    (heads, value_dim), key_dim = a.value.shape[-2:], a.query.shape[-1]
    return (heads, value_dim, key_dim) if a.value_first else (heads, key_dim, value_dim)


def _fake(a: GatedDeltaUpdate | GatedDeltaPrefill) -> Tensor:
    return a.value.new_empty(a.value.shape)


def _states(a: GatedDeltaUpdate | GatedDeltaPrefill) -> Tensor:
    """Every page's states, ``[num_pages, Hv, V, K]``, a view."""
    states = state_view(a.buffer, a.state_plane, _state_shape(a), a.state_dtype)
    return states if a.value_first else states.transpose(2, 3)


def _inputs(a: GatedDeltaUpdate | GatedDeltaPrefill) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scaled query, key, value, the factor by which a state decays, and the rate, of every value head, in float32."""
    query, key, decay, beta = a.query.float(), a.key.float(), a.g.float(), a.beta.float()
    if a.l2_norm:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (query, key))
    if a.a_log is not None and a.dt_bias is not None:
        decay = -a.a_log.float().exp() * softplus(decay + a.dt_bias.float())
        beta = beta.sigmoid()
    group = a.value.shape[-2] // a.query.shape[-2]
    query, key = (x.repeat_interleave(group, -2) for x in (query * a.scale, key))
    return query, key, a.value.float(), decay.exp(), beta


def _step(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """One token: ``state [..., V, K]``, the others without one or both of these axes; state and output."""
    state = state * decay[..., None, None]
    change = beta[..., None] * (value - (state @ key[..., None])[..., 0])
    state = state + change[..., None] * key[..., None, :]
    return state, (state @ query[..., None])[..., 0]


def _update(a: GatedDeltaUpdate) -> Tensor:
    inputs = [x if a.query.dim() == 4 else x[:, None] for x in _inputs(a)]
    tokens, states = inputs[0].shape[1], _states(a)
    if tokens == 0:
        return a.value.new_empty(a.value.shape)
    source, target = update_pages(a.state_indices, a.num_accepted, tokens)
    live = source >= 0
    state, out = states[source[live]].float(), inputs[2].new_zeros(inputs[2].shape)
    for t in range(tokens):
        state, out[live, t] = _step(state, *(x[live, t] for x in inputs))
        page = target[live, t]
        states[page[page >= 0]] = state[page >= 0].to(a.state_dtype)
    return out.to(a.value.dtype).view(a.value.shape)


def _prefill(a: GatedDeltaPrefill) -> Tensor:
    inputs, states = _inputs(a), _states(a)
    out, starts = inputs[2].new_zeros(inputs[2].shape), a.query_start.tolist()
    for b, page in enumerate(a.state_indices.tolist()):
        if page < 0 or starts[b] == starts[b + 1]:
            continue
        initial = a.has_initial_state is not None and bool(a.has_initial_state[b])
        state = states[page].float() if initial else torch.zeros(states.shape[1:], dtype=torch.float32)
        for t in range(starts[b], starts[b + 1]):
            state, out[t] = _step(state, *(x[t] for x in inputs))
        states[page] = state.to(a.state_dtype)
    return out.to(a.value.dtype)


_OPTIONS = (
    "SymInt[] state_plane, ScalarType state_dtype, float scale, bool l2_norm=False, bool value_first=True, "
    "Tensor? a_log=None, Tensor? dt_bias=None, "
)
define(
    "gated_delta_update",
    "(Tensor(a!) buffer, Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor state_indices, "
    f"{_OPTIONS}Tensor? num_accepted=None) -> Tensor",
    GatedDeltaUpdate,
    fake=_fake,
    cpu=_update,
    cuda="gated_delta.gated_delta_update",
)
define(
    "gated_delta_prefill",
    "(Tensor(a!) buffer, Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor query_start, "
    f"Tensor state_indices, {_OPTIONS}Tensor? has_initial_state=None) -> Tensor",
    GatedDeltaPrefill,
    fake=_fake,
    cpu=_prefill,
    cuda="gated_delta_prefill.gated_delta_prefill",
)
