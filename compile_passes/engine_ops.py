"""Engines' own cache operators, brought to pages by an adapter that says what the operator means.

::

    register_store_op(torch.ops.engine.store.default,
                      lambda key, value, k_cache, v_cache, slots: Store(slots, key, k_cache, value, v_cache))
    register_attention_op(torch.ops.engine.attend.default,
                          lambda q, k_cache, v_cache, table, lens: Attend(q, k_cache, v_cache, table, lens))

    register_rotary_op(torch.ops.engine.rotary_embedding.default,
                       lambda positions, q, k, dim, table, neox: Rotate(q, k, positions, table, dim, not neox))

An adapter is called with the operator's arguments while the new graph is recorded; it may compute with them. Caches
must be addressed by physical slot (forms ``SHD`` and ``PSHD``), since such operators are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .forms import CachePlane
from .internals import overloads
from .page_ops import PlaneWrite, Scale, scale_arguments
from .report import RewriteError
from .trace import off_record

if TYPE_CHECKING:
    from .rewriter import Rewriter

ENGINE_OPS: dict[Any, Callable[..., Any]] = {}
NORM_OPS: dict[Any, Callable[..., RmsNorm | None]] = {}
ROTARY_OPS: dict[Any, Callable[..., Rotate | None]] = {}


@dataclass
class Store:
    """What a store operator writes: rows ``[T, heads, dim]`` to ``slots [N]``, N <= T; slot < 0 is skipped.

    ``result`` is what the operator returns. Stored is ``x / scale``.
    """

    slots: Tensor
    key: Tensor | None = None
    key_cache: Tensor | None = None
    value: Tensor | None = None
    value_cache: Tensor | None = None
    key_scale: Scale = 1.0
    value_scale: Scale = 1.0
    result: Any = None


@dataclass
class Attend:
    """What an attention operator reads; the fields are ``pm_ops.attention``'s.

    ``out`` is a tensor that the operator writes its result to; ``result`` makes what it returns from out and lse.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    query_start: Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    key_scale: Scale = 1.0
    value_scale: Scale = 1.0
    max_query_len: int = 0
    return_lse: bool = False
    out: Tensor | None = None
    result: Callable[[Tensor, Tensor], Any] = lambda out, lse: out


@dataclass
class Rotate:
    """What a rotary operator rotates in place: ``query`` and ``key``, ``[T, heads * head_dim]`` or with heads apart.

    The fields are arguments of the operator as they came. ``positions`` is ``[T]``; ``cos_sin`` and ``interleaved`` are
    ``pm_ops.rope_store_kv``'s.
    """

    query: Any
    key: Any
    positions: Any
    cos_sin: Any
    head_dim: int
    interleaved: bool = False


@dataclass
class RmsNorm:
    """What a norm operator computes: ``x * rsqrt(mean(x * x, -1) + eps) * weight``, in ``x``'s dtype.

    The fields are arguments of the operator as they came.
    """

    x: Any
    weight: Any
    eps: float


def register_norm_op(op: Any, adapter: Callable[..., RmsNorm | None]) -> None:
    """Let a fusion include an operator (overload, or all of a packet) that norms heads in front of their rotation.

    The adapter is called with the operator's arguments, fx nodes for the tensors; None: with these it is another norm.
    Inductor's cache is of use to :class:`RopeStorePass` only if the adapter is a function that its module has by name.
    """
    NORM_OPS.update(dict.fromkeys(_overloads(op), adapter))


def register_rotary_op(op: Any, adapter: Callable[..., Rotate | None]) -> None:
    """Let a fusion include an operator (overload, or all of a packet) that rotates in place.

    In a graph that Inductor compiles the adapter is called with the operator's arguments by name, and fx nodes for the
    tensors. There it returns None for a call that does not rotate by the whole of ``cos_sin``, query and key alike; and
    Inductor's cache is of use only if the adapter is a function that its module has by name, no lambda.
    """
    ROTARY_OPS.update(dict.fromkeys(_overloads(op), adapter))


def register_store_op(op: Any, adapter: Callable[..., Store]) -> None:
    """Rewrite an operator (overload, or all overloads of a packet) that stores rows into caches."""
    _register(op, lambda rw, *args, **kwargs: _store(rw, adapter(*args, **kwargs)))


def register_attention_op(op: Any, adapter: Callable[..., Attend]) -> None:
    """Rewrite an operator (overload, or all overloads of a packet) that attends over caches."""
    _register(op, lambda rw, *args, **kwargs: _attend(rw, adapter(*args, **kwargs)))


def _register(op: Any, run: Callable[..., Any]) -> None:
    ENGINE_OPS.update(dict.fromkeys(_overloads(op), run))


def _overloads(op: Any) -> list[Any]:
    found = overloads(op)
    if not found:
        raise ValueError(f"expected an operator such as torch.ops.engine.store.default, got {op!r}")
    return found


def _store(rw: Rewriter, s: Store) -> Any:
    writes = []
    for rows, cache, scale in ((s.key, s.key_cache, s.key_scale), (s.value, s.value_cache, s.value_scale)):
        if rows is not None and cache is not None:
            writes.append(PlaneWrite(_whole(rw, cache), rows, s.slots, *rw.pages.where(), scale=scale))
    rw.pages.store_rows(writes)
    return s.result


def _attend(rw: Rewriter, a: Attend) -> Any:
    key, value = _whole(rw, a.key_cache), _whole(rw, a.value_cache)
    out, lse = rw.pages.attend(
        (key, value),
        a.query,
        a.page_table,
        a.seq_lens,
        a.query_start,
        softmax_scale=a.query.shape[-1] ** -0.5 if a.softmax_scale is None else a.softmax_scale,
        causal=a.causal,
        window=a.window,
        softcap=a.softcap,
        sinks=a.sinks,
        alibi_slopes=a.alibi_slopes,
        bias=a.bias,
        **scale_arguments(a.key_scale, a.value_scale),
        max_query_len=a.max_query_len,
        return_lse=a.return_lse,
    )
    if a.out is not None:
        a.out.copy_(out.view(a.out.shape))
    return a.result(out, lse)


def _whole(rw: Rewriter, cache: Tensor) -> CachePlane:
    with off_record():
        region = rw.locate(cache)
    plane = region.plane
    if plane.paged:
        raise RewriteError(
            f"an engine's operator addresses {plane.label} by physical slot, but it is bound as a {plane.form} cache"
        )
    covered = cache.numel() == torch.Size(plane.shape).numel() and region.whole_rows
    if not covered:
        raise RewriteError(f"an engine's operator is given a part of the cache of {plane.label}, a view {cache.shape}")
    return plane
