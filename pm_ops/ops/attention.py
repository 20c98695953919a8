"""The arguments of ``attention`` over pages, ragged batches of decode, prefill and both in one call, and their checks.

What it computes is in :mod:`pm_ops.ops.attention_reference`, who computes it in :mod:`pm_ops.ops.attention_choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ._common import (
    describe,
    either,
    plane_view,
    require,
    require_buffer,
    require_device,
    require_finite,
    require_in_range,
    require_indices,
    require_no_grad,
    require_plane,
    require_query_start,
    require_scale,
    require_scale_plane,
    require_values,
)

IMPLEMENTATIONS = ("auto", "triton", "fa3", "reference")
BATCH_INVARIANT_KEYS = 524288
QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(slots=True)
class Attention:
    """Arguments of ``pm_ops::attention``.

    Args:
        buffer, key_plane, value_plane, page_size, key_dtype, value_dtype: the pages, see :class:`pm_ops.PagePool`.
        query: ``[Tq, Hq, Dk]``, any strides; ``Hq`` is a multiple of ``kv_heads``.
        page_table: ``[B, W]``; entries past a sequence's last page, or wholly before every query's window, are never
            read.
        seq_lens: ``[B]``, keys of each sequence, those of this step included; at most ``W * page_size``.
        query_start: ``[B + 1]``, cumulative query tokens, from 0 on; ``None``: every sequence has ``Tq / B``. Query
            rows past the last sequence are padding.
        kv_heads, value_dim: of the cache.
        softmax_scale: factor of query · key.
        causal: query ``i`` of ``n`` stands at position ``p = seq_len - n + i`` (aligned bottom right) and sees keys
            ``j <= p``.
        window: 0, or the number of keys a query sees, itself included: ``p - window < j``, and where not causal also
            ``j < p + window``.
        softcap: 0, or ``c`` in ``c * tanh(logit / c)``, before ALiBi and bias.
        sinks: ``[Hq]``, one more logit in each softmax, without a value.
        alibi_slopes: ``[Hq]``; adds ``slope * (j - p)``.
        bias: bool (True: visible) or floating point (added; -inf: hidden), ``[B or 1, Hq or 1, Lq or 1, S]`` with any
            strides, ``Lq`` being the most query tokens of one sequence; row ``i`` is the ``i``-th query of its own
            sequence, column ``j`` its key ``j``. Keys past ``S`` are hidden.
        key_scale, value_scale: stored = x / scale; a float, or ``*_tensor``, one float32 element on the device, or
            ``*_plane``, a plane of float32 ``(kv_heads, 1)`` with the scale of each token and head.
        max_query_len: 0 (unknown), or at least the most query tokens of one sequence, which helps to choose a kernel.
            It must hold, and is refused where it does not and values are checked; elsewhere queries past it may be left
            out of the result, as FlashAttention 3 does.
        max_seq_len: 0 or about the most keys of one sequence, a hint for dividing the work where ``page_table`` is much
            wider. It changes nothing but the order of sums.
        batch_invariant: a row's result, to the bit, follows from its query and its keys alone, whatever else is in the
            call. Slower, by Triton only, and for tables of at most ``BATCH_INVARIANT_KEYS`` keys.
        return_lse: also return the log-sum-exp of every query row.
        impl: ``"triton"``; ``"fa3"``, FlashAttention 3 where it is installed (refused with the reason where it is
            missing or lacks what the call needs, see ``pm_ops.kernels.fa3``); ``"reference"`` (plain torch;
            synchronises on CUDA); or ``"auto"``: reference on CPU, on CUDA triton; but fa3 where a sequence has more
            than ``FA3_QUERIES`` queries (``max_query_len``, else ``Tq / B``), Triton's kernel for so many
            (``pm_ops.kernels.attention_hopper``) does not take the call, and fa3 can. See
            :mod:`pm_ops.ops.attention_choice`.

    Returns ``out [Tq, Hq, value_dim]`` of the query's dtype and ``lse [Tq, Hq]`` float32, natural log, sinks included
    (``[0]`` if not asked for). A row that sees no key gives 0 and -inf (with sinks: the sink). Bytes of slots that no
    query of the sequence may see have no influence, NaN included. Page ids never change the order of the reduction.
    """

    buffer: Tensor
    query: Tensor
    page_table: Tensor
    seq_lens: Tensor
    query_start: Tensor | None
    key_plane: Sequence[int]
    value_plane: Sequence[int]
    page_size: int
    kv_heads: int
    value_dim: int
    key_dtype: torch.dtype
    value_dtype: torch.dtype
    softmax_scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0
    key_scale_tensor: Tensor | None = None
    value_scale_tensor: Tensor | None = None
    max_query_len: int = 0
    return_lse: bool = False
    impl: str = "auto"
    key_scale_plane: Sequence[int] | None = None
    value_scale_plane: Sequence[int] | None = None
    batch_invariant: bool = False
    max_seq_len: int = 0

    @property
    def queries_per_sequence(self) -> int:
        """As many as one may have where that is known, else their mean."""
        if self.query_start is not None and self.max_query_len:
            return self.max_query_len
        return -(-self.query.shape[0] // max(self.seq_lens.shape[0], 1))

    def new_out(self) -> Tensor:
        """Where the output goes: a fresh ``[Tq, Hq, value_dim]`` of the query's dtype."""
        return self.query.new_empty((*self.query.shape[:2], self.value_dim))

    def planes_divide_by(self, nbytes: int) -> bool:
        """Whether offset and strides of both planes are multiples of so many bytes."""
        return not any(n % nbytes for plane in (self.key_plane, self.value_plane) for n in plane[:4])

    def plane_views(self) -> tuple[Tensor, Tensor]:
        """Keys and values as views ``[pages, page_size, kv_heads, dim]``, of the pages that both planes have."""
        pages = min(self.key_plane[4], self.value_plane[4])
        key, value = ([*plane[:4], pages] for plane in (self.key_plane, self.value_plane))
        heads, dim = self.kv_heads, self.query.shape[2]
        return (
            plane_view(self.buffer, key, self.page_size, heads, dim, self.key_dtype),
            plane_view(self.buffer, value, self.page_size, heads, self.value_dim, self.value_dtype),
        )

    def check(self) -> None:
        if torch.is_grad_enabled():
            self._check_no_grad()
        require_batch(self)
        device, nbytes = self.buffer.device, self.buffer.shape[0]
        tokens, heads, dim = self.query.shape
        batch = self.seq_lens.shape[0]
        require(
            self.kv_heads >= 1 and heads % self.kv_heads == 0,
            lambda: f"{heads} query heads cannot share {self.kv_heads} KV heads; it must be a multiple of them",
        )
        require_plane("key", nbytes, self.key_plane, self.page_size, self.kv_heads, dim, self.key_dtype)
        require_plane(
            "value", nbytes, self.value_plane, self.page_size, self.kv_heads, self.value_dim, self.value_dtype
        )
        for name, scale, tensor, plane, dtype in (
            ("key_scale", self.key_scale, self.key_scale_tensor, self.key_scale_plane, self.key_dtype),
            ("value_scale", self.value_scale, self.value_scale_tensor, self.value_scale_plane, self.value_dtype),
        ):
            require_scale(name, scale, tensor, plane, dtype, device)
            require_scale_plane(name, nbytes, plane, self.page_size, self.kv_heads)
        require_finite(softmax_scale=self.softmax_scale, softcap=self.softcap)
        require(
            self.window >= 0 and self.softcap >= 0 and self.max_query_len >= 0 and self.max_seq_len >= 0,
            lambda: (
                f"window={self.window}, softcap={self.softcap}, max_query_len={self.max_query_len} and "
                f"max_seq_len={self.max_seq_len} must not be negative; 0 is none"
            ),
        )
        if self.impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={self.impl!r} is unknown; supported: {', '.join(IMPLEMENTATIONS)}")
        if self.impl in ("triton", "fa3") and device.type == "cpu":
            raise ValueError(
                f"impl={self.impl!r} needs CUDA tensors, these are on the CPU; use impl='reference' or 'auto'"
            )
        if self.batch_invariant:
            self._check_batch_invariant(device)
        self._check_per_head("sinks", self.sinks, heads, device)
        self._check_per_head("alibi_slopes", self.alibi_slopes, heads, device)
        if self.bias is not None:
            self._check_bias(self.bias, tokens, heads, batch, device)

    def _check_no_grad(self) -> None:
        extras = {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes, "bias": self.bias}
        scales = {"key_scale_tensor": self.key_scale_tensor, "value_scale_tensor": self.value_scale_tensor}
        require_no_grad("attention", query=self.query, **extras, **scales)

    def _check_batch_invariant(self, device: torch.device) -> None:
        if device.type == "cpu" or self.impl == "reference":
            raise ValueError(
                "batch_invariant needs impl='triton' and CUDA tensors; plain torch gives no such guarantee"
            )
        keys = self.page_table.shape[1] * self.page_size
        require(
            keys <= BATCH_INVARIANT_KEYS,
            lambda: f"batch_invariant takes page tables of at most {BATCH_INVARIANT_KEYS} keys, this one has {keys}",
        )

    def _check_per_head(self, name: str, tensor: Tensor | None, heads: int, device: torch.device) -> None:
        if tensor is None:
            return
        if tensor.dim() != 1 or tensor.dtype not in QUERY_DTYPES:
            raise ValueError(f"{name} must be floating point [{heads}], got {describe(tensor)}")
        require(tensor.shape[0] == heads, lambda: f"{name} must be floating point [{heads}], got {describe(tensor)}")
        require_device(name, tensor, device)

    def _check_bias(self, bias: Tensor, tokens: int, heads: int, batch: int, device: torch.device) -> None:
        if bias.dim() != 4 or bias.dtype not in (torch.bool, *QUERY_DTYPES):
            raise ValueError(f"bias must be bool or floating point [batch, heads, queries, keys], got {describe(bias)}")
        require_device("bias", bias, device)
        sizes = bias.shape
        require(
            either(sizes[0] == 1, sizes[0] == batch),
            lambda: f"bias {list(sizes)}: axis 0 must be 1 or {batch} (sequences)",
        )
        require(
            either(sizes[1] == 1, sizes[1] == heads),
            lambda: f"bias {list(sizes)}: axis 1 must be 1 or {heads} (heads)",
        )
        if self.query_start is None:
            queries = tokens // torch.sym_max(batch, 1)
            require(either(sizes[2] == 1, sizes[2] >= queries), lambda: self._bias_too_short(queries))

    def _bias_too_short(self, queries: int) -> str:
        assert self.bias is not None
        return (
            f"bias {list(self.bias.shape)}: axis 2 must be 1 or have a row for each of {queries} queries of a sequence"
        )

    def check_values(self) -> None:
        """Lengths fit the table, query_start ascends within the query, and every page id that is read exists."""
        lengths, table = self.seq_lens, self.page_table
        capacity = table.shape[1] * self.page_size
        require_values(lengths >= 0, lambda: f"seq_lens has {int(lengths.min())}; a length must not be negative")
        require_values(
            lengths <= capacity,
            lambda: f"seq_lens has {int(lengths.max())}, but page_table columns x page_size are {capacity} keys",
        )
        queries = torch.full_like(lengths, self.query.shape[0] // max(lengths.shape[0], 1))
        if self.query_start is not None:
            start = self.query_start
            queries = start[1:] - start[:-1]
            require_values(
                torch.cat((start[:1] == 0, queries >= 0, start[-1:] <= self.query.shape[0])),
                lambda: (
                    f"query_start {start.tolist()} must begin at 0, be cumulative, and end within the "
                    f"{self.query.shape[0]} query rows"
                ),
            )
            if self.bias is not None and self.bias.shape[2] != 1:
                most = self.bias.shape[2]
                require_values(queries <= most, lambda: self._bias_too_short(int(queries.max())))
        if self.max_query_len:
            require_values(
                queries <= self.max_query_len,
                lambda: f"max_query_len={self.max_query_len}, but a sequence has {int(queries.max())} query tokens",
            )
        if table.numel():
            first = torch.arange(table.shape[1], device=table.device) * self.page_size
            read = (first < lengths[:, None]) & (queries > 0)[:, None]
            if self.window:
                window = min(self.window, capacity)  # more would not fit the dtype
                read &= first + self.page_size > (lengths - queries - window + 1)[:, None]
            pages = torch.where(read, table, 0)
            planes = (self.key_plane, self.value_plane, self.key_scale_plane, self.value_scale_plane)
            limit = min(plane[4] for plane in planes if plane is not None)
            require_in_range("page_table", pages, limit, "pages in the pool")
            require_values(pages >= 0, lambda: f"page_table has {int(pages.min())} where a page is read")


@dataclass(slots=True)
class AttentionOut(Attention):
    """Arguments of ``pm_ops::attention_out``: those of :class:`Attention`, and where the output goes.

    Args:
        out: contiguous ``[Tq, Hq, value_dim]`` of the query's dtype, which overlaps no other argument. All of it is
            written. The log-sum-exp is not returned, whatever ``return_lse`` says.
    """

    out: Tensor = field(kw_only=True)

    def new_out(self) -> Tensor:
        return self.out

    def check(self) -> None:
        Attention.check(self)
        if torch.is_grad_enabled():
            require_no_grad("attention_out", out=self.out)
        shape, out = (*self.query.shape[:2], self.value_dim), self.out
        require_device("out", out, self.buffer.device)
        if out.dim() != 3 or out.dtype != self.query.dtype or not out.is_contiguous():
            raise ValueError(f"out must be contiguous {self.query.dtype} {list(shape)}, got {describe(out)}")
        for have, want in zip(out.shape, shape, strict=True):
            require(
                have == want, lambda: f"out must be {list(shape)} as the query and value_dim are, got {describe(out)}"
            )

    def fill(self, out: Tensor) -> None:
        """Bring a result to where it belongs, unless it was written there."""
        if out is not self.out:
            self.out.copy_(out)


class Batch(Protocol):
    """What every attention over pages takes of a ragged batch."""

    buffer: Tensor
    query: Tensor
    page_table: Tensor
    seq_lens: Tensor
    query_start: Tensor | None


def require_batch(a: Batch) -> None:
    """The buffer is one, and query, page table, lengths and starts fit one another."""
    require_buffer(a.buffer)
    device, q = a.buffer.device, a.query
    if q.dim() != 3 or q.dtype not in QUERY_DTYPES:
        raise ValueError(f"query must be float32, float16 or bfloat16 [tokens, heads, head_dim], got {describe(q)}")
    require(q.shape[1] >= 1, lambda: f"query needs a head at least, got {describe(q)}")
    require_device("query", q, device)
    require_indices("page_table", a.page_table, device, dim=2)
    require_indices("seq_lens", a.seq_lens, device)
    tokens, batch, rows = q.shape[0], a.seq_lens.shape[0], a.page_table.shape[0]
    require(rows == batch, lambda: f"page_table has {rows} rows for {batch} sequences")
    if a.query_start is None:
        require(
            tokens // torch.sym_max(batch, 1) * batch == tokens,
            lambda: f"{tokens} query tokens for {batch} sequences; without query_start all have equally many",
        )
    else:
        require_query_start(a.query_start, batch, device)
