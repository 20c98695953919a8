"""For tests of code that uses pm_ops: poisoned pools, the untouched-bytes check, sample inputs of every operator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .formats import mla, page_major, token_major, vllm
from .layout import PageLayout, Plane, counted
from .ops._common import ROW_DTYPES
from .ops.repack import WIDER
from .pool import PagePool
from .repack import RepackPlan
from .state_samples import STATE_SAMPLES

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of ``torch.ops.pm_ops.<name>``."""


def fill_random(buffer: Tensor, seed: int = 0) -> None:
    """Random bytes, the same for the same seed: poison for tests that write."""
    generator = torch.Generator().manual_seed(seed)
    buffer.copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=generator))


def fill_nan(buffer: Tensor) -> None:
    """Bytes 0xff, which read as NaN in every floating dtype a plane may have: poison for tests that read."""
    buffer.fill_(0xFF)


def slot_bytes(pool: PagePool, layer: int, kind: str, slots: Iterable[int]) -> list[int]:
    """Every byte of the buffer that these slots of one plane own, by the byte formula. Slots < 0 own none."""
    plane = pool.layout.plane(layer, kind)
    heads, _ = plane.shape
    owned: list[int] = []
    for slot in (s for s in slots if s >= 0):
        page, token = divmod(slot, pool.page_size)
        start = pool.base + page * pool.page_stride + plane.offset + token * (plane.token_stride or 0)
        for head in range(heads):
            owned.extend(range(start + head * plane.head_stride, start + head * plane.head_stride + plane.row_bytes))
    return owned


def page_bytes(pool: PagePool, pages: Iterable[int]) -> list[int]:
    """Every byte of the buffer that these pages own. Pages < 0 own none."""
    starts = [pool.base + page * pool.page_stride for page in pages if page >= 0]
    return [byte for start in starts for byte in range(start, start + pool.layout.page_bytes)]


@contextmanager
def writes_only(buffer: Tensor, owned: Iterable[int]) -> Iterator[None]:
    """Within the block only these bytes of the buffer may change; AssertionError names the first other one that did."""
    before = buffer.cpu().clone()
    try:
        yield
    finally:  # also where the block raises: a refused call must not have written
        changed = buffer.cpu() != before
        changed[list(owned)] = False
        stray = changed.nonzero().squeeze(1).tolist()
        if stray:
            found = counted(len(stray), "byte")
            raise AssertionError(f"{found} outside the addressed cells changed, the first is {stray[0]}")


def sample_pools(device: str = "cpu") -> Iterator[PagePool]:
    """Small pools of every named format, of unequal K and V dims, and of a pool inside a larger buffer."""
    for dtype in ROW_DTYPES:
        yield _filled(PagePool(page_major(2, 2, 8, 4, dtype), 5, device))
    yield _filled(PagePool(page_major(2, 2, 8, 4, torch.float16, value_dim=16), 5, device))
    yield _filled(PagePool(token_major(2, 2, 8, 3, torch.float32), 5, device))
    yield _filled(PagePool(vllm(2, 2, 8, 4, torch.bfloat16, "BHLNC"), 5, device))
    layout = page_major(2, 2, 8, 1, torch.float32)
    buffer = torch.zeros(64 + 5 * 2 * layout.page_bytes, dtype=torch.uint8, device=device)
    yield _filled(PagePool(layout, 5, buffer=buffer, base=64, page_stride=2 * layout.page_bytes))


def scaled_pools(device: str = "cpu") -> Iterator[PagePool]:
    """Small pools with a scale for each token and head: every 8-bit dtype, unequal dims, a pool in a larger buffer."""
    yield _filled(PagePool(page_major(2, 2, 8, 4, torch.int8, scales=True), 5, device))
    layout = page_major(2, 2, 8, 3, torch.float8_e4m3fn, value_dim=12, scales=True)
    buffer = torch.zeros(64 + 5 * 2 * layout.page_bytes, dtype=torch.uint8, device=device)
    yield _filled(PagePool(layout, 5, buffer=buffer, base=64, page_stride=2 * layout.page_bytes))
    yield _filled(PagePool(token_major(2, 2, 8, 3, torch.float8_e5m2, value_dim=5, scales=True), 5, device))


def sample_inputs(op: str, device: str = "cpu") -> Iterator[Sample]:
    """Valid inputs of an operator: none, one and many rows, int32 and int64, every dtype, non-contiguous inputs."""
    whole = {"merge_attention": _merge_samples, "mla_attention": _mla_samples, **STATE_SAMPLES}
    if op in whole:
        yield from whole[op](device)
        return
    make = {
        "store_kv": _store_samples,
        "rope_store_kv": _rope_samples,
        "load_kv": _load_samples,
        "attention": _attention_samples,
        "attention_out": _attention_out_samples,
        "copy_pages": _page_samples,
        "zero_pages": _page_samples,
        "gather_pages": _page_samples,
        "scatter_pages": _page_samples,
        "copy_slots": _slot_samples,
        "repack_pages": _repack_samples,
    }[op]
    pools = [*sample_pools(device), *scaled_pools(device)]
    for pool in pools if op != "attention_out" else (pools[0], pools[-1]):  # what attention gets, and out
        yield from make(op, pool)


def _filled(pool: PagePool) -> PagePool:
    """Finite values in every plane."""
    for plane in pool.layout.planes:
        view = pool.view(plane.layer, plane.kind)
        values = torch.randn(view.shape, generator=torch.Generator().manual_seed(plane.offset))
        view.copy_((values.abs() if plane.kind.endswith("_scale") else values).to(plane.dtype))
    return pool


def _scales(pool: PagePool) -> dict[str, list[int]]:
    """The arguments that name the scale planes of layer 1, where there are any."""
    return {f"{kind}_scale_plane": pool.geometry(1, f"{kind}_scale") for kind in sorted(pool.scaled_kinds)}


def _ids(count: int, limit: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Distinct indices with a skipped one among them, where there are several."""
    ids = torch.randperm(limit, generator=torch.Generator().manual_seed(count))[:count]
    if count > 2:
        ids[1] = -1
    return ids.to(device, dtype)


def _counts() -> tuple[tuple[int, torch.dtype], ...]:
    return (0, torch.int32), (1, torch.int64), (4, torch.int32), (4, torch.int64)


def _store_samples(op: str, pool: PagePool) -> Iterator[Sample]:
    heads, dim = pool.layout.plane(1, "key").shape
    value_dim = pool.layout.plane(1, "value").shape[1]
    key_plane, value_plane = pool.geometry(1, "key"), pool.geometry(1, "value")
    dtype = pool.layout.plane(1, "key").dtype
    planes = (key_plane, value_plane, pool.page_size, dtype, dtype)
    scales = _scales(pool)
    for count, index in _counts():
        slots = _ids(count, pool.num_slots, index, pool.device)
        fused = torch.randn(count + 1, heads, dim + value_dim, device=pool.device)  # one padding row, strided rows
        yield (pool.buffer, fused[..., :dim], fused[..., dim:], slots, *planes), scales
        key_alone = {"key_scale_plane": scales["key_scale_plane"]} if scales else {}
        yield (pool.buffer, fused[..., :dim], None, slots, key_plane, None, pool.page_size, dtype, None), key_alone
    scale = torch.tensor(0.5, device=pool.device)
    rows = (torch.randn(4, heads, dim, device=pool.device).bfloat16(), None)
    yield (
        (pool.buffer, *rows, slots, key_plane, None, pool.page_size, dtype, None),
        {"key_scale_tensor": scale},
    )


def _rope_samples(op: str, pool: PagePool) -> Iterator[Sample]:
    key, value = pool.layout.plane(1, "key"), pool.layout.plane(1, "value")
    (heads, dim), (_, value_dim) = key.shape, value.shape
    planes = (pool.geometry(1, "key"), pool.geometry(1, "value"), pool.page_size, key.dtype, value.dtype)
    device = pool.device
    for count, index in ((0, torch.int32), (4, torch.int64)):
        slots = _ids(count, pool.num_slots, index, device)
        query, k = torch.randn(count + 1, 3 * heads, dim, device=device).split([2 * heads, heads], 1)
        v = torch.randn(count + 1, value_dim, heads, device=device).transpose(1, 2)
        positions = torch.arange(count + 1, dtype=index, device=device).flip(0)
        weights = {"q_weight": torch.randn(dim, device=device), "k_weight": torch.randn(dim, device=device).half()}
        table = torch.randn(9, dim, device=device)
        yield (
            (pool.buffer, query, k, v, positions, table, slots, *planes),
            {**weights, "return_key": True, **_scales(pool)},
        )
    rows = (query.bfloat16(), k.half(), v.half(), positions.int(), table[:, : dim // 2].bfloat16(), slots.int())
    options = {"interleaved": True, "key_scale_tensor": torch.tensor(0.5, device=device), "value_scale": 2.0}
    yield (pool.buffer, *rows, *planes), options
    yield (pool.buffer, *rows[:3], None, rows[4][: query.shape[0]], rows[5], *planes), options


def _load_samples(op: str, pool: PagePool) -> Iterator[Sample]:
    plane = pool.layout.plane(1, "value")
    geometry = (pool.geometry(1, "value"), pool.page_size, *plane.shape, plane.dtype)
    for count, index in _counts():
        slots = _ids(2 * count, pool.num_slots, index, pool.device)[::2]
        yield (pool.buffer, slots, *geometry), {}
        yield (pool.buffer, slots, *geometry), {"scale": 0.5, "out_dtype": torch.float32}
        if pool.scaled_kinds:
            scales = {"scale_plane": pool.geometry(1, "value_scale")}
            yield (pool.buffer, slots, *geometry), {"out_dtype": torch.float16, **scales}


def _attention_samples(op: str, pool: PagePool) -> Iterator[Sample]:
    key, value = pool.layout.plane(1, "key"), pool.layout.plane(1, "value")
    heads, dim = key.shape
    geometry = (pool.geometry(1, "key"), pool.geometry(1, "value"), pool.page_size, heads, value.shape[1])
    tail = (*geometry, key.dtype, value.dtype)
    device, ps = pool.device, pool.page_size
    for batch, index in ((0, torch.int32), (1, torch.int64), (3, torch.int32)):
        table = _ids(5, 5, index, device).clamp(min=0)[None].expand(batch, -1)
        lengths = torch.tensor([2 * ps, 0, 5 * ps], dtype=index, device=device)[:batch]
        query = torch.randn(2 * batch, dim, 2 * heads, device=device).transpose(1, 2)
        half = query.to(torch.float16)
        options = {"softmax_scale": 0.3, **_scales(pool)}
        yield (pool.buffer, query, table, lengths, None, *tail), {"return_lse": True, **options}
        start = torch.tensor([0, 1, 1, 4], dtype=index, device=device)[: batch + 1]
        bias = torch.randn(1, 2 * heads, 1, 5 * ps, device=device)
        extra = {"softcap": 20.0, "sinks": torch.randn(2 * heads, device=device), "bias": bias, "causal": False}
        yield (pool.buffer, half, table, lengths, start, *tail), {"window": 3, **options, **extra}


def _attention_out_samples(op: str, pool: PagePool) -> Iterator[Sample]:
    for args, options in _attention_samples(op, pool):
        query, value_dim = args[1], args[9]
        out = torch.full((*query.shape[:2], value_dim), torch.nan, dtype=query.dtype, device=query.device)
        yield args, {**options, "out": out}


def _mla_samples(device: str) -> Iterator[Sample]:
    for dtype, latent, rope in ((torch.float32, 8, 4), (torch.bfloat16, 16, 0), (torch.float8_e4m3fn, 8, 8)):
        layout = mla(2, 3, dtype, latent_dim=latent, rope_dim=rope, index_dim=16)
        pool = _filled(PagePool(layout, 5, device))
        tail = (pool.geometry(1, "latent"), 3, latent, dtype, 0.3)
        for batch, index in ((0, torch.int32), (1, torch.int64), (3, torch.int32)):
            table = _ids(5, 5, index, pool.device).clamp(min=0)[None].expand(batch, -1)
            lengths = torch.tensor([6, 0, 15], dtype=index, device=device)[:batch]
            query = torch.randn(2 * batch, latent + rope, 5, device=device).transpose(1, 2)
            yield (pool.buffer, query, table, lengths, None, *tail), {"return_lse": True}
            start = torch.tensor([0, 1, 1, 4], dtype=index, device=device)[: batch + 1]
            options = {"causal": False, "scale_tensor": torch.tensor(0.5, device=device), "max_query_len": 3}
            yield (pool.buffer, query.half(), table, lengths, start, *tail), options


def _page_samples(op: str, pool: PagePool) -> Iterator[Sample]:
    for count, index in _counts():
        pages = _ids(count, pool.num_pages, index, pool.device)
        if op == "copy_pages":
            yield (pool.buffer, pages, pages.flip(0).roll(1), pool.region), {}
        elif op == "scatter_pages":
            rows = torch.randint(0, 256, (count, 2 * pool.layout.page_bytes), device=pool.device).to(torch.uint8)
            yield (pool.buffer, rows[:, ::2], pages, pool.region), {}
        else:
            yield (pool.buffer, pages, pool.region), {}


def _slot_samples(op: str, pool: PagePool) -> Iterator[Sample]:
    for count, index in _counts():
        slots = _ids(count, pool.num_slots, index, pool.device)
        yield (pool.buffer, slots, slots.flip(0).roll(1), pool.slot_runs, pool.page_size, pool.region), {}


def _repack_samples(op: str, pool: PagePool) -> Iterator[Sample]:
    """To entries of a whole token, in pages of another size: every head, head 1 alone, and in a wider dtype."""
    ours, size = pool.layout, pool.page_size + 1
    narrow = next((p.dtype for p in ours.planes if p.dtype in WIDER), None)
    for heads, wide in ((None, False), ((1, 0, 1), False), (None, True)):
        planes, entry = [], 0
        for p in sorted(ours.planes, key=lambda p: (p.kind, p.layer)):
            count = p.shape[0] if heads is None else 1
            dtype = WIDER[p.dtype][-1] if wide and p.dtype == narrow else p.dtype
            row = p.row_bytes // p.dtype.itemsize * dtype.itemsize
            planes.append((p, entry, count, row, dtype))
            entry += count * row + -(count * row) % 4
        theirs = [
            Plane(p.layer, p.kind, at, entry, row, (count, *p.shape[1:]), dtype) for p, at, count, row, dtype in planes
        ]
        target = PagePool(PageLayout(size, size * entry, tuple(theirs)), 4, pool.device)
        plan = RepackPlan(ours, target.layout, heads=heads)
        table, sizes = plan.table(pool.device), (pool.page_size, size)
        for count, index in ((0, torch.int32), (1, torch.int64), (3, torch.int32)):
            lists = (_ids(count, 5, index, pool.device), _ids(count, 4, index, pool.device))
            tokens = max(count * pool.page_size - 1, 0)
            sides = (*sizes, pool.region, target.region, *(plan.widening or ()))
            yield (pool.buffer, target.buffer, *lists, table, tokens, *sides), {}


def _merge_samples(device: str) -> Iterator[Sample]:
    for tokens, dtype in product((0, 1, 5), (torch.float32, torch.float16, torch.bfloat16)):
        out = torch.randn(2, tokens, 8, 4, device=device, dtype=dtype).transpose(2, 3)
        lse = torch.randn(2, tokens, 4, device=device)
        lse[:, :1] = -torch.inf
        yield (out[0], lse[0], out[1], lse[1]), {}
