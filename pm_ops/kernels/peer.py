"""Two GPUs of one host in one launch: a kernel on one of them writes the other's memory, over NVLink or PCIe."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..capture import refuse_capture


@contextmanager
def writes_to(here: torch.device, there: torch.device) -> Iterator[None]:
    """Around a launch on ``here``, the current device, that writes memory of ``there``.

    It starts after what is queued on the current streams of both devices, and what is queued on either after it waits
    for it: as for a copy between the two. Where ``here`` is ``there`` that is so anyway, and nothing is done.

    Raises:
        RuntimeError: ``here`` has no access to the memory of ``there``, or a CUDA graph is being captured.
    """
    if here == there:
        yield
        return
    refuse_capture("a graph is of one device, but this writes another's memory; call it outside", here, there)
    _give_access(here, there)
    ours, theirs = torch.cuda.current_stream(here), torch.cuda.current_stream(there)
    ours.wait_stream(theirs)
    yield
    theirs.wait_stream(ours)


@functools.cache
def _give_access(here: torch.device, there: torch.device) -> None:
    if not torch.cuda.can_device_access_peer(here, there):
        raise RuntimeError(
            f"{here} has no access to the memory of {there} (torch.cuda.can_device_access_peer): pages go from one to "
            "the other through host memory (pm_ops.HostPool)"
        )
    # torch opens a device's way to another's memory, its own allocations of either kind included, at the first copy
    torch.empty(1, device=there).copy_(torch.empty(1, device=here))
