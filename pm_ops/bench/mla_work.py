"""The data of latent attention: as in :mod:`.work`, but rows that are key and value at once, in one plane."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import PagePool, mla
from ..ops._common import bits, plane_view
from .memory import LAYOUTS, PAGE_MAJOR, Memory, poison
from .mla_cases import MLAShape
from .work import SPARE, AttentionWork


def mla_work(shape: MLAShape, device: torch.device, fill: bool = True) -> AttentionWork:
    """Make a case's data. Without ``fill`` rows and poison are whatever the memory held: enough to compile with."""
    torch.manual_seed(0)
    counts = [-(-s // shape.page_size) for s in shape.seq_lens]
    used = sum(counts)
    ids = torch.randperm(used + SPARE, device=device)[:used]
    first_page = [sum(counts[:b]) for b in range(len(counts))]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for b, (first, count) in enumerate(zip(first_page, counts, strict=True)):
        table[b, :count] = ids[first : first + count]
    size = (used, shape.page_size, 1, shape.head_dim)
    rows = torch.empty(size, dtype=shape.kv_dtype, device=device)
    memories = {layout: _memory(layout, shape, used + SPARE, device, fill) for layout in LAYOUTS}
    if fill:
        rows.normal_()
        for memory in memories.values():
            bits(memory.key)[ids] = bits(rows)
    starts = [sum(shape.query_lens[:b]) for b in range(len(counts) + 1)]
    return AttentionWork(
        shape,
        torch.randn(shape.tokens, shape.q_heads, shape.head_dim, dtype=shape.dtype, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
        table,
        None,
        memories,
        (rows, _value(rows, shape)),
        first_page,
    )


def _memory(layout: str, shape: MLAShape, pages: int, device: torch.device, fill: bool) -> Memory:
    """One layer's rows: the middle one of a page-major pool, or rows behind one another."""
    s = shape
    if layout == PAGE_MAJOR:
        page = mla(s.layers, s.page_size, s.kv_dtype, latent_dim=s.value_dim, rope_dim=s.head_dim - s.value_dim)
        pool = PagePool(page, pages, buffer=poison(pages * page.page_bytes, device, fill))
        layer = s.layers // 2
        plane, view = pool.geometry(layer, "latent"), pool.view(layer, "latent")
        return Memory(pool.buffer, plane, plane, s.page_size, view, _value(view, s), pool, layer)
    buffer = poison(pages * s.page_size * s.row_bytes, device, fill)
    plane = [0, s.page_size * s.row_bytes, s.row_bytes, s.row_bytes, pages]
    view = plane_view(buffer, plane, s.page_size, 1, s.head_dim, s.kv_dtype)
    return Memory(buffer, plane, plane, s.page_size, view, _value(view, s))


def _value(rows: Tensor, shape: MLAShape) -> Tensor:
    return rows[..., : shape.value_dim]
