"""What the attention backend makes of a step of the engine, where that follows from shapes alone."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm_layer import DIM, HEADS, layer

import pm_ops
from pm_ops.adapters.vllm.backend import PageMajorMetadata, PageMajorMetadataBuilder
from pm_ops.kernels import fa3


def step(queries: list[int], tokens: int | None = None, **more: Any) -> CommonAttentionMetadata:
    """A batch of sequences with these many queries, padded to ``tokens``."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    total = int(starts[-1]) if tokens is None else tokens
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((len(queries),), 9, dtype=torch.int32),
        num_reqs=len(queries),
        num_actual_tokens=total,
        max_query_len=max(queries),
        max_seq_len=9,
        block_table_tensor=torch.zeros(len(queries), 4, dtype=torch.int32),
        slot_mapping=torch.zeros(total, dtype=torch.int64),
        **more,
    )


def builder(mode: CUDAGraphMode = CUDAGraphMode.NONE) -> PageMajorMetadataBuilder:
    config = SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_mode=mode))
    return PageMajorMetadataBuilder(None, [], config, torch.device("cpu"))


def built(batch: CommonAttentionMetadata) -> PageMajorMetadata:
    return builder().build(0, batch)


def test_sequences_of_one_query_each_are_a_uniform_batch() -> None:
    assert built(step([1, 1, 1])).query_start is None
    assert built(step([1, 1, 0], tokens=3)).query_start is None, "padded: the last sequence is empty, and so is its row"
    for ragged in (step([1, 2, 1]), step([2, 2]), step([1, 1], tokens=4)):
        found = built(ragged)
        assert found.query_start is ragged.query_start_loc and found.tokens == ragged.num_actual_tokens


def test_a_graph_of_any_batch_is_captured_for_one_sequence_of_all_tokens() -> None:
    assert builder().get_cudagraph_support(None, None) is AttentionCGSupport.ALWAYS
    any_batch = builder(CUDAGraphMode.FULL).build_for_cudagraph_capture(step([1] * 8))
    assert any_batch.max_query_len == 8 and any_batch.query_start is not None
    for mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
        decodes = builder(mode).build_for_cudagraph_capture(step([1] * 8))
        assert decodes.max_query_len == 1 and decodes.query_start is None


def test_steps_that_the_operator_cannot_do_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="causal for some sequences of a batch"):
        built(step([1, 2], causal=torch.tensor([True, False])))
    with pytest.raises(NotImplementedError, match="R-SWA"):
        built(step([1, 2], rswa_prefix_lens=torch.tensor([1, 1])))


def taken(monkeypatch: pytest.MonkeyPatch, reason: str | None, impl: str) -> list[str]:
    """The implementation that a prompt, its second half, a last short part, a decode and a draft are asked of."""
    calls: list[str] = []
    monkeypatch.setattr(torch.ops.pm_ops, "attention_out", lambda **call: calls.append(call["impl"]))
    monkeypatch.setattr(fa3, "reason", lambda call: reason)
    attention = layer(pm_ops.PagePool(pm_ops.vllm(1, 2, DIM, 4, torch.float32, "BLNHC"), 5), 0, impl=impl)
    for queries, keys in ((40, 40), (40, 79), (40, 80), (1, 1), (16, 16)):
        batch = step([queries]).replace(max_seq_len=keys)
        rows = torch.zeros(queries, HEADS, DIM)
        attention.impl.forward(attention, rows, rows, rows, attention.kv_cache, built(batch), rows.clone())
    return calls


def test_prompts_whose_keys_are_mostly_new_go_to_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, None, "auto") == ["fa3", "fa3", "auto", "auto", "auto"]
    assert taken(monkeypatch, "it is not there", "auto") == ["auto"] * 5
    assert taken(monkeypatch, None, "triton") == ["triton"] * 5
