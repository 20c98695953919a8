"""rope_store_kv's CPU kernel, the specification: against float64, the unfused chain, and models' own code; refusals."""

import dataclasses
import math

import pytest
import torch
from kernels.test_rope import SHAPES, check_rope, rope_case, table_of, unfused
from torch._inductor.utils import run_and_get_code

import pm_ops
from pm_ops.testing import fill_nan, fill_random, sample_pools, slot_bytes, writes_only

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POOLS = list(sample_pools())


def call(case):
    """The registered operator, with a case's arguments."""
    return torch.ops.pm_ops.rope_store_kv(*(getattr(case, f.name) for f in dataclasses.fields(case)))


def inputs_for(pool, tokens, dtype=F32, rotary=8):
    """Query, key and value as slices of one projection where their dims allow it, positions and a table."""
    (heads, dim), (value_heads, value_dim) = (pool.layout.plane(1, kind).shape for kind in ("key", "value"))
    query, key = torch.randn(tokens, 3 * heads, dim).to(dtype).split([2 * heads, heads], 1)
    value = torch.randn(tokens, value_heads, value_dim).to(dtype)
    return query, key, value, torch.randint(40, (tokens,)), table_of(rotary)


def call_cases():
    for shape in SHAPES:
        for interleaved in (False, True):
            yield SHAPES[shape], {"interleaved": interleaved, "norm": not interleaved}
    for dtype, planes in ((BF16, (BF16, BF16)), (BF16, (E4M3, E5M2)), (F16, (F32, E4M3)), (F32, (E5M2, F16))):
        for norm in (False, True):
            options = {"rows": (dtype,) * 3, "planes": planes, "norm": norm, "key_scale": 0.37, "table": BF16}
            yield ((5, 2, 3), (24, 16, 20)), options
    tensors = {"key_scale_tensor": torch.tensor(0.25), "value_scale_tensor": torch.tensor([3.0])}
    yield ((4, 2, 2), (16, 16, 16)), {"planes": (E4M3, E4M3), "weight_offset": 1.0, "norm": True, **tensors}


@pytest.mark.parametrize("case", list(call_cases()), ids=str)
def test_the_specification_equals_the_formula_rounded_once_and_stores_that_key(case):
    """Keys of the second token pass the range of fp8."""
    shape, options = case
    rope = rope_case(6, *shape, slots=[5, 9, -1, 0], **options)
    rope.key[1] *= 2.0**18 if rope.key.dtype == BF16 else 1000.0
    check_rope(rope, call)


@pytest.mark.parametrize("pool", POOLS, ids=lambda p: f"{p.layout.name}-{p.layout.plane(1, 'key').dtype}")
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary", [8, 4])
def test_the_result_is_bit_equal_to_rotating_casting_and_store_kv(pool, interleaved, rotary):
    for dtype, scale in ((F32, 1.0), (F16, 0.3), (BF16, 1.0), (BF16, 0.3)):
        fill_random(pool.buffer)
        query, key, value, positions, table = inputs_for(pool, 6, dtype, rotary)
        slots = torch.tensor([pool.num_slots - 2, -1, 0, 1])
        owned = [b for kind in ("key", "value") for b in slot_bytes(pool, 1, kind, slots.tolist())]
        before = pool.buffer.clone()
        options = {"interleaved": interleaved, "key_scale": scale, "value_scale": torch.tensor(scale)}
        with writes_only(pool.buffer, owned):
            got = pm_ops.rope_store_kv(pool, 1, query, key, value, positions, table, slots, return_key=True, **options)
        fused = pool.buffer.clone()
        case = rope_case(6, interleaved=interleaved)
        chain = dataclasses.replace(case, query=query, key=key, positions=positions, cos_sin=table)
        turned_query, turned_key = unfused(chain)
        assert torch.equal(got[0], turned_query) and torch.equal(got[1], turned_key)
        pool.buffer.copy_(before)
        pm_ops.store_kv(pool, 1, turned_key, value, slots, key_scale=scale, value_scale=scale)
        assert torch.equal(pool.buffer, fused)


def test_the_face_returns_the_query_or_query_and_key_of_every_row():
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, F32), 5)
    query, key, value, positions, table = inputs_for(pool, 5)
    args = (pool, 1, query, key, value, positions, table, torch.tensor([7, -1]))
    alone = pm_ops.rope_store_kv(*args)
    both = pm_ops.rope_store_kv(*args, return_key=True)
    assert isinstance(alone, torch.Tensor) and torch.equal(alone, both[0])
    assert torch.equal(pm_ops.load_kv(pool, 1, torch.tensor([7])), both[1][:1])
    assert torch.equal(pm_ops.load_kv(pool, 1, torch.tensor([7]), "value"), value[:1])
    norm = {"q_weight": torch.ones(8), "k_weight": torch.ones(8)}
    zero = torch.tensor([[1.0] * 4 + [0.0] * 4])  # cos 1, sin 0: the norm alone
    scaled = pm_ops.rope_store_kv(*args[:5], positions * 0, zero, args[7], **norm, weight_offset=1.0, eps=0.0)
    torch.testing.assert_close(scaled, 2 * query / query.square().mean(-1, keepdim=True).sqrt())


def test_it_rotates_and_norms_as_the_code_of_transformers_does():
    """Llama's and GPT-J's rotations bit for bit, in float32; Qwen3's and Gemma 3's norms up to the order of a sum."""
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    qwen = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, F32), 5)
    query, key, value, positions, table = inputs_for(pool, 5)
    args = (pool, 1, query, key, value, positions, table, torch.arange(5))
    cos, sin = table[positions][None].chunk(2, -1)
    whole = (torch.cat((x, x), -1) for x in (cos, sin))
    expected = llama.apply_rotary_pos_emb(query[None], key[None], *whole, unsqueeze_dim=2)
    got = pm_ops.rope_store_kv(*args, return_key=True)
    assert torch.equal(got[0], expected[0][0]) and torch.equal(got[1], expected[1][0])
    got = pm_ops.rope_store_kv(*args, interleaved=True, return_key=True)
    for x, turned in zip((query, key), got, strict=True):
        assert torch.equal(turned, gptj.apply_rotary_pos_emb(x[None], sin, cos)[0])
    for norm, offset in ((qwen.Qwen3RMSNorm(8, eps=1e-5), 0.0), (gemma.Gemma3RMSNorm(8, eps=1e-5), 1.0)):
        weight = norm.weight.detach().normal_()
        options = {"q_weight": weight, "k_weight": weight, "eps": 1e-5, "weight_offset": offset}
        with torch.no_grad():
            expected = pm_ops.rope_store_kv(*args[:2], norm(query), norm(key), *args[4:])
        torch.testing.assert_close(pm_ops.rope_store_kv(*args, **options), expected, rtol=1e-6, atol=1e-6)


REFUSED = {
    "a position past the table": (lambda c: {"positions": c.positions + 40}, "but there are 40 rows in cos_sin"),
    "a negative position": (lambda c: {"positions": c.positions - 40}, "positions has -[0-9]+; a row to skip"),
    "a bad position of a padding row": (
        lambda c: {"positions": torch.cat((c.positions[:-1], torch.tensor([40])))},
        "has 40, but there are 40 rows",
    ),
    "a slot past the end": (lambda c: {"slots": torch.tensor([0, 24])}, "has 24, but there are 24"),
    "a slot twice": (lambda c: {"slots": torch.tensor([4, 1, 4])}, "names 4 twice"),
    "one slot more than rows": (lambda c: {"slots": torch.arange(8)}, "8 slots for 7 key rows"),
    "float positions": (lambda c: {"positions": c.positions.float()}, "positions must be a 1-D int32 or int64"),
    "positions for other rows": (lambda c: {"positions": c.positions[:5]}, "query has 7 rows, the others .*5"),
    "a query of other rows": (lambda c: {"query": c.query[:5]}, "query has 5 rows, the others .*7"),
    "a value of other rows": (lambda c: {"value": c.value[:6]}, "query has 7 rows, the others .*6"),
    "another head_dim": (lambda c: {"query": c.query[..., :20]}, "head_dim of 20, key of 24"),
    "an integer query": (lambda c: {"query": c.query.int()}, "query must be float32, float16 or bfloat16"),
    "a flat query": (lambda c: {"query": c.query.flatten(1)}, "query must be float32, float16 or bfloat16"),
    "an fp8 key": (lambda c: {"key": c.key.to(E4M3)}, "key must be float32, float16 or bfloat16"),
    "a float64 value": (lambda c: {"value": c.value.double()}, "value must be rows"),
    "an odd rotary_dim": (lambda c: {"cos_sin": c.cos_sin[:, :7]}, "rotary_dim of 7"),
    "no rotary_dim": (lambda c: {"cos_sin": c.cos_sin[:, :0]}, "rotary_dim of 0"),
    "a rotary_dim past the head": (lambda c: {"cos_sin": table_of(26)}, "from 2 to the head_dim, 24"),
    "an integer table": (lambda c: {"cos_sin": c.cos_sin.int()}, "cos_sin must be floating point"),
    "a table of three axes": (lambda c: {"cos_sin": c.cos_sin[None]}, "cos_sin must be floating point"),
    "one weight of two": (lambda c: {"q_weight": torch.ones(24)}, "come together or not at all"),
    "weights of another dim": (
        lambda c: {"q_weight": torch.ones(24), "k_weight": torch.ones(8)},
        r"k_weight must be \[24\]",
    ),
    "integer weights": (
        lambda c: {"q_weight": torch.ones(24).int(), "k_weight": torch.ones(24)},
        "q_weight must be float32",
    ),
    "a negative eps": (lambda c: {"eps": -1e-6}, "eps=-1e-06"),
    "a NaN eps": (lambda c: {"eps": math.nan}, "eps=nan"),
    "an infinite offset": (lambda c: {"weight_offset": math.inf}, "weight_offset=inf"),
    "a zero scale": (lambda c: {"key_scale": 0.0}, "key_scale=0.0"),
    "a scale twice": (lambda c: {"value_scale": 2.0, "value_scale_tensor": torch.tensor(2.0)}, "both given"),
    "a query elsewhere": (lambda c: {"query": c.query.to("meta")}, "query is on meta"),
    "a table elsewhere": (lambda c: {"cos_sin": c.cos_sin.to("meta")}, "cos_sin is on meta"),
    "no positions and not a row a token": (
        lambda c: {"positions": None},
        "query has 7 rows, the others .*'cos_sin, without positions,': 40",
    ),
    "positions elsewhere": (lambda c: {"positions": c.positions.to("meta")}, "positions is on meta"),
    "weights elsewhere": (
        lambda c: {"q_weight": torch.ones(24), "k_weight": torch.ones(24, device="meta")},
        "k_weight is on meta",
    ),
    "heads the plane has not": (lambda c: {"key": torch.ones(7, 99, 24)}, "key_plane .* does not hold pages"),
    "int16 planes": (lambda c: {"value_dtype": torch.int16}, "int16 is not supported"),
    "int8 planes without a scale": (lambda c: {"value_dtype": torch.int8}, "int8 needs scales: pass value_scale"),
    "scales of fp32 planes": (lambda c: {"value_scale_plane": c.value_plane}, "goes with a plane of float8_e4m3fn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_byte_is_written(name):
    case = rope_case(slots=[5, 9, -1])
    changes, message = REFUSED[name]
    with writes_only(case.buffer, []), pytest.raises(ValueError, match=message):
        call(dataclasses.replace(case, **changes(case)))


def test_the_face_refuses_rows_that_are_not_the_layers():
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, F32), 5)
    query, key, value, positions, table = inputs_for(pool, 5)
    for rows in ((key[:, :1], value), (key, value[..., :4])):
        with writes_only(pool.buffer, []), pytest.raises(ValueError, match="layer 1 holds"):
            pm_ops.rope_store_kv(pool, 1, query, *rows, positions, table, torch.tensor([0]))


def test_compiled_it_stays_before_the_attention_that_reads_it_and_never_clones_the_pool():
    pools = [pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, F32), 4099) for _ in range(2)]
    for pool in pools:
        fill_nan(pool.buffer)
    table, slots, lengths = torch.tensor([[3, 1]]), torch.tensor([12, 13, 14, 15, 4, 5]), torch.tensor([6])

    def step(pool, qkv, positions, cos_sin):
        query, key, value = qkv.split([4, 2, 2], 1)
        query, key = pm_ops.rope_store_kv(pool, 1, query, key, value, positions, cos_sin, slots, return_key=True)
        return pm_ops.attention(pool, 1, query, table, lengths, query_start=torch.tensor([0, 6])), key + 1

    inputs = torch.randn(6, 8, 8), torch.arange(6), table_of(8)
    expected = step(pools[0], *inputs)
    got, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), pools[1], *inputs)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert torch.equal(pools[0].buffer, pools[1].buffer)
    assert code.count("pm_ops.rope_store_kv.default") >= 1
    assert f"empty_strided_cpu(({pools[1].buffer.numel()}" not in code and "clone" not in code.split("def call", 1)[1]
