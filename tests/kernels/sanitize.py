"""Every kernel under compute-sanitizer: memcheck, racecheck and initcheck, on one GPU, side by side.

    python tests/kernels/sanitize.py                    # or: make gpu-sanitize
    python tests/kernels/sanitize.py states gated_delta # or: make gpu-sanitize ARGS="states gated_delta"; these alone

First the cases of `every_kernel.py` run as they are, which compares results and compiles; then under each tool. Exits
with 1, and shows what was found, unless every run is clean and every kernel was launched.

Two kinds of reports of racecheck are no races. Both are of the Hopper kernels, whose partitions wait for one another at
mbarriers. One is of how `gl.warp_specialize` of triton 3.6 hands work to worker warps: of the bytes behind all that the
kernel allocates, which name each warp's next task. In the machine code (sm_90, by `cuobjdump -sass`) the accesses to
them are these, and every warp of the program takes part in every `BAR.SYNC 1`:

    the default warps    STS tasks, BAR.SYNC 1, BAR.SYNC 1, their work, BAR.SYNC 1, STS the end, BAR.SYNC 1, EXIT
    worker warps         BAR.SYNC 1, LDS task, BAR.SYNC 1, their work, BAR.SYNC 1, and again from the first one on

So at least one barrier lies between the read and either write. A kernel of three partitions that store a number each is
not reported, nor with barriers of the partitions' own; once one of them waits for an mbarrier of another, it is, alike.

The other is of what the consumers of `_mla_hopper` hand to one another: the running maximum, by what it shrinks the
sums, and the sums. One stores it with 128 threads, which meet at a barrier before one of them arrives at an mbarrier
for all; the other waits for that, and loads. racecheck takes no such arrival for an order between partitions, neither
of the load behind the store nor of the next store behind the load. That there is one `gluon_clocks.py` checks of every
access, with one barrier or another left out too; and that the threads meet, `test_compile.py` of the compiled kernels.

The reports are known by their kernel and lines: of the first kind the kernel's own, for what has no line of its own,
and that of the call; of the second a store and the load of the same. In partition 0, which becomes part of the kernel,
a consumer's lines are told with the kernel's file.

Nothing here, nor in the interpreter, checks proxy fences: that a `fence_async_shared` stands between what threads store
to shared memory and the tensor cores or copy engines that read it. Where one is missing only a wrong result can show.
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
SOURCES = ROOT / "pm_ops/kernels"
SPECIALISED = {
    "_attention_hopper": ("attention_hopper.py", "hopper_consume.py"),
    "_mla_hopper": ("mla_hopper.py", "mla_hopper_consume.py"),
}
"""Kernels with partitions: their file and their consumers'."""
TASKS = ("def _attention_hopper(", "def _mla_hopper(", "gl.warp_specialize(")
HANDOVERS = {
    "m_row.store(": "m = m_row.load(",
    "shrink_row.store(": "shrink = shrink_row.load(",
    "sums.index(PART).store(": "l += sums.index(1 - PART).load(",
}
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
    """Whether the script ran to its end, and all that racecheck reports is how partitions hand over tasks or values."""
    summary = re.search(r"^launched .*\n=+ RACECHECK SUMMARY: (\d+) hazards? displayed", output, re.MULTILINE)
    reports = output.split("Race reported between ")[1:]
    return bool(summary and reports) and len(reports) == int(summary[1]) and all(map(is_handover, reports))


def is_handover(report: str) -> bool:
    """Of one report: an access, and one or more that it is said to have a race with."""
    accesses = re.findall(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\w+\.py):(\d+)", report)
    if len(accesses) < 2 or len(accesses) != report.count(" access at "):  # one has no line
        return False

    def are_one(*both: tuple[str, ...]) -> bool:
        (first, read), (second, written) = sorted((kind, lines_of(*place)) for kind, *place in both)
        tasks = all(any(line.startswith(TASKS) for line in lines) for lines in (read, written))
        values = any(
            any(line.startswith(store) for line in written) and any(line.startswith(load) for line in read)
            for store, load in HANDOVERS.items()
        )
        return tasks or (values and (first, second) == ("Read", "Write"))

    return all(are_one(accesses[0], other) for other in accesses[1:])


def lines_of(kernel: str, name: str, number: str) -> list[str]:
    """What may stand there: nothing if it is none of the files of a kernel with partitions."""
    own, consumers = SPECIALISED.get(kernel, ("", ""))
    files = {own: (own, consumers), consumers: (consumers,)}.get(name, ()) if own else ()
    sources = [(SOURCES / file).read_text().splitlines() for file in files]
    return [lines[int(number) - 1].lstrip() for lines in sources if int(number) <= len(lines)]


def main(names: Sequence[str]) -> None:
    from kernels.cases import KERNELS
    from kernels.every_kernel import GROUPS

    if not set(names) <= GROUPS.keys():
        sys.exit(f"no groups: {', '.join(set(names) - GROUPS.keys())}; there are {', '.join(GROUPS)}")
    groups = names or list(GROUPS)
    sanitizer, script = find_sanitizer(), [sys.executable, str(HERE / "every_kernel.py")]
    launched: set[str] = set()
    failed = {}
    for group, (code, output) in zip(groups, run_all([*script, group] for group in groups), strict=True):
        if code:
            failed[f"no tool, {group}"] = output
        launched |= {name for line in re.findall("^launched (.*)$", output, re.MULTILINE) for name in line.split()}
    if not (failed or names or launched >= KERNELS):
        failed["no tool"] = f"not launched: {KERNELS - launched}"
    failed = failed or sanitize(sanitizer, script, groups)
    for name, output in failed.items():
        print(f"---- {name}", output[:8000], sep="\n")
    if failed:
        sys.exit("not clean: " + "; ".join(failed))
    print(f"{len(launched & KERNELS)} kernels give what the CPU operators give, and are clean under {', '.join(TOOLS)}")


if __name__ == "__main__":
    main(sys.argv[1:])
