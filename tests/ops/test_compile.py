"""The operators inside torch.compile: order, clones of the pool, recompiles, first calls."""

import subprocess
import sys
import textwrap

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._inductor.utils import run_and_get_code

import pm_ops
from pm_ops.testing import fill_nan


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_pool(dtype=torch.float32, page_size=4, pages=5, layers=2):
    pool = pm_ops.PagePool(pm_ops.page_major(layers, 2, 8, page_size, dtype), pages)
    fill_nan(pool.buffer)
    return pool


def decode_twice(pool, key, value, slots, query, table, lengths):
    """store, attend, overwrite the same slots, attend: any reordering changes one of the results."""
    pm_ops.store_kv(pool, 0, key, value, slots)
    first = pm_ops.attention(pool, 0, query, table, lengths)
    pm_ops.store_kv(pool, 0, key * 2, value - 1, slots)
    return first, pm_ops.attention(pool, 0, query, table, lengths), pm_ops.load_kv(pool, 0, slots)


def decode_inputs(tokens=6):
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    slots = torch.tensor([12, 13, 14, 15, 4, 5])[:tokens]
    rows = [torch.randn(tokens, 2, 8) for _ in range(2)]
    return *rows, slots, torch.randn(1, 4, 8), table, torch.tensor([tokens], dtype=torch.int32)


def test_inductor_keeps_the_order_of_stores_and_reads_and_never_clones_the_pool():
    eager_pool, pool = make_pool(pages=4099), make_pool(pages=4099)  # a size nothing else in the graph has
    inputs = decode_inputs()
    expected = decode_twice(eager_pool, *inputs)
    got, (code,) = run_and_get_code(torch.compile(decode_twice, fullgraph=True), pool, *inputs)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert torch.equal(pool.buffer, eager_pool.buffer)
    assert code.count("pm_ops.store_kv.default") >= 2
    assert f"empty_strided_cpu(({pool.buffer.numel()}" not in code and "clone" not in code.split("def call", 1)[1]


def test_planes_of_different_dtypes_in_one_buffer_compile():
    planes = (
        pm_ops.Plane(0, "key", 0, 32, 16, (2, 8), torch.bfloat16),
        pm_ops.Plane(0, "value", 128, 64, 32, (2, 8), torch.float32),
    )
    pool = pm_ops.PagePool(pm_ops.PageLayout(4, 384, planes), 3)

    def step(key, value, slots):
        pm_ops.store_kv(pool, 0, key, value, slots)
        return pm_ops.load_kv(pool, 0, slots, "key"), pm_ops.load_kv(pool, 0, slots, "value")

    key, value, slots = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.tensor([7, 0, 10])
    got = torch.compile(step, fullgraph=True)(key, value, slots)
    assert torch.equal(got[0], key.bfloat16()) and torch.equal(got[1], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_planes_are_read_as_views_before_and_after_a_store_and_the_pool_is_not_cloned(dtype):
    """Of layers that differ, and at the first use of the layout."""
    planes = (
        pm_ops.Plane(0, "ssm", 0, None, 24, (2, 3, 2), torch.float32),
        pm_ops.Plane(2, "key", 64, 16 * dtype.itemsize, 8 * dtype.itemsize, (2, 8), dtype),
    )

    def pool_of_numbers():
        pool = pm_ops.PagePool(pm_ops.PageLayout(4, 512, planes), 4099, base=16)
        pool.buffer.copy_(torch.arange(pool.buffer.numel()) % 60)
        return pool

    def step(pool, rows, slots):
        view = pool.view(2, "key")
        before = view[2, 1].float() + 1
        pm_ops.store_kv(pool, 2, rows, None, slots)
        return before, view[2, 1].float() + 2, pool.view(0, "ssm")[3] + 1, pool.pages[5] + 1

    pool, rows, slots = pool_of_numbers(), torch.ones(2, 2, 8), torch.tensor([9, 4])
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), pool, rows, slots)
    eager_pool = pool_of_numbers()
    expected = step(eager_pool, rows, slots)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert not torch.equal(got[0] + 1, got[1]) and torch.equal(pool.buffer, eager_pool.buffer)
    assert "4099" in code and f"empty_strided_cpu(({4099 * 512}" not in code
    assert f"empty_strided_cpu(({pool.buffer.numel()}" not in code and "clone" not in code.split("def call", 1)[1]


def test_torch_refuses_to_write_through_a_view_in_compiled_code():
    pool = make_pool()
    before = pool.buffer.clone()
    with pytest.raises(RuntimeError, match="mutation on a view chain .* an as_strided"):
        torch.compile(lambda pool: pool.view(0, "key")[1].zero_(), fullgraph=True, backend="aot_eager")(pool)
    assert torch.equal(pool.buffer, before)


def test_token_counts_1_2_3_7_8_16_take_at_most_two_graphs():
    pool, reference = make_pool(pages=6), make_pool(pages=6)
    counter = CompileCounter()

    def step(pool, key, slots):
        pm_ops.store_kv(pool, 0, key, key, slots)
        return pm_ops.load_kv(pool, 0, slots)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for tokens in (1, 2, 3, 7, 8, 16):
        key, slots = torch.randn(tokens, 2, 8), torch.randperm(24)[:tokens]
        assert torch.equal(compiled(pool, key, slots), step(reference, key, slots))
    assert torch.equal(pool.buffer, reference.buffer) and counter.frame_count <= 2


def test_the_layer_is_an_int_of_the_graph_not_a_graph_of_its_own():
    """32 layers through one function: two graphs, static and dynamic, not 32."""
    pool = make_pool(layers=32)
    counter = CompileCounter()

    def step(offset, key, slots):
        plane = [offset, pool.page_stride, 64, 32, pool.num_pages]
        torch.ops.pm_ops.store_kv(pool.buffer, key, None, slots, plane, None, 4, torch.float32, None)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    key, slots = torch.randn(3, 2, 8), torch.tensor([1, 9, 4])
    for layer in range(32):
        compiled(pool.layout.plane(layer, "key").offset, key, slots)
        assert torch.equal(pm_ops.load_kv(pool, layer, slots), key)
    assert counter.frame_count <= 2


def test_the_layer_stays_a_number_through_the_face_too():
    pool = make_pool(layers=32)
    counter = CompileCounter()

    def step(layer, key, slots, query, table, lengths):
        pm_ops.store_kv(pool, layer, key, key, slots)
        return pm_ops.attention(pool, layer, query, table, lengths)

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    key, slots, query = torch.randn(4, 2, 8), torch.tensor([8, 9, 10, 11]), torch.randn(1, 4, 8)
    for layer in range(32):
        compiled(layer, key + layer, slots, query, torch.tensor([[2]]), torch.tensor([4]))
        assert torch.equal(pm_ops.load_kv(pool, layer, slots), key + layer)
    assert counter.frame_count <= 2


def test_unbacked_token_counts_compile():
    """Slots whose number only the data knows (a nonzero) must not need a guard."""
    pool = make_pool()

    @torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    def run(keep):
        def step(keep):
            slots = keep.nonzero().squeeze(1)
            return pm_ops.load_kv(pool, 0, slots)

        return torch.compile(step, fullgraph=True, backend="aot_eager")(keep)

    keep = torch.tensor([True, False, True, True])
    assert torch.equal(run(keep).view(torch.int32), pm_ops.load_kv(pool, 0, torch.tensor([0, 2, 3])).view(torch.int32))


def test_a_first_call_may_be_a_compiled_one():
    """Nothing may depend on an eager call having come before."""
    code = """
        import torch, pm_ops
        pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.float32), 4)

        @torch.compile(fullgraph=True)
        def step(key, slots, query, table, lengths):
            pm_ops.store_kv(pool, 1, key, key, slots)
            return pm_ops.attention(pool, 1, query, table, lengths)

        key = torch.ones(4, 2, 8)
        out = step(key, torch.arange(4), torch.randn(1, 4, 8), torch.tensor([[0]]), torch.tensor([4]))
        assert torch.allclose(out, torch.ones(1, 4, 8))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
