"""The attention operator's CPU kernel, the specification, against dense float64 attention; and what it refuses."""

import dataclasses

import pytest
import torch
from kernels.cases import attention_case, check_attention
from kernels.test_attention import CASES, MIXED

import pm_ops
from pm_ops.testing import fill_nan, writes_only

BF16 = torch.bfloat16


def call(case, **changes):
    """The registered operator, with a case's arguments."""
    values = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)} | changes
    schema = torch.ops.pm_ops.attention.default._schema.arguments
    positional = [values.pop(a.name) for a in schema if not a.kwarg_only]
    return torch.ops.pm_ops.attention(*positional, **values)


@pytest.mark.parametrize("name", CASES)
def test_the_specification_equals_dense_attention(name):
    case = attention_case("cpu", **CASES[name])
    with writes_only(case.buffer, []):
        check_attention(case, *call(case))


@pytest.mark.parametrize("dtypes", [*MIXED, (BF16, BF16, BF16), (BF16, torch.float32, torch.float8_e4m3fn)], ids=str)
def test_query_key_and_value_may_differ_in_dtype(dtypes):
    case = attention_case("cpu", [13, 30], [1, 9], dtypes=dtypes, scales=(0.25, 0.5))
    check_attention(case, *call(case))


def test_the_pools_faces_defaults_are_causal_decode_at_the_usual_scale():
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.float32), 5)
    fill_nan(pool.buffer)
    rows, slots = torch.randn(2, 6, 2, 8), torch.tensor([8, 9, 10, 11, 16, 17])
    pm_ops.store_kv(pool, 1, rows[0], rows[1], slots)
    query = torch.randn(1, 4, 8)
    out, lse = pm_ops.attention(pool, 1, query, torch.tensor([[2, 4]]), torch.tensor([6]), return_lse=True)
    k, v = (r.repeat_interleave(2, 1) for r in rows)
    logits = torch.einsum("hd,jhd->hj", query[0], k) * 8**-0.5
    assert torch.allclose(out[0], torch.einsum("hj,jhd->hd", logits.softmax(-1), v), atol=1e-6)
    assert torch.allclose(lse[0], logits.logsumexp(-1), atol=1e-6)
    assert torch.equal(pm_ops.attention(pool, 1, query, torch.tensor([[2, 4]]), torch.tensor([6])), out)


def test_a_permutation_of_page_ids_changes_no_bit():
    results = []
    for seed in range(3):
        torch.manual_seed(0)
        case = attention_case("cpu", [13, 30], [1, 9], num_pages=16)
        keys = torch.randperm(16, generator=torch.Generator().manual_seed(seed))
        buffer = torch.full_like(case.buffer, 0xFF)
        size = case.key_plane[1]
        for page in range(16):
            buffer[keys[page] * size : (keys[page] + 1) * size] = case.buffer[page * size : (page + 1) * size]
        table = torch.where(case.page_table < 0, -1, keys[case.page_table.clamp(min=0).long()])
        results.append(call(case, buffer=buffer, page_table=table))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_attention_over_a_prefix_and_a_suffix_merges_to_attention_over_both():
    """Cascade: the shared prefix without causality, the rest with it, sinks in one part only."""
    case = attention_case("cpu", [24, 24], [4, 4], page_size=4, sinks=torch.randn(4))
    whole, whole_lse = call(case)
    prefix = call(case, seq_lens=torch.tensor([8, 8]), causal=False)
    suffix = call(case, page_table=case.page_table[:, 2:], seq_lens=torch.tensor([16, 16]), sinks=None)
    out, lse = pm_ops.merge_attention(*prefix, *suffix)
    assert torch.allclose(out, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-5)


REFUSED = {
    "heads 33 over 2": (lambda c: {"query": torch.zeros(2, 33, 32)}, "33 query heads cannot share 2"),
    "heads 3 over 2": (lambda c: {"query": torch.zeros(2, 3, 32)}, "3 query heads cannot share 2"),
    "integer query": (lambda c: {"query": c.query.int()}, "query must be float32"),
    "a length past the table": (lambda c: {"seq_lens": torch.tensor([13, 33])}, "columns x page_size"),
    "a page past the pool": (lambda c: {"page_table": c.page_table.clamp(min=99)}, "page_table has 99"),
    "a negative page that is read": (lambda c: {"page_table": torch.full_like(c.page_table, -1)}, "negative page ids"),
    "a table of other rows": (lambda c: {"page_table": c.page_table[:1]}, "1 rows for 2 sequences"),
    "uneven queries": (lambda c: {"query": torch.zeros(3, 4, 32)}, "3 query tokens for 2 sequences"),
    "descending starts": (lambda c: {"query_start": torch.tensor([0, 2, 1])}, "cumulative"),
    "starts past the rows": (lambda c: {"query_start": torch.tensor([0, 1, 3])}, "query_start has 3"),
    "too few starts": (lambda c: {"query_start": torch.tensor([0, 2])}, "query_start has 2 entries"),
    "sinks of other heads": (lambda c: {"sinks": torch.zeros(2)}, r"sinks must be floating point \[4\]"),
    "slopes of other heads": (lambda c: {"alibi_slopes": torch.zeros(5)}, "alibi_slopes must be"),
    "a flat bias": (lambda c: {"bias": torch.zeros(2, 30)}, "bias must be bool or floating point"),
    "a bias of other sequences": (lambda c: {"bias": torch.zeros(3, 1, 1, 30)}, "1 or 2 sequences"),
    "an integer bias": (lambda c: {"bias": torch.zeros(2, 1, 1, 30, dtype=torch.int32)}, "bias must be bool"),
    "a negative window": (lambda c: {"window": -1}, "window=-1"),
    "a negative cap": (lambda c: {"softcap": -1.0}, "softcap=-1.0"),
    "a zero scale": (lambda c: {"key_scale": 0.0}, "key_scale=0.0"),
    "an unknown implementation": (lambda c: {"impl": "fast"}, "supported: auto, triton, reference"),
    "int8 planes": (lambda c: {"key_dtype": torch.int8}, "int8 is not supported"),
    "dims the plane has not": (lambda c: {"value_dim": 4096}, "ends at byte"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_what_came_and_what_is_supported(name):
    case = attention_case("cpu", [13, 30], 1)
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(case, **changes(case))


def test_asking_for_triton_on_the_cpu_never_falls_back():
    case = attention_case("cpu", [13, 30], 1)
    with pytest.raises(RuntimeError, match="needs CUDA tensors"):
        call(case, impl="triton")
