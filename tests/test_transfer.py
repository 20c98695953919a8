"""Progress and cancellation of transfers, with a stream whose work is done when the test says so."""

import pytest
import torch
from delayed import LAYOUT, PAGE, delayed
from pages import packed_pool

from pm_ops import HostPool


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


def test_a_page_that_was_never_written_is_so_for_each_of_its_owners(log) -> None:
    _, host = delayed(log, max_in_flight=PAGE)
    for freed_first in (False, True):
        saved = host.offload([0, 1])
        host.pool.allocator.retain(saved.pages)
        if freed_first:
            host.free(saved.pages)
        assert saved.cancel()
        if not freed_first:
            host.free(saved.pages)
        saved.synchronize()
        host.restore(saved.pages[:1], [4])
        with pytest.raises(ValueError, match=f"host page {saved.pages[1]} was never written.*free it"):
            host.restore(saved.pages[1:], [5])
        host.free(saved.pages)
    assert not host._unwritten


def test_progress_is_told_on_the_cpu_too() -> None:
    pool = packed_pool(LAYOUT, 8)
    host = HostPool(pool, 8)
    seen = []
    saved = host.offload([3, 0], progress=lambda t: seen.append((t.bytes_arrived, t.nbytes, t.done())))
    assert seen == []
    saved.wait()
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
    assert saved.arrived == [0, 1, 2] and saved.left_out == [3]  # the third was issued before it was told
    assert torch.equal(host.pool.gather(others[0].pages), pool.gather([7]))


def test_a_host_pool_calls_no_callbacks(log) -> None:
    """They could cancel, free or take what it has just checked."""
    pool, host = delayed(log, 4, max_in_flight=PAGE)
    told = []
    kept = host.offload([7])
    kept.synchronize()
    host.restore(kept.pages, [6])  # fills the direction
    before = pool.gather([0, 1, 2])
    saved = host.offload([0, 1, 2], progress=lambda t: told.append(t.cancelled or t.cancel()))
    for _ in range(2):
        host._out._moving[0][2].synchronize()
        back = host.restore(saved.pages, [3, 4, 5])
        host.free(saved.pages)
        host.pool.allocator.retain(saved.pages)
    with pytest.raises(RuntimeError, match="0 of 4 free"):
        host.offload([0])
    assert not told
    back.wait()
    back.synchronize()
    assert torch.equal(pool.gather([3, 4, 5]), before) and not told
    saved.wait()
    assert told == [False]


def test_a_callback_that_takes_the_last_host_page_is_not_asked_meanwhile(log) -> None:
    _, host = delayed(log, 2)
    saved = host.offload([0, 1])
    saved.synchronize()
    back = host.restore(saved.pages, [6, 7], progress=lambda t: host.offload([2]))
    host.free(saved.pages)
    assert sorted(host.offload([3, 4]).pages) == [0, 1]
    with pytest.raises(RuntimeError, match="out of host pages"):
        back.done()


@pytest.mark.parametrize("wait", ["wait", "wait_layer"])
def test_a_callback_that_cancels_cancels_nothing_that_is_waited_for(wait: str, log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE // 3)
    saved = host.offload([0, 1, 2])
    saved.synchronize()
    before = pool.gather([0, 1, 2])
    back = host.restore(saved.pages, [5, 6, 7], by_layer=True, progress=lambda t: t.cancel())
    host._in._moving[0][2].synchronize()
    back.wait() if wait == "wait" else back.wait_layer(1)
    assert back.cancelled == (wait == "wait_layer") and set(back.layers) >= {0, 1}
    back.last.synchronize()
    block = 2 * PAGE // 3
    assert torch.equal(pool.gather([5, 6, 7])[:, :block], before[:, :block])
    if back.cancelled:
        with pytest.raises(RuntimeError, match="was cancelled"):
            back.wait_layer(2)


def test_a_callback_that_raises_comes_out_of_the_method_that_called_it(log) -> None:
    pool, host = delayed(log, 4, max_in_flight=2 * PAGE)

    def progress(transfer):
        raise KeyError("mine")

    saved = host.offload([0, 1, 2], progress=progress)
    for method in (saved.done, saved.wait, lambda: saved.arrived):
        host._out._moving[0][2].synchronize()
        with pytest.raises(KeyError, match="mine"):
            method()
    assert saved.done() and saved.arrived == [0, 1, 2]
    assert torch.equal(host.pool.gather(saved.pages), pool.gather([0, 1, 2]))
    host.free(saved.pages)
    assert len(host.offload([4, 5, 6, 7]).pages) == 4


def test_waiting_on_the_host_keeps_to_the_bound_and_tells_of_every_step(log) -> None:
    _, host = delayed(log, max_in_flight=2 * PAGE)
    seen = []
    saved = host.offload(range(5), progress=lambda t: seen.append((t.bytes_arrived, host._out.in_flight)))
    saved.synchronize()
    assert seen == [(PAGE * n, PAGE * min(2, 5 - n)) for n in range(1, 6)]
