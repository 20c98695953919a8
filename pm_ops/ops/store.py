"""``store_kv`` and ``load_kv``: token rows to their slots, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import dtype_name
from ._common import (
    ROW_DTYPES,
    bits,
    define,
    describe,
    plane_view,
    require,
    require_buffer,
    require_device,
    require_distinct,
    require_in_range,
    require_indices,
    require_no_grad,
    require_plane,
    require_scale,
    require_scale_plane,
)
from ._quantise import dequantise, quantise, quantise_rows, scale_value


@dataclass(slots=True)
class StoreKV:
    """Arguments of ``pm_ops::store_kv``: rows ``[T, H, D]`` to ``slots [N]``, N <= T; rows past N are padding.

    slot < 0 is skipped; slot >= capacity, the smallest one of the planes, is never written (and refused where values
    are checked). Where a slot is named twice, which row wins is unspecified (and refused where values are checked).

    Stored is ``x / scale`` in float32, rounded to nearest even; fp8 and int8 (-127 to 127) saturate. The scale is

    - one for the whole tensor, 1 unless given; int8 needs one. NaN stays NaN; in int8, which has none, -128 stands for
      it, here as in ``load_kv`` and ``attention``;
    - with ``key_scale_plane`` or ``value_scale_plane``, float32 ``(heads, 1)``, for fp8 and int8: one for each token
      and head, taken from its row and written to that plane: the row's largest magnitude over 448 (e4m3fn), 57344
      (e5m2) or 127 (int8), at least 2^-126, the smallest normal float32, and 1 for a row of zeros. A row with a NaN or
      an infinity is stored as zeros with a scale of NaN, and so reads as NaN throughout.
    """

    buffer: Tensor
    key: Tensor | None
    value: Tensor | None
    slots: Tensor
    key_plane: Sequence[int] | None
    value_plane: Sequence[int] | None
    page_size: int
    key_dtype: torch.dtype | None
    value_dtype: torch.dtype | None
    key_scale: float = 1.0
    value_scale: float = 1.0
    key_scale_tensor: Tensor | None = None
    value_scale_tensor: Tensor | None = None
    key_scale_plane: Sequence[int] | None = None
    value_scale_plane: Sequence[int] | None = None

    def check(self) -> None:
        if torch.is_grad_enabled():
            scales = {"key_scale_tensor": self.key_scale_tensor, "value_scale_tensor": self.value_scale_tensor}
            require_no_grad("store_kv", key=self.key, value=self.value, **scales)
        require_buffer(self.buffer)
        device, nbytes = self.buffer.device, self.buffer.shape[0]
        require_indices("slots", self.slots, device)
        if self.key is None and self.value is None:
            raise ValueError("store_kv needs a key, a value, or both; got neither")
        key_scale, value_scale = self.key_scale_plane, self.value_scale_plane
        self._check_rows("key", self.key, self.key_plane, self.key_dtype, key_scale, device, nbytes)
        self._check_rows("value", self.value, self.value_plane, self.value_dtype, value_scale, device, nbytes)
        require_scale("key_scale", self.key_scale, self.key_scale_tensor, key_scale, self.key_dtype, device)
        require_scale("value_scale", self.value_scale, self.value_scale_tensor, value_scale, self.value_dtype, device)

    def _check_rows(
        self,
        name: str,
        rows: Tensor | None,
        plane: Sequence[int] | None,
        dtype: torch.dtype | None,
        scale_plane: Sequence[int] | None,
        device: torch.device,
        nbytes: int,
    ) -> None:
        if (rows is None) != (plane is None) or (rows is None) != (dtype is None):
            raise ValueError(f"{name}, {name}_plane and {name}_dtype come together or not at all")
        if rows is None or plane is None or dtype is None:
            return
        if rows.dim() != 3 or rows.dtype not in ROW_DTYPES:
            supported = ", ".join(map(dtype_name, ROW_DTYPES))
            raise ValueError(f"{name} must be rows [tokens, heads, dim] of {supported}, got {describe(rows)}")
        require_device(name, rows, device)
        tokens, heads, dim = rows.shape
        slots = self.slots.shape[0]
        require(slots <= tokens, lambda: f"{slots} slots for {tokens} {name} rows; there must be a row for every slot")
        require_plane(name, nbytes, plane, self.page_size, heads, dim, dtype)
        if scale_plane is not None:
            require_scale_plane(f"{name}_scale", nbytes, scale_plane, self.page_size, heads)

    def check_values(self) -> None:
        for plane in (self.key_plane, self.value_plane, self.key_scale_plane, self.value_scale_plane):
            if plane is not None:
                require_in_range("slots", self.slots, plane[4] * self.page_size, "slots in the pool")
        require_distinct("slots", self.slots)


def store_rows(a: StoreKV) -> None:
    """The CPU kernel: the specification of every store."""
    kept = (a.slots >= 0).nonzero().squeeze(1)
    page, token = a.slots[kept] // a.page_size, a.slots[kept] % a.page_size

    def put(plane: Sequence[int], stored: Tensor) -> None:
        cells = plane_view(a.buffer, plane, a.page_size, stored.shape[1], stored.shape[2], stored.dtype)
        bits(cells)[page, token] = bits(stored)

    for rows, plane, dtype, scale, scale_plane in (
        (a.key, a.key_plane, a.key_dtype, scale_value(a.key_scale, a.key_scale_tensor), a.key_scale_plane),
        (a.value, a.value_plane, a.value_dtype, scale_value(a.value_scale, a.value_scale_tensor), a.value_scale_plane),
    ):
        if rows is None or plane is None or dtype is None:
            continue
        if scale_plane is None:
            put(plane, quantise(rows[kept], dtype, scale))
        else:
            stored, scales = quantise_rows(rows[kept], dtype)
            put(plane, stored)
            put(scale_plane, scales)


define(
    "store_kv",
    "(Tensor(a!) buffer, Tensor? key, Tensor? value, Tensor slots, SymInt[]? key_plane, SymInt[]? value_plane, "
    "SymInt page_size, ScalarType? key_dtype, ScalarType? value_dtype, float key_scale=1.0, float value_scale=1.0, "
    "Tensor? key_scale_tensor=None, Tensor? value_scale_tensor=None, SymInt[]? key_scale_plane=None, "
    "SymInt[]? value_scale_plane=None) -> ()",
    StoreKV,
    fake=lambda a: None,
    cpu=store_rows,
    cuda="store.store_kv",
)


@dataclass(slots=True)
class LoadKV:
    """Arguments of ``pm_ops::load_kv``: the rows of ``slots [N]`` of one plane, fresh ``[N, heads, dim]``.

    Without ``out_dtype`` the stored elements, bit for bit (no scale may be given then); with it ``stored * scale`` in
    float32, cast to ``out_dtype``, the scale being one for all or, with ``scale_plane``, that of the token and head.
    slot < 0 gives a row of zeros.
    """

    buffer: Tensor
    slots: Tensor
    plane: Sequence[int]
    page_size: int
    heads: int
    dim: int
    dtype: torch.dtype
    scale: float = 1.0
    scale_tensor: Tensor | None = None
    out_dtype: torch.dtype | None = None
    scale_plane: Sequence[int] | None = None

    def check(self) -> None:
        if torch.is_grad_enabled():
            require_no_grad("load_kv", scale_tensor=self.scale_tensor)
        require_buffer(self.buffer)
        device, nbytes = self.buffer.device, self.buffer.shape[0]
        require_indices("slots", self.slots, device)
        require_plane("", nbytes, self.plane, self.page_size, self.heads, self.dim, self.dtype)
        scaled = self.scale_plane is not None or self.scale_tensor is not None or self.scale != 1.0
        if scaled or self.out_dtype is not None:
            require_scale("scale", self.scale, self.scale_tensor, self.scale_plane, self.dtype, device)
        require_scale_plane("scale", nbytes, self.scale_plane, self.page_size, self.heads)
        if self.out_dtype is None and scaled:
            raise ValueError("load_kv with a scale needs out_dtype; without it the stored elements come bit for bit")
        if self.out_dtype is not None and self.out_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                f"out_dtype {dtype_name(self.out_dtype)} is not supported; use float32, float16 or bfloat16"
            )

    def check_values(self) -> None:
        for plane in (self.plane, self.scale_plane):
            if plane is not None:
                require_in_range("slots", self.slots, plane[4] * self.page_size, "slots in the pool")


def _load_kv_fake(a: LoadKV) -> Tensor:
    return a.buffer.new_empty((a.slots.shape[0], a.heads, a.dim), dtype=a.out_dtype or a.dtype)


def _load_kv_cpu(a: LoadKV) -> Tensor:
    kept = (a.slots >= 0).nonzero().squeeze(1)
    page, token = a.slots[kept] // a.page_size, a.slots[kept] % a.page_size

    def rows(plane: Sequence[int], dim: int, dtype: torch.dtype) -> Tensor:
        cells = bits(plane_view(a.buffer, plane, a.page_size, a.heads, dim, dtype))
        found = cells.new_zeros((len(a.slots), a.heads, dim))
        found[kept] = cells[page, token]
        return found.view(dtype)

    found = rows(a.plane, a.dim, a.dtype)
    if a.out_dtype is None:
        return found
    scales = None if a.scale_plane is None else rows(a.scale_plane, 1, torch.float32)
    return dequantise(found, scale_value(a.scale, a.scale_tensor), scales).to(a.out_dtype)


define(
    "load_kv",
    "(Tensor buffer, Tensor slots, SymInt[] plane, SymInt page_size, SymInt heads, SymInt dim, ScalarType dtype, "
    "float scale=1.0, Tensor? scale_tensor=None, ScalarType? out_dtype=None, SymInt[]? scale_plane=None) -> Tensor",
    LoadKV,
    fake=_load_kv_fake,
    cpu=_load_kv_cpu,
    cuda="store.load_kv",
)
