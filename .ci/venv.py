"""Set up the environment of a checkout: ``python .ci/venv.py [FOLDER]``.

When the Python that runs this already has torch (a ROCm image), the environment sees that torch, and neither
it nor triton nor their companions are ever replaced. Otherwise torch and triton come from the package index.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036 (whoever starts this may have an older one)
    sys.exit(f"rocm-dp needs Python 3.10 or newer, {sys.executable} is {sys.version.split()[0]}: set PYTHON")

import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "soak,report,dev"
# The CUDA wheel of this torch asks for exactly this triton; its CPU wheel for none.
TORCH = ("torch==2.13.0", "triton==3.7.1; platform_system == 'Linux' and python_version < '3.15'")
# What belongs to an image's torch: another version of any of these would not match its ROCm (or CUDA).
HELD = re.compile(
    r"torch(vision|audio|ao)?|(pytorch-)?triton(-.*)?|(nvidia|cuda|hip|amd)-.*|rocm(-sdk.*)?|aiter|amdsmi"
)
MARKER = "rocm-dp.json"
CONSTRAINTS = "image-constraints.txt"
LINKS = "image-packages.pth"

PROBE = """
import importlib.metadata, importlib.util, json, os, re, sys
sys.path[:] = [path for path in sys.path if path]  # without the folder that this runs in
has = lambda name: importlib.util.find_spec(name) is not None
spec = importlib.util.find_spec("torch")
torch = os.path.realpath(spec.origin) if spec and spec.origin else None
packages = {}
for found in importlib.metadata.distributions():
    name = found.metadata and found.metadata["Name"]  # a broken install may have neither
    if name and found.version:
        packages.setdefault(re.sub(r"[-_.]+", "-", name).lower(), found.version)
folders = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
print(json.dumps({
    "version": ".".join(map(str, sys.version_info[:3])),
    "torch": torch,
    "packages": packages,
    "folders": [path for path in folders if os.path.isdir(path)],
    "modules": [name for name in ("venv", "ensurepip", "pip") if has(name)],
}))
"""


@dataclass(frozen=True)
class Seen:
    """What one Python sees: its packages by name, and the file of its torch (None: it has no torch)."""

    python: str
    version: str
    torch: str | None
    packages: dict[str, str]
    folders: tuple[str, ...]
    modules: tuple[str, ...]

    @property
    def held(self) -> dict[str, str]:
        """The packages that nothing may replace."""
        return {name: version for name, version in sorted(self.packages.items()) if HELD.fullmatch(name)}

    @property
    def torch_version(self) -> str:
        """As installed; a torch without metadata (a source tree on the path) has none."""
        return self.packages.get("torch", "of unknown version")


def see(python: str) -> Seen:
    """Ask a Python what it sees, without importing any of it."""
    done = subprocess.run([python, "-c", PROBE], check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Seen(
        python=python,
        version=found["version"],
        torch=found["torch"],
        packages=found["packages"],
        folders=tuple(found["folders"]),
        modules=tuple(found["modules"]),
    )


def python_of(folder: Path) -> str:
    """The Python of an environment."""
    return str(folder / "bin" / "python")


def read_marker(folder: Path) -> dict[str, object]:
    """What was written about an environment; empty when this script did not make it."""
    try:
        found = json.loads((folder / MARKER).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_marker(folder: Path, about: dict[str, object], *, ready: bool) -> None:
    """Written before the work and again after it, so that half an environment never looks whole."""
    (folder / MARKER).write_text(json.dumps({**about, "ready": ready}, indent=1) + "\n")


def describe(base: Seen) -> dict[str, object]:
    """What an environment depends on besides the project: another Python or torch means a new one."""
    return {"python": base.python, "version": base.version, "torch": base.torch, "held": base.held}


def digest_inputs() -> str:
    """Changes when the project's requirements or this script change."""
    inputs = (ROOT / "pyproject.toml", Path(__file__))
    return hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()


def check_can_make(base: Seen) -> None:
    """Say what is missing in words, before anything is written."""
    pip_comes = "ensurepip" in base.modules or (base.torch is not None and "pip" in base.modules)
    if "venv" not in base.modules or not pip_comes:
        lacking = [name for name in ("venv", "ensurepip") if name not in base.modules]
        raise SystemExit(
            f"{base.python} can't make an environment: it has no module {' and no module '.join(lacking)}.\n"
            "On Debian and Ubuntu `apt install python3-venv` brings it; or set PYTHON to another Python."
        )


def create(base: Seen, folder: Path) -> None:
    """A fresh environment in which everything of a base that has torch can be imported."""
    # An image's own pip serves when it has no ensurepip: it is linked below.
    options = [] if "ensurepip" in base.modules else ["--without-pip"]
    subprocess.run([base.python, "-m", "venv", *options, str(folder)], check=True)
    if base.torch is not None:
        link(base, folder)


def link(base: Seen, folder: Path) -> None:
    """Let an environment see the base's packages, after its own.

    `--system-site-packages` would not do: made from a Python that is itself an environment (as in the
    rocm/pytorch images), it shows the packages of the interpreter below that one, where no torch is.
    """
    assert base.torch is not None
    [site] = (folder / "lib").glob("python*/site-packages")
    # addsitedir follows the base's own .pth files too: that is how editable installs (aiter, vLLM) are found.
    lines = [f"import site; site.addsitedir({path!r})" for path in base.folders]
    lines.append(str(Path(base.torch).parent.parent))
    (site / LINKS).write_text("\n".join(lines) + "\n")


def write_constraints(base: Seen, folder: Path) -> Path:
    """Keep pip from choosing another version of what the image has."""
    path = folder / CONSTRAINTS
    path.write_text("".join(f"{name}=={version}\n" for name, version in base.held.items()))
    return path


def differences(base: Seen, now: Seen) -> list[str]:
    """What an environment sees otherwise than the image it was made from, both sides named."""
    lines = []
    if base.torch != now.torch:
        lines.append(f"torch is {base.torch} in the image, {now.torch} in the environment")
    for name in sorted({*base.held, *now.held}):
        before, after = base.held.get(name, "absent"), now.held.get(name, "absent")
        if before != after:
            lines.append(f"{name} is {before} in the image, {after} in the environment")
    return lines


def check_kept(base: Seen, now: Seen) -> None:
    """Fail loudly when the image's torch, or what belongs to it, is not what the environment sees."""
    lines = differences(base, now)
    if lines:
        raise SystemExit("The image's packages must not be replaced, but:\n  " + "\n  ".join(lines))


def pip(folder: Path, *arguments: str) -> None:
    """Run an environment's pip; what goes wrong it says itself."""
    command = [python_of(folder), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    # From elsewhere: pip would take the checkout's own egg-info for an installed package.
    done = subprocess.run([*command, *arguments], cwd=folder)
    if done.returncode:
        raise SystemExit(f"pip failed ({done.returncode}), as it says above; the next run starts anew")


def install(base: Seen, folder: Path) -> None:
    """The project, editable, with everything that its tests and tools need."""
    wanted = ["--editable", f"{ROOT}[{EXTRAS}]"]
    if base.torch is None:
        wanted += TORCH
    else:
        wanted += ["--constraint", str(write_constraints(base, folder))]
    pip(folder, "install", *wanted)


def clear(folder: Path) -> None:
    """Remove what an earlier run made, and nothing else."""
    if not folder.exists():
        return
    if not read_marker(folder) and any(folder.iterdir()):
        raise SystemExit(f"{folder} is there, and this script did not make it: remove it, or set VENV")
    shutil.rmtree(folder)


def explain(base: Seen) -> str:
    """Where torch comes from, in a line or two."""
    if base.torch is None:
        return f"No torch in {base.python}: installing {', '.join(name.split(';')[0] for name in TORCH)}"
    line = f"Using the torch {base.torch_version} that is there: {base.torch}"
    if not any("triton" in name for name in base.held):
        line += "\nNo triton is there, and none is installed: another build would not match that torch"
    return line


def set_up(python: str, folder: Path) -> None:
    """Make the environment, or bring it up to date, or see that it is."""
    base = see(python)
    about = {**describe(base), "inputs": digest_inputs()}
    have = read_marker(folder)
    if have == {**about, "ready": True}:
        return
    if have == {**about, "inputs": have.get("inputs"), "ready": True}:
        print(f"What is needed has changed: updating {folder}", flush=True)
        write_marker(folder, about, ready=False)
    else:
        check_can_make(base)
        clear(folder)
        print(f"Making {folder} with {python} ({base.version})", flush=True)
        folder.mkdir(parents=True)
        write_marker(folder, about, ready=False)
        create(base, folder)
        if base.torch is not None:
            check_kept(base, see(python_of(folder)))
    print(explain(base), f"Installing rocm-dp with {EXTRAS}", sep="\n", flush=True)
    install(base, folder)
    if base.torch is not None:
        check_kept(base, see(python_of(folder)))
    write_marker(folder, about, ready=True)
    print(f"Ready: {folder}", flush=True)


def base_python(folder: Path) -> str:
    """The Python to build on: never that of the environment itself, which an activated shell would offer."""
    if Path(sys.prefix).resolve() != folder.resolve():
        return sys.executable
    made_from = read_marker(folder).get("python")
    if isinstance(made_from, str) and Path(made_from).exists():
        return made_from
    raise SystemExit(f"{sys.executable} belongs to {folder}: deactivate it, or set PYTHON")


def main() -> None:
    """Set up the folder named on the command line."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".venv").absolute()
    set_up(base_python(folder), folder)


if __name__ == "__main__":
    main()
