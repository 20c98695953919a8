"""Every kernel compiles for Hopper, which the interpreter cannot tell; no GPU is needed to compile."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kernels.cases import KERNELS

ROOT = Path(__file__).parents[2]
SUMS_DIFFER = {"_selective_scan_prefill"}
"""Kernels of which :func:`sums_are_alike` is not true: of ``end``, the decay of a chunk of 32 rows, one a lane.

It is not stored itself: a lane takes its own ``end`` for its row's factor and for its part of the state. Other lanes
have no copies of these; other warps do, of the same lane, to the last bit.
"""


def python(task: str) -> set[str]:
    """Run a task of this file in a process of its own, since this one may have imported triton as an interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    run = subprocess.run([sys.executable, __file__, task], env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.fail(run.stdout + run.stderr)
    return set(run.stdout.split("\n")) - {""}


def test_every_kernel_compiles_for_sm_90():
    assert {line.split()[0] for line in python("compile")} == KERNELS


def test_layers_and_batch_sizes_share_compiled_kernels():
    """Over three layers and six numbers of tokens: attention with and without splits, and one of every other kernel.

    Once in bf16, and once in int8 with a scale for each token and head.
    """
    variants = [line.split()[0] for line in python("variants")]
    assert sorted(variants) == ["_attention"] * 4 + ["_merge_splits"] + ["_store_kv"] * 2


def instead_of_launching(compile_kernels: bool) -> set[str]:
    """From now on a launch notes its kernel and specialisation in the set that is returned, and may compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import JITFunction, create_function_from_signature

    target = GPUTarget("cuda", 90, 32)
    seen: set[str] = set()

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        backend = make_backend(target)
        names = ("num_warps", "num_stages", "enable_fp_fusion", "maxnreg")
        options = {name: kwargs.pop(name) for name in names if name in kwargs}
        bound, specialization, _ = create_function_from_signature(self.signature, self.params, backend)(*args, **kwargs)
        seen.add(f"{self.__name__} {specialization} {options}")
        if compile_kernels:
            _, signature, constants, attributes = self._pack_args(backend, options, bound, specialization, {})
            source = GluonASTSource if self.is_gluon() else ASTSource
            made = triton.compile(source(self, signature, constants, attributes), target=target, options=options)
            check_arrivals(made.asm["ptx"])
            assert self.__name__ in SUMS_DIFFER or sums_are_alike(made.asm["ptx"]), self.__name__
            # Triton 3.6's products of whole warp groups read outside of shared memory in a loop that has one stage
            assert self.is_gluon() or made.metadata.num_stages > 1 or "wgmma" not in made.asm["ptx"], self.__name__

    JITFunction.run = run
    return seen


def check_arrivals(ptx: str) -> None:
    """Where one thread arrives at an mbarrier for others, they all have met it since they used shared memory.

    Gluon does not say so; `gluon_clocks.py` takes it as given.
    """
    of_each, uses = r"mbarrier\.arrive\.(noinc|expect_tx)", r"mbarrier\.arrive|shared|matrix|wgmma|bar\.(warp\.)?sync"
    lines = [line for line in ptx.splitlines() if re.search(uses, line) and not re.search(of_each, line)]
    for before, line in itertools.pairwise(lines):
        assert "mbarrier.arrive" not in line or re.search(r"bar\.(warp\.)?sync", before), (before, line)


def sums_are_alike(ptx: str) -> bool:
    """Whether no lane adds a product of its own, unrounded, to what it gets of another lane's.

    Else the lanes' copies of a sum differ in their last bit, and racecheck reports where one of them is stored.
    """
    exchanged = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+),", ptx))
    return exchanged.isdisjoint(re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx))


def test_sums_that_differ_by_lane_are_found():
    exchange = "shfl.sync.bfly.b32 \t%r2, %r1, 16, 31, -1;"
    assert sums_are_alike("\n".join([exchange, "add.f32 %r3, %r1, %r2;"]))
    assert sums_are_alike("\n".join([exchange, "fma.rn.f32 \t%r3, %r4, %r4, %r5;"]))
    assert not sums_are_alike("\n".join([exchange, "fma.rn.f32 \t%r3, %r4, %r4, %r2;"]))


def test_arrivals_without_a_barrier_are_found():
    arrive, store = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];", "st.shared.b32 [%r2], %r3;"
    check_arrivals("\n".join([store, "bar.sync 0, 128;", "add.f32 %r4, %r4, %r4;", arrive]))
    check_arrivals("\n".join([store, "mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 9;"]))
    for use in (store, "wgmma.wait_group.sync.aligned 0;", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2];"):
        with pytest.raises(AssertionError):
            check_arrivals("\n".join(["bar.sync 0, 128;", use, arrive]))


def launch_every_kernel() -> None:
    import torch
    from kernels.cases import attention_case, pages
    from kernels.mla_cases import mla_case
    from kernels.test_rope import rope_case

    from pm_ops.kernels import attention_hopper, mla_hopper
    from pm_ops.kernels.attention import attention
    from pm_ops.kernels.merge import merge_attention
    from pm_ops.kernels.mla import mla_attention
    from pm_ops.kernels.padding import zero_padding
    from pm_ops.kernels.pages import copy_pages, copy_slots, gather_pages, zero_pages
    from pm_ops.kernels.repack import repack_pages
    from pm_ops.kernels.rope import rope_store_kv
    from pm_ops.kernels.store import load_kv, store_kv
    from pm_ops.kernels.transfer import move_pages
    from pm_ops.ops.merge import MergeAttention
    from pm_ops.ops.pages import CopyPages, CopySlots, GatherPages, ZeroPages
    from pm_ops.ops.repack import RepackPages
    from pm_ops.ops.store import LoadKV, StoreKV
    from pm_ops.transfer_queue import MovePages

    f32, f16, bf16, e4m3, e5m2 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
    attention(attention_case("cpu", [64], 1, dtypes=(bf16, bf16, bf16), dims=(64, 64), width=64))  # split
    attention(attention_case("cpu", [3, 64], [3, 64], dtypes=(f16, e4m3, e5m2), dims=(80, 80), spare_rows=1))
    attention(attention_case("cpu", [3], 3, dtypes=(f32, f32, bf16), dims=(32, 16), window=3, sinks=torch.zeros(4)))
    bias = {"bias": torch.ones(1, 1, 1, 8, dtype=torch.bool), "alibi_slopes": torch.ones(4), "softcap": 2.0}
    attention(attention_case("cpu", [8], [8], dtypes=(bf16, e4m3, e4m3), dims=(32, 32), **bias))
    for dtypes in ((bf16, torch.int8, torch.int8), (f16, e5m2, e5m2), (f32, e4m3, torch.int8)):
        attention(attention_case("cpu", [64], 1, dtypes=dtypes, own=True))
        attention(attention_case("cpu", [3, 64], [3, 64], dtypes=dtypes, own=True, window=9))
    attention(attention_case("cpu", [3], 1, dtypes=(bf16, torch.int8, torch.int8), scales=(0.1, 0.1)))

    hopper = dict(page_size=16, dtypes=(bf16, bf16, bf16))
    attention_hopper.attention(attention_case("cpu", [40, 0], [9, 1], dims=(128, 128), **hopper))
    attention_hopper.attention(attention_case("cpu", [40], 40, dims=(64, 128), window=3, softcap=2.0, **hopper))
    for gap in (0, 16):  # 16 bytes are no multiple of 16 elements
        by_row = hopper | {"page_size": 1, "gap": gap}
        attention_hopper.attention(attention_case("cpu", [40, 0], [9, 1], dims=(128, 128), **by_row))
    attention_hopper.attention(
        attention_case("cpu", [40], 40, dims=(256, 256), causal=False, window=3, sinks=torch.zeros(4), **hopper)
    )

    latent = dict(dims=(512, 64), dtypes=(bf16, bf16), heads=128)
    mla_attention(mla_case("cpu", [3], 1, **latent))
    mla_attention(mla_case("cpu", [3, 64], [3, 64], dims=(32, 16), dtypes=(f16, e4m3), scale=0.5))
    mla_hopper.mla_attention(mla_case("cpu", [40], 1, **latent, page_size=64))
    for gap in (0, 16):
        options = dict(page_size=1, causal=False, width=999, gap=gap)
        mla_hopper.mla_attention(mla_case("cpu", [40, 300], [9, 1], **latent, **options))

    slots = torch.arange(4)
    for source, dtype in ((f32, f32), (bf16, e4m3), (f16, bf16), (torch.float64, f16), (bf16, e5m2)):
        pool = pages("page_major", 4, 2, 1, dict.fromkeys(("key", "value"), (2, 20, dtype.itemsize)))
        planes = pool.planes[0, "key"], pool.planes[0, "value"]
        rows = torch.zeros(4, 2, 20).to(source)
        store_kv(StoreKV(pool.buffer, rows, rows, slots, *planes, 4, dtype, dtype, key_scale=0.5))
        store_kv(StoreKV(pool.buffer, None, rows, slots, None, planes[1], 4, None, dtype))
        load_kv(LoadKV(pool.buffer, slots, planes[0], 4, 2, 20, dtype))
        load_kv(LoadKV(pool.buffer, slots, planes[0], 4, 2, 20, dtype, out_dtype=bf16, scale_tensor=torch.ones(1)))
    for source, dtype in ((bf16, torch.int8), (f16, e4m3), (f32, e5m2)):
        kinds = dict.fromkeys(("key", "value"), (2, 20, 1)) | {f"{k}_scale": (2, 1, 4) for k in ("key", "value")}
        pool = pages("page_major", 4, 6, 1, kinds)
        planes = {f"{kind}_plane": pool.planes[0, kind] for kind in kinds}
        types = {"page_size": 4, "key_dtype": dtype, "value_dtype": dtype}
        own, rows = pool.planes[0, "key_scale"], torch.zeros(4, 2, 20).to(source)
        store_kv(StoreKV(pool.buffer, rows, rows, slots, **planes, **types))
        load_kv(LoadKV(pool.buffer, slots, planes["key_plane"], 4, 2, 20, dtype, out_dtype=bf16, scale_plane=own))
        rope = rope_case(heads=(4, 2, 2), dims=(20, 12, 20), rows=(source,) * 3, slots=[0, 1])
        rope_store_kv(dataclasses.replace(rope, buffer=pool.buffer, **planes, **types))
    rope_store_kv(rope_case(rows=(bf16,) * 3, planes=(bf16, bf16)))
    merge_attention(MergeAttention(rows, rows[..., 0].float(), rows, rows[..., 0].float()))
    zero_padding(rows, slots[:3].int())
    gather_pages(GatherPages(pool.buffer, slots[:2], pool.region))
    zero_pages(ZeroPages(pool.buffer, slots[:2].int(), pool.region))
    copy_pages(CopyPages(pool.buffer, slots[:2], slots[:2].flip(0), pool.region))
    copy_slots(CopySlots(pool.buffer, slots, slots, torch.tensor([[0, 40, 40]]), 4, pool.region))
    for page_bytes in (1 << 16, 20):
        move_pages(MovePages(pool.buffer, pool.buffer, slots.view(2, 2), (0, 0), (page_bytes,) * 2, page_bytes, True))
        move_pages(MovePages(pool.buffer, pool.buffer, slots.view(2, 2), (0, 4), (page_bytes,) * 2, page_bytes, False))
    other = pages("token_major", 4, 6, 1, kinds)
    regions = (pool.region, other.region)
    for dtypes in ((), (bf16, f32), (e4m3, bf16), (e5m2, f16)):
        table = torch.zeros(3, 6).long()
        repack_pages(RepackPages(pool.buffer, other.buffer, slots, slots, table, 15, 4, 4, *regions, *dtypes))
    launch_every_state_kernel()
    launch_every_gated_delta_kernel()


def launch_every_state_kernel() -> None:
    import torch
    from state_cases import conv_prefill, conv_update, ssm_prefill, ssm_update

    from pm_ops import kernels
    from pm_ops.kernels.conv import conv1d_prefill, conv1d_update
    from pm_ops.kernels.selective_chunks import scan_in_chunks
    from pm_ops.kernels.selective_scan import scan_in_order
    from pm_ops.kernels.selective_update import selective_state_update

    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for dtype, state, width in ((f32, f32, 2), (bf16, bf16, 4), (f16, f32, 3)):
        options = {"dtype": dtype, "state_dtype": state, "width": width}
        conv1d_update(conv_update(2, **options))
        conv1d_update(conv_update(2, 3, per_token=True, **options))
        conv1d_update(conv_update(2, 3, dim=24, **options))
        conv1d_prefill(conv_prefill([3, 2], **options))
    for dtype, state, dims in ((f32, f32, (12, 20)), (bf16, f32, (64, 128)), (f16, bf16, (80, 256))):
        options = {"dtype": dtype, "state_dtype": state, "dims": dims}
        selective_state_update(ssm_update(2, **options))
        selective_state_update(ssm_update(2, 3, per_token=True, gate=False, **options))
        scan_in_order(ssm_prefill([3, 2], **options))
    kernels.selective_chunks.multiprocessors = lambda device: 132
    for dtype, state, dims in ((bf16, f32, (64, 128)), (f16, f16, (80, 96)), (bf16, bf16, (12, 20))):
        options = {"dtype": dtype, "state_dtype": state, "dims": dims}
        scan_in_chunks(ssm_prefill([3, 700], heads=(16, 2), **options))
        scan_in_chunks(ssm_prefill([3, 2], gate=False, initial=False, D=None, **options))


def launch_every_gated_delta_kernel() -> None:
    import torch
    from gated_delta_cases import prefill_case, update_case

    from pm_ops import kernels
    from pm_ops.kernels.gated_delta import gated_delta_update
    from pm_ops.kernels.gated_delta_prefill import gated_delta_prefill

    kernels.gated_delta_prefill.is_hopper = lambda device: True
    kernels.gated_delta_prefill.multiprocessors = lambda device: 132
    f32, f16, bf16 = torch.float32, torch.float16, torch.bfloat16
    for dtype, state, dims in ((f32, f32, (12, 20)), (bf16, f32, (128, 128)), (f16, bf16, (80, 256))):
        options = {"dtypes": (dtype,) * 5, "state_dtype": state, "dims": dims, "raw": dtype == bf16}
        gated_delta_update(update_case(2, **options))
        gated_delta_update(update_case(2, 3, each=True, l2_norm=False, value_first=False, **options))
        gated_delta_prefill(prefill_case([3, 2], **options))
    gated_delta_prefill(prefill_case([3], initial=False, l2_norm=False, value_first=False, dtypes=(f16,) * 5))
    for heads, dims in ((1, (128, 128)), (140, (128, 128)), (1, (256, 256))):
        for dtype in (bf16, f32):
            gated_delta_prefill(prefill_case([3], heads=(heads, 1), dims=dims, dtypes=(dtype,) * 5))


def decode_at_several_layers_and_batch_sizes() -> None:
    import torch
    from kernels.cases import pages

    from pm_ops import PagePool, page_major
    from pm_ops.kernels.attention import attention
    from pm_ops.kernels.store import store_kv
    from pm_ops.ops.attention import Attention
    from pm_ops.ops.store import StoreKV

    bf16 = torch.bfloat16
    pool = pages("page_major", 16, 4, 3, {"key": (8, 128, 2), "value": (8, 128, 2)})
    for layer in range(3):
        planes = pool.planes[layer, "key"], pool.planes[layer, "value"]
        for tokens in (1, 2, 3, 7, 8, 16):
            qkv = torch.zeros(tokens, 48, 128, dtype=bf16)
            query, key, value = qkv.split([32, 8, 8], 1)
            store_kv(StoreKV(pool.buffer, key, value, torch.arange(tokens), *planes, 16, bf16, bf16))
            table, lens = torch.zeros(tokens, 1024, dtype=torch.int32), torch.ones(tokens, dtype=torch.int32)
            attention(
                Attention(pool.buffer, query, table, lens, None, *planes, 16, 8, 128, bf16, bf16, softmax_scale=1.0)
            )

    layout = page_major(3, 8, 128, 16, torch.int8, scales=True)
    scaled, types = PagePool(layout, 4), {"page_size": 16, "key_dtype": torch.int8, "value_dtype": torch.int8}
    for layer in range(3):
        kinds = ("key", "value", "key_scale", "value_scale")
        own = {f"{kind}_plane": scaled.geometry(layer, kind) for kind in kinds}
        for tokens in (1, 2, 3, 7, 8, 16):
            query, key, value = torch.zeros(tokens, 48, 128, dtype=bf16).split([32, 8, 8], 1)
            store_kv(StoreKV(scaled.buffer, key, value, torch.arange(tokens), **own, **types))
            table, lens = torch.zeros(tokens, 1024, dtype=torch.int32), torch.ones(tokens, dtype=torch.int32)
            rows = (scaled.buffer, query, table, lens, None)
            attention(Attention(*rows, **own, **types, kv_heads=8, value_dim=128, softmax_scale=1.0))


if __name__ == "__main__":
    found = instead_of_launching(compile_kernels=sys.argv[1] == "compile")
    if sys.argv[1] == "compile":
        launch_every_kernel()
    else:
        decode_at_several_layers_and_batch_sizes()
    print(*found, sep="\n")
