"""The page verbs' kernels: whole pages and token slots, byte for byte."""

from __future__ import annotations

import oracle
import pytest
import torch
from kernels.cases import Pages, check_bytes, on_each_device, pages

from pm_ops.kernels import pages as pages_module
from pm_ops.kernels.pages import copy_pages, copy_slots, gather_pages, scatter_pages, zero_pages
from pm_ops.ops.pages import CopyPages, CopySlots, GatherPages, ScatterPages, ZeroPages

# (bytes of a row, base, gap): the widest words are 16 bytes, 8, 4, 2 and 1
GEOMETRIES = [(32, 0, 0), (32, 64, 48), (24, 8, 8), (20, 0, 4), (32, 2, 0), (33, 0, 0), (3001, 5, 1)]


def make(row: int, base: int, gap: int, num_pages: int = 7) -> Pages:
    return pages("page_major", 3, num_pages, 2, {"key": (1, row, 1), "value": (1, row, 1)}, base=base, gap=gap)


def page(pool: Pages, i: int) -> torch.Tensor:
    span = oracle.page_bytes(pool.region, i)
    return pool.buffer[span.start : span.stop]


def ids(device: str, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@on_each_device
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gather_returns_pages_as_rows_and_zeros_for_pages_that_do_not_exist(device, geometry, index):
    pool = make(*geometry)
    wanted = [6, -1, 0, 3, 3, 7]
    rows = gather_pages(GatherPages(pool.to(device).buffer, ids(device, wanted, index), pool.region)).cpu()
    assert rows.shape == (6, pool.region[2])
    for row, i in zip(rows, wanted, strict=True):
        assert torch.equal(row, page(pool, i) if 0 <= i < 7 else torch.zeros_like(row))


@on_each_device
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_scatter_writes_its_pages_and_no_other_byte(device, geometry):
    pool = make(*geometry)
    wanted = [6, -1, 0, 7, 3]
    rows = torch.randint(0, 256, (5, pool.region[2]), dtype=torch.uint8)
    expected, touched = pool.buffer.clone(), set()
    for row, i in zip(rows, wanted, strict=True):
        if 0 <= i < 7:
            span = oracle.page_bytes(pool.region, i)
            expected[span.start : span.stop] = row
            touched |= set(span)
    there = pool.to(device)
    scatter_pages(ScatterPages(there.buffer, rows.to(device), ids(device, wanted), pool.region))
    check_bytes(pool.buffer, there.buffer, expected, touched)


@on_each_device
def test_scatter_takes_rows_that_are_strided_or_start_at_an_odd_byte(device):
    pool = make(32, 0, 0)
    nbytes = pool.region[2]
    wide = torch.randint(0, 256, (2, nbytes + 3), dtype=torch.uint8)
    odd = torch.randint(0, 256, (2 * nbytes + 1,), dtype=torch.uint8)
    for rows in (wide.to(device)[:, 1:-2], odd.to(device)[1:].view(2, nbytes)):
        there = pool.to(device)
        scatter_pages(ScatterPages(there.buffer, rows, ids(device, [2, 5]), pool.region))
        assert torch.equal(torch.stack([page(there, 2), page(there, 5)]), rows)


@on_each_device
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_zero_clears_exactly_its_pages(device, geometry):
    """A zeroer that takes a page's stride for its span, or one layer's for all, fails on pages 4 and 6."""
    pool = make(*geometry)
    expected = pool.buffer.clone()
    span = oracle.page_bytes(pool.region, 5)
    expected[span.start : span.stop] = 0
    there = pool.to(device)
    zero_pages(ZeroPages(there.buffer, ids(device, [5, -1, 7]), pool.region))
    check_bytes(pool.buffer, there.buffer, expected, span)


PATTERNS = {
    "apart": ([0, 1, 2], [4, 5, 6]),
    "a cycle": ([0, 1, 2, 3], [1, 2, 3, 0]),
    "two swaps": ([0, 6, 3, 4], [6, 0, 4, 3]),
    "a chain": ([2, 3, 4], [3, 4, 5]),
    "a chain from its end": ([4, 3, 2], [5, 4, 3]),
    "one source, many targets, itself read too": ([0, 0, 0, 3, 1], [1, 2, 4, 0, 5]),
    "onto themselves": ([5, 0, 2], [5, 1, 2]),
    "onto itself, and read by another": ([5, 5, 1], [5, 1, 6]),
    "pairs of which one is missing": ([-1, 2, 7, 3, 5], [1, -1, 4, 7, 2]),
    "a target that only a missing pair reads": ([1, 2, 2], [2, -1, 9]),
    "none at all": ([-1, 7], [-5, 8]),
}


def gather_then_scatter(rows: torch.Tensor, src: list[int], dst: list[int]) -> tuple[torch.Tensor, list[int]]:
    """The specification on the rows of a matrix, and the rows that are written."""
    pairs = [(i, j) for i, j in zip(src, dst, strict=True) if 0 <= i < len(rows) and 0 <= j < len(rows)]
    after = rows.clone()
    after[[j for _, j in pairs]] = rows[[i for i, _ in pairs]]
    return after, [j for _, j in pairs]


@pytest.fixture(params=["compared by the copy", "compared before", "looked up"])
def small_parts(request, monkeypatch):
    """A page in several programs, and every way to find the rows to stage; gives the flags of all launches."""
    flags: list[torch.Tensor] = []
    launch = pages_module.launch

    def kept(kernel, grid, *args, **options):
        launch(kernel, grid, *args, **options)
        if kernel in (pages_module._copy_pages, pages_module._copy_slots):
            flags.append(args[4])

    monkeypatch.setattr(pages_module, "launch", kept)
    monkeypatch.setattr(pages_module, "_PAGE_WORDS", 16)
    monkeypatch.setattr(pages_module, "_WARP_WORDS", 16)
    monkeypatch.setattr(pages_module, "_SECOND_WARPS", 3)
    monkeypatch.setattr(pages_module, "_COMPARE_HERE", 16 if request.param == "compared by the copy" else 0)
    if request.param == "looked up":
        monkeypatch.setattr(pages_module, "_COMPARE_MOST", 0)
    return flags


def check_flags(flags: list[torch.Tensor], src: list[int], dst: list[int], limit: int) -> None:
    """Only rows whose target some row reads went through the workspace."""
    for k, (i, j) in enumerate(zip(src, dst, strict=True)):
        if 0 <= i < limit and 0 <= j < limit and i != j:
            assert bool(flags[-1][k]) == (j in src)


@on_each_device
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_copy_pages_is_a_gather_then_a_scatter(device, geometry, pattern):
    src, dst = PATTERNS[pattern]
    pool = make(*geometry)
    expected, touched = pool.buffer.clone(), set()
    for i, j in zip(src, dst, strict=True):
        if 0 <= i < 7 and 0 <= j < 7:
            span = oracle.page_bytes(pool.region, j)
            expected[span.start : span.stop] = page(pool, i)
            touched |= set(span)
    there = pool.to(device)
    copy_pages(CopyPages(there.buffer, ids(device, src), ids(device, dst), pool.region))
    check_bytes(pool.buffer, there.buffer, expected, touched)


@on_each_device
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_copies_stage_only_rows_whose_target_is_read(device, index, small_parts):
    """Pages of 320 bytes in three programs: every pattern, then lists drawn at random."""
    lists = list(PATTERNS.values())
    for _ in range(12):
        count = int(torch.randint(1, 13, ()))
        lists.append((torch.randint(-2, 15, (count,)).tolist(), torch.randperm(16)[:count].sub(1).tolist()))
    for src, dst in lists:
        before = torch.randint(0, 256, (13, 336), dtype=torch.uint8)
        expected = before.clone()
        expected[:, :320], _ = gather_then_scatter(before[:, :320], src, dst)
        buffer = before.flatten().clone().to(device)
        copy_pages(CopyPages(buffer, ids(device, src, index), ids(device, dst, index), [0, 336, 320, 13]))
        assert torch.equal(buffer.cpu().view(13, 336), expected), (src, dst)
        check_flags(small_parts, src, dst, 13)


@on_each_device
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_copies_of_slots_stage_only_slots_whose_target_is_read(device, index, small_parts):
    """Three runs a slot, of 48, 7 and 160 bytes, in several programs; 12 slots in pages of 4."""
    runs, region = [(0, 48, 48), (192, 8, 7), (224, 160, 160)], [16, 912, 864, 3]
    pool_rows = torch.cat([16 + off + torch.arange(n) for off, _, n in runs])
    strides = torch.cat([torch.full((n,), stride) for _, stride, n in runs])
    slots = torch.arange(12)[:, None]
    cells = slots // 4 * 912 + slots % 4 * strides + pool_rows  # [slot, byte of the slot]: where it lies
    lists = list(PATTERNS.values())
    for _ in range(12):
        count = int(torch.randint(1, 12, ()))
        lists.append((torch.randint(-2, 14, (count,)).tolist(), torch.randperm(14)[:count].sub(1).tolist()))
    for src, dst in lists:
        before = torch.randint(0, 256, (16 + 3 * 912 + 9,), dtype=torch.uint8)
        expected = before.clone()
        expected[cells], _ = gather_then_scatter(before[cells], src, dst)
        buffer = before.clone().to(device)
        run_list = torch.tensor(runs, device=device)
        copy_slots(CopySlots(buffer, ids(device, src, index), ids(device, dst, index), run_list, 4, region))
        assert torch.equal(buffer.cpu(), expected), (src, dst)
        check_flags(small_parts, src, dst, 12)


@on_each_device
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_targets_are_compared_with_every_source_of_a_long_list(device, index, monkeypatch):
    """1100 rows: several blocks of sources and of targets, the last ones not full."""
    src, dst = torch.randint(-3, 3000, (2, 1100), dtype=index)
    dst[0] = src[1099] = 3001  # no block but the last has it
    dst[1099] = src[1099]
    for most in (4096, 0):  # compared, and looked up in a table, where ids that do not exist need no flag
        monkeypatch.setattr(pages_module, "_COMPARE_MOST", most)
        staged = pages_module._find_staged(src.to(device), dst.to(device), 3000).cpu()
        exists = (dst >= 0) & (dst < 3000 if not most else dst < 3002)
        assert torch.equal(staged.bool()[exists], torch.isin(dst, src)[exists])


@on_each_device
@pytest.mark.parametrize("verb", ["pages", "slots"])
def test_the_last_rows_of_a_long_list_may_be_the_only_ones_that_overlap(device, verb):
    """Two pages swapped behind 1098 pairs that are skipped: the second launch looks at every block of flags."""
    src, dst = torch.tensor([-1, -2])[:, None].repeat(1, 1100)  # equal ones would be flagged
    src[-2:], dst[-2:] = torch.tensor([0, 2]), torch.tensor([2, 0])
    buffer = torch.tensor([7, 8, 9], dtype=torch.uint8, device=device)
    if verb == "pages":
        copy_pages(CopyPages(buffer, src.to(device), dst.to(device), [0, 1, 1, 3]))
    else:
        runs = ids(device, [0, 1, 1]).view(1, 3)
        copy_slots(CopySlots(buffer, src.to(device), dst.to(device), runs, 1, [0, 1, 1, 3]))
    assert buffer.tolist() == [9, 8, 7]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1500, 5000])
def test_many_rows_are_copied_as_if_at_once(count):
    """All pages, and all slots, moved on by one: the last id of the list decides about the first row."""
    before = torch.randint(0, 256, (count,), dtype=torch.uint8)
    src = torch.arange(count, device="cuda")
    for verb in ("pages", "slots"):
        buffer = before.to("cuda")
        if verb == "pages":
            copy_pages(CopyPages(buffer, src, src.roll(1), [0, 1, 1, count]))
        else:
            runs = ids("cuda", [0, 1, 1]).view(1, 3)
            copy_slots(CopySlots(buffer, src, src.roll(1), runs, 1, [0, 1, 1, count]))
        assert torch.equal(buffer.cpu(), before.roll(-1))


@on_each_device
@pytest.mark.parametrize("order", ["page_major", "token_major", "head_major"])
@pytest.mark.parametrize("dims", [(16, 16), (5, 3)])  # rows of 32 bytes, and of 10 and 6
@pytest.mark.parametrize(("page_size", "index"), [(1, torch.int32), (3, torch.int64), (16, torch.int64)])
def test_copy_slots_moves_every_plane_of_its_tokens(device, order, dims, page_size, index):
    rows = {"key": (2, dims[0], 2), "value": (2, dims[1], 2)}
    num_pages = 24 // page_size + 1
    pool = pages(order, page_size, num_pages, 2, rows, base=16, gap=32)
    last = pool.num_slots - 1
    src = [0, 1, last, -1, 9, pool.num_slots]
    dst = [1, 7, 0, 3, -1, 11]
    runs = []
    expected, touched = pool.buffer.clone(), set()
    for (_, kind), plane in pool.planes.items():
        heads, row = 2, rows[kind][1] * 2
        runs += [[plane[0] - 16 + h * plane[3], plane[2], row] for h in range(heads)]
        for i, j in zip(src, dst, strict=True):
            if 0 <= i <= last and 0 <= j <= last:
                moved = oracle.read(pool.buffer, plane, page_size, i, heads, row)
                touched |= oracle.write(expected, plane, page_size, j, moved)
    buffer = pool.to(device).buffer
    run_list = ids(device, [x for run in sorted(runs) for x in run]).view(-1, 3)
    copy_slots(CopySlots(buffer, ids(device, src, index), ids(device, dst, index), run_list, page_size, pool.region))
    check_bytes(pool.buffer, buffer, expected, touched)


@on_each_device
def test_copy_slots_moves_runs_longer_than_a_block_and_mixed_alignments(device):
    """Runs of 3000 bytes (aligned), 24 and 7: each at its own place in the workspace."""
    runs = [(0, 3008, 3008), (9024, 32, 24), (9120, 7, 7)]
    region = [0, 9152, 9152, 4]
    before = torch.randint(0, 256, (4 * 9152,), dtype=torch.uint8)
    expected, touched = before.clone(), set()
    src, dst = [0, 5, 11], [5, 11, 1]
    for offset, stride, nbytes in runs:
        plane = [offset, 9152, stride, 0, 4]
        for i, j in zip(src, dst, strict=True):
            touched |= oracle.write(expected, plane, 3, j, oracle.read(before, plane, 3, i, 1, nbytes))
    buffer = before.clone().to(device)
    copy_slots(CopySlots(buffer, ids(device, src), ids(device, dst), torch.tensor(runs, device=device), 3, region))
    check_bytes(before, buffer, expected, touched)


@on_each_device
def test_no_pages_and_no_slots_are_no_work(device):
    pool = make(32, 0, 0)
    buffer, none = pool.to(device).buffer, ids(device, [])
    assert gather_pages(GatherPages(buffer, none, pool.region)).shape == (0, pool.region[2])
    scatter_pages(ScatterPages(buffer, buffer.new_empty(0, pool.region[2]), none, pool.region))
    zero_pages(ZeroPages(buffer, none, pool.region))
    copy_pages(CopyPages(buffer, none, none, pool.region))
    copy_slots(CopySlots(buffer, none, none, ids(device, [0, 32, 32]).view(1, 3), 3, pool.region))
    copy_slots(CopySlots(buffer, ids(device, [0]), ids(device, [1]), none.view(0, 3), 3, pool.region))
    assert torch.equal(buffer.cpu(), pool.buffer)
