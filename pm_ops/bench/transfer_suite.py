"""The cases of the suite ``transfer``, and what is right there: every byte of both sides."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .case import Case
from .implementation import Bound
from .memory import PAGE_MAJOR, poison
from .oracle import Error
from .transfer_cases import RepackShape, TransferShape
from .transfer_work import RepackWork, TransferWork, repack_work, transfer_work


def transfer_case(suite: str, shape: TransferShape) -> Case:
    """Pages to the host, from it, or both: how long until they are there, or how long the caller is busy."""
    kind = "prefix" if shape.verb in ("first layer", "last layer") else suite
    return Case(
        suite,
        shape.name,
        f"host {kind}" if shape.host_time else kind,
        partial(transfer_work, shape),
        lambda impl, work, layout: impl.transfer(work, layout),
        _check_transfer,
        None if shape.host_time else "gb_s",
        shape.nbytes,
        graph=False,
        tolerance=0.0,
        apart=True,
        idle=kind == "prefix",
    )


def repack_case(suite: str, shape: RepackShape) -> Case:
    """Pages of one layout as pages of another."""
    return Case(
        suite,
        shape.name,
        "repack",
        partial(repack_work, shape),
        lambda impl, work, layout: impl.repack(work, layout),
        _check_repack,
        "gb_s",
        shape.nbytes,
        graph=False,
        tolerance=0.0,
        apart=shape.peer,  # two streams wait for one another: as long for the host as for short transfers
    )


def _check_transfer(bound: Bound, work: TransferWork, layout: str) -> Error:
    """Both sides are filled anew, so that what is there after the call has come by it.

    What is read here is read in stream order behind the call: it has to wait for its own copies.
    """
    (device, host), verb = work.sides(layout), work.shape.verb
    right_device, right_host = (poison(side.numel(), device.device).view(side.shape) for side in (device, host))
    device.copy_(right_device)
    host.copy_(right_host)
    if bound.prepare is not None:
        bound.prepare()
    dst, saved = _ids(work.dst, device), _ids(work.saved, device)
    if verb != "offload":
        right_device[:, dst] = right_host[:, saved]
    bound.run()
    wrong = 0.0
    if verb == "first layer":
        first = work.first_layer(layout)
        at = (dst,) if layout == PAGE_MAJOR else (slice(None), dst)
        arrived = first[at]
        if bound.finish is not None:
            bound.finish()
        if device.is_cuda:
            torch.cuda.synchronize(device.device)
        wrong = _share(arrived, first[at])  # what comes later is compared with what is right below
    if verb in ("offload", "both ways"):
        sent = right_device[:, _ids(work.src, device)]
        if bound.out is None:
            right_host[:, _ids(bound.pages() if bound.pages is not None else work.spare, device)] = sent
        else:
            wrong = _share(bound.out.to(device.device), sent)
    wrong = max(wrong, _share(host.to(device.device), right_host), _share(device, right_device))
    return Error(wrong, wrong)


def _check_repack(bound: Bound, work: RepackWork, layout: str) -> Error:
    buffer = work.target.buffer
    buffer.copy_(poison(buffer.numel(), buffer.device))
    right = work.expected()
    bound.run()
    wrong = _share(buffer, right)
    return Error(wrong, wrong)


def _ids(ids: list[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, device=like.device)


def _share(got: Tensor, right: Tensor) -> float:
    """Which share of the bytes differs."""
    if torch.equal(got, right):
        return 0.0
    return float((got != right).count_nonzero()) / got.numel()
