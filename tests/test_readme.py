"""The README's example is complete, and its output is the real one."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_prints_what_the_readme_shows(tmp_path: Path) -> None:
    blocks = re.findall(r"```(\w*)\n(.*?)```", README.read_text(), flags=re.DOTALL)
    program, shown = next((a[1], b[1]) for a, b in itertools.pairwise(blocks) if a[0] == "python")
    script = tmp_path / "layer.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_every_file_that_the_readme_names_is_there() -> None:
    for name in re.findall(r"`((?:rocm_dp|tests)/[\w/]+(?:\.py|/))`", README.read_text()):
        assert (README.parent / name).exists(), name
