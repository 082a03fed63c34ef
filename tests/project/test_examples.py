"""The examples run, and say what they promise to say."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import pytest

import jax_kvblock

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def test_a_model_decodes_on_from_a_cache_that_was_moved() -> None:
    skip_without_model()
    printed = run("demo.py")
    assert "the same text, token for token" in printed
    assert "GB/s" in printed


def test_a_gpt_learns_the_same_with_flash_and_with_plain_attention(
    tmp_path: pathlib.Path,
) -> None:
    options = ["--quick"]
    plot = tmp_path / "loss.svg"
    if importlib.util.find_spec("matplotlib") is not None:
        options += ["--plot", str(plot)]
    printed = run("train_gpt.py", *options)
    assert "the same curve" in printed
    found = re.findall(r"(\w+) +attention: +([\d,]+) tokens .* ([\d.]+) MiB", printed)
    assert [name for name, _, _ in found] == ["flash", "plain"]
    flash, plain = (float(mebibytes) for *_, mebibytes in found)
    assert flash < plain
    assert plot.exists() == ("--plot" in options)


def test_kernels_of_other_compilers() -> None:
    printed = run("other_compilers.py")
    for compiler in ("triton", "numba", "cutlass", "cutile"):  # or it is not installed
        assert re.search(compiler, printed, re.IGNORECASE)
    kept = EXAMPLES.parent / "tests/support/ptx"
    printed = run("other_compilers.py", "--kept", str(kept))
    assert len(re.findall("traced and lowered|as jnp", printed)) == 4
    on_gpu = jax.default_backend() == "gpu"
    assert ("not run: there is none here" in printed) != on_gpu


# ---- paged_decode --------------------------------------------------------------------


# The model itself takes as long as all other tests here: `make test` leaves it out.
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--random"], id="random"),
        pytest.param([], id="smollm2", marks=pytest.mark.wide),
    ],
)
def test_sequences_of_all_lengths_decode_as_with_dense_attention(
    options: list[str],
) -> None:
    if not options:
        skip_without_model()
    printed = run("paged_decode.py", *options)
    assert re.search(r"float32 chooses the same \d{3} tokens", printed)
    assert re.search(r"^traces +2, for 64 and 4 rows$", printed, re.MULTILINE)
    # Everything that may happen did: waiting, chunks beside decoding, being put back.
    assert int(re.findall(r"for want of blocks: (\d+)", printed)[0]) > 0
    steps = re.findall(r"^  .{13} ([Rd. ]+)$", printed, re.MULTILINE)
    assert len(steps) == 8
    columns = list(zip(*(line.ljust(99) for line in steps), strict=True))
    assert any({"R", "d"} <= set(column) for column in columns)
    assert all(sum(column.count(c) for c in "Rd") <= 4 for column in columns)


@pytest.fixture
def paged_decode(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example as a fresh module, which has compiled nothing yet."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "paged_decode", raising=False)
    return importlib.import_module("paged_decode")


# Each takes what `paged_attention` takes, and gives it something else.
MISTAKES: dict[str, Callable[..., Any]] = {
    "one key too few": lambda attend, q, pool, layer, tables, lens, **to: attend(
        q, pool, layer, tables, lens - 1, **to
    ),
    "a block of another": lambda attend, q, pool, layer, tables, lens, **to: attend(
        q, pool, layer, tables.at[1, 1].set(tables[0, 0]), lens, **to
    ),
    "a layer of another": lambda attend, q, pool, layer, *of, **to: attend(
        q, pool, layer // 2, *of, **to
    ),
    "no mask": lambda attend, *of, **to: attend(*of, causal=False, **to),
    "a row of another": lambda attend, *of, query_start: attend(
        *of, query_start=query_start.at[1].add(1)
    ),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_dense_attention_notices_a_mistake(
    mistake: str | None, paged_decode: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mistake is not None:
        attend = paged_decode.paged_attention
        wrong = functools.partial(MISTAKES[mistake], attend)
        monkeypatch.setattr(paged_decode, "paged_attention", wrong)
    with jax.default_matmul_precision("float32"):
        model = paged_decode.random_model()
        paged_decode.serve(model)
        if mistake is None:
            assert paged_decode.check_against_dense(model) == 139
            return
        with pytest.raises(SystemExit, match="dense attention chooses"):
            paged_decode.check_against_dense(model)


def skip_without_model() -> None:
    for package in ("gguf", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make demo` installs it")


def run(example: str, *options: str) -> str:
    """What an example prints; it must end well."""
    package_root = str(pathlib.Path(jax_kvblock.__file__).parent.parent)
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / example), *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
