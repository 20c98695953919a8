"""How vLLM 0.26 offloads: ``swap_blocks_batch`` of its C++ library, and the Triton kernel it has for small pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .implementation import TRANSFER, Bound, Implementation, Missing
from .loading import import_module, version, vllm_library
from .streams import Two
from .transfer_work import TransferWork

LIBRARY = "_C_stable_libtorch.abi3.so"
_MOST = 8192  # bytes of a chunk of its Triton kernel

Swap = Callable[[Tensor, Tensor, Tensor, bool], None]
"""Addresses to read, addresses to write, bytes of each, and whether sources may be read out of stream order."""


class VLLMSwap(Implementation):
    """One call of the driver for all copies (``cuMemcpyBatchAsync``), on a stream of its own, as its workers do."""

    name = "vllm_swap"
    kinds = TRANSFER
    scope = "it moves blocks between device and host, and nothing else"
    compiles = False

    def __init__(self, folder: Path | None) -> None:
        library, self._version = vllm_library(folder, LIBRARY)
        if not hasattr(torch.ops._C_cache_ops, "swap_blocks_batch"):  # a second copy would clash with the first
            try:
                torch.ops.load_library(str(library))
            except (OSError, RuntimeError) as error:
                raise Missing(f"{LIBRARY} does not load with torch {torch.__version__}: {error}") from error

    def version(self) -> str:
        """vLLM's release, or the library's digest."""
        return self._version

    def transfer(self, work: TransferWork, layout: str) -> Bound:
        """``swap_blocks_batch``; what it is given is made from page ids within the call, as its worker does."""
        return Bound(_bind(work, layout, self._swap(work, layout)))

    def _swap(self, work: TransferWork, layout: str) -> Swap:
        return lambda *job: torch.ops._C_cache_ops.swap_blocks_batch(*job)


class VLLMSwapTriton(VLLMSwap):
    """The same by few SMs that read and write mapped memory. vLLM takes it to restore parts below 28 KiB."""

    name = "vllm_swap_triton"
    scope = "it is a second way to move blocks between device and host, and nothing else"
    compiles = True

    def __init__(self, folder: Path | None) -> None:
        module = import_module(folder, "vllm.v1.kv_offload.cpu.swap_blocks_triton")
        self._triton = module.swap_blocks_batch
        self._version = version(folder, "vllm", module)

    def _swap(self, work: TransferWork, layout: str) -> Swap:
        part = work.sides(layout).device.shape[2]
        chunk = min(1 << (part - 1).bit_length(), _MOST)
        return lambda *job: self._triton(*job, bytes_per_chunk=chunk)


def _bind(work: TransferWork, layout: str, swap: Swap) -> Callable[[], None]:
    (device, host), verb, jobs = work.sides(layout), work.shape.verb, []
    if verb in ("offload", "both ways"):
        jobs.append(_Job(device, host, work.src, work.spare, swap, any_order=False))
    if verb != "offload":
        jobs.append(_Job(host, device, work.saved, work.dst, swap, any_order=True))
    streams = Two(work.pool.device)
    return lambda: streams.run(*jobs)


class _Job:
    """One direction: addresses into pinned memory, then the swap."""

    def __init__(
        self, source: Tensor, target: Tensor, src: list[int], dst: list[int], swap: Swap, any_order: bool
    ) -> None:
        self.sides = tuple(
            (torch.tensor([part.data_ptr() for part in side])[:, None], side.stride(1), ids)
            for side, ids in ((source, src), (target, dst))
        )
        pinned, count = source.is_cuda or target.is_cuda, len(source) * len(src)
        self.addresses = torch.empty(2, len(source), len(src), dtype=torch.int64, pin_memory=pinned)
        self.sizes = torch.empty(count, dtype=torch.int64, pin_memory=pinned).fill_(source.shape[2])
        self.swap, self.any_order = swap, any_order

    def __call__(self) -> None:
        for addresses, (bases, stride, ids) in zip(self.addresses, self.sides, strict=True):
            torch.add(bases, torch.tensor(ids), alpha=stride, out=addresses)
        src, dst = self.addresses.flatten(1)
        self.swap(src, dst, self.sizes, self.any_order)
