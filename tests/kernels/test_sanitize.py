"""What `sanitize.py` makes of compute-sanitizer's answers, with a script in its place; it itself needs a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernels.sanitize import SOURCES, TOOLS, is_handing_over, main, sanitize


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


def line(name: str, text: str) -> str:
    lines = (SOURCES / name).read_text().splitlines()
    return f"{name}:{next(i for i, x in enumerate(lines, 1) if x.lstrip().startswith(text))}"


def summary(reports: int) -> str:
    return f"launched it\n========= RACECHECK SUMMARY: {reports} hazards displayed ({reports} errors, 0 warnings)\n"


def report(*accesses: str) -> str:
    """As racecheck has it: "Read _kernel file.py:line" and others."""
    first, *others = (re.sub(r"(\w+) (\w+) (.*)", r"\1 access at \2+0x19af0 in \3", access) for access in accesses)
    last = "".join(f"=========     and {other} [54 hazards]\n" for other in others)
    return f"========= Error: Race reported between {first}\n{last}========= \n"


CONSUME = "mla_hopper_consume.py"
TASK = report(
    f"Read _attention_hopper {line('attention_hopper.py', 'def _attention_hopper(')}",
    f"Write _attention_hopper {line('attention_hopper.py', 'gl.warp_specialize(')}",
)
STORE, LOAD = (f"_mla_hopper {line(CONSUME, text)}" for text in ("m_row.store(", "m = m_row.load("))
SHRINK = f"_mla_hopper {line(CONSUME, 'shrink = shrink_row.load(')}"
SUMS, OTHER_SUMS = (f"_mla_hopper {line(CONSUME, f'{text}sums.index(')}" for text in ("", "l += "))
HANDOVERS = [
    TASK,
    report(f"Write {STORE}", f"Read {LOAD}", f"Read {LOAD}"),
    report(f"Read {LOAD}", f"Write {STORE}"),
    report(f"Write {SUMS}", f"Read {OTHER_SUMS.replace(CONSUME, 'mla_hopper.py')}"),  # that of partition 0
]
RACES = {
    "no lines of tasks": TASK.replace(line("attention_hopper.py", "gl.warp_specialize("), "attention_hopper.py:1"),
    "no kernel with partitions": TASK.replace("_attention_hopper", "_attention"),
    "another kernel's lines": TASK.replace("_attention_hopper", "_mla_hopper"),
    "a task and a value": report(f"Write {STORE}", f"Read _mla_hopper {line('mla_hopper.py', 'def _mla_hopper(')}"),
    "values of two kinds": report(f"Write {STORE}", f"Read {SHRINK}"),
    "also values of two kinds": report(f"Write {STORE}", f"Read {LOAD}", f"Read {SHRINK}"),
    "two stores": report(f"Write {STORE}", f"Write {STORE}"),
    "the producer's": report(f"Write {STORE}", f"Read {LOAD}").replace(CONSUME, "mla_hopper_produce.py"),
    "the probabilities": report(
        f"Write _mla_hopper {line(CONSUME, 'p_tile.store(')}", f"Read _mla_hopper {line(CONSUME, 'p = p_tile.load(')}"
    ),
    "an access without a line": report(f"Write {STORE}", f"Read {LOAD}")
    + "=========     and Read access at _mla_hopper+0x8e60 [2 hazards]\n",
    "of one instruction": report(*["Write _gated_delta_chunks gated_delta_chunk.py:146"] * 2),
}


def test_handovers_between_partitions_are_known_by_their_lines(sanitizer, tmp_path):
    assert all(is_handing_over(one + summary(1)) for one in HANDOVERS)
    output = "".join(HANDOVERS) + summary(len(HANDOVERS))
    assert is_handing_over(output)
    assert not is_handing_over(output.replace("launched it\n", ""))  # a result is wrong
    assert not is_handing_over("".join(HANDOVERS) + summary(len(HANDOVERS) + 1))  # one is not shown
    assert not is_handing_over(summary(0))
    (tmp_path / "cases").write_text(f"[ $kind = ERROR ] && {CLEAN} || {{ cat <<'X'\n{output}X\nexit 9; }}\n")
    assert not sanitize(sanitizer, [], ["cases"])


@pytest.mark.parametrize("name", RACES)
def test_all_else_is_a_race(name):
    assert "access at" in RACES[name] and RACES[name] not in HANDOVERS
    assert not is_handing_over(RACES[name] + summary(1))
    assert not is_handing_over("".join(HANDOVERS) + RACES[name] + summary(len(HANDOVERS) + 1))


def test_only_groups_that_there_are_can_be_asked_for():
    with pytest.raises(SystemExit, match="no groups: nothing; there are .*latent_attentions"):
        main(["states", "nothing"])
