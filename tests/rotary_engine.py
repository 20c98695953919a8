"""An engine's layers, whose cache is not in the graph, and its operators, compiled with RopeStorePass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from functorch.compile import make_boxed_func
from rotary_forms import DIM, FORMS
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

import pm_ops
from pm_ops.compile_passes import (
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


def norm_of(x: Any, weight: Any, eps: float) -> RmsNorm | None:
    return None if weight is None else RmsNorm(x, weight, eps)


def rotation_of(
    positions: Any, query: Any, key: Any, head_size: int, cache: Any, is_neox: bool, skip: int = 0
) -> Rotate | None:
    return None if skip else Rotate(query, key, positions, cache, head_size, not is_neox)


@contextmanager
def operators() -> Iterator[Any]:
    """The engine's operators, registered: layers by name, as vLLM's."""
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
    register_norm_op(engine.norm, norm_of)
    register_fused_store(engine.store, engine.fused.default, lambda n: f"layer {n.args[-1]}")
    register_rotary_op(engine.rotary, rotation_of)
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
