"""A scale for each token and head, through the pool's face: the specification, what it promises, what is refused."""

import dataclasses

import oracle
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

import pm_ops
from pm_ops.ops.store import StoreKV
from pm_ops.testing import fill_nan, fill_random, scaled_pools, slot_bytes, writes_only

INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
POOLS = list(scaled_pools())
KINDS = ("key", "value", "key_scale", "value_scale")
STEP = {INT8: 1 / 254, E4M3: 1 / 16, E5M2: 1 / 8}
"""Half a step of the dtype at its largest number, relative to it."""


@pytest.fixture(params=range(len(POOLS)), ids=lambda i: f"{POOLS[i].layout.name}-{i}")
def pool(request):
    pool = POOLS[request.param]
    fill_random(pool.buffer, seed=request.param)
    return pool


def rows_for(pool, tokens, dtype=torch.float32):
    """Rows of unlike sizes; a row of zeros, one of subnormals, one with NaN and one with an infinity among them."""
    shapes = [pool.layout.plane(1, kind).shape for kind in ("key", "value")]
    rows = [torch.randn(tokens, *shape) * torch.logspace(-3, 3, tokens)[:, None, None] for shape in shapes]
    for x in rows:
        x[0, 0], x[0, 1], x[1, 0, 2], x[2, 1, 3] = 0.0, 1e-42, torch.nan, -torch.inf
    return [x.to(dtype) for x in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_stored_are_the_oracles_elements_and_scales_and_no_other_byte_changes(pool, dtype, index):
    rows, slots = dict(zip(("key", "value"), rows_for(pool, 6, dtype), strict=True)), [7, -1, 3, 0, 14]
    expected = pool.buffer.clone()
    for kind, x in rows.items():
        plane, scales = pool.geometry(1, kind), pool.geometry(1, f"{kind}_scale")
        element = pool.layout.plane(1, kind).dtype
        oracle.store(expected, plane, pool.page_size, element, x, slots, scale_plane=scales)
    owned = [b for kind in KINDS for b in slot_bytes(pool, 1, kind, slots)]
    with writes_only(pool.buffer, owned):
        pm_ops.store_kv(pool, 1, rows["key"], rows["value"], torch.tensor(slots, dtype=index))
    assert torch.equal(pool.buffer, expected)


def test_what_is_read_back_is_within_half_a_step_of_each_rows_largest(pool):
    """Whatever its size; a row with NaN or an infinity reads as NaN, and a skipped slot as zeros."""
    key, value = rows_for(pool, 12)
    slots = torch.randperm(pool.num_slots)[:12]
    pm_ops.store_kv(pool, 1, key, value, slots)
    for kind, x in (("key", key), ("value", value)):
        back = pm_ops.load_kv(pool, 1, slots, kind, out_dtype=torch.float32)
        size = x.abs().amax(-1, keepdim=True)
        good = size.isfinite().expand_as(x) & (size > 1e-36)
        error = ((back - x).abs() / size)[good]
        assert error.max() <= STEP[pool.layout.plane(1, kind).dtype] * 1.0001
        assert back[~size.isfinite().expand_as(x)].isnan().all()
        assert not back[0, 0].any() and back[0, 1].isfinite().all()
        raw = pm_ops.load_kv(pool, 1, slots, kind)
        scales = pool.view(1, f"{kind}_scale")[slots // pool.page_size, slots % pool.page_size]
        torch.testing.assert_close(back, raw.float() * scales, rtol=0, atol=0, equal_nan=True)
        assert not pm_ops.load_kv(pool, 1, torch.tensor([-1]), kind, out_dtype=torch.bfloat16).any()


def test_the_scale_is_the_largest_magnitude_over_the_dtypes_largest_number():
    for dtype, limit in ((INT8, 127), (E4M3, 448), (E5M2, 57344)):
        pool = pm_ops.PagePool(pm_ops.page_major(1, 3, 4, 2, dtype, scales=True), 1)
        key = torch.tensor([[[1.0, -limit, 2, 0], [0, 0, 0, 0], [0, 2 * limit, -limit, 0.0]]])
        pm_ops.store_kv(pool, 0, key, None, torch.tensor([1]))
        assert pool.view(0, "key_scale")[0, 1].flatten().tolist() == [1.0, 1.0, 2.0]
        assert pool.view(0, "key")[0, 1].float()[2].tolist() == [0, limit, -limit / 2 if dtype != INT8 else -64, 0]


def test_key_alone_and_value_alone_leave_the_others_scales(pool):
    key, value = rows_for(pool, 3)
    slots = torch.tensor([5, 2])
    for rows, kind in (((key, None), "key"), ((None, value), "value")):
        owned = [b for k in (kind, f"{kind}_scale") for b in slot_bytes(pool, 1, k, slots.tolist())]
        with writes_only(pool.buffer, owned):
            pm_ops.store_kv(pool, 1, *rows, slots)


def test_a_layout_may_have_scales_for_the_key_alone_or_in_some_layers():
    planes = (
        pm_ops.Plane(0, "key", 0, 16, 16, (1, 16), E4M3),
        pm_ops.Plane(0, "value", 64, 32, 32, (1, 16), torch.float16),
        pm_ops.Plane(0, "key_scale", 192, 4, 4, (1, 1), torch.float32),
    )
    mixed = pm_ops.page_major(3, 1, 16, 4, [torch.float16, INT8, INT8], scales=True)
    for layout, layers in ((pm_ops.PageLayout(4, 208, planes), 1), (mixed, 3)):
        pool = pm_ops.PagePool(layout, 2)
        key, value = torch.randn(2, 6, 1, 16)
        slots, query = torch.arange(6), torch.randn(1, 1, 16)
        for layer in range(layers):
            pm_ops.store_kv(pool, layer, key, value, slots)
            out = pm_ops.attention(pool, layer, query, torch.tensor([[0, 1]]), torch.tensor([6]))
            expected = torch.softmax(query[:, 0] @ key[:, 0].T / 4, -1) @ value[:, 0]
            torch.testing.assert_close(out[:, 0], expected, rtol=0, atol=0.1)


def test_attention_over_a_pool_of_nan_equals_attention_over_what_load_kv_gives(pool):
    """Nothing of an unstored slot leaks, of its scale neither."""
    fill_nan(pool.buffer)
    table = torch.tensor([[3, 1], [4, -1]])
    lengths = torch.tensor([pool.page_size + 2, 2])
    heads, dim = pool.layout.plane(1, "key").shape
    for b, n in enumerate(lengths.tolist()):
        slots = torch.tensor(
            [int(table[b, j // pool.page_size]) * pool.page_size + j % pool.page_size for j in range(n)]
        )
        key, value = (torch.randn(n, *pool.layout.plane(1, kind).shape) * 3 for kind in ("key", "value"))
        pm_ops.store_kv(pool, 1, key, value, slots)
        query = torch.randn(2, 2 * heads, dim)
        out = pm_ops.attention(pool, 1, query, table[b : b + 1], lengths[b : b + 1])
        k, v = (
            pm_ops.load_kv(pool, 1, slots, kind, out_dtype=torch.float32).repeat_interleave(2, 1)
            for kind in ("key", "value")
        )
        seen = torch.ones(2, n, dtype=torch.bool).tril(n - 2)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), seen
        )
        torch.testing.assert_close(out, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_the_rotated_key_is_stored_as_store_kv_stores_it(pool):
    (heads, dim), (_, value_dim) = (pool.layout.plane(1, kind).shape for kind in ("key", "value"))
    query, key, value = torch.randn(5, 4, dim), torch.randn(5, heads, dim), torch.randn(5, heads, value_dim)
    table, slots, positions = torch.randn(9, 4), torch.tensor([7, 2, -1, 0]), torch.arange(5)
    before = pool.buffer.clone()
    _, turned = pm_ops.rope_store_kv(pool, 1, query, key, value, positions, table, slots, return_key=True)
    fused = pool.buffer.clone()
    pool.buffer.copy_(before)
    pm_ops.store_kv(pool, 1, turned, value, slots)
    assert torch.equal(pool.buffer, fused) and not torch.equal(fused, before)


def test_a_moved_token_reads_as_before(pool):
    """A quantised cache whose scales stay behind is silently wrong after a move."""
    fill_nan(pool.buffer)
    key, value = (torch.randn(3, *pool.layout.plane(0, kind).shape) for kind in ("key", "value"))
    src, dst = torch.tensor([4, 1, 9]), torch.tensor([1, 13, 4])
    for layer in (0, 1):
        pm_ops.store_kv(pool, layer, key * (layer + 1), value * 100, src)
    before = [pm_ops.load_kv(pool, la, src, k, out_dtype=torch.float32) for la in (0, 1) for k in ("key", "value")]
    owned = [b for la in (0, 1) for kind in KINDS for b in slot_bytes(pool, la, kind, dst.tolist())]
    with writes_only(pool.buffer, owned):
        pool.copy_slots(src, dst)
    after = [pm_ops.load_kv(pool, la, dst, k, out_dtype=torch.float32) for la in (0, 1) for k in ("key", "value")]
    assert all(torch.equal(b, a) and a.isfinite().all() for b, a in zip(before, after, strict=True))
    moved = pool.gather([0, 1, 2, 3, 4])
    fill_nan(pool.buffer)
    pool.scatter([0, 1, 2, 3, 4], moved)
    again = [pm_ops.load_kv(pool, la, dst, k, out_dtype=torch.float32) for la in (0, 1) for k in ("key", "value")]
    assert all(torch.equal(b, a) for b, a in zip(before, again, strict=True))


def test_int8_by_one_scale_keeps_nan_in_a_code_of_its_own():
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 4, 4, INT8), 1)
    slots = torch.tensor([1, 2])
    key = torch.tensor([[[1.0, 2.5, -1e30, torch.inf]], [[1.0, torch.nan, 0.0, 0.3]]])
    value = torch.ones(2, 1, 4)
    for scale in (0.5, torch.tensor(0.5)):
        pm_ops.store_kv(pool, 0, key, value, slots, key_scale=scale, value_scale=scale)
        assert pm_ops.load_kv(pool, 0, slots).flatten().tolist() == [2, 5, -127, 127, 2, -128, 0, 1]
        back = pm_ops.load_kv(pool, 0, slots, scale=scale, out_dtype=torch.float32).flatten()
        assert back.isnan().tolist() == [False] * 5 + [True] + [False] * 2
        assert back[:4].tolist() == [1, 2.5, -63.5, 63.5]
        query, where = torch.ones(2, 1, 4), (torch.tensor([[0]]), torch.tensor([3]))
        fill = torch.zeros(1, 1, 4)
        pm_ops.store_kv(pool, 0, fill, fill, torch.tensor([0]), key_scale=scale, value_scale=scale)
        out = pm_ops.attention(pool, 0, query, *where, key_scale=scale, value_scale=scale)
        assert out[0].isfinite().all() and out[1].isnan().all()


def test_compiled_it_is_one_graph_for_all_layers_and_never_clones_the_pool():
    layout = pm_ops.page_major(32, 2, 8, 4, INT8, scales=True)
    pool, eager = pm_ops.PagePool(layout, 4099), pm_ops.PagePool(layout, 4099)
    counter = CompileCounter()

    def step(pool, layer, key, slots, query, table, lengths):
        pm_ops.store_kv(pool, layer, key, key, slots)
        first = pm_ops.attention(pool, layer, query, table, lengths)
        pm_ops.store_kv(pool, layer, key * 2, key, slots)
        return first + pm_ops.attention(pool, layer, query, table, lengths)

    inputs = torch.tensor([8, 9, 10, 11]), torch.randn(1, 4, 8), torch.tensor([[2]]), torch.tensor([4])
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for layer in range(32):
        key = torch.randn(4, 2, 8)
        assert torch.equal(compiled(pool, layer, key, *inputs), step(eager, layer, key, *inputs))
    assert torch.equal(pool.buffer, eager.buffer) and counter.frame_count <= 2
    torch._dynamo.reset()
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), pool, 1, key, *inputs)
    assert torch.equal(got, step(eager, 1, key, *inputs)) and torch.equal(pool.buffer, eager.buffer)
    assert f"empty_strided_cpu(({pool.buffer.numel()}" not in code and "clone" not in code.split("def call", 1)[1]


def store(pool, **options):
    key, slots = torch.ones(2, 2, 8), torch.tensor([0, 1])
    pm_ops.store_kv(pool, 1, key, key, slots, **options)


def raw_store(pool, **options):
    planes = {f"{kind}_plane": pool.geometry(1, kind) for kind in KINDS}
    rows = torch.ones(2, 2, 8)
    call = StoreKV(
        pool.buffer, rows, rows, torch.tensor([0, 1]), **planes, page_size=4, key_dtype=INT8, value_dtype=INT8
    )
    values = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)} | options
    torch.ops.pm_ops.store_kv(**values)


REFUSED = {
    "a scale beside scales": (lambda p: store(p, key_scale=0.5), "key_scale and key_scale_plane were both given"),
    "a tensor beside scales": (
        lambda p: store(p, value_scale=torch.tensor(0.5)),
        "value_scale and value_scale_plane were both given",
    ),
    "a load's scale beside scales": (
        lambda p: pm_ops.load_kv(p, 1, torch.tensor([0]), scale=0.5, out_dtype=torch.float32),
        "scale and scale_plane were both given",
    ),
    "an attention's scale beside scales": (
        lambda p: pm_ops.attention(p, 1, torch.ones(1, 2, 8), torch.tensor([[0]]), torch.tensor([1]), key_scale=2.0),
        "key_scale and key_scale_plane were both given",
    ),
    "scaled bits": (
        lambda p: torch.ops.pm_ops.load_kv(
            p.buffer, torch.tensor([0]), p.geometry(1, "key"), 4, 2, 8, INT8, scale_plane=p.geometry(1, "key_scale")
        ),
        "needs out_dtype",
    ),
    "a scale of another dtype": (
        lambda p: raw_store(p, key_scale_plane=None, key_scale_tensor=torch.ones((), dtype=torch.float64)),
        "key_scale, as a tensor, must be one float32 element, got float64",
    ),
    "int8 without a scale": (lambda p: raw_store(p, key_scale_plane=None), "int8 needs scales: pass key_scale"),
    "int8 loaded without a scale": (
        lambda p: torch.ops.pm_ops.load_kv(
            p.buffer, torch.tensor([0]), p.geometry(1, "key"), 4, 2, 8, INT8, out_dtype=torch.float32
        ),
        "int8 needs scales",
    ),
    "scales of wider planes": (
        lambda p: raw_store(p, key=torch.ones(2, 2, 4), key_dtype=torch.float16),
        "key_scale_plane goes with a plane of float8_e4m3fn, float8_e5m2, int8; got float16",
    ),
    "scales without rows": (
        lambda p: raw_store(p, value=None, value_plane=None, value_dtype=None),
        "value_scale_plane goes with .* got no rows",
    ),
    "scales that leave the buffer": (
        lambda p: raw_store(p, key_scale_plane=[p.buffer.numel(), *p.geometry(1, "key_scale")[1:]]),
        "key_scale_plane .* does not hold pages",
    ),
    "scales off their alignment": (
        lambda p: raw_store(p, value_scale_plane=[2, *p.geometry(1, "value_scale")[1:]]),
        "multiples of 4",
    ),
    "fewer pages of scales": (
        lambda p: raw_store(p, slots=torch.tensor([0, 9]), key_scale_plane=[*p.geometry(1, "key_scale")[:4], 2]),
        "has 9, but there are 8 slots",
    ),
    "int8 rows": (lambda p: raw_store(p, key=torch.ones(2, 2, 8, dtype=INT8)), "must be rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_before_any_byte_is_written(case):
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, INT8, scales=True), 5)
    fill_random(pool.buffer)
    call, message = REFUSED[case]
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match=message):
        call(pool)
