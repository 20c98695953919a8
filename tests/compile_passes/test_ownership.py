"""Whose memory it is: several bindings, modes around the graph, and shapes that do not go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind, page_major_backend

HEADS, DIM, PAGE = 2, 8, 4


def pool(pages: int = 5, layers: int = 1) -> PagePool:
    return PagePool(page_major(layers, HEADS, DIM, PAGE, torch.float32), pages)


def caches(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randn(shape)


def compiled(function: Callable[..., Any], binding: Any, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend=page_major_backend(binding, **{"inner": "eager", **options}), fullgraph=True)


def test_a_pool_is_taken_by_one_binding_of_caches_addressed_by_slot() -> None:
    """A second one, of either kind, would write over the first one's pages."""
    shared, (k, v) = pool(), caches(20, HEADS, DIM)
    first = bind(shared, keys=[k], values=[v])
    refusals = {(20, HEADS, DIM): "take every page of the pool; 5 of 5 are in use", (1, HEADS, 8, DIM): "0 free of 5"}
    for shape, message in refusals.items():
        k2, v2 = caches(*shape)
        with pytest.raises(ValueError, match=message):
            bind(shared, keys=[k2], values=[v2])
        assert type(k2) is Tensor and k2.untyped_storage().nbytes() > 0
    first.release()
    assert shared.allocator.num_free == 5
    bind(shared, keys=[k], values=[v])


def test_a_cache_of_another_binding_is_refused_by_name() -> None:
    (k, v), (k2, v2) = caches(20, HEADS, DIM), caches(20, HEADS, DIM)
    first = bind(pool(), keys=[k], values=[v])
    bind(pool(), keys=[k2], values=[v2])

    def both(x: Tensor, at: Tensor) -> Tensor:
        k[at] = x
        return k2[at] + 1

    with torch.no_grad(), pytest.raises(Exception, match="layer 0 key, which another binding"):
        compiled(both, first)(torch.randn(2, HEADS, DIM), torch.tensor([1, 2]))


def test_a_model_bound_anew_does_not_run_its_old_graphs() -> None:
    k, v = caches(20, HEADS, DIM)
    first = bind(pool(), keys=[k], values=[v])

    def step(x: Tensor, at: Tensor) -> Tensor:
        k[at] = x
        return k[at] * 2

    run = compiled(step, first)
    x, at = torch.randn(2, HEADS, DIM), torch.tensor([1, 2])
    with torch.no_grad():
        run(x, at)
        first.release()
        second = pool()
        bind(second, keys=[k], values=[v])
        with pytest.raises(Exception, match="compile anew after binding anew"):
            run(x, at + 4)
    assert torch.equal(second.view(0, "key").reshape(20, HEADS, DIM)[1:3], x)


@pytest.mark.parametrize(
    ("queries", "rows"),
    [(4, slice(0, 1)), (1, slice(0, 2)), (2, slice(0, 1))],
    ids=["4 over 1", "1 over 2", "2 over 1"],
)
def test_attention_of_another_number_of_sequences_is_refused(queries: int, rows: slice) -> None:
    k, v = caches(4, HEADS, 12, DIM)
    binding = bind(pool(12), keys=[k], values=[v])

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[rows], v[rows]).sum(0)

    with torch.no_grad(), pytest.raises(Exception, match="expand it or slice the cache"):
        compiled(attend, binding)(torch.randn(queries, HEADS, 3, DIM))


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
def test_a_region_without_autocast_stays_one(inner: str) -> None:
    """Rotary embeddings are computed in fp32 under autocast; in bf16 positions past 256 would lose their angles."""
    k, v = caches(1, HEADS, 400, DIM)
    binding = bind(pool(100), keys=[k], values=[v])
    frequencies = torch.rand(4) * 3

    def step(x: Tensor, w: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled=False):
            angles = frequencies[:, None].float() @ pos[None].float()
        k[:, :, pos] = x
        v[:, :, pos] = x
        return angles.cos(), w @ w

    x, w, pos = torch.randn(1, HEADS, 3, DIM), torch.randn(4, 4), torch.tensor([300, 301, 399])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        got = compiled(step, binding, inner=inner)(x, w, pos)
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.bfloat16
    torch.testing.assert_close(got[0], (frequencies[:, None] * pos[None]).cos(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_no_grad_inside_the_function_is_enough(inner: str) -> None:
    k, v = caches(20, HEADS, DIM)
    binding = bind(pool(), keys=[k], values=[v])
    weight = torch.nn.Parameter(torch.randn(DIM, DIM))

    @torch.no_grad()
    def step(x: Tensor, at: Tensor) -> Tensor:
        k[at] = x @ weight
        return k[at] @ weight

    x, at = torch.randn(2, HEADS, DIM), torch.tensor([1, 2])
    got = compiled(step, binding, inner=inner)(x, at)
    torch.testing.assert_close(got, x @ weight @ weight)
    assert not got.requires_grad


def test_reading_a_number_out_of_a_cache_names_the_line() -> None:
    k, v = caches(20, HEADS, DIM)
    binding = bind(pool(), keys=[k], values=[v])

    def step(x: Tensor, at: Tensor) -> Tensor:
        k[at] = x
        return x * k[0, 0, 0].item()

    scalars, named = torch._dynamo.config.patch(capture_scalar_outputs=True), r"k\[0, 0, 0\].item\(\)"
    with scalars, torch.no_grad(), pytest.raises(Exception, match=named):
        compiled(step, binding)(torch.randn(2, HEADS, DIM), torch.tensor([1, 2]))


def test_memory_that_cannot_be_given_back_is_refused_and_nothing_changes() -> None:
    """numpy's memory cannot be resized; a subclass over a cache would stay behind."""
    where = pool()
    k, v = torch.from_numpy(np.ones((20, HEADS, DIM), np.float32)), torch.randn(20, HEADS, DIM)
    with pytest.raises(ValueError, match="memory that torch does not own"):
        bind(where, keys=[k], values=[v])

    class Named(torch.Tensor):
        pass

    k = torch.randn(20, HEADS, DIM)
    kept = k[2:4].as_subclass(Named)
    with pytest.raises(ValueError, match="a Named shares memory with a cache"):
        bind(where, keys=[k], values=[v])
    assert type(k) is type(v) is Tensor and v.untyped_storage().nbytes() == v.nbytes and kept.shape[0] == 2
    assert where.allocator.num_free == 5 and not where.buffer.any()


def test_a_model_called_after_its_binding_was_released_is_told_so() -> None:
    key, value = caches(20, HEADS, DIM)
    binding = bind(pool(), keys=[key], values=[value])

    def model(x: Tensor, at: Tensor) -> Tensor:
        key[at] = x
        return x + 1

    x, at = torch.randn(2, HEADS, DIM), torch.tensor([3, 5])
    strict = torch.compile(model, backend=page_major_backend(binding, "eager"))
    with torch.no_grad():
        strict(x, at)
        binding.release()
        assert torch.equal(key[at], x)
        with pytest.raises(Exception, match="this backend's binding was released: compile the model with another"):
            strict(x + 1, at)
        assert torch.equal(key[at], x)
        torch.compile(model, backend=page_major_backend(binding, "eager", strict=False))(x + 1, at)
    assert torch.equal(key[at], x + 1)
