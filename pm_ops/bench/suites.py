"""Cases: what to build, bind, check and count for each shape of each suite."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops._common import bits
from .case import Case
from .cases import ATTENTION_SUITES, AttentionShape, PagesShape, RopeShape, StoreShape, shapes
from .implementation import Bound
from .memory import PAGE_MAJOR
from .oracle import Error, error, rotate
from .transfer_cases import RepackShape, TransferShape
from .transfer_suite import repack_case, transfer_case
from .work import AttentionWork, PagesWork, RopeWork, StoreWork, attention_work, pages_work, rope_work, store_work


def cases(suite: str, device: torch.device, quick: bool) -> Iterator[Case]:
    """The cases of a suite on this device."""
    for shape in shapes(suite, device, quick):
        if isinstance(shape, AttentionShape):
            yield attention_case(suite, shape)
        elif isinstance(shape, RopeShape):
            yield rope_case(suite, shape)
        elif isinstance(shape, StoreShape):
            yield store_case(suite, shape)
        elif isinstance(shape, TransferShape):
            yield transfer_case(suite, shape)
        elif isinstance(shape, RepackShape):
            yield repack_case(suite, shape)
        elif isinstance(shape, PagesShape):
            yield pages_case(suite, shape)
        else:
            yield shape.case(suite)


def attention_case(suite: str, shape: AttentionShape) -> Case:
    """Attention of a batch: a rate of bytes where each query is one token, of operations otherwise."""
    assert suite in (*ATTENTION_SUITES, "host")
    decode = max(shape.query_lens) == 1
    unit = None if suite == "host" else "gb_s" if decode else "tflop_s"
    return Case(
        suite,
        shape.name,
        "host attention" if suite == "host" else suite,
        partial(attention_work, shape),
        lambda impl, work, layout: impl.attention(work, work.memories[layout]),
        _check_attention,
        unit,
        shape.nbytes if decode else shape.flops,
        shape.short,
        _tolerance(shape.dtype),
    )


def store_case(suite: str, shape: StoreShape) -> Case:
    """Rows to their slots."""
    return Case(
        suite,
        shape.name,
        "host store" if suite == "host" else suite,
        partial(store_work, shape),
        lambda impl, work, layout: impl.store(work, work.memories[layout]),
        _check_store,
        None if suite == "host" else "gb_s",
        shape.nbytes,
        graph=True,
        tolerance=0.0,
    )


def rope_case(suite: str, shape: RopeShape) -> Case:
    """The same after the rotation of query and key."""
    return Case(
        suite,
        shape.name,
        "rope and store",
        partial(rope_work, shape),
        lambda impl, work, layout: impl.rope_store(work, work.memories[layout]),
        _check_rope,
        "gb_s",
        shape.nbytes,
        graph=True,
        tolerance=_tolerance(shape.dtype),
    )


def pages_case(suite: str, shape: PagesShape) -> Case:
    """Whole pages, or tokens of all layers."""
    return Case(
        suite,
        shape.name,
        "move" if shape.verb == "move" else suite,
        partial(pages_work, shape),
        lambda impl, work, layout: impl.pages(work, layout),
        _check_pages,
        "gb_s",
        shape.nbytes,
        graph=shape.nbytes <= 1 << 28,
        tolerance=0.0,
    )


def _tolerance(dtype: torch.dtype) -> float:
    """Relative error that rounding to this dtype, of the result and of what it is summed from, explains."""
    return 1e-2 if dtype.itemsize == 2 else 1e-5


def _check_attention(bound: Bound, work: AttentionWork, layout: str) -> Error:
    if bound.out is not None:
        bound.out.fill_(torch.nan)
    else:  # a fresh result comes out of memory just freed
        del_soon = torch.full((work.shape.tokens, work.shape.q_heads, work.shape.value_dim), torch.nan,
                              dtype=work.query.dtype, device=work.query.device)  # fmt: skip
        del del_soon
    return error(bound.run(), work.reference)


def _check_store(bound: Bound, work: StoreWork, layout: str) -> Error:
    """The slots hold the rows, and after putting their old bytes back the memory is what it was."""
    memory = work.memories[layout]
    before, total = memory.rows(work.slots), _checksum(memory.buffer)
    bound.run()
    wrong = [_share(got, row) for got, row in zip(memory.rows(work.slots), (work.key, work.value), strict=True)]
    memory.write(work.slots, before)
    return _bytes_error(max(wrong), _checksum(memory.buffer) == total)


def _check_rope(bound: Bound, work: RopeWork, layout: str) -> Error:
    """Query and stored key are rotated, the value is stored as it came, and nothing else has changed."""
    memory, store = work.memories[layout], work.store
    before, total = memory.rows(store.slots), _checksum(memory.buffer)
    if bound.prepare is not None:
        bound.prepare()
    query = bound.run()
    key, value = memory.rows(store.slots)
    memory.write(store.slots, before)
    if _share(value, store.value) > 0 or _checksum(memory.buffer) != total:
        return Error(1.0, 1.0)
    right = [rotate(rows, work.positions, work.cos_sin) for rows in (work.query, store.key)]
    return max(error(query, right[0]), error(key, right[1]))


def _check_pages(bound: Bound, work: PagesWork, layout: str) -> Error:
    """Where the bytes go they are right, and after putting the old ones back the memory is what it was."""
    shape = work.shape
    buffer = work.pool.buffer if layout == PAGE_MAJOR else work.layer_major.view(-1)
    incoming = _read(work, layout, work.src)
    if shape.verb == "gather":
        total = _checksum(buffer)
        result = bound.run()
        wrong = 1.0 if result is None or result.shape != incoming.shape else _share(result, incoming)
        return _bytes_error(wrong, _checksum(buffer) == total)
    if shape.verb == "scatter":
        incoming = work.rows
        if layout != PAGE_MAJOR:
            incoming = incoming.view(shape.count, shape.layers, 2, -1).permute(1, 2, 0, 3)
    before, total = _read(work, layout, work.dst), _checksum(buffer)
    bound.run()
    wrong = _share(_read(work, layout, work.dst), incoming)
    _write(work, layout, work.dst, before)
    return _bytes_error(wrong, _checksum(buffer) == total)


def _cells(work: PagesWork, layout: str, ids: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """The memory as a tensor, and the index of these pages or slots in it."""
    s = work.shape
    everywhere = slice(None)
    if s.verb != "move":
        return (work.pool.pages, (ids,)) if layout == PAGE_MAJOR else (work.layer_major, (everywhere, everywhere, ids))
    page, token = ids // s.page_size, ids % s.page_size
    if layout == PAGE_MAJOR:
        return work.pool.pages.view(s.pages, 2 * s.layers, s.page_size, -1), (page, everywhere, token)
    return work.layer_major.view(2 * s.layers, s.pages, s.page_size, -1), (everywhere, page, token)


def _read(work: PagesWork, layout: str, ids: Tensor) -> Tensor:
    tensor, index = _cells(work, layout, ids)
    return tensor[index]


def _write(work: PagesWork, layout: str, ids: Tensor, rows: Tensor) -> None:
    tensor, index = _cells(work, layout, ids)
    tensor[index] = rows


def _share(got: Tensor, right: Tensor) -> float:
    """Which share of the elements differs, by their bytes."""
    return float((bits(got) != bits(right)).float().mean())


def _bytes_error(wrong: float, untouched: bool) -> Error:
    """Touching anything else is an error of 1."""
    wrong = wrong if untouched else 1.0
    return Error(wrong, wrong)


def _checksum(buffer: Tensor) -> int:
    """The sum of the buffer's 8-byte words, and of what is left of it, modulo 2^64."""
    whole = buffer.numel() // 8 * 8
    return int(buffer[:whole].view(torch.int64).sum()) + int(buffer[whole:].sum())
