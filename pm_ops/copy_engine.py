"""Runs of bytes from one buffer to another, by the GPU's copy engines where one of the two is a GPU's."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Where the bytes lie: int64 CPU tensors of one length, offsets from the first byte of each buffer."""

    source: Tensor
    target: Tensor
    nbytes: Tensor


def copy_runs(source: Tensor, target: Tensor, runs: Runs, stream: torch.cuda.Stream | None) -> None:
    """Copy runs that do not overlap, on a stream of a GPU that one of the buffers is on, else at once.

    On CUDA all runs are one call of ``cuMemcpyBatchAsync`` where the driver has it (CUDA 12.8 on), else one copy each.

    Args:
        source, target: 1-D uint8 buffers, pinned where they are on the CPU and there is a stream.

    Raises:
        RuntimeError: the driver refused the copies.
    """
    if stream is None:
        _one_by_one(source, target, runs)
        return
    batch = _batch_call()
    with torch.cuda.device(stream.device):
        if batch is not None:
            batch(runs.source + source.data_ptr(), runs.target + target.data_ptr(), runs.nbytes, stream)
        else:
            with torch.cuda.stream(stream):
                _one_by_one(source, target, runs)


def _one_by_one(source: Tensor, target: Tensor, runs: Runs) -> None:
    for begin, to, nbytes in zip(*(column.tolist() for column in runs), strict=True):
        target[to : to + nbytes].copy_(source[begin : begin + nbytes], non_blocking=True)


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes`` of CUDA 12.8, with its two ``CUmemLocation`` hints, which stay empty."""

    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM; with ANY a source is read before the stream's events allow it


@functools.cache
def _batch_call() -> Callable[[Tensor, Tensor, Tensor, torch.cuda.Stream], None] | None:
    """``cuMemcpyBatchAsync`` with tensors of addresses and bytes; None where the driver has none.

    Looked up by the version of its signature, which CUDA 13 changed, so that any driver gives the one that is called.
    It takes no legacy default stream, which the streams of torch's pool never are.
    """
    try:
        lookup = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    name, version, flags = b"cuMemcpyBatchAsync", 12080, ctypes.c_uint64(0)
    failed = lookup(name, ctypes.byref(address), ctypes.c_int(version), flags, ctypes.byref(status))
    if failed or not address.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )(address.value)  # fmt: skip
    attributes, applies_from = _Attributes(source_access_order=_IN_STREAM_ORDER), size(0)

    def batch(source: Tensor, target: Tensor, nbytes: Tensor, stream: torch.cuda.Stream) -> None:
        wrong = size(0)
        lists = target.data_ptr(), source.data_ptr(), nbytes.data_ptr(), len(nbytes)
        of_all = ctypes.byref(attributes), ctypes.byref(applies_from), 1
        error = call(*lists, *of_all, ctypes.byref(wrong), stream.cuda_stream)
        if error:
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {error} at copy {wrong.value} of {lists[3]}")

    return batch
