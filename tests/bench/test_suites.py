"""Checks of a case: what is right passes with no or little error, what is subtly wrong does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench.fakes import CPU, ROPE, ROWS, SHAPES, STORE

from pm_ops.bench.baseline import Torch
from pm_ops.bench.case import Case
from pm_ops.bench.cases import PagesShape
from pm_ops.bench.implementation import Bound
from pm_ops.bench.memory import LAYOUTS, PAGE_MAJOR
from pm_ops.bench.ours import PmOps
from pm_ops.bench.suites import attention_case, cases, pages_case, rope_case, store_case

VERBS = ("copy", "gather", "scatter", "move")


def pages(verb: str) -> PagesShape:
    return PagesShape(verb, verb, 4, **{**ROWS, "pages": 12})


ALL: list[Case] = [
    *(attention_case("decode", SHAPES[name]) for name in SHAPES),
    store_case("store", STORE),
    rope_case("store", ROPE),
    *(pages_case("pages", pages(verb)) for verb in VERBS),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_ours_and_plain_torch_pass_every_check_twice(case: Case, layout: str) -> None:
    """Twice, for a check must leave the data as it found it."""
    work = case.build(CPU, True)
    for impl in (Torch(CPU), PmOps()):
        if impl.ours and isinstance(getattr(work, "shape", None), PagesShape) and layout != PAGE_MAJOR:
            continue
        bound = case.bind(impl, work, layout)
        for _ in range(2):
            assert case.check(bound, work, layout).within(case.tolerance)


def changed(case: Case, layout: str, change: Callable[[Any, Any], None]) -> bool:
    """Whether a right call passes the check after ``change(work, result)`` has been done behind its back."""
    work = case.build(CPU, True)
    right = case.bind(Torch(CPU), work, layout)

    def run() -> Any:
        result = right.run()
        change(work, result)
        return result

    return case.check(Bound(run, right.out), work, layout).within(case.tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_that_touches_another_byte_or_misses_one_row_is_wrong(layout: str) -> None:
    case = store_case("store", STORE)

    def stray(work: Any, result: Any) -> None:
        free = next(s for s in range(36) if s not in work.slots.tolist())
        work.memories[layout].key[free // 4, free % 4, 0, 0].view(torch.int32).bitwise_xor_(1)

    def missed(work: Any, result: Any) -> None:
        slot = int(work.slots[3])
        work.memories[layout].value[slot // 4, slot % 4, 1, 7] += 1

    assert changed(case, layout, lambda work, result: None)
    assert not changed(case, layout, stray) and not changed(case, layout, missed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rotation_of_one_head_too_few_is_wrong(layout: str) -> None:
    case = rope_case("store", ROPE)
    assert changed(case, layout, lambda work, result: None)
    assert not changed(case, layout, lambda work, result: result[:, 3].copy_(work.query[:, 3]))
    assert not changed(case, layout, lambda work, result: work.memories[layout].buffer[:1].bitwise_xor_(1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_moves_wrong_bytes_or_touches_others_is_wrong(verb: str, layout: str) -> None:
    case = pages_case("pages", pages(verb))

    def bytes_of(work: Any) -> torch.Tensor:
        return work.pool.buffer if layout == PAGE_MAJOR else work.layer_major.view(-1)

    def one_bit_anywhere(work: Any, result: Any) -> None:
        bytes_of(work)[-1:].bitwise_xor_(1)

    def wrong(work: Any, result: Any) -> None:
        if verb == "gather":
            result.view(-1)[5:6].bitwise_xor_(1)
        else:
            bytes_of(work).bitwise_xor_(1)

    assert changed(case, layout, lambda work, result: None)
    assert not changed(case, layout, one_bit_anywhere) and not changed(case, layout, wrong)


def test_attention_that_writes_nothing_is_wrong() -> None:
    """The buffer that a peer writes to holds the right result of an earlier call, but is poisoned first."""
    case = attention_case("decode", SHAPES["decode"])
    work = case.build(CPU, True)
    out = work.reference.float()
    assert not case.check(Bound(lambda: out, out), work, PAGE_MAJOR).within(case.tolerance)
    assert case.check(Bound(lambda: work.reference.float()), work, PAGE_MAJOR).within(case.tolerance)


def test_attention_that_misses_one_key_of_one_sequence_is_wrong() -> None:
    case = attention_case("mixed", SHAPES["mixed"])
    work = case.build(CPU, True)
    assert case.check(case.bind(PmOps(), work, PAGE_MAJOR), work, PAGE_MAJOR).within(case.tolerance)
    work.seq_lens[1] -= 1
    assert not case.check(case.bind(PmOps(), work, PAGE_MAJOR), work, PAGE_MAJOR).within(case.tolerance)


def test_units_graphs_and_tolerances() -> None:
    gpu = torch.device("cuda")
    every = {suite: list(cases(suite, gpu, False)) for suite in ("store", "decode", "prefill", "pages", "host")}
    assert {case.unit for case in every["store"] + every["decode"] + every["pages"]} == {"gb_s"}
    assert {case.unit for case in every["prefill"]} == {"tflop_s"} and {case.unit for case in every["host"]} == {None}
    assert all(case.graph for case in every["store"])
    graphs = {case.name: case.graph for case in every["decode"] + every["pages"]}
    assert graphs["B8 x 2048"] and graphs["B1 x 131072"] and not graphs["B64 x 4096"]
    assert graphs["copy 256 pages of 64 KiB"] and not graphs["copy 256 pages of 2 MiB"]
    assert {case.tolerance for case in every["pages"]} == {0.0} and every["decode"][0].tolerance == 1e-2
    assert [case.name for case in every["host"]] == ["store 8 tokens", "attention B8 x 512"]
