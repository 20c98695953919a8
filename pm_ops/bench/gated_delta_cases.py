"""The gated delta rule's shapes in the suite ``state``, their data, and what is right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from ..ops.gated_delta import GatedDeltaPrefill, GatedDeltaUpdate
from .case import Case
from .implementation import Bound
from .memory import PAGE_MAJOR
from .oracle import Error
from .state_cases import check_state
from .state_work import StateWork, random_pages, starts

Call = GatedDeltaUpdate | GatedDeltaPrefill
_HEADS = 3  # of a long prefill's many, the first, the middle and the last, are computed token by token


@dataclass(frozen=True)
class GatedDeltaShape:
    """The next token of each sequence, or whole sequences that go on from a state. Defaults are Qwen3-Next's."""

    name: str
    batch: int
    tokens: int = 0
    """Of each sequence; 0: an update with the next one."""
    key_heads: int = 16
    heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    layers: int = 4
    """Of the page-major pool; the one in the middle is used."""

    @property
    def nbytes(self) -> int:
        """Of an update: states read and written, and rows."""
        states = 2 * self.heads * self.key_dim * self.value_dim * self.state_dtype.itemsize
        rows = 2 * self.key_heads * self.key_dim + 2 * self.heads * self.value_dim
        return self.batch * (states + rows * self.dtype.itemsize)

    @property
    def flops(self) -> int:
        """Of the recurrence, token by token: what a key finds, what changes, and the output."""
        return 6 * self.batch * self.tokens * self.heads * self.key_dim * self.value_dim

    def case(self, suite: str) -> Case:
        """An update by its rate of bytes, a prefill by its rate of operations."""
        return Case(
            suite,
            self.name,
            "gated delta prefill" if self.tokens else "gated delta update",
            partial(gated_delta_work, self),
            lambda impl, work, layout: impl.state(work, layout),
            _check,
            "tflop_s" if self.tokens else "gb_s",
            self.flops if self.tokens else self.nbytes,
            graph=True,
            tolerance=2e-2 if self.dtype.itemsize == 2 else 1e-4,
        )


def _check(bound: Bound, work: GatedDeltaWork, layout: str) -> Error:
    """As of all states; a call that leaves its states elsewhere brings them here first, untimed."""

    def run() -> Tensor | None:
        out = bound.run()
        if bound.finish is not None:
            bound.finish()
        return out

    return check_state(Bound(run), work, layout)


class GatedDeltaWork(StateWork):
    """One call's arguments for each layout, with equal states."""

    def call(self, layout: str) -> Call:
        """The arguments."""
        return cast(Call, self.calls[layout])

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor, slice]:
        """Output and states, float64, and the part of the heads that they are of: all sequences at once."""
        call = self.call(PAGE_MAJOR)
        batch, heads = len(call.state_indices), call.value.shape[-2]
        prefill = isinstance(call, GatedDeltaPrefill)
        part = slice(0, heads, max((heads - 1) // (_HEADS - 1), 1)) if prefill else slice(None)
        group = heads // call.key.shape[-2]
        q, k = (rows.double().repeat_interleave(group, -2)[:, part] for rows in (call.query, call.key))
        q, k = (rows / (rows.square().sum(-1, keepdim=True) + 1e-6).sqrt() for rows in (q, k))
        v, decay, beta = call.value.double()[:, part], call.g.double()[:, part].exp(), call.beta.double()[:, part]
        q, k, v, decay, beta = (rows.unflatten(0, (batch, -1)) for rows in (q * call.scale, k, v, decay, beta))
        state, out = self.initial[:, part].double(), torch.empty_like(v)
        for t in range(v.shape[1]):
            state *= decay[:, t, :, None, None]
            change = beta[:, t, :, None] * (v[:, t] - (state @ k[:, t, :, :, None])[..., 0])
            state += change[..., None] * k[:, t, :, None]
            out[:, t] = (state @ q[:, t, :, :, None])[..., 0]
        return out.flatten(0, 1), state, part


def gated_delta_work(shape: GatedDeltaShape, device: torch.device, fill: bool = True) -> GatedDeltaWork:
    """Make the data. Query, key and value are slices of one projection, as a model's are."""
    torch.manual_seed(0)
    s = shape
    rows = s.batch * max(s.tokens, 1)
    widths = [s.key_heads * s.key_dim, s.key_heads * s.key_dim, s.heads * s.value_dim]
    mixed = torch.randn(rows, sum(widths), dtype=s.dtype, device=device)
    query, key, value = mixed.split(widths, -1)
    tensors = (
        query.unflatten(-1, (s.key_heads, s.key_dim)),
        key.unflatten(-1, (s.key_heads, s.key_dim)),
        value.unflatten(-1, (s.heads, s.value_dim)),
        -torch.rand(rows, s.heads, device=device) * 0.2,
        torch.rand(rows, s.heads, device=device).to(s.dtype),
    )
    pages = random_pages(s.batch, device)
    options: dict[str, Any] = dict(state_plane=[], state_dtype=s.state_dtype, scale=s.key_dim**-0.5, l2_norm=True)
    call: Call
    if s.tokens:
        known = torch.ones(s.batch, dtype=torch.bool, device=device)
        start = starts(s.batch, s.tokens, device)
        call = GatedDeltaPrefill(mixed, *tensors, start, pages, has_initial_state=known, **options)
    else:
        call = GatedDeltaUpdate(mixed, *tensors, pages, **options)
    return GatedDeltaWork(call, (s.heads, s.value_dim, s.key_dim), s.layers, fill)


_SMALL: dict[str, Any] = dict(key_heads=2, heads=4, key_dim=16, value_dim=16, dtype=torch.float32, layers=3)
GPU: tuple[GatedDeltaShape, ...] = (
    GatedDeltaShape("gated delta update, B256", 256),
    GatedDeltaShape("gated delta prefill, B8 x 4096", 8, 4096),
    GatedDeltaShape("gated delta update, B256, bf16 states", 256, state_dtype=torch.bfloat16),
    GatedDeltaShape("gated delta update, B16", 16),
    GatedDeltaShape("gated delta prefill, B1 x 16384", 1, 16384),
    GatedDeltaShape("gated delta prefill, B64 x 256", 64, 256),
)
CPU: tuple[GatedDeltaShape, ...] = (
    GatedDeltaShape("gated delta update, B4", 4, **_SMALL),
    GatedDeltaShape("gated delta prefill, B2 x 70", 2, 70, **_SMALL),
)
