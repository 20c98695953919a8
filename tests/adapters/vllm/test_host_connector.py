"""Prefixes in host memory: restored, they give stock's tokens, whatever was evicted, preempted or aborted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import torch
import transformers
from vllm import SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm_engine import (
    FRESH,
    FULL,
    PREFIXES,
    assert_depends_on_context,
    engine,
    generate,
    host_tier,
    metric,
    pools,
    random_prompts,
    save_tiny,
    tokens,
)

from pm_ops.adapters.vllm.host_connector import HostStats, PageHostConnector
from pm_ops.adapters.vllm.host_settings import number_of_pages, require_supported


@contextmanager
def hosting(model: Path, pm_ops: Any = True, **more: Any) -> Iterator[Any]:
    defaults = {"skip_tokenizer_init": True, "block_size": 16, "kv_transfer_config": host_tier()}
    with engine(model, pm_ops, **{**defaults, **more}) as llm:
        yield llm


def connector(llm: Any) -> PageHostConnector:
    """The scheduler's."""
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def run(llm: Any) -> tuple[list[list[int]], list[int]]:
    """(tokens, how many tokens of each prompt were found)."""
    outputs = generate(llm, PREFIXES)
    return tokens(outputs), [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("page_major", {"async_scheduling": True, "max_num_batched_tokens": 48}),
        ("page_major", {"enable_prefix_caching": False}),
        ("BLNHC", {}),
        ("BLHNC", {}),
        ("BHLNC", {}),
    ],
)
def test_every_full_block_of_a_prompt_is_restored(
    model: Path, stock: list[list[int]], layout: str, more: dict[str, Any]
) -> None:
    fresh = FRESH if more.get("enable_prefix_caching", True) else [0] * len(FULL)
    with hosting(model, {"layout": layout}, disable_log_stats=False, **more) as llm:
        first = run(llm)
        if "max_num_batched_tokens" not in more:
            assert first == (stock, fresh)
        assert first[0] == stock
        assert llm.reset_prefix_cache()
        assert run(llm) == (stock, FULL)
        ours = connector(llm)
        kept = sum((len(prompt) + 47) // 16 for prompt in PREFIXES) - 3
        assert len(ours.index) == kept, "every block that was filled, answers too"
        assert ours.tracked == {} and ours.saves == {} and ours.loads == {}
        restored = sum(FULL) - fresh[-1]  # what two prompts begin with is restored once, for the first
        assert metric(llm, "external_prefix_cache_hits") == restored
        assert metric(llm, "prompt_tokens_cached_by_source", source="host") == restored
        assert llm.reset_prefix_cache(reset_connector=True)
        assert len(ours.index) == 0
        assert run(llm)[0] == stock and len(ours.index) == kept
        assert_the_engines_own_offloading_sees_one_region(llm)


@pytest.mark.parametrize("max_pages", [200, 12])
def test_a_cache_that_is_too_small_for_all_preempts_and_reads_its_own_blocks_back(
    model: Path, stock: list[list[int]], max_pages: int
) -> None:
    config = host_tier({"max_pages": max_pages})
    small = {"num_gpu_blocks_override": 16, "max_model_len": 240, "max_num_batched_tokens": 32}
    with hosting(model, kv_transfer_config=config, disable_log_stats=False, **small) as llm:
        for _ in range(3):
            assert run(llm)[0] == stock
        assert metric(llm, "num_preemptions") > 0
        host = get_kv_transfer_group().transfers.host.pool.allocator
        assert len(connector(llm).index) <= max_pages == host.num_pages
        if max_pages == 200:
            assert metric(llm, "external_prefix_cache_hits") > 0
            assert llm.reset_prefix_cache()
            assert run(llm)[1] == FULL


def test_the_size_in_bytes_holds_and_the_latest_prefix_is_kept(model: Path, stock: list[list[int]]) -> None:
    config = host_tier({"max_bytes": 13 * 32768 - 1})
    with hosting(model, kv_transfer_config=config, disable_log_stats=False) as llm:
        ours = connector(llm)
        for i in (3, 4):  # 9 blocks, then 12
            assert tokens(generate(llm, [PREFIXES[i]])) == [stock[i]]
            assert len(ours.index) <= ours.num_pages == 12
        for i, found in ((4, FULL[4]), (3, 0), (4, 3 * 16)):  # of nine new blocks, the end of the other makes room
            assert llm.reset_prefix_cache()
            (output,) = generate(llm, [PREFIXES[i]])
            assert tokens([output]) == [stock[i]] and output.num_cached_tokens == found


def test_two_workers_keep_their_halves_of_every_page(model: Path, stock: list[list[int]]) -> None:
    with hosting(model, tensor_parallel_size=2) as llm:
        assert run(llm)[0] == stock
        assert llm.reset_prefix_cache()
        assert run(llm) == (stock, FULL)
        ours = connector(llm)
        assert ours.workers == 2 and ours.page_bytes == 16384 and ours.saves == {} and ours.loads == {}


def test_requests_that_are_aborted_leave_nothing_behind(model: Path, stock: list[list[int]]) -> None:
    with hosting(model, max_num_batched_tokens=32) as llm:
        for _ in range(2):  # computed in part, then restored in part
            core = llm.llm_engine
            for name, prompt in zip("abcdefg", PREFIXES, strict=True):
                core.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=48))
            for _ in range(4):  # the longest prompts are half read, or waiting
                core.step()
            core.abort_request(list("abcdefg"))
            core.step()
            assert llm.reset_prefix_cache(), "no block has an owner"
        assert run(llm)[0] == stock
        assert llm.reset_prefix_cache()
        assert run(llm) == (stock, FULL)
        assert connector(llm).tracked == {}


def test_windows_are_restored_as_far_as_they_reach(tmp_path: Path) -> None:
    """Two cache groups over one buffer: of the one with a window, only what the next token reads comes back."""
    config = transformers.Gemma3TextConfig(
        vocab_size=512,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=512,
    )
    folder = save_tiny(transformers.Gemma3ForCausalLM(config), tmp_path)
    prompts = random_prompts(512, (30, 100, 200))
    with engine(folder, skip_tokenizer_init=True) as llm:
        assert_depends_on_context(llm, prompts[1])
        expected = tokens(generate(llm, prompts))
    with hosting(folder, max_num_batched_tokens=64, disable_log_stats=False) as llm:
        assert tokens(generate(llm, prompts)) == expected
        assert llm.reset_prefix_cache()
        ours = connector(llm)
        assert len(ours.windows) == 2 and 3 in ours.windows
        loads = []
        restore = get_kv_transfer_group().transfers.host.restore
        get_kv_transfer_group().transfers.host.restore = lambda *pages: (loads.append(pages), restore(*pages))[1]
        outputs = generate(llm, prompts)
        assert tokens(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [16, 96, 192]
        assert sorted(len(pages) for pages, _ in loads) == [1 + 1, 6 + 3, 12 + 3]
        assert llm.reset_prefix_cache()
        window = ours.windows.index(3)
        for key in [key for key in ours.index._pages if key[1] == window][:8]:  # of the longest prompt, gaps
            ours.index.drop(ours.index._pages[key])
        assert tokens(generate(llm, prompts)) == expected


def assert_the_engines_own_offloading_sees_one_region(llm: Any) -> None:
    """It refuses to run on a CPU: so much of it is asked as decides what it would move."""
    (pool,) = pools(llm)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    config = llm.llm_engine.vllm_config
    seen: list[Any] = []
    spec = SimpleNamespace(
        replicated_layout=False, config=SimpleNamespace(canonical_layout=False), get_worker=seen.append
    )
    layers = config.compilation_config.static_forward_context
    caches = {name: layer.kv_cache for name, layer in layers.items()}
    OffloadingConnectorWorker(spec, config, runner.kv_cache_config).register_kv_caches(caches)
    ((region,),) = (caches.tensors for caches in seen)
    (group,) = seen[0].group_data_refs
    assert [(ref.tensor_idx, ref.page_size_bytes) for ref in group] == [(0, pool.layout.page_bytes)]
    assert region.page_size_bytes == region.tensor.stride(0) == pool.layout.page_bytes
    assert region.tensor.data_ptr() == pool.buffer.data_ptr()
    assert torch.equal(region.tensor.view(torch.uint8), pool.pages) and bool(pool.pages.any())


def test_the_log_sums_what_steps_have_moved() -> None:
    step = HostStats()
    assert step.is_empty()
    step.add(offloaded=3, evicted=0)
    total = PageHostConnector.build_kv_connector_stats(step.to_dict()).aggregate(HostStats({"offloaded": 2}))
    assert total.reduce() == {"host pages offloaded": 5, "host pages evicted": 0} and not total.is_empty()
    total.reset()
    assert total.is_empty()


@pytest.mark.parametrize(
    ("pm_ops", "size", "message"),
    [
        (None, None, "PageHostConnector keeps pm_ops' pages, and pm_ops was not asked for"),
        (True, {"max_bytes": 32767}, "max_bytes=32767 is less than one page of 32768 bytes; raise it"),
    ],
)
def test_settings_that_cannot_work_stop_the_engine(
    model: Path, pm_ops: Any, size: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message), hosting(model, pm_ops, kv_transfer_config=host_tier(size)):
        pass


def test_the_size_is_in_pages_or_in_bytes() -> None:
    assert number_of_pages({"max_bytes": 3 * 32768 - 1}, 32768) == 2 and number_of_pages({"max_pages": "5"}, 32768) == 5
    both = {"max_bytes": 1 << 20, "max_pages": 9}
    for options in ({}, both, {"folder": "pages"}, {"max_pages": "many"}, {"max_bytes": None}):
        with pytest.raises(ValueError, match="kv_connector_extra_config is .*; it needs either max_bytes or max_pages"):
            number_of_pages(options, 32768)
    for pages in (0, -1):
        with pytest.raises(ValueError, match=f"max_pages={pages} is less than one page of 32768 bytes"):
            number_of_pages({"max_pages": pages}, 32768)


def configured(groups: list[Any], role: str = "kv_both", unit: int | None = None, **parallel: int) -> None:
    """What the connector says to such cache groups and workers, without an engine."""
    sizes = {"world_size": 1, "tensor_parallel_size": 1, "decode_context_parallel_size": 1, **parallel}
    require_supported(
        SimpleNamespace(
            kv_transfer_config=host_tier(kv_role=role),
            parallel_config=SimpleNamespace(**sizes),
            cache_config=SimpleNamespace(prefix_match_unit=unit),
        ),
        SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in groups]),
    )


def test_models_and_engines_that_cannot_be_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=16, **sizes)
    window = SlidingWindowSpec(block_size=32, sliding_window=64, **sizes)
    state = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    configured([full], world_size=2, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="cache groups of this model are FullAttentionSpec, MambaSpec"):
        configured([full, state])
    with pytest.raises(ValueError, match=r"needs one block size, .* have \[16, 32\]"):
        configured([full, window])
    several = [full, SlidingWindowSpec(block_size=16, sliding_window=64, **sizes)]
    configured(several)
    with monkeypatch.context() as older:
        older.delattr(KVConnectorBase_V1, "get_transfer_results")
        configured([full])
        with pytest.raises(ValueError, match=r"several cache groups \(FullAttentionSpec, SlidingWindowSpec\) a block"):
            configured(several)
    for parallel in (
        {"world_size": 2},
        {"world_size": 2, "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    ):
        with pytest.raises(ValueError, match="tensor parallelism only; run it without pipeline and context"):
            configured([full], **parallel)
