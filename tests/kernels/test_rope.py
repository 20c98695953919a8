"""The rope_store_kv kernel against a float64 formula, the byte formula, and the chain of separate operators."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from kernels.cases import NAN_BYTE, check_bytes, moved_with_strides, on_each_device, pages
from torch import Tensor

from pm_ops.kernels.rope import rope_store_kv
from pm_ops.kernels.store import store_kv
from pm_ops.ops.rope import RopeStoreKV

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDING = {F32: 2e-6, F16: 1.02 * 2**-11, BF16: 1.02 * 2**-8}
"""Relative error of one rounding; more than one would not pass."""
Run = Callable[[RopeStoreKV], tuple[Tensor, Tensor]]


def table_of(rotary: int, positions: int = 40, dtype: torch.dtype = F32) -> Tensor:
    """Cosines, then sines, of positions times frequencies, in columns of a wider tensor."""
    angles = torch.arange(positions)[:, None] * 10000.0 ** -(torch.arange(rotary // 2) / (rotary // 2))
    wide = torch.full((positions, rotary + 16), torch.nan, dtype=dtype)
    wide[:, :rotary] = torch.cat((angles.cos(), angles.sin()), 1).to(dtype)
    return wide[:, :rotary]


def rope_case(
    tokens: int = 7,
    heads: tuple[int, int, int] = (5, 2, 3),
    dims: tuple[int, int, int] = (24, 24, 20),
    *,
    rows: Sequence[torch.dtype] = (F32, F32, F32),
    planes: Sequence[torch.dtype] = (F32, F32),
    order: str = "page_major",
    page_size: int = 4,
    num_pages: int = 6,
    slots: Sequence[int] | None = None,
    index: torch.dtype = torch.int64,
    norm: bool = False,
    table: torch.dtype = F32,
    **options: Any,
) -> RopeStoreKV:
    """A call on the CPU, over a pool of random bytes. ``dims``: head_dim, rotary_dim, value_dim; ``rows``, ``planes``:
    the dtypes of query, key and value, and of the cache.

    By default some slots are skipped or past the end, and the last rows have none.
    """
    dim, rotary, value_dim = dims
    pool = pages(
        order,
        page_size,
        num_pages,
        3,
        {"key": (heads[1], dim, planes[0].itemsize), "value": (heads[2], value_dim, planes[1].itemsize)},
        base=64,
        gap=32,
    )
    if slots is None:
        slots = torch.randperm(pool.num_slots)[: max(tokens - 2, 0)].tolist()
        slots[1:4] = [-1, pool.num_slots, 2**31 - 1][: len(slots[1:4])]
    if norm:
        weights = torch.randn(dim, 2).unbind(1)
        options = {"q_weight": weights[0], "k_weight": weights[1].to(BF16), **options}
    return RopeStoreKV(
        pool.buffer,
        torch.randn(tokens, heads[0], dim).to(rows[0]),
        torch.randn(tokens, heads[1], dim).to(rows[1]),
        torch.randn(tokens, heads[2], value_dim).to(rows[2]),
        torch.randint(40, (tokens,), dtype=index),
        table_of(rotary, dtype=table),
        torch.tensor(slots, dtype=index),
        pool.planes[1, "key"],
        pool.planes[1, "value"],
        page_size,
        *planes,
        **options,
    )


def to(case: RopeStoreKV, device: str) -> RopeStoreKV:
    """The call on a device, over a copy of the pool."""
    fields = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    moved = {k: moved_with_strides(v, device) if isinstance(v, Tensor) else v for k, v in fields.items()}
    return RopeStoreKV(**moved | {"buffer": case.buffer.to(device, copy=True)})


def formula(case: RopeStoreKV, x: Tensor, weight: Tensor | None) -> Tensor:
    """Norm and rotation in float64: a pair is a complex number, which is multiplied by cos + i sin."""
    y = x.double().numpy()
    if weight is not None:
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + case.eps) * (case.weight_offset + weight.double().numpy())
    half = case.cos_sin.shape[1] // 2
    turn = np.array([complex(*case.cos_sin[p, [i, i + half]].tolist()) for p in case.positions for i in range(half)])
    first = [2 * i if case.interleaved else i for i in range(half)]
    second = [2 * i + 1 if case.interleaved else i + half for i in range(half)]
    turned = (y[..., first] + 1j * y[..., second]) * turn.reshape(-1, 1, half)
    out = y.copy()
    out[..., first], out[..., second] = turned.real, turned.imag
    return torch.from_numpy(out)


def check_rope(case: RopeStoreKV, run: Run, device: str = "cpu") -> None:
    """Query and key are the formula's, rounded once; the pool holds that key and the value; nothing else changed."""
    there = to(case, device)
    inputs = [there.query.clone(), there.key.clone(), there.value.clone()]
    query, key = run(dataclasses.replace(there, return_key=True))
    for before, after in zip(inputs, (there.query, there.key, there.value), strict=True):
        assert torch.equal(before, after)
    for got, x, weight in ((query, case.query, case.q_weight), (key, case.key, case.k_weight)):
        assert got.dtype == x.dtype and got.shape == x.shape and got.is_contiguous()
        torch.testing.assert_close(
            got.cpu().double(), formula(case, x, weight), rtol=ROUNDING[x.dtype], atol=4e-6, check_dtype=False
        )
    expected, touched, size = case.buffer.clone(), set(), case.page_size
    scales = [s if t is None else t.item() for s, t in zip(*scales_of(case), strict=True)]
    for plane, dtype, rows, scale in (
        (case.key_plane, case.key_dtype, key.cpu(), scales[0]),
        (case.value_plane, case.value_dtype, case.value, scales[1]),
    ):
        touched |= oracle.store(expected, plane, size, dtype, rows, case.slots.tolist(), scale)
    check_bytes(case.buffer, there.buffer, expected, touched)

    again = to(case, device)
    same, none = run(again)
    assert torch.equal(same, query) and none.shape == (0,) and none.dtype == key.dtype
    assert torch.equal(again.buffer, there.buffer)


def scales_of(case: RopeStoreKV) -> tuple[Sequence[float], Sequence[Tensor | None]]:
    return (case.key_scale, case.value_scale), (case.key_scale_tensor, case.value_scale_tensor)


def unfused(case: RopeStoreKV) -> tuple[Tensor, Tensor]:
    """The rotation as models write it, in float32, and the cast: query and key."""
    cos, sin = case.cos_sin[case.positions].float()[:, None].chunk(2, -1)
    cos, sin = (x.repeat_interleave(2, -1) if case.interleaved else torch.cat((x, x), -1) for x in (cos, sin))
    results = []
    for x in (case.query, case.key):
        turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
        turned = turned.float()
        if case.interleaved:
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            other = torch.cat((-second, first), -1)
        results.append(torch.cat(((turned * cos + other * sin).to(x.dtype), rest), -1))
    return results[0], results[1]


@on_each_device
@pytest.mark.parametrize(("order", "page_size"), [("page_major", 1), ("page_major", 16), ("token_major", 3)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_key_and_value_reach_their_slots_and_every_row_is_rotated(device, order, page_size, index):
    check_rope(rope_case(order=order, page_size=page_size, num_pages=12, index=index), rope_store_kv, device)


SHAPES = {  # heads of query, key and value; head_dim, rotary_dim, value_dim
    "llama": ((8, 2, 2), (128, 128, 128)),
    "phi": ((4, 4, 4), (80, 32, 80)),
    "neox": ((3, 3, 3), (96, 24, 96)),
    "odd heads": ((7, 3, 3), (40, 20, 16)),
    "one pair": ((2, 1, 1), (8, 2, 8)),
    "one key head": ((5, 1, 1), (64, 64, 64)),
    "a value of its own dim": ((4, 2, 2), (48, 48, 32)),
    "wide": ((2, 1, 1), (256, 128, 256)),
}


@on_each_device
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_both_styles_rotate_any_dims_and_heads(device, shape, interleaved):
    """One style with norm, the other without; the reverse is below, at one shape."""
    check_rope(rope_case(5, *SHAPES[shape], interleaved=interleaved, norm=interleaved), rope_store_kv, device)


@on_each_device
@pytest.mark.parametrize(
    ("rows", "table"), [((F16,) * 3, BF16), ((F32, F16, F16), F16), ((F16, F32, F32), F64)], ids=str
)
@pytest.mark.parametrize("planes", [(F16, F16), (F16, F32)], ids=str)
def test_rows_planes_and_table_may_differ_in_dtype_and_each_result_is_rounded_once(device, rows, planes, table):
    check_rope(rope_case(rows=rows, planes=planes, table=table), rope_store_kv, device)


@on_each_device
@pytest.mark.parametrize(("dims", "scale"), [((24, 24, 24), 1.0), ((24, 12, 24), 0.37)], ids=["whole", "partial"])
@pytest.mark.parametrize("dtype", [F32, F16, pytest.param(BF16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_the_result_is_bit_equal_to_rotating_in_float32_casting_and_storing(device, dims, dtype, scale, interleaved):
    case = rope_case(
        40, (5, 2, 2), dims, rows=(dtype,) * 3, planes=(dtype,) * 2, num_pages=15, interleaved=interleaved,
        key_scale=scale, value_scale=scale, return_key=True,
    )  # fmt: skip
    fused, chain = to(case, device), to(case, device)
    query, key = unfused(chain)
    store_kv(chain.store_of(key))
    got = rope_store_kv(fused)
    assert torch.equal(got[0], query) and torch.equal(got[1], key)
    assert torch.equal(fused.buffer, chain.buffer)


@on_each_device
def test_rows_may_be_slices_of_a_fused_qkv_or_strided_in_every_axis(device):
    case = rope_case(heads=(4, 2, 2), dims=(16, 16, 16), norm=True)
    qkv = torch.randn(7, 8, 16)
    query, key, value = qkv.split([4, 2, 2], 1)
    check_rope(dataclasses.replace(case, query=query, key=key, value=value), rope_store_kv, device)
    turned = torch.randn(16, 8, 14)[..., ::2].permute(2, 1, 0)
    wide = torch.randn(40, 32)[:, ::2]
    weight = torch.randn(32)[::2]
    strided = {"query": turned[:, :4], "key": turned[:, 4:6], "value": turned[:, 6:], "q_weight": weight}
    index = {"positions": torch.randint(40, (7, 2))[:, 0], "slots": torch.tensor([[5, 0], [2, 0], [-1, 0]])[:, 0]}
    check_rope(dataclasses.replace(case, cos_sin=wide, **strided, **index), rope_store_kv, device)


@on_each_device
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_the_norms_factor_is_offset_plus_weight(device, offset, eps):
    case = rope_case(norm=True, weight_offset=offset, eps=eps)
    case.key *= 100
    check_rope(case, rope_store_kv, device)


@on_each_device
def test_stored_is_the_rotated_key_over_its_scale_given_as_a_number_or_a_tensor(device):
    check_rope(rope_case(planes=(F32, F16), key_scale=0.37, value_scale=3.0), rope_store_kv, device)
    tensors = {"key_scale_tensor": torch.tensor([0.37]), "value_scale_tensor": torch.tensor(3.0)}
    check_rope(rope_case(planes=(F32, F16), rows=(F16,) * 3, **tensors), rope_store_kv, device)


@on_each_device
@pytest.mark.parametrize(
    ("tokens", "slots"), [(0, []), (1, []), (3, []), (3, [-1, -1, -1]), (1, [5]), (3, [3, -1, -1])]
)
def test_rows_without_a_slot_are_rotated_and_write_nothing(device, tokens, slots):
    check_rope(rope_case(tokens, slots=slots), rope_store_kv, device)


@on_each_device
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_without_positions_every_token_has_its_own_row_of_the_table(device, interleaved):
    case = rope_case(33, interleaved=interleaved, norm=True)
    given = dataclasses.replace(case, cos_sin=case.cos_sin[case.positions], positions=torch.arange(33))
    expected, bare = to(given, device), to(dataclasses.replace(given, positions=None), device)
    assert torch.equal(rope_store_kv(bare)[0], rope_store_kv(expected)[0])
    assert torch.equal(bare.buffer, expected.buffer)


@on_each_device
def test_many_tokens_take_many_programs_the_last_of_them_in_part(device):
    case = rope_case(601, (2, 1, 1), (24, 16, 24), planes=(F16, F16), page_size=16, num_pages=40)
    check_rope(case, rope_store_kv, device)


@on_each_device
def test_rows_without_a_slot_may_hold_anything_and_have_positions_that_the_table_has_not(device):
    """They are read all the same, with the others."""
    case = rope_case(6, slots=[5, -1, 2, 2**31 - 1])
    expected = to(case, device)
    rope_store_kv(expected)
    case.key[[1, 3, 4, 5]], case.value[[1, 3, 4, 5]] = torch.nan, torch.inf
    case.positions = case.positions.long()
    case.positions[[1, 3, 4, 5]] = torch.tensor([40, -1, 2**40, -(2**40)])
    there = to(case, device)
    rope_store_kv(there)
    assert torch.equal(there.buffer, expected.buffer)
    assert not torch.equal(there.buffer.cpu(), case.buffer)


@on_each_device
def test_a_position_that_the_table_has_not_gives_nan_and_writes_nothing_outside_the_slots(device):
    """Without checks, as in a server: no address is made from it."""
    positions = [3, 40, -1, 2**40, -(2**40), 7]
    case = rope_case(6, dims=(24, 16, 20), slots=[5, 9, 2, -1, 11, 0], return_key=True)
    case.positions = torch.tensor(positions)
    there = to(case, device)
    query, key = rope_store_kv(there)
    good = to(dataclasses.replace(case, positions=case.positions.clamp(0, 39)), device)
    expected = rope_store_kv(good)
    for got, want in zip((query, key), expected, strict=True):
        assert torch.equal(got[[0, 5]], want[[0, 5]])
        assert torch.equal(got[..., 16:], want[..., 16:])
        assert got[1:5, :, :16].isnan().all()
    buffer = case.buffer.clone()
    touched = oracle.store(buffer, case.key_plane, 4, F32, key.cpu(), case.slots.tolist())
    touched |= oracle.store(buffer, case.value_plane, 4, F32, case.value, case.slots.tolist())
    mask = torch.ones(len(buffer), dtype=torch.bool)
    mask[list(touched)] = False
    assert torch.equal(there.buffer.cpu()[mask], case.buffer[mask])


@on_each_device
def test_the_smaller_of_two_planes_bounds_the_slots(device):
    """A slot that only the key's plane has is not half written."""
    case = rope_case(3, slots=[5, 13, 2])
    case.value_plane = [*case.value_plane[:4], 3]
    there, without = to(case, device), to(dataclasses.replace(case, slots=torch.tensor([5, -1, 2])), device)
    rope_store_kv(there)
    rope_store_kv(without)
    assert torch.equal(there.buffer, without.buffer)


# -- what only a GPU can show ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("planes", [(BF16, BF16), (E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_bf16_rows_into_bf16_and_fp8_planes(shape, interleaved, planes):
    """fp8 saturates: the second token's key and value are far past its range."""
    case = rope_case(
        9, *SHAPES[shape], rows=(BF16,) * 3, planes=planes, interleaved=interleaved, norm=interleaved, table=BF16,
        slots=[5, 9, 2, -1, 11, 0], key_scale=0.37,
    )  # fmt: skip
    case.key[1] *= 2.0**18
    case.value[1] *= 2.0**18
    check_rope(case, rope_store_kv, "cuda")


@pytest.mark.gpu
def test_it_replays_in_a_cuda_graph_and_never_synchronises():
    """Captured once, replayed with other rows, positions and slots."""
    case = rope_case(6, rows=(BF16,) * 3, planes=(BF16, E4M3), norm=True, slots=[5, 9, 2, -1, 11, 0], return_key=True)
    there = to(case, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles
        rope_store_kv(there)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rope_store_kv(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = rope_store_kv(there)
    for step in range(3):
        there.query.normal_()
        there.key.normal_()
        there.value.normal_()
        there.positions.add_(step).remainder_(40)
        there.slots.copy_(torch.randperm(24)[:6])
        eager = dataclasses.replace(there, buffer=there.buffer.clone())
        graph.replay()
        expected = rope_store_kv(eager)
        assert torch.equal(there.buffer, eager.buffer)
        assert all(torch.equal(got, want) for got, want in zip(results, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rows_past_2_to_the_31_elements_are_stored_past_2_to_the_32_bytes(index):
    """The last of 100000 tokens, 192 heads x 128 in and 176 out, into the last ones of 2050 pages of 2 MiB."""
    tokens, page_bytes, block = 100_000, 1 << 21, 16 * 8 * 128 * 2
    qkv = torch.zeros(tokens, 192, 128, device="cuda", dtype=BF16)
    qkv[-5:].normal_()
    query, key, value = qkv.split([176, 8, 8], 1)
    buffer = torch.full((2050 * page_bytes,), NAN_BYTE, dtype=torch.uint8, device="cuda")
    planes = [[page_bytes - n * block, page_bytes, 2048, 256, 2050] for n in (2, 1)]
    slots = torch.full((tokens,), -1, dtype=index, device="cuda")
    slots[-5:] = torch.tensor([2049 * 16 + 3, 2048 * 16, 2047 * 16 + 15, -1, 2048 * 16 + 1], device="cuda")
    positions = torch.randint(40, (tokens,), dtype=index, device="cuda")
    case = RopeStoreKV(
        buffer, query, key, value, positions, table_of(128).cuda(), slots, *planes, 16, BF16, BF16, return_key=True
    )
    results = rope_store_kv(case)
    end = dataclasses.replace(
        case, query=query[-5:], key=key[-5:], value=value[-5:], positions=positions[-5:], slots=slots[-5:]
    )
    expected = unfused(end)
    assert all(torch.equal(got[-5:], want) for got, want in zip(results, expected, strict=True))
    compact = torch.full((3 * page_bytes,), NAN_BYTE, dtype=torch.uint8)
    near = [slot - 2047 * 16 for slot in slots[-5:].tolist()]
    for plane, rows in zip(planes, (expected[1], value[-5:]), strict=True):
        oracle.store(compact, [*plane[:4], 3], 16, BF16, rows.cpu(), near)
    assert torch.equal(buffer[2047 * page_bytes :].cpu(), compact)
    assert (buffer[: 2047 * page_bytes] == NAN_BYTE).all()


# -- compilation, which needs no GPU -----------------------------------------------------------------------------------


def test_every_variant_compiles_for_sm_90_without_fused_products_and_layers_and_batch_sizes_share_one():
    """In a process of its own, since this one may have imported triton as an interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), str(root / "tests")])
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def compile_variants() -> None:
    import triton
    from kernels.test_compile import instead_of_launching

    compile_for = triton.compile

    def compile_checked(source: Any, target: Any, options: dict[str, Any]) -> Any:
        compiled = compile_for(source, target=target, options=options)
        assert ".f32" in compiled.asm["ptx"] and "fma.rn.f32" not in compiled.asm["ptx"]
        return compiled

    triton.compile = compile_checked
    seen = instead_of_launching(compile_kernels=True)
    half = {"rows": (F16, F16, F16), "planes": (F16, E5M2), "table": F64}
    rope_store_kv(rope_case(**half, heads=(7, 3, 3), dims=(96, 24, 80), interleaved=True, norm=True, return_key=True))
    rope_store_kv(rope_case(rows=(F32, F32, E4M3), planes=(F32, BF16), key_scale=0.5, dims=(80, 32, 80), norm=True))
    scales = {"key_scale_tensor": torch.ones(1), "value_scale_tensor": torch.ones(1)}
    rope_store_kv(rope_case(601, rows=(BF16,) * 3, planes=(E4M3, E4M3), num_pages=200, **scales, interleaved=True))

    own = rope_case(rows=(BF16,) * 3, planes=(E4M3, torch.int8), heads=(4, 2, 2), norm=True, slots=[0, 1])
    planes = {f"{kind}_scale_plane": getattr(own, f"{kind}_plane") for kind in ("key", "value")}  # of any bytes
    rope_store_kv(dataclasses.replace(own, **planes))

    seen.clear()
    case = rope_case(16, (32, 8, 8), (128, 128, 128), rows=(BF16,) * 3, planes=(BF16, BF16), page_size=16)
    for layer in range(3):
        planes = [[plane[0] + layer * 65536, *plane[1:]] for plane in (case.key_plane, case.value_plane)]
        for tokens in (1, 2, 3, 7, 8, 16):
            query, key, value = torch.zeros(tokens, 48, 128, dtype=BF16).split([32, 8, 8], 1)
            rows = {"query": query, "key": key, "value": value, "positions": case.positions[:tokens]}
            slots = {"slots": torch.arange(tokens), "key_plane": planes[0], "value_plane": planes[1]}
            rope_store_kv(dataclasses.replace(case, **rows, **slots))
    assert len(seen) == 1, seen


if __name__ == "__main__":
    compile_variants()
