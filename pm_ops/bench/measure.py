"""A whole run of ``pm-ops bench``: its order, and what it leaves behind."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from pathlib import Path

import torch

import pm_ops

from .ahead import compile_in_processes, default_jobs
from .cases import SUITES
from .clock import Clock
from .limits import has_peer, measure_limits
from .peers import FACTORIES, find
from .plots import draw
from .progress import Progress
from .report import Report
from .results import Results
from .runner import DeviceLost, Runner, compile_ahead
from .suites import cases


@torch.inference_mode()
def measure(options: argparse.Namespace) -> int:
    """Measure in inference mode, as engines run; print, write.

    Returns 1 if a result was wrong or a call of ours failed, else 0.

    Raises:
        ValueError: an option makes no sense here.
    """
    suites = _names("--suite", options.suite, SUITES)
    device = _device(options.device)
    if options.peers is not None and not options.peers.is_dir():
        raise ValueError(f"--peers {options.peers} is no folder")
    wanted = list(FACTORIES) if options.impl is None else _names("--impl", options.impl, list(FACTORIES))
    found, missing = find(wanted, options.peers, device)
    todo = [case for suite in suites for case in cases(suite, device, options.quick)]
    if options.case is not None:
        todo = [case for case in todo if options.case in case.name]
        if not todo:
            raise ValueError(f"--case {options.case!r} is in no case's name in {', '.join(suites)}")
    if options.share is not None:
        share, shares = map(int, options.share.split("/"))
        compile_ahead(todo, found, device, share, shares)
        return 0

    stem = _stem(device)
    results = Results(_versions(device))
    results.versions |= {impl.name: version for impl in found if (version := impl.version()) is not None}
    for name, reason in missing.items():
        results.remarks.append(f"{name}: not measured: {reason}")
    if "peer" in suites and not has_peer(device):
        results.remarks.append("peer: not measured: it needs a second GPU, whose memory the first has access to")
    kinds = {case.kind for case in todo}
    for impl in found:
        if impl.scope is not None and kinds - impl.kinds:
            results.because(impl.name, impl.scope, ", ".join(sorted(kinds - impl.kinds)))
    if device.type != "cuda":
        results.remarks.append(
            "measured on the CPU with one thread, on tiny shapes; its operators are plain torch: right, not fast"
        )
    clock = Clock(device, options.quick)
    jobs = options.jobs if options.jobs is not None else default_jobs() if device.type == "cuda" else 0
    if jobs > 0 and todo:
        remark = compile_in_processes(_arguments(options, suites, device), jobs)
        results.remarks.append(remark)
        print(remark, file=sys.stderr, flush=True)

    progress = Progress(Runner.steps(todo, found))
    threads = torch.get_num_threads()
    if device.type != "cuda":
        torch.set_num_threads(1)  # waiting for other threads would be most of the time of work as small as this
    try:
        measure_limits(clock, results)
        runner = Runner(found, clock, results, progress)
        for case in todo:
            runner.run([case])
            if options.out is not None:  # also what a run has that is stopped later
                results.write(options.out / f"{stem}.json")
    except DeviceLost as problem:
        results.failures.append(f"the device no longer works, what follows was not measured: {problem}")
    finally:
        torch.set_num_threads(threads)
        progress.close()
    _tell(results, options.out, stem)
    return 1 if results.failures else 0


def _names(option: str, given: str, known: tuple[str, ...] | list[str]) -> list[str]:
    """Comma-separated names, in the order of the known ones."""
    names = [name for name in given.split(",") if name]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ValueError(f"{option} {given!r}: {', '.join(unknown) or 'nothing'} is unknown; use {', '.join(known)}")
    return [name for name in known if name in names]


def _device(name: str | None) -> torch.device:
    kind = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"--device {name}: there are cuda and cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"pm_ops": pm_ops.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        import triton

        versions |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
        versions["device"] = torch.cuda.get_device_name(device)
    else:
        versions["device"] = f"CPU, {platform.machine()}"
    return versions


def _arguments(options: argparse.Namespace, suites: list[str], device: torch.device) -> list[str]:
    """The same options again, for the processes that compile."""
    arguments = ["--suite", ",".join(suites), "--device", device.type]
    arguments += ["--impl", options.impl] if options.impl is not None else []
    arguments += ["--case", options.case] if options.case is not None else []
    arguments += ["--peers", str(options.peers)] if options.peers is not None else []
    return arguments + (["--quick"] if options.quick else [])


def _tell(results: Results, out: Path | None, stem: str) -> None:
    """Print everything, failures last; with ``out`` write it too, and the plots."""
    report = Report(results)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        try:
            draw(report, out, stem)
        except ImportError as problem:
            results.remarks.append(f"no plots: {problem}")
        results.write(out / f"{stem}.json")
        (out / f"{stem}.txt").write_text(f"{report.text()}\n")
    print(report.text())
    if out is not None:
        print(f"\nwritten to {out}: {', '.join(sorted(path.name for path in out.glob(f'{stem}*')))}")
    for failure in results.failures:
        print(f"FAILED {failure}")


def _stem(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
