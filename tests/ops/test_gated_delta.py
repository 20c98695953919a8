"""The gated delta rule on the CPU, which is the specification; what it refuses; torch.compile; transformers' own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from gated_delta_cases import Call, owned_bytes, parts_of, prefill_case, reference, states_of, update_case
from state_cases import BF16, CHUNKS, F16, F32, copied

import pm_ops
from pm_ops.ops.gated_delta import GatedDeltaUpdate
from pm_ops.testing import fill_nan, writes_only

TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}
TYPES = [
    ((F32,) * 5, F32),
    ((BF16, BF16, BF16, F32, BF16), F32),
    ((F16, F16, F16, F32, F32), BF16),
    ((F32, BF16, F16, BF16, F16), F16),
]
"""Of query, key, value, g and beta, and of states."""


def call(a: Call) -> torch.Tensor:
    name = "gated_delta_update" if isinstance(a, GatedDeltaUpdate) else "gated_delta_prefill"
    return getattr(torch.ops.pm_ops, name)(*(getattr(a, f.name) for f in fields(a)))


def check(a: Call) -> None:
    out, states = reference(a)
    with writes_only(a.buffer, owned_bytes(a, list(states))):
        got = call(a)
    near(got, out, a.value.dtype)
    assert bool((got[out == 0] == 0).all())
    for page, state in states.items():
        near(states_of(a)[page], state, a.state_dtype)


def near(got: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("dtypes", "states"), TYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("value_first", [True, False])
def test_updates_are_right_in_mixed_dtypes_and_touch_nothing_else(dtypes, states, index, value_first):
    options = {"dtypes": dtypes, "state_dtype": states, "index": index, "value_first": value_first}
    check(update_case(4, **options))
    check(update_case(3, 4, raw=True, **options))
    check(update_case(4, 3, each=True, **options))
    check(update_case(2, 3, each=True, accepted=False, l2_norm=False, **options))


@pytest.mark.parametrize(("dtypes", "states"), TYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("value_first", [True, False])
def test_prefills_are_right_in_mixed_dtypes_and_touch_nothing_else(dtypes, states, index, value_first):
    options = {"dtypes": dtypes, "state_dtype": states, "index": index, "value_first": value_first}
    check(prefill_case([5, 1, 0, 3, 2], raw=True, **options))
    check(prefill_case([2, 4], initial=False, l2_norm=False, **options))


def test_lengths_around_chunks():
    check(prefill_case(CHUNKS, heads=(2, 1), dims=(3, 4)))


def test_a_decay_of_nothing_and_of_everything():
    case = prefill_case([6])
    case.g[:3], case.g[3], case.g[4] = 0, -torch.inf, -1e30
    check(case)


def test_a_prefill_in_two_parts_is_the_same_as_in_one():
    whole = prefill_case([7], padding=0)
    parts = parts_of(copied(whole), 3)
    parts[1].buffer = parts[0].buffer
    out = torch.cat([call(a) for a in parts])
    torch.testing.assert_close(out, call(whole))
    torch.testing.assert_close(states_of(parts[1])[whole.state_indices], states_of(whole)[whole.state_indices])


def test_a_prefill_goes_on_as_updates_do():
    whole = prefill_case([5], padding=0)
    first, rest = parts_of(copied(whole), 4)
    expected = call(whole)
    call(first)
    rows = {name: getattr(rest, name) for name in ("query", "key", "value", "g", "beta")}
    page = {name: getattr(first, name) for name in ("buffer", "state_indices", "state_plane", "state_dtype")}
    last = GatedDeltaUpdate(**rows, **page, scale=whole.scale, l2_norm=whole.l2_norm)
    torch.testing.assert_close(call(last), expected[4:])
    torch.testing.assert_close(states_of(first)[whole.state_indices], states_of(whole)[whole.state_indices])


def test_after_a_rejected_token_the_next_step_goes_on_from_the_last_accepted_one():
    """Four tokens were proposed, two accepted: the step after gives what it gives without the other two."""
    draft = update_case(1, 4, each=True, accepted=False)
    draft.state_indices = torch.randperm(6)[:4].view(1, 4)
    states_of(draft)[:] = torch.randn(states_of(draft).shape)
    plain = replace(copied(draft), state_indices=draft.state_indices[:, 0].clone())
    call(draft)
    after = replace(draft, num_accepted=torch.tensor([2]))
    accepted = {name: getattr(plain, name)[:, :2] for name in ("query", "key", "value", "g", "beta")}
    call(replace(plain, **accepted))
    torch.testing.assert_close(call(after), call(plain))


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "rank": (update_case, {"query": torch.zeros(3, 20)}, r"query must be \[sequences, heads, dim\] or"),
    "rank of a prefill": (prefill_case, {"query": torch.zeros(3, 1, 2, 20)}, r"query must be \[tokens, heads, dim\]"),
    "ranks": (update_case, {"value": torch.zeros(3, 1, 4, 12)}, "value must have as many axes as query, 3"),
    "dtype of rows": (update_case, {"key": torch.zeros(3, 2, 20).double()}, "of float32, float16, bfloat16"),
    "dtype of states": (update_case, {"state_dtype": torch.int8}, "not supported for a state"),
    "key of another dim": (update_case, {"key": torch.zeros(3, 2, 19)}, r"key is \[3, 2, 19\]; it must be \[3, 2, 20"),
    "heads": (update_case, {"query": torch.zeros(3, 3, 20), "key": torch.zeros(3, 3, 20)}, "value has 4 heads, key 3"),
    "no head": (update_case, {"query": torch.zeros(3, 0, 20), "key": torch.zeros(3, 0, 20)}, "must be a multiple"),
    "dims": (update_case, {"query": torch.zeros(3, 2, 257), "key": torch.zeros(3, 2, 257)}, "supported are 1 to 256"),
    "g": (update_case, {"g": torch.zeros(3, 2)}, r"g is \[3, 2\]; it must be \[3, 4\]"),
    "beta": (prefill_case, {"beta": torch.zeros(3, 4, 1)}, r"beta must be \[8, 4\]"),
    "a_log alone": (update_case, {"a_log": torch.zeros(4)}, "a_log and dt_bias come together"),
    "a_log": (update_case, {"a_log": torch.zeros(2), "dt_bias": torch.zeros(4)}, r"a_log is \[2\]"),
    "scale": (update_case, {"scale": float("nan")}, "scale=nan must be a finite number"),
    "indices": (update_case, {"state_indices": torch.zeros(3)}, "state_indices must be a 1-D int32 or int64"),
    "an index a token": (update_case, {"state_indices": torch.ones(3, 2).long()}, "a token axis"),
    "a page that is not there": (update_case, {"state_indices": torch.tensor([0, 1, 5])}, "has 5, but there are 5"),
    "a page twice": (prefill_case, {"state_indices": torch.tensor([3, 1, 3])}, "names 3 twice"),
    "accepted": (update_case, {"num_accepted": torch.tensor([1, 1, 1])}, "num_accepted needs state_indices"),
    "starts": (prefill_case, {"query_start": torch.tensor([0, 4, 3, 5])}, "must begin at 0, be cumulative"),
    "known": (prefill_case, {"has_initial_state": torch.tensor([True])}, "1 entries for 3 sequences"),
    "a plane too small": (update_case, {}, "last element ends"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(name):
    make, change, message = BAD[name]
    case = make(3) if make is update_case else make([2, 1, 2])
    if name == "a plane too small":
        change = {"state_plane": [case.buffer.numel() - 64, *case.state_plane[1:]]}
    with writes_only(case.buffer, []), pytest.raises(ValueError, match=message):
        call(replace(case, **change))


def test_a_pool_and_a_layer_stand_for_the_plane():
    layout = pm_ops.state_page([0, 3], {"conv": ((6, 3), F32), "ssm": ((4, 6, 5), F32), "hf": ((4, 5, 6), F32)})
    pool = pm_ops.PagePool(layout, 3)
    query, key, value = torch.randn(2, 2, 5), torch.randn(2, 2, 5), torch.randn(2, 4, 6)
    g, beta = -torch.rand(2, 4), torch.rand(2, 4)
    out = pm_ops.gated_delta_prefill(pool, 3, query, key, value, g, beta, torch.tensor([0, 2]), torch.tensor([1]))
    for t in range(2):
        rows = (x[t : t + 1] for x in (query, key, value, g, beta))
        index = torch.tensor([2])
        token = pm_ops.gated_delta_update(pool, 3, *rows, index, scale=5**-0.5, kind="hf", value_first=False)
        torch.testing.assert_close(token[0], out[t])
    torch.testing.assert_close(pool.view(3, "ssm")[1], pool.view(3, "hf")[2].transpose(1, 2))
    assert not pool.view(0, "ssm").any() and not pool.view(3, "ssm")[0].any()
    rows, where = (query, key, value, g, beta), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"make states of \[4, 5, 6\]; plane 'ssm' of layer 3 is \[4, 6, 5\]"):
        pm_ops.gated_delta_update(pool, 3, *rows, where, value_first=False)
    for at in (1, 2):  # of key and value
        bare = [torch.tensor(1.0) if i == at else x for i, x in enumerate(rows)]
        with pytest.raises(ValueError, match=r"\[\].* make states of .*; plane 'ssm' of layer 3 is \[4, 6, 5\]"):
            pm_ops.gated_delta_update(pool, 3, *bare, where)
    with pytest.raises(ValueError, match="no plane 'ssm' of layer 1"):
        pm_ops.gated_delta_update(pool, 1, *rows, where)


def test_compiled_it_is_as_eager_and_one_graph_serves_several_batches():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(call_parts, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (5, 6, 9):  # none is another axis's size
        case = update_case(batch, raw=True)
        twin = copied(case)
        torch.testing.assert_close(compiled(*args_of(twin)), call(case))
        assert torch.equal(twin.buffer, case.buffer)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def args_of(a: GatedDeltaUpdate) -> tuple[Any, ...]:
    return tuple(getattr(a, f.name) for f in fields(a))


def call_parts(*args: Any) -> torch.Tensor:
    return torch.ops.pm_ops.gated_delta_update(*args)


@pytest.fixture(scope="module")
def qwen() -> Any:
    """Qwen3-Next's functions, whose states are [key, value]."""
    return pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_transformers_gives_the_same_for_a_prefill_and_then_a_token(qwen, length):
    case = replace(prefill_case([length + 1], heads=(4, 2), value_first=False, padding=0), has_initial_state=None)
    page = case.state_indices
    first, rest = parts_of(case, length)
    rows = [x[None].contiguous() for x in (case.query, case.key, case.value, case.g, case.beta)]
    rows[:2] = [x.repeat_interleave(2, 2) for x in rows[:2]]
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    out, state = qwen.torch_chunk_gated_delta_rule(*(x[:, :length] for x in rows), **options)
    torch.testing.assert_close(call(first), out[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states_of(first)[page].mT, state, rtol=1e-5, atol=1e-5)
    out, state = qwen.torch_recurrent_gated_delta_rule(*(x[:, length:] for x in rows), initial_state=state, **options)
    torch.testing.assert_close(call(rest), out[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states_of(rest)[page].mT, state, rtol=1e-5, atol=1e-5)


def test_a_layers_raw_projections(qwen):
    """The module's own gates: decay and rate from what it projects, as engines leave them to the kernel."""
    case = prefill_case([9], raw=True, padding=0, initial=False)
    g = -case.a_log.exp() * torch.nn.functional.softplus(case.g + case.dt_bias)
    rows = [x[None].contiguous() for x in (case.query, case.key, case.value, g, case.beta.sigmoid())]
    rows[:2] = [x.repeat_interleave(2, 2) for x in rows[:2]]
    out, _ = qwen.torch_chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(call(case), out[0], rtol=1e-5, atol=1e-5)


def test_a_layer_of_qwen3_next_runs_on_its_page_as_transformers_runs_it(qwen):
    """Convolution and gated delta rule by operators, all the rest by the module: 70 tokens at once, then one by one."""
    config = qwen.Qwen3NextConfig(
        hidden_size=24, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=6, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    layer, hidden, count = qwen.Qwen3NextGatedDeltaNet(config, 0).eval(), torch.randn(1, 73, 24), 70
    channels = layer.conv_dim
    pool = pm_ops.PagePool(pm_ops.state_page(2, {"conv": ((channels, 3), F32), "ssm": ((4, 6, 8), F32)}), 4)
    fill_nan(pool.buffer)
    page, start = torch.tensor([2]), torch.tensor([0, count])
    weight, rows = layer.conv1d.weight.detach()[:, 0], []
    with torch.no_grad():
        expected = layer(hidden)[0]
        query, key, value, z, b, a = (
            x[0] for x in layer.fix_query_key_value_ordering(layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden))
        )
        mixed = torch.cat([x.flatten(1) for x in (query, key, value)], 1)
        options = {"l2_norm": True, "a_log": layer.A_log.detach(), "dt_bias": layer.dt_bias.detach()}

        def heads(x: torch.Tensor) -> list[torch.Tensor]:
            parts = x.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
            return [part.unflatten(-1, (n, -1)) for part, n in zip(parts, (2, 2, 4), strict=True)]

        x = pm_ops.conv1d_prefill(pool, 1, mixed[:count], weight, start, page, silu=True)
        rows.append(pm_ops.gated_delta_prefill(pool, 1, *heads(x), a[:count], b[:count], start, page, **options))
        for t in range(count, 73):
            x = pm_ops.conv1d_update(pool, 1, mixed[t : t + 1], weight, page, silu=True)
            rows.append(pm_ops.gated_delta_update(pool, 1, *heads(x), a[t : t + 1], b[t : t + 1], page, **options))
        out = layer.norm(torch.cat(rows).flatten(0, 1), z.flatten(0, 1))
        torch.testing.assert_close(layer.out_proj(out.view(73, -1)), expected, rtol=1e-4, atol=1e-5)
