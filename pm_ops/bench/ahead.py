"""Compile all kernels before anything is measured: several processes, each a share, into the caches on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

_TIMEOUT = 300.0
"""Seconds after which processes still compiling are stopped: what they had left is compiled while measuring."""


def default_jobs() -> int:
    """Processes to start: most of the cores, but no more than share one GPU's memory well."""
    return max(1, min((os.cpu_count() or 1) - 2, 12))


def compile_in_processes(arguments: Sequence[str], jobs: int) -> str:
    """Run ``pm-ops bench <arguments> --share i/jobs`` for each share at once; what became of them, for the notes."""
    start = time.monotonic()
    command = [sys.executable, "-m", "pm_ops.cli", "bench", *arguments]
    running = [
        subprocess.Popen([*command, "--share", f"{i}/{jobs}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for i in range(jobs)
    ]
    failed = []
    for process in running:
        try:
            _, said = process.communicate(timeout=max(_TIMEOUT - (time.monotonic() - start), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed.append(f"stopped after {_TIMEOUT:.0f} s")
        else:
            if process.returncode:
                failed.append((said.decode(errors="replace").strip().splitlines() or ["no message"])[-1][:200])
    text = f"kernels compiled ahead by {jobs} processes in {time.monotonic() - start:.0f} s"
    if failed:
        text += f"; {len(failed)} did not finish their share: {'; '.join(dict.fromkeys(failed))}"
    return text
