"""Calls of mla_attention on pools that hold NaN outside the stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oracle
import torch
from kernels.cases import NAN_BYTE, check_attention, pages, scattered_table
from torch import Tensor

from pm_ops.ops.mla import MLAAttention


def mla_case(
    device: str,
    lens: Sequence[int],
    queries: Sequence[int] | int,
    *,
    heads: int = 5,
    dims: tuple[int, int] = (32, 16),
    page_size: int = 4,
    order: str = "page_major",
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    tail: int = -1,
    width: int = 0,
    spare_rows: int = 0,
    index: torch.dtype = torch.int32,
    num_pages: int = 0,
    scale: float = 1.0,
    spread: float = 1.0,
    gap: int = 0,
    **options: Any,
) -> MLAAttention:
    """``dims`` of the latent and of the rest of a row, ``dtypes`` of query and rows; else as ``attention_case``."""
    query_dtype, dtype = dtypes
    dim = sum(dims)
    needed = sum(-(-n // page_size) for n in lens)
    rows = {"latent": (1, dim, dtype.itemsize)}
    pool = pages(order, page_size, max(num_pages, needed + 2), 2, rows, gap=gap, fill=NAN_BYTE)
    plane = pool.planes[1, "latent"]
    table = scattered_table(lens, page_size, pool.num_pages, tail=tail, width=width)
    for b, n in enumerate(lens):
        slots = [int(table[b, j // page_size]) * page_size + j % page_size for j in range(n)]
        oracle.store(pool.buffer, plane, page_size, dtype, torch.randn(n, 1, dim) * scale, slots, scale)
    start = None
    if isinstance(queries, int):
        tokens = queries * len(lens)
    else:
        start = torch.tensor([0, *queries]).cumsum(0).to(index).to(device)
        tokens = sum(queries) + spare_rows
    return MLAAttention(
        pool.buffer.to(device),
        (torch.randn(tokens, heads, dim) * spread).to(query_dtype).to(device),
        table.to(index).to(device),
        torch.tensor(lens, dtype=index, device=device),
        start,
        plane,
        page_size,
        dims[0],
        dtype,
        softmax_scale=dim**-0.5,
        scale=scale,
        return_lse=True,
        **options,
    )


def check_mla(case: MLAAttention, result: tuple[Tensor, Tensor]) -> None:
    """The result is that of float64 attention, whose keys are the rows and whose values are their first elements."""
    check_attention(case.attention(), *result)
