"""The suite of transfers: right ones pass its checks in both layouts, and what is subtly wrong does not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.fakes import CPU, SWAP_SCHEMA, VLLM_FILES, write_files

from pm_ops.bench.baseline import Torch
from pm_ops.bench.implementation import Bound, Implementation, Missing, Unsupported
from pm_ops.bench.limits import TO_PEER
from pm_ops.bench.memory import LAYER_MAJOR, LAYOUTS, PAGE_MAJOR
from pm_ops.bench.ours import PmOps, PmOpsByLayer
from pm_ops.bench.peer_vllm_swap import LIBRARY, VLLMSwap, VLLMSwapTriton
from pm_ops.bench.report import limit_of
from pm_ops.bench.suites import cases, repack_case, transfer_case
from pm_ops.bench.transfer_cases import PEER, RepackShape, TransferShape
from pm_ops.bench.transfer_torch import TorchStaged

VERBS = ("offload", "restore", "both ways", "first layer", "last layer")
REPACKS = {
    "to vLLM": (("page_major", "BLNHC"), (4, 4), None),
    "from vLLM": (("BLNHC", "page_major"), (4, 4), None),
    "larger pages": (("page_major", "page_major"), (2, 8), None),
    "some heads": (("page_major", "page_major"), (4, 4), (1, 0, 2)),
}


def shape(verb: str, **options: Any) -> TransferShape:
    return TransferShape(verb, verb, 5, 13, 3, 2, 3, 4, torch.float32, **options)


def repack(name: str) -> RepackShape:
    formats, sizes, heads = REPACKS[name]
    return RepackShape(name, 8, formats, sizes, heads, 2, 3, 4, torch.float32)


def passes(impl: Implementation, verb: str, layout: str) -> bool:
    """Twice, for a check must not live on what an earlier call has left."""
    case = transfer_case("transfer", shape(verb))
    work = case.build(CPU, True)
    bound = case.bind(impl, work, layout)
    return all(case.check(bound, work, layout).within(case.tolerance) for _ in range(2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_plain_torch_moves_pages_both_ways_in_both_layouts(verb: str, layout: str) -> None:
    assert passes(Torch(CPU), verb, layout) and passes(TorchStaged(), verb, layout)


@pytest.mark.parametrize("verb", VERBS)
def test_ours_moves_pages_and_says_where_they_went(verb: str) -> None:
    for impl in (PmOps(), PmOpsByLayer()):
        assert passes(impl, verb, PAGE_MAJOR)
        with pytest.raises(Unsupported, match="no runs of bytes"):
            passes(impl, verb, LAYER_MAJOR)


def test_offloads_give_back_the_pages_of_the_one_before() -> None:
    """There is room on the host for one of them."""
    case = transfer_case("transfer", shape("offload"))
    work = case.build(CPU, True)
    bound = case.bind(PmOps(), work, PAGE_MAJOR)
    for _ in range(4):
        bound.run()
    assert bound.pages is not None and sorted(bound.pages()) == work.spare


def flip(run_of_bytes: torch.Tensor) -> None:
    run_of_bytes[-1:].bitwise_xor_(1)


def changed(verb: str, layout: str, change: Callable[[Any], None]) -> bool:
    """Whether a right call passes the check after ``change(work)`` has been done behind its back."""
    case = transfer_case("transfer", shape(verb))
    work = case.build(CPU, True)
    right = case.bind(Torch(CPU), work, layout)

    def run() -> None:
        right.run()
        change(work)

    return case.check(Bound(run), work, layout).within(case.tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_one_wrong_bit_on_either_side_is_wrong(verb: str, layout: str) -> None:
    assert changed(verb, layout, lambda work: None)
    for side, place in product((0, 1), ((0, 0), (-1, -1))):
        assert not changed(verb, layout, lambda work, at=(side, place): flip(work.sides(layout)[at[0]][at[1]]))


@pytest.mark.parametrize("verb", VERBS)
def test_a_call_that_moves_nothing_is_wrong_though_an_earlier_one_was_right(verb: str) -> None:
    for layout in LAYOUTS:
        case = transfer_case("transfer", shape(verb))
        work = case.build(CPU, True)
        right = case.bind(Torch(CPU), work, layout)
        assert case.check(right, work, layout).within(0.0)
        assert not case.check(Bound(lambda: None), work, layout).within(0.0)


def test_bytes_that_lie_side_by_side_are_compared_too() -> None:
    case = transfer_case("transfer", shape("offload"))
    work = case.build(CPU, True)
    bound = case.bind(TorchStaged(), work, LAYER_MAJOR)

    def run() -> None:
        bound.run()
        bound.out[3, 2, -1:].bitwise_xor_(1)

    assert case.check(bound, work, LAYER_MAJOR).within(0.0)
    assert not case.check(Bound(run, bound.out), work, LAYER_MAJOR).within(0.0)


@pytest.mark.parametrize("name", REPACKS)
def test_repacks_are_compared_with_every_row_by_its_layout(name: str) -> None:
    case = repack_case("transfer", repack(name))
    for impl in (PmOps(), Torch(CPU)):
        work = case.build(CPU, True)
        bound = case.bind(impl, work, PAGE_MAJOR)
        assert all(case.check(bound, work, PAGE_MAJOR).within(0.0) for _ in range(2))
        stray = Bound(lambda bound=bound, work=work: (bound.run(), work.target.buffer[-1:].bitwise_xor_(1)))
        assert not case.check(stray, work, PAGE_MAJOR).within(0.0)
        assert not case.check(Bound(lambda: None), work, PAGE_MAJOR).within(0.0)
        with pytest.raises(Unsupported):
            case.bind(impl, work, LAYER_MAJOR)


def test_amounts_are_the_bytes_that_cross_until_the_call_has_done_its_work() -> None:
    page = 3 * 2 * 2 * 3 * 4 * 4  # layers, K and V, heads, dim, tokens, bytes
    amounts = {verb: transfer_case("transfer", shape(verb)).amount for verb in VERBS}
    once = 5 * page
    assert amounts == {
        "offload": once, "restore": once, "both ways": 2 * once, "first layer": once / 3, "last layer": once
    }  # fmt: skip
    assert repack_case("transfer", repack("some heads")).amount == 2 * 8 * 4 * 2 * 2 * 2 * 4 * 4
    every = [case.build.args[0] for case in cases("transfer", torch.device("cuda"), False)]
    sizes = {each.name: each.layout.page_bytes for each in every if isinstance(each, TransferShape)}
    assert sizes["offload 256 pages of 2 MiB"] == 2 << 20 and sizes["restore 256 pages of 512 KiB"] == 512 << 10
    assert sizes["both ways 256 pages of 128 KiB"] == 128 << 10 and sizes["offload 256 pages of 32 KiB"] == 32 << 10


def test_what_goes_to_another_gpu_is_counted_once_and_set_against_a_copy_to_it() -> None:
    found = [repack_case("peer", each) for each in PEER]
    assert [case.amount for case in found] == [256 * (2 << 20), 256 * (64 << 10), 256 * (1 << 20)]
    for case in found:
        assert limit_of({"suite": case.suite, "case": case.name, "gb_s": 1.0}) == TO_PEER


def test_kinds_units_and_clocks() -> None:
    every = {case.name: case for case in cases("transfer", torch.device("cuda"), False)}
    assert {case.kind for case in every.values()} == {"transfer", "prefix", "repack", "host transfer"}
    assert all(case.apart is (case.kind != "repack") and not case.graph for case in every.values())
    assert all(case.idle is (case.kind == "prefix") for case in every.values())
    assert all((case.unit is None) is case.name.startswith("host time") for case in every.values())


class FakeSwap:
    """vLLM's batch of copies on the CPU; keeps how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, bool]] = []
        self.library = torch.library.Library("_C_cache_ops", "FRAGMENT")
        self.library.define(SWAP_SCHEMA)
        self.library.impl("swap_blocks_batch", self.swap, "CPU")

    def swap(self, src_ptrs, dst_ptrs, sizes, is_src_access_order_any=False):
        self.calls.append((len(sizes), is_src_access_order_any))
        for src, dst, size in zip(*(x.tolist() for x in (src_ptrs, dst_ptrs, sizes)), strict=True):
            ctypes.memmove(dst, src, size)


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[tuple[Path, FakeSwap]]:
    pytest.importorskip("triton")
    (tmp_path / LIBRARY).write_bytes(b"a library")
    fake = FakeSwap()
    yield write_files(tmp_path, VLLM_FILES), fake
    fake.library._destroy()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_vllm_swaps_blocks_in_one_call_each_way(verb: str, layout: str, swap: tuple[Path, FakeSwap]) -> None:
    """Only what comes from pinned memory, which nobody writes meanwhile, may be read out of stream order."""
    parts = 5 * (6 if layout == LAYER_MAJOR else 1)
    calls = {"offload": [(parts, False)], "both ways": [(parts, False), (parts, True)]}.get(verb, [(parts, True)])
    for impl in (VLLMSwap(swap[0]), VLLMSwapTriton(swap[0])):
        swap[1].calls.clear()
        assert passes(impl, verb, layout)
        assert swap[1].calls == 2 * calls


def test_vllms_files_have_their_versions_and_what_is_not_there_is_missing(
    tmp_path: Path, swap: tuple[Path, FakeSwap]
) -> None:
    assert VLLMSwap(swap[0]).version().startswith(f"{LIBRARY} sha256 ")
    assert VLLMSwapTriton(swap[0]).version().startswith("swap_blocks_triton.py sha256 ")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(Missing, match=f"{LIBRARY} is neither in vLLM's installation nor in the folder"):
        VLLMSwap(empty)


def test_a_library_that_does_not_load_is_missing(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"no library")
    with pytest.raises(Missing, match="does not load with torch"):
        VLLMSwap(tmp_path)
