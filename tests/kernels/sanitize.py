"""Every kernel under compute-sanitizer: memcheck, racecheck and initcheck, on one GPU, side by side.

    python tests/kernels/sanitize.py            # or: make gpu-sanitize

First the cases of `every_kernel.py` run as they are, which compares results and compiles; then under each tool. Exits
with 1, and shows what was found, unless every run is clean and every kernel was launched.

One report of racecheck is no race, that of how `gl.warp_specialize` of triton 3.6 hands work to worker warps: of the
bytes behind all that the kernel allocates, which name each warp's next task. In the machine code (sm_90, by `cuobjdump
-sass`) the accesses to them are these, and every warp of the program takes part in every `BAR.SYNC 1`:

    the default warps    STS tasks, BAR.SYNC 1, BAR.SYNC 1, their work, BAR.SYNC 1, STS the end, BAR.SYNC 1, EXIT
    worker warps         BAR.SYNC 1, LDS task, BAR.SYNC 1, their work, BAR.SYNC 1, and again from the first one on

So at least one barrier lies between the read and either write. A kernel of three partitions that store a number each is
not reported, nor with barriers of the partitions' own; once one of them waits for an mbarrier of another, it is, alike.
The reports are known by their lines: the kernel's own, for what has no line of its own, and that of the call.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE.parent)]

TOOLS = {
    "memcheck": ["--padding", "4096"],  # so that an access past one tensor is none of the next
    "racecheck": [],
    "initcheck": [],
}
"""The tools, and their options."""
CLEAN = re.compile(r"^=+ (ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed)", re.MULTILINE)
HOPPER = ROOT / "pm_ops/kernels/attention_hopper.py"
SPECIALISED = {path.name: path for path in (HOPPER, HOPPER.with_name("mla_hopper.py"))}
HANDING_OVER = ("def _attention_hopper(", "def _mla_hopper(", "gl.warp_specialize(")
Command = Sequence[str]


def find_sanitizer() -> str:
    """compute-sanitizer of the path or of the CUDA toolkit."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{toolkit}/bin")
    if found is None:
        raise FileNotFoundError(f"compute-sanitizer is neither on the path nor in {toolkit}/bin; set CUDA_HOME")
    return found


def run_all(commands: Iterable[Command]) -> list[tuple[int, str]]:
    """Exit status and output of commands, as many at a time as there are cores."""

    def run(command: Command) -> tuple[int, str]:
        # Each tensor an allocation of its own, whose bounds the tools know
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.returncode, done.stdout

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return list(workers.map(run, commands))


def sanitize(sanitizer: str, script: Command, groups: Iterable[str]) -> dict[str, str]:
    """Run the groups of a script under every tool; returns what was not clean: the output by "tool group"."""
    runs = [(tool, group) for group in groups for tool in TOOLS]
    commands = [
        [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "9", *script, group] for tool, group in runs
    ]
    failed = {}
    for (tool, group), (code, output) in zip(runs, run_all(commands), strict=True):
        if (code or not CLEAN.search(output)) and not is_handing_over(output):
            failed[f"{tool} {group}"] = output
    return failed


def is_handing_over(output: str) -> bool:
    """Whether the script ran to its end, and all that racecheck reports is how work comes to worker warps."""
    source = {name: path.read_text().splitlines() for name, path in SPECIALISED.items()}

    def of_call(access: str) -> bool:
        place = re.search(r" in (\w+\.py):(\d+)", access)
        lines = source.get(place[1], []) if place else []
        return bool(place and lines) and lines[int(place[2]) - 1].lstrip().startswith(HANDING_OVER)

    accesses = re.findall(r"(?:Read|Write) access at (.*)", output)
    finished = re.search(r"^launched .*\n=+ RACECHECK SUMMARY: ", output, re.MULTILINE)
    return bool(finished and accesses) and all(map(of_call, accesses))


def main() -> None:
    from kernels.cases import KERNELS
    from kernels.every_kernel import GROUPS

    sanitizer, script = find_sanitizer(), [sys.executable, str(HERE / "every_kernel.py")]
    launched: set[str] = set()
    failed = {}
    for group, (code, output) in zip(GROUPS, run_all([*script, group] for group in GROUPS), strict=True):
        if code:
            failed[f"no tool, {group}"] = output
        launched |= {name for line in re.findall("^launched (.*)$", output, re.MULTILINE) for name in line.split()}
    if not failed and not launched >= KERNELS:
        failed["no tool"] = f"not launched: {KERNELS - launched}"
    failed = failed or sanitize(sanitizer, script, GROUPS)
    for name, output in failed.items():
        print(f"---- {name}", output[:8000], sep="\n")
    if failed:
        sys.exit("not clean: " + "; ".join(failed))
    print(f"{len(KERNELS)} kernels give what the CPU operators give, and are clean under {', '.join(TOOLS)}")


if __name__ == "__main__":
    main()
