"""``rope_store_kv``: query and key rotated by their positions, key and value stored to their slots, in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._common import (
    define,
    describe,
    require,
    require_device,
    require_in_range,
    require_indices,
    require_no_grad,
    require_values,
)
from .store import StoreKV, store_rows

ROTATED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TABLE_DTYPES = (*ROTATED_DTYPES, torch.float64)


@dataclass(slots=True)
class RopeStoreKV:
    """Arguments of ``pm_ops::rope_store_kv``.

    Args:
        buffer, value, slots, key_plane, value_plane, page_size, key_dtype, value_dtype, key_scale, value_scale, their
            tensors and their planes: as in :class:`StoreKV`, which stores the rotated key and the value as it came.
        query, key: ``[T, Hq, D]`` and ``[T, Hk, D]``, float32, float16 or bfloat16, any strides. All T rows are
            rotated, those past the slots and those of slots < 0 too. ``value`` has T rows as well.
        positions: int32 or int64 ``[T]``, the row of ``cos_sin`` of each token. One that ``cos_sin`` has not is
            refused where values are checked; elsewhere it turns the rotated elements into NaN, and nothing outside of
            ``cos_sin`` is read. None: ``cos_sin`` has T rows, one a token.
        cos_sin: ``[max_position, R]``, R even and at most D: R / 2 cosines, then R / 2 sines, of the token's angles.
            float32, float16, bfloat16 or float64 (taken as float32).
        interleaved: pair ``i`` is elements ``2i, 2i + 1`` (GPT-J), or ``i, i + R / 2`` (GPT-NeoX, the default).
            Elements from R on are not rotated.
        q_weight, k_weight: floating point ``[D]``, both or neither: RMSNorm over each head first (QK-norm).
        eps, weight_offset: of that norm; the factor is ``weight_offset + weight`` (1 for Gemma, else 0).
        return_key: also return the rotated key.

    Arithmetic: in float32, every operation rounded by itself (products are not fused into sums), in this order

        ``x = x * (1 / sqrt(mean(x * x) + eps)) * (weight_offset + weight)``, with weights; the mean in any order
        ``first, second = first * cos - second * sin, second * cos + first * sin``

    and then one rounding to nearest even, to the dtype that query or key has. The key is stored from what that gave.
    So without weights the result equals, bit for bit, a rotation in float32, a cast, and ``store_kv``.

    Returns the rotated query, ``[T, Hq, D]``, and the rotated key, ``[T, Hk, D]`` (``[0]`` if not asked for), fresh,
    contiguous and of the dtypes they came in.
    """

    buffer: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    positions: Tensor | None
    cos_sin: Tensor
    slots: Tensor
    key_plane: Sequence[int]
    value_plane: Sequence[int]
    page_size: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    interleaved: bool = False
    q_weight: Tensor | None = None
    k_weight: Tensor | None = None
    eps: float = 1e-6
    weight_offset: float = 0.0
    key_scale: float = 1.0
    value_scale: float = 1.0
    key_scale_tensor: Tensor | None = None
    value_scale_tensor: Tensor | None = None
    return_key: bool = False
    key_scale_plane: Sequence[int] | None = None
    value_scale_plane: Sequence[int] | None = None

    def store_of(self, key: Tensor) -> StoreKV:
        """The store that comes after the rotation."""
        return StoreKV(
            self.buffer,
            key,
            self.value,
            self.slots,
            self.key_plane,
            self.value_plane,
            self.page_size,
            self.key_dtype,
            self.value_dtype,
            self.key_scale,
            self.value_scale,
            self.key_scale_tensor,
            self.value_scale_tensor,
            self.key_scale_plane,
            self.value_scale_plane,
        )

    def check(self) -> None:
        if torch.is_grad_enabled():
            self._check_no_grad()
        q, k, device = self.query, self.key, self.buffer.device
        for name, rows in (("query", q), ("key", k)):
            if rows.dim() != 3 or rows.dtype not in ROTATED_DTYPES:
                raise ValueError(
                    f"{name} must be float32, float16 or bfloat16 [tokens, heads, head_dim], got {describe(rows)}"
                )
        self.store_of(k).check()
        require_device("query", q, device)
        tokens, _, dim = q.shape
        require(
            k.shape[2] == dim,
            lambda: f"query has a head_dim of {dim}, key of {k.shape[2]}; one rotation needs one head_dim",
        )
        self._check_table(dim, device)
        alike = {"key": k.shape[0], "value": self.value.shape[0]}
        if self.positions is not None:
            require_indices("positions", self.positions, device)
            alike["positions"] = self.positions.shape[0]
        else:
            alike["cos_sin, without positions,"] = self.cos_sin.shape[0]
        for count in alike.values():
            require(count == tokens, lambda: f"query has {tokens} rows, the others {alike}; all need equally many")
        if (self.q_weight is None) != (self.k_weight is None):
            raise ValueError("q_weight and k_weight come together or not at all")
        self._check_weight("q_weight", self.q_weight, dim, device)
        self._check_weight("k_weight", self.k_weight, dim, device)
        if not (0 <= self.eps < math.inf and math.isfinite(self.weight_offset)):
            raise ValueError(
                f"eps={self.eps} and weight_offset={self.weight_offset} must be finite, eps also not negative"
            )

    def _check_no_grad(self) -> None:
        rows = {"query": self.query, "key": self.key, "value": self.value, "cos_sin": self.cos_sin}
        weights = {"q_weight": self.q_weight, "k_weight": self.k_weight}
        scales = {"key_scale_tensor": self.key_scale_tensor, "value_scale_tensor": self.value_scale_tensor}
        require_no_grad("rope_store_kv", **rows, **weights, **scales)

    def _check_table(self, dim: int, device: torch.device) -> None:
        table = self.cos_sin
        if table.dim() != 2 or table.dtype not in TABLE_DTYPES:
            raise ValueError(f"cos_sin must be floating point [max_position, rotary_dim], got {describe(table)}")
        require_device("cos_sin", table, device)
        rotary = table.shape[1]
        for holds in (rotary >= 2, rotary % 2 == 0, rotary <= dim):
            require(
                holds,
                lambda: f"cos_sin has a rotary_dim of {rotary}; it must be even, from 2 to the head_dim, {dim}",
            )

    def _check_weight(self, name: str, weight: Tensor | None, dim: int, device: torch.device) -> None:
        if weight is None:
            return
        if weight.dim() != 1 or weight.dtype not in ROTATED_DTYPES:
            raise ValueError(f"{name} must be float32, float16 or bfloat16 [{dim}], got {describe(weight)}")
        require(weight.shape[0] == dim, lambda: f"{name} must be [{dim}], as long as a head, got {describe(weight)}")
        require_device(name, weight, device)

    def check_values(self) -> None:
        self.store_of(self.key).check_values()
        positions, limit = self.positions, self.cos_sin.shape[0]
        if positions is None:
            return
        require_in_range("positions", positions, limit, "rows in cos_sin")
        require_values(
            positions >= 0,
            lambda: f"positions has {int(positions.min())}; a row to skip is one whose slot is negative",
        )


def _rotated(a: RopeStoreKV, x: Tensor, weight: Tensor | None) -> Tensor:
    """``x [T, H, D]`` after norm and rotation, fresh and contiguous, of its own dtype."""
    rotary, y = a.cos_sin.shape[1], x
    if weight is not None:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + a.eps) * (a.weight_offset + weight.float())
    turned, rest = y[..., :rotary].float(), y[..., rotary:]
    rows = a.cos_sin if a.positions is None else a.cos_sin[a.positions.long()]
    cos, sin = rows[:, None].float().chunk(2, -1)
    first, second = (turned[..., ::2], turned[..., 1::2]) if a.interleaved else turned.chunk(2, -1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, -1).flatten(-2) if a.interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest.to(x.dtype)), -1)


def _rope_store_kv_cpu(a: RopeStoreKV) -> tuple[Tensor, Tensor]:
    query, key = _rotated(a, a.query, a.q_weight), _rotated(a, a.key, a.k_weight)
    store_rows(a.store_of(key))
    return query, key if a.return_key else key.new_empty(0)


def _rope_store_kv_fake(a: RopeStoreKV) -> tuple[Tensor, Tensor]:
    return a.query.new_empty(a.query.shape), a.key.new_empty(a.key.shape if a.return_key else (0,))


define(
    "rope_store_kv",
    "(Tensor(a!) buffer, Tensor query, Tensor key, Tensor value, Tensor? positions, Tensor cos_sin, Tensor slots, "
    "SymInt[] key_plane, SymInt[] value_plane, SymInt page_size, ScalarType key_dtype, ScalarType value_dtype, "
    "bool interleaved=False, Tensor? q_weight=None, Tensor? k_weight=None, float eps=1e-06, float weight_offset=0.0, "
    "float key_scale=1.0, float value_scale=1.0, Tensor? key_scale_tensor=None, Tensor? value_scale_tensor=None, "
    "bool return_key=False, SymInt[]? key_scale_plane=None, SymInt[]? value_scale_plane=None) -> (Tensor, Tensor)",
    RopeStoreKV,
    fake=_rope_store_kv_fake,
    cpu=_rope_store_kv_cpu,
    cuda="rope.rope_store_kv",
)
