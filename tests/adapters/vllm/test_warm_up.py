"""The calls that compile kernels: every number of queries, in each kind of layer once, and nothing is written."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

import pm_ops
from pm_ops.adapters.vllm.backend import PageMajorImpl
from pm_ops.adapters.vllm.config import Settings
from pm_ops.adapters.vllm.warm_up import steps, warm_up
from pm_ops.testing import fill_nan, writes_only


def layer(pool: pm_ops.PagePool, number: int, window: int = 0) -> Any:
    """An attention layer over a pool in vLLM's layout, as the engine binds it."""
    impl: Any = object.__new__(PageMajorImpl)
    impl.settings = Settings("BLNHC")
    impl.num_heads, impl.num_kv_heads, impl.head_size = 4, 2, 8
    impl.scale, impl.window, impl.softcap, impl.sinks, impl.alibi_slopes = 0.3, window, 0.0, None, None
    impl.kv_cache_dtype, impl._takes_fa3, impl._located = "auto", None, {}
    content = torch.as_strided(
        pool.buffer.view(torch.float32), (5, 2, 4, 16), (pool.layout.page_bytes // 4, 16, 32, 1), number * 128
    )
    impl.locate = lambda cache: PageMajorImpl.locate(impl, cache)
    return SimpleNamespace(impl=impl, kv_cache=content, _k_scale_float=1.0, _v_scale_float=1.0)


def test_each_kind_of_layer_runs_once_and_writes_nothing() -> None:
    pool = pm_ops.PagePool(pm_ops.vllm(3, 2, 8, 4, torch.float32, "BLNHC"), 5)
    fill_nan(pool.buffer)
    layers = {"a": layer(pool, 0), "b": layer(pool, 1), "c": layer(pool, 2, window=3), "state": SimpleNamespace()}
    with writes_only(pool.buffer, []):
        assert warm_up(layers, torch.float32, 20) == 2 * len(list(steps(4, 20, torch.device("cpu"))))


def test_every_number_of_queries_comes_with_few_and_with_many_sequences() -> None:
    found = [(s.max_query_len, len(s.seq_lens)) for s in steps(16, 4096, torch.device("cpu"))]
    assert {q for q, _ in found} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}
    assert {(1, 1), (1, 1024), (64, 16), (1024, 1)} <= set(found) and len(found) == 21
    assert max(s.max_query_len for s in steps(16, 40, torch.device("cpu"))) == 32
    for s in steps(16, 100, torch.device("cpu")):
        assert s.query_start is not None and int(s.query_start[-1]) == s.tokens == int(s.seq_lens.sum())
        assert s.page_table.shape == (len(s.seq_lens), 7)
