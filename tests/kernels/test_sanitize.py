"""What `sanitize.py` makes of compute-sanitizer's answers, with a script in its place; it itself needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels.sanitize import TOOLS, sanitize


@pytest.fixture
def sanitizer(tmp_path: Path) -> str:
    """Answers for the tool that it was asked for as the command that it was to run says."""
    script = tmp_path / "compute-sanitizer"
    script.write_text(
        "#!/bin/sh\nfor last; do :; done\n"
        'if [ "$2" = racecheck ]; then kind=RACECHECK none="0 hazards displayed"; else kind=ERROR none="0 errors"; fi\n'
        '. "$last"\n'
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize(
    ("answer", "failing"),
    [
        ('echo "========= $kind SUMMARY: $none"', set()),
        ('echo "========= $kind SUMMARY: 2 errors"; exit 9', set(TOOLS)),
        ('[ $kind = ERROR ] && echo "========= ERROR SUMMARY: 0 errors" || exit 9', {"racecheck"}),
        ('echo "========= ERROR SUMMARY: 0 errors"; exit 1', set(TOOLS)),  # a result is wrong
        ('echo "Device not supported"', set(TOOLS)),  # nothing was watched
    ],
)
def test_only_a_run_that_was_watched_and_is_clean_passes(sanitizer, tmp_path, answer, failing):
    cases = tmp_path / "cases"
    cases.write_text(answer + "\n")
    assert {name.split()[0] for name in sanitize(sanitizer, [], [str(cases)])} == failing
