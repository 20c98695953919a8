"""Other engines' kernel files, imported on their own: out of a folder, their packages stubbed, or installed.

An engine's package pulls in hundreds of megabytes when it is imported; its Triton kernels need little of that. So the
packages above a kernel file become empty modules that only lead to the folder, and what the file imports from the rest
of its engine is the few attributes below.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..kernels import fa3
from .implementation import Missing

_MARK = "__pm_ops_stub__"


class KVQuantMode(enum.IntEnum):
    """vLLM's ways to keep K and V quantised, under its names and numbers."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5


class Platform:
    """As much of vLLM's platform as its kernels ask: an NVIDIA GPU, of which capability, and no to all else."""

    def fp8_dtype(self) -> torch.dtype:
        """The fp8 type of K and V."""
        return torch.float8_e4m3fn

    def is_cuda(self) -> bool:
        """Always."""
        return True

    def has_device_capability(self, capability: int) -> bool:
        """Whether the GPU has at least this one, 90 for 9.0."""
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor >= capability

    def is_device_capability_family(self, capability: int) -> bool:
        """Whether the GPU is of this generation."""
        return torch.cuda.get_device_capability()[0] == capability // 10

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("is_", "has_")):
            raise AttributeError(name)
        return lambda *_: False


def _logger(name: str) -> logging.Logger:
    """With vLLM's methods that say something once."""
    logger: Any = logging.getLogger(name)
    logger.info_once = logger.warning_once = lambda *args, **options: logger.info(*args)
    return logger


def _vllm() -> dict[str, dict[str, Any]]:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    return {
        "vllm._custom_ops": dict(
            swap_blocks_batch=lambda *args, **options: torch.ops._C_cache_ops.swap_blocks_batch(*args, **options)
        ),
        "vllm.envs": dict(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=None),
        "vllm.logger": dict(init_logger=_logger),
        "vllm.platforms": dict(current_platform=Platform()),
        "vllm.triton_utils": dict(triton=triton, tl=tl, tldevice=libdevice, HAS_TRITON=True),
        "vllm.utils.platform_utils": dict(
            get_device_name_as_file_name=lambda: torch.cuda.get_device_name().replace(" ", "_")
        ),
        "vllm.v1.attention.backends.utils": dict(NULL_BLOCK_ID=0, PAD_SLOT_ID=-1),
        "vllm.utils.torch_utils": dict(is_quantized_kv_cache=lambda name: name.startswith("fp8")),
        "vllm.v1.kv_cache_interface": dict(KVQuantMode=KVQuantMode),
        "vllm.model_executor.layers.quantization.utils.quant_utils": dict(
            FP8_DTYPE=torch.float8_e4m3fn, get_fp8_min_max=lambda: (-448.0, 448.0)
        ),
    }


def _sglang() -> dict[str, dict[str, Any]]:
    no = lambda: False  # noqa: E731
    platform = dict(is_hip=no, is_cpu=no, is_gfx95_supported=no, is_cuda=torch.cuda.is_available)
    release = tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:2])
    return {"sglang.srt.utils": platform, "sglang.srt.utils.common": platform | dict(torch_release=release)}


def _fla() -> dict[str, dict[str, Any]]:
    return {"fla": dict(__version__="0")}  # one that parses


_STUBS = {"vllm": _vllm, "sglang": _sglang, "fla": _fla}


def import_module(folder: Path | None, name: str) -> ModuleType:
    """An engine's module: out of the folder if the file is in it, else as installed.

    Raises:
        Missing: it is in neither, or does not import; the message says which.
    """
    package = name.partition(".")[0]
    if folder is not None and folder.joinpath(*name.split(".")).with_suffix(".py").is_file():
        _stub_packages(folder, package, name)
    elif name in sys.modules:
        return sys.modules[name]
    elif _stubbed(package) or importlib.util.find_spec(package) is None:
        places = "is not installed" if folder is None else f"is not installed, and not in the folder {folder.name}"
        raise Missing(f"{name} {places}; --peers names a folder of kernel files")
    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever another project's file does while it loads
        raise Missing(f"{name} does not import: {type(error).__name__}: {error}") from error


def version(folder: Path | None, distribution: str, *modules: ModuleType) -> str:
    """What a peer's version is: the installed distribution's, or of files a digest that tells them from others."""
    if folder is None or not _stubbed(distribution):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return "installed without metadata"
    return digest(*(Path(str(module.__file__)) for module in modules))


def digest(*files: Path) -> str:
    """Files by their content."""
    total = hashlib.sha256()
    for file in files:
        total.update(file.read_bytes())
    return f"{', '.join(file.name for file in files)} sha256 {total.hexdigest()[:12]}"


def vllm_library(folder: Path | None, *path: str) -> tuple[Path, str]:
    """One of vLLM's libraries and its version: out of the folder, or where ``path`` leads in its installation.

    Raises:
        Missing: it is in neither.
    """
    if folder is not None and (folder / path[-1]).is_file():
        return folder / path[-1], digest(folder / path[-1])
    file = fa3.installed(*path)
    if file is None:
        raise Missing(f"{path[-1]} is neither in vLLM's installation nor in the folder that --peers names")
    return file, f"vllm {importlib.metadata.version('vllm')}"


def _stubbed(package: str) -> bool:
    return hasattr(sys.modules.get(package), _MARK)


def _stub_packages(folder: Path, package: str, module: str) -> None:
    """Empty packages above ``module``, leading to the folder, and the package's stubs."""
    present = sys.modules.get(package)
    if present is not None and getattr(present, _MARK, None) != str(folder):
        raise Missing(f"{package} is already imported from elsewhere; run in a process of its own")
    attributes = {module.rpartition(".")[0]: dict[str, Any]()}
    if present is None:
        attributes |= _STUBS[package]()
    for name, values in attributes.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            _stub(folder, ".".join(parts[:depth]))
        vars(sys.modules[name]).update(values)


def _stub(folder: Path, name: str) -> None:
    if name in sys.modules:
        return
    stub = ModuleType(name)
    stub.__spec__ = ModuleSpec(name, None, is_package=True)
    stub.__path__ = [str(folder.joinpath(*name.split(".")))]
    setattr(stub, _MARK, str(folder))
    sys.modules[name] = stub
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, stub)
