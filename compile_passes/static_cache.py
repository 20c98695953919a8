"""What a transformers cache object holds: keys and values of its static layers, and states of its linear ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pm_ops import PagePool, Plane
from pm_ops.layout import counted

from .page_tables import layers_with

STATES = {"conv": "conv", "ssm": "recurrent"}
"""A state plane's kind, and what transformers calls such states."""


def attention_caches(cache: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values, layer after layer, of the layers that keep them.

    Raises:
        ValueError: a layer is a sliding-window or a growing one, or has no tensors yet.
    """
    layers = list(getattr(cache, "layers", []))
    if not layers:
        raise ValueError(f"{type(cache).__name__} has no layers; pass a StaticCache, or keys= and values=")
    sliding = [i for i, layer in enumerate(layers) if getattr(layer, "is_sliding", False)]
    if sliding:
        raise ValueError(f"layers {sliding} are sliding-window layers, which are not supported yet")
    keeping = [(i, layer) for i, layer in enumerate(layers) if not _only_states(layer)]
    for i, layer in keeping:
        if not getattr(layer, "is_compileable", False) or not hasattr(layer, "max_cache_len"):
            raise ValueError(f"layer {i} is a {type(layer).__name__}; only transformers' static layers can be bound")
        if not layer.is_initialized:
            raise ValueError(
                f"layer {i} has no tensors yet; call cache.early_initialization(...) or run a prefill before bind"
            )
    return [layer.keys for _, layer in keeping], [layer.values for _, layer in keeping]


@contextmanager
def states_of(cache: Any, pools: Sequence[PagePool], batch: int | None) -> Iterator[dict[str, list[Tensor]]]:
    """The states of every layer that has them in the pool's layout, by kind of plane.

    States that the cache has not made yet are made, as zeros: the layout knows their shapes. Where the block raises,
    they are taken away again.

    Raises:
        ValueError: cache and layout disagree about which layers have states, nothing tells their batch, or a layer
            records past states.
    """
    made: list[tuple[Any, str]] = []
    try:
        yield _states(cache, pools, batch, made)
    except BaseException:
        for layer, name in made:
            getattr(layer, f"{name}_states")[0] = None
            getattr(layer, f"is_{name}_states_initialized")[0] = False
        raise


def _states(
    cache: Any, pools: Sequence[PagePool], batch: int | None, made: list[tuple[Any, str]]
) -> dict[str, list[Tensor]]:
    found: dict[str, list[Tensor]] = {}
    for kind, name in STATES.items():
        planes = layers_with(pools, kind)
        for i, layer in enumerate(cache.layers):
            own = getattr(layer, f"{name}_states", {})
            if not isinstance(own, dict) or len(own) > 1:
                raise ValueError(
                    f"layer {i} keeps {name} states in a form that bind does not know: several of them, or not as "
                    "transformers 5.17 does; pass keys=, values= and states="
                )
            if i in planes:
                if getattr(layer, "record_past", False):
                    raise ValueError(
                        f"layer {i} records past states (activate_past_recording, as assisted generation calls it): "
                        "every step would put a new tensor in the place of a bound one; bind a cache that records none"
                    )
                if own and own[0] is None:
                    _make(layer, i, name, planes[i].layout.plane(i, kind), batch, planes[i].device)
                    made.append((layer, name))
                found.setdefault(kind, []).append(_state(layer, i, kind, name))
            elif own and own[0] is not None:
                raise ValueError(f"layer {i} keeps {name} states, and the pool has no plane {kind!r} of that layer")
        if planes and max(planes) >= len(cache.layers):
            raise ValueError(
                f"the pool has a plane {kind!r} of layer {max(planes)}, the cache {counted(len(cache.layers), 'layer')}"
            )
    return found


def _make(layer: Any, i: int, name: str, plane: Plane, batch: int | None, device: torch.device) -> None:
    if batch is None:
        raise ValueError(f"layer {i} has no {name} states yet, nor tells a layer of how many sequences: run a prefill")
    new = torch.zeros(batch, *plane.shape, dtype=plane.dtype, device=device)
    layer.lazy_initialization(**{f"{name}_states": new})


def _state(layer: Any, i: int, kind: str, name: str) -> Tensor:
    if not hasattr(layer, f"{name}_states"):
        raise ValueError(
            f"the pool has a plane {kind!r} of layer {i}, but that layer is a {type(layer).__name__} without states; "
            "number the layout's layers as in the model, with PageLayout.numbered"
        )
    state: Tensor = getattr(layer, f"{name}_states")[0]
    return state


def _only_states(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states") and not hasattr(layer, "update")
