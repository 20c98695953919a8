"""fuse_rope=True: one rope_store_kv a layer, and the results of the graph without it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rotary_forms import FORMS, POSITIONS, llama
from torch import Tensor
from torch._dynamo.utils import ReinplaceCounters, counters
from torch._inductor.utils import fresh_cache, run_and_get_code

HEADS, DIM, SLOTS, LAYERS, TOKENS = 2, 8, 20, 2, 5


class Rotary(torch.nn.Module):
    """Layers that rotate, store, and go on with what they read; ``body`` does it for one of them."""

    def __init__(self, body: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.k = [torch.randn(SLOTS, HEADS, DIM).to(dtype) for _ in range(LAYERS)]
        self.v = [torch.randn(SLOTS, HEADS, DIM).to(dtype) for _ in range(LAYERS)]
        self.body = body

    def forward(self, qkv: Tensor, slots: Tensor, positions: Tensor, *tensors: Tensor) -> list[Tensor]:
        outs = []
        for k_cache, v_cache in zip(self.k, self.v, strict=True):
            q, k, v = qkv.split([2 * HEADS, HEADS, HEADS], 1)
            out = self.body(k_cache, v_cache, q, k, v, slots, positions, *tensors)
            outs += [out, k_cache[slots].float(), v_cache[slots].float()]
            qkv = torch.tanh(qkv + out.amax() * 0.5)
        return outs


def plain(rotate: Callable[..., Any]) -> Callable[..., Tensor]:
    """A layer's body: rotate, store, use the query."""

    def body(
        k_cache: Tensor, v_cache: Tensor, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, *t: Tensor
    ) -> Tensor:
        q, k = rotate(q, k, positions, *t)
        k_cache[slots], v_cache[slots] = k.to(k_cache.dtype), v.to(v_cache.dtype)
        return q * 2

    return body


def inputs(dtype: torch.dtype = torch.float32, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    return (
        torch.randn(tokens, 4 * HEADS, DIM).to(dtype),
        torch.randperm(SLOTS)[:tokens],
        torch.randint(POSITIONS, (tokens,)),
    )


def twins(
    paged: Any, body: Callable[..., Tensor], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Any]:
    """The model on pages without the fusion, and with it."""
    model = Rotary(body, dtype)
    return paged(copy.deepcopy(model), dtype=dtype), paged(model, dtype=dtype, fuse_rope=True, **options)


def check_same(plain: Any, fused: Any, *args: Tensor) -> None:
    """Outputs and every byte of the pool are equal."""
    with torch.no_grad():
        expected, got = plain.compiled(*args), fused.compiled(*args)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert torch.equal(fused.pool.buffer, plain.pool.buffer)


def count(twin: Any, op: str) -> int:
    return sum(f"pm_ops.{op}.default(" in line for line in twin.backend.graphs[-1].splitlines())


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


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in FORMS), ("gemma3", torch.float16)])
def test_16_bit_graphs_are_equal_but_for_the_roundings_in_between(paged: Any, name: str, dtype: torch.dtype) -> None:
    """One ulp of what a pair, or its norm, is made of; nothing where the graph itself rounds at the end only."""
    form = FORMS[name]
    one, other = twins(paged, plain(form.rotate), dtype)
    tensors = [t if t.dim() == 1 and "norm" not in form.says else t.to(dtype) for t in form.tensors]
    with torch.no_grad():
        expected, got = (twin.compiled(*inputs(dtype), *tensors) for twin in (one, other))
    assert count(other, "rope_store_kv") == LAYERS
    tolerance = 0.0 if form.grows else 2 * torch.finfo(dtype).eps * (4 if "norm" in form.says else 1)
    for a, b in zip(got[:3], expected[:3], strict=True):
        assert a.dtype == b.dtype
        largest = b.float().abs().amax(-1, keepdim=True)
        assert bool(((a.float() - b.float()).abs() <= tolerance * largest).all())


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


def test_inductor_keeps_fused_and_unfused_graphs_apart_in_its_caches(paged: Any) -> None:
    """And the pool is passed through whole, without a clone, to one operator a layer."""
    form = FORMS["llama"]
    with fresh_cache():
        results = []
        for fuse, hits in ((False, 0), (True, 0), (True, 1)):
            torch._dynamo.reset()
            torch.manual_seed(0)
            twin = paged(Rotary(plain(form.rotate)), inner="inductor", fuse_rope=fuse)
            ReinplaceCounters.clear()
            counters.clear()
            with torch.no_grad():
                out, (code,) = run_and_get_code(twin.compiled, *inputs(), *form.tensors)
            assert counters["inductor"]["fxgraph_cache_hit"] == hits
            assert ReinplaceCounters.get_total_missed() == 0
            assert len(re.findall(r"torch\.ops\.pm_ops\.rope_store_kv\.default\(arg", code)) == (LAYERS if fuse else 0)
            results.append((out, twin.pool.buffer))
    for out, buffer in results[1:]:
        torch.testing.assert_close(out, results[0][0], rtol=0, atol=0)
        assert torch.equal(buffer, results[0][1])


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
