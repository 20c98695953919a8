"""Pages from one GPU to another: every byte of the target, and the order of what both devices do."""

from __future__ import annotations

import pytest
import torch
from repack_cases import SCALED, UNIFORM, expected, heads_of, side, wider_pools
from two_gpus import captured_in_turn

import pm_ops
from pm_ops.kernels import peer

TWO = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
DELAY = 20_000_000  # clock cycles, about 10 ms


def on_two_gpus(test):
    for mark in TWO:
        test = mark(test)
    return pytest.mark.parametrize(("here", "there"), [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])(test)


def whole(pool) -> torch.Tensor:
    torch.cuda.synchronize(pool.device)
    return pool.buffer.cpu()


@on_two_gpus
@pytest.mark.parametrize(("a", "b", "ours", "theirs"), [("page_major", "page_major", 16, 16),
    ("page_major", "BLHNC", 16, 64), ("BHLNC", "page_major", 8, 3), ("token_major", "BLNHC", 1, 16)])  # fmt: skip
def test_every_byte_arrives_and_no_other_is_written(here, there, a, b, ours, theirs):
    model = SCALED if a == b else UNIFORM
    source, target = side(a, model, ours, 97, 1, here), side(b, model, theirs, 97, 2, there)
    wanted = expected(source, target, 97)
    pm_ops.RepackPlan(source.pool.layout, target.pool.layout).run(
        source.pool, target.pool, source.pages, target.pages, 97
    )
    assert torch.equal(whole(target.pool), wanted)
    assert torch.cuda.current_device() == 0


@on_two_gpus
def test_heads_are_split_in_flight(here, there):
    """One rank's pages of four heads become two ranks': the first two stay on the GPU, the others go to the next."""
    source = side("page_major", UNIFORM, 16, 80, 1, here)
    for rank, device in enumerate((here, there)):
        target = side("page_major", heads_of(UNIFORM, 2), 16, 80, 2 + rank, device)
        heads = (2 * rank, 0, 2)
        wanted = expected(source, target, 80, heads=heads)
        plan = pm_ops.RepackPlan(source.pool.layout, target.pool.layout, heads=heads)
        plan.run(source.pool, target.pool, source.pages, target.pages, 80)
        assert torch.equal(whole(target.pool), wanted)


@on_two_gpus
def test_numbers_get_wider_on_their_way(here, there):
    """The very bits that they become on one GPU."""
    *pools, src, dst, tokens = wider_pools(torch.bfloat16, torch.float32, (64, 48), (16, 8))
    plan, found = pm_ops.RepackPlan(pools[0].layout, pools[1].layout), []
    for device in (here, there):
        placed = [
            pm_ops.PagePool(pool.layout, pool.num_pages, buffer=pool.buffer.to(where))
            for pool, where in zip(pools, (here, device), strict=True)
        ]
        plan.run(*placed, src, dst, tokens)
        found.append(whole(placed[1]))
    assert not torch.equal(found[0], pools[1].buffer)
    assert torch.equal(*found)


@on_two_gpus
def test_streams_of_both_devices_wait_for_one_another(here, there):
    """Delays before the source is written, and before the target is read and the source overwritten: 50 of 50 exact."""
    layout = pm_ops.page_major(2, 2, 64, 16, torch.bfloat16)
    source, target = pm_ops.PagePool(layout, 64, here), pm_ops.PagePool(layout, 64, there)
    plan, ids = pm_ops.RepackPlan(layout, layout), torch.arange(64, device=here)
    exact = 0
    for round_ in range(50):
        ours, theirs = torch.cuda.Stream(here), torch.cuda.Stream(there)
        with torch.cuda.stream(theirs), torch.cuda.stream(ours):
            new = torch.randint(256, source.buffer.shape, dtype=torch.uint8, device=here)
            torch.cuda.synchronize(here)
            with torch.cuda.device((here, there)[round_ % 2]):
                torch.cuda._sleep(DELAY)
            with torch.cuda.device(there):
                target.buffer.fill_(round_)  # what is queued on the target before the call comes before it
            source.buffer.copy_(new)
            plan.run(source, target, ids, ids)
            source.buffer.zero_()  # and what is queued on the source after it does not reach the pages that move
            with torch.cuda.device(there):
                read = target.buffer.clone()
                target.buffer.zero_()
        torch.cuda.synchronize(here)
        torch.cuda.synchronize(there)
        exact += torch.equal(read.cpu(), new.cpu())
    assert exact == 50


def test_a_capture_is_refused_on_either_device(monkeypatch):
    devices = torch.device("cuda:0"), torch.device("cuda:1")
    for _ in captured_in_turn(monkeypatch):
        with pytest.raises(RuntimeError, match="graph is being captured.*outside"), peer.writes_to(*devices):
            raise AssertionError("not reached")
    assert torch.cuda.current_device() == 0


def test_a_gpu_without_access_to_the_other_is_refused(monkeypatch):
    monkeypatch.setattr(peer, "refuse_capture", lambda what, *devices: None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    devices = torch.device("cuda:0"), torch.device("cuda:1")
    message = r"cuda:0 has no access to the memory of cuda:1.*HostPool"
    with pytest.raises(RuntimeError, match=message), peer.writes_to(*devices):
        raise AssertionError("not reached")


def test_on_one_device_nothing_is_waited_for():
    with peer.writes_to(torch.device("cuda:0"), torch.device("cuda:0")):
        pass
