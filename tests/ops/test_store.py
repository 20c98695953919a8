"""store_kv and load_kv against the byte formula."""

import itertools
import math
import struct

import pytest
import torch

import pm_ops
from pm_ops.testing import fill_nan, fill_random, sample_pools, slot_bytes, writes_only

POOLS = list(sample_pools())
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(params=range(len(POOLS)), ids=lambda i: f"{POOLS[i].layout.name}-{i}")
def pool(request):
    pool = POOLS[request.param]
    fill_random(pool.buffer, seed=request.param)
    return pool


def stored_bytes(pool, layer, kind, slot):
    return bytes(pool.buffer[slot_bytes(pool, layer, kind, [slot])].tolist())


def rows_for(pool, layer, tokens, dtype=torch.float32):
    shapes = [pool.layout.plane(layer, kind).shape for kind in ("key", "value")]
    return [torch.randn(tokens, *shape).to(dtype) for shape in shapes]


def raw(x):
    return bytes(x.contiguous().view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_land_in_their_slots_and_no_other_byte_changes(pool, index):
    """Padding rows (slot -1, and rows past the slots) must not reach the last slot, as Python indexing would."""
    key, value = rows_for(pool, 1, 6)
    slots = [pool.num_slots - 2, -1, 0, 1]
    owned = slot_bytes(pool, 1, "key", slots) + slot_bytes(pool, 1, "value", slots)
    with writes_only(pool.buffer, owned):
        pm_ops.store_kv(pool, 1, key, value, torch.tensor(slots, dtype=index))
    for kind, rows in (("key", key), ("value", value)):
        dtype = pool.layout.plane(1, kind).dtype
        for i in (0, 2, 3):
            assert stored_bytes(pool, 1, kind, slots[i]) == raw(rows[i].to(dtype))


def test_key_alone_and_value_alone(pool):
    key, value = rows_for(pool, 0, 2)
    slots = torch.tensor([5 % pool.num_slots, 2])
    with writes_only(pool.buffer, slot_bytes(pool, 0, "key", slots.tolist())):
        pm_ops.store_kv(pool, 0, key, None, slots)
    with writes_only(pool.buffer, slot_bytes(pool, 0, "value", slots.tolist())):
        pm_ops.store_kv(pool, 0, None, value, slots)


def test_slices_of_a_fused_projection_are_stored_without_a_copy(pool):
    (heads, dim), (_, value_dim) = (pool.layout.plane(1, k).shape for k in ("key", "value"))
    fused = torch.randn(4, heads, dim + value_dim + 3)
    key, value = fused[..., :dim], fused[..., dim : dim + value_dim]
    slots = torch.tensor([1, 0, 4, 2])
    pm_ops.store_kv(pool, 1, key, value, slots)
    dtype = pool.layout.plane(1, "key").dtype
    assert torch.equal(pm_ops.load_kv(pool, 1, slots, "key").float(), key.to(dtype).float())
    assert torch.equal(pm_ops.load_kv(pool, 1, slots, "value").float(), value.to(dtype).float())


def test_load_is_bit_exact_for_every_byte_pattern(pool):
    """NaN payloads and signs survive, and skipped slots give zero rows."""
    slots = torch.tensor([0, -1, pool.num_slots - 1])
    with writes_only(pool.buffer, []):
        got = pm_ops.load_kv(pool, 0, slots, "value")
    assert raw(got[0]) == stored_bytes(pool, 0, "value", 0)
    assert raw(got[2]) == stored_bytes(pool, 0, "value", pool.num_slots - 1)
    assert not any(raw(got[1]))


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_saturates_and_keeps_nan(dtype, rows_dtype):
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 8, 2, dtype), 2)
    limit = torch.finfo(dtype).max
    row = torch.tensor([1e4 * 8, -1e4 * 8, math.inf, -math.inf, math.nan, limit, 0.3, -0.0]).to(rows_dtype)
    pm_ops.store_kv(pool, 0, row.reshape(1, 1, 8), None, torch.tensor([3]))
    got = pool.view(0, "key")[1, 1, 0].float()
    expected = row.float().clamp(-limit, limit).to(dtype).float()
    assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7]], expected[[0, 1, 2, 3, 5, 6, 7]]) and got[4].isnan()
    if dtype == torch.float8_e4m3fn:
        assert got[:4].tolist() == [448.0, -448.0, 448.0, -448.0]


def test_casts_round_to_nearest_even():
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 4, 1, torch.bfloat16), 1)
    ulp = 2.0**-7
    row = torch.tensor([1 + ulp / 2, 1 + 1.5 * ulp, 1 + 0.51 * ulp, -1 - ulp / 2])
    pm_ops.store_kv(pool, 0, row.reshape(1, 1, 4), None, torch.tensor([0]))
    assert pool.view(0, "key").flatten().tolist() == [1.0, 1 + 2 * ulp, 1 + ulp, -1.0]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [*FP8, torch.float16, torch.float32])
def test_stored_is_x_over_scale_and_loading_multiplies_it_back(dtype, rows_dtype, as_tensor):
    """The quotient is the float32 one: not by the reciprocal, and not in the rows' dtype."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, 4, 32, 4, dtype), 2)
    scales = [torch.tensor(s) if as_tensor else s for s in (0.3, 2.5)]
    key, value = rows_for(pool, 0, 3, rows_dtype)
    slots = torch.tensor([2, 7, 0])
    pm_ops.store_kv(pool, 0, key, value, slots, key_scale=scales[0], value_scale=scales[1])
    for kind, rows, scale in (("key", key, 0.3), ("value", value, 2.5)):
        single = struct.unpack("f", struct.pack("f", scale))[0]
        quotient = (rows.double() / single).float()
        stored = pm_ops.load_kv(pool, 0, slots, kind).float()
        assert torch.equal(stored, quotient.to(dtype).float())
        for out_dtype in (torch.float32, torch.bfloat16, torch.float16):
            back = pm_ops.load_kv(pool, 0, slots, kind, scale=scales[kind == "value"], out_dtype=out_dtype)
            assert torch.equal(back, (stored.double() * single).float().to(out_dtype))


@pytest.mark.parametrize("scale", [1e-50, 1e300, 0.0, math.nan, -1.0, math.inf])
def test_a_scale_that_is_not_positive_and_finite_in_float32_is_refused(scale):
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 4, 1, torch.float8_e4m3fn), 1)
    row, slot = torch.ones(1, 1, 4), torch.tensor([0])
    with writes_only(pool.buffer, []):
        with pytest.raises(ValueError, match="key_scale"):
            pm_ops.store_kv(pool, 0, row, None, slot, key_scale=scale)
        with pytest.raises(ValueError, match="scale"):
            pm_ops.load_kv(pool, 0, slot, scale=scale, out_dtype=torch.float32)


REFUSED = {
    "slots and rows": (lambda p, k: pm_ops.store_kv(p, 1, k[:5], k[:5], torch.arange(8)), "8 slots for 5 key rows"),
    "a slot past the end": (
        lambda p, k: pm_ops.store_kv(p, 1, k[:2], None, torch.tensor([0, 20])),
        "has 20, but there are 20",
    ),
    "a slot twice": (lambda p, k: pm_ops.store_kv(p, 1, k[:3], None, torch.tensor([4, 1, 4])), "names 4 twice"),
    "float slots": (lambda p, k: pm_ops.store_kv(p, 1, k[:1], None, torch.zeros(1)), "int32 or int64"),
    "no rows": (lambda p, k: pm_ops.store_kv(p, 1, None, None, torch.zeros(1, dtype=torch.int64)), "got neither"),
    "other heads": (lambda p, k: pm_ops.store_kv(p, 1, k[:1, :1], None, torch.tensor([0])), "layer 1 holds"),
    "no such layer": (lambda p, k: pm_ops.store_kv(p, 7, k, None, torch.tensor([0])), "layers are 0 to 1"),
    "load past the end": (lambda p, k: pm_ops.load_kv(p, 1, torch.tensor([20])), "has 20, but there are 20"),
    "scaled bits": (lambda p, k: pm_ops.load_kv(p, 1, torch.tensor([0]), scale=2.0), "needs out_dtype"),
    "integer rows": (lambda p, k: pm_ops.store_kv(p, 1, k[:1].int(), None, torch.tensor([0])), "must be rows"),
    "float64 rows": (lambda p, k: pm_ops.store_kv(p, 1, k[:1].double(), None, torch.tensor([0])), "got float64"),
    "one slot more": (lambda p, k: pm_ops.store_kv(p, 1, k[:2], None, torch.arange(3)), "3 slots for 2 key rows"),
    "slot 0 twice": (lambda p, k: pm_ops.store_kv(p, 1, k[:2], None, torch.tensor([0, 0])), "names 0 twice"),
    "an integer output": (
        lambda p, k: pm_ops.load_kv(p, 1, torch.tensor([0]), out_dtype=torch.int32),
        "out_dtype int32",
    ),
    "rows elsewhere": (lambda p, k: pm_ops.store_kv(p, 1, k[:1].to("meta"), None, torch.tensor([0])), "key is on meta"),
    "a scale elsewhere": (
        lambda p, k: pm_ops.store_kv(p, 1, k[:1], None, torch.tensor([0]), key_scale=torch.ones(1, device="meta")),
        "key_scale_tensor is on meta",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_any_byte_is_written(case):
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.float32), 5)
    fill_random(pool.buffer)
    call, message = REFUSED[case]
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match=message):
        call(pool, torch.randn(8, 2, 8))


def test_a_plane_that_leaves_the_buffer_is_refused():
    """Heads that the pool does not have, given straight to the operator."""
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.float32), 5)
    plane = pool.geometry(1, "value")
    rows = torch.ones(1, 3, 8)
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match="does not hold pages"):
        torch.ops.pm_ops.store_kv(pool.buffer, None, rows, torch.tensor([0]), None, plane, 4, None, torch.float32)
    with pytest.raises(ValueError, match="come together"):
        torch.ops.pm_ops.store_kv(pool.buffer, None, rows, torch.tensor([0]), plane, plane, 4, None, torch.float32)
    one_byte_less = pool.buffer[:-1]
    with pytest.raises(ValueError, match=r"^plane \[.*\] does not hold pages"):
        torch.ops.pm_ops.load_kv(one_byte_less, torch.tensor([0]), plane, 4, 2, 8, torch.float32)
    with pytest.raises(ValueError, match="^dtype int16 is not supported"):
        torch.ops.pm_ops.load_kv(pool.buffer, torch.tensor([0]), plane, 4, 2, 8, torch.int16)
    with pytest.raises(ValueError, match="multiples of 4"):
        torch.ops.pm_ops.load_kv(pool.buffer, torch.tensor([0]), [2, *plane[1:]], 4, 2, 8, torch.float32)


def test_a_negative_head_stride_is_refused_of_one_head_too():
    """Of values it was refused when the keys were written."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 8, 4, torch.float32), 5)
    fill_random(pool.buffer)
    key, (offset, page, token, head, pages) = pool.geometry(0, "key"), pool.geometry(0, "value")
    value, rows = [offset, page, token, -head, pages], torch.ones(1, 1, 8)
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match="none negative"):
        torch.ops.pm_ops.store_kv(
            pool.buffer, rows, rows, torch.tensor([0]), key, value, 4, torch.float32, torch.float32
        )


@pytest.mark.parametrize("shifts", [(2, 0, 0, 0), (0, 3, 1, 0), (0, 1, 0, 3), (0, 0, 1, 3), (1, 1, 1, 1)])
def test_offset_and_strides_that_are_no_multiples_of_the_element_are_refused(shifts):
    """Each by itself: two odd ones whose sum is even too."""
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.float32), 5)
    plane = [n + by for n, by in zip(pool.geometry(0, "key"), (*shifts, -1), strict=True)]
    args = (torch.ones(1, 2, 8), None, torch.tensor([0]), plane, None, 4, torch.float32, None)
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match="multiples of 4"):
        torch.ops.pm_ops.store_kv(pool.buffer, *args)


@pytest.mark.parametrize(("stride", "pages", "page_size"), [(1, 5, 4), (1, 2, 1), (2, 1, 2), (2, 5, 4)])
def test_pages_and_tokens_that_lie_on_one_another_are_refused(stride, pages, page_size):
    """A stride of 0, but over one page or one token, where none is used."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, 2, 8, 4, torch.float32), 5)
    fill_random(pool.buffer)
    whole, rest = [0, 512, 64, 32, pages], {1: (1, page_size), 2: (pages, 1)}[stride]
    flat = [0 if i == stride else n for i, n in enumerate(whole)]
    args = (torch.ones(1, 2, 8), None, torch.tensor([0]))
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match="not 0 either"):
        torch.ops.pm_ops.store_kv(pool.buffer, *args, flat, None, page_size, torch.float32, None)
    torch.ops.pm_ops.store_kv(pool.buffer, *args, [*flat[:4], rest[0]], None, rest[1], torch.float32, None)


def test_scales_without_rows_are_refused():
    pool = pm_ops.PagePool(pm_ops.page_major(1, 2, 8, 4, torch.float8_e4m3fn), 5)
    fill_random(pool.buffer)
    rows, slot = torch.ones(1, 2, 8), torch.tensor([0])
    for scale in (2.0, torch.tensor(2.0)):
        with writes_only(pool.buffer, []):
            with pytest.raises(ValueError, match="key_scale was given without the rows"):
                pm_ops.store_kv(pool, 0, None, rows, slot, key_scale=scale)
            with pytest.raises(ValueError, match="value_scale was given without the rows"):
                pm_ops.store_kv(pool, 0, rows, None, slot, value_scale=scale)


def test_page_size_one_and_many_give_the_same_bytes_as_a_layer_major_tensor():
    """One operator on a plain [slots, heads, dim] tensor, on pages of one slot, and on pages of four."""
    rows, slots = torch.randn(5, 2, 8), torch.tensor([3, 11, 0, 8, 5])
    flat = torch.zeros(12 * 2 * 8 * 4, dtype=torch.uint8)
    torch.ops.pm_ops.store_kv(flat, rows, None, slots, [0, 64, 64, 32, 12], None, 1, torch.float32, None)
    for page_size in (1, 4):
        pool = pm_ops.PagePool(pm_ops.page_major(3, 2, 8, page_size, torch.float32), 12 // page_size)
        pm_ops.store_kv(pool, 1, rows, None, slots)
        assert torch.equal(pool.view(1, "key").reshape(12, 2, 8), flat.view(torch.float32).view(12, 2, 8))


def test_all_live_slots_stay_when_padding_rows_are_skipped():
    """A padding sentinel must not alias a live slot."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 4, 2, torch.float32), 4, reserve_null=True)
    fill_nan(pool.buffer)
    live = torch.arange(2, 8)
    pm_ops.store_kv(pool, 0, torch.arange(6.0).reshape(6, 1, 1).expand(6, 1, 4), None, live)
    pm_ops.store_kv(pool, 0, torch.full((4, 1, 4), math.nan), None, torch.full((4,), -1))
    assert pool.view(0, "key").reshape(8, 4)[2:, 0].tolist() == list(range(6))


def test_a_wide_integer_range_of_slots_round_trips():
    """int32 and int64 slots near 4,000,000 address the same bytes, past 2^31 bytes."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 576, 1, torch.float8_e4m3fn, value_dim=8), 4_000_000)
    rows = torch.randn(2, 1, 576)
    for index, slots in itertools.product((torch.int32, torch.int64), ([3_999_999, 3_700_123],)):
        pm_ops.store_kv(pool, 0, rows, None, torch.tensor(slots, dtype=index))
        got = pm_ops.load_kv(pool, 0, torch.tensor(slots, dtype=index))
        assert torch.equal(got.float(), rows.to(torch.float8_e4m3fn).float())
        start = 3_999_999 * pool.page_stride
        assert raw(rows[0].to(torch.float8_e4m3fn)) == bytes(pool.buffer[start : start + 576].tolist())


def test_the_smaller_of_two_planes_bounds_the_slots():
    """A value plane of fewer pages: a slot past it is refused, not half written."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 8, 4, torch.float32), 5)
    planes = pool.geometry(0, "key"), [*pool.geometry(0, "value")[:4], 3]
    rows = torch.ones(1, 1, 8)
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match="there are 12"):
        torch.ops.pm_ops.store_kv(pool.buffer, rows, rows, torch.tensor([13]), *planes, 4, torch.float32, torch.float32)


def test_a_buffer_that_is_a_slice_addresses_its_own_bytes():
    layout = pm_ops.page_major(1, 1, 8, 4, torch.float32)
    pool = pm_ops.PagePool(layout, 3)
    outer = torch.zeros(64 + 3 * layout.page_bytes, dtype=torch.uint8)
    rows, slots = torch.randn(2, 1, 8), torch.tensor([9, 2])
    for buffer in (outer[64:], pool.buffer):
        plane = pool.geometry(0, "key")
        torch.ops.pm_ops.store_kv(buffer, rows, None, slots, plane, None, 4, torch.float32, None)
    assert torch.equal(outer[64:], pool.buffer) and not outer[:64].any()


def test_a_state_plane_has_no_slots():
    layout = pm_ops.PageLayout(4, 48, (pm_ops.Plane(0, "conv", 0, None, 16, (3, 4), torch.float32),))
    pool = pm_ops.PagePool(layout, 2)
    with pytest.raises(ValueError, match="is a state"):
        pm_ops.load_kv(pool, 0, torch.tensor([0]), "conv")
    with pytest.raises(ValueError, match="no token planes"):
        pool.copy_slots([0], [1])
