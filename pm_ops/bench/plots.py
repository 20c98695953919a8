"""Bar charts of a run, one PNG a suite, where matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from .memory import LAYER_MAJOR
from .report import UNITS, Report, unit_of
from .results import Row

_COLOURS = {
    "pm_ops": "tab:blue",
    "pm_ops_fa3": "navy",
    "fa3": "tab:orange",
    "flashinfer": "tab:green",
    "vllm": "tab:red",
    "sglang": "tab:purple",
    "sglang_one_launch": "tab:pink",
    "torch": "tab:gray",
}


def draw(report: Report, folder: Path, stem: str) -> list[Path]:
    """Write ``<stem>-<suite>.png`` for every suite in the results; their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("matplotlib is not installed: pip install matplotlib")
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    paths = []
    for suite in dict.fromkeys(suite for suite, _ in report.cases if suite != "limits"):
        cases = {case: rows for (of, case), rows in report.cases.items() if of == suite}
        path = folder / f"{stem}-{suite}.png"
        _draw_suite(pyplot, report, suite, cases, path)
        paths.append(path)
    return paths


def _draw_suite(pyplot: Any, report: Report, suite: str, cases: dict[str, list[Row]], path: Path) -> None:
    """A group of horizontal bars for each case; layer-major hatched, wrong results left out."""
    bars = sum(len(rows) + 1 for rows in cases.values())
    figure, axes = pyplot.subplots(figsize=(10, 0.9 + 0.17 * bars))
    y, ticks, shown = 0, [], dict[str, Any]()
    unit = next((unit_of(row) for rows in cases.values() for row in rows), None)
    for rows in cases.values():
        first = y
        for row in filter(report.right, rows):
            value = row["median_us"] if unit is None else row[unit]
            colour = _COLOURS.get(row["impl"], "black")
            hatch = "////" if row["layout"] == LAYER_MAJOR else None
            bar = axes.barh(y, value, height=0.9, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            axes.text(value, y, f" {value:.4g}", va="center", fontsize=6)
            if hatch is None or row["impl"] not in shown:
                shown[row["impl"]] = bar
            y += 1
        ticks.append((first + y - 1) / 2)
        y += 1
    axes.set_yticks(ticks, list(cases), fontsize=7)
    axes.invert_yaxis()
    limit = report.limits[unit] if unit is not None else None
    if limit is not None:
        line = axes.axvline(limit, color="black", linewidth=0.8, linestyle="--")
        shown["copy" if unit == "gb_s" else "matmul"] = line
    axes.set_xlabel("host µs a call" if unit is None else f"{UNITS[unit]} (higher is better)")
    axes.set_title(f"{suite}, {report.results.versions.get('device', '')}; hatched: layer-major", fontsize=9)
    axes.legend(list(shown.values()), list(shown), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
