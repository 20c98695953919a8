"""mla_attention and its stores: pm_ops.* and torch.ops.pm_ops.* on the CPU, and DeepSeek-V3's own attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import oracle
import pytest
import torch
from kernels.cases import check_bytes, on_each_device
from kernels.mla_cases import check_mla, mla_case
from kernels.test_mla import CASES

import pm_ops

F32 = torch.float32


def call(case: Any) -> Any:
    values = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    return torch.ops.pm_ops.mla_attention(**values)


def filled(layout: pm_ops.PageLayout, num_pages: int = 4, **options: Any) -> pm_ops.PagePool:
    """A pool of random bytes."""
    pool = pm_ops.PagePool(layout, num_pages, **options)
    pool.buffer.random_(0, 256)
    return pool


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_operator_equals_dense_attention(name):
    case = mla_case("cpu", **CASES[name])
    check_mla(case, call(case))


@on_each_device
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("whole", [True, False], ids=["whole rows", "two parts"])
@pytest.mark.parametrize("dtype", [F32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_go_to_their_slots_and_nowhere_else(device, page_size, whole, dtype):
    layout = pm_ops.mla(3, page_size, dtype, latent_dim=12, rope_dim=4, index_dim=8, align=16)
    pool = filled(layout, 48 // page_size, device=device)
    before = pool.buffer.clone()
    rows = torch.randn(7, 40, device=device)[:, ::2]  # one row and some columns more than are stored
    slots = torch.tensor([5, -1, 0, 47, 13, 14], dtype=torch.int32, device=device)
    latent, rope = (rows[:, :16], None) if whole else (rows[:, :12], rows[:, 12:16])
    pm_ops.store_latent(pool, 1, latent, slots, rope=rope, scale=0.5 if dtype.itemsize == 1 else 1.0)
    expected = before.cpu().clone()
    plane = layout.plane(1, "latent")
    geometry = [plane.offset, layout.page_bytes, plane.token_stride, plane.head_stride, pool.num_pages]
    scale = 0.5 if dtype.itemsize == 1 else 1.0
    touched = oracle.store(expected, geometry, page_size, dtype, rows[:, None, :16].cpu(), slots.tolist(), scale)
    assert len(touched) == 5 * 16 * dtype.itemsize
    check_bytes(before, pool.buffer, expected, touched)


@on_each_device
def test_index_keys_go_beside_their_scales_and_nowhere_else(device):
    layout = pm_ops.mla(2, 4, torch.bfloat16, latent_dim=8, rope_dim=8, index_dim=16)
    pool = filled(layout, device=device)
    before = pool.buffer.clone()
    rows, slots = torch.randn(4, 16, device=device), torch.tensor([15, 3, -1, 8], device=device)
    pm_ops.store_index_key(pool, 1, rows, slots)
    planes = [[p.offset, layout.page_bytes, p.token_stride, p.head_stride, 4] for p in layout.planes[-2:]]
    expected = before.cpu().clone()
    touched = oracle.store(
        expected, planes[0], 4, torch.float8_e4m3fn, rows[:, None].cpu(), slots.tolist(), scale_plane=planes[1]
    )
    check_bytes(before, pool.buffer, expected, touched)
    read = pm_ops.load_kv(pool, 1, slots, "index_key", out_dtype=F32)
    torch.testing.assert_close(read[[0, 1, 3], 0], rows[[0, 1, 3]], rtol=0.07, atol=0.01)


def test_what_is_stored_is_attended_to_layer_by_layer():
    """A sequence token by token, with the pool's other bytes NaN, equals float64 attention over its rows."""
    pool = pm_ops.PagePool(pm_ops.mla(2, 4, F32, latent_dim=16, rope_dim=8), 6)
    pool.buffer.fill_(0xFF)
    pages = torch.tensor([[4, 1, 3]])
    rows = torch.randn(2, 9, 24)
    for t in range(9):
        slot = pages[0, t // 4] * 4 + t % 4
        for layer in range(2):
            pm_ops.store_latent(pool, layer, rows[layer, t : t + 1, :16], slot[None], rope=rows[layer, t : t + 1, 16:])
        query = torch.randn(1, 3, 24)
        out, lse = pm_ops.mla_attention(
            pool, 1, query, pages, torch.tensor([t + 1]), value_dim=16, softmax_scale=0.4, return_lse=True
        )
        seen = rows[1, : t + 1].double()
        logits = query[0].double() @ seen.T * 0.4
        torch.testing.assert_close(out[0].double(), logits.softmax(-1) @ seen[:, :16], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[0].double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def deepseek() -> tuple[Any, Any]:
    """DeepSeek-V3's attention from transformers, small, with random weights, and its rotary embedding."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    from transformers import DeepseekV3Config

    torch.manual_seed(0)
    config = DeepseekV3Config(
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    module = modeling.DeepseekV3Attention(config, 0).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module, modeling.DeepseekV3RotaryEmbedding(config)


@torch.no_grad()
def test_the_absorbed_form_is_deepseek_v3s_attention():
    """Prefill of 9 tokens, and then one by one, from pages of latent rows: what the module gives for all of them."""
    module, rotary = deepseek()
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    tokens, heads, nope, rank, value = 13, 4, 16, 32, 12
    hidden = torch.randn(1, tokens, 48)
    cos, sin = rotary(hidden, torch.arange(tokens)[None])
    mask = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
    expected = module(hidden, (cos, sin), mask)[0]

    query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden))).view(1, tokens, heads, -1).transpose(1, 2)
    latent, key_rope = module.kv_a_proj_with_mqa(hidden).split([rank, 8], -1)
    rotate = (
        modeling.apply_rotary_pos_emb_interleave if module.config.rope_interleave else modeling.apply_rotary_pos_emb
    )
    query_rope, key_rope = rotate(query[..., nope:], key_rope[:, None], cos, sin)
    key_up, value_up = module.kv_b_proj.weight.view(heads, nope + value, rank).split([nope, value], 1)
    absorbed = torch.cat((torch.einsum("bhtn,hnr->bthr", query[..., :nope], key_up), query_rope.transpose(1, 2)), -1)[0]
    rows = module.kv_a_layernorm(latent)[0]

    pool = pm_ops.PagePool(pm_ops.mla(1, 4, F32, latent_dim=rank, rope_dim=8), 5)
    pool.buffer.fill_(0xFF)
    table = torch.tensor([[3, 0, 4, 1]])
    slots = table[0].repeat_interleave(4) * 4 + torch.arange(16) % 4
    results = []
    for first, end in ((0, 9), *((t, t + 1) for t in range(9, tokens))):
        pm_ops.store_latent(pool, 0, rows[first:end], slots[first:end], rope=key_rope[0, 0, first:end])
        results.append(
            pm_ops.mla_attention(
                pool, 0, absorbed[first:end], table, torch.tensor([end]), value_dim=rank, softmax_scale=module.scaling
            )
        )
    out = torch.einsum("thr,hvr->thv", torch.cat(results), value_up)
    torch.testing.assert_close(module.o_proj(out.flatten(1)), expected[0], rtol=1e-4, atol=1e-4)


def face(**changes: Any) -> Any:
    pool = pm_ops.PagePool(pm_ops.mla(2, 4, F32, latent_dim=8, rope_dim=4), 4)
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2])
    arguments = dict(query=torch.ones(1, 3, 12), page_table=table, seq_lens=lens, value_dim=8, softmax_scale=1.0)
    return pm_ops.mla_attention(pool, 1, **(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(query=torch.ones(1, 3, 8)), r"query is \[1, 3, 8\]; layer 1 has latent rows of 12"),
        (dict(query=torch.ones(3, 12)), "query must be float32, float16 or bfloat16"),
        (dict(value_dim=13), "value_dim=13: the value is the first elements of a row, which has 12"),
        (dict(value_dim=0), "value_dim=0"),
        (dict(scale=float("nan")), "scale=nan is nan in float32"),
        (dict(max_query_len=-1), "must not be negative"),
        (dict(seq_lens=torch.tensor([5])), "seq_lens has 5, but page_table columns x page_size are 4"),
        (dict(page_table=torch.tensor([[4]])), "page_table has 4, but there are 4 pages"),
        (dict(impl="fa3"), "impl='fa3' is unknown; supported: auto, triton, hopper, reference"),
        (dict(impl="hopper"), "impl='hopper' needs CUDA tensors, these are on the CPU"),
        (dict(impl="triton"), "impl='triton' needs CUDA tensors"),
        (dict(page_table=[[0]]), "page_table must be a tensor"),
        (dict(query=torch.ones(2, 3, 12), seq_lens=torch.tensor([1, 1])), "page_table has 1 rows for 2 sequences"),
    ],
)
def test_a_wrong_argument_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        face(**changes)


@pytest.mark.parametrize(
    ("latent", "rope", "message"),
    [
        ((2, 11), None, r"latent rows are \[2, 11\], layer 1 holds rows of 12, whole or in two parts"),
        ((2, 8), (2, 5), r"latent rows are \[2, 8\] and \[2, 5\]"),
        ((2, 1, 12), None, "latent rows are"),
        ((1, 12), None, "2 slots for 1 key rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_a_byte_is_written(latent, rope, message):
    pool = filled(pm_ops.mla(2, 4, F32, latent_dim=8, rope_dim=4))
    before = pool.buffer.clone()
    with pytest.raises(ValueError, match=message):
        pm_ops.store_latent(
            pool, 1, torch.ones(latent), torch.tensor([0, 1]), rope=None if rope is None else torch.ones(rope)
        )
    with pytest.raises(ValueError, match="no plane 'index_key' of layer 1"):
        pm_ops.store_index_key(pool, 1, torch.ones(1, 8), torch.tensor([0]))
    assert torch.equal(pool.buffer, before)


def test_a_plane_of_keys_is_no_latent_plane():
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 8, 4, F32), 4)
    with pytest.raises(ValueError, match="no plane 'latent' of layer 0"):
        pm_ops.store_latent(pool, 0, torch.ones(1, 8), torch.tensor([0]))


def test_a_scale_for_each_latent_row_is_refused_not_left_unwritten():
    planes = (
        pm_ops.Plane(0, "latent", 0, 8, 8, (1, 8), torch.float8_e4m3fn),
        pm_ops.Plane(0, "latent_scale", 32, 4, 4, (1, 1), F32),
    )
    pool = filled(pm_ops.PageLayout(4, 48, planes))
    before, page = pool.buffer.clone(), torch.tensor([0])
    with pytest.raises(ValueError, match="layer 0 has a scale for each latent row, which is not supported"):
        pm_ops.store_latent(pool, 0, torch.ones(1, 8), page)
    with pytest.raises(ValueError, match="layer 0 has a scale for each latent row, which is not supported"):
        pm_ops.mla_attention(pool, 0, torch.ones(1, 1, 8), page[None], page, softmax_scale=1.0, value_dim=8)
    assert torch.equal(pool.buffer, before)


def test_a_query_without_axes_is_refused():
    pool, page = filled(pm_ops.mla(1, 4, F32, latent_dim=8, rope_dim=4)), torch.tensor([0])
    with pytest.raises(ValueError, match=r"query is \[\]; layer 0 has latent rows of 12"):
        pm_ops.mla_attention(pool, 0, torch.tensor(1.0), page[None], page, softmax_scale=1.0, value_dim=8)


def test_compiled_it_is_one_graph_for_all_layers_and_copies_nothing():
    """Store and attention of two layers, other numbers of tokens, under the default backend's functionalisation."""
    pool = pm_ops.PagePool(pm_ops.mla(2, 4, F32, latent_dim=8, rope_dim=4), 8)
    table = torch.arange(8)[None].int()

    def step(rows: torch.Tensor, query: torch.Tensor, slots: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        for layer in range(2):
            pm_ops.store_latent(pool, layer, rows[:, :8], slots, rope=rows[:, 8:])
        return sum(pm_ops.mla_attention(pool, i, query, table, lens, value_dim=8, softmax_scale=0.3) for i in range(2))

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (1, 3, 5):
        arguments = (torch.randn(tokens, 12), torch.randn(tokens, 3, 12), torch.arange(tokens), torch.tensor([tokens]))
        expected = step(*arguments)
        pool.buffer.zero_()
        torch.testing.assert_close(compiled(*arguments), expected)
