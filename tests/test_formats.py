"""The named formats follow their formulas, written out here independently of the code."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import pm_ops


def addresses(layout: pm_ops.PageLayout, layer: int, kind: str) -> dict[tuple[int, int, int], int]:
    """Byte of every element (token, head, d) of a plane, from its offset and strides."""
    plane = layout.plane(layer, kind)
    heads, dim = plane.shape
    assert plane.token_stride is not None
    return {
        (t, h, d): plane.offset + t * plane.token_stride + h * plane.head_stride + d * plane.dtype.itemsize
        for t, h, d in itertools.product(range(layout.page_size), range(heads), range(dim))
    }


def test_page_major_puts_layer_after_layer_each_k_before_v() -> None:
    layers, heads, key_dim, value_dim, page_size, item = 3, 2, 5, 3, 4, 2
    layout = pm_ops.page_major(layers, heads, key_dim, page_size, torch.bfloat16, value_dim=value_dim)
    for layer in range(layers):
        start = layer * page_size * heads * (key_dim + value_dim) * item
        for (t, h, d), byte in addresses(layout, layer, "key").items():
            assert byte == start + ((t * heads + h) * key_dim + d) * item
        start += page_size * heads * key_dim * item
        for (t, h, d), byte in addresses(layout, layer, "value").items():
            assert byte == start + ((t * heads + h) * value_dim + d) * item
    assert layout.page_bytes == layers * page_size * heads * (key_dim + value_dim) * item


def test_token_major_puts_token_after_token_padded_to_32_bytes() -> None:
    layers, heads, key_dim, value_dim, page_size, item = 3, 2, 5, 3, 4, 4
    layout = pm_ops.token_major(layers, heads, key_dim, page_size, torch.float32, value_dim=value_dim)
    used = layers * heads * (key_dim + value_dim) * item
    entry = used + -used % 32
    assert used == 192
    for layer in range(layers):
        start = layer * heads * (key_dim + value_dim) * item
        for (t, h, d), byte in addresses(layout, layer, "key").items():
            assert byte == t * entry + start + (h * key_dim + d) * item
        for (t, h, d), byte in addresses(layout, layer, "value").items():
            assert byte == t * entry + start + (heads * key_dim + h * value_dim + d) * item
    assert layout.page_bytes == page_size * entry


def test_token_major_entry_of_odd_size_is_padded() -> None:
    layout = pm_ops.token_major(1, 1, 3, 2, torch.float16)
    assert layout.token_bytes == 12
    assert layout.page_bytes == 2 * 32
    assert layout.plane(0, "value").offset == 6


def test_mla_puts_layer_after_layer_and_the_indexer_behind_all_rows() -> None:
    layers, page_size, latent, rope, index = 3, 5, 7, 4, 12
    plain = pm_ops.mla(layers, page_size, torch.bfloat16, latent_dim=latent, rope_dim=rope)
    layout = pm_ops.mla(layers, page_size, "bfloat16", latent_dim=latent, rope_dim=rope, index_dim=index)
    row = (latent + rope) * 2
    for layer in range(layers):
        assert plain.plane(layer, "latent") == layout.plane(layer, "latent")
        for (t, _, d), byte in addresses(layout, layer, "latent").items():
            assert byte == (layer * page_size + t) * row + d * 2
    assert plain.page_bytes == layers * page_size * row == 330
    start = 336  # a multiple of 16
    for layer in range(layers):
        for (t, _, d), byte in addresses(layout, layer, "index_key").items():
            assert byte == start + t * index + d
        for (t, _, _), byte in addresses(layout, layer, "index_key_scale").items():
            assert byte == start + page_size * index + t * 4
        start += 80
    assert layout.page_bytes == start
    assert layout.plane(0, "index_key").dtype == torch.float8_e4m3fn
    assert layout.kinds(1) == ("latent", "index_key", "index_key_scale")
    assert layout.scaled_kinds == {"index_key"}


def test_mla_defaults_are_deepseek_v3s_and_a_page_can_be_aligned() -> None:
    layout = pm_ops.mla(61, 64, torch.bfloat16)
    assert layout.page_bytes == 61 * 64 * 576 * 2
    assert layout.token_bytes == 61 * 1152
    assert pm_ops.mla(2, 1, torch.float16, latent_dim=256, rope_dim=32, align=512).page_bytes == 2 * 1024
    assert pm_ops.PageLayout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("dims", [dict(latent_dim=0), dict(rope_dim=-1), dict(index_dim=-1)])
def test_mla_refuses_dims_that_are_none(dims: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="latent_dim=.* must be positive, rope_dim=.* and index_dim=.* >= 0"):
        pm_ops.mla(1, 1, torch.float16, **dims)


@pytest.mark.parametrize("order", ["BLNHC", "BLHNC", "BHLNC"])
def test_vllm_puts_k_and_v_of_one_token_and_head_side_by_side(order: str) -> None:
    sizes = {"L": 3, "H": 2, "N": 4}
    dim, item = 5, 2
    layout = pm_ops.vllm(sizes["L"], sizes["H"], dim, sizes["N"], torch.float16, order)
    for layer in range(sizes["L"]):
        for kind, shift in (("key", 0), ("value", dim)):
            for (t, h, d), byte in addresses(layout, layer, kind).items():
                index = {"L": layer, "H": h, "N": t}
                row = 0
                for axis in order[1:4]:
                    row = row * sizes[axis] + index[axis]
                assert byte == (row * 2 * dim + shift + d) * item
    assert layout.page_bytes == 3 * 2 * 4 * 2 * dim * item


@pytest.mark.parametrize(
    ("order", "axes"),
    [("page_first_direct", "LNH"), ("layer_first", "LNH"), ("page_first", "NLH"), ("page_head", "HNL")],
)
def test_hicache_puts_k_of_all_layers_before_v_of_all_layers(order: str, axes: str) -> None:
    sizes = {"L": 3, "H": 2, "N": 4}
    dim, item = 5, 2
    layout = pm_ops.hicache(sizes["L"], sizes["H"], dim, sizes["N"], "bfloat16", order)
    for layer in range(sizes["L"]):
        for half, kind in enumerate(("key", "value")):
            for (t, h, d), byte in addresses(layout, layer, kind).items():
                index = {"L": layer, "H": h, "N": t}
                row = half
                for axis in axes:
                    row = row * sizes[axis] + index[axis]
                assert byte == (row * dim + d) * item
    assert layout.page_bytes == 2 * 3 * 2 * 4 * dim * item


def test_hicache_without_an_order_is_page_first_direct_and_others_are_refused() -> None:
    assert pm_ops.hicache(2, 3, 8, 4, "float16") == pm_ops.hicache(2, 3, 8, 4, "float16", "page_first_direct")
    with pytest.raises(ValueError, match="'page_last'.*page_first_direct, layer_first, page_first, page_head"):
        pm_ops.hicache(2, 2, 8, 4, torch.float32, "page_last")


def test_page_major_equals_token_major_at_page_size_1_up_to_padding() -> None:
    rng = random.Random(0)
    for _ in range(50):
        shape = {
            "layers": rng.randint(1, 6),
            "kv_heads": rng.randint(1, 8),
            "head_dim": rng.randint(1, 200),
            "value_dim": rng.randint(1, 200),
            "page_size": 1,
            "dtype": rng.choice((torch.float32, torch.bfloat16, torch.float8_e5m2)),
        }
        page, token = pm_ops.page_major(**shape), pm_ops.token_major(**shape)
        for layer in range(shape["layers"]):
            for kind in ("key", "value"):
                assert addresses(page, layer, kind) == addresses(token, layer, kind)
        assert token.page_bytes == -(-page.page_bytes // 32) * 32
        assert page.page_runs == token.page_runs
        assert pm_ops.token_major(**shape, align=1).page_bytes == page.page_bytes


def test_layers_may_differ_in_heads_dims_and_dtype() -> None:
    layout = pm_ops.page_major(
        3, [4, 1, 2], [8, 16, 4], 2, [torch.float16, torch.float32, torch.float8_e4m3fn], value_dim=[8, 4, 4]
    )
    sizes = {(p.layer, p.kind): 2 * p.shape[0] * p.shape[1] * p.dtype.itemsize for p in layout.planes}
    assert sizes == {
        (0, "key"): 128, (0, "value"): 128, (1, "key"): 128, (1, "value"): 32, (2, "key"): 16, (2, "value"): 16
    }  # fmt: skip
    offsets = [layout.plane(layer, kind).offset for layer in range(3) for kind in ("key", "value")]
    assert offsets == [0, 128, 256, 384, 416, 432]
    assert layout.page_bytes == 448


def test_align_starts_every_plane_and_ends_the_page_on_the_boundary() -> None:
    layout = pm_ops.page_major(2, 1, 3, 5, torch.float16, align=64)
    assert [p.offset for p in layout.planes] == [0, 64, 128, 192]
    assert layout.page_bytes == 256
    assert layout.token_bytes == 2 * 2 * 6


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_majors_scales_lie_behind_everything_head_by_head_and_move_nothing(dtype, page_size: int) -> None:
    """A head's scales of a page side by side; each plane and the page padded to 16 bytes, so that rows stay aligned."""
    layers, heads = 3, 3
    plain = pm_ops.page_major(layers, heads, 5, page_size, dtype, value_dim=3)
    layout = pm_ops.page_major(layers, heads, 5, page_size, dtype, value_dim=3, scales=True)
    assert set(plain.planes) < set(layout.planes)
    start, step = plain.page_bytes + -plain.page_bytes % 16, 4 * heads * page_size
    step += -step % 16
    for layer in range(layers):
        for i, kind in enumerate(("key_scale", "value_scale")):
            assert layout.plane(layer, kind).dtype == torch.float32
            for (t, h, _), byte in addresses(layout, layer, kind).items():
                assert byte == start + (2 * layer + i) * step + (h * page_size + t) * 4
    assert layout.page_bytes == start + 2 * layers * step
    assert layout.token_bytes == plain.token_bytes + 2 * layers * heads * 4
    assert layout.scaled_kinds == {"key", "value"} and not plain.scaled_kinds


def test_token_majors_scales_end_the_entry() -> None:
    layers, heads, page_size = 2, 3, 4
    plain = pm_ops.token_major(layers, heads, 5, page_size, torch.int8, value_dim=4, align=1)
    layout = pm_ops.token_major(layers, heads, 5, page_size, torch.int8, value_dim=4, scales=True)
    start = plain.token_bytes + -plain.token_bytes % 4
    entry = start + 2 * layers * heads * 4
    entry += -entry % 32
    for layer in range(layers):
        for kind in ("key", "value"):
            assert layout.plane(layer, kind).offset == plain.plane(layer, kind).offset
        for i, kind in enumerate(("key_scale", "value_scale")):
            for (t, h, _), byte in addresses(layout, layer, kind).items():
                assert byte == t * entry + start + ((2 * layer + i) * heads + h) * 4
    assert layout.page_bytes == page_size * entry


def test_scales_keep_to_an_alignment_of_the_callers_own() -> None:
    layout = pm_ops.page_major(2, 1, 3, 5, torch.int8, align=24, scales=True)
    assert [p.offset % (24 if "scale" not in p.kind else 48) for p in layout.planes] == [0] * 8
    assert layout.page_bytes % 48 == 0


def test_only_layers_of_8_bits_have_scales() -> None:
    dtypes = [torch.bfloat16, torch.int8, torch.float8_e5m2]
    layout = pm_ops.page_major(3, 2, 8, 4, dtypes, scales=True)
    assert [len(layout.kinds(layer)) for layer in range(3)] == [2, 4, 4]
    for make in (pm_ops.page_major, pm_ops.token_major):
        with pytest.raises(ValueError, match="scales=True is for 8-bit dtypes .* got bfloat16"):
            make(3, 2, 8, 4, torch.bfloat16, scales=True)


def test_a_list_of_the_wrong_length_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv_heads has 2 values for 3 layers"):
        pm_ops.page_major(3, [1, 2], 8, 4, torch.float32)


@pytest.mark.parametrize("make", [pm_ops.page_major, pm_ops.token_major, pm_ops.vllm, pm_ops.hicache])
def test_a_dtype_may_be_given_by_its_name(make: Callable[..., pm_ops.PageLayout]) -> None:
    for name in ("bfloat16", "torch.bfloat16"):
        assert make(2, 3, 8, 4, name) == make(2, 3, 8, 4, torch.bfloat16)
    with pytest.raises(ValueError, match=r"unknown dtype 'bf16'; use torch's names"):
        make(2, 3, 8, 4, "bf16")
    with pytest.raises(ValueError, match=r"dtype is <class 'float'>; give a torch dtype"):
        make(2, 3, 8, 4, float)


def test_names_of_dtypes_may_differ_by_layer() -> None:
    mixed = pm_ops.page_major(2, 3, 8, 4, ["bfloat16", torch.float32])
    assert [mixed.plane(i, "key").dtype for i in range(2)] == [torch.bfloat16, torch.float32]


def test_an_unknown_vllm_order_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ValueError, match="'LBHNC'.*BLNHC, BLHNC, BHLNC"):
        pm_ops.vllm(2, 2, 8, 4, torch.float32, "LBHNC")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"layers": 0}, "layers=0: give the number of layers"), ({"layers": "2"}, "layers='2': give the number"),
        ({"head_dim": "64"}, "head_dim is '64'; give an int"), ({"kv_heads": 1.5}, "kv_heads is 1.5; give an int"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_refused_by_name(bad: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "page_size": 4, "dtype": torch.float32}
    for make in (pm_ops.page_major, pm_ops.token_major):
        with pytest.raises(ValueError, match=message):
            make(**sizes | bad)


def test_integers_of_numpy_are_integers() -> None:
    made = pm_ops.page_major(numpy.int64(2), numpy.int32(2), [numpy.int64(8)] * 2, 4, torch.float32)
    assert made.to_json() == pm_ops.page_major(2, 2, 8, 4, torch.float32).to_json()


@pytest.mark.parametrize("bad", [{"layers": 0}, {"kv_heads": 0}, {"head_dim": -8}, {"page_size": 0}])
@pytest.mark.parametrize("make", [pm_ops.page_major, pm_ops.token_major, pm_ops.vllm, pm_ops.hicache])
def test_sizes_below_one_are_refused(make, bad: dict[str, int]) -> None:
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 8, "page_size": 4, "dtype": torch.float32}
    with pytest.raises(ValueError, match=r"page_size >= 1|must be positive|layers=0: give"):
        make(**{**shape, **bad})


@pytest.mark.parametrize("align", [0, -16])
@pytest.mark.parametrize("make", [pm_ops.page_major, pm_ops.token_major])
def test_an_alignment_below_one_is_refused(make, align: int) -> None:
    with pytest.raises(ValueError, match=f"align={align}"):
        make(2, 2, 8, 4, torch.float32, align=align)


def test_state_page_puts_kind_after_kind_each_of_all_layers() -> None:
    conv, ssm = (6, 3), (2, 4, 5)
    layout = pm_ops.state_page([1, 4], {"conv": (conv, "bfloat16"), "ssm": (ssm, torch.float32)})
    assert (layout.page_size, layout.page_bytes, layout.token_bytes) == (1, 2 * 18 * 2 + 2 * 40 * 4, 0)
    assert [layout.plane(i, "conv").offset for i in (1, 4)] == [0, 36]
    assert [layout.plane(i, "ssm").offset for i in (1, 4)] == [72, 72 + 160]
    pool = pm_ops.PagePool(layout, 3)
    view = pool.view(4, "ssm")
    view[2, 1, 3, 4] = 7.0
    assert pool.buffer.view(torch.float32)[(2 * layout.page_bytes + 72 + 160) // 4 + (1 * 4 + 3) * 5 + 4] == 7.0


def test_states_are_aligned_where_that_is_asked_for() -> None:
    states = {"conv": ((3, 3), "bfloat16"), "ssm": ((2, 2), "float32")}
    with pytest.raises(ValueError, match="multiples of float32's 4 bytes; pad the page or pass align="):
        pm_ops.state_page(1, states)
    layout = pm_ops.state_page(2, states, align=16)
    assert [layout.plane(i, k).offset for k in states for i in (0, 1)] == [0, 32, 64, 80] and layout.page_bytes == 96
