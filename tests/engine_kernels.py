"""Triton kernels of vLLM and SGLang in the interpreter: their files out of the wheels, as the benchmark imports them.

The interpreter differs from the compiler in five ways that these files meet, and that are made up for: there is no
device to ask for its properties, and none to tune on; a launch's grid gets the very arguments that the kernel is called
with; a name of `triton.language` that a module imports alone is not the interpreter's; and a loop's number is an int.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import peers
from pm_ops.bench.loading import import_module

Load = Callable[[str], ModuleType]
ENGINES = {"vllm": peers.VLLM, "sglang": peers.SGLANG_KERNELS}


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Imports a module of an engine by its full name; nothing of either engine is left after the test's module."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(peers.fetched(peers.EINOPS)))
        _stand_in_for_a_device(patch)
        pdl = "sglang.kernels.jit.utils"
        patch.setitem(sys.modules, pdl, peers.stub(pdl, is_arch_support_pdl=lambda: False))

        def load(name: str) -> ModuleType:
            module = import_module(peers.fetched(ENGINES[name.partition(".")[0]]), name)
            for other in set(sys.modules) - before:
                if other.partition(".")[0] in ENGINES:
                    _adapt(sys.modules[other])
            return module

        yield load
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ENGINES:
            del sys.modules[name]


def _stand_in_for_a_device(patch: pytest.MonkeyPatch) -> None:
    from triton.runtime import Autotuner
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def run(self: Autotuner, *args: Any, **options: Any) -> Any:
        return self.fn.run(*args, **options, **self.configs[0].all_kwargs())

    def launch_on_a_copy(self: GridExecutor, *args: Any, **options: Any) -> None:
        grid = self.grid
        if callable(grid):
            self.grid = lambda arguments: grid(dict(arguments))
        launch(self, *args, **options)

    patch.setattr(Autotuner, "run", run)
    patch.setattr(GridExecutor, "__call__", launch_on_a_copy)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    patch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=2, name="none")
    )
    patch.setattr(torch.cpu, "device", lambda index: nullcontext(), raising=False)


class _Number(int):
    """A loop's, which kernels may cast."""

    def to(self, dtype: Any) -> _Number:
        return self


def _adapt(module: ModuleType) -> None:
    import triton.language as tl

    for name, value in list(vars(module).items()):
        if callable(value) and tl.core.is_builtin(value):
            setattr(module, name, lambda *args, of=value.__name__, **options: getattr(tl, of)(*args, **options))
    vars(module)["range"] = lambda *bounds: map(_Number, range(*bounds))
