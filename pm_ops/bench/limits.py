"""The machine's own limits, by torch's copy, reduction and matrix product: what the other rows are shares of."""

from __future__ import annotations

import torch
from torch import Tensor

from .clock import Clock
from .results import Results
from .streams import Two

COPY, MATMUL = "copy", "matmul"
TO_HOST, FROM_HOST, BOTH_WAYS = "to pinned", "from pinned", "to and from pinned"
TO_PEER = "to another GPU"
"""How the names of the limits begin."""


def measure_limits(clock: Clock, results: Results) -> None:
    """Add the limits' rows: device copy and read, matrix product, and on CUDA pinned copies to and from the host."""
    device = clock.device
    size, dim, dtype = (1 << 30, 8192, torch.bfloat16) if device.type == "cuda" else (1 << 24, 512, torch.float32)
    source = torch.empty(size // 8, dtype=torch.int64, device=device).random_().view(torch.uint8)
    target = torch.zeros_like(source)
    mib = f"{size >> 20} MiB"

    us = clock.median_us(lambda: target.copy_(source))
    _add(results, f"{COPY} {mib}", us, float(not torch.equal(target, source)), "gb_s", 2 * size)
    words = source.view(torch.int64)
    half = words[: len(words) // 2].sum() + words[len(words) // 2 :].sum()
    us = clock.median_us(words.sum)
    _add(results, f"read {mib}", us, float(bool(words.sum() != half)), "gb_s", size)
    if device.type == "cuda":
        _pinned(clock, results, source[: size // 4], target[: size // 4])
    if has_peer(device):
        there = torch.zeros(size, dtype=torch.uint8, device=other_gpu(device))
        us = clock.median_us(lambda: there.copy_(source))
        _add(results, f"{TO_PEER}, {mib}", us, float(not torch.equal(there.cpu(), source.cpu())), "gb_s", size)

    a, b = (torch.randn(dim, dim, dtype=dtype, device=device) for _ in range(2))
    us = clock.median_us(lambda: a @ b)
    rows = slice(0, 16)
    right = a[rows].double() @ b.double()
    error = float(((a @ b)[rows].double() - right).norm() / right.norm())
    _add(results, f"{MATMUL} {dim}^3, {str(dtype).removeprefix('torch.')}", us, error, "tflop_s", 2 * dim**3)


def other_gpu(device: torch.device) -> torch.device:
    """Another one of the host."""
    return torch.device("cuda", 1 if (device.index or 0) == 0 else 0)


def has_peer(device: torch.device) -> bool:
    """Whether there is another, whose memory this one has access to."""
    return (
        device.type == "cuda"
        and torch.cuda.device_count() > 1
        and torch.cuda.can_device_access_peer(device, other_gpu(device))
    )


def _pinned(clock: Clock, results: Results, source: Tensor, target: Tensor) -> None:
    size, mib = source.numel(), f"{source.numel() >> 20} MiB"
    host, other = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    us = clock.apart_us(lambda: host.copy_(source, non_blocking=True))
    _add(results, f"{TO_HOST} host memory, {mib}", us, float(not torch.equal(host, source.cpu())), "gb_s", size)
    target.zero_()
    us = clock.apart_us(lambda: target.copy_(host, non_blocking=True))
    _add(results, f"{FROM_HOST} host memory, {mib}", us, float(not torch.equal(target, source)), "gb_s", size)
    target.zero_()
    streams = Two(clock.device)
    to, back = (lambda: other.copy_(source, non_blocking=True)), (lambda: target.copy_(host, non_blocking=True))
    us = clock.apart_us(lambda: streams.run(to, back))
    wrong = float(not (torch.equal(other, host) and torch.equal(target, source)))
    _add(results, f"{BOTH_WAYS} host memory at once, {mib} each", us, wrong, "gb_s", 2 * size)


def _add(results: Results, case: str, us: float, error: float, unit: str, amount: float) -> None:
    results.add("limits", case, "torch", "-", us, error, unit, amount)
    if error > 1e-2:
        results.mark_wrong(f"limits {case}: wrong result, relative error {error:.2e}")
