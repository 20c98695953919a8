"""The calls that compile kernels: every number of queries, in each kind of layer once."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

from vllm_layer import layer

import pm_ops
from pm_ops.adapters.vllm.warm_up import steps, warm_up


def test_each_kind_of_layer_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[int] = []
    monkeypatch.setattr(torch.ops.pm_ops, "attention_out", lambda **call: windows.append(call["window"]))
    pool = pm_ops.PagePool(pm_ops.vllm(3, 2, 8, 4, torch.float32, "BLNHC"), 5)
    layers = {"a": layer(pool, 0), "b": layer(pool, 1), "c": layer(pool, 2, window=3), "state": SimpleNamespace()}
    each = len(list(steps(1024, 4, 20, torch.device("cpu"))))
    assert warm_up(layers, torch.float32, 20) == 2 * each and windows == [0] * each + [3] * each


def test_the_operator_takes_every_call() -> None:
    pool = pm_ops.PagePool(pm_ops.vllm(1, 2, 8, 4, torch.float32, "BLNHC"), 5)
    assert warm_up({"a": layer(pool, 0)}, torch.float32, 20) > 0


def test_every_number_of_queries_comes_with_few_and_with_many_sequences() -> None:
    found = [(s.max_query_len, len(s.seq_lens)) for s in steps(1024, 16, 4096, torch.device("cpu"))]
    assert {q for q, _ in found} == {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}
    assert {(1, 1), (1, 1024), (64, 16), (1024, 1)} <= set(found) and len(found) == 24
    alike = [len(s.seq_lens) for s in steps(1024, 16, 4096, torch.device("cpu")) if s.query_start is None]
    assert sorted(alike) == [1, 1024], "decodes"
    assert max(s.max_query_len for s in steps(1024, 16, 40, torch.device("cpu"))) == 32
    for longest in (1024, 4096):
        *ours, last = steps(1024, 16, longest, torch.device("cpu"))
        assert last.prompts and last.max_query_len == 1024 and not any(s.prompts for s in ours), "each kernel of ours"
    for s in steps(1024, 16, 100, torch.device("cpu")):
        assert s.tokens == int(s.seq_lens.sum()) == (len(s.seq_lens) if s.query_start is None else s.query_start[-1])
        assert s.query_start is not None or s.max_query_len == 1
        assert s.page_table.shape == (len(s.seq_lens), 7)


@pytest.mark.parametrize("longest", [128, 1 << 17])
@pytest.mark.parametrize("heads", [1, 3, 8, 17, 64])
def test_few_heads_get_as_much_work_as_many(heads: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a parallel engine may have one. A device of 132 multiprocessors takes 128 rows a program."""
    rows: list[int] = []
    monkeypatch.setattr(torch.ops.pm_ops, "attention_out", lambda **call: rows.append(len(call["query"]) * heads))
    attention = layer(pm_ops.PagePool(pm_ops.vllm(1, 2, 8, 4, torch.float32, "BLNHC"), 5), 0)
    attention.impl.num_heads = heads
    warm_up({"a": attention}, torch.float32, longest)
    assert 132 * 128 <= max(rows) <= 64 * 1024
