"""What the quickstart measures: copies, bytes that survive an offload, clones of the pool in compiled code, time."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._dynamo.utils import ReinplaceCounters
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache

import pm_ops
from pm_ops.compile_passes import Binding, PageMajorBackend
from pm_ops.layout import counted


class CountCopies(TorchDispatchMode):
    """Counts the copies that a block of code makes."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


class Offload:
    """Takes all pages of a sequence to host memory and back, and keeps count."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.equal: list[bool] = []
        self.copies: list[int] = []
        """Of each page that was taken out."""

    def __call__(self) -> None:
        pool, table = self.binding.pool, self.binding.page_table
        assert table is not None
        pages = table.flatten().tolist()
        before = pool.gather(pages)
        host = torch.empty(len(pages), pool.layout.page_bytes, dtype=torch.uint8, pin_memory=pool.device.type == "cuda")
        for row, page in zip(host, pages, strict=True):
            with CountCopies() as out:
                row.copy_(pool.pages[page])
            self.copies.append(out.copies)
        for page in pages:
            pool.pages[page].fill_(0xFF)  # NaN in every float type: what is not restored would be noticed
        wiped = not torch.equal(pool.gather(pages), before)
        for row, page in zip(host, pages, strict=True):
            pool.pages[page].copy_(row)
        self.equal.append(wiped and torch.equal(pool.gather(pages), before))


def copies_per_page_layer_major(cache: StaticCache, page_size: int) -> int:
    """Copies that it takes to bring one page's tokens to host memory from a cache of two tensors a layer."""
    with CountCopies() as out:
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                page = tensor[:, :, :page_size]
                torch.empty(page.shape, dtype=page.dtype).copy_(page)
    return out.copies


@contextmanager
def output_code() -> Iterator[list[str]]:
    """Collects the code that Inductor writes, or finds in its disk cache."""
    ReinplaceCounters.clear()
    found: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", found.append):
        yield found


def pool_clones(code: list[str], pool: pm_ops.PagePool) -> int:
    """Buffers of the pool's size or more that compiled code allocates, and tensors it failed to change in place."""
    if not code:
        raise RuntimeError("Inductor handed over no code, so its clones cannot be counted")
    allocated = re.compile(r"= empty_strided\w*\(\(([\d, ]+)\).*?torch\.(\w+)")
    sizes = []
    for shape, dtype in (match for text in code for match in allocated.findall(text)):
        elements = torch.Size(int(n) for n in shape.replace(" ", "").strip(",").split(",")).numel()
        sizes.append(elements * getattr(torch, dtype).itemsize)
    return sum(size >= pool.buffer.numel() for size in sizes) + ReinplaceCounters.get_total_missed()


class Progress:
    """Prints lines on stderr, each with the seconds since the start and since the line before."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def __call__(self, text: str) -> None:
        now = time.perf_counter()
        print(f"[{now - self.start:6.1f} s, +{now - self.last:4.1f}] {text}", file=sys.stderr, flush=True)
        self.last = now


def telling(backend: PageMajorBackend, say: Callable[[str], None]) -> Callable[..., Any]:
    """The backend, with a line at the end of every stage of a compilation."""
    compile_inner = backend._compile_inner

    def inner(gm: Any, *args: Any) -> Any:
        say(f"    rewritten onto pages: {counted(len(gm.graph.nodes), 'operation')}")
        compiled = compile_inner(gm, *args)
        if backend.inner == "inductor":
            say("    compiled by Inductor")
        return compiled

    def outer(gm: Any, inputs: Any, **options: Any) -> Any:
        say(f"    traced by Dynamo: {counted(len(gm.graph.nodes), 'operation')}")
        with mock.patch.object(backend, "_compile_inner", inner):
            return backend(gm, inputs, **options)

    return outer
