"""Which runs of bytes a transfer is made of, by which implementation, in which steps."""

import pytest
import torch
from delayed import LAYOUT, PAGE
from pages import packed_pool, spaced_pool

import pm_ops
from pm_ops import PagePool, transfer_plan
from pm_ops.transfer_plan import plan_transfer


@pytest.mark.parametrize("makes", [(packed_pool, packed_pool), (packed_pool, spaced_pool), (spaced_pool,) * 2])
def test_runs_are_the_fewest_copies_within_a_step(makes, monkeypatch) -> None:
    """By the plan's runs, and by the descriptors that transfer engines get."""
    source, target = makes[0](LAYOUT, 16, 1), makes[1](LAYOUT, 16, 2)
    ids, there = [9, 4, 5, 6, 7, 0, 1], [3, 8, 9, 10, 11, 14, 15]
    pairs = sorted(zip(ids, there, strict=True))
    for step in (100, 2):
        monkeypatch.setattr(transfer_plan, "STEP_LEAST", step * PAGE)
        monkeypatch.setattr(transfer_plan, "STEP_MOST", step * PAGE)
        plan = plan_transfer(source, target, ids, there, by_layer=False, impl="copy", most=1 << 30)
        expected = []
        for i in range(0, len(pairs), step):
            sides = zip(*pairs[i : i + step], strict=True)
            runs = (pm_ops.page_descriptors(pool, side) for pool, side in zip((source, target), sides, strict=True))
            copies = pm_ops.pair_descriptors(*runs)
            begins = source.buffer.data_ptr(), target.buffer.data_ptr()
            expected += [(src - begins[0], dst - begins[1], nbytes) for src, dst, nbytes in copies]
        found = zip(*(column.tolist() for column in plan.runs), strict=True)
        assert [(src, dst, pages * PAGE) for src, dst, pages in found] == expected
        assert [s.nbytes for s in plan.steps] == [PAGE * len(pairs[i : i + step]) for i in range(0, len(pairs), step)]


@pytest.mark.parametrize("impl", ["copy", "kernel"])
def test_no_step_is_larger_than_the_bound_allows(impl) -> None:
    """Steps of megabytes are for bounds of more."""
    pool = packed_pool(LAYOUT, 16)
    plan = plan_transfer(pool, pool, list(range(16)), list(range(16)), by_layer=False, impl=impl, most=3 * PAGE)
    assert [step.nbytes for step in plan.steps] == [3 * PAGE] * 5 + [PAGE]


def test_short_runs_are_for_the_kernel_and_adjacent_pages_are_not_short() -> None:
    layout = pm_ops.page_major(2, 8, 128, 1, torch.bfloat16)  # pages of 8 KiB
    pool, other = PagePool(layout, 32), PagePool(layout, 32)

    def impl(ids, there, **options):
        return plan_transfer(
            pool, other, ids, there, **{"by_layer": False, "impl": None, "most": 1 << 30, **options}
        ).impl

    apart, back = list(range(0, 32, 2)), list(range(30, -1, -2))
    assert impl(apart, apart) == impl(apart, back) == impl([0, 1, 2], [5, 6, 7]) == "kernel"
    assert impl([0, 1, 2, 3], [5, 6, 7, 8]) == impl([3, 2, 1, 0], [8, 7, 6, 5]) == "copy"
    assert impl([0, 1, 2, 3], [5, 6, 7, 8], by_layer=True) == "kernel"
    assert impl(apart, apart, impl="copy") == "copy" and impl([0, 1, 2, 3], [5, 6, 7, 8], impl="kernel") == "kernel"


def test_steps_grow_so_that_the_device_begins_early(monkeypatch) -> None:
    monkeypatch.setattr(transfer_plan, "STEP_LEAST", 2 * PAGE)
    monkeypatch.setattr(transfer_plan, "STEP_MOST", 8 * PAGE)
    pool = packed_pool(LAYOUT, 40)
    plan = plan_transfer(pool, pool, list(range(40)), list(range(40)), by_layer=False, impl="copy", most=1 << 30)
    assert [step.nbytes // PAGE for step in plan.steps] == [2, 4, 8, 8, 8, 8, 2]
    assert [step.whole for step in plan.steps] == [2, 6, 14, 22, 30, 38, 40]
