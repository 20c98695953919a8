"""``pm-ops bench`` on a GPU: graphs, events, limits, processes that compile."""

import json
import time
from pathlib import Path

import pytest
import torch

from pm_ops import cli
from pm_ops.bench.baseline import Torch
from pm_ops.bench.clock import Clock, captured, fastest
from pm_ops.bench.implementation import Bound
from pm_ops.bench.limits import measure_limits
from pm_ops.bench.ours import PmOps, PmOpsByLayer
from pm_ops.bench.progress import Progress
from pm_ops.bench.results import Results
from pm_ops.bench.runner import Runner
from pm_ops.bench.suites import cases, transfer_case
from pm_ops.bench.transfer_cases import PEER, TransferShape
from pm_ops.bench.transfer_torch import TorchStaged

pytestmark = pytest.mark.gpu


def test_suites_of_graphs_and_of_host_times_run_on_a_gpu(tmp_path: Path) -> None:
    options = ["--quick", "--suite", "store,host", "--impl", "pm_ops,torch", "--jobs", "1", "--out", str(tmp_path)]
    assert cli.main(["bench", *options]) == 0
    (path,) = tmp_path.glob("*.json")
    read = json.loads(path.read_text())
    assert {row["suite"] for row in read["rows"]} == {"limits", "store", "host"}
    assert {"triton", "cuda", "device"} <= set(read["versions"])
    assert all(row["rel_err"] is not None and row["rel_err"] < 1e-2 for row in read["rows"])


def test_a_captured_call_replays_into_the_same_result() -> None:
    x = torch.ones(4, device="cuda")
    replayed = captured(Bound(lambda: x * 2))
    x.fill_(3)
    result = replayed.run()
    assert result is replayed.out
    torch.testing.assert_close(result.cpu(), torch.full((4,), 6.0))


def test_everyone_waits_for_the_pages_that_cross() -> None:
    """Checks read in stream order behind each call. The pages are large enough that bytes on their way would show."""
    device = torch.device("cuda", torch.cuda.current_device())
    results, clock = Results({}), Clock(device, quick=True)
    runner = Runner([PmOps(), PmOpsByLayer(), Torch(device), TorchStaged()], clock, results, Progress(0, bar=False))
    for verb in ("offload", "restore", "both ways", "first layer", "last layer"):
        runner.run([transfer_case("transfer", TransferShape(verb, verb, 64, 160, layers=4, page_size=64))])
    assert results.failures == [] and all(row["rel_err"] == 0 for row in results.rows)
    assert len(results.rows) == 3 * 5 + 2 * 6, results.notes


def test_pinned_copies_are_limits_one_way_and_both_ways() -> None:
    results = Results({})
    measure_limits(Clock(torch.device("cuda", torch.cuda.current_device()), quick=True), results)
    pinned = [row for row in results.rows if "pinned host memory" in row["case"]]
    assert results.failures == [] and len(pinned) == 3
    assert all(row["gb_s"] > 0 and row["rel_err"] == 0 for row in pinned)


def test_a_call_that_begins_work_elsewhere_is_timed_until_the_current_stream_goes_on() -> None:
    clock, side = Clock(torch.device("cuda", torch.cuda.current_device()), quick=True), torch.cuda.Stream()
    x = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")

    def run(wait: bool) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(8):
                x.zero_()
        if wait:
            torch.cuda.current_stream().wait_stream(side)

    whole, started = clock.apart_us(lambda: run(True)), clock.apart_us(lambda: run(False))
    assert whole > 4 * started  # 8 GiB written, against a few launches


def test_what_the_host_does_counts_only_where_the_device_is_idle() -> None:
    clock, x = Clock(torch.device("cuda", torch.cuda.current_device()), quick=True), torch.empty(8, device="cuda")

    def run() -> None:
        until = time.perf_counter() + 0.0004
        while time.perf_counter() < until:
            pass
        x.zero_()

    assert clock.apart_us(run) < 200 and clock.apart_us(run, idle=True) > 400


def test_the_faster_way_is_found() -> None:
    x = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    run, name = fastest({"all": x.zero_, "little": x[:16].zero_}, x.device)
    assert name == "little"
    assert run().numel() == 16


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_pages_to_another_gpu_are_measured() -> None:
    device, results = torch.device("cuda", torch.cuda.current_device()), Results({})
    runner = Runner([PmOps()], Clock(device, quick=True), results, Progress(0, bar=False))
    runner.run(list(cases("peer", device, True)))
    assert results.failures == [] and [row["rel_err"] for row in results.rows] == [0.0] * len(PEER), results.notes
