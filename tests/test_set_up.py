"""requirements/run.sh says what it installs before it does, once; where a step fails it stops there."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = ["torch", "transformers and the tools of the tests", "the model of the demo, 93 MB", "pm_ops itself"]


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment whose python writes down what it is asked to do, and fails where it is asked for FAIL_AT."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    failing = 'case "$*" in *"${FAIL_AT:-never}"*) exit 3;; esac'
    python.write_text(f'#!/bin/sh\necho "$*" >> "{tmp_path}/log"\n{failing}\n')
    python.chmod(0o755)
    return tmp_path / "venv"


def run(venv: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "requirements/run.sh", *options, "-c", "print()"]
    environment = {"PATH": "/usr/bin:/bin", "VENV": str(venv), **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_every_step_is_announced_and_the_second_run_is_mute(venv: Path) -> None:
    done = run(venv)
    assert done.returncode == 0 and done.stdout == ""
    lines = [line.removeprefix("pm_ops set-up: ") for line in done.stderr.splitlines()]
    assert lines[0].startswith(f"installing into {venv}") and lines[-1] == "done"
    assert [line.strip() for line in lines[1:-1]] == STEPS
    log = (venv.parent / "log").read_text().splitlines()
    installs = [line for line in log if line.startswith("-m pip ")]
    assert len(installs) == len(STEPS) and all(" install --quiet " in line for line in installs)
    assert run(venv).stderr == ""
    assert (venv.parent / "log").read_text().splitlines() == [*log, "-c print()"]


def test_the_real_engine_has_an_environment_of_its_own(venv: Path) -> None:
    (venv.parent / "venv-vllm").symlink_to(venv)
    done = run(venv, "--vllm")
    lines = [line.removeprefix("pm_ops set-up: ").strip() for line in done.stderr.splitlines()]
    assert lines[0].startswith(f"installing into {venv}-vllm")
    assert lines[1:-1] == ["torch", "vLLM for the CPU", *STEPS[2:]]
    log = (venv.parent / "log").read_text()
    assert "--no-deps -r" in log and "requirements/vllm.txt" in log and "requirements/dev.txt" not in log


def test_a_step_that_fails_is_the_last_one_announced(venv: Path) -> None:
    done = run(venv, FAIL_AT="model.txt")
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == f"pm_ops set-up:   {STEPS[2]}"
    assert not (venv / "pm_ops.stamp").exists()
