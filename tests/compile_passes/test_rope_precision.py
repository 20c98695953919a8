"""16-bit graphs: a graph rounds after each of its operations, rope_store_kv once, so it is the one that is right.

What is right: the graph's arithmetic in float64, on the same rows and the same cosines and sines, which models round to
16 bits before they use them. What rope_store_kv gives is the 16-bit number next to that; what an eager graph gives is
further away, by the roundings of two products, a sum, and up to three operations of a norm.
"""

from __future__ import annotations

from typing import Any

import pytest
import rotary_forms
import torch
from rotary_forms import FORMS, Form
from rotary_layers import LAYERS, count, inputs, plain, twins
from torch import Tensor

TOKENS = 16
NOISE = 2.0**-20
"""Of float32 arithmetic, relative to what the largest element of a head is made of."""


def tables_of(form: Form, dtype: torch.dtype) -> list[Tensor]:
    """Norms' weights and tables in 16 bits; frequencies are float32 in models."""
    return [t if t.dim() == 1 and "norm" not in form.says else t.to(dtype) for t in form.tensors]


def exact(form: Form, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Query (doubled, as the model here does), key and value of the first layer, as float64."""
    angles = rotary_forms._angles
    monkeypatch.setattr(rotary_forms, "_angles", lambda x, *rest: tuple(t.double() for t in angles(x.to(dtype), *rest)))
    qkv, _, positions = inputs(dtype, TOKENS)
    q, k, v = qkv.double().split([4, 2, 2], 1)
    q, k = form.rotate(q, k, positions, *(t.double() for t in tables_of(form, dtype)))
    return [q * 2, k, v]


def spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of a dtype at ``x``: an ulp."""
    return torch.finfo(dtype).eps * 2.0 ** x.abs().clamp_min(torch.finfo(dtype).tiny).log2().floor()


def noise(x: Tensor) -> Tensor:
    return NOISE * x.abs().amax(-1, keepdim=True)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in FORMS), ("gemma3", torch.float16)])
def test_the_fused_operator_rounds_once_and_is_never_further_from_float64_than_the_graph(
    paged: Any, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMS[name]
    one, other = twins(paged, plain(form.rotate), dtype)
    with torch.no_grad():
        unfused, fused = (twin.compiled(*inputs(dtype, TOKENS), *tables_of(form, dtype)) for twin in (one, other))
    assert count(other, "rope_store_kv") == LAYERS
    further = 0
    for got, graph, right in zip(fused[:3], unfused[:3], exact(form, dtype, monkeypatch), strict=True):
        error, of_graph = (got.double() - right).abs(), (graph.double() - right).abs()
        assert bool((error <= spacing(right, dtype) / 2 + noise(right)).all())  # half an ulp: one rounding
        assert bool((error <= of_graph + 2 * noise(right)).all())
        further += int((of_graph > error + 2 * noise(right)).sum())
        if form.grows:
            assert torch.equal(got, graph)
    assert (further == 0) == form.grows  # the graph's roundings are there


def test_inductor_which_leaves_these_roundings_out_gives_the_same_numbers(paged: Any) -> None:
    """From a table that comes in 16 bits; an ulp of the cache is what a product fused into a sum may turn."""
    form, dtype = FORMS["vllm_neox"], torch.bfloat16
    one, other = twins(paged, plain(form.rotate), dtype, inner="inductor")
    with torch.no_grad():
        unfused, fused = (twin.compiled(*inputs(dtype, TOKENS), *tables_of(form, dtype)) for twin in (one, other))
    for got, graph in zip(fused[:3], unfused[:3], strict=True):
        difference = (got.double() - graph.double()).abs()
        assert bool((difference <= spacing(graph.double(), dtype) + noise(graph.double())).all())
        assert float((difference > 0).double().mean()) < 0.01
    assert other.binding.report().fused == LAYERS
