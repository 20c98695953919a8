"""Transfer descriptors against a byte oracle: which bytes, in which order, in how few runs; and copies by them."""

import ctypes
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
import torch
from pages import LAYOUTS, packed_pool, spaced_pool

import pm_ops
from pm_ops import PageLayout, PagePool
from pm_ops.descriptors import Copy, Descriptor, Region
from pm_ops.testing import page_bytes, writes_only

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
every_pool = pytest.mark.parametrize("make", [packed_pool, spaced_pool])
PAGES = [4, 5, 6, 0, 2, 1, 7]
LAYERS = [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2]]


def layer_bytes(pool: PagePool, page: int, layers: Iterable[int]) -> list[int]:
    """Every byte of the buffer that holds data of these layers in a page, by the byte formula, ascending."""
    owned = []
    for p in (p for p in pool.layout.planes if p.layer in layers):
        start = pool.base + page * pool.page_stride + p.offset
        row = p.dtype.itemsize
        for size in p.shape[1:]:
            row *= size
        for token in range(pool.page_size if p.token_stride is not None else 1):
            for head in range(p.shape[0]):
                at = start + token * (p.token_stride or 0) + head * p.head_stride
                owned += range(at, at + row)
    return sorted(owned)


def covered(pool: PagePool, runs: Sequence[Descriptor]) -> list[int]:
    """The bytes of the buffer that the runs name, in their order."""
    start = pool.buffer.data_ptr()
    return [byte - start for address, nbytes in runs for byte in range(address, address + nbytes)]


def cannot_be_fewer(runs: Sequence[Descriptor]) -> bool:
    return all(a.address + a.nbytes != b.address for a, b in pairwise(runs))


def move(copies: Sequence[Copy]) -> None:
    for src, dst, nbytes in copies:
        ctypes.memmove(dst, src, nbytes)


@every_pool
@every_layout
def test_whole_pages_are_the_bytes_of_gather_in_the_fewest_runs(make, layout: PageLayout) -> None:
    pool = make(layout, 8)
    for pages in (PAGES, [3], [], [2, 2, 3], list(range(8))):
        runs = pm_ops.page_descriptors(pool, pages)
        assert covered(pool, runs) == [byte for page in pages for byte in page_bytes(pool, [page])]
        assert cannot_be_fewer(runs)
        assert pool.buffer[covered(pool, runs)].equal(pool.gather(pages).flatten())


@every_pool
@every_layout
@pytest.mark.parametrize("layers", LAYERS)
def test_a_range_of_layers_is_exactly_their_data(make, layout: PageLayout, layers: list[int]) -> None:
    pool = make(layout, 8)
    runs = pm_ops.page_descriptors(pool, PAGES, layers)
    assert covered(pool, runs) == [byte for page in PAGES for byte in layer_bytes(pool, page, layers)]
    assert cannot_be_fewer(runs)


def test_counts_of_pages_back_to_back_and_apart() -> None:
    """Four runs of ids are four descriptors where pages touch, one a page where they do not."""
    layout = LAYOUTS["page_major"]
    packed, spaced = packed_pool(layout, 8), spaced_pool(layout, 8)
    assert [run.nbytes // layout.page_bytes for run in pm_ops.page_descriptors(packed, PAGES)] == [3, 1, 1, 1, 1]
    assert len(pm_ops.page_descriptors(spaced, PAGES)) == len(PAGES)
    assert pm_ops.page_descriptors(packed, torch.tensor(PAGES, dtype=torch.int32)) == pm_ops.page_descriptors(
        packed, PAGES
    )
    assert pm_ops.count_layer_major(packed, PAGES) == 2 * 3 * 5
    assert pm_ops.count_layer_major(spaced, PAGES, [1]) == 2 * 5
    assert pm_ops.count_layer_major(packed, []) == 0


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("page_major", 1, 1),  # a (page, layer) block is contiguous
        ("vllm BLNHC", 1, 1),
        ("vllm BLHNC", 1, 1),
        ("vllm BHLNC", 3, 3),  # once a head
        ("token_major", 4, 4),  # once a token
        ("int8 with scales", 3, 3),  # K and V, and each one's scales, which are padded to 16 bytes
    ],
)
def test_runs_of_a_layer_and_of_two(name: str, one: int, two: int) -> None:
    pool = packed_pool(LAYOUTS[name], 8)
    assert len(pm_ops.page_descriptors(pool, [5], [1])) == one
    assert len(pm_ops.page_descriptors(pool, [5], range(1, 2))) == one
    if name != "int8 with scales":
        assert len(pm_ops.page_descriptors(pool, [5], [0, 1])) == two


def test_bytes_that_touch_across_pages_are_one_run() -> None:
    """The last layer of a page and the first of the next lie back to back; the layer between does not."""
    pool = packed_pool(LAYOUTS["page_major"], 4)
    block = pool.layout.page_bytes // 3
    assert [run.nbytes for run in pm_ops.page_descriptors(pool, [1, 2], [0, 2])] == [block, 2 * block, block]


@every_layout
@pytest.mark.parametrize("makes", [(packed_pool, packed_pool), (packed_pool, spaced_pool), (spaced_pool, packed_pool)])
def test_copies_by_descriptors_are_gather_and_scatter(layout: PageLayout, makes) -> None:
    src, dst = makes[0](layout, 8, 1), makes[1](layout, 9, 2)
    there = [8, 0, 1, 2, 3, 5, 4]
    expected = PagePool(layout, 9, buffer=dst.buffer.clone(), base=dst.base, page_stride=dst.page_stride)
    expected.scatter(there, src.gather(PAGES))
    copies = pm_ops.pair_descriptors(pm_ops.page_descriptors(src, PAGES), pm_ops.page_descriptors(dst, there))
    with writes_only(dst.buffer, page_bytes(dst, there)):
        move(copies)
    assert torch.equal(dst.buffer, expected.buffer)


@every_layout
def test_layer_after_layer_carries_all_data_and_no_padding(layout: PageLayout) -> None:
    src, dst = packed_pool(layout, 8, 1), spaced_pool(layout, 8, 2)
    there = [7, 6, 5, 0, 1, 2, 3]
    for layer in range(3):
        owned = [byte for page in there for byte in layer_bytes(dst, page, [layer])]
        with writes_only(dst.buffer, owned):
            sides = (pm_ops.page_descriptors(pool, ids, [layer]) for pool, ids in ((src, PAGES), (dst, there)))
            move(pm_ops.pair_descriptors(*sides))
        assert torch.equal(dst.buffer[owned], src.buffer[[b for p in PAGES for b in layer_bytes(src, p, [layer])]])


def test_pairs_are_cut_where_either_side_ends_and_nowhere_else() -> None:
    src = [Descriptor(100, 10), Descriptor(200, 5), Descriptor(300, 5)]
    dst = [Descriptor(500, 4), Descriptor(600, 11), Descriptor(700, 5)]
    assert pm_ops.pair_descriptors(src, dst) == [
        Copy(100, 500, 4), Copy(104, 600, 6), Copy(200, 606, 5), Copy(300, 700, 5)
    ]  # fmt: skip
    assert pm_ops.pair_descriptors([], []) == []


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([Descriptor(0, 4)], [Descriptor(10, 5)], "src has 4 bytes, dst 5"),
        ([Descriptor(0, 4)], [], "src has 4 bytes, dst 0"),
        ([Descriptor(0, 8)], [Descriptor(14, 4), Descriptor(11, 4)], "dst has the byte at 0xe twice"),
        ([Descriptor(0, 0)], [Descriptor(14, 0)], "less than one byte"),
    ],
)
def test_lists_that_do_not_pair_are_refused(src, dst, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pm_ops.pair_descriptors(src, dst)


@pytest.mark.parametrize("pages", [[0, -1], [8], torch.tensor([3, 8]), torch.tensor([-1])])
def test_a_page_that_is_not_there_is_refused(pages) -> None:
    pool = packed_pool(LAYOUTS["page_major"], 8)
    for call in (pm_ops.page_descriptors, pm_ops.count_layer_major):
        with pytest.raises(ValueError, match=r"none of the pool's pages 0 to 7"):
            call(pool, pages)


@pytest.mark.parametrize(
    "pages",
    [[1.0], [0, 1.9], [True, False], ["1"], [[1]], {1, 2}, 1, None, torch.tensor(1), torch.tensor([1.9, 2.2]),
     torch.tensor([True, False]), torch.tensor([[1, 2]]), torch.tensor([1], dtype=torch.uint8)],
)  # fmt: skip
def test_what_is_no_list_of_integers_is_refused_and_not_rounded(pages) -> None:
    """A mask would be pages 1 and 0."""
    pool = packed_pool(LAYOUTS["page_major"], 8)
    host = pm_ops.HostPool(pool, 4)
    for call in (
        lambda: pm_ops.page_descriptors(pool, pages),
        lambda: host.offload(pages),
        lambda: host.restore([], pages),
        lambda: pm_ops.save_pages("nowhere", pool, pages, model="m"),
    ):
        with pytest.raises(ValueError, match="pages must be "):
            call()


@pytest.mark.parametrize("pages", [(1, 0), range(2), [torch.tensor(1), 0], {1: 0, 0: 0}, torch.tensor([1, 0]).int()])
def test_page_ids_may_be_in_any_list_of_integers(pages) -> None:
    pool = packed_pool(LAYOUTS["page_major"], 8)
    assert pm_ops.page_descriptors(pool, pages) == pm_ops.page_descriptors(pool, [int(page) for page in pages])


def test_a_layer_that_is_not_there_is_refused() -> None:
    pool = packed_pool(LAYOUTS["page_major"], 8)
    for call in (pm_ops.page_descriptors, pm_ops.count_layer_major):
        with pytest.raises(ValueError, match=r"no layer 3 in this layout, whose layers are \[0, 1, 2\]"):
            call(pool, [0], range(2, 5))


def test_regions_hold_every_page_and_nothing_behind_the_last() -> None:
    pool = spaced_pool(LAYOUTS["page_major"], 4)
    (region,) = pm_ops.page_regions(pool)
    owned = page_bytes(pool, range(4))
    assert region == Region(pool.buffer.data_ptr() + owned[0], owned[-1] + 1 - owned[0], torch.device("cpu"))
    for address, nbytes in pm_ops.page_descriptors(pool, range(4)):
        assert region.address <= address and address + nbytes <= region.address + region.nbytes


def test_pools_that_interleave_share_a_region_and_others_do_not() -> None:
    a, b = LAYOUTS["page_major"], LAYOUTS["states"]
    stride = a.page_bytes + b.page_bytes
    buffer = torch.zeros(4 * stride, dtype=torch.uint8)
    first = PagePool(a, 4, buffer=buffer, page_stride=stride)
    second = PagePool(b, 4, buffer=buffer, base=a.page_bytes, page_stride=stride)
    assert pm_ops.page_regions(second, first) == [Region(buffer.data_ptr(), 4 * stride, torch.device("cpu"))]
    other = packed_pool(a, 2)
    assert len(pm_ops.page_regions(first, other, second)) == 2
    assert pm_ops.page_regions() == []


def test_a_pool_without_memory_has_no_addresses() -> None:
    pool = PagePool(LAYOUTS["page_major"], 2, buffer=torch.empty(4096, dtype=torch.uint8, device="meta"))
    with pytest.raises(ValueError, match="meta device"):
        pm_ops.page_descriptors(pool, [0])


def test_addresses_of_a_pool_larger_than_two_gib_are_not_cut() -> None:
    """Pages of 2 MiB: page 5000 begins 10 GB behind page 0. Memory that nothing touches takes none."""
    layout = pm_ops.page_major(32, 8, 128, 16, torch.bfloat16)
    assert layout.page_bytes == 2 << 20
    pool = PagePool(layout, 5001, buffer=torch.empty(5001 * (2 << 20), dtype=torch.uint8))
    runs = pm_ops.page_descriptors(pool, [4999, 5000, 0])
    start = pool.buffer.data_ptr()
    assert runs == [Descriptor(start + 4999 * (2 << 20), 4 << 20), Descriptor(start, 2 << 20)]
