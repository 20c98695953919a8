"""fuse_rope on a GPU: what a layer launches, from the profiler, and that CUDA graphs can hold it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from rotary_forms import DIM, FORMS
from rotary_layers import HEADS, LAYERS, Rotary, inputs, plain

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind, page_major_backend

PAGE, PAGES = 4, 5


def compiled(model: Any, device: str, fuse: bool) -> tuple[Any, PagePool]:
    model = copy.deepcopy(model)
    model.k, model.v = ([t.to(device) for t in caches] for caches in (model.k, model.v))
    pool = PagePool(page_major(LAYERS, HEADS, DIM, PAGE, torch.bfloat16), PAGES, device=device)
    backend = page_major_backend(bind(pool, keys=model.k, values=model.v), fuse_rope=fuse)
    return torch.compile(model, backend=backend, fullgraph=True), pool


def kernels(run: Any, *args: torch.Tensor) -> Counter[str]:
    """How often each kernel ran in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run(*args)
        torch.cuda.synchronize()
    return Counter(e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_layer_launches_one_kernel_in_place_of_several(name: str) -> None:
    """Launches are no more, though what follows, a large part of these layers, is no longer fused into the rotation."""
    torch._dynamo.reset()
    model = Rotary(plain(FORMS[name].rotate), torch.bfloat16)
    frequencies, *weights = FORMS[name].tensors
    args = [t.cuda() for t in (*inputs(torch.bfloat16), frequencies, *(w.bfloat16() for w in weights))]
    counted, pools = [], []
    with torch.no_grad():
        for fuse in (False, True):
            run, pool = compiled(model, "cuda", fuse)
            expected = run(*args)
            counted.append(kernels(run, *args))
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                got = run(*args)
            graph.replay()
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
            pools.append(pool.buffer.view(torch.bfloat16))
    unfused, fused = counted
    of_ours = sum(n for kernel, n in fused.items() if "rope_store_kv" in kernel)
    assert of_ours == LAYERS and not any("store_kv" in k and "rope" not in k for k in fused), fused
    assert fused.total() <= unfused.total(), (unfused, fused)
    torch.testing.assert_close(pools[1], pools[0], rtol=2.0**-5, atol=2.0**-4)
