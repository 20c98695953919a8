"""Recurrent states as bound caches: a tensor of one state a page or a sequence, and the plane that takes its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from pm_ops import PagePool
from pm_ops.layout import counted

from .forms import CachePlane
from .page_tables import layers_with


def named_states(pools: Sequence[PagePool], states: Mapping[str, Iterable[Tensor]]) -> list[tuple[int, str, Tensor]]:
    """``(layer, kind, tensor)`` of every state to bind.

    Raises:
        ValueError: a kind is no state of the pool's layout, or has another number of layers there.
    """
    named: list[tuple[int, str, Tensor]] = []
    for kind, given in states.items():
        tensors, layers = list(given), layers_with(pools, kind)
        if any(pool.layout.plane(i, kind).token_stride is not None for i, pool in layers.items()):
            raise ValueError(
                f"plane {kind!r} has a row for each token, not a state for each page; bind it by keys= or values="
            )
        if len(tensors) != len(layers) or not layers:
            raise ValueError(
                f"{counted(len(tensors), f'{kind} state')} for a layout that has {counted(len(layers), 'layer')} with "
                f"a plane {kind!r}; give one for each"
            )
        named += [(i, kind, t) for i, t in zip(layers, tensors, strict=True)]
    return named


def state_form(
    pool: PagePool, layer: int, kind: str, tensor: Tensor, storage: int, batch: int | None, by_page: bool
) -> CachePlane:
    """A state tensor ``[num_pages, *shape]`` or ``[batch, *shape]`` as rows of one token, in a page each.

    Args:
        pool, layer, kind, tensor, storage: the plane, the state, and the number of the storage that it lies in.
        batch: sequences of the caches beside it; None where these do not tell, and the state's own shape does.
        by_page: attention caches beside it are addressed by slot, so it has to be by page.

    Raises:
        ValueError: it has another shape, or is not contiguous behind the first axis of a state.
    """
    plane = pool.layout.plane(layer, kind)
    where, shape = f"the {kind} state of layer {layer}", tuple(tensor.shape)
    if batch is not None and shape != (batch, *plane.shape):
        raise ValueError(
            f"{where} has shape {list(shape)}; beside others of {counted(batch, 'sequence')} it must be "
            f"{[batch, *plane.shape]}, a state for each"
        )
    if shape[1:] != plane.shape or not shape[0] or (by_page and shape[0] != pool.num_pages):
        sequences = "" if by_page else ", or one for each of a batch of sequences"
        raise ValueError(
            f"{where} has shape {list(shape)}; it must be {[pool.num_pages, *plane.shape]}, a state for each of the "
            f"pool's {counted(pool.num_pages, 'page')}{sequences}"
        )
    heads, dim = plane.shape[0], math.prod(plane.shape[1:])
    slot, head = tensor.stride(0), tensor.stride(1)
    if not tensor[0, 0].is_contiguous() or head < dim or slot < heads * head:
        raise ValueError(
            f"{where} has strides {list(tensor.stride())}; a state's first axis may have any stride, the others must "
            "be contiguous"
        )
    form = "SHD" if batch is None and shape[0] == pool.num_pages else "BHD"
    return CachePlane(
        layer, kind, form, (shape[0], heads, dim), (slot, head, 1), int(tensor.storage_offset()), tensor.dtype,
        heads, dim, tuple(pool.geometry(layer, kind)), 1, storage,
    )  # fmt: skip
