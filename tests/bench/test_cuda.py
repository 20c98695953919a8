"""``pm-ops bench`` on a GPU: graphs, events, limits, processes that compile."""

import json
from pathlib import Path

import pytest
import torch

from pm_ops import cli
from pm_ops.bench.clock import captured, fastest
from pm_ops.bench.implementation import Bound

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


def test_the_faster_way_is_found() -> None:
    x = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    run, name = fastest({"all": x.zero_, "little": x[:16].zero_}, x.device)
    assert name == "little"
    assert run().numel() == 16
