"""A scale for each token and head: stores, loads, rotations and attention, against the byte formula and float64."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
import torch
from kernels.cases import NAN_BYTE, Pages, attention_case, check_attention, check_bytes, on_each_device, pages, plan
from kernels.test_rope import rope_case, to, unfused
from kernels.test_store import some_slots

from pm_ops import PagePool, page_major, token_major
from pm_ops.kernels.attention import attention
from pm_ops.kernels.pages import copy_slots
from pm_ops.kernels.rope import rope_store_kv
from pm_ops.kernels.store import load_kv, store_kv
from pm_ops.ops.attention import Attention
from pm_ops.ops.pages import CopySlots
from pm_ops.ops.store import LoadKV, StoreKV, store_rows
from pm_ops.testing import fill_random, slot_bytes

F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDED = [INT8, *(pytest.param(dtype, marks=pytest.mark.gpu) for dtype in (E4M3, E5M2))]
"""The interpreter rounds fp8 wrongly, so there fp8 is only read."""
ORDERS = ["page_major", "token_major", "head_major"]


def make(
    order: str, page_size: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, num_pages: int = 6
) -> Pages:
    rows = {"key": (heads, dims[0], dtype.itemsize), "value": (heads, dims[1], dtype.itemsize)}
    scales = dict.fromkeys(("key_scale", "value_scale"), (heads, 1, 4))
    return pages(order, page_size, num_pages, 3, rows | scales, base=64, gap=32)


def planes_of(pool: Pages) -> dict[str, list[int]]:
    return {f"{kind}_plane": pool.planes[1, kind] for kind in ("key", "value", "key_scale", "value_scale")}


def special(rows: torch.Tensor) -> torch.Tensor:
    """Rows of unlike sizes; the first heads of the first tokens: zeros, subnormals, the largest, NaN, infinities."""
    rows *= torch.logspace(-6, 4, rows[..., 0].numel()).view(rows.shape[:2])[..., None].to(rows.dtype)
    rows[:7, 0] = 0.5
    rows[0, 0] = 0
    rows[1, 0, 3:] = torch.tensor(1e-43)
    rows[2, 0, :3] = torch.tensor([1e-38, -3e-38, 2e-38])
    rows[3, 0, :2] = torch.tensor([torch.finfo(rows.dtype).max, -1.0])
    rows[4, 0, 4] = torch.nan
    rows[5, 0, 0] = torch.inf
    rows[6, 0, -1] = -torch.inf
    return rows


def check_store(device: str, pool: Pages, dtype: torch.dtype, key: torch.Tensor, value: torch.Tensor, slots) -> None:
    """Elements and scales are the oracle's and the specification's, and all other bytes unchanged."""
    call = StoreKV(pool.buffer, key, value, slots, **planes_of(pool), page_size=pool.page_size,
                   key_dtype=dtype, value_dtype=dtype)  # fmt: skip
    expected, touched = pool.buffer.clone(), set()
    for kind, rows in (("key", key), ("value", value)):
        plane, scales = pool.planes[1, kind], pool.planes[1, f"{kind}_scale"]
        touched |= oracle.store(expected, plane, pool.page_size, dtype, rows, slots.tolist(), scale_plane=scales)
    there = pool.to(device)
    rows = {"key": key.to(device), "value": value.to(device), "slots": slots.to(device)}
    store_kv(dataclasses.replace(call, buffer=there.buffer, **rows))
    check_bytes(pool.buffer, there.buffer, expected, touched)
    specified = pool.buffer.clone()
    inside = torch.where(slots < pool.num_slots, slots, -1)
    store_rows(dataclasses.replace(call, buffer=specified, slots=inside))
    assert torch.equal(there.buffer.cpu(), specified)


@on_each_device
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_rows_and_their_scales_reach_their_slots_and_no_other_byte_changes(device, order, page_size, dtype):
    pool = make(order, page_size, 3, (20, 12), dtype, num_pages=12)
    slots = some_slots(pool, 11)
    check_store(device, pool, dtype, special(torch.randn(11, 3, 20)), special(torch.randn(11, 3, 12)), slots)


@on_each_device
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("source", [F32, F16, pytest.param(BF16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dims", [(128, 128), (80, 5)])
def test_many_rows_of_every_dtype_equal_the_specification_bit_for_bit(device, dtype, source, dims):
    """601 tokens: several a program. A head of 5 is narrower than any load is wide."""
    pool = make("page_major", 16, 2, dims, dtype, num_pages=40)
    slots = torch.randperm(pool.num_slots)[:601]
    slots[::7] = -1
    key, value = (special(torch.randn(601, 2, dim)).to(source) for dim in dims)
    check_store(device, pool, dtype, key, value, slots.int())


@on_each_device
def test_int8_rounds_halves_to_even_and_saturates_and_has_a_code_for_nan(device):
    """By one scale a tensor. -128, which no number gives, is NaN."""
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.49, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    expected = torch.tensor([0, 2, 2, 0, -2, 126, 127, 127, -127, 127, -127, -128], dtype=INT8)
    buffer = torch.zeros(24, dtype=torch.uint8, device=device)
    plane, slots = [0, 12, 0, 12, 2], torch.tensor([1], device=device)
    half = {"key_scale_tensor": torch.tensor([0.5], device=device)}
    store_kv(StoreKV(buffer, (x / 2).view(1, 1, 12).to(device), None, slots, plane, None, 1, INT8, None, **half))
    assert torch.equal(buffer[12:].cpu().view(INT8), expected)
    assert not buffer[:12].any()
    rows = load_kv(LoadKV(buffer, slots, plane, 1, 1, 12, INT8, scale=0.5, out_dtype=F32))
    assert rows.flatten()[:11].tolist() == (expected[:11] / 2).tolist()
    assert rows.flatten()[11].isnan()


@on_each_device
def test_one_side_may_have_scales_and_the_other_none(device):
    for own, other in (("key", "value"), ("value", "key")):
        pool = make("page_major", 4, 2, (16, 16), INT8)
        slots, rows = some_slots(pool, 5), {"key": torch.randn(5, 2, 16), "value": torch.randn(5, 2, 16)}
        expected, touched = pool.buffer.clone(), set()
        scales = pool.planes[1, f"{own}_scale"]
        plane = pool.planes[1, own]
        touched |= oracle.store(expected, plane, 4, INT8, rows[own], slots.tolist(), scale_plane=scales)
        touched |= oracle.store(expected, pool.planes[1, other], 4, INT8, rows[other], slots.tolist(), 0.05)
        there = pool.to(device)
        planes = {f"{own}_scale_plane": scales, f"{other}_scale": 0.05, "key_dtype": INT8, "value_dtype": INT8}
        planes |= {"key_plane": pool.planes[1, "key"], "value_plane": pool.planes[1, "value"], "page_size": 4}
        there_rows = {kind: x.to(device) for kind, x in rows.items()}
        store_kv(StoreKV(there.buffer, **there_rows, slots=slots.to(device), **planes))
        check_bytes(pool.buffer, there.buffer, expected, touched)


@on_each_device
def test_the_smallest_of_all_planes_bounds_the_slots(device):
    pool = make("page_major", 4, 1, (8, 8), INT8)
    pool.planes[1, "value_scale"][4] = 3
    rows, slots = torch.randn(3, 1, 8), torch.tensor([11, 12, 2])
    without, there = pool.to(device), pool.to(device)
    for p, s in ((there, slots), (without, torch.tensor([11, -1, 2]))):
        x = rows.to(device)
        store_kv(StoreKV(p.buffer, x, x, s.to(device), **planes_of(p), page_size=4, key_dtype=INT8, value_dtype=INT8))
    assert torch.equal(there.buffer, without.buffer)
    x = LoadKV(there.buffer, slots.to(device), pool.planes[1, "value"], 4, 1, 8, INT8, out_dtype=F32)
    x = load_kv(dataclasses.replace(x, scale_plane=pool.planes[1, "value_scale"]))
    assert x[0].any() and not x[1].any() and x[2].any()


@on_each_device
@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("out_dtype", [F32, F16])
def test_load_multiplies_by_each_rows_scale_and_gives_zeros_for_slots_that_do_not_exist(
    device, dtype, order, out_dtype
):
    """Slots that are not stored hold NaN, and a row that has no scale reads as NaN."""
    pool = make(order, 3, 2, (20, 12), dtype)
    pool.buffer.fill_(NAN_BYTE)
    plane, scales, rows = pool.planes[1, "key"], pool.planes[1, "key_scale"], torch.randn(5, 2, 20) * 3
    rows[4, 1, 7] = torch.inf
    oracle.store(pool.buffer, plane, 3, dtype, rows, [4, 9, 0, 11, 7], scale_plane=scales)
    slots = [4, -1, 0, pool.num_slots, 7]
    stored = torch.from_numpy(oracle.load(pool.buffer, plane, 3, dtype, [4, 0, 7], 2, 20)).float()
    factor = torch.from_numpy(oracle.load(pool.buffer, scales, 3, F32, [4, 0, 7], 2, 1)).float()
    there = pool.to(device)
    a = LoadKV(there.buffer, torch.tensor(slots, device=device), plane, 3, 2, 20, dtype, out_dtype=out_dtype)
    got = load_kv(dataclasses.replace(a, scale_plane=scales)).cpu()
    torch.testing.assert_close(got[[0, 2, 4]], (stored * factor).to(out_dtype), rtol=0, atol=0, equal_nan=True)
    assert got[4, 1].isnan().all() and got[4, 0].isfinite().all()
    assert not got[[1, 3]].any()


@on_each_device
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dims", [(24, 24, 24), (24, 12, 20)], ids=["whole", "partial"])
@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("rows", [F32, F16])
def test_rope_store_is_bit_equal_to_rotating_casting_and_storing(device, interleaved, dims, dtype, rows):
    pool = make("page_major", 4, 2, (24, dims[2]), dtype, num_pages=15)
    case = rope_case(40, (5, 2, 2), dims, rows=(rows,) * 3, interleaved=interleaved, num_pages=15)
    case = dataclasses.replace(case, buffer=pool.buffer, **planes_of(pool), key_dtype=dtype, value_dtype=dtype)
    case.key[3, 0], case.value[4, 1, 2] = 0, torch.nan
    fused, chain = to(case, device), to(case, device)
    query, key = unfused(chain)
    store_kv(chain.store_of(key))
    got = rope_store_kv(fused)
    assert torch.equal(got[0], query)
    assert torch.equal(fused.buffer, chain.buffer)
    assert not torch.equal(fused.buffer.cpu(), case.buffer)


@on_each_device
@pytest.mark.parametrize("layout", [page_major, token_major])
def test_moved_slots_take_their_scales_along(device, layout):
    """Single scales, 4 bytes apart or in entries: the shortest runs there are."""
    pool = PagePool(layout(2, 3, 20, 5, INT8, value_dim=8, scales=True), 4)
    fill_random(pool.buffer)
    src, dst = torch.tensor([7, 0, 19, 3, -1]), torch.tensor([0, 7, 12, -1, 5])
    there = pool.buffer.to(device, copy=True)
    copy_slots(CopySlots(there, src.to(device), dst.to(device), pool.slot_runs.to(device), 5, pool.region))
    kinds = [(layer, kind) for layer in (0, 1) for kind in ("key", "value", "key_scale", "value_scale")]
    owned = {kind: [slot_bytes(pool, *kind, [slot]) for slot in range(20)] for kind in kinds}
    expected, touched = pool.buffer.clone(), set()
    for kind in kinds:
        for s, d in zip(src.tolist()[:3], dst.tolist()[:3], strict=True):
            expected[owned[kind][d]] = pool.buffer[owned[kind][s]]
            touched.update(owned[kind][d])
    check_bytes(pool.buffer, there, expected, touched)


@on_each_device
@pytest.mark.parametrize("query", [F32, F16, pytest.param(BF16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2])
@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 9, 30]], ids=["decode", "mixed"])
def test_attention_equals_dense_attention_over_the_dequantised_rows(device, query, dtype, queries):
    """Scales of unstored slots are NaN. Those of e5m2 are near 1e-5, where float16 has few bits left."""
    case = attention_case(device, [13, 70, 30], queries, dtypes=(query, dtype, dtype), own=True)
    check_attention(case, *attention(case))


@on_each_device
@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.parametrize(
    "options",
    [
        dict(lens=[13, 30, 0, 45], queries=[1, 9, 1, 45], window=17, softcap=5.0, sinks=torch.zeros(4), spare_rows=2),
        dict(lens=[13, 30], queries=[1, 9], order="token_major", page_size=3, dims=(80, 16)),
        dict(lens=[13, 30], queries=[1, 9], order="head_major", page_size=1, heads=(6, 2), dims=(32, 20)),
        dict(lens=[200, 3, 0, 90], queries=1, heads=(4, 1)),  # splits
    ],
    ids=["everything", "token major", "head major", "splits"],
)
def test_attention_with_scales_in_every_form(device, dtype, options):
    case = attention_case(device, **{"dtypes": (F32 if device == "cpu" else BF16, dtype, dtype), **options}, own=True)
    check_attention(case, *attention(case))


@on_each_device
@pytest.mark.parametrize("kind", ["key", "value"])
def test_one_of_key_and_value_may_have_scales(device, kind):
    dtypes = (F32, INT8, F32) if kind == "key" else (F32, F32, INT8)
    case = attention_case(device, [13, 30], [1, 9], dtypes=dtypes)
    own = attention_case(device, [13, 30], [1, 9], dtypes=(F32, INT8, INT8), own=True)
    buffer = torch.cat((case.buffer, own.buffer))
    shift = case.buffer.numel()
    planes = {n: getattr(own, n) for n in (f"{kind}_plane", f"{kind}_scale_plane")}
    planes = {n: [plane[0] + shift, *plane[1:]] for n, plane in planes.items()}
    mixed = dataclasses.replace(case, buffer=buffer, page_table=own.page_table, **planes)
    slots = [int(own.page_table[b, j // 4]) * 4 + j % 4 for b, n in enumerate((13, 30)) for j in range(n)]
    other = "value" if kind == "key" else "key"
    there = buffer.cpu()
    oracle.store(there, getattr(case, f"{other}_plane"), 4, F32, torch.randn(43, 2, 32), slots)
    mixed.buffer.copy_(there)
    check_attention(mixed, *attention(mixed))


@on_each_device
@pytest.mark.parametrize("kind", ["key", "value"])
def test_scales_of_keys_that_the_bias_hides_do_not_leak(device, kind):
    shown = torch.ones(1, 1, 1, 30, dtype=torch.bool)
    shown[..., [3, 17, 29]] = False
    case = attention_case(device, [30], 9, dtypes=(F32, INT8, INT8), own=True, causal=False, bias=shown)
    buffer = case.buffer.cpu()
    for j in (3, 17, 29):
        slot = int(case.page_table[0, j // 4]) * 4 + j % 4
        oracle.store(buffer, getattr(case, f"{kind}_scale_plane"), 4, F32, torch.full((1, 2, 1), torch.nan), [slot])
    case.buffer.copy_(buffer)
    check_attention(case, *attention(case))


@on_each_device
@pytest.mark.parametrize("own", [True, False])
def test_a_nan_key_in_int8_reaches_every_query_that_sees_it_and_no_earlier_one(device, own):
    """By its scale where it has one of its own, else by its code."""
    case = attention_case(device, [40], 40, heads=(1, 1), dtypes=(F32, INT8, INT8), own=own, scales=(0.02, 0.02))
    if own:
        case = dataclasses.replace(case, key_scale=1.0, value_scale=1.0)
    buffer = case.buffer.cpu()
    slot = int(case.page_table[0, 5]) * 4 + 2  # key 22
    row = torch.ones(1, 1, 32)
    row[0, 0, 9] = torch.nan
    oracle.store(buffer, case.key_plane, 4, INT8, row, [slot], 0.02, scale_plane=case.key_scale_plane)
    case.buffer.copy_(buffer)
    out, _ = attention(case)
    assert out[22:].isnan().all()
    assert out[:22].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [INT8, E4M3, E5M2])
@pytest.mark.parametrize("queries", [1, [3, 200, 64]])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_stored_by_the_kernel_and_attended_at_the_sizes_of_models(dtype, queries, head_dim):
    case = attention_case(
        "cuda", [700, 333, 90], queries, dtypes=(BF16, dtype, dtype), heads=(8, 2), dims=(head_dim,) * 2, page_size=16,
        own=True,
    )  # fmt: skip
    slots = [int(case.page_table[b, j // 16]) * 16 + j % 16 for b, n in enumerate((700, 333, 90)) for j in range(n)]
    key, value = torch.randn(2, len(slots), 2, head_dim, device="cuda", dtype=BF16)
    case.buffer.fill_(NAN_BYTE)
    planes = {n: getattr(case, n) for n in ("key_plane", "value_plane", "key_scale_plane", "value_scale_plane")}
    index = torch.tensor(slots, device="cuda")
    store_kv(StoreKV(case.buffer, key, value, index, **planes, page_size=16, key_dtype=dtype, value_dtype=dtype))
    check_attention(case, *attention(case))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [0, 512])
def test_store_and_attention_replay_in_a_cuda_graph_and_never_synchronise(width):
    """Captured once, replayed with other rows and slots; with and without splits."""
    case = attention_case("cuda", [13, 30, 5], 1, dtypes=(BF16, E4M3, INT8), own=True, num_pages=20, width=width)
    assert (plan(case).splits > 1) == (width > 0)
    key, value = torch.randn(2, 3, 2, 32, device="cuda", dtype=BF16)
    planes = {n: getattr(case, n) for n in ("key_plane", "value_plane", "key_scale_plane", "value_scale_plane")}
    slots = torch.full((3,), -1, device="cuda")
    store = StoreKV(case.buffer, key, value, slots, **planes, page_size=4, key_dtype=E4M3, value_dtype=INT8)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles
        store_kv(store)
        attention(case)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        store_kv(store)
        attention(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kv(store)
        out, lse = attention(case)
    for _ in range(3):
        key.normal_()
        value.normal_()
        last = case.seq_lens - 1
        page = case.page_table.gather(1, (last // 4).long()[:, None])[:, 0]
        slots.copy_(page * 4 + last % 4)
        eager = dataclasses.replace(store, buffer=case.buffer.clone())
        graph.replay()
        store_kv(eager)
        assert torch.equal(case.buffer, eager.buffer)
        check_attention(case, out, lse)
        case.seq_lens.sub_(1)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [INT8, E4M3])
def test_scales_past_2_to_the_32_bytes(dtype):
    """2050 pages of 2 MiB, keys, values and scales at the end of the last ones."""
    size, block, count = 1 << 21, 16 * 8 * 128, 2050
    offsets = {"key": size - 3 * block, "value": size - 2 * block, "key_scale": size - 1024, "value_scale": size - 512}
    strides = {kind: (1024, 128) if "scale" not in kind else (4, 64) for kind in offsets}
    planes = {f"{kind}_plane": [at, size, *strides[kind], count] for kind, at in offsets.items()}
    buffer = torch.full((count * size,), NAN_BYTE, dtype=torch.uint8, device="cuda")
    table = torch.tensor([[2049, 2047, 2048]], device="cuda")
    slots = torch.tensor([int(table[0, j // 16]) * 16 + j % 16 for j in range(40)], device="cuda")
    key, value = torch.randn(2, 40, 8, 128, device="cuda", dtype=BF16)
    store = StoreKV(buffer, key, value, slots, **planes, page_size=16, key_dtype=dtype, value_dtype=dtype)
    store_kv(store)
    compact = torch.full((3 * size,), NAN_BYTE, dtype=torch.uint8)
    near = {name: [*plane[:4], 3] for name, plane in planes.items()}
    rows = {"key": key.cpu(), "value": value.cpu(), "slots": slots.cpu() - 2047 * 16}
    store_rows(dataclasses.replace(store, buffer=compact, **rows, **near))
    assert torch.equal(buffer[2047 * size :].cpu(), compact)
    assert (buffer[: 2047 * size] == NAN_BYTE).all()
    query, lens = torch.randn(1, 32, 128, device="cuda", dtype=BF16), torch.tensor([40], device="cuda")
    case = Attention(
        buffer, query, table, lens, None, **planes, page_size=16, kv_heads=8, value_dim=128, key_dtype=dtype,
        value_dtype=dtype, softmax_scale=0.1, return_lse=True,
    )  # fmt: skip
    here = dataclasses.replace(case, buffer=compact, page_table=table - 2047, **near)
    check_attention(here, *attention(case))
