"""The data of a case over states: the same random states in pages of several layers and in a tensor of one layer."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import PagePool, state_page
from ..ops._state import state_view
from ..ops.conv import Conv1dPrefill, Conv1dUpdate
from ..ops.selective import SelectiveScanPrefill, SelectiveStateUpdate
from .memory import LAYER_MAJOR, PAGE_MAJOR, poison

if TYPE_CHECKING:
    from .state_cases import ConvShape, MambaShape

Call = Conv1dUpdate | Conv1dPrefill | SelectiveStateUpdate | SelectiveScanPrefill
"""An operator's arguments, by name."""

_SPARE = 8
_HEADS = 3  # of a long scan's many, the first, the middle and the last, are computed in float64


class StateWork:
    """One call's arguments for each layout, with equal states; page-major, in the middle one of several layers.

    Args:
        call: the arguments, of whose buffer only the device matters, and whose plane is not looked at.
        shape, layers: of a state, and of the page-major pool.
        fill: False leaves states and poison as whatever the memory held.
    """

    def __init__(self, call: Any, shape: tuple[int, ...], layers: int, fill: bool) -> None:
        device, dtype = call.buffer.device, call.state_dtype
        pages, layer = int(call.state_indices.max()) + 1 + _SPARE, layers // 2
        self.shape = shape
        self.calls: dict[str, Call] = {}
        for layout, count in ((PAGE_MAJOR, layers), (LAYER_MAJOR, 1)):
            page = state_page(count, {"state": (shape, dtype)}, align=16)
            pool = PagePool(page, pages, buffer=poison(pages * page.page_bytes, device, fill))
            plane = pool.geometry(layer if count > 1 else 0, "state")
            self.calls[layout] = replace(call, buffer=pool.buffer, state_plane=plane)
        self.initial = torch.randn(len(call.state_indices), *shape, dtype=torch.float32, device=device).to(dtype)
        for layout in self.calls:
            self.states(layout)[call.state_indices.long()] = self.initial

    def states(self, layout: str) -> Tensor:
        """All states of the layer, ``[num_pages, *shape]``, a strided view."""
        call = self.calls[layout]
        return state_view(call.buffer, call.state_plane, self.shape, call.state_dtype)

    @staticmethod
    def arguments(call: Call) -> list[Any]:
        """In the operator's order."""
        return [getattr(call, field.name) for field in fields(call)]

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor, slice]:
        """Output and states, float64, and the part of either's head axis (of channels: all) that they are of."""
        call = self.calls[PAGE_MAJOR]
        if isinstance(call, Conv1dUpdate | Conv1dPrefill):
            return *_conv_reference(call, self.initial), slice(None)
        heads = call.x.shape[-2]
        prefill = isinstance(call, SelectiveScanPrefill)
        part = slice(0, heads, max((heads - 1) // (_HEADS - 1), 1)) if prefill else slice(None)
        return *_mamba_reference(call, self.initial, part), part


def conv_work(shape: ConvShape, device: torch.device, fill: bool = True) -> StateWork:
    """Make a convolution's data."""
    torch.manual_seed(0)
    s = shape
    x = torch.randn(s.batch * max(s.tokens, 1), s.dim, dtype=s.dtype, device=device)
    rest = (torch.randn(s.dim, s.width, dtype=s.dtype, device=device),)
    options: dict[str, Any] = dict(bias=torch.randn(s.dim, dtype=s.dtype, device=device), silu=True)
    tail: Any = (random_pages(s.batch, device), [], s.dtype)
    call: Any
    if s.tokens:
        call = Conv1dPrefill(x, x, *rest, starts(s.batch, s.tokens, device), *tail, **options)
    else:
        call = Conv1dUpdate(x, x, *rest, *tail, **options)
    return StateWork(call, (s.dim, s.width - 1), s.layers, fill)


def mamba_work(shape: MambaShape, device: torch.device, fill: bool = True) -> StateWork:
    """Make Mamba-2's data. B and C are such that outputs are about as large as x.

    D is small, since a first token's output, ``(D + dt * B . C) * x``, must not be the difference of two large ones.
    """
    torch.manual_seed(0)
    s = shape
    rows = s.batch * max(s.tokens, 1)
    x = torch.randn(rows, s.heads, s.head_dim, dtype=s.dtype, device=device)
    dt = torch.randn(rows, s.heads, dtype=s.dtype, device=device)
    A = -torch.rand(s.heads, device=device) - 0.5
    B, C = torch.randn(2, rows, s.groups, s.state_dim, dtype=s.dtype, device=device) / s.state_dim**0.25
    D, dt_bias = 0.02 * torch.randn(s.heads, device=device), torch.randn(s.heads, device=device)
    options: dict[str, Any] = dict(D=D, dt_bias=dt_bias, dt_softplus=True)
    tail: Any = (random_pages(s.batch, device), [], s.state_dtype)
    call: Any
    if s.tokens:
        start = starts(s.batch, s.tokens, device)
        call = SelectiveScanPrefill(x, x, dt, A, B, C, start, *tail, **options)
    else:
        call = SelectiveStateUpdate(x, x, dt, A, B, C, *tail, **options)
    return StateWork(call, (s.heads, s.head_dim, s.state_dim), s.layers, fill)


def random_pages(count: int, device: torch.device) -> Tensor:
    """Distinct pages in no order; page 0, which engines keep for padding, is none of them."""
    return (torch.randperm(count + _SPARE, device=device)[:count] + 1).int()


def starts(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Where each of so many sequences of so many tokens begins, and the end."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * tokens


def _conv_reference(call: Conv1dUpdate | Conv1dPrefill, initial: Tensor) -> tuple[Tensor, Tensor]:
    """All sequences are as long, and prefills begin with nothing."""
    batch, (dim, width) = len(call.state_indices), call.weight.shape
    x = call.x.double().view(batch, -1, dim).transpose(1, 2)
    before = initial.double() if isinstance(call, Conv1dUpdate) else torch.zeros_like(initial, dtype=torch.float64)
    window = torch.cat((before, x), 2)
    bias = None if call.bias is None else call.bias.double()
    y = torch.nn.functional.conv1d(window, call.weight.double()[:, None], bias, groups=dim)
    return torch.nn.functional.silu(y).transpose(1, 2).reshape(-1, dim), window[:, :, 1 - width :]


def _mamba_reference(
    call: SelectiveStateUpdate | SelectiveScanPrefill, initial: Tensor, part: slice
) -> tuple[Tensor, Tensor]:
    """Token by token, all sequences, which are as long, at once."""
    batch, each = len(call.state_indices), call.x.shape[-2] // call.B.shape[-2]
    B, C = (rows.double().repeat_interleave(each, -2)[:, part].unflatten(0, (batch, -1)) for rows in (call.B, call.C))
    x, dt = (rows.double()[:, part].unflatten(0, (batch, -1)) for rows in (call.x, call.dt))
    A, (D, bias) = call.A.double()[part], (p.double()[part] for p in (call.D, call.dt_bias) if p is not None)
    dt = torch.nn.functional.softplus(dt + bias)
    fresh = isinstance(call, SelectiveScanPrefill)
    state = initial[:, part].double() * (0 if fresh else 1)
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        state *= torch.exp(dt[:, t] * A)[..., None, None]
        state += (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        out[:, t] = (state @ C[:, t, :, :, None])[..., 0] + D[:, None] * x[:, t]
    return out.flatten(0, 1), state
