"""The order and bounds of transfers, with a stream whose work is done when the test says so."""

import gc
import weakref

import pytest
import torch
from delayed import LAYOUT, PAGE, delayed, on_a_gpu
from pages import LAYOUTS, packed_pool

from pm_ops import PagePool, transfer_plan, transfer_queue
from pm_ops.index_ring import IndexRing
from pm_ops.testing import writes_only
from pm_ops.transfer_queue import TransferQueue


def test_what_is_beyond_the_bound_is_issued_by_later_calls_that_wait_for_nothing(log) -> None:
    pool, host = delayed(log, max_in_flight=2 * PAGE + 1)
    saved = host.offload(range(5))
    assert len(log) == 2 and not saved.done() and saved.arrived == [] and host._out.in_flight == 2 * PAGE
    host._out._moving[0][2].synchronize()
    assert not saved.done() and len(log) == 3 and saved.arrived == [0] and saved.bytes_arrived == PAGE
    other = host.offload([7])
    assert len(log) == 3  # in turn
    saved.wait()
    assert len(log) == 5 and not saved.done()
    saved.synchronize()
    assert saved.done() and saved.arrived == [0, 1, 2, 3, 4] and len(log) == 6
    other.synchronize()
    assert torch.equal(host.pool.gather(saved.pages + other.pages), pool.gather([0, 1, 2, 3, 4, 7]))
    assert host._out.in_flight == 0


def test_the_bound_holds_for_the_usual_steps_too(log, monkeypatch) -> None:
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", 4 << 20)
    monkeypatch.setattr(transfer_plan, "STEP_MOST", 64 << 20)
    pool, host = delayed(log, max_in_flight=2 * PAGE)
    saved = host.offload(range(8))
    assert host._out.in_flight == 2 * PAGE and len(log) == 2
    saved.synchronize()
    assert torch.equal(host.pool.gather(saved.pages), pool.gather(range(8)))


def test_a_page_larger_than_the_bound_goes_alone(log) -> None:
    _, host = delayed(log, max_in_flight=1)
    saved = host.offload([0, 1])
    assert len(log) == 1
    saved.synchronize()
    assert len(log) == 2 and saved.done()


def test_a_restore_has_the_offload_that_it_reads_issued_and_waits_for_it(log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    before = pool.gather([0, 1, 2])
    saved = host.offload([0, 1, 2])
    back = host.restore(saved.pages[2:], [5])
    assert log == [("copy", "out")] * 3 + [("wait", "out"), ("copy", "in")]
    back.synchronize()
    assert torch.equal(pool.gather([5]), before[2:]) and saved.done()


def test_a_restore_waits_for_the_offload_of_the_page_that_it_overwrites(log) -> None:
    pool, host = delayed(log)
    kept = host.offload([6])
    kept.synchronize()
    log.clear()
    before = pool.gather([0])
    saved = host.offload([0])
    back = host.restore(kept.pages, [0])
    assert log == [("copy", "out"), ("wait", "out"), ("copy", "in")]
    back.synchronize()
    assert torch.equal(host.pool.gather(saved.pages), before) and torch.equal(pool.gather([0]), pool.gather([6]))


def test_an_offload_waits_for_the_restore_of_the_page_that_it_reads(log) -> None:
    pool, host = delayed(log)
    kept = host.offload([6])
    kept.synchronize()
    host.restore(kept.pages, [0])
    saved = host.offload([0])
    saved.synchronize()
    assert torch.equal(host.pool.gather(saved.pages), pool.gather([6]))


def test_transfers_of_other_pages_do_not_wait_for_one_another(log) -> None:
    _, host = delayed(log)
    kept = host.offload([6])
    kept.synchronize()
    log.clear()
    host.offload([0, 1])
    host.restore(kept.pages, [5])
    assert log == [("copy", "out")] * 2 + [("copy", "in")]


@pytest.mark.parametrize("log", [2], indirect=True)
def test_two_streams_take_turns_each_behind_the_other(log) -> None:
    """So that copies of others, on streams of theirs, come between two turns."""
    pool, host = delayed(log)
    first, second = host._out.streams
    saved = host.offload([0, 1, 2])
    assert log == [("copy", "out")] * 3 and (len(first.work), len(second.work)) == (2, 2)  # and a wait
    other = host.offload([3, 4])
    assert log == [("copy", "out")] * 5 and (len(first.work), len(second.work)) == (4, 3)
    second.synchronize()
    assert first.done == 2 and saved.done() and not other.done()
    other.synchronize()
    assert first.done == 4 and torch.equal(host.pool.gather(saved.pages + other.pages), pool.gather(range(5)))


def test_a_transfer_comes_after_what_is_queued(log, monkeypatch) -> None:
    """The stream of the model's work: it stores and reads pages when its turn comes, as a kernel does."""
    pool, host = delayed(log)
    current, stored = on_a_gpu(host, log, monkeypatch), packed_pool(LAYOUT, 8, seed=5).pages
    current.work.append(lambda: pool.pages.copy_(stored))
    saved = host.offload([0, 1])
    saved.synchronize()
    assert torch.equal(host.pool.gather(saved.pages), stored[:2])
    read = []
    current.work.append(lambda: read.append(pool.gather([6, 7])))
    host.restore(saved.pages, [6, 7]).synchronize()
    assert torch.equal(read[0], stored[6:]) and torch.equal(pool.gather([6, 7]), stored[:2])


def test_what_is_queued_behind_a_wait_comes_after_the_transfer(log, monkeypatch) -> None:
    pool, host = delayed(log)
    current, before = on_a_gpu(host, log, monkeypatch), pool.gather([0, 1])
    saved = host.offload([0, 1])
    saved.wait()
    current.work.append(lambda: pool.zero([0, 1]))
    current.synchronize()
    assert saved.done() and torch.equal(host.pool.gather(saved.pages), before)


def test_a_layer_that_is_waited_for_holds_what_is_queued_behind(log, monkeypatch) -> None:
    pool, host = delayed(log)
    saved = host.offload([0])
    saved.synchronize()
    current, read, block = on_a_gpu(host, log, monkeypatch), [], PAGE // 3
    back = host.restore(saved.pages, [7], by_layer=True)
    for layer in range(2):
        back.wait_layer(layer)
    current.work.append(lambda: read.append(pool.gather([7])[:, : 2 * block]))
    current.synchronize()
    assert torch.equal(read[0], pool.gather([0])[:, : 2 * block])


def test_layers_are_there_one_after_the_other(log) -> None:
    pool, host = delayed(log, max_in_flight=1)
    saved = host.offload([0, 1])
    saved.synchronize()
    before = pool.gather([0, 1])
    log.clear()
    back = host.restore(saved.pages, [6, 7], by_layer=True)
    back.wait_layer(0)
    assert len(log) == 2
    back.wait_layer(1)
    assert len(log) == 4 and set(back.layers) == {0, 1}
    back.layers[1].synchronize()
    block = PAGE // 3
    rows = pool.gather([6, 7])
    assert torch.equal(rows[:, : 2 * block], before[:, : 2 * block])
    assert not torch.equal(rows[:, 2 * block :], before[:, 2 * block :]) and back.arrived == []
    back.synchronize()
    assert torch.equal(pool.gather([6, 7]), before) and back.arrived == [0, 1]


def test_host_pages_freed_in_flight_are_handed_out_after_that(log) -> None:
    pool, host = delayed(log, 4)
    first = pool.gather([0, 1])
    saved = host.offload([0, 1])
    saved.synchronize()
    back = host.restore(saved.pages, [6, 7])
    host.free(saved.pages)
    assert host.pool.allocator.num_free == 2
    other = host.offload([2, 3])
    assert not set(other.pages) & set(saved.pages) and not back.done()
    third = host.offload([4])  # waits on the host for the restore, whose pages are the only ones left
    assert back.done() and third.pages[0] in saved.pages
    third.synchronize()
    assert torch.equal(pool.gather([6, 7]), first)
    assert torch.equal(host.pool.gather(third.pages), pool.gather([4]))


def test_a_full_pool_is_refused_without_waiting(log) -> None:
    pool, host = delayed(log, 3)
    saved = host.offload([0, 1, 2])
    host.free(saved.pages[:1])
    with writes_only(pool.buffer, []), pytest.raises(RuntimeError, match="2 asked for, 0 of 3 free"):
        host.offload([4, 5])
    assert not saved.done()
    assert host.offload([4]).pages == saved.pages[:1]


def test_a_page_is_not_freed_twice_in_flight(log) -> None:
    _, host = delayed(log)
    saved = host.offload([0, 1])
    host.pool.allocator.retain([0])
    host.free(saved.pages)
    with pytest.raises(RuntimeError, match="cannot free host page 0 2 times: it has 1 owner"):
        host.free([0, 0])
    host.free([0])
    for call in (lambda: host.free([0]), lambda: host.restore([1], [3])):
        with pytest.raises(RuntimeError, match="it has 0 owners"):
            call()
    assert not saved.done() and host.pool.allocator.num_free == 6
    saved.synchronize()
    host.free([])
    assert host.pool.allocator.num_free == 8


def test_a_page_that_another_owner_keeps_is_not_waited_for(log) -> None:
    pool, host = delayed(log, 3)
    saved = host.offload([0, 1])
    host.pool.allocator.retain(saved.pages[:1])
    host.free(saved.pages)
    with writes_only(pool.buffer, []), pytest.raises(RuntimeError, match="3 asked for, 1 of 3 free"):
        host.offload([4, 5, 6])
    assert host._out.in_flight == 2 * PAGE


def test_restores_are_not_kept_by_the_offload_that_they_read(log) -> None:
    _, host = delayed(log, max_in_flight=PAGE)
    first = host.offload([0, 1])
    queued = host.restore(first.pages, [2, 3])
    first.wait()
    later = host.restore(first.pages, [4, 5])
    gone = [weakref.ref(transfer) for transfer in (queued, later)]
    later.synchronize()
    host.free([])
    del queued, later
    gc.collect()
    assert [transfer() for transfer in gone] == [None, None]


def test_pages_do_not_go_from_gpu_to_gpu(monkeypatch) -> None:
    pools = packed_pool(LAYOUT, 4), packed_pool(LAYOUT, 4)
    monkeypatch.setattr(PagePool, "device", property(lambda self: torch.device("cuda", pools.index(self))))
    with pytest.raises(ValueError, match="not from cuda:0 to cuda:1.*RepackPlan"):
        TransferQueue(*pools)


def test_pools_of_other_layouts_are_refused() -> None:
    pool = packed_pool(LAYOUT, 4)
    other = packed_pool(LAYOUTS["token_major"], 4)
    with pytest.raises(ValueError, match="equal layouts.*RepackPlan"):
        TransferQueue(pool, other)


def test_a_call_that_finds_the_ring_full_does_not_wait(log, monkeypatch) -> None:
    _, host = delayed(log)
    queue = host._out
    queue._ring = IndexRing(torch.zeros(4, 2, dtype=torch.int64))
    moved = []
    monkeypatch.setattr(
        transfer_queue, "_move_pages", lambda a: queue.stream.work.append(lambda: moved.append(a.pairs.tolist()))
    )
    saved = [host.offload(ids, impl="kernel") for ids in ([0, 1, 2], [3, 4, 5])]
    assert moved == [] and not any(transfer.done() for transfer in saved)
    saved[1].synchronize()
    pairs = [list(map(list, zip(t.source_pages, t.pages, strict=True))) for t in saved]
    assert [pair for step in moved for pair in step] == pairs[0] + pairs[1]
