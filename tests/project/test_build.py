"""How the build chooses: with and without nvcc, and for which architectures.

Only configures; compiling is what installing the package did.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.cpu
NO_NVCC = {"CUDACXX": "/nonexistent/nvcc"}


def configure(
    folder: pathlib.Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    cmake = shutil.which("cmake", path=os.path.dirname(sys.executable)) or "cmake"
    return subprocess.run(
        [
            cmake, "-S", str(ROOT), "-B", str(folder),
            f"-DPython_EXECUTABLE={sys.executable}", *options,
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc here")


def test_auto_without_nvcc_builds_the_cpu_handlers(tmp_path: pathlib.Path) -> None:
    done = configure(tmp_path, KVBLOCK_CUDA="AUTO", **NO_NVCC)
    assert done.returncode == 0, done.stderr
    assert "building the CPU handlers alone" in done.stdout


def test_on_without_nvcc_fails_and_says_what_to_do(tmp_path: pathlib.Path) -> None:
    done = configure(tmp_path, KVBLOCK_CUDA="ON", **NO_NVCC)
    assert done.returncode != 0
    message = " ".join(done.stderr.split())
    assert "KVBLOCK_CUDA=ON, but no nvcc was found" in message
    assert "CUDACXX" in message and "KVBLOCK_CUDA=AUTO" in message


def test_a_wrong_choice_is_named(tmp_path: pathlib.Path) -> None:
    done = configure(tmp_path, KVBLOCK_CUDA="MAYBE")
    assert done.returncode != 0
    assert "must be AUTO, ON or OFF, got 'MAYBE'" in " ".join(done.stderr.split())


@needs_nvcc
def test_a_build_without_hopper_compiles_what_stands_in(
    tmp_path: pathlib.Path,
) -> None:
    done = configure(tmp_path, "-GNinja", KVBLOCK_CUDA="ON", CUDA_ARCHS="80")
    assert done.returncode == 0, done.stderr
    ninja = shutil.which("ninja", path=os.path.dirname(sys.executable)) or "ninja"
    name = "CMakeFiles/kvblock.dir/cpp/ops/attention/hopper/not_built.cu.o"
    built = subprocess.run(
        [ninja, "-C", str(tmp_path), name], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout


@needs_nvcc
@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ((), {}, ["sm_80", "sm_90a", "code=[compute_80,"]),
        ((), {"CUDA_ARCHS": "80,90"}, ["sm_80", "sm_90"]),
        (("-DCMAKE_CUDA_ARCHITECTURES=89",), {}, ["sm_89"]),
    ],
)
def test_architectures(
    tmp_path: pathlib.Path,
    options: tuple[str, ...],
    environment: dict[str, str],
    expected: list[str],
) -> None:
    done = configure(tmp_path, *options, KVBLOCK_CUDA="ON", **environment)
    assert done.returncode == 0, done.stderr
    commands = (tmp_path / "compile_commands.json").read_text()
    files = [entry["file"] for entry in json.loads(commands)]
    cuda = [file for file in files if file.endswith(".cu")]
    estimate = rf"{len(cuda)} CUDA files to compile for .*: about \d+ min on \d+ cores"
    assert re.search(estimate, done.stdout), done.stdout
    # No file compiles two instances of the attention kernels' templates.
    instances = [f for f in cuda if f.startswith(str(tmp_path))]
    assert len(instances) >= 16
    for file in instances:
        types = re.findall(r"<(\w+, \d+(?:, \d+)?)", pathlib.Path(file).read_text())
        assert len(set(types)) == 1, file
    for name in expected:
        assert name in commands
    if options:
        assert "sm_80" not in commands
