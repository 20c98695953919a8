"""Launches that remember compiled variants: never one that Triton would have compiled for other arguments.

What Triton specialises on is asked of Triton itself, as in test_compile.py. A compiled kernel is a stand-in that notes
what it is run with: compiling needs no GPU, loading does; test_cuda.py launches real ones.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import JITFunction
from triton.runtime.jit import create_function_from_signature

from pm_ops.kernels import launch as module
from pm_ops.kernels.launch import Launch, specialised


def _kernel(x, y, n, rows: tl.int64, scale, pair, fixed, limit: tl.int32, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    pass


def _other(x, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    pass


KERNEL = JITFunction(_kernel, do_not_specialize=["fixed", "limit"])  # also where triton.jit means the interpreter
INTS = (0, 1, 2, 3, 16, 17, 32, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**62, 2**63 - 16, 2**63)


class Compiled(CompiledKernel):
    """Notes its launches."""

    function, packed_metadata = "the function", "its metadata"

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((self, grid, *args))

    def run(self, x: int, y: int, z: int, *args: Any) -> None:  # type: ignore[override]
        assert args[1:6] == ("the function", "its metadata", None, None, None)
        self.launches.append((self, (x, y, z), *args[6:]))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Of a Triton that compiles at every launch of its own: (variant, grid, arguments) of each launch of a variant."""
    launches: list[tuple[Any, ...]] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        variant = Compiled(launches)
        variant[grid](*args, *(options[name] for name in ("DTYPE", "SIZE")))
        return variant

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(module, "_compiled", {})
    active = SimpleNamespace(get_current_stream=lambda device: f"the stream of {device}")
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=active))
    return launches


def launch(*args: Any, numbers: tuple[Any, ...] = (), device: int = 0, kernel: Any = KERNEL, **options: Any) -> None:
    options = {"DTYPE": tl.float16, "SIZE": 4, "num_warps": 4} | options
    Launch(kernel, (7,), numbers, **options).on_current_device(device, args)


def variants(launches: list[tuple[Any, ...]]) -> list[int]:
    """Which variant each launch ran, numbered in the order in which they came."""
    seen: list[Any] = []
    return [seen.index(v) if v in seen else (seen.append(v), len(seen) - 1)[1] for v, *_ in launches]


def aligned(dtype: torch.dtype, offset: int = 0) -> Tensor:
    x = torch.empty(64, dtype=dtype)
    assert x.data_ptr() % 16 == 0
    return x[offset:]


def arguments(choose: random.Random) -> tuple[Any, ...]:
    """Of every kind that a launch takes, in every position that Triton treats in its own way."""
    tensors = [aligned(dtype, offset) for dtype in (torch.float16, torch.uint8, torch.int32) for offset in (0, 1, 16)]
    pairs = [None, (1, 16), (16, 1), (2**31, 3), (16, None), (tensors[0], 5), (tensors[1], 5)]
    return (
        choose.choice(tensors),
        choose.choice([None, *tensors]),
        choose.choice([*INTS, None, True, 2.0]),
        choose.choice(INTS[:-1]),
        choose.choice([1, 1.0, 0.5, True, False, tensors[3]]),
        choose.choice(pairs),
        choose.choice(INTS),
        choose.choice(INTS[:9]),
    )


def test_arguments_that_triton_specialises_differently_have_different_keys():
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(KERNEL.signature, KERNEL.params, backend)
    choose, of_triton = random.Random(0), {}
    drawn = [arguments(choose) for _ in range(5000)]
    drawn += [  # and lists that differ in one place
        (*args[:i], other[i], *args[i + 1 :])
        for args, other in zip(drawn, reversed(drawn), strict=True)
        for i in range(8)
    ]
    for args in drawn:
        _, key, _ = bind(*args, DTYPE=tl.float16, SIZE=4)
        assert of_triton.setdefault(specialised(args)[0], key) == key, args
    assert len({str(x) for x in of_triton.values()}) > 1000  # or nothing was tried


def test_keys_tell_no_more_of_numbers_than_triton_does():
    """Else every new length would be a variant to look up in Triton's way."""
    assert specialised((5, 0.25, (48, 7)))[0] == specialised((123, 0.5, (16, 9)))[0]
    assert specialised((aligned(torch.int8),))[0] == specialised((aligned(torch.int8, 32),))[0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((aligned(torch.float16),), (aligned(torch.float16, 1),)),
        ((aligned(torch.float16),), (aligned(torch.bfloat16),)),
        ((aligned(torch.float16), None), (aligned(torch.float16), aligned(torch.float16))),
        ((aligned(torch.float16), None, 7), (aligned(torch.float16), 7, None)),
        ((aligned(torch.float16), 16), (aligned(torch.float16), 8)),
        ((aligned(torch.float16), 1), (aligned(torch.float16), 2)),
        ((aligned(torch.float16), (16, 8)), (aligned(torch.float16), (8, 16))),
    ],
)
def test_a_variant_runs_for_its_own_arguments_alone(compiled, first, second):
    for args in (first, second, first, second, second):
        launch(*args)
    assert variants(compiled) == [0, 1, 0, 1, 1]
    addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in second)
    assert compiled[-1][2 : 2 + len(second)] == addresses  # which spares Triton to ask for them, and whose they are


@pytest.mark.parametrize(
    "other",
    [
        {"DTYPE": tl.float32},
        {"SIZE": 8},
        {"num_warps": 8},
        {"num_stages": 2},
        {"device": 1},
        {"numbers": (16,)},
        {"kernel": JITFunction(_other)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_constants_options_numbers_device_and_kernel_tell_variants_apart(compiled, other):
    x = aligned(torch.float16)
    for options in ({}, other, {}, other):
        launch(x, **options)
    assert variants(compiled) == [0, 1, 0, 1]


def test_a_variant_gets_the_arguments_and_constants_in_the_kernels_order(compiled):
    first, second = aligned(torch.float16), aligned(torch.float16, 8)
    kept = Launch(KERNEL, (7, 2), (16, 3), SIZE=4, num_warps=2, DTYPE=tl.float16)
    for x in (first, second, first):
        kept.on_current_device(0, (x, None))
    assert variants(compiled) == [0, 0, 0]
    assert compiled[0][2] is first  # which Triton compiled the variant for
    for (_, grid, *args), x in zip(compiled[1:], (second, first), strict=True):
        assert grid == (7, 2, 1)
        assert args == [x.data_ptr(), None, 16, 3, tl.float16, 4]


def test_tensors_in_tuples_are_addresses_too():
    x = aligned(torch.float16)
    assert specialised((x, (x, None, (3, x)), 0.5))[1] == (x.data_ptr(), (x.data_ptr(), None, (3, x.data_ptr())), 0.5)


def test_launches_of_like_numbers_share_a_variant(compiled):
    for numbers in ((48, 5), (16, 7), (48, 5)):
        launch(aligned(torch.float16), numbers=numbers)
    assert variants(compiled) == [0, 0, 0]
    assert [args[3:5] for args in compiled] == [(48, 5), (16, 7), (48, 5)]


def test_debugging_and_instrumentation_have_variants_of_their_own(compiled, monkeypatch):
    x = aligned(torch.float16)
    launch(x)
    monkeypatch.setattr(knobs.runtime, "debug", not knobs.runtime.debug)
    launch(x)
    monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "consan")
    launch(x)
    assert variants(compiled) == [0, 1, 2]


def test_hooks_that_triton_calls_at_each_launch_keep_launches_on_its_path(compiled, monkeypatch):
    x = aligned(torch.float16)
    monkeypatch.setattr(KERNEL, "pre_run_hooks", [lambda *args, **options: None])
    launch(x)
    launch(x)
    monkeypatch.setattr(KERNEL, "pre_run_hooks", [])
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *args: ("", ""))
    launch(x)
    assert variants(compiled) == [0, 1, 2]


@pytest.mark.parametrize("reason", ["launch_enter_hook", "launch_exit_hook", "another triton"])
def test_with_a_profilers_hooks_and_elsewhere_than_in_triton_3_6_a_variant_is_launched_by_its_grid(
    compiled, monkeypatch, reason
):
    x = aligned(torch.float16)
    monkeypatch.setattr(Compiled, "run", None)
    if reason == "another triton":
        monkeypatch.setattr(module, "DIRECT", False)
    else:
        monkeypatch.setattr(getattr(knobs.runtime, reason), "calls", [print])
    launch(x)
    launch(x)
    assert variants(compiled) == [0, 0]
    assert compiled[1][2] is x


def test_another_triton_launches_in_its_own_way(compiled, monkeypatch):
    monkeypatch.setattr(module, "REMEMBERS", False)
    launch(aligned(torch.float16))
    launch(aligned(torch.float16))
    assert variants(compiled) == [0, 1]


def test_what_no_kernel_takes_is_refused_before_the_launch(compiled):
    with pytest.raises(TypeError, match="an argument is a str"):
        launch(aligned(torch.float16), "16")
    assert not compiled


def test_cpu_tensors_go_to_the_interpreter():
    @triton.jit
    def double(x, out, n, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

    if isinstance(double, JITFunction):
        pytest.skip("kernels are compiled where there is a GPU")
    x, out = torch.arange(5), torch.zeros(5, dtype=torch.int64)
    module.launch(double, (1,), x, out, 5, BLOCK=8, num_warps=1)
    assert out.tolist() == [0, 2, 4, 6, 8]


@triton.jit
def _copy(x, out, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@pytest.mark.gpu
def test_on_a_gpu_rows_at_other_addresses_run_other_variants():
    data = torch.randn(3, 256, device="cuda").half()
    before = len(module._compiled)
    kept = Launch(_copy, (1,), SIZE=256, num_warps=1)
    for n in (64, 63, 1):
        for offset in (0, 1, 8, 3, 0, 1):
            out = torch.full((256,), torch.nan, device="cuda").half()
            kept(data[1, offset:], out, n)
            assert torch.equal(out[:n], data[1, offset : offset + n])
            assert out[n:].isnan().all()
    assert len(module._compiled) == before + 6  # rows at a multiple of 16 bytes or not, and 64, 63 or 1 elements


@pytest.mark.gpu
def test_on_a_gpu_a_profilers_hooks_see_every_launch():
    seen = []
    x, out = torch.ones(2, 64, device="cuda")
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        for _ in range(3):
            module.launch(_copy, (1,), x, out, 64, SIZE=64, num_warps=1)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert [metadata.get()["name"] for metadata in seen] == ["_copy"] * 3


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_is_on_the_device_of_its_tensors():
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        x, out = torch.arange(8, device=device), torch.zeros(8, dtype=torch.int64, device=device)
        module.launch(_copy, (1,), x, out, 8, SIZE=8, num_warps=1)
        torch.cuda.synchronize(device)
        assert torch.equal(x, out)
        assert torch.cuda.current_device() == 0
