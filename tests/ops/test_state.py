"""The operators over states on the CPU, which are the specification; what they refuse; and torch.compile."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from state_cases import (
    BF16,
    CHUNKS,
    F16,
    F32,
    Call,
    conv_prefill,
    conv_update,
    copied,
    owned_bytes,
    reference,
    ssm_prefill,
    ssm_update,
    states_of,
)

import pm_ops
from pm_ops.testing import fill_nan, writes_only

TOLERANCE = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}
TYPES = [(F32, F32), (BF16, F32), (F16, BF16), (F32, F16), (BF16, BF16)]
"""Of rows and of states."""


def call(a: Call) -> torch.Tensor:
    name = re.sub(r"(?<!^)([A-Z])", r"_\1", type(a).__name__).lower()
    return getattr(torch.ops.pm_ops, name)(*(getattr(a, f.name) for f in fields(a)))


def check(a: Call) -> None:
    out, states = reference(a)
    with writes_only(a.buffer, owned_bytes(a, list(states))):
        got = call(a)
    near(got, out, a.x.dtype)
    assert bool((got[out == 0] == 0).all())
    for page, state in states.items():
        near(states_of(a)[page], state, a.state_dtype)


def near(got: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(got.double(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("rows", "states"), TYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_updates_are_right_in_mixed_dtypes_and_touch_nothing_else(rows, states, index):
    options = {"dtype": rows, "state_dtype": states, "index_dtype": index}
    for make in (conv_update, ssm_update):
        check(make(4, **options))
        check(make(3, 4, **options))
        check(make(4, 3, per_token=True, **options))


@pytest.mark.parametrize(("rows", "states"), TYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_prefills_are_right_in_mixed_dtypes_and_touch_nothing_else(rows, states, index):
    options = {"dtype": rows, "state_dtype": states, "index_dtype": index}
    for make in (conv_prefill, ssm_prefill):
        check(make([5, 1, 0, 3, 2], **options))
        check(make([2, 4], initial=False, **options))


@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_width(width):
    check(conv_update(2, 3, width=width))
    check(conv_prefill([1, 4, 2], width=width, bias=False, silu=False))


def test_lengths_around_chunks():
    check(conv_prefill(CHUNKS))
    check(ssm_prefill(CHUNKS, heads=(2, 1), dims=(3, 4)))


@pytest.mark.parametrize("make", [lambda: conv_prefill([7, 5], skip=False), lambda: ssm_prefill([7, 5], skip=False)])
def test_a_prefill_in_two_parts_is_the_same_as_in_one(make):
    """And its state goes on where the first part's has ended, whatever the page held before."""
    whole = make()
    whole.has_initial_state = None
    parts = copied(whole)
    out = call(whole)
    for first, last, known in ((0, 3, False), (3, 7, True)):
        rows = {f.name: getattr(parts, f.name) for f in fields(parts) if f.name in ("x", "dt", "B", "C", "z")}
        one = {name: rows[first:last] for name, rows in rows.items()}
        part = replace(parts, **one, query_start=torch.tensor([0, last - first]), state_indices=whole.state_indices[:1])
        part.has_initial_state = torch.tensor([known])
        torch.testing.assert_close(call(part), out[first:last])
    page = int(whole.state_indices[0])
    torch.testing.assert_close(states_of(parts)[page], states_of(whole)[page])


@pytest.mark.parametrize("make", [conv_update, ssm_update])
def test_after_a_rejected_token_the_next_step_goes_on_from_the_last_accepted_one(make):
    """Four tokens were proposed, two accepted: the step after gives what it gives without the other two."""
    draft = replace(make(1, 4, per_token=True, skip=False), num_accepted=None)
    plain = copied(draft)
    call(draft)
    after = replace(copied(draft), num_accepted=torch.tensor([2]))
    rows = {name: getattr(draft, name)[:, :2] for name in ("x", "dt", "B", "C", "z") if hasattr(draft, name)}
    call(replace(plain, **rows, state_indices=draft.state_indices[:, :1].contiguous().view(1)))
    expected = call(replace(plain, state_indices=draft.state_indices[:, :1].contiguous().view(1)))
    torch.testing.assert_close(call(after), expected)


@pytest.mark.parametrize(
    "make", [conv_update, ssm_update, lambda n: conv_prefill([1] * n), lambda n: ssm_prefill([1] * n)]
)
def test_only_the_states_that_are_named_are_read(make):
    """The rest of the pool is NaN."""
    case = make(4)
    kept = states_of(case).clone()
    fill_nan(case.buffer)
    pages = [page for page in case.state_indices.tolist() if page >= 0]
    states_of(case)[pages] = kept[pages]
    check(case)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "width": (conv_update, {"weight": torch.zeros(20, 5)}, "width of 2, 3 or 4"),
    "channels": (conv_update, {"weight": torch.zeros(21, 4)}, r"weight is \[21, 4\]; it must be \[20, 4\]"),
    "bias": (conv_update, {"bias": torch.zeros(3)}, r"bias is \[3\]"),
    "rank": (conv_update, {"x": torch.zeros(20)}, r"x must be \[sequences, dim\]"),
    "dtype of rows": (conv_update, {"x": torch.zeros(3, 20).double()}, "x must be float32, float16 or bfloat16"),
    "dtype of states": (conv_update, {"state_dtype": torch.int8}, "not supported for a state"),
    "floating indices": (conv_update, {"state_indices": torch.zeros(3)}, "state_indices must be a 1-D int32 or int64"),
    "too few indices": (conv_update, {"state_indices": torch.tensor([1])}, "1 rows for 3 sequences"),
    "an index a token": (conv_update, {"state_indices": torch.ones(3, 2).long()}, "give x a token axis"),
    "a page that is not there": (conv_update, {"state_indices": torch.tensor([0, 1, 5])}, "has 5, but there are 5"),
    "a page twice": (conv_update, {"state_indices": torch.tensor([3, 1, 3])}, "names 3 twice"),
    "accepted": (conv_update, {"num_accepted": torch.tensor([1, 1, 1])}, "num_accepted needs state_indices"),
    "heads and groups": (ssm_update, dict.fromkeys("BC", torch.zeros(3, 3, 20)), "4 heads cannot share 3"),
    "B and C": (ssm_update, {"C": torch.zeros(3, 2, 19)}, r"C is \[3, 2, 19\]; it must be \[3, 2, 20\]"),
    "dt of a dim": (ssm_update, {"dt": torch.zeros(3, 4, 12)}, r"dt must be \[3, 4\]"),
    "A of a dim": (ssm_update, {"A": torch.zeros(4, 12)}, r"A must be \[4\]"),
    "limits": (ssm_update, {"dt_min": 3.0, "dt_max": 2.0}, "dt_min=3.0 must not be above dt_max=2.0"),
    "a plane too small": (ssm_update, {"state_plane": [0, 8, 0, 960, 5]}, "does not hold|last element ends"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_written(name):
    make, change, message = BAD[name]
    case = make(3)
    if name == "a plane too small":
        change = {"state_plane": [case.buffer.numel() - 64, *case.state_plane[1:]]}
    with writes_only(case.buffer, []), pytest.raises(ValueError, match=message):
        call(replace(case, **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_start": torch.tensor([0, 4])}, "2 entries for 2 sequences"),
        ({"query_start": torch.tensor([0, 4, 3])}, "must begin at 0, be cumulative"),
        ({"query_start": torch.tensor([0, 4, 99])}, "end within the"),
        ({"query_start": torch.tensor([1, 4, 5])}, "must begin at 0"),
        ({"has_initial_state": torch.tensor([1, 0])}, "has_initial_state must be a 1-D bool"),
        ({"has_initial_state": torch.tensor([True])}, "1 entries for 2 sequences"),
        ({"state_indices": torch.tensor([4, -1])}, "has 4, but there are 4"),
    ],
)
@pytest.mark.parametrize("make", [conv_prefill, ssm_prefill])
def test_bad_sequences_are_refused_before_anything_is_written(make, change, message):
    case = make([3, 2])
    with writes_only(case.buffer, []), pytest.raises(ValueError, match=message):
        call(replace(case, **change))


def test_a_pool_and_a_layer_stand_for_the_plane():
    layout = pm_ops.state_page([0, 3], {"conv": ((6, 3), F32), "ssm": ((2, 4, 5), F32)})
    pool, page = pm_ops.PagePool(layout, 3), torch.tensor([1])
    weight, x = torch.randn(6, 4), torch.randn(2, 6)
    pm_ops.conv1d_prefill(pool, 3, x, weight, torch.tensor([0, 2]), page)
    torch.testing.assert_close(pool.view(3, "conv")[1, :, 1:], x.T)
    y = pm_ops.conv1d_update(pool, 3, x[:1], weight, page)
    torch.testing.assert_close(y[0], (torch.stack((x[0], x[1], x[0]), 1) * weight[:, 1:]).sum(1))
    rows = torch.randn(2, 2, 4), torch.rand(2, 2), -torch.rand(2), torch.randn(2, 1, 5), torch.randn(2, 1, 5)
    first = pm_ops.selective_scan_prefill(pool, 3, *rows, torch.tensor([0, 2]), page)
    other = torch.tensor([2])
    for t in range(2):
        token = (rows[0][t : t + 1], rows[1][t : t + 1], rows[2], rows[3][t : t + 1], rows[4][t : t + 1])
        torch.testing.assert_close(pm_ops.selective_state_update(pool, 3, *token, other)[0], first[t])
    torch.testing.assert_close(pool.view(3, "ssm")[1], pool.view(3, "ssm")[2])
    assert not pool.view(0, "ssm").any() and not pool.view(3, "ssm")[0].any()
    with pytest.raises(
        ValueError, match=r"filters \[6, 3\] make states of \[6, 2\]; plane 'conv' of layer 3 is \[6, 3\]"
    ):
        pm_ops.conv1d_update(pool, 3, x, weight[:, 1:], page)
    with pytest.raises(ValueError, match=r"make states of \[2, 4, 4\]; plane 'ssm' of layer 3 is \[2, 4, 5\]"):
        pm_ops.selective_state_update(
            pool, 3, *(r[:1] for r in rows[:2]), rows[2], *(r[:1, :, 1:] for r in rows[3:]), page
        )
    with pytest.raises(ValueError, match="no plane 'conv' of layer 1"):
        pm_ops.conv1d_update(pool, 1, x, weight, page)
    with pytest.raises(ValueError, match="has a row for each token"):
        pm_ops.conv1d_update(pm_ops.PagePool(pm_ops.page_major(1, 6, 3, 1, F32), 2), 0, x, weight, page, kind="key")


def step(pool, x, weight, rows, pages):
    y = pm_ops.conv1d_update(pool, 0, x, weight, pages, silu=True)
    z = pm_ops.selective_state_update(pool, 1, *rows, pages)
    return y + pm_ops.conv1d_update(pool, 0, y, weight, pages), z


def test_compiled_code_gives_the_same_and_serves_every_batch():
    torch._dynamo.reset()
    layout = pm_ops.state_page(2, {"conv": ((6, 3), F16), "ssm": ((2, 4, 5), F32)}, align=16)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    eager_pool, pool = pm_ops.PagePool(layout, 9), pm_ops.PagePool(layout, 9)
    weight = torch.randn(6, 4)
    for count, stance in ((3, "default"), (5, "fail_on_recompile"), (2, "fail_on_recompile")):
        rows = [torch.randn(count, 2, 4), torch.rand(count, 2), -torch.rand(2), *torch.randn(2, count, 1, 5)]
        inputs = torch.randn(count, 6), weight, rows, torch.randperm(9)[:count]
        expected = step(eager_pool, *inputs)
        with torch.compiler.set_stance(stance):
            got = compiled(pool, *inputs)
        assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
        assert torch.equal(pool.buffer, eager_pool.buffer)
    torch._dynamo.reset()
