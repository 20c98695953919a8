"""Launching a kernel without specialising it anew: most of the host's time of an eager call, otherwise.

``kernel[grid](...)`` binds every argument and looks its compiled variant up by what it is specialised on, in Python, at
each call. Here that variant is remembered by a key which is cheaper to make and never coarser: two lists of arguments
that Triton specialises differently have different keys. Triton itself compiles a variant, at its first launch, and
launches it after that (``CompiledKernel.__getitem__``), with the hooks that a profiler may have set.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

_REMEMBERS = (
    torch.version.hip is None  # there pointers are specialised on their tensor's size, too
    and hasattr(CompiledKernel, "__getitem__")
    and hasattr(knobs.runtime, "debug")
    and hasattr(knobs.compilation, "instrumentation_mode")
)
"""Whether this triton is one whose variants can be remembered; with others every launch is ``kernel[grid](...)``."""

_variants: dict[tuple[Any, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)`` on the device of the first argument, a tensor.

    Args:
        kernel: a ``triton.jit`` function whose globals do not change.
        grid: one to three numbers of programs.
        args: tensors, ints, floats, bools, tuples of these, and None.
        options: all of the kernel's constexprs, hashable, and the compiler's options (``num_warps``, ...).
    """
    device = args[0].device
    if device.type != "cuda":
        kernel[grid](*args, **options)  # the interpreter
    elif device.index == torch.cuda.current_device():
        launch_on(device.index, kernel, grid, args, options)
    else:
        with torch.cuda.device(device):
            launch_on(device.index, kernel, grid, args, options)


def launch_on(device: int, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Launch on the current CUDA device, whose index is given."""
    if not _REMEMBERS or type(kernel) is not JITFunction or kernel.pre_run_hooks:
        kernel[grid](*args, **options)
        return
    compiled_for = (kernel.fn, device, knobs.runtime.debug, knobs.compilation.instrumentation_mode)
    key = (*compiled_for, *options, *options.values(), *specialisation(args))
    variant = _variants.get(key)
    if variant is None:
        compiled = kernel[grid](*args, **options)
        if isinstance(compiled, CompiledKernel):  # not where a hook took the compilation over
            constants = tuple(options[name] for name in kernel.arg_names[len(args) :])
            _variants[key] = compiled, constants
    else:
        compiled, constants = variant
        compiled[(*grid, 1, 1)[:3]](*args, *constants)


def specialisation(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All of the arguments that Triton may specialise a kernel on, and little more.

    That are a tensor's dtype and whether its address is a multiple of 16; what :func:`_kind` tells of an int; of floats
    and bools the type alone; and which arguments are None.
    """
    key: list[Any] = []
    for x in args:
        of = type(x)
        if of is int:
            key.append(_kind(x))
        elif x is None:
            key.append(None)
        elif isinstance(x, Tensor):
            key += (x.dtype, x.data_ptr() % 16 == 0)
        elif of is tuple:
            key.append(specialisation(x))
        elif of is float or of is bool:
            key.append(of)
        else:
            raise TypeError(f"a kernel's argument is a {of.__name__}; launch takes tensors, numbers, tuples and None")
    return tuple(key)


@functools.lru_cache(1 << 16)
def _kind(x: int) -> tuple[int, bool, bool]:
    """The words that an int needs (0: 32 bits, 1: 64, 2: 64 unsigned), whether it is 1, and a multiple of 16."""
    return (x if x >= 0 else ~x).bit_length() // 32, x == 1, x % 16 == 0
