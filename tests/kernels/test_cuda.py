"""What only a GPU can show: graphs, synchronisation, run-to-run equality, and addresses past 2^31 and 2^32."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
import torch
from kernels.cases import NAN_BYTE, attention_case, check_attention, plan

from pm_ops.kernels import attention_hopper
from pm_ops.kernels.attention import attention
from pm_ops.kernels.merge import merge_attention
from pm_ops.kernels.pages import copy_pages, copy_slots, gather_pages, scatter_pages, zero_pages
from pm_ops.kernels.store import load_kv, store_kv
from pm_ops.ops.attention import Attention
from pm_ops.ops.merge import MergeAttention
from pm_ops.ops.pages import CopyPages, CopySlots, GatherPages, ScatterPages, ZeroPages
from pm_ops.ops.store import LoadKV, StoreKV

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("width", [0, 512])
def test_store_and_attention_replay_in_a_cuda_graph(width):
    """Captured once, replayed with other rows, slots, lengths and pages; with and without splits."""
    case = attention_case("cuda", [13, 30, 5], 1, dtypes=(BF16,) * 3, num_pages=20, width=width)
    assert (plan(case).splits > 1) == (width > 0)
    key, value = torch.randn(2, 3, 2, 32, device="cuda", dtype=BF16)
    slots = torch.full((3,), -1, device="cuda")
    store = StoreKV(case.buffer, key, value, slots, case.key_plane, case.value_plane, 4, BF16, BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles
        store_kv(store)
        attention(case)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kv(store)
        out, lse = attention(case)
    for step in range(3):
        case.query.normal_()
        key.normal_()
        value.normal_()
        last = case.seq_lens - 1
        page = case.page_table.gather(1, (last // 4).long()[:, None])[:, 0]
        slots.copy_(page * 4 + last % 4)
        before = case.buffer.clone()
        graph.replay()
        check_attention(case, out, lse)
        eager = dataclasses.replace(case, buffer=before)
        store_kv(dataclasses.replace(store, buffer=before))
        assert torch.equal(case.buffer, before)
        assert torch.equal(out, attention(eager)[0])
        case.seq_lens.sub_(step + 1)


@pytest.mark.parametrize(("dim", "longest"), [(32, 40), (64, 1100)], ids=["general", "many queries"])
def test_a_graph_of_one_batch_runs_any_batch_of_as_many_queries(dim, longest):
    """Captured with one query a sequence and room for more, as engines capture batches of prompts and decodes."""
    total = 2 * longest
    case = attention_case(
        "cuda", [longest] * 3, [1, 1, 1], dtypes=(BF16,) * 3, dims=(dim, dim), page_size=16, spare_rows=total - 3
    )
    case = dataclasses.replace(case, max_query_len=total, max_seq_len=8 * longest)
    assert attention_hopper.takes(case) == (dim == 64 and attention_hopper.able(case))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attention(case)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention(case)
    for queries in ([longest, 1, longest - 1], [0, 7, 0], [1, longest, 2]):
        case.query_start.copy_(torch.tensor([0, *queries]).cumsum(0))
        case.query.normal_()
        graph.replay()
        check_attention(case, out, lse)


def test_no_kernel_synchronises_the_host():
    case = attention_case("cuda", [70, 30], [1, 9], dtypes=(BF16, E4M3, E4M3), width=64, sinks=torch.randn(4))
    scale = torch.tensor([0.5], device="cuda")
    case = dataclasses.replace(case, key_scale_tensor=scale, value_scale_tensor=scale)
    key, slots = torch.randn(8, 2, 32, device="cuda"), torch.arange(8, device="cuda")
    pages = torch.tensor([1, 0], device="cuda")
    runs = torch.tensor([[0, 64, 64]], device="cuda")
    nbytes = case.key_plane[1]
    region = [0, nbytes, nbytes, case.key_plane[4]]

    def everything() -> None:
        store_kv(
            StoreKV(
                case.buffer, key, key, slots, case.key_plane, case.value_plane, 4, E4M3, E4M3, key_scale_tensor=scale
            )
        )
        load_kv(LoadKV(case.buffer, slots, case.key_plane, 4, 2, 32, E4M3, scale_tensor=scale, out_dtype=BF16))
        out, lse = attention(case)
        merge_attention(MergeAttention(out, lse, out, lse))
        rows = gather_pages(GatherPages(case.buffer, pages, region))
        scatter_pages(ScatterPages(case.buffer, rows, pages, region))
        copy_pages(CopyPages(case.buffer, pages, pages.flip(0), region))
        copy_slots(CopySlots(case.buffer, slots, slots, runs, 4, region))
        zero_pages(ZeroPages(case.buffer, pages, region))

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("queries", [1, [3, 200, 1]])
def test_the_same_call_gives_the_same_bits_every_time(queries):
    case = attention_case("cuda", [700, 333, 90], queries, dtypes=(BF16,) * 3, heads=(8, 2), page_size=16)
    out, lse = attention(case)
    for _ in range(20):
        again, again_lse = attention(case)
        assert torch.equal(again, out)
        assert torch.equal(again_lse, lse)


# -- addresses ---------------------------------------------------------------------------------------------------------

PAGES, FIRST = 2050, 2047
"""Pages of 2 MiB, so that page 2048 begins at byte 2^32 (and, in a 16-bit type, at element 2^31)."""
PAGE_BYTES = 1 << 21


def far_planes(itemsize: int) -> tuple[list[int], list[int]]:
    """Key and value of the last layer of page-major pages of 16 tokens x 8 heads x 128."""
    block = 16 * 8 * 128 * itemsize
    return tuple(
        [PAGE_BYTES - blocks * block, PAGE_BYTES, 8 * 128 * itemsize, 128 * itemsize, PAGES] for blocks in (2, 1)
    )


def near(planes: tuple[list[int], list[int]]) -> list[list[int]]:
    """The same planes over the last pages alone."""
    return [[*plane[:4], PAGES - FIRST] for plane in planes]


@pytest.fixture
def far_buffer():
    return torch.full((PAGES * PAGE_BYTES,), NAN_BYTE, dtype=torch.uint8, device="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_store_load_and_attention_past_2_to_the_32_bytes(far_buffer, dtype, index):
    planes = far_planes(dtype.itemsize)
    table = torch.tensor([[2049, 2047, 2048], [2048, -1, 2**30]], dtype=index, device="cuda")
    lens = torch.tensor([40, 8], dtype=index, device="cuda")
    slots = [int(table[0, j // 16]) * 16 + j % 16 for j in range(40)]
    key, value = torch.randn(2, 40, 8, 128, device="cuda", dtype=BF16)
    store_kv(
        StoreKV(far_buffer, key, value, torch.tensor(slots, dtype=index, device="cuda"), *planes, 16, dtype, dtype)
    )

    compact = torch.full(((PAGES - FIRST) * PAGE_BYTES,), NAN_BYTE, dtype=torch.uint8)
    near_slots = [slot - FIRST * 16 for slot in slots]
    for plane, rows in zip(near(planes), (key, value), strict=True):
        oracle.store(compact, plane, 16, dtype, rows.cpu(), near_slots)
    assert torch.equal(far_buffer[FIRST * PAGE_BYTES :].cpu(), compact)
    assert (far_buffer[: FIRST * PAGE_BYTES] == NAN_BYTE).all()

    loaded = load_kv(LoadKV(far_buffer, torch.tensor(slots, dtype=index, device="cuda"), planes[1], 16, 8, 128, dtype))
    expected = oracle.load(compact, near(planes)[1], 16, dtype, near_slots, 8, 128)
    assert torch.equal(loaded.cpu().double(), torch.from_numpy(expected))

    for queries in (1, 9):
        query = torch.randn(2 * queries, 32, 128, device="cuda", dtype=BF16)
        case = Attention(
            far_buffer, query, table, lens, None, *planes, 16, 8, 128, dtype, dtype, softmax_scale=0.1, return_lse=True
        )
        here = dataclasses.replace(case, buffer=compact, page_table=table - FIRST)
        here.key_plane, here.value_plane = near(planes)
        check_attention(here, *attention(case))


@pytest.mark.slow
def test_page_verbs_past_2_to_the_32_bytes(far_buffer):
    pages = far_buffer.view(PAGES, PAGE_BYTES)
    pages[FIRST:].random_()
    region = [0, PAGE_BYTES, PAGE_BYTES, PAGES]
    last = torch.tensor([2049, 2047, 2048], device="cuda")
    saved = pages[last]

    assert torch.equal(gather_pages(GatherPages(far_buffer, last, region)), saved)
    copy_pages(CopyPages(far_buffer, last, last.roll(1), region))
    assert torch.equal(pages[last.roll(1)], saved)
    scatter_pages(ScatterPages(far_buffer, saved, last.int(), region))
    assert torch.equal(pages[last], saved)

    runs = torch.tensor([[0, 1 << 17, 1 << 17]], device="cuda")
    copy_slots(
        CopySlots(
            far_buffer,
            2049 * 16 + torch.arange(16, device="cuda"),
            2048 * 16 + torch.arange(16, device="cuda"),
            runs,
            16,
            region,
        )
    )
    assert torch.equal(pages[2048], saved[0])
    zero_pages(ZeroPages(far_buffer, torch.tensor([2048], device="cuda"), region))
    assert not pages[2048].any()
    assert torch.equal(pages[2047], saved[1])
    assert torch.equal(pages[2049], saved[0])
    assert (pages[:FIRST] == NAN_BYTE).all()


@pytest.mark.slow
def test_gathered_rows_may_pass_2_to_the_31_bytes(far_buffer):
    pages = far_buffer.view(PAGES, PAGE_BYTES)
    pages.random_()
    order = torch.randperm(PAGES, device="cuda")[:1100]
    region = [0, PAGE_BYTES, PAGE_BYTES, PAGES]
    rows = gather_pages(GatherPages(far_buffer, order, region))
    assert torch.equal(rows, pages[order])
    copy_pages(CopyPages(far_buffer, order, order.roll(1), region))
    assert torch.equal(pages[order.roll(1)], rows)


@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_slots_near_4_million_in_pages_of_one_token(index):
    num, row = 4_000_000, 576
    buffer = torch.full((num * 2 * row,), NAN_BYTE, dtype=torch.uint8, device="cuda")
    plane = [row, 2 * row, 0, row, num]
    slots = torch.arange(num - 10, num, dtype=index, device="cuda")
    rows = torch.randn(10, 1, row, device="cuda")
    store_kv(StoreKV(buffer, None, rows, slots, None, plane, 1, None, E4M3))
    assert torch.equal(
        buffer.view(num, 2, row)[-10:, 1].view(E4M3).float(), rows[:, 0].clamp(-448, 448).to(E4M3).float()
    )
    assert (buffer.view(num, 2, row)[:, 0] == NAN_BYTE).all()
    assert (buffer.view(num, 2, row)[:-10] == NAN_BYTE).all()
    loaded = load_kv(LoadKV(buffer, slots, plane, 1, 1, row, E4M3))
    assert torch.equal(loaded[:, 0].float(), buffer.view(num, 2, row)[-10:, 1].view(E4M3).float())


@pytest.mark.slow
def test_rows_of_a_fused_qkv_may_pass_2_to_the_31_elements():
    """100000 tokens of 3 x 56 x 128: the last ones begin past element 2^31 of the projection."""
    tokens, heads, dim = 100_000, 56, 128
    qkv = torch.zeros(tokens, 3 * heads, dim, device="cuda", dtype=BF16)
    qkv[-5:].normal_()
    query, key, value = qkv.split(heads, 1)
    plane_bytes = heads * dim * 2
    buffer = torch.full((3 * 4 * 2 * plane_bytes,), NAN_BYTE, dtype=torch.uint8, device="cuda")
    planes = [[at * 4 * plane_bytes, 8 * plane_bytes, plane_bytes, dim * 2, 3] for at in (0, 1)]
    slots = torch.full((tokens,), -1, device="cuda")
    slots[-5:] = torch.tensor([9, 4, 7, 5, 6], device="cuda")
    store_kv(StoreKV(buffer, key, value, slots, *planes, 4, BF16, BF16))
    found = load_kv(LoadKV(buffer, slots[-5:], planes[1], 4, heads, dim, BF16))
    assert torch.equal(found, value[-5:])

    table = torch.full((tokens, 1), 1, dtype=torch.int32, device="cuda")
    lens = torch.full((tokens,), 4, dtype=torch.int32, device="cuda")
    case = Attention(
        buffer, query, table, lens, None, *planes, 4, heads, dim, BF16, BF16, softmax_scale=0.1, return_lse=True
    )
    out, lse = attention(case)
    end = dataclasses.replace(case, query=query[-5:], page_table=table[-5:], seq_lens=lens[-5:])
    check_attention(end, out[-5:], lse[-5:])
