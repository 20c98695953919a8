"""HostPool on a GPU: bytes by every way to move them, and the order of everything that touches a page.

The order tests hold a stream back for longer than a transfer takes, so that a wait that is missing shows; controls
without the waits tell that it would.
"""

import gc
import weakref

import pytest
import torch

import pm_ops
from pm_ops import HostPool, PagePool, copy_engine, transfer_plan
from pm_ops import host as host_module
from pm_ops.index_ring import IndexRing
from pm_ops.testing import fill_random

pytestmark = pytest.mark.gpu

LAYOUT = pm_ops.page_major(4, 2, 64, 16, torch.bfloat16)  # pages of 32 KiB
TIMES = 150
every_impl = pytest.mark.parametrize("impl", ["copy", "kernel"])


@pytest.fixture(autouse=True)
def nothing_is_left_over():
    """A pool that is dropped waits for its streams, which torch may have given to another one too."""
    gc.collect()


def delay(stream: torch.cuda.Stream | None = None, ms: float = 0.5) -> None:
    """Nothing that is queued on the stream from now on begins for about so long."""
    with torch.cuda.stream(stream or torch.cuda.current_stream()):
        torch.cuda._sleep(int(ms * 1.8e6))


def random_pool(num_pages: int = 64, layout: pm_ops.PageLayout = LAYOUT) -> PagePool:
    pool = PagePool(layout, num_pages, "cuda")
    fill_random(pool.buffer)
    return pool


def random_rows(pool: PagePool, count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, pool.layout.page_bytes), dtype=torch.uint8, device="cuda")


LAYOUTS = {
    "pages of 32 KiB": LAYOUT,
    "pages of 1 MiB": pm_ops.page_major(8, 8, 128, 32, torch.bfloat16),
    "pages of 588 B": pm_ops.page_major(3, 1, 7, 14, torch.int8),
    "scales": pm_ops.page_major(2, 2, 64, 16, torch.int8, scales=True),
}


@every_impl
@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_there_and_back_and_no_other(name, batch, impl, monkeypatch):
    """Over a whole host buffer, and a whole pool with a base and gaps; in many steps, by layer and by page."""
    layout = LAYOUTS[name]
    if not batch:
        if impl == "kernel":
            pytest.skip("the kernel makes no copies")
        monkeypatch.setattr(copy_engine, "_batch_call", lambda: None)
    elif impl == "copy":
        assert copy_engine._batch_call() is not None, "no cuMemcpyBatchAsync in this driver"
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", 2 * layout.page_bytes)
    monkeypatch.setattr(transfer_plan, "STEP_MOST", 5 * layout.page_bytes)
    stride = layout.page_bytes + 64
    buffer = torch.zeros(16 + 64 * stride, dtype=torch.uint8, device="cuda")
    fill_random(buffer)
    pool = PagePool(layout, 64, buffer=buffer, base=16, page_stride=stride)
    host = HostPool(pool, 40)
    fill_random(host.pool.buffer, 1)
    assert host.pool.buffer.is_pinned()
    ids = torch.randperm(64)[:30]
    there = torch.randperm(64)[:30]
    expected_host, expected = host.pool.buffer.clone(), buffer.cpu()
    rows = pool.gather(ids.cuda()).cpu()
    saved = host.offload(ids if batch else ids.cuda(), impl=impl)
    PagePool(layout, 40, buffer=expected_host).scatter(saved.pages, rows)
    saved.synchronize()
    assert saved.impl == impl and saved.done() and saved.arrived == list(range(30))
    assert torch.equal(host.pool.buffer, expected_host) and torch.equal(buffer.cpu(), expected)
    PagePool(layout, 64, buffer=expected, base=16, page_stride=stride).scatter(there, rows)
    host.restore(saved.pages, there, impl=impl).wait()
    assert torch.equal(buffer.cpu(), expected)
    fill_random(buffer, 2)
    expected = buffer.cpu()
    padding = layout.page_bytes - sum(run.nbytes for run in layout.page_runs)
    assert padding == 0
    PagePool(layout, 64, buffer=expected, base=16, page_stride=stride).scatter(there, rows)
    back = host.restore(saved.pages, there, by_layer=True, impl=impl)
    back.wait_layer(layout.layers[-1])
    assert torch.equal(buffer.cpu(), expected)
    assert torch.equal(host.pool.buffer, expected_host)


@every_impl
def test_store_then_offload_on_another_stream(impl):
    pool, side = random_pool(), torch.cuda.Stream()
    host = HostPool(pool, 64)
    exact = 0
    for _ in range(TIMES):
        ids = torch.randperm(64)[:20].tolist()
        rows, there = random_rows(pool, 20), torch.tensor(ids, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            delay()
            pool.scatter(there, rows)
            saved = host.offload(ids, impl=impl)
        saved.synchronize()
        exact += torch.equal(host.pool.gather(saved.pages), rows.cpu())
        host.free(saved.pages)
    assert exact == TIMES


@every_impl
def test_restore_while_an_attention_reads(impl):
    """What was queued before reads the old pages, what is queued after a wait reads the new ones."""
    pool = random_pool()
    host = HostPool(pool, 64)
    for layer in range(4):
        for kind in ("key", "value"):
            pool.view(layer, kind).normal_()
    ids = list(range(40))
    saved = host.offload(ids)
    saved.wait()
    table = torch.tensor([ids[:20], ids[20:]], device="cuda", dtype=torch.int32)
    lens = torch.tensor([320, 301], device="cuda", dtype=torch.int32)
    query = torch.randn(2, 4, 64, device="cuda", dtype=torch.bfloat16)

    def attend(layer):
        return pm_ops.attention(pool, layer, query, table, lens)

    restored = [attend(layer).clone() for layer in range(4)]
    exact = 0
    for i in range(TIMES):
        for layer in range(4):
            pool.view(layer, "value").normal_()
        others = attend(0).clone()
        torch.cuda.synchronize()
        delay()
        old = attend(0)
        back = host.restore(saved.pages, ids, impl=impl, by_layer=bool(i % 2))
        new = []
        for layer in range(4):
            if i % 2:
                back.wait_layer(layer)
            elif layer == 0:
                back.wait()
            new.append(attend(layer))
        exact += torch.equal(old, others) and all(map(torch.equal, new, restored))
    assert exact == TIMES


@every_impl
def test_offload_then_overwrite(impl):
    pool = random_pool()
    host = HostPool(pool, 64)
    exact = 0
    for _ in range(TIMES):
        ids = torch.randperm(64)[:20].tolist()
        before, rows, there = pool.gather(ids).cpu(), random_rows(pool, 20), torch.tensor(ids, device="cuda")
        delay(host._out.stream)
        saved = host.offload(ids, impl=impl)
        saved.wait()
        pool.scatter(there, rows)
        saved.synchronize()
        exact += torch.equal(host.pool.gather(saved.pages), before)
        host.free(saved.pages)
    assert exact == TIMES


@every_impl
def test_restore_follows_the_offload_that_it_reads(impl):
    """And one that overwrites follows the offload of what it overwrites; nobody waits on the host."""
    pool = random_pool()
    host = HostPool(pool, 64)
    exact = 0
    for _ in range(TIMES):
        ids = torch.randperm(64).tolist()
        before = pool.gather(ids).cpu()
        delay(host._out.stream)
        first = host.offload(ids[:16], impl=impl)
        host.restore(first.pages, ids[16:32], impl=impl)
        second = host.offload(ids[32:48], impl=impl)
        back = host.restore(first.pages, ids[32:48], impl=impl)
        third = host.offload(ids[32:48], impl=impl)
        back.wait()
        exact += torch.equal(pool.gather(ids[16:48]).cpu(), before[:16].repeat(2, 1))
        third.synchronize()
        exact += torch.equal(host.pool.gather(second.pages + third.pages), torch.cat([before[32:48], before[:16]]))
        host.free(first.pages + second.pages + third.pages)
    assert exact == 2 * TIMES


@every_impl
def test_a_single_page_is_read_in_its_turn(impl):
    pool = random_pool()
    host = HostPool(pool, 64)
    exact = 0
    for i in range(TIMES):
        before = pool.gather([i % 64]).cpu()
        delay(host._out.stream)
        saved = host.offload([i % 64], impl=impl)
        host.restore(saved.pages, [(i + 1) % 64], impl=impl).wait()
        exact += torch.equal(pool.gather([(i + 1) % 64]).cpu(), before)
        pool.scatter([(i + 1) % 64], random_rows(pool, 1))
        host.free(saved.pages)
    assert exact == TIMES


@every_impl
def test_host_pages_freed_and_reused_in_flight(impl):
    pool = random_pool()
    host = HostPool(pool, 16)
    exact = 0
    for _ in range(TIMES):
        ids = torch.randperm(64).tolist()
        before = pool.gather(ids).cpu()
        saved = host.offload(ids[:16], impl=impl)
        delay(host._in.stream)
        back = host.restore(saved.pages, ids[16:32], impl=impl)
        host.free(saved.pages)
        again = host.offload(ids[32:48], impl=impl)  # of which every page is one of those
        again.synchronize()
        back.wait()
        exact += torch.equal(pool.gather(ids[16:32]).cpu(), before[:16])
        exact += torch.equal(host.pool.gather(again.pages), before[32:48])
        host.free(again.pages)
    assert exact == 2 * TIMES


@every_impl
def test_without_a_wait_the_order_tests_would_fail(impl, monkeypatch):
    """Overwritten while it is still to be read, read before it is written, and moved before it is stored.

    The delays are long, so that a busy host is not what makes the difference.
    """
    pool = random_pool()
    host = HostPool(pool, 64)
    ids, there = list(range(20)), torch.arange(20, device="cuda")
    before, rows = pool.gather(ids).cpu(), random_rows(pool, 20)
    warm = host.offload(ids, impl=impl)  # or compiling the kernels below takes longer than the delay
    host.restore(warm.pages, ids, impl=impl).synchronize()
    host.free(warm.pages)
    pool.scatter(there, pool.gather(there))
    torch.cuda.synchronize()
    delay(host._out.stream, 50)
    saved = host.offload(ids, impl=impl)
    pool.scatter(there, rows)
    saved.synchronize()
    assert not torch.equal(host.pool.gather(saved.pages), before)

    delay(host._in.stream, 50)
    host.restore(saved.pages, range(40, 60), impl=impl)
    early = pool.gather(range(40, 60))
    torch.cuda.synchronize()
    assert not torch.equal(early.cpu(), host.pool.gather(saved.pages))

    rows = random_rows(pool, 20)
    torch.cuda.synchronize()
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda self, event: None)
    delay(ms=50)
    pool.scatter(there, rows)
    saved = host.offload(ids, impl=impl)
    saved.synchronize()
    assert not torch.equal(host.pool.gather(saved.pages), rows.cpu())


def test_more_page_ids_in_flight_than_the_ring_holds():
    pool = random_pool()
    host = HostPool(pool, 640)
    host._out._ring = IndexRing(torch.zeros(70, 2, dtype=torch.int64, pin_memory=True))
    lists = [torch.randperm(64)[:30].tolist() for _ in range(20)]
    delay(ms=5)
    saved = [host.offload(ids, impl="kernel") for ids in lists]
    for ids, transfer in zip(lists, saved, strict=True):
        transfer.synchronize()
        assert torch.equal(host.pool.gather(transfer.pages), pool.gather(ids).cpu())


def test_calls_and_polls_do_not_wait_on_the_host(monkeypatch):
    """Beyond the bound: the rest is issued by done(), and by wait() at once."""
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", LAYOUT.page_bytes)
    monkeypatch.setattr(transfer_plan, "STEP_MOST", LAYOUT.page_bytes)
    pool = random_pool()
    host = HostPool(pool, 64, max_in_flight=4 * LAYOUT.page_bytes)
    seen = []
    torch.cuda.synchronize()
    delay(ms=100)
    end = torch.cuda.Event()
    end.record()
    saved = host.offload(range(32), impl="copy", progress=lambda t: seen.append(t.bytes_arrived))
    assert not saved.done() and host._out.in_flight == 4 * LAYOUT.page_bytes and not end.query()
    while not saved.done():
        pass
    assert seen == sorted(set(seen)) and seen[-1] == 32 * LAYOUT.page_bytes
    assert torch.equal(host.pool.gather(saved.pages), pool.gather(range(32)).cpu())
    torch.cuda.synchronize()
    delay(ms=100)
    end.record()
    back = host.restore(saved.pages, range(32, 64), impl="copy")
    back.wait()
    assert not back.steps and not end.query()
    assert torch.equal(pool.gather(range(32, 64)), pool.gather(range(32)))


def test_copies_of_others_come_between_two_steps():
    """On a single stream they came when all 512 MiB, which take 10 ms, had been copied."""
    pool, side = random_pool(512, LAYOUTS["pages of 1 MiB"]), torch.cuda.Stream()
    host = HostPool(pool, 512)
    tokens, there = torch.arange(32, device="cuda"), torch.empty(32, dtype=torch.int64, pin_memory=True)
    torch.cuda.synchronize()
    saved = host.offload(torch.randperm(512), impl="copy")
    assert not saved.steps, "all is in flight"
    with torch.cuda.stream(side):
        there.copy_(tokens, non_blocking=True)
    side.synchronize()
    assert not saved.done() and saved.bytes_arrived < saved.nbytes / 3 and there.tolist() == list(range(32))
    saved.synchronize()


def test_cancel_leaves_out_what_was_not_issued(monkeypatch):
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", LAYOUT.page_bytes)
    monkeypatch.setattr(transfer_plan, "STEP_MOST", LAYOUT.page_bytes)
    pool = random_pool()
    host = HostPool(pool, 64, max_in_flight=4 * LAYOUT.page_bytes)
    saved = host.offload(range(32))
    saved.synchronize()
    before = pool.gather(range(64)).cpu()
    delay(ms=100)
    back = host.restore(saved.pages, range(32, 64))
    assert back.cancel()
    back.synchronize()
    assert back.arrived == [0, 1, 2, 3]
    assert torch.equal(pool.gather(range(64)).cpu(), torch.cat([before[:32], before[:4], before[36:]]))


def test_a_capture_is_refused_and_a_wait_on_another_stream_works():
    pool, side = random_pool(), torch.cuda.Stream()
    host = HostPool(pool, 64)
    saved = host.offload(range(20))
    graph, rows = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        for call in (
            lambda: host.offload([0]), lambda: host.restore(saved.pages[:1], [63]), lambda: host.free(saved.pages[:1]),
            lambda: saved.done() and saved.wait(), saved.wait,
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
                call()
        rows += 1  # the capture goes on
    graph.replay()
    assert rows.tolist() == [1] * 8 and host.pool.allocator.num_free == 44
    delay(host._in.stream)
    back = host.restore(saved.pages, range(40, 60))
    with torch.cuda.stream(side):
        back.wait()
        rows = pool.gather(torch.arange(40, 60, device="cuda"))
    side.synchronize()
    assert torch.equal(rows.cpu(), host.pool.gather(saved.pages))


def test_an_error_of_locking_is_not_left_to_the_next_launch():
    pool = random_pool(4)
    host = HostPool(pool, 4)
    with pytest.raises(RuntimeError, match="cannot be page-locked"):
        host_module._pin(host.pool.buffer, pool.device)  # a second time
    torch.ones(1, device="cuda")
    host.offload([0, 1]).synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_impl
def test_a_pool_on_another_gpu_than_the_current_one(impl):
    pool = PagePool(LAYOUT, 64, "cuda:1")
    fill_random(pool.buffer)
    before = pool.gather(torch.arange(20, device="cuda:1")).cpu()
    host = HostPool(pool, 64)
    with torch.cuda.device("cuda:0"):
        delay(host._out.stream)
        saved = host.offload(range(20), impl=impl)
        back = host.restore(saved.pages, range(40, 60), by_layer=True, impl=impl)
        back.wait_layer(LAYOUT.layers[-1])
        back.wait()
        assert torch.cuda.current_device() == 0
    assert torch.equal(pool.gather(torch.arange(40, 60, device="cuda:1")).cpu(), before)


def test_memory_that_was_not_pinned_is_refused():
    pool = random_pool(4)
    with pytest.raises(ValueError, match="not pinned"):
        pm_ops.transfer_queue.TransferQueue(pool, PagePool(LAYOUT, 4))


def test_a_pool_that_is_dropped_in_flight_gives_its_memory_back_after_that():
    pool = random_pool()
    host = HostPool(pool, 64)
    buffer, expected = pool.buffer, pool.gather(range(20)).cpu()
    saved = host.offload(range(20))
    saved.synchronize()
    delay(host._in.stream, 20)
    host.restore(saved.pages, range(40, 60))
    gone = weakref.ref(host)
    del host, saved
    gc.collect()
    assert gone() is None
    rows = PagePool(LAYOUT, 64, buffer=buffer).gather(range(40, 60))
    assert torch.equal(rows.cpu(), expected)
