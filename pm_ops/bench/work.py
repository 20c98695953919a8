"""The data of a case: the same random K and V in page-major and in layer-major memory, pages shuffled.

Every buffer is first filled with random bytes, NaN among them, and only the cells that the case owns get numbers: what
reads another layer, or a page that is no one's, shows in the result. Within a used page all tokens hold numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .. import PagePool, page_major
from ..ops._common import bits
from .attention_shape import AttentionShape
from .cases import PagesShape, RopeShape, StoreShape
from .memory import LAYOUTS, Memory, memory, poison
from .oracle import attention_reference

SPARE = 8  # pages that belong to no sequence


@dataclass
class AttentionWork:
    """A batch: queries, lengths, page table, and the K and V of every sequence in each layout."""

    shape: AttentionShape
    query: Tensor
    query_start: Tensor
    seq_lens: Tensor
    page_table: Tensor
    sinks: Tensor | None
    memories: dict[str, Memory]
    dense: tuple[Tensor, Tensor]
    """Stored K and V of the used pages, sequence after sequence: ``[used, page_size, heads, dim]``."""
    first_page: list[int] = field(default_factory=list)
    """Of each sequence, in ``dense``."""

    def rows(self, b: int) -> tuple[Tensor, Tensor]:
        """Stored K and V of sequence ``b``, ``[seq_len, heads, dim]``."""
        keys = self.shape.seq_lens[b]
        pages = slice(self.first_page[b], self.first_page[b] + -(-keys // self.shape.page_size))
        return self.dense[0][pages].flatten(0, 1)[:keys], self.dense[1][pages].flatten(0, 1)[:keys]

    @cached_property
    def new_rows(self) -> tuple[Tensor, Tensor]:
        """This step's K and V as the model has just made them, ``[Tq, heads, dim]``, contiguous."""
        parts = [
            [rows[s - n :] for rows in self.rows(b)]
            for b, (n, s) in enumerate(zip(self.shape.query_lens, self.shape.seq_lens, strict=True))
        ]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])

    @cached_property
    def reference(self) -> Tensor:
        """The right result, float64 ``[Tq, Hq, Dv]``."""
        s = self.shape
        return attention_reference(
            self.query, self.rows, s.query_lens, s.seq_lens, scales=s.scales, window=s.window, sinks=self.sinks
        )

    def slots(self, first: Sequence[int], last: Sequence[int]) -> Tensor:
        """Slots of each sequence's keys from ``first[b]`` up to ``last[b]``, one sequence after another, int64."""
        ps, parts = self.shape.page_size, []
        for b, (begin, end) in enumerate(zip(first, last, strict=True)):
            j = torch.arange(begin, end, device=self.page_table.device)
            parts.append(self.page_table[b, j // ps].long() * ps + j % ps)
        return torch.cat(parts)


def attention_work(shape: AttentionShape, device: torch.device, fill: bool = True) -> AttentionWork:
    """Make a case's data. Without ``fill`` K, V and the poison are whatever the memory held: enough to compile with."""
    torch.manual_seed(0)
    counts = [-(-s // shape.page_size) for s in shape.seq_lens]
    used, pages = sum(counts), sum(counts) + SPARE
    ids = torch.randperm(pages, device=device)[:used]
    first_page = [sum(counts[:b]) for b in range(len(counts))]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for b, (first, count) in enumerate(zip(first_page, counts, strict=True)):
        table[b, :count] = ids[first : first + count]
    dims = (shape.head_dim, shape.value_dim)
    dense = [_stored(used, shape, dim, s, device, fill) for dim, s in zip(dims, shape.scales, strict=True)]
    memories = {}
    for layout in LAYOUTS:
        m = memory(layout, pages, shape.page_size, shape.kv_heads, dims, shape.kv_dtype, shape.layers, device, fill)
        if fill:
            bits(m.key)[ids], bits(m.value)[ids] = bits(dense[0]), bits(dense[1])
        memories[layout] = m
    starts = [sum(shape.query_lens[:b]) for b in range(len(counts) + 1)]
    return AttentionWork(
        shape,
        torch.randn(shape.tokens, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
        table,
        torch.randn(shape.q_heads, dtype=shape.dtype, device=device) if shape.sinks else None,
        memories,
        (dense[0], dense[1]),
        first_page,
    )


def _stored(pages: int, shape: AttentionShape, dim: int, scale: float, device: torch.device, fill: bool) -> Tensor:
    size = (pages, shape.page_size, shape.kv_heads, dim)
    if not fill:
        return torch.empty(size, dtype=shape.kv_dtype, device=device)
    x = torch.randn(size, dtype=shape.dtype, device=device)
    if shape.kv_dtype == shape.dtype:
        return x
    return (x / scale).clamp(-448, 448).to(shape.kv_dtype)


@dataclass(frozen=True)
class StoreWork:
    """Rows and distinct random slots for them."""

    shape: StoreShape
    key: Tensor
    value: Tensor
    slots: Tensor
    memories: dict[str, Memory]


def store_work(shape: StoreShape, device: torch.device, fill: bool = True) -> StoreWork:
    """Make a store's data."""
    torch.manual_seed(0)
    s = shape
    rows = [torch.randn(s.tokens, s.kv_heads, s.head_dim, dtype=s.dtype, device=device) for _ in range(2)]
    slots = torch.randperm(s.pages * s.page_size, device=device)[: s.tokens].clone()
    dims = (s.head_dim, s.head_dim)
    memories = {
        layout: memory(layout, s.pages, s.page_size, s.kv_heads, dims, s.dtype, s.layers, device, fill)
        for layout in LAYOUTS
    }
    return StoreWork(s, rows[0], rows[1], slots, memories)


@dataclass(frozen=True)
class RopeWork:
    """A store's data, and what rotating query and key takes."""

    store: StoreWork
    query: Tensor
    positions: Tensor
    cos_sin: Tensor
    """``[positions, head_dim]`` float32: cosines, then sines."""

    @property
    def memories(self) -> dict[str, Memory]:
        """The store's."""
        return self.store.memories

    def copies(self) -> tuple[Tensor, Tensor, Callable[[], object]]:
        """Query and key for a call that rotates in place, and what puts them back."""
        query, key = self.query.clone(), self.store.key.clone()
        return query, key, lambda: (query.copy_(self.query), key.copy_(self.store.key))


def rope_work(shape: RopeShape, device: torch.device, fill: bool = True) -> RopeWork:
    """Make the data of a store with rotation."""
    store = store_work(shape, device, fill)
    angle = torch.rand(shape.positions, shape.head_dim // 2, device=device) * (2 * torch.pi)
    return RopeWork(
        store,
        torch.randn(shape.tokens, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=device),
        torch.randint(shape.positions, (shape.tokens,), device=device),
        torch.cat((angle.cos(), angle.sin()), -1),
    )


@dataclass
class PagesWork:
    """A pool of random bytes, and which of its pages or slots go where."""

    shape: PagesShape
    pool: PagePool
    src: Tensor
    dst: Tensor
    """Page ids, or slots of a move; ``src`` and ``dst`` have none in common."""

    @cached_property
    def layer_major(self) -> Tensor:
        """Other random bytes as ``[layers, 2, pages, page_size * row_bytes]``: each layer's K and V a tensor."""
        s = self.shape
        size = (s.layers, 2, s.pages, s.page_size * s.row_bytes)
        return poison(self.pool.buffer.numel(), self.pool.device).view(size)

    @cached_property
    def rows(self) -> Tensor:
        """Random pages to scatter, uint8 ``[count, page_bytes]``."""
        return poison(self.shape.count * self.pool.layout.page_bytes, self.pool.device).view(self.shape.count, -1)


def pages_work(shape: PagesShape, device: torch.device, fill: bool = True) -> PagesWork:
    """Make the data of a page verb or a move."""
    torch.manual_seed(0)
    s = shape
    layout = page_major(s.layers, s.kv_heads, s.head_dim, s.page_size, s.dtype)
    pool = PagePool(layout, s.pages, buffer=poison(s.pages * layout.page_bytes, device, fill))
    ids = torch.randperm(s.pages * (s.page_size if s.verb == "move" else 1), device=device)
    return PagesWork(s, pool, ids[: s.count].clone(), ids[s.count : 2 * s.count].clone())
