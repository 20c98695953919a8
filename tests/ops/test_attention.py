"""The attention operator's CPU kernel, the specification, against dense float64 attention; and what it refuses."""

import dataclasses

import pytest
import torch
from kernels.cases import attention_case, check_attention
from kernels.test_attention import CASES, MIXED
from torch import Tensor

import pm_ops
from pm_ops.ops.attention import BATCH_INVARIANT_KEYS
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
    into = torch.full_like(out, torch.nan)
    assert pm_ops.attention(pool, 1, query, torch.tensor([[2, 4]]), torch.tensor([6]), out=into) is into
    assert torch.equal(into, out)
    with pytest.raises(ValueError, match="writes to out, or returns lse, not both"):
        pm_ops.attention(pool, 1, query, torch.tensor([[2, 4]]), torch.tensor([6]), return_lse=True, out=into)


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
    "no query heads": (lambda c: {"query": torch.zeros(2, 0, 32)}, r"query needs a head at least, got float32 \[2, 0"),
    "a scale of NaN": (lambda c: {"softmax_scale": float("nan")}, "softmax_scale=nan must be a finite number"),
    "a cap of NaN": (lambda c: {"softcap": float("nan")}, "softcap=nan must be a finite number"),
    "an infinite cap": (lambda c: {"softcap": float("inf")}, "softcap=inf must be a finite number"),
    "integer query": (lambda c: {"query": c.query.int()}, "query must be float32"),
    "a length past the table": (lambda c: {"seq_lens": torch.tensor([13, 33])}, "columns x page_size"),
    "a page past the pool": (lambda c: {"page_table": c.page_table.clamp(min=99)}, "page_table has 99"),
    "a negative page that is read": (lambda c: {"page_table": torch.full_like(c.page_table, -1)}, "-1 where a page is"),
    "a negative length": (lambda c: {"seq_lens": torch.tensor([13, -5])}, "must not be negative"),
    "starts that do not begin at 0": (lambda c: {"query_start": torch.tensor([1, 1, 2])}, "must begin at 0"),
    "negative starts": (lambda c: {"query_start": torch.tensor([-1, 1, 2])}, "must begin at 0"),
    "a bias of fewer queries": (
        lambda c: {"bias": torch.zeros(1, 1, 2, 30), "query": torch.zeros(6, 4, 32)},
        "each of 3 queries",
    ),
    "a ragged bias of fewer queries": (
        lambda c: {
            "bias": torch.zeros(1, 1, 2, 30),
            "query": torch.zeros(6, 4, 32),
            "query_start": torch.tensor([0, 1, 6]),
        },
        "each of 5 queries",
    ),
    "no KV heads": (lambda c: {"kv_heads": 0}, "cannot share 0"),
    "a scalar length": (lambda c: {"seq_lens": torch.tensor(13)}, "seq_lens must be a 1-D"),
    "a plane before the buffer": (lambda c: {"key_plane": [-512, *c.key_plane[1:]]}, "does not hold pages"),
    "a negative stride": (lambda c: {"key_plane": [*c.key_plane[:2], -4, *c.key_plane[3:]]}, "does not hold pages"),
    "a plane without pages": (lambda c: {"value_plane": [*c.value_plane[:4], 0]}, "does not hold pages"),
    "heads that overlap": (lambda c: {"query": torch.zeros(2, 4, 36)}, "heads must not overlap"),
    "triton on the CPU": (lambda c: {"impl": "triton"}, "needs CUDA tensors"),
    "FlashAttention 3 on the CPU": (lambda c: {"impl": "fa3"}, "impl='fa3' needs CUDA tensors"),
    "more queries than the longest": (
        lambda c: {"query_start": torch.tensor([0, 0, 2]), "max_query_len": 1},
        "max_query_len=1, but a sequence has 2",
    ),
    "more queries than the longest, all having equally many": (
        lambda c: {"query": torch.zeros(4, 4, 32), "max_query_len": 1},
        "max_query_len=1, but a sequence has 2",
    ),
    "a scale twice": (lambda c: {"key_scale": 2.0, "key_scale_tensor": torch.tensor(2.0)}, "both given"),
    "a float64 scale": (lambda c: {"key_scale_tensor": torch.tensor(2.0, dtype=torch.float64)}, "one float32 element"),
    "a query elsewhere": (lambda c: {"query": torch.zeros(2, 4, 32, device="meta")}, "query is on meta"),
    "a table of other rows": (lambda c: {"page_table": c.page_table[:1]}, "1 rows for 2 sequences"),
    "uneven queries": (lambda c: {"query": torch.zeros(3, 4, 32)}, "3 query tokens for 2 sequences"),
    "descending starts": (lambda c: {"query_start": torch.tensor([0, 2, 1])}, "cumulative"),
    "starts past the rows": (lambda c: {"query_start": torch.tensor([0, 1, 3])}, "within the 2 query rows"),
    "too few starts": (lambda c: {"query_start": torch.tensor([0, 2])}, "query_start has 2 entries"),
    "sinks of other heads": (lambda c: {"sinks": torch.zeros(2)}, r"sinks must be floating point \[4\]"),
    "slopes of other heads": (lambda c: {"alibi_slopes": torch.zeros(5)}, "alibi_slopes must be"),
    "a flat bias": (lambda c: {"bias": torch.zeros(2, 30)}, "bias must be bool or floating point"),
    "a bias of other sequences": (lambda c: {"bias": torch.zeros(3, 1, 1, 30)}, r"1 or 2 \(sequences\)"),
    "an integer bias": (lambda c: {"bias": torch.zeros(2, 1, 1, 30, dtype=torch.int32)}, "bias must be bool"),
    "a negative window": (lambda c: {"window": -1}, "window=-1"),
    "a negative cap": (lambda c: {"softcap": -1.0}, "softcap=-1.0"),
    "a zero scale": (lambda c: {"key_scale": 0.0}, "key_scale=0.0"),
    "an unknown implementation": (lambda c: {"impl": "fast"}, "supported: auto, triton, fa3, reference"),
    "int16 planes": (lambda c: {"key_dtype": torch.int16}, "int16 is not supported"),
    "int8 planes without a scale": (lambda c: {"key_dtype": torch.int8}, "int8 needs scales: pass key_scale"),
    "scales of fp32 planes": (lambda c: {"key_scale_plane": c.key_plane}, "goes with a plane of float8_e4m3fn"),
    "a scale and scales": (
        lambda c: {"value_dtype": torch.int8, "value_scale": 0.5, "value_scale_plane": c.value_plane},
        "value_scale and value_scale_plane were both given",
    ),
    "scales past the buffer": (
        lambda c: {"key_dtype": torch.int8, "key_scale_plane": [c.buffer.numel(), *c.key_plane[1:]]},
        "key_scale_plane .* does not hold pages",
    ),
    "fewer pages of scales": (
        lambda c: {"key_dtype": torch.int8, "key_scale_plane": [*c.key_plane[:4], 1]},
        "there are 1 pages in the pool",
    ),
    "batch invariance on the CPU": (
        lambda c: {"batch_invariant": True},
        "batch_invariant needs impl='triton' and CUDA",
    ),
    "a negative longest sequence": (lambda c: {"max_seq_len": -1}, "max_seq_len=-1 must not be negative"),
    "dims the plane has not": (lambda c: {"value_dim": 4096}, "last element ends at byte"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_what_came_and_what_is_supported(name):
    case = attention_case("cpu", [13, 30], 1)
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(case, **changes(case))


def test_batch_invariance_has_a_widest_table():
    """Checked without a GPU, on tensors of another device than the CPU."""
    case = attention_case("cpu", [13, 30], 1)
    tensors = {f.name: x.to("meta") for f in dataclasses.fields(case) if isinstance(x := getattr(case, f.name), Tensor)}
    case = dataclasses.replace(case, batch_invariant=True, **tensors)
    case.check()
    wide = torch.empty(2, BATCH_INVARIANT_KEYS // case.page_size + 1, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="at most 524288 keys, this one has 524292"):
        dataclasses.replace(case, page_table=wide).check()


@pytest.mark.parametrize("oldest", [4, 5, 6, 7, 8])
def test_the_page_of_a_windows_oldest_key_is_needed_and_no_earlier_one(oldest):
    case = attention_case("cpu", [13], 1, page_size=4, window=13 - oldest)
    needed, table = oldest // 4, case.page_table.clone()
    table[0, :needed] = -1
    check_attention(case, *call(case, page_table=table))
    table[0, needed] = -1
    with pytest.raises(ValueError, match="-1 where a page is read"):
        call(case, page_table=table)


def test_a_page_before_every_querys_window_may_be_gone():
    """An engine frees it: its entry is garbage, its bytes are NaN."""
    for queries in (1, 3):
        case = attention_case("cpu", [30, 21], queries, page_size=4, window=6)
        gone = [(30 - queries - 6 + 1) // 4, (21 - queries - 6 + 1) // 4]
        table = case.page_table.clone()
        for b, n in enumerate(gone):
            table[b, :n] = -1
        assert min(gone) > 0
        check_attention(case, *call(case, page_table=table))


def test_key_and_value_planes_may_have_their_own_strides_and_bases():
    """K and V in different regions of one buffer, of different page strides and numbers of pages."""
    torch.manual_seed(0)
    case = attention_case("cpu", [13, 30], [1, 9])
    expected = call(case)
    pages = case.key_plane[4]
    wide = torch.full((pages + 3, 2, case.page_size * 2 * 32 * 4), 0xFF, dtype=torch.uint8)
    values = case.buffer.as_strided((pages, case.page_size * 2 * 32 * 4), (case.value_plane[1], 1), case.value_plane[0])
    wide[:pages, 1] = values
    moved = [len(case.buffer) + wide.stride(1), wide.stride(0), *case.value_plane[2:4], pages + 3]
    got = call(case, buffer=torch.cat((case.buffer, wide.flatten())), value_plane=moved)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("window", [2**31, 2**32 + 1, 2**63 - 1])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_may_be_wider_than_any_sequence(causal, window):
    """sys.maxsize once hid every key; and 2**32 + 1, in int32, once was 1 where page ids are checked."""
    case = attention_case("cpu", [13, 30], [2, 3], page_size=4, causal=causal)
    out, _ = call(case, window=window)
    assert torch.equal(out, call(case)[0])
    table = case.page_table.int()
    table[:, 0] = 2**30
    with pytest.raises(ValueError, match="page_table has 1073741824"):
        call(case, window=window, page_table=table, seq_lens=case.seq_lens.int())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 2, 4])
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (3, 5), (5, 3), (2, 1), (4, 4)])
def test_exactly_the_visible_keys_count(causal, window, queries, keys):
    """V is one-hot by position and all logits are equal, so that each output row names its visible keys."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 8, 3, torch.float32), 4)
    fill_nan(pool.buffer)
    table, slots = torch.tensor([[2, 0]]), torch.tensor([6, 7, 8, 0, 1])[:keys]
    pm_ops.store_kv(pool, 0, torch.zeros(keys, 1, 8), torch.eye(8)[:keys, None], slots)
    query, lengths = torch.randn(queries, 1, 8), torch.tensor([keys])
    out = pm_ops.attention(pool, 0, query, table, lengths, causal=causal, window=window)
    for i in range(queries):
        position = keys - queries + i
        visible = [
            j for j in range(keys) if (not causal or j <= position) and (not window or abs(j - position) < window)
        ]
        assert out[i, 0].nonzero().flatten().tolist() == visible
        assert out[i, 0].sum().item() == pytest.approx(1.0 if visible else 0.0)


def test_one_token_pages_many_token_pages_and_a_layer_major_tensor_give_the_same_bits():
    rows, query = torch.randn(2, 11, 2, 8), torch.randn(1, 4, 8)
    results = []
    for page_size in (1, 4):
        pool = pm_ops.PagePool(pm_ops.page_major(3, 2, 8, page_size, torch.float32), 12)
        table = torch.randperm(12)[None, : -(-11 // page_size)]
        slots = torch.tensor([int(table[0, j // page_size]) * page_size + j % page_size for j in range(11)])
        pm_ops.store_kv(pool, 1, rows[0], rows[1], slots)
        results.append(pm_ops.attention(pool, 1, query, table, torch.tensor([11])))
    flat = rows.view(torch.uint8).flatten().contiguous()
    key, value = [0, 64, 64, 32, 11], [11 * 64, 64, 64, 32, 11]
    tail = (1, 2, 8, torch.float32, torch.float32, 8**-0.5)
    lengths = torch.tensor([11])
    results.append(torch.ops.pm_ops.attention(flat, query, torch.arange(11)[None], lengths, None, key, value, *tail)[0])
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_the_face_knows_the_layers_dims():
    """Value dims of their own, a scale of the caller's, and a query of another dim refused."""
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.float32, value_dim=4), 3)
    rows, slots = (torch.randn(3, 2, 8), torch.randn(3, 2, 4)), torch.tensor([4, 5, 6])
    pm_ops.store_kv(pool, 1, *rows, slots)
    query, where = torch.randn(1, 4, 8), (torch.tensor([[1]]), torch.tensor([3]))
    k, v = (r.repeat_interleave(2, 1) for r in rows)
    for scale in (None, 0.7):
        logits = torch.einsum("hd,jhd->hj", query[0], k) * (8**-0.5 if scale is None else scale)
        out = pm_ops.attention(pool, 1, query, *where, softmax_scale=scale)
        assert torch.allclose(out[0], torch.einsum("hj,jhd->hd", logits.softmax(-1), v), atol=1e-6)
    for dim in (4, 16):
        with pytest.raises(ValueError, match="query's last axis must be the key's"):
            pm_ops.attention(pool, 1, torch.randn(1, 4, dim), *where)


@pytest.mark.parametrize("name", CASES)
def test_the_output_goes_where_it_is_wanted(name):
    case = attention_case("cpu", **CASES[name])
    expected, _ = call(case, return_lse=False)
    out = torch.full_like(expected, torch.nan)
    with writes_only(case.buffer, []):
        assert call_out(case, out) is None
    assert torch.equal(out, expected)


def call_out(case, out):
    """``attention_out`` with a case's arguments."""
    values = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)} | {"return_lse": False}
    schema = torch.ops.pm_ops.attention_out.default._schema.arguments
    positional = [values.pop(a.name) for a in schema if not a.kwarg_only]
    return torch.ops.pm_ops.attention_out(*positional, out=out, **values)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 4, 7), r"out must be \[2, 4, 8\] as the query and value_dim are"),
        (torch.zeros(2, 4, 8, dtype=torch.float64), r"out must be contiguous torch.float32 \[2, 4, 8\]"),
        (torch.zeros(4, 2, 8).transpose(0, 1), "out must be contiguous"),
        (torch.zeros(8, 8), "out must be contiguous"),
    ],
)
def test_an_output_of_another_shape_is_refused(out, message):
    case = attention_case("cpu", [13, 30], 1, dims=(8, 8))
    before = out.clone()
    with pytest.raises(ValueError, match=message):
        call_out(case, out)
    assert torch.equal(out, before)
