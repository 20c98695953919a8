"""Plane and PageLayout: the byte formula, its checks, its JSON and its drawing."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pm_ops
from pm_ops import PageLayout, Plane

expecttest = pytest.importorskip("expecttest")

ROOT = Path(__file__).parents[1]

MIXED = PageLayout(
    page_size=4,
    page_bytes=352,
    planes=(
        Plane(0, "key", 0, 16, 8, (2, 4), torch.float16),
        Plane(0, "value", 64, 8, 4, (2, 2), torch.float16),
        Plane(0, "key_scale", 96, 8, 4, (2, 1), torch.float32),
        Plane(1, "conv", 128, None, 8, (3, 4), torch.bfloat16),
        Plane(1, "ssm", 160, None, 32, (2, 4, 2), torch.float32),
        Plane(3, "latent", 224, 32, 32, (1, 32), torch.float8_e4m3fn),
    ),
    name="mixed",
)


def used_bytes(layout: PageLayout) -> set[int]:
    """Every byte of a page that an element covers, element by element from the formula."""
    used: set[int] = set()
    for p in layout.planes:
        tokens = [0] if p.token_stride is None else [t * p.token_stride for t in range(layout.page_size)]
        row = torch.Size(p.shape[1:]).numel() * p.dtype.itemsize
        for token, head in itertools.product(tokens, range(p.shape[0])):
            start = p.offset + token + head * p.head_stride
            used |= set(range(start, start + row))
    return used


LAYOUTS = {
    "mixed": MIXED,
    "page_major": pm_ops.page_major(3, 2, 5, 4, torch.bfloat16, value_dim=3),
    "page_major aligned": pm_ops.page_major(2, 3, 5, 3, torch.float32, align=64),
    "page_major with scales": pm_ops.page_major(2, 3, 5, 3, torch.int8, value_dim=3, scales=True),
    "token_major with scales": pm_ops.token_major(2, 3, 5, 3, torch.float8_e5m2, scales=True),
    "token_major": pm_ops.token_major(2, 1, 3, 4, torch.float16),
    "vllm BLNHC": pm_ops.vllm(2, 3, 4, 5, torch.float32, "BLNHC"),
    "vllm BLHNC": pm_ops.vllm(2, 3, 4, 5, torch.float32, "BLHNC"),
    "vllm BHLNC": pm_ops.vllm(2, 3, 4, 5, torch.float32, "BHLNC"),
    "one byte": pm_ops.page_major(1, 1, 1, 1, torch.int8),
}
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, "int32"], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: pm_ops.page_major(2, 1, 4, 4, dtype),
        lambda dtype: pm_ops.page_major(2, 1, 4, 4, ["float32", dtype]),
        lambda dtype: pm_ops.token_major(2, 1, 4, 4, dtype),
        lambda dtype: pm_ops.vllm(2, 1, 4, 4, dtype),
        lambda dtype: pm_ops.hicache(2, 1, 4, 4, dtype),
        lambda dtype: pm_ops.mla(2, 4, dtype),
    ],
)
def test_a_format_of_tokens_that_no_operator_takes_is_refused(make: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"no operator takes a cache of .*; dtype may be float32, float16, .*, int8"):
        make(dtype)


@every_layout
def test_page_runs_cover_exactly_the_bytes_of_the_elements(layout: PageLayout) -> None:
    runs = layout.page_runs
    covered = [b for offset, nbytes in runs for b in range(offset, offset + nbytes)]
    assert len(covered) == len(set(covered))
    assert set(covered) == used_bytes(layout)
    assert all(a.offset + a.nbytes < b.offset for a, b in itertools.pairwise(runs)), "adjacent runs are not merged"


@every_layout
def test_slot_runs_of_all_tokens_cover_exactly_the_token_planes(layout: PageLayout) -> None:
    planes = tuple(p for p in layout.planes if p.token_stride is not None)
    tokens_only = dataclasses.replace(layout, planes=planes)
    covered = [
        byte
        for t in range(layout.page_size)
        for offset, token_stride, nbytes in layout.slot_runs
        for byte in range(offset + t * token_stride, offset + t * token_stride + nbytes)
    ]
    assert len(covered) == len(set(covered))
    assert set(covered) == used_bytes(tokens_only)
    assert layout.token_bytes * layout.page_size == len(covered)


@every_layout
def test_json_round_trip(layout: PageLayout) -> None:
    again = PageLayout.from_json(layout.to_json())
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.name == layout.name
    assert again.fingerprint == layout.fingerprint
    assert again.planes == layout.planes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_every_dtype_survives_json(dtype: torch.dtype) -> None:
    layout = pm_ops.page_major(1, 1, 8, 2, dtype)
    assert PageLayout.from_json(layout.to_json()).plane(0, "key").dtype is dtype


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "3", '{"page_size": 1, "page_bytes": 8}',
        json.dumps({"page_size": 1, "page_bytes": 8, "planes": [{"layer": 0}]}),
        json.dumps({"page_size": 1, "page_bytes": 8, "planes": [3]}),
        LAYOUTS["page_major"].to_json().replace("bfloat16", "bfloat17"),
        LAYOUTS["page_major"].to_json().replace("bfloat16", "nn"),
        LAYOUTS["page_major"].to_json().replace('"bfloat16"', "16"),
        LAYOUTS["page_major"].to_json().replace('"page_size": 4', '"page_size": "4"'),
        LAYOUTS["page_major"].to_json().replace('"page_size": 4', '"page_size": 4.5'),
    ],
)  # fmt: skip
def test_json_that_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="layout's JSON|unknown dtype|must be integers"):
        PageLayout.from_json(text)


def test_a_planes_shape_may_be_any_sequence_and_its_kind_is_a_string() -> None:
    shapes = [2, 4], (2, 4), torch.Size((2, 4))
    planes = [Plane(0, "key", 0, 16, 8, shape, torch.bfloat16) for shape in shapes]  # type: ignore[arg-type]
    assert len(set(planes)) == 1 and len({PageLayout(2, 32, (plane,)) for plane in planes}) == 1
    for kind in (0, None, ["key"]):
        with pytest.raises(ValueError, match=r"kind=.* must be a string"):
            Plane(0, kind, 0, 16, 8, (2, 4), torch.bfloat16)  # type: ignore[arg-type]


def test_equality_and_hash_look_at_the_geometry_not_at_name_or_order() -> None:
    layout = LAYOUTS["page_major"]
    shuffled = dataclasses.replace(layout, planes=layout.planes[::-1], name="other")
    assert shuffled == layout
    assert hash(shuffled) == hash(layout)
    assert shuffled.fingerprint == layout.fingerprint
    assert len({layout, shuffled, MIXED}) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 2}, {"token_stride": 24}, {"head_stride": 12}, {"shape": (2, 3)}, {"dtype": torch.float16},
        {"kind": "latent"}, {"layer": 7},
    ],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_any_field_of_a_plane_tells_layouts_apart(change: dict[str, object]) -> None:
    plane = Plane(0, "key", 0, 20, 10, (2, 4), torch.bfloat16)
    a = PageLayout(2, 128, (plane,))
    b = PageLayout(2, 128, (dataclasses.replace(plane, **change),))
    assert a != b
    assert a.fingerprint != b.fingerprint


def test_page_size_and_page_bytes_tell_layouts_apart() -> None:
    plane = Plane(0, "key", 0, 16, 8, (2, 4), torch.bfloat16)
    layouts = [PageLayout(n, size, (plane,)) for n, size in ((2, 128), (3, 128), (2, 130))]
    assert len(set(layouts)) == 3
    assert len({x.fingerprint for x in layouts}) == 3
    assert layouts[0] != "page_major"


def test_fingerprint_is_the_same_in_another_process() -> None:
    code = "import torch, pm_ops; print(pm_ops.page_major(3, 2, 5, 4, torch.bfloat16, value_dim=3).fingerprint)"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert out.strip() == LAYOUTS["page_major"].fingerprint


def test_planes_are_found_by_layer_and_kind() -> None:
    assert MIXED.plane(0, "value") is MIXED.planes[1]
    assert MIXED.layers == (0, 1, 3)
    assert MIXED.kinds(0) == ("key", "value", "key_scale")
    assert MIXED.kinds(2) == ()


def test_a_missing_plane_is_refused_with_what_exists() -> None:
    with pytest.raises(ValueError, match="no plane 'latent' of layer 0.*key, value, key_scale"):
        MIXED.plane(0, "latent")
    with pytest.raises(ValueError, match="no plane 'key' of layer 2.*0, 1, 3"):
        MIXED.plane(2, "key")


def test_copies_per_page() -> None:
    """One copy moves a page-major page; a tensor a plane takes one copy a plane."""
    assert pm_ops.page_major(30, 3, 64, 16, torch.float32).copies_per_page_layer_major == 60
    assert MIXED.copies_per_page_layer_major == 6


def test_rows_of_132_bytes_make_a_page_of_33792_bytes() -> None:
    """fp8 rows of 128 with a 4-byte scale behind each: no power of two anywhere, still a valid layout."""
    planes = (
        Plane(0, "key", 0, 132, 132, (1, 128), torch.float8_e4m3fn),
        Plane(0, "key_scale", 128, 132, 132, (1, 1), torch.float32),
    )
    layout = PageLayout(256, 33_792, planes)
    assert layout.slot_runs == ((0, 132, 132),)
    assert layout.page_runs == ((0, 33_792),)
    assert layout.token_bytes == 132


def test_planes_that_share_bytes_are_refused() -> None:
    key = Plane(0, "key", 0, 16, 8, (2, 4), torch.float16)
    for value in (
        Plane(0, "value", 30, 16, 8, (2, 4), torch.float16),  # in the last token of key
        Plane(0, "value", 8, 16, 8, (1, 4), torch.float16),  # head 1 of key
        Plane(0, "value", 0, 16, 8, (2, 4), torch.float16),  # all of it
        Plane(1, "conv", 8, None, 8, (2, 4), torch.float16),
    ):
        with pytest.raises(ValueError, match="overlap at byte"):
            PageLayout(2, 128, (key, value))


def test_tokens_or_heads_of_one_plane_that_share_bytes_are_refused() -> None:
    for token_stride, head_stride in ((8, 8), (16, 4), (0, 8), (16, 0)):
        plane = Plane(0, "key", 0, token_stride, head_stride, (2, 4), torch.float16)
        with pytest.raises(ValueError, match="overlap at byte"):
            PageLayout(2, 128, (plane,))


def test_interleaved_planes_without_shared_bytes_are_taken() -> None:
    planes = (
        Plane(0, "key", 0, 32, 16, (2, 4), torch.float16),
        Plane(0, "value", 8, 32, 16, (2, 4), torch.float16),
    )
    assert PageLayout(2, 64, planes).page_runs == ((0, 64),)


def test_a_plane_past_the_end_of_the_page_is_refused() -> None:
    plane = Plane(0, "key", 2, 16, 8, (2, 4), torch.float16)
    assert PageLayout(2, 34, (plane,)).page_bytes == 34
    with pytest.raises(ValueError, match="planes need 34 bytes, the page has 32"):
        PageLayout(2, 32, (plane,))


@pytest.mark.parametrize(
    ("plane", "page_bytes"),
    [
        (Plane(0, "key", 2, 16, 16, (1, 4), torch.float32), 64),
        (Plane(0, "key", 0, 18, 16, (1, 4), torch.float32), 64),
        (Plane(0, "key", 0, 32, 18, (1, 4), torch.float32), 64),
        (Plane(0, "key", 0, 16, 16, (1, 4), torch.float32), 66),
    ],
    ids=["offset", "token stride", "head stride", "page"],
)
def test_what_is_not_a_multiple_of_the_element_is_refused(plane: Plane, page_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiples of float32's 4 bytes"):
        PageLayout(2, page_bytes, (plane,))


@pytest.mark.parametrize(
    "plane",
    [
        Plane(0, "key", -2, 16, 8, (2, 4), torch.float16),
        Plane(0, "key", 64, -16, 8, (2, 4), torch.float16),
        Plane(0, "key", 64, 16, -8, (2, 4), torch.float16),
    ],
)
def test_negative_offsets_and_strides_are_refused(plane: Plane) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        PageLayout(2, 128, (plane,))


@pytest.mark.parametrize("shape", [(), (2,), (0, 4), (2, 0), (2, 2, 2), (-1, 4)])
def test_token_planes_are_heads_by_dim(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be positive, and \(heads, dim\)"):
        PageLayout(2, 128, (Plane(0, "key", 0, 16, 8, shape, torch.float16),))


def test_two_planes_of_one_layer_and_kind_are_refused() -> None:
    plane = Plane(0, "key", 0, 16, 8, (2, 4), torch.float16)
    with pytest.raises(ValueError, match="two planes of one layer and kind"):
        PageLayout(2, 128, (plane, dataclasses.replace(plane, offset=64)))


@pytest.mark.parametrize(("page_size", "page_bytes", "n"), [(0, 64, 1), (-1, 64, 1), (2, 0, 1), (2, 64, 0)])
def test_an_empty_page_is_refused(page_size: int, page_bytes: int, n: int) -> None:
    plane = Plane(0, "key", 0, 16, 8, (2, 4), torch.float16)
    with pytest.raises(ValueError, match="at least one plane"):
        PageLayout(page_size, page_bytes, (plane,) * n)


def test_a_layout_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        MIXED.page_size = 8  # type: ignore[misc]


class TestDrawing(expecttest.TestCase):
    """str(layout) draws the page's bytes."""

    def test_mixed(self) -> None:
        self.assertExpectedInline(
            str(MIXED),
            """\
mixed: a page of 4 tokens, 3 layers, 352 B (64 B a token)
    0  L0 key        4 tokens x 2 x 4 float16         strides: token 16 B, head 8 B
   64  L0 value      4 tokens x 2 x 2 float16         strides: token 8 B, head 4 B
   96  L0 key_scale  4 tokens x 2 x 1 float32         strides: token 8 B, head 4 B
  128  L1 conv       3 x 4 bfloat16                   state
  160  L1 ssm        2 x 4 x 2 float32                state
  224  L3 latent     4 tokens x 1 x 32 float8_e4m3fn  strides: token 32 B, head 32 B
  352  end           padding 8 B""",
        )

    def test_one_of_each(self) -> None:
        self.assertExpectedInline(
            str(pm_ops.page_major(1, 1, 3, 1, torch.float16)),
            """\
page_major: a page of 1 token, 1 layer, 12 B (12 B a token)
   0  L0 key    1 token x 1 x 3 float16  strides: token 6 B, head 6 B
   6  L0 value  1 token x 1 x 3 float16  strides: token 6 B, head 6 B
  12  end       no padding""",
        )

    def test_padding(self) -> None:
        self.assertExpectedInline(
            str(LAYOUTS["token_major"]),
            """\
token_major: a page of 4 tokens, 2 layers, 128 B (24 B a token)
    0  L0 key    4 tokens x 1 x 3 float16  strides: token 32 B, head 6 B
    6  L0 value  4 tokens x 1 x 3 float16  strides: token 32 B, head 6 B
   12  L1 key    4 tokens x 1 x 3 float16  strides: token 32 B, head 6 B
   18  L1 value  4 tokens x 1 x 3 float16  strides: token 32 B, head 6 B
  128  end       padding 32 B""",
        )

    def test_deep_model(self) -> None:
        self.assertExpectedInline(
            str(pm_ops.page_major(32, 8, 128, 16, torch.bfloat16)),
            """\
page_major: a page of 16 tokens, 32 layers, 2097152 B (131072 B a token)
        0  L0 key     16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
    32768  L0 value   16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
    65536  L1 key     16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
    98304  L1 value   16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
   131072  L2 key     16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
   163840  L2 value   16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
   196608  L3 key     16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
           ...        50 more planes
  1867776  L28 value  16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
  1900544  L29 key    16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
  1933312  L29 value  16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
  1966080  L30 key    16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
  1998848  L30 value  16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
  2031616  L31 key    16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
  2064384  L31 value  16 tokens x 8 x 128 bfloat16  strides: token 2048 B, head 256 B
  2097152  end        no padding""",
        )


def test_a_part_is_a_page_from_its_first_byte_to_its_last() -> None:
    layout = pm_ops.page_major(3, 2, 8, 4, torch.float16, value_dim=6)
    block, key = 4 * 2 * (8 + 6) * 2, 4 * 2 * 8 * 2
    assert layout.part("key", layers=[2]) == PageLayout(
        4, key, (dataclasses.replace(layout.plane(2, "key"), offset=0),)
    )
    values = layout.part("value")
    assert [p.offset for p in values.planes] == [0, block, 2 * block] and values.name == "page_major value"
    assert values.page_bytes == 3 * block - key
    assert layout.part("key", "value") == layout
    interleaved = pm_ops.vllm(2, 2, 8, 4, torch.float16).part("value")
    assert (interleaved.plane(0, "value").offset, interleaved.page_bytes) == (0, 2 * 4 * 2 * 16 * 2 - 16)


@pytest.mark.parametrize(("kinds", "layers"), [(("ssm",), None), (("key",), [7]), ((), None)])
def test_a_part_without_planes_is_refused(kinds: tuple[str, ...], layers: list[int] | None) -> None:
    with pytest.raises(ValueError, match="no plane of .* there are key, value in 0 to 2"):
        pm_ops.page_major(3, 2, 8, 4, torch.float16).part(*kinds, layers=layers)
