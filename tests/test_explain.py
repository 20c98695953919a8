"""An argument of the wrong kind is named in a ValueError, whatever the operator; other errors stay what they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pm_ops

np = pytest.importorskip("numpy")
HEADS, DIM, PAGE = 2, 8, 4


def good(name: str) -> dict[str, Any]:
    """Arguments with which the call succeeds, by name."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, HEADS, DIM, PAGE, torch.float32), 3)
    rows, one = torch.randn(1, HEADS, DIM), torch.tensor([1])
    stored = {"pool": pool, "layer": 0, "key": rows, "value": rows, "slots": one}
    return {
        "store_kv": stored,
        "load_kv": {"pool": pool, "layer": 0, "slots": one},
        "rope_store_kv": {**stored, "query": rows, "positions": one, "cos_sin": torch.randn(4, DIM)},
        "attention": {
            "pool": pool,
            "layer": 0,
            "query": rows,
            "page_table": one[:, None],
            "seq_lens": one,
            "query_start": torch.tensor([0, 1]),
        },
        "merge_attention": {"out_a": rows, "lse_a": rows[..., 0], "out_b": rows, "lse_b": rows[..., 0]},
    }[name]


OPERATORS = ("store_kv", "load_kv", "rope_store_kv", "attention", "merge_attention")
TENSORS = [(op, name) for op in OPERATORS for name, value in good(op).items() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_arguments_as_they_should_be_are_taken(operator: str) -> None:
    getattr(pm_ops, operator)(**good(operator))


@pytest.mark.parametrize(
    ("make", "kind"), [(lambda x: x.tolist(), "list"), (np.asarray, r"numpy\.ndarray"), (lambda x: 3, "int")]
)
@pytest.mark.parametrize(("operator", "name"), TENSORS)
def test_what_is_no_tensor_is_refused_by_name(
    operator: str, name: str, make: Callable[[torch.Tensor], Any], kind: str
) -> None:
    arguments = good(operator)
    before = arguments["pool"].buffer.clone() if "pool" in arguments else None
    where = "the other tensors' device" if before is None else "cpu"
    message = rf"^{name} must be a tensor on {where}, got {kind}; torch\.as_tensor"
    with pytest.raises(ValueError, match=message) as caught:
        getattr(pm_ops, operator)(**{**arguments, name: make(arguments[name])})
    assert caught.value.__context__ is None, "torch's own words are not shown beside ours"
    assert before is None or torch.equal(arguments["pool"].buffer, before)


@pytest.mark.parametrize("operator", OPERATORS[:-1])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pool", torch.zeros(4096, dtype=torch.uint8), r"pool must be a pm_ops\.PagePool, got Tensor; pass the pool"),
        ("pool", None, r"pool must be a pm_ops\.PagePool, got NoneType"),
        ("layer", "0", "layer must be an integer, got str"),
    ],
)
def test_pool_and_layer_are_refused_by_name(operator: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(pm_ops, operator)(**{**good(operator), name: value})


def test_a_scale_is_a_number_or_a_tensor() -> None:
    with pytest.raises(ValueError, match=r"key_scale must be a float or a tensor of one float32 element, got list"):
        pm_ops.store_kv(**good("store_kv"), key_scale=[1.0])


@pytest.mark.parametrize(("name", "noun"), [("softmax_scale", "a number"), ("window", "an integer")])
def test_numbers_are_refused_by_name(name: str, noun: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be {noun}, got str$"):
        pm_ops.attention(**good("attention"), **{name: "x"})


def test_only_what_may_be_absent_may_be_none() -> None:
    arguments = good("rope_store_kv")
    with pytest.raises(ValueError, match="value must be a tensor on cpu, got NoneType"):
        pm_ops.rope_store_kv(**{**arguments, "value": None})
    pm_ops.store_kv(**{**good("store_kv"), "value": None})


def test_a_query_without_axes_and_an_absent_table_are_refused_where_only_the_choice_is_asked_for_too() -> None:
    arguments = good("attention")
    for call in (pm_ops.attention, pm_ops.attention_impl):
        with pytest.raises(ValueError, match=r"query is \[\]; layer 0 has keys"):
            call(**{**arguments, "query": torch.tensor(1.0)})
        with pytest.raises(ValueError, match="page_table must be a tensor on cpu, got NoneType"):
            call(**{**arguments, "page_table": None})


def test_other_errors_stay_what_they_are() -> None:
    arguments = good("store_kv")
    with pytest.raises(RuntimeError, match="key requires grad"):
        pm_ops.store_kv(**{**arguments, "key": arguments["key"].clone().requires_grad_()})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'slots'"):
        pm_ops.store_kv(arguments["pool"], 0, arguments["key"], None)  # type: ignore[call-arg]
