"""``mla_attention``: multi-head latent attention over pages, in its absorbed form.

A token's row is one latent for all query heads: ``value_dim`` numbers that are key and value at once, then the rotated
part of the key (DeepSeek-V3: 512 + 64). A head's query is brought into the latent space before, its result out of it
after: ``query = [q_nope @ W_UK | q_rope]`` and ``head output = out @ W_UV``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._common import define, kernel, plane_view, require, require_finite, require_no_grad, require_plane, require_scale
from .attention import Attention, require_batch
from .attention_reference import attention_reference

IMPLEMENTATIONS = ("auto", "triton", "hopper", "reference")


@dataclass(slots=True)
class MLAAttention:
    """Arguments of ``pm_ops::mla_attention``.

    Args:
        buffer, latent_plane, page_size, dtype: the pages; the plane has one head of ``D`` elements.
        query: ``[Tq, Hq, D]``, any strides.
        page_table, seq_lens, query_start, causal, max_query_len, max_seq_len: as in
            :class:`pm_ops.ops.attention.Attention`.
        value_dim: how many of a row's first elements are the value, too.
        softmax_scale: factor of query · row. DeepSeek's follows from the dims before absorption, 128 + 64 (and YaRN).
        scale: stored = x / scale; a float, or ``scale_tensor``, one float32 element on the device.
        return_lse: also return the log-sum-exp of every query row.
        impl: ``"triton"``, attention's kernel, which loads a row once for key and value; ``"hopper"``, a kernel for
            compute capability 9, rows of 512 + 64 or 256 + 64 and the query's 16-bit dtype, refused with the reason
            where it cannot make the call (``pm_ops.kernels.mla_hopper``); ``"reference"`` (plain torch; synchronises
            on CUDA); or ``"auto"``: reference on CPU, on CUDA hopper where it can make the call, else triton.

    Returns ``out [Tq, Hq, value_dim]`` of the query's dtype and ``lse [Tq, Hq]`` float32 (``[0]`` if not asked for),
    with all that ``attention`` promises: a row that sees no key gives 0 and -inf, bytes of slots that no query of the
    sequence may see have no influence, and page ids never change the order of the reduction. But there is no
    ``batch_invariant``: into how many parts the keys are split, and so the order of sums, follows from the whole call.
    """

    buffer: Tensor
    query: Tensor
    page_table: Tensor
    seq_lens: Tensor
    query_start: Tensor | None
    latent_plane: Sequence[int]
    page_size: int
    value_dim: int
    dtype: torch.dtype
    softmax_scale: float
    causal: bool = True
    scale: float = 1.0
    scale_tensor: Tensor | None = None
    max_query_len: int = 0
    return_lse: bool = False
    max_seq_len: int = 0
    impl: str = "auto"

    def attention(self) -> Attention:
        """The same as attention with one KV head, whose values are the first elements of its keys."""
        return Attention(
            self.buffer,
            self.query,
            self.page_table,
            self.seq_lens,
            self.query_start,
            self.latent_plane,
            self.latent_plane,
            self.page_size,
            1,
            self.value_dim,
            self.dtype,
            self.dtype,
            self.softmax_scale,
            self.causal,
            key_scale=self.scale,
            value_scale=self.scale,
            key_scale_tensor=self.scale_tensor,
            value_scale_tensor=self.scale_tensor,
            max_query_len=self.max_query_len,
            return_lse=self.return_lse,
            max_seq_len=self.max_seq_len,
        )

    def latent_view(self) -> Tensor:
        """The rows as a view ``[pages, page_size, 1, D]``."""
        return plane_view(self.buffer, self.latent_plane, self.page_size, 1, self.query.shape[2], self.dtype)

    def check(self) -> None:
        if torch.is_grad_enabled():
            require_no_grad("mla_attention", query=self.query, scale_tensor=self.scale_tensor)
        require_batch(self)
        dim, device = self.query.shape[2], self.buffer.device
        require_plane("latent", self.buffer.shape[0], self.latent_plane, self.page_size, 1, dim, self.dtype)
        require_scale("scale", self.scale, self.scale_tensor, None, self.dtype, device)
        require(
            1 <= self.value_dim <= dim,
            lambda: f"value_dim={self.value_dim}: the value is the first elements of a row, which has {dim}",
        )
        require_finite(softmax_scale=self.softmax_scale)
        require(
            self.max_query_len >= 0 and self.max_seq_len >= 0,
            lambda: f"max_query_len={self.max_query_len} and max_seq_len={self.max_seq_len} must not be negative",
        )
        if self.impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={self.impl!r} is unknown; supported: {', '.join(IMPLEMENTATIONS)}")
        if self.impl in ("triton", "hopper") and device.type == "cpu":
            raise ValueError(
                f"impl={self.impl!r} needs CUDA tensors, these are on the CPU; use impl='reference' or 'auto'"
            )

    def check_values(self) -> None:
        self.attention().check_values()


_triton = kernel("mla.mla_attention")


def _reference(a: MLAAttention) -> tuple[Tensor, Tensor]:
    return attention_reference(a.attention())


def _mla_attention_fake(a: MLAAttention) -> tuple[Tensor, Tensor]:
    tokens, heads = a.query.shape[:2]
    lse = (tokens, heads) if a.return_lse else (0,)
    return a.query.new_empty((tokens, heads, a.value_dim)), a.query.new_empty(lse, dtype=torch.float32)


define(
    "mla_attention",
    "(Tensor buffer, Tensor query, Tensor page_table, Tensor seq_lens, Tensor? query_start, SymInt[] latent_plane, "
    "SymInt page_size, SymInt value_dim, ScalarType dtype, float softmax_scale, bool causal=True, float scale=1.0, "
    "Tensor? scale_tensor=None, SymInt max_query_len=0, bool return_lse=False, SymInt max_seq_len=0, "
    'str impl="auto") -> (Tensor, Tensor)',
    MLAAttention,
    fake=_mla_attention_fake,
    cpu=_reference,
    cuda=lambda a: _reference(a) if a.impl == "reference" else _triton(a),
)
