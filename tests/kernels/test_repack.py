"""repack_pages' kernel: every byte of the target's buffer against the formats' formulas."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernels.cases import on_each_device
from repack_cases import (
    FORMATS,
    UNIFORM,
    WIDENINGS,
    Layer,
    Model,
    Side,
    check_wider,
    expected,
    heads_of,
    models_of,
    side,
    wider_pools,
)

import pm_ops
from pm_ops.kernels import repack as repack_module
from pm_ops.kernels.repack import repack_pages
from pm_ops.ops.repack import RepackPages


def launch(source: Side, target: Side, tokens: int, index=torch.int64, **chosen) -> None:
    """Run the kernel and compare the target's whole buffer."""
    ours, theirs = source.pool, target.pool
    plan = pm_ops.RepackPlan(ours.layout, theirs.layout, **chosen)
    wanted = expected(source, target, tokens, **chosen)
    lists = [torch.tensor(s.pages, dtype=index, device=ours.device) for s in (source, target)]
    table, sizes = plan.table(ours.device), (tokens, ours.page_size, theirs.page_size)
    repack_pages(RepackPages(ours.buffer, theirs.buffer, *lists, table, *sizes, ours.region, theirs.region))
    got = theirs.buffer.cpu()
    assert torch.equal(got, wanted), f"first byte that differs: {int((got != wanted).nonzero()[0])}"


@on_each_device
@pytest.mark.parametrize(("a", "b"), list(itertools.product(FORMATS, FORMATS)))
def test_every_pair_of_formats(device, a, b):
    """Rows of every alignment; with the page sizes' common divisor 1, 8 and 16, and a last page partly filled."""
    for seed, model in enumerate(models_of(a, b)):
        ours, theirs = ((16, 16), (8, 16), (3, 8))[seed % 3]
        launch(side(a, model, ours, 37, seed, device), side(b, model, theirs, 37, seed + 50, device), 37)


@on_each_device
@pytest.mark.parametrize("ours", [1, 8, 16, 48, 64])
@pytest.mark.parametrize("theirs", [1, 8, 16, 48, 64])
@pytest.mark.parametrize("tokens", [1, 64, 97])
def test_every_pair_of_page_sizes(device, ours, theirs, tokens):
    a, b = side("page_major", UNIFORM, ours, tokens, 1, device), side("BLHNC", UNIFORM, theirs, tokens, 2, device)
    launch(a, b, tokens)


@on_each_device
@pytest.mark.parametrize(("base", "gap"), [(0, 0), (8, 8), (4, 12), (2, 2)])
@pytest.mark.parametrize(("a", "b"), [("page_major", "page_major"), ("token_major", "BLNHC")])
def test_bases_and_strides_of_every_alignment(device, base, gap, a, b):
    launch(side(a, UNIFORM, 8, 21, 1, device, base, gap), side(b, UNIFORM, 8, 21, 2, device), 21)
    launch(side(a, UNIFORM, 8, 21, 1, device), side(b, UNIFORM, 8, 21, 2, device, base, gap), 21)


@on_each_device
@pytest.mark.parametrize(("ours", "theirs"), [(8, 4), (4, 8), (8, 1), (2, 8)])
@pytest.mark.parametrize(("a", "b"), [("page_major", "BHLNC"), ("BLHNC", "page_major")])
def test_head_slices_and_merges(device, ours, theirs, a, b):
    count = min(ours, theirs)
    heads = (ours - count, theirs - count, count)
    source = side(a, heads_of(UNIFORM, ours), 16, 40, 1, device)
    launch(source, side(b, heads_of(UNIFORM, theirs), 48, 40, 2, device), 40, heads=heads)


@on_each_device
def test_layer_ranges(device):
    for model in models_of("page_major"):
        source, target = side("page_major", model, 16, 40, 1, device), side("token_major", model[:1], 16, 40, 2, device)
        launch(source, target, 40, layers={0: 0})


@on_each_device
@pytest.mark.parametrize(("ours", "theirs"), WIDENINGS)
@pytest.mark.parametrize(("dims", "sizes"), [((64, 48), (16, 8)), ((640, 6), (4, 3))])
def test_every_number_gets_wider_and_stays_what_it_is(device, ours, theirs, dims, sizes, monkeypatch):
    """Rows of whole 16-byte words and others, and rows longer than the tile's; beside a layer that moves as it is."""
    monkeypatch.setattr(repack_module, "_ELEMENTS", 8192)  # few programs, for the interpreter's sake
    *pools, src, dst, tokens = wider_pools(ours, theirs, dims, sizes, device)
    before = pools[1].buffer.cpu().clone()
    plan = pm_ops.RepackPlan(pools[0].layout, pools[1].layout)
    lists = [torch.tensor(ids, device=device) for ids in (src, dst)]
    table, regions = plan.table(pools[0].device), [p.region for p in pools]
    assert plan.widening is not None
    buffers = [p.buffer for p in pools]
    repack_pages(RepackPages(*buffers, *lists, table, tokens, *sizes, *regions, *plan.widening))
    check_wider(pools, (src, dst), tokens, before)


BIG: Model = (Layer(3, 96, 72, 2), Layer(8, 64, 64, 4), Layer(1, 128, 512, 1))
"""Rows longer than a row of the tile, and pieces longer than all of it."""


@on_each_device
@pytest.mark.parametrize(("a", "b"), [("page_major", "page_major"), ("page_major", "token_major")])
@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 48), (1, 1)])
def test_long_rows_and_long_pieces(device, a, b, ours, theirs):
    launch(side(a, BIG, ours, 39, 1, device), side(b, BIG, theirs, 39, 2, device), 39)


@on_each_device
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pages_below_0_and_past_the_end_move_nothing(device, index, monkeypatch):
    """Programs of many runs each, the last one of fewer; and of 16 tokens, so that pages end within a tile."""
    monkeypatch.setattr(repack_module, "_PROGRAMS", 1)
    monkeypatch.setattr(repack_module, "_RUNS", 7)
    monkeypatch.setattr(repack_module, "_ELEMENTS", 64)
    source, target = side("page_major", UNIFORM, 8, 75, 1, device), side("BLNHC", UNIFORM, 16, 75, 2, device)
    source.pages[1], target.pages[2] = -1, -7
    launch(source, target, 75, index)
    far = [torch.tensor(s.pages, dtype=index, device=device) for s in (source, target)]
    far[0][0], far[1][3], far[1][4] = source.pool.num_pages, 2**31 - 1, target.pool.num_pages - 1
    source.pages[0] = target.pages[3] = target.pages[4] = -1
    wanted = expected(source, target, 75)
    plan = pm_ops.RepackPlan(source.pool.layout, target.pool.layout)
    pools, table = (source.pool, target.pool), plan.table(source.pool.device)
    regions = [p.region for p in pools]
    regions[1][3] -= 1  # the last page exists, but is not the target's
    repack_pages(RepackPages(*(p.buffer for p in pools), *far, table, 75, 8, 16, *regions))
    assert torch.equal(target.pool.buffer.cpu(), wanted)


@on_each_device
@pytest.mark.parametrize("page_size", [1, 4, 20])
def test_states_move_once_a_page(device, page_size):
    planes = [
        (pm_ops.Plane(0, "key", at[0], 16, 8, (2, 4), torch.bfloat16),
         pm_ops.Plane(1, "ssm", at[1], None, 80, (20, 5, 4), torch.float32))
        for at in ((0, 16 * page_size), (1600, 0))
    ]  # fmt: skip
    pools = [
        pm_ops.PagePool(pm_ops.PageLayout(page_size, 1600 + 16 * page_size, p), 5, device)
        for p in planes
    ]  # fmt: skip
    for pool in pools:
        pool.buffer.random_(0, 256)
    src, dst, tokens = [4, 0, -1, 2], [1, 3, 0, 2], 3 * page_size + 1
    after = pools[1].pages.clone()
    for t in range(tokens):
        a, b = src[t // page_size], dst[t // page_size]
        if a >= 0:
            after[b, 1600 + t % page_size * 16 :][:16] = pools[0].pages[a, t % page_size * 16 :][:16]
            after[b, :1600] = pools[0].pages[a, 16 * page_size :]
    plan = pm_ops.RepackPlan(pools[0].layout, pools[1].layout)
    lists = [torch.tensor(ids, device=device) for ids in (src, dst)]
    sizes, regions = (tokens, page_size, page_size), [p.region for p in pools]
    repack_pages(RepackPages(pools[0].buffer, pools[1].buffer, *lists, plan.table(pools[0].device), *sizes, *regions))
    assert torch.equal(pools[1].pages, after)


@on_each_device
def test_nothing_to_move(device):
    source, target = side("page_major", UNIFORM, 8, 20, 1, device), side("BLNHC", UNIFORM, 8, 20, 2, device)
    launch(source, target, 0)


@pytest.mark.gpu
def test_plans_run_on_the_gpu_and_inside_a_cuda_graph():
    """Captured once, replayed with other pages."""
    source, target = side("page_major", UNIFORM, 16, 200, 1, "cuda"), side("BLNHC", UNIFORM, 64, 200, 2, "cuda")
    plan = pm_ops.RepackPlan(source.pool.layout, target.pool.layout)
    lists = [torch.tensor(s.pages, device="cuda") for s in (source, target)]
    before = target.pool.buffer.clone()
    plan.run(source.pool, target.pool, *lists, 200)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(source.pool, target.pool, *lists, 200)
    for s, ids in zip((source, target), lists, strict=True):
        s.pages.reverse()
        ids.copy_(torch.tensor(s.pages))
    target.pool.buffer.copy_(before)
    wanted = expected(source, target, 200)
    graph.replay()
    assert torch.equal(target.pool.buffer.cpu(), wanted)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_pages_past_2_to_the_32_bytes(index):
    """Pages of 2 MiB on either side of byte 2^32 of both pools, every byte of both."""
    layouts = [
        pm_ops.page_major(32, 8, 128, 16, torch.bfloat16),
        pm_ops.vllm(32, 8, 128, 16, torch.bfloat16, "BLHNC"),
    ]
    pools = [pm_ops.PagePool(layout, 2050, "cuda") for layout in layouts]
    pools[0].buffer.random_(0, 256)
    pools[1].buffer.fill_(0xA5)
    src, dst = (torch.tensor(ids, dtype=index, device="cuda") for ids in ([2049, 2047, 2048], [2047, 2048, 2049]))
    pm_ops.RepackPlan(*layouts).run(*pools, src, dst)
    # [page, layer, kind, token, head, dim] as [page, layer, head, token, kind, dim]
    moved = pools[0].pages[src.long()].view(3, 32, 2, 16, 8, 256).permute(0, 1, 4, 3, 2, 5).reshape(3, -1)
    assert torch.equal(pools[1].pages[dst.long()], moved)
    assert (pools[1].pages[:2047] == 0xA5).all()
