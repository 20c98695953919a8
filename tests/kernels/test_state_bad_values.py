"""Indices and lengths that no caller may give: what is outside of the named pages and of the result stays as it is.

Where a value is too large or too small the kernels do as if it were the nearest one that is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from gated_delta_cases import owned_bytes as gated_delta_bytes
from gated_delta_cases import prefill_case, update_case
from kernels.cases import on, on_each_device
from state_cases import F16, conv_prefill, conv_update, copied, owned_bytes, ssm_prefill, ssm_update
from torch import Tensor

from pm_ops.kernels.conv import conv1d_prefill, conv1d_update
from pm_ops.kernels.gated_delta import gated_delta_update
from pm_ops.kernels.gated_delta_prefill import gated_delta_prefill
from pm_ops.kernels.selective_chunks import scan_in_chunks
from pm_ops.kernels.selective_scan import scan_in_order
from pm_ops.kernels.selective_update import selective_state_update
from pm_ops.ops.gated_delta import GatedDeltaPrefill, GatedDeltaUpdate
from pm_ops.testing import fill_random, writes_only

PREFILLS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "conv": (conv_prefill, conv1d_prefill),
    "selective": (ssm_prefill, scan_in_order),
    "selective_chunks": (partial(ssm_prefill, dtype=F16), scan_in_chunks),
    "gated_delta": (prefill_case, gated_delta_prefill),
}
UPDATES: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Tensor]]] = {
    "conv": (conv_update, {"per_token": True, "skip": False}, conv1d_update),
    "selective": (ssm_update, {"per_token": True, "skip": False}, selective_state_update),
    "gated_delta": (update_case, {"each": True}, gated_delta_update),
}
GUARD = 4096
"""Bytes of random numbers on each side of a result."""


@contextmanager
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The results that are allocated in the block have random bytes around them, which are unchanged at its end."""
    made: list[tuple[Tensor, Tensor, int]] = []
    allocate = Tensor.new_empty

    def new_empty(self: Tensor, shape: Any, **options: Any) -> Tensor:
        if isinstance(shape, int):  # the interpreter's own
            return allocate(self, shape, **options)
        nbytes = shape.numel() * self.element_size()
        memory = torch.empty(nbytes + 2 * GUARD, dtype=torch.uint8, device=self.device)
        fill_random(memory)
        made.append((memory, memory.clone(), nbytes))
        return memory[GUARD : GUARD + nbytes].view(self.dtype).view(shape)

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_empty", new_empty)
        yield
    assert len(made) == 1
    for memory, before, nbytes in made:
        for guard in (slice(0, GUARD), slice(GUARD + nbytes, None)):
            assert torch.equal(memory[guard], before[guard])


def run(kernel: Callable[..., Tensor], case: Any, pages: list[int], device: str, patch: Any) -> tuple[Tensor, Tensor]:
    """The result and the buffer, of which only the states of these pages have changed."""
    a = on(copied(case), device)
    owned = gated_delta_bytes if isinstance(case, GatedDeltaUpdate | GatedDeltaPrefill) else owned_bytes
    with writes_only(a.buffer, owned(case, pages)), guarded(patch):
        out = kernel(a)
    return out.cpu(), a.buffer.cpu()


@on_each_device
@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ([0, 5, 45], [0, 5, 9]),
        ([0, 70, 80], [0, 9, 9]),
        ([0, 2**31 - 1, 2**31 - 1], [0, 9, 9]),
        ([-3, 5, 9], [0, 5, 9]),
        ([-100, -70, 9], [0, 0, 9]),
        ([-9, -7, -5], [0, 0, 0]),
    ],
)
def test_starts_outside_of_the_rows(
    name: str, given: list[int], meant: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kernel = PREFILLS[name]
    case = make([5, 4], skip=False, padding=0)
    case.query_start = torch.tensor(meant, dtype=torch.int32)
    pages = [int(case.state_indices[b]) for b in range(2) if meant[b] < meant[b + 1]]
    expected = run(kernel, case, pages, device, monkeypatch)
    got = run(kernel, replace(case, query_start=torch.tensor(given)), pages, device, monkeypatch)
    assert torch.equal(got[1], expected[1])
    if given[0] >= 0 or given[-1] < 0:
        assert torch.equal(got[0], expected[0])


@on_each_device
@pytest.mark.parametrize("name", PREFILLS)
@pytest.mark.parametrize("given", [[5, 3, 9], [9, 5, 2], [9, 9, 2], [70, 3, 3]])
def test_starts_that_descend_leave_the_page_alone(
    name: str, given: list[int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, kernel = PREFILLS[name]
    for initial in (True, False):
        case = make([5, 4], skip=False, padding=0, initial=initial)
        case.query_start = torch.tensor(given, dtype=torch.int32)
        run(kernel, case, [int(case.state_indices[1])] if given[1] < given[2] else [], device, monkeypatch)


@on_each_device
@pytest.mark.parametrize("name", PREFILLS)
def test_pages_that_the_pool_does_not_have(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be they in memory, behind the pool's last page, or nowhere: they are skipped, with zeros for the result."""
    make, kernel = PREFILLS[name]
    case = make([5, 4], skip=False, padding=0, dtypes=(F16,) * 5) if name == "gated_delta" else make([5, 4], skip=False)
    case.state_plane = [*case.state_plane[:4], 3]
    for page in (3, 2**31 - 1):
        case.state_indices = torch.tensor([1, page], dtype=torch.int32)
        out, _ = run(kernel, case, [1], device, monkeypatch)
        assert bool((out[5:9] == 0).all()) and bool((out[:5] != 0).any())


@on_each_device
@pytest.mark.parametrize("name", UPDATES)
def test_pages_to_read_or_write_that_the_pool_does_not_have(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, kernel = UPDATES[name]
    case = make(2, 2, **options)
    case.state_plane = [*case.state_plane[:4], 4]
    case.num_accepted = torch.tensor([1, 1], dtype=torch.int32)
    for page in (4, 5, 2**31 - 1):
        case.state_indices = torch.tensor([[0, page], [page, 1]], dtype=torch.int32)
        out, _ = run(kernel, case, [0], device, monkeypatch)
        assert bool((out[1] == 0).all()) and bool((out[0] != 0).any())
        single = replace(case, state_indices=torch.tensor([2, page]), num_accepted=None)
        out, _ = run(kernel, single, [2], device, monkeypatch)
        assert bool((out[1] == 0).all()) and bool((out[0] != 0).any())


@on_each_device
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("accepted", [3, 4, 2**31 - 1, 2**33 + 1, -1, -(2**31)])
def test_more_tokens_accepted_than_there_are_or_fewer_than_none(
    name: str, accepted: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, kernel = UPDATES[name]
    case = make(2, 2, **options)
    case.state_indices = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    results = []
    for first in (accepted, min(max(accepted, 0), 2)):
        case.num_accepted = torch.tensor([first, 1])
        results.append(run(kernel, case, [0, 1, 2, 3], device, monkeypatch))
    (out, buffer), (right, right_buffer) = results
    assert torch.equal(out.view(torch.int32), right.view(torch.int32)) and torch.equal(buffer, right_buffer)
