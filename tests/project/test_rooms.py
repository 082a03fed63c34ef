"""Where things lie, and that the rooms of the package import each other one way only.

`core` stands below all; `blocks`, `attention`, `kernels`, `training` and `precision`
stand on it and do not know of each other; `objects` and `append` stand on `blocks`,
`cache` on both, `paged` on `attention` and `blocks`, `dropins`, `parallel` and `sparse`
on `paged`, `fp8` on `attention`, `graphs` on `kernels`; `hardware` asks each of them
who computes, `layers` stands on it, and `fusion` on `layers`. Files beside the rooms
see all of them.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jax_kvblock"
# What each room may import, besides itself and the native module.
BELOW: dict[str, set[str]] = {
    "core": set(),
    "blocks": {"core"},
    "append": {"blocks", "core"},
    "attention": {"core"},
    "fp8": {"attention", "core"},
    "kernels": {"core"},
    "graphs": {"kernels", "core"},
    "objects": {"blocks", "core"},
    "cache": {"objects", "append", "blocks", "core"},
    "paged": {"attention", "blocks", "core"},
    "dropins": {"paged", "attention", "blocks", "core"},
    "parallel": {"paged", "attention", "append", "blocks", "core"},
    "precision": {"core"},
    "sparse": {"paged", "attention", "blocks", "core"},
    "training": {"core"},
    "hardware": {
        *("training", "paged", "fp8", "attention", "append", "blocks", "core"),
    },
    "layers": {"hardware", "attention", "core"},
    "fusion": {"layers", "hardware", "attention", "core"},
}
NATIVE = "jax_kvblock._native"


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in PACKAGE.rglob("*.py")}


def imports_of(tree: ast.AST) -> Iterator[str]:
    """The modules of the package that a module names, for types or not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports of the package are absolute"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [
                name if name in MODULES or name == NATIVE else node.module or ""
                for name in inside
            ]
        else:
            continue
        yield from (name for name in found if name.split(".")[0] == "jax_kvblock")


IMPORTS = {
    name: set(imports_of(ast.parse(file.read_text()))) for name, file in MODULES.items()
}


def room_of(module: str) -> str:
    """The first folder of a module's name; nothing for what lies beside the rooms."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else ""


def test_every_folder_is_a_room() -> None:
    folders = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert folders == set(BELOW)
    assert IMPORTS["jax_kvblock"] == {f"jax_kvblock.{r}" for r in BELOW}


@pytest.mark.cases(99)
@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_what_lies_below_it_alone(room: str) -> None:
    wrong = {
        f"{module} imports {name}"
        for module, names in IMPORTS.items()
        if room_of(module) == room
        for name in names - {NATIVE}
        if room_of(name) not in {room, *BELOW[room]}
    }
    assert not wrong


def test_no_modules_import_each_other() -> None:
    """Not by way of others either, and not for types alone."""
    rooms = {name: {*names} & {*MODULES} for name, names in IMPORTS.items()}
    graphlib.TopologicalSorter(rooms).prepare()  # a circle raises, and is shown


def test_helpers_of_tests_and_benchmarks_lie_in_support() -> None:
    tests, benchmarks = ROOT / "tests", ROOT / "benchmarks"
    assert {file.name for file in tests.glob("*.py")} == {"conftest.py"}
    others = {file.parent.name for file in tests.glob("*/*.py") if not is_test(file)}
    assert others == {"support", "typing"}
    for file in benchmarks.glob("*.py"):
        assert re.search(r"__main__|^def bench\(", file.read_text(), re.MULTILINE), file


def is_test(file: Path) -> bool:
    return file.name.startswith("test_")
