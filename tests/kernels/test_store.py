"""The store and load kernels against the byte formula."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
import torch
from kernels.cases import Pages, check_bytes, moved_with_strides, on_each_device, pages

from pm_ops.kernels.store import load_kv, store_kv
from pm_ops.ops.store import LoadKV, StoreKV

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ORDERS = ["page_major", "token_major", "head_major"]


def call(pool: Pages, layer: int, key, value, slots, dtypes, **options) -> StoreKV:
    device = pool.buffer.device
    planes = [pool.planes[layer, kind] if x is not None else None for kind, x in (("key", key), ("value", value))]
    rows = [x if x is None else moved_with_strides(x, device) for x in (key, value)]
    return StoreKV(pool.buffer, *rows, slots.to(device), *planes, pool.page_size, *dtypes, **options)


def check_store(device: str, pool: Pages, key, value, slots, dtypes, scales=(1.0, 1.0), **options) -> None:
    """Run a store on the device; its bytes are the oracle's and all others are unchanged."""
    expected, touched = pool.buffer.clone(), set()
    for kind, rows, dtype, scale in zip(("key", "value"), (key, value), dtypes, scales, strict=True):
        if rows is not None:
            touched |= oracle.store(
                expected, pool.planes[1, kind], pool.page_size, dtype, rows[: len(slots)], slots.tolist(), scale
            )
    there = pool.to(device)
    options = {k: v.to(device) for k, v in options.items()} or {"key_scale": scales[0], "value_scale": scales[1]}
    store_kv(call(there, 1, key, value, slots, dtypes, **options))
    check_bytes(pool.buffer, there.buffer, expected, touched)


def make(order: str, page_size: int, key: tuple[int, int], value: tuple[int, int], dtypes, *, num_pages=6, gap=32):
    return pages(
        order,
        page_size,
        num_pages,
        3,
        {"key": (*key, dtypes[0].itemsize), "value": (*value, dtypes[1].itemsize)},
        base=64,
        gap=gap,
    )


def some_slots(pool: Pages, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Distinct slots, among them one to skip and two past the end."""
    slots = torch.randperm(pool.num_slots)[:n]
    slots[n // 2] = -1
    slots[0] = pool.num_slots
    slots[-1] = 2**31 - 1
    return slots.to(dtype)


@on_each_device
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_reach_their_slots_and_no_other_byte_changes(device, order, page_size, index):
    pool = make(order, page_size, (3, 20), (3, 12), (F32, F32))
    slots = some_slots(pool, min(pool.num_slots, 9), index)
    check_store(device, pool, torch.randn(9, 3, 20), torch.randn(9, 3, 12), slots, (F32, F32))


@on_each_device
@pytest.mark.parametrize("dtypes", [(F32, F16), (F16, F32), (F16, F16)])
@pytest.mark.parametrize("source", [F32, F16, torch.float64])
def test_key_and_value_planes_may_differ_in_heads_dims_and_dtype(device, dtypes, source):
    pool = make("page_major", 4, (2, 80), (5, 24), dtypes)
    key, value = torch.randn(7, 2, 80).to(source), torch.randn(7, 5, 24).to(source)
    check_store(device, pool, key, value, some_slots(pool, 7), dtypes)


@on_each_device
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("absent", ["key", "value"])
def test_a_store_of_one_of_the_two_leaves_the_other_plane(device, order, absent):
    pool = make(order, 4, (2, 16), (2, 16), (F32, F32))
    rows = {"key": torch.randn(5, 2, 16), "value": torch.randn(5, 2, 16), absent: None}
    check_store(device, pool, rows["key"], rows["value"], some_slots(pool, 5), (F32, F32))


@on_each_device
def test_rows_may_be_slices_of_a_fused_qkv_transposed_or_strided_in_every_axis(device):
    pool = make("page_major", 4, (2, 16), (2, 16), (F32, F32))
    qkv = torch.randn(9, (4 + 2 + 2) * 16)
    _, key, value = qkv.split([64, 32, 32], dim=1)
    check_store(device, pool, key.view(9, 2, 16), value.view(9, 2, 16), some_slots(pool, 9), (F32, F32))
    heads_first = torch.randn(2, 9, 16).transpose(0, 1)
    dims_first = torch.randn(16, 9, 2).permute(1, 2, 0)
    check_store(device, pool, heads_first, dims_first, some_slots(pool, 9), (F32, F32))
    check_store(device, pool, torch.randn(9, 2, 32)[..., ::2], None, some_slots(pool, 9), (F32, F32))


@on_each_device
def test_rows_past_the_slots_are_padding_and_slots_may_be_strided(device):
    pool = make("page_major", 4, (2, 16), (2, 16), (F32, F32))
    slots = torch.stack([some_slots(pool, 5), torch.arange(5)], 1)[:, 0]
    check_store(device, pool, torch.randn(8, 2, 16), torch.randn(8, 2, 16), slots, (F32, F32))


@on_each_device
def test_only_the_named_slot_of_3_and_two_skipped_rows_is_written(device):
    pool = make("page_major", 4, (1, 8), (1, 8), (F32, F32))
    check_store(device, pool, torch.randn(3, 1, 8), torch.randn(3, 1, 8), torch.tensor([3, -1, -1]), (F32, F32))


@on_each_device
def test_the_smaller_of_two_planes_bounds_the_slots(device):
    """A slot that only the key's plane has is written in neither: half a token would be worse than none."""
    pool = make("page_major", 4, (1, 8), (1, 8), (F32, F32))
    pool.planes[1, "value"][4] = 3
    rows, slots = torch.randn(3, 1, 8), torch.tensor([11, 12, 2])
    expected, touched = pool.buffer.clone(), set()
    for kind in ("key", "value"):
        for i in (0, 2):
            touched |= oracle.store(expected, pool.planes[1, kind], 4, F32, rows[i : i + 1], [int(slots[i])])
    there = pool.to(device)
    store_kv(call(there, 1, rows, rows, slots, (F32, F32)))
    check_bytes(pool.buffer, there.buffer, expected, touched)


@on_each_device
def test_many_tokens_take_many_programs_the_last_of_them_in_part(device):
    pool = make("page_major", 16, (2, 24), (2, 24), (F16, F16), num_pages=40)
    slots = torch.randperm(pool.num_slots)[:601]
    slots[::7] = -1
    rows = torch.randn(2, 601, 2, 24).half()
    check_store(device, pool, rows[0], rows[1], slots, (F16, F16))
    there = pool.to(device)
    store_kv(call(there, 1, rows[0], rows[1], slots, (F16, F16)))
    for kind, stored in zip(("key", "value"), rows, strict=True):
        stored[::7] = 0
        read = load_kv(LoadKV(there.buffer, slots.to(device), pool.planes[1, kind], 16, 2, 24, F16))
        assert torch.equal(read.cpu(), stored)


@on_each_device
def test_rows_without_a_slot_may_hold_anything(device):
    """They are read all the same, with the others."""
    pool = make("page_major", 4, (2, 16), (2, 16), (F32, F16))
    rows, slots = torch.randn(2, 9, 2, 16), some_slots(pool, 9)
    rows[:, (slots < 0) | (slots >= pool.num_slots)] = torch.tensor([torch.nan, torch.inf]).repeat(8)
    check_store(device, pool, rows[0], rows[1], slots, (F32, F16), (0.37, 3.0))


@on_each_device
def test_stored_is_the_row_over_its_scale_given_as_a_number_or_a_tensor(device):
    pool = make("page_major", 4, (2, 16), (2, 16), (F32, F16))
    key, value, slots = torch.randn(5, 2, 16), torch.randn(5, 2, 16), some_slots(pool, 5)
    check_store(device, pool, key, value, slots, (F32, F16), (0.37, 3.0))
    tensors = {"key_scale_tensor": torch.tensor([0.37]), "value_scale_tensor": torch.tensor(3.0)}
    check_store(device, pool, key, value, slots, (F32, F16), (0.37, 3.0), **tensors)


@on_each_device
def test_an_empty_store_writes_nothing_and_an_empty_load_returns_no_rows(device):
    pool = make("page_major", 4, (2, 16), (2, 16), (F32, F32))
    none = torch.zeros(0, dtype=torch.int64)
    check_store(device, pool, torch.randn(0, 2, 16), torch.randn(0, 2, 16), none, (F32, F32))
    there = pool.to(device)
    rows = load_kv(LoadKV(there.buffer, none.to(device), there.planes[0, "key"], 4, 2, 16, F32))
    assert rows.shape == (0, 2, 16)


@on_each_device
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3, E5M2])
def test_load_returns_the_stored_bytes_and_zeros_for_slots_that_do_not_exist(device, order, dtype):
    """Random bytes, so that NaN payloads are among them."""
    pool = make(order, 3, (2, 20), (2, 12), (dtype, dtype))
    there = pool.to(device)
    for kind, dim in (("key", 20), ("value", 12)):
        plane, slots = pool.planes[2, kind], [5, -1, 17, 0, pool.num_slots]
        rows = load_kv(LoadKV(there.buffer, torch.tensor(slots, device=device), plane, 3, 2, dim, dtype))
        assert rows.dtype == dtype
        assert rows.is_contiguous()
        found = rows.cpu().view(torch.uint8).numpy()
        for row, slot in zip(found, slots, strict=True):
            exists = 0 <= slot < pool.num_slots
            expected = oracle.read(pool.buffer, plane, 3, slot if exists else 0, 2, dim * dtype.itemsize) * exists
            assert (row == expected).all()


@on_each_device
@pytest.mark.parametrize("dtype", [F32, F16, BF16, E4M3, E5M2])
@pytest.mark.parametrize("out_dtype", [F32, F16])
def test_load_multiplies_by_the_scale_in_fp32_and_casts(device, dtype, out_dtype):
    pool = make("page_major", 3, (2, 20), (2, 12), (dtype, dtype))
    plane, slots = pool.planes[1, "key"], list(range(9))
    oracle.store(pool.buffer, plane, 3, dtype, torch.randn(9, 2, 20), slots)
    expected = torch.from_numpy(oracle.load(pool.buffer, plane, 3, dtype, slots, 2, 20)).float()
    there = pool.to(device)
    a = LoadKV(there.buffer, torch.tensor(slots, device=device), plane, 3, 2, 20, dtype, out_dtype=out_dtype)
    tensor = torch.tensor([0.37], device=device)
    for scaled in ({"scale": 0.37}, {"scale_tensor": tensor}):
        rows = load_kv(dataclasses.replace(a, **scaled))
        assert torch.equal(rows.cpu(), (expected * 0.37).to(out_dtype))


@on_each_device
def test_page_size_1_is_flat_addressing(device):
    """The same rows in a 3-D layer-major tensor, in pages of one token, and in pages of four, read back alike."""
    key, slots = torch.randn(10, 2, 16), torch.randperm(24)[:10]
    flat = torch.zeros(24 * 2 * 16 * 4, dtype=torch.uint8, device=device)
    store_kv(StoreKV(flat, key.to(device), None, slots.to(device), [0, 128, 0, 64, 24], None, 1, F32, None))
    assert torch.equal(flat.cpu().view(F32).view(24, 2, 16)[slots], key)
    for page_size in (1, 4):
        pool = make("page_major", page_size, (2, 16), (2, 16), (F32, F32), num_pages=24 // page_size).to(device)
        store_kv(call(pool, 1, key, None, slots, (F32, None)))
        rows = load_kv(LoadKV(pool.buffer, slots.to(device), pool.planes[1, "key"], page_size, 2, 16, F32))
        assert torch.equal(rows.cpu(), key)


def everything(dtype: torch.dtype) -> torch.Tensor:
    """Rows ``[T, 2, 64]`` of numbers of every size and sign, exact ties, the largest, infinities and zeros."""
    powers = torch.tensor([2.0**e for e in range(-30, 20)])
    halves = torch.cat([powers * m / 32 for m in range(32, 64)])
    special = torch.tensor([0.0, torch.inf, 448.0, 464.0, 465.0, 480.0, 57344.0, 61440.0, 65504.0, 65519.0, 65520.0])
    x = torch.cat([halves, special, torch.randn(500), torch.randn(500) * 100])
    x = torch.cat([x, -x])
    x = torch.cat([x, torch.zeros(-len(x) % 128)])
    return x.to(dtype).view(-1, 2, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("source", [F32, F16, BF16])
@pytest.mark.parametrize("target", [F32, F16, BF16, E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_casts_round_to_nearest_even_and_fp8_saturates(source, target, scale):
    key = everything(source)
    pool = make("page_major", 16, (2, 64), (2, 64), (target, target), num_pages=len(key) // 16 + 1)
    slots = torch.randperm(pool.num_slots)[: len(key)]
    check_store("cuda", pool, key, key.flip(0), slots, (target, target), (scale, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("target", [E4M3, E5M2])
def test_fp8_is_bit_equal_to_torchs_cast_after_the_clamp_for_every_half(target):
    """All 65536 halves, NaN included (which stays NaN, whatever its payload)."""
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(F16).view(512, 1, 128).cuda()
    buffer = torch.zeros(65536, dtype=torch.uint8, device="cuda")
    slots = torch.arange(512, device="cuda")
    store_kv(StoreKV(buffer, halves, None, slots, [0, 128, 0, 128, 512], None, 1, target, None))
    limit = torch.finfo(target).max
    expected = halves.float().clamp(-limit, limit).to(target).view(torch.uint8).flatten()
    nan = halves.isnan().flatten()
    assert torch.equal(buffer[~nan], expected[~nan])
    assert buffer.view(target)[nan].float().isnan().all()
