"""RopeStorePass: in an engine's graphs, where the cache is out of sight, one fused operator a layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rotary_engine import (
    LAYERS,
    TOKENS,
    Body,
    Compiled,
    in_place,
    inputs,
    operators,
    plain,
    stored,
)
from rotary_forms import DIM, FORMS, llama
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from pm_ops.compile_passes import RewriteError


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[Any]:
    with operators() as engine:
        yield engine


@pytest.mark.parametrize("name", FORMS)
def test_every_form_becomes_one_operator_a_layer_with_the_same_bits(name: str) -> None:
    form = FORMS[name]
    compiled = Compiled(plain(form.rotate))
    assert compiled.check(*inputs(), *form.tensors) == ["fused"] * LAYERS
    report = compiled.rope.report
    assert list(report.fused) == ["layer 0", "layer 1"] and not report.unfused and report.graphs == 1
    assert form.says in str(report) and "rotary_forms.py" in str(report)


def test_sizes_may_be_symbolic() -> None:
    compiled = Compiled(plain(FORMS["vllm_neox"].rotate), dynamic=True)
    for tokens in (TOKENS, 3, 7):
        assert compiled.check(*inputs(tokens), *FORMS["vllm_neox"].tensors) == ["fused"] * LAYERS
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("version", [1, 2])
def test_an_operator_that_rotates_in_place_goes_by_its_table_and_positions(
    version: int, neox: bool, dynamic: bool
) -> None:
    compiled = Compiled(in_place(neox), version, dynamic)
    assert compiled.check(*inputs(), *FORMS["vllm_neox" if neox else "vllm_gptj"].tensors) == ["fused"] * LAYERS
    assert "rotary" not in compiled.graphs[0] and "attend" in compiled.graphs[0]


@pytest.mark.parametrize("version", [1, 2])
def test_a_norm_in_front_of_the_operator_goes_into_the_store(version: int) -> None:
    """Query and key are tensors of their own then, and the second version's bases as a whole."""
    table, (_, q_weight, k_weight) = FORMS["vllm_neox"].tensors[0], FORMS["qwen3"].tensors

    def body(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        norm = torch.nn.functional.rms_norm
        q = norm(q.unflatten(-1, (-1, DIM)), (DIM,), q_weight, 1e-6).view(q.shape)
        k = norm(k.unflatten(-1, (-1, DIM)), (DIM,), k_weight, 1e-6).view(k.shape)
        in_place()(layer, q, k, v, out, positions, table)

    compiled = Compiled(body, version)
    assert compiled.check(*inputs(), table) == ["fused"] * LAYERS
    assert "QK-norm" in str(compiled.rope.report)


@pytest.mark.parametrize("native", [True, False])
def test_a_norm_operator_goes_into_the_store_where_it_is_the_norm_of_that(native: bool, caplog: Any) -> None:
    """With weights; without, it stays, and so does the factor of a Gemma norm, which is computed for the weights."""
    table, (_, q_weight, k_weight) = FORMS["vllm_neox"].tensors[0], FORMS["qwen3"].tensors

    def body(weighted: bool) -> Body:
        def layer_of(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Tensor) -> None:
            weights = (1.0 + q_weight, 1.0 + k_weight) if weighted else (None, None)
            q, k = (
                torch.ops.pm_test_engine.norm(x.unflatten(-1, (-1, DIM)), w, 1e-5).view(x.shape)
                for x, w in zip((q, k), weights, strict=True)
            )
            (plain(FORMS["vllm_neox"].rotate) if native else in_place())(layer, q, k, v, out, *rest)

        return layer_of

    compiled = Compiled(body(True))
    assert compiled.check(*inputs(), table) == ["fused"] * LAYERS and "QK-norm" in str(compiled.rope.report)
    compiled = Compiled(body(False))
    assert compiled.check(*inputs(), table) == ["norm", "norm", "fused"] * LAYERS
    assert "QK-norm" not in str(compiled.rope.report)


@pytest.mark.parametrize("version", [1, 2])
def test_an_operator_that_is_not_fused_stays(version: int, caplog: Any) -> None:
    """One whose adapter refuses it, one whose key is changed before the store, and one whose base is used whole."""

    def changed(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        torch.ops.pm_test_engine.rotary(positions, q, k, DIM, table, True)
        stored(layer, q, k * 2, v, out)

    def whole(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        qkv = torch.cat((q, k, v), -1)
        q, k, v = qkv.split([q.shape[1], k.shape[1], v.shape[1]], -1)
        torch.ops.pm_test_engine.rotary(positions, q, k, DIM, table, True)
        stored(layer, q, k, v, out)
        out.add_(qkv.sum())

    table = FORMS["vllm_neox"].tensors[0]
    for body in (in_place(skip=1), changed, *([whole] if version == 2 else [])):
        compiled = Compiled(body, version)
        assert compiled.check(*inputs(), table) == ["rotary", "store"] * LAYERS
        assert len(compiled.rope.report.unfused) == LAYERS and "layer 1" in caplog.text
        assert "pm_ops_trace" not in compiled.graphs[0]
        caplog.clear()


@pytest.mark.parametrize("version", [1, 2])
def test_operators_that_rotate_query_and_key_by_different_positions_stay(version: int) -> None:
    def body(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        q, k, other_q, other_k = q.clone(), k.clone(), q.clone(), k.clone()
        torch.ops.pm_test_engine.rotary(positions, q, other_k, DIM, table, True)
        torch.ops.pm_test_engine.rotary(positions + 1, other_q, k, DIM, table, True)
        stored(layer, q, k, v, out)

    compiled = Compiled(body, version)
    assert compiled.check(*inputs(), FORMS["vllm_neox"].tensors[0]) == ["rotary", "rotary", "store"] * LAYERS
    assert all("by the same angles" in reason for reason in compiled.rope.report.unfused.values())
    assert not compiled.rope.report.fused


def test_keys_and_values_of_different_tokens_go_where_the_store_puts_them() -> None:
    """An engine's store has one set of slots, but its rows may come in another order for values than for keys."""

    def body(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Tensor) -> None:
        q, k = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), *rest)
        stored(layer, q, k, v.flip(0), out)

    assert Compiled(body).check(*inputs(), *FORMS["llama"].tensors) == ["fused"] * LAYERS


ALONE: dict[str, Body] = {}


def alone(body: Body) -> Body:
    ALONE[body.__name__] = body
    return body


@alone
def key_changed_before_the_store(layer, q, k, v, out, *rest):
    q, k = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), *rest)
    stored(layer, q, k + 1, v, out)


@alone
def query_of_other_positions(layer, q, k, v, out, positions, *t):
    q = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), positions + 1, *t)[0]
    k = llama(k.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), positions, *t)[1]
    stored(layer, q, k, v, out)


@alone
def key_stored_under_a_condition(layer, q, k, v, out, positions, *t):
    plain_key = k.unflatten(-1, (-1, DIM))
    q, k = llama(q.unflatten(-1, (-1, DIM)), plain_key, positions, *t)
    stored(layer, q, torch.where(positions[:, None, None] > 3, k, plain_key), v, out)


@alone
def value_of_the_rotated_key(layer, q, k, v, out, *rest):
    q, k = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), *rest)
    stored(layer, q, k, k * v.unflatten(-1, (-1, DIM)), out)


@alone
def key_of_other_tokens(layer, q, k, v, out, *rest):
    q, k = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), *rest)
    stored(layer, q, k.flip(0), v, out)


@alone
def key_not_rotated(layer, q, k, v, out, *rest):
    stored(layer, q, k, v, out)


@pytest.mark.parametrize("name", ALONE)
def test_where_fusion_would_be_wrong_the_graph_stays_and_a_warning_says_why(name: str, caplog: Any) -> None:
    compiled = Compiled(ALONE[name])
    assert compiled.check(*inputs(), *FORMS["llama"].tensors) == ["store"] * LAYERS
    report = compiled.rope.report
    assert not report.fused and list(report.unfused) == ["layer 0", "layer 1"]
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING and "rope_store_kv" in r.message]
    assert "layer layer" not in record.message
    assert "layer 0: its " in record.message or "layer 0: no query" in record.message or "beside" in record.message
    assert "rotary_engine.py" in record.message  # the user's line


def test_strict_raises_every_time_where_a_layer_is_left() -> None:
    """An engine may catch the error, and compile or call anew."""
    compiled = Compiled(key_changed_before_the_store, strict=True)
    for _ in range(2):
        with pytest.raises(Exception, match="strict: without it") as caught, torch.no_grad():
            compiled.compiled(*inputs(), *FORMS["llama"].tensors)
        errors = (caught.value, caught.value.__cause__, caught.value.__context__)
        assert any(isinstance(e, RewriteError) for e in errors)


@pytest.mark.parametrize("by_operator", [False, True])
def test_a_graph_that_was_split_at_its_stores_is_warned_of_with_the_remedy(by_operator: bool, caplog: Any) -> None:
    """As engines split theirs by default; other graphs without stores are none of the pass's business."""
    table = FORMS["vllm_neox"].tensors[0]

    def piece(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if by_operator:
            q, k = q.clone(), k.clone()
            torch.ops.pm_test_engine.rotary(positions, q, k, DIM, table, True)
            return q, k
        return FORMS["vllm_neox"].rotate(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), positions, table)

    compiled = Compiled(key_not_rotated)
    backend = aot_autograd(fw_compiler=compiled._compile, decompositions=select_decomp_table())
    with torch.no_grad(), torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        torch.compile(lambda x: x * torch.cos(x) + 1, backend=backend)(torch.randn(3, 2, 8))
        assert "rope_store_kv" not in caplog.text and not compiled.rope.report.split
        rows = torch.randn(3, 4 * DIM), torch.randn(3, 2 * DIM), torch.tensor([2, 9, 4])
        got = torch.compile(piece, backend=backend)(*rows)
    torch.testing.assert_close(got, piece(*rows), rtol=0, atol=0)
    assert "without splitting its graphs at the store operator" in caplog.text and compiled.rope.report.split
    assert "without splitting" in str(compiled.rope.report)
