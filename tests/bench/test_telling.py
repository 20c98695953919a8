"""The clock, the progress display, the plots, and the processes that compile ahead."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from bench.fakes import CPU

from pm_ops.bench import ahead
from pm_ops.bench.clock import Clock, fastest
from pm_ops.bench.plots import draw
from pm_ops.bench.progress import Progress
from pm_ops.bench.report import Report
from pm_ops.bench.results import Results


def test_times_are_medians_in_microseconds() -> None:
    clock, calls = Clock(CPU, quick=True), []

    def run() -> None:
        calls.append(None)
        time.sleep(0.1 if len(calls) == 3 else 0.002)

    assert 2000 <= clock.median_us(run) < 50_000 and len(calls) > 5
    assert 2000 <= clock.host_us(run) < 50_000 and 2000 <= clock.host_us(run, apart=True) < 50_000
    assert 2000 <= clock.apart_us(run) < 50_000


def test_of_several_ways_the_first_is_taken_where_no_gpu_tells() -> None:
    ways = {"a": lambda: 1, "b": lambda: 2}
    run, name = fastest(ways, CPU)
    assert (run(), name) == (1, "a")


def test_plain_lines_have_seconds_count_and_case(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(12, bar=False)
    progress.case("store 1 token")
    progress.step(4)
    progress.case("decode B1")
    progress.close()
    first, second = capsys.readouterr().err.splitlines()
    assert first.split(maxsplit=3)[2:] == ["0/12", "store 1 token"] and second.split(maxsplit=3)[2:] == [
        "4/12",
        "decode B1",
    ]


def test_a_bar_is_drawn_with_tqdm_and_its_absence_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tqdm = MagicMock()
    tqdm.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "tqdm", tqdm)
    progress = Progress(12, bar=True)
    progress.case("store 1 token")
    progress.step(3)
    progress.close()
    bar = tqdm.tqdm.return_value
    bar.set_description.assert_called_once_with("store 1 token")
    bar.update.assert_called_once_with(3)
    bar.close.assert_called_once_with()
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    Progress(12, bar=True).case("store 1 token")
    assert "tqdm is not installed" in capsys.readouterr().err


@pytest.fixture
def report() -> Report:
    results = Results({"device": "a GPU"})
    results.add("limits", "copy 1 GiB", "torch", "-", 1.0, 0.0, "gb_s", 4e6)
    for layout in ("page-major", "layer-major"):
        results.add("store", "1 token", "pm_ops", layout, 2.0, 0.0, "gb_s", 6e6)
    results.add("store", "1 token", "vllm", "page-major", 1.0, 1.0, "gb_s", 6e6)
    results.mark_wrong("vllm")
    results.add("host", "attention", "pm_ops", "page-major", 12.0, 0.0, None, 0.0)
    return Report(results)


def test_each_suite_has_a_plot_without_wrong_results(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib, pyplot = MagicMock(), MagicMock()
    matplotlib.__spec__ = sys.__spec__
    axes = MagicMock()
    pyplot.subplots.return_value = (MagicMock(), axes)
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    paths = draw(report, tmp_path, "gpu")
    assert paths == [tmp_path / "gpu-store.png", tmp_path / "gpu-host.png"]
    assert [call.args[1] for call in axes.barh.call_args_list] == [3000.0, 3000.0, 12.0]
    assert [call.kwargs["hatch"] for call in axes.barh.call_args_list] == [None, "////", None]
    axes.axvline.assert_called_once()  # the copy limit of the store; host times have none
    assert axes.axvline.call_args.args == (4000.0,)


def played_charts(monkeypatch: pytest.MonkeyPatch, number: int) -> list[MagicMock]:
    """The axes of so many plots, of a matplotlib that draws nothing."""
    matplotlib, pyplot = MagicMock(), MagicMock()
    matplotlib.__spec__ = sys.__spec__
    charts = [MagicMock() for _ in range(number)]
    pyplot.subplots.side_effect = [(MagicMock(), axes) for axes in charts]
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    return charts


def test_transfers_across_pcie_on_the_device_and_host_times_are_plots_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results({"device": "a GPU"})
    for case, rate in (("copy 1 GiB", 4e6), ("to pinned host memory", 5e4), ("from pinned host memory", 4e4)):
        results.add("limits", case, "torch", "-", 1.0, 0.0, "gb_s", rate)
    for case, unit in (("offload", "gb_s"), ("host time, offload", None), ("repack", "gb_s"), ("restore", "gb_s")):
        results.add("transfer", case, "pm_ops", "page-major", 1.0, 0.0, unit, 3e4)
    charts = played_charts(monkeypatch, 3)
    names = ["gpu-transfer.png", "gpu-transfer-host.png", "gpu-transfer-repack.png"]
    assert [path.name for path in draw(Report(results), tmp_path, "gpu")] == names
    assert [[call.args[1] for call in axes.barh.call_args_list] for axes in charts] == [[30.0, 30.0], [1.0], [30.0]]
    assert [[call.args[0] for call in axes.axvline.call_args_list] for axes in charts] == [[50.0, 40.0], [], [4000.0]]


def test_states_are_a_plot_of_bytes_and_one_of_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results({"device": "a GPU"})
    for case, unit in (("update", "gb_s"), ("prefill", "tflop_s"), ("another update", "gb_s")):
        results.add("state", case, "pm_ops", "page-major", 1.0, 0.0, unit, 3e6)
    charts = played_charts(monkeypatch, 2)
    names = ["gpu-state.png", "gpu-state-prefill.png"]
    assert [path.name for path in draw(Report(results), tmp_path, "gpu")] == names
    assert [axes.barh.call_count for axes in charts] == [2, 1]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_plots_are_png_files(report: Report, tmp_path: Path) -> None:
    for path in draw(report, tmp_path, "gpu"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_are_no_plots_but_a_message(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        draw(report, tmp_path, "gpu")
    assert list(tmp_path.iterdir()) == []


def interpreter(tmp_path: Path, body: str) -> str:
    """An executable that stands in for python and leaves its arguments in a file of their own."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/ran.$$"\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_each_share_is_compiled_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "exit 0"))
    said = ahead.compile_in_processes(["--suite", "store"], 3)
    assert said.startswith("kernels compiled ahead by 3 processes in ") and said.endswith(" s")
    ran = sorted(path.read_text().split() for path in tmp_path.glob("ran.*"))
    assert ran == [["-m", "pm_ops.cli", "bench", "--suite", "store", "--share", f"{i}/3"] for i in range(3)]


def test_processes_that_fail_or_hang_are_told_of_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "echo out of memory >&2\nexit 3"))
    assert "; 2 did not finish their share: out of memory" in ahead.compile_in_processes([], 2)
    monkeypatch.setattr(sys, "executable", interpreter(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(ahead, "_TIMEOUT", 0.5)
    start = time.monotonic()
    assert "; 1 did not finish their share: stopped after 0 s" in ahead.compile_in_processes([], 1)
    assert time.monotonic() - start < 30


def test_some_cores_are_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, jobs in ((1, 1), (2, 1), (16, 12), (8, 6), (128, 12)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert ahead.default_jobs() == jobs
