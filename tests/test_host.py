"""HostPool on the CPU against byte oracles: what arrives, what stays as it was, what is refused before a byte moves."""

import copy
import gc
import os
import pickle
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from delayed import LAYOUT, PAGE, delayed
from pages import LAYOUTS, packed_pool, spaced_pool
from test_descriptors import layer_bytes
from two_gpus import captured_in_turn

import pm_ops
from pm_ops import HostPool, PageLayout, PagePool, transfer_queue
from pm_ops.testing import fill_random, page_bytes, writes_only

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
every_pool = pytest.mark.parametrize("make", [packed_pool, spaced_pool])
PAGES = [4, 5, 6, 0, 2, 1]
THERE = [7, 0, 1, 2, 3, 6]
SCATTERED = {"fp8 with scales by token": 6, "states": 5}
"""In how many places of a page the bytes of the first scattered layer are."""


def host_of(pool: PagePool, num_pages: int = 8, **options) -> HostPool:
    host = HostPool(pool, num_pages, **options)
    fill_random(host.pool.buffer, 9)
    return host


@pytest.fixture
def pool() -> PagePool:
    return packed_pool(LAYOUTS["page_major"], 8)


@every_pool
@every_layout
def test_offload_and_restore_carry_every_byte_of_these_pages_and_no_other(make, layout: PageLayout) -> None:
    pool = make(layout, 8)
    host = host_of(pool)
    before = pool.gather(PAGES)
    with writes_only(pool.buffer, []):
        start = host.pool.buffer.clone()
        saved = host.offload(torch.tensor(PAGES, dtype=torch.int32))
    changed = (host.pool.buffer != start).nonzero().squeeze(1).tolist()
    assert set(changed) <= set(page_bytes(host.pool, saved.pages))
    assert torch.equal(host.pool.gather(saved.pages), before)
    assert saved.done() and saved.arrived == list(range(6)) and saved.nbytes == saved.bytes_arrived == before.numel()
    with writes_only(pool.buffer, page_bytes(pool, THERE)), writes_only(host.pool.buffer, []):
        back = host.restore(saved.pages, THERE)
    back.wait()
    back.synchronize()
    assert torch.equal(pool.gather(THERE), before)
    assert back.pages == saved.pages and not back.cancel()


@every_pool
@pytest.mark.parametrize("name", LAYOUTS)
def test_restore_by_layer_moves_the_data_of_every_layer_and_no_padding(make, name: str) -> None:
    layout = LAYOUTS[name]
    pool = make(layout, 8)
    host = host_of(pool)
    saved = host.offload(PAGES)
    before = pool.buffer.clone()
    if name in SCATTERED:
        with writes_only(pool.buffer, []), pytest.raises(ValueError, match=f"in {SCATTERED[name]} places of every"):
            host.restore(saved.pages, THERE, by_layer=True)
        return
    owned = [layer_bytes(pool, page, layout.layers) for page in THERE]
    with writes_only(pool.buffer, [byte for page in owned for byte in page]):
        back = host.restore(saved.pages, THERE, by_layer=True)
    for layer in layout.layers:
        back.wait_layer(layer)
    for page, bytes_there in zip(PAGES, owned, strict=True):
        assert torch.equal(pool.buffer[bytes_there], before[layer_bytes(pool, page, layout.layers)])
    assert back.nbytes == back.bytes_arrived == sum(map(len, owned)) and back.arrived == list(range(6))


def test_keys_values_and_their_scales_may_lie_apart() -> None:
    layout = pm_ops.page_major(2, 1, 64, 1, torch.float8_e4m3fn, scales=True, align=128)
    assert [len(layout.layer_runs([layer])) for layer in layout.layers] == [4, 4]
    pool = packed_pool(layout, 8)
    host = host_of(pool)
    saved = host.offload([3, 5])
    owned = [layer_bytes(pool, page, layout.layers) for page in (3, 5, 0, 7)]
    before = pool.buffer.clone()
    with writes_only(pool.buffer, owned[2] + owned[3]):
        host.restore(saved.pages, [0, 7], by_layer=True).wait_layer(1)
    assert torch.equal(pool.buffer[owned[2] + owned[3]], before[owned[0] + owned[1]])


def test_pages_that_are_adjacent_in_the_pool_stay_adjacent(pool: PagePool) -> None:
    host = host_of(pool)
    pages = host.offload([6, 3, 5, 4]).pages
    assert [pages[1], pages[3], pages[2], pages[0]] == list(range(min(pages), min(pages) + 4))


def test_a_host_page_goes_to_several_pages(pool: PagePool) -> None:
    host = host_of(pool)
    (page,) = host.offload([3]).pages
    host.restore([page, page], [1, 7])
    assert torch.equal(pool.gather([1, 7]), pool.gather([3, 3]))


def test_nothing_at_all(pool: PagePool) -> None:
    host = host_of(pool)
    saved, back = host.offload([]), host.restore([], [], by_layer=True)
    back.wait_layer(1)
    for transfer in (saved, back):
        transfer.wait()
        transfer.synchronize()
        assert transfer.done() and transfer.arrived == [] and not transfer.cancel() and transfer.nbytes == 0
    host.free([])


def test_host_pages_are_kept_until_their_last_owner_frees_them(pool: PagePool) -> None:
    host = host_of(pool, 4)
    saved = host.offload([0, 1])
    host.pool.allocator.retain(saved.pages)
    host.free(saved.pages)
    assert host.pool.allocator.num_free == 2
    host.restore(saved.pages, [2, 3])
    host.free(saved.pages)
    assert host.pool.allocator.num_free == 4
    assert sorted(host.offload([4, 5, 6, 7]).pages) == [0, 1, 2, 3]


def test_host_pages_in_files(pool: PagePool, tmp_path) -> None:
    host = host_of(pool)
    saved = host.offload(PAGES)
    store = pm_ops.PageStore(tmp_path, 1 << 20, model="m")
    store.put("prefix", host.pool, saved.pages)
    host.free(saved.pages)
    before = pool.gather(PAGES)
    pool.zero(PAGES)
    host.restore(store.get("prefix", host.pool), PAGES)
    assert torch.equal(pool.gather(PAGES), before)


REFUSED = {
    "more pages than host pages": (RuntimeError, "3 asked for, 2 of 4 free", lambda h, s: h.offload([5, 6, 7])),
    "an unknown page": (ValueError, "page 8 is none of", lambda h, s: h.offload([5, 8])),
    "a skipped page": (ValueError, "page -1 is none of", lambda h, s: h.offload([-1])),
    "a page twice": (ValueError, "page 5 is named twice", lambda h, s: h.offload([5, 6, 5])),
    "no such implementation": (ValueError, 'give "auto", "copy" or "kernel"', lambda h, s: h.offload([5], impl="dma")),
    "a kernel on the CPU": (ValueError, "GPU and pinned host memory", lambda h, s: h.offload([5], impl="kernel")),
    "an unknown host page": (ValueError, "page 4 is none of", lambda h, s: h.restore([4], [5])),
    "a free host page": (RuntimeError, "cannot restore host page 3: it has 0 owners", lambda h, s: h.restore([3], [5])),
    "two of one": (ValueError, "2 host pages for 1", lambda h, s: h.restore(s, [5])),
    "onto a page twice": (ValueError, "page 5 is named twice", lambda h, s: h.restore(s, [5, 5])),
    "onto an unknown page": (ValueError, "page 8 is none of", lambda h, s: h.restore(s, [5, 8])),
    "a kernel for a restore": (ValueError, "GPU and pinned", lambda h, s: h.restore(s, [5, 6], impl="kernel")),
    "freed twice at once": (
        RuntimeError,
        "page 0 freed 2 times at once, but has 1 owner",
        lambda h, s: h.free([s[0], s[0]]),
    ),
    "freed though free": (RuntimeError, "cannot free page 3: it is free already", lambda h, s: h.free([3])),
    "an unknown page freed": (ValueError, "page 9 is none of", lambda h, s: h.free([9])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_a_byte_moves_or_a_page_changes_hands(name: str, pool: PagePool) -> None:
    host = host_of(pool, 4)
    saved = host.offload([0, 1]).pages
    assert saved == [0, 1]
    error, message, call = REFUSED[name]
    with writes_only(pool.buffer, []), writes_only(host.pool.buffer, []), pytest.raises(error, match=message):
        call(host, saved)
    assert host.pool.allocator.num_free == 2
    host.free(saved)


def test_waiting_for_a_layer_that_is_not_there_or_not_apart(pool: PagePool) -> None:
    host = host_of(pool)
    saved = host.offload([0])
    with pytest.raises(ValueError, match="by_layer=True"):
        saved.wait_layer(0)
    with pytest.raises(ValueError, match="no layer 3"):
        host.restore(saved.pages, [1], by_layer=True).wait_layer(3)


def test_a_closed_host_pool_moves_nothing(pool: PagePool) -> None:
    host = host_of(pool)
    saved = host.offload([3, 5])
    for _ in range(2):
        host.close()
    assert saved.done() and torch.equal(host.pool.gather(saved.pages), pool.gather([3, 5]))
    for call in (lambda: host.offload([0]), lambda: host.restore(saved.pages, [0, 1]), lambda: host.free(saved.pages)):
        with writes_only(pool.buffer, []), pytest.raises(RuntimeError, match="was closed"):
            call()


def test_host_pools_and_transfers_are_neither_copied_nor_pickled(pool: PagePool) -> None:
    host = host_of(pool)
    for thing in (host, host.offload([3])):
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=f"a {type(thing).__name__} is neither copied nor pickled"):
                call(thing)


def test_a_forked_child_gives_nothing_back(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not work in a child, whose exit, like ours, ends all finalizers."""
    host = host_of(pool)
    _, release, (owner, device, streams, *memory), _ = host._memory.peek()
    waited: list[int] = []
    streams.append(SimpleNamespace(synchronize=lambda: waited.append(os.getpid())))
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: owner + 1)
        release(owner, device, streams, *memory)
    assert not waited
    host.close()
    assert waited == [os.getpid()]


def test_a_host_pool_goes_when_it_is_dropped_and_its_transfers_have_arrived(pool: PagePool) -> None:
    host = host_of(pool)
    transfers = [host.offload([3, 5]), host.offload([])]
    transfers.append(host.restore(transfers[0].pages, [1, 2]))
    gone = weakref.ref(host)
    gc.disable()  # which would find a cycle, some day
    try:
        del host
        assert gone() is None
    finally:
        gc.enable()
    assert all(transfer.done() for transfer in transfers)


def test_a_host_pool_with_a_cancelled_transfer_goes_as_well(log) -> None:
    _, host = delayed(log, max_in_flight=PAGE)
    saved, cancelled = host.offload([0]), host.offload([1])
    assert cancelled.cancel()
    saved.synchronize()
    gone = weakref.ref(host)
    gc.disable()
    try:
        del host
        assert gone() is None
    finally:
        gc.enable()


def test_a_pool_without_memory_or_a_host_tier_without_pages(pool: PagePool) -> None:
    with pytest.raises(ValueError, match="on the meta device has no memory"):
        HostPool(PagePool(pool.layout, 2, "meta"), 2)
    host = HostPool(pool, 2)
    with pytest.raises(ValueError, match="pool must be a PagePool, such as HostPool.pool, got HostPool"):
        HostPool(host, 2)  # type: ignore[arg-type]
    assert repr(host) == f"HostPool(2 pages of {pool.layout.page_bytes} B, 2 free, for {pool!r})"
    with pytest.raises(RuntimeError, match="out of host pages: 3 asked for, 2 of 2 free, 0 more when"):
        host.offload([0, 1, 2])
    with pytest.raises(RuntimeError, match="cannot restore host page 1: it has 0 owners; an offload's pages"):
        host.restore([1], [0])
    host.close()
    assert "closed" in repr(host)
    with pytest.raises(ValueError, match="num_pages=0"):
        HostPool(pool, 0)
    with pytest.raises(ValueError, match="max_in_flight=0"):
        HostPool(pool, 1, max_in_flight=0)


def test_everything_is_refused_in_a_capture(log, monkeypatch) -> None:
    """On the current device, and on the pool's where that is another."""
    _, host = delayed(log, max_in_flight=PAGE)
    kept = host.offload([7])
    kept.synchronize()
    back = host.restore(kept.pages, [6], by_layer=True)
    saved = host.offload([0, 1])
    host._out.gpu = host._in.gpu = torch.device("cuda:1")
    issued = len(log)
    for _ in captured_in_turn(monkeypatch):
        for call in (
            lambda: host.offload([4]), lambda: host.restore(saved.pages, [2, 3]), lambda: host.free(saved.pages),
            saved.done, saved.wait, saved.synchronize, lambda: saved.arrived, lambda: back.wait_layer(0),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="a CUDA graph is being captured.*outside"):
                call()
    assert len(log) == issued and host.pool.allocator.num_free == 5


@pytest.mark.parametrize("kind", ["fails", "is pinned"])
def test_memory_is_unlocked_when_a_host_pool_cannot_be_made(kind: str, monkeypatch) -> None:
    """Or the next registration of that address would fail. And an error of CUDA is not left to the next launch."""
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *a: calls.append("lock") or (2 if kind == "fails" else 0),
        cudaHostUnregister=lambda *a: calls.append("unlock"),
    )
    pool = packed_pool(LAYOUT, 4)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(calls.append(str(device))))
    monkeypatch.setattr(torch, "ones", lambda *a, **k: (_ for _ in ()).throw(RuntimeError(calls.append("drain"))))
    monkeypatch.setattr(PagePool, "device", property(lambda self: torch.device("cuda:1" if self is pool else "cpu")))
    error, message, expected = {
        "fails": (RuntimeError, "cannot be page-locked.*512 GiB at once", ["cuda:1", "lock", "drain"]),
        "is pinned": (ValueError, "max_in_flight=0", ["cuda:1", "lock", "cuda:1", "unlock"]),
    }[kind]
    with pytest.raises(error, match=message):
        HostPool(pool, 4, max_in_flight=0)
    gc.collect()
    assert calls == expected


def test_close_waits_for_what_is_queued(log) -> None:
    pool, host = delayed(log, max_in_flight=PAGE)
    saved = host.offload([0, 1, 2])
    host.close()
    assert saved.finished and torch.equal(host.pool.gather(saved.pages), pool.gather([0, 1, 2]))


def test_a_call_that_cannot_be_prepared_gives_its_host_pages_back(log, monkeypatch) -> None:
    _, host = delayed(log)
    monkeypatch.setattr(transfer_queue, "plan_transfer", lambda *a, **k: (_ for _ in ()).throw(MemoryError("host")))
    with pytest.raises(MemoryError):
        host.offload([0, 1])
    assert host.pool.allocator.num_free == 8
