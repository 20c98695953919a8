"""Where the tensors of a call may lie: buffers at multiples of 16 bytes, what is read apart from what is written."""

from collections.abc import Iterator
from typing import Any

import numpy
import oracle
import pytest
import torch
from torch import Tensor

import pm_ops
from pm_ops.testing import fill_random, sample_inputs, writes_only

NAMES = sorted(n[8:] for n in torch._C._dispatch_get_all_op_names() if n.startswith("pm_ops::") and n[8] != "_")
WRITTEN = {
    name: a.name for name in NAMES for a in getattr(torch.ops.pm_ops, name).default._schema.arguments if a.alias_info
}
BUFFERS = {"buffer", "source", "target"}


def call(name: str, values: dict[str, Any]) -> None:
    getattr(torch.ops.pm_ops, name).default(**values)


def samples(name: str) -> Iterator[dict[str, Any]]:
    """The arguments of every sample, by name."""
    arguments = getattr(torch.ops.pm_ops, name).default._schema.arguments
    for args, kwargs in sample_inputs(name):
        yield dict(zip((a.name for a in arguments), args, strict=False)) | kwargs


def rounded(nbytes: int) -> int:
    return (nbytes + 15) // 16 * 16


def placed(memory: Tensor, at: int, x: Tensor) -> Tensor:
    """A contiguous copy of ``x`` from a byte of ``memory`` on."""
    return memory[at : at + x.nbytes].view(x.dtype).view(x.shape).copy_(x)


@pytest.mark.parametrize("name", WRITTEN)
def test_nothing_that_is_read_shares_a_byte_with_what_is_written(name: str) -> None:
    written, seen = WRITTEN[name], set()
    for values in samples(name):
        target = values[written]
        tensors = {key: x for key, x in values.items() if isinstance(x, Tensor) and x.numel() and key != written}
        for other, x in tensors.items():
            if other in seen or not target.numel():
                continue
            seen.add(other)
            room = rounded(x.nbytes)
            for at, target_at, apart in (
                (0, room, True),
                (16, room, False),
                ((target.nbytes - 1) // 16 * 16, 0, False),
                (rounded(target.nbytes), 0, True),
            ):
                memory = torch.empty(rounded(target.nbytes) + 2 * room, dtype=torch.uint8)
                fill_random(memory)
                moved = {written: placed(memory, target_at, target), other: placed(memory, at, x)}
                if apart:
                    call(name, {**values, **moved})
                else:
                    with writes_only(memory, []), pytest.raises(ValueError, match=f"^{other} and {written} share mem"):
                        call(name, {**values, **moved})
    assert len(seen) >= 2 or name == "zero_pages"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "merge_attention"])
def test_a_buffer_begins_at_a_multiple_of_16_bytes(name: str) -> None:
    values = next(samples(name))
    for buffer in BUFFERS & values.keys():
        memory = torch.empty(values[buffer].numel() + 16, dtype=torch.uint8)
        for at in (1, 8, 15):
            moved = {**values, buffer: placed(memory, at, values[buffer])}
            with writes_only(memory, []), pytest.raises(ValueError, match=f"^{buffer} begins {at} bytes behind"):
                call(name, moved)
        call(name, {**values, buffer: placed(memory, 16, values[buffer])})


def test_memory_is_shared_whatever_storage_it_is_seen_by() -> None:
    array = numpy.zeros(4096, dtype=numpy.uint8)
    skip = -array.ctypes.data % 16
    whole, behind = (torch.from_numpy(array[skip + at : skip + at + 2048]) for at in (0, 64))
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 8, 4, torch.float32), 8, buffer=behind)
    rows = whole[:256].view(1, -1)
    with writes_only(behind, []), pytest.raises(ValueError, match="^rows and buffer share memory"):
        pool.scatter([3], rows)


def test_rows_of_the_pool_itself_are_refused_with_the_remedy() -> None:
    pool = pm_ops.PagePool(pm_ops.page_major(2, 2, 8, 4, torch.float32), 6)
    fill_random(pool.buffer)
    rows, slots = pool.view(0, "key")[3], torch.arange(4)
    with writes_only(pool.buffer, []):
        with pytest.raises(ValueError, match=r"rows and buffer share memory.*; pass rows\.clone\(\)"):
            pool.scatter([0, 1], pool.pages[2:4])
        with pytest.raises(ValueError, match=r"key and buffer share memory.*; pass key\.clone\(\)"):
            pm_ops.store_kv(pool, 0, rows, None, slots)
    pm_ops.store_kv(pool, 0, rows.clone(), None, slots)
    assert torch.equal(pool.view(0, "key")[0].view(torch.int32), rows.view(torch.int32))


@pytest.mark.parametrize("compiling", [False, True])
def test_a_part_of_a_buffer_is_found_while_another_thread_compiles(
    compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then ``torch.compiler.is_compiling()`` holds in every thread."""
    pool = pm_ops.PagePool(pm_ops.page_major(1, 1, 8, 4, torch.float32), 3)
    memory = torch.zeros(2048, dtype=torch.uint8)
    fill_random(memory)
    part = memory[512 : 512 + pool.buffer.numel()]
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", compiling)
    assert torch.compiler.is_compiling() == compiling
    row, slots = torch.randn(1, 1, 8), torch.tensor([5])
    plane = pool.plane(0, "key")
    first = 512 + oracle.address(plane.geometry, 4, 5)
    with writes_only(memory, range(first, first + 32)):
        torch.ops.pm_ops.store_kv(part, row, None, slots, plane.geometry, None, 4, torch.float32, None)
    assert memory[first : first + 32].equal(row.flatten().view(torch.uint8))
    second = range(512 + 2 * pool.layout.page_bytes, 512 + 3 * pool.layout.page_bytes)
    with writes_only(memory, second):
        torch.ops.pm_ops.zero_pages(part, torch.tensor([2]), pool.region)
    assert not memory[second.start : second.stop].any()
