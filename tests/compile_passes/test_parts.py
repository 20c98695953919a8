"""A model compiled in parts: layer by layer, around graph breaks, and beside code that touches no cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import Binding, bind, page_major_backend

HEADS, DIM, PAGE, SLOTS = 2, 8, 4, 20


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = torch.randn(SLOTS, HEADS, DIM), torch.randn(SLOTS, HEADS, DIM)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.k[at], self.v[at] = x, x * 2
        return self.k[at] - self.v[at - 1]


def bind_layers(layers: Any) -> Binding:
    pool = PagePool(page_major(len(layers), HEADS, DIM, PAGE, torch.float32), SLOTS // PAGE)
    return bind(pool, keys=[layer.k for layer in layers], values=[layer.v for layer in layers])


def bound_layer() -> tuple[Layer, Binding]:
    layer = Layer()
    return layer, bind_layers([layer])


def rows(tokens: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, HEADS, DIM), torch.arange(4, 4 + tokens)


@pytest.mark.parametrize("how", ["Module.compile", "torch.compile", "a function of the layer"])
def test_more_layers_than_the_recompile_limit_are_compiled_one_by_one(how: str) -> None:
    """Dynamo compiles one code object at most eight times, unless each time for another module."""
    layers = torch.nn.ModuleList(Layer() for _ in range(torch._dynamo.config.recompile_limit + 3))
    stock = [(layer.k.clone(), layer.v.clone()) for layer in layers]
    binding = bind_layers(layers)
    backend = page_major_backend(binding, inner="eager")
    if how == "Module.compile":
        calls: list[Callable[..., Tensor]] = list(layers)
        for layer in layers:
            layer.compile(backend=backend, fullgraph=True)
    elif how == "torch.compile":
        calls = [torch.compile(layer, backend=backend, fullgraph=True) for layer in layers]
    else:
        one = torch.compile(lambda layer, x, at: Layer.forward(layer, x, at), backend=backend, fullgraph=True)
        calls = [lambda x, at, layer=layer: one(layer, x, at) for layer in layers]  # type: ignore[misc]
    with torch.no_grad():
        for tokens in (3, 4, 2):
            x, at = rows(tokens)
            want = x
            for call, (k, v) in zip(calls, stock, strict=True):
                x = call(x, at)
                k[at], v[at] = want, want * 2
                want = k[at] - v[at - 1]
                torch.testing.assert_close(x, want, rtol=0, atol=0)
    assert binding.report().graphs == 2 * len(layers)  # static, then with any number of tokens
    binding.release()
    for layer, (k, v) in zip(layers, stock, strict=True):
        assert torch.equal(layer.k, k) and torch.equal(layer.v, v)


def test_at_the_recompile_limit_eager_code_is_told_of_it() -> None:
    layer, binding = bound_layer()

    def step(x: Tensor, at: Tensor, n: int) -> Tensor:
        layer.k[at] = x * n
        return x + n

    compiled = torch.compile(step, backend=page_major_backend(binding, inner="eager"), dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        compiled(*rows(), 1)
        compiled(*rows(), 2)
        with pytest.raises(RuntimeError, match=r"recompile limit .*raise torch\._dynamo\.config\.recompile_limit"):
            compiled(*rows(), 3)


def broken(layer: Layer, where: str) -> Callable[..., Tensor]:
    """A function in three parts, that touches the cache in one of them or in none."""

    def step(x: Tensor, at: Tensor) -> Tensor:
        x = x * 2
        if where == "first":
            layer.k[at] = x
        torch._dynamo.graph_break()
        x = x + 1
        if where == "second":
            layer.k[at] = x
        torch._dynamo.graph_break()
        if where == "last":
            layer.k[at] = x
        return x - 3

    return step


@pytest.mark.parametrize("where", ["first", "second", "last"])
def test_one_part_of_a_broken_function_may_touch_the_caches(where: str) -> None:
    layer, binding = bound_layer()
    with torch.no_grad():
        x, at = rows()
        got = torch.compile(broken(layer, where), backend=page_major_backend(binding, inner="eager"))(x, at)
    torch.testing.assert_close(got, x * 2 - 2)
    assert binding.report().writes_rewritten == 1


def test_a_broken_function_that_touches_no_cache_is_refused_at_its_end() -> None:
    layer, binding = bound_layer()
    assert "nothing was rewritten" in str(binding.report())
    with torch.no_grad(), pytest.raises(Exception, match="nothing was rewritten"):
        torch.compile(broken(layer, "none"), backend=page_major_backend(binding, inner="eager"))(*rows())
    assert "nothing was rewritten" in str(binding.report())


def test_after_a_graph_break_and_a_rewrite_a_function_that_touches_nothing_is_still_refused() -> None:
    layer, binding = bound_layer()
    backend = page_major_backend(binding, inner="eager")
    with torch.no_grad():
        torch.compile(broken(layer, "second"), backend=backend)(*rows())
        with pytest.raises(Exception, match="nothing was rewritten"):
            torch.compile(lambda x: x * 3, backend=backend)(torch.ones(2))
        relaxed = page_major_backend(binding, inner="eager", strict=False)
        assert torch.compile(lambda x: x * 3, backend=relaxed)(torch.ones(2)).sum() == 6
    assert "nothing was rewritten" not in str(binding.report())


def test_a_function_that_a_broken_one_calls_may_touch_nothing() -> None:
    """What is called where the graph broke is compiled by itself, long before the cache's turn comes."""
    layer, binding = bound_layer()

    def helper(x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    def step(x: Tensor, at: Tensor) -> Tensor:
        x = helper(helper(x))
        layer.k[at] = x
        return x

    with torch.no_grad():
        x, at = rows()
        got = torch.compile(step, backend=page_major_backend(binding, inner="eager"))(x, at)
    torch.testing.assert_close(got, x * 4 + 3)
    assert binding.report().writes_rewritten == 1


def test_modules_in_a_broken_model_may_touch_nothing() -> None:
    class Norm(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.norm()

    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = Norm(), Layer()

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            x = call(self.norm, x)
            return call(self.layer, x, at).relu()

    @torch._dynamo.disable(recursive=False)
    def call(module: torch.nn.Module, *args: Tensor) -> Tensor:
        return module(*args)

    model = Broken()
    binding = bind_layers([model.layer])
    with torch.no_grad():
        got = torch.compile(model, backend=page_major_backend(binding, inner="eager"))(*rows())
    assert got.shape == (3, HEADS, DIM)
    assert binding.report().writes_rewritten == 2
