"""What came out: rows, notes and versions, as they go into the JSON file; and which case failed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""``suite``, ``case``, ``impl``, ``layout``, ``median_us``, ``rel_err``, and ``gb_s`` or ``tflop_s``; of host times
there is no rate, their ``gb_s`` is null."""


@dataclass
class Results:
    """Everything that a run has found so far."""

    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """Notes on the run as a whole."""
    failures: list[str] = field(default_factory=list)
    """Wrong results, and calls of ours that raised: each makes the exit status 1."""
    wrong: set[int] = field(default_factory=set)
    """Indices of the rows whose result was wrong."""
    _reasons: dict[tuple[str, str], dict[str, None]] = field(default_factory=dict)

    def add(
        self, suite: str, case: str, impl: str, layout: str, us: float, error: float, unit: str | None, amount: float
    ) -> None:
        """Add a row. ``amount`` is in bytes or floating-point operations, as the unit is ``gb_s`` or ``tflop_s``."""
        row: Row = dict(suite=suite, case=case, impl=impl, layout=layout, median_us=round(us, 3))
        row["rel_err"] = float(f"{error:.3e}") if math.isfinite(error) else None
        if unit is None:
            row["gb_s"] = None
        else:
            row[unit] = float(f"{amount / us / (1e3 if unit == 'gb_s' else 1e6):.5g}")
        self.rows.append(row)

    def mark_wrong(self, failure: str) -> None:
        """The row added last has a wrong result."""
        self.wrong.add(len(self.rows) - 1)
        self.failures.append(failure)

    def because(self, impl: str, reason: str, where: str) -> None:
        """Note why an implementation did not do a case, or how it did; cases with one reason make one note."""
        self._reasons.setdefault((impl, " ".join(reason.split())), {})[where] = None

    @property
    def notes(self) -> list[str]:
        """All notes, failures first."""
        grouped = [f"{impl}: {reason} [{'; '.join(cases)}]" for (impl, reason), cases in self._reasons.items()]
        return [f"FAILED {failure}" for failure in self.failures] + self.remarks + grouped

    def record(self) -> dict[str, Any]:
        """``{"versions": {...}, "rows": [...], "notes": [...]}``."""
        return {"versions": self.versions, "rows": self.rows, "notes": self.notes}

    def write(self, path: Path) -> None:
        """Write the JSON file, one row a line, whole or not at all."""
        rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in self.rows)
        versions, notes = (json.dumps(part, indent=2, allow_nan=False) for part in (self.versions, self.notes))
        text = f'{{\n"versions": {versions},\n"rows": [\n{rows}\n],\n"notes": {notes}\n}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(path)
