"""Runs the Gluon kernels on the CPU, in plain torch; Gluon itself has no interpreter.

A kernel's Python code is run as it stands, with the Gluon functions that it calls replaced by the ones below.
Partitions of `warp_specialize` are threads, mbarriers count arrivals and bytes and have phases, shared memory is one
run of elements that views address, and the products of warpgroups read their operands either when they are issued or
not before they are waited for, so that a place that is written too early, or read too late, shows. That no access to
shared memory is a race, however fast partitions are, `gluon_clocks.py` checks. What is not modelled: registers, and
fences between the ways to shared memory.
"""

from __future__ import annotations

import builtins
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernels.gluon_clocks import Accesses, Barrier, Barriers, Clocks, Partition
from torch import Tensor
from triton.experimental.gluon import language as gluon_language
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction


class Pointer:
    """An address of elements, or a tensor of them."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def of(cls, x: Tensor) -> Pointer:
        """The address of a tensor's first element, within all of its storage."""
        storage = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        return cls(storage, torch.tensor(x.storage_offset()))

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.memory, self.offset + elements)

    def at(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Where the elements are, those that are masked out at 0, and the mask."""
        offset = torch.as_tensor(self.offset)
        mask = torch.as_tensor(True if mask is None else mask)
        mask, offset = torch.broadcast_tensors(mask, offset)
        at = torch.where(mask, offset, 0)
        assert at.numel() == 0 or 0 <= int(at.min()) <= int(at.max()) < len(self.memory), "outside the memory"
        return at, mask


class Shared:
    """A view of shared memory: for each of its elements where it is in `memory`."""

    def __init__(self, memory: Tensor, accesses: Accesses, places: Tensor) -> None:
        self.memory, self.accesses, self.places, self.dtype = memory, accesses, places, memory.dtype

    def at(self, places: Tensor) -> Shared:
        return Shared(self.memory, self.accesses, places)

    def index(self, i: Any) -> Shared:
        return self.at(self.places[int(i)])

    def slice(self, start: int, length: int) -> Shared:
        return self.at(self.places[start : start + length])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return self.at(self.places.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: str) -> Shared:
        assert dtype == self.dtype
        return self.at(places_of(shape, layout))

    def load(self, layout: Any = None) -> Tensor:
        self.accesses.note(self.places, writes=False)
        return self.values()

    def store(self, x: Tensor, *agent: int) -> None:
        self.accesses.note(self.places, True, *agent)
        self.memory[self.places] = x.to(self.dtype).expand(self.places.shape)

    def values(self) -> Tensor:
        return self.memory[self.places]


def places_of(shape: list[int], layout: str) -> Tensor:
    """Tiles that tensor cores read lie in columns of 64 elements, one behind the other; all else row by row."""
    places = torch.arange(torch.Size(shape).numel()).view(shape)
    if layout != "tile":
        return places
    *outer, rows, columns = shape
    return places.view(*outer, columns // 64, rows, 64).transpose(-3, -2).reshape(shape)


class Pending:
    """A product that has been issued; `value` when it is done."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute, self.value = compute, None


class Machine:
    """Gluon's functions for one program.

    `late`: products read their operands when they are waited for. `without`: a file's name and a line, whose barrier
    orders nothing: partitions wait there, but for no accesses to shared memory.
    """

    def __init__(
        self, program: tuple[int, ...], grid: tuple[int, ...], late: bool, without: tuple[str, int] | None
    ) -> None:
        self.program, self.grid, self.late, self.without = program, grid, late, without
        self.issued = threading.local()
        self.clocks = Clocks()
        self.translated: dict[Any, Callable[..., Any]] = {}
        layouts = {
            name: (lambda *args, **options: "row")
            for name in ("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout")
        }
        dtypes = {name: getattr(torch, name) for name in ("int32", "int64", "float32")}
        self.gl = types.SimpleNamespace(
            **layouts,
            **dtypes,
            constexpr=lambda x: x,
            NVMMASharedLayout=lambda **options: "tile",
            SwizzledSharedLayout=lambda *args: "row",
            program_id=lambda axis: torch.tensor(program[axis]),
            num_programs=lambda axis: torch.tensor(grid[axis]),
            arange=lambda start, end, layout: torch.arange(start, end),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            static_range=builtins.range,
            convert_layout=lambda x, layout: x,
            where=lambda condition, a, b: torch.where(
                torch.as_tensor(condition), torch.as_tensor(a), torch.as_tensor(b)
            ),
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
            exp2=torch.exp2,
            log2=torch.log2,
            max=lambda x, axis: x.amax(axis),
            sum=lambda x, axis: x.sum(axis),
            load=self.load,
            store=self.store,
            thread_barrier=lambda: self.orders() and self.clocks.partition.meet(),
            allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
        )
        self.mbarrier = types.SimpleNamespace(
            MBarrierLayout=lambda: "barriers",
            init=lambda barrier, count: setattr(barrier, "count", count),
            arrive=lambda barrier: barrier.step(self.orders() and self.clocks.partition.one_threads(), 1),
            expect=lambda barrier, nbytes: barrier.step(self.clocks.partition.one_threads(), 1, nbytes),
            wait=lambda barrier, phase: barrier.wait(phase, self.orders()),
        )
        self.async_copy = types.SimpleNamespace(
            async_copy_global_to_shared=lambda box, address, mask: box.store(
                self.load(address, mask, 0.0), *self.clocks.partition.now
            ),
            mbarrier_arrive=lambda barrier, increment_count: barrier.step(
                self.orders() and self.clocks.partition.every_threads(), 128
            ),
        )
        self.tma = types.SimpleNamespace(async_copy_global_to_shared=self.fetch_box)
        self.replaced = {
            "gl": self.gl,
            "mbarrier": self.mbarrier,
            "tma": self.tma,
            "async_copy": self.async_copy,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self.mma,
            "warpgroup_mma_wait": self.mma_wait,
            "range": self.range,
        }

    def orders(self) -> bool:
        """Whether the barrier that the kernel calls is one that orders accesses."""
        caller = sys._getframe(2)
        return (os.path.basename(caller.f_code.co_filename), caller.f_lineno) != self.without

    @staticmethod
    def range(*bounds: Any) -> Iterator[Tensor]:
        """Numbers at run time are tensors, as all that the kernel computes."""
        return map(torch.tensor, builtins.range(*map(int, bounds)))

    @staticmethod
    def load(address: Pointer, mask: Any = None, other: float = 0) -> Tensor:
        at, mask = address.at(mask)
        return torch.where(mask, address.memory[at], torch.as_tensor(other, dtype=address.memory.dtype))

    @staticmethod
    def store(address: Pointer, value: Tensor, mask: Any = None) -> None:
        at, mask = address.at(mask)
        address.memory[at[mask]] = value.to(address.memory.dtype).expand(at.shape)[mask]

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            barriers = Barriers(Barrier(self.clocks) for _ in builtins.range(shape[0] if len(shape) > 1 else 1))
            return barriers if len(shape) > 1 else barriers[0]
        memory = torch.full((torch.Size(shape).numel(),), torch.nan, dtype=dtype)
        return Shared(memory, Accesses(self.clocks, len(memory)), places_of(shape, layout))

    def fetch_box(self, plane: TensorDescriptor, at: list[Any], barrier: Barrier, box: Shared) -> None:
        """What lies outside the plane is 0."""
        x = torch.zeros(box.places.shape, dtype=box.dtype)
        ranges = [slice(int(a), int(a) + n) for a, n in zip(at, plane.block_shape, strict=True)]
        inside = plane.base[tuple(ranges)]
        x[tuple(slice(n) for n in inside.shape)] = inside
        box.store(x, barrier.agent, barrier.phase)
        barrier.step(self.clocks.partition.one_threads(), nbytes=-x.numel() * x.itemsize)

    def mma(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Pending:
        assert is_async
        agent = self.clocks.issue()
        for operand in (a, b):
            if isinstance(operand, Shared):
                operand.accesses.note(operand.places, False, *agent)

        def compute() -> Tensor:
            left, before = (a.values() if isinstance(a, Shared) else a), acc.value if isinstance(acc, Pending) else acc
            product = left.float() @ b.values().float()
            return product + before if use_acc else product

        result = Pending(compute)
        queue = self.issued.__dict__.setdefault("queue", [])
        queue.append(result)
        if not self.late:
            result.value = compute()
        return result

    def mma_wait(self, number: int, deps: tuple[Any, ...]) -> Any:
        queue = self.issued.__dict__.setdefault("queue", [])
        while len(queue) > number:
            done = queue.pop(0)
            if done.value is None:
                done.value = done.compute()
        self.clocks.finish(len(queue))
        values = tuple(x.value if isinstance(x, Pending) else x for x in deps)
        assert all(value is not None for value in values), "used before it is done"
        return values if len(values) > 1 else values[0]

    def warp_specialize(self, parts: list[Any], num_warps: list[int], registers: list[int]) -> None:
        failures = self.clocks.stopped
        partitions = self.clocks.split(len(parts))

        def run(partition: Partition, function: Any, args: Any) -> None:
            self.clocks.here.partition = partition
            try:
                function(*args)
            except BaseException as error:
                with Barrier.changed:
                    failures.append(error)
                    Barrier.changed.notify_all()

        threads = [threading.Thread(target=run, args=(p, *part)) for p, part in zip(partitions, parts, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        self.clocks.join(partitions)

    def translate(self, function: Any) -> Callable[..., Any]:
        """A kernel's code with other globals."""
        if function not in self.translated:
            code = function.fn
            names: dict[str, Any] = {}
            self.translated[function] = types.FunctionType(code.__code__, names, code.__name__, code.__defaults__)
            for name, value in code.__globals__.items():
                if name in self.replaced:
                    value = self.replaced[name]
                elif isinstance(value, JITFunction):
                    value = self.translate(value)
                elif isinstance(value, gluon_language.constexpr):
                    value = value.value
                names[name] = value
            names["range"] = self.range
        return self.translated[function]


def at_run_time(x: Any) -> Any:
    """An argument as the kernel gets it: an address for a tensor, a tensor for an integer."""
    if isinstance(x, tuple):
        return tuple(map(at_run_time, x))
    return Pointer.of(x) if isinstance(x, Tensor) else torch.tensor(x) if isinstance(x, int) else x


class Kernel:
    """Stands in for a jit function: `kernel[grid](...)`, one program after the other."""

    def __init__(self, function: Any, late: bool, without: tuple[str, int] | None = None) -> None:
        self.function, self.late, self.without = function, late, without

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        grid = (*grid, 1, 1)[:3]

        def launch(*args: Any, num_warps: int, **options: Any) -> None:
            args = tuple(map(at_run_time, args))
            for program in itertools.product(*map(builtins.range, grid)):
                Machine(program, grid, self.late, self.without).translate(self.function)(*args, **options)

        return launch
