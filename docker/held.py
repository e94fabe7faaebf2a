"""Hold what belongs to an image's torch: ``held.py before FILE --constraints FILE``, then ``held.py after FILE``.

Runs while the image is built, with its own Python. ``before`` writes down the versions that nothing may change;
``after`` ends the build when one did, when a CUDA package is there, or when rocm_dp.kernels can't be imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import re
import sys
from pathlib import Path

# As in .ci/venv.py, which does the same for a checkout.
HELD = re.compile(
    r"torch(vision|audio|ao)?|(pytorch-)?triton(-.*)?|(nvidia|cuda|hip|amd)-.*|rocm(-sdk.*)?|aiter|amdsmi"
)
CUDA = re.compile(r"(nvidia|cuda)-.*")


def installed() -> dict[str, str]:
    """Return the version of every distribution, by its normalised name."""
    packages: dict[str, str] = {}
    for found in importlib.metadata.distributions():
        name = found.metadata and found.metadata["Name"]
        if name and found.version:
            packages.setdefault(re.sub(r"[-_.]+", "-", name).lower(), found.version)
    return packages


def held(packages: dict[str, str]) -> dict[str, str]:
    """Return those of ``packages`` that nothing may change."""
    return {name: version for name, version in sorted(packages.items()) if HELD.fullmatch(name)}


def faults(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return what is wrong with the packages of an image, both sides named."""
    found = [f"{name} {version} is a CUDA package" for name, version in sorted(now.items()) if CUDA.fullmatch(name)]
    if "torch" not in now:
        found.append("there is no torch: the base image must bring it")
    for name in sorted({*before, *held(now)}):
        was, is_now = before.get(name, "absent"), now.get(name, "absent")
        if was != is_now and not CUDA.fullmatch(name):
            found.append(f"{name} was {was} in the base image, and is {is_now} now")
    return found


def import_fault() -> list[str]:
    """Return why the kernels can't be imported."""
    try:
        importlib.import_module("rocm_dp.kernels.rows")
    except Exception as error:  # whatever it is, the image is of no use
        return [f"rocm_dp.kernels can't be imported: {type(error).__name__}: {error}"]
    return []


def main() -> None:
    """Write down or compare, and leave with the reasons when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("when", choices=("before", "after"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--constraints", type=Path)
    args = parser.parse_args()
    now = installed()
    if args.when == "before":
        before = held(now)
        args.file.write_text(json.dumps(before, indent=1) + "\n")
        if args.constraints:
            args.constraints.write_text("".join(f"{name}=={version}\n" for name, version in before.items()))
        wrong = faults(before, now)
    else:
        wrong = faults(json.loads(args.file.read_text()), now) + import_fault()
    if wrong:
        sys.exit("This image can't be built:\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
