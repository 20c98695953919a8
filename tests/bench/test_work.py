"""A case's data: the same in both layouts, shuffled, amid poison; and what it counts as bytes and operations."""

import pytest
import torch
from bench.fakes import CPU, ROPE, SHAPES, STORE, TINY

from pm_ops.bench.attention_shape import AttentionShape, decode
from pm_ops.bench.cases import SUITES, PagesShape, shapes
from pm_ops.bench.limits import has_peer
from pm_ops.bench.memory import LAYOUTS
from pm_ops.bench.work import attention_work, pages_work, rope_work, store_work


def cell(buffer: torch.Tensor, plane: list[int], page_size: int, slot: int, head: int, nbytes: int) -> torch.Tensor:
    """The bytes of one row by the address formula."""
    start = plane[0] + slot // page_size * plane[1] + slot % page_size * plane[2] + head * plane[3]
    return buffer[start : start + nbytes]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["mixed", "fp8", "unequal", "page size 1"])
def test_the_planes_address_the_rows_of_every_sequence(name: str, layout: str) -> None:
    work = attention_work(SHAPES[name], CPU)
    s, memory = work.shape, work.memories[layout]
    slots = work.slots([0] * len(s.seq_lens), s.seq_lens)
    rows = [torch.cat(parts) for parts in zip(*(work.rows(b) for b in range(len(s.seq_lens))), strict=True)]
    for plane, stored, dim in zip((memory.key_plane, memory.value_plane), rows, (s.head_dim, s.value_dim), strict=True):
        for slot, row in zip(slots.tolist(), stored, strict=True):
            for head in range(s.kv_heads):
                there = cell(memory.buffer, plane, s.page_size, slot, head, dim * s.kv_dtype.itemsize)
                assert torch.equal(there, row[head].view(torch.uint8))


def test_pages_are_shuffled_and_all_else_is_poison() -> None:
    work = attention_work(decode("", 4, 64, **TINY), CPU)
    ids = work.page_table.flatten().tolist()
    assert len(set(ids)) == 64 and ids != sorted(ids)
    memory = work.memories["page-major"]
    assert memory.pool is not None and memory.pool.num_pages == 64 + 8
    spare = [page for page in range(72) if page not in ids]
    other = memory.pool.view(memory.layer + 1, "key")
    for poison in (memory.pool.pages[spare], other[ids].flatten().view(torch.uint8)):
        assert poison.unique().numel() > 250  # bytes of any value, not zeros


def test_new_rows_are_the_last_ones_of_each_sequence() -> None:
    work = attention_work(SHAPES["mixed"], CPU)
    key, value = work.new_rows
    assert key.is_contiguous() and value.is_contiguous()
    parts = [[rows[-n:] for rows in work.rows(b)] for b, n in enumerate(work.shape.query_lens)]
    assert torch.equal(key, torch.cat([k for k, _ in parts])) and torch.equal(value, torch.cat([v for _, v in parts]))


def test_slots_of_a_store_and_of_a_move_are_distinct() -> None:
    store = store_work(STORE, CPU)
    assert store.slots.unique().numel() == STORE.tokens
    assert torch.equal(rope_work(ROPE, CPU).store.slots, store.slots)
    move = pages_work(PagesShape("move", "move", 9, 8, 2, kv_heads=2, head_dim=4, page_size=4), CPU)
    assert torch.cat((move.src, move.dst)).unique().numel() == 18
    assert move.layer_major.numel() == move.pool.buffer.numel()


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_and_operations_are_those_of_the_visible_pairs(name: str) -> None:
    s: AttentionShape = SHAPES[name]
    pairs, keys = 0, 0
    for n, length in zip(s.query_lens, s.seq_lens, strict=True):
        seen = {
            (i, j)
            for i in range(n)
            for j in range(length)
            if j <= length - n + i and (not s.window or j > length - n + i - s.window)
        }
        pairs += len(seen)
        keys += len({j for _, j in seen})
    assert s.flops == 2 * pairs * s.q_heads * (s.head_dim + s.value_dim)
    assert s.kv_bytes == keys * s.kv_heads * (s.head_dim + s.value_dim) * s.kv_dtype.itemsize
    assert s.nbytes - s.kv_bytes == sum(s.query_lens) * s.q_heads * (s.head_dim + s.value_dim) * 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_suite_has_cases_with_names_of_their_own(device: str) -> None:
    for suite in SUITES[1:]:
        full, quick = (shapes(suite, torch.device(device), quick) for quick in (False, True))
        assert full[: len(quick)] == quick
        assert bool(quick) is (suite != "peer" or has_peer(torch.device(device)))
        assert len({shape.name for shape in full}) == len(full)


def test_uninitialised_data_has_the_same_shapes() -> None:
    """Kernels compiled on it are those that the measurement needs."""
    for name in ("mixed", "fp8"):
        work, hollow = (attention_work(SHAPES[name], CPU, fill) for fill in (True, False))
        assert torch.equal(work.page_table, hollow.page_table)
        assert [x.shape for x in work.new_rows] == [x.shape for x in hollow.new_rows]
        for layout in LAYOUTS:
            assert work.memories[layout].key.stride() == hollow.memories[layout].key.stride()
            assert work.memories[layout].buffer.shape == hollow.memories[layout].buffer.shape
