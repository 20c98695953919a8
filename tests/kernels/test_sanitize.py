"""What `sanitize.py` makes of compute-sanitizer's answers, with a script in its place; it itself needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.sanitize import HOPPER, TOOLS, is_handing_over, sanitize


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


def report(second: str = "gl.warp_specialize(", end: str = "launched it\n") -> str:
    """As racecheck has it, of a read without a line of its own and of a write in the line that begins so."""
    lines = [line.lstrip() for line in HOPPER.read_text().splitlines()]
    first, other = (next(i for i, x in enumerate(lines, 1) if x.startswith(text)) for text in ("def _att", second))
    return (
        f"========= Error: Race reported between Read access at it+0x270 in {HOPPER.name}:{first}\n"
        f"=========     and Write access at it+0xe390 in {HOPPER.name}:{other} [54 hazards]\n========= \n"
        f"{end}========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n"
    )


def test_the_handing_over_of_work_is_known_by_its_lines(sanitizer, tmp_path):
    assert is_handing_over(report())
    assert not is_handing_over(report(second="mbarrier.init"))
    assert not is_handing_over(report(end=""))  # a result is wrong
    assert not is_handing_over(report().replace(HOPPER.name, "attention.py"))
    assert not is_handing_over("launched it\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n")
    (tmp_path / "cases").write_text(f"[ $kind = ERROR ] && {CLEAN} || {{ cat <<'X'\n{report()}X\nexit 9; }}\n")
    assert not sanitize(sanitizer, [], ["cases"])
