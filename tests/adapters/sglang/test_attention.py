"""Attention over our pool: SGLang's own Triton kernels, in the interpreter, and the backend ``pm_ops``, by the oracle.

The pool is full of NaN but for the rows that were stored.
"""

from typing import Any

import pytest
import sglang_engine

pytestmark = pytest.mark.engines
RELEASE = sglang_engine.require()

import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_runner import CONTEXT, DIM, PAGE, Batch, Runner, close, expected, fill, kwargs, layer, page_table, rows

import pm_ops
from pm_ops.adapters import prompts
from pm_ops.adapters.sglang.backend import PageMajorAttnBackend
from pm_ops.adapters.sglang.pool import FORMATS, pool_class
from pm_ops.kernels import fa3

CASES: dict[str, dict[str, Any]] = {
    "gqa": {"heads": 4},
    "mha": {"heads": 2},
    "cap": {"heads": 4, "softcap": 2.0},
    "sinks": {"heads": 4, "sinks": True},
    "window": {"heads": 4, "window": 5},
}
DECODE = Batch([1, 7, 20], [1, 1, 1])
EXTEND = Batch([5, 12, 9], [5, 4, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [DECODE, EXTEND], ids=["decode", "extend"])
def test_sglangs_triton_kernels_read_token_major(batch: Batch, case: str, dtype: torch.dtype) -> None:
    """The stock backend's kernels on the very views that the pool gives them: 3-D, with wide strides."""
    heads, softcap, window = CASES[case]["heads"], CASES[case].get("softcap", 0.0), CASES[case].get("window", 0)
    runner = Runner("token_major", dtype, batch)
    fill(runner, 1, dtype)
    query, key, value = rows(sum(batch.new), heads, dtype)
    pool = runner.token_to_kv_pool
    pool.set_kv_buffer(None, runner.forward_batch(ForwardMode.EXTEND).out_cache_loc, key, value, layer_id_override=1)
    views = pool.get_kv_buffer(1)
    assert views[0].dim() == 3 and not views[0].is_contiguous()
    sinks = torch.randn(heads) if CASES[case].get("sinks") else None
    out = torch.full((len(query), heads, DIM), torch.nan, dtype=dtype)
    if batch is DECODE:
        read = [s[-window:] if window else s for s in runner.slots]  # the backend lists a window's keys
    else:
        read = [s[: len(s) - n] for s, n in zip(runner.slots, batch.new, strict=True)]
    pointers = torch.tensor([0, *map(len, read)]).cumsum(0).int()
    if batch is DECODE:
        splits = 2
        logits = torch.zeros(len(query), heads, splits, DIM)
        decode_attention_fwd(
            query, *views, out, pointers, torch.cat(read), logits, torch.zeros(len(query), heads, splits),
            torch.full((len(query),), splits, dtype=torch.int32), splits, DIM**-0.5, 1.0, 1.0,
            logit_cap=softcap, sinks=sinks, page_size=PAGE,
        )  # fmt: skip
    else:
        starts = torch.tensor([0, *batch.new]).cumsum(0)
        extend_attention_fwd(
            query, key, value, out, *views, starts, pointers, torch.cat(read), None, True, None, max(batch.new),
            1.0, 1.0, DIM**-0.5, logit_cap=softcap, sinks=sinks, sliding_window_size=window - 1 if window else -1,
            page_size=PAGE,
        )  # fmt: skip
    options = {"softcap": softcap, "window": window, "sinks": sinks}
    close(out, expected(pool, 1, page_table(runner), batch, query, **options), dtype)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [DECODE, EXTEND], ids=["decode", "extend"])
def test_the_backend_stores_and_attends(batch: Batch, case: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", "1")
    dtype = torch.float32 if case != "mha" else torch.float16
    heads, softcap, window = CASES[case]["heads"], CASES[case].get("softcap", 0.0), CASES[case].get("window", 0)
    runner = Runner(layout, dtype, batch)
    fill(runner, 1, dtype)
    backend = PageMajorAttnBackend(runner)
    forward = runner.forward_batch(ForwardMode.DECODE if batch is DECODE else ForwardMode.EXTEND)
    backend.init_forward_metadata(forward)
    query, key, value = rows(sum(batch.new), heads, dtype)
    sinks = torch.randn(heads) if CASES[case].get("sinks") else None
    given = {} if sinks is None else {"sinks": sinks}
    out = backend.forward(
        query.flatten(1), key, value, layer(1, heads, softcap=softcap, window=window), forward, **given
    )
    assert out.shape == (len(query), heads * DIM)
    options = {"softcap": softcap, "window": window, "sinks": sinks}
    close(out, expected(runner.pools[0], 1, page_table(runner), batch, query, **options), dtype)
    again = backend.forward(query, None, None, layer(1, heads, softcap=softcap, window=window), forward, **given)
    assert torch.equal(out, again), "a layer that shares another's keys stores none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_prefill_between_graphs_is_written_where_sglang_wants_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that is of another dtype than the query, which SGLang converts to."""
    monkeypatch.setenv("PM_OPS", "1")
    runner = Runner("page_major", torch.float32, EXTEND)
    fill(runner, 1, torch.float32)
    backend = PageMajorAttnBackend(runner)
    around = torch.randn(2 + sum(EXTEND.new), 4 * DIM).to(dtype)
    kept = around.clone()
    forward = runner.forward_batch(ForwardMode.EXTEND, _attn_output=around[1:-1])
    backend.init_forward_metadata(forward)
    query, key, value = rows(sum(EXTEND.new), 4, torch.float32)
    out = backend.forward(query.flatten(1), key, value, layer(1, 4), forward)
    close(out, expected(runner.pools[0], 1, page_table(runner), EXTEND, query), torch.float32)
    taken = dtype == torch.float32
    assert (out.data_ptr() == around[1:].data_ptr()) == taken and torch.equal(around[1:-1], kept[1:-1]) != taken
    assert torch.equal(around[[0, -1]], kept[[0, -1]])


@pytest.mark.parametrize(
    ("impl", "reason", "taken"),
    [
        ("auto", None, ["fa3", "fa3", "auto", "fa3", "auto", "auto", "auto"]),
        ("auto", "it is not there", ["auto"] * 7),
        ("triton", None, ["triton"] * 7),
    ],
)
def test_prompts_whose_keys_are_mostly_new_go_to_flash_attention_3(
    impl: str, reason: str | None, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, its second half, a last short part, a long chunk, one that is too short, a decode and a draft."""
    monkeypatch.setattr(prompts, "CHUNK", 24)
    monkeypatch.setenv("PM_OPS", f'{{"impl": "{impl}"}}')
    found: list[str] = []
    monkeypatch.setattr(fa3, "reason", lambda call: reason)
    monkeypatch.setattr(pm_ops, "attention", lambda *call, impl, **options: (found.append(impl), call[2])[1])
    for queries, keys in ((20, 20), (20, 39), (20, 40), (24, 60), (23, 60), (1, 1), (16, 16)):
        batch = Batch([keys], [queries])
        runner = Runner("page_major", torch.float32, batch, context=64)
        backend = PageMajorAttnBackend(runner)
        forward = runner.forward_batch(ForwardMode.DECODE if queries == 1 else ForwardMode.EXTEND)
        backend.init_forward_metadata(forward)
        query, key, value = rows(queries, 4, torch.float32)
        backend.forward(query, key, value, layer(1, 4), forward)
    assert found == taken


def test_each_layer_is_asked_once_whether_flash_attention_3_takes_its_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it attends with: here layers of a window are not taken."""
    monkeypatch.setenv("PM_OPS", "1")
    asked, found = [], []

    def reason(call: Any) -> str | None:
        asked.append(call.window)
        return "windows are not there" if call.window else None

    monkeypatch.setattr(fa3, "reason", reason)
    monkeypatch.setattr(pm_ops, "attention", lambda *call, impl, **options: (found.append(impl), call[2])[1])
    batch = Batch([20], [20])
    runner = Runner("page_major", torch.float32, batch)
    backend, forward = PageMajorAttnBackend(runner), runner.forward_batch(ForwardMode.EXTEND)
    for _ in range(3):
        backend.init_forward_metadata(forward)
        for index, window in ((0, 6), (1, 0)):
            backend.forward(*rows(20, 4, torch.float32), layer(index, 4, window=window), forward)
    assert found == ["auto", "fa3"] * 3 and asked == [6, 0]


@pytest.mark.parametrize("batch", [DECODE, EXTEND], ids=["decode", "extend"])
def test_layers_of_sliding_windows_read_their_own_pool(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", "1")
    runner = Runner("token_major", torch.float32, batch, windowed=True)
    backend = PageMajorAttnBackend(runner)
    forward = runner.forward_batch(ForwardMode.DECODE if batch is DECODE else ForwardMode.EXTEND)
    mapping = runner.token_to_kv_pool.full_to_swa_index_mapping
    backend.init_forward_metadata(forward)
    for index, window, its in ((0, 0, None), (1, 6, mapping)):
        fill(runner, index, torch.float32)
        query, key, value = rows(sum(batch.new), 4, torch.float32)
        out = backend.forward(query, key, value, layer(index, 4, window=window), forward)
        close(
            out, expected(runner.pools[index], 0, page_table(runner, its), batch, query, window=window), torch.float32
        )


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("windowed", [False, True])
def test_a_graphs_tensors_are_filled_in_place_before_each_replay(
    windowed: bool, mirror: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is captured for one batch serves the next one: the same tensors, other pages. Lengths may be on the host."""
    monkeypatch.setenv("PM_OPS", "1")
    runner = Runner("page_major", torch.float32, DECODE, windowed=windowed)
    backend = PageMajorAttnBackend(runner)
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8)
    empty = runner.forward_batch(ForwardMode.DECODE, out_cache_loc=torch.zeros(3, dtype=torch.int64))
    empty.seq_lens = torch.full((3,), backend.get_cuda_graph_seq_len_fill_value())
    empty.req_pool_indices = torch.zeros(3, dtype=torch.int64)
    backend.init_forward_metadata_out_graph(empty, in_capture=True)
    captured = backend.forward_metadata
    assert captured.page_table.shape == (3, CONTEXT // PAGE)
    forward = runner.forward_batch(ForwardMode.DECODE, **({} if mirror else {"seq_lens_cpu": None}))
    backend.init_forward_metadata_out_graph(forward)
    backend.forward_metadata = captured  # a graph knows these tensors, whatever the backend holds
    index = int(windowed)
    fill(runner, index, torch.float32)
    query, key, value = rows(3, 4, torch.float32)
    out = backend.forward(query, key, value, layer(index, 4), forward)
    its = runner.token_to_kv_pool.full_to_swa_index_mapping if windowed else None
    close(out, expected(runner.pools[-1], 0, page_table(runner, its), DECODE, query), torch.float32)
    with pytest.raises(ValueError, match="of EXTEND batches are not .* --cuda-graph-backend-prefill disabled"):
        backend.init_forward_metadata_out_graph(runner.forward_batch(ForwardMode.EXTEND))


@pytest.mark.parametrize("real", [0, 1, 2])
def test_a_padded_replay_writes_no_row_of_another_sequence(real: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang pads lengths and rows of the table, and gives the slots of the real sequences alone."""
    monkeypatch.setenv("PM_OPS", "1")
    runner = Runner("page_major", torch.float32, DECODE, windowed=True)
    backend = PageMajorAttnBackend(runner)
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8)
    full = runner.forward_batch(ForwardMode.DECODE)
    backend.init_forward_metadata_out_graph(full, in_capture=True)
    captured = backend.forward_metadata
    windows, attend = runner.pools[1].page_pool, layer(1, 4, window=5)
    fill(runner, 1, torch.float32)
    backend.forward(*rows(3, 4, torch.float32), attend, full)
    before, where = windows.pages.clone(), captured.slots_window.clone()

    idle = torch.arange(3) >= real
    padded = runner.forward_batch(
        ForwardMode.DECODE,
        seq_lens=full.seq_lens.masked_fill(idle, 1),
        seq_lens_cpu=full.seq_lens.masked_fill(idle, 1),
        req_pool_indices=full.req_pool_indices.masked_fill(idle, 0),
        out_cache_loc=full.out_cache_loc[:real],
    )
    backend.init_forward_metadata_out_graph(padded)
    assert captured.slots_window.tolist() == [*where[:real].tolist(), *[0] * (3 - real)]
    assert len(backend.forward_metadata.slots_window) == 3
    backend.forward_metadata = captured
    padded.out_cache_loc = full.out_cache_loc.masked_fill(idle, 0)  # the graph's own tensor
    backend.forward(*rows(3, 4, torch.float32), attend, padded)
    changed = (windows.pages != before).any(1).nonzero().flatten()
    assert set(changed.tolist()) - {0} == set((where[:real] // PAGE).tolist())


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32])
def test_a_checkpoints_scales_are_those_of_an_fp8_cache(
    dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored by them and read by them; a cache of another dtype has none."""
    monkeypatch.setenv("PM_OPS", "1")
    runner = Runner(layout, torch.float32, DECODE)
    pool = runner.token_to_kv_pool = pool_class(MHATokenToKVPool, layout)(**kwargs(dtype))
    backend, forward = PageMajorAttnBackend(runner), runner.forward_batch(ForwardMode.DECODE)
    backend.init_forward_metadata(forward)
    scaled = layer(1, 4)
    scaled.k_scale, scaled.v_scale = (torch.nn.Parameter(torch.tensor(s), requires_grad=False) for s in (0.25, 0.5))
    scaled.k_scale_float, scaled.v_scale_float = 0.25, 0.5
    whole = [tuple(rows(length, 4, torch.float32))[1:] for length in DECODE.lengths]
    for slots, (key, value) in zip(runner.slots, whole, strict=True):
        pool.set_kv_buffer(scaled, slots, key, value, *((0.25, 0.5) if dtype.itemsize == 1 else ()))
    query = torch.randn(3, 4, DIM)
    last = [torch.stack([pair[i][-1] for pair in whole]) for i in range(2)]
    out = backend.forward(query.flatten(1), *last, scaled, forward).view(3, 4, DIM)
    for i, pair in enumerate(whole):
        if dtype.itemsize == 1:
            pair = [(x / s).to(dtype).float() * s for x, s in zip(pair, (0.25, 0.5), strict=True)]
        key, value = (x.repeat_interleave(2, 1) for x in pair)
        weights = (torch.einsum("hd,nhd->hn", query[i], key) * DIM**-0.5).softmax(-1)
        torch.testing.assert_close(out[i], torch.einsum("hn,nhd->hd", weights, value), atol=1e-5, rtol=1e-5)


def test_layers_of_a_pipelines_later_stage_wait_for_their_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", "1")
    runner = Runner("token_major", torch.float32, DECODE)
    fill(runner, 1, torch.float32)
    later = pool_class(MHATokenToKVPool, "token_major")(**kwargs(torch.float32), start_layer=6)
    later.page_pool.buffer.copy_(runner.pools[0].page_pool.buffer)
    runner.token_to_kv_pool = later
    waited: list[int] = []
    later.register_layer_transfer_counter(type("Counter", (), {"wait_until": lambda _, index: waited.append(index)})())
    backend, forward = PageMajorAttnBackend(runner), runner.forward_batch(ForwardMode.DECODE)
    backend.init_forward_metadata(forward)
    query, key, value = rows(3, 4, torch.float32)
    out = backend.forward(query, key, value, layer(7, 4), forward)
    assert waited == [1]
    close(out, expected(later, 1, page_table(runner), DECODE, query), torch.float32)


def test_torch_native_reads_token_major() -> None:
    """SGLang's backend of plain torch, on the views that the pool gives it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    runner = Runner("token_major", torch.float32, DECODE)
    runner.device = "cpu"
    fill(runner, 1, torch.float32)
    query, key, value = rows(3, 4, torch.float32)
    forward = runner.forward_batch(ForwardMode.DECODE)
    forward.req_to_token_pool, forward.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
    forward.encoder_lens = forward.positions = None
    out = TorchNativeAttnBackend(runner).forward_decode(query.flatten(1), key, value, layer(1, 4), forward)
    close(out, expected(runner.pools[0], 1, page_table(runner), DECODE, query), torch.float32)


def test_what_the_backend_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PM_OPS", "1")
    runner = Runner("token_major", torch.float32, DECODE)
    backend, forward = PageMajorAttnBackend(runner), runner.forward_batch(ForwardMode.DECODE)
    backend.init_forward_metadata(forward)
    q, k, v = rows(3, 4, torch.float32)
    odd = layer(1, 4)
    odd.xai_temperature_len = 5
    for bad, says in (
        (layer(1, 4, attn_type=AttentionType.ENCODER_ONLY), "not causal self-attention"),
        (layer(1, 4, is_cross_attention=True), "not causal self-attention"),
        (layer(1, 4, use_irope=True), r"in chunks \(iRoPE\)"),
        (odd, "temperatures by position"),
        (layer(1, 4, softcap=2.0, logit_capping_method="sigmoid"), "capped by sigmoid"),
    ):
        with pytest.raises(ValueError, match=says + ".*choose --attention-backend triton"):
            backend.forward(q, k, v, bad, forward)
    with pytest.raises(ValueError, match="attention with score_mod is not supported"):
        backend.forward(q, k, v, layer(1, 4), forward, score_mod=len)
    for algorithm in (SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.FROZEN_KV_MTP):
        runner.spec_algorithm = algorithm
        with pytest.raises(ValueError, match=f"NGRAM, not of {algorithm.name}; choose one of these, or --attention"):
            PageMajorAttnBackend(runner)
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    inner = runner.token_to_kv_pool
    runner.token_to_kv_pool = type("HybridLinearKVPool", (), {"full_kv_pool": inner})()
    with pytest.raises(ValueError, match="does not read a HybridLinearKVPool .*choose --attention-backend triton"):
        PageMajorAttnBackend(runner)
    runner.token_to_kv_pool = MHATokenToKVPool(**kwargs(torch.float32))
    with pytest.raises(ValueError, match="reads a KV cache of pm_ops, and this one is SGLang's own .*: set PM_OPS=1"):
        PageMajorAttnBackend(runner)
