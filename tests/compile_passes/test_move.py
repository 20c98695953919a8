"""A bound sequence moves to other pages in one call: bytes, tokens, and who owns which page before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import Binding, bind
from pm_ops.testing import fill_random, page_bytes, writes_only

BATCH, HEADS, SEQ, DIM, PAGE, COLUMNS = 2, 2, 14, 8, 4, 4


def write(k: Tensor, v: Tensor, x: Tensor, y: Tensor, at: Tensor) -> None:
    k.index_copy_(2, at, x)
    v.index_copy_(2, at, y)


def read(k: Tensor, v: Tensor, x: Tensor, at: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, k, v)


def make_binding(pages: int = 13) -> tuple[PagePool, Binding, Tensor]:
    """A pool of random bytes with two sequences in it, and the page table."""
    pool = PagePool(page_major(1, HEADS, DIM, PAGE, torch.float32), pages)
    fill_random(pool.buffer)
    binding = bind(pool, **{name: [torch.randn(BATCH, HEADS, SEQ, DIM)] for name in ("keys", "values")})
    assert binding.page_table is not None
    return pool, binding, binding.page_table


def test_a_moved_sequence_goes_on_as_before(paged: Any) -> None:
    """To pages of the allocator and to given ones; the old ones are wiped, and may be handed out again."""
    twins = paged(form="BHSD", write=write, read=read, pages=13)
    pool, table = twins.pool, twins.binding.page_table
    twins.check(torch.randn(BATCH, HEADS, 5, DIM), torch.arange(5))
    for step, given in enumerate((False, True)):
        old = table[1].tolist()
        new = pool.allocator.alloc(COLUMNS) if given else None
        got = twins.binding.move(1, None if new is None else torch.tensor(new))
        assert got == table[1].tolist() and not set(got) & set(old) and new in (None, got)
        pool.pages[old] = 0xFF  # NaN, and what check_pages wants of pages without an owner
        twins.check(torch.randn(BATCH, HEADS, 1, DIM), torch.tensor([5 + step]))
        twins.check_pages()
    assert len(twins.backend.graphs) <= 2, "a moved sequence is no reason to compile anew"


def test_its_new_pages_alone_are_written() -> None:
    pool, binding, table = make_binding()
    other, old = table[0].tolist(), table[1].tolist()
    new, before = pool.allocator.alloc(COLUMNS), pool.gather(table[1])
    with writes_only(pool.buffer, page_bytes(pool, new)):
        assert binding.move(1, new) == new
    assert torch.equal(pool.gather(new), before) and table.tolist() == [other, new] and table.dtype == torch.int32
    assert [pool.allocator.refcount(page) for page in (*old, *new, *other)] == [0] * 4 + [1] * 8


def test_old_pages_that_somebody_else_retained_stay_theirs() -> None:
    """A shared prefix, say. After release every other page is free."""
    pool, binding, table = make_binding()
    shared = table[0, :2].tolist()
    pool.allocator.retain(shared)
    held = pool.gather(shared)
    binding.move(0)
    assert [pool.allocator.refcount(page) for page in shared] == [1, 1] and torch.equal(pool.gather(shared), held)
    binding.release()
    assert pool.allocator.num_free == pool.num_pages - 2


@pytest.mark.parametrize("inside", [False, True])
def test_the_table_may_be_of_inference_mode(inside: bool) -> None:
    with torch.inference_mode(not inside):
        _, binding, table = make_binding()
    with torch.inference_mode(inside):
        assert binding.move(0) == table[0].tolist()


REFUSED: dict[str, tuple[type[Exception], str, Callable[[PagePool, Tensor], tuple[Any, ...]]]] = {
    "no such row": (ValueError, "no row 2 in a page table of 2 sequences", lambda pool, table: (2,)),
    "counted back": (ValueError, "no row -1", lambda pool, table: (-1,)),
    "a flag": (TypeError, "row True is no integer", lambda pool, table: (True,)),
    "a fraction": (TypeError, "float", lambda pool, table: (1.0,)),
    "a name": (TypeError, "str", lambda pool, table: ("0",)),
    "too few": (ValueError, "3 pages for a sequence of 4", lambda pool, table: (0, free(pool)[:3])),
    "unknown": (ValueError, "page 99 is none of the pool's", lambda pool, table: (0, [*free(pool)[:3], 99])),
    "twice": (ValueError, "is named twice", lambda pool, table: (0, [*free(pool)[:3], free(pool)[0]])),
    "its own": (ValueError, "in the page table already", lambda pool, table: (0, table[0])),
    "another row's": (ValueError, "in the page table already", lambda pool, table: (0, table[1])),
    "free": (RuntimeError, "has 0 owners; give pages of pool.allocator.alloc", lambda pool, table: (0, free(pool))),
}


def free(pool: PagePool) -> list[int]:
    return [page for page in range(pool.num_pages) if not pool.allocator.refcount(page)][:COLUMNS]


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_moved_is_refused_and_nothing_changes(case: str) -> None:
    kind, message, arguments = REFUSED[case]
    pool, binding, table = make_binding()
    given, before = arguments(pool, table), (pool.buffer.clone(), table.clone(), pool.allocator.num_free)
    with pytest.raises(kind, match=message):
        binding.move(*given)
    assert torch.equal(pool.buffer, before[0]) and torch.equal(table, before[1])
    assert pool.allocator.num_free == before[2]


@pytest.mark.parametrize("given", [False, True])
def test_where_the_copy_fails_the_sequence_stays(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New pages are free again; given ones are still the caller's."""
    pool, binding, table = make_binding()
    new = pool.allocator.alloc(COLUMNS) if given else None
    before = (pool.buffer.clone(), table.clone(), pool.allocator.num_free)

    def fail(old: Any, new: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(pool, "copy", fail)
        with pytest.raises(RuntimeError, match="CUDA out of memory"):
            binding.move(1, new)
    assert torch.equal(pool.buffer, before[0]) and torch.equal(table, before[1])
    assert pool.allocator.num_free == before[2] and all(pool.allocator.refcount(page) == 1 for page in new or ())
    assert binding.move(1, new) == table[1].tolist()


def test_pages_with_another_owner_are_refused() -> None:
    """Their bytes are somebody's."""
    pool, binding, _ = make_binding()
    shared = pool.allocator.alloc(COLUMNS)
    pool.allocator.retain(shared[1:2])
    before = pool.buffer.clone()
    with pytest.raises(RuntimeError, match=f"page {shared[1]} has 2 owners"):
        binding.move(0, shared)
    assert torch.equal(pool.buffer, before)


def test_where_no_pages_are_left_nothing_changes() -> None:
    pool, binding, table = make_binding(pages=11)
    before = table.clone()
    with pytest.raises(RuntimeError, match="out of pages: 4 asked for, 3 of 11 free"):
        binding.move(0)
    assert torch.equal(table, before) and pool.allocator.num_free == 3
    binding.release()
    with pytest.raises(RuntimeError, match="released already"):
        binding.move(0)


def test_caches_addressed_by_slot_have_no_row_to_move() -> None:
    pool = PagePool(page_major(1, HEADS, DIM, PAGE, torch.float32), 10)
    binding = bind(pool, **{name: [torch.randn(40, HEADS, DIM)] for name in ("keys", "values")})
    with pytest.raises(ValueError, match="addressed by slot or page take every page of the pool: there is no row"):
        binding.move(0)
