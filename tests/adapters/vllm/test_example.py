"""The example runs as a user runs it, and shows what it says."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[3]


def test_the_offline_example_says_that_the_text_is_stocks() -> None:
    command = [sys.executable, "examples/vllm_offline.py", "--tokens", "8", "--layout", "BLHNC"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "the same text as a stock engine: True" in done.stdout
    assert "PagePool(BLHNC" in done.stdout and "60 copies to move a page layer by layer, 1 here" in done.stdout
