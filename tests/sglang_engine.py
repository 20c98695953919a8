"""The real SGLang for tests, without a GPU: a release's own package, and what it imports, put on the path.

``SGLANG_RELEASE`` names the release; without it tests of the engine are skipped. One process can hold one release. The
package comes out of its wheel, what it needs from ``requirements/sglang.txt``; both are fetched once, next to the files
of other engines, and leave the environment's own packages alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import peers

RELEASES = ("0.5.17", "0.5.23")
REQUIREMENTS = Path(__file__).parents[1] / "requirements" / "sglang.txt"
VISION = ("nms", "qnms")


def require() -> str:
    """Make ``sglang`` importable here and in child processes; its version. Skips the module where none is asked for."""
    release = os.environ.get("SGLANG_RELEASE")
    if release is None:
        pytest.skip(f"needs SGLANG_RELEASE, one of {', '.join(RELEASES)}", allow_module_level=True)
    files = ("sglang/", f"sglang-{release}.dist-info/")
    folders = [str(peers.fetched(peers.Peer("sglang", release, files, part="-engine"))), str(_needs())]
    if folders[0] not in sys.path:
        sys.path[:0] = folders
        here = str(Path(__file__).parent)  # for child processes, which begin with prepare()
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, here, os.environ.get("PYTHONPATH", "")])
        prepare()
    return release


def prepare() -> None:
    """What a process needs before it imports SGLang: torchvision's own operators, which a torch for CPUs cannot load.

    SGLang imports torchvision for pictures; its package imports if these two are known, though they cannot be called.
    """
    global _vision
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        _vision = torch.library.Library("torchvision", "FRAGMENT")
        for name in VISION:
            _vision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_vision: torch.library.Library | None = None


def _needs() -> Path:
    """The folder with the packages that SGLang imports, those of ``requirements/sglang.txt``."""
    folder = peers.cache() / "sglang-needs"
    stamp = folder / "requirements.txt"
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return folder
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    command += ["--only-binary=:all:", "--no-deps", "--upgrade", "--target", str(folder)]
    command += ["--requirement", str(REQUIREMENTS), *peers.pip_args()]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"cannot install what SGLang needs: {error}\n{getattr(error, 'stderr', '')}"
        if os.environ.get("PM_OPS_PEERS") == "required":
            pytest.fail(reason)
        pytest.skip(reason, allow_module_level=True)
    stamp.write_text(REQUIREMENTS.read_text())
    return folder
