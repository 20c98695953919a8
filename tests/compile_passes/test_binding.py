"""bind moves caches into pages, gives their memory back, and leaves facades; release undoes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind, page_major_backend
from pm_ops.compile_passes.cells import Cells

LAYERS, HEADS, DIM, PAGE = 2, 2, 8, 4


def make_pool(pages: int = 10, dtype: torch.dtype = torch.float32, layers: int = LAYERS) -> PagePool:
    return PagePool(page_major(layers, HEADS, DIM, PAGE, dtype), pages)


def caches(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for _ in range(LAYERS)]


def overlapping() -> list[Tensor]:
    """Two caches that share 20 of their 40 slots; together they are as long as their storage."""
    storage = torch.randn(80, HEADS, DIM)
    return [storage[20:60], storage[40:80]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", [(40, HEADS, DIM), (10, PAGE, HEADS, DIM), (2, HEADS, 13, DIM), (2, 13, HEADS, DIM)])
def test_bind_and_release_give_the_caches_back_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    keys, values = caches(*shape, dtype=dtype), caches(*shape, dtype=dtype)
    before, ids = [t.clone() for t in (*keys, *values)], [id(t) for t in (*keys, *values)]
    pool = make_pool(dtype=dtype)
    binding = bind(pool, keys=keys, values=values)
    assert binding.cache_bytes() == 0
    assert binding.report().bytes_released == sum(t.numel() * t.element_size() for t in before)
    pool.view(0, "key")[...] = pool.view(0, "key").clone()  # the pages are ordinary memory
    binding.release()
    assert [id(t) for t in (*keys, *values)] == ids
    for got, want in zip((*keys, *values), before, strict=True):
        assert type(got) is Tensor
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    assert pool.allocator.num_free == pool.num_pages
    with pytest.raises(RuntimeError, match="released already"):
        binding.release()


def test_a_stacked_cache_is_bound_by_its_views_and_every_object_over_it_becomes_a_facade() -> None:
    stack = torch.randn(2, LAYERS, 40, HEADS, DIM)
    kept, before = stack[1], stack.clone()  # kept: a view that the model holds and bind is not told of
    pool = make_pool()
    binding = bind(pool, keys=stack[0], values=stack[1])
    assert binding.cache_bytes() == 0
    for tensor in (stack, kept):
        assert type(tensor).__name__ == "Facade"
        with pytest.raises(RuntimeError, match="lives in pages"):
            tensor.sum()
    torch.testing.assert_close(pool.view(1, "value").reshape(40, HEADS, DIM), before[1, 1])
    binding.release()
    assert torch.equal(stack, before)
    assert torch.equal(kept, before[1])


def test_caches_made_in_inference_mode_are_given_back_too() -> None:
    with torch.inference_mode():
        stack = torch.randn(2, LAYERS, 40, HEADS, DIM)
        kept = stack[0, 1]
    before = stack.clone()
    for inside in (False, True):
        with torch.inference_mode(inside):
            binding = bind(make_pool(), keys=stack[0], values=stack[1])
            assert type(kept).__name__ == "Facade"
            binding.release()
        assert torch.equal(stack, before)
        assert kept.is_inference()
        with torch.inference_mode():
            stack.add_(1)
            before.add_(1)
        assert torch.equal(kept, before[0, 1])


def test_interleaved_k_and_v_of_one_tensor_are_told_apart() -> None:
    kv = [torch.randn(40, 2, HEADS, DIM) for _ in range(LAYERS)]
    before = copy.deepcopy(kv)
    pool = make_pool()
    binding = bind(pool, keys=[t[:, 0] for t in kv], values=[t[:, 1] for t in kv])

    def model(x: Tensor, at: Tensor) -> Tensor:
        for t in kv:
            t[at, 0], t[:, 1][at] = x, 2 * x
        return kv[0][at, 1] + kv[1][:, 0].index_select(0, at)

    x, at = torch.randn(3, HEADS, DIM), torch.tensor([1, 39, 7])
    with torch.no_grad():
        got = torch.compile(model, backend=page_major_backend(binding, inner="eager"), fullgraph=True)(x, at)
    torch.testing.assert_close(got, 2 * x + x)
    binding.release()
    for t, want in zip(kv, before, strict=True):
        want[at] = torch.stack([x, 2 * x], 1)
        assert torch.equal(t, want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keys": caches(36, HEADS, DIM)}, "make the pool with num_pages=9"),
        ({"keys": caches(9, PAGE, HEADS, DIM)}, "make the pool with num_pages=9"),
        ({"keys": caches(40, 3, DIM)}, "fits no cache form"),
        (
            {name: caches(2, HEADS, 24, DIM) for name in ("keys", "values")},
            "caches of 2 x 24 tokens need 12 pages of 4 tokens, the pool has 10 free of 10; give it more pages",
        ),
        ({name: caches(1, HEADS, 44, DIM) for name in ("keys", "values")}, "caches of 1 x 44 tokens need 11 pages"),
        ({"keys": caches(2, HEADS, HEADS, DIM)}, "say which with dims="),
        ({"keys": caches(40, HEADS, DIM), "dims": "BHSD"}, "is no BHSD cache"),
        ({"keys": caches(40, HEADS, DIM), "dims": "NHD"}, "dims='NHD' is unknown"),
        ({"keys": caches(40, HEADS, DIM)[:1]}, "1 key cache for a layout of 2 layers"),
        ({"keys": caches(40, HEADS, DIM, dtype=torch.float16)}, "they must agree"),
        ({"keys": [t.requires_grad_() for t in caches(40, HEADS, DIM)]}, "requires grad"),
        (
            {"keys": torch.randn(3, 40, HEADS, DIM)[:2], "values": caches(40, HEADS, DIM)},
            "bind every cache that lies in it",
        ),
        (
            {"keys": [torch.randn(40, HEADS, DIM)] * 2},
            "key cache of layer 1 is the key cache of layer 0 too; give each",
        ),
        (
            dict.fromkeys(("keys", "values"), caches(40, HEADS, DIM)),
            "value cache of layer 0 is the key cache of layer 0",
        ),
        (dict.fromkeys(("keys", "values"), torch.randn(2, 40, HEADS, DIM)), "value cache of layer 0 is the key cache"),
        ({"keys": overlapping(), "values": caches(40, HEADS, DIM)}, "bind every cache that lies in it, once"),
        (
            {"keys": [caches(2, HEADS, n, DIM)[0] for n in (13, 9)], "values": caches(2, HEADS, 13, DIM)},
            "one batch and length for all",
        ),
        ({"keys": [[1.0], [2.0]]}, "must be a plain torch.Tensor"),
        (
            {"keys": caches(40, HEADS, DIM)},
            "for 2 planes of the pool, 'value' from layer 0 on: .* pass keys=, val",
        ),
        ({"values": caches(40, HEADS, DIM)}, "no cache is given for 2 planes of the pool, 'key' from layer 0 on: "),
        ({}, "nothing to bind"),
        ({"cache": object()}, "has no layers"),
        ({"cache": object(), "keys": caches(40, HEADS, DIM)}, "not both"),
    ],
)
def test_what_cannot_be_bound_is_refused_and_nothing_changes(arguments: dict[str, Any], message: str) -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match=message):
        bind(pool, **arguments)
    assert pool.allocator.num_free == pool.num_pages
    assert not pool.buffer.any()


def test_keys_alone_are_bound_to_a_layout_of_keys_alone() -> None:
    pool = PagePool(page_major(LAYERS, HEADS, DIM, PAGE, torch.float32).part("key"), 10)
    keys = caches(40, HEADS, DIM)
    want = [k.clone() for k in keys]
    binding = bind(pool, keys=keys)
    assert repr(binding) == f"Binding(2 caches in {pool!r})"
    assert all(torch.equal(pool.view(i, "key").flatten(0, 1), k) for i, k in enumerate(want))
    binding.release()
    assert repr(binding).startswith("Binding(2 caches released from PagePool(")


def test_caches_may_come_from_a_generator() -> None:
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    binding = bind(make_pool(), keys=iter(keys), values=(v for v in values))
    assert [(p.layer, p.kind) for p in binding.planes] == [(i, k) for i in range(LAYERS) for k in ("key", "value")]


def test_a_layout_is_no_pool() -> None:
    with pytest.raises(ValueError, match=r"pool must be a pm_ops\.PagePool or a pm_ops\.HybridPool, got PageLayout"):
        bind(make_pool().layout, keys=caches(40, HEADS, DIM))  # type: ignore[arg-type]


def test_a_layout_that_would_quantise_what_the_model_writes_is_refused() -> None:
    pool = PagePool(page_major(LAYERS, HEADS, DIM, PAGE, torch.int8, scales=True), 10)
    keys = caches(40, HEADS, DIM, dtype=torch.int8)
    with pytest.raises(ValueError, match="key cache of layer 0 would be quantised.*without scales=True"):
        bind(pool, keys=keys)
    assert pool.allocator.num_free == pool.num_pages and type(keys[0]) is Tensor


def test_caches_addressed_by_slot_do_not_share_their_pool() -> None:
    pool = make_pool()
    taken = pool.allocator.alloc(3)
    with pytest.raises(ValueError, match=r"take every page of the pool; 3 of 10 are in use: make a pool of their own"):
        bind(pool, keys=caches(40, HEADS, DIM), values=caches(40, HEADS, DIM))
    pool.allocator.free(taken)
    bind(pool, keys=caches(40, HEADS, DIM), values=caches(40, HEADS, DIM))


@pytest.mark.parametrize("shape", [(40, HEADS, DIM), (2, HEADS, 13, DIM)])
def test_where_memory_runs_out_the_caches_and_the_pool_are_as_they_were(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = caches(*shape), caches(*shape)
    before, pool, fill = [t.clone() for t in (*keys, *values)], make_pool(), Cells.fill

    def fill_one(self: Cells, storage: torch.UntypedStorage) -> None:
        if self.plane.layer:
            raise torch.OutOfMemoryError("no memory for the indices")
        fill(self, storage)

    with monkeypatch.context() as patched:
        patched.setattr(Cells, "fill", fill_one)
        with pytest.raises(torch.OutOfMemoryError):
            bind(pool, keys=keys, values=values)
    assert pool.allocator.num_free == pool.num_pages
    assert all(type(t) is Tensor and torch.equal(t, b) for t, b in zip((*keys, *values), before, strict=True))
    bind(pool, keys=keys, values=values).release()


def test_a_bound_cache_is_not_bound_again() -> None:
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    bind(make_pool(), keys=keys, values=values)
    with pytest.raises(ValueError, match="bound already"):
        bind(make_pool(), keys=keys, values=values)


def test_dims_settles_a_shape_that_fits_two_forms() -> None:
    keys, values = caches(2, HEADS, HEADS, DIM), caches(2, HEADS, HEADS, DIM)
    for dims, first in (("BHSD", keys[0][1, :, 1]), ("BSHD", keys[0][1, 1])):
        want, pool = first.clone(), make_pool()
        binding = bind(pool, keys=keys, values=values, dims=dims)
        assert binding.page_table is not None
        assert torch.equal(pool.view(0, "key")[int(binding.page_table[1, 0]), 1], want)
        binding.release()
