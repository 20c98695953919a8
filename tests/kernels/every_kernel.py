"""Every kernel once on each of a few odd shapes, against the operator's CPU kernel: what compute-sanitizer watches.

    python tests/kernels/every_kernel.py [GROUP...]

Shapes end inside tiles, words and pages. The first and the last slots and pages are used, indices that are to be
skipped point far outside, what attention must not read is NaN, and every byte around a write is compared. Tensors come
from the host, so that all of what the kernels are given has been written.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import torch
from gated_delta_cases import prefill_case, update_case
from kernels.cases import TOLERANCE, attention_case, moved_with_strides
from kernels.mla_cases import mla_case
from kernels.test_rope import rope_case
from state_cases import conv_prefill, conv_update, ssm_prefill, ssm_update
from torch import Tensor
from triton import knobs

import pm_ops
from pm_ops.kernels import attention_hopper, mla_hopper
from pm_ops.kernels.attention import attention
from pm_ops.kernels.conv import conv1d_prefill, conv1d_update
from pm_ops.kernels.gated_delta import gated_delta_update
from pm_ops.kernels.gated_delta_prefill import gated_delta_prefill
from pm_ops.kernels.merge import merge_attention
from pm_ops.kernels.mla import mla_attention
from pm_ops.kernels.padding import zero_padding
from pm_ops.kernels.pages import copy_pages, copy_slots, gather_pages, scatter_pages, zero_pages
from pm_ops.kernels.repack import repack_pages
from pm_ops.kernels.rope import rope_store_kv
from pm_ops.kernels.selective_chunks import scan_in_chunks
from pm_ops.kernels.selective_scan import scan_in_order
from pm_ops.kernels.selective_update import selective_state_update
from pm_ops.kernels.store import load_kv, store_kv
from pm_ops.ops._common import bits
from pm_ops.ops.merge import MergeAttention
from pm_ops.ops.pages import CopyPages, CopySlots, GatherPages, ScatterPages, ZeroPages
from pm_ops.ops.repack import RepackPages
from pm_ops.ops.store import LoadKV, StoreKV

DEVICE = "cuda"
F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FAR = 2**30
"""A slot or page that no pool has. The operators' CPU kernels refuse it; they are given -1, which is skipped, too."""


def fields(case: Any) -> dict[str, Any]:
    return {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}


def moved(case: Any) -> Any:
    """The call on the device; indices < 0 are far outside there."""
    there = {k: moved_with_strides(v, DEVICE) if isinstance(v, Tensor) else v for k, v in fields(case).items()}
    for name in {"slots", "pages", "src", "dst", "src_pages", "dst_pages", "state_indices"} & there.keys():
        index = getattr(case, name)
        there[name] = torch.where(index < 0, FAR, index).to(DEVICE)
    return type(case)(**there)


def check(kernel: Callable[[Any], Any], case: Any, tolerance: float | None = None, operator: str | None = None) -> None:
    """A kernel and the CPU operator of its name, or of another's, give the same, bit for bit or nearly.

    So do the call's buffers.
    """
    there = moved(case)
    found = as_tuple(kernel(there))
    plain = fields(case) | ({"batch_invariant": False} if kernel is attention else {})  # which is for CUDA alone
    wanted = as_tuple(getattr(torch.ops.pm_ops, operator or kernel.__name__)(*plain.values()))
    buffers = [k for k, v in fields(case).items() if isinstance(v, Tensor) and v.dtype == torch.uint8]
    pairs = [*zip(found, wanted, strict=True), *((getattr(there, k), getattr(case, k)) for k in buffers)]
    for got, expected in ((a.cpu(), b) for a, b in pairs):
        if not torch.equal(bits(got), bits(expected)):
            assert tolerance is not None, f"{kernel.__name__}: other bits than the CPU operator's"
            floats = (x.view(F32) if x.dtype == torch.uint8 else x for x in (got, expected))
            torch.testing.assert_close(*floats, rtol=tolerance, atol=tolerance, equal_nan=True)


def as_tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else () if x is None else (x,)


def pool_of(make: str, dims: tuple[int, int], dtype: torch.dtype, scales: bool = False) -> pm_ops.PagePool:
    """Five pages of three tokens, of two layers with three heads, random bytes."""
    if make == "BLHNC":
        layout = pm_ops.vllm(2, 3, dims[0], 3, dtype, make, value_dim=dims[1])
    else:
        layout = getattr(pm_ops, make)(2, 3, dims[0], 3, dtype, value_dim=dims[1], scales=scales)
    return pm_ops.PagePool(layout, 5, buffer=torch.randint(0, 256, (5 * layout.page_bytes,), dtype=torch.uint8))


def rows_to_slots_and_back() -> None:
    """Rows of all widths, padding rows, key or value alone, every cache dtype, one scale or the rows' own."""
    for source, dtype, dims, make in (
        (F32, F32, (20, 20), "page_major"),
        (BF16, BF16, (128, 80), "token_major"),
        (F16, F16, (1, 7), "BLHNC"),
        (BF16, E4M3, (96, 33), "page_major"),
        (F32, E5M2, (5, 64), "token_major"),
        (BF16, INT8, (72, 72), "page_major"),
    ):
        for own in (False, True)[: 3 - dtype.itemsize]:
            pool = pool_of(make, dims, dtype, own)
            scale = 0.05 if dtype.itemsize == 1 and not own else 1.0
            slots = torch.tensor([14, -1, 0, 7, 8, 3], dtype=torch.int32)
            call: dict[str, Any] = dict(buffer=pool.buffer, slots=slots, page_size=3)
            for kind, dim in zip(("key", "value"), dims, strict=True):
                plane, rows = pool.plane(1, kind), torch.randn(7, 6, dim).to(source)[:, ::2]
                call |= {kind: rows, f"{kind}_plane": plane.geometry, f"{kind}_dtype": dtype}
                call |= {f"{kind}_scale": scale, f"{kind}_scale_plane": plane.scales}
            none = dict.fromkeys(("key", "key_plane", "key_dtype", "key_scale_plane")) | {"key_scale": 1.0}
            check(store_kv, StoreKV(**call))
            check(store_kv, StoreKV(**call | none))
            for kind, dim in zip(("key", "value"), dims, strict=True):
                plane = pool.plane(1, kind)
                check(load_kv, LoadKV(pool.buffer, slots.long(), plane.geometry, 3, 3, dim, dtype))
                scaled = (scale, None, F32, plane.scales)
                check(load_kv, LoadKV(pool.buffer, slots, plane.geometry, 3, 3, dim, dtype, *scaled), 1e-6)


def rotations() -> None:
    """NeoX and GPT-J pairs, part of a head or all of it, with a norm and without, plain and quantised."""
    slots = [23, -1, 0, 9, 10]
    check(rope_store_kv, rope_case(slots=slots, return_key=True))
    check(rope_store_kv, rope_case(slots=slots, dims=(80, 80, 5), rows=(BF16,) * 3, planes=(BF16, BF16)))
    check(rope_store_kv, rope_case(slots=slots, interleaved=True, rows=(F16, BF16, F32), planes=(E4M3, BF16)))
    check(rope_store_kv, rope_case(slots=slots, norm=True, return_key=True), 1e-5)
    pool = pool_of("token_major", (24, 20), INT8, scales=True)
    case = rope_case(5, heads=(5, 3, 3), slots=[14, 0, -1, 7], rows=(BF16,) * 3, page_size=3, return_key=True)
    for kind in ("key", "value"):
        plane = pool.plane(1, kind)
        own = {f"{kind}_plane": plane.geometry, f"{kind}_scale_plane": plane.scales, f"{kind}_dtype": INT8}
        case = dataclasses.replace(case, buffer=pool.buffer, **own)
    check(rope_store_kv, case)


def attentions() -> None:
    """Decode, with and without splits; blocks of queries; mixed; every option; 8-bit rows, packed and not."""
    ragged: dict[str, Any] = dict(lens=[9, 21, 0, 30, 33], queries=[1, 21, 0, 6, 1], spare_rows=3)
    hidden = torch.where(torch.rand(5, 4, 21, 33) < 0.3, -torch.inf, torch.randn(5, 4, 21, 33))
    for options in (
        dict(lens=[13, 1, 30, 0], queries=1, dtypes=(F32,) * 3),
        dict(lens=[13, 1, 30, 0], queries=1, heads=(10, 2), dims=(80, 80), index=torch.int64),
        dict(lens=[300, 40, 0], queries=1, dims=(128, 128), page_size=16, width=1024),
        dict(lens=[300, 40], queries=1, dims=(192, 128), page_size=3, width=1024, batch_invariant=True),
        dict(lens=[300, 40], queries=1, dims=(64, 64), window=7, sinks=torch.randn(4), tail=FAR, width=1024),
        ragged,
        dict(lens=[137, 30], queries=[130, 30], dims=(128, 128), page_size=544, causal=False),
        dict(ragged, bias=hidden, softcap=3.0, alibi_slopes=torch.rand(4)),
        dict(ragged, bias=hidden[:, :1, :1] > 0, window=5, page_size=1),
        dict(lens=[13, 30], queries=[1, 9], dtypes=(BF16, E4M3, BF16), dims=(20, 36), scales=(0.5, 0.25)),
        *(
            dict(lens=[200, 40], width=90, dtypes=(BF16, dtype, dtype), dims=dims, **scales)
            for dtype, dims in ((INT8, (80, 96)), (E4M3, (128, 128)), (E5M2, (12, 20)))
            for scales in (dict(queries=1, own=True), dict(queries=[1, 9], scales=(0.05, 0.03)))
        ),
    ):
        case = attention_case("cpu", **{"dtypes": (BF16,) * 3, **options})
        check(attention, case, TOLERANCE[case.query.dtype])


def attentions_on_hopper() -> None:
    """The kernel for many queries, by the copy engine (pages that are multiples of 8 tokens) and row by row."""
    if not attention_hopper.is_hopper(torch.device(DEVICE)):
        return
    ragged: dict[str, Any] = dict(lens=[37, 77, 133, 0, 150], queries=[37, 1, 100, 0, 5], spare_rows=3, heads=(8, 2))
    for options in (
        dict(ragged, page_size=16),
        dict(ragged, page_size=3, gap=16),
        dict(ragged, page_size=8, window=50, sinks=torch.randn(8), dims=(64, 128), tail=FAR, width=60),
        dict(ragged, page_size=1, window=50, softcap=3.0, dims=(64, 64), order="head_major", heads=(5, 1)),
        dict(ragged, page_size=544, causal=False, dims=(256, 256), dtypes=(F16,) * 3, index=torch.int64),
        dict(ragged, page_size=5, causal=False, window=9, dims=(256, 64), order="token_major", lens=[3, 0, 9, 7, 2]),
        dict(lens=[150, 300], queries=70, page_size=64, heads=(14, 2)),
    ):
        case = attention_case("cpu", **{"dtypes": (BF16,) * 3, "dims": (128, 128), **options})
        check(attention_hopper.attention, case, TOLERANCE[case.query.dtype])


def latent_attentions() -> None:
    """Rows of many widths by attention's kernel; on Hopper rows of 512 + 64 by their own, in boxes and row by row."""
    ragged: dict[str, Any] = dict(lens=[37, 77, 133, 0, 150], queries=[37, 1, 100, 0, 5], spare_rows=3)
    for options in (
        dict(lens=[13, 1, 30, 0], queries=1, dims=(40, 24)),
        dict(lens=[300, 40, 0], queries=1, page_size=16, width=64, dtypes=(F16, E4M3), scale=0.5, tail=FAR),
        dict(ragged, dims=(256, 32), dtypes=(BF16, BF16), page_size=3),
    ):
        case = mla_case("cpu", **options)
        check(mla_attention, case, TOLERANCE[case.query.dtype])
    if not attention_hopper.is_hopper(torch.device(DEVICE)):
        return
    for options in (
        dict(ragged, page_size=16, heads=16, tail=FAR, width=40),
        dict(ragged, page_size=1, heads=5, index=torch.int64, gap=16),
        dict(lens=[700, 64, 0], queries=1, page_size=64, heads=128, width=30),
        dict(ragged, page_size=8, heads=65, causal=False, dims=(256, 64), dtypes=(F16, F16)),
    ):
        case = mla_case("cpu", **{"dtypes": (BF16, BF16), "dims": (512, 64), **options})
        check(mla_hopper.mla_attention, case, TOLERANCE[case.query.dtype])


def merges_and_padding() -> None:
    """Parts of a softmax, of which some are empty, and rows behind the last query."""
    for dtype, dim in ((F32, 20), (BF16, 128), (F16, 7)):
        a, b = torch.randn(2, 7, 3, dim).to(dtype)
        lse_a, lse_b = torch.randn(2, 7, 3) * 5
        lse_a[2:4] = lse_b[3:5] = -torch.inf
        check(merge_attention, MergeAttention(a, lse_a, b, lse_b), TOLERANCE[dtype])
    memory = torch.randn(701, 3, 100)
    there = memory.to(DEVICE)
    zero_padding(there, torch.tensor([0, 5, 699], device=DEVICE))
    assert torch.equal(there.cpu(), torch.cat((memory[:699], torch.zeros(2, 3, 100))))


def whole_pages() -> None:
    """Words of 16 bytes down to 1, with gaps; pairs apart, cycles and chains; more ids than are compared one by one."""
    for page_bytes, base, gap in ((1 << 17, 0, 0), (65552, 64, 48), (120, 8, 8), (100, 0, 4), (6, 2, 0), (3001, 5, 1)):
        region = [base, page_bytes + gap, page_bytes, 9]
        buffer = torch.randint(0, 256, (base + 8 * region[1] + page_bytes,), dtype=torch.uint8)
        src, dst = torch.tensor([[8, 0, 3, -1, 5, 2], [0, 8, 1, 7, -1, 3]])
        for index in (torch.int32, torch.int64):
            check(copy_pages, CopyPages(buffer, src.to(index), dst.to(index), region))
            check(gather_pages, GatherPages(buffer, src.to(index), region))
        rows = torch.randint(0, 256, (6, page_bytes), dtype=torch.uint8)
        check(scatter_pages, ScatterPages(buffer, rows, dst, region))
        check(zero_pages, ZeroPages(buffer, dst[2:], region))
    buffer = torch.randint(0, 256, (5001 * 24,), dtype=torch.uint8)
    check(copy_pages, CopyPages(buffer, torch.randperm(5001), torch.arange(5001), [0, 24, 24, 5001]))


def tokens() -> None:
    """Slots moved within a pool, and pages of one layout written as another's."""
    for make, dims, dtype in (("page_major", (128, 80), BF16), ("token_major", (5, 3), INT8), ("BLHNC", (7, 7), F16)):
        pool = pool_of(make, dims, dtype)
        src, dst = torch.tensor([[14, 0, 3, -1, 5, 2], [0, 14, 1, 7, -1, 3]])
        check(copy_slots, CopySlots(pool.buffer, src, dst, pool.slot_runs, 3, pool.region))
        for other, size in (("page_major", 4), ("token_major", 16)):
            layout = getattr(pm_ops, other)(2, 2, dims[0], size, dtype, value_dim=dims[1])
            target = pm_ops.PagePool(layout, 5)
            table = pm_ops.RepackPlan(pool.layout, layout, heads=(1, 0, 2)).table(torch.device("cpu"))
            lists = torch.tensor([4, -1, 0, 2, 1]), torch.tensor([3, 0, 4, 1], dtype=torch.int32)
            call = RepackPages(pool.buffer, target.buffer, *lists, table, 14, 3, size, pool.region, target.region)
            check(repack_pages, call)


def pages_to_the_host() -> None:
    """Pages of odd sizes to pinned memory and back to others, by the kernel."""
    for make, dims, dtype in (("page_major", (128, 80), BF16), ("token_major", (5, 3), INT8), ("BLHNC", (7, 7), F16)):
        layout = pool_of(make, dims, dtype).layout
        pool = pm_ops.PagePool(layout, 5, DEVICE)
        pool.buffer.copy_(torch.randint(0, 256, pool.buffer.shape, dtype=torch.uint8))
        wanted = pool.buffer.cpu()
        wanted[: 2 * layout.page_bytes] = wanted[3 * layout.page_bytes :].clone()
        host = pm_ops.HostPool(pool, 3)
        saved = host.offload([4, 3], impl="kernel")
        host.restore(saved.pages, [1, 0], impl="kernel").synchronize()
        assert torch.equal(pool.buffer.cpu(), wanted)


def states() -> None:
    """Convolutions and Mamba-2: one token and several, a state a token; sequences that end around chunks; none."""
    for dtype, width in ((F32, 4), (F16, 2), (BF16, 3)):
        options: dict[str, Any] = dict(dtype=dtype, state_dtype=dtype, width=width, dim=133)
        check(conv1d_update, conv_update(4, **options), TOLERANCE[dtype])
        check(conv1d_update, conv_update(4, 3, per_token=True, index_dtype=torch.int64, **options), TOLERANCE[dtype])
        check(conv1d_prefill, conv_prefill([1, 2, 0, 33, 64, 31], **options), TOLERANCE[dtype])
        check(conv1d_update, conv_update(4, 3, **options | {"dim": 136}), TOLERANCE[dtype])
    for dtype, dims in ((F32, (12, 20)), (F16, (64, 128)), (BF16, (80, 16))):
        options = dict(dtype=dtype, dims=dims)
        tolerance = TOLERANCE[dtype] * 5  # sums of many more numbers than attention's, whose weights add up to 1
        check(selective_state_update, ssm_update(4, **options), tolerance)
        check(selective_state_update, ssm_update(4, 3, per_token=True, gate=False, **options), tolerance)
        check(scan_in_order, ssm_prefill([1, 65, 0, 63, 130, 64], **options), tolerance, "selective_scan_prefill")
    for dtype, dims in ((F16, (64, 128)), (BF16, (80, 16))):
        for lens in ([1, 129, 0, 127, 200], [1, 1300, 514]):  # in segments of a part of 512 at least
            case = ssm_prefill(lens, dtype=dtype, dims=dims)
            check(scan_in_chunks, case, TOLERANCE[dtype] * 5, "selective_scan_prefill")


def gated_delta() -> None:
    """One token and several, a state a token; sequences that end around chunks, none, and padding; both orders."""
    for dtype, dims in ((F32, (12, 20)), (F16, (64, 96)), (BF16, (128, 128)), (BF16, (64, 192))):
        for first in (True, False):
            options: dict[str, Any] = dict(dtypes=(dtype,) * 5, dims=dims, value_first=first)
            check(gated_delta_update, update_case(3, raw=first, **options), TOLERANCE[dtype])
            check(gated_delta_update, update_case(3, 3, each=True, index=torch.int64, **options), TOLERANCE[dtype])
            check(gated_delta_prefill, prefill_case([1, 4, 65, 0, 64, 63], raw=first, **options), TOLERANCE[dtype])


GROUPS: dict[str, Callable[[], None]] = {
    f.__name__: f
    for f in (
        rows_to_slots_and_back, rotations, attentions, attentions_on_hopper, latent_attentions, merges_and_padding,
        whole_pages, tokens, pages_to_the_host, states, gated_delta,
    )
}  # fmt: skip


def main(names: list[str]) -> None:
    launched: set[str] = set()
    knobs.runtime.launch_enter_hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    for name in names or GROUPS:
        torch.manual_seed(0)
        GROUPS[name]()
    torch.cuda.synchronize()
    print("launched", *sorted(launched))


if __name__ == "__main__":
    main(sys.argv[1:])
