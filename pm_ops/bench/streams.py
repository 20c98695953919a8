"""Work in two directions at once, on two streams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


class Two:
    """Two streams besides the current one, which waits for both; on the CPU one thing after another."""

    def __init__(self, device: torch.device) -> None:
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def run(self, *calls: Callable[[], object]) -> None:
        """One or two, each on a stream of its own, behind what is on the current one."""
        self.begin()
        for number, work in enumerate(calls):
            with self.on(number):
                work()
        self.end()

    def begin(self) -> None:
        """Both go on behind the current stream."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())

    def on(self, number: int) -> AbstractContextManager[object]:
        """One of them as the current stream."""
        return torch.cuda.stream(self.streams[number]) if self.streams else nullcontext()

    def end(self) -> None:
        """The current stream goes on behind both."""
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
