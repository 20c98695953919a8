"""Two GPUs, for code that asks which one is current and whether a CUDA graph is being captured there."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


def captured_in_turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Pretend that there are two, of which the first is current, and a graph is captured on one, then on the other."""
    here = [0]

    @contextmanager
    def device(other: torch.device) -> Iterator[None]:
        before, here[0] = here[0], other.index
        yield
        here[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: here[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    for capturing in (0, 1):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: here[0] == capturing)  # noqa: B023
        yield capturing
