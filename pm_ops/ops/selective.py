"""``selective_state_update`` and ``selective_scan_prefill``: Mamba-2's state space, its states in pages.

A state is ``(heads, head_dim, state_dim)``. For each token and head, in float32, with ``dt`` after bias, softplus and
limits, and with the group of B and C that the head belongs to:

    state = exp(dt * A) * state + dt * outer(x, B);   out = state @ C + D * x, times silu(z) where a gate is given

See :mod:`pm_ops.ops._state` for which page is read and which one is written. What is stored is rounded to the state's
dtype; between the tokens of one call the state stays in float32, and ``out`` comes from it before it is rounded.
On CUDA the prefill multiplies blocks of tokens in x's dtype, with float32 sums; float32 rows to nearly that precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._common import define, describe, require, require_buffer, require_device, require_no_grad
from ._state import (
    STATE_DTYPES,
    require_rows,
    require_sequence_values,
    require_sequences,
    require_state_plane,
    require_update_indices,
    require_update_values,
    state_view,
    update_pages,
)


@dataclass(slots=True)
class _Selective:
    """What the two operators share: rows ``x [..., H, P]`` of one or two leading axes, and the parameters of a head."""

    buffer: Tensor
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor

    def check_rows(
        self,
        op: str,
        plane: Sequence[int],
        dtype: torch.dtype,
        options: dict[str, Tensor | None],
        limits: tuple[float, float | None],
    ) -> None:
        """Shapes, dtypes and devices; ``options`` are D, z and dt_bias."""
        if torch.is_grad_enabled():
            require_no_grad(op, x=self.x, dt=self.dt, A=self.A, B=self.B, C=self.C, **options)
        require_buffer(self.buffer)
        x, device = self.x, self.buffer.device
        if x.dtype not in STATE_DTYPES:
            raise ValueError(f"x must be float32, float16 or bfloat16, got {describe(x)}")
        require_device("x", x, device)
        if self.B.dim() != x.dim():
            raise ValueError(f"B must be [..., groups, state_dim] with x's leading axes, got {describe(self.B)}")
        *leading, heads, head_dim = x.shape
        groups, state_dim = self.B.shape[-2:]
        require_rows("dt", self.dt, (*leading, heads), device)
        require_rows("A", self.A, (heads,), device)
        require_rows("B", self.B, (*leading, groups, state_dim), device)
        require_rows("C", self.C, (*leading, groups, state_dim), device)
        require_rows("D", options["D"], (heads,), device)
        require_rows("dt_bias", options["dt_bias"], (heads,), device)
        require_rows("z", options["z"], tuple(x.shape), device)
        require(
            (groups >= 1) & (heads % torch.sym_max(groups, 1) == 0),
            lambda: f"{heads} heads cannot share {groups} groups of B and C; it must be a multiple of them",
        )
        for name, size in (("head_dim", head_dim), ("state_dim", state_dim)):
            require((size >= 1) & (size <= 256), lambda: f"{name} is {size}; it must be 1 to 256")  # noqa: B023
        low, high = limits[0], math.inf if limits[1] is None else limits[1]
        if isinstance(low, float | int) and isinstance(high, float | int) and not low <= high:
            raise ValueError(f"dt_min={low} must not be above dt_max={high}")
        require_state_plane("state", self.buffer.shape[0], plane, (heads, head_dim, state_dim), dtype)


def _step(dt: Tensor, bias: Tensor | None, softplus: bool, low: float, high: float | None) -> Tensor:
    """dt as it is used, float32."""
    dt = dt.float()
    if bias is not None:
        dt = dt + bias.float()
    if softplus:
        dt = torch.nn.functional.softplus(dt)
    return dt.clamp(min=low, max=high)


def _token(
    state: Tensor, x: Tensor, dt: Tensor, a: _Selective, B: Tensor, C: Tensor, D: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The state ``[..., H, P, S]`` after one token, and its output ``[..., H, P]``, both float32."""
    each = x.shape[-2] // B.shape[-2]
    B, C = (rows.float().repeat_interleave(each, -2) for rows in (B, C))
    x = x.float()
    decay = torch.exp(dt * a.A.float())[..., None, None]
    state = state * decay + (dt[..., None] * x)[..., None] * B[..., None, :]
    out = (state * C[..., None, :]).sum(-1)
    if D is not None:
        out = out + D.float()[:, None] * x
    return state, out if z is None else out * torch.nn.functional.silu(z.float())


@dataclass(slots=True)
class SelectiveStateUpdate(_Selective):
    """Arguments of ``pm_ops::selective_state_update``: the next token, or next tokens, of each of N sequences.

    ``x [N, H, P]`` or ``[N, T, H, P]``, ``dt [.., H]``, ``A [H]`` (negative), ``B, C [.., G, S]``, ``D, dt_bias [H]``,
    ``z`` as x; returns x's shape and dtype, fresh. ``dt_max=None`` is no limit.
    """

    state_indices: Tensor
    state_plane: Sequence[int]
    state_dtype: torch.dtype
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_softplus: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None
    num_accepted: Tensor | None = None

    def check(self) -> None:
        if self.x.dim() not in (3, 4):
            raise ValueError(f"x must be [sequences, heads, dim] or [sequences, tokens, ...], got {describe(self.x)}")
        options = {"D": self.D, "z": self.z, "dt_bias": self.dt_bias}
        limits = self.dt_min, self.dt_max
        self.check_rows("selective_state_update", self.state_plane, self.state_dtype, options, limits)
        require_device("state_indices", self.state_indices, self.buffer.device)
        tokens = self.x.shape[1] if self.x.dim() == 4 else None
        require_update_indices(self.state_indices, self.num_accepted, self.x.shape[0], tokens)

    def check_values(self) -> None:
        require_update_values(self.state_indices, self.num_accepted, self.state_plane[4])


def _update(a: SelectiveStateUpdate) -> Tensor:
    several = a.x.dim() == 4
    x, dt, B, C = (rows if several else rows[:, None] for rows in (a.x, a.dt, a.B, a.C))
    z = a.z if a.z is None or several else a.z[:, None]
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    tokens, heads, head_dim = x.shape[1:]
    if tokens == 0:
        return out
    source, target = update_pages(a.state_indices, a.num_accepted, tokens)
    live = source >= 0
    states = state_view(a.buffer, a.state_plane, (heads, head_dim, B.shape[-1]), a.state_dtype)
    dt = _step(dt, a.dt_bias, a.dt_softplus, a.dt_min, a.dt_max)
    state = states[source[live]].float()
    for t in range(tokens):
        gate = None if z is None else z[live, t]
        state, y = _token(state, x[live, t], dt[live, t], a, B[live, t], C[live, t], a.D, gate)
        out[live, t] = y.to(x.dtype)
        page = target[live, t]
        states[page[page >= 0]] = state[page >= 0].to(a.state_dtype)
    return out.view(a.x.shape)


_ROWS = "Tensor(a!) buffer, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C"
_OPTIONS = (
    "Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool dt_softplus=False, float dt_min=0.0, float? dt_max=None"
)

define(
    "selective_state_update",
    f"({_ROWS}, Tensor state_indices, SymInt[] state_plane, ScalarType state_dtype, {_OPTIONS}, "
    "Tensor? num_accepted=None) -> Tensor",
    SelectiveStateUpdate,
    fake=lambda a: a.x.new_empty(a.x.shape),
    cpu=_update,
    cuda="selective_update.selective_state_update",
)


@dataclass(slots=True)
class SelectiveScanPrefill(_Selective):
    """Arguments of ``pm_ops::selective_scan_prefill``: sequences one behind the other.

    ``x [T, H, P]``, ``dt [T, H]``, ``A [H]`` (negative), ``B, C [T, G, S]``, ``D, dt_bias [H]``, ``z`` as x, all of any
    strides, and ``query_start [B + 1]``; returns ``[T, H, P]`` in x's dtype, fresh. ``dt_max=None`` is no limit.
    """

    query_start: Tensor
    state_indices: Tensor
    state_plane: Sequence[int]
    state_dtype: torch.dtype
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_softplus: bool = False
    dt_min: float = 0.0
    dt_max: float | None = None
    has_initial_state: Tensor | None = None

    def check(self) -> None:
        if self.x.dim() != 3:
            raise ValueError(f"x must be rows [tokens, heads, dim], got {describe(self.x)}")
        options = {"D": self.D, "z": self.z, "dt_bias": self.dt_bias}
        limits = self.dt_min, self.dt_max
        self.check_rows("selective_scan_prefill", self.state_plane, self.state_dtype, options, limits)
        require_device("state_indices", self.state_indices, self.buffer.device)
        require_sequences(self.query_start, self.state_indices, self.has_initial_state)

    def check_values(self) -> None:
        require_sequence_values(self.query_start, self.state_indices, self.x.shape[0], self.state_plane[4])


def _prefill(a: SelectiveScanPrefill) -> Tensor:
    _, heads, head_dim = a.x.shape
    states = state_view(a.buffer, a.state_plane, (heads, head_dim, a.B.shape[-1]), a.state_dtype)
    out = torch.zeros_like(a.x, memory_format=torch.contiguous_format)
    dt = _step(a.dt, a.dt_bias, a.dt_softplus, a.dt_min, a.dt_max)
    starts = a.query_start.tolist()
    for b, page in enumerate(a.state_indices.tolist()):
        if page < 0 or starts[b] == starts[b + 1]:
            continue
        initial = a.has_initial_state is not None and bool(a.has_initial_state[b])
        state = states[page].float() if initial else torch.zeros(states.shape[1:], dtype=torch.float32)
        for t in range(starts[b], starts[b + 1]):
            state, y = _token(state, a.x[t], dt[t], a, a.B[t], a.C[t], a.D, None if a.z is None else a.z[t])
            out[t] = y.to(a.x.dtype)
        states[page] = state.to(a.state_dtype)
    return out


define(
    "selective_scan_prefill",
    f"({_ROWS}, Tensor query_start, Tensor state_indices, SymInt[] state_plane, ScalarType state_dtype, {_OPTIONS}, "
    "Tensor? has_initial_state=None) -> Tensor",
    SelectiveScanPrefill,
    fake=lambda a: a.x.new_empty(a.x.shape),
    cpu=_prefill,
    cuda="selective_scan.selective_scan_prefill",
)
