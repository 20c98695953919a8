"""The suite ``state``: shapes whose case is a method of theirs, here of convolutions and Mamba-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .case import Case
from .implementation import Bound
from .oracle import Error, error
from .state_work import StateWork, conv_work, mamba_work


@dataclass(frozen=True)
class ConvShape:
    """A convolution of 4 taps for each of many channels, of the next tokens or of whole sequences."""

    name: str
    batch: int
    tokens: int = 0
    """Of each sequence; 0: an update with the next one."""
    dim: int = 8192 + 2 * 8 * 128
    width: int = 4
    dtype: torch.dtype = torch.bfloat16
    layers: int = 8
    """Of the page-major pool; the one in the middle is used."""

    @property
    def nbytes(self) -> int:
        """Rows read and written, and states: read and written by an update, written by a prefill."""
        rows = 2 * self.batch * max(self.tokens, 1)
        states = self.batch * (self.width - 1) * (1 if self.tokens else 2)
        return (rows + states) * self.dim * self.dtype.itemsize

    def case(self, suite: str) -> Case:
        """By its rate of bytes."""
        kind = "conv1d prefill" if self.tokens else "conv1d update"
        return state_case(suite, self.name, kind, partial(conv_work, self), "gb_s", self.nbytes, self.dtype)


@dataclass(frozen=True)
class MambaShape:
    """Mamba-2's state space, the next token of each sequence or whole sequences. Defaults are an 8B model's."""

    name: str
    batch: int
    tokens: int = 0
    """Of each sequence; 0: an update with the next one."""
    heads: int = 128
    groups: int = 8
    head_dim: int = 64
    state_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32
    layers: int = 4

    @property
    def nbytes(self) -> int:
        """Of an update: states read and written, and rows."""
        states = 2 * self.heads * self.head_dim * self.state_dim * self.state_dtype.itemsize
        rows = 2 * self.heads * self.head_dim + self.heads + 2 * self.groups * self.state_dim
        return self.batch * (states + rows * self.dtype.itemsize)

    @property
    def flops(self) -> int:
        """Of the recurrence, token by token: a product for what is added to the state, and one for the output."""
        return 4 * self.batch * self.tokens * self.heads * self.head_dim * self.state_dim

    def case(self, suite: str) -> Case:
        """By its rate of bytes; a prefill by its rate of operations."""
        build = partial(mamba_work, self)
        if self.tokens:
            return state_case(suite, self.name, "selective prefill", build, "tflop_s", self.flops, self.dtype)
        return state_case(suite, self.name, "selective update", build, "gb_s", self.nbytes, self.dtype)


def state_case(
    suite: str,
    name: str,
    kind: str,
    build: Callable[[torch.device, bool], Any],
    unit: str,
    amount: float,
    dtype: torch.dtype,
) -> Case:
    """A call over states, timed as the replay of a graph: output and states are right, and nothing else has changed."""
    tolerance = 1e-2 if dtype.itemsize == 2 else 1e-5
    bind = lambda impl, work, layout: impl.state(work, layout)  # noqa: E731
    return Case(suite, name, kind, build, bind, check_state, unit, amount, graph=True, tolerance=tolerance)


def check_state(bound: Bound, work: StateWork, layout: str) -> Error:
    """From the initial states; these are put back."""
    call, states = work.calls[layout], work.states(layout)
    pages = call.state_indices.long()
    states[pages] = work.initial
    total = _checksum(call)
    out = bound.run()
    right_out, right_states, part = work.reference
    found = states[pages]
    states[pages] = work.initial
    if out is None or _checksum(call) != total:
        return Error(1.0, 1.0)
    heads = out[:, part] if right_out.dim() == 3 else out
    of_rows = error(heads, right_out)
    return max(of_rows, error(found[:, part].flatten(2), right_states.flatten(2)))


def _checksum(call: Any) -> int:
    words = call.buffer.numel() // 8 * 8
    return int(call.buffer[:words].view(torch.int64).sum())


_SMALL: dict[str, Any] = dict(
    heads=4, groups=2, head_dim=16, state_dim=16, dtype=torch.float32, layers=3
)  # fmt: skip
GPU: tuple[ConvShape | MambaShape, ...] = (
    MambaShape("mamba-2 update, B256", 256),
    MambaShape("mamba-2 update, B256, bf16 states", 256, state_dtype=torch.bfloat16),
    MambaShape("mamba-2 update, B16", 16),
    ConvShape("conv update, B256", 256),
    MambaShape("mamba-2 prefill, B8 x 4096", 8, 4096),
    ConvShape("conv prefill, B8 x 4096", 8, 4096),
    MambaShape("mamba-2 prefill, B1 x 16384", 1, 16384),
)
CPU: tuple[ConvShape | MambaShape, ...] = (
    MambaShape("mamba-2 update, B4", 4, **_SMALL),
    MambaShape("mamba-2 prefill, B2 x 70", 2, 70, **_SMALL),
    ConvShape("conv update, B4", 4, dim=64, dtype=torch.float32, layers=3),
    ConvShape("conv prefill, B2 x 70", 2, 70, dim=64, dtype=torch.float32, layers=3),
)
