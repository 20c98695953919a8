"""Measure cases one after another: bind, check, time, check again; what goes wrong is written down and passed over."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from .case import Case
from .clock import Clock, captured
from .implementation import Bound, Implementation, Unsupported
from .memory import LAYOUTS
from .progress import Progress
from .results import Results


class DeviceLost(Exception):
    """The device no longer works: after an illegal access nothing more can be measured in this process."""


class Runner:
    """Runs cases over implementations and layouts into results."""

    def __init__(
        self, implementations: Sequence[Implementation], clock: Clock, results: Results, progress: Progress
    ) -> None:
        self.implementations = implementations
        self.clock = clock
        self.results = results
        self.progress = progress

    @staticmethod
    def steps(cases: Sequence[Case], implementations: Sequence[Implementation]) -> int:
        """Measurements that these cases ask for."""
        return sum(len(LAYOUTS) for case in cases for impl in implementations if case.kind in impl.kinds)

    def run(self, cases: Sequence[Case]) -> None:
        """Measure all. Raises DeviceLost where the rest cannot be measured."""
        for case in cases:
            self.progress.case(case.title)
            taking_part = [impl for impl in self.implementations if case.kind in impl.kinds]
            if not taking_part:
                continue
            try:
                work = case.build(self.clock.device, True)
            except Exception as problem:
                self.results.failures.append(f"{case.title}: its data could not be made: {_text(problem)}")
                self._recover()
                self.progress.step(len(taking_part) * len(LAYOUTS))
                continue
            for impl in taking_part:
                for layout in LAYOUTS:
                    self._measure(case, impl, layout, work)
                    self.progress.step()
            del work
            free(self.clock.device)

    def _measure(self, case: Case, impl: Implementation, layout: str, work: Any) -> None:
        where = f"{case.title}, {layout}"
        try:
            bound = case.bind(impl, work, layout)
            first = case.check(bound, work, layout)
            timed = captured(bound) if case.graph and case.unit is not None and self._cuda else bound
            us = self._time(case, timed)
            second = case.check(timed, work, layout)  # what was timed was right, too
        except (Unsupported, ImportError) as reason:
            self.results.because(impl.name, str(reason), where)
            return
        except Exception as problem:
            if impl.ours:
                self.results.failures.append(f"{impl.name} {where}: {_text(problem)}")
            else:
                self.results.because(impl.name, f"not measured: {_text(problem)}", where)
            self._recover()
            return
        worse = max(first, second)
        self.results.add(case.suite, case.name, impl.name, layout, us, worse.total, case.unit, case.amount)
        tolerance = case.tolerance if bound.tolerance is None else bound.tolerance
        if not (first.within(tolerance) and second.within(tolerance)):
            self.results.mark_wrong(
                f"{impl.name} {where}: wrong result, relative error {worse.total:.2e} of all and {worse.worst:.2e} of "
                f"the worst row, allowed are {tolerance:.0e} and ten times that"
            )
        if bound.note is not None:
            self.results.because(impl.name, bound.note, where)

    def _time(self, case: Case, bound: Bound) -> float:
        if case.unit is None:
            return self.clock.host_us(bound.run, case.apart)
        if not case.apart:
            return self.clock.median_us(bound.run)
        return self.clock.apart_us(bound.run, bound.finish or (lambda: None), idle=case.idle)

    @property
    def _cuda(self) -> bool:
        return self.clock.device.type == "cuda"

    def _recover(self) -> None:
        """After an error: give memory back, and see whether the device still works."""
        try:
            self.clock.wait()
            free(self.clock.device)
        except Exception as problem:
            raise DeviceLost(_text(problem)) from problem


def compile_ahead(
    cases: Sequence[Case], implementations: Sequence[Implementation], device: torch.device, share: int, shares: int
) -> None:
    """Call this share of (case, implementation) once on uninitialised data, so that every kernel is in the caches."""
    number = 0
    for case in cases:
        work = None
        for impl in implementations:
            if not impl.compiles or case.kind not in impl.kinds:
                continue
            number += 1
            if number % shares != share:
                continue
            for layout in LAYOUTS:
                with suppress(Exception):  # the measurement will meet it again, and tell
                    work = case.build(device, False) if work is None else work
                    case.bind(impl, work, layout).run()
        del work
        free(device)


def free(device: torch.device) -> None:
    """Give memory back, so that the next case's pools find room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _text(problem: BaseException) -> str:
    """One line, not too long, that names the kind of error."""
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:400]}{'…' if len(text) > 400 else ''}"
