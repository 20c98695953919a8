"""Launches that do not bind and specialise every argument in Python again, which is most of an eager call's time.

``kernel[grid](...)`` looks the compiled variant of a kernel up, at each call, by what every argument is specialised on.
A :class:`Launch` holds the arguments that follow from a call's shapes, is kept for the next call of these shapes, and
looks at the others alone. Its keys are never coarser than Triton's: lists of arguments that Triton specialises
differently have different keys. Triton compiles each variant and runs it the first times; after that the variant's own
launcher gets the addresses of tensors, unless a profiler has set hooks, which Triton calls.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

REMEMBERS = (
    torch.version.hip is None  # there pointers are specialised on their tensor's size, too
    and hasattr(CompiledKernel, "__getitem__")
    and hasattr(knobs.runtime, "debug")
    and hasattr(knobs.runtime, "add_stages_inspection_hook")
    and hasattr(knobs.compilation, "instrumentation_mode")
)
"""Whether this triton's variants can be remembered. If not, every launch is ``kernel[grid](...)``: the same, slower."""

DIRECT = triton.__version__.startswith("3.6.")
"""Whether a variant's launcher takes what :class:`Launch` gives it. Else ``variant[grid](...)``: 1.3 times as long."""

_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)`` on the device of the first argument; see :class:`Launch`."""
    Launch(kernel, grid, **options)(*args)


class Launch:
    """``kernel[grid](*args, *numbers, **options)``, to be called with ``args``.

    Args:
        kernel: a ``triton.jit`` function whose globals do not change; its constexprs are its last parameters.
        grid: one to three numbers of programs.
        numbers: the last of the other arguments: ints, floats, bools, tuples of these, and None.
        options: all constexprs, hashable, and the compiler's options (``num_warps``, ...).
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], numbers: tuple[Any, ...] = (), **options: Any) -> None:
        self.kernel, self.numbers, self.options = kernel, numbers, options
        self.grid = (*grid, 1, 1)[:3]
        self._last = (*numbers, *(options[name] for name in kernel.arg_names if name in options))
        self._variants: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(self, *args: Any) -> None:
        """Launch on the device of the first argument, a tensor; the others are tensors or as ``numbers``."""
        device = args[0].device
        if device.type != "cuda":
            self.through_triton(args)  # the interpreter
        elif device.index == torch.cuda.current_device():
            self.on_current_device(device.index, args)
        else:
            with torch.cuda.device(device):
                self.on_current_device(device.index, args)

    def on_current_device(self, device: int, args: tuple[Any, ...]) -> None:
        """Launch on the current CUDA device, whose index is given."""
        runtime, kernel = knobs.runtime, self.kernel
        hooked = type(kernel) is not JITFunction or kernel.pre_run_hooks or runtime.add_stages_inspection_hook
        if hooked or not REMEMBERS:
            self.through_triton(args)
            return
        special, values = specialised(args)
        key = (device, runtime.debug, knobs.compilation.instrumentation_mode, *special)
        variant = self._variants.get(key)
        if variant is None:
            whole = (kernel.fn, *key, *specialised(self.numbers)[0], *self.options, *self.options.values())
            variant = _compiled.get(whole)
            if variant is None:
                variant = self.through_triton(args)
                if isinstance(variant, CompiledKernel):  # not where a hook took the compilation over
                    _compiled[whole] = variant
                return
            self._variants[key] = variant
        if not DIRECT or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            variant[self.grid](*args, *self._last)
            return
        stream, of_hooks = driver.active.get_current_stream(device), (None, None, None)  # metadata, and two hooks
        variant.run(*self.grid, stream, variant.function, variant.packed_metadata, *of_hooks, *values, *self._last)

    def through_triton(self, args: tuple[Any, ...]) -> Any:
        """Launch in Triton's own way; returns what that returns, the compiled kernel."""
        return self.kernel[self.grid](*args, *self.numbers, **self.options)


def specialised(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """All of the arguments that Triton may specialise a kernel on, and little more; and the arguments as it gets them.

    The first are a tensor's dtype and whether its address is a multiple of 16; what :func:`_kind` tells of an int; of
    floats and bools the type alone; and which arguments are None. The second are addresses in place of tensors.
    """
    key: list[Any] = []
    values: list[Any] = []
    for x in args:
        of = type(x)
        if x is None:
            key.append(None)
        elif of is int:
            key.append(_kind(x))
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            key += (x.dtype, address % 16 == 0)
            x = address
        elif of is tuple:
            inner, x = specialised(x)
            key.append(inner)
        elif of is float or of is bool:
            key.append(of)
        else:
            raise TypeError(f"an argument is a {of.__name__}; a launch takes tensors, numbers, tuples of them and None")
        values.append(x)
    return tuple(key), tuple(values)


@functools.lru_cache(1 << 16)
def _kind(x: int) -> tuple[int, bool, bool]:
    """The words that an int needs (0: 32 bits, 1: 64, 2: 64 unsigned), whether it is 1, and a multiple of 16."""
    return (x if x >= 0 else ~x).bit_length() // 32, x == 1, x % 16 == 0
