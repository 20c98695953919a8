"""vLLM's Triton kernels over states: the updates and prefills of convolutions and of Mamba-2.

Its updates and convolutions take states with strides. Its scan takes initial states as a tensor and returns the last
ones as another; what it returns is written to the states with an index, as its Mamba-2 layer does.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..ops.conv import Conv1dPrefill, Conv1dUpdate
from ..ops.selective import SelectiveScanPrefill, SelectiveStateUpdate
from .implementation import STATE, Bound, Implementation
from .loading import import_module, version
from .state_work import StateWork

_OPS = "vllm.model_executor.layers.mamba.ops"
_CHUNK = 256  # its models' usual chunk_size
_BLOCK = 8  # tokens of a program of its convolution


class VLLMMamba(Implementation):
    """On page-major states through strided views, on layer-major ones as they are."""

    name = "vllm_mamba"
    kinds = STATE
    scope = "these are its kernels over states"

    def __init__(self, folder: Path | None) -> None:
        ssm, conv, scan = (import_module(folder, f"{_OPS}.{m}") for m in ("mamba_ssm", "causal_conv1d", "ssd_combined"))
        self._update, self._scan = ssm.selective_state_update, scan.mamba_chunk_scan_combined_varlen
        self._conv_update, self._conv = conv.causal_conv1d_update, conv.causal_conv1d_fn
        self._version = version(folder, "vllm", ssm, conv, scan)

    def version(self) -> str:
        """Release or digest."""
        return self._version

    def state(self, work: StateWork, layout: str) -> Bound:
        """The kernel for the call's operator."""
        call: Any = work.calls[layout]
        binders: dict[type, Any] = {
            Conv1dUpdate: self._bind_conv_update,
            Conv1dPrefill: self._bind_conv,
            SelectiveStateUpdate: self._bind_update,
            SelectiveScanPrefill: self._bind_scan,
        }
        bound: Bound = binders[type(call)](call, work.states(layout))
        return bound

    def _bind_conv_update(self, a: Conv1dUpdate, states: Tensor) -> Bound:
        out = torch.empty_like(a.x)
        args, pages = (a.x, states, a.weight, a.bias, "silu"), a.state_indices
        return Bound(lambda: self._conv_update(*args, conv_state_indices=pages, out=out), out)

    def _bind_conv(self, a: Conv1dPrefill, states: Tensor) -> Bound:
        counts = [-(-n // _BLOCK) for n in a.query_start.diff().tolist()]
        which = torch.tensor([b for b, n in enumerate(counts) for _ in range(n)], dtype=torch.int32)
        block = torch.tensor([i for n in counts for i in range(n)], dtype=torch.int32)
        there = dict(batch_ptr=which.to(a.x.device), token_chunk_offset_ptr=block.to(a.x.device))
        numbers = dict(tot=len(which), mlist=which, mlist_len=len(which), offsetlist=block, **there)
        metadata = SimpleNamespace(nums_dict={_BLOCK: numbers}, **there)
        known = torch.zeros(len(counts), dtype=torch.bool, device=a.x.device)
        args = (a.x.t(), a.weight, a.bias, states, a.query_start, a.state_indices, known, "silu")
        return Bound(lambda: self._conv(*args, metadata=metadata).t())

    def _bind_update(self, a: SelectiveStateUpdate, states: Tensor) -> Bound:
        out, (heads, dim, size) = torch.empty_like(a.x), states.shape[1:]
        assert a.D is not None and a.dt_bias is not None
        rows = (a.x, a.dt[..., None].expand(-1, -1, dim), a.A[:, None, None].expand(heads, dim, size), a.B, a.C)
        each = (a.D[:, None].expand(heads, dim), a.dt_bias[:, None].expand(heads, dim))
        pages = a.state_indices

        def run() -> Tensor:
            self._update(states, *rows, *each, dt_softplus=True, state_batch_indices=pages, out=out)
            return out

        return Bound(run, out)

    def _bind_scan(self, a: SelectiveScanPrefill, states: Tensor) -> Bound:
        out, device = torch.empty_like(a.x), a.x.device
        ends, which, last = [0], [], []
        for b, n in enumerate(a.query_start.diff().tolist()):
            sizes = [min(_CHUNK, n - i) for i in range(0, n, _CHUNK)]
            ends += [ends[-1] + sum(sizes[: i + 1]) for i in range(len(sizes))]
            which += [b] * len(sizes)
            last.append(len(which) - 1)
        chunks = [torch.tensor(x, dtype=torch.int32, device=device) for x in (ends, last, which)]
        pages = a.state_indices.long()
        rows = (a.x, a.dt, a.A, a.B, a.C, _CHUNK, a.query_start, *chunks, out)
        options = dict(D=a.D, dt_bias=a.dt_bias, dt_softplus=True, state_dtype=a.state_dtype)

        def run() -> Tensor:
            states[pages] = self._scan(*rows, **options)
            return out

        return Bound(run, out)
