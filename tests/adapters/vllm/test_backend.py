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
from pm_ops.adapters import prompts
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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations that layers ask the operator for."""
    calls: list[str] = []
    monkeypatch.setattr(torch.ops.pm_ops, "attention_out", lambda **call: calls.append(call["impl"]))
    return calls


def pool(layers: int = 1, dtype: torch.dtype = torch.float32) -> pm_ops.PagePool:
    return pm_ops.PagePool(pm_ops.vllm(layers, 2, DIM, 4, dtype, "BLNHC"), 5)


def run(layer: Any, batch: PageMajorMetadata, dtype: torch.dtype = torch.float32) -> None:
    rows = torch.zeros(batch.tokens, HEADS, DIM, dtype=dtype)
    layer.impl.forward(layer, rows, rows, rows, layer.kv_cache, batch, rows.clone())


def attend(layer: Any, queries: int, keys: int, dtype: torch.dtype = torch.float32) -> None:
    run(layer, built(step([queries]).replace(max_seq_len=keys)), dtype)


def test_no_graph_is_captured_as_a_step_that_reads_prompts(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would call FlashAttention 3 for whatever batch it runs."""
    monkeypatch.setattr(prompts, "CHUNK", 64)
    monkeypatch.setattr(fa3, "reason", lambda call: None)
    attention = layer(pool(), 0)
    for keys in (64, 4096):
        batch = step([64]).replace(max_seq_len=keys)
        run(attention, built(batch))  # before it is captured
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_AND_PIECEWISE):
            graph = builder(mode).build_for_cudagraph_capture(batch)
            assert graph.max_query_len == 64
            run(attention, graph)
    assert asked == ["fa3", "auto", "auto"] * 2


@pytest.mark.parametrize(
    ("impl", "reason", "expected"),
    [
        ("auto", None, ["fa3", "fa3", "auto", "fa3", "auto", "auto", "auto"]),
        ("auto", "it is not there", ["auto"] * 7),
        ("triton", None, ["triton"] * 7),
    ],
)
def test_prompts_whose_keys_are_mostly_new_go_to_flash_attention_3(
    impl: str, reason: str | None, expected: list[str], asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, its second half, a last short part, a long chunk, one that is too short, a decode and a draft."""
    monkeypatch.setattr(prompts, "CHUNK", 50)
    monkeypatch.setattr(fa3, "reason", lambda call: reason)
    attention = layer(pool(), 0, impl=impl)
    for queries, keys in ((40, 40), (40, 79), (40, 80), (50, 500), (49, 500), (1, 1), (16, 16)):
        attend(attention, queries, keys)
    assert asked == expected


def test_each_layer_is_asked_once_whether_flash_attention_3_takes_its_prompts(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what it attends with: here layers of a window are not taken."""
    windows: list[int] = []

    def reason(call: Any) -> str | None:
        windows.append(call.window)
        return "windows are not there" if call.window else None

    monkeypatch.setattr(fa3, "reason", reason)
    cache = pool(2)
    layers = layer(cache, 0, window=6), layer(cache, 1)
    for queries in (1, 20, 40):
        for attention in layers:
            attend(attention, queries, queries)
    assert asked == ["auto", "auto", *["auto", "fa3"] * 2] and windows == [6, 0]


@pytest.mark.parametrize(
    ("dtype", "hopper", "expected"),
    [(torch.bfloat16, True, "fa3"), (torch.bfloat16, False, "auto"), (torch.float32, True, "auto")],
)
def test_what_flash_attention_3_cannot_do_or_where_it_cannot_run_is_left_to_our_kernels(
    dtype: torch.dtype, hopper: bool, expected: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules themselves; the library is there, and the tensors' device is of Hopper, or it is not."""
    monkeypatch.setattr(fa3, "library", lambda: fa3.Library(fa3.vllm_forward, has_sinks=True))
    monkeypatch.setattr(fa3, "is_hopper", lambda device: hopper)
    attend(layer(pool(1, dtype), 0), 40, 40, dtype)
    assert asked == [expected]
