"""Named page formats, each byte-exact with its origin unless ``align`` is given.

========================  =============================================================  ============================
format                    bytes of a page                                                origin
========================  =============================================================  ============================
``page_major``            ``[L0_K·ps | L0_V·ps | L1_K·ps | L1_V·ps | …]``                SGLang 0.5.15 – 0.5.18
``token_major``           ``ps`` entries ``[K0 | V0 | K1 | V1 | … | pad to 32 B]``       SGLang 0.5.22 on
``vllm("BLNHC")``         ``[layer][token][head][K | V]``                                vLLM 0.29 on
``vllm("BLHNC")``         ``[layer][head][token][K | V]``                                vLLM 0.29 on
``vllm("BHLNC")``         ``[head][layer][token][K | V]``                                vLLM 0.29 on
``hicache(…)``            ``[K | V][layer][token][head]``, also token or head first      SGLang 0.5.17, HiCache
``mla(…)``                ``[L0_latent·ps | L1_latent·ps | …]``                          SGLang 0.5.17, MLA
``state_page``            ``[conv·L | … | ssm·L]``, one state of a sequence a page       SGLang 0.5.17, Mamba
========================  =============================================================  ============================

With ``scales=True`` the first two also hold a float32 scale of every (token, head) of K and of V, behind all the rest,
so that K and V lie where they lie without scales:

========================  ==========================================================================================
``page_major``            ``[… | pad to 16 B | L0_Ks·H·ps | L0_Vs·H·ps | L1_Ks·H·ps | …]``, each padded to 16 B. One
                          head's scales of a page are side by side, as attention reads them
``token_major``           ``ps`` entries ``[… | pad to 4 B | Ks0·H | Vs0·H | Ks1·H | … | pad to 32 B]``
========================  ==========================================================================================

``layers`` is the number of layers. Every other argument that describes a layer may be one value, or a sequence with one
value a layer (models whose layers differ).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from .layout import PageLayout, Plane, counted, dtype_name, dtype_of
from .ops._common import PLANE_DTYPES

T = TypeVar("T")
Dtype = torch.dtype | str
"""A dtype, or torch's name of one, such as ``"bfloat16"``."""
Layers = list[tuple[int, int, tuple[int, int], torch.dtype]]
"""``(layer, heads, (key dim, value dim), dtype)`` of every layer."""

INDEX_DTYPE = torch.float8_e4m3fn
TOKEN_MAJOR_ALIGN = 32
"""Bytes to which SGLang pads a token's entry (``ENTRY_ALIGN_BYTES``)."""
SCALE_BYTES = torch.float32.itemsize
SCALE_ALIGN = 16
"""Bytes to which a page with scales is padded, so that rows behind the first page stay fit for 16-byte loads."""
VLLM_ORDERS = ("BLNHC", "BLHNC", "BHLNC")
"""vLLM's block-outermost orders: B block, L layer, H head, N token, C the K|V content of one (token, head)."""

HICACHE_ORDERS = {"page_first_direct": "LNH", "layer_first": "LNH", "page_first": "NLH", "page_head": "HNL"}
"""Orders of K, and of V, in a page of SGLang's HiCache: L layer, N token, H head."""


def page_major(
    layers: int,
    kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    page_size: int,
    dtype: Dtype | Sequence[Dtype],
    *,
    value_dim: int | Sequence[int] | None = None,
    align: int = 1,
    scales: bool = False,
) -> PageLayout:
    """``page = [L0_K·ps | L0_V·ps | L1_K·ps | …]``: layer after layer inside the page, K and V in blocks.

    Args:
        layers: number of layers.
        kv_heads, head_dim, value_dim: heads and dims, in elements; ``value_dim`` defaults to ``head_dim``.
        page_size: tokens of a page.
        dtype: element type of K and V, ``torch.bfloat16`` or ``"bfloat16"``: float32, float16, bfloat16, float8_e4m3fn,
            float8_e5m2 or int8; uint8 for bytes that are moved alone, as which engines store fp8.
        align: start every plane, and end the page, at a multiple of this many bytes. 1 is byte-exact with SGLang.
        scales: add planes ``"key_scale"`` and ``"value_scale"``, float32 ``(heads, 1)``, to the layers of an 8-bit
            dtype. They start, and the page then ends, at multiples of 16 bytes too.
    """
    planes = []
    end = 0
    per_layer = _per_layer(layers, kv_heads, head_dim, value_dim, dtype)
    for layer, heads, dims, layer_dtype in per_layer:
        for kind, dim in zip(("key", "value"), dims, strict=True):
            row = dim * layer_dtype.itemsize
            planes.append(Plane(layer, kind, end, heads * row, row, (heads, dim), layer_dtype))
            end = _round_up(end + page_size * heads * row, align)
    if scales:
        align = math.lcm(align, SCALE_ALIGN)
        for layer, kind, heads in _scaled(per_layer):
            start = _round_up(end, align)
            planes.append(Plane(layer, kind, start, SCALE_BYTES, page_size * SCALE_BYTES, (heads, 1), torch.float32))
            end = start + page_size * heads * SCALE_BYTES
    return PageLayout(page_size, _round_up(end, align), tuple(planes), "page_major")


def token_major(
    layers: int,
    kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    page_size: int,
    dtype: Dtype | Sequence[Dtype],
    *,
    value_dim: int | Sequence[int] | None = None,
    align: int = TOKEN_MAJOR_ALIGN,
    scales: bool = False,
) -> PageLayout:
    """``page_size`` entries, each ``[K0 | V0 | K1 | V1 | … | pad]``: everything of one token side by side.

    Args as in :func:`page_major`; ``align`` pads the entry alone, 32 bytes being SGLang's. SGLang itself also refuses
    rows that are not multiples of 16 bytes; here they are allowed.
    """
    rows = []
    end = 0
    per_layer = _per_layer(layers, kv_heads, head_dim, value_dim, dtype)
    for layer, heads, dims, layer_dtype in per_layer:
        for kind, dim in zip(("key", "value"), dims, strict=True):
            rows.append((layer, kind, end, dim * layer_dtype.itemsize, (heads, dim), layer_dtype))
            end += heads * dim * layer_dtype.itemsize
    if scales:
        end = _round_up(end, SCALE_BYTES)
        for layer, kind, heads in _scaled(per_layer):
            rows.append((layer, kind, end, SCALE_BYTES, (heads, 1), torch.float32))
            end += heads * SCALE_BYTES
    entry = _round_up(end, align)
    planes = tuple(Plane(layer, kind, at, entry, row, shape, dt) for layer, kind, at, row, shape, dt in rows)
    return PageLayout(page_size, page_size * entry, planes, "token_major")


def vllm(
    layers: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: Dtype,
    order: str = "BLNHC",
    *,
    value_dim: int | None = None,
) -> PageLayout:
    """vLLM's block-outermost layouts: K and V of one (token, head) side by side, C = K dim + V dim.

    Args:
        layers, kv_heads, head_dim, page_size, dtype, value_dim: as in :func:`page_major`; all layers are alike.
        order: memory order after the block axis, one of :data:`VLLM_ORDERS`.
    """
    if order not in VLLM_ORDERS:
        raise ValueError(f"order {order!r} is not a block-outermost vLLM layout; supported: {', '.join(VLLM_ORDERS)}")
    dtype = _cache_dtype(dtype)
    key_bytes = head_dim * dtype.itemsize
    value = head_dim if value_dim is None else value_dim
    content = key_bytes + value * dtype.itemsize
    strides, page_bytes = _strides(order[1:4], {"L": layers, "H": kv_heads, "N": page_size}, content)
    planes = []
    for layer in range(layers):
        start = layer * strides["L"]
        for kind, offset, dim in (("key", start, head_dim), ("value", start + key_bytes, value)):
            planes.append(Plane(layer, kind, offset, strides["N"], strides["H"], (kv_heads, dim), dtype))
    return PageLayout(page_size, page_bytes, tuple(planes), f"vllm {order}")


def hicache(
    layers: int, kv_heads: int, head_dim: int, page_size: int, dtype: Dtype, order: str = "page_first_direct"
) -> PageLayout:
    """A page of SGLang's HiCache, as its storage backends get it: K of all layers, then V of all layers.

    ======================================  ====================================================================
    ``page_first_direct``, ``layer_first``  ``[K | V][layer][token][head]``
    ``page_first``                          ``[K | V][token][layer][head]``
    ``page_head``                           ``[K | V][head][token][layer]``
    ======================================  ====================================================================

    The host pool itself is one tensor whose first axis is K and V. In the page-first orders, either half of it is a
    pool of ``hicache(…).part("key")``, and of ``"value"`` with ``base=`` half the tensor's bytes.

    Args:
        layers, kv_heads, head_dim, page_size, dtype: as in :func:`page_major`; layers, K and V are alike.
        order: the pool's ``layout``, one of :data:`HICACHE_ORDERS`.
    """
    if order not in HICACHE_ORDERS:
        raise ValueError(f"order {order!r} is not a HiCache layout; supported: {', '.join(HICACHE_ORDERS)}")
    dtype = _cache_dtype(dtype)
    sizes = {"L": layers, "H": kv_heads, "N": page_size}
    strides, half = _strides(HICACHE_ORDERS[order], sizes, head_dim * dtype.itemsize)
    planes = [
        Plane(layer, kind, start + layer * strides["L"], strides["N"], strides["H"], (kv_heads, head_dim), dtype)
        for layer in range(layers)
        for kind, start in (("key", 0), ("value", half))
    ]
    return PageLayout(page_size, 2 * half, tuple(planes), f"hicache {order}")


def state_page(
    layers: int | Sequence[int],
    states: Mapping[str, tuple[Sequence[int], Dtype]],
    *,
    align: int = 1,
) -> PageLayout:
    """``page = [first kind of every layer | second kind of every layer | …]``: one sequence's recurrent states.

    Args:
        layers: number of layers, or their numbers, for models in which only some layers have a state.
        states: by kind, in page order, the shape and dtype of a layer's state, such as
            ``{"conv": ((dim, width - 1), "bfloat16"), "ssm": ((heads, head_dim, state_dim), "float32")}``.
        align: start every state, and end the page, at a multiple of this many bytes. 1 is byte-exact with SGLang.

    Raises:
        ValueError: a state or the page's end does not fall on its dtype's bytes; ``align=16`` always does.
    """
    numbers = list(range(layers)) if isinstance(layers, int) else list(layers)
    planes = []
    end = 0
    for kind, (shape, given) in states.items():
        dtype, sizes = _dtype(given), tuple(shape)
        row = math.prod(sizes[1:]) * dtype.itemsize
        for layer in numbers:
            start = _round_up(end, align)
            planes.append(Plane(layer, kind, start, None, row, sizes, dtype))
            end = start + math.prod(sizes) * dtype.itemsize
    return PageLayout(1, _round_up(end, align), tuple(planes), "state_page")


def mla(
    layers: int,
    page_size: int,
    dtype: Dtype,
    *,
    latent_dim: int = 512,
    rope_dim: int = 64,
    index_dim: int = 0,
    align: int = 1,
) -> PageLayout:
    """Multi-head latent attention: ``page = [L0_latent·ps | L1_latent·ps | …]``, one plane ``"latent"`` a layer.

    A row is ``[latent | rotated key]``, as vLLM's ``concat_and_cache_mla`` writes it; its value is the latent, no plane
    of its own. A page is SGLang's ``build_dense_mla_views``' envelope.

    Args:
        layers: number of layers, all alike.
        page_size: tokens of a page.
        dtype: element type of the rows, as in :func:`page_major`.
        latent_dim, rope_dim: elements of the two parts of a row.
        index_dim: with an indexer (DeepSeek-V3.2: 128), the dim of its keys. It adds to each layer the planes
            ``"index_key"``, float8_e4m3fn, and ``"index_key_scale"``, float32, one a token: behind all latents
            ``[… | pad to 16 B | L0_keys·ps | L0_scales·ps | pad to 16 B | L1_keys·ps | …]``. A layer's part is a page
            of SGLang's and vLLM's indexer caches.
        align: start every layer's plane or pair of planes, and end the page, at a multiple of this many bytes.
    """
    dtype = _cache_dtype(dtype)
    if latent_dim < 1 or rope_dim < 0 or index_dim < 0:
        raise ValueError(
            f"latent_dim={latent_dim} must be positive, rope_dim={rope_dim} and index_dim={index_dim} >= 0"
        )
    dim = latent_dim + rope_dim
    row = dim * dtype.itemsize
    planes = []
    end = 0
    for layer in range(layers):
        planes.append(Plane(layer, "latent", end, row, row, (1, dim), dtype))
        end = _round_up(end + page_size * row, align)
    if index_dim:
        align = math.lcm(align, SCALE_ALIGN)
        for layer in range(layers):
            start = _round_up(end, align)
            scales = start + page_size * index_dim
            planes.append(Plane(layer, "index_key", start, index_dim, index_dim, (1, index_dim), INDEX_DTYPE))
            planes.append(Plane(layer, "index_key_scale", scales, SCALE_BYTES, SCALE_BYTES, (1, 1), torch.float32))
            end = scales + page_size * SCALE_BYTES
    return PageLayout(page_size, _round_up(end, align), tuple(planes), "mla")


def _strides(order: str, sizes: dict[str, int], content: int) -> tuple[dict[str, int], int]:
    """Bytes from one index of each axis to the next, where the last axis is innermost; and the bytes of all."""
    strides = {}
    for axis in reversed(order):
        strides[axis] = content
        content *= sizes[axis]
    return strides, content


def _per_layer(
    layers: int,
    kv_heads: int | Sequence[int],
    head_dim: int | Sequence[int],
    value_dim: int | Sequence[int] | None,
    dtype: Dtype | Sequence[Dtype],
) -> Layers:
    if not hasattr(layers, "__index__") or layers < 1:
        raise ValueError(f"layers={layers!r}: give the number of layers, 1 or more")
    heads = _numbers(kv_heads, layers, "kv_heads")
    keys = _numbers(head_dim, layers, "head_dim")
    values = keys if value_dim is None else _numbers(value_dim, layers, "value_dim")
    dtypes: list[Dtype] = _spread(dtype, layers, "dtype")
    return [(i, heads[i], (keys[i], values[i]), _cache_dtype(dtypes[i])) for i in range(layers)]


def _scaled(per_layer: Layers) -> list[tuple[int, str, int]]:
    """``(layer, kind, heads)`` of every scale plane, in page order: those of the layers of an 8-bit dtype."""
    found = [(i, heads) for i, heads, _, dtype in per_layer if dtype.itemsize == 1]
    if not found:
        raise ValueError(
            f"scales=True is for 8-bit dtypes (float8_e4m3fn, float8_e5m2, int8), got {dtype_name(per_layer[0][3])}; "
            "wider ones need no scales"
        )
    return [(i, kind, heads) for i, heads in found for kind in ("key_scale", "value_scale")]


def _numbers(value: int | Sequence[int], layers: int, name: str) -> list[int]:
    try:
        return list(map(operator.index, _spread(value, layers, name)))
    except TypeError:
        raise ValueError(f"{name} is {value!r}; give an integer, or one a layer") from None


def _spread(value: T | Sequence[T], layers: int, name: str) -> list[T]:
    """One value a layer, from one value or a sequence of them."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * layers
    if len(value) != layers:
        given = f"{counted(len(value), 'value')} for {counted(layers, 'layer')}"
        raise ValueError(f"{name} has {given}; give one value, or one a layer")
    return list(value)


def _cache_dtype(given: Dtype) -> torch.dtype:
    """The dtype of a plane of tokens: one that the operators write and read, or uint8, as which engines store fp8."""
    dtype = _dtype(given)
    if dtype not in (*PLANE_DTYPES, torch.uint8):
        supported = ", ".join(map(dtype_name, PLANE_DTYPES))
        raise ValueError(
            f"no operator takes a cache of {dtype_name(dtype)}; dtype may be {supported}, or uint8 for bytes to move"
        )
    return dtype


def _dtype(dtype: Dtype) -> torch.dtype:
    if isinstance(dtype, str):
        return dtype_of(dtype)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}; give a torch dtype such as torch.bfloat16, or its name")
    return dtype


def _round_up(n: int, multiple: int) -> int:
    if multiple < 1:
        raise ValueError(f"align={multiple}: give a number of bytes, 1 or more")
    return -(-n // multiple) * multiple
