"""PageHeader: round trips, and the refusal of everything that does not fit, with what differs."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from pages import LAYOUTS, packed_pool

import pm_ops
from pm_ops import PageHeader, PageLayout

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
LAYOUT = LAYOUTS["page_major"]
MODEL = "llama@1f2e, rank 0"


def header(layout: PageLayout = LAYOUT, pages: int = 3) -> tuple[PageHeader, torch.Tensor]:
    rows = packed_pool(layout, pages).gather(list(range(pages)))
    return PageHeader.of(layout, MODEL, rows), rows


@every_layout
def test_bytes_give_an_equal_header_back_that_fits_the_same_pages(layout: PageLayout) -> None:
    sent, rows = header(layout)
    got = PageHeader.from_bytes(sent.to_bytes())
    assert got == sent and got.num_pages == 3 and len(set(got.digests)) == 3
    got.check(layout, MODEL, 3)
    got.verify(rows)


def test_digests_are_sha256_of_the_whole_page() -> None:
    sent, rows = header()
    assert list(sent.digests) == [hashlib.sha256(bytes(row.tolist())).hexdigest() for row in rows]
    strided = torch.stack([rows, rows], 2).flatten(1)[:, ::2]  # rows need not be contiguous
    assert PageHeader.of(LAYOUT, sent.model, strided) == sent


def test_a_layouts_name_is_no_difference() -> None:
    sent, _ = header()
    sent.check(replace(LAYOUT, name="mine"), sent.model)


LATER = replace(LAYOUT.planes[-1], dtype=torch.float16)


@pytest.mark.parametrize(
    ("layout", "model", "pages", "message"),
    [
        (pm_ops.page_major(3, 2, 4, 6, torch.bfloat16, value_dim=6), MODEL, 3, "page_size 3 instead of 6"),
        (LAYOUTS["token_major"], MODEL, 3, r"\(page_major\) instead of \w{16} \(token_major\)"),
        (replace(LAYOUT, page_bytes=1024), MODEL, 3, f"page_bytes {LAYOUT.page_bytes} instead of 1024"),
        (
            replace(LAYOUT, planes=(*LAYOUT.planes[:-1], LATER)),
            MODEL,
            3,
            "'value' of layer 2: dtype torch.bfloat16 instead of torch.float16$",
        ),
        (replace(LAYOUT, planes=LAYOUT.planes[:-1]), MODEL, 3, "kind='value'.* instead of None"),
        (LAYOUT, "llama@1f2e, rank 1", 3, "model 'llama@1f2e, rank 0' instead of 'llama@1f2e, rank 1'"),
        (LAYOUT, MODEL, 2, "3 pages instead of 2"),
    ],
)
def test_pages_that_do_not_fit_are_refused_with_what_differs(
    layout: PageLayout, model: str, pages: int, message: str
) -> None:
    sent, _ = header()
    with pytest.raises(ValueError, match=f"do not fit: .*{message}"):
        sent.check(layout, model, pages)


def test_everything_that_differs_is_said_at_once() -> None:
    sent, _ = header()
    other = LAYOUTS["token_major"]
    with pytest.raises(ValueError) as error:
        sent.check(other, "gpt", 7)
    said = str(error.value)
    assert LAYOUT.fingerprint in said and other.fingerprint in said
    assert "model 'llama@1f2e, rank 0' instead of 'gpt'" in said and "3 pages instead of 7" in said


@pytest.mark.parametrize("byte", [0, 17, -1])
@pytest.mark.parametrize("page", [0, 2])
def test_one_bit_of_a_page_is_noticed_and_the_page_named(page: int, byte: int) -> None:
    sent, rows = header()
    rows[page, byte] ^= 4
    with pytest.raises(ValueError, match=f"page {page} of 3 is corrupted"):
        sent.verify(rows)


def test_pages_in_another_order_or_number_are_noticed() -> None:
    sent, rows = header()
    with pytest.raises(ValueError, match="page 0 of 3 is corrupted.*and 1 other page"):
        sent.verify(rows[[1, 0, 2]])
    with pytest.raises(ValueError, match="2 rows for a header of 3 pages"):
        sent.verify(rows[:2])
    for wrong in (rows[:, 1:], rows.view(torch.int8), rows[0]):
        with pytest.raises(ValueError, match="rows must be uint8"):
            sent.verify(wrong)
        with pytest.raises(ValueError, match="rows must be uint8"):
            PageHeader.of(LAYOUT, "m", wrong)


def test_a_model_that_is_no_string_is_refused() -> None:
    with pytest.raises(ValueError, match="model must be a string.*got int"):
        PageHeader.of(LAYOUT, 3, header()[1])  # type: ignore[arg-type]


def test_every_changed_byte_of_a_header_is_noticed() -> None:
    data = bytearray(header(pages=1)[0].to_bytes())
    for at in range(len(data)):
        for bit in (1, 4, 32):
            data[at] ^= bit
            with pytest.raises(ValueError, match="not a header of pages"):
                PageHeader.from_bytes(bytes(data))
            data[at] ^= bit


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_cut_header_is_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="not a header of pages"):
        PageHeader.from_bytes(header()[0].to_bytes()[:cut])


@pytest.mark.parametrize("data", [b"[]", b"{}", b"null", b"\xff\xfe", b'"pm_ops pages"', b"[" * 200_000])
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a header of pages"):
        PageHeader.from_bytes(data)


def test_another_version_is_refused_by_its_number() -> None:
    record = json.loads(header()[0].to_bytes())
    with pytest.raises(ValueError, match="format version 2, this pm_ops reads version 1"):
        PageHeader.from_bytes(json.dumps({**record, "version": 2}).encode())
