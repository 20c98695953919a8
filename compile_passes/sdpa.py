"""``scaled_dot_product_attention`` over caches → ``attention`` over their pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from .forms import CachePlane
from .regions import Dim, Region
from .report import RewriteError

if TYPE_CHECKING:
    from .rewriter import Rewriter

aten = torch.ops.aten


@dataclass(frozen=True)
class Sequences:
    """What attention reads of one plane: ``batch`` sequences of ``length`` tokens, from ``first`` on.

    ``first`` is a position, or for caches addressed by slot the first sequence's first slot; the next sequence's is
    ``spacing`` slots further. ``group`` query heads share a KV head.
    """

    plane: CachePlane
    batch: Any
    row: Any
    first: Any
    spacing: int
    length: Any
    group: Any

    @property
    def where(self) -> tuple[Any, ...]:
        """Equal for two planes of which the same tokens are read."""
        tokens = (self.batch, self.row, self.first, self.spacing, self.length, self.group)
        return (self.plane.form, self.plane.column, *map(str, tokens))


def rewrite_sdpa(rw: Rewriter, n: Node) -> Tensor:
    """``sdpa(q [B, Hq, L, Dk], k, v [B, Hkv or Hq, S, D], mask, is_causal=..., scale=...)`` → ``attention``.

    Without ``B``, one sequence.
    """
    query, k, v, mask, dropout, causal, scale = _arguments(rw, n)
    if dropout:
        raise RewriteError(f"attention with dropout_p={dropout} over a cache; only inference is supported")
    ranks = [query.dim(), rw.env[k].dim(), rw.env[v].dim()]
    if ranks not in ([3, 3, 3], [4, 4, 4]):
        raise RewriteError(
            "attention over a cache needs query, key and value [batch, heads, tokens, head_dim] or without the batch, "
            f"got {ranks} dimensions"
        )
    single = query.dim() == 3
    query = query[None] if single else query
    keys, values = _sequences(rw, k), _sequences(rw, v)
    if keys.where != values.where:
        raise RewriteError(f"attention reads other tokens of {keys.plane.label} than of {values.plane.label}")
    batch, heads, length, dim = query.shape
    if batch != keys.batch:
        raise RewriteError(
            f"a query of {batch} sequences attends to {keys.batch} of a cache; expand it or slice the cache"
        )
    if heads % keys.plane.heads or keys.group not in (1, heads // keys.plane.heads):
        raise RewriteError(f"{heads} query heads over {keys.plane.heads} KV heads, each repeated {keys.group} times")
    bias, seq_len, causal = _visibility(mask, causal, query, keys.length)
    out, _ = rw.pages.attend(
        (keys.plane, values.plane),
        query.transpose(1, 2).reshape(batch * length, heads, dim),
        _page_table(rw, keys),
        _seq_lens(rw, keys.batch, seq_len),
        None,
        softmax_scale=1 / math.sqrt(dim) if scale is None else scale,
        causal=causal,
        bias=bias,
    )
    out = out.view(batch, length, heads, values.plane.dim).transpose(1, 2)
    return out[0] if single else out


def _arguments(rw: Rewriter, n: Node) -> tuple[Tensor, Node, Node, Tensor | None, float, bool, float | None]:
    named = n.normalized_arguments(rw.module, normalize_to_only_use_kwargs=True)
    assert named is not None
    nodes = named.kwargs
    if any(isinstance(nodes[name], Node) and rw.is_shadow(nodes[name]) for name in ("query", "attn_mask")):
        raise RewriteError("attention's query or mask is read from a bound cache")
    given = {name: rw.env[a] if isinstance(a, Node) else a for name, a in nodes.items() if name not in ("key", "value")}
    if not all(rw.is_shadow(nodes[name]) for name in ("key", "value")):
        raise RewriteError("attention reads keys or values from a bound cache, but not both")
    options = (given["attn_mask"], given["dropout_p"], given["is_causal"], given["scale"])
    return given["query"], nodes["key"], nodes["value"], *options


def _sequences(rw: Rewriter, n: Node) -> Sequences:
    """Which tokens an attention's key or value is: a view of a cache, or its copy with KV heads repeated."""
    final, source = rw.env[n], n
    while not rw.on_cache(rw.env[source]):
        _check_exact(rw, source)
        source = source.all_input_nodes[0]
    region = rw.locate(rw.env[source])
    if source is not n and rw.writes_since(n, region.plane):
        raise RewriteError(f"the cache of {region.plane.label} is written between its copy and the attention over it")
    single = [Dim("1", 0, 1)] if final.dim() == 3 else []
    dims, group = [*single, *region.dims], 1
    repeated = [i for i, d in enumerate(dims) if d.axis == "x"]
    if repeated and repeated[0] in (1, 2) and (repeated[0] == 2 or region.plane.heads == 1):
        group = dims[repeated[0]].size
        if len(dims) == 5:
            del dims[repeated[0]]
    shape = (dims[0].size, region.plane.heads * group, dims[-2].size, region.plane.dim)
    ordered = len(dims) == 4 and dims[0].axis in "BS1" and dims[1].axis in "Hx1" and dims[2].axis in "S1"
    if (
        not ordered
        or not region.whole_rows
        or len(repeated) > 1
        or tuple(final.shape) != shape[len(single) :]
        or dims[2].step > 1
    ):
        raise RewriteError(
            f"attention over a view {list(rw.env[source].shape)} of {region.plane.label}; it must hold "
            "[batch, heads, tokens, head_dim] with every head, tokens without gaps, and KV heads repeated one by one"
        )
    return _placed(region, dims[0], dims[2], group)


def _check_exact(rw: Rewriter, n: Node) -> None:
    """Reading through a copy must not change values: a cast to a wider type is one, to a narrower one is not."""
    if n.target is aten._to_copy.default:
        before, after = rw.env[n.all_input_nodes[0]].dtype, rw.env[n].dtype
        if after != before and after.itemsize <= before.itemsize:
            raise RewriteError(
                f"the cache is cast from {before} to {after} before the attention, which loses precision"
            )


def _placed(region: Region, batch: Any, tokens: Any, group: Any) -> Sequences:
    """Where the sequences lie; pages are read from their first slot on, so they must begin at one."""
    plane, size = region.plane, region.plane.page_size
    first = region.start.get("S", 0)
    spacing = batch.step if batch.axis == "S" else 0
    if not (isinstance(first, int) and first % size == 0 and spacing % size == 0):
        raise RewriteError(
            f"attention over tokens of {plane.label} from {first} on; they must begin at a multiple of the page size "
            f"{size}. Mask the tokens in front instead"
        )
    by_slot = batch.axis == "S" and not plane.paged
    if not (batch.axis == "1" or by_slot or (batch.axis == "B" and batch.step == 1)):
        raise RewriteError(f"attention over a choice of the sequences of {plane.label}; slice them, as in k[:n]")
    return Sequences(plane, batch.size, region.start.get("B", 0), first, spacing, tokens.size, group)


def _page_table(rw: Rewriter, s: Sequences) -> Tensor:
    size = s.plane.page_size
    if s.plane.paged:
        assert rw.pages.page_table is not None
        begin, end = s.plane.column + s.first // size, s.plane.column + s.plane.columns
        whole = (s.row, s.batch, begin, end) == (0, rw.pages.page_table.shape[0], 0, rw.pages.page_table.shape[1])
        return rw.pages.page_table if whole else rw.pages.page_table[s.row : s.row + s.batch, begin:end]

    def pages() -> Tensor:
        across = torch.arange((s.length + size - 1) // size, dtype=torch.int32, device=rw.pages.buffer.device)
        begin = torch.arange(s.batch, dtype=torch.int32, device=rw.pages.buffer.device) * (s.spacing // size)
        return (begin + s.first // size)[:, None] + across

    return rw.pages.once(("pages", s.where), None, pages)


def _seq_lens(rw: Rewriter, batch: Any, length: Any) -> Tensor:
    key = ("seq_lens", str(batch), str(length))
    make = lambda: torch.full((batch,), length, dtype=torch.int32, device=rw.pages.buffer.device)  # noqa: E731
    return rw.pages.once(key, None, make)


def _visibility(mask: Tensor | None, causal: bool, query: Tensor, keys: Any) -> tuple[Tensor | None, Any, bool]:
    """``attention``'s bias, sequence length and causal flag for SDPA's mask and is_causal.

    SDPA's causal mask is aligned top left: query ``i`` sees keys ``j <= i``. Over the first ``L`` keys that is
    ``attention``'s, aligned bottom right; with more queries than keys it takes an explicit mask.
    """
    length, device = query.shape[2], query.device
    if causal:
        if mask is not None:
            raise RewriteError("attention with both a mask and is_causal")
        if length <= keys:
            return None, length, True
        mask = torch.ones(length, keys, dtype=torch.bool, device=device).tril()
    if mask is not None:
        mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape) if mask.dim() < 4 else mask
        mask = mask if mask.shape[3] == keys else mask.expand(-1, -1, -1, keys)
    return mask, keys, False
