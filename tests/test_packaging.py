"""Wheel, sdist and editable install hold the whole of pm_ops, wings included, and nothing beside it."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "build", "dist", "__pycache__", ".*_cache", ".gpu")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def pip(*arguments: str | Path, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


def build_wheel(source: Path, into: Path) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", into, source, cwd=into)
    (wheel,) = into.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as a clone would have it: links kept, nothing built."""
    target = tmp_path_factory.mktemp("checkout") / "pm_ops"
    shutil.copytree(ROOT, target, symlinks=True, ignore=LEFT_OUT)
    return target


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("sdist")
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(into)!r})"
    run(sys.executable, "-c", code, cwd=checkout)
    (archive,) = into.glob("*.tar.gz")
    return archive


def sources(checkout: Path) -> set[str]:
    """Every module of the tree under the name it is imported by."""
    files = {path.relative_to(checkout).as_posix() for path in (checkout / "pm_ops").rglob("*.py")}
    wings = [path for wing in ("compile_passes", "adapters") for path in (checkout / wing).rglob("*.py")]
    assert wings
    return files | {f"pm_ops/{path.relative_to(checkout).as_posix()}" for path in wings}


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wings_are_relative_links_of_the_tree(checkout: Path) -> None:
    for wing in ("compile_passes", "adapters"):
        link = checkout / "pm_ops" / wing
        assert link.is_symlink()
        assert link.readlink() == Path("..") / wing


def test_the_wheel_holds_every_module_and_nothing_at_the_top_but_pm_ops(checkout: Path, wheel: Path) -> None:
    names = contents(wheel)
    metadata = {name for name in names if ".dist-info/" in name}
    assert {name for name in names - metadata if name.endswith(".py")} == sources(checkout)
    assert "pm_ops/py.typed" in names
    assert {name.partition("/")[0] for name in names - metadata} == {"pm_ops"}


def test_the_wheel_says_what_it_needs_and_offers(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        entry_points = archive.read(f"{folder}/entry_points.txt").decode()
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    needed = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert needed == ["torch>=2.11"]
    assert set(metadata.get_all("Provides-Extra") or []) == {"triton", "transformers", "vllm", "sglang", "nixl", "test"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "[torch_dynamo_backends]\npm_ops = pm_ops.compile_passes.backend:pm_ops_backend" in entry_points
    assert "[vllm.general_plugins]\npm_ops = pm_ops.adapters.vllm.plugin:register" in entry_points
    assert "[sglang.srt.plugins]\npm_ops = pm_ops.adapters.sglang.plugin:register" in entry_points
    assert "[console_scripts]\npm-ops = pm_ops.cli:main" in entry_points


def test_the_version_is_the_packages(wheel: Path) -> None:
    version = run(sys.executable, "-c", "import pm_ops; print(pm_ops.__version__)", cwd=ROOT)
    assert wheel.name.split("-")[1] == version


def test_a_wheel_built_from_the_sdist_holds_the_same_files(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym()]
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    (tmp_path / "wheel").mkdir()
    again = build_wheel(source, tmp_path / "wheel")
    assert contents(again) == contents(wheel)


IMPORT = """
import importlib.util, os.path, site, sys
from importlib.metadata import entry_points
site.addsitedir({site!r})
sys.path.append({environment!r})
import pm_ops, pm_ops.adapters, pm_ops.compile_passes
assert importlib.util.find_spec("adapters") is None and importlib.util.find_spec("compile_passes") is None
for module in (pm_ops, pm_ops.adapters, pm_ops.compile_passes):
    print(os.path.realpath(module.__file__))
(entry,) = {{e for e in entry_points(group="torch_dynamo_backends") if e.name == "pm_ops"}}
assert entry.load().__module__ == "pm_ops.compile_passes.backend"
"""


def imported_from(site: Path, cwd: Path) -> list[Path]:
    """Files that pm_ops and its wings are imported from where this site folder is the only one with pm_ops in it."""
    # -S leaves the environment's own site folder out, so that no other editable install of pm_ops is active. Its other
    # packages, torch first, are reached by the path alone.
    code = IMPORT.format(site=str(site), environment=sysconfig.get_paths()["purelib"])
    return [Path(line) for line in run(sys.executable, "-S", "-c", code, cwd=cwd).splitlines()]


def test_the_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip("install", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    assert imported_from(site, tmp_path) == [
        site / "pm_ops" / part for part in ("__init__.py", "adapters/__init__.py", "compile_passes/__init__.py")
    ]
    assert not [path for path in site.rglob("*") if path.is_symlink()]


def test_an_editable_install_imports_from_the_checkout(checkout: Path, tmp_path: Path) -> None:
    options = ("--no-deps", "--no-build-isolation", "--ignore-installed", "--prefix", tmp_path / "prefix")
    pip("install", *options, "--editable", checkout, cwd=tmp_path)
    (site,) = (tmp_path / "prefix").rglob("site-packages")
    assert imported_from(site, tmp_path) == [
        checkout / part for part in ("pm_ops/__init__.py", "adapters/__init__.py", "compile_passes/__init__.py")
    ]


def test_the_checkout_imports_uninstalled(checkout: Path) -> None:
    code = "import pm_ops, pm_ops.adapters, pm_ops.compile_passes; print(pm_ops.__file__)"
    assert Path(run(sys.executable, "-c", code, cwd=checkout)) == checkout / "pm_ops" / "__init__.py"
