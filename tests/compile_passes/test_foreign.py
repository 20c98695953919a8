"""A bound model compiled or exported by anything but its binding's backend: refused, in words, without a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind

ROOT = Path(__file__).parents[2]

FOREIGN = """
import sys, torch
from pm_ops import PagePool, page_major
from pm_ops.compile_passes import bind

k, v = torch.randn(20, 2, 8), torch.randn(20, 2, 8)
binding = bind(PagePool(page_major(1, 2, 8, 4, torch.float32), 5), keys=[k], values=[v])
before = binding.pool.buffer.clone()

def write_and_read(x, at):
    k[at] = x
    return k[at] * 2

def read_all(x, at):
    return k.sum() + v[3] + x.sum()

def operator(x, at):
    return torch.ops.aten.index.Tensor(k, [at]) + x

for function in (write_and_read, read_all, operator):
    for fullgraph in (True, False):
        torch._dynamo.reset()
        try:
            with torch.no_grad():
                torch.compile(function, backend=sys.argv[1], fullgraph=fullgraph)(torch.randn(2, 2, 8), torch.arange(2))
        except Exception as error:
            assert "compile it with torch.compile(model, backend=page_major_backend(binding))" in str(error), error
            assert "layer 0 key was moved into pages" in str(error), error
        else:
            raise AssertionError("ran on memory that was given back")
assert torch.equal(binding.pool.buffer, before)
print("refused")
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_another_backend_is_refused_and_does_not_crash(backend: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FOREIGN, backend]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_model_has_no_data_of_a_bound_cache(strict: bool) -> None:
    keys, values = [torch.randn(20, 2, 8)], [torch.randn(20, 2, 8)]
    bind(PagePool(page_major(1, 2, 8, 4, torch.float32), 5), keys=keys, values=values)

    class Reads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", keys[0])

        def forward(self, x: Tensor) -> Tensor:
            return x + self.cache.sum()

    with torch.no_grad(), pytest.raises(Exception, match=r"lives in pages|moved into pages|Cannot access data pointer"):
        torch.export.export(Reads(), (torch.ones(1),), strict=strict).module()(torch.ones(1))
