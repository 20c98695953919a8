"""Sample inputs of the operators over states, for :func:`pm_ops.testing.sample_inputs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .formats import state_page
from .pool import PagePool

Sample = tuple[tuple[Any, ...], dict[str, Any]]

_HEADS, _GROUPS, _HEAD_DIM, _STATE_DIM, _DIM, _WIDTH, _PAGES = 4, 2, 6, 5, 12, 4, 9


def _pool(dtype: torch.dtype, device: str) -> PagePool:
    conv, ssm = ((_DIM, _WIDTH - 1), dtype), ((_HEADS, _HEAD_DIM, _STATE_DIM), torch.float32)
    pool = PagePool(state_page(2, {"conv": conv, "ssm": ssm}, align=16), _PAGES, device)
    for kind in ("conv", "ssm"):
        view = pool.view(1, kind)
        view.copy_(_randn(view.shape, device).to(view.dtype))
    return pool


def _randn(shape: Any, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(tuple(shape), generator=generator).to(device, dtype)


def _wide(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> Tensor:
    """A slice of a wider tensor."""
    return _randn((*shape[:-1], shape[-1] + 2), device, dtype)[..., 1:-1]


def _plane(pool: PagePool, kind: str) -> tuple[list[int], torch.dtype]:
    return pool.geometry(1, kind), pool.layout.plane(1, kind).dtype


def _index(*rows: Any, device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(rows, device=device, dtype=dtype)


def _updates(device: str) -> Iterator[tuple[torch.dtype, tuple[int, ...], Tensor, Tensor | None]]:
    """dtype, leading axes, pages, accepted: no, one and several sequences; one and several tokens; a state a token."""
    long = torch.int64
    yield torch.float32, (3,), _index(4, -1, 2, device=device), None
    yield torch.float32, (0,), _index(device=device), None
    yield torch.float32, (1,), _index(8, device=device, dtype=long), None
    yield torch.float16, (2, 3), _index(1, 0, device=device), None
    pages = _index([0, 1, 2], [5, -1, 4], device=device, dtype=long)
    yield torch.float32, (2, 3), pages, None
    yield torch.bfloat16, (2, 3), pages, _index(3, 1, device=device)


def _prefills(device: str) -> Iterator[tuple[torch.dtype, int, Tensor, Tensor, Tensor | None]]:
    """dtype, rows, query_start, pages, which have a state: no, one and several sequences; empty ones; padding."""
    known = torch.tensor([True, False], device=device)
    long = torch.int64
    yield torch.float32, 7, _index(0, 3, 3, 4, 6, device=device), _index(4, 1, -1, 2, device=device), None
    yield torch.float16, 9, _index(0, 1, 5, device=device, dtype=long), _index(0, 8, device=device), known
    yield torch.float32, 0, _index(0, device=device), _index(device=device), None
    yield torch.float16, 2, _index(0, device=device), _index(device=device), None
    yield torch.float32, 1, _index(0, 1, device=device), _index(3, device=device, dtype=long), known[:1]
    yield torch.bfloat16, 4, _index(0, 4, device=device), _index(3, device=device), known[:1]


def _filter(device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    return _randn((_DIM, _WIDTH), device, dtype), {"bias": _randn((_DIM,), device, dtype), "silu": True}


def _mamba(leading: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    x = _wide((*leading, _HEADS, _HEAD_DIM), device, dtype)
    dt, A = _randn((*leading, _HEADS), device, dtype), -_randn((_HEADS,), device).abs()
    B, C = (_wide((*leading, _GROUPS, _STATE_DIM), device, dtype) for _ in range(2))
    options = {"D": A, "dt_bias": A, "z": x, "dt_softplus": True, "dt_min": 0.01, "dt_max": 3.0}
    return [x, dt, A, B, C], options


def _conv1d_update(device: str) -> Iterator[Sample]:
    for dtype, leading, pages, accepted in _updates(device):
        pool = _pool(dtype, device)
        weight, options = _filter(device, dtype)
        options |= {"num_accepted": accepted}
        yield (pool.buffer, _wide((*leading, _DIM), device, dtype), weight, pages, *_plane(pool, "conv")), options
    yield (pool.buffer, _randn((*leading, _DIM), device), weight, pages, *_plane(pool, "conv")), {}


def _conv1d_prefill(device: str) -> Iterator[Sample]:
    for dtype, rows, start, pages, known in _prefills(device):
        pool = _pool(dtype, device)
        weight, options = _filter(device, dtype)
        options |= {"has_initial_state": known}
        x = _wide((rows, _DIM), device, dtype)
        yield (pool.buffer, x, weight, start, pages, *_plane(pool, "conv")), options


def _selective_state_update(device: str) -> Iterator[Sample]:
    for dtype, leading, pages, accepted in _updates(device):
        pool = _pool(dtype, device)
        rows, options = _mamba(leading, device, dtype)
        yield (pool.buffer, *rows, pages, *_plane(pool, "ssm")), {**options, "num_accepted": accepted}
    yield (pool.buffer, *rows, pages, *_plane(pool, "ssm")), {}


def _selective_scan_prefill(device: str) -> Iterator[Sample]:
    for dtype, count, start, pages, known in _prefills(device):
        pool = _pool(dtype, device)
        rows, options = _mamba((count,), device, dtype)
        yield (pool.buffer, *rows, start, pages, *_plane(pool, "ssm")), {**options, "has_initial_state": known}


def _gated(leading: tuple[int, ...], device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    query, key = (_wide((*leading, _GROUPS, _STATE_DIM), device, dtype) for _ in range(2))
    value = _wide((*leading, _HEADS, _HEAD_DIM), device, dtype)
    g, beta = -_randn((*leading, _HEADS), device).abs(), _randn((*leading, _HEADS), device, dtype)
    gates = {"a_log": _randn((_HEADS,), device), "dt_bias": _randn((_HEADS,), device, dtype)}
    return [query, key, value, g, beta], {"l2_norm": True, **gates}


def _gated_delta_update(device: str) -> Iterator[Sample]:
    for dtype, leading, pages, accepted in _updates(device):
        pool = _pool(dtype, device)
        rows, options = _gated(leading, device, dtype)
        yield (pool.buffer, *rows, pages, *_plane(pool, "ssm"), 0.4), {**options, "num_accepted": accepted}
    yield (pool.buffer, *rows, pages, *_plane(pool, "ssm"), 0.4), {}


def _gated_delta_prefill(device: str) -> Iterator[Sample]:
    for dtype, count, start, pages, known in _prefills(device):
        pool = _pool(dtype, device)
        rows, options = _gated((count,), device, dtype)
        yield (pool.buffer, *rows, start, pages, *_plane(pool, "ssm"), 0.4), {**options, "has_initial_state": known}


STATE_SAMPLES: dict[str, Callable[[str], Iterator[Sample]]] = {
    "conv1d_update": _conv1d_update,
    "conv1d_prefill": _conv1d_prefill,
    "selective_state_update": _selective_state_update,
    "selective_scan_prefill": _selective_scan_prefill,
    "gated_delta_update": _gated_delta_update,
    "gated_delta_prefill": _gated_delta_prefill,
}
"""By operator; each takes the device."""
