"""The scan that is parallel over chunks: against float64, the scan in order, and every byte that is not its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernels.cases import on, on_each_device
from kernels.test_state import IN_THE_INTERPRETER, near, spaced
from state_cases import BF16, F16, F32, copied, owned_bytes, reference, ssm_prefill, states_of
from torch import Tensor

from pm_ops.kernels import selective_chunks, selective_scan
from pm_ops.kernels.selective_chunks import Tiles, kept_bytes, scan_in_chunks, segment_of
from pm_ops.kernels.selective_scan import in_chunks, scan_in_order, selective_scan_prefill
from pm_ops.ops.selective import SelectiveScanPrefill
from pm_ops.testing import fill_nan, fill_random, writes_only

SMALL = Tiles(chunk=32)
SHORTEST = selective_chunks._SHORTEST
AROUND = [1, 31, 32, 0, 33, 127, 128, 129, 256, 300]
"""Lengths around chunks and segments."""
GUARD = 4096
"""Bytes of random numbers on each side of a tensor."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 tokens, on a device that has many multiprocessors, so that short sequences have several."""
    monkeypatch.setattr(selective_chunks, "_SHORTEST", 128)
    monkeypatch.setattr(selective_chunks, "multiprocessors", lambda device: 132)


@contextmanager
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is allocated in the block begins as NaN, and has random bytes around it, which are unchanged at its end."""
    made: list[tuple[Tensor, Tensor, int]] = []
    allocate = Tensor.new_empty

    def new_empty(self: Tensor, shape: Any, **options: Any) -> Tensor:
        own = isinstance(shape, int)  # the interpreter's
        return allocate(self, shape, **options) if own else memory(shape, self.dtype, self.device)

    def memory(shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        whole = torch.zeros(nbytes + 2 * GUARD, dtype=torch.uint8, device=device)
        fill_random(whole)
        fill_nan(whole[GUARD : GUARD + nbytes])
        made.append((whole, whole.clone(), nbytes))
        return whole[GUARD : GUARD + nbytes].view(dtype).view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, dtype, device: memory(shape, dtype, device))
        patch.setattr(Tensor, "new_empty", new_empty)
        yield
    assert len(made) >= 5
    for whole, before, nbytes in made:
        for guard in (slice(0, GUARD), slice(GUARD + nbytes, None)):
            assert torch.equal(whole[guard], before[guard])


def check(case: SelectiveScanPrefill, device: str, patch: pytest.MonkeyPatch, tiles: Tiles = SMALL) -> None:
    """Output and states are right, and the scan in order gives the same; skipped and padding rows are zeros.

    All but what the call may read is NaN, and nothing is written but the states, the output and its own memory.
    """
    kept = states_of(case).clone()
    fill_nan(case.buffer)
    pages = [page for page in case.state_indices.tolist() if page >= 0]
    states_of(case)[pages] = kept[pages]
    out, states = reference(case)
    a, other = (on(copied(case), device) for _ in range(2))
    with writes_only(a.buffer, owned_bytes(case, list(states))), guarded(patch):
        got = scan_in_chunks(a, tiles)
    in_order = scan_in_order(other)
    assert got.is_contiguous() and got.dtype == case.x.dtype and got.shape == case.x.shape
    assert near(got.cpu(), out, case.x.dtype, case.x.dtype, 5)
    assert near(got.cpu(), in_order.double().cpu(), case.x.dtype, case.x.dtype, 5)
    assert bool((got.cpu()[out == 0] == 0).all())
    found, ordered = (states_of(replace(call, buffer=call.buffer.cpu())) for call in (a, other))
    for page, state in states.items():
        assert near(found[page], state, case.state_dtype, case.x.dtype, 5), page
        assert near(found[page], ordered[page].double(), case.state_dtype, case.x.dtype, 5), page


@on_each_device
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": False, "initial": False, "index_dtype": torch.int64, "heads": (4, 1)},
        {"D": None, "dt_bias": None, "dt_softplus": False, "dt_min": 0.1, "heads": (3, 3)},
        {"dims": (70, 9), "heads": (2, 1), "state_dtype": F16},
        {"skip": False, "padding": 0, "dt_max": None},
    ],
)
def test_lengths_around_chunks_and_segments(
    options: dict[str, Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dtype": F16, "heads": (2, 1), "dims": (12, 20), **options}
    check(ssm_prefill(AROUND, **options), device, monkeypatch)


@IN_THE_INTERPRETER
def test_float32_rows_to_their_own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    check(ssm_prefill(AROUND, heads=(2, 1)), "cpu", monkeypatch)
    check(ssm_prefill([400], heads=(1, 1), dims=(3, 5)), "cpu", monkeypatch, Tiles(chunk=64))


@on_each_device
def test_chunks_and_segments_as_they_are(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selective_chunks, "_SHORTEST", SHORTEST)
    lens = [1, 127, 128, 0, 129, 512, 1100]
    check(ssm_prefill(lens, heads=(4, 1), dims=(5, 3), dtype=F16), device, monkeypatch, Tiles())


@on_each_device
def test_one_segment_a_sequence(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as one has make no second one."""
    check(ssm_prefill([60, 63, 5], padding=0, dtype=F16), device, monkeypatch)
    check(ssm_prefill([128], padding=0, dtype=F16), device, monkeypatch)


@IN_THE_INTERPRETER
def test_strides_past_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the rows of a chunk, and of the heads of dt. Of 4 GiB, memory is taken for a few pages."""
    case = ssm_prefill([17], padding=0, heads=(3, 1), dtype=F16, gate=False)
    check(replace(case, x=spaced(case.x, (1 << 27, 12, 1))), "cpu", monkeypatch)
    check(replace(case, B=spaced(case.B, (1 << 27, 20, 1))), "cpu", monkeypatch)
    check(replace(case, dt=spaced(case.dt, (1, 1 << 30))), "cpu", monkeypatch)


@on_each_device
def test_steps_without_bound_and_strong_decays(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = ssm_prefill([200], dtype=F16)
    limited.dt[0, 0], limited.dt[1, 1] = -torch.inf, torch.inf
    check(limited, device, monkeypatch)
    strong = ssm_prefill([200, 150], dtype=F16, heads=(2, 1), dt_max=None)
    strong.A *= 1000
    check(strong, device, monkeypatch)


@on_each_device
@pytest.mark.parametrize(
    "given",
    [
        [250, 5, 300],
        [300, 0, 300],
        [-200, 150, 300],
        [-300, -290, 300],
        [300, 299, 3],
        [0, 2**31 - 1, 2**31 - 1],
        [7, 2**31 - 1, 0],
    ],
)
def test_starts_that_no_caller_may_give(given: list[int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the states of sequences that have rows are written, and what is allocated is not left."""
    case = ssm_prefill([160, 140], skip=False, padding=0, heads=(2, 1), dtype=F16)
    inside = [min(max(n, 0), 300) for n in given]
    pages = [int(case.state_indices[b]) for b in range(2) if inside[b] < inside[b + 1]]
    a = on(copied(replace(case, query_start=torch.tensor(given, dtype=torch.int32))), device)
    with writes_only(a.buffer, owned_bytes(case, pages)), guarded(monkeypatch):
        scan_in_chunks(a, SMALL)


@on_each_device
def test_pages_that_the_pool_does_not_have_are_skipped(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = ssm_prefill([200, 150], skip=False, dtype=F16, heads=(2, 1))
    for page in (4, 2**31 - 1):
        case.state_indices = torch.tensor([page, 1], dtype=torch.int32)
        a = on(copied(case), device)
        with writes_only(a.buffer, owned_bytes(case, [1])), guarded(monkeypatch):
            out = scan_in_chunks(a, SMALL).cpu()
        assert bool((out[:200] == 0).all()) and bool((out[200:350] != 0).any()) and bool((out[350:] == 0).all())


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device that the tests of the choice are on."""
    monkeypatch.setattr(selective_scan, "is_hopper", lambda device: device.type == "cpu")
    monkeypatch.setattr(selective_scan, "multiprocessors", lambda device: 132)
    return torch.device("cpu")


def test_the_choice_follows_from_the_shape_alone(hopper: torch.device) -> None:
    state, other = (128, 64, 128), torch.device("meta")
    for tokens, batch, shape, dtype, device, expected in (
        (16384, 1, state, BF16, hopper, True),
        (16384, 1, state, F16, hopper, True),
        (32768, 8, state, BF16, hopper, True),
        (131072, 1, state, BF16, hopper, True),
        (262144, 4, state, BF16, hopper, False),
        (256 * 256, 256, (64, 64, 128), BF16, hopper, True),
        (1024 * 256, 1024, (64, 64, 128), BF16, hopper, False),  # 5 GiB of chunks, 3 of segments
        (1024, 1, (1, 64, 128), BF16, hopper, True),
        (1023, 1, (1, 64, 128), BF16, hopper, False),
        (1023, 1, state, BF16, hopper, False),
        (64 * 256, 64, state, BF16, hopper, True),
        (64 * 256 - 1, 64, state, BF16, hopper, False),
        (64 * 256, 64, (16, 64, 128), BF16, hopper, False),
        (64 * 256, 64, (16, 128, 128), BF16, hopper, True),
        (16384, 1, state, F32, hopper, False),
        (16384, 1, (128, 64, 129), BF16, hopper, False),
        (16384, 1, state, BF16, other, False),
        (16384, 0, state, BF16, hopper, False),
        (16384, 1, (0, 64, 128), BF16, hopper, False),
    ):
        assert in_chunks(tokens, batch, shape, dtype, device) == expected, (tokens, batch, shape, dtype)


def test_what_the_choice_counts_is_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one segment, and of several."""
    empty = torch.empty
    monkeypatch.setattr(selective_chunks, "launch", lambda *args, **options: None)
    for lens, heads in (([100], 2), ([300, 5, 0, 200], 2), ([1000, 24], 1)):
        case, made = on(ssm_prefill(lens, heads=(heads, 1), dtype=F16), "meta"), []
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *args, made=made, **k: made.append(empty(*args, **k)) or made[-1])
            scan_in_chunks(case)
        states = sum(x.nbytes for x in made if x.shape[1:] == (heads, 12, 20))
        assert states == kept_bytes(sum(lens) + 3, len(lens), (heads, 12, 20), 2, 132)


@IN_THE_INTERPRETER
def test_each_way_is_taken_where_it_is_chosen(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("scan_in_chunks", "scan_in_order"):
        monkeypatch.setattr(selective_scan, name, lambda a, name=name: taken.append(name))
    for lens, dtype in (([2000], F16), ([2000], F32), ([3] * 10, F16), ([], F16)):
        selective_scan_prefill(ssm_prefill(lens, heads=(1, 1), dims=(3, 5), dtype=dtype))
    assert taken == ["scan_in_chunks", *["scan_in_order"] * 3]


def test_segments_make_about_as_many_programs_as_there_are_multiprocessors() -> None:
    for tokens, heads, segment in (
        (16384, 128, 16384),
        (32768, 128, 32768),
        (16384, 64, 4096),
        (16384, 16, 1024),
        (1000, 1, 128),
    ):
        assert segment_of(tokens, heads, 132) == segment


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("heads", "dims"), [((16, 2), (64, 128)), ((6, 1), (128, 64)), ((3, 1), (80, 16)), ((4, 4), (256, 100))]
)
def test_bf16_on_a_gpu(
    heads: tuple[int, int], dims: tuple[int, int], state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = dict(heads=heads, dims=dims, dtype=BF16, state_dtype=state_dtype)
    check(ssm_prefill([1025, 5, 65, 0, 127, 640], **options), "cuda", monkeypatch, Tiles())
    check(ssm_prefill([300], gate=False, initial=False, **options), "cuda", monkeypatch, Tiles())


@pytest.mark.gpu
def test_replays_follow_the_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph serves whatever sequences its tokens are divided among; nothing waits for the device."""
    case = on(ssm_prefill([1500, 548], skip=False, padding=0, heads=(4, 1), dtype=BF16), "cuda")
    before = case.buffer.clone()
    scan_in_chunks(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scan_in_chunks(case)
    for middle in (1500, 100, 2048, 0):
        case.query_start[1] = middle
        case.buffer.copy_(before)
        graph.replay()
        again = replace(case, buffer=before.clone())
        assert torch.equal(out, scan_in_chunks(again)) and torch.equal(case.buffer, again.buffer)
