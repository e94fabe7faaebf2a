"""`.ci/venv.py` against stand-in images: environments whose torch is a file of one line."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "venv.py"
ROCM = {"torch": "2.9.1+rocm7.2", "torchvision": "0.24.1", "triton": "3.5.1+rocm7.2"}


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("venv_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def site_of(environment: Path) -> Path:
    [site] = (environment / "lib").glob("python*/site-packages")
    return site


def put(site: Path, name: str, version: str) -> None:
    """What pip would leave behind of a package."""
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
    about = site / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "RECORD").write_text(f"{name}/__init__.py,,\n{about.name}/METADATA,,\n{about.name}/RECORD,,\n")


def pack(folder: Path, name: str, version: str, *needs: str) -> None:
    """A wheel that pip takes from a folder."""
    about = f"{name}-{version}.dist-info"
    requires = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", f"__version__ = {version!r}\n")
        archive.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        )
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def bare(environment: Path) -> str:
    """An environment without pip, and its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    return str(environment / "bin" / "python")


@pytest.fixture(scope="module")
def image(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Like the rocm/pytorch images: torch lies in an environment, beside an editable install."""
    folder = tmp_path_factory.mktemp("image")
    python = bare(folder / "venv")
    site = site_of(folder / "venv")
    for name, version in ROCM.items():
        put(site, name, version)
    (folder / "source").mkdir()
    (folder / "source" / "engine.py").touch()
    (site / "engine.pth").write_text(f"{folder / 'source'}\n")
    return script.see(python)


@pytest.fixture
def without_pip(image: Any) -> Any:
    """The same image, from which environments are made quickly."""
    return dataclasses.replace(image, modules=("venv", "pip"))


def test_the_torch_of_an_image_is_seen(image: Any) -> None:
    assert image.held == ROCM
    assert image.torch_version == ROCM["torch"]
    assert image.torch.endswith("site-packages/torch/__init__.py")


def test_a_python_without_torch_has_none(script: Any, tmp_path: Path) -> None:
    assert script.see(bare(tmp_path / "venv")).torch is None


def test_system_site_packages_would_miss_the_torch_of_an_image(script: Any, image: Any, tmp_path: Path) -> None:
    subprocess.run(
        [image.python, "-m", "venv", "--without-pip", "--system-site-packages", tmp_path / "venv"], check=True
    )
    assert script.see(str(tmp_path / "venv" / "bin" / "python")).torch != image.torch


def test_an_environment_sees_the_torch_that_it_was_made_from(script: Any, without_pip: Any, tmp_path: Path) -> None:
    script.create(without_pip, tmp_path / "venv")
    now = script.see(script.python_of(tmp_path / "venv"))
    assert (now.torch, now.held) == (without_pip.torch, ROCM)
    script.check_kept(without_pip, now)
    subprocess.run([now.python, "-c", "import engine, torch; assert 'rocm' in torch.__version__"], check=True)


def test_an_environment_of_a_plain_python_sees_nothing_of_it(script: Any, tmp_path: Path) -> None:
    base = script.see(bare(tmp_path / "plain"))
    put(site_of(tmp_path / "plain"), "leftover", "1.0")
    script.create(dataclasses.replace(base, modules=("venv",)), tmp_path / "venv")
    assert "leftover" not in script.see(script.python_of(tmp_path / "venv")).packages


def test_pip_may_not_replace_the_torch_of_an_image(script: Any, image: Any, tmp_path: Path) -> None:
    folder, wheels = tmp_path / "venv", tmp_path / "wheels"
    wheels.mkdir()
    pack(wheels, "torch", "2.13.0")
    pack(wheels, "greedy", "1.0", "torch>=2.13")
    script.create(image, folder)
    offline = ("install", "--no-index", "--find-links", str(wheels))
    with pytest.raises(SystemExit, match="pip failed"):
        script.pip(folder, *offline, "--constraint", str(script.write_constraints(image, folder)), "greedy")
    script.check_kept(image, script.see(script.python_of(folder)))
    # Without the constraints the same command does replace it, and that is seen.
    script.pip(folder, *offline, "greedy")
    with pytest.raises(SystemExit) as caught:
        script.check_kept(image, script.see(script.python_of(folder)))
    assert "torch is 2.9.1+rocm7.2 in the image, 2.13.0 in the environment" in str(caught.value)
    assert f"torch is {image.torch} in the image, {site_of(folder).resolve()}/torch/" in str(caught.value)


def test_a_companion_that_comes_or_goes_is_reported(script: Any, image: Any) -> None:
    packages = {name: version for name, version in image.packages.items() if name != "torchvision"}
    now = dataclasses.replace(image, packages={**packages, "nvidia-nccl-cu12": "2.27"})
    assert script.differences(image, now) == [
        "nvidia-nccl-cu12 is absent in the image, 2.27 in the environment",
        "torchvision is 0.24.1 in the image, absent in the environment",
    ]


@pytest.mark.parametrize("name", ["torch", "torchaudio", "triton-rocm", "pytorch-triton-rocm", "nvidia-nccl-cu13"])
def test_what_belongs_to_torch_is_held(script: Any, name: str) -> None:
    assert script.HELD.fullmatch(name)


@pytest.mark.parametrize("name", ["rocm-dp", "numpy", "torchmetrics", "rich"])
def test_what_does_not_belong_to_torch_is_not_held(script: Any, name: str) -> None:
    assert not script.HELD.fullmatch(name)


def test_torch_is_asked_for_only_where_there_is_none(
    script: Any, image: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(script, "pip", lambda folder, *arguments: asked.append(arguments))
    script.install(image, tmp_path)
    script.install(dataclasses.replace(image, torch=None, packages={}), tmp_path)
    of_image, of_plain = asked
    assert not [word for word in of_image if word.startswith(("torch", "triton"))]
    assert "--constraint" in of_image
    assert [word for word in of_plain if word.startswith(("torch==", "triton=="))] == list(script.TORCH)


def test_a_missing_triton_is_named_and_not_installed(script: Any, image: Any) -> None:
    assert "No triton" not in script.explain(image)
    assert "No triton is there" in script.explain(dataclasses.replace(image, packages={"torch": "2.9.1"}))


@pytest.mark.parametrize("modules", [(), ("venv",), ("venv", "pip"), ("ensurepip", "pip")])
def test_a_python_that_cannot_make_environments_says_what_to_install(
    script: Any, image: Any, modules: tuple[str, ...]
) -> None:
    plain = dataclasses.replace(image, torch=None, modules=modules)
    with pytest.raises(SystemExit, match="apt install python3-venv"):
        script.check_can_make(plain)


def test_the_pip_of_an_image_serves_when_it_has_no_ensurepip(script: Any, without_pip: Any) -> None:
    script.check_can_make(without_pip)


def test_an_older_python_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit, match=r"needs Python 3\.10 or newer"):
        runpy.run_path(str(SCRIPT))


@pytest.fixture
def steps(script: Any, without_pip: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What set_up does, without its two slow steps."""
    done: list[str] = []

    def create(base: Any, folder: Path) -> None:
        done.append("create")
        bare(folder)
        script.link(base, folder)

    monkeypatch.setattr(script, "create", create)
    monkeypatch.setattr(script, "install", lambda base, folder: done.append("install"))
    monkeypatch.setattr(script, "digest_inputs", lambda: "inputs")
    return done


def test_a_second_run_does_nothing(script: Any, image: Any, steps: list[str], tmp_path: Path) -> None:
    script.set_up(image.python, tmp_path / "venv")
    script.set_up(image.python, tmp_path / "venv")
    assert steps == ["create", "install"]


def test_a_changed_pyproject_installs_again(
    script: Any, image: Any, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.set_up(image.python, tmp_path / "venv")
    monkeypatch.setattr(script, "digest_inputs", lambda: "others")
    script.set_up(image.python, tmp_path / "venv")
    assert steps == ["create", "install", "install"]


def test_another_torch_means_another_environment(script: Any, image: Any, steps: list[str], tmp_path: Path) -> None:
    script.set_up(image.python, tmp_path / "venv")
    marker = tmp_path / "venv" / script.MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "held": {"torch": "2.8.0"}}))
    script.set_up(image.python, tmp_path / "venv")
    assert steps == ["create", "install", "create", "install"]


def test_an_interrupted_set_up_starts_anew(
    script: Any, image: Any, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(base: Any, folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            script.set_up(image.python, tmp_path / "venv")
    half = tmp_path / "venv" / "half"
    half.touch()
    script.set_up(image.python, tmp_path / "venv")
    assert steps == ["create", "create", "install"]
    assert not half.exists()


def test_a_set_up_that_replaced_torch_fails_and_is_not_ready(
    script: Any, image: Any, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "install", lambda base, folder: put(site_of(folder), "torch", "2.13.0"))
    with pytest.raises(SystemExit, match="must not be replaced"):
        script.set_up(image.python, tmp_path / "venv")
    assert script.read_marker(tmp_path / "venv")["ready"] is False


def test_a_folder_of_somebody_else_is_left_alone(script: Any, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(SystemExit, match="did not make it"):
        script.clear(tmp_path)
    assert (tmp_path / "precious").exists()


def test_an_activated_environment_is_built_on_what_it_was_made_from(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(SystemExit, match="deactivate it"):
        script.base_python(tmp_path)
    script.write_marker(tmp_path, {"python": sys.executable}, ready=True)
    assert script.base_python(tmp_path) == sys.executable
    assert script.base_python(tmp_path / "other") == sys.executable
