"""Pages in files: round trips, the safetensors library as a witness, and every way in which a file can be wrong."""

import json
import os
from pathlib import Path

import pytest
import torch
from pages import LAYOUTS, packed_pool, spaced_pool

import pm_ops
from pm_ops import PageHeader, PageLayout, PagePool, disk
from pm_ops.testing import page_bytes, writes_only

every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
LAYOUT = LAYOUTS["page_major"]
MODEL = "llama@1f2e"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of pages 3, 0 and 5 of a pool of LAYOUT."""
    pm_ops.save_pages(tmp_path / "pages.safetensors", packed_pool(LAYOUT, 6), [3, 0, 5], model=MODEL)
    return tmp_path / "pages.safetensors"


def refused(path: Path, message: str, pages: list[int] | None = None, model: str = MODEL) -> None:
    """Loading is a ValueError that names the file, after which no byte of the pool and of its allocator has changed."""
    pool = spaced_pool(LAYOUT, 4, seed=1)
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match=message) as error:
        pm_ops.load_pages(path, pool, pages, model=model)
    assert str(path) in str(error.value)
    assert pool.allocator.num_free == 4


@every_layout
def test_pages_come_back_byte_for_byte_and_nothing_else_changes(layout: PageLayout, tmp_path: Path) -> None:
    src, dst = spaced_pool(layout, 6), spaced_pool(layout, 5, seed=1)
    header = pm_ops.save_pages(tmp_path / "a", src, torch.tensor([3, 0, 5]), model=MODEL)
    header.verify(src.gather([3, 0, 5]))
    with writes_only(dst.buffer, page_bytes(dst, [1, 4, 2])):
        assert pm_ops.load_pages(tmp_path / "a", dst, [1, 4, 2], model=MODEL) == [1, 4, 2]
    assert torch.equal(dst.gather([1, 4, 2]), src.gather([3, 0, 5]))
    assert os.listdir(tmp_path) == ["a"]


def test_pages_are_allocated_where_none_are_named(file: Path) -> None:
    pool = spaced_pool(LAYOUT, 4, seed=1)
    taken = pool.allocator.alloc(1)
    pages = pm_ops.load_pages(file, pool, model=MODEL)
    assert sorted(pages + taken) == [0, 1, 2, 3] and pool.allocator.num_free == 0
    assert torch.equal(pool.gather(pages), packed_pool(LAYOUT, 6).gather([3, 0, 5]))
    with writes_only(pool.buffer, []), pytest.raises(RuntimeError, match="out of pages"):
        pm_ops.load_pages(file, pool, model=MODEL)


def test_pages_that_were_allocated_are_free_again_where_they_cannot_be_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = spaced_pool(LAYOUT, 4, seed=1)

    def failed(*args: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(PagePool, "scatter", failed)
    for pages in (None, [0, 1, 2]):
        with pytest.raises(RuntimeError, match="CUDA error"):
            pm_ops.load_pages(file, pool, pages, model=MODEL)
        assert pool.allocator.num_free == 4


def test_the_safetensors_library_reads_the_file(file: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.keys() == ["pages"]
        assert torch.equal(opened.get_tensor("pages"), packed_pool(LAYOUT, 6).gather([3, 0, 5]))
        header = PageHeader.from_bytes(opened.metadata()["pm_ops"].encode())
    header.check(LAYOUT, MODEL, 3)
    assert (file.stat().st_size - 3 * LAYOUT.page_bytes) % 4096 == 0


def test_a_file_of_the_safetensors_library_is_read(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    rows = packed_pool(LAYOUT, 6).gather([3, 0, 5])
    metadata = {"pm_ops": PageHeader.of(LAYOUT, MODEL, rows).to_bytes().decode()}
    torch_files.save_file({"pages": rows}, tmp_path / "a", metadata=metadata)
    pool = PagePool(LAYOUT, 3)
    assert torch.equal(pool.gather(pm_ops.load_pages(tmp_path / "a", pool, model=MODEL)), rows)


def test_a_model_may_have_any_name(tmp_path: Path) -> None:
    pool = packed_pool(LAYOUT, 2)
    model = 'ü "quoted" \\ 模型 \n'
    pm_ops.save_pages(tmp_path / "a", pool, [1], model=model)
    pm_ops.load_pages(tmp_path / "a", pool, [0], model=model)
    assert torch.equal(pool.pages[0], pool.pages[1])


def test_files_are_mapped_not_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are verified and scattered lie in a private mapping of the file; writing there leaves the file."""
    before = file.read_bytes()
    verify = PageHeader.verify

    def look(header: PageHeader, rows: torch.Tensor) -> None:
        address = rows.data_ptr()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        spans = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[-1] == str(file)]
        assert any(start <= address and address + rows.nbytes <= end for start, end in spans)
        verify(header, rows)
        rows.zero_()

    monkeypatch.setattr(PageHeader, "verify", look)
    pm_ops.load_pages(file, PagePool(LAYOUT, 3), model=MODEL)
    assert file.read_bytes() == before


def test_a_file_of_another_layout_model_or_number_is_refused(file: Path, tmp_path: Path) -> None:
    refused(file, "model 'llama@1f2e' instead of 'gpt'", model="gpt")
    refused(file, "3 pages instead of 2", pages=[0, 1])
    for name in ("token_major", "states", "int8 with scales"):
        pm_ops.save_pages(tmp_path / "other", packed_pool(LAYOUTS[name], 3), [0, 1, 2], model=MODEL)
        refused(tmp_path / "other", f"layout {LAYOUTS[name].fingerprint} .* instead of {LAYOUT.fingerprint}")


@pytest.mark.parametrize(("pages", "message"), [([0, 1, 4], "pool's pages 0 to 3"), ([0, -1, 1], "page -1 is none"),
                                                ([2, 1, 2], "page 2 is named twice")])  # fmt: skip
def test_pages_that_cannot_be_written_are_refused(file: Path, pages: list[int], message: str) -> None:
    pool = packed_pool(LAYOUT, 4)
    with writes_only(pool.buffer, []), pytest.raises(ValueError, match=message):
        pm_ops.load_pages(file, pool, pages, model=MODEL)


@pytest.mark.parametrize(("pages", "message"), [([0, 6], "pool's pages 0 to 5"), ([-1], "page -1"), ([], "no pages")])
def test_pages_that_cannot_be_saved_are_refused_and_leave_no_file(pages, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pm_ops.save_pages(tmp_path / "a", packed_pool(LAYOUT, 6), pages, model=MODEL)
    assert not os.listdir(tmp_path)


def test_a_pool_without_memory_and_what_is_no_pool_are_refused(file: Path, tmp_path: Path) -> None:
    """Rather than pages that are read to nowhere."""
    for pool, message in ((PagePool(LAYOUT, 6, "meta"), "meta device has no memory"), (LAYOUT, "must be a PagePool")):
        with pytest.raises(ValueError, match=message):
            pm_ops.load_pages(file, pool, model=MODEL)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            pm_ops.save_pages(tmp_path / "b", pool, [0], model=MODEL)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == [file.name]


def test_a_header_that_safetensors_would_not_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "MAX_HEADER", 4000)
    with pytest.raises(ValueError, match="the header of 2 pages is 4088 bytes.*several files"):
        pm_ops.save_pages(tmp_path / "a", packed_pool(LAYOUT, 6), [0, 1], model=MODEL)
    assert not os.listdir(tmp_path)


def test_a_file_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pm_ops.load_pages(tmp_path / "a", packed_pool(LAYOUT, 3), model=MODEL)
    with pytest.raises(FileNotFoundError):
        pm_ops.save_pages(tmp_path / "no folder" / "a", packed_pool(LAYOUT, 3), [0], model=MODEL)


def test_a_file_cut_anywhere_is_refused_and_the_page_named(file: Path) -> None:
    whole = file.read_bytes()
    start = len(whole) - 3 * LAYOUT.page_bytes
    for page, cut in ((0, start), (0, start + 1), (1, start + LAYOUT.page_bytes), (2, len(whole) - 1)):
        file.write_bytes(whole[:cut])
        refused(file, f"truncated: it ends at byte {cut}, inside page {page} of 3")
    for cut in (0, 1, 7, 8, 9, 100, start - 1):
        file.write_bytes(whole[:cut])
        refused(file, f"ends at byte {cut}, before page 0")
    file.write_bytes(whole + b"\0")
    refused(file, "1 bytes follow page 2, the last")


def test_a_flipped_bit_anywhere_is_refused(file: Path) -> None:
    """Every byte of the file, one bit each; a page's are named with the page."""
    data = file.read_bytes()
    start = len(data) - 3 * LAYOUT.page_bytes
    pool = packed_pool(LAYOUT, 3, seed=1)
    with writes_only(pool.buffer, []), open(file, "r+b") as opened:
        for at in range(len(data)):
            os.pwrite(opened.fileno(), bytes([data[at] ^ 1 << at % 8]), at)
            named = "page 0|the last" if at < start else f"page {(at - start) // LAYOUT.page_bytes} of 3"
            with pytest.raises(ValueError, match=named):
                pm_ops.load_pages(file, pool, [0, 1, 2], model=MODEL)
            os.pwrite(opened.fileno(), data[at : at + 1], at)
    pm_ops.load_pages(file, pool, [0, 1, 2], model=MODEL)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 5000, b"\2\0\0\0\0\0\0\0{}", b"PK\3\4" * 3000])
def test_files_of_other_kinds_are_refused(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    refused(file, "page 0")


def test_a_file_whose_tensor_contradicts_its_header_is_refused(file: Path) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for change in (
        {"pages": {"dtype": "I8", "shape": [3, LAYOUT.page_bytes], "data_offsets": [0, 3 * LAYOUT.page_bytes]}},
        {"pages": {"dtype": "U8", "shape": [3, LAYOUT.page_bytes], "data_offsets": [8, 8 + 3 * LAYOUT.page_bytes]}},
        {"more": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}},
        {"__metadata__": {}},
        {"__metadata__": {"pm_ops": 3}},
    ):
        text = json.dumps({**json.loads(data[8 : 8 + length]), **change}).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        refused(file, "before page 0")


def test_saving_replaces_a_file_whole(file: Path) -> None:
    """A reader that has the old file open reads the old pages to the end."""
    pool, other = packed_pool(LAYOUT, 6), packed_pool(LAYOUT, 6, seed=1)
    with open(file, "rb") as old:
        pm_ops.save_pages(file, other, [2], model=MODEL)
        got = PagePool(LAYOUT, 3)
        disk.read_into(old, file, got, [0, 1, 2], MODEL)
        assert torch.equal(got.pages, pool.gather([3, 0, 5]))
    assert torch.equal(got.gather(pm_ops.load_pages(file, got, model=MODEL)), other.gather([2]))
    assert os.listdir(file.parent) == [file.name]


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_an_error_while_saving_leaves_the_old_file_and_nothing_beside_it(
    call: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        pm_ops.save_pages(file, packed_pool(LAYOUT, 6, seed=1), [2], model=MODEL)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_bytes_are_flushed_before_the_name_and_the_folder_after(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order that a power failure cannot break: file to disk, rename, folder to disk."""
    events = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size))
        fsync(fd)

    def replaced(src: object, dst: object) -> None:
        events.append(("replace", str(src), str(dst)))
        replace(src, dst)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    pm_ops.save_pages(file, packed_pool(LAYOUT, 6), [2], model=MODEL)
    temporary = events[0][1]
    assert Path(temporary).parent == file.parent and temporary != str(file)
    assert events[0] == ("fsync", temporary, file.stat().st_size)
    assert events[1] == ("replace", temporary, str(file))
    assert events[2][:2] == ("fsync", str(file.parent)) and len(events) == 3


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        pm_ops.save_pages(tmp_path / "a", packed_pool(LAYOUT, 2), [0], model=MODEL)
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.gpu
@every_layout
def test_pages_of_a_gpu_come_back_on_a_gpu(layout: PageLayout, tmp_path: Path) -> None:
    cpu = packed_pool(layout, 6)
    src, dst = PagePool(layout, 6, buffer=cpu.buffer.cuda()), PagePool(layout, 5, "cuda")
    pm_ops.save_pages(tmp_path / "a", src, [3, 0, 5], model=MODEL)
    with writes_only(dst.buffer, page_bytes(dst, [1, 4, 2])):
        pm_ops.load_pages(tmp_path / "a", dst, [1, 4, 2], model=MODEL)
    assert torch.equal(dst.gather([1, 4, 2]).cpu(), cpu.gather([3, 0, 5]))
