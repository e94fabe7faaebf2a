"""What the wheel and the sdist hold, and how they behave where they are installed."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEVER_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
# The wheel's dependencies, not torch: what they are linked from has it.
BASE = ("numpy", "rich")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must succeed, outside the checkout's own Python settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=kept, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def copy_checkout(target: Path) -> Path:
    """What a commit of everything would hold: neither ignored files nor this run's build output."""
    git = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(git, capture_output=True, text=True) if shutil.which("git") else None
    names = listed.stdout.split("\0") if listed and not listed.returncode else []
    if "pyproject.toml" not in names:  # no git, or the checkout is a folder of somebody else's
        return Path(shutil.copytree(ROOT, target, ignore=NEVER_COPIED, symlinks=True))
    for name in filter(None, names):
        if os.path.lexists(ROOT / name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build(source: Path, target: Path, *kinds: str) -> None:
    """Without isolation: the dev extra brings setuptools, so nothing is downloaded."""
    run(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", target, source, cwd=target.parent)


def packages_in(source: Path) -> set[str]:
    """Every package of a checkout, as it is imported."""
    found = {"rocm_dp.kernels"}
    for path in (source / "rocm_dp").rglob("__init__.py"):
        found.add(".".join(path.parent.relative_to(source).parts))
    for path in (source / "kernels").rglob("__init__.py"):
        found.add(".".join(["rocm_dp", *path.parent.relative_to(source).parts]))
    return found


def names_in(wheel: Path) -> list[PurePosixPath]:
    with zipfile.ZipFile(wheel) as archive:
        return [PurePosixPath(name) for name in archive.namelist()]


def missing_packages(wheel: Path, source: Path) -> set[str]:
    held = {".".join(name.parent.parts) for name in names_in(wheel) if name.name == "__init__.py"}
    return packages_in(source) - held


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("checkout") / "source")


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the sdist and the wheel built from that sdist, as `make build` makes them."""
    target = tmp_path_factory.mktemp("built") / "dist"
    build(source, target)
    return target


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


def linked(names: tuple[str, ...], folder: Path) -> Path:
    """A folder in which just these distributions, and what they need, can be imported."""
    folder.mkdir()
    left, seen = list(names), set[str]()
    while left:
        found = metadata.distribution(left.pop())
        if found.name in seen:
            continue
        seen.add(found.name)
        needs = [need for need in found.requires or () if "extra ==" not in need]
        left += [need for need in (re.split(r"[^\w.-]", line)[0] for line in needs) if is_installed(need)]
        tops = {path.parts[0] for path in found.files or () if path.parts[0] not in {"..", "__pycache__"}}
        for top in tops:
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


def is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def site_of(environment: Path) -> Path:
    [site] = (environment / "lib").glob("python*/site-packages")
    return site


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with the wheel and its base dependencies, but no torch."""
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=folder)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (site_of(environment) / "base.pth").write_text(f"{linked(BASE, folder / 'base')}\n")
    return python


def test_the_wheel_holds_every_package(wheel: Path, source: Path) -> None:
    assert not missing_packages(wheel, source)


def test_a_package_that_is_not_listed_is_missed(source: Path, tmp_path: Path) -> None:
    spoilt = Path(shutil.copytree(source, tmp_path / "spoilt", symlinks=True))
    pyproject = spoilt / "pyproject.toml"
    text = pyproject.read_text()
    assert text.count('    "rocm_dp.transports",\n') == 1
    pyproject.write_text(text.replace('    "rocm_dp.transports",\n', ""))
    build(spoilt, tmp_path / "dist", "--wheel")
    [wheel] = (tmp_path / "dist").glob("*.whl")
    assert "rocm_dp.transports" in missing_packages(wheel, spoilt)


def test_the_wheel_holds_every_module_of_the_checkout(wheel: Path, source: Path) -> None:
    modules = {PurePosixPath(path.relative_to(source)) for path in (source / "rocm_dp").rglob("*.py")}
    modules |= {PurePosixPath("rocm_dp", path.relative_to(source)) for path in (source / "kernels").rglob("*.py")}
    assert modules == {name for name in names_in(wheel) if name.suffix == ".py"}


def test_the_wheel_holds_nothing_beside_the_package(wheel: Path) -> None:
    tops = {name.parts[0] for name in names_in(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rocm_dp"}


def test_the_wheel_holds_the_licence_and_the_typing_mark(wheel: Path) -> None:
    names = names_in(wheel)
    assert PurePosixPath("rocm_dp/py.typed") in names
    [licence] = [name for name in names if name.name == "LICENSE"]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(str(licence)) == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_holds_the_source_of_the_signal_counter(wheel: Path) -> None:
    """It is compiled where it is used."""
    path = PurePosixPath("rocm_dp/soak/signal_counter.c")
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(str(path)) == (ROOT / path).read_bytes()


def test_the_pytest_plugin_is_installed(installed: Path, tmp_path: Path) -> None:
    code = "from importlib.metadata import entry_points as e; print(*(p.value for p in e(group='pytest11')))"
    assert run(installed, "-c", code, cwd=tmp_path).split() == ["rocm_dp.soak.plugin"]


def test_the_sdist_holds_what_the_wheel_is_built_from(built: Path, source: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {str(PurePosixPath(*PurePosixPath(name).parts[1:])) for name in archive.getnames()}
    modules = {
        str(path.relative_to(source)) for room in ("rocm_dp", "kernels") for path in (source / room).rglob("*.py")
    }
    others = {"LICENSE", "pyproject.toml", "rocm_dp/py.typed", "rocm_dp/soak/signal_counter.c"}
    assert modules | others <= names


def test_torch_and_triton_are_no_base_dependencies(wheel: Path) -> None:
    [path] = [name for name in names_in(wheel) if name.name == "METADATA"]
    with zipfile.ZipFile(wheel) as archive:
        about = email.message_from_bytes(archive.read(str(path)))
    needs = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[^\w.-]", line)[0] for line in needs} == set(BASE)
    assert about["Requires-Python"] == ">=3.10"


def test_the_package_imports_without_torch(installed: Path, tmp_path: Path) -> None:
    code = "import rocm_dp, rocm_dp.kernels, sys; assert 'torch' not in sys.modules; print(rocm_dp.__file__)"
    assert "site-packages" in run(installed, "-c", code, cwd=tmp_path)
    find = "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert run(installed, "-c", find, cwd=tmp_path).strip() == "None"


def test_the_kernels_shadow_nobody_else(installed: Path, tmp_path: Path) -> None:
    other = site_of(installed.parent.parent) / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("OWNER = 'somebody else'\n")
    code = "import kernels, rocm_dp.kernels as ours; print(kernels.OWNER, ours.__name__, hasattr(ours, 'OWNER'))"
    try:
        assert run(installed, "-c", code, cwd=tmp_path).split("\n")[0] == "somebody else rocm_dp.kernels False"
    finally:
        shutil.rmtree(other)


def test_the_command_is_installed(installed: Path, tmp_path: Path) -> None:
    assert (installed.parent / "rocm-dp").exists()
    code = "from importlib.metadata import entry_points as e; print(*e(group='console_scripts', name='rocm-dp'))"
    assert "rocm_dp.cli:main" in run(installed, "-c", code, cwd=tmp_path)
