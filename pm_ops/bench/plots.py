"""Bar charts of a run, one PNG for what has one scale, where matplotlib is installed."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from .limits import COPY
from .memory import LAYER_MAJOR
from .report import UNITS, Report, limit_of, unit_of
from .results import Row

_COLOURS = {
    "pm_ops": "tab:blue",
    "pm_ops_fa3": "navy",
    "pm_ops_mla_triton": "navy",
    "pm_ops_by_layer": "tab:cyan",
    "fa3": "tab:orange",
    "flashinfer": "tab:green",
    "vllm": "tab:red",
    "vllm_swap": "tab:red",
    "vllm_swap_triton": "lightcoral",
    "sglang": "tab:purple",
    "sglang_one_launch": "tab:pink",
    "torch": "tab:gray",
    "torch_staged": "silver",
}
_LINES = ("--", ":", "-.")


def draw(report: Report, folder: Path, stem: str) -> list[Path]:
    """Write ``<stem>-<chart>.png`` for every chart of the results; their paths.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("matplotlib is not installed: pip install matplotlib")
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    paths = []
    charts: dict[str, dict[str, list[Row]]] = {}
    for (suite, case), rows in report.cases.items():
        if suite != "limits":
            charts.setdefault(_chart(rows[0]), {})[case] = rows
    for chart, cases in charts.items():
        path = folder / f"{stem}-{chart}.png"
        _draw_chart(pyplot, report, chart, cases, path)
        paths.append(path)
    return paths


def _chart(row: Row) -> str:
    """The suite. States are two charts, whose rates are of bytes and of operations; transfers are three: across PCIe,
    on the device, and the caller's time.
    """
    if row["suite"] == "state":
        return "state-prefill" if unit_of(row) == "tflop_s" else "state"
    if row["suite"] != "transfer":
        return str(row["suite"])
    return {None: "transfer-host", COPY: "transfer-repack"}.get(limit_of(row), "transfer")


def _draw_chart(pyplot: Any, report: Report, chart: str, cases: dict[str, list[Row]], path: Path) -> None:
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
    limits = dict.fromkeys(limit_of(row) for rows in cases.values() for row in rows)
    for name, style in zip(limits, _LINES, strict=False):
        limit = report.limits[name] if name is not None else None
        if limit is not None:
            shown[str(name)] = axes.axvline(limit, color="black", linewidth=0.8, linestyle=style)
    axes.set_xlabel("host µs a call" if unit is None else f"{UNITS[unit]} (higher is better)")
    axes.set_title(f"{chart}, {report.results.versions.get('device', '')}; hatched: layer-major", fontsize=9)
    axes.legend(list(shown.values()), list(shown), fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
