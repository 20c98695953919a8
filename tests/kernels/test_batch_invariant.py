"""batch_invariant: a row's bits follow from its query and its keys alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kernels.cases import attention_case, check_attention, on_each_device, plan
from kernels.test_attention import shapes

from pm_ops.kernels import attention_plan
from pm_ops.kernels.attention import attention
from pm_ops.kernels.merge import INVARIANT_SPLITS
from pm_ops.ops.attention import BATCH_INVARIANT_KEYS, Attention

F32, F16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Of 128 keys, so that short sequences have several."""
    monkeypatch.setattr(attention_plan, "SPLIT_KEYS", 128)


def invariant(case: Attention, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(dataclasses.replace(case, batch_invariant=True, **changes))


@on_each_device
@pytest.mark.parametrize("options", [{}, {"window": 150}, {"softcap": 3.0}, {"causal": False}], ids=str)
@pytest.mark.parametrize("cache", [None, E4M3], ids=str)
def test_alone_in_a_batch_and_under_a_wider_table_a_row_has_the_same_bits(device, options, cache):
    dtype = F16 if device == "cpu" else BF16
    dtypes = (dtype, cache or dtype, cache or dtype)
    case = attention_case(device, [300, 20, 131], [5, 20, 1], dtypes=dtypes, heads=(4, 2), **options)
    out, lse = invariant(case)
    check_attention(case, out, lse)
    wider = torch.nn.functional.pad(case.page_table, (0, 70), value=-1)
    for other, other_lse in (invariant(case, page_table=wider), invariant(case, max_query_len=20, max_seq_len=7)):
        assert torch.equal(out, other)
        assert torch.equal(lse, other_lse)
    for b, (begin, end) in enumerate(((0, 5), (5, 25), (25, 26))):
        start = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        lens, table = case.seq_lens[b : b + 1], case.page_table[b : b + 1]
        alone, alone_lse = invariant(
            case, query=case.query[begin:end], query_start=start, seq_lens=lens, page_table=table
        )
        assert torch.equal(alone, out[begin:end])
        assert torch.equal(alone_lse, lse[begin:end])


@on_each_device
def test_a_tile_of_keys_that_only_later_queries_see_changes_no_bit(device):
    """Also where values have scales of their own, by which the sums are carried on from tile to tile."""
    case = attention_case(device, [65], [2], dtypes=(F32, torch.int8, torch.int8), own=True, heads=(32, 32))
    out, lse = invariant(case)
    start = torch.tensor([0, 1], dtype=torch.int32, device=device)
    alone, alone_lse = invariant(case, query=case.query[:1], query_start=start, seq_lens=case.seq_lens - 1)
    assert torch.equal(alone, out[:1])
    assert torch.equal(alone_lse, lse[:1])


@pytest.mark.gpu  # the interpreter's numpy rounds by an element's place in its array
@pytest.mark.parametrize("options", [{}, {"window": 50}], ids=str)
def test_a_token_has_the_same_bits_in_a_prefill_and_as_a_decode_step(options):
    device = "cuda"
    case = attention_case(device, [141], [141], dtypes=(BF16,) * 3, page_size=16, heads=(4, 2), **options)
    out, lse = invariant(case)
    for position in (0, 1, 63, 64, 127, 128, 140):
        lens = torch.tensor([position + 1], dtype=torch.int32, device=device)
        row = slice(position, position + 1)
        step, step_lse = invariant(case, query=case.query[row], query_start=None, seq_lens=lens)
        assert torch.equal(step, out[row])
        assert torch.equal(step_lse, lse[row])


@pytest.mark.parametrize("dim", [64, 128, 192])
def test_the_plan_follows_from_the_geometry_alone(dim):
    plans = {
        dataclasses.replace(plan(dataclasses.replace(shapes(dim=dim, **o), batch_invariant=True)), query_blocks=0)
        for o in (dict(), dict(batch=7, tokens=7), dict(tokens=4096), dict(tokens=999, batch=3, ragged=True))
    }
    assert len(plans) == 1
    narrow = plan(dataclasses.replace(shapes(dim=dim, width=2), batch_invariant=True))  # as many splits as it is wide
    assert dataclasses.replace(narrow, splits=0) == dataclasses.replace(
        *plans, splits=0, query_blocks=narrow.query_blocks
    )


def test_splits_are_no_more_than_can_be_joined():
    assert attention_plan.SPLIT_KEYS == 128  # the fixture's
    assert BATCH_INVARIANT_KEYS <= 2048 * INVARIANT_SPLITS


def test_the_hint_of_the_longest_sequence_bounds_the_splits(monkeypatch):
    monkeypatch.setattr(attention_plan, "multiprocessors", lambda device: 132)
    wide = shapes(width=8192)
    assert plan(dataclasses.replace(wide, max_seq_len=128)).splits == 1
    assert 1 < plan(dataclasses.replace(wide, max_seq_len=1024)).splits < plan(wide).splits
    assert plan(dataclasses.replace(wide, max_seq_len=1 << 30)).splits == plan(wide).splits
