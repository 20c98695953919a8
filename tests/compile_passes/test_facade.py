"""A bound cache in eager code: it tells its sizes, and whatever needs its data names the way out."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import Binding, bind, page_major_backend

LAYERS, HEADS, DIM, PAGE = 2, 2, 8, 4


def make_pool(pages: int = 10, layers: int = LAYERS) -> PagePool:
    return PagePool(page_major(layers, HEADS, DIM, PAGE, torch.float32), pages)


def caches(*shape: int) -> list[Tensor]:
    return [torch.randn(shape) for _ in range(LAYERS)]


class Attention(torch.nn.Module):
    """A layer whose caches are buffers, one of them left out of its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(2, 2)
        self.register_buffer("k_cache", torch.randn(40, HEADS, DIM))
        self.register_buffer("v_cache", torch.randn(40, HEADS, DIM), persistent=False)


def bound_model() -> tuple[torch.nn.Sequential, Binding]:
    model = torch.nn.Sequential(*(Attention() for _ in range(LAYERS)))
    return model, bind(make_pool(), keys=[m.k_cache for m in model], values=[m.v_cache for m in model])


def test_a_facade_answers_metadata_and_refuses_data() -> None:
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    bind(make_pool(), keys=keys, values=values)
    k = keys[1]
    assert (k.shape, k.stride(), k.dtype, k.device.type) == ((40, HEADS, DIM), (16, 8, 1), torch.float32, "cpu")
    assert (len(k), k.numel(), k.ndim, k.is_contiguous(), k.requires_grad) == (40, 640, 3, True, False)
    assert "layer 1 key" in repr(k)
    view = k[3, None, :, ::2]
    assert (view.shape, view.stride(), view.storage_offset()) == ((1, HEADS, DIM // 2), (16, 8, 2), 48)
    assert (view.dtype, view.device, view.is_meta, view.get_device()) == (k.dtype, k.device, False, -1)
    assert "a view of layer 1 key" in repr(view)
    with pytest.raises(IndexError):
        k[40]


IN_PYTHON: dict[str, Callable[[Any], Tensor]] = {
    "split": lambda k: k.split(8)[1][3:5] + k.split([30, 10], dim=0)[1][:2],
    "unflatten": lambda k: k.unflatten(0, (5, 8))[1:3, 2] + k.unflatten(dim=-3, sizes=(-1, 4))[2:4, 1],
    "norm": lambda k: k.norm() + k.norm(dim=-1),
    "__rsub__": lambda k: 1 - k,
    "__rdiv__": lambda k: 1 / k + 3.0 / k,
    "__rpow__": lambda k: 2**k,
    "pow": lambda k: k**2,
    "__floordiv__": lambda k: k // 2,
    "__rfloordiv__": lambda k: 3 // k,
    "__rmod__": lambda k: 3 % k,
}


@pytest.mark.parametrize("name", IN_PYTHON)
def test_tensor_methods_written_in_python_are_traced(name: str) -> None:
    """Operators, too. The name is the one that eager code is told."""
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    expected = IN_PYTHON[name](keys[1].clone())
    binding = bind(make_pool(), keys=keys, values=values)
    backend = page_major_backend(binding, "eager", on_unsupported_read="materialize")
    with torch.no_grad():
        assert torch.equal(torch.compile(IN_PYTHON[name], backend=backend, fullgraph=True)(keys[1]), expected)
    with pytest.raises(RuntimeError, match=f"eager code calls '{name}' on layer 1 key"):
        IN_PYTHON[name](keys[1])


ROWS, AT = torch.ones(2, HEADS, DIM), torch.tensor([9, 1])
WRITES: dict[str, Callable[[Any], Any]] = {
    "set": lambda k: k.__setitem__(AT, ROWS),
    "index_put_": lambda k: k.index_put_((AT,), ROWS),
    "index_copy_": lambda k: k.index_copy_(0, AT, ROWS),
    "index_fill_": lambda k: k.index_fill_(0, AT, torch.tensor(2.0)),
    "copy_": lambda k: k.copy_(ROWS[:1]),
    "scatter_": lambda k: k.scatter_(0, AT[:, None, None].expand(-1, HEADS, DIM), ROWS),
    "fill_": lambda k: k.fill_(torch.tensor(2.0)),
}


@pytest.mark.parametrize("name", WRITES)
def test_tensor_methods_written_in_python_are_traced_behind_a_write(name: str) -> None:
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)

    def step(k: Tensor) -> Tensor:
        WRITES[name](k)
        return k.unflatten(0, (5, 8))[1:3, 1] + k.split(8)[1][:2] + k.norm()

    expected = step(keys[1].clone())
    backend = page_major_backend(
        bind(make_pool(), keys=keys, values=values), "eager", on_unsupported_read="materialize"
    )
    with torch.no_grad():
        assert torch.equal(torch.compile(step, backend=backend, fullgraph=True)(keys[1]), expected)


def test_reads_of_as_many_elements_as_their_values_tell_are_eagers() -> None:
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)

    def step(k: Tensor) -> tuple[Tensor, Tensor]:
        return k.nonzero() + 1, k.masked_select(k > 0) * 2

    expected = step(keys[1].clone())
    binding = bind(make_pool(), keys=keys, values=values)
    backend = page_major_backend(binding, "eager", on_unsupported_read="materialize")
    with torch.no_grad(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(step, backend=backend, fullgraph=True)(keys[1])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


DATA: dict[str, Callable[[Any], Any]] = {
    "a view's data": lambda k: k[0] + 1,
    "index": lambda k: k[torch.tensor([1])],
    "mask": lambda k: k[k.new_ones(40, dtype=torch.bool)],
    "set": lambda k: k.__setitem__(0, 1.0),
    "add": lambda k: k + 1,
    "in place": lambda k: torch.zeros(40, HEADS, DIM).add_(k),
    "copy_": lambda k: k.copy_(torch.zeros(40, HEADS, DIM)),
    "out=": lambda k: torch.add(torch.zeros(40, HEADS, DIM), 1, out=k),
    "cat": lambda k: torch.cat([k, k]),
    "foreach": lambda k: torch._foreach_zero_([k]),
    "operator": lambda k: torch.ops.aten.sum.default(k),
    "T": lambda k: k.T,
    "data": lambda k: k.data,
    "new data": lambda k: setattr(k, "data", torch.zeros(3)),
    "new gradient flag": lambda k: setattr(k, "requires_grad", True),
    "detach": lambda k: k.detach(),
    "as_subclass": lambda k: k.as_subclass(torch.Tensor),
    "cpu": lambda k: k.cpu(),
    "to": lambda k: k.to(torch.float16),
    "tolist": lambda k: k.tolist(),
    "numpy": lambda k: k.numpy(),
    "asarray": lambda k: np.asarray(k),
    "dlpack": lambda k: torch.from_dlpack(k),
    "numpy's dlpack": lambda k: np.from_dlpack(k),
    "data_ptr": lambda k: k.data_ptr(),
    "copy": lambda k: copy.copy(k),
    "deepcopy": lambda k: copy.deepcopy(k),
    "save": lambda k: torch.save(k, io.BytesIO()),
    "share_memory_": lambda k: k.share_memory_(),
    "resize_": lambda k: k.resize_(3),
}


@pytest.mark.parametrize("touch", DATA.values(), ids=DATA.keys())
def test_eager_code_that_touches_the_data_is_refused(touch: Callable[[Any], Any]) -> None:
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    binding = bind(make_pool(), keys=keys, values=values)
    before = binding.pool.buffer.clone()
    with pytest.raises(RuntimeError, match=r"layer 1 key, which lives in pages[\s\S]*binding\.release\(\)"):
        touch(keys[1])
    assert torch.equal(binding.pool.buffer, before)


def test_a_capsule_of_a_bound_cache_is_not_made() -> None:
    """to_dlpack asks no tensor subclass; the storage itself has to refuse."""
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    bind(make_pool(), keys=keys, values=values)
    with pytest.raises(RuntimeError, match=r"binding\.release\(\)|Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(keys[1])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_address_of_a_bound_cache_is_given_out(device: str) -> None:
    """These ask no tensor subclass either. Builds of torch without CUDA cannot refuse an address to readers."""
    keys, values = ([t.to(device) for t in caches(40, HEADS, DIM)] for _ in "kv")
    before = [t.clone() for t in (*keys, *values)]
    pool = PagePool(page_major(LAYERS, HEADS, DIM, PAGE, torch.float32), 10, device=device)
    binding = bind(pool, keys=keys, values=values)
    for touch in (
        torch.tensor,
        lambda k: torch.asarray(k, copy=True),
        lambda k: torch.as_tensor(k, dtype=torch.float64),
        lambda k: torch.utils.dlpack.to_dlpack(k),
        lambda k: torch.func.vmap(lambda x: x + 1)(k),
    ):
        with pytest.raises(RuntimeError, match=r"layer 1 key lives in pages[\s\S]*binding\.release\(\)"):
            touch(keys[1])
    binding.release()
    for got, want in zip((*keys, *values), before, strict=True):
        assert torch.equal(got, want)


MODULE: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "save": lambda model: torch.save(model, io.BytesIO()),
    "deepcopy": lambda model: copy.deepcopy(model),
    "to": lambda model: model.to(torch.float16),
    "half": lambda model: model.half(),
    "cpu": lambda model: model.cpu(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("use", MODULE.values(), ids=MODULE.keys())
def test_a_bound_module_is_neither_saved_nor_copied_nor_converted(use: Callable[[Any], Any]) -> None:
    model, binding = bound_model()
    with pytest.raises(RuntimeError, match=r"lives in pages[\s\S]*binding\.release\(\)"):
        use(model)
    binding.release()
    use(model)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_does_not_replace_a_bound_cache(assign: bool) -> None:
    saved = torch.nn.Sequential(*(Attention() for _ in range(LAYERS))).state_dict()
    weights = {name: t for name, t in saved.items() if "cache" not in name}
    model, binding = bound_model()
    with pytest.raises(RuntimeError, match=r"0\.k_cache: bound caches, which live in pages[\s\S]*binding\.release\(\)"):
        model.load_state_dict(saved, assign=assign)
    model.load_state_dict(weights, assign=assign, strict=False)
    assert torch.equal(model[1].proj.weight, saved["1.proj.weight"])
    assert type(model[1].k_cache).__name__ == "Facade"
    binding.release()
    model.load_state_dict(saved, assign=assign)
    assert torch.equal(model[1].k_cache, saved["1.k_cache"])


def test_a_view_that_eager_code_made_is_no_cache_of_the_compiled_model() -> None:
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    binding = bind(make_pool(), keys=keys, values=values)
    model = torch.compile(lambda view: view.clone(), backend=page_major_backend(binding, inner="eager"))
    with torch.no_grad(), pytest.raises(Exception, match="a view of layer 0 key, which [\\s\\S]* eager code made"):
        model(keys[0][:4])
    view = keys[0][:]
    binding.release()
    with pytest.raises(RuntimeError, match="released already"):
        view.zero_()


def test_eager_code_after_a_graph_break_is_told_of_the_facade() -> None:
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    binding = bind(make_pool(), keys=keys, values=values)

    def model(x: Tensor, at: Tensor) -> Tensor:
        keys[0][at] = x
        torch._dynamo.graph_break()
        return x + read(at)

    @torch._dynamo.disable
    def read(at: Tensor) -> Tensor:
        return keys[0][at]

    with torch.no_grad(), pytest.raises(RuntimeError, match="TORCH_LOGS=graph_breaks"):
        torch.compile(model, backend=page_major_backend(binding, inner="eager"))(
            torch.ones(2, HEADS, DIM), torch.tensor([1, 2])
        )


BREAKS: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda k: k.nonzero(),
    "masked_select": lambda k: k.masked_select(torch.ones(40, 1, 1, dtype=torch.bool)),
    "mask": lambda k: k[torch.arange(40) < 3],
    "empty mask": lambda k: k[torch.arange(40) < 0],
    "unique": torch.unique,
    "equal": lambda k: torch.equal(k, k),
    "allclose": lambda k: torch.allclose(k, torch.zeros(40, HEADS, DIM)),
    "tolist": lambda k: k.tolist(),
}


@pytest.mark.parametrize("read", BREAKS.values(), ids=BREAKS.keys())
def test_an_operation_at_which_the_graph_breaks_finds_the_facade(read: Callable[[Any], Any]) -> None:
    """Its result's size or value is the data's, so that Dynamo leaves it to eager code, which has none."""
    keys, values = caches(40, HEADS, DIM), caches(40, HEADS, DIM)
    binding = bind(make_pool(), keys=keys, values=values)

    def model(x: Tensor, at: Tensor) -> Any:
        keys[0][at] = x
        return read(keys[0])

    with torch.no_grad(), pytest.raises(RuntimeError, match="on layer 0 key, which lives in pages"):
        torch.compile(model, backend=page_major_backend(binding, inner="eager"))(
            torch.ones(2, HEADS, DIM), torch.tensor([1, 2])
        )
