"""The real Dockerfile, built and run without a container engine, on a base that stands in for AMD's image.

The base is a small Debian with this Python's torch and triton. Needs root, buildah and debootstrap, and downloads:
run it with ``make image-test``.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_packaging import linked

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.image, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parent.parent
SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
DEBIAN = "python3,python3-pip,python3-setuptools,python3-venv,python3-wheel,ca-certificates,tini"
VENV = "/opt/venv"


@dataclass(frozen=True)
class Store:
    """Images and containers of this test alone."""

    folder: Path

    def buildah(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = ["buildah", "--root", self.folder / "images", "--runroot", self.folder / "run", *arguments]
        return subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env={**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )

    def must(self, *arguments: str | Path) -> str:
        done = self.buildah(*arguments)
        assert done.returncode == 0, f"buildah {' '.join(map(str, arguments))}\n{done.stdout[-4000:]}"
        return done.stdout.strip()

    def build(self, base: str, tag: str) -> subprocess.CompletedProcess[str]:
        recipe = ("--format", "docker", "--file", "docker/Dockerfile", "--build-arg", f"BASE_IMAGE={base}")
        return self.buildah("build", *recipe, "--tag", tag, ".")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {' and '.join(missing) or 'nothing else'}")
    folder = tmp_path_factory.mktemp("store")
    yield Store(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def base(store: Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Debian with this Python's torch and triton in an environment of its own, as AMD's image has them."""
    suite = SUITES.get(sys.version_info[:2])
    if suite is None:
        pytest.skip(f"no Debian has Python {sys.version_info.major}.{sys.version_info.minor}")
    folder = tmp_path_factory.mktemp("base")
    system = folder / "system"
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={DEBIAN}", suite, system], check=True)
    # Debian's own pip, seen from the environment: pip refuses to work on Debian's Python itself.
    subprocess.run(
        ["chroot", system, "python3", "-m", "venv", "--system-site-packages", "--without-pip", VENV], check=True
    )
    [site] = (system / VENV.lstrip("/") / "lib").glob("python*/site-packages")
    shutil.copytree(linked(("torch", "triton", "numpy", "rich"), folder / "packages"), site, dirs_exist_ok=True)
    if authorities := ssl.get_default_verify_paths().cafile:
        shutil.copy(authorities, system / "etc/ssl/certs/ca-certificates.crt")
    container = store.must("from", "scratch")
    store.must("add", "--quiet", container, system, "/")
    path = f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    certificates = "PIP_CERT=/etc/ssl/certs/ca-certificates.crt"
    store.must("config", "--env", f"PATH={path}", "--env", certificates, container)
    store.must("commit", "--quiet", "--rm", container, "local/base")
    shutil.rmtree(folder)
    return "localhost/local/base"


@pytest.fixture(scope="module")
def container(store: Store, base: str) -> str:
    built = store.build(base, "rocm-dp")
    assert built.returncode == 0, built.stdout[-4000:]
    assert ", 0 with faults" in built.stdout
    return store.must("from", "rocm-dp")


def test_the_image_runs_as_a_user_who_is_in_both_groups_and_owns_the_reports(store: Store, container: str) -> None:
    told = store.must("run", container, "--", "id")
    assert told.startswith("uid=10001(rocm_dp)")
    assert re.search(r"groups=.*video.*render", told)
    store.must("run", container, "--", "touch", "/reports/mine")


def test_the_torch_of_the_base_is_still_there(store: Store, container: str) -> None:
    import torch

    told = store.must("run", container, "--", "python3", "-c", "import torch; print(torch.__version__)")
    assert told == torch.__version__


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("info --ranks 2 --hidden 64", "carried by"),
        ("doctor --all --only 'no gpu' --only triton", "2 checks: 0 error, 0 warning"),
        ("doctor --only gpus --only devices --only 'error counters'", "0 checks"),  # the health check
        ("demo --ranks 2 --steps 5", "PASSED"),
        ("validate --ranks 2 --transport all_gather_v --json /reports/validate.json", "PASSED"),
        ("soak --ranks 2 --self-test --clean-runs 1", "0 false alarms in 1 clean runs, 0 of"),
    ],
)
def test_the_commands_run_in_it_under_its_init(store: Store, container: str, command: str, says: str) -> None:
    told = store.must("run", container, "--", "tini", "-s", "-g", "--", "rocm-dp", *shlex.split(command))
    assert says in told
    assert "Tini is not running as PID 1" not in told


def test_a_short_soak_passes_with_what_native_code_holds_and_leaves_its_log_to_its_owner(
    store: Store, container: str
) -> None:
    soak = "rocm-dp soak --ranks 2 --steps 400 --json /reports/it"
    assert "CLEAN: 400 steps" in store.must("run", container, "--", *soak.split())
    assert store.must("run", container, "--", "stat", "--format=%a %U", "/reports/it") == "600 rocm_dp"
    # Behind the last samples each rank says that it ended, and then comes the outcome.
    assert "heap.used" in store.must("run", container, "--", "tail", "--lines=8", "/reports/it")


def test_kernels_are_found_where_they_were_compiled(store: Store, container: str) -> None:
    count = "import os; print(len(os.listdir(os.environ['TRITON_CACHE_DIR'])))"
    assert int(store.must("run", container, "--", "python3", "-c", count)) > 100


def test_a_base_with_a_cuda_package_builds_no_image_and_says_why(store: Store, base: str, tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text("Name: nvidia-nccl-cu12\nVersion: 2.27.5\n")
    spoilt = store.must("from", base)
    site = store.must("run", spoilt, "--", "python3", "-c", "import site; print(site.getsitepackages()[0])")
    store.must("add", spoilt, tmp_path / "METADATA", f"{site}/nvidia_nccl_cu12-2.27.5.dist-info/METADATA")
    store.must("commit", "--quiet", "--rm", spoilt, "local/spoilt")
    built = store.build("localhost/local/spoilt", "never")
    assert built.returncode != 0
    assert "nvidia-nccl-cu12 2.27.5 is a CUDA package" in built.stdout, built.stdout[-4000:]


def test_a_base_whose_torch_changes_on_the_way_builds_no_image_and_says_why(
    store: Store, base: str, tmp_path: Path
) -> None:
    """A pip that puts another torch in the place of the base's, whatever the constraints say."""
    (tmp_path / "pip.py").write_text(
        "import pathlib, runpy, site, sys\n"
        "here = site.getsitepackages()[0]\n"
        "if sys.argv[1] == 'install':\n"
        "    for about in pathlib.Path(here).glob('torch-*.dist-info/METADATA'):\n"
        "        about.write_text('Name: torch\\nVersion: 9.9.9\\n')\n"
        "else:\n"
        "    sys.path.remove(here)\n"
        "    runpy.run_module('pip', run_name='__main__', alter_sys=True)\n"
    )
    spoilt = store.must("from", base)
    site = store.must("run", spoilt, "--", "python3", "-c", "import site; print(site.getsitepackages()[0])")
    store.must("add", spoilt, tmp_path / "pip.py", f"{site}/pip.py")
    store.must("commit", "--quiet", "--rm", spoilt, "local/changed")
    built = store.build("localhost/local/changed", "never")
    assert built.returncode != 0
    assert re.search(r"torch was \S+ in the base image, and is 9\.9\.9 now", built.stdout), built.stdout[-2000:]
