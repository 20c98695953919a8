"""The kernels over states against float64, and against every other byte of the buffer."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from kernels.cases import moved_with_strides, on_each_device
from state_cases import (
    BF16,
    F16,
    F32,
    Call,
    conv_prefill,
    conv_update,
    copied,
    owned_bytes,
    reference,
    ssm_prefill,
    ssm_update,
    states_of,
)
from torch import Tensor

from pm_ops.kernels.conv import conv1d_prefill, conv1d_update
from pm_ops.kernels.selective_scan import selective_scan_prefill
from pm_ops.kernels.selective_update import selective_state_update
from pm_ops.ops.conv import Conv1dPrefill, Conv1dUpdate
from pm_ops.ops.selective import SelectiveStateUpdate
from pm_ops.testing import writes_only

TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 2e-2}
"""Of out and state, relative to the largest number."""


def run(a: Call) -> Tensor:
    if isinstance(a, Conv1dUpdate):
        return conv1d_update(a)
    if isinstance(a, Conv1dPrefill):
        return conv1d_prefill(a)
    return selective_state_update(a) if isinstance(a, SelectiveStateUpdate) else selective_scan_prefill(a)


def on(a: Any, device: str) -> Any:
    tensors = {f.name: getattr(a, f.name) for f in fields(a)}
    moved = {k: moved_with_strides(v, device) for k, v in tensors.items() if isinstance(v, Tensor)}
    return replace(a, **moved)


def check(case: Call, device: str) -> None:
    """Output and states are right, skipped rows are zeros, and no other byte has changed."""
    case.check()
    case.check_values()
    out, states = reference(case)
    a = on(copied(case), device)
    with writes_only(a.buffer, owned_bytes(case, list(states))):
        got = run(a)
    assert got.is_contiguous() and got.dtype == case.x.dtype and got.shape == case.x.shape
    assert near(got.cpu(), out, case.x.dtype, case.x.dtype)
    assert bool((got.cpu()[out == 0] == 0).all())
    found = states_of(replace(a, buffer=a.buffer.cpu()))
    for page, state in states.items():
        assert near(found[page], state, case.state_dtype, case.x.dtype), page


def near(got: Tensor, right: Tensor, stored: torch.dtype, computed: torch.dtype) -> bool:
    scale = max(float(right.abs().max()), 1.0) if right.numel() else 1.0
    allowed = max(TOLERANCE[stored], TOLERANCE[computed]) * scale
    return bool(((got.double() - right).abs() <= allowed).all())


@on_each_device
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"bias": False, "silu": False, "index_dtype": torch.int64}])
def test_conv_update(width: int, options: dict[str, Any], device: str) -> None:
    check(conv_update(3, width=width, **options), device)
    check(conv_update(3, 5, width=width, **options), device)
    check(conv_update(3, 4, width=width, per_token=True, **options), device)


@on_each_device
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"bias": False, "silu": False, "initial": False, "index_dtype": torch.int64}])
def test_conv_prefill(width: int, options: dict[str, Any], device: str) -> None:
    check(conv_prefill([1, 3, 2, 0, 33, 65, 31], width=width, **options), device)


@on_each_device
@pytest.mark.parametrize("options", [{}, {"gate": False, "index_dtype": torch.int64, "dt_max": None, "dt_min": 0.0}])
def test_selective_update(options: dict[str, Any], device: str) -> None:
    check(ssm_update(3, **options), device)
    check(ssm_update(2, 3, **options), device)
    check(ssm_update(3, 3, per_token=True, **options), device)


@on_each_device
@pytest.mark.parametrize("options", [{}, {"gate": False, "initial": False, "index_dtype": torch.int64}])
def test_selective_prefill(options: dict[str, Any], device: str) -> None:
    check(ssm_prefill([1, 7, 64, 0, 65, 63], heads=(2, 1), **options), device)
    check(ssm_prefill([130], dims=(70, 9), heads=(2, 2), **options), device)
