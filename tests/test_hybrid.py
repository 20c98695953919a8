"""Several kinds of page over one buffer: one allocator for all, or two that grow toward each other."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import pm_ops
from pm_ops import HybridPool, PageLayout, TwoEndedPool
from pm_ops.hybrid import smallest_page_size
from pm_ops.testing import fill_random, page_bytes, writes_only

F32, F16 = torch.float32, torch.float16
FULL = pm_ops.page_major(2, 2, 8, 4, F16).numbered([1, 4])
WINDOW = pm_ops.page_major(1, 2, 8, 4, F16).numbered([3])
STATE = pm_ops.state_page([0, 2], {"conv": ((6, 3), F16), "ssm": ((2, 4, 5), F32)}, align=4)
KINDS = {"full": FULL, "window": WINDOW, "state": STATE}


def filled(pool: HybridPool) -> HybridPool:
    fill_random(pool.whole.buffer)
    return pool


def test_every_kind_has_its_planes_in_the_same_pages() -> None:
    pool = filled(HybridPool(KINDS, 5))
    stride = pool.whole.page_stride
    assert list(pool) == list(KINDS) and len(pool) == 3 and "state" in pool
    assert stride % 16 == 0 and stride - 16 < max(layout.page_bytes for layout in KINDS.values()) <= stride
    assert pool.padding == {name: stride - layout.page_bytes for name, layout in KINDS.items()}
    for name, layout in KINDS.items():
        assert pool[name].allocator is pool.allocator and pool[name].layout == layout
        assert pool[name].buffer is pool.whole.buffer and pool[name].page_stride == stride
        for page in range(5):
            for plane in layout.planes:
                with writes_only(pool.whole.buffer, page_bytes(pool[name], [page])):
                    pool[name].view(plane.layer, plane.kind)[page] = 1


@pytest.mark.parametrize(
    "use",
    [
        lambda pool, folder: pm_ops.HostPool(pool, 2),
        lambda pool, folder: pm_ops.PageStore(folder, 1 << 20, model="any").put("key", pool, [0]),
        lambda pool, folder: pm_ops.save_pages(folder / "file", pool, [0], model="any"),
        lambda pool, folder: pm_ops.store_kv(pool, 1, torch.ones(1, 2, 8), None, torch.tensor([0])),
        lambda pool, folder: pool.copy([0], [1]),
        lambda pool, folder: pool.buffer,
    ],
)
def test_where_one_of_its_pools_is_wanted_the_error_names_them(use: Any, tmp_path: Path) -> None:
    remedy = r"; take pool\.whole for pages of any kind, pool\['full'\] or pool\['window'\] or pool\['state'\] for"
    with pytest.raises((ValueError, AttributeError), match=f"HybridPool.*{remedy}"):
        use(HybridPool(KINDS, 3), tmp_path)


def test_a_kind_that_is_not_there_is_refused_with_those_that_are() -> None:
    pool = HybridPool(KINDS, 3)
    with pytest.raises(KeyError, match="no kind of page 'attention'; there are 'full', 'window', 'state'"):
        pool["attention"]
    assert "attention" not in pool and pool.get("attention") is None
    assert not hasattr(pool, "_other") and list(copy.copy(pool)) == list(KINDS)


def test_a_page_serves_one_kind_after_another() -> None:
    pool = HybridPool(KINDS, 3)
    first = pool["full"].allocator.alloc(2)
    (state,) = pool["state"].allocator.alloc()
    with pytest.raises(RuntimeError, match="out of pages: 1 asked for, 0 of 3 free"):
        pool["window"].allocator.alloc()
    pool.allocator.free([first[0]])
    assert pool["state"].allocator.alloc() == [first[0]] != [state]
    null = HybridPool(KINDS, 3, reserve_null=True)
    assert null.allocator.num_free == 2 and null["state"].reserve_null


def test_one_call_copies_a_sequence_whole() -> None:
    """Pages of keys and values, of a window group, and of the states, together; every other byte stays."""
    pool = filled(HybridPool(KINDS, 9))
    src = {"full": [0, 3], "window": [5], "state": [7]}
    dst = {"full": [8, 1], "window": [2], "state": [4]}
    flat = [[page for pages in kinds.values() for page in pages] for kinds in (src, dst)]
    with writes_only(pool.whole.buffer, page_bytes(pool.whole, flat[1])):
        pool.whole.copy(*flat)
    for name, layout in KINDS.items():
        for plane in layout.planes:
            bits = pool[name].view(plane.layer, plane.kind).view(torch.int16)
            assert torch.equal(bits[src[name]], bits[dst[name]])
    host = pm_ops.HostPool(pool.whole, 4)
    saved = host.offload(flat[0])
    saved.synchronize()
    kept = pool.whole.gather(flat[0])
    pool.whole.zero(flat[0])
    host.restore(saved.pages, flat[0]).synchronize()
    assert torch.equal(pool.whole.gather(flat[0]), kept)


def test_attention_and_states_work_in_the_pages_of_one_buffer() -> None:
    pool = HybridPool(KINDS, 4)
    pages, state = pool.allocator.alloc(2), torch.tensor(pool.allocator.alloc())
    key, x = torch.randn(6, 2, 8), torch.randn(6, 6)
    slots = torch.tensor([page * 4 + i for page in pages for i in range(4)][:6])
    pm_ops.store_kv(pool["full"], 4, key, key, slots)
    pm_ops.conv1d_prefill(pool["state"], 2, x, torch.randn(6, 4), torch.tensor([0, 6]), state)
    assert torch.equal(pm_ops.load_kv(pool["full"], 4, slots), key.half())
    assert torch.equal(pool["state"].view(2, "conv")[state[0]], x[3:].T.half())


@pytest.mark.parametrize("make", [lambda k: HybridPool(k, 4), lambda k: TwoEndedPool(k["a"], k["b"], 1 << 12)])
def test_two_kinds_with_the_same_plane_are_refused(make) -> None:
    kinds = {"a": FULL, "b": pm_ops.page_major(1, 2, 8, 4, F16).numbered([4])}
    with pytest.raises(ValueError, match="both have a plane 'key' of layer 4; number the "):
        make(kinds)


def test_no_kind_and_a_buffer_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one kind"):
        HybridPool({}, 4)
    with pytest.raises(ValueError, match="the pool's pages end at byte"):
        HybridPool(KINDS, 4, buffer=torch.zeros(100, dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not hold a page of each kind"):
        TwoEndedPool(FULL, STATE, FULL.page_bytes + STATE.page_bytes - 1)


def spans(pool: TwoEndedPool, low: list[int], high: list[int]) -> list[range]:
    begins = [(pool.low, page) for page in low] + [(pool.high, page) for page in high]
    return [
        range(p.base + page * p.page_stride, p.base + page * p.page_stride + p.layout.page_bytes) for p, page in begins
    ]


@pytest.mark.parametrize("seed", range(6))
def test_two_ends_never_overlap_and_use_what_is_free(seed: int) -> None:
    """A random walk against a plain model: the extents by the pages in use, and what fits between them."""
    rng = random.Random(seed)
    nbytes = rng.randint(FULL.page_bytes + STATE.page_bytes + 16, 20 * FULL.page_bytes)
    pool = TwoEndedPool(FULL, STATE, nbytes)
    kinds, used = (pool.low, pool.high), ([], [])
    size = pool.buffer.numel()
    assert [kind.page_stride for kind in kinds] == [512, 400] and pool.high.base % 16 == 0
    for _ in range(200):
        side = rng.randint(0, 1)
        own, other = kinds[side], kinds[1 - side]
        ranks = [sorted(p if i == 0 else k.num_pages - 1 - p for p in used[i]) for i, k in enumerate(kinds)]
        taken = (ranks[1 - side][-1] + 1) * other.page_stride if ranks[1 - side] else 0
        fits = min((size - taken) // own.page_stride, own.num_pages)
        free = [r for r in range(fits) if r not in ranks[side]]
        assert own.allocator.num_free == len(free)
        if rng.random() < 0.6:
            n = rng.randint(0, 3)
            if n > len(free):
                with pytest.raises(RuntimeError, match="free some of either kind"):
                    own.allocator.alloc(n)
                continue
            got = own.allocator.alloc(n)
            assert sorted(p if side == 0 else own.num_pages - 1 - p for p in got) == free[:n]
            used[side].extend(got)
        elif used[side]:
            rng.shuffle(used[side])
            freed, used[side][:2] = used[side][:2], []
            own.allocator.free(freed)
        found = spans(pool, *used)
        assert sum(map(len, found)) == len({byte for span in found for byte in span})
        assert all(span.start >= 0 and span.stop <= size for span in found)


def test_a_sequence_of_a_two_ended_pool_is_copied_whole() -> None:
    pool = TwoEndedPool(FULL, STATE, 8 * (FULL.page_bytes + STATE.page_bytes))
    fill_random(pool.buffer)
    low, high = pool.low.allocator.alloc(4), pool.high.allocator.alloc(2)
    owned = [*page_bytes(pool.low, low[2:]), *page_bytes(pool.high, high[1:])]
    with writes_only(pool.buffer, owned):
        pool.copy((low[:2], low[2:]), (high[:1], high[1:]))
    assert torch.equal(pool.low.pages[low[:2]], pool.low.pages[low[2:]])
    assert torch.equal(pool.high.pages[high[0]], pool.high.pages[high[1]])


def test_the_page_size_at_which_attention_pages_are_as_long_as_a_states() -> None:
    assert smallest_page_size(1024, 1024 * 16) == 16 and smallest_page_size(1024, 1024 * 16 + 1) == 32
    assert smallest_page_size(100, 1001, multiple=1) == 11
    with pytest.raises(ValueError, match="must be positive"):
        smallest_page_size(0, 1)


def test_layers_are_numbered_as_in_the_model() -> None:
    assert (
        FULL.layers == (1, 4)
        and FULL.plane(4, "key").offset == pm_ops.page_major(2, 2, 8, 4, F16).plane(1, "key").offset
    )
    for numbers in ([1], [1, 1], [1, 2, 3]):
        with pytest.raises(ValueError, match="a number of its own to each of 2 layers"):
            FULL.numbered(numbers)
    assert isinstance(FULL, PageLayout) and FULL.name == "page_major"
