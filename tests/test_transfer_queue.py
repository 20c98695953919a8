"""The order, bounds and cancellation of transfers, with a stream whose work is done when the test says so."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pages import LAYOUTS, packed_pool, spaced_pool

import pm_ops
from pm_ops import HostPool, PagePool, transfer_plan, transfer_queue
from pm_ops.copy_engine import copy_runs
from pm_ops.index_ring import IndexRing
from pm_ops.testing import fill_random, page_bytes, writes_only
from pm_ops.transfer_plan import plan_transfer
from pm_ops.transfer_queue import TransferQueue

LAYOUT = LAYOUTS["page_major"]
PAGE = LAYOUT.page_bytes


class Stream:
    """Carries work out, in order, when a mark behind it is reached, not when it is given."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def record_event(self) -> "Mark":
        return Mark(self, len(self.work))

    def wait_event(self, mark: "Mark") -> None:
        self.log.append(("wait", mark.stream))
        self.work.append(mark.synchronize)


class Mark:
    def __init__(self, stream: Stream, position: int) -> None:
        self.stream, self.position = stream, position

    def query(self) -> bool:
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        while not self.query():
            self.stream.work[self.stream.done]()
            self.stream.done += 1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was issued: ("copy", stream) and ("wait", the stream waited for). A step is a page."""
    found: list[Any] = []

    def later(*args):
        *what, stream = args
        found.append(("copy", stream))
        stream.work.append(lambda: copy_runs(*what, None))

    monkeypatch.setattr(transfer_queue, "copy_runs", later)
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", PAGE)
    monkeypatch.setattr(transfer_plan, "STEP_MOST", PAGE)
    return found


def delayed(log: list[Any], num_pages: int = 8, **options: Any) -> tuple[PagePool, HostPool]:
    pool = packed_pool(LAYOUT, 8)
    host = HostPool(pool, num_pages, **options)
    fill_random(host.pool.buffer, 9)
    host._out.stream, host._in.stream = Stream(log), Stream(log)
    return pool, host


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


def test_waiting_on_the_host_keeps_to_the_bound_and_tells_of_every_step(log) -> None:
    _, host = delayed(log, max_in_flight=2 * PAGE)
    seen = []
    saved = host.offload(range(5), progress=lambda t: seen.append((t.bytes_arrived, host._out.in_flight)))
    saved.synchronize()
    assert seen == [(PAGE * n, PAGE * min(1, 5 - n)) for n in range(1, 6)]


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
    out, into = host._out.stream, host._in.stream
    assert log == [("copy", out)] * 3 + [("wait", out), ("copy", into)]
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
    assert log == [("copy", host._out.stream), ("wait", host._out.stream), ("copy", host._in.stream)]
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
    assert log == [("copy", host._out.stream)] * 2 + [("copy", host._in.stream)]


def test_layers_are_there_one_after_the_other(log) -> None:
    pool, host = delayed(log, max_in_flight=1)
    saved = host.offload([0, 1])
    saved.synchronize()
    before = pool.gather([0, 1])
    log.clear()
    back = host.restore(saved.pages, [6, 7], by_layer=True)
    back.wait_layer(0)
    assert len(log) == 1  # both pages' layer fits a step
    back.wait_layer(1)
    assert len(log) == 2 and set(back.layers) == {0, 1}
    back.layers[1].synchronize()
    block = PAGE // 3
    rows = pool.gather([6, 7])
    assert torch.equal(rows[:, : 2 * block], before[:, : 2 * block])
    assert not torch.equal(rows[:, 2 * block :], before[:, 2 * block :]) and back.arrived == []
    back.synchronize()
    assert torch.equal(pool.gather([6, 7]), before) and back.arrived == [0, 1]


def test_a_cancelled_offload_says_what_arrived_and_its_other_pages_are_not_restored(log) -> None:
    pool, host = delayed(log, max_in_flight=2 * PAGE)
    saved = host.offload([5, 2, 7, 0])
    assert saved.cancel() and not saved.cancel() and saved.cancelled and not saved.done()
    with pytest.raises(RuntimeError, match="cancelled with 2 of 4 pages issued"):
        saved.wait()
    written = [saved.pages[i] for i in (1, 3)]
    with pytest.raises(ValueError, match="was never written: its offload was cancelled"):
        host.restore(saved.pages, [1, 3, 4, 6])
    saved.synchronize()
    assert saved.done() and saved.arrived == [1, 3] and saved.left_out == [0, 2]  # pages 0 and 2 come first
    assert torch.equal(host.pool.gather(written), pool.gather([2, 0]))
    with pytest.raises(ValueError, match="was never written"):
        host.restore(saved.pages[:1], [1])
    host.restore(written, [1, 3]).synchronize()
    host.free(saved.pages)
    again = host.offload(range(8))  # all of them can be used again
    again.synchronize()
    host.restore(again.pages, list(range(8))).synchronize()


def test_pages_of_a_cancelled_offload_that_were_freed_in_flight_are_as_good_as_others(log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    saved = host.offload([0, 1, 2])
    saved.cancel()
    host.free(saved.pages)
    saved.synchronize()
    host.free([])
    pages = host.pool.allocator.alloc(8)
    host.pool.scatter(pages, pool.gather(range(8)))  # by the CPU
    host.restore(pages, range(7, -1, -1)).synchronize()
    assert torch.equal(pool.gather(range(8)), host.pool.gather(pages[::-1]))


def test_a_cancelled_restore_leaves_the_other_pages_as_they_were(log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    saved = host.offload([0, 1, 2])
    saved.synchronize()
    before = pool.gather(range(8))
    back = host.restore(saved.pages, [5, 6, 7])
    assert back.cancel()
    back.synchronize()
    assert back.arrived == [0] and back.left_out == [1, 2]
    assert torch.equal(pool.gather([5, 6, 7]), before[[0, 6, 7]])
    layered = host.restore(saved.pages, [5, 6, 7], by_layer=True)
    assert layered.cancel()
    layered.wait_layer(0)
    with pytest.raises(RuntimeError, match="cancelled with 0 of 3"):
        layered.wait_layer(1)


def test_an_offload_that_a_queued_restore_reads_is_not_cancelled(log) -> None:
    _, host = delayed(log, max_in_flight=PAGE)
    kept = host.offload([7])
    kept.synchronize()
    host.restore(kept.pages, [6])  # fills the direction
    saved = host.offload([0, 1])
    back = host.restore(saved.pages, [4, 5])
    assert saved.steps and back.steps
    with pytest.raises(RuntimeError, match="a queued transfer reads pages that this one writes"):
        saved.cancel()
    assert back.cancel() and saved.cancel()


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


def test_progress_is_told_of_every_step_and_may_cancel() -> None:
    pool = packed_pool(LAYOUTS["page_major"], 8)
    host = HostPool(pool, 8)
    seen = []
    host.offload([3, 0], progress=lambda t: seen.append((t.bytes_arrived, t.nbytes, t.done())))
    assert seen == [(2 * PAGE, 2 * PAGE, True)]


def test_callbacks_may_use_the_pool_and_cancel(log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    others = []

    def progress(transfer):
        if transfer.bytes_arrived == PAGE:
            others.append(host.offload([7]))
        if transfer.bytes_arrived == 2 * PAGE:
            assert transfer.cancel()

    saved = host.offload([0, 1, 2, 3], progress=progress)
    while not saved.done():
        host._out._moving[0][2].synchronize()
    others[0].synchronize()
    assert saved.arrived == [0, 1] and saved.left_out == [2, 3]  # the third was not issued before it was told
    assert torch.equal(host.pool.gather(others[0].pages), pool.gather([7]))


def test_a_callback_that_raises_in_the_call_leaves_nothing_behind(monkeypatch) -> None:
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", PAGE)
    pool = packed_pool(LAYOUT, 8)
    host = HostPool(pool, 4)

    def progress(transfer):
        raise KeyError("mine")

    for _ in range(3):
        with writes_only(host.pool.buffer, page_bytes(host.pool, [0])), pytest.raises(KeyError, match="mine"):
            host.offload([0, 1, 2], progress=progress)
    assert host.pool.allocator.num_free == 4
    assert host.offload([0, 1, 2, 3]).done()


def test_a_copy_that_fails_does_not_stand_in_the_way(log, monkeypatch) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    with monkeypatch.context() as broken:
        broken.setattr(transfer_queue, "copy_runs", lambda *a: (_ for _ in ()).throw(RuntimeError("device")))
        with pytest.raises(RuntimeError, match="device"):
            host.offload([0, 1])
    assert host.pool.allocator.num_free == 8
    saved, later = host.offload([0, 1]), host.offload([2])
    with monkeypatch.context() as broken:
        broken.setattr(transfer_queue, "copy_runs", lambda *a: (_ for _ in ()).throw(RuntimeError("device")))
        with pytest.raises(RuntimeError, match="device"):
            saved.wait()
    assert saved.cancelled and not later.cancelled
    later.synchronize()
    assert torch.equal(host.pool.gather(later.pages), pool.gather([2]))


def test_pools_of_other_layouts_are_refused() -> None:
    pool = packed_pool(LAYOUT, 4)
    other = packed_pool(LAYOUTS["token_major"], 4)
    with pytest.raises(ValueError, match="equal layouts.*RepackPlan"):
        TransferQueue(pool, other)


@pytest.mark.parametrize("makes", [(packed_pool, packed_pool), (packed_pool, spaced_pool)])
def test_runs_are_the_fewest_copies_within_a_step(makes, monkeypatch) -> None:
    """By the plan's runs, and by the descriptors that transfer engines get."""
    source, target = makes[0](LAYOUT, 16, 1), makes[1](LAYOUT, 16, 2)
    ids, there = [9, 4, 5, 6, 7, 0, 1], [3, 8, 9, 10, 11, 14, 15]
    pairs = sorted(zip(ids, there, strict=True))
    for step in (100, 2):
        monkeypatch.setattr(transfer_plan, "STEP_LEAST", step * PAGE)
        monkeypatch.setattr(transfer_plan, "STEP_MOST", step * PAGE)
        plan = plan_transfer(source, target, ids, there, by_layer=False, impl="copy")
        expected = []
        for i in range(0, len(pairs), step):
            sides = zip(*pairs[i : i + step], strict=True)
            runs = (pm_ops.page_descriptors(pool, side) for pool, side in zip((source, target), sides, strict=True))
            copies = pm_ops.pair_descriptors(*runs)
            begins = source.buffer.data_ptr(), target.buffer.data_ptr()
            expected += [(src - begins[0], dst - begins[1], nbytes) for src, dst, nbytes in copies]
        found = zip(*(column.tolist() for column in plan.runs), strict=True)
        assert [(src, dst, pages * PAGE) for src, dst, pages in found] == expected
        assert [s.nbytes for s in plan.steps] == [PAGE * len(pairs[i : i + step]) for i in range(0, len(pairs), step)]


def test_short_runs_are_for_the_kernel_and_adjacent_pages_are_not_short() -> None:
    layout = pm_ops.page_major(2, 8, 128, 4, torch.bfloat16)  # pages of 32 KiB
    pool, other = PagePool(layout, 32), PagePool(layout, 32)

    def impl(ids, there, **options):
        return plan_transfer(pool, other, ids, there, **{"by_layer": False, "impl": None, **options}).impl

    apart, back = list(range(0, 32, 2)), list(range(30, -1, -2))
    assert impl(apart, apart) == impl(apart, back) == impl([0, 1, 2], [5, 6, 7]) == "kernel"
    assert impl([0, 1, 2, 3], [5, 6, 7, 8]) == impl([3, 2, 1, 0], [8, 7, 6, 5]) == "copy"
    assert impl([0, 1, 2, 3], [5, 6, 7, 8], by_layer=True) == "kernel"
    assert impl(apart, apart, impl="copy") == "copy" and impl([0, 1, 2, 3], [5, 6, 7, 8], impl="kernel") == "kernel"


def test_steps_grow_so_that_the_device_begins_early(monkeypatch) -> None:
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", 2 * PAGE)
    monkeypatch.setattr(transfer_plan, "STEP_MOST", 8 * PAGE)
    pool = packed_pool(LAYOUT, 40)
    plan = plan_transfer(pool, pool, list(range(40)), list(range(40)), by_layer=False, impl="copy")
    assert [step.nbytes // PAGE for step in plan.steps] == [2, 4, 8, 8, 8, 8, 2]
    assert [step.whole for step in plan.steps] == [2, 6, 14, 22, 30, 38, 40]


def ring_transfer(count: int) -> SimpleNamespace:
    pairs = torch.randint(1 << 40, (count, 2))
    stream = Stream([])
    stream.work.append(lambda: None)
    return SimpleNamespace(pairs=pairs, last=stream.record_event(), finished=False)


def test_the_ring_waits_only_for_what_it_would_overwrite() -> None:
    ring = IndexRing(torch.zeros(10, 2, dtype=torch.int64))
    first, second, third, fourth = (ring_transfer(count) for count in (4, 4, 3, 5))
    kept = [ring.put(first), ring.put(second)]
    assert torch.equal(kept[0], first.pairs) and torch.equal(kept[1], second.pairs)
    assert torch.equal(ring.put(third), third.pairs)  # from the start again
    assert first.last.query() and not second.last.query() and torch.equal(kept[1], second.pairs)
    second.finished = third.finished = True
    assert torch.equal(ring.put(fourth), fourth.pairs)
    assert not third.last.query()


def test_the_ring_grows_with_a_transfer_and_keeps_what_is_in_flight() -> None:
    ring = IndexRing(torch.zeros(4, 2, dtype=torch.int64))
    first, second = ring_transfer(3), ring_transfer(9)
    kept = ring.put(first)
    assert torch.equal(ring.put(second), second.pairs)
    assert torch.equal(kept, first.pairs) and not first.last.query()
