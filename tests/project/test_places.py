"""What a run on a GPU leaves out: what it says nothing of, and nothing else."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import gpus
import places
import pytest


class Item:
    """As much of a test as is looked at."""

    def __init__(self, name: str, *fixtures: str, mark: str = "") -> None:
        self.path, self.name = Path("test_some.py"), name
        self.originalname = name.partition("[")[0]
        self.fixturenames, self.marks = fixtures, {mark} - {""}

    def add_marker(self, mark: str) -> None:
        self.marks.add(mark)

    def get_closest_marker(self, mark: str) -> bool:
        return mark in self.marks


def test_who_asks_for_cpus_is_marked():
    items = [
        Item("plain", "rng"),
        Item("mesh", "rng", "four_cpus"),
        Item("fallback", "on_cpu"),
        Item("kernel", "latent_library", "latent_as_cuda"),
        Item("both", "four_cpus", "attention_library", "paged_as_cuda"),
        Item("by hand", mark="host"),
    ]
    places.mark(items)
    marks = [item.marks for item in items]
    assert marks == [set(), {"host"}, {"host"}, {"cpu"}, {"cpu"}, {"host"}]


def test_the_first_case_of_each_function_stays():
    """Of those on a CPU's devices; what a GPU has is not counted as one."""
    names = ["f[gpu]", "f[a]", "f[b]", "g", "f[c]", "h[kernel]", "h[a]", "h[b]"]
    items: list[Any] = [Item(name, mark="host") for name in names]
    items[0].marks = set()
    items[5].marks.add("cpu")
    others = places.others_than_the_first(items)
    assert [item.name for item in others] == ["f[b]", "f[c]", "h[b]"]


def test_the_fixtures_are_there():
    """Under these names, and no other fixtures have them."""
    tests, defined = Path(places.__file__).parents[1], set()
    for file in tests.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                "pytest.fixture" in ast.unparse(by) for by in node.decorator_list
            ):
                defined.add((node.name, re.sub("_[a-z0-9]+$", "", file.stem)))
    named = places.EMULATORS | places.CPU_DEVICES
    files = {name: {file for n, file in defined if n == name} for name in named}
    assert all(files.values()), files
    assert set().union(*files.values()) == {"conftest", "emulated", "test_emulated"}


@pytest.mark.parametrize(
    ("worker", "named", "files", "wanted"),
    [
        ("gw0", None, 4, "0,1,2,3"),
        ("gw6", None, 4, "2,3,0,1"),
        ("gw1", "3,5", 4, "5,3"),
        ("gw1", "GPU-a,GPU-b,GPU-c", 0, "GPU-b,GPU-c,GPU-a"),
        ("", None, 4, None),
        ("gw3", None, 1, None),
        ("gw3", "", 4, ""),
    ],
)
def test_each_process_takes_another_gpu_first(
    monkeypatch, tmp_path, worker, named, files, wanted
):
    for i in range(files):
        (tmp_path / f"nvidia{i}").touch()
    for other in ("nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / other).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    gpus.rotate(worker, tmp_path)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == wanted
