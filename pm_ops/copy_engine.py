"""Runs of bytes from one buffer to another, by the GPU's copy engines where one of the two is a GPU's."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Runs(NamedTuple):
    """Bytes to copy: int64 CPU tensors of one length, of addresses and sizes."""

    source: Tensor
    target: Tensor
    nbytes: Tensor


def copy_runs(
    source: Tensor, target: Tensor, runs: Runs, first: int, last: int, stream: torch.cuda.Stream | None
) -> None:
    """Copy the runs ``first`` to ``last``, which do not overlap; on a stream of a GPU that has one of the buffers.

    On CUDA all runs are one call of ``cuMemcpyBatchAsync`` where the driver has it (CUDA 12.8 on), else one copy each.

    Args:
        source, target: the 1-D uint8 buffers in which the runs lie; one on the CPU is pinned where there is a stream.
        stream: None where both are on the CPU; the copies have been made when the call returns.

    Raises:
        RuntimeError: the driver refused the copies.
    """
    batch = _batch_call() if stream is not None else None
    if batch is None or stream is None:
        with torch.cuda.stream(stream):
            _one_by_one(source, target, runs, slice(first, last))
    elif torch.cuda.current_device() == stream.device_index:
        batch(runs, first, last, stream)
    else:
        with torch.cuda.device(stream.device):
            batch(runs, first, last, stream)


def _one_by_one(source: Tensor, target: Tensor, runs: Runs, rows: slice) -> None:
    offsets = runs.source[rows] - source.data_ptr(), runs.target[rows] - target.data_ptr(), runs.nbytes[rows]
    for begin, to, nbytes in zip(*(column.tolist() for column in offsets), strict=True):
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
def _batch_call() -> Callable[[Runs, int, int, torch.cuda.Stream], None] | None:
    """``cuMemcpyBatchAsync`` of some of the runs; None where the driver has none.

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

    def batch(runs: Runs, first: int, last: int, stream: torch.cuda.Stream) -> None:
        wrong = size(0)
        source, target, nbytes = (column.data_ptr() + column.itemsize * first for column in runs)
        of_all = ctypes.byref(attributes), ctypes.byref(applies_from), 1
        error = call(target, source, nbytes, last - first, *of_all, ctypes.byref(wrong), stream.cuda_stream)
        if error:
            where = f"at copy {wrong.value} of {last - first}"
            raise RuntimeError(f"cuMemcpyBatchAsync failed with CUDA error {error} {where}")

    return batch
