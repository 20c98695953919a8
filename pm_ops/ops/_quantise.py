"""How numbers become 8 bits and come back, in plain torch: the specification of every kernel that does so."""

from __future__ import annotations

import torch
from torch import Tensor

Scale = float | Tensor
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""The 8-bit dtypes, which saturate, and the largest number that is stored in each."""
TINY = torch.finfo(torch.float32).tiny


def scale_arguments(scale: Scale) -> tuple[float, Tensor | None]:
    """A scale as the schemas take it: a float goes with no tensor, a tensor with 1.0."""
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


def scale_value(scale: float, tensor: Tensor | None) -> float | Tensor:
    """The scale to compute with: the device tensor where one was given, as a scalar tensor."""
    return scale if tensor is None else tensor.reshape(())


def quantise(x: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """``x / scale`` in fp32, rounded to nearest even; 8 bits saturate (inf to the largest value), NaN stays NaN.

    int8 has no NaN: -128, which no number gives, stands for it.
    """
    if isinstance(scale, Tensor) or scale != 1.0:
        x = x.float() / torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    if dtype in LARGEST:
        x = x.float().clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == torch.int8:
        x = torch.where(x.isnan(), -128.0, x.round())
    return x.to(dtype)


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows ``[..., dim]`` as 8 bits, and the float32 scale ``[..., 1]`` of each.

    The scale is the row's largest magnitude over the dtype's largest number, but at least the smallest normal float32,
    so that the quotient never overflows, and 1 for a row of zeros. A row with a NaN or an infinity has no scale: it is
    stored as zeros with a scale of NaN, and reads as NaN.
    """
    size = x.float().abs().amax(-1, keepdim=True)
    finite = size.isfinite()
    scale = (size / torch.tensor(LARGEST[dtype], device=x.device)).clamp(min=TINY)
    scale = torch.where(finite & (size > 0), scale, 1.0)
    stored = quantise(torch.where(finite, x.float(), 0.0), dtype, scale)
    return stored, torch.where(finite, scale, torch.nan)


def dequantise(x: Tensor, scale: float | Tensor, scales: Tensor | None = None) -> Tensor:
    """Stored rows ``[..., heads, dim]`` in float32, by one scale or by ``scales [..., heads, 1]``."""
    if scales is not None:
        return x.float() * scales
    y = x.float()
    return (torch.where(x == -128, torch.nan, y) if x.dtype == torch.int8 else y) * scale
