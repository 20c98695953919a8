"""Pools and calls for the kernel tests, laid out by the formulas of the page formats, and where the tests run.

One body serves both devices: on the CPU the interpreter runs the kernels, on CUDA they are compiled. The interpreter
rounds bf16 and fp8 wrongly, so there those dtypes are only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

from pm_ops.ops.attention import Attention

CUDA = torch.cuda.is_available()
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="kernels are compiled where there is a GPU")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)
KERNELS = {
    "_store_kv", "_load_kv", "_rope_store_kv", "_attention", "_attention_hopper", "_mla_hopper", "_merge_splits",
    "_merge_attention", "_zero_padding", "_gather_pages", "_scatter_pages", "_compare", "_copy_pages", "_copy_slots",
    "_repack_pages", "_move_pages", "_conv1d_update", "_conv1d_prefill", "_selective_state_update",
    "_selective_scan_prefill", "_selective_steps", "_selective_states", "_selective_segments", "_selective_outputs",
    "_gated_delta_update", "_gated_delta_chunks", "_gated_delta_scan",
}  # fmt: skip
"""All that are launched."""
NAN_BYTE = 0xFF
"""A buffer full of this byte reads as NaN in every dtype."""


@dataclass
class Pages:
    """A pool's buffer and the geometry of its planes, by (layer, kind)."""

    buffer: Tensor
    page_size: int
    num_pages: int
    planes: dict[tuple[int, str], list[int]]
    region: list[int]

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def to(self, device: str) -> Pages:
        """A copy on a device."""
        return Pages(self.buffer.to(device, copy=True), self.page_size, self.num_pages, self.planes, self.region)


def pages(
    order: str,
    page_size: int,
    num_pages: int,
    layers: int,
    rows: dict[str, tuple[int, int, int]],
    *,
    base: int = 0,
    gap: int = 0,
    fill: int | None = None,
) -> Pages:
    """A pool of identical layers, filled with ``fill`` or random bytes.

    ``rows``: per kind (heads, dim, itemsize). ``order``: ``page_major`` ``[layer][kind][token][head]``, ``token_major``
    ``[token][layer][kind][head]`` padded to 32 bytes, or ``head_major`` ``[layer][head][token][kind]`` (vLLM's BLHNC;
    kinds must have equal heads). ``gap`` bytes lie between pages.
    """
    offsets: dict[tuple[int, str], tuple[int, int, int]] = {}  # offset, token stride, head stride
    at = 0
    if order == "page_major":
        for layer in range(layers):
            for kind, (heads, dim, item) in rows.items():
                offsets[layer, kind] = (at, heads * dim * item, dim * item)
                at += page_size * heads * dim * item
    elif order == "token_major":
        token = sum(heads * dim * item for heads, dim, item in rows.values()) * layers
        token = -(-token // 32) * 32
        for layer in range(layers):
            for kind, (heads, dim, item) in rows.items():
                offsets[layer, kind] = (at, token, dim * item)
                at += heads * dim * item
        at = page_size * token
    else:
        assert order == "head_major"
        content = sum(dim * item for _, dim, item in rows.values())
        (heads,) = {heads for heads, _, _ in rows.values()}
        for layer in range(layers):
            inner = at
            for kind, (_, dim, item) in rows.items():
                offsets[layer, kind] = (inner, content, page_size * content)
                inner += dim * item
            at += heads * page_size * content
    page_stride = at + gap
    planes = {
        key: [base + offset, page_stride, token_stride, head_stride, num_pages]
        for key, (offset, token_stride, head_stride) in offsets.items()
    }
    nbytes = base + num_pages * page_stride
    buffer = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    if fill is not None:
        buffer.fill_(fill)
    return Pages(buffer, page_size, num_pages, planes, [base, page_stride, at, num_pages])


def moved_with_strides(x: Tensor, device: str | torch.device) -> Tensor:
    """A slice stays a slice; ``Tensor.to`` would make it contiguous on another device."""
    storage = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def on(a: Any, device: str) -> Any:
    """An operator's arguments, a dataclass, with its tensors on this device."""
    tensors = {f.name: getattr(a, f.name) for f in fields(a)}
    return replace(a, **{k: moved_with_strides(v, device) for k, v in tensors.items() if isinstance(v, Tensor)})


def scattered_table(lens: Sequence[int], page_size: int, num_pages: int, *, tail: int, width: int = 0) -> Tensor:
    """A page table ``[B, W]`` of distinct random pages; entries past each sequence's last page are ``tail``."""
    needed = [-(-n // page_size) for n in lens]
    free = torch.randperm(num_pages).tolist()
    table = torch.full((len(lens), max([width, *needed])), tail, dtype=torch.int32)
    for b, n in enumerate(needed):
        for column in range(n):
            table[b, column] = free.pop()
    return table


def attention_case(
    device: str,
    lens: Sequence[int],
    queries: Sequence[int] | int,
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (32, 32),
    page_size: int = 4,
    order: str = "page_major",
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (torch.float32,) * 3,
    tail: int = -1,
    width: int = 0,
    spare_rows: int = 0,
    index: torch.dtype = torch.int32,
    num_pages: int = 0,
    scales: tuple[float, float] = (1.0, 1.0),
    own: bool = False,
    spread: float = 1.0,
    gap: int = 0,
    **options: Any,
) -> Attention:
    """A call over a pool that holds NaN everywhere but in the slots of its sequences' keys.

    ``queries`` an int: so many of every sequence, without ``query_start``. ``dtypes`` of query, key and value;
    ``spare_rows`` padding rows behind the last query. ``spread`` scales the queries. ``own``: a scale for each token
    and head, of rows whose sizes differ. ``gap`` bytes lie between pages.
    """
    query_dtype, key_dtype, value_dtype = dtypes
    q_heads, kv_heads = heads
    needed = sum(-(-n // page_size) for n in lens)
    rows = {"key": (kv_heads, dims[0], key_dtype.itemsize), "value": (kv_heads, dims[1], value_dtype.itemsize)}
    if own:
        rows |= {"key_scale": (kv_heads, 1, 4), "value_scale": (kv_heads, 1, 4)}
    pool = pages(order, page_size, max(num_pages, needed + 2), 2, rows, gap=gap, fill=NAN_BYTE)
    table = scattered_table(lens, page_size, pool.num_pages, tail=tail, width=width)
    for kind, dim, dtype, scale in (("key", dims[0], key_dtype, scales[0]), ("value", dims[1], value_dtype, scales[1])):
        for b, n in enumerate(lens):
            slots = [int(table[b, j // page_size]) * page_size + j % page_size for j in range(n)]
            rows = torch.randn(n, kv_heads, dim) * scale
            scale_plane = pool.planes.get((1, f"{kind}_scale"))
            if own:
                rows *= torch.rand(n, kv_heads, 1) * 2
            oracle.store(pool.buffer, pool.planes[1, kind], page_size, dtype, rows, slots, scale, scale_plane)
    start = None
    if isinstance(queries, int):
        tokens = queries * len(lens)
    else:
        start = torch.tensor([0, *queries]).cumsum(0).to(index).to(device)
        tokens = sum(queries) + spare_rows
    return Attention(
        pool.buffer.to(device),
        (torch.randn(tokens, q_heads, dims[0]) * spread).to(query_dtype).to(device),
        table.to(index).to(device),
        torch.tensor(lens, dtype=index, device=device),
        start,
        pool.planes[1, "key"],
        pool.planes[1, "value"],
        page_size,
        kv_heads,
        dims[1],
        key_dtype,
        value_dtype,
        softmax_scale=dims[0] ** -0.5,
        return_lse=True,
        key_scale=scales[0],
        value_scale=scales[1],
        key_scale_plane=pool.planes.get((1, "key_scale")),
        value_scale_plane=pool.planes.get((1, "value_scale")),
        **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()},
    )


def plan(case: Attention) -> Any:
    """How a call is cut into programs."""
    from pm_ops.kernels.attention_plan import plan_of, shape_of

    return plan_of(shape_of(case))


TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of outputs of unit scale, and relative: P is rounded to 16 bits before P @ V, and the output once more."""


def check_attention(case: Attention, out: Tensor, lse: Tensor) -> None:
    """The result of a call is the oracle's: finite, of the query's dtype, contiguous, padding rows 0 and -inf."""
    expected, expected_lse = oracle.attention_of(case)
    assert out.dtype == case.query.dtype
    assert out.is_contiguous()
    assert lse.dtype == torch.float32
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    # A logit is a sum in fp32 whose parts are as large as the largest logit: so is what each step of it rounds off
    largest = expected_lse[expected_lse.isfinite()].abs().max().item() if expected_lse.isfinite().any() else 0.0
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-5, atol=1e-4 + 8 * 2**-23 * largest)


def check_bytes(before: Tensor, after: Tensor, expected: Tensor, touched: Iterable[int]) -> None:
    """After a write every touched byte is the expected one and every other byte is what it was."""
    mask = torch.zeros(len(before), dtype=torch.bool)
    mask[torch.tensor(sorted(touched), dtype=torch.int64)] = True
    assert torch.equal(after.cpu()[~mask], before.cpu()[~mask]), "bytes outside the addressed cells changed"
    assert torch.equal(after.cpu()[mask], expected.cpu()[mask]), "addressed cells hold other bytes than expected"
