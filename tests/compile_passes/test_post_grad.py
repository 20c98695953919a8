"""RopeStorePass: in an engine's graphs, where the cache is out of sight, one fused operator a layer."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from rotary_forms import DIM, FORMS, llama
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache

import pm_ops
from pm_ops.compile_passes import (
    RewriteError,
    RmsNorm,
    RopeStorePass,
    Rotate,
    register_fused_store,
    register_norm_op,
    register_rotary_op,
)
from pm_ops.compile_passes.engine_ops import NORM_OPS, ROTARY_OPS
from pm_ops.compile_passes.post_grad import FUSED_STORES

HEADS, SLOTS, LAYERS, TOKENS = 2, 20, 2, 5
FUSED = (
    "fused(Tensor query, Tensor key, Tensor value, Tensor? positions, Tensor cos_sin, bool interleaved, Tensor? "
    "q_weight, Tensor? k_weight, float eps, float weight_offset, bool return_key, str layer) -> "
    "(Tensor, Tensor, Tensor)"
)
POOL = pm_ops.PagePool(pm_ops.page_major(LAYERS, HEADS, DIM, 4, torch.float32), SLOTS // 4)
CALLS: list[str] = []


def _slots(rows: Tensor) -> Tensor:
    return torch.tensor([3, 17, 4, -1, 9, 0, 1, 2])[: rows.shape[0]]


def _store(key: Tensor, value: Tensor, layer: str) -> Tensor:
    CALLS.append("store")
    pm_ops.store_kv(POOL, int(layer), key, value, _slots(key))
    return key.new_empty(0)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, positions: Any, cos_sin: Tensor, interleaved: bool, q_weight: Any,
    k_weight: Any, eps: float, weight_offset: float, return_key: bool, layer: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    CALLS.append("fused")
    norm = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "weight_offset": weight_offset}
    out, rotated = pm_ops.rope_store_kv(
        POOL, int(layer), query, key, value, positions, cos_sin, _slots(key), interleaved=interleaved, return_key=True,
        **norm,
    )  # fmt: skip
    return out, rotated if return_key else key.new_empty(0), key.new_empty(0)


def _attend(query: Tensor, key: Tensor, value: Tensor, out: Tensor, layer: str, after: Tensor | None) -> None:
    rows = [pm_ops.load_kv(POOL, int(layer), _slots(key).clamp(0), kind) for kind in ("key", "value")]
    out.copy_(query.flatten(1) * rows[0].sum() + rows[1].sum())


def _rotary(
    positions: Tensor, query: Tensor, key: Tensor, head: int, cache: Tensor, is_neox: bool, skip: int = 0
) -> None:
    CALLS.append("rotary")
    rows = (query.unflatten(-1, (-1, head)), key.unflatten(-1, (-1, head)))
    turned = FORMS["vllm_neox" if is_neox else "vllm_gptj"].rotate(*rows, positions, cache)
    for x, y in zip((query, key), turned, strict=True):
        x.copy_(y.flatten(-2))


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    CALLS.append("norm")
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight).to(x.dtype)


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[Any]:
    """An engine's operators: layers by name, as vLLM's."""
    library = torch.library.Library("pm_test_engine", "DEF")
    library.define("store(Tensor key, Tensor value, str layer) -> Tensor")
    library.define(FUSED)
    library.define("attend(Tensor query, Tensor key, Tensor value, Tensor(a!) out, str layer, Tensor? after) -> ()")
    library.define(
        "rotary(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cache, bool is_neox, "
        "int skip=0) -> ()"
    )
    library.define("norm(Tensor x, Tensor? weight, float eps) -> Tensor")
    impls = {"store": _store, "fused": _fused, "attend": _attend, "rotary": _rotary, "norm": _norm}
    for name, impl in impls.items():
        library.impl(name, impl, "CPU")
    empty = lambda key, *a: key.new_empty(0)  # noqa: E731
    torch.library.register_fake("pm_test_engine::store", empty, lib=library)
    torch.library.register_fake(
        "pm_test_engine::fused",
        lambda q, k, *a: (torch.empty(q.shape), torch.empty(k.shape if a[-2] else (0,)), torch.empty(0)),
        lib=library,
    )
    for name in ("attend", "rotary"):
        torch.library.register_fake(f"pm_test_engine::{name}", lambda *a: None, lib=library)
    torch.library.register_fake("pm_test_engine::norm", lambda x, *a: x.new_empty(x.shape), lib=library)
    engine = torch.ops.pm_test_engine
    register_norm_op(engine.norm, lambda x, weight, eps: None if weight is None else RmsNorm(x, weight, eps))
    register_fused_store(engine.store, engine.fused.default, lambda n: f"layer {n.args[-1]}")
    register_rotary_op(
        engine.rotary,
        lambda positions, query, key, head_size, cache, is_neox, skip=0: (
            None if skip else Rotate(query, key, positions, cache, head_size, not is_neox)
        ),
    )
    yield engine
    for known in (FUSED_STORES, NORM_OPS, ROTARY_OPS):
        for op in (engine.store.default, engine.rotary.default, engine.norm.default):
            known.pop(op, None)
    library._destroy()


Body = Callable[..., Any]


class Model(torch.nn.Module):
    """Layers of an engine: one projection, a rotation, a store, attention; ``body`` does all but the projection."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList([torch.randn(6, 4 * HEADS * DIM) * 0.3 for _ in range(LAYERS)])
        self.body = body

    def forward(self, x: Tensor, positions: Tensor, *tensors: Tensor) -> Tensor:
        for layer, weight in enumerate(self.weights):
            out = torch.empty(x.shape[0], 2 * HEADS * DIM)
            q, k, v = (x @ weight).split([2 * HEADS * DIM, HEADS * DIM, HEADS * DIM], -1)
            self.body(str(layer), q, k, v, out, positions, *tensors)
            x = torch.tanh(out)[:, :6]
        return x


def stored(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """The store and the attention of a layer."""
    q, k, v = (t.reshape(-1, t.shape[-1] // DIM if t.dim() == 2 else t.shape[1], DIM) for t in (q, k, v))
    after = torch.ops.pm_test_engine.store(k, v, layer)
    torch.ops.pm_test_engine.attend(q, k, v, out, layer, after)


def plain(rotate: Body) -> Body:
    def body(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, *t: Tensor) -> None:
        q, k = rotate(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), positions, *t)
        stored(layer, q, k, v, out)

    return body


def in_place(neox: bool = True, **options: Any) -> Body:
    """With the engine's rotary operator."""

    def body(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        torch.ops.pm_test_engine.rotary(positions, q, k, DIM, table, neox, **options)
        stored(layer, q, k, v, out)

    return body


def inputs(tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(tokens)
    return torch.randn(tokens, 6), torch.randint(40, (tokens,))


class Compiled:
    """A model compiled to functional ATen, as Inductor sees it, with the pass run over every graph."""

    def __init__(self, body: Body, version: int = 1, dynamic: bool = False, **options: Any) -> None:
        self.model, self.graphs = Model(body), []
        self.rope = RopeStorePass("test", **options)
        backend = aot_autograd(fw_compiler=self._compile, decompositions=select_decomp_table())
        self.compiled = torch.compile(self.model, backend=backend, fullgraph=True, dynamic=dynamic)
        self.version = version

    def _compile(self, gm: Any, _: Any) -> Any:
        self.rope(gm.graph)
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(gm.code)
        return make_boxed_func(gm.forward)

    def check(self, *args: Tensor) -> list[str]:
        """Results and every byte of the pool equal the eager model's; which operators ran."""
        POOL.buffer.copy_(torch.randint(256, POOL.buffer.shape, dtype=torch.uint8))
        POOL.pages[:] = POOL.pages.view(torch.float32).nan_to_num(0, 1, -1).clamp(-1, 1).view(torch.uint8)
        before = POOL.buffer.clone()
        with torch.no_grad():
            expected, bytes_of_it = self.model(*args), POOL.buffer.clone()
            POOL.buffer.copy_(before)
            CALLS.clear()
            with torch._inductor.config.patch(enable_auto_functionalized_v2=self.version == 2):
                got = self.compiled(*args)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        assert torch.equal(POOL.buffer, bytes_of_it)
        return CALLS


@pytest.mark.parametrize("name", FORMS)
def test_every_form_becomes_one_operator_a_layer_with_the_same_bits(name: str) -> None:
    form = FORMS[name]
    compiled = Compiled(plain(form.rotate))
    assert compiled.check(*inputs(), *form.tensors) == ["fused"] * LAYERS
    report = compiled.rope.report
    assert list(report.fused) == ["layer 0", "layer 1"] and not report.unfused and report.graphs == 1
    assert form.says in str(report) and "rotary_forms.py" in str(report)


def test_sizes_may_be_symbolic() -> None:
    compiled = Compiled(plain(FORMS["vllm_neox"].rotate), dynamic=True)
    for tokens in (TOKENS, 3, 7):
        assert compiled.check(*inputs(tokens), *FORMS["vllm_neox"].tensors) == ["fused"] * LAYERS
    assert len(compiled.graphs) == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("version", [1, 2])
def test_an_operator_that_rotates_in_place_goes_by_its_table_and_positions(
    version: int, neox: bool, dynamic: bool
) -> None:
    compiled = Compiled(in_place(neox), version, dynamic)
    assert compiled.check(*inputs(), *FORMS["vllm_neox" if neox else "vllm_gptj"].tensors) == ["fused"] * LAYERS
    assert "rotary" not in compiled.graphs[0] and "attend" in compiled.graphs[0]


@pytest.mark.parametrize("version", [1, 2])
def test_a_norm_in_front_of_the_operator_goes_into_the_store(version: int) -> None:
    """Query and key are tensors of their own then, and the second version's bases as a whole."""
    table, (_, q_weight, k_weight) = FORMS["vllm_neox"].tensors[0], FORMS["qwen3"].tensors

    def body(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        norm = torch.nn.functional.rms_norm
        q = norm(q.unflatten(-1, (-1, DIM)), (DIM,), q_weight, 1e-6).view(q.shape)
        k = norm(k.unflatten(-1, (-1, DIM)), (DIM,), k_weight, 1e-6).view(k.shape)
        in_place()(layer, q, k, v, out, positions, table)

    compiled = Compiled(body, version)
    assert compiled.check(*inputs(), table) == ["fused"] * LAYERS
    assert "QK-norm" in str(compiled.rope.report)


@pytest.mark.parametrize("native", [True, False])
def test_a_norm_operator_goes_into_the_store_where_it_is_the_norm_of_that(native: bool, caplog: Any) -> None:
    """With weights; without, it stays, and so does the factor of a Gemma norm, which is computed for the weights."""
    table, (_, q_weight, k_weight) = FORMS["vllm_neox"].tensors[0], FORMS["qwen3"].tensors

    def body(weighted: bool) -> Body:
        def layer_of(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Tensor) -> None:
            weights = (1.0 + q_weight, 1.0 + k_weight) if weighted else (None, None)
            q, k = (
                torch.ops.pm_test_engine.norm(x.unflatten(-1, (-1, DIM)), w, 1e-5).view(x.shape)
                for x, w in zip((q, k), weights, strict=True)
            )
            (plain(FORMS["vllm_neox"].rotate) if native else in_place())(layer, q, k, v, out, *rest)

        return layer_of

    compiled = Compiled(body(True))
    assert compiled.check(*inputs(), table) == ["fused"] * LAYERS and "QK-norm" in str(compiled.rope.report)
    compiled = Compiled(body(False))
    assert compiled.check(*inputs(), table) == ["norm", "norm", "fused"] * LAYERS
    assert "QK-norm" not in str(compiled.rope.report)


@pytest.mark.parametrize("version", [1, 2])
def test_an_operator_that_is_not_fused_stays(version: int, caplog: Any) -> None:
    """One whose adapter refuses it, one whose key is changed before the store, and one whose base is used whole."""

    def changed(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        torch.ops.pm_test_engine.rotary(positions, q, k, DIM, table, True)
        stored(layer, q, k * 2, v, out)

    def whole(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        qkv = torch.cat((q, k, v), -1)
        q, k, v = qkv.split([q.shape[1], k.shape[1], v.shape[1]], -1)
        torch.ops.pm_test_engine.rotary(positions, q, k, DIM, table, True)
        stored(layer, q, k, v, out)
        out.add_(qkv.sum())

    table = FORMS["vllm_neox"].tensors[0]
    for body in (in_place(skip=1), changed, *([whole] if version == 2 else [])):
        compiled = Compiled(body, version)
        assert compiled.check(*inputs(), table) == ["rotary", "store"] * LAYERS
        assert len(compiled.rope.report.unfused) == LAYERS and "layer 1" in caplog.text
        assert "pm_ops_trace" not in compiled.graphs[0]
        caplog.clear()


@pytest.mark.parametrize("version", [1, 2])
def test_operators_that_rotate_query_and_key_by_different_positions_stay(version: int) -> None:
    def body(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, positions: Tensor, table: Tensor) -> None:
        q, k, other_q, other_k = q.clone(), k.clone(), q.clone(), k.clone()
        torch.ops.pm_test_engine.rotary(positions, q, other_k, DIM, table, True)
        torch.ops.pm_test_engine.rotary(positions + 1, other_q, k, DIM, table, True)
        stored(layer, q, k, v, out)

    compiled = Compiled(body, version)
    assert compiled.check(*inputs(), FORMS["vllm_neox"].tensors[0]) == ["rotary", "rotary", "store"] * LAYERS
    assert all("by the same angles" in reason for reason in compiled.rope.report.unfused.values())
    assert not compiled.rope.report.fused


def test_keys_and_values_of_different_tokens_go_where_the_store_puts_them() -> None:
    """An engine's store has one set of slots, but its rows may come in another order for values than for keys."""

    def body(layer: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Tensor) -> None:
        q, k = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), *rest)
        stored(layer, q, k, v.flip(0), out)

    assert Compiled(body).check(*inputs(), *FORMS["llama"].tensors) == ["fused"] * LAYERS


ALONE: dict[str, Body] = {}


def alone(body: Body) -> Body:
    ALONE[body.__name__] = body
    return body


@alone
def key_changed_before_the_store(layer, q, k, v, out, *rest):
    q, k = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), *rest)
    stored(layer, q, k + 1, v, out)


@alone
def query_of_other_positions(layer, q, k, v, out, positions, *t):
    q = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), positions + 1, *t)[0]
    k = llama(k.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), positions, *t)[1]
    stored(layer, q, k, v, out)


@alone
def key_stored_under_a_condition(layer, q, k, v, out, positions, *t):
    plain_key = k.unflatten(-1, (-1, DIM))
    q, k = llama(q.unflatten(-1, (-1, DIM)), plain_key, positions, *t)
    stored(layer, q, torch.where(positions[:, None, None] > 3, k, plain_key), v, out)


@alone
def value_of_the_rotated_key(layer, q, k, v, out, *rest):
    q, k = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), *rest)
    stored(layer, q, k, k * v.unflatten(-1, (-1, DIM)), out)


@alone
def key_of_other_tokens(layer, q, k, v, out, *rest):
    q, k = llama(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), *rest)
    stored(layer, q, k.flip(0), v, out)


@alone
def key_not_rotated(layer, q, k, v, out, *rest):
    stored(layer, q, k, v, out)


@pytest.mark.parametrize("name", ALONE)
def test_where_fusion_would_be_wrong_the_graph_stays_and_a_warning_says_why(name: str, caplog: Any) -> None:
    compiled = Compiled(ALONE[name])
    assert compiled.check(*inputs(), *FORMS["llama"].tensors) == ["store"] * LAYERS
    report = compiled.rope.report
    assert not report.fused and list(report.unfused) == ["layer 0", "layer 1"]
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING and "rope_store_kv" in r.message]
    assert "layer layer" not in record.message
    assert "layer 0: its " in record.message or "layer 0: no query" in record.message or "beside" in record.message
    assert "test_post_grad.py" in record.message  # the user's line


def test_strict_raises_every_time_where_a_layer_is_left() -> None:
    """An engine may catch the error, and compile or call anew."""
    compiled = Compiled(key_changed_before_the_store, strict=True)
    for _ in range(2):
        with pytest.raises(Exception, match="strict: without it") as caught, torch.no_grad():
            compiled.compiled(*inputs(), *FORMS["llama"].tensors)
        errors = (caught.value, caught.value.__cause__, caught.value.__context__)
        assert any(isinstance(e, RewriteError) for e in errors)


@pytest.mark.parametrize("by_operator", [False, True])
def test_a_graph_that_was_split_at_its_stores_is_warned_of_with_the_remedy(by_operator: bool, caplog: Any) -> None:
    """As engines split theirs by default; other graphs without stores are none of the pass's business."""
    table = FORMS["vllm_neox"].tensors[0]

    def piece(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        if by_operator:
            q, k = q.clone(), k.clone()
            torch.ops.pm_test_engine.rotary(positions, q, k, DIM, table, True)
            return q, k
        return FORMS["vllm_neox"].rotate(q.unflatten(-1, (-1, DIM)), k.unflatten(-1, (-1, DIM)), positions, table)

    compiled = Compiled(key_not_rotated)
    backend = aot_autograd(fw_compiler=compiled._compile, decompositions=select_decomp_table())
    with torch.no_grad(), torch._inductor.config.patch(enable_auto_functionalized_v2=False):
        torch.compile(lambda x: x * torch.cos(x) + 1, backend=backend)(torch.randn(3, 2, 8))
        assert "rope_store_kv" not in caplog.text and not compiled.rope.report.split
        rows = torch.randn(3, 4 * DIM), torch.randn(3, 2 * DIM), torch.tensor([2, 9, 4])
        got = torch.compile(piece, backend=backend)(*rows)
    torch.testing.assert_close(got, piece(*rows), rtol=0, atol=0)
    assert "without splitting its graphs at the store operator" in caplog.text and compiled.rope.report.split
    assert "without splitting" in str(compiled.rope.report)


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
