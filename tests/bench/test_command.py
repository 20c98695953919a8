"""``pm-ops bench`` from its options to its files, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pm_ops
from pm_ops import cli
from pm_ops.bench.cases import SUITES

ROOT = Path(__file__).parents[2]
OPTIONS = ["bench", "--device", "cpu", "--quick"]


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "cpu.json").read_text())


def test_a_run_over_all_suites_checks_times_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    assert cli.main([*OPTIONS, "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == threads
    read = results(tmp_path)
    assert set(read) == {"versions", "rows", "notes"}
    assert set(read["versions"]) == {"pm_ops", "python", "torch", "device"}
    measured = [suite for suite in SUITES if suite != "peer"]
    assert list(dict.fromkeys(row["suite"] for row in read["rows"])) == measured
    common = {"suite", "case", "impl", "layout", "median_us", "rel_err"}
    for row in read["rows"]:
        assert set(row) - common in ({"gb_s"}, {"tflop_s"}) and common <= set(row)
        assert row["median_us"] > 0 and row["rel_err"] < 1e-4
    for suite in measured[1:]:
        impls = {(row["impl"], row["layout"]) for row in read["rows"] if row["suite"] == suite}
        torchs = {("torch", "page-major"), ("torch", "layer-major")} if suite != "state" else set()
        assert {("pm_ops", "page-major"), *torchs} <= impls
    notes = "\n".join(read["notes"])
    assert "measured on the CPU" in notes and "FAILED" not in notes
    assert "peer: not measured: it needs a second GPU" in notes
    for name in ("fa3", "flashinfer", "vllm", "vllm_swap", "sglang"):
        assert f"{name}: not measured: its kernels need a CUDA device" in notes
    printed = capsys.readouterr()
    assert (tmp_path / "cpu.txt").read_text().strip() in printed.out
    assert "written to" in printed.out and "decode B4 x 64" in printed.err


def test_suites_and_implementations_can_be_chosen(tmp_path: Path) -> None:
    assert cli.main([*OPTIONS, "--suite", "store,pages", "--impl", "torch", "--out", str(tmp_path)]) == 0
    rows = results(tmp_path)["rows"]
    assert {row["suite"] for row in rows} == {"limits", "store", "pages"} and {row["impl"] for row in rows} == {"torch"}


def test_cases_can_be_chosen_by_a_part_of_their_names(tmp_path: Path) -> None:
    options = ["--suite", "store,transfer", "--case", "offload 16", "--impl", "pm_ops", "--out", str(tmp_path)]
    assert cli.main([*OPTIONS, *options]) == 0
    names = {row["case"] for row in results(tmp_path)["rows"] if row["suite"] != "limits"}
    assert names and all("offload 16" in name for name in names)


def test_without_out_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*OPTIONS, "--suite", "limits"]) == 0
    assert list(tmp_path.iterdir()) == [] and "copy 16 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "stores"], "--suite 'stores': stores is unknown; use limits, store, decode"),
        (["--suite", ","], "--suite ',': nothing is unknown"),
        (["--impl", "pm_ops,fa2"], "--impl 'pm_ops,fa2': fa2 is unknown; use pm_ops, "),
        (["--suite", "store", "--case", "64 TiB"], "--case '64 TiB' is in no case's name in store"),
        (["--peers", "/no/such/folder"], "--peers /no/such/folder is no folder"),
        (["--device", "tpu"], "--device tpu: there are cuda and cpu"),
    ],
)
def test_bad_options_end_with_status_2_and_one_line(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*OPTIONS, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(f"pm-ops bench: {said}") and printed.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_a_wrong_result_of_ours_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = pm_ops.store_kv
    monkeypatch.setattr(pm_ops, "store_kv", lambda p, layer, k, v, slots: right(p, layer, v, k, slots))
    assert cli.main([*OPTIONS, "--suite", "store", "--impl", "pm_ops,torch", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed and "\nFAILED pm_ops store 1 token, page-major: wrong result" in printed
    assert results(tmp_path)["notes"][0].startswith("FAILED pm_ops store 1 token, page-major: wrong result")


def test_an_error_of_ours_ends_with_status_1_and_the_rest_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(pm_ops, "store_kv", broken)
    assert cli.main([*OPTIONS, "--suite", "store", "--impl", "pm_ops,torch", "--out", str(tmp_path)]) == 1
    rows = [row for row in results(tmp_path)["rows"] if row["case"] == "64 tokens"]
    assert [(row["impl"], row["layout"]) for row in rows] == [
        ("pm_ops", "layer-major"), ("torch", "page-major"), ("torch", "layer-major")
    ]  # fmt: skip


def test_a_share_measures_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main([*OPTIONS, "--suite", "store", "--share", "0/1", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


def test_processes_compile_ahead_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--suite", "store", "--impl", "pm_ops", "--jobs", "1", "--out", str(tmp_path)]
    assert cli.main([*OPTIONS, *options]) == 0
    (note,) = [note for note in results(tmp_path)["notes"] if "compiled ahead" in note]
    assert note.startswith("kernels compiled ahead by 1 processes in ") and "did not finish" not in note


def test_it_runs_without_triton_and_other_commands_run_without_it() -> None:
    code = """
import sys
sys.modules["triton"] = None
from pm_ops import cli
assert cli.main(["inspect", "--layers", "2", "--kv-heads", "1", "--head-dim", "8"]) == 0
assert "pm_ops.bench.measure" not in sys.modules
assert cli.main(["bench", "--device", "cpu", "--quick", "--suite", "store,decode"]) == 0
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
