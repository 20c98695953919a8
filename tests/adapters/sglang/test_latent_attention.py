"""The backend ``pm_ops`` over pools of latents, by the oracle, and how SGLang's DeepSeek models come to it.

The pool is full of NaN but for the rows that were stored.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang_engine

pytestmark = pytest.mark.engines
RELEASE = sglang_engine.require()

import oracle
import torch
import triton_interpreter  # noqa: F401
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor import forward_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models import deepseek_v2
from sglang.srt.models.deepseek_common import attention_backend_handler
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_runner import CONTEXT, PAGE, Batch, Runner, close, page_table
from torch import Tensor

from pm_ops import PagePool
from pm_ops.adapters.sglang import backend as backend_module
from pm_ops.adapters.sglang import latent_backend
from pm_ops.adapters.sglang.backend import PageMajorAttnBackend
from pm_ops.adapters.sglang.draft import PageMajorMultiStepDraft
from pm_ops.adapters.sglang.latent_backend import LatentAttnBackend, make_backend
from pm_ops.adapters.sglang.latent_pool import latent_pool_class
from pm_ops.adapters.sglang.pool import FORMATS
from pm_ops.testing import fill_random

LATENT, ROPE, HEADS, SCALE = 32, 8, 4, 24**-0.5
DECODE = Batch([1, 7, 20], [1, 1, 1])
EXTEND = Batch([5, 12, 9], [5, 4, 1])
PROMPTS = Batch([5, 12, 1], [5, 12, 1])


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting, and a stand-in for process groups of one."""
    monkeypatch.setenv("PM_OPS", "1")
    alone = SimpleNamespace(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0)
    monkeypatch.setattr(memory_pool, "get_parallel", lambda: alone)


def runner_of(batch: Batch, layout: str = "page_major", dtype: torch.dtype = torch.float32, **more: Any) -> Runner:
    """A runner whose pool is of latents, all NaN."""
    runner = Runner("token_major", torch.float32, batch, **more)
    pool = runner.token_to_kv_pool
    runner.token_to_kv_pool = latent_pool_class(MLATokenToKVPool, layout)(
        size=pool.size, page_size=pool.page_size, dtype=dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    runner.token_to_kv_pool.page_pool.buffer.fill_(0xFF)  # NaN in every dtype
    return runner


def absorbed(index: int = 1, **more: Any) -> Any:
    """DeepSeek's ``attn_mqa``: every head has the latent row as its key, and the latent as its value."""
    return RadixAttention(HEADS, LATENT + ROPE, SCALE, 1, index, v_head_dim=LATENT, **more)


def own(index: int = 1) -> Any:
    """DeepSeek's ``attn_mha``: heads of keys and values of their own."""
    return RadixAttention(HEADS, 24, SCALE, HEADS, index, v_head_dim=16)


def rows(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, whole rows, and their first part, as DeepSeek's absorbed form gives them to ``attn_mqa``."""
    key = torch.randn(count, 1, LATENT + ROPE).to(dtype)
    return torch.randn(count, HEADS, LATENT + ROPE).to(dtype), key, key[..., :LATENT]


def fill(runner: Runner, index: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """Store the row of every token but the step's own."""
    for slots, new in zip(runner.slots, runner.batch.new, strict=True):
        _, key, value = rows(len(slots) - new, dtype)
        at = SimpleNamespace(layer_id=index)
        runner.token_to_kv_pool.set_kv_buffer(at, slots[: len(slots) - new], key, value)


def expected(runner: Runner, query: Tensor, index: int = 1) -> Tensor:
    plane, batch = runner.token_to_kv_pool.page_pool.plane(index, "latent"), runner.batch
    starts = torch.tensor([0, *batch.new]).cumsum(0)
    return oracle.attention(
        runner.token_to_kv_pool.page_pool.buffer, query, page_table(runner), torch.tensor(batch.lengths), starts,
        plane.geometry, plane.geometry, runner.token_to_kv_pool.page_size, 1, LATENT, plane.dtype, plane.dtype,
        softmax_scale=SCALE,
    )[0]  # fmt: skip


def forward_of(runner: Runner, mode: ForwardMode, **more: Any) -> Any:
    batch = runner.batch
    prefix = [length - new for length, new in zip(batch.lengths, batch.new, strict=True)]
    return runner.forward_batch(mode, **{"extend_prefix_lens_cpu": prefix, **more})


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("batch", "mode"),
    [(DECODE, ForwardMode.DECODE), (EXTEND, ForwardMode.EXTEND), (EXTEND, ForwardMode.MIXED)],
    ids=["decode", "extend", "mixed"],
)
def test_the_backend_stores_and_attends(
    batch: Batch, mode: ForwardMode, page_size: int, dtype: torch.dtype, layout: str
) -> None:
    """Rows of a prefix, of prompts and of single tokens, in one batch or apart, stored and read in pages."""
    runner = runner_of(batch, layout, dtype, page_size=page_size)
    computed = torch.float32 if dtype.itemsize == 1 else dtype
    fill(runner, dtype=computed)
    before = runner.token_to_kv_pool.page_pool.buffer.clone()
    backend, forward = make_backend(runner), forward_of(runner, mode)
    assert isinstance(backend, LatentAttnBackend)
    backend.init_forward_metadata(forward)
    query, key, value = rows(sum(batch.new), computed)
    out = backend.forward(query, key, value, absorbed(), forward)
    assert out.shape == (len(query), HEADS * LATENT) and out.dtype == computed
    close(out, expected(runner, query), computed)
    stored = runner.token_to_kv_pool.get_key_buffer(1)
    places = forward.out_cache_loc
    found = stored[places] if stored.dim() == 3 else stored[places // page_size, places % page_size]
    assert torch.equal(found.view(dtype).float(), key.to(dtype).float())
    again = backend.forward(query.flatten(1), None, None, absorbed(), forward)
    assert torch.equal(out, again), "a layer that shares another's rows stores none"
    unsaved = backend.forward(query, key + 1, value + 1, absorbed(), forward, save_kv_cache=False)
    assert torch.equal(out, unsaved)
    changed = (runner.token_to_kv_pool.page_pool.buffer != before).sum()
    assert 0 < changed <= key.numel() * dtype.itemsize


@pytest.mark.parametrize("layout", FORMATS)
def test_nothing_around_the_rows_is_written(layout: str) -> None:
    runner = runner_of(EXTEND, layout)
    pool = runner.token_to_kv_pool.page_pool
    fill_random(pool.buffer, 1)
    before = pool.buffer.clone()
    backend, forward = make_backend(runner), forward_of(runner, ForwardMode.EXTEND)
    backend.init_forward_metadata(forward)
    backend.forward(*rows(sum(EXTEND.new)), absorbed(), forward)
    assert not torch.equal(pool.buffer, before)
    places = forward.out_cache_loc
    old = PagePool(pool.layout, pool.num_pages, buffer=before).view(1, "latent")
    pool.view(1, "latent")[places // PAGE, places % PAGE] = old[places // PAGE, places % PAGE]
    assert torch.equal(pool.buffer, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batch", [PROMPTS, Batch([66, 3, 40], [66, 3, 40])], ids=["short", "of several pages"])
def test_prompts_without_a_prefix_attend_over_their_own_keys(batch: Batch, dtype: torch.dtype) -> None:
    """Which are nowhere else than in the model's tensors: the pool's pages are as they were. Rows may be padded."""
    runner = runner_of(batch, context=128)
    pool = runner.token_to_kv_pool.page_pool
    before = pool.buffer.clone()
    backend, forward = make_backend(runner), forward_of(runner, ForwardMode.EXTEND)
    backend.init_forward_metadata(forward)
    for padding, index in ((0, 1), (3, 0)):
        count = sum(batch.new) + padding
        query, key = (torch.randn(count, HEADS, 24).to(dtype) for _ in range(2))
        value = torch.randn(count, HEADS, 40).to(dtype)[..., 24:]  # a part of a projection, as the model gives it
        given = [x.clone() for x in (query, key, value)]
        out = backend.forward(query, key, value, own(index), forward, save_kv_cache=False)
        assert out.shape == (count, HEADS * 16)
        start = 0
        for length in batch.new:
            its = slice(start, start + length)
            logits = torch.einsum("qhd,khd->hqk", query[its].double(), key[its].double()) * SCALE
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            close(out[its], torch.einsum("hqk,khd->qhd", weights, value[its].double()), dtype)
            start += length
        assert all(torch.equal(a, b) for a, b in zip((query, key, value), given, strict=True))
    assert torch.equal(pool.buffer, before)
    forward = forward_of(runner, ForwardMode.EXTEND, extend_prefix_lens_cpu=[0, 4, 0])
    with pytest.raises(
        ValueError, match="in whole prompts alone, whose latents .*, and not in this EXTEND batch; choose"
    ):
        backend.forward(query, key, value, own(), forward, save_kv_cache=False)
    forward = forward_of(runner, ForwardMode.EXTEND)
    for pair, save in (((None, None), False), ((key, value), True)):
        with pytest.raises(ValueError, match="in whole prompts alone"):
            backend.forward(query, *pair, own(), forward, save_kv_cache=save)


def test_each_pass_of_prompts_has_places_of_its_own() -> None:
    backend = make_backend(runner_of(PROMPTS))
    for lengths in ([3, 0, 65], [64], [1, 1]):
        found = latent_backend.prompts_of(torch.tensor(lengths), lengths)
        pages = [-(-n // latent_backend.PAGE) for n in lengths]
        assert found.num_pages == sum(pages) and found.page_table.dtype == torch.int32
        slots = iter(found.slots.tolist())
        for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
            its = found.page_table[row, :count].tolist()
            assert [next(slots) for _ in range(length)] == [
                its[i // latent_backend.PAGE] * latent_backend.PAGE + i % latent_backend.PAGE for i in range(length)
            ]
    for batch in (PROMPTS, Batch([9], [9])):
        runner = runner_of(batch)
        backend.req_to_token = runner.req_to_token_pool.req_to_token
        forward = forward_of(runner, ForwardMode.EXTEND)
        backend.init_forward_metadata(forward)
        query, key, value = (torch.randn(sum(batch.new), HEADS, n) for n in (24, 24, 16))
        backend.forward(query, key, value, own(), forward, save_kv_cache=False)
        assert len(backend.prompts.page_table) == len(batch.new)


def test_idle_ranks_get_nothing() -> None:
    runner = runner_of(DECODE)
    backend = make_backend(runner)
    nobody = torch.zeros(0, dtype=torch.int64)
    idle = forward_of(
        runner, ForwardMode.IDLE, batch_size=0, seq_lens=nobody, seq_lens_cpu=nobody, req_pool_indices=nobody,
        out_cache_loc=nobody,
    )  # fmt: skip
    backend.init_forward_metadata(idle)
    assert backend.forward(*rows(0), absorbed(), idle).shape == (0, HEADS * LATENT)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("real", [3, 1, 0])
def test_a_graphs_tensors_are_filled_in_place_before_each_replay(real: int, mirror: bool) -> None:
    """What is captured for one batch serves the next one, padded, too: rows of padding go to the sink."""
    runner = runner_of(DECODE)
    backend, pool = make_backend(runner), runner.token_to_kv_pool.page_pool
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=8)
    empty = forward_of(runner, ForwardMode.DECODE, out_cache_loc=torch.zeros(3, dtype=torch.int64))
    empty.seq_lens = torch.full((3,), backend.get_cuda_graph_seq_len_fill_value())
    empty.req_pool_indices = torch.zeros(3, dtype=torch.int64)
    backend.init_forward_metadata_out_graph(empty, in_capture=True)
    captured = backend.forward_metadata
    assert captured.page_table.shape == (3, CONTEXT // PAGE)
    idle = torch.arange(3) >= real
    lengths = torch.tensor(DECODE.lengths).masked_fill(idle, 1)
    full = forward_of(runner, ForwardMode.DECODE)
    places = full.out_cache_loc.masked_fill(idle, 0)
    padded = forward_of(
        runner,
        ForwardMode.DECODE,
        seq_lens=lengths,
        seq_lens_cpu=lengths if mirror else None,
        req_pool_indices=full.req_pool_indices.masked_fill(idle, 0),
        out_cache_loc=places,
    )
    backend.init_forward_metadata_out_graph(padded)
    backend.forward_metadata = captured  # a graph knows these tensors, whatever the backend holds
    fill(runner)
    before = pool.pages.clone()
    query, key, value = rows(3)
    out = backend.forward(query, key, value, absorbed(), padded).view(3, HEADS, LATENT)
    changed = (pool.pages != before).any(1).nonzero().flatten()
    assert set(changed.tolist()) - {0} == set((places[:real] // PAGE).tolist())
    with pytest.raises(ValueError, match="of EXTEND batches are not .* --cuda-graph-backend-prefill disabled"):
        backend.init_forward_metadata_out_graph(forward_of(runner, ForwardMode.EXTEND))
    if real:
        runner.batch = Batch(DECODE.lengths[:real], DECODE.new[:real])
        runner.rows = runner.rows[:real]
        close(out[:real], expected(runner, query[:real]), torch.float32)


def test_layers_of_a_pipelines_later_stage_wait_for_their_transfer() -> None:
    runner = runner_of(DECODE)
    fill(runner)
    pool = runner.token_to_kv_pool
    pool.start_layer, waited = 6, []
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=waited.append))
    backend, forward = make_backend(runner), forward_of(runner, ForwardMode.DECODE)
    backend.init_forward_metadata(forward)
    query, key, value = rows(3)
    out = backend.forward(query, key, value, absorbed(7), forward)
    assert waited == [1]
    close(out, expected(runner, query), torch.float32)


@pytest.mark.parametrize(
    ("mode", "prefix", "form"),
    [
        (ForwardMode.DECODE, None, "MLA"),
        (ForwardMode.EXTEND, [0, 0], "MHA"),
        (ForwardMode.EXTEND, [0, 4], "MLA"),
        (ForwardMode.MIXED, [3, 9], "MLA"),
        (ForwardMode.TARGET_VERIFY, None, "MLA"),
    ],
)
def test_deepseek_takes_the_form_that_it_takes_with_triton(
    mode: ForwardMode, prefix: list[int] | None, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGLang's own dispatch and its registry, in which the backend's name is."""
    registry = attention_backend_handler.AttentionBackendRegistry
    monkeypatch.setattr(registry, "_handlers", {k: v for k, v in registry._handlers.items() if k != "pm_ops"})
    backend = make_backend(runner_of(DECODE))
    assert registry._handlers["pm_ops"] is registry._handlers["triton"]
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "pm_ops"
    options = SimpleNamespace(
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
        kernel=SimpleNamespace(attention_backend="triton"), speculative_attention_mode="prefill",
    )  # fmt: skip
    monkeypatch.setattr(attention_backend_handler, "get_exec", lambda: options)
    monkeypatch.setattr(deepseek_v2, "get_attn_backend", lambda: backend)
    monkeypatch.setattr(deepseek_v2, "get_spec", lambda: options)
    stock = lambda: ("triton", "triton")  # noqa: E731
    if RELEASE == "0.5.17":  # it takes names from the options; later ones, from the process
        monkeypatch.setattr(deepseek_v2, "get_server_args", lambda: SimpleNamespace(get_attention_backends=stock))
    else:
        monkeypatch.setattr(deepseek_v2, "attention_backends", stock)
    module, batch = SimpleNamespace(), SimpleNamespace(forward_mode=mode, extend_prefix_lens_cpu=prefix)
    found = deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method(module, batch)
    assert found == AttnForwardMethod[form] and module.current_attention_backend == "pm_ops"


def test_keys_and_values_have_the_backend_of_theirs() -> None:
    assert type(make_backend(Runner("page_major", torch.float32, DECODE))) is PageMajorAttnBackend
    runner = runner_of(DECODE)
    pool = runner.token_to_kv_pool
    runner.token_to_kv_pool = MLATokenToKVPool(
        size=pool.size, page_size=PAGE, dtype=torch.float32, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, layer_num=2,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="this one is SGLang's own"):
        make_backend(runner)


@pytest.mark.parametrize("latent", [False, True])
def test_models_find_the_pools_in_it(latent: bool) -> None:
    runner = runner_of(DECODE) if latent else Runner("page_major", torch.float32, DECODE)
    with forward_context.forward_context(forward_context.ForwardContext(attn_backend=make_backend(runner))):
        assert forward_context.get_token_to_kv_pool() is runner.token_to_kv_pool
        assert forward_context.get_req_to_token_pool() is runner.req_to_token_pool


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Options of a process that verifies chains of three drafts."""
    options = SimpleNamespace(speculative_num_draft_tokens=3, speculative_eagle_topk=1)
    for module in (backend_module, latent_backend):
        monkeypatch.setattr(module, "get_spec", lambda: options)
    return options


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2])
def test_a_chain_of_drafts_is_the_causal_extension_that_it_is(mode: ForwardMode, chains: SimpleNamespace) -> None:
    """Verified, and computed by the model that drafts; in graphs, too."""
    prefix = [1, 7, 20]
    runner = runner_of(Batch([n + 3 for n in prefix], [3] * 3), spec=SpeculativeAlgorithm.EAGLE)
    backend = make_backend(runner)
    fill(runner)
    lengths = torch.tensor(prefix) if mode.is_target_verify() else torch.tensor(runner.batch.lengths)
    spec = SimpleNamespace(draft_token_num=3, tree_topk=1, custom_mask=torch.ones(27, dtype=torch.bool))
    forward = forward_of(runner, mode, seq_lens=lengths, seq_lens_cpu=lengths, spec_info=spec)
    backend.init_forward_metadata(forward)
    query, key, value = rows(9)
    out = backend.forward(query, key, value, absorbed(), forward)
    close(out, expected(runner, query), torch.float32)
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=24)
    backend.init_forward_metadata_out_graph(forward, in_capture=True)
    close(backend.forward(query, key, value, absorbed(), forward), out.double(), torch.float32)


def test_a_draft_models_steps_attend_over_its_latents(chains: SimpleNamespace) -> None:
    runner = runner_of(Batch([3, 9], [1, 1]), spec=SpeculativeAlgorithm.EAGLE)
    runner.is_draft_worker = True
    fill(runner)
    lengths = torch.tensor([2, 8])
    forward = forward_of(runner, ForwardMode.DECODE, seq_lens=lengths, seq_lens_cpu=lengths)
    steps = PageMajorMultiStepDraft(runner, 1, 3)
    steps.init_forward_metadata(forward)
    first, second = steps.attn_backends
    assert isinstance(first, LatentAttnBackend) and second.forward_metadata.seq_lens.tolist() == [4, 10]
    query, key, value = rows(2)
    close(first.forward(query, key, value, absorbed(), forward), expected(runner, query), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float32])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
def test_a_checkpoints_scales_over_fp8_latents_are_refused(mode: ForwardMode, dtype: torch.dtype) -> None:
    """Before a row is stored; a scale of 1 is none, and a cache of another dtype needs none."""
    runner = runner_of(DECODE, dtype=dtype)
    fill(runner)
    backend, forward = make_backend(runner), forward_of(runner, mode)
    backend.init_forward_metadata(forward)
    scaled, before = absorbed(), runner.token_to_kv_pool.page_pool.buffer.clone()
    query, key, value = rows(3)
    for scale in (0.25, 1.0):
        scaled.k_scale = torch.nn.Parameter(torch.tensor(scale), requires_grad=False)
        scaled.k_scale_float = scale
        if dtype.itemsize == 1 and scale != 1.0:
            with pytest.raises(
                ValueError, match="scales .*, 0.25 in layer 1, are not .* --kv-cache-dtype bfloat16, or"
            ):
                backend.forward(query, key, value, scaled, forward)
            assert torch.equal(runner.token_to_kv_pool.page_pool.buffer, before)
        else:
            close(backend.forward(query, key, value, scaled, forward), expected(runner, query), torch.float32)


def test_what_the_backend_refuses(chains: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(DECODE)
    backend, forward = make_backend(runner), forward_of(runner, ForwardMode.DECODE)
    backend.init_forward_metadata(forward)
    before = runner.token_to_kv_pool.page_pool.buffer.clone()
    for bad, says in (
        (absorbed(logit_cap=2.0), "with caps or windows"),
        (absorbed(sliding_window_size=5), "with caps or windows"),
        (absorbed(is_cross_attention=True), "not causal self-attention"),
    ):
        with pytest.raises(ValueError, match=says + ".*choose --attention-backend triton"):
            backend.forward(*rows(3), bad, forward)
    for name in ("sinks", "q_rope", "topk_indices"):
        with pytest.raises(ValueError, match=f"attention with {name} is not supported"):
            backend.forward(*rows(3), absorbed(), forward, **{name: torch.zeros(4)})
    key, value = torch.zeros(3, HEADS, 24), torch.zeros(3, HEADS, 16)
    with pytest.raises(ValueError, match="whole prompts alone, .*, and not in this DECODE batch"):
        backend.forward(key, key, value, own(), forward, save_kv_cache=False)
    assert torch.equal(runner.token_to_kv_pool.page_pool.buffer, before)
    monkeypatch.setenv("PM_OPS", '{"impl": "fa3"}')
    with pytest.raises(ValueError, match=r"no latent attention \(MLA\) by impl fa3; leave that out, or choose"):
        make_backend(runner)
    monkeypatch.setenv("PM_OPS", "1")
    runner.spec_algorithm = SpeculativeAlgorithm.NGRAM
    with pytest.raises(ValueError, match=r"of trees of drafts \(NGRAM, or --speculative-eagle-topk of more than 1\)"):
        make_backend(runner)
    runner.spec_algorithm, chains.speculative_eagle_topk = SpeculativeAlgorithm.EAGLE, 2
    with pytest.raises(ValueError, match="of trees of drafts"):
        make_backend(runner)
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    windowed = Runner("token_major", torch.float32, DECODE, windowed=True)
    for part in windowed.pools:
        part.KINDS = ("latent",)
    with pytest.raises(ValueError, match="in sliding windows; leave that out"):
        make_backend(windowed)
