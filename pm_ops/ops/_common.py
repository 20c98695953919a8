"""What every operator shares: registration, argument checks, and the one address formula in torch.

An operator is a *schema*, a dataclass with the schema's arguments whose ``check`` refuses bad input, a *fake*, a *CPU
kernel* in plain torch (the specification) and a *Triton launcher*. The check runs before each of the three.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..layout import dtype_name

PLANE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CHECKS = os.environ.get("PM_OPS_CHECKS", "0") not in ("", "0")
"""Whether index *values* are checked on CUDA too, by device asserts (environment variable ``PM_OPS_CHECKS=1``)."""

_LIBRARY = torch.library.Library("pm_ops", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Arguments(Protocol):
    """An operator's arguments, as a dataclass in the schema's order and with its defaults."""

    def check(self) -> None:
        """Refuse bad shapes, dtypes and devices with a ValueError; needs no data, so fakes run it too."""

    def check_values(self) -> None:
        """Refuse bad index values. Runs on CPU always, on CUDA with ``PM_OPS_CHECKS=1``."""


def define(
    name: str,
    signature: str,
    arguments: Callable[..., Any],
    *,
    fake: Callable[[Any], Any],
    cpu: Callable[[Any], Any],
    cuda: str | Callable[[Any], Any],
) -> None:
    """Register one operator.

    Args:
        name, signature: the schema is ``name + signature``.
        arguments: the dataclass of the arguments, see :class:`Arguments`.
        fake, cpu, cuda: take the checked arguments object. ``cuda`` may be a Triton launcher, ``"module.function"`` in
            ``pm_ops.kernels``: it is imported at the first call, so that importing pm_ops never needs triton.
    """

    def run_fake(*args: Any, **kwargs: Any) -> Any:
        parsed = arguments(*args, **kwargs)
        parsed.check()
        return fake(parsed)

    def run_cpu(*args: Any, **kwargs: Any) -> Any:
        parsed = arguments(*args, **kwargs)
        parsed.check()
        parsed.check_values()
        return cpu(parsed)

    launcher = kernel(cuda) if isinstance(cuda, str) else cuda

    def run_cuda(*args: Any, **kwargs: Any) -> Any:
        parsed = arguments(*args, **kwargs)
        parsed.check()
        if CHECKS:
            parsed.check_values()
        return launcher(parsed)

    _LIBRARY.define(name + signature, tags=_TAGS)
    _LIBRARY.impl(name, run_cpu, "CPU")
    _LIBRARY.impl(name, run_cuda, "CUDA")
    torch.library.register_fake(f"pm_ops::{name}", run_fake, lib=_LIBRARY)


def kernel(path: str) -> Callable[[Any], Any]:
    """The Triton launcher ``"module.function"`` of ``pm_ops.kernels``, imported when it is first called."""
    module, function = path.split(".")
    loaded: Callable[[Any], Any] | None = None

    def launch(arguments: Any) -> Any:
        nonlocal loaded
        if loaded is None:
            try:
                loaded = getattr(importlib.import_module(f"pm_ops.kernels.{module}"), function)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] != "triton":
                    raise
                raise ImportError("CUDA tensors need triton >= 3.6: pip install 'pm-ops[triton]'") from error
        assert loaded is not None
        return loaded(arguments)

    return launch


def require(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise ValueError unless the condition holds; a symbolic condition becomes a guard, or a run-time assert."""
    if condition is not True:
        torch._check_value(condition, message)


def require_no_grad(op: str, **tensors: Tensor | None) -> None:
    """Refuse inputs that need a gradient: these operators have no backward."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"pm_ops::{op} has no backward, but {name} requires grad; call it under torch.no_grad() or "
                f"torch.inference_mode(), or pass {name}.detach()"
            )


def require_buffer(buffer: Tensor) -> None:
    require(
        buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous(),
        lambda: f"buffer must be a 1-D contiguous uint8 tensor, got {describe(buffer)}; pass PagePool.buffer",
    )


def require_indices(name: str, index: Tensor, like: Tensor, dim: int = 1) -> None:
    require(
        index.dtype in (torch.int32, torch.int64) and index.dim() == dim,
        lambda: f"{name} must be a {dim}-D int32 or int64 tensor, got {describe(index)}",
    )
    require_device(name, index, like)


def require_device(name: str, tensor: Tensor, like: Tensor) -> None:
    require(
        tensor.device == like.device,
        lambda: f"{name} is on {tensor.device}, the buffer on {like.device}; move it there",
    )


def require_plane(
    name: str, buffer: Tensor, plane: Sequence[int], page_size: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """A plane's geometry names five ints, is aligned to its dtype and lies within the buffer."""
    require(
        dtype in PLANE_DTYPES,
        lambda: (
            f"{name} dtype {dtype_name(dtype)} is not supported; use one of {', '.join(map(dtype_name, PLANE_DTYPES))}"
        ),
    )
    require(
        len(plane) == 5,
        lambda: f"{name}_plane must be [offset, page_stride, token_stride, head_stride, num_pages], got {list(plane)}",
    )
    offset, page_stride, token_stride, head_stride, num_pages = plane
    item = dtype.itemsize
    if item > 1:
        aligned = offset % item + page_stride % item + token_stride % item + head_stride % item == 0
        require(aligned, lambda: f"{name}_plane {list(plane)} is not aligned to {dtype_name(dtype)}'s {item} bytes")
    require(page_size > 0, lambda: f"page_size must be positive, got {page_size}")
    last = offset + (num_pages - 1) * page_stride + (page_size - 1) * token_stride + (heads - 1) * head_stride
    require(
        last + dim * item <= buffer.numel(),
        lambda: (
            f"{name}_plane {list(plane)} with {heads} heads x {dim} ends at byte {last + dim * item}, "
            f"the buffer has {buffer.numel()}; heads, dim and page_size must be the layout's"
        ),
    )


def require_scale(name: str, scale: float, tensor: Tensor | None, like: Tensor) -> None:
    """A float scale is positive and finite after rounding to fp32; a tensor is one fp32 element, trusted."""
    if tensor is not None:
        require(
            tensor.dtype == torch.float32 and tensor.numel() == 1,
            lambda: f"{name} must be one float32 element, got {describe(tensor)}",
        )
        require_device(name, tensor, like)
    if isinstance(scale, float | int):
        rounded = ctypes.c_float(scale).value
        require(
            math.isfinite(rounded) and rounded > 0,
            lambda: f"{name}={scale} is {rounded} in float32; a scale must be positive and finite",
        )


def require_in_range(name: str, index: Tensor, limit: int, what: str) -> None:
    """Every index is below ``limit`` (negative ones mean: skip). A device assert on CUDA."""
    _require_all(index < limit, lambda: f"{name} has {int(index.max())}, but there are {limit} {what}")


def require_distinct(name: str, index: Tensor) -> None:
    """No index that will be written occurs twice: which row wins would be unspecified. A device assert on CUDA."""
    ordered = index.sort().values
    repeats = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    _require_all(
        ~repeats, lambda: f"{name} names {int(ordered[1:][repeats][0])} twice; each may be written once a call"
    )


def _require_all(holds: Tensor, message: Callable[[], str]) -> None:
    if holds.device.type == "cpu":
        if not bool(holds.all()):
            raise ValueError(message())
    else:
        torch._assert_async(holds.all(), "pm_ops: an index is out of range or repeated (PM_OPS_CHECKS=1)")


def scale_value(scale: float, tensor: Tensor | None) -> float | Tensor:
    """The scale to compute with: the device tensor where one was given, as a scalar tensor."""
    return scale if tensor is None else tensor.reshape(())


def plane_view(
    buffer: Tensor, plane: Sequence[int], page_size: int, heads: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """A plane as a typed strided view ``[num_pages, page_size, heads, dim]``: the address formula, in torch."""
    offset, page_stride, token_stride, head_stride, num_pages = plane
    item = dtype.itemsize
    typed = buffer[: buffer.numel() // item * item].view(dtype)
    strides = (page_stride // item, token_stride // item, head_stride // item, 1)
    return typed.as_strided((num_pages, page_size, heads, dim), strides, typed.storage_offset() + offset // item)


def bits(x: Tensor) -> Tensor:
    """The same bytes as integers, so that indexing moves them unchanged (NaN payloads) and works for fp8."""
    return x.view(_BITS[x.dtype.itemsize])


def quantise(x: Tensor, dtype: torch.dtype, scale: float | Tensor) -> Tensor:
    """``x / scale`` in fp32, rounded to nearest even; fp8 saturates (inf to the largest value) and keeps NaN."""
    if isinstance(scale, Tensor) or scale != 1.0:
        x = x.float() / scale
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        x = x.float().clamp(-limit, limit)
    return x.to(dtype)


def describe(t: Tensor) -> str:
    return f"{dtype_name(t.dtype)} {list(t.shape)} on {t.device}"
