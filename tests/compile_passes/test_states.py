"""Recurrent states bound to pages: writes and reads by index compile to pages, whatever the state's rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pm_ops
from pm_ops.compile_passes import bind, page_major_backend
from pm_ops.layout import Plane
from pm_ops.testing import fill_random

PAGES, LAYERS = 6, 2
SHAPES = {"conv": (6, 3), "ssm": (2, 4, 5), "sum": (7,)}
DTYPES = {"conv": torch.float16, "ssm": torch.float32, "sum": torch.float32}


class Recurrent(torch.nn.Module):
    """Every layer reads its states by index, moves them on, and writes them in one way."""

    def __init__(self, write: Callable[..., None], read: Callable[..., Tensor]) -> None:
        super().__init__()
        self.states = {
            kind: [torch.randn(PAGES, *shape).to(DTYPES[kind]) for _ in range(LAYERS)] for kind, shape in SHAPES.items()
        }
        self.write, self.read = write, read

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        total = x
        for layer in range(LAYERS):
            for kind in SHAPES:
                cache = self.states[kind][layer]
                state = self.read(cache, index).float()
                total = total + state.flatten(1).sum(1)
                new = state * 0.5 + total.view(-1, *[1] * (state.dim() - 1))
                self.write(cache, index, new.to(cache.dtype))
        return total


def put(cache: Tensor, index: Tensor, new: Tensor) -> None:
    cache[index] = new


def index_copy(cache: Tensor, index: Tensor, new: Tensor) -> None:
    cache.index_copy_(0, index, new)


def copy_slice(cache: Tensor, index: Tensor, new: Tensor) -> None:
    cache[: new.shape[0]].copy_(new)


def fill(cache: Tensor, index: Tensor, new: Tensor) -> None:
    cache[index] = new
    cache.index_fill_(0, index[:1], 0.0)


READS = {"index": lambda cache, index: cache[index], "index_select": lambda cache, index: cache.index_select(0, index)}


def bound(model: Recurrent, **options: Any) -> tuple[pm_ops.PagePool, Any, Any]:
    layout = pm_ops.state_page(LAYERS, {kind: (shape, DTYPES[kind]) for kind, shape in SHAPES.items()}, align=16)
    stride = layout.page_bytes + 32
    buffer = torch.zeros(16 + PAGES * stride, dtype=torch.uint8)
    fill_random(buffer)
    pool = pm_ops.PagePool(layout, PAGES, buffer=buffer, base=16, page_stride=stride)
    binding = bind(pool, states=model.states)
    backend = page_major_backend(binding, inner="eager", **options)
    return pool, binding, torch.compile(model, backend=backend, fullgraph=True)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("write", "read"), [(put, "index"), (index_copy, "index_select"), (copy_slice, "index"), (fill, "index")]
)
def test_states_written_and_read_by_index_live_in_pages(write: Callable[..., None], read: str) -> None:
    model = Recurrent(write, READS[read])
    stock = copy.deepcopy(model)
    pool, binding, compiled = bound(model)
    gaps = pool.buffer.clone()
    for plane in pool.layout.planes:
        pm_ops.PagePool(pool.layout, PAGES, buffer=gaps, base=16, page_stride=pool.page_stride).view(
            plane.layer, plane.kind
        ).zero_()
    assert binding.cache_bytes() == 0
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = torch.randn(3), torch.randperm(PAGES)[:3]
        torch.testing.assert_close(compiled(*inputs), stock(*inputs))
    for kind, layers in stock.states.items():
        for layer, state in enumerate(layers):
            torch.testing.assert_close(pool.view(layer, kind), state)
            pool.view(layer, kind).zero_()
    assert torch.equal(pool.buffer, gaps)  # every byte that is no state is as it was
    report = str(binding.report())
    assert "store_kv" in report and "load_kv" in report and ", 0 materialized" in report


def test_released_states_are_tensors_again() -> None:
    model = Recurrent(put, READS["index"])
    before = copy.deepcopy(model.states)
    pool, binding, _ = bound(model)
    assert all(s.untyped_storage().nbytes() == 0 for layers in model.states.values() for s in layers)
    binding.release()
    for kind, layers in before.items():
        assert all(torch.equal(a, b) for a, b in zip(layers, model.states[kind], strict=True))
    assert pool.allocator.num_free == PAGES


def test_a_state_that_is_read_as_a_whole_is_refused_or_copied_out() -> None:
    whole = lambda cache, index: torch.cat([cache, cache[:1]])[index]  # noqa: E731
    model = Recurrent(put, whole)
    stock = copy.deepcopy(model)
    _, binding, compiled = bound(model)
    inputs = torch.randn(3), torch.tensor([4, 0, 2])
    with pytest.raises(Exception, match="reads a bound cache"):
        compiled(*inputs)
    binding.release()
    torch._dynamo.reset()
    _, _, compiled = bound(model, on_unsupported_read="materialize")
    torch.testing.assert_close(compiled(*inputs), stock(*inputs))


def test_a_part_of_a_state_is_refused() -> None:
    def part(cache: Tensor, index: Tensor, new: Tensor) -> None:
        cache[:, :1][index] = new[:, :1]

    _, _, compiled = bound(Recurrent(part, READS["index"]))
    with pytest.raises(Exception, match="only a part of the heads or of the elements"):
        compiled(torch.randn(3), torch.tensor([4, 0, 2]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {**s, "conv": s["conv"][:1]}, "1 conv state for a layout that has 2 layers with a plane 'conv'"),
        (lambda s: {"key": s["conv"]}, "2 key states for a layout that has 0 layers"),
        (
            lambda s: {"conv": [t[:, :4].clone() for t in s["conv"]]},
            r"it must be \[6, 6, 3\], a state for each of the pool's 6 pages, or one for each of a batch of sequences",
        ),
        (lambda s: {**s, "conv": [t[:4].clone() for t in s["conv"]]}, "one batch and length for all"),
        (
            lambda s: {kind: [torch.zeros(9, *t.shape[1:], dtype=t.dtype) for t in own] for kind, own in s.items()},
            "states of 9 sequences need 9 pages, the pool has 6",
        ),
        (lambda s: {"conv": [t.float() for t in s["conv"]]}, "its plane torch.float16 on cpu; they must agree"),
        (
            lambda s: {"ssm": [torch.zeros(6, 2, 5, 4).transpose(2, 3) for _ in s["ssm"]]},
            "the others must be contiguous",
        ),
        (lambda s: {"conv": [s["conv"][0]] * 2}, "is the conv cache of layer 0 too"),
        (lambda s: {"conv": s["conv"]}, "for 4 planes of the pool, 'ssm', 'sum' from layer 0 on: "),
    ],
)
def test_states_that_do_not_fit_are_refused_and_nothing_is_changed(change: Any, message: str) -> None:
    model = Recurrent(put, READS["index"])
    layout = pm_ops.state_page(LAYERS, {kind: (shape, DTYPES[kind]) for kind, shape in SHAPES.items()}, align=16)
    pool = pm_ops.PagePool(layout, PAGES)
    with pytest.raises(ValueError, match=message):
        bind(pool, states=change(model.states))
    assert pool.allocator.num_free == PAGES and not pool.buffer.any()


def test_a_plane_of_tokens_is_no_state() -> None:
    pool = pm_ops.PagePool(pm_ops.page_major(1, 2, 4, 1, torch.float32), PAGES)
    with pytest.raises(ValueError, match="a row for each token"):
        bind(pool, states={"key": [torch.zeros(PAGES, 2, 4)]})
    with pytest.raises(ValueError, match="nothing to bind"):
        bind(pool)


def test_pages_that_hold_keys_and_states_hold_a_sequences_states_in_a_page_of_their_own() -> None:
    """A layout of both: the page table's last column is the states'. Other batches than the caches' are refused."""
    rows = pm_ops.page_major(1, 2, 8, 4, torch.float32)
    state = Plane(0, "conv", rows.page_bytes, None, 12, (6, 3), torch.float32)
    layout = pm_ops.PageLayout(4, rows.page_bytes + 72, (*rows.planes, state), "both")
    pool = pm_ops.PagePool(layout, 9)
    caches = {name: [torch.randn(2, 2, 12, 8)] for name in ("keys", "values")}
    states = {"conv": [torch.randn(PAGES, 6, 3)]}
    with pytest.raises(ValueError, match=r"shape \[6, 6, 3\]; beside others of 2 sequences it must be \[2, 6, 3\]"):
        bind(pool, **caches, states=states)
    assert pool.allocator.num_free == 9 and not pool.buffer.any()
    states = {"conv": [torch.randn(2, 6, 3)]}
    want = states["conv"][0].clone()
    binding = bind(pool, **caches, states=states)
    assert binding.page_table is not None and binding.page_table.shape == (2, 4) and pool.allocator.num_free == 1
    assert torch.equal(pool.view(0, "conv")[binding.page_table[:, 3].long()], want)
