"""mypy and pyright see of the public interface what a user should see."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

import jax_kvblock
from jax_kvblock.append import append
from jax_kvblock.attention import options as by_name

HERE = Path(__file__).parents[1]
PACKAGE_ROOT = Path(jax_kvblock.__file__).parent.parent
USER = (HERE / "typing" / "user.py").read_text()
PYPROJECT = """
[tool.mypy]
strict = true
follow_imports = "silent"
cache_dir = "{root}/.mypy_cache"
{mypy_path}

[tool.pyright]
typeCheckingMode = "standard"
reportUnnecessaryTypeIgnoreComment = true
extraPaths = ["{package}"]
"""


def check(folder: Path, *command: str, text: str = USER, name: str = "user.py") -> str:
    """What a checker says of a file, the user's; nothing when it is content."""
    if importlib.util.find_spec(command[0]) is None:
        missing = f"{command[0]} is not installed; `make lint` installs it"
        if os.environ.get("KVBLOCK_REQUIRE_CHECKERS"):  # CI sets this
            pytest.fail(missing)
        pytest.skip(missing)
    # mypy finds installed packages by itself, and takes no path to them.
    installed = "site-packages" in PACKAGE_ROOT.parts
    path = "" if installed else f'mypy_path = "{PACKAGE_ROOT}"'
    settings = PYPROJECT.format(
        root=HERE.parent, mypy_path=path, package="" if installed else PACKAGE_ROOT
    )
    (folder / "pyproject.toml").write_text(settings)
    (folder / name).write_text(text.replace("# wrong", "# type: ignore"))
    done = subprocess.run(
        [sys.executable, "-m", *command, name],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    assert re.search(r"no issues found|0 errors|error", said), said
    return "" if done.returncode == 0 else said


def test_mypy_accepts_what_is_right_and_nothing_else(tmp_path: Path) -> None:
    assert not check(tmp_path, "mypy", "--python-executable", sys.executable)


def test_pyright_accepts_what_is_right_and_nothing_else(tmp_path: Path) -> None:
    assert not check(tmp_path, "pyright", "--pythonpath", sys.executable)


def test_the_native_module_has_strict_types(tmp_path: Path) -> None:
    """Its stub comes of the build; who checks the package strictly sees it."""
    stub = (PACKAGE_ROOT / "jax_kvblock" / "_native.pyi").read_text()
    assert not check(tmp_path, "mypy", text=stub, name="native.pyi")


CALLED = ("__init__", "__call__", "__array__")


def public_functions() -> dict[str, Callable[..., object]]:
    """The functions, and the methods and properties that users see."""
    found = {}
    for name in jax_kvblock.__all__:
        value = getattr(jax_kvblock, name)
        if not inspect.isclass(value):
            found[name] = value
            continue
        for key, member in inspect.getmembers_static(value):
            member = getattr(member, "fget", getattr(member, "__func__", member))
            ours = inspect.isfunction(member) and "jax_kvblock" in str(
                member.__module__
            )
            if ours and (not key.startswith("_") or key in CALLED):
                found[f"{name}.{key}"] = member
    for module in jax_kvblock.dropins.__all__:
        members = vars(getattr(jax_kvblock.dropins, module)).items()
        for name, value in members:
            ours = getattr(value, "__module__", "").endswith(f"dropins.{module}")
            if ours and not name.startswith("_") and inspect.isfunction(value):
                found[f"dropins.{module}.{name}"] = value
    # What JAX makes a tree of has leaves of any kind.
    return {name: f for name, f in found.items() if ".tree_" not in name}


PUBLIC = public_functions()


@pytest.mark.cases(999)
@pytest.mark.parametrize("name", PUBLIC)
def test_public_signatures_say_what_they_take_and_give(name: str) -> None:
    """Nothing is `Any`, but what a function that is passed in gives; dims are told."""
    for function in (*typing.get_overloads(PUBLIC[name]), PUBLIC[name]):
        for told in map(str, function.__annotations__.values()):
            assert not re.search(r"\bAny\b", re.sub(r"Callable\[[^]]*\]", "", told))
            assert not re.search(r"(?<!\[)\bArrayIn\b", told), "without its dims"


def test_who_computes_has_one_name() -> None:
    takes = {name: inspect.signature(f).parameters for name, f in PUBLIC.items()}
    by_backend = {name for name, parameters in takes.items() if "backend" in parameters}
    by_name = {name for name, these in takes.items() if "implementation" in these}
    assert by_backend == {"block_to_operational", "operational_to_block"} < by_name


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (jax_kvblock.flash_attention, by_name.FlashOptions),
        (jax_kvblock.dot_product_attention, by_name.DotProductOptions),
        (jax_kvblock.append_kv, append.AppendOptions),
        (jax_kvblock.rope_append, append.RopeOptions),
    ],
)
def test_options_are_those_of_the_function(
    function: Callable[..., object], options: type
) -> None:
    """The overloads take their options from a TypedDict."""
    taken = inspect.signature(function).parameters.values()
    by_name = [p.name for p in taken if p.kind is p.KEYWORD_ONLY]
    known = list(options.__annotations__)
    # For appends `scales` chooses the overload; `flash_attention` has it as an option.
    switches = {"return_lse", "return_residual", "scales"}.difference(known)
    assert [n for n in by_name if n not in switches] == known
