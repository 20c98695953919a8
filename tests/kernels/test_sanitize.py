"""What `sanitize.py` makes of compute-sanitizer's answers, with a script in its place; it itself needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.sanitize import HERE, TOOLS, WORKER_WARPS, is_handing_over, sanitize


@pytest.fixture
def sanitizer(tmp_path: Path) -> str:
    """Answers for the tool that it was asked for as the command that it was to run says."""
    script = tmp_path / "compute-sanitizer"
    script.write_text(
        "#!/bin/sh\nfor last; do :; done\n"
        'if [ "$2" = racecheck ]; then kind=RACECHECK none="0 hazards displayed"; else kind=ERROR none="0 errors"; fi\n'
        f'. "{tmp_path}/$last"\n'
    )
    script.chmod(0o755)
    return str(script)


CLEAN = 'echo "========= $kind SUMMARY: $none"'


@pytest.mark.parametrize(
    ("answer", "failing"),
    [
        (CLEAN, set()),
        ('echo "========= $kind SUMMARY: 2 errors"; exit 9', set(TOOLS)),
        ('[ $kind = ERROR ] && echo "========= ERROR SUMMARY: 0 errors" || exit 9', {"racecheck"}),
        (CLEAN + "; exit 1", set(TOOLS)),  # a result is wrong
        ('echo "Device not supported"', set(TOOLS)),  # nothing was watched
    ],
)
def test_only_a_run_that_was_watched_and_is_clean_passes(sanitizer, tmp_path, answer, failing):
    (tmp_path / "cases").write_text(answer + "\n")
    assert {name.split()[0] for name in sanitize(sanitizer, [], ["cases"])} == failing


def line_of(text: str, file: str) -> int:
    lines = (HERE.parents[1] / file).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.lstrip().startswith(text))


FILES = {
    "attention_hopper.py": "pm_ops/kernels/attention_hopper.py",
    "every_kernel.py": "tests/kernels/every_kernel.py",
}


def report(file: str, second: int = 0, end: str = "launched it\n") -> str:
    first, call = line_of("@gluon.jit", FILES[file]), line_of("gl.warp_specialize(", FILES[file])
    return (
        f"========= Error: Race reported between Read access at it+0x270 in {file}:{first}\n"
        f"=========     and Write access at it+0xe390 in {file}:{second or call} [54 hazards]\n========= \n"
        f"{end}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )


def test_the_handing_over_of_work_is_known_by_its_lines():
    for file in FILES:
        assert is_handing_over(report(file))
        assert not is_handing_over(report(file, second=3))
        assert not is_handing_over(report(file, end=""))  # a result is wrong
    assert not is_handing_over(report("every_kernel.py").replace("every_kernel.py", "attention.py"))
    assert not is_handing_over("launched it\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n")


@pytest.mark.parametrize("alone", [True, False])
def test_it_passes_where_it_is_reported_of_the_bare_kernel_too(sanitizer, tmp_path, alone):
    for name, file in (("attentions_on_hopper", "attention_hopper.py"), (WORKER_WARPS, "every_kernel.py")):
        reported = name != WORKER_WARPS or alone
        said = f"cat <<'X'\n{report(file)}X\nexit 9" if reported else CLEAN
        (tmp_path / name).write_text(f"if [ $kind = ERROR ]; then {CLEAN}; exit 0; fi\n{said}\n")
    failed = sanitize(sanitizer, [], ["attentions_on_hopper", WORKER_WARPS])
    assert set(failed) == (set() if alone else {"racecheck attentions_on_hopper"})
