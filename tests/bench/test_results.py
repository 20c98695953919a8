"""Results and what is told of them: the JSON form, ratios, shares, notes."""

import json
from pathlib import Path

import pytest

from pm_ops.bench.report import Report, aligned
from pm_ops.bench.results import Results


def words(line: str) -> str:
    return " ".join(line.split())


@pytest.fixture
def results() -> Results:
    r = Results({"device": "a GPU"})
    r.add("limits", "copy 1 GiB", "torch", "-", 1000.0, 0.0, "gb_s", 4e9)
    r.add("limits", "matmul 8192^3", "torch", "-", 1000.0, 1e-3, "tflop_s", 7e11)
    for impl, layout, us in (
        ("pm_ops", "page-major", 100.0), ("pm_ops", "layer-major", 80.0), ("fa3", "page-major", 110.0),
        ("fa3", "layer-major", 125.0), ("vllm", "page-major", 50.0),
    ):  # fmt: skip
        r.add("decode", "B1 x 2", impl, layout, us, 2e-3, "gb_s", 3e8)
    r.mark_wrong("vllm decode B1 x 2, page-major: wrong result")
    r.add("prefill", "B1", "pm_ops_fa3", "page-major", 10.0, float("inf"), "tflop_s", 3.5e9)
    r.add("host", "store", "pm_ops", "page-major", 12.0, 0.0, None, 0.0)
    return r


def test_rows_have_exactly_the_published_keys_and_units(results: Results) -> None:
    common = {"suite", "case", "impl", "layout", "median_us", "rel_err"}
    assert [set(row) - common for row in results.rows] == [
        {"tflop_s"} if row["case"].startswith(("matmul", "B1")) and row["suite"] != "decode" else {"gb_s"}
        for row in results.rows
    ]
    decode = results.rows[2]
    assert decode == {
        "suite": "decode", "case": "B1 x 2", "impl": "pm_ops", "layout": "page-major", "median_us": 100.0,
        "rel_err": 2e-3, "gb_s": 3000.0,
    }  # fmt: skip
    assert results.rows[1]["tflop_s"] == 700.0 and results.rows[-2]["tflop_s"] == 350.0


def test_the_file_is_strict_json_with_versions_rows_and_notes(results: Results, tmp_path: Path) -> None:
    results.remarks.append("a remark")
    results.because("fa3", "it\n cannot", "decode x, page-major")
    results.because("fa3", "it cannot", "decode y, page-major")
    path = tmp_path / "folder" / "gpu.json"
    results.write(path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    read = json.loads(path.read_text(), parse_constant=refuse)
    assert read == {"versions": {"device": "a GPU"}, "rows": results.rows, "notes": results.notes}
    assert read["rows"][-2]["rel_err"] is None
    assert read["notes"] == [
        "FAILED vllm decode B1 x 2, page-major: wrong result",
        "a remark",
        "fa3: it cannot [decode x, page-major; decode y, page-major]",
    ]
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


def test_the_best_peer_is_the_fastest_right_one_that_is_not_ours(results: Results) -> None:
    report = Report(results)
    best = report.best_peer(report.cases["decode", "B1 x 2"])
    assert best is not None and (best["impl"], best["layout"]) == ("fa3", "page-major")
    assert report.best_peer(report.cases["prefill", "B1"]) is None


def test_shares_are_of_the_limits_of_the_same_run(results: Results) -> None:
    report = Report(results)
    assert [report.share(row) for row in results.rows[1:3]] == [1.0, 0.75]
    assert report.share(results.rows[-2]) == 0.5 and report.share(results.rows[-1]) is None
    without = Results({})
    without.rows = results.rows[2:]
    assert Report(without).share(results.rows[2]) is None


def test_transfers_are_shares_of_the_pinned_copies_in_their_direction() -> None:
    results = Results({})
    limits = {"copy 1 GiB": 4000.0, "to pinned host memory, 256 MiB": 50.0, "from pinned host memory, 256 MiB": 40.0,
              "to and from pinned host memory at once, 256 MiB each": 80.0}  # fmt: skip
    for case, rate in limits.items():
        results.add("limits", case, "torch", "-", 1.0, 0.0, "gb_s", rate * 1e3)
    for case in ("offload 2 pages", "restore 2 pages", "both ways 2 pages", "repack 2 pages"):
        results.add("transfer", case, "pm_ops", "page-major", 1.0, 0.0, "gb_s", 20e3)
    results.add("transfer", "host time, offload 2 pages", "pm_ops", "page-major", 1.0, 0.0, None, 0.0)
    results.add("pages", "restore-like 2 pages", "pm_ops", "page-major", 1.0, 0.0, "gb_s", 20e3)
    report = Report(results)
    assert [report.share(row) for row in results.rows[len(limits) :]] == [0.4, 0.5, 0.25, 0.005, None, 0.005]


def test_the_table_has_a_line_a_row_and_marks_what_is_wrong(results: Results) -> None:
    lines = Report(results).table().splitlines()
    assert len(lines) == 1 + len(results.rows)
    assert words(lines[3]) == "decode B1 x 2 pm_ops page-major 100.0 3000 GB/s 0.750 0.909 2.0e-03"
    assert lines[7].endswith("WRONG") and "inf" in lines[8]
    assert [line.endswith("WRONG") for line in lines].count(True) == 1


def test_the_summary_sets_page_major_against_layer_major_and_the_best_peer(results: Results) -> None:
    decode, prefill, host = Report(results).summary().splitlines()[1:]
    assert words(decode) == "decode B1 x 2 pm_ops 100.0 3000 GB/s 0.750 1.250 0.909 fa3, page-major"
    assert words(prefill) == "prefill B1 pm_ops_fa3 10.0 350 TFLOP/s 0.500 no peer"
    assert words(host) == "host store pm_ops 12.0 no peer"


def test_the_text_has_everything_and_ends_with_the_summary(results: Results) -> None:
    report = Report(results)
    text = report.text()
    assert text.startswith("device       a GPU") and text.endswith(report.summary())
    assert "note: FAILED vllm" in text and report.table() in text


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    assert aligned(("name", "n"), [("a", "1.0"), ("bcdef", "10.0")]) == "name      n\na       1.0\nbcdef  10.0"
    assert aligned(("name", "n"), []) == "name  n"
