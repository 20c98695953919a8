"""What the device refuses, and calls that are interrupted: nothing moves after that, and nobody takes garbage."""

import pytest
import torch
from delayed import PAGE, Mark, arrive, broken_copies, delayed, has_arrived

from pm_ops.testing import writes_only


def test_a_copy_that_fails_does_not_stand_in_the_way(log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    with broken_copies(), pytest.raises(RuntimeError, match="device"):
        host.offload([0, 1])
    assert host.pool.allocator.num_free == 8
    saved, later = host.offload([0, 1]), host.offload([2])
    with broken_copies():
        for method in (saved.wait, saved.wait, saved.done, saved.synchronize):
            with pytest.raises(RuntimeError, match=r"failed with 1 of 2 pages issued.*RuntimeError\('device'\)"):
                method()
    assert saved.cancelled and saved.arrived == [0] and saved.left_out == [1] and not later.cancelled
    later.synchronize()
    assert torch.equal(host.pool.gather(later.pages), pool.gather([2]))


def test_an_error_is_raised_by_the_transfer_that_it_befell(log) -> None:
    """Whatever call finds it."""
    pool, host = delayed(log, max_in_flight=PAGE)
    saved, later = host.offload([0, 1]), host.offload([2])
    host._out._moving[0][2].synchronize()
    with broken_copies():
        assert not later.done()
    assert saved.error is not None
    for _ in range(2):
        with pytest.raises(RuntimeError, match="failed with 1 of 2 pages issued"):
            saved.done()
    later.synchronize()
    assert torch.equal(host.pool.gather(later.pages), pool.gather([2]))


def test_what_reads_what_was_never_written_fails_as_well(log) -> None:
    """A restore of an offload that fails, an offload of that restore, and nothing else."""
    pool, host = delayed(log, max_in_flight=PAGE)
    kept = host.offload([7])
    kept.synchronize()
    host.restore(kept.pages, [6])  # fills the direction
    saved = host.offload([0, 1, 2])
    back = host.restore(saved.pages, [3, 4, 5])
    again = host.offload([4])
    other = host.restore(kept.pages, [0])  # overwrites what is read, and goes on
    before = pool.gather([3, 4, 5])
    with broken_copies(), pytest.raises(RuntimeError, match="failed with 1 of 3"):
        saved.wait()
    for transfer in (back, again):
        assert transfer.cancelled
        for method in (transfer.wait, transfer.done):
            with pytest.raises(RuntimeError, match="device"):
                method()
    other.synchronize()
    assert torch.equal(pool.gather([3, 4, 5]), before) and torch.equal(pool.gather([0]), pool.gather([7]))
    for pages in (saved.pages[1:2], again.pages):
        with pytest.raises(ValueError, match="was never written"):
            host.restore(pages, [1])


def test_a_restore_that_has_a_failing_offload_issued_is_refused(log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    saved = host.offload([0, 1, 2])
    with writes_only(pool.buffer, []), broken_copies(), pytest.raises(RuntimeError, match="device"):
        host.restore(saved.pages, [3, 4, 5])
    assert saved.cancelled and host._in.in_flight == 0


@pytest.mark.parametrize("issued", [False, True])
def test_nothing_moves_after_a_call_that_failed(issued: bool, log) -> None:
    """One step was issued before the error; or the step whose issue failed, in part."""
    pool, host = delayed(log, 3)
    told = []
    with broken_copies(kept=1, issued=issued), pytest.raises(RuntimeError, match="device"):
        host.offload([0, 1, 2], progress=told.append)
    assert has_arrived(host._out) and host.pool.allocator.num_free == 3
    saved = host.offload([5, 6, 7])
    saved.synchronize()
    assert told == []
    before = pool.gather([5, 6, 7])
    with broken_copies(kept=1, issued=issued), pytest.raises(RuntimeError, match="device"):
        host.restore(saved.pages, [0, 1, 2])
    with writes_only(pool.buffer, []):
        arrive(host._in)
    host.restore(saved.pages, [0, 1, 2]).synchronize()
    assert torch.equal(pool.gather([0, 1, 2]), before)


def test_an_interrupted_issue_is_over_when_it_is_raised(log, monkeypatch) -> None:
    """Between the copy and the mark behind it."""
    _, host = delayed(log, max_in_flight=PAGE)
    saved = host.offload([0, 1])

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(host._out.stream, "record_event", interrupt)
        broken.setattr(host._out.stream, "synchronize", lambda s=host._out.stream: Mark(s, len(s.work)).synchronize())
        with pytest.raises(KeyboardInterrupt):
            saved.wait()
    assert has_arrived(host._out)
    with pytest.raises(RuntimeError, match="failed with 1 of 2"):
        saved.done()


def test_a_call_that_cannot_ask_what_has_arrived_leaves_nothing_queued(log, monkeypatch) -> None:
    _, host = delayed(log, max_in_flight=PAGE)
    host.offload([0])
    issued, asked = len(log), iter(range(100))

    def query(mark):
        if next(asked):  # the transfer is queued by then
            raise RuntimeError("device")
        return False

    with monkeypatch.context() as broken:
        broken.setattr(Mark, "query", query)
        broken.setattr(host._out.stream, "synchronize", lambda: None)
        with pytest.raises(RuntimeError, match="device"):
            host.offload([1, 2])
    host.free([])
    host._out._moving[0][2].synchronize()
    host.free([])
    assert len(log) == issued and host.pool.allocator.num_free == 7


def test_a_restore_whose_own_look_finds_that_an_offload_fails_is_refused(log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    saved = host.offload([0, 1])
    host._out._moving[0][2].synchronize()
    with writes_only(pool.buffer, []), broken_copies(), pytest.raises(ValueError, match="was never written"):
        host.restore(saved.pages, [3, 4])
    host.restore(saved.pages[:1], [3]).synchronize()
    assert torch.equal(pool.gather([3]), pool.gather([0]))
