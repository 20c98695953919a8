"""What every operator shares: registration, argument checks, and the one address formula in torch.

An operator is a *schema*, a dataclass with the schema's arguments whose ``check`` refuses bad input, a *fake*, a *CPU
kernel* in plain torch (the specification) and a *Triton launcher*. The check runs before each of the three, and one of
where the tensors lie before the two kernels.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..layout import dtype_name
from ._quantise import LARGEST

ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
PLANE_DTYPES = (*ROW_DTYPES, torch.int8)
ALIGNMENT = 16
"""Bytes: a buffer begins at a multiple of them, as every allocation does."""
INDEX_DTYPES = (torch.int32, torch.int64)
CHECKS = os.environ.get("PM_OPS_CHECKS", "0") not in ("", "0")
"""Whether index *values* are checked on CUDA too, by device asserts (environment variable ``PM_OPS_CHECKS=1``)."""

_LIBRARY = torch.library.Library("pm_ops", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Arguments(Protocol):
    """An operator's arguments: a dataclass with the schema's names, order and defaults."""

    def check(self) -> None:
        """Refuse bad shapes, dtypes and devices with a ValueError; needs no data, so fakes run it too."""

    def check_values(self) -> None:
        """Refuse bad index values with a ValueError. Runs on CPU always, on CUDA with ``PM_OPS_CHECKS=1``."""


def define(
    name: str,
    signature: str,
    arguments: Callable[..., Arguments],
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

    _LIBRARY.define(name + signature, tags=_TAGS)
    check_memory = memory_check(getattr(torch.ops.pm_ops, name).default._schema)

    def run_fake(*args: Any, **kwargs: Any) -> Any:
        parsed = arguments(*args, **kwargs)
        parsed.check()
        return fake(parsed)

    def run_cpu(*args: Any, **kwargs: Any) -> Any:
        parsed = arguments(*args, **kwargs)
        parsed.check()
        check_memory(parsed)
        parsed.check_values()
        return without_autocast("cpu", cpu, parsed)

    launcher = kernel(cuda) if isinstance(cuda, str) else cuda

    def run_cuda(*args: Any, **kwargs: Any) -> Any:
        parsed = arguments(*args, **kwargs)
        parsed.check()
        check_memory(parsed)
        if CHECKS:
            parsed.check_values()
        return launcher(parsed)

    _LIBRARY.impl(name, run_cpu, "CPU")
    _LIBRARY.impl(name, run_cuda, "CUDA")
    torch.library.register_fake(f"pm_ops::{name}", run_fake, lib=_LIBRARY)


def without_autocast(device: str, run: Callable[[Any], Any], arguments: Any) -> Any:
    """Run plain torch in the dtypes that it names, also where the caller's autocast would have torch choose others."""
    if not torch.is_autocast_enabled(device):
        return run(arguments)
    with torch.autocast(device, enabled=False):
        return run(arguments)


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


# The checks. What can never be symbolic (dtype, rank, device) is a plain ``raise``; a condition on sizes goes through
# ``require``, under which a symbolic one becomes a guard or a run-time assert. Written for few calls: they are most of
# an eager call's host time.


def require(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise ValueError unless the condition holds."""
    if condition is not True:
        torch._check_value(condition, message)


def either(a: bool | torch.SymBool, b: bool | torch.SymBool) -> bool | torch.SymBool:
    """``a or b``, without a guard on either where they are symbolic."""
    if a is True or b is True:
        return True
    if a is False or b is False:
        return b if a is False else a
    from torch.fx.experimental.symbolic_shapes import sym_or

    return sym_or(a, b)


def require_no_grad(op: str, **tensors: Tensor | None) -> None:
    """Refuse inputs that need a gradient: these operators have no backward."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise RuntimeError(
                f"pm_ops::{op} has no backward, but {name} requires grad; call it under torch.no_grad() or "
                f"torch.inference_mode(), or pass {name}.detach()"
            )


def require_buffer(buffer: Tensor, name: str = "buffer") -> None:
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"{name} must be a 1-D contiguous uint8 tensor, got {describe(buffer)}; pass PagePool.buffer")


def memory_check(schema: torch.FunctionSchema) -> Callable[[Any], None]:
    """A check of where the tensors of a call lie, which fakes cannot make: they have no addresses.

    Raises ValueError where a buffer does not begin at a multiple of :data:`ALIGNMENT` bytes, which kernels load at
    once, and where an argument shares bytes with the one that is written: a kernel's programs read and write in any
    order.
    """
    tensors = [a for a in schema.arguments if a.type.isSubtypeOf(torch._C.OptionalType.ofTensor())]
    buffers = [a.name for a in tensors if a.name in ("buffer", "source", "target")]
    written = next((a.name for a in tensors if a.alias_info is not None and a.alias_info.is_write), None)
    read = [a.name for a in tensors if a.name != written]

    def check(arguments: Any) -> None:
        for name in buffers:
            if getattr(arguments, name).data_ptr() % ALIGNMENT:
                raise ValueError(
                    f"{name} begins {getattr(arguments, name).data_ptr() % ALIGNMENT} bytes behind a multiple of "
                    f"{ALIGNMENT}; pass PagePool.buffer, or a tensor with storage offset 0"
                )
        if written is None:
            return
        target = getattr(arguments, written)
        first = target.data_ptr()
        end = first + target.nbytes
        for name in read:
            tensor = getattr(arguments, name)
            if tensor is not None and (at := tensor.data_ptr()) < end and at + span(tensor) > first:
                raise ValueError(
                    f"{name} and {written} share memory, so that bytes could be written before they are read; pass "
                    f"{name}.clone()"
                )

    return check


def span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def require_indices(name: str, index: Tensor, device: torch.device, dim: int = 1) -> None:
    if index.dtype not in INDEX_DTYPES or index.dim() != dim:
        raise ValueError(f"{name} must be a {dim}-D int32 or int64 tensor, got {describe(index)}")
    require_device(name, index, device)


def require_query_start(query_start: Tensor, batch: int | torch.SymInt, device: torch.device) -> None:
    """Where each of ``batch`` sequences begins in rows one behind the other, and where the last one ends."""
    require_indices("query_start", query_start, device)
    starts = query_start.shape[0]
    require(
        starts == batch + 1,
        lambda: f"query_start has {starts} entries for {batch} sequences; it needs one more than those",
    )


def page_ids(pages: Tensor | Iterable[int], name: str = "pages", *, ordered: bool = True) -> list[int]:
    """Ids as a list, for the host. Raises ValueError for what is no list of integers: nothing is rounded.

    ``ordered``: it matters which comes first, so that a set is none either.
    """
    if isinstance(pages, Tensor):
        require_indices(name, pages, pages.device)
        return pages.tolist()
    try:
        ids = list(pages)
        if ordered and isinstance(pages, set | frozenset):
            raise TypeError
        if bool in map(type, ids):  # a mask would be pages 1 and 0
            raise TypeError
        return list(map(operator.index, ids))
    except TypeError:
        raise ValueError(f"{name} must be a list of integers or a 1-D tensor of them, got {pages!r:.100}") from None


def require_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the buffer on {device}; move it there")


def require_plane(
    name: str, nbytes: int, plane: Sequence[int], page_size: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    """A plane has five numbers, is aligned to its dtype, lies in the buffer, and its heads do not overlap.

    Its argument is ``{name}_plane``, or without a name ``plane``.
    """
    if dtype not in PLANE_DTYPES:
        supported = ", ".join(map(dtype_name, PLANE_DTYPES))
        raise ValueError(f"{name} dtype {dtype_name(dtype)} is not supported; use one of {supported}".lstrip())
    argument = f"{name}_plane" if name else "plane"
    if len(plane) != 5:
        names = "[offset, page_stride, token_stride, head_stride, num_pages]"
        raise ValueError(f"{argument} must be {names}, got {list(plane)}")
    offset, page_stride, token_stride, head_stride, num_pages = plane
    item = dtype.itemsize
    end = (
        offset + (num_pages - 1) * page_stride + (page_size - 1) * token_stride + (heads - 1) * head_stride + dim * item
    )
    rules = (
        offset % item == 0,
        page_stride % item == 0,
        token_stride % item == 0,
        head_stride % item == 0,
        offset >= 0,
        page_stride >= 0,
        token_stride >= 0,
        head_stride >= 0,
        either(page_stride > 0, num_pages == 1),
        either(token_stride > 0, page_size == 1),
        head_stride >= dim * item or heads == 1,
        num_pages >= 1,
        page_size >= 1,
        end <= nbytes,
    )
    for holds in rules:
        if holds is not True:
            torch._check_value(
                holds,
                lambda: (
                    f"{argument} {list(plane)} does not hold pages of {page_size} x {heads} heads x {dim} "
                    f"{dtype_name(dtype)} in a buffer of {nbytes} bytes: offset and strides must be multiples of "
                    f"{item}, none negative, and strides over several pages or tokens not 0 either; heads must not "
                    f"overlap; and the last element ends at byte {end}"
                ),
            )


def require_finite(**numbers: float) -> None:
    for name, number in numbers.items():
        if isinstance(number, float | int) and not math.isfinite(number):
            raise ValueError(f"{name}={number} must be a finite number")


def require_scale(
    name: str,
    scale: float,
    tensor: Tensor | None,
    plane: Sequence[int] | None,
    of: torch.dtype | None,
    device: torch.device,
) -> None:
    """The scale of a plane of dtype ``of``: a float, a tensor or a plane of scales, one of them.

    A float is positive and finite after rounding to fp32; a tensor is one fp32 element, its value trusted.
    """
    if plane is not None:
        if tensor is not None or scale != 1.0:
            raise ValueError(
                f"{name} and {name}_plane were both given: a layout with scales=True has a scale for each token and "
                f"head; leave {name} out"
            )
        if of not in LARGEST:
            supported, got = ", ".join(map(dtype_name, LARGEST)), dtype_name(of) if of else "no rows"
            raise ValueError(f"{name}_plane goes with a plane of {supported}; got {got}")
        return
    if of is None:
        if tensor is not None or scale != 1.0:
            raise ValueError(f"{name} was given without the rows that it scales; leave it out")
        return
    if of is torch.int8 and tensor is None and scale == 1.0:
        raise ValueError(
            f"int8 needs scales: pass {name} (a scale of 1 as a tensor), or use a layout with scales=True, which has "
            "one for each token and head"
        )
    if tensor is not None:
        if tensor.dtype != torch.float32 or tensor.numel() != 1:
            raise ValueError(f"{name}, as a tensor, must be one float32 element, got {describe(tensor)}")
        if scale != 1.0:
            raise ValueError(f"{name}={scale} and {name}_tensor were both given; pass one of them")
        require_device(f"{name}_tensor", tensor, device)
    elif scale != 1.0 and isinstance(scale, float | int):
        rounded = ctypes.c_float(scale).value
        if not (math.isfinite(rounded) and rounded > 0):
            raise ValueError(f"{name}={scale} is {rounded} in float32; a scale must be positive and finite")


def require_values(holds: Tensor, message: Callable[[], str]) -> None:
    """Every element is True. On CUDA a device assert, which shows at the next synchronisation."""
    if holds.device.type == "cpu":
        if not bool(holds.all()):
            raise ValueError(message())
    else:
        torch._assert_async(holds.all(), "pm_ops: an index is out of range or repeated (PM_OPS_CHECKS=1)")


def require_in_range(name: str, index: Tensor, limit: int, what: str) -> None:
    """Every index is below ``limit``; negative ones mean: skip."""
    last = min(limit - 1, torch.iinfo(index.dtype).max)  # torch compares in the dtype, in which more would wrap around
    require_values(index <= last, lambda: f"{name} has {int(index.max())}, but there are {limit} {what}")


def require_distinct(name: str, index: Tensor) -> None:
    """No index that will be written occurs twice: which row wins would be unspecified."""
    ordered = index.sort().values
    repeats = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    require_values(
        ~repeats, lambda: f"{name} names {int(ordered[1:][repeats][0])} twice; each may be written once a call"
    )


def require_scale_plane(name: str, nbytes: int, plane: Sequence[int] | None, page_size: int, heads: int) -> None:
    """A plane of scales, where there is one, is one of fp32 ``(heads, 1)`` in the buffer."""
    if plane is not None:
        require_plane(name, nbytes, plane, page_size, heads, 1, torch.float32)


def plane_view(
    buffer: Tensor, plane: Sequence[int], page_size: int, heads: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """A plane as a typed strided view ``[num_pages, page_size, heads, dim]``: the address formula, in torch."""
    offset, page_stride, token_stride, head_stride, num_pages = plane
    item = dtype.itemsize
    typed = buffer[: buffer.numel() // item * item].view(dtype)
    strides = (page_stride // item, token_stride // item, head_stride // item, 1)
    return typed.as_strided((num_pages, page_size, heads, dim), strides, (begin(buffer) + offset) // item)


def begin(buffer: Tensor) -> int:
    """Where a buffer begins in its storage. What Dynamo traces cannot ask; it sees pools' alone, which begin at 0.

    Not by ``is_compiling()``: that holds for all threads of a process while one of them compiles, also where operators
    run.
    """
    return 0 if torch.compiler.is_dynamo_compiling() else int(buffer.storage_offset())


def bits(x: Tensor) -> Tensor:
    """The same bytes as integers, so that indexing moves them unchanged (NaN payloads), fp8 too."""
    return x.view(_BITS[x.dtype.itemsize])


def describe(t: Tensor) -> str:
    return f"{dtype_name(t.dtype)} {list(t.shape)} on {t.device}"
