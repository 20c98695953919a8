"""PageAllocator: free list, reference counts, copy-on-write, the reserved null page."""

import random

import pytest
import torch

from pm_ops import PageAllocator


@pytest.mark.parametrize("reserve_null", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk_agrees_with_a_dictionary_of_owners(seed: int, reserve_null: bool) -> None:
    """Any sequence of alloc, retain, free and writable leaves the counts that a plain model of owners has."""
    rng = random.Random(seed)
    size = rng.randint(2, 24)
    usable = size - reserve_null
    allocator = PageAllocator(size, reserve_null=reserve_null)
    owners: dict[int, int] = {}

    def some() -> list[int]:
        return rng.choices(sorted(owners), k=rng.randint(1, 3))

    for _ in range(600):
        step = rng.choice(("alloc", "retain", "free", "free", "writable"))
        if step == "alloc":
            n = rng.randint(0, 4)
            if n > usable - len(owners):
                with pytest.raises(RuntimeError, match="out of pages"):
                    allocator.alloc(n)
            else:
                pages = allocator.alloc(n)
                assert len(set(pages)) == n
                assert not set(pages) & set(owners)
                assert all(int(reserve_null) <= p < size for p in pages)
                owners |= dict.fromkeys(pages, 1)
        elif not owners:
            continue
        elif step == "retain":
            pages = some()
            allocator.retain(pages)
            for p in pages:
                owners[p] += 1
        elif step == "free":
            pages = some()
            if any(pages.count(p) > owners[p] for p in pages):
                with pytest.raises(RuntimeError, match="freed"):
                    allocator.free(pages)
            else:
                allocator.free(pages)
                for p in pages:
                    owners[p] -= 1
                owners = {p: n for p, n in owners.items() if n}
        else:
            (page,) = rng.choices(sorted(owners))
            if owners[page] == 1:
                assert allocator.writable(page) == page
            elif len(owners) == usable:
                with pytest.raises(RuntimeError, match="out of pages"):
                    allocator.writable(page)
            else:
                copy = allocator.writable(page)
                assert copy not in owners
                owners[page] -= 1
                owners[copy] = 1
        assert allocator.num_free == usable - len(owners)
        assert [allocator.refcount(p) for p in range(size)] == [owners.get(p, 0) for p in range(size)]


def test_all_pages_are_handed_out_once_then_it_is_an_error() -> None:
    allocator = PageAllocator(5)
    assert sorted(allocator.alloc(5)) == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="out of pages: 1 asked for, 0 of 5 free"):
        allocator.alloc()


def test_a_refused_allocation_takes_nothing() -> None:
    allocator = PageAllocator(3)
    allocator.alloc(2)
    with pytest.raises(RuntimeError, match="2 asked for, 1 of 3 free"):
        allocator.alloc(2)
    assert allocator.num_free == 1


def test_the_last_page_freed_comes_back_first() -> None:
    allocator = PageAllocator(8)
    a, b = allocator.alloc(2)
    allocator.free([a])
    allocator.free([b])
    assert allocator.alloc(2) == [b, a]


def test_a_double_free_is_an_error() -> None:
    allocator = PageAllocator(4)
    (page,) = allocator.alloc()
    allocator.free([page])
    with pytest.raises(RuntimeError, match=f"cannot free page {page}: it is free already"):
        allocator.free([page])


def test_freeing_a_page_twice_in_one_call_is_an_error_that_frees_nothing() -> None:
    allocator = PageAllocator(4)
    a, b = allocator.alloc(2)
    with pytest.raises(RuntimeError, match=f"page {b} freed 2 times at once, but has 1 owner$"):
        allocator.free([a, b, b])
    assert (allocator.refcount(a), allocator.refcount(b)) == (1, 1)
    allocator.retain([b])
    allocator.free([a, b, b])
    assert allocator.num_free == 4


def test_a_bad_page_in_a_list_leaves_the_others_as_they_were() -> None:
    allocator = PageAllocator(4)
    a, b = allocator.alloc(2)
    allocator.free([b])
    for call in (allocator.free, allocator.retain):
        with pytest.raises(RuntimeError, match=f"page {b}"):
            call([a, b])
        assert allocator.refcount(a) == 1


def test_a_shared_page_lives_until_its_last_owner_frees_it() -> None:
    allocator = PageAllocator(2)
    (page,) = allocator.alloc()
    allocator.retain([page])
    allocator.free([page])
    assert allocator.num_free == 1
    allocator.free([page])
    assert allocator.num_free == 2


def test_a_free_page_can_be_neither_retained_nor_written() -> None:
    allocator = PageAllocator(2)
    with pytest.raises(RuntimeError, match="cannot retain page 1"):
        allocator.retain([1])
    with pytest.raises(RuntimeError, match="cannot write to page 1"):
        allocator.writable(1)


def test_the_null_page_belongs_to_nobody() -> None:
    allocator = PageAllocator(3, reserve_null=True)
    assert allocator.num_free == 2
    for call in (allocator.free, allocator.retain):
        with pytest.raises(RuntimeError, match="reserved null page"):
            call([0])
    assert sorted(allocator.alloc(2)) == [1, 2]
    with pytest.raises(RuntimeError, match="out of pages"):
        allocator.alloc()


@pytest.mark.parametrize("page", [-1, 4, 1 << 40])
def test_a_page_of_another_pool_is_refused(page: int) -> None:
    allocator = PageAllocator(4)
    calls = (lambda: allocator.free([page]), lambda: allocator.retain([page]), lambda: allocator.writable(page))
    for call in (*calls, lambda: allocator.refcount(page)):
        with pytest.raises(ValueError, match=r"outside this allocator's pages 0 to 3"):
            call()


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot allocate -1 pages"):
        PageAllocator(4).alloc(-1)


def test_copy_on_write_without_a_free_page_is_an_error_that_changes_nothing() -> None:
    allocator = PageAllocator(1)
    (page,) = allocator.alloc()
    allocator.retain([page])
    with pytest.raises(RuntimeError, match="out of pages"):
        allocator.writable(page)
    assert allocator.refcount(page) == 2


def test_pages_may_be_a_tensor_and_are_handed_out_again_as_integers() -> None:
    allocator = PageAllocator(4)
    pages = allocator.alloc(2)
    allocator.retain(torch.tensor(pages))
    allocator.free(torch.tensor(pages))
    with pytest.raises(RuntimeError, match="freed 2 times at once, but has 1 owner"):
        allocator.free(torch.tensor([pages[0], pages[0]]))
    allocator.free([torch.tensor(page) for page in pages])
    assert allocator.num_free == 4 and all(type(page) is int for page in allocator.alloc(4))


@pytest.mark.parametrize("pages", [0, [0.0], [[0]], [True], torch.tensor(0), torch.tensor([0.5]), torch.tensor([True])])
def test_what_is_no_list_of_integers_is_refused(pages) -> None:
    allocator = PageAllocator(4)
    allocator.alloc(4)
    for call in (allocator.retain, allocator.free):
        with pytest.raises(ValueError, match="pages must be "):
            call(pages)
    assert [allocator.refcount(page) for page in range(4)] == [1] * 4
