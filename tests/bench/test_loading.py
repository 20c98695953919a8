"""Kernel files of other engines: out of a folder without their packages, or as installed."""

import sys
from pathlib import Path

import pytest
import torch
from bench.fakes import SGLANG_FILES, VLLM_FILES, write_files

from pm_ops.bench.implementation import Missing
from pm_ops.bench.loading import KVQuantMode, Platform, digest, import_module, version, vllm_library

ATTENTION = "vllm.v1.attention.ops.triton_unified_attention"

pytest.importorskip("triton")


def test_a_file_is_run_without_its_engine(tmp_path: Path) -> None:
    """Every ``__init__`` of the folder raises; what the file imports of its engine is stubs and its own neighbours."""
    folder = write_files(tmp_path, VLLM_FILES)
    module = import_module(folder, ATTENTION)
    assert module.__file__ == str(folder / "vllm/v1/attention/ops/triton_unified_attention.py")
    assert module.KVQuantMode is KVQuantMode and "vllm.v1.attention.ops.helpers" in sys.modules
    assert import_module(folder, ATTENTION) is module
    assert import_module(folder, "vllm.v1.kv_cache_interface").KVQuantMode is KVQuantMode


def test_packages_of_different_files_join(tmp_path: Path) -> None:
    folder = write_files(tmp_path, SGLANG_FILES)
    names = [name.removesuffix(".py").replace("/", ".") for name in SGLANG_FILES if name != "sglang/__init__.py"]
    modules = [import_module(folder, name) for name in names]
    assert [module.__name__ for module in modules] == names


def test_an_installed_package_is_used_where_the_folder_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = write_files(tmp_path / "site", {"sglang/__init__.py": "", "sglang/kernels.py": "found = True\n"})
    monkeypatch.syspath_prepend(str(site))
    for folder in (None, tmp_path):
        module = import_module(folder, "sglang.kernels")
        assert module.found and version(folder, "sglang", module) == "installed without metadata"


def test_what_is_nowhere_is_missing_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"vllm.x is not installed; --peers names a folder"):
        import_module(None, "vllm.x")
    with pytest.raises(Missing, match=rf"vllm.x is not installed, and not in the folder {tmp_path.name}"):
        import_module(tmp_path, "vllm.x")
    folder = write_files(tmp_path, VLLM_FILES)
    import_module(folder, ATTENTION)
    with pytest.raises(Missing, match="not in the folder"):  # the package is in the folder, this file is not
        import_module(folder, "vllm.x")


@pytest.mark.parametrize("text", ["from vllm.envs import NEW", "import vllm.other", "raise SystemError('no')", "def"])
def test_a_file_that_does_not_import_is_missing_with_its_error(text: str, tmp_path: Path) -> None:
    folder = write_files(tmp_path, {"vllm/kernel.py": text})
    with pytest.raises(Missing, match=r"vllm.kernel does not import: \w+Error: "):
        import_module(folder, "vllm.kernel")


def test_a_package_imported_from_elsewhere_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = write_files(tmp_path / "site", {"vllm/__init__.py": ""})
    monkeypatch.syspath_prepend(str(site))
    import vllm

    folder = write_files(tmp_path / "folder", VLLM_FILES)
    with pytest.raises(Missing, match="already imported from elsewhere"):
        import_module(folder, ATTENTION)
    assert sys.modules["vllm"] is vllm


def test_files_have_a_version_by_their_content(tmp_path: Path) -> None:
    folder = write_files(tmp_path, VLLM_FILES)
    module = import_module(folder, ATTENTION)
    first = version(folder, "vllm", module)
    assert first == digest(Path(str(module.__file__)))
    assert first.startswith("triton_unified_attention.py sha256 ") and len(first.split()[-1]) == 12
    Path(str(module.__file__)).write_text("pass")
    assert version(folder, "vllm", module) != first


def test_a_library_of_vllms_is_taken_out_of_the_folder_or_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write_files(tmp_path / "site", {"vllm/__init__.py": "", "vllm/inside/library.so": ""}) / "vllm"
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.26.0")
    for folder in (None, tmp_path):
        assert vllm_library(folder, "inside", "library.so") == (package / "inside/library.so", "vllm 0.26.0")
    mine = write_files(tmp_path, {"library.so": "of the folder"}) / "library.so"
    assert vllm_library(tmp_path, "inside", "library.so") == (mine, digest(mine))
    with pytest.raises(Missing, match="other.so is neither in vLLM's installation nor in the folder"):
        vllm_library(tmp_path, "other.so")


def test_the_platform_is_a_gpu_of_its_capability_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    platform = Platform()
    assert platform.is_cuda() and platform.has_device_capability(89) and platform.is_device_capability_family(90)
    assert not platform.has_device_capability(100) and not platform.is_device_capability_family(100)
    assert not platform.is_rocm() and not platform.is_xpu()
    with pytest.raises(AttributeError):
        platform.some_new_function  # not silently False
