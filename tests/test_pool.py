"""PagePool: typed views against the byte formula, page verbs, pools inside a larger buffer, refusals."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from pages import MIXED
from torch._subclasses.fake_tensor import FakeTensorMode

import pm_ops
from pm_ops import PageLayout, PagePool, Plane
from pm_ops.testing import fill_random, page_bytes, slot_bytes, writes_only

LAYOUTS = {
    "page_major": pm_ops.page_major(2, 2, 4, 3, torch.bfloat16, value_dim=6),
    "token_major": pm_ops.token_major(2, 1, 3, 4, torch.float16),
    "vllm BHLNC": pm_ops.vllm(2, 3, 4, 2, torch.float32, "BHLNC"),
    "with scales": pm_ops.page_major(2, 3, 4, 3, torch.int8, scales=True),
    "with scales by token": pm_ops.token_major(2, 3, 4, 3, torch.float8_e4m3fn, scales=True),
    "layers of their own": pm_ops.page_major(2, [1, 2], [4, 2], 2, [torch.float32, torch.float8_e5m2]),
    "mixed": MIXED,
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


def element_bytes(pool: PagePool, plane: Plane, index: tuple[int, ...]) -> slice:
    """The bytes of one element of a view, from the formula; index is (page, token, head, d), or (page, *shape)."""
    page, *rest = index
    start = pool.base + page * pool.page_stride + plane.offset
    if plane.token_stride is not None:
        start += rest.pop(0) * plane.token_stride
    start += rest.pop(0) * plane.head_stride
    inner = 0
    for size, i in zip(plane.shape[1:], rest, strict=True):
        inner = inner * size + i
    start += inner * plane.dtype.itemsize
    return slice(start, start + plane.dtype.itemsize)


@every_layout
@pytest.mark.parametrize(("base", "extra"), [(0, 0), (64, 32)])
def test_views_follow_the_byte_formula(layout: PageLayout, base: int, extra: int) -> None:
    """Each element read through a view is the bytes that the formula names; also for a pool inside a larger buffer."""
    stride = layout.page_bytes + extra
    pool = PagePool(layout, 3, buffer=torch.zeros(base + 3 * stride, dtype=torch.uint8), base=base, page_stride=stride)
    fill_random(pool.buffer)
    for plane in layout.planes:
        view = pool.view(plane.layer, plane.kind)
        tokens = () if plane.token_stride is None else (layout.page_size,)
        assert view.shape == (3, *tokens, *plane.shape)
        assert view.dtype == plane.dtype
        for index in itertools.product(*map(range, view.shape)):
            expected = pool.buffer[element_bytes(pool, plane, index)]
            assert torch.equal(view[index].reshape(1).view(torch.uint8), expected)


@every_layout
def test_writing_through_a_view_touches_only_its_plane(layout: PageLayout) -> None:
    pool = PagePool(layout, 2)
    for plane in layout.planes:
        fill_random(pool.buffer)
        view = pool.view(plane.layer, plane.kind)
        owned = {
            byte
            for index in itertools.product(*map(range, view.shape))
            for byte in range(*element_bytes(pool, plane, index).indices(pool.buffer.numel()))
        }
        with writes_only(pool.buffer, owned):
            view.zero_()
        assert not pool.buffer[sorted(owned)].any()


@every_layout
def test_geometry_is_what_the_operators_take(layout: PageLayout) -> None:
    stride = layout.page_bytes + 64
    buffer = torch.zeros(128 + 4 * stride, dtype=torch.uint8)
    pool = PagePool(layout, 4, buffer=buffer, base=128, page_stride=stride)
    for p in layout.planes:
        expected = [128 + p.offset, stride, p.token_stride or 0, p.head_stride, 4]
        assert pool.geometry(p.layer, p.kind) == expected
    assert pool.region == [128, stride, layout.page_bytes, 4]
    assert pool.slot_runs.tolist() == [list(run) for run in layout.slot_runs]
    assert pool.slot_runs.dtype == torch.int64
    assert pool.slot_runs.shape[1] == 3
    assert pool.num_slots == 4 * layout.page_size


def test_a_plane_knows_the_scales_beside_it() -> None:
    for name in ("with scales", "with scales by token"):
        pool = PagePool(LAYOUTS[name], 2)
        for layer, kind in itertools.product((0, 1), ("key", "value")):
            assert pool.plane(layer, kind).scales == pool.geometry(layer, f"{kind}_scale")
    some = PagePool(pm_ops.page_major(3, 1, 4, 3, [torch.int8, torch.float16, torch.int8], scales=True), 2)
    assert [some.plane(layer, "value").scales for layer in range(3)] == [
        some.geometry(0, "value_scale"), None, some.geometry(2, "value_scale")
    ]  # fmt: skip
    assert PagePool(LAYOUTS["page_major"], 2).plane(0, "key").scales is None


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (2, 2), "token_stride": 16, "head_stride": 8},
        {"shape": (1, 1)},
        {"dtype": torch.float16},
        {"token_stride": None},
    ],
)
def test_scales_of_another_form_are_refused(changes: dict[str, Any]) -> None:
    scale = replace(Plane(0, "key_scale", 24, 8, 4, (2, 1), torch.float32), **changes)
    pool = PagePool(PageLayout(3, 80, (Plane(0, "key", 0, 8, 4, (2, 4), torch.int8), scale)), 2)
    with pytest.raises(ValueError, match=r"scales are float32 \(2, 1\) of every token"):
        pool.plane(0, "key")


def test_geometry_is_a_list_of_the_callers_own() -> None:
    pool = PagePool(LAYOUTS["page_major"], 2)
    pool.geometry(0, "key")[0] = 99
    assert pool.geometry(0, "key")[0] == 0


def test_a_new_pool_reads_as_zeros() -> None:
    pool = PagePool(LAYOUTS["page_major"], 3)
    assert pool.buffer.shape == (3 * pool.layout.page_bytes,)
    assert not pool.buffer.any()


def test_pages_are_rows_of_the_buffer() -> None:
    layout = LAYOUTS["page_major"]
    stride = layout.page_bytes + 16
    pool = PagePool(layout, 3, buffer=torch.zeros(32 + 3 * stride, dtype=torch.uint8), base=32, page_stride=stride)
    fill_random(pool.buffer)
    for page in range(3):
        start = 32 + page * stride
        assert torch.equal(pool.pages[page], pool.buffer[start : start + layout.page_bytes])
    pool.pages[1] = 7
    assert pool.buffer[32 + stride : 32 + stride + layout.page_bytes].eq(7).all()


def test_a_layer_or_kind_that_is_not_there_is_refused() -> None:
    pool = PagePool(LAYOUTS["page_major"], 2)
    for call in (pool.view, pool.geometry):
        with pytest.raises(ValueError, match="no plane 'latent' of layer 0.*key, value"):
            call(0, "latent")
        with pytest.raises(ValueError, match="no plane 'key' of layer 5"):
            call(5, "key")


def poisoned(layout: PageLayout, num_pages: int) -> PagePool:
    """A pool inside a larger buffer of random bytes, with a gap between its pages."""
    stride = layout.page_bytes + 48
    pool = PagePool(
        layout, num_pages, buffer=torch.zeros(96 + num_pages * stride + 40, dtype=torch.uint8), base=96,
        page_stride=stride,
    )  # fmt: skip
    fill_random(pool.buffer)
    return pool


@every_layout
def test_gather_gives_every_byte_of_a_page_and_scatter_puts_it_back(layout: PageLayout) -> None:
    pool = poisoned(layout, 6)
    pages = [4, 0, -1, 4]
    rows = pool.gather(pages)
    for row, page in zip(rows, pages, strict=True):
        expected = pool.buffer[page_bytes(pool, [page])] if page >= 0 else torch.zeros(layout.page_bytes)
        assert torch.equal(row, expected.to(torch.uint8))
    before = pool.buffer.clone()
    with writes_only(pool.buffer, page_bytes(pool, [4, 0])):
        pool.zero([4, 0])
    pool.scatter([4, 0, -1], rows[:3])
    assert torch.equal(pool.buffer, before)


@every_layout
def test_zero_clears_exactly_the_named_pages(layout: PageLayout) -> None:
    pool = poisoned(layout, 7)
    owned = page_bytes(pool, [5, 2])
    with writes_only(pool.buffer, owned):
        pool.zero([5, -1, 2])
    assert not pool.buffer[owned].any()


@every_layout
def test_overlapping_copies_equal_gather_then_scatter(layout: PageLayout) -> None:
    """A chain and a swap: each destination gets what its source held before the call."""
    pool = poisoned(layout, 6)
    src, dst = [0, 1, 2, 5, 4, -1, 3], [1, 2, 3, 4, 5, 0, -1]
    before = pool.pages.clone()
    with writes_only(pool.buffer, page_bytes(pool, dst)):
        pool.copy(src, dst)
    for s, d in zip(src, dst, strict=True):
        if s >= 0 and d >= 0:
            assert torch.equal(pool.pages[d], before[s])
    assert torch.equal(pool.pages[0], before[0])


@every_layout
def test_copy_slots_moves_every_token_plane_and_no_state(layout: PageLayout) -> None:
    """Token by token, scales with their rows, across pages and positions within the page."""
    pool = poisoned(layout, 4)
    ps = layout.page_size
    src, dst = [0, ps + 1, 1, 2 * ps, -1, 3], [1, 0, 3 * ps + 1, ps, 3, -1]
    before = pool.buffer.clone()
    planes = [p for p in layout.planes if p.token_stride is not None]
    owned = [b for p in planes for b in slot_bytes(pool, p.layer, p.kind, dst[:4])]
    with writes_only(pool.buffer, owned):
        pool.copy_slots(src, dst)
    for p in planes:
        for s, d in zip(src[:4], dst[:4], strict=True):
            old = before[slot_bytes(pool, p.layer, p.kind, [s])]
            assert torch.equal(pool.buffer[slot_bytes(pool, p.layer, p.kind, [d])], old)


def test_page_verbs_take_tensors_of_both_index_dtypes_and_empty_lists() -> None:
    pool = poisoned(LAYOUTS["page_major"], 4)
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([2, 0], dtype=dtype)
        assert torch.equal(pool.gather(ids), pool.pages[[2, 0]])
    with writes_only(pool.buffer, []):
        pool.zero([])
        pool.copy([], [])
        pool.copy_slots([], [])
        assert pool.gather([]).shape == (0, pool.layout.page_bytes)


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.gather([4]),
        lambda pool: pool.zero([0, 4]),
        lambda pool: pool.copy([0], [4]),
        lambda pool: pool.copy([4], [0]),
        lambda pool: pool.copy([0, 1], [2, 2]),
        lambda pool: pool.copy([0, 1], [2]),
        lambda pool: pool.copy_slots([0], [12]),
        lambda pool: pool.copy_slots([12], [0]),
        lambda pool: pool.scatter([4], torch.zeros(1, pool.layout.page_bytes, dtype=torch.uint8)),
        lambda pool: pool.scatter([0], torch.zeros(1, pool.layout.page_bytes + 1, dtype=torch.uint8)),
        lambda pool: pool.scatter([0, 1], torch.zeros(1, pool.layout.page_bytes, dtype=torch.uint8)),
        lambda pool: pool.scatter([0], torch.zeros(1, pool.layout.page_bytes)),
        lambda pool: pool.zero(torch.tensor([0.0])),
        lambda pool: pool.zero([0.5]),
        lambda pool: pool.zero([True, False]),
        lambda pool: pool.scatter(torch.zeros(1, pool.layout.page_bytes, dtype=torch.uint8), [0]),
        lambda pool: pool.zero(torch.tensor([[0]])),
    ],
)
def test_bad_pages_are_refused_before_a_byte_changes(call) -> None:
    pool = poisoned(LAYOUTS["page_major"], 4)
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match=r"\w"):
        call(pool)


def test_two_pools_share_one_buffer_page_by_page() -> None:
    """Hybrid models: two kinds of page interleaved over one buffer do not touch each other."""
    a, b = LAYOUTS["page_major"], MIXED
    stride = a.page_bytes + b.page_bytes
    buffer = torch.zeros(4 * stride, dtype=torch.uint8)
    first = PagePool(a, 4, buffer=buffer, page_stride=stride)
    second = PagePool(b, 4, buffer=buffer, base=a.page_bytes, page_stride=stride)
    first.pages.fill_(1)
    second.pages.fill_(2)
    assert buffer.view(4, stride)[:, : a.page_bytes].eq(1).all()
    assert buffer.view(4, stride)[:, a.page_bytes :].eq(2).all()
    second.zero([0, 1, 2, 3])
    assert first.pages.eq(1).all()


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(10_000, dtype=torch.int8),
        torch.zeros(10_000, dtype=torch.bfloat16),
        torch.zeros(100, 100, dtype=torch.uint8),
        torch.zeros(20_000, dtype=torch.uint8)[::2],
        torch.zeros(20_000, dtype=torch.uint8)[16:],
    ],
    ids=["int8", "bfloat16", "2-D", "strided", "offset"],
)
def test_a_buffer_of_another_kind_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="1-D contiguous uint8 tensor with storage offset 0"):
        PagePool(LAYOUTS["page_major"], 2, buffer=buffer)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    layout = LAYOUTS["page_major"]
    exact = 64 + 3 * layout.page_bytes
    PagePool(layout, 3, buffer=torch.zeros(exact, dtype=torch.uint8), base=64)
    with pytest.raises(ValueError, match=f"holds {exact - 1} bytes.*end at byte {exact}"):
        PagePool(layout, 3, buffer=torch.zeros(exact - 1, dtype=torch.uint8), base=64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_stride": 239}, "must not overlap"),
        ({"base": -16}, "must not be negative"),
        ({"base": 3}, "multiples of bfloat16's 2 bytes"),
        ({"page_stride": 241}, "multiples of bfloat16's 2 bytes"),
    ],
)
def test_a_base_or_stride_that_does_not_fit_is_refused(options: dict[str, int], message: str) -> None:
    assert LAYOUTS["page_major"].page_bytes == 240
    with pytest.raises(ValueError, match=message):
        PagePool(LAYOUTS["page_major"], 2, buffer=torch.zeros(4096, dtype=torch.uint8), **options)


@pytest.mark.parametrize("layer", [-1, -3, 3])
def test_a_layer_that_is_not_there_is_refused(layer: int) -> None:
    """-1 is no last layer: its planes would lie before the page."""
    pool = PagePool(pm_ops.page_major(3, 1, 8, 4, torch.float32), 2)
    fill_random(pool.buffer)
    row, slot = torch.ones(1, 1, 8), torch.tensor([0])
    for call in (
        lambda: pool.geometry(layer, "key"),
        lambda: pool.plane(layer, "value"),
        lambda: pool.view(layer, "key"),
        lambda: pm_ops.store_kv(pool, layer, row, None, slot),
    ):
        with writes_only(pool.buffer, []), pytest.raises(ValueError, match=f"of layer {layer} in this layout"):
            call()


@pytest.mark.parametrize("ids", [None, "12", 1.5, [1.5], [True], [None], ["1"], [[1]], [1, [2]], {1, 2}])
def test_what_is_no_list_of_integers_is_refused(ids: Any) -> None:
    pool = PagePool(pm_ops.page_major(1, 1, 8, 4, torch.float32), 4)
    fill_random(pool.buffer)
    calls = (pool.gather, pool.zero, lambda i: pool.copy(i, [0]), lambda i: pool.copy_slots([0], i))
    for call in calls:
        with writes_only(pool.buffer, []), pytest.raises(ValueError, match="^ids must be a list of integers or a 1-D"):
            call(ids)


def test_a_list_of_ids_is_refused_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        pool = PagePool(pm_ops.page_major(1, 1, 8, 4, torch.float32), 2, buffer=torch.empty(512, dtype=torch.uint8))
        pool.buffer = torch.empty(512, dtype=torch.uint8, device="cuda:0")
        ids = torch.zeros(1, dtype=torch.int64, device="cuda:0")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="ids in a list .*; pass a tensor that is there"):
            pool.gather([0])
        assert pool.gather(ids).shape == (1, pool.layout.page_bytes)


def test_a_device_that_is_not_the_buffers_is_refused_by_its_index_too() -> None:
    layout = pm_ops.page_major(1, 1, 8, 4, torch.float32)
    buffer = torch.zeros(512, dtype=torch.uint8)
    for device in ("cpu", "cpu:0", None):
        assert PagePool(layout, 2, device, buffer=buffer).device == buffer.device
    with FakeTensorMode():
        buffer = torch.empty(512, dtype=torch.uint8, device="cuda:0")
        for device in ("cuda", "cuda:0"):
            PagePool(layout, 2, device, buffer=buffer)
        for device in ("cuda:7", "cpu"):
            with pytest.raises(ValueError, match=f"device={device} but the buffer is on cuda:0"):
                PagePool(layout, 2, device, buffer=buffer)


@pytest.mark.parametrize(
    ("cuda", "reason"), [(None, "it was built for the CPU only"), ("13.0", "no usable GPU or driver was found")]
)
def test_a_cuda_pool_without_a_cuda_device_says_why(
    cuda: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for device in ("cuda", torch.device("cuda:0")):
        with pytest.raises(RuntimeError, match=rf"device='cuda.*sees no CUDA device: {reason}"):
            PagePool(pm_ops.page_major(1, 1, 8, 4, torch.float32), 2, device)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 4), "a pool needs a PageLayout, .* got int and int"),
        ((LAYOUTS["page_major"], "4"), "and a number of pages, got PageLayout and str"),
        ((LAYOUTS["page_major"], 4, "gpu"), "device='gpu' is no device of torch's; use 'cuda'"),
    ],
)
def test_a_pool_of_something_else_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PagePool(*arguments)


def test_a_pool_prints_its_counts_as_words_go() -> None:
    one, two = (PagePool(pm_ops.page_major(1, 1, 8, n, torch.float32), n) for n in (1, 2))
    assert repr(one) == "PagePool(page_major, 1 page of 64 B, 1 token a page, cpu)"
    assert repr(two) == "PagePool(page_major, 2 pages of 128 B, 2 tokens a page, cpu)"


@pytest.mark.parametrize(("num_pages", "reserve_null"), [(0, False), (-1, False), (1, True)])
def test_a_pool_without_a_page_to_hand_out_is_refused(num_pages: int, reserve_null: bool) -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(LAYOUTS["page_major"], num_pages, reserve_null=reserve_null)


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    """writable() hands a shared page's bytes over to a page of the caller's own, and leaves an unshared page alone."""
    pool = poisoned(LAYOUTS["page_major"], 4)
    (page,) = pool.allocator.alloc()
    with writes_only(pool.buffer, []):
        assert pool.writable(page) == page
    pool.allocator.retain([page])
    before = pool.pages[page].clone()
    own = pool.writable(page)
    assert own != page
    assert torch.equal(pool.pages[own], before)
    assert torch.equal(pool.pages[page], before)
    assert (pool.allocator.refcount(page), pool.allocator.refcount(own)) == (1, 1)


def test_the_null_page_is_never_handed_out() -> None:
    pool = PagePool(LAYOUTS["page_major"], 4, reserve_null=True)
    assert sorted(pool.allocator.alloc(3)) == [1, 2, 3]


def test_an_odd_page_of_33792_bytes_works_like_any_other() -> None:
    """Rows of 128 fp8 values with a 4-byte scale behind each: 132-byte rows, 33,792-byte pages."""
    planes = (
        Plane(0, "key", 0, 132, 132, (1, 128), torch.float8_e4m3fn),
        Plane(0, "key_scale", 128, 132, 132, (1, 1), torch.float32),
    )
    pool = PagePool(PageLayout(256, 33_792, planes), 3)
    fill_random(pool.buffer)
    before = pool.buffer.clone()
    with writes_only(pool.buffer, range(132 * 700, 132 * 701)):
        pool.copy_slots([17], [700])
    assert torch.equal(pool.buffer[132 * 700 : 132 * 701], before[132 * 17 : 132 * 18])
    expected = before[132 * 17 + 128 : 132 * 18].view(torch.float32)
    got = pool.view(0, "key_scale")[700 // 256, 700 % 256, 0]
    assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


@pytest.mark.gpu
@every_layout
def test_views_and_page_verbs_on_cuda_equal_the_cpus(layout: PageLayout) -> None:
    cpu = PagePool(layout, 5)
    fill_random(cpu.buffer)
    gpu = PagePool(layout, 5, "cuda", buffer=cpu.buffer.cuda())
    for plane in layout.planes:
        ours, theirs = gpu.view(plane.layer, plane.kind), cpu.view(plane.layer, plane.kind)
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.cpu().contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    for pool in (cpu, gpu):
        pool.copy([0, 1, 2], [1, 2, 3])
        pool.zero([0])
        pool.copy_slots([layout.page_size, 2 * layout.page_size + 1], [3 * layout.page_size, 1])
        pool.scatter([4], pool.gather([2]))
    assert torch.equal(gpu.buffer.cpu(), cpu.buffer)
