"""The operators as people call them: with a pool and a layer instead of buffers and byte strides.

Each function only fills in the pool's geometry; ``torch.ops.pm_ops.<name>`` is the same operator with ints, for
compiler passes and engines. Eager or compiled, CPU or CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .pool import PagePool

Scale = float | Tensor


def store_kv(
    pool: PagePool,
    layer: int,
    key: Tensor | None,
    value: Tensor | None,
    slots: Tensor,
    *,
    key_scale: Scale = 1.0,
    value_scale: Scale = 1.0,
) -> None:
    """Write token rows to their slots, K and V (or one of them) in one launch.

    Args:
        key, value: ``[T, heads, dim]`` of the layer's geometry, any strides and floating dtype.
        slots: int32 or int64 ``[N]``, N <= T: row ``i`` goes to ``slots[i]``; rows past N are padding. slot < 0 is
            skipped, slot >= capacity is never written.
        key_scale, value_scale: stored = x / scale, rounded to nearest even; fp8 saturates. A float, or one float32
            element on the pool's device.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; on CPU also an index out of range or named twice.
        RuntimeError: an input requires grad.
    """
    planes = [_plane(pool, layer, kind, rows) for kind, rows in (("key", key), ("value", value))]
    torch.ops.pm_ops.store_kv(
        pool.buffer,
        key,
        value,
        slots,
        planes[0][0],
        planes[1][0],
        pool.page_size,
        planes[0][1],
        planes[1][1],
        **_scales(key_scale, value_scale),
    )


def load_kv(
    pool: PagePool,
    layer: int,
    slots: Tensor,
    kind: str = "key",
    *,
    scale: Scale = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The rows of these slots of one plane, fresh ``[N, heads, dim]``; slot < 0 gives zeros.

    Without ``out_dtype`` the stored elements, bit for bit; with it ``stored * scale``, cast.
    """
    plane = pool.layout.plane(layer, kind)
    heads, dim = plane.shape
    number, tensor = _scale(scale)
    return torch.ops.pm_ops.load_kv(
        pool.buffer,
        slots,
        pool.geometry(layer, kind),
        pool.page_size,
        heads,
        dim,
        plane.dtype,
        scale=number,
        scale_tensor=tensor,
        out_dtype=out_dtype,
    )


def attention(
    pool: PagePool,
    layer: int,
    query: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    query_start: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    key_scale: Scale = 1.0,
    value_scale: Scale = 1.0,
    max_query_len: int = 0,
    return_lse: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of ``query [Tq, Hq, Dk]`` over the layer's pages: decode, prefill and mixed batches.

    ``softmax_scale`` defaults to ``Dk ** -0.5``. The other arguments, and what each row promises, are those of
    :class:`pm_ops.ops.attention.Attention`. Returns ``out [Tq, Hq, Dv]``, or ``(out, lse)`` with ``return_lse``.
    """
    key, value = pool.layout.plane(layer, "key"), pool.layout.plane(layer, "value")
    out, lse = torch.ops.pm_ops.attention(
        pool.buffer,
        query,
        page_table,
        seq_lens,
        query_start,
        pool.geometry(layer, "key"),
        pool.geometry(layer, "value"),
        pool.page_size,
        key.shape[0],
        value.shape[1],
        key.dtype,
        value.dtype,
        softmax_scale=key.shape[1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        bias=bias,
        **_scales(key_scale, value_scale),
        max_query_len=max_query_len,
        return_lse=return_lse,
        impl=impl,
    )
    return (out, lse) if return_lse else out


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two parts of one softmax: ``out_* [T, H, D]``, natural-log ``lse_* [T, H]`` float32.

    Two empty parts give 0 and -inf. Sinks may be in one part only.
    """
    return torch.ops.pm_ops.merge_attention(out_a, lse_a, out_b, lse_b)


def copy_pages(pool: PagePool, src: Tensor, dst: Tensor) -> None:
    """Copy pages onto pages, every layer; overlapping lists behave as gather, then scatter."""
    pool.copy(src, dst)


def zero_pages(pool: PagePool, pages: Tensor) -> None:
    """Fill pages with zero bytes."""
    pool.zero(pages)


def gather_pages(pool: PagePool, pages: Tensor) -> Tensor:
    """Fresh uint8 ``[n, page_bytes]``, one row a page."""
    return pool.gather(pages)


def scatter_pages(pool: PagePool, rows: Tensor, pages: Tensor) -> None:
    """Write rows of :func:`gather_pages` to pages."""
    pool.scatter(pages, rows)


def copy_slots(pool: PagePool, src: Tensor, dst: Tensor) -> None:
    """Copy token slots onto token slots, every token plane of every layer."""
    pool.copy_slots(src, dst)


def _plane(pool: PagePool, layer: int, kind: str, rows: Tensor | None) -> tuple[list[int] | None, torch.dtype | None]:
    if rows is None:
        return None, None
    plane = pool.layout.plane(layer, kind)
    if tuple(rows.shape[1:]) != plane.shape:
        raise ValueError(
            f"{kind} rows are {list(rows.shape)}, layer {layer} holds [tokens, {plane.shape[0]}, {plane.shape[1]}]"
        )
    return pool.geometry(layer, kind), plane.dtype


def _scale(scale: Scale) -> tuple[float, Tensor | None]:
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


def _scales(key_scale: Scale, value_scale: Scale) -> dict[str, float | Tensor | None]:
    (key, key_tensor), (value, value_tensor) = _scale(key_scale), _scale(value_scale)
    return {
        "key_scale": key,
        "value_scale": value,
        "key_scale_tensor": key_tensor,
        "value_scale_tensor": value_tensor,
    }
