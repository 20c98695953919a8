"""A case: one line of the results for each implementation and layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .implementation import Bound, Implementation
from .oracle import Error


@dataclass(frozen=True)
class Case:
    """What to build, bind, check and count."""

    suite: str
    name: str
    kind: str
    """What an implementation must do to take part, see :class:`Implementation`."""
    build: Callable[[torch.device, bool], Any]
    """Make the data; False: uninitialised."""
    bind: Callable[[Implementation, Any, str], Bound]
    check: Callable[[Bound, Any, str], Error]
    """Run the call and compare."""
    unit: str | None
    """``gb_s``, ``tflop_s``, or None for host time."""
    amount: float
    """Bytes or floating-point operations."""
    graph: bool
    """Whether it is timed as the replay of a CUDA graph."""
    tolerance: float
    apart: bool = False
    """Whether nothing may be left of a call when the next is made: what runs on streams of its own would overlap."""
    idle: bool = False
    """Whether such a call is made on an idle device, so that all that the host does counts."""

    @property
    def title(self) -> str:
        """Suite and name."""
        return f"{self.suite} {self.name}"
