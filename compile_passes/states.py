"""Recurrent states as bound caches: a tensor of one state a page, and the state plane that takes its place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from pm_ops import PagePool
from pm_ops.layout import counted

from .forms import CachePlane


def named_states(pool: PagePool, states: Mapping[str, Iterable[Tensor]]) -> list[tuple[int, str, Tensor]]:
    """``(layer, kind, tensor)`` of every state to bind.

    Raises:
        ValueError: a kind is no state of the pool's layout, or has another number of layers there.
    """
    named: list[tuple[int, str, Tensor]] = []
    for kind, given in states.items():
        tensors = list(given)
        layers = [i for i in pool.layout.layers if kind in pool.layout.kinds(i)]
        if any(pool.layout.plane(i, kind).token_stride is not None for i in layers):
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


def state_form(pool: PagePool, layer: int, kind: str, tensor: Tensor, storage: int) -> CachePlane:
    """A state tensor ``[num_pages, *shape]`` as rows of one token a page.

    Raises:
        ValueError: it has another shape, or is not contiguous behind the first axis of a state.
    """
    plane = pool.layout.plane(layer, kind)
    where, wanted = f"the {kind} state of layer {layer}", (pool.num_pages, *plane.shape)
    if tuple(tensor.shape) != wanted:
        raise ValueError(
            f"{where} has shape {list(tensor.shape)}; it is addressed by page, so it must be {list(wanted)}, a state "
            f"for each of the pool's {counted(pool.num_pages, 'page')}"
        )
    heads, dim = plane.shape[0], math.prod(plane.shape[1:])
    slot, head = tensor.stride(0), tensor.stride(1)
    if not tensor[0, 0].is_contiguous() or head < dim or slot < heads * head:
        raise ValueError(
            f"{where} has strides {list(tensor.stride())}; a state's first axis may have any stride, the others must "
            "be contiguous"
        )
    return CachePlane(
        layer, kind, "SHD", (pool.num_pages, heads, dim), (slot, head, 1), int(tensor.storage_offset()), tensor.dtype,
        heads, dim, tuple(pool.geometry(layer, kind)), 1, storage,
    )  # fmt: skip
