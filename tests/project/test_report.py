"""`python -m jax_kvblock` tells the truth about this install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import jax
import pytest

import jax_kvblock
from jax_kvblock import _report
from jax_kvblock.blocks import implementations
from jax_kvblock.core import ffi
from jax_kvblock.hardware import served


def test_report_names_versions_build_devices_and_every_op() -> None:
    text = _report.report()
    assert f"jax {jax.__version__}" in text
    assert f"jaxlib {metadata.version('jaxlib')}" in text
    assert str(jax.devices()[0]) in text
    for op in (*served.COPY_OPS, served.OPERATIONAL_OPS):
        for name in op.split(" / "):
            assert name in text


PACKAGE = Path(jax_kvblock.__file__).parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The source folder as a fresh clone has it: without the native module."""
    leave = shutil.ignore_patterns("_native*", "lib", "include", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "clone" / "jax_kvblock", ignore=leave)
    shutil.copy(Path(__file__).parents[2] / "pyproject.toml", tmp_path / "clone")
    return tmp_path / "clone"


def run_in(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    paths = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )


def test_in_the_clone_the_error_says_what_to_run_and_that_works(clone: Path) -> None:
    done = run_in(clone, "-m", "jax_kvblock")
    said = done.stderr.splitlines()[-1]
    assert f"missing from {clone / 'jax_kvblock'}, the source folder" in said
    assert f"before the installed package in {PACKAGE}" in said
    assert "circular import" not in done.stderr
    command = re.search(r"like `python (.*?)`", said)
    assert command
    done = run_in(clone, *command[1].split())
    assert "ops on the default device" in done.stdout, done.stderr


def test_a_clone_that_nobody_installed_says_how_to_install_it(clone: Path) -> None:
    said = ffi._missing(clone / "jax_kvblock", [str(clone)])
    assert said and said.endswith(f"`pip install -v {clone}`")
    assert ffi._missing(PACKAGE, []) is None


def test_a_broken_installation_says_so_and_is_not_the_source_folder(
    clone: Path,
) -> None:
    site = clone.parent / "site-packages"
    shutil.copytree(clone / "jax_kvblock", site / "jax_kvblock")
    options = "-c", "import sys; sys.path.insert(0, sys.argv[1]); import jax_kvblock"
    done = run_in(clone.parent, *options, str(site))
    said = done.stderr.splitlines()[-1]
    assert f"missing from {site / 'jax_kvblock'}: the installation is broken" in said
    assert said.endswith(
        "source folder: `pip install -v --force-reinstall --no-deps .`"
    )
    assert str(PACKAGE) not in said and f"pip install -v {site}" not in said


def test_the_command_prints_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    scripts = tomllib.loads(pyproject.read_text())["project"]["scripts"]
    command = metadata.EntryPoint("", scripts["jax-kvblock"], "console_scripts")
    command.load()()
    assert capsys.readouterr().out.startswith(f"jax_kvblock {jax_kvblock.__version__}")


def test_the_reported_implementation_is_the_one_that_runs() -> None:
    """The report says "kernel" exactly when the compiled program calls it."""
    import jax.numpy as jnp

    from jax_kvblock import block_to_universal

    compiled = jax.jit(block_to_universal).lower(jnp.zeros((2, 2, 2, 4, 2, 8)))
    calls_kernel = "kvblock_copy" in compiled.compile().as_text()
    row = served.capabilities()[0].implementation
    assert calls_kernel == row.startswith("kernel")


def test_the_reported_attention_is_the_one_that_runs() -> None:
    """The report says "cuda" exactly when the compiled program calls the kernels."""
    import jax.numpy as jnp

    from jax_kvblock import flash_attention

    rows = {row.op: row for row in served.capabilities()}
    for dtype, op in (
        (jnp.bfloat16, served.ATTENTION_16_BITS),
        (jnp.float32, served.ATTENTION_32_BITS),
    ):
        x = jnp.zeros((1, 16, 1, 16), dtype)
        text = jax.jit(flash_attention).lower(x, x, x).compile().as_text()
        calls_kernel = "kvblock_attention_forward" in text
        assert calls_kernel == rows[op].implementation.startswith("cuda")
        assert rows[op].why


def test_the_report_lists_the_tiles_and_cudnn() -> None:
    from jax_kvblock.attention import cuda

    text = _report.report()
    for kernels in ("cuda", *cuda.best_kernels()):
        for queries, keys in cuda.FORWARD_TILES[kernels].values():
            assert f"({keys}, {queries}) for" in text
    assert ("(176, 128)" in text) == ("cuda_sm90" in cuda.best_kernels())
    assert "16, 32, 64, 128, 256, 512" in text
    assert served.ATTENTION_CUDNN in text


def test_a_gpu_without_a_cuda_build_says_how_to_rebuild(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ffi.BUILD, "cuda", False)
    monkeypatch.setattr(ffi, "gpu_present", lambda: True)
    with pytest.raises(RuntimeError, match=r"(?s)GPU is present.*nvcc.*pip install"):
        ffi.require_cuda_build()


def test_the_report_says_what_a_call_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows_by_op() -> dict[str, tuple[str, str]]:
        rows = served.capabilities()
        return {row.op: (row.implementation, row.why) for row in rows}

    monkeypatch.setattr(ffi, "default_platform", lambda: "cuda")
    monkeypatch.setattr(ffi, "gpu_present", lambda: True)
    monkeypatch.setattr(ffi, "gpu_capabilities", frozenset)
    monkeypatch.setitem(ffi.BUILD, "cuda", True)
    rows = rows_by_op()
    assert rows["convert_blocks"][0] == "kernel (CUDA)"
    batch = "the operational pair with implementation='batch'"
    assert rows[batch][0] == "cudaMemcpyBatchAsync"
    for op in (served.ATTENTION_16_BITS, served.PAGED, served.PAGED_8_BITS):
        assert rows[op][0] == "cuda (kernels)"
    monkeypatch.setattr(ffi, "gpu_capabilities", lambda: frozenset({(8, 6)}))
    name, why = rows_by_op()[served.ATTENTION_16_BITS]
    assert name == "cuda (kernels), gradients by xla" and "163 KiB" in why

    monkeypatch.setitem(ffi.BUILD, "cuda", False)
    name, why = rows_by_op()["convert_blocks"]
    with pytest.raises(RuntimeError) as raised:
        implementations.choose(None, "cuda")
    assert name == "error" and why in str(raised.value)
    assert rows_by_op()[served.ATTENTION_16_BITS] == (name, why)

    monkeypatch.setattr(ffi, "default_platform", lambda: "tpu")
    name, why = rows_by_op()[batch]
    assert name == "none" and "needs a CPU or an NVIDIA GPU" in why and "tpu" in why
    assert rows_by_op()["convert_blocks"][0] == "xla"
    name, why = rows_by_op()[served.ATTENTION_CUDNN]
    assert name == "none" and "needs an NVIDIA GPU" in why and "tpu" in why
    name, why = rows_by_op()[served.PAGED]
    assert name.startswith("xla") and "tpu" in why
    name, why = rows_by_op()[served.ATTENTION_8_BITS]
    assert name == "none" and "Hopper" in why and "tpu" in why


def test_exporting_for_cuda_from_a_machine_without_a_gpu_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax.numpy as jnp

    from jax_kvblock import block_to_universal

    monkeypatch.setitem(ffi.BUILD, "cuda", False)
    monkeypatch.setattr(ffi, "gpu_present", lambda: False)
    check = jax.export.DisabledSafetyCheck.custom_call("kvblock_copy")
    exported = jax.export.export(
        jax.jit(block_to_universal), platforms=("cuda",), disabled_checks=[check]
    )(jnp.zeros((1, 2, 4, 2, 8)))
    assert "kvblock_copy" in exported.mlir_module()
