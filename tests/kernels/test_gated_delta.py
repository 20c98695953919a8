"""The kernels of the gated delta rule against float64, and against every other byte of the buffer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from gated_delta_cases import (
    Call,
    owned_bytes,
    parts_of,
    prefill_case,
    reference,
    states_of,
    update_case,
)
from kernels.cases import on, on_each_device
from state_cases import BF16, F16, F32, copied
from torch import Tensor

from pm_ops.kernels import gated_delta_prefill as gated_delta_prefill_module
from pm_ops.kernels.gated_delta import gated_delta_update
from pm_ops.kernels.gated_delta_prefill import gated_delta_prefill
from pm_ops.ops.gated_delta import GatedDeltaPrefill, GatedDeltaUpdate
from pm_ops.testing import writes_only

TOLERANCE = {F32: 5e-5, F16: 4e-3, BF16: 2e-2}
"""Of out and state, relative to the largest number. In float32 running sums of decays lose the most."""


def run(a: Call) -> Tensor:
    return gated_delta_update(a) if isinstance(a, GatedDeltaUpdate) else gated_delta_prefill(a)


def check(case: Call, device: str) -> None:
    """Results and states are right, skipped and padding rows are zeros, and no other byte has changed."""
    case.check()
    case.check_values()
    out, states = reference(case)
    a = on(copied(case), device)
    with writes_only(a.buffer, owned_bytes(case, list(states))):
        got = run(a).cpu()
    computed = max((case.query.dtype, case.key.dtype, case.value.dtype), key=TOLERANCE.__getitem__)
    assert got.is_contiguous() and got.dtype == case.value.dtype and got.shape == case.value.shape
    assert near(got, out, case.value.dtype, computed)
    found = states_of(replace(a, buffer=a.buffer.cpu()))
    for page, state in states.items():
        assert near(found[page], state, case.state_dtype, computed), page
    if isinstance(case, GatedDeltaUpdate):
        skipped = skipped_of(case)
        assert bool((got[skipped] == 0).all())
    else:
        rows = case.query_start.tolist()
        for b, page in enumerate(case.state_indices.tolist()):
            if page < 0:
                assert bool((got[rows[b] : rows[b + 1]] == 0).all())
        assert bool((got[rows[-1] :] == 0).all())


def skipped_of(case: GatedDeltaUpdate) -> Tensor:
    """Sequences whose page to read is negative."""
    index = case.state_indices if case.state_indices.dim() == 2 else case.state_indices[:, None]
    column = torch.zeros(len(index), dtype=torch.int64) if case.num_accepted is None else case.num_accepted.long() - 1
    return index.gather(1, column[:, None])[:, 0] < 0


def near(got: Tensor, right: Tensor, stored: torch.dtype, computed: torch.dtype) -> bool:
    scale = max(float(right.abs().max()), 1.0) if right.numel() else 1.0
    allowed = max(TOLERANCE[stored], TOLERANCE[computed]) * scale
    return bool(((got.double() - right).abs() <= allowed).all())


@on_each_device
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_first": False, "index": torch.int64},
        {"raw": True, "l2_norm": False},
        {"raw": True, "heads": (3, 1), "dims": (40, 8), "value_first": False},
        {"state_dtype": F16, "dtypes": (F16, F16, F16, F32, F16)},
        {"dtypes": (F16, F32, F32, F16, F32), "dims": (1, 5), "heads": (2, 2)},
    ],
)
def test_update(device: str, options: dict[str, Any]) -> None:
    check(update_case(3, **options), device)
    check(update_case(3, 4, **options), device)
    check(update_case(3, 3, each=True, **options), device)
    check(update_case(2, 2, each=True, accepted=False, **options), device)


@on_each_device
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"value_first": False, "index": torch.int64, "initial": False},
        {"raw": True, "l2_norm": False, "heads": (2, 2)},
        {"state_dtype": F16, "dtypes": (F16, F16, F16, F32, F16), "heads": (2, 1), "dims": (24, 16)},
        {"dtypes": (F16, F32, F32, F16, F32), "dims": (3, 5), "heads": (1, 1)},
    ],
)
def test_prefill_at_lengths_around_its_chunks(device: str, options: dict[str, Any]) -> None:
    check(prefill_case([1, 5, 65, 0, 64, 63], **options), device)


@on_each_device
def test_chunks_of_a_long_sequence(device: str) -> None:
    check(prefill_case([1025], heads=(1, 1), dims=(3, 5)), device)


@on_each_device
def test_prefill_of_dims_that_take_several_blocks(device: str) -> None:
    check(prefill_case([3, 1, 66], heads=(1, 1), dims=(130, 72)), device)
    check(prefill_case([9], heads=(1, 1), dims=(72, 200), value_first=False), device)


@on_each_device
@pytest.mark.parametrize("decay", [50.0, 1e4, 1e30])
def test_strong_decays_neither_overflow_nor_give_nan(device: str, decay: float) -> None:
    """In a chunk with strong and weak decays their running sum loses the weak ones where it is not bounded."""
    case = prefill_case([70, 2, 65], decay=decay, heads=(2, 1))
    weak = torch.rand(case.g.shape) < 0.7
    case.g[weak & case.g.isfinite()] *= 1e-2 / decay
    case.g[5] = -torch.inf
    check(case, device)
    check(update_case(3, 2, decay=decay), device)


def on_circle(angle: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return angle.cos() * x + angle.sin() * y


ALIKE = {
    "all": lambda keys: keys[:1],
    "nearly all": lambda keys: keys[:1] + 1e-3 * keys,
    "all but for signs": lambda keys: keys[:1] * torch.randn(len(keys), 1, 1).sign(),
    "each one of two": lambda keys: keys[torch.randint(2, (len(keys),))],
    "along a circle": lambda keys: on_circle(torch.linspace(0, 3, len(keys))[:, None, None], keys[0], keys[1]),
    "of four dimensions": lambda keys: torch.randn(len(keys), 1, 4) @ torch.randn(4, keys.shape[-1]),
}


def alike_case(alike: str, **options: Any) -> GatedDeltaPrefill:
    """Powers of the triangle that is inverted are as large as 10^18 then: nothing decays, and all changes are whole."""
    case = prefill_case([64, 5], heads=(2, 1), decay=0.0, padding=0, skip=False, **options)
    case.key[:] = ALIKE[alike](torch.randn(case.key.shape))
    case.beta.fill_(1.0)
    return case


@on_each_device
@pytest.mark.parametrize("alike", ALIKE)
def test_keys_that_are_alike(device: str, alike: str) -> None:
    check(alike_case(alike), device)


@on_each_device
def test_two_parts_of_a_sequence_are_as_one(device: str) -> None:
    case = prefill_case([70], padding=0)
    parts = [on(a, device) for a in parts_of(copied(case), 33)]
    parts[1].buffer = parts[0].buffer
    whole = on(case, device)
    out = torch.cat([run(a) for a in parts])
    assert near(out.cpu(), run(whole).double().cpu(), F32, F32)
    page = int(case.state_indices[0])
    assert near(states_of(parts[1])[page].cpu(), states_of(whole)[page].double().cpu(), F32, F32)


@on_each_device
def test_calls_without_rows_or_sequences(device: str) -> None:
    for case in (update_case(0), update_case(2, 0), prefill_case([], padding=0), prefill_case([0, 0], padding=0)):
        check(case, device)
    check(prefill_case([], padding=4), device)


@on_each_device
def test_pages_that_no_pool_has_are_skipped(device: str) -> None:
    for case in (update_case(2, 2), prefill_case([5, 4], skip=False, padding=0)):
        far = on(replace(case, state_indices=torch.full_like(case.state_indices, 2**31 - 1)), device)
        with writes_only(far.buffer, []):
            assert bool((run(far) == 0).all())


def test_few_heads_make_more_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what does not fit the registers makes narrower ones; a Hopper's have stages, without which they fail."""
    monkeypatch.setattr(gated_delta_prefill_module, "is_hopper", lambda device: device == "hopper")
    monkeypatch.setattr(gated_delta_prefill_module, "multiprocessors", lambda device: 132)
    columns = {
        (128, 128, BF16, 66, "hopper"): (64, 3),
        (128, 128, BF16, 65, "hopper"): (32, 3),
        (128, 20, BF16, 500, "hopper"): (32, 3),
        (129, 128, BF16, 500, "hopper"): (32, 2),
        (128, 128, F32, 500, "hopper"): (32, 1),
        (128, 128, BF16, 500, "another"): (32, 1),
        (128, 3, BF16, 500, "another"): (16, 1),
    }
    for call, (block, stages) in columns.items():
        tile = gated_delta_prefill_module.scan_tile(*call)
        assert (tile["VALUE_BLOCK"], tile["num_stages"]) == (block, stages), call


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 128), (64, 192), (256, 256)])
@pytest.mark.parametrize("state_dtype", [F32, BF16])
def test_bf16_on_a_gpu(dims: tuple[int, int], state_dtype: torch.dtype) -> None:
    options = dict(dims=dims, dtypes=(BF16, BF16, BF16, F32, BF16), state_dtype=state_dtype)
    check(update_case(5, **options), "cuda")
    check(update_case(5, 3, each=True, value_first=False, **options), "cuda")
    check(prefill_case([1025, 5, 65, 0, 64, 63], raw=True, **options), "cuda")
    check(prefill_case([130, 2, 1], value_first=False, **options), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(128, 128), (256, 256)])
def test_fp32_on_a_gpu(dims: tuple[int, int]) -> None:
    check(prefill_case([130, 2, 1], dims=dims), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("key_dim", [40, 128])
def test_as_many_heads_as_make_programs_of_64_columns(key_dim: int) -> None:
    options = dict(heads=(36, 18), dims=(128, key_dim), dtypes=(BF16, BF16, BF16, F32, BF16))
    check(prefill_case([130, 2, 1, 65], **options), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("alike", ALIKE)
def test_keys_that_are_alike_in_bf16(alike: str) -> None:
    check(alike_case(alike, dims=(128, 128), dtypes=(BF16, BF16, BF16, F32, BF16)), "cuda")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("slot", [82, 83, 84])
def test_offsets_past_two_to_the_31(slot: int) -> None:
    """48 layers of 540,672 fp32 elements a page; the last layer of pages around 2^31 elements."""
    heads, value_dim, key_dim, layers = 33, 128, 128, 48
    entry = heads * value_dim * key_dim * 4
    buffer = torch.zeros(86 * layers * entry, dtype=torch.uint8, device="cuda")
    plane = [(layers - 1) * entry, layers * entry, 0, value_dim * key_dim * 4, 86]
    small = prefill_case([65], heads=(heads, 33), dims=(value_dim, key_dim), padding=0)
    view = states_of(replace(small, buffer=buffer, state_plane=plane))
    view[slot] = states_of(small)[small.state_indices[0]].cuda()
    case = on(small, "cuda")
    for name in ("prefill", "update"):
        index = torch.tensor([slot], dtype=torch.int32, device="cuda")
        far = replace(case, buffer=buffer, state_plane=plane, state_indices=index)
        near_by = case
        if name == "update":
            rows = {n: getattr(case, n)[:1] for n in ("query", "key", "value", "g", "beta")}
            shared = dict(state_dtype=F32, scale=case.scale, l2_norm=True, **rows)
            far = GatedDeltaUpdate(buffer=buffer, state_plane=plane, state_indices=index, **shared)
            near_by = GatedDeltaUpdate(
                buffer=case.buffer, state_plane=case.state_plane, state_indices=case.state_indices, **shared
            )
        assert torch.equal(run(far), run(near_by))
        assert torch.equal(view[slot], states_of(near_by)[small.state_indices[0]])
    view[slot] = 0
    assert not bool(buffer.any())
