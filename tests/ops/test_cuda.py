"""The operators through the dispatcher on a GPU: implementations, checks by environment variable, memory, graphs."""

import dataclasses
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from kernels.cases import attention_case, check_attention, moved_with_strides
from kernels.test_attention import CASES
from torch.utils._pytree import tree_leaves, tree_map

import pm_ops
from pm_ops.ops._state import state_view
from pm_ops.testing import fill_random, sample_inputs

from .test_attention import call, call_out
from .test_registration import GATED_DELTA, MUTATING, READING, RETURNING, SELECTIVE, op_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted({*MUTATING, *READING, *RETURNING}))
def test_cpu_and_cuda_kernels_agree_on_every_sample(name):
    """The buffer byte for byte, except after sums without a fixed order, a norm's or a state's; numbers to rounding."""
    for sample in sample_inputs(name):
        args, kwargs = tree_map(lambda x: moved_with_strides(x, "cuda") if isinstance(x, torch.Tensor) else x, sample)
        expected, got = op_of(name)(*sample[0], **sample[1]), op_of(name)(*args, **kwargs)
        for e, g in zip(tree_leaves(expected), tree_leaves(got), strict=True):
            if isinstance(e, torch.Tensor):
                assert e.shape == g.shape and e.dtype == g.dtype and e.stride() == g.stride()
                torch.testing.assert_close(g.cpu().float(), e.float(), rtol=2e-2, atol=2e-2, equal_nan=True)
        if name in MUTATING and kwargs.get("q_weight") is None:
            written = [a.alias_info is not None for a in op_of(name)._schema.arguments].index(True)
            buffers = sample[0][written], args[written].cpu()
            if name in (*SELECTIVE, *GATED_DELTA):
                expected, got = (states_of(name, sample[0], buffer) for buffer in buffers)
                torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
                expected.copy_(got)  # and every other byte
            assert torch.equal(*buffers)


def states_of(name, args, buffer):
    """The states that a call of Mamba-2's or of the gated delta rule's is about, in another buffer."""
    given = dict(zip([a.name for a in op_of(name)._schema.arguments], args, strict=False))
    rows, columns = ("x", "B") if name in SELECTIVE else ("value", "key")
    shape = (*given[rows].shape[-2:], given[columns].shape[-1])
    return state_view(buffer, given["state_plane"], shape, given["state_dtype"])


@pytest.mark.parametrize("name", ["decode, prefill, extend and nothing in one batch", "everything at once"])
@pytest.mark.parametrize("impl", ["auto", "triton", "reference"])
def test_every_implementation_is_reachable_and_right(name, impl):
    case = attention_case("cuda", **{"dtypes": (torch.bfloat16,) * 3, **CASES[name]})
    check_attention(case, *call(case, impl=impl))


@pytest.mark.parametrize("impl", ["auto", "triton", "reference"])
def test_the_output_goes_where_it_is_wanted(impl):
    case = attention_case("cuda", [300, 64], [200, 64], dtypes=(torch.bfloat16,) * 3, dims=(64, 64), spare_rows=1)
    expected, _ = call(case, impl=impl)
    out = torch.full_like(expected, torch.nan)
    call_out(dataclasses.replace(case, impl=impl), out)
    assert torch.equal(out, expected)


BAD_CALLS = {
    "a slot past the end": "pm_ops.store_kv(pool, 0, rows, rows, on_gpu([3, 16]))",
    "a slot twice": "pm_ops.store_kv(pool, 0, rows, rows, on_gpu([3, 3]))",
    "a page past the end": "pool.gather([4])",
    "a page id past the pool": "pm_ops.attention(pool, 0, rows[:1], on_gpu([[9]]), on_gpu([2]))",
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_with_checks_on_a_bad_index_is_an_error_at_the_next_synchronisation(name):
    code = f"""
        import torch, pm_ops
        on_gpu = lambda ids: torch.tensor(ids, device="cuda")
        pool = pm_ops.PagePool(pm_ops.page_major(1, 2, 16, 4, torch.float32), 4, "cuda")
        rows = torch.ones(2, 2, 16, device="cuda")
        pm_ops.store_kv(pool, 0, rows, rows, torch.tensor([3, -1], device="cuda"))
        torch.cuda.synchronize()
        print("good calls pass", flush=True)
        {BAD_CALLS[name]}
        torch.cuda.synchronize()
        print("not refused", flush=True)
    """
    environment = {**os.environ, "PM_OPS_CHECKS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert "good calls pass" in result.stdout, result.stderr
    assert "not refused" not in result.stdout and result.returncode != 0


def test_without_checks_a_bad_index_never_writes():
    pool = pm_ops.PagePool(pm_ops.page_major(1, 2, 16, 4, torch.float32), 4, "cuda")
    buffer = torch.zeros(3 * pool.buffer.numel(), dtype=torch.uint8, device="cuda")
    middle = pm_ops.PagePool(pool.layout, 4, buffer=buffer, base=pool.buffer.numel())
    fill_random(buffer)
    before = buffer.clone()
    rows = torch.ones(4, 2, 16, device="cuda")
    slots = torch.tensor([16, -1, 2**31, 2**62], device="cuda")
    pm_ops.store_kv(middle, 0, rows, rows, slots)
    middle.zero(slots // 4)
    middle.scatter(slots // 4, torch.zeros(4, pool.layout.page_bytes, dtype=torch.uint8, device="cuda"))
    middle.copy([0, 1], [4, -1])
    middle.copy_slots([0, 1], [16, -7])
    torch.cuda.synchronize()
    assert torch.equal(buffer, before)


def test_a_compiled_step_allocates_less_than_a_megabyte_beside_a_pool_of_a_gigabyte():
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 16, 16, torch.bfloat16), 2**30 // 4096, "cuda")
    rows = torch.randn(8, 2, 16, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(8, device="cuda")
    table, lengths = torch.zeros(1, 1, dtype=torch.int32, device="cuda"), torch.tensor([8], device="cuda")

    @torch.compile(fullgraph=True)
    def step(rows, slots, table, lengths):
        for layer in range(2):
            pm_ops.store_kv(pool, layer, rows, rows, slots)
            rows = rows + pm_ops.attention(pool, layer, rows, table, lengths)
        return rows

    step(rows, slots, table, lengths)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(rows, slots, table, lengths)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**20
