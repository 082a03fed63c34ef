"""`.ci/compile_cuda`: which CUDA files it takes as compiled, by their digests."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = ROOT / ".ci" / "compile_cuda"
    if not path.exists():
        pytest.skip("a source distribution has no .ci")
    loader = importlib.machinery.SourceFileLoader("compile_cuda", str(path))
    spec = importlib.util.spec_from_loader("compile_cuda", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(module, "version_of", lambda compiler: f"{compiler} 13.0")
    return module


def unit_in(folder: Path, options: str = "-O3") -> dict[str, str]:
    """A file that includes a header, which includes another one beside itself."""
    (folder / "cpp" / "ops").mkdir(parents=True, exist_ok=True)
    (folder / "cpp" / "ops" / "near.cuh").write_text("int near;\n")
    (folder / "cpp" / "ops" / "far.cuh").write_text('  # include "near.cuh"\n')
    source = folder / "cpp" / "a.cu"
    source.write_text('#include <vector>\n#include "ops/far.cuh"\n')
    return {
        "command": f"nvcc -I{folder}/cpp {options} -c {source} -o a.o",
        "file": str(source),
    }


def test_the_digest_is_of_all_that_is_compiled(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = unit_in(tmp_path)
    before = tool.digest(unit)
    assert tool.digest(unit) == before
    assert tool.digest(unit_in(tmp_path, "-O2")) != before

    header = tmp_path / "cpp" / "ops" / "near.cuh"
    header.write_text("int nearer;\n")
    assert tool.digest(unit) != before
    header.write_text("int near;\n")
    assert tool.digest(unit) == before

    monkeypatch.setattr(tool, "version_of", lambda compiler: "nvcc 13.1")
    assert tool.digest(unit) != before


def test_the_digest_is_the_same_in_another_folder(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = set()
    for name in "here", "there":
        monkeypatch.setattr(tool, "ROOT", tmp_path / name)
        digests.add(tool.digest(unit_in(tmp_path / name)))
    assert len(digests) == 1


def test_a_record_is_read_as_it_was_written(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "RECORD", tmp_path / "compiled.txt")
    assert tool.read_record() == {}
    digests = {"cpp/a.cu": "0123456789abcdef", "attention/b.cu": "fedcba9876543210"}
    tool.write_record(digests)
    assert tool.read_record() == digests


def test_one_file_that_is_known_is_drawn(tool: ModuleType) -> None:
    assert tool.drawn([]) == []
    names = ["a.cu", "b.cu", "c.cu"]
    (name,) = tool.drawn(names)
    assert name in names


def test_a_record_is_of_every_file(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["compile_cuda", "--record"])
    with pytest.raises(SystemExit):
        tool.main()


def test_it_builds_cuda_where_the_suite_does_not(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both, CMakeLists.txt listens to the environment: KVBLOCK_CUDA=OFF in CI."""
    monkeypatch.setenv("KVBLOCK_CUDA", "OFF")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "BUILD", tmp_path / "build")
    sources = ["cpp/a.cu", "cpp/b.cc", "build/c.cu"]
    told: list[str] = []

    def cmake(*command: Any, env: dict[str, str], **options: Any) -> None:
        told.append(env["KVBLOCK_CUDA"])
        units = [{"file": str(tmp_path / name)} for name in sources]
        (tmp_path / "build").mkdir(exist_ok=True)
        (tmp_path / "build" / "compile_commands.json").write_text(json.dumps(units))

    monkeypatch.setattr(tool.subprocess, "run", cmake)
    assert list(tool.configure()) == ["c.cu", "cpp/a.cu"]
    assert told == ["ON"]

    sources[:] = ["cpp/b.cc"]
    with pytest.raises(SystemExit, match="no CUDA files"):
        tool.configure()
