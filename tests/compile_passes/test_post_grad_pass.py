"""RopeStorePass among the passes and caches of a compiler: which run, and when compiled code is used again."""

from __future__ import annotations

import functools
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rotary_engine import (
    CALLS,
    LAYERS,
    Compiled,
    Model,
    in_place,
    inputs,
    norm_of,
    operators,
    plain,
)
from rotary_forms import FORMS, llama
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

from pm_ops.compile_passes import RopeStorePass, register_fused_store
from pm_ops.compile_passes.engine_ops import NORM_OPS, ROTARY_OPS


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[Any]:
    with operators() as engine:
        yield engine


def test_the_users_own_pass_runs_first() -> None:
    seen: list[bool] = []

    def before(graph: torch.fx.Graph) -> None:
        seen.append(any("store" in str(n.target) for n in graph.nodes))
        (last,) = graph.find_nodes(op="output")
        with graph.inserting_before(last):  # without a fake value, as passes may leave nodes
            graph.call_function(torch.ops.aten.add.Tensor, (last.args[0][0], 0))

    compiled = Compiled(plain(llama), before=before)
    assert compiled.check(*inputs(), *FORMS["llama"].tensors) == ["fused"] * LAYERS
    assert seen == [True] and compiled.rope.uuid() is None  # nobody knows what a plain function does


class Other(CustomGraphPass):
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, graph: torch.fx.Graph) -> None:
        pass

    def uuid(self) -> str:
        return self.name


def test_uuid_is_of_sources_geometry_and_the_users_pass(tmp_path: Path, monkeypatch: Any) -> None:
    known = {
        RopeStorePass(*args, **options).uuid()
        for args, options in (
            (("page 16",), {}),
            (("page 32",), {}),
            (("page 16",), {"strict": True}),
            (("page 16",), {"before": Other("a")}),
            (("page 16",), {"before": Other("b")}),
        )
    }
    assert len(known) == 5 and RopeStorePass("page 16").uuid() in known
    names = {path.name for path in RopeStorePass.sources()}
    assert {"post_grad.py", "rotation.py", "terms.py", "rope.py"} <= names
    copies = [Path(shutil.copy(path, tmp_path / f"{i}.py")) for i, path in enumerate(RopeStorePass.sources())]
    monkeypatch.setattr(RopeStorePass, "sources", staticmethod(lambda: copies))
    assert RopeStorePass("page 16").uuid() in known
    copies[3].write_text(copies[3].read_text() + "# changed\n")
    assert RopeStorePass("page 16").uuid() not in known


@pytest.mark.parametrize("operators", [NORM_OPS, ROTARY_OPS])
def test_uuid_is_of_the_adapters_of_operators_too(operators: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """What an adapter says of an operator is in the code that is compiled, an eps say."""
    file = tmp_path / "adapters.py"
    file.write_text("def first(*args): ...\ndef second(*args): ...\n")
    spec = importlib.util.spec_from_file_location("engine_adapters", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "engine_adapters", module)
    rope = RopeStorePass("page 16")
    known = [rope.uuid()]
    for op, adapter in ((torch.ops.aten.sin.default, "first"), (torch.ops.aten.cos.default, "first")):
        monkeypatch.setitem(operators, op, getattr(module, adapter))
        known.append(rope.uuid())
    monkeypatch.setitem(operators, torch.ops.aten.cos.default, module.second)
    known.append(rope.uuid())
    assert rope.uuid() == known[-1]
    file.write_text(file.read_text() + "# changed\n")
    assert len({*known, rope.uuid()}) == 5


@pytest.mark.parametrize("operators", [NORM_OPS, ROTARY_OPS])
def test_code_of_adapters_that_nobody_can_tell_apart_is_not_used_again(operators: Any, monkeypatch: Any) -> None:
    """Two lambdas of a line have one name in one file."""
    rope, op = RopeStorePass("page 16"), torch.ops.aten.sin.default
    unnamed = (
        lambda *args: None,
        functools.partial(norm_of, eps=1e-5),
        functools.partial(norm_of, eps=1e-6),
        Other("a"),
    )
    for adapter in unnamed:
        monkeypatch.setitem(operators, op, adapter)
        assert rope.uuid() is None
    monkeypatch.setitem(operators, op, norm_of)
    assert rope.uuid() is not None
    monkeypatch.setattr("rotary_engine.norm_of", lambda *args: None)  # registered is the one of before
    assert rope.uuid() is None


def test_inductor_compiles_it_and_finds_it_again_for_the_same_geometry_only() -> None:
    hits, results = [], []
    with fresh_cache():
        for geometry in ("page 4", "page 4", "page 8"):
            torch._dynamo.reset()
            counters.clear()
            rope = RopeStorePass(geometry)
            options = {"post_grad_custom_pre_pass": rope, "enable_auto_functionalized_v2": False}
            model = torch.compile(Model(in_place()), fullgraph=True, options=options)
            CALLS.clear()
            with torch.no_grad():
                results.append(model(*inputs(), FORMS["vllm_neox"].tensors[0]))
            assert CALLS == ["fused"] * LAYERS
            hits.append((counters["inductor"]["fxgraph_cache_hit"], rope.report.graphs))
    assert hits == [(0, 1), (1, 0), (0, 1)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_operators_that_cannot_be_fused_are_refused(ops: Any) -> None:
    with pytest.raises(ValueError, match="no argument cache"):
        register_fused_store(ops.rotary, ops.fused.default, str)
    with pytest.raises(ValueError, match="no argument cos_sin"):
        register_fused_store(ops.store, ops.store.default, str)
    with pytest.raises(ValueError, match="expected operators"):
        register_fused_store("store", ops.fused, str)
