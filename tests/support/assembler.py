"""PTX, taken to machine code by the toolkit's assembler, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def assemble(image: bytes, folder: Path) -> str:
    """Fails, with what the assembler says, where it does not take the PTX.

    Returns:
        What it says of each kernel: registers, spills.
    """
    tool = shutil.which("ptxas")
    if tool is None:
        pytest.skip("ptxas is not here")
    (folder / "k.ptx").write_bytes(image)
    arch = re.search(rb"^\.target (\w+)", image, re.MULTILINE)[1].decode()
    made = subprocess.run(
        [
            tool,
            f"-arch={arch}",
            "-v",
            str(folder / "k.ptx"),
            "-o",
            str(folder / "k.cubin"),
        ],
        capture_output=True,
        text=True,
    )
    if "Unsupported .version" in made.stderr:
        pytest.skip("ptxas is older than the compiler that wrote the PTX")
    assert made.returncode == 0, made.stderr
    return made.stderr
