"""Page verbs against plain Python over the page's bytes."""

import pytest
import torch

import pm_ops
from pm_ops.testing import fill_random, page_bytes, sample_pools, slot_bytes, writes_only

POOLS = list(sample_pools())
KINDS = ("key", "value")


@pytest.fixture(params=range(len(POOLS)), ids=lambda i: f"{POOLS[i].layout.name}-{i}")
def pool(request):
    pool = POOLS[request.param]
    fill_random(pool.buffer, seed=request.param)
    return pool


def rows_of(pool):
    """Every page as a bytes object, cut out of the buffer by arithmetic."""
    raw = bytes(pool.buffer.tolist())
    starts = [pool.base + i * pool.page_stride for i in range(pool.num_pages)]
    return [raw[s : s + pool.layout.page_bytes] for s in starts]


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gather_returns_the_pages_bytes_and_zeros_for_skipped_ones(pool, index):
    before = rows_of(pool)
    with writes_only(pool.buffer, []):
        got = pool.gather(torch.tensor([3, -1, 0, 3], dtype=index))
    expected = [before[3], bytes(pool.layout.page_bytes), before[0], before[3]]
    assert [bytes(row.tolist()) for row in got] == expected


def test_scatter_writes_exactly_the_named_pages(pool):
    rows = torch.randint(0, 256, (3, pool.layout.page_bytes), dtype=torch.uint8)
    with writes_only(pool.buffer, page_bytes(pool, [4, 1])):
        pool.scatter(torch.tensor([4, -1, 1]), rows)
    after = rows_of(pool)
    assert after[4] == bytes(rows[0].tolist()) and after[1] == bytes(rows[2].tolist())


def test_zero_clears_exactly_the_named_page_in_every_layer(pool):
    with writes_only(pool.buffer, page_bytes(pool, [2])):
        pool.zero([2, -1])
    assert rows_of(pool)[2] == bytes(pool.layout.page_bytes)


def test_overlapping_copy_equals_gather_then_scatter(pool):
    """A rotation: each destination is also a source."""
    before = rows_of(pool)
    with writes_only(pool.buffer, page_bytes(pool, [1, 2, 3])):
        pool.copy([3, 1, 2, 0, -1], [1, 2, 3, -1, 4])
    after = rows_of(pool)
    assert [after[1], after[2], after[3]] == [before[3], before[1], before[2]]


def test_copy_slots_moves_every_plane_of_every_layer_and_nothing_else(pool):
    """Tokens swap places across and within pages; a page checksum would not notice a permutation, so compare tokens."""
    ps = pool.page_size
    src, dst = [ps + 1 if ps > 1 else 1, 0, 2 * ps, -1], [0, ps + 1 if ps > 1 else 1, 4 * ps + ps - 1, 3 * ps]
    before = {
        (la, k, s): pool.buffer[slot_bytes(pool, la, k, [s])].tolist() for la in (0, 1) for k in KINDS for s in src[:3]
    }
    owned = [b for la in (0, 1) for k in KINDS for b in slot_bytes(pool, la, k, dst[:3])]
    with writes_only(pool.buffer, owned):
        pool.copy_slots(src, dst)
    for (la, k, s), data in before.items():
        assert pool.buffer[slot_bytes(pool, la, k, [dst[src.index(s)]])].tolist() == data


def test_copy_slots_moves_scale_planes_too():
    """A quantised cache whose scales stay behind is silently wrong after a move."""
    planes = (
        pm_ops.Plane(0, "key", 0, 64, 16, (4, 16), torch.float8_e4m3fn),
        pm_ops.Plane(0, "key_scale", 256, 16, 4, (4, 1), torch.float32),
    )
    pool = pm_ops.PagePool(pm_ops.PageLayout(4, 320, planes), 3)
    fill_random(pool.buffer)
    scales = pool.view(0, "key_scale")[0, 1].clone()
    with writes_only(pool.buffer, slot_bytes(pool, 0, "key", [10]) + slot_bytes(pool, 0, "key_scale", [10])):
        pool.copy_slots([1], [10])
    assert torch.equal(pool.view(0, "key_scale")[2, 2].view(torch.int32), scales.view(torch.int32))


@pytest.mark.parametrize("verb", ["gather", "scatter", "zero", "copy"])
def test_a_page_past_the_end_is_refused_before_any_byte_is_written(pool, verb):
    rows = torch.zeros(2, pool.layout.page_bytes, dtype=torch.uint8)
    calls = {
        "gather": lambda: pool.gather([0, 5]),
        "scatter": lambda: pool.scatter([0, 5], rows),
        "zero": lambda: pool.zero([0, 5]),
        "copy": lambda: pool.copy([0, 1], [1, 5]),
    }
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match="has 5, but there are 5 pages"):
        calls[verb]()


def test_a_destination_named_twice_is_refused(pool):
    rows = torch.zeros(2, pool.layout.page_bytes, dtype=torch.uint8)
    for call in (
        lambda: pool.copy([0, 1], [2, 2]),
        lambda: pool.scatter([2, 2], rows),
        lambda: pool.copy_slots([0, 1], [2, 2]),
    ):
        with writes_only(pool.buffer, []), pytest.raises(ValueError, match="names 2 twice"):
            call()
    pool.copy([-1, 1], [2, 2])  # a skipped pair writes nothing


def test_rows_of_another_layout_are_refused(pool):
    rows = torch.zeros(1, pool.layout.page_bytes + 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match="must come from this layout"):
        pool.scatter([0], rows)


def test_no_pages_at_all_are_no_error(pool):
    with writes_only(pool.buffer, []):
        pool.copy([], [])
        pool.zero([])
        pool.copy_slots([], [])
        assert pool.gather([]).shape == (0, pool.layout.page_bytes)
        pool.scatter([], torch.zeros(0, pool.layout.page_bytes, dtype=torch.uint8))


@pytest.mark.parametrize(
    "region", [[-64, 256, 256, 2], [0, 16, 256, 2], [0, 256, -5, 2], [0, 256, 256, 0], [0, 256, 256, 5]]
)
def test_a_region_that_leaves_the_buffer_or_whose_pages_overlap_is_refused(region):
    buffer = torch.zeros(4 * 256, dtype=torch.uint8)
    with writes_only(buffer, []), pytest.raises(ValueError, match="does not lie in a buffer of 1024 bytes"):
        torch.ops.pm_ops.zero_pages(buffer, torch.tensor([1]), region)


OUTSIDE = [[100_000, 64, 64], [-64, 64, 64], [64, 64, 129], [0, 64, 0]]
WRAPPING = [[64, 2**62, 64], [2**63 - 1, 64, 64], [64, 64, 2**63 - 1]]  # the last byte's place, in int64


@pytest.mark.parametrize("run", OUTSIDE + WRAPPING)
def test_runs_that_leave_the_page_are_refused_before_any_byte_is_written(run):
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 8, 4, torch.float32), 3)
    fill_random(pool.buffer)
    runs = torch.tensor([[0, 32, 32], run])
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match="runs leave the page of 256 bytes"):
        torch.ops.pm_ops.copy_slots(pool.buffer, torch.tensor([0]), torch.tensor([5]), runs, 4, pool.region)
