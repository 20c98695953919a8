"""How far a run is: a bar where tqdm is installed and someone watches, plain lines elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from typing import Any


class Progress:
    """Writes to stderr. A plain line is one case, with the seconds since the start."""

    def __init__(self, total: int, *, bar: bool | None = None) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty() if bar is None else bar:
            if importlib.util.find_spec("tqdm") is None:
                print("pm-ops bench: plain lines, no bar: tqdm is not installed", file=sys.stderr)
            else:
                self._bar = importlib.import_module("tqdm").tqdm(total=total, unit="run", dynamic_ncols=True)

    def case(self, title: str) -> None:
        """A case begins."""
        if self._bar is not None:
            self._bar.set_description(title)
        else:
            seconds = time.monotonic() - self._start
            print(f"{seconds:6.1f} s  {self._done:4d}/{self._total}  {title}", file=sys.stderr, flush=True)

    def step(self, steps: int = 1) -> None:
        """So many measurements are done."""
        self._done += steps
        if self._bar is not None:
            self._bar.update(steps)

    def close(self) -> None:
        """The run is over."""
        if self._bar is not None:
            self._bar.close()
