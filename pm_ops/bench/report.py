"""The results as text: every row, and one line a case that sets ours against the best peer and the limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .limits import BOTH_WAYS, COPY, FROM_HOST, MATMUL, TO_HOST, TO_PEER
from .memory import LAYER_MAJOR, PAGE_MAJOR
from .results import Results, Row

OURS = "pm_ops"
"""How the names of our implementations begin."""
UNITS = {"gb_s": "GB/s", "tflop_s": "TFLOP/s"}

_WAYS = {"offload": TO_HOST, "restore": FROM_HOST, "both ways": BOTH_WAYS, TO_PEER: TO_PEER}
"""How the names of transfers begin, and of what limits them."""


class Report:
    """Ratios and shares of the rows of one run."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.limits = {name: self._limit(name) for name in (COPY, MATMUL, *_WAYS.values())}
        self.cases: dict[tuple[str, str], list[Row]] = {}
        for row in results.rows:
            self.cases.setdefault((row["suite"], row["case"]), []).append(row)
        self._wrong = [results.rows[i] for i in results.wrong]

    def share(self, row: Row) -> float | None:
        """Of the rate of the same run that limits it."""
        unit, name = unit_of(row), limit_of(row)
        limit = self.limits[name] if name is not None else None
        return None if limit is None or unit is None else row[unit] / limit

    def right(self, row: Row) -> bool:
        """Whether the row's result was right."""
        return not any(row is wrong for wrong in self._wrong)

    def best_peer(self, rows: Iterable[Row]) -> Row | None:
        """The fastest right row that is not ours, in either layout."""
        peers = [row for row in rows if not row["impl"].startswith(OURS) and self.right(row)]
        return min(peers, key=lambda row: row["median_us"], default=None)

    def table(self) -> str:
        """All rows."""
        lines = []
        for (suite, case), rows in self.cases.items():
            best = self.best_peer(rows) if suite != "limits" else None
            for row in rows:
                lines.append((
                    suite, case, row["impl"], row["layout"], f"{row['median_us']:.1f}", *self._rate(row),
                    "" if best is None else f"{row['median_us'] / best['median_us']:.3f}",
                    "inf" if row["rel_err"] is None else f"{row['rel_err']:.1e}",
                    "" if self.right(row) else "WRONG",
                ))  # fmt: skip
        head = ("suite", "case", "implementation", "layout", "µs", "rate", "of limit", "x best peer", "error", "")
        return aligned(head, lines)

    def summary(self) -> str:
        """One line for each case and each of our implementations."""
        lines = []
        for (suite, case), rows in self.cases.items():
            best = self.best_peer(rows)
            for impl in dict.fromkeys(row["impl"] for row in rows if row["impl"].startswith(OURS)):
                by_layout = {row["layout"]: row for row in rows if row["impl"] == impl}
                row = by_layout.get(PAGE_MAJOR) or by_layout[LAYER_MAJOR]
                layer = by_layout.get(LAYER_MAJOR)
                both = layer is not None and row is not layer
                lines.append((
                    suite, case, impl, f"{row['median_us']:.1f}", *self._rate(row),
                    f"{row['median_us'] / layer['median_us']:.3f}" if layer is not None and both else "",
                    f"{row['median_us'] / best['median_us']:.3f}" if best is not None else "",
                    f"{best['impl']}, {best['layout']}" if best is not None else "no peer",
                    "" if all(map(self.right, by_layout.values())) else "WRONG",
                ))  # fmt: skip
        head = ("suite", "case", "page-major", "µs", "rate", "of limit", "x layer", "x best peer", "which is", "")
        return aligned(head, lines)

    def text(self) -> str:
        """Everything: versions, rows, notes, summary."""
        versions = "\n".join(f"{name:<12} {version}" for name, version in self.results.versions.items())
        notes = "\n".join(f"note: {note}" for note in self.results.notes)
        return "\n\n".join(part for part in (versions, self.table(), notes, self.summary()) if part)

    def _limit(self, name: str) -> float | None:
        for row in self.results.rows:
            if row["suite"] == "limits" and row["case"].startswith(name):
                return float(row[unit_of(row) or "gb_s"])
        return None

    def _rate(self, row: Row) -> tuple[str, str]:
        """Rate with its unit, and its share of the limit."""
        unit, share = unit_of(row), self.share(row)
        if unit is None:
            return "", ""
        return f"{row[unit]:.4g} {UNITS[unit]}", "" if share is None else f"{share:.3f}"


def unit_of(row: Row) -> str | None:
    """``gb_s`` or ``tflop_s``; None for host times."""
    return next((unit for unit in UNITS if row.get(unit) is not None), None)


def limit_of(row: Row) -> str | None:
    """Which limit a row's rate is a share of, by the beginning of its name; None for host times."""
    unit = unit_of(row)
    if unit is None:
        return None
    travels = row["suite"] in ("transfer", "peer")
    across = (limit for way, limit in _WAYS.items() if travels and row["case"].startswith(way))
    return MATMUL if unit == "tflop_s" else next(across, COPY)


def aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns of text; numbers to the right."""
    rows = [head, *lines]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    right = [all(not line[i] or line[i][0].isdigit() or line[i] == "inf" for line in lines) for i in range(len(head))]
    texts = []
    for row in rows:
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)
