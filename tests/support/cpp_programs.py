"""Small C++ programs over the sources, for what Python cannot reach."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2] / "cpp"


def run_cpp(folder: Path, program: str, *sources: str) -> str:
    """What a program says that is compiled with these sources of the library."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler built this package"
    file, binary = folder / "program.cc", folder / "program"
    file.write_text(program)
    paths = [str(file), *(str(ROOT / source) for source in sources)]
    include = [f"-I{ROOT}", f"-I{ROOT / 'include'}"]
    subprocess.run([compiler, "-std=c++17", *include, *paths, "-o", binary], check=True)
    done = subprocess.run([binary], check=True, capture_output=True, text=True)
    return done.stdout
