"""The runner: what becomes a row, what a note, what a failure, and that one failure does not stop the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench.fakes import CPU, STORE

from pm_ops.bench.case import Case
from pm_ops.bench.clock import Clock
from pm_ops.bench.implementation import Bound, Implementation, Missing, Unsupported
from pm_ops.bench.memory import LAYOUTS, PAGE_MAJOR, Memory
from pm_ops.bench.progress import Progress
from pm_ops.bench.results import Results
from pm_ops.bench.runner import DeviceLost, Runner, compile_ahead
from pm_ops.bench.suites import store_case
from pm_ops.bench.work import StoreWork


class Store(Implementation):
    """A store by plain indexing, or what ``broken`` makes of it."""

    kinds = frozenset({"store", "host store"})

    def __init__(self, name: str, broken: Callable[[StoreWork, Memory], Any] | None = None, ours: bool = False) -> None:
        self.name, self.broken, self.ours, self.calls = name, broken, ours, 0

    def store(self, work: StoreWork, memory: Memory) -> Bound:
        at = (work.slots // 4, work.slots % 4)

        def run() -> None:
            self.calls += 1
            memory.key[at], memory.value[at] = work.key, work.value
            if self.broken is not None:
                self.broken(work, memory)

        return Bound(run, note="by indexing" if self.broken is None else None)


def raising(error: BaseException) -> Callable[[StoreWork, Memory], None]:
    def broken(work: StoreWork, memory: Memory) -> None:
        raise error

    return broken


def run(*implementations: Implementation, cases: list[Case] | None = None) -> Results:
    results = Results({})
    todo = cases or [store_case("store", STORE)]
    Runner(implementations, Clock(CPU, quick=True), results, Progress(0, bar=False)).run(todo)
    return results


def test_a_right_result_is_a_row_a_layout_with_its_note() -> None:
    results = run(Store("peer"))
    assert [(row["impl"], row["layout"], row["rel_err"]) for row in results.rows] == [
        ("peer", layout, 0.0) for layout in LAYOUTS
    ]
    assert all(row["median_us"] > 0 and row["gb_s"] > 0 and "tflop_s" not in row for row in results.rows)
    assert results.failures == []
    assert results.notes == ["peer: by indexing [store store, page-major; store store, layer-major]"]


def test_a_wrong_result_is_a_failure_and_keeps_its_row() -> None:
    def stray(work: StoreWork, memory: Memory) -> None:
        memory.buffer[:1] += 1

    results = run(Store("peer", stray), Store("other"))
    assert [row["rel_err"] for row in results.rows] == [1.0, 1.0, 0.0, 0.0] and results.wrong == {0, 1}
    assert len(results.failures) == 2
    assert results.notes[0].startswith("FAILED peer store store, page-major: wrong result, relative error 1.00e+00")


def test_a_result_that_is_wrong_only_after_many_calls_is_wrong() -> None:
    peer = Store("peer")

    def late(work: StoreWork, memory: Memory) -> None:
        if peer.calls > 3:
            memory.key[work.slots[0] // 4, work.slots[0] % 4] = 0

    peer.broken = late
    assert run(peer).wrong == {0, 1}


@pytest.mark.parametrize("reason", [Unsupported("it cannot"), Missing("it cannot"), ImportError("it cannot")])
def test_what_cannot_do_a_case_is_noted_and_no_failure(reason: Exception) -> None:
    for ours in (False, True):
        results = run(Store("some", raising(reason), ours), Store("other"))
        assert [row["impl"] for row in results.rows] == ["other", "other"] and results.failures == []
        assert "some: it cannot [store store, page-major; store store, layer-major]" in results.notes


def test_an_error_of_a_peer_is_a_note_and_one_of_ours_a_failure() -> None:
    error = RuntimeError("no\n  such kernel")
    peers = run(Store("peer", raising(error)), Store("other"))
    assert len(peers.rows) == 2 and peers.failures == []
    assert peers.notes[0].startswith("peer: not measured: RuntimeError: no such kernel [store store, page-major;")
    ours = run(Store("pm_ops", raising(error), ours=True), Store("other"))
    assert len(ours.rows) == 2
    assert ours.failures == [f"pm_ops store store, {layout}: RuntimeError: no such kernel" for layout in LAYOUTS]


def test_a_case_whose_data_cannot_be_made_is_a_failure_and_the_next_one_runs() -> None:
    def build(device: torch.device, fill: bool) -> Any:
        raise MemoryError("too large")

    case = store_case("store", STORE)
    results = run(Store("peer"), cases=[Case(**{**vars(case), "build": build, "name": "huge"}), case])
    assert results.failures == ["store huge: its data could not be made: MemoryError: too large"]
    assert len(results.rows) == 2


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: Clock) -> None:
        raise RuntimeError("an illegal memory access")

    results = Results({})
    runner = Runner([Store("peer", raising(RuntimeError("x")))], Clock(CPU, True), results, Progress(0, bar=False))
    monkeypatch.setattr(Clock, "wait", lost)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        runner.run([store_case("store", STORE)])


def test_implementations_take_part_only_where_they_say() -> None:
    class Bystander(Store):
        kinds = frozenset({"decode"})

    case = store_case("store", STORE)
    assert run(Bystander("none")).rows == []
    assert Runner.steps([case, case], [Bystander("none"), Store("peer")]) == 2 * len(LAYOUTS)


def test_host_times_have_no_rate() -> None:
    results = run(Store("peer"), cases=[store_case("host", STORE)])
    assert [row["gb_s"] for row in results.rows] == [None, None] and all(row["median_us"] > 0 for row in results.rows)


def test_compiling_ahead_calls_everything_once_in_one_share_and_passes_over_errors() -> None:
    class Quiet(Store):
        compiles = False

    cases = [store_case("store", STORE), store_case("host", STORE)]
    counts = []
    for share in range(3):
        peers = [Store("a"), Store("b", raising(RuntimeError("x"))), Store("c"), Quiet("d")]
        compile_ahead(cases, peers, CPU, share, 3)
        counts.append([peer.calls for peer in peers])
    assert [sum(column) for column in zip(*counts, strict=True)] == [4, 4, 4, 0]
    assert all(sum(row) == 4 for row in counts)


def test_the_memory_that_a_call_is_bound_to_is_that_of_the_layout() -> None:
    seen = []
    peer = Store("peer", lambda work, memory: seen.append(memory.pool is not None))
    run(peer)
    assert set(seen) == {True, False} and seen[0] is (LAYOUTS[0] == PAGE_MAJOR)
