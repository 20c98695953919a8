"""A Hopper kernel whose barriers order accesses to shared memory, all but one, has a race, and the clocks see it.

That the kernels as they are have none the tests that run their Python show: the interpreter checks every access.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernels.cases import attention_case
from kernels.gluon_clocks import CELL, Accesses, Clocks, Partition, Race
from kernels.gluon_interpreter import Kernel
from kernels.mla_cases import mla_case

from pm_ops.kernels import attention_hopper, mla_hopper

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where there is a GPU")
KERNELS = Path(mla_hopper.__file__).parent
BF16 = torch.bfloat16
ATTENTION, LATENT_ATTENTION = attention_hopper._attention_hopper, mla_hopper._mla_hopper
CALLS = ("gl.thread_barrier()", "mbarrier.arrive(", "mbarrier.wait(", "async_copy.mbarrier_arrive(")
NEEDLESS = (
    ("mla_hopper_consume.py", "# all have read"),
    ("hopper_consume.py", "warpgroup_mma_wait(1,"),
    ("mla_hopper_consume.py", "warpgroup_mma_wait(1,"),
)
"""File, and what is in a line, or in that before it, of a barrier whose order is another's, too.

The first orders threads of one partition, as the compiler would; arrivals while a product still runs are followed by
those when it is done, which the producer waits for before it comes back to the place of the first.
"""


def text_of(name: str) -> list[str]:
    """Lines of a file by their number."""
    return ["", *(KERNELS / name).read_text().splitlines()]


def calls(name: str) -> list[int]:
    return [i for i, line in enumerate(text_of(name)) if line.lstrip().startswith(CALLS)]


def lines(files: tuple[str, ...]) -> list[tuple[str, int]]:
    found = []
    for name in files:
        text, signs = text_of(name), [sign for file, sign in NEEDLESS if file == name]
        found += [(name, i) for i in calls(name) if not any(sign in "".join(text[i - 1 : i + 1]) for sign in signs)]
    return found


@pytest.mark.parametrize(("name", "sign"), NEEDLESS)
def test_a_sign_of_a_needless_barrier_is_in_one_line_and_of_one_barrier(name, sign):
    (at,) = (i for i, line in enumerate(text_of(name)) if sign in line)
    assert len({at, at + 1}.intersection(calls(name))) == 1


def attend(without: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles of queries a program; boxes with an edge in the middle, and rows."""
    monkeypatch.setattr(attention_hopper, "_attention_hopper", Kernel(ATTENTION, False, without))
    monkeypatch.setattr(attention_hopper, "multiprocessors", lambda device: 1)
    for page_size in (16, 1):
        common: dict[str, Any] = dict(dtypes=(BF16,) * 3, page_size=page_size, dims=(64, 64), heads=(8, 1))
        attention_hopper.attention(attention_case("cpu", [400], [20], **common))


def attend_to_latents(without: tuple[str, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tiles as each consumer has the last of once, of boxes with an edge in the middle, and of rows."""
    monkeypatch.setattr(mla_hopper, "_mla_hopper", Kernel(LATENT_ATTENTION, False, without))
    monkeypatch.setattr(mla_hopper, "splits_of", lambda *args: 1)
    for page_size, length in ((64, 300), (64, 370), (1, 300)):
        common: dict[str, Any] = dict(dtypes=(BF16, BF16), dims=(256, 64), page_size=page_size, heads=2)
        mla_hopper.mla_attention(mla_case("cpu", [length], 1, **common))


OF_ATTENTION = ("hopper_consume.py", "hopper_produce.py")
OF_LATENTS = ("mla_hopper_consume.py", "mla_hopper_produce.py")
BARRIERS = [(attend, at) for at in lines(OF_ATTENTION)] + [(attend_to_latents, at) for at in lines(OF_LATENTS)]


@pytest.mark.parametrize(("run", "without"), BARRIERS, ids=[f"{name} {line}" for _, (name, line) in BARRIERS])
def test_a_barrier_that_orders_nothing_is_a_race(run, without, monkeypatch):
    with pytest.raises(Race):
        run(without, monkeypatch)


@pytest.mark.parametrize("run", [attend, attend_to_latents])
@pytest.mark.parametrize(
    "change",
    [
        (Clocks, "finish", lambda self, pending: None),  # arrivals ahead of the wait for products
        (Partition, "every_threads", Partition.one_threads),  # one thread that arrives for all that copy
        (Partition, "meet", lambda self: None),
    ],
    ids=["products", "copies", "stores"],
)
def test_what_is_not_waited_for_is_a_race(run, change, monkeypatch):
    run(None, monkeypatch)
    monkeypatch.setattr(*change)
    with pytest.raises(Race):
        run(None, monkeypatch)


def test_what_partitions_have_done_is_known_at_their_end():
    clocks = Clocks()
    accesses, places = Accesses(clocks, CELL), torch.arange(CELL)
    accesses.note(places, writes=True)
    kernel, (first, second) = clocks.partition, clocks.split(2)
    for partition in (first, second):  # reads beside one another
        clocks.here.partition = partition
        accesses.note(places, writes=False)
    with pytest.raises(Race, match="partition 1 is not behind a read by partition 0"):
        accesses.note(places, writes=True)
    clocks.here.partition = kernel
    with pytest.raises(Race, match="the kernel is not behind a read"):
        accesses.note(places, writes=True)
    clocks.join([first, second])
    accesses.note(places, writes=True)
