"""Medians: of device time by CUDA events with cold caches, of host time, and of both at once on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from .implementation import Bound

_CACHE = 1 << 28  # bytes, several times any L2 cache
_AHEAD = 48  # times that so many are written: about three milliseconds on an H200


class Clock:
    """Times calls on one device; ``quick`` takes fewer samples."""

    def __init__(self, device: torch.device, quick: bool = False) -> None:
        self.device = device
        self.quick = quick

    def median_us(self, run: Callable[[], Any]) -> float:
        """Median time of a call in microseconds. On CUDA the L2 cache is flushed before each."""
        if self.device.type == "cuda":
            from triton.testing import do_bench

            return 1e3 * float(do_bench(run, warmup=10, rep=30 if self.quick else 60, return_mode="median"))
        run()
        once = _seconds(run)
        samples = min(max(int((0.02 if self.quick else 0.2) / max(once, 1e-9)), 5), 1000)
        return 1e6 * median(_seconds(run) for _ in range(samples))

    def apart_us(
        self, run: Callable[[], Any], finish: Callable[[], Any] = lambda: None, *, idle: bool = False
    ) -> float:
        """The same where a call starts work on streams of its own: nothing is left of one call when the next is made.

        It ends when the current stream goes on, which need not be when all of that work is done; ``finish``, not timed,
        sees to the rest. A call is made while the current stream is busy for another 3 ms, a part of an engine's
        step, and is timed from the end of that, so that what the host does meanwhile is hidden; ``idle``: it is made on
        an idle device, and all of it counts.
        """
        if self.device.type != "cuda":
            us = self.median_us(run)
            finish()
            return us
        cache = torch.empty(_CACHE, dtype=torch.uint8, device=self.device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()
        samples: list[float] = []
        start = time.perf_counter()
        while len(samples) < 3 or (len(samples) < 100 and time.perf_counter() - start < (0.1 if self.quick else 0.3)):
            finish()
            self.wait()
            for _ in range(1 if idle else _AHEAD):
                cache.zero_()
            if idle:
                self.wait()
            begin.record()
            run()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end))
        finish()
        self.wait()
        return 1e3 * median(samples)

    def host_us(self, run: Callable[[], Any], apart: bool = False) -> float:
        """Median time that the calling thread spends in a call, warm, with the device's queue far from full.

        ``apart``: with nothing in that queue.
        """
        run()
        self.wait()
        once = _seconds(run)
        calls = 1 if apart else max(min(50, int(0.01 / max(once, 1e-9))), 1)
        rounds = 5 if self.quick else 30
        samples = []
        for _ in range(rounds):
            self.wait()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            samples.append((time.perf_counter() - start) / calls)
        self.wait()
        return 1e6 * median(samples)

    def wait(self) -> None:
        """Until the device has done all that it was given; errors of its kernels show here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def captured(bound: Bound) -> Bound:
    """The same call as the replay of a CUDA graph, which leaves the host's launch overhead out."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        bound.run()
        bound.run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = bound.run()

    def replay() -> Any:
        graph.replay()
        return result

    return replace(bound, run=replay, out=result if bound.out is None else bound.out)


def fastest(ways: Mapping[str, Callable[[], Any]], device: torch.device) -> tuple[Callable[[], Any], str]:
    """The fastest of several ways to make one call, and its name, by a few replays of each: peers at their best."""
    name = next(iter(ways))
    if len(ways) > 1 and device.type == "cuda":
        name = min(ways, key=lambda way: _brief(ways[way]))
    return ways[name], name


def _brief(run: Callable[[], Any]) -> float:
    run = captured(Bound(run)).run
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
