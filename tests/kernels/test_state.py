"""The kernels over states against float64, and against every other byte of the buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.cases import on, on_each_device
from state_cases import (
    BF16,
    F16,
    F32,
    Call,
    conv_prefill,
    conv_update,
    copied,
    owned_bytes,
    reference,
    ssm_prefill,
    ssm_update,
    states_of,
)
from torch import Tensor

import pm_ops
from pm_ops.kernels import conv
from pm_ops.kernels.common import near as near_rows
from pm_ops.kernels.conv import conv1d_prefill, conv1d_update
from pm_ops.kernels.selective_scan import selective_scan_prefill
from pm_ops.kernels.selective_update import selective_state_update
from pm_ops.ops.conv import Conv1dPrefill, Conv1dUpdate
from pm_ops.ops.selective import SelectiveScanPrefill, SelectiveStateUpdate
from pm_ops.testing import writes_only

TOLERANCE = {F32: 2e-5, F16: 4e-3, BF16: 2e-2}
"""Of out and state, relative to the largest number; five times as much of a scan, whose decays are differences."""
IN_THE_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU"
)


def run(a: Call) -> Tensor:
    if isinstance(a, Conv1dUpdate):
        return conv1d_update(a)
    if isinstance(a, Conv1dPrefill):
        return conv1d_prefill(a)
    return selective_state_update(a) if isinstance(a, SelectiveStateUpdate) else selective_scan_prefill(a)


def check(case: Call, device: str) -> None:
    """Output and states are right, skipped rows are zeros, and no other byte has changed."""
    case.check()
    case.check_values()
    out, states = reference(case)
    a = on(copied(case), device)
    with writes_only(a.buffer, owned_bytes(case, list(states))):
        got = run(a)
    assert got.is_contiguous() and got.dtype == case.x.dtype and got.shape == case.x.shape
    factor = 5 if isinstance(case, SelectiveScanPrefill) else 1
    assert near(got.cpu(), out, case.x.dtype, case.x.dtype, factor)
    assert bool((got.cpu()[out == 0] == 0).all())
    found = states_of(replace(a, buffer=a.buffer.cpu()))
    for page, state in states.items():
        assert near(found[page], state, case.state_dtype, case.x.dtype, factor), page


def near(got: Tensor, right: Tensor, stored: torch.dtype, computed: torch.dtype, factor: int) -> bool:
    scale = max(float(right.abs().max()), 1.0) if right.numel() else 1.0
    allowed = max(TOLERANCE[stored], TOLERANCE[computed]) * scale * factor
    return bool(((got.double() - right).abs() <= allowed).all())


@on_each_device
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"bias": False, "silu": False, "index_dtype": torch.int64}])
def test_conv_update(width: int, options: dict[str, Any], device: str) -> None:
    check(conv_update(3, width=width, **options), device)
    check(conv_update(3, 5, width=width, **options), device)
    check(conv_update(3, 4, width=width, per_token=True, **options), device)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each launch of conv1d_update, whether it is in words of 16 bytes."""
    launch, found = conv._update_launch.__wrapped__, []

    def told(*args: Any) -> Any:
        made = launch(*args)
        found.append(made.options["WORDS"])
        return made

    monkeypatch.setattr(conv, "_update_launch", told)
    return found


HALVES = {"dtype": F16, "state_dtype": F16, "dim": 24}


@on_each_device
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"dim": 8, "bias": False, "silu": False}, {"dim": 1032}])
def test_conv_update_in_words(width: int, options: dict[str, Any], device: str, words: list[bool]) -> None:
    """Of eight channels each, which may be fewer or more than a block; bit for bit what element by element gives."""
    for tokens, per_token in ((None, False), (3, True)):
        case = conv_update(3, tokens, width=width, per_token=per_token, **HALVES | options)
        check(case, device)
        one, other = (on(copied(case), device) for _ in range(2))
        other.weight = torch.cat((other.weight, other.weight), 1)[:, :width]  # rows with gaps
        assert torch.equal(run(one), run(other)) and torch.equal(one.buffer, other.buffer)
    assert words == [True, True, False] * 2


@on_each_device
def test_conv_update_in_words_of_bf16(device: str, words: list[bool]) -> None:
    case = conv_update(3, 2, dtype=F32, state_dtype=BF16, dim=24)
    check(replace(case, weight=case.weight.to(BF16)), device)
    assert words == [True]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2, 3, 4])
def test_conv_update_of_many_channels_on_a_gpu(width: int) -> None:
    for dim in (1032, 10240):
        options = dict(dim=dim, width=width, dtype=BF16, state_dtype=BF16)
        check(conv_update(5, **options), "cuda")
        check(conv_update(3, 3, per_token=True, **options), "cuda")


@IN_THE_INTERPRETER
def test_where_states_and_filters_are_no_words_conv_update_is_element_by_element(words: list[bool]) -> None:
    whole = conv_update(3, **HALVES)
    plane = [whole.state_plane[0] - 8, *whole.state_plane[1:]]
    others = [
        replace(whole, buffer=whole.buffer[8:], state_plane=plane),
        replace(whole, buffer=whole.buffer[8:].clone(), state_plane=plane),
        replace(whole, weight=torch.empty(24 * 4 + 1, dtype=F16)[1:].view(24, 4).copy_(whole.weight)),
        replace(whole, weight=whole.weight.float()),
        conv_update(3, **HALVES | {"dim": 20}),
        conv_update(3, **HALVES | {"state_dtype": F32}),
    ]
    # gaps between channels; pages that begin elsewhere than at multiples of 16 bytes
    for plane in ([16, 208, 0, 8, 5], [16, 152, 0, 6, 5], [16, 146, 0, 6, 5]):
        others.append(replace(whole, buffer=whole.buffer.clone(), state_plane=plane))
        states_of(others[-1]).copy_(states_of(whole))
    for case in (whole, *others):
        check(case, "cpu")
    assert words == [True, *[False] * len(others)]


@on_each_device
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("options", [{}, {"bias": False, "silu": False, "initial": False, "index_dtype": torch.int64}])
def test_conv_prefill(width: int, options: dict[str, Any], device: str) -> None:
    check(conv_prefill([1, 3, 2, 0, 33, 65, 31], width=width, **options), device)


@on_each_device
@pytest.mark.parametrize("options", [{}, {"gate": False, "index_dtype": torch.int64, "dt_max": None, "dt_min": 0.0}])
def test_selective_update(options: dict[str, Any], device: str) -> None:
    check(ssm_update(3, **options), device)
    check(ssm_update(2, 3, **options), device)
    check(ssm_update(3, 3, per_token=True, **options), device)


@on_each_device
@pytest.mark.parametrize("options", [{}, {"gate": False, "initial": False, "index_dtype": torch.int64}])
def test_selective_prefill(options: dict[str, Any], device: str) -> None:
    check(ssm_prefill([1, 7, 64, 0, 65, 63], heads=(2, 1), **options), device)
    check(ssm_prefill([130], dims=(70, 9), heads=(2, 2), **options), device)


@on_each_device
def test_chunks_of_long_sequences(device: str) -> None:
    check(conv_prefill([1025, 1026], dim=3, bias=False, silu=False), device)
    check(ssm_prefill([1025], heads=(1, 1), dims=(3, 5), gate=False), device)


@on_each_device
def test_infinite_steps_are_limited_as_on_the_cpu(device: str) -> None:
    for case in (ssm_update(2), ssm_prefill([40])):
        case.dt[0, 0], case.dt[1, 1] = -torch.inf, torch.inf
        check(case, device)


def test_rows_too_far_apart_for_32_bits_within_a_chunk_are_copied() -> None:
    for stride, copied_ in ((1 << 24, False), (1 << 26, True)):
        for shape in ((2, 1, 3), (2, 3)):
            rows = torch.empty_strided(shape, (stride, *((3, 1)[-len(shape) + 1 :])), device="meta")
            assert (near_rows(rows, 64) is not rows) == copied_ == near_rows(rows, 64).is_contiguous()


@IN_THE_INTERPRETER
def test_strides_past_32_bits() -> None:
    """Of the rows of a chunk, and of an update's elements and tokens. Of 4 GiB, memory is taken for a few pages."""
    chunk = ssm_prefill([17], skip=False, padding=0, heads=(1, 1), dtype=F16, gate=False)
    check(replace(chunk, x=spaced(chunk.x, (1 << 27, 12, 1))), "cpu")
    update = ssm_update(1, 3, heads=(1, 1), dims=(5, 3), dtype=F16, gate=False)
    check(replace(update, x=spaced(update.x, (1, 1, 1, 1 << 29))), "cpu")
    check(replace(update, dt=spaced(update.dt, (1, 1 << 30, 1))), "cpu")


def spaced(rows: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(rows.shape, strides, dtype=rows.dtype).copy_(rows)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("page", [82, 83, 84])
def test_states_beyond_the_2_31st_element(page: int) -> None:
    """48 layers of 540,672 elements a page: what a pool of one page gives, and no other page is touched."""
    for kind, shape, dtype in (("conv", (180224, 3), F32), ("conv", (180224, 3), BF16), ("ssm", (66, 64, 128), F32)):
        pool = pm_ops.PagePool(pm_ops.state_page(48, {kind: (shape, dtype)}), 85, "cuda")
        one = pm_ops.PagePool(pm_ops.state_page(1, {kind: (shape, dtype)}), 1, "cuda")
        one.view(0, kind).normal_()
        pool.view(47, kind)[page] = one.view(0, kind)[0]
        start = torch.tensor([0, 70], device="cuda")
        for there, layer, at in ((one, 0, 0), (pool, 47, page)):
            torch.manual_seed(1)
            index, known = torch.tensor([at], device="cuda"), torch.tensor([True], device="cuda")
            if kind == "conv":
                weight, rows = (torch.randn(*size, device="cuda").to(dtype) for size in ((shape[0], 4), (70, shape[0])))
                pm_ops.conv1d_prefill(there, layer, rows, weight, start, index, has_initial_state=known)
                pm_ops.conv1d_update(there, layer, rows[:1], weight, index)
            else:
                x, dt, A = (torch.rand(*size, device="cuda") for size in ((70, 66, 64), (70, 66), (66,)))
                B, C = torch.randn(2, 70, 2, 128, device="cuda")
                pm_ops.selective_scan_prefill(there, layer, x, dt, -A, B, C, start, index, has_initial_state=known)
                pm_ops.selective_state_update(there, layer, x[:1], dt[:1], -A, B[:1], C[:1], index)
        state = pool.view(47, kind)[page]
        assert torch.equal(state, one.view(0, kind)[0]) and bool(state.any())
        state.zero_()
        assert not any(bool(part.any()) for part in pool.buffer.view(torch.int64).chunk(8))
        del pool, state
        torch.cuda.empty_cache()
