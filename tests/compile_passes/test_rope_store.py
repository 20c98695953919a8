"""fuse_rope=True: one rope_store_kv a layer, and the results of the graph without it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from rotary_forms import FORMS, llama
from rotary_layers import LAYERS, TOKENS, Rotary, count, inputs, plain, twins
from torch import Tensor
from torch._dynamo.utils import ReinplaceCounters, counters
from torch._inductor.utils import fresh_cache, run_and_get_code

VIEWS = {"alias", "chunk", "expand", "select", "slice", "split", "split_with_sizes", "transpose", "unsqueeze", "view"}


def check_same(plain: Any, fused: Any, *args: Tensor) -> None:
    """Outputs and every byte of the pool are equal."""
    with torch.no_grad():
        expected, got = plain.compiled(*args), fused.compiled(*args)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert torch.equal(fused.pool.buffer, plain.pool.buffer)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_becomes_one_operator_a_layer_with_the_same_bits(paged: Any, name: str) -> None:
    form = FORMS[name]
    one, other = twins(paged, plain(form.rotate))
    for tokens in (TOKENS, 1) if name == "gpt_fast" else (TOKENS,):
        other.stock(*inputs(tokens=tokens), *form.tensors)
        check_same(one, other, *inputs(tokens=tokens), *form.tensors)
        assert (count(other, "rope_store_kv"), count(other, "store_kv")) == (LAYERS, 0)
        assert (count(one, "rope_store_kv"), count(one, "store_kv")) == (0, LAYERS)
    other.check_pages()
    assert {e.became for e in other.binding.report().entries if e.action == "rotate"} == {f"rope_store_kv, {form.says}"}


def test_sizes_may_be_symbolic(paged: Any) -> None:
    for name in ("phi", "gpt_fast"):
        one, other = twins(paged, plain(FORMS[name].rotate))
        for twin in (one, other):
            twin.compiled = torch.compile(twin.model, backend=twin.backend, fullgraph=True, dynamic=True)
        for tokens in (TOKENS, 3, 9):
            check_same(one, other, *inputs(tokens=tokens), *FORMS[name].tensors)
        assert len(other.backend.graphs) == 1 and count(other, "rope_store_kv") == LAYERS


def test_the_table_is_computed_once_for_all_layers(paged: Any) -> None:
    _, other = twins(paged, plain(llama))
    other.check(*inputs(), *FORMS["llama"].tensors)
    graph = other.backend.graphs[0]
    (table,) = {line.split("None, ")[1].split(",")[0] for line in graph.splitlines() if "rope_store_kv.default" in line}
    assert graph.count(f"{table} = torch.ops.aten.cat.default(") == 1


def test_key_and_value_that_are_used_again_are_handed_out(paged: Any) -> None:
    def body(k_cache: Tensor, v_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, *rest: Tensor) -> Tensor:
        q, k = llama(q, k, *rest)
        early = k.sum(-1)  # before the store, and after it
        k_cache[slots], v_cache[slots] = k, v
        return q.sum(1) + (k * v).sum(1) + early.sum(1, keepdim=True)

    one, other = twins(paged, body)
    check_same(one, other, *inputs(), *FORMS["llama"].tensors)
    assert count(other, "rope_store_kv") == LAYERS


def test_a_query_that_is_scaled_before_the_store_is_scaled_after_it(paged: Any) -> None:
    def body(k_cache: Tensor, v_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, *rest: Tensor) -> Tensor:
        q, k = llama(q, k, *rest)
        q = q * 0.125
        k_cache[slots], v_cache[slots] = k, v
        return q

    one, other = twins(paged, body)
    check_same(one, other, *inputs(), *FORMS["llama"].tensors)
    assert count(other, "rope_store_kv") == LAYERS


def test_a_rotated_query_has_the_strides_that_the_models_own_has(paged: Any) -> None:
    """gpt-oss rotates heads first, by a cat of halves, which is contiguous so; its attention takes a view of that."""

    def body(k_cache: Tensor, v_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, *rest: Tensor) -> Tensor:
        positions, inv_freq = rest
        angles = positions[:, None] * inv_freq
        cos, sin = angles.cos(), angles.sin()

        def rotate(x: Tensor) -> Tensor:
            a, b = x.transpose(0, 1).chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        q, k = rotate(q), rotate(k)
        k_cache[slots], v_cache[slots] = k.transpose(0, 1), v
        return q.view(-1, q.shape[-1]) * 2

    one, other = twins(paged, body)
    check_same(one, other, *inputs(), *FORMS["llama"].tensors)
    assert count(other, "rope_store_kv") == LAYERS


@pytest.mark.parametrize("by_tensor", [False, True], ids=["number", "tensor"])
def test_a_quantisation_by_one_scale_goes_into_the_store(paged: Any, by_tensor: bool) -> None:
    fp8 = torch.float8_e4m3fn
    scale = torch.tensor(0.02) if by_tensor else 0.02

    def body(k_cache: Tensor, v_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, *rest: Tensor) -> Tensor:
        q, k = llama(q, k, *rest)
        limit = torch.finfo(fp8).max
        k_cache[slots] = (k / scale).clamp(-limit, limit).to(fp8)
        v_cache[slots] = (v / scale).clamp(-limit, limit).to(fp8)
        return q

    one, other = twins(paged, body, fp8)
    check_same(one, other, *inputs(), *FORMS["llama"].tensors)
    assert count(other, "rope_store_kv") == LAYERS
    assert other.backend.graphs[0].count("clamp.default") == one.backend.graphs[0].count("clamp.default") - LAYERS


def test_the_report_names_the_rotation_and_the_users_line(paged: Any) -> None:
    _, other = twins(paged, plain(llama))
    other.check(*inputs(), *FORMS["llama"].tensors)
    report = other.binding.report()
    assert report.fused == LAYERS and report.writes_rewritten == 2 * LAYERS
    text = str(report)
    assert "rope_store_kv, NeoX pairs, 8 of 8 elements" in text and "(k * cos) + (_half(k) * sin)" in text


def test_inductor_keeps_fused_and_unfused_graphs_and_geometries_apart_in_its_caches(paged: Any) -> None:
    """A second start finds its graph, in both caches; another geometry is another graph.

    And the pool is passed through whole, without a clone, to one operator a layer.
    """
    form, results = FORMS["llama"], []
    with fresh_cache():
        for fuse, page, hits in ((False, 4, 0), (True, 4, 0), (True, 4, 1), (True, 2, 0)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            twin = paged(Rotary(plain(form.rotate)), inner="inductor", fuse_rope=fuse, page=page)
            ReinplaceCounters.clear()
            counters.clear()
            with torch.no_grad():
                out, (code,) = run_and_get_code(twin.compiled, *inputs(), *form.tensors)
            found = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
            assert found == (hits, hits)
            assert ReinplaceCounters.get_total_missed() == 0
            assert len(re.findall(r"torch\.ops\.pm_ops\.rope_store_kv\.default\(arg", code)) == (LAYERS if fuse else 0)
            twin.stock(*inputs(), *form.tensors)
            twin.check_pages()
            results.append(out)
    for out in results[1:]:
        torch.testing.assert_close(out, results[0], rtol=0, atol=0)


@pytest.mark.parametrize(("name", "before", "after"), [("llama", 56, 25), ("qwen3", 80, 25), ("vllm_neox", 54, 18)])
def test_in_the_profiler_a_layer_is_one_operator_in_place_of_many(
    paged: Any, name: str, before: int, after: int
) -> None:
    """Of an eager graph of two layers, in which each operator but views is a kernel on a GPU."""
    form, found = FORMS[name], []
    call = (*inputs(), *form.tensors)
    for twin in twins(paged, plain(form.rotate)):
        with torch.no_grad():
            twin.compiled(*call)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
                twin.compiled(*call)
        ran = Counter(e.name for e in profile.events() if e.cpu_parent is None or "::" not in e.cpu_parent.name)
        found.append(Counter({op: n for op, n in ran.items() if "::" in op and op.partition("::")[2] not in VIEWS}))
    unfused, fused = found
    assert (unfused["pm_ops::store_kv"], fused["pm_ops::store_kv"]) == (LAYERS, 0)
    assert fused["pm_ops::rope_store_kv"] == LAYERS
    assert (unfused.total(), fused.total()) == (before, after), found


def test_the_registered_backend_takes_the_option(paged: Any) -> None:
    _, other = twins(paged, plain(llama))
    options = {"binding": other.binding, "inner": "eager", "fuse_rope": True}
    other.compiled = torch.compile(other.model, backend="pm_ops", options=options)
    other.check(*inputs(), *FORMS["llama"].tensors)
    assert other.binding.report().fused == LAYERS


def test_a_cast_to_fp8_that_does_not_saturate_stays_in_front_of_the_store(paged: Any) -> None:
    """torch's cast gives NaN where the store would give the largest number."""

    def body(k_cache: Tensor, v_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, *rest: Tensor) -> Tensor:
        q, k = llama(q, k, *rest)
        k_cache[slots], v_cache[slots] = (k * 1000).to(k_cache.dtype), v.to(v_cache.dtype)
        return q

    one, other = twins(paged, body, torch.float8_e4m3fn, strict=False)
    with torch.no_grad():
        for twin in (one, other):
            twin.compiled(*inputs(), *FORMS["llama"].tensors)
    assert torch.equal(one.pool.buffer, other.pool.buffer)
    assert count(other, "rope_store_kv") == 0 and "without a clamp" in str(other.binding.report())
