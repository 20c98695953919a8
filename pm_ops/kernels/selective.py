"""What the kernels over states share: the page to read, activations, and Mamba-2's step size."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_page(state_indices, num_accepted, n, TOKENS: tl.constexpr):
    """The page that sequence n's state is read from; `state_indices` has TOKENS columns."""
    column = 0
    if num_accepted is not None:
        column = tl.maximum(tl.load(num_accepted + n) - 1, 0).to(tl.int32)
    return tl.load(state_indices + n * TOKENS + column).to(tl.int64)


@triton.jit
def silu(y):
    """y times its sigmoid."""
    return y / (1 + tl.exp(-y))


@triton.jit
def step_size(dt, dt_bias, softplus: tl.constexpr, low, high):
    """dt as it is used: float32, after bias, softplus and limits. NaN stays NaN."""
    dt = dt.to(tl.float32) + dt_bias
    if softplus:
        e = tl.exp(-tl.abs(dt))  # log1p(e), exact to the last bits where e is small
        u = 1 + e
        dt = tl.where(dt > 0, dt, 0.0) + tl.where(u == 1, e, tl.log(u) * (e / tl.where(u == 1, 1.0, u - 1))) + dt * 0
    dt = tl.where(dt < low, low, dt)
    return tl.where(dt > high, high, dt)
